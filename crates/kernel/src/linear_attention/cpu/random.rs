//! Random features of a normalised vector on tiles (Peng et al. 2021).

use super::map::{At, Map, Mask, Peak, Side, Tile};
use super::rows::{Rows, RowsMut};
use crate::cpu::gemm::{Mat, MatMut, Threads, gemm, gemm_add};
use crate::cpu::math;
use crate::cpu::simd::Simd;
use crate::linear_attention::RandomKernel;

/// scale [sin p, cos p] or scale relu(p) with p = W x / (|x| + norm_eps).
pub(super) struct RandomMap {
    /// W [heads, p, d].
    pub(super) weight: Vec<f32>,
    /// Number of projections p.
    pub(super) projections: usize,
    pub(super) head_dim: usize,
    pub(super) kernel: RandomKernel,
    pub(super) norm_eps: f32,
    pub(super) scale: f32,
    pub(super) mask: Mask,
}

impl RandomMap {
    fn weight(&self, head: usize) -> Mat<'_> {
        let len = self.params();
        Mat::new(&self.weight[head * len..][..len], self.projections, self.head_dim)
    }

    /// W x / (|x| + norm_eps) in `scratch`.
    fn project<'a>(&self, at: At, x: Rows, scratch: &'a mut Vec<f32>) -> &'a mut [f32] {
        let (p, d) = (self.projections, self.head_dim);
        scratch.resize(x.count * (p + d), 0.0);
        let (unit, projected) = scratch.split_at_mut(x.count * d);
        normalise(self.norm_eps, x, unit);
        let out = MatMut::new(projected, x.count, p);
        gemm(out, Mat::new(unit, x.count, d), self.weight(at.head).t(), 1.0, Threads::One);
        projected
    }

    fn features(&self, at: At, x: Rows, f: &mut [f32], scratch: &mut Vec<f32>) {
        let projected = self.project(at, x, scratch);
        match self.kernel {
            RandomKernel::Gaussian => waves(self.projections, self.scale, projected, f),
            RandomKernel::ArcCos => rectify(self.scale, projected, f),
        }
    }
}

impl Map for RandomMap {
    fn width(&self) -> usize {
        match self.kernel {
            RandomKernel::Gaussian => 2 * self.projections,
            RandomKernel::ArcCos => self.projections,
        }
    }

    fn params(&self) -> usize {
        self.projections * self.head_dim
    }

    fn queries(&self, at: At, x: Rows, f: &mut [f32], scratch: &mut Vec<f32>) {
        self.features(at, x, f, scratch);
    }

    fn keys(&self, at: At, x: Rows, f: &mut [f32], scratch: &mut Vec<f32>, _: &mut Peak, _: bool) {
        self.features(at, x, f, scratch);
        self.mask
            .clear_hidden(at, RowsMut { data: f, stride: self.width(), count: x.count, width: self.width() });
    }

    fn back(&self, side: Side, at: At, tile: Tile, dx: RowsMut, dparams: &mut [f32]) -> f64 {
        let (p, d, mut dx) = (self.projections, self.head_dim, dx);
        let Tile { x, f, df, scratch } = tile;
        scratch.resize(x.count * (p + d), 0.0);
        let (unit, dp) = scratch.split_at_mut(x.count * d);
        // a hidden key has features 0, and so a gradient of 0 in the gaussian case too
        match self.kernel {
            RandomKernel::Gaussian => unwave(p, f, df, dp),
            RandomKernel::ArcCos => unrectify(self.scale, f, df, dp),
        }
        normalise(self.norm_eps, x, unit);
        let (dp, unit) = (Mat::new(dp, x.count, p), Mat::new(unit, x.count, d));
        gemm_add(MatMut::new(dparams, p, d), dp.t(), unit, 1.0, 1.0, Threads::One);
        gemm(dx.mat(), dp, self.weight(at.head), 1.0, Threads::One);
        unnormalise(self.norm_eps, x, dx.reborrow());
        if side == Side::Key {
            self.mask.clear_hidden(at, dx);
        }
        0.0
    }
}

crate::simd_fn! {
    /// unit = x / (|x| + eps), row by row.
    fn normalise<S>(simd, eps: f32, x: Rows<'a>, unit: &'a mut [f32]) {
        for (row, unit) in unit.chunks_exact_mut(x.width).take(x.count).enumerate() {
            let x = x.row(row);
            let factor = 1.0 / (math::dot(simd, x, x).sqrt() + eps);
            unit.copy_from_slice(x);
            math::scale(simd, factor, unit);
        }
    }
}

crate::simd_fn! {
    /// The gradient `dx` of x / (|x| + eps) becomes that of x.
    fn unnormalise<S>(simd, eps: f32, x: Rows<'a>, dx: RowsMut<'a>) {
        let mut dx = dx;
        for row in 0..x.count {
            let (x, dx) = (x.row(row), dx.row(row));
            let norm = math::dot(simd, x, x).sqrt();
            let factor = 1.0 / (norm + eps);
            math::scale(simd, factor, dx);
            if norm > 0.0 {
                let along = math::dot(simd, x, dx) / norm;
                math::axpy(simd, -along * factor, x, dx);
            }
        }
    }
}

crate::simd_fn! {
    /// f = scale [sin p, cos p], row by row.
    fn waves<S>(simd, width: usize, scale: f32, p: &'a [f32], f: &'a mut [f32]) {
        let scale = simd.splat_f32s(scale);
        for (p, f) in p.chunks_exact(width).zip(f.chunks_exact_mut(2 * width)) {
            let (sin, cos) = f.split_at_mut(width);
            for at in (0..width).step_by(S::F32_LANES) {
                let (s, c) = sin_cos(simd, math::load(simd, p, at));
                math::store(simd, sin, at, simd.mul_f32s(s, scale));
                math::store(simd, cos, at, simd.mul_f32s(c, scale));
            }
        }
    }
}

crate::simd_fn! {
    /// dp = d_sin f_cos - d_cos f_sin, row by row.
    fn unwave<S>(simd, width: usize, f: &'a [f32], df: &'a [f32], dp: &'a mut [f32]) {
        let rows = f.chunks_exact(2 * width).zip(df.chunks_exact(2 * width)).zip(dp.chunks_exact_mut(width));
        for ((f, df), dp) in rows {
            let ((sin, cos), (d_sin, d_cos)) = (f.split_at(width), df.split_at(width));
            for at in (0..width).step_by(S::F32_LANES) {
                let of_sin = simd.mul_f32s(math::load(simd, cos, at), math::load(simd, d_sin, at));
                let (sin, d_cos) = (math::load(simd, sin, at), math::load(simd, d_cos, at));
                math::store(simd, dp, at, simd.negate_mul_add_e_f32s(sin, d_cos, of_sin));
            }
        }
    }
}

crate::simd_fn! {
    /// f = scale max(p, 0).
    fn rectify<S>(simd, scale: f32, p: &'a [f32], f: &'a mut [f32]) {
        let (zero, scale) = (simd.splat_f32s(0.0), simd.splat_f32s(scale));
        math::map(simd, p, f, |p| simd.mul_f32s(simd.max_f32s(p, zero), scale));
    }
}

crate::simd_fn! {
    /// dp = scale df where f > 0, else 0.
    fn unrectify<S>(simd, scale: f32, f: &'a [f32], df: &'a [f32], dp: &'a mut [f32]) {
        let (zero, scale) = (simd.splat_f32s(0.0), simd.splat_f32s(scale));
        dp.copy_from_slice(df);
        math::update(simd, f, dp, |f, dp| {
            simd.select_f32s(simd.greater_than_f32s(f, zero), simd.mul_f32s(dp, scale), zero)
        });
    }
}

/// Sine and cosine within 2e-7 for |x| up to 2^15; beyond, what rounding of x leaves has no meaning, but the
/// results stay within [-1, 1].
#[inline(always)]
fn sin_cos<S: Simd>(simd: S, x: S::f32s) -> (S::f32s, S::f32s) {
    let splat = |value| simd.splat_f32s(value);
    // x = n pi / 2 + r, |r| <= pi / 4; adding 1.5 * 2^23 rounds n to an integer in the low bits
    let limit = splat(32_768.0);
    let x = simd.max_f32s(simd.min_f32s(x, limit), simd.sub_f32s(splat(0.0), limit));
    let round = splat(12_582_912.0);
    let shifted = simd.mul_add_e_f32s(x, splat(std::f32::consts::FRAC_2_PI), round);
    let n = simd.sub_f32s(shifted, round);
    let mut r = x;
    for part in [1.570_312_5, 4.837_513e-4, 7.549_79e-8] {
        r = simd.negate_mul_add_e_f32s(n, splat(part), r);
    }
    let z = simd.mul_f32s(r, r);
    let mut s = splat(-1.951_529_6e-4);
    for c in [8.332_161e-3, -1.666_665_5e-1] {
        s = simd.mul_add_e_f32s(s, z, splat(c));
    }
    let s = simd.mul_add_e_f32s(simd.mul_f32s(s, z), r, r);
    let mut c = splat(2.443_315_7e-5);
    for k in [-1.388_731_6e-3, 4.166_664_6e-2, -0.5] {
        c = simd.mul_add_e_f32s(c, z, splat(k));
    }
    let c = simd.mul_add_e_f32s(c, z, splat(1.0));
    // quarter turns: odd ones swap, the sign bit comes from bit 1 of n (sine) and of n + 1 (cosine)
    let turns = simd.transmute_u32s_f32s(shifted);
    let one = simd.splat_u32s(1);
    let odd = simd.greater_than_u32s(simd.and_u32s(turns, one), simd.splat_u32s(0));
    let two = simd.splat_u32s(2);
    let sign = |turns| simd.wrapping_dyn_shl_u32s(simd.and_u32s(turns, two), simd.splat_u32s(30));
    let flip = |x, turns| {
        let bits = simd.transmute_u32s_f32s(x);
        simd.transmute_f32s_u32s(simd.xor_u32s(bits, sign(turns)))
    };
    let sine = flip(simd.select_f32s(odd, c, s), turns);
    let cosine = flip(simd.select_f32s(odd, s, c), simd.add_u32s(turns, one));
    (sine, cosine)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sine_and_cosine_are_exact_to_two_in_ten_million() {
        for (low, high) in [(-10.0, 10.0), (-300.0, 300.0), (-30_000.0, 30_000.0)] {
            let x: Vec<f32> = (0..100_003).map(|i| low + (high - low) * i as f32 / 100_002.0).collect();
            let mut f = vec![0.0; 2 * x.len()];
            waves(x.len(), 1.0, &x, &mut f);
            for (i, &x) in x.iter().enumerate() {
                let (sin, cos) = f64::from(x).sin_cos();
                let (s, c) = (f64::from(f[i]), f64::from(f[100_003 + i]));
                assert!((s - sin).abs() < 2e-7 && (c - cos).abs() < 2e-7, "{x}: {s} {sin}, {c} {cos}");
            }
        }
    }

    #[test]
    fn sine_and_cosine_of_extremes_are_bounded() {
        let x = [f32::MAX, f32::MIN, 1e9, 0.0];
        let mut f = [9.0; 8];
        waves(4, 1.0, &x, &mut f);
        assert!(f.iter().all(|f| f.abs() <= 1.0001), "{f:?}");
        assert_eq!((f[3], f[7]), (0.0, 1.0));
    }
}
