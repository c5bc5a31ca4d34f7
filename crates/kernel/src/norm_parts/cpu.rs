//! The fused CPU kernel of [`super::norm_parts`], forward and backward.

use candle_core::{CpuStorage, Layout, Result, Shape, Tensor};
use pulp::Simd;

use crate::cpu::compact::{self, Elements};
use crate::cpu::{self, math, par};
use crate::norm::EPS;
use crate::op::{self, FusedOp, SavedOutput};

/// Rows handled as one piece of work.
const CHUNK: usize = 256;

/// LayerNorm over some parts of packed rows.
pub struct NormParts {
    /// Width of a part.
    pub width: usize,
    /// Whether each part of a row is normalised.
    pub parts: Vec<bool>,
    /// Per row: 0 where nothing of it may show.
    pub mask: Option<Vec<f32>>,
}

impl NormParts {
    /// How `len` numbers from row `first` on are divided.
    fn spec(&self, first: usize, len: usize) -> Spec<'_> {
        let rows = len / (self.width * self.parts.len());
        let mask = self.mask.as_ref().map(|mask| &mask[first..first + rows]);
        Spec { width: self.width, parts: &self.parts, mask, eps: EPS as f32 }
    }

    fn backward(&self, x: Elements, flat: &[f32], grad: &[f32]) -> (Vec<f32>, Vec<f32>) {
        let (stride, params) = (self.width * self.parts.len(), 2 * self.width);
        let chunks = (x.count() / stride).div_ceil(CHUNK);
        let (dx, partial) = par::build_two(
            (x.count(), CHUNK * stride),
            (chunks * params, params),
            || par::scratch(x.room(CHUNK * stride)),
            |room, index, dx, dparams| {
                let at = index * CHUNK * stride;
                let (x, grad) = (x.read(at..at + dx.len(), room), &grad[at..at + dx.len()]);
                backward_rows(self.spec(index * CHUNK, dx.len()), x, flat, grad, dx, dparams);
            },
        );
        let mut total = vec![0.0; params];
        for partial in partial.chunks_exact(params) {
            total.iter_mut().zip(partial).for_each(|(total, part)| *total += part);
        }
        (dx, total)
    }
}

impl FusedOp for NormParts {
    fn name(&self) -> &'static str {
        "norm-parts"
    }

    fn forward(&self, operands: &[(&CpuStorage, &Layout)]) -> Result<(Vec<f32>, Shape)> {
        let [x, flat] = cpu::slices(operands)?;
        let stride = self.width * self.parts.len();
        let y = par::build(x.len(), CHUNK * stride, |index, y| {
            let at = index * CHUNK * stride;
            forward_rows(self.spec(index * CHUNK, y.len()), &x[at..at + y.len()], flat, y);
        });
        Ok((y, operands[0].1.shape().clone()))
    }

    fn backward(&self, operands: &[&Tensor], _: SavedOutput, grad: &Tensor) -> Result<Vec<Option<Tensor>>> {
        let [x, flat] = op::operands(operands)?;
        let (dx, dflat) =
            compact::with_elements([x], [flat, grad], |[x], [flat, grad]| Ok(self.backward(x, flat, grad)))?;
        Ok(vec![cpu::gradient(x, dx)?, cpu::gradient(flat, dflat)?])
    }
}

/// Zeros in place of hidden rows, in the result and in the gradient.
pub struct Hide {
    /// Width of a row.
    pub width: usize,
    /// Per row: 0 where nothing of it may show.
    pub mask: Vec<f32>,
}

impl Hide {
    fn apply(&self, x: &[f32]) -> Vec<f32> {
        par::build(x.len(), CHUNK * self.width, |index, y| {
            let first = index * CHUNK;
            let x = x[first * self.width..].chunks_exact(self.width);
            for ((y, x), &keep) in y.chunks_exact_mut(self.width).zip(x).zip(&self.mask[first..]) {
                if keep != 0.0 {
                    y.copy_from_slice(x);
                }
            }
        })
    }
}

impl FusedOp for Hide {
    fn name(&self) -> &'static str {
        "hide-rows"
    }

    fn forward(&self, operands: &[(&CpuStorage, &Layout)]) -> Result<(Vec<f32>, Shape)> {
        let [x] = cpu::slices(operands)?;
        Ok((self.apply(x), operands[0].1.shape().clone()))
    }

    fn backward(&self, _: &[&Tensor], _: SavedOutput, grad: &Tensor) -> Result<Vec<Option<Tensor>>> {
        Ok(vec![cpu::gradient(grad, cpu::with_slices([grad], |[grad]| Ok(self.apply(grad)))?)?])
    }
}

/// How rows are divided.
#[derive(Clone, Copy)]
struct Spec<'a> {
    width: usize,
    parts: &'a [bool],
    mask: Option<&'a [f32]>,
    eps: f32,
}

/// Mean and reciprocal standard deviation; `centred` is scratch of the length of `x`.
#[inline(always)]
fn statistics<S: Simd>(simd: S, x: &[f32], eps: f32, centred: &mut [f32]) -> (f32, f32) {
    let count = x.len() as f32;
    let mean = math::sum(simd, x) / count;
    let shift = simd.splat_f32s(mean);
    math::map(
        simd,
        x,
        centred,
        #[inline(always)]
        |x| simd.sub_f32s(x, shift),
    );
    let variance = math::sum_map(
        simd,
        centred,
        #[inline(always)]
        |x| simd.mul_f32s(x, x),
    ) / count;
    (mean, 1.0 / (variance + eps).sqrt())
}

crate::simd_fn! {
    /// The rows of `x` with their parts normalised; `y` holds zeros before. `params` = [weight | bias].
    fn forward_rows<S>(simd, spec: Spec<'a>, x: &'a [f32], params: &'a [f32], y: &'a mut [f32]) {
        let (width, stride) = (spec.width, spec.width * spec.parts.len());
        let (weight, bias) = params[..2 * width].split_at(width);
        for (row, (x, y)) in x.chunks_exact(stride).zip(y.chunks_exact_mut(stride)).enumerate() {
            if spec.mask.is_some_and(|mask| mask[row] == 0.0) {
                continue;
            }
            let parts = x.chunks_exact(width).zip(y.chunks_exact_mut(width)).zip(spec.parts);
            for ((x, y), &normalised) in parts {
                if normalised {
                    let (_, scale) = statistics(simd, x, spec.eps, y);
                    affine(simd, scale, weight, bias, y);
                } else {
                    y.copy_from_slice(x);
                }
            }
        }
    }
}

/// y = y * scale * weight + bias.
#[inline(always)]
fn affine<S: Simd>(simd: S, scale: f32, weight: &[f32], bias: &[f32], y: &mut [f32]) {
    let scale = simd.splat_f32s(scale);
    let (weight, weight_tail) = S::as_simd_f32s(weight);
    let (bias, bias_tail) = S::as_simd_f32s(bias);
    let (y, y_tail) = S::as_mut_simd_f32s(y);
    let step = |y, w, b| simd.mul_add_e_f32s(simd.mul_f32s(y, scale), w, b);
    for ((y, &w), &b) in y.iter_mut().zip(weight).zip(bias) {
        *y = step(*y, w, b);
    }
    if !y_tail.is_empty() {
        let last = step(
            simd.partial_load_f32s(y_tail),
            simd.partial_load_f32s(weight_tail),
            simd.partial_load_f32s(bias_tail),
        );
        simd.partial_store_f32s(y_tail, last);
    }
}

crate::simd_fn! {
    /// Gradient of [`forward_rows`]: `dx` (zeros before) and, added up, `dparams` = [dweight | dbias].
    fn backward_rows<S>(
        simd, spec: Spec<'a>, x: &'a [f32], params: &'a [f32], grad: &'a [f32], dx: &'a mut [f32],
        dparams: &'a mut [f32],
    ) {
        let (width, stride) = (spec.width, spec.width * spec.parts.len());
        let weight = &params[..width];
        let (dweight, dbias) = dparams[..2 * width].split_at_mut(width);
        let rows = x.chunks_exact(stride).zip(grad.chunks_exact(stride)).zip(dx.chunks_exact_mut(stride));
        for (row, ((x, grad), dx)) in rows.enumerate() {
            if spec.mask.is_some_and(|mask| mask[row] == 0.0) {
                continue;
            }
            let parts = x.chunks_exact(width).zip(grad.chunks_exact(width)).zip(dx.chunks_exact_mut(width));
            for (((x, grad), dx), &normalised) in parts.zip(spec.parts) {
                if normalised {
                    let (_, scale) = statistics(simd, x, spec.eps, dx);
                    backward_row(simd, scale, weight, grad, dx, dweight, dbias);
                } else {
                    dx.copy_from_slice(grad);
                }
            }
        }
    }
}

/// With `dx` = x - mean on entry: dx = scale (g w - mean(g w) - xhat mean(g w xhat)), xhat = scale (x - mean);
/// dweight += g xhat, dbias += g.
#[inline(always)]
fn backward_row<S: Simd>(
    simd: S,
    scale: f32,
    weight: &[f32],
    grad: &[f32],
    dx: &mut [f32],
    dweight: &mut [f32],
    dbias: &mut [f32],
) {
    let count = dx.len() as f32;
    math::scale(simd, scale, dx);
    math::add(simd, grad, dbias);
    let (mut sum, mut moment) = (simd.splat_f32s(0.0), simd.splat_f32s(0.0));
    let (w, w_tail) = S::as_simd_f32s(weight);
    let (g, g_tail) = S::as_simd_f32s(grad);
    let (dw, dw_tail) = S::as_mut_simd_f32s(dweight);
    let (xhat, xhat_tail) = S::as_mut_simd_f32s(dx);
    for (((&w, &g), &x), dw) in w.iter().zip(g).zip(&*xhat).zip(dw) {
        let gw = simd.mul_f32s(g, w);
        sum = simd.add_f32s(sum, gw);
        moment = simd.mul_add_e_f32s(gw, x, moment);
        *dw = simd.mul_add_e_f32s(g, x, *dw);
    }
    let (w_last, g_last) = (simd.partial_load_f32s(w_tail), simd.partial_load_f32s(g_tail));
    if !w_tail.is_empty() {
        let (gw, x) = (simd.mul_f32s(g_last, w_last), simd.partial_load_f32s(xhat_tail));
        sum = simd.add_f32s(sum, gw);
        moment = simd.mul_add_e_f32s(gw, x, moment);
        let last = simd.mul_add_e_f32s(g_last, x, simd.partial_load_f32s(dw_tail));
        simd.partial_store_f32s(dw_tail, last);
    }
    let mean = simd.splat_f32s(simd.reduce_sum_f32s(sum) / count);
    let moment = simd.splat_f32s(simd.reduce_sum_f32s(moment) / count);
    let scale = simd.splat_f32s(scale);
    let step = |g, w, x| {
        let rest = simd.negate_mul_add_e_f32s(x, moment, simd.sub_f32s(simd.mul_f32s(g, w), mean));
        simd.mul_f32s(rest, scale)
    };
    for ((&w, &g), x) in w.iter().zip(g).zip(xhat) {
        *x = step(g, w, *x);
    }
    if !w_tail.is_empty() {
        let last = step(g_last, w_last, simd.partial_load_f32s(xhat_tail));
        simd.partial_store_f32s(xhat_tail, last);
    }
}
