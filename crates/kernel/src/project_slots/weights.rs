//! Weights of a dynamic projection from logits, tile by tile.

use crate::cpu::math;

/// The columns of one segment in the rows of a tile.
#[derive(Clone, Copy)]
pub struct Columns {
    /// Numbers from one row to the next.
    pub stride: usize,
    /// The first column.
    pub first: usize,
    /// How many they are.
    pub len: usize,
}

crate::simd_fn! {
    /// Logits of one segment's columns become exp(logit - maximum); maxima, sums and weighted rows so far are
    /// brought to the new maximum.
    pub fn fold_weights<S>(
        simd, logits: &'a mut [f32], columns: Columns, max: &'a mut [f32], sum: &'a mut [f32],
        sums: &'a mut [f32], width: usize,
    ) {
        let Columns { stride, first, len } = columns;
        let rows = logits.chunks_exact_mut(stride).zip(sums.chunks_exact_mut(width));
        for ((logits, sums), (max, sum)) in rows.zip(max.iter_mut().zip(sum)) {
            let logits = &mut logits[first..first + len];
            let new = math::max(simd, logits).max(*max);
            if new == f32::NEG_INFINITY {
                logits.fill(0.0);
                continue;
            }
            if new != *max {
                let factor = (*max - new).exp();
                math::scale(simd, factor, sums);
                *sum *= factor;
                *max = new;
            }
            let shift = simd.splat_f32s(new);
            math::map_in_place(simd, logits, #[inline(always)] |x| math::exp(simd, simd.sub_f32s(x, shift)));
            *sum += math::sum(simd, logits);
        }
    }
}

crate::simd_fn! {
    /// Logits of one segment's columns become weights.
    pub fn weights_again<S>(simd, logits: &'a mut [f32], columns: Columns, stats: &'a [[f32; 2]]) {
        let Columns { stride, first, len } = columns;
        for (logits, &[max, factor]) in logits.chunks_exact_mut(stride).zip(stats) {
            let logits = &mut logits[first..first + len];
            if factor == 0.0 {
                logits.fill(0.0);
                continue;
            }
            let (shift, factor) = (simd.splat_f32s(max), simd.splat_f32s(factor));
            math::map_in_place(simd, logits, #[inline(always)] |x| {
                simd.mul_f32s(factor, math::exp(simd, simd.sub_f32s(x, shift)))
            });
        }
    }
}

crate::simd_fn! {
    /// Gradients of weights become gradients of logits: weight (gradient - delta). Where the sum of exponentials is
    /// 1, one position has all the weight, and its logit does not matter: exactly zero, not rounding noise.
    pub fn logit_grads<S>(
        simd, weights: &'a [f32], grads: &'a mut [f32], columns: Columns, stats: &'a [[f32; 2]],
        deltas: &'a [f32],
    ) {
        let Columns { stride, first, len } = columns;
        let rows = weights.chunks_exact(stride).zip(grads.chunks_exact_mut(stride));
        for ((weights, grads), (&delta, stat)) in rows.zip(deltas.iter().zip(stats)) {
            if stat[1] == 1.0 {
                grads[first..first + len].fill(0.0);
                continue;
            }
            let delta = simd.splat_f32s(delta);
            math::update(simd, &weights[first..first + len], &mut grads[first..first + len], #[inline(always)] |w, g| {
                simd.mul_f32s(w, simd.sub_f32s(g, delta))
            });
        }
    }
}
