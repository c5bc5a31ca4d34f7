//! Normalisation over the last dimension: LayerNorm (biased variance, affine) and RMSNorm (Zhang & Sennrich 2019).

use candle_core::{CpuStorage, D, DType, Layout, Result, Shape, Tensor, bail};

#[cfg(feature = "cuda")]
use candle_core::cuda_backend::CudaStorage;

use super::cpu::{self, par, par::Chunks, rows};
#[cfg(feature = "cuda")]
use super::cuda::{rows as device_rows, tensors};
use super::op::{self, FusedOp, SavedOutput};
use super::tape;

/// Epsilon of every LayerNorm in the specifications.
pub const EPS: f64 = 1e-5;

/// (x - mean) / sqrt(var + eps) * weight + bias over the last dimension; `weight` and `bias` `[d]`.
pub fn layer_norm(x: &Tensor, weight: &Tensor, bias: &Tensor, eps: f64) -> Result<Tensor> {
    if super::fused(x) {
        return tape::apply(
            &[&x.contiguous()?, &weight.contiguous()?, &bias.contiguous()?],
            LayerNorm { eps },
        );
    }
    composed(x, weight, bias, eps)
}

/// The definition in plain candle operations.
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
    fn dims<S>(operands: &[(&S, &Layout)]) -> Result<[usize; 2]> {
        let &[(_, x), (_, weight), (_, bias)] = operands else { bail!("a LayerNorm has three operands") };
        let (count, width) = cpu::matrix_dims(x.dims())?;
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

impl FusedOp for LayerNorm {
    fn name(&self) -> &'static str {
        "layer-norm"
    }

    fn forward(&self, operands: &[(&CpuStorage, &Layout)]) -> Result<(Vec<f32>, Shape)> {
        let [x, weight, bias] = cpu::slices(operands)?;
        let [count, width] = Self::dims(operands)?;
        let chunk = Chunks::rows(count, width).size * width;
        let y = par::build(x.len(), chunk, |index, y| {
            rows::layer_norm(&x[index * chunk..][..y.len()], weight, bias, self.eps as f32, y);
        });
        Ok((y, operands[0].1.shape().clone()))
    }

    #[cfg(feature = "cuda")]
    fn forward_cuda(&self, operands: &[(&CudaStorage, &Layout)]) -> Result<(CudaStorage, Shape)> {
        let dims = Self::dims(operands)?;
        tensors::forward(operands, operands[0].1.shape(), |device, [x, weight, bias]| {
            device_rows::layer_norm(device, x, [weight, bias], dims, self.eps as f32)
        })
    }

    fn backward(&self, operands: &[&Tensor], _: SavedOutput, grad: &Tensor) -> Result<Vec<Option<Tensor>>> {
        let [x, weight, bias] = op::operands(operands)?;
        #[cfg(feature = "cuda")]
        if x.device().is_cuda() {
            return self.cuda_backward(x, weight, grad).map(|grads| grads.map(Some).into());
        }
        let (dx, mut dparameters) = cpu::with_slices([x, weight, grad], |[x, weight, dy]| {
            Ok(backward(x, weight, self.eps as f32, dy))
        })?;
        let dbias = dparameters.split_off(weight.elem_count());
        Ok(vec![cpu::gradient(x, dx)?, cpu::gradient(weight, dparameters)?, cpu::gradient(bias, dbias)?])
    }
}

/// x / sqrt(mean(x^2) + eps) * weight over the last dimension; `weight` `[d]`.
///
/// # Errors
/// Shapes that do not fit.
pub fn rms_norm(x: &Tensor, weight: &Tensor, eps: f64) -> Result<Tensor> {
    if super::fused_cpu(x.device()) && x.dtype() == DType::F32 {
        return tape::apply(&[&x.contiguous()?, &weight.contiguous()?], RmsNorm { eps });
    }
    let mean = x.sqr()?.mean_keepdim(D::Minus1)?;
    x.broadcast_div(&(mean + eps)?.sqrt()?)?.broadcast_mul(weight)
}

struct RmsNorm {
    eps: f64,
}

impl RmsNorm {
    /// Number of rows and their width.
    fn dims(x: &[usize], weight: &[usize]) -> Result<[usize; 2]> {
        let (count, width) = cpu::matrix_dims(x)?;
        if weight != [width] {
            bail!("weight {weight:?} for rows of {width}");
        }
        Ok([count, width])
    }
}

impl FusedOp for RmsNorm {
    fn name(&self) -> &'static str {
        "rms-norm"
    }

    fn forward(&self, operands: &[(&CpuStorage, &Layout)]) -> Result<(Vec<f32>, Shape)> {
        let [x, weight] = cpu::slices(operands)?;
        let shape = operands[0].1.shape();
        let [count, width] = Self::dims(shape.dims(), operands[1].1.dims())?;
        let chunk = Chunks::rows(count, width).size * width;
        let y = par::build(x.len(), chunk, |index, y| {
            rows::rms_norm(&x[index * chunk..][..y.len()], weight, self.eps as f32, y);
        });
        Ok((y, shape.clone()))
    }

    fn backward(&self, operands: &[&Tensor], _: SavedOutput, grad: &Tensor) -> Result<Vec<Option<Tensor>>> {
        let [x, weight] = op::operands(operands)?;
        let [count, width] = Self::dims(x.dims(), weight.dims())?;
        let chunks = Chunks::rows(count, width);
        let chunk = chunks.size * width;
        let (dx, dweight) = cpu::with_slices([x, weight, grad], |[x, weight, dy]| {
            let lens = [(x.len(), chunk), (chunks.count() * width, width)];
            let (dx, parts) = par::build_two(
                lens[0],
                lens[1],
                || (),
                |(), index, dx, part| {
                    let here = index * chunk..index * chunk + dx.len();
                    rows::rms_norm_backward(&x[here.clone()], weight, self.eps as f32, &dy[here], dx, part);
                },
            );
            Ok((dx, par::sum_parts(&parts, width)))
        })?;
        Ok(vec![cpu::gradient(x, dx)?, cpu::gradient(weight, dweight)?])
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
            let grads = rows::LayerNormGrads { dx, dweight, dbias };
            rows::layer_norm_backward(&x[here.clone()], weight, eps, &dy[here], grads);
        },
    );
    (dx, par::sum_parts(&dparameters, parts))
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;
    use crate::testing::{check, randn};

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
            check(&format!("rms {dims:?}"), &inputs[..2], 1e-5, |x| rms_norm(&x[0], &x[1], 1e-6));
        }
    }

    #[test]
    fn no_rows_and_wrong_widths() {
        let ones = |dims: &[usize]| Tensor::ones(dims, DType::F32, &Device::Cpu).unwrap();
        let empty = layer_norm(&ones(&[0, 4]), &ones(&[4]), &ones(&[4]), EPS).unwrap();
        assert_eq!(empty.dims(), [0, 4]);
        assert!(layer_norm(&ones(&[2, 4]), &ones(&[3]), &ones(&[4]), EPS).is_err());
        assert!(rms_norm(&ones(&[2, 4]), &ones(&[3]), EPS).is_err());
    }
}
