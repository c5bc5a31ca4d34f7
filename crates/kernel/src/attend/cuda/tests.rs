//! The CUDA kernels without a GPU: compiled for the CPU and run thread by thread, their results are those of the fused
//! CPU kernel; compiled by NVRTC where it is at hand, they are valid CUDA.

use candle_core::{Device, Tensor};

use super::launch::{Call, Outputs, defines};
use super::source;
use super::tables::{Distances, Places, memory_bytes};
use crate::KernelMode;
use crate::attend::dims::{Dims, RowLayout};
use crate::attend::tests::cases;
use crate::attend::tests::naive::{Case, Form, Operands, evaluate, operands};
use crate::attend::tile_plan::TilePlan;
use crate::attend::{CUDA_WIDEST as WIDEST, CUDA_WIDEST_RELATIVE as WIDEST_RELATIVE};
use crate::cuda::emulated::{Emulated, TRACED, nvrtc};
use crate::cuda::{BufferView, Module};
use crate::heads::{merge, split};

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
fn emulate(machine: &Emulated, case: &Case, seed: u64) -> Vec<Vec<f32>> {
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
    let call = Call { plan: &plan, dims, scale: case.scale as f32, hidden: &hidden, relative };
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

#[test]
fn the_kernels_run_thread_by_thread_give_the_results_of_the_cpu() {
    for memory in [memory_bytes(WIDEST, false), memory_bytes(WIDEST_RELATIVE, true)] {
        assert!(memory <= 99 << 10, "no block of an RTX card has so much shared memory");
    }
    let machine = Emulated::default();
    let wide = Case::new(effattn_record::pattern::Pattern::full(30, 40, false), 1, 1, 128);
    let cases = cases().into_iter().filter(|case| !case.bias).chain([wide]);
    for (seed, case) in cases.enumerate() {
        let want = evaluate(&case, seed as u64, Form::Separate, KernelMode::Fused).unwrap();
        let got = emulate(&machine, &case, seed as u64);
        assert_eq!(got.len(), want.len());
        for (number, (got, want)) in got.iter().zip(&want).enumerate() {
            let want = want.flatten_all().unwrap().to_vec1::<f32>().unwrap();
            let largest = want.iter().fold(1f32, |a, b| a.max(b.abs()));
            let gap = got.iter().zip(&want).map(|(got, want)| (got - want).abs()).fold(0.0, f32::max);
            let finite = got.iter().all(|x| x.is_finite());
            assert!(
                finite && got.len() == want.len() && gap <= 1e-5 * largest,
                "result {number} is off by {gap} (d {}, {:?})",
                case.d,
                case.pattern
            );
        }
    }
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
    let pattern = || effattn_record::pattern::Pattern::full(70, 70, false);
    for (seed, (text, instead, says)) in SEEDS.iter().enumerate() {
        let machine = Emulated::seeded(text, instead);
        emulate(&machine, &Case::new(pattern(), 2, 1, 8), seed as u64);
        let found = machine.found();
        assert!(found.iter().any(|fault| fault.contains(says)), "{text} -> {instead}: {found:#?}");
    }
}

#[test]
#[ignore = "needs an NVRTC library, named by EFFATTN_NVRTC"]
fn nvrtc_compiles_the_kernels_for_all_architectures() {
    for architecture in [80, 86, 89, 90, 100, 120] {
        for (width, relative) in
            [(8, false), (33, false), (64, false), (WIDEST, false), (8, true), (33, true), (64, true)]
        {
            let (name, source) = source(relative);
            let module = Module { name, source, defines: &defines(width, relative) };
            let result = nvrtc(&module, architecture);
            assert!(result.is_ok(), "compute_{architecture}, width {width}: {}", result.unwrap_err());
        }
    }
    let wrong = [("WIDTH", 8), ("BLOCK", 32), ("RELATIVE", 0), ("MEMORY", 1)];
    let (name, source) = source(false);
    assert!(nvrtc(&Module { name, source, defines: &wrong }, 80).is_err());
}
