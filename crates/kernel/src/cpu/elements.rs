//! Pieces of [`math`], dispatched on their own: for long vectors outside of a larger function.

use super::math;

crate::simd_fn! {
    /// y *= a.
    pub fn scale<S>(simd, a: f32, y: &'a mut [f32]) {
        math::scale(simd, a, y);
    }
}

crate::simd_fn! {
    /// y *= x.
    pub fn multiply<S>(simd, x: &'a [f32], y: &'a mut [f32]) {
        math::update(simd, x, y, #[inline(always)] |x, y| simd.mul_f32s(x, y));
    }
}

crate::simd_fn! {
    /// x . y.
    pub fn dot<S>(simd, x: &'a [f32], y: &'a [f32]) -> f32 {
        math::dot(simd, x, y)
    }
}

crate::simd_fn! {
    /// The scalar product of every row of `a` with that of `b`.
    pub fn row_dots<S>(simd, a: &'a [f32], b: &'a [f32], width: usize, dots: &'a mut [f32]) {
        for ((a, b), dot) in a.chunks_exact(width).zip(b.chunks_exact(width)).zip(dots) {
            *dot = math::dot(simd, a, b);
        }
    }
}
