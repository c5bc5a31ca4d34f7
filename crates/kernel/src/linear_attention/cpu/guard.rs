//! The division and its derivative, row by row.

use super::rows::{Rows, RowsMut};
use crate::cpu::math;
use crate::linear_attention::{Guard, TINY};

/// 1 / guard(den), and the derivative of guard at `den`; 1 and 0 where nothing is divided.
#[inline(always)]
pub(super) fn invert(guard: Option<Guard>, den: f32) -> (f32, f32) {
    let Some(guard) = guard else { return (1.0, 0.0) };
    let clamp = |size: f32, eps: f32, sign: f32| {
        if size > eps { (1.0 / size, sign) } else { (1.0 / eps, 0.0) }
    };
    let sign = if den >= 0.0 { 1.0 } else { -1.0 };
    match guard {
        Guard::ClampMin(eps) => clamp(den, eps as f32, 1.0),
        Guard::AbsClampMin(eps) => clamp(den.abs(), eps as f32, sign),
        Guard::SignedClamp(eps) if den.abs() >= eps as f32 => (1.0 / den, 1.0),
        Guard::SignedClamp(eps) => (sign / eps as f32, 0.0),
        Guard::Add(eps) => (1.0 / (den + eps as f32), 1.0),
        Guard::NonZero if den.abs() >= TINY as f32 => (1.0 / den, 1.0),
        Guard::NonZero => (0.0, 0.0),
    }
}

/// z of one head, and what every query's numerator and denominator get on top.
#[derive(Clone, Copy)]
pub(super) struct Normaliser<'a> {
    pub(super) z: &'a [f32],
    /// Added to every numerator; empty for nothing.
    pub(super) num: &'a [f32],
    /// Added to every denominator.
    pub(super) den: f32,
    /// Absent: nothing is divided.
    pub(super) guard: Option<Guard>,
}

crate::simd_fn! {
    /// out_i = (out_i + num) / guard(f_i . z + den) for the numerators in `out`.
    pub(super) fn divide<S>(simd, f: &'a [f32], norm: Normaliser<'a>, out: RowsMut<'a>) {
        let mut out = out;
        for (row, f) in f.chunks_exact(norm.z.len()).take(out.count).enumerate() {
            let (inverse, _) = invert(norm.guard, math::dot(simd, f, norm.z) + norm.den);
            let out = out.row(row);
            if !norm.num.is_empty() {
                math::add(simd, norm.num, out);
            }
            math::scale(simd, inverse, out);
        }
    }
}

crate::simd_fn! {
    /// Gradients of the numerators, `dnum` [rows, e], and of the denominators, `dden`, from the result and its
    /// gradient.
    pub(super) fn undivide<S>(
        simd,
        f: &'a [f32],
        norm: Normaliser<'a>,
        out: Rows<'a>,
        dout: Rows<'a>,
        dnum: &'a mut [f32],
        dden: &'a mut [f32],
    ) {
        let rows = f.chunks_exact(norm.z.len()).zip(dnum.chunks_exact_mut(out.width)).zip(dden);
        for (row, ((f, dnum), dden)) in rows.take(out.count).enumerate() {
            let (inverse, slope) = invert(norm.guard, math::dot(simd, f, norm.z) + norm.den);
            let factor = simd.splat_f32s(inverse);
            math::map(simd, dout.row(row), dnum, |g| simd.mul_f32s(g, factor));
            *dden = -math::dot(simd, dnum, out.row(row)) * slope;
        }
    }
}

crate::simd_fn! {
    /// sum += sum_i weight_i row_i.
    pub(super) fn weighted_sum<S>(simd, weights: &'a [f32], rows: Rows<'a>, sum: &'a mut [f32]) {
        for (row, &weight) in weights.iter().take(rows.count).enumerate() {
            math::axpy(simd, weight, rows.row(row), sum);
        }
    }
}

crate::simd_fn! {
    /// sum += sum_i row_i.
    pub(super) fn plain_sum<S>(simd, rows: Rows<'a>, sum: &'a mut [f32]) {
        for row in 0..rows.count {
            math::add(simd, rows.row(row), sum);
        }
    }
}

crate::simd_fn! {
    /// row_i += weight_i x.
    pub(super) fn add_outer<S>(simd, weights: &'a [f32], x: &'a [f32], rows: &'a mut [f32]) {
        for (row, &weight) in rows.chunks_exact_mut(x.len()).zip(weights) {
            math::axpy(simd, weight, x, row);
        }
    }
}

crate::simd_fn! {
    /// row_i += x.
    pub(super) fn add_to_rows<S>(simd, x: &'a [f32], rows: RowsMut<'a>) {
        let mut rows = rows;
        for row in 0..rows.count {
            math::add(simd, x, rows.row(row));
        }
    }
}
