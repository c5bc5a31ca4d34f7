//! The output projection with its residual as one operation.

use std::ops::Range;

#[cfg(feature = "cuda")]
use candle_core::cuda_backend::CudaStorage;
use candle_core::{CpuStorage, Layout, Result, Shape, Tensor, bail};

use super::{Scales, Weight, add_scaled, check_scales, scale_rows, vector, weight};
use crate::cpu::compact;
use crate::cpu::dense::{self, Panels, WeightGradient};
use crate::cpu::few::{self, FewRows, Layer};
use crate::cpu::gemm::Mat;
use crate::cpu::layers::Layers;
use crate::cpu::par::{self, Chunks};
use crate::cpu::{self, rows};
#[cfg(feature = "cuda")]
use crate::cuda::tensors;
use crate::group::ParamGroup;
use crate::op::{self, FusedOp, SavedOutput};

/// residual + scale (x W^T + b).
pub(super) struct Output {
    pub(super) inp: usize,
    pub(super) weight: Weight,
    pub(super) bias: Option<Range<usize>>,
    scales: Option<Vec<f32>>,
}

impl Output {
    pub(super) fn new(x: &Tensor, residual: &Tensor, group: &ParamGroup, scales: Scales) -> Result<Self> {
        let (count, inp) = cpu::matrix_dims(x.dims())?;
        let weight = weight(group, 0, inp)?;
        if residual.elem_count() != count * weight.out {
            bail!("a residual {:?} for {count} rows of {}", residual.dims(), weight.out);
        }
        let bias = (group.parts.len() > 1).then(|| vector(group, 1, weight.out)).transpose()?;
        scales.map_or(Ok(()), |scales| check_scales(scales, residual.dims()[0]))?;
        Ok(Self { inp, weight, bias, scales: scales.map(<[f32]>::to_vec) })
    }

    /// The result for few rows.
    fn forward_few(&self, x: &[f32], residual: &[f32], flat: &[f32]) -> Vec<f32> {
        let out = self.weight.out;
        let bias = self.bias.as_ref().map_or(&[][..], |bias| &flat[bias.clone()]);
        let layer = Layer { weight: &flat[self.weight.at.clone()], columns: 0..out };
        FewRows::new(x, self.inp).multiply(&[layer], out, |columns, row, y| {
            let residual = &residual[row * out..][columns.clone()];
            rows::add_row_in_place(y, bias.get(columns).unwrap_or_default());
            match &self.scales {
                None => rows::add(residual, y),
                Some(scales) => {
                    let each = x.len() / self.inp / scales.len();
                    add_scaled(residual, scales, (row, each), y.len(), y);
                }
            }
        })
    }
}

impl FusedOp for Output {
    fn name(&self) -> &'static str {
        "output"
    }

    fn forward(&self, operands: &[(&CpuStorage, &Layout)]) -> Result<(Vec<f32>, Shape)> {
        let [x, residual, flat] = cpu::slices(operands)?;
        let (inp, out) = (self.inp, self.weight.out);
        let count = residual.len() / out.max(1);
        if few::are(x.len() / inp.max(1)) {
            return Ok((self.forward_few(x, residual, flat), operands[1].1.shape().clone()));
        }
        let panels = Panels::turned(&flat[self.weight.at.clone()], out, inp);
        let size = dense::chunks(count, inp + out).size;
        let y = par::build(residual.len(), size * out, |index, y| {
            let here = index * size * out..index * size * out + y.len();
            let (residual, bias) = (&residual[here], self.bias.as_ref().map(|bias| &flat[bias.clone()]));
            match (bias, &self.scales) {
                (Some(bias), None) => rows::add_row(residual, bias, y),
                (None, None) => y.copy_from_slice(residual),
                (bias, Some(_)) => rows::add_row_in_place(y, bias.unwrap_or_default()), // of zeros
            }
            let rows = y.len() / out;
            let x = Mat::new(&x[index * size * inp..], rows, inp);
            panels.multiply(x, y, out, true);
            if let Some(scales) = &self.scales {
                add_scaled(residual, scales, (index * size, count / scales.len()), out, y);
            }
        });
        Ok((y, operands[1].1.shape().clone()))
    }

    #[cfg(feature = "cuda")]
    fn forward_cuda(&self, operands: &[(&CudaStorage, &Layout)]) -> Result<(CudaStorage, Shape)> {
        let (count, _) = cpu::matrix_dims(operands[0].1.dims())?;
        tensors::forward(operands, operands[1].1.shape(), |device, operands| {
            self.forward_on(device, operands, count)
        })
    }

    fn backward(&self, operands: &[&Tensor], _: SavedOutput, grad: &Tensor) -> Result<Vec<Option<Tensor>>> {
        let [x, _, flat] = op::operands(operands)?;
        #[cfg(feature = "cuda")]
        if x.device().is_cuda() {
            let lens = [cpu::matrix_dims(x.dims())?.0, flat.elem_count()];
            let [dx, dflat] = tensors::gradients([x, flat, grad], |device, operands| {
                self.backward_on(device, operands, lens)
            })?;
            return Ok(vec![dx, Some(grad.clone()), dflat]);
        }
        let (inp, out) = (self.inp, self.weight.out);
        let (dx, dflat) = compact::with_elements([x], [flat, grad], |[x], [flat, dy]| {
            let count = dy.len() / out.max(1);
            let scaled = self.scales.as_ref().map(|scales| {
                let size = Chunks::rows(count, out).size;
                par::build(dy.len(), size * out, |index, to| {
                    let (dy, each) = (&dy[index * size * out..], count / scales.len());
                    scale_rows(dy, scales, (index * size, each), out, to);
                })
            });
            let dy = scaled.as_deref().unwrap_or(dy);
            let weights = vec![&flat[self.weight.at.clone()]];
            let needs_bias = self.bias.is_some();
            let mut sum = WeightGradient::new(out, inp);
            let (dx, dbias) =
                Layers { inp, norm: None, weights, needs_x: true, needs_bias }.gradients(x, dy, &mut sum);
            let mut dflat = par::zeros(flat.len());
            sum.finish(&mut dflat[self.weight.at.clone()]);
            if let Some(bias) = &self.bias {
                dflat[bias.clone()].copy_from_slice(&dbias);
            }
            Ok((dx, dflat))
        })?;
        Ok(vec![cpu::gradient(x, dx)?, Some(grad.clone()), cpu::gradient(flat, dflat)?])
    }
}
