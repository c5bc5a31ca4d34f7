//! The CUDA kernels without a GPU: run thread by thread on the CPU, by the operation that launches them on a device, they give the
//! values and gradients of the recurrence in f64; compiled by NVRTC where it is at hand, they are valid CUDA.

use candle_core::{DType, Result, Tensor};

use super::launch::{defines, memory_bytes};
use super::normalize::{MODULE, Sizes};
use super::{NAME, SOURCE, fused};
use crate::KernelMode;
use crate::cuda::emulated::{Emulated, TRACED, with_seeded};
use crate::cuda::nvrtc::assert_compiles;
use crate::cuda::{BufferView, Module};
use crate::delta_rule::tests::{Strength, holes, inputs, rows};
use crate::delta_rule::{CUDA_WIDEST, DeltaRows, DeltaRule, NormalizeConfig, composed, normalize};
use crate::testing::{difference, evaluate, randn, value_and_grads};

fn run(tensors: &[Tensor], mask: Option<&Tensor>, by_kernels: bool) -> Result<Tensor> {
    let call = DeltaRule { beta: &tensors[3], log_decay: tensors.get(4), mask };
    let rows = rows(tensors)?;
    let heads = if by_kernels { fused(&rows, &call)? } else { composed(&rows, &call)? };
    heads.split()?.contiguous()
}

/// A pass forward and backward over `len` positions of one head of 64 columns.
pub(crate) fn pass(len: usize) {
    let inputs = inputs("pass", [1, 1, len, 64, 64], Strength::Slow);
    value_and_grads(&inputs, DType::F32, &|x| run(x, None, true)).unwrap();
}

#[test]
fn the_kernels_run_thread_by_thread_give_the_recurrence() {
    for (index, shape) in [
        [1, 1, 1, 1, 1],
        [2, 2, 31, 5, 7],
        [1, 1, 32, 16, 16],
        [2, 1, 33, 33, 33],
        [1, 2, 67, 16, 40],
        [1, 1, 70, 64, 64],
        [1, 1, 40, CUDA_WIDEST, 3],
    ]
    .into_iter()
    .enumerate()
    {
        for strength in [Strength::None, Strength::Slow, Strength::Strong] {
            let name = format!("{shape:?} {strength:?}");
            let inputs = inputs(&name, shape, strength);
            let mask = (index % 3 == 1).then(|| holes(shape[0], shape[2]));
            let exact = value_and_grads(&inputs, DType::F64, &|x| run(x, mask.as_ref(), false)).unwrap();
            let got = value_and_grads(&inputs, DType::F32, &|x| run(x, mask.as_ref(), true)).unwrap();
            for (result, (got, exact)) in got.iter().zip(&exact).enumerate() {
                let found = difference(got, exact);
                assert!(found <= 2e-5, "{name}: result {result} differs by {found:e}");
            }
        }
    }
}

#[test]
fn normalized_rows_and_their_gradients() {
    let machine = Emulated::default();
    for (silu_qk, silu_v, heads, dk, d) in
        [(true, true, 2, 16, 16), (false, true, 1, 5, 3), (true, false, 3, 7, 33), (true, true, 1, 40, 1)]
    {
        let x = randn("normalize", &[2, 9, heads * (2 * dk + d)]);
        let config = NormalizeConfig { silu_qk, silu_v, eps: 1e-2, query_scale: (dk as f64).powf(-0.5) };
        let sizes = Sizes { rows: 18, heads, key_width: dk, value_width: d };
        for x in [x.zeros_like().unwrap(), x] {
            let want = evaluate(KernelMode::Fused, std::slice::from_ref(&x), |x| {
                let rows = DeltaRows { rows: x[0].clone(), heads, key_width: dk, value_width: d };
                Ok(normalize(&rows, &config)?.rows)
            });
            let flat = |x: &Tensor| x.flatten_all().unwrap().to_vec1::<f32>().unwrap();
            let (data, dy) = (flat(&x), flat(&randn("cotangent", x.dims())));
            let y = sizes.forward(&machine, BufferView::all(&data), &config).unwrap();
            let views = [BufferView::all(&data), BufferView::all(&dy)];
            let dx = sizes.backward(&machine, views, &config).unwrap();
            for (got, want) in [y, dx].iter().zip(want.unwrap()) {
                assert_eq!(got.len(), want.len());
                let largest = want.iter().fold(0.1f32, |largest, x| largest.max(x.abs()));
                assert!(got.iter().zip(&want).all(|(a, b)| (a - b).abs() <= 1e-5 * largest), "{sizes:?}");
            }
        }
    }
}

/// A fault: the first place of a text, what it becomes, and what is to be found.
const SEEDS: &[(&str, &str, &str)] = &[
    // the state moves on while others still read what was written
    (
        "*= m->rest[ROW(i)];\n        __syncthreads();\n        for (int x",
        "*= m->rest[ROW(i)];\n        for (int x",
        "without a barrier",
    ),
    // decays are weighed with steps that are not there
    ("    __syncthreads();\n    float squares", "    float squares", "shared memory"),
    ("if (first + ROW(i) >= h->length || c", "if (c", "beyond the end"),
    ("own = blockIdx.x * all;", "own = 0 * blockIdx.x * all;", "another block"),
    ("if (at >= count) return;", "if (at > count) return;", "beyond the end"),
    ("if (me < CHUNK && first + me < h->length) {", "if (me < CHUNK) {", "another block"),
];

#[test]
fn seeded_faults_are_found() {
    if !TRACED {
        return;
    }
    let inputs = inputs("faults", [1, 2, 41, 7, 40], Strength::Slow);
    for (text, instead, says) in SEEDS {
        let found = with_seeded(text, instead, || {
            let _ = value_and_grads(&inputs, DType::F32, &|x| run(x, None, true)).unwrap();
        });
        assert!(found.iter().any(|fault| fault.contains(says)), "{text} -> {instead}: {found:#?}");
    }
}

#[test]
#[ignore = "needs an NVRTC library, named by EFFATTN_NVRTC"]
fn nvrtc_compiles_the_kernels_for_all_architectures() {
    assert!(memory_bytes(CUDA_WIDEST) <= 99 << 10, "no block of an RTX card has so much shared memory");
    let widths = [1, 33, 64, CUDA_WIDEST].map(defines);
    assert_compiles([MODULE]);
    assert_compiles(widths.iter().map(|defines| Module { name: NAME, source: SOURCE, defines }));
}
