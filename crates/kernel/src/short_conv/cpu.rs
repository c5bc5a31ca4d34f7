//! The convolution on the CPU, in parallel over chunks of positions. The backward pass computes the sums before SiLU again.

use std::ops::Range;

use candle_core::{CpuStorage, Layout, Result, Shape, Tensor};

use crate::cpu;
use crate::cpu::math::{self, load, store};
use crate::cpu::par::{self, Chunks};
use crate::cpu::sample_rows::build_rows;
use crate::op::{self, FusedOp, SavedOutput};
use crate::simd_fn;

pub(super) struct Conv {
    pub silu: bool,
}

impl FusedOp for Conv {
    fn name(&self) -> &'static str {
        "short-conv"
    }

    fn forward(&self, operands: &[(&CpuStorage, &Layout)]) -> Result<(Vec<f32>, Shape)> {
        let [x, taps, bias] = cpu::slices(operands)?;
        let (b, n, e) = operands[0].1.shape().dims3()?;
        let rows = Chunks::rows(n, 2 * e);
        let (y, _) = build_rows(
            b,
            rows,
            e,
            || (),
            |(), sample, range, y| {
                sums(&x[sample * n * e..][..n * e], taps, bias, range.start, y);
                if self.silu {
                    silu(y);
                }
            },
        );
        Ok((y, (b, n, e).into()))
    }

    fn backward(&self, operands: &[&Tensor], _: SavedOutput, grad: &Tensor) -> Result<Vec<Option<Tensor>>> {
        let [x, taps, bias] = op::operands(operands)?;
        let (b, n, e) = x.dims3()?;
        let count = taps.dim(0)?;
        let rows = Chunks::rows(n, 4 * e);
        let (dx, mut sums) = cpu::with_slices([x, taps, bias, grad], |[x, taps, bias, dy]| {
            let room = (rows.size + count - 1) * e;
            let (dx, parts) = build_rows(
                b,
                rows,
                e,
                || par::scratch(room),
                |dz, sample, range, dx| {
                    let sample = sample * n * e..(sample + 1) * n * e;
                    let (x, dy) = (&x[sample.clone()], &dy[sample]);
                    // gradients of the sums that the rows of this chunk are in
                    let reach = range.start..(range.end + count - 1).min(n);
                    let dz = &mut dz[..reach.len() * e];
                    self.gradient_of_sums(x, taps, bias, dy, reach, dz);
                    add_turned(dz, taps, e, dx);
                    let mut part = vec![0.0; (count + 1) * e];
                    parameter_gradients(x, &dz[..range.len() * e], e, range, &mut part);
                    part
                },
            );
            Ok((dx, par::sum_parts(&parts.concat(), (count + 1) * e)))
        })?;
        let dbias = sums.split_off(count * e);
        Ok(vec![cpu::gradient(x, dx)?, cpu::gradient(taps, sums)?, cpu::gradient(bias, dbias)?])
    }
}

impl Conv {
    fn gradient_of_sums(
        &self,
        x: &[f32],
        taps: &[f32],
        bias: &[f32],
        dy: &[f32],
        rows: Range<usize>,
        dz: &mut [f32],
    ) {
        let dy = &dy[rows.start * bias.len()..][..dz.len()];
        if self.silu {
            sums(x, taps, bias, rows.start, dz);
            silu_backward(dy, dz);
        } else {
            dz.copy_from_slice(dy);
        }
    }
}

simd_fn! {
    /// The convolution of `x` [n, e] at the positions from `first` on that `y` has room for.
    fn sums<S>(simd, x: &'a [f32], taps: &'a [f32], bias: &'a [f32], first: usize, y: &'a mut [f32]) {
        let e = bias.len();
        let count = taps.len() / e.max(1);
        for (row, y) in y.chunks_exact_mut(e.max(1)).enumerate() {
            let row = first + row;
            let missing = (count - 1).saturating_sub(row);
            let (taps, x) = (&taps[missing * e..], &x[(row + missing + 1 - count) * e..(row + 1) * e]);
            for at in (0..e).step_by(S::F32_LANES) {
                let mut sum = load(simd, bias, at);
                for (tap, x) in taps.chunks_exact(e).zip(x.chunks_exact(e)) {
                    sum = simd.mul_add_e_f32s(load(simd, tap, at), load(simd, x, at), sum);
                }
                store(simd, y, at, sum);
            }
        }
    }
}

simd_fn! {
    /// y becomes y sigmoid(y).
    fn silu<S>(simd, y: &'a mut [f32]) {
        let one = simd.splat_f32s(1.0);
        math::map_in_place(simd, y, #[inline(always)] |y| {
            simd.div_f32s(y, simd.add_f32s(one, math::exp(simd, simd.neg_f32s(y))))
        });
    }
}

simd_fn! {
    /// z becomes dy times the derivative of SiLU at z.
    fn silu_backward<S>(simd, dy: &'a [f32], z: &'a mut [f32]) {
        let one = simd.splat_f32s(1.0);
        math::update(simd, dy, z, #[inline(always)] |dy, z| {
            let tail = math::exp(simd, simd.neg_f32s(z));
            let share = simd.div_f32s(one, simd.add_f32s(one, tail));
            // share + z share (1 - share)
            let bend = simd.mul_f32s(z, simd.sub_f32s(one, share));
            simd.mul_f32s(dy, simd.mul_add_e_f32s(share, bend, share))
        });
    }
}

simd_fn! {
    /// Adds to every row of `dx` the rows of `dz` from its own on, each with its tap: the last tap with its own.
    fn add_turned<S>(simd, dz: &'a [f32], taps: &'a [f32], e: usize, dx: &'a mut [f32]) {
        let e = e.max(1);
        for (row, dx) in dx.chunks_exact_mut(e).enumerate() {
            let dz = &dz[row * e..];
            for at in (0..e).step_by(S::F32_LANES) {
                let mut sum = load(simd, dx, at);
                for (tap, dz) in taps.chunks_exact(e).rev().zip(dz.chunks_exact(e)) {
                    sum = simd.mul_add_e_f32s(load(simd, tap, at), load(simd, dz, at), sum);
                }
                store(simd, dx, at, sum);
            }
        }
    }
}

simd_fn! {
    /// Adds to `part` the gradients of taps, then of the bias, for the gradients `dz` of the sums at `rows`.
    fn parameter_gradients<S>(
        simd, x: &'a [f32], dz: &'a [f32], e: usize, rows: Range<usize>, part: &'a mut [f32],
    ) {
        let e = e.max(1);
        let count = part.len() / e - 1;
        for (row, dz) in rows.zip(dz.chunks_exact(e)) {
            let missing = (count - 1).saturating_sub(row);
            let x = &x[(row + missing + 1 - count) * e..(row + 1) * e];
            for (sum, x) in part[missing * e..].chunks_exact_mut(e).zip(x.chunks_exact(e)) {
                for at in (0..e).step_by(S::F32_LANES) {
                    let product = simd.mul_add_e_f32s(load(simd, x, at), load(simd, dz, at), load(simd, sum, at));
                    store(simd, sum, at, product);
                }
            }
            math::add(simd, dz, &mut part[count * e..]);
        }
    }
}
