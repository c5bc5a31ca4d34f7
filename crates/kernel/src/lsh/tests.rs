//! Hashing, and the fused kernel against its twin.

use candle_core::{Device, Result, Tensor};

use super::hash::{bucket, bucket_of, sort};
use super::{Lsh, lsh};
use crate::device::rng::RngStream;
use crate::heads::{PackedLayout, Qkv};
use crate::testing::{assert_matches_composed, normal};

#[test]
fn ties_go_to_the_lowest_bucket() {
    assert_eq!(bucket_of(&[0.0, 0.0], &[4]), 0);
    assert_eq!(bucket_of(&[-1.0, 1.0], &[4]), 1);
    assert_eq!(bucket_of(&[-2.0, 1.0], &[4]), 2);
    assert_eq!(bucket_of(&[-2.0, 1.0, 0.5, -3.0, 1.0], &[4, 6]), 2 + 4 * 4);
}

#[test]
fn sorting_is_stable_and_appends_the_padding() {
    let mut order = [9; 8];
    sort(&[2, 0, 2, 1, 0], &mut order);
    assert_eq!(order, [1, 4, 3, 0, 2, 5, 6, 7]);
}

crate::simd_fn! {
    fn vector_bucket<S>(simd, turned: &'a [f32], factors: &'a [usize]) -> u32 { bucket(simd, turned, factors) }
}

#[test]
fn vectors_and_scalars_hash_alike() {
    let mut stream = RngStream::new(3, "hash");
    for factors in [&[2][..], &[4], &[8, 2], &[64], &[70, 4, 34]] {
        let width = factors.iter().map(|factor| factor / 2).sum();
        for round in 0..200 {
            // small whole numbers: many ties, zeros of both signs
            let turned: Vec<f32> =
                (0..width).map(|_| (stream.below(5) as f32 - 2.0) * 0.0f32.powi(round % 2)).collect();
            assert_eq!(
                vector_bucket(&turned, factors),
                bucket_of(&turned, factors),
                "{turned:?} {factors:?}"
            );
        }
    }
}

/// Packed rows `[v | other | q]`: parts in another order, with one that attention does not read.
fn rows(b: usize, n: usize, heads: usize, d: usize, rows: &Tensor) -> Qkv {
    assert_eq!(rows.dims(), [b, n, 3 * heads * d]);
    Qkv::Packed {
        rows: rows.clone(),
        heads,
        parts: PackedLayout { q: Some(2), k: None, v: Some(0), count: 3 },
    }
}

#[test]
fn fused_and_twin_agree() -> Result<()> {
    for (b, n, heads, d, chunk, rounds, factors) in [
        (1, 1, 1, 1, 4, 1, &[2][..]),
        (2, 5, 1, 3, 8, 2, &[2]),
        (2, 5, 2, 4, 4, 1, &[4]),
        (1, 17, 3, 5, 4, 3, &[2, 4]),
        (2, 50, 2, 8, 8, 2, &[8]),
        (2, 67, 2, 20, 1, 2, &[8]),
        (1, 300, 2, 16, 64, 2, &[8]),
        (1, 131, 1, 64, 64, 4, &[2, 2, 2]),
    ] {
        let input = normal("rows", &[b, n, 3 * heads * d])?;
        let columns: usize = factors.iter().map(|factor| factor / 2).sum();
        let rotations = normal("rotations", &[heads, d, rounds, columns])?;
        let masks = [
            None,
            Some((0..b * n).map(|i| f32::from(u8::from((i * 5) % 7 < 4))).collect::<Vec<_>>()),
            Some((0..b * n).map(|i| f32::from(u8::from(i % n < n - n / 3 && i / n == 0))).collect()),
        ];
        for (index, mask) in masks.into_iter().enumerate() {
            let mask = mask.map(|mask| Tensor::from_vec(mask, (b, n), &Device::Cpu)).transpose()?;
            for causal in [false, true] {
                let label =
                    format!("b={b} n={n} heads={heads} d={d} chunk={chunk} mask={index} causal={causal}");
                let call = Lsh { chunk, factors, rotations: Some(&rotations), causal };
                assert_matches_composed(&label, std::slice::from_ref(&input), 1e-5, |inputs| {
                    lsh(&rows(b, n, heads, d, &inputs[0]), mask.as_ref(), &call)?.merged()
                })?;
            }
        }
    }
    Ok(())
}
