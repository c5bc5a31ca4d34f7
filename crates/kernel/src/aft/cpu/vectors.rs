//! Rows of whole vectors, to inline into the passes.

use pulp::Simd;

/// Elements that a row of working space is a multiple of: at least the lanes of every instruction set.
pub(super) const ALIGN: usize = 16;

/// `V` vectors of a row from `at` on.
#[inline(always)]
pub(super) fn vectors<S: Simd, const V: usize>(row: &[f32], at: usize) -> &[S::f32s] {
    &S::as_simd_f32s(&row[at..at + V * S::F32_LANES]).0[..V]
}

/// [`vectors`] to write to.
#[inline(always)]
pub(super) fn vectors_mut<S: Simd, const V: usize>(row: &mut [f32], at: usize) -> &mut [S::f32s] {
    &mut S::as_mut_simd_f32s(&mut row[at..at + V * S::F32_LANES]).0[..V]
}

/// sums += sum_i weight_i (x_i, y_i), over rows of `width` elements of which x_0 and y_0 are the first.
#[inline(always)]
pub(super) fn add_weighted<S: Simd>(
    simd: S,
    weights: &[f32],
    [x, y]: [&[f32]; 2],
    width: usize,
    [sum_x, sum_y]: [&mut [f32]; 2],
) {
    const V: usize = 4;
    let mut at = 0;
    while at + V * S::F32_LANES <= width {
        add_block::<S, V>(simd, weights, [x, y], width, at, [&mut *sum_x, &mut *sum_y]);
        at += V * S::F32_LANES;
    }
    while at < width {
        add_block::<S, 1>(simd, weights, [x, y], width, at, [&mut *sum_x, &mut *sum_y]);
        at += S::F32_LANES;
    }
}

#[inline(always)]
fn add_block<S: Simd, const V: usize>(
    simd: S,
    weights: &[f32],
    [x, y]: [&[f32]; 2],
    width: usize,
    at: usize,
    [sum_x, sum_y]: [&mut [f32]; 2],
) {
    let mut sums = [[simd.splat_f32s(0.0); V]; 2];
    for (&weight, (x, y)) in weights.iter().zip(x.chunks_exact(width).zip(y.chunks_exact(width))) {
        let weight = simd.splat_f32s(weight);
        let (x, y) = (vectors::<S, V>(x, at), vectors::<S, V>(y, at));
        for v in 0..V {
            sums[0][v] = simd.mul_add_e_f32s(weight, x[v], sums[0][v]);
            sums[1][v] = simd.mul_add_e_f32s(weight, y[v], sums[1][v]);
        }
    }
    let (sum_x, sum_y) = (vectors_mut::<S, V>(sum_x, at), vectors_mut::<S, V>(sum_y, at));
    for v in 0..V {
        sum_x[v] = simd.add_f32s(sum_x[v], sums[0][v]);
        sum_y[v] = simd.add_f32s(sum_y[v], sums[1][v]);
    }
}
