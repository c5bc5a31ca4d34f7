//! Layer normalisation over the last dimension: biased variance, affine.

use candle_core::{CpuStorage, CustomOp3, D, Device, Layout, Result, Shape, Tensor, bail};

#[cfg(feature = "cuda")]
use candle_core::cuda_backend::CudaStorage;

use super::cpu::{self, par, par::Chunks, rows};
#[cfg(feature = "cuda")]
use super::cuda::{rows as device_rows, tensors};
use super::tape;

/// Epsilon of every LayerNorm in the specifications.
pub const EPS: f64 = 1e-5;

/// (x - mean) / sqrt(var + eps) * weight + bias over the last dimension; `weight` and `bias` `[d]`.
///
/// # Errors
/// Shapes that do not fit.
pub fn layer_norm(x: &Tensor, weight: &Tensor, bias: &Tensor, eps: f64) -> Result<Tensor> {
    if super::fused(x) {
        return tape::apply3(&x.contiguous()?, &weight.contiguous()?, &bias.contiguous()?, LayerNorm { eps });
    }
    composed(x, weight, bias, eps)
}

/// The definition in plain candle operations.
///
/// # Errors
/// Shapes that do not fit.
pub fn composed(x: &Tensor, weight: &Tensor, bias: &Tensor, eps: f64) -> Result<Tensor> {
    let centred = x.broadcast_sub(&x.mean_keepdim(D::Minus1)?)?;
    let variance = centred.sqr()?.mean_keepdim(D::Minus1)?;
    let normal = centred.broadcast_div(&(variance + eps)?.sqrt()?)?;
    normal.broadcast_mul(weight)?.broadcast_add(bias)
}

struct LayerNorm {
    eps: f64,
}

impl LayerNorm {
    /// Number of rows and their width.
    fn dims(layout: &Layout, weight: &Layout, bias: &Layout) -> Result<[usize; 2]> {
        let (count, width) = cpu::matrix_dims(layout.dims())?;
        if weight.dims() != [width] || bias.dims() != [width] {
            bail!("weight {:?} and bias {:?} for rows of {width}", weight.dims(), bias.dims());
        }
        Ok([count, width])
    }

    #[cfg(feature = "cuda")]
    fn cuda_backward(&self, x: &Tensor, weight: &Tensor, grad: &Tensor) -> Result<[Tensor; 3]> {
        let (count, width) = cpu::matrix_dims(x.dims())?;
        tensors::with_views([x, weight, grad], |device, operands| {
            let [dx, parameters] =
                device_rows::layer_norm_backward(device, operands, [count, width], self.eps as f32)?;
            let parameters = tensors::tensor(device, parameters, 2 * width);
            let part = |start| parameters.narrow(0, start, width);
            Ok([tensors::tensor(device, dx, x.shape()), part(0)?, part(width)?])
        })
    }
}

impl CustomOp3 for LayerNorm {
    fn name(&self) -> &'static str {
        "layer-norm"
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        layout: &Layout,
        weight: &CpuStorage,
        weight_layout: &Layout,
        bias: &CpuStorage,
        bias_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let (x, weight) = (cpu::slice(x, layout)?, cpu::slice(weight, weight_layout)?);
        let bias = cpu::slice(bias, bias_layout)?;
        let [count, width] = Self::dims(layout, weight_layout, bias_layout)?;
        let chunk = Chunks::rows(count, width).size * width;
        let y = par::build(x.len(), chunk, |index, y| {
            rows::layer_norm(&x[index * chunk..][..y.len()], weight, bias, self.eps as f32, y);
        });
        Ok((CpuStorage::F32(y), layout.shape().clone()))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        x: &CudaStorage,
        layout: &Layout,
        weight: &CudaStorage,
        weight_layout: &Layout,
        bias: &CudaStorage,
        bias_layout: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        let dims = Self::dims(layout, weight_layout, bias_layout)?;
        let operands = [(x, layout), (weight, weight_layout), (bias, bias_layout)];
        tensors::forward(operands, layout.shape(), |device, [x, weight, bias]| {
            device_rows::layer_norm(device, x, [weight, bias], dims, self.eps as f32)
        })
    }

    fn bwd(
        &self,
        x: &Tensor,
        weight: &Tensor,
        bias: &Tensor,
        _: &Tensor,
        grad: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let grad = grad.contiguous()?;
        #[cfg(feature = "cuda")]
        if x.device().is_cuda() {
            let [dx, dweight, dbias] = self.cuda_backward(x, weight, &grad)?;
            return Ok((Some(dx), Some(dweight), Some(dbias)));
        }
        let (dx, mut dparameters) = cpu::with_slices([x, weight, &grad], |[x, weight, dy]| {
            Ok(backward(x, weight, self.eps as f32, dy))
        })?;
        let dbias = dparameters.split_off(weight.elem_count());
        Ok((
            Some(Tensor::from_vec(dx, x.shape(), &Device::Cpu)?),
            Some(Tensor::from_vec(dparameters, weight.shape(), &Device::Cpu)?),
            Some(Tensor::from_vec(dbias, bias.shape(), &Device::Cpu)?),
        ))
    }
}

/// Gradients of x and of `[weight | bias]`.
fn backward(x: &[f32], weight: &[f32], eps: f32, dy: &[f32]) -> (Vec<f32>, Vec<f32>) {
    let width = weight.len();
    let chunks = Chunks::rows(x.len() / width.max(1), width);
    let (chunk, parts) = (chunks.size * width, 2 * width);
    let (dx, dparameters) = par::build_two(
        (x.len(), chunk),
        (chunks.count() * parts, parts),
        || (),
        |(), index, dx, part| {
            let (dweight, dbias) = part.split_at_mut(width);
            let here = index * chunk..index * chunk + dx.len();
            rows::layer_norm_backward(&x[here.clone()], weight, eps, &dy[here], dx, dweight, dbias);
        },
    );
    (dx, par::sum_parts(&dparameters, parts))
}

#[cfg(test)]
mod tests {
    use candle_core::DType;

    use super::*;
    use crate::kernel::testing::{check, randn};

    #[test]
    fn fused_is_the_twin() {
        for (dims, shift) in [
            (vec![1, 1], 0.0),
            (vec![3, 8], 2.0),
            (vec![2, 7, 17], 0.0),
            (vec![701, 64], 5.0),
            (vec![5, 256], 0.0),
        ] {
            let d = dims[dims.len() - 1];
            let x = (randn("x", &dims) + shift).unwrap();
            let inputs = [x, randn("weight", &[d]), randn("bias", &[d])];
            check(&format!("{dims:?}"), &inputs, 1e-5, |x| layer_norm(&x[0], &x[1], &x[2], EPS));
        }
    }

    #[test]
    fn no_rows_and_wrong_widths() {
        let ones = |dims: &[usize]| Tensor::ones(dims, DType::F32, &Device::Cpu).unwrap();
        let empty = layer_norm(&ones(&[0, 4]), &ones(&[4]), &ones(&[4]), EPS).unwrap();
        assert_eq!(empty.dims(), [0, 4]);
        assert!(layer_norm(&ones(&[2, 4]), &ones(&[3]), &ones(&[4]), EPS).is_err());
    }
}
