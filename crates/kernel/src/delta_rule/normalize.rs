//! What DeltaNet does to queries, keys and values first: SiLU, and queries and keys divided by their length.

use std::ops::Range;

#[cfg(feature = "cuda")]
use candle_core::cuda_backend::CudaStorage;
use candle_core::{CpuStorage, D, Layout, Result, Shape, Tensor};
use pulp::Simd;

#[cfg(feature = "cuda")]
use super::cuda::normalize::Sizes;
use super::{DeltaRows, NormalizeConfig};
use crate::cpu::{self, math, par, par::Chunks};
#[cfg(feature = "cuda")]
use crate::cuda::tensors;
use crate::op::{self, FusedOp, SavedOutput};
use crate::{fused, tape};

/// Queries and keys x / sqrt(sum x^2 + eps) per head, after the activations; queries times `query_scale`.
pub fn normalize(rows: &DeltaRows, config: &NormalizeConfig) -> Result<DeltaRows> {
    rows.check()?;
    let out = if fused(&rows.rows) {
        let DeltaRows { heads, key_width, value_width, .. } = *rows;
        let op = Normalize { heads, key_width, value_width, config: *config };
        tape::apply(&[&rows.rows.contiguous()?], op)?
    } else {
        composed(rows, config)?
    };
    Ok(rows.with_rows(out))
}

/// The definition in plain candle operations.
fn composed(rows: &DeltaRows, config: &NormalizeConfig) -> Result<Tensor> {
    let (b, n, _) = rows.rows.dims3()?;
    let (h, dk, d) = (rows.heads, rows.key_width, rows.value_width);
    let part = |start: usize, width: usize, silu: bool| -> Result<Tensor> {
        let x = rows.rows.narrow(2, start, h * width)?.reshape((b, n, h, width))?;
        if silu { x.silu() } else { Ok(x) }
    };
    let unit = |x: Tensor, scale: f64| -> Result<Tensor> {
        let length = (x.sqr()?.sum_keepdim(D::Minus1)? + config.eps)?.sqrt()?;
        (x.broadcast_div(&length)? * scale)?.flatten_from(2)
    };
    let q = unit(part(0, dk, config.silu_qk)?, config.query_scale)?;
    let k = unit(part(h * dk, dk, config.silu_qk)?, 1.0)?;
    Tensor::cat(&[q, k, part(2 * h * dk, d, config.silu_v)?.flatten_from(2)?], 2)
}

struct Normalize {
    heads: usize,
    key_width: usize,
    value_width: usize,
    config: NormalizeConfig,
}

impl Normalize {
    fn width(&self) -> usize {
        self.heads * (2 * self.key_width + self.value_width)
    }

    #[cfg(feature = "cuda")]
    fn sizes(&self, shape: &Shape) -> Sizes {
        let Self { heads, key_width, value_width, .. } = *self;
        Sizes { rows: shape.elem_count() / self.width(), heads, key_width, value_width }
    }

    /// The vectors of a row with the factor on queries and keys; `None` for the values.
    fn parts(&self) -> Vec<(Range<usize>, Option<f32>)> {
        let (h, dk) = (self.heads, self.key_width);
        let scale = |index: usize| if index < h { self.config.query_scale as f32 } else { 1.0 };
        let unit = (0..2 * h).map(|index| (index * dk..(index + 1) * dk, Some(scale(index))));
        unit.chain([(2 * h * dk..self.width(), None)]).collect()
    }
}

impl FusedOp for Normalize {
    fn name(&self) -> &'static str {
        "delta-normalize"
    }

    fn forward(&self, operands: &[(&CpuStorage, &Layout)]) -> Result<(Vec<f32>, Shape)> {
        let [x] = cpu::slices(operands)?;
        let NormalizeConfig { silu_qk, silu_v, eps, .. } = self.config;
        let (width, parts) = (self.width(), self.parts());
        let chunk = Chunks::rows(x.len() / width, width).size * width;
        let y = par::build(x.len(), chunk, |index, y| {
            let x = &x[index * chunk..][..y.len()];
            for (x, y) in x.chunks_exact(width).zip(y.chunks_exact_mut(width)) {
                for (at, scale) in parts.iter().cloned() {
                    let (x, y) = (&x[at.clone()], &mut y[at]);
                    match scale {
                        Some(scale) => unit(silu_qk, eps as f32, scale, x, y),
                        None => activate(silu_v, x, y),
                    }
                }
            }
        });
        Ok((y, operands[0].1.shape().clone()))
    }

    #[cfg(feature = "cuda")]
    fn forward_cuda(&self, operands: &[(&CudaStorage, &Layout)]) -> Result<(CudaStorage, Shape)> {
        let shape = operands[0].1.shape().clone();
        let sizes = self.sizes(&shape);
        tensors::forward(operands, shape, |device, [x]| sizes.forward(device, x, &self.config))
    }

    fn backward(&self, operands: &[&Tensor], _: SavedOutput, grad: &Tensor) -> Result<Vec<Option<Tensor>>> {
        let [x] = op::operands(operands)?;
        #[cfg(feature = "cuda")]
        if x.device().is_cuda() {
            let sizes = self.sizes(x.shape());
            return tensors::with_views([x, grad], |device, views| {
                let dx = sizes.backward(device, views, &self.config)?;
                Ok(vec![Some(tensors::tensor(device, dx, x.shape()))])
            });
        }
        let NormalizeConfig { silu_qk, silu_v, eps, .. } = self.config;
        let (width, parts) = (self.width(), self.parts());
        let dx = cpu::with_slices([x, grad], |[x, dy]| {
            let chunk = Chunks::rows(x.len() / width, width).size * width;
            Ok(par::build(x.len(), chunk, |index, dx| {
                let at = index * chunk..index * chunk + dx.len();
                let rows = x[at.clone()].chunks_exact(width).zip(dy[at].chunks_exact(width));
                for ((x, dy), dx) in rows.zip(dx.chunks_exact_mut(width)) {
                    for (at, scale) in parts.iter().cloned() {
                        let (x, dy, dx) = (&x[at.clone()], &dy[at.clone()], &mut dx[at]);
                        match scale {
                            Some(scale) => unit_backward(silu_qk, eps as f32, scale, x, dy, dx),
                            None => activate_backward(silu_v, x, dy, dx),
                        }
                    }
                }
            }))
        })?;
        Ok(vec![cpu::gradient(x, dx)?])
    }
}

/// x sigmoid(x) and its derivative.
#[inline(always)]
fn silu<S: Simd>(simd: S, x: S::f32s) -> (S::f32s, S::f32s) {
    let one = simd.splat_f32s(1.0);
    let share = simd.div_f32s(one, simd.add_f32s(one, math::exp(simd, simd.neg_f32s(x))));
    let y = simd.mul_f32s(x, share);
    (y, simd.mul_add_e_f32s(y, simd.sub_f32s(one, share), share))
}

crate::simd_fn! {
    /// y = silu(x), or x.
    fn activate<S>(simd, active: bool, x: &'a [f32], y: &'a mut [f32]) {
        if active {
            math::map(simd, x, y, #[inline(always)] |x| silu(simd, x).0);
        } else {
            y.copy_from_slice(x);
        }
    }
}

crate::simd_fn! {
    /// dx = dy silu'(x), or dy.
    fn activate_backward<S>(simd, active: bool, x: &'a [f32], dy: &'a [f32], dx: &'a mut [f32]) {
        dx.copy_from_slice(dy);
        if active {
            math::update(simd, x, dx, #[inline(always)] |x, dx| simd.mul_f32s(dx, silu(simd, x).1));
        }
    }
}

crate::simd_fn! {
    /// y = scale a / sqrt(a . a + eps) with a = silu(x), or x.
    fn unit<S>(simd, active: bool, eps: f32, scale: f32, x: &'a [f32], y: &'a mut [f32]) {
        if active {
            math::map(simd, x, y, #[inline(always)] |x| silu(simd, x).0);
        } else {
            y.copy_from_slice(x);
        }
        let length = (math::dot(simd, y, y) + eps).sqrt();
        math::scale(simd, scale / length, y);
    }
}

crate::simd_fn! {
    /// The gradient of [`unit`].
    fn unit_backward<S>(
        simd,
        active: bool,
        eps: f32,
        scale: f32,
        x: &'a [f32],
        dy: &'a [f32],
        dx: &'a mut [f32],
    ) {
        if active {
            math::map(simd, x, dx, #[inline(always)] |x| silu(simd, x).0);
        } else {
            dx.copy_from_slice(x);
        }
        let inverse = 1.0 / (math::dot(simd, dx, dx) + eps).sqrt();
        // scale (dy - a (a . dy) / length^2) / length
        let along = simd.splat_f32s(-scale * inverse * inverse * inverse * math::dot(simd, dx, dy));
        let factor = simd.splat_f32s(scale * inverse);
        math::update(
            simd,
            dy,
            dx,
            #[inline(always)]
            |dy, a| simd.mul_add_e_f32s(a, along, simd.mul_f32s(factor, dy)),
        );
        if active {
            math::update(simd, x, dx, #[inline(always)] |x, dx| simd.mul_f32s(dx, silu(simd, x).1));
        }
    }
}
