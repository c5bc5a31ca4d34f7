//! Arithmetic on rows of lanes: one row per key, one lane per query.
//!
//! Logits are in units of ln 2, so that weights are powers of two.

use pulp::Simd;

use crate::cpu::math;
use crate::dropout::AttentionDropout;
use crate::simd_fn;

/// 2^x for x <= 0 within 2e-7; 0 below the smallest normal number, so also for negative infinity.
#[inline(always)]
fn exp2<S: Simd>(simd: S, x: S::f32s) -> S::f32s {
    let splat = |value| simd.splat_f32s(value);
    // Adding 1.5 * 2^23 rounds to an integer, which then stands in the low bits.
    let round = splat(12_582_912.0);
    let shifted = simd.add_f32s(x, round);
    let r = simd.sub_f32s(x, simd.sub_f32s(shifted, round));
    // Minimax polynomial of 2^r on [-1/2, 1/2].
    let mut p = splat(1.535_336_2e-4);
    for c in [1.339_887_4e-3, 9.618_437e-3, 5.550_332_4e-2, 2.402_264_8e-1, 6.931_472e-1, 1.0] {
        p = simd.mul_add_e_f32s(p, r, splat(c));
    }
    let n = simd.wrapping_dyn_shl_u32s(simd.transmute_u32s_f32s(shifted), simd.splat_u32s(23));
    let y = simd.transmute_f32s_u32s(simd.add_u32s(simd.transmute_u32s_f32s(p), n));
    simd.select_f32s(simd.less_than_f32s(x, splat(-126.0)), splat(0.0), y)
}

/// A row as vectors; its length is a multiple of [`WIDTH`](crate::attend::tile::WIDTH).
#[inline(always)]
fn vectors<S: Simd>(row: &[f32]) -> &[S::f32s] {
    S::as_simd_f32s(row).0
}

/// The same, to write.
#[inline(always)]
fn vectors_mut<S: Simd>(row: &mut [f32]) -> &mut [S::f32s] {
    S::as_mut_simd_f32s(row).0
}

simd_fn! {
    /// Makes logits minus infinity where key `first + row` is outside of the lane's `low..high`.
    pub fn hide<S>(simd, logits: &'a mut [f32], first: f32, low: &'a [f32], high: &'a [f32]) {
        let hidden = simd.splat_f32s(f32::NEG_INFINITY);
        let (lows, highs) = (vectors::<S>(low), vectors::<S>(high));
        for (row, logits) in logits.chunks_exact_mut(low.len()).enumerate() {
            let key = simd.splat_f32s(first + row as f32);
            let bounds = lows.iter().zip(highs);
            for (logit, (&low, &high)) in vectors_mut::<S>(logits).iter_mut().zip(bounds) {
                let seen = simd.select_f32s(simd.less_than_or_equal_f32s(low, key), *logit, hidden);
                *logit = simd.select_f32s(simd.less_than_f32s(key, high), seen, hidden);
            }
        }
    }
}

// In the following, vector `at` of every row is gone through before the next: sums and maxima stay in registers.
// Loops are written out because closures over vectors may be compiled for a lesser processor.

simd_fn! {
    /// Raises every lane's `max` to its largest logit.
    pub fn raise_max<S>(simd, logits: &'a [f32], max: &'a mut [f32]) {
        let width = max.len();
        for (at, max) in vectors_mut::<S>(max).iter_mut().enumerate() {
            let mut most = *max;
            for row in logits.chunks_exact(width) {
                most = simd.max_f32s(most, vectors::<S>(row)[at]);
            }
            *max = most;
        }
    }
}

simd_fn! {
    /// Logits become weights 2^(logit - max), which are added to the lanes' sums.
    pub fn weigh<S>(simd, logits: &'a mut [f32], max: &'a [f32], sum: &'a mut [f32]) {
        let width = max.len();
        for (at, (sum, &max)) in vectors_mut::<S>(sum).iter_mut().zip(vectors::<S>(max)).enumerate() {
            let mut total = *sum;
            for row in logits.chunks_exact_mut(width) {
                let logit = &mut vectors_mut::<S>(row)[at];
                *logit = exp2(simd, simd.sub_f32s(*logit, max));
                total = simd.add_f32s(total, *logit);
            }
            *sum = total;
        }
    }
}

simd_fn! {
    /// Drops weights: row `i` belongs to key `first + i step`, lanes to `rows`.
    pub fn drop<S>(simd, weights: &'a mut [f32], rows: &'a [u32], first: usize, step: usize, dropout: AttentionDropout) {
        let _ = simd; // the compiler makes vectors of integers itself
        for (number, weights) in weights.chunks_exact_mut(rows.len()).enumerate() {
            let key = AttentionDropout::key(first + number * step);
            for (weight, &row) in weights.iter_mut().zip(rows) {
                *weight *= dropout.factor(row, key);
            }
        }
    }
}

simd_fn! {
    /// `factor` = 2^(old - new), and `sum` times it, by lane.
    pub fn correct<S>(simd, old: &'a [f32], new: &'a [f32], factor: &'a mut [f32], sum: &'a mut [f32]) {
        let bounds = vectors::<S>(old).iter().zip(vectors::<S>(new));
        let results = vectors_mut::<S>(factor).iter_mut().zip(vectors_mut::<S>(sum));
        for ((&old, &new), (factor, sum)) in bounds.zip(results) {
            *factor = exp2(simd, simd.sub_f32s(old, new));
            *sum = simd.mul_f32s(*factor, *sum);
        }
    }
}

simd_fn! {
    /// Logits become probabilities 2^(logit - max) / sum; `slopes`, the products of values and output gradients,
    /// become the gradients of the logits: scale p (slope - mean).
    pub fn differentiate<S>(
        simd, logits: &'a mut [f32], slopes: &'a mut [f32], max: &'a [f32], share: &'a [f32], mean: &'a [f32],
        scale: f32,
    ) {
        let width = max.len();
        let scale = simd.splat_f32s(scale);
        let (shares, means) = (vectors::<S>(share), vectors::<S>(mean));
        for (at, &max) in vectors::<S>(max).iter().enumerate() {
            let (share, mean) = (shares[at], means[at]);
            let scaled = simd.mul_f32s(scale, share);
            for (logits, slopes) in logits.chunks_exact_mut(width).zip(slopes.chunks_exact_mut(width)) {
                let logit = &mut vectors_mut::<S>(logits)[at];
                let slope = &mut vectors_mut::<S>(slopes)[at];
                let weight = exp2(simd, simd.sub_f32s(*logit, max));
                *logit = simd.mul_f32s(weight, share);
                *slope = simd.mul_f32s(simd.mul_f32s(weight, scaled), simd.sub_f32s(*slope, mean));
            }
        }
    }
}

simd_fn! {
    /// Scalar products by lane, summed over elements in the order of [`product`](super::product::product): where a
    /// query sees one key, this is exactly the product of value and output gradient.
    pub fn dot<S>(simd, x: &'a [f32], y: &'a [f32], to: &'a mut [f32]) {
        let width = to.len();
        for (at, to) in vectors_mut::<S>(to).iter_mut().enumerate() {
            let mut sum = simd.splat_f32s(0.0);
            for (x, y) in x.chunks_exact(width).zip(y.chunks_exact(width)) {
                sum = simd.mul_add_e_f32s(vectors::<S>(x)[at], vectors::<S>(y)[at], sum);
            }
            *to = sum;
        }
    }
}

simd_fn! {
    /// Rows of lanes, each lane times its factor.
    pub fn scale_lanes<S>(simd, factor: &'a [f32], y: &'a mut [f32]) {
        let factors = vectors::<S>(factor);
        for row in y.chunks_exact_mut(factor.len()) {
            for (y, &factor) in vectors_mut::<S>(row).iter_mut().zip(factors) {
                *y = simd.mul_f32s(*y, factor);
            }
        }
    }
}

simd_fn! {
    /// y = a x.
    pub fn scaled_row<S>(simd, a: f32, x: &'a [f32], y: &'a mut [f32]) {
        let a = simd.splat_f32s(a);
        math::map(simd, x, y, |x| simd.mul_f32s(a, x))
    }
}

simd_fn! {
    /// y += x.
    pub fn add_row<S>(simd, x: &'a [f32], y: &'a mut [f32]) { math::add(simd, x, y) }
}

simd_fn! {
    /// Transposes four rows of `data`, which start at `starts`: lane `lane` of row `element` of `lanes` (rows `row`
    /// apart) is `factor` times element `element` of row `lane`.
    pub fn transpose<S>(
        simd, data: &'a [f32], starts: [usize; 4], width: usize, factor: f32, lanes: &'a mut [f32], row: usize,
    ) {
        let _ = simd; // plain loops over squares of 4 x 4, which the compiler turns into shuffles
        let rows = starts.map(|start| &data[start..start + width]);
        let whole = width / 4 * 4;
        for element in (0..whole).step_by(4) {
            let mut square = [[0.0; 4]; 4];
            for (square, from) in square.iter_mut().zip(rows) {
                square.copy_from_slice(&from[element..element + 4]);
            }
            for i in 0..4 {
                let column = square.map(|from| factor * from[i]);
                lanes[(element + i) * row..][..4].copy_from_slice(&column);
            }
        }
        for element in whole..width {
            lanes[element * row..][..4].copy_from_slice(&rows.map(|from| factor * from[element]));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn powers_of_two() {
        let steps = 40_000;
        let mut logits: Vec<f32> = (0..steps).map(|i| -130.0 * i as f32 / steps as f32).collect();
        logits.extend([f32::NEG_INFINITY; 16]);
        let exact: Vec<f64> = logits.iter().map(|&x| f64::from(x).exp2()).collect();
        let mut sum = [0.0; 16];
        weigh(&mut logits, &[0.0; 16], &mut sum);
        for (got, want) in logits.iter().zip(&exact) {
            let error = (f64::from(*got) - want).abs();
            assert!(if *want < 2f64.powi(-126) { *got == 0.0 } else { error <= 2e-7 * want }, "{got} {want}");
        }
        let total: f64 = exact.iter().sum();
        assert!((f64::from(sum.iter().sum::<f32>()) - total).abs() < 1e-5 * total);
    }

    #[test]
    fn keys_out_of_bounds_are_hidden() {
        let mut logits = [1.0; 48];
        let (mut low, mut high) = ([0.0; 16], [9.0; 16]);
        (low[3], high[5]) = (6.0, 6.0);
        hide(&mut logits, 5.0, &low, &high);
        let hidden: Vec<usize> = (0..48).filter(|&at| logits[at] == f32::NEG_INFINITY).collect();
        assert_eq!(hidden, [3, 21, 37]);
    }

    #[test]
    fn a_lane_without_keys_stays_empty() {
        let (mut max, mut sum, mut factor) = ([f32::NEG_INFINITY; 16], [0.0; 16], [9.0; 16]);
        raise_max(&[f32::NEG_INFINITY; 32], &mut max);
        assert_eq!(max, [f32::NEG_INFINITY; 16]);
        correct(&max, &[0.0; 16], &mut factor, &mut sum);
        assert_eq!((factor, sum), ([0.0; 16], [0.0; 16]));
    }
}
