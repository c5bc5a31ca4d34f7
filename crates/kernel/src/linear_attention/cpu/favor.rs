//! FAVOR+ features on tiles.

use super::map::{At, Map, Mask, Peak, Side, Tile};
use super::rows::{Rows, RowsMut};
use crate::cpu::gemm::{Mat, MatMut, Threads, gemm};
use crate::cpu::math;

/// Exponentials exp(omega x' - |x'|^2 / 2 - c); `feature_eps` is the sums' business.
pub(super) struct FavorMap {
    /// omega times the factor on x, [m, d].
    pub(super) omega: Vec<f32>,
    pub(super) head_dim: usize,
    /// The squared factor on x.
    pub(super) square: f32,
    /// Shifts cancel: c may be the maximum of the whole logit, without gradient.
    pub(super) stable: bool,
    /// Gradients flow through c.
    pub(super) through: bool,
    /// Hidden keys are zero vectors instead of absent.
    pub(super) masked_as_zero: bool,
    pub(super) mask: Mask,
}

impl FavorMap {
    fn directions(&self) -> Mat<'_> {
        Mat::new(&self.omega, self.width(), self.head_dim)
    }

    fn dots(&self, x: Rows, f: &mut [f32]) {
        gemm(MatMut::new(f, x.count, self.width()), x.mat(), self.directions().t(), 1.0, Threads::One);
    }

    /// Dots of keys; hidden keys that count get those of a zero vector.
    fn key_dots(&self, at: At, x: Rows, f: &mut [f32], halves: &mut Vec<f32>) -> Option<&[f32]> {
        self.dots(x, f);
        halves.resize(x.count, 0.0);
        half_squares(self.square, x, halves);
        let mask = self.mask.of(at, x.count);
        if let Some(mask) = mask
            && self.masked_as_zero
        {
            let m = self.width();
            for (row, _) in mask.iter().enumerate().filter(|(_, keep)| **keep == 0.0) {
                f[row * m..][..m].fill(0.0);
                halves[row] = 0.0;
            }
            return None;
        }
        mask
    }
}

impl Map for FavorMap {
    fn width(&self) -> usize {
        self.omega.len() / self.head_dim
    }

    fn queries(&self, _: At, x: Rows, f: &mut [f32], halves: &mut Vec<f32>) {
        self.dots(x, f);
        halves.resize(x.count, 0.0);
        if self.stable {
            halves.fill(0.0);
        } else {
            half_squares(self.square, x, halves);
        }
        let m = self.width();
        exp_queries(m, halves, f);
    }

    fn keys(&self, at: At, x: Rows, f: &mut [f32], halves: &mut Vec<f32>, peak: &mut Peak, fixed: bool) {
        let m = self.width();
        let mask = self.key_dots(at, x, f, halves);
        if !fixed {
            for (row, f) in f.chunks_exact(m).enumerate() {
                if mask.is_some_and(|mask| mask[row] == 0.0) {
                    continue;
                }
                let largest = largest(f) - if self.stable { halves[row] } else { 0.0 };
                if largest > peak.value {
                    let feature = position_of_largest(f);
                    *peak = Peak { value: largest, position: at.first + row, feature };
                }
            }
        }
        halves.iter_mut().for_each(|half| *half += peak.value);
        exp_keys(m, halves, mask, f);
    }

    fn causal_keys(
        &self,
        at: At,
        x: Rows,
        f: &mut [f32],
        halves: &mut Vec<f32>,
        peak: &mut Peak,
        steps: &mut [f32],
    ) {
        let m = self.width();
        let mask = self.key_dots(at, x, f, halves);
        for (row, (f, step)) in f.chunks_exact(m).zip(steps).enumerate() {
            *step = 0.0;
            if mask.is_some_and(|mask| mask[row] == 0.0) {
                continue;
            }
            let largest = largest(f) - halves[row];
            if largest > peak.value {
                // nothing is summed before the first visible key
                *step = if peak.value == f32::NEG_INFINITY { 0.0 } else { peak.value - largest };
                peak.value = largest;
            }
            halves[row] += peak.value;
        }
        exp_keys(m, halves, mask, f);
    }

    fn back(&self, side: Side, at: At, tile: Tile, dx: RowsMut, _: &mut [f32]) -> f64 {
        let (m, mut dx) = (self.width(), dx);
        let Tile { x, f, df, scratch } = tile;
        scratch.resize(x.count, 0.0);
        let through = self.through && !self.stable && side == Side::Query;
        let sums = &mut scratch[..x.count];
        logit_gradients(m, f, through, df, sums);
        if self.stable && side == Side::Query {
            sums.fill(0.0); // |q'|^2 / 2 cancels and is left out
        }
        let total = sums.iter().map(|&sum| f64::from(sum)).sum();
        gemm(dx.mat(), Mat::new(df, x.count, m), self.directions(), 1.0, Threads::One);
        subtract_scaled(self.square, sums, x, dx.reborrow());
        if side == Side::Key {
            self.mask.clear_hidden(at, dx);
        }
        total
    }

    fn back_peak(&self, feature: usize, total: f32, dx: &mut [f32]) {
        let direction = &self.omega[feature * self.head_dim..][..self.head_dim];
        dx.iter_mut().zip(direction).for_each(|(dx, omega)| *dx -= total * omega);
    }
}

fn position_of_largest(row: &[f32]) -> usize {
    let largest = row.iter().enumerate().reduce(|a, b| if b.1 > a.1 { b } else { a });
    largest.map_or(0, |(index, _)| index)
}

crate::simd_fn! { fn largest<S>(simd, row: &'a [f32]) -> f32 { math::max(simd, row) } }

crate::simd_fn! {
    /// |x'|^2 / 2 per row.
    fn half_squares<S>(simd, square: f32, x: Rows<'a>, halves: &'a mut [f32]) {
        for (row, half) in halves.iter_mut().take(x.count).enumerate() {
            *half = 0.5 * square * math::sum_map(simd, x.row(row), |x| simd.mul_f32s(x, x));
        }
    }
}

crate::simd_fn! {
    /// f = exp(f - half - max f), row by row.
    fn exp_queries<S>(simd, m: usize, halves: &'a [f32], f: &'a mut [f32]) {
        for (f, half) in f.chunks_exact_mut(m).zip(halves) {
            let shift = math::max(simd, f) + half;
            math::exp_in_place(simd, shift, f);
        }
    }
}

crate::simd_fn! {
    /// f = exp(f - shift), row by row; 0 where hidden.
    fn exp_keys<S>(simd, m: usize, shifts: &'a [f32], mask: Option<&'a [f32]>, f: &'a mut [f32]) {
        for (row, (f, &shift)) in f.chunks_exact_mut(m).zip(shifts).enumerate() {
            if mask.is_some_and(|mask| mask[row] == 0.0) {
                f.fill(0.0);
                continue;
            }
            math::exp_in_place(simd, shift, f);
        }
    }
}

crate::simd_fn! {
    /// df becomes the gradient of omega x', `sums` its sum per row (the gradient of -|x'|^2 / 2). With `through`
    /// the largest feature of a row takes the gradient of the row's shift.
    fn logit_gradients<S>(
        simd,
        m: usize,
        f: &'a [f32],
        through: bool,
        df: &'a mut [f32],
        sums: &'a mut [f32],
    ) {
        for ((df, f), sum) in df.chunks_exact_mut(m).zip(f.chunks_exact(m)).zip(sums) {
            math::update(simd, f, df, |f, df| simd.mul_f32s(f, df));
            *sum = math::sum(simd, df);
            if through {
                df[position_of_largest(f)] -= *sum;
            }
        }
    }
}

crate::simd_fn! {
    /// dx_i -= square sum_i x_i.
    fn subtract_scaled<S>(simd, square: f32, sums: &'a [f32], x: Rows<'a>, dx: RowsMut<'a>) {
        let mut dx = dx;
        for (row, sum) in sums.iter().enumerate() {
            math::axpy(simd, -square * sum, x.row(row), dx.row(row));
        }
    }
}
