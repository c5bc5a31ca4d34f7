//! Sizes of a call, and the fused hashing and sorting.

use candle_core::Result;

use super::Lsh;
use super::hash::{bucket, sort};
use crate::cpu::gemm::{Mat, MatMut, Threads, gemm_exact};
use crate::cpu::{par, with_slices};

/// Rows per job, about.
pub const JOB_ROWS: usize = 256;

/// One sample.
#[derive(Clone, Copy)]
pub struct Sample<'a> {
    pub sizes: &'a Sizes,
    /// [n, row].
    pub rows: &'a [f32],
    /// [heads, rounds * padded].
    pub order: &'a [u32],
    /// [n], 0 where a position is hidden.
    pub keep: Option<&'a [f32]>,
}

/// Sizes of one call, in elements.
#[derive(Clone, Copy)]
pub struct Sizes {
    /// Samples.
    pub b: usize,
    /// Positions.
    pub n: usize,
    pub heads: usize,
    /// Width of a head.
    pub d: usize,
    /// Length of a packed row.
    pub row: usize,
    /// First query in a row.
    pub q: usize,
    /// First value in a row.
    pub v: usize,
    /// Rounds of hashing.
    pub rounds: usize,
    /// Positions of a round, a multiple of the chunk.
    pub padded: usize,
    /// Length of a chunk.
    pub chunk: usize,
    /// Whether a chunk sees the one before it.
    pub back: bool,
    /// Whether future keys are hidden.
    pub causal: bool,
}

impl Sizes {
    /// Chunks of a chain.
    pub fn chunks(&self) -> usize {
        self.rounds * self.padded / self.chunk
    }

    /// Keys that a query sees, and queries that see a key.
    pub fn span(&self) -> usize {
        if self.back { 2 * self.chunk } else { self.chunk }
    }

    /// Chunks per job.
    pub fn group(&self) -> usize {
        (JOB_ROWS / self.chunk).max(1)
    }

    /// Sorted positions [b, heads, rounds * padded].
    pub fn order(&self, rows: &[f32], keep: Option<&[f32]>, call: &Lsh) -> Result<Vec<u32>> {
        let Self { b, n, heads, d, row, rounds, padded, .. } = *self;
        let mut order = vec![0; b * heads * rounds * padded];
        if !self.back {
            order.chunks_mut(n).for_each(|order| sort(&vec![0; n], order));
            return Ok(order);
        }
        let (rotations, _, columns) = call.rotation_dims(heads, d, n)?;
        let hidden = call.factors.iter().product::<usize>() as u32;
        with_slices([&rotations.contiguous()?], |[rotations]| {
            par::each_piece(order.chunks_mut(rounds * padded), |index, order| {
                let (sample, head) = (index / heads, index % heads);
                let first = sample * n * row + self.q + head * d;
                let turn = Mat::new(&rotations[head * d * rounds * columns..], d, rounds * columns);
                let mut buckets = vec![0; rounds * n];
                let mut turned = vec![0.0; JOB_ROWS.min(n) * rounds * columns];
                for start in (0..n).step_by(JOB_ROWS) {
                    let len = JOB_ROWS.min(n - start);
                    let queries = Mat::strided(&rows[first + start * row..], len, d, row);
                    // in f32: rounding would move rows to other buckets
                    let to = MatMut::new(&mut turned, len, rounds * columns);
                    gemm_exact(to, queries, turn, 1.0, None, Threads::One);
                    buckets_of(
                        &turned[..len * rounds * columns],
                        call.factors,
                        columns,
                        &mut buckets[start..],
                        n,
                    );
                }
                for (at, _) in keep.into_iter().flat_map(|keep| {
                    keep[sample * n..][..n].iter().enumerate().filter(|(_, keep)| **keep == 0.0)
                }) {
                    buckets[at..].iter_mut().step_by(n).for_each(|bucket| *bucket = hidden);
                }
                for (buckets, order) in buckets.chunks(n).zip(order.chunks_mut(padded)) {
                    sort(buckets, order);
                }
            });
            Ok(())
        })?;
        Ok(order)
    }
}

crate::simd_fn! {
    /// Buckets of rows [len, rounds, columns]: position p of round r goes to `buckets[r * stride + p]`.
    fn buckets_of<S>(
        simd,
        turned: &'a [f32],
        factors: &'a [usize],
        columns: usize,
        buckets: &'a mut [u32],
        stride: usize,
    ) {
        let rounds = buckets.len().div_ceil(stride);
        for (at, turned) in turned.chunks_exact(columns).enumerate() {
            buckets[at % rounds * stride + at / rounds] = bucket(simd, turned, factors);
        }
    }
}
