//! The CUDA kernels without a GPU: run thread by thread on the CPU, they give the values and gradients of the definition in f64.

use candle_core::DType;

use super::{MODULE, fused};
use crate::cuda::emulated::{TRACED, with_seeded};
use crate::cuda::nvrtc::assert_compiles;
use crate::diagonal_scan::composed;
use crate::diagonal_scan::tests::{DIRECTIONS, decays};
use crate::testing::{difference, randn, value_and_grads};

/// A pass forward and backward over `len` positions of 128 states.
pub(crate) fn pass(len: usize) {
    let inputs = [randn("u", &[1, len, 256]), decays(128)];
    let forward = super::Direction::Forward;
    value_and_grads(&inputs, DType::F32, &|x| fused(&x[0], &x[1], forward)).unwrap();
}

#[test]
fn the_kernels_run_thread_by_thread_give_the_definition() {
    for (b, n, p) in [(1, 1, 1), (2, 7, 3), (1, 64, 130), (3, 65, 16), (2, 197, 35)] {
        for direction in DIRECTIONS {
            let inputs = [randn("u", &[b, n, 2 * p]), decays(p)];
            let exact = value_and_grads(&inputs, DType::F64, &|x| composed(&x[0], &x[1], direction)).unwrap();
            let got = value_and_grads(&inputs, DType::F32, &|x| fused(&x[0], &x[1], direction)).unwrap();
            for (index, (got, exact)) in got.iter().zip(&exact).enumerate() {
                let found = difference(got, exact);
                assert!(found <= 1e-5, "{b} x {n} x {p}, {direction:?}: result {index} differs by {found:e}");
            }
        }
    }
}

/// A fault: the first place of a text, what it becomes, and what is to be found.
const SEEDS: &[(&str, &str, &str)] = &[
    (
        "first_row() + CHUNK < h->length ? first_row() + CHUNK : h->length",
        "first_row() + CHUNK",
        "beyond the end",
    ),
    ("if (state >= h->states) return;", "if (state > h->states) return;", "without a barrier"),
    ("(blockIdx.z * h->chunks + chunk) * 2", "chunk * 2", "another block"),
];

#[test]
fn seeded_faults_are_found() {
    if !TRACED {
        return;
    }
    let inputs = [randn("u", &[2, 70, 10]), decays(5)];
    for (text, instead, says) in SEEDS {
        let found = with_seeded(text, instead, || {
            let both = super::Direction::Both;
            let _ = value_and_grads(&inputs, DType::F32, &|x| fused(&x[0], &x[1], both)).unwrap();
        });
        assert!(found.iter().any(|fault| fault.contains(says)), "{text} -> {instead}: {found:#?}");
    }
}

#[test]
#[ignore = "needs an NVRTC library, named by EFFATTN_NVRTC"]
fn nvrtc_compiles_the_kernels_for_all_architectures() {
    assert_compiles([MODULE]);
}
