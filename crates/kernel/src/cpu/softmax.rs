//! Softmax of the rows of a matrix.

use super::math;

crate::simd_fn! {
    /// Every row of logits [_, width] becomes weights that sum to 1.
    pub fn softmax_rows<S>(simd, logits: &'a mut [f32], width: usize) {
        for row in logits.chunks_exact_mut(width) {
            let max = math::max(simd, row);
            math::exp_in_place(simd, max, row);
            let sum = math::sum(simd, row);
            math::scale(simd, 1.0 / sum, row);
        }
    }
}

crate::simd_fn! {
    /// Gradients of weights become those of logits: w (g - sum(w g)), the sum over each row.
    pub fn softmax_rows_backward<S>(simd, weights: &'a [f32], grads: &'a mut [f32], width: usize) {
        for (weights, grads) in weights.chunks_exact(width).zip(grads.chunks_exact_mut(width)) {
            let mean = simd.splat_f32s(math::dot(simd, weights, grads));
            math::update(simd, weights, grads, #[inline(always)] |w, g| simd.mul_f32s(w, simd.sub_f32s(g, mean)));
        }
    }
}
