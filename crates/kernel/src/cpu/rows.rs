//! Row-wise pieces of the fused kernels. Matrices are row-major slices; the width is that of `weight`, `bias`
//! or the given `width`. All run on the calling thread.

use super::math::{self, load, loads, store, stores};
use crate::simd_fn;

/// Mean and 1 / sqrt(variance + eps) of a row.
#[inline(always)]
pub fn moments<S: pulp::Simd>(simd: S, x: &[f32], eps: f32) -> (f32, f32) {
    let scale = 1.0 / x.len() as f32;
    let mean = math::sum(simd, x) * scale;
    let variance = math::sum_squares_around(simd, x, mean) * scale;
    (mean, 1.0 / (variance + eps).sqrt())
}

simd_fn! {
    /// y = LayerNorm(x), row by row.
    pub fn layer_norm<S>(
        simd, x: &'a [f32], weight: &'a [f32], bias: &'a [f32], eps: f32, y: &'a mut [f32],
    ) {
        let width = weight.len().max(1);
        for (x, y) in x.chunks_exact(width).zip(y.chunks_exact_mut(width)) {
            let (mean, inverse) = moments(simd, x, eps);
            let (mean, inverse) = (simd.splat_f32s(mean), simd.splat_f32s(inverse));
            for at in (0..width).step_by(S::F32_LANES) {
                let normal = simd.mul_f32s(simd.sub_f32s(load(simd, x, at), mean), inverse);
                let normal = simd.mul_add_e_f32s(normal, load(simd, weight, at), load(simd, bias, at));
                store(simd, y, at, normal);
            }
        }
    }
}

/// What [`layer_norm_backward`] adds to.
pub struct LayerNormGrads<'a> {
    /// The gradient of x.
    pub dx: &'a mut [f32],
    /// That of the weight.
    pub dweight: &'a mut [f32],
    /// That of the bias.
    pub dbias: &'a mut [f32],
}

simd_fn! {
    /// Backward of [`layer_norm`].
    pub fn layer_norm_backward<S>(
        simd,
        x: &'a [f32],
        weight: &'a [f32],
        eps: f32,
        dy: &'a [f32],
        grads: LayerNormGrads<'a>,
    ) {
        let LayerNormGrads { dx, dweight, dbias } = grads;
        let width = weight.len().max(1);
        let rows = x.chunks_exact(width).zip(dy.chunks_exact(width)).zip(dx.chunks_exact_mut(width));
        for ((x, dy), dx) in rows {
            let (mean, inverse) = moments(simd, x, eps);
            let (mean, inverse) = (simd.splat_f32s(mean), simd.splat_f32s(inverse));
            let (mut sum, mut product) = (simd.splat_f32s(0.0), simd.splat_f32s(0.0));
            for at in (0..width).step_by(S::F32_LANES) {
                let normal = simd.mul_f32s(simd.sub_f32s(load(simd, x, at), mean), inverse);
                let grad = load(simd, dy, at);
                let total = simd.mul_add_e_f32s(grad, normal, load(simd, dweight, at));
                store(simd, dweight, at, total);
                store(simd, dbias, at, simd.add_f32s(grad, load(simd, dbias, at)));
                let grad = simd.mul_f32s(grad, load(simd, weight, at)); // 0 beyond the end
                sum = simd.add_f32s(sum, grad);
                product = simd.mul_add_e_f32s(grad, normal, product);
            }
            let over = 1.0 / width as f32;
            let sum = simd.splat_f32s(-simd.reduce_sum_f32s(sum) * over);
            let product = simd.splat_f32s(-simd.reduce_sum_f32s(product) * over);
            for at in (0..width).step_by(S::F32_LANES) {
                let normal = simd.mul_f32s(simd.sub_f32s(load(simd, x, at), mean), inverse);
                let grad = simd.mul_add_e_f32s(load(simd, dy, at), load(simd, weight, at), sum);
                let grad = simd.mul_add_e_f32s(normal, product, grad);
                store(simd, dx, at, simd.mul_add_e_f32s(grad, inverse, load(simd, dx, at)));
            }
        }
    }
}

simd_fn! {
    /// y = x / sqrt(mean(x^2) + eps) * weight, row by row.
    pub fn rms_norm<S>(simd, x: &'a [f32], weight: &'a [f32], eps: f32, y: &'a mut [f32]) {
        let width = weight.len().max(1);
        for (x, y) in x.chunks_exact(width).zip(y.chunks_exact_mut(width)) {
            let inverse = simd.splat_f32s(inverse_rms(simd, x, eps));
            for at in (0..width).step_by(S::F32_LANES) {
                let normal = simd.mul_f32s(load(simd, x, at), inverse);
                store(simd, y, at, simd.mul_f32s(normal, load(simd, weight, at)));
            }
        }
    }
}

/// 1 / sqrt(mean(x^2) + eps) of a row.
#[inline(always)]
fn inverse_rms<S: pulp::Simd>(simd: S, x: &[f32], eps: f32) -> f32 {
    1.0 / (math::sum_squares_around(simd, x, 0.0) / x.len() as f32 + eps).sqrt()
}

simd_fn! {
    /// Backward of [`rms_norm`]: `dx` becomes the gradient of x, that of the weight is added to `dweight`.
    pub fn rms_norm_backward<S>(
        simd,
        x: &'a [f32],
        weight: &'a [f32],
        eps: f32,
        dy: &'a [f32],
        dx: &'a mut [f32],
        dweight: &'a mut [f32],
    ) {
        let width = weight.len().max(1);
        let rows = x.chunks_exact(width).zip(dy.chunks_exact(width)).zip(dx.chunks_exact_mut(width));
        for ((x, dy), dx) in rows {
            let inverse = simd.splat_f32s(inverse_rms(simd, x, eps));
            let mut product = simd.splat_f32s(0.0);
            for at in (0..width).step_by(S::F32_LANES) {
                let normal = simd.mul_f32s(load(simd, x, at), inverse);
                let grad = load(simd, dy, at);
                store(simd, dweight, at, simd.mul_add_e_f32s(grad, normal, load(simd, dweight, at)));
                product = simd.mul_add_e_f32s(simd.mul_f32s(grad, load(simd, weight, at)), normal, product);
            }
            let product = simd.splat_f32s(-simd.reduce_sum_f32s(product) / width as f32);
            for at in (0..width).step_by(S::F32_LANES) {
                let normal = simd.mul_f32s(load(simd, x, at), inverse);
                let grad = simd.mul_f32s(load(simd, dy, at), load(simd, weight, at));
                store(simd, dx, at, simd.mul_f32s(simd.mul_add_e_f32s(normal, product, grad), inverse));
            }
        }
    }
}

/// sigmoid(x).
#[inline(always)]
pub fn sigmoid<S: pulp::Simd>(simd: S, x: S::f32s) -> S::f32s {
    let one = simd.splat_f32s(1.0);
    simd.div_f32s(one, simd.add_f32s(one, math::exp(simd, simd.neg_f32s(x))))
}

simd_fn! {
    /// y = SiLU(gate) * up.
    pub fn swiglu<S>(simd, gate: &'a [f32], up: &'a [f32], y: &'a mut [f32]) {
        for at in (0..y.len()).step_by(S::F32_LANES) {
            let gate = load(simd, gate, at);
            let silu = simd.mul_f32s(gate, sigmoid(simd, gate));
            store(simd, y, at, simd.mul_f32s(silu, load(simd, up, at)));
        }
    }
}

simd_fn! {
    /// Backward of [`swiglu`].
    pub fn swiglu_backward<S>(
        simd,
        gate: &'a [f32],
        up: &'a [f32],
        dy: &'a [f32],
        dgate: &'a mut [f32],
        dup: &'a mut [f32],
    ) {
        for at in (0..dy.len()).step_by(S::F32_LANES) {
            let (gate, grad) = (load(simd, gate, at), load(simd, dy, at));
            let (silu, slope) = silu_and_slope(simd, gate);
            store(simd, dup, at, simd.mul_f32s(grad, silu));
            store(simd, dgate, at, simd.mul_f32s(simd.mul_f32s(grad, load(simd, up, at)), slope));
        }
    }
}

simd_fn! {
    /// y = sigmoid(gate) * up.
    pub fn glu<S>(simd, gate: &'a [f32], up: &'a [f32], y: &'a mut [f32]) {
        for at in (0..y.len()).step_by(S::F32_LANES) {
            let open = sigmoid(simd, load(simd, gate, at));
            store(simd, y, at, simd.mul_f32s(open, load(simd, up, at)));
        }
    }
}

simd_fn! {
    /// Backward of [`glu`].
    pub fn glu_backward<S>(
        simd,
        gate: &'a [f32],
        up: &'a [f32],
        dy: &'a [f32],
        dgate: &'a mut [f32],
        dup: &'a mut [f32],
    ) {
        for at in (0..dy.len()).step_by(S::F32_LANES) {
            let (open, grad) = (sigmoid(simd, load(simd, gate, at)), load(simd, dy, at));
            let through = simd.mul_f32s(grad, open);
            store(simd, dup, at, through);
            let closed = simd.sub_f32s(simd.splat_f32s(1.0), open);
            store(simd, dgate, at, simd.mul_f32s(simd.mul_f32s(through, load(simd, up, at)), closed));
        }
    }
}

simd_fn! {
    /// y = outer ln(1 + exp(inner x)).
    pub fn softplus<S>(simd, x: &'a [f32], inner: f32, outer: f32, y: &'a mut [f32]) {
        let (inner, outer) = (simd.splat_f32s(inner), simd.splat_f32s(outer));
        math::map(
            simd,
            x,
            y,
            #[inline(always)]
            |x| simd.mul_f32s(outer, math::softplus(simd, simd.mul_f32s(inner, x))),
        );
    }
}

simd_fn! {
    /// dx = dy outer inner sigmoid(inner x).
    pub fn softplus_backward<S>(
        simd, x: &'a [f32], dy: &'a [f32], inner: f32, outer: f32, dx: &'a mut [f32],
    ) {
        let (product, inner) = (simd.splat_f32s(inner * outer), simd.splat_f32s(inner));
        for at in (0..x.len()).step_by(S::F32_LANES) {
            let slope = sigmoid(simd, simd.mul_f32s(inner, load(simd, x, at)));
            let grad = simd.mul_f32s(load(simd, dy, at), product);
            store(simd, dx, at, simd.mul_f32s(grad, slope));
        }
    }
}

simd_fn! {
    /// y = SiLU(x).
    pub fn silu<S>(simd, x: &'a [f32], y: &'a mut [f32]) {
        math::map(simd, x, y, #[inline(always)] |x| simd.mul_f32s(x, sigmoid(simd, x)));
    }
}

simd_fn! {
    /// dx = dy SiLU'(x).
    pub fn silu_backward<S>(simd, x: &'a [f32], dy: &'a [f32], dx: &'a mut [f32]) {
        for at in (0..x.len()).step_by(S::F32_LANES) {
            let (_, slope) = silu_and_slope(simd, load(simd, x, at));
            store(simd, dx, at, simd.mul_f32s(load(simd, dy, at), slope));
        }
    }
}

/// SiLU(x) and its derivative s + SiLU(x) (1 - s) with s = sigmoid(x).
#[inline(always)]
pub fn silu_and_slope<S: pulp::Simd>(simd: S, x: S::f32s) -> (S::f32s, S::f32s) {
    let open = sigmoid(simd, x);
    let silu = simd.mul_f32s(x, open);
    (silu, simd.mul_add_e_f32s(silu, simd.sub_f32s(simd.splat_f32s(1.0), open), open))
}

simd_fn! {
    /// y = x + row, for every row.
    pub fn add_row<S>(simd, x: &'a [f32], row: &'a [f32], y: &'a mut [f32]) {
        let width = row.len().max(1);
        for (x, y) in x.chunks_exact(width).zip(y.chunks_exact_mut(width)) {
            for at in (0..width).step_by(S::F32_LANES) {
                store(simd, y, at, simd.add_f32s(load(simd, x, at), load(simd, row, at)));
            }
        }
    }
}

simd_fn! {
    /// y += row, for every row of y (nothing happens if `row` is empty).
    pub fn add_row_in_place<S>(simd, y: &'a mut [f32], row: &'a [f32]) {
        if !row.is_empty() {
            for y in y.chunks_exact_mut(row.len()) {
                math::add(simd, row, y);
            }
        }
    }
}

simd_fn! {
    /// Adds the sum of all rows of `x` to `total`.
    pub fn add_column_sums<S>(simd, x: &'a [f32], total: &'a mut [f32]) {
        let width = total.len();
        if width == 0 {
            return;
        }
        // Four rows at a time: a quarter of the loads and stores of the totals.
        let mut fours = x.chunks_exact(4 * width);
        for four in &mut fours {
            for at in (0..width).step_by(S::F32_LANES) {
                let mut sum = load(simd, &four[..width], at);
                for row in four[width..].chunks_exact(width) {
                    sum = simd.add_f32s(sum, load(simd, row, at));
                }
                store(simd, total, at, simd.add_f32s(load(simd, total, at), sum));
            }
        }
        for row in fours.remainder().chunks_exact(width) {
            math::add(simd, row, total);
        }
    }
}

/// Vectors whose GELU is computed side by side: each waits for one long chain of steps.
const GELUS: usize = 2;

/// h + bias.
#[inline(always)]
fn biased<S: pulp::Simd>(simd: S, h: &[f32], bias: &[f32], at: usize) -> [S::f32s; GELUS] {
    let mut sums = loads(simd, h, at);
    for (sum, bias) in sums.iter_mut().zip(loads::<S, GELUS>(simd, bias, at)) {
        *sum = simd.add_f32s(*sum, bias);
    }
    sums
}

simd_fn! {
    /// y = GELU(x).
    pub fn gelu<S>(simd, x: &'a [f32], y: &'a mut [f32]) {
        for at in (0..y.len()).step_by(GELUS * S::F32_LANES) {
            stores(simd, y, at, math::gelu::<S, GELUS>(simd, loads(simd, x, at)));
        }
    }
}

simd_fn! {
    /// y = GELU(x) with tanh.
    pub fn gelu_tanh<S>(simd, x: &'a [f32], y: &'a mut [f32]) {
        math::map(simd, x, y, #[inline(always)] |x| math::gelu_tanh_grad(simd, x).0);
    }
}

simd_fn! {
    /// dx = dy GELU'(x) with tanh.
    pub fn gelu_tanh_backward<S>(simd, x: &'a [f32], dy: &'a [f32], dx: &'a mut [f32]) {
        for at in (0..x.len()).step_by(S::F32_LANES) {
            let (_, slope) = math::gelu_tanh_grad(simd, load(simd, x, at));
            store(simd, dx, at, simd.mul_f32s(load(simd, dy, at), slope));
        }
    }
}

simd_fn! {
    /// h += bias and a = GELU(h), for every row.
    pub fn bias_gelu<S>(simd, h: &'a mut [f32], bias: &'a [f32], a: &'a mut [f32]) {
        let width = bias.len().max(1);
        for (h, a) in h.chunks_exact_mut(width).zip(a.chunks_exact_mut(width)) {
            for at in (0..width).step_by(GELUS * S::F32_LANES) {
                let sum = biased::<S>(simd, h, bias, at);
                stores(simd, h, at, sum);
                stores(simd, a, at, math::gelu(simd, sum));
            }
        }
    }
}

simd_fn! {
    /// h becomes GELU(h + bias), for every row.
    pub fn bias_gelu_in_place<S>(simd, h: &'a mut [f32], bias: &'a [f32]) {
        for h in h.chunks_exact_mut(bias.len().max(1)) {
            for at in (0..h.len()).step_by(GELUS * S::F32_LANES) {
                let sum = biased::<S>(simd, h, bias, at);
                stores(simd, h, at, math::gelu(simd, sum));
            }
        }
    }
}

simd_fn! {
    /// a = GELU(h), and h becomes the gradient da GELU'(h).
    pub fn gelu_and_gradient<S>(simd, h: &'a mut [f32], da: &'a [f32], a: &'a mut [f32]) {
        for at in (0..h.len()).step_by(GELUS * S::F32_LANES) {
            let (values, slopes) = math::gelu_grad::<S, GELUS>(simd, loads(simd, h, at));
            stores(simd, a, at, values);
            stores(simd, h, at, math::products(simd, slopes, loads(simd, da, at)));
        }
    }
}

simd_fn! {
    /// dx = dy GELU'(x).
    pub fn gelu_backward<S>(simd, x: &'a [f32], dy: &'a [f32], dx: &'a mut [f32]) {
        for at in (0..x.len()).step_by(GELUS * S::F32_LANES) {
            let (_, slopes) = math::gelu_grad::<S, GELUS>(simd, loads(simd, x, at));
            stores(simd, dx, at, math::products(simd, slopes, loads(simd, dy, at)));
        }
    }
}

simd_fn! {
    /// y += a x.
    pub fn axpy<S>(simd, a: f32, x: &'a [f32], y: &'a mut [f32]) {
        math::axpy(simd, a, x, y);
    }
}

simd_fn! {
    /// y += x.
    pub fn add<S>(simd, x: &'a [f32], y: &'a mut [f32]) {
        math::add(simd, x, y);
    }
}

simd_fn! {
    /// Copies rows of `width` elements, `step` apart, to rows `row` apart; what lies between is left as it is.
    pub fn copy_rows<S>(simd, from: &'a [f32], step: usize, width: usize, to: &'a mut [f32], row: usize) {
        for (number, to) in to.chunks_exact_mut(row).enumerate() {
            math::map(simd, &from[number * step..][..width], &mut to[..width], |x| x);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn column_sums_of_every_height() {
        for (rows, width) in [(0, 3), (1, 1), (3, 17), (4, 16), (9, 33)] {
            let x: Vec<f32> = (0..rows * width).map(|i| (i % 13) as f32).collect();
            let mut total = vec![1.0; width];
            add_column_sums(&x, &mut total);
            for (column, total) in total.iter().enumerate() {
                let sum: f32 = (0..rows).map(|row| x[row * width + column]).sum();
                assert_eq!(*total, 1.0 + sum);
            }
        }
    }
}
