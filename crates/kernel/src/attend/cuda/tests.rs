//! The CUDA kernels without a GPU: compiled for the CPU and run thread by thread, their results are those of the fused
//! CPU kernel; compiled by NVRTC where it is at hand, they are valid CUDA.

use candle_core::{Device, Tensor};

use super::Kernels;
use super::launch::{Call, Outputs, defines};
use super::tables::{Distances, Places, memory_bytes};
use crate::KernelMode;
use crate::attend::dims::{Dims, RowLayout};
use crate::attend::tests::naive::{Case, Form, Operands, evaluate, operands};
use crate::attend::tests::{cases, dropped};
use crate::attend::tile_plan::TilePlan;
use crate::attend::{
    CUDA_WIDEST as WIDEST, CUDA_WIDEST_RELATIVE as WIDEST_RELATIVE,
    CUDA_WIDEST_TENSOR_CORES as WIDEST_TENSOR_CORES,
};
use crate::cpu::matmul_format::{MatmulFormat, set_products};
use crate::cuda::emulated::{Emulated, TRACED, here};
use crate::cuda::nvrtc::{assert_compiles, nvrtc};
use crate::cuda::{BufferView, Module};
use crate::heads::{merge, split};
use effattn_record::pattern::Pattern;

/// Operands [b, h, n, d] of a call and its gradients, all in one buffer.
struct Buffer {
    data: Vec<f32>,
    places: Vec<Option<RowLayout>>,
    /// Start and length of the table, both biases and the table of slots.
    slab: Vec<(usize, usize)>,
}

impl Buffer {
    fn new(case: &Case, operands: &Operands) -> Self {
        let (mut data, mut places) = (Vec::new(), Vec::new());
        for name in ["q", "k", "v", "slot_k", "slot_v"] {
            let tensor = operands.named.iter().find(|(key, _)| *key == name).map(|(_, tensor)| tensor);
            places.push(tensor.map(|tensor| {
                let rows = tensor.dims()[2];
                let start = data.len();
                data.extend(tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap());
                let head = rows * case.d;
                RowLayout { start, batch: case.heads * head, head, row: case.d }
            }));
        }
        let mut slab = Vec::new();
        for name in ["table", "u", "w", "slot_table"] {
            let Some((_, tensor)) = operands.named.iter().find(|(key, _)| *key == name) else { continue };
            slab.push((data.len(), tensor.elem_count()));
            data.extend(tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap());
        }
        Self { data, places, slab }
    }

    fn operand(&self, case: &Case, index: usize, rows: usize) -> &[f32] {
        let start = self.places[index].expect("an operand").start;
        &self.data[start..start + case.batch * case.heads * rows * case.d]
    }
}

/// Output and gradients, as `evaluate` gives them.
fn emulate(machine: &Emulated, case: &Case, seed: u64, format: MatmulFormat) -> Vec<Vec<f32>> {
    let operands = operands(case, seed).unwrap();
    let Case { pattern, batch, heads, d, .. } = case;
    let (keys, slots, queries) = (pattern.keys, pattern.slots, pattern.queries);
    let dims = Dims { batch: *batch, heads: *heads, width: *d, queries, keys, slots };
    let plan = TilePlan::new(pattern, *heads).unwrap();
    let hidden = operands.hidden(keys + slots);
    let rows =
        |name: &str| operands.named.iter().find(|(key, _)| *key == name).map(|(_, table)| table.dims()[1]);
    let relative = case.relative.map(|segments| {
        let (segment, rank) = segments.unwrap_or((1, 0));
        Distances { keys: rows("table").unwrap(), slots: rows("slot_table").unwrap_or(0), segment, rank }
    });
    let (scale, dropout) = (case.scale as f32, case.dropout);
    let call = Call { plan: &plan, dims, scale, hidden: &hidden, relative, dropout, format };
    let x = Buffer::new(case, &operands);
    let [q, k, v, slot_k, slot_v] = [0, 1, 2, 3, 4].map(|index| x.places[index]);
    let (d_q, d_k, d_v, d_slot_k, d_slot_v) = (q, k, v, slot_k, slot_v);
    let slab = x.slab.first().map_or(0, |&(start, _)| start);
    let given = Places { q, k, v, slot_k, slot_v, slab, ..Places::default() };
    let places = Places { d_q, d_k, d_v, d_slot_k, d_slot_v, d_slab: slab, ..given };

    let inputs = [BufferView::all(&x.data); 6];
    let (out, saved) = call.forward(machine, inputs, &places).unwrap();
    let grad = merge(&operands.grad_out).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
    let outputs = Outputs { out: BufferView::all(&out), grad: BufferView::all(&grad) };
    let data = call.backward(machine, inputs, outputs, &saved, &places, x.data.len()).unwrap();
    let grads = Buffer { data, places: x.places.clone(), slab: x.slab.clone() };

    let out = Tensor::from_vec(out, (*batch, queries, heads * d), &Device::Cpu).unwrap();
    let out = split(&out, *heads).unwrap();
    let mut results = vec![out.flatten_all().unwrap().to_vec1::<f32>().unwrap()];
    for (index, rows) in [queries, keys, keys, slots, slots].into_iter().enumerate() {
        if x.places[index].is_some() {
            results.push(grads.operand(case, index, rows).to_vec());
        }
    }
    results.extend(grads.slab.iter().map(|&(start, len)| grads.data[start..start + len].to_vec()));
    results
}

/// Asserts that the kernels give the results of the fused CPU kernel within `tolerance` of the largest number of each.
fn assert_close(case: &Case, seed: u64, format: MatmulFormat, tolerance: f32) {
    let want = evaluate(case, seed, Form::Separate, KernelMode::Fused).unwrap();
    let got = emulate(&Emulated::default(), case, seed, format);
    assert_eq!(got.len(), want.len());
    for (number, (got, want)) in got.iter().zip(&want).enumerate() {
        let want = want.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        let largest = want.iter().fold(1f32, |a, b| a.max(b.abs()));
        let gap = got.iter().zip(&want).map(|(got, want)| (got - want).abs()).fold(0.0, f32::max);
        let finite = got.iter().all(|x| x.is_finite());
        assert!(
            finite && got.len() == want.len() && gap <= tolerance * largest,
            "{format:?}: result {number} is off by {gap} of {largest} (d {}, {:?})",
            case.d,
            case.pattern
        );
    }
}

/// A pass forward and backward over `len` positions of one head of 64 columns.
pub(crate) fn pass(len: usize, format: MatmulFormat, relative: bool) {
    let case = Case::new(Pattern::full(len, len, relative), 1, 1, 64);
    let case = if relative { case.relative(None) } else { case };
    here(|machine| emulate(machine, &case, 1, format));
}

#[test]
fn the_kernels_run_thread_by_thread_give_the_results_of_the_cpu() {
    for (kernels, width) in [
        (Kernels::Plain, WIDEST),
        (Kernels::TensorCores(MatmulFormat::F32), WIDEST_TENSOR_CORES),
        (Kernels::Relative, WIDEST_RELATIVE),
    ] {
        let memory = memory_bytes(width, kernels);
        assert!(memory <= 99 << 10, "no block of an RTX card has so much shared memory");
    }
    let wide = Case::new(Pattern::full(30, 40, false), 1, 1, 128);
    let dropped = dropped().into_iter().filter(|case| case.relative.is_none());
    let cases = cases().into_iter().chain([wide]).chain(dropped);
    for (seed, case) in cases.filter(|case| !case.bias).map(shorter).enumerate() {
        assert_close(&case, seed as u64, MatmulFormat::F32, 1e-5);
    }
}

/// One sequence of a long case: another one without padding only takes the emulation twice as long.
fn shorter(case: Case) -> Case {
    let Pattern { queries, keys, .. } = case.pattern;
    let long = case.padding == 0 && queries * keys * case.d > 40_000;
    Case { batch: if long { 1 } else { case.batch }, ..case }
}

/// A weight of 1 is that of the only key that a query sees, and its logit has no gradient: not even what rounding leaves.
#[test]
fn the_gradient_of_a_query_that_sees_one_key_is_zero() {
    let case = Case::new(Pattern::full(70, 70, true), 2, 2, 20);
    let results = emulate(&Emulated::default(), &case, 7, MatmulFormat::F32);
    for first in results[1].chunks(70 * 20) {
        assert!(first[..20].iter().all(|x| *x == 0.0) && first[20..].iter().all(|x| *x != 0.0), "{first:?}");
    }
}

/// Cases for products of bf16: without relative positions, whose products are f32.
fn bf16_cases() -> impl Iterator<Item = Case> {
    let wide = Case::new(Pattern::full(30, 70, false), 1, 1, 128);
    let cases = cases().into_iter().chain(dropped());
    let cases = cases.filter(|case| !case.bias && case.relative.is_none()).map(shorter);
    [wide].into_iter().chain(cases)
}

/// Asks a process of its own to run every so many of [`bf16_cases`].
const IN_BF16: &str = "EFFATTN_TEST_IN_BF16";

fn run_in_bf16(step: &str) {
    let mut tests = std::process::Command::new(std::env::current_exe().unwrap());
    tests.args(["--ignored", "--exact", "attend::cuda::tests::in_bf16"]);
    let output = tests.env(IN_BF16, step).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && said.contains("1 passed"), "{said}");
}

#[test]
fn tensor_cores_give_the_results_of_the_cpu_in_bf16() {
    run_in_bf16("5");
}

#[test]
#[ignore = "the emulation takes half a minute"]
fn tensor_cores_give_the_results_of_the_cpu_in_every_case() {
    run_in_bf16("1");
}

#[test]
#[ignore = "the number format belongs to the process: another test runs this one in a process of its own"]
fn in_bf16() {
    let Ok(step) = std::env::var(IN_BF16) else { return };
    set_products(MatmulFormat::Bf16);
    for (seed, case) in bf16_cases().enumerate().step_by(step.parse().unwrap()) {
        // weights are rounded relative to the largest logit so far, which another number of keys at a time finds elsewhere
        assert_close(&case, seed as u64, MatmulFormat::Bf16, 1.0 / 64.0);
    }
}

/// See [`TENSOR_SEEDS`].
type TensorSeed = (&'static str, &'static str, &'static str);

/// A fault of products by tensor cores, what it becomes, and what is to be found; nothing where only results tell.
const TENSOR_SEEDS: &[TensorSeed] = &[
    // rows g and g + 8 of a left factor the other way round
    ("PITCH + 32 * part, 2, &a[0][i]", "PITCH + 32 * part, 2, &a[0][1 - i]", ""),
    // a lane takes the row of its neighbour
    ("(8 * n + threadIdx.x % WARP / 4) * PITCH", "(8 * n + (threadIdx.x + 4) % WARP / 4) * PITCH", ""),
    // halves of a word the other way round, and the halves of weights
    ("bf16_pair(four[0].x[n], four[1].x[n])", "bf16_pair(four[1].x[n], four[0].x[n])", ""),
    ("weights[2 * k + i / 2][i % 2 * 2]", "weights[2 * k + i % 2][i / 2 * 2]", ""),
    ("weights[k][i % 2 * 2 + i / 2]", "weights[k][i]", ""),
    // what tf32 cuts is lost, of one factor
    ("    UNROLL for (int n = 0; n < 4; n++) multiply_tf32(low[n], a_lower, b_upper[n]);\n", "", ""),
    // what one key has all the weight of is compared with its neighbour
    ("warp / 2 * BLOCK + 8 * n + COLUMN(i) &&", "warp / 2 * BLOCK + 8 * n + (COLUMN(i) ^ 1) &&", ""),
    ("threadIdx.x % 4 * 2 + (i) % 2", "threadIdx.x % 4 + (i) % 2 * 4", ""),
    // the largest of two lanes of four
    ("return fmaxf(value, __shfl_xor_sync(0xffffffffu, value, 2));", "return value;", ""),
    // keys and values are multiplied before all of them are there
    (
        "        __syncthreads();\n        Stream s = here.s;",
        "        Stream s = here.s;",
        "of shared memory",
    ),
    // the next keys come to where the last ones are multiplied
    ("slot_k, slot_v, stage ^ 1, m);", "slot_k, slot_v, stage, m);", "without a barrier"),
    (
        "multiply_bf16(c[n], a, b[n]);",
        "if (threadIdx.x % WARP != 7) multiply_bf16(c[n], a, b[n]);",
        "reached by 31 lanes",
    ),
    ("if (me % 4 == 0) {", "{", "without a barrier"),
    ("number >= 0 && x < WIDTH);", "number >= 0);", "beyond the end"),
    ("number >= 0 && x + c < WIDTH ? numbers[c]", "number >= 0 ? numbers[c]", "beyond the end"),
];

#[test]
fn seeded_faults_of_tensor_cores_are_found() {
    // rows that four numbers at a time fit, and others
    let case = |width| Case::new(Pattern::full(70, 75, true), 1, 1, width);
    let runs = [MatmulFormat::F32, MatmulFormat::Bf16].into_iter().flat_map(|format| {
        [20, 21].map(|width| (case(width), format, emulate(&Emulated::default(), &case(width), 1, format)))
    });
    let runs: Vec<_> = runs.collect();
    for seed @ (text, instead, _) in TENSOR_SEEDS.iter().filter(|(.., says)| TRACED || says.is_empty()) {
        let found = runs.iter().any(|(case, format, want)| is_found(case, *format, want, seed));
        assert!(found, "{text} -> {instead}");
    }
}

/// Whether a fault is found as what it is, or by results that are not those wanted.
fn is_found(case: &Case, format: MatmulFormat, want: &[Vec<f32>], seed: &TensorSeed) -> bool {
    let (text, instead, says) = *seed;
    let machine = Emulated::seeded(text, instead);
    let got = emulate(&machine, case, 1, format);
    let found = machine.found();
    let gap = |(got, want): (&Vec<f32>, &Vec<f32>)| {
        let gaps = got.iter().zip(want).map(|(got, want)| (got - want).abs());
        gaps.fold(0.0, |a: f32, b| if b.is_nan() { f32::INFINITY } else { a.max(b) })
    };
    let gap = got.iter().zip(want).map(gap).fold(0.0, f32::max);
    let least = if format == MatmulFormat::F32 { 1e-4 } else { 0.1 };
    if says.is_empty() { gap > least } else { found.iter().any(|fault| fault.contains(says)) }
}

/// A fault: the first place of a text, what it becomes, and what is to be found.
const SEEDS: &[(&str, &str, &str)] = &[
    // keys and values are read before all of them are there
    (
        "slot_v, m);\n            __syncthreads();\n            float logits[4][KEYS];",
        "slot_v, m);\n            float logits[4][KEYS];",
        "of shared memory",
    ),
    // the largest logit of a query is looked for before all of its logits are there
    (
        "            __syncthreads();\n            if (me < TILE) {\n                float old",
        "            if (me < TILE) {\n                float old",
        "of shared memory",
    ),
    ("a[(query + i) * PITCH + x]", "a[(query + i + 1) * PITCH + x]", "reads what nobody wrote"),
    (
        "if (threadIdx.x < BLOCK) {\n        int number",
        "if (threadIdx.x <= BLOCK) {\n        int number",
        "writes beyond the end",
    ),
    ("if (column == 0 && stats)", "if (stats)", "without a barrier"),
    (
        "head_tiles[2 * head + 1]) return;",
        "head_tiles[2 * head + 1] || threadIdx.x == 5) return;",
        "reached by 127 of 128",
    ),
    (
        "batch = blockIdx.z, me = threadIdx.x;",
        "batch = 0 * blockIdx.z, me = threadIdx.x;",
        "another block writes",
    ),
    ("if (query >= h->queries) return;", "if (query > h->queries) return;", "beyond the end"),
];

#[test]
fn seeded_faults_are_found() {
    if !TRACED {
        return;
    }
    let pattern = || Pattern::full(70, 70, false);
    for (seed, (text, instead, says)) in SEEDS.iter().enumerate() {
        let machine = Emulated::seeded(text, instead);
        emulate(&machine, &Case::new(pattern(), 2, 1, 72), seed as u64, MatmulFormat::F32);
        let found = machine.found();
        assert!(found.iter().any(|fault| fault.contains(says)), "{text} -> {instead}: {found:#?}");
    }
}

#[test]
#[ignore = "needs an NVRTC library, named by EFFATTN_NVRTC"]
fn nvrtc_compiles_the_kernels_for_all_architectures() {
    let narrow = [
        Kernels::Relative,
        Kernels::TensorCores(MatmulFormat::F32),
        Kernels::TensorCores(MatmulFormat::Bf16),
    ];
    for (kernels, widths) in
        narrow.map(|kernels| (kernels, [8, 33, 64])).into_iter().chain([(Kernels::Plain, [72, 100, WIDEST])])
    {
        let (name, source) = kernels.source();
        let defines = widths.map(|width| defines(width, kernels));
        assert_compiles(defines.iter().map(|defines| Module { name, source, defines }));
    }
    let wrong = [("WIDTH", 72), ("BLOCK", 16), ("RELATIVE", 0), ("MEMORY", 1)];
    let (name, source) = Kernels::Plain.source();
    assert!(nvrtc(&Module { name, source, defines: &wrong }, 80).is_err());
}
