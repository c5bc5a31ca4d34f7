//! Row by row arithmetic of the fused Nystrom kernel.

use crate::kernel::cpu::math;

crate::simd_fn! {
    /// Softmax of every row of `width`.
    pub fn softmax_rows<S>(simd, logits: &'a mut [f32], width: usize) {
        for row in logits.chunks_exact_mut(width) {
            let shift = simd.splat_f32s(math::max(simd, row));
            math::map_in_place(simd, row, #[inline(always)] |x| math::exp(simd, simd.sub_f32s(x, shift)));
            let sum = math::sum(simd, row);
            math::scale(simd, 1.0 / sum, row);
        }
    }
}

crate::simd_fn! {
    /// Adds logits [m, width] to running softmaxes: they become weights relative to the new maxima, `max` and `sum`
    /// [m] are brought up to date and `rows` [m, d] rescaled. Negative infinity hides a position.
    pub fn fold_rows<S>(
        simd,
        logits: &'a mut [f32],
        width: usize,
        max: &'a mut [f32],
        sum: &'a mut [f32],
        rows: &'a mut [f32],
    ) {
        let d = rows.len() / max.len();
        let stats = max.iter_mut().zip(sum).zip(rows.chunks_exact_mut(d));
        for (logits, ((max, sum), row)) in logits.chunks_exact_mut(width).zip(stats) {
            let new = max.max(math::max(simd, logits));
            if new == f32::NEG_INFINITY {
                logits.fill(0.0);
                continue;
            }
            let factor = (*max - new).exp();
            if factor != 1.0 {
                math::scale(simd, factor, row);
            }
            let shift = simd.splat_f32s(new);
            math::map_in_place(simd, logits, #[inline(always)] |x| math::exp(simd, simd.sub_f32s(x, shift)));
            (*max, *sum) = (new, *sum * factor + math::sum(simd, logits));
        }
    }
}

crate::simd_fn! {
    /// Logits [m, width] become weights by the stored maxima and reciprocal sums [m, 2].
    pub fn weights_again<S>(simd, logits: &'a mut [f32], width: usize, stats: &'a [f32]) {
        for (row, stat) in logits.chunks_exact_mut(width).zip(stats.chunks_exact(2)) {
            let (max, factor) = (simd.splat_f32s(stat[0]), simd.splat_f32s(stat[1]));
            math::map_in_place(simd, row, #[inline(always)] |x| {
                simd.mul_f32s(math::exp(simd, simd.sub_f32s(x, max)), factor)
            });
        }
    }
}

crate::simd_fn! {
    /// Gradients of weights become those of logits: w (g - delta), one delta per row.
    pub fn logit_grads<S>(simd, weights: &'a [f32], grads: &'a mut [f32], width: usize, deltas: &'a [f32]) {
        let rows = weights.chunks_exact(width).zip(grads.chunks_exact_mut(width));
        for ((weights, grads), &delta) in rows.zip(deltas) {
            let delta = simd.splat_f32s(delta);
            math::update(simd, weights, grads, #[inline(always)] |w, g| simd.mul_f32s(w, simd.sub_f32s(g, delta)));
        }
    }
}

crate::simd_fn! {
    /// The scalar product of every row of `x` with that of `y`; rows of `d`, `stride` apart.
    pub fn dots<S>(simd, x: &'a [f32], y: &'a [f32], d: usize, stride: usize, out: &'a mut [f32]) {
        for (at, out) in out.iter_mut().enumerate() {
            *out = math::dot(simd, &x[at * stride..][..d], &y[at * stride..][..d]);
        }
    }
}

crate::simd_fn! {
    /// sum += a x over rows of `d`; rows of `x` are `stride` apart.
    pub fn add_rows<S>(simd, a: f32, x: &'a [f32], stride: usize, d: usize, sum: &'a mut [f32]) {
        for x in x.chunks(stride) {
            math::axpy(simd, a, &x[..d], sum);
        }
    }
}
