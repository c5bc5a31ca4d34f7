//! Forward and back substitution with the unit lower triangular matrix of a chunk, column block by column block.

use pulp::Simd;

use crate::cpu::math::{load, store};

/// Vectors of a column block: independent sums, enough to hide the latency of a multiply-add.
const VECTORS: usize = 4;

/// sum -= sum_i weight_i row_i over a block of `rows`: the columns from `at` on, `width` per row.
#[inline(always)]
fn subtract_rows<S: Simd>(
    simd: S,
    sums: &mut [S::f32s; VECTORS],
    weights: impl Iterator<Item = f32>,
    rows: &[f32],
    width: usize,
    at: usize,
) {
    let columns = VECTORS * S::F32_LANES;
    if at + columns <= width {
        for (weight, row) in weights.zip(rows.chunks_exact(width)) {
            let weight = simd.splat_f32s(weight);
            let block = S::as_simd_f32s(&row[at..at + columns]).0;
            for (sum, &x) in sums.iter_mut().zip(block) {
                *sum = simd.negate_mul_add_e_f32s(weight, x, *sum);
            }
        }
    } else {
        for (weight, row) in weights.zip(rows.chunks_exact(width)) {
            let weight = simd.splat_f32s(weight);
            for (index, sum) in sums.iter_mut().enumerate() {
                let at = at + index * S::F32_LANES;
                if at < width {
                    *sum = simd.negate_mul_add_e_f32s(weight, load(simd, row, at), *sum);
                }
            }
        }
    }
}

/// The vectors of a block of `row` that exist; zeros elsewhere.
#[inline(always)]
fn load_block<S: Simd>(simd: S, row: &[f32], at: usize) -> [S::f32s; VECTORS] {
    let mut block = [simd.splat_f32s(0.0); VECTORS];
    for (index, x) in block.iter_mut().enumerate() {
        let at = at + index * S::F32_LANES;
        if at < row.len() {
            *x = load(simd, row, at);
        }
    }
    block
}

/// Stores `factor` times a block.
#[inline(always)]
fn store_block<S: Simd>(simd: S, row: &mut [f32], at: usize, block: &[S::f32s; VECTORS], factor: f32) {
    let factor = simd.splat_f32s(factor);
    for (index, &x) in block.iter().enumerate() {
        let at = at + index * S::F32_LANES;
        if at < row.len() {
            store(simd, row, at, simd.mul_f32s(factor, x));
        }
    }
}

crate::simd_fn! {
    /// y_t -= sum_{s < t} b(t, s) u_s with u_t = beta_t y_t, in order of t; b is square.
    pub(super) fn forward<S>(simd, b: &'a [f32], beta: &'a [f32], y: &'a mut [f32], u: &'a mut [f32]) {
        let count = beta.len();
        let width = y.len() / count;
        for at in (0..width).step_by(VECTORS * S::F32_LANES) {
            for t in 0..count {
                let (before, own) = u.split_at_mut(t * width);
                let row = &mut y[t * width..][..width];
                let mut sums = load_block(simd, row, at);
                subtract_rows(simd, &mut sums, b[t * count..][..t].iter().copied(), before, width, at);
                store_block(simd, row, at, &sums, 1.0);
                store_block(simd, &mut own[..width], at, &sums, beta[t]);
            }
        }
    }
}

crate::simd_fn! {
    /// du_s -= sum_{t > s} b(t, s) dy_t with dy_s = beta_s du_s, against the order of s; b is square.
    pub(super) fn backward<S>(simd, b: &'a [f32], beta: &'a [f32], du: &'a mut [f32], dy: &'a mut [f32]) {
        let count = beta.len();
        let width = du.len() / count;
        for at in (0..width).step_by(VECTORS * S::F32_LANES) {
            for s in (0..count).rev() {
                let (own, after) = dy.split_at_mut((s + 1) * width);
                let row = &mut du[s * width..][..width];
                let mut sums = load_block(simd, row, at);
                let weights = b[s..].iter().step_by(count).skip(s + 1).copied();
                subtract_rows(simd, &mut sums, weights, after, width, at);
                store_block(simd, row, at, &sums, 1.0);
                store_block(simd, &mut own[s * width..], at, &sums, beta[s]);
            }
        }
    }
}
