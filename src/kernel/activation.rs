//! GELU in its exact form, x/2 (1 + erf(x / sqrt 2)), and ReLU.

use candle_core::{CpuStorage, CustomOp1, Device, Layout, Result, Shape, Tensor};

#[cfg(feature = "cuda")]
use candle_core::cuda_backend::CudaStorage;

use super::cpu::{self, par, rows};
#[cfg(feature = "cuda")]
use super::cuda::{rows as device_rows, tensors};
use super::tape;

/// Elements that one thread handles at a time.
const CHUNK: usize = 1 << 15;

/// Exact GELU.
///
/// # Errors
/// Failures of the device.
pub fn gelu(x: &Tensor) -> Result<Tensor> {
    if super::fused(x) {
        return tape::apply1(&x.contiguous()?, Gelu);
    }
    composed(x)
}

/// The definition in plain candle operations.
///
/// # Errors
/// Failures of the device.
pub fn composed(x: &Tensor) -> Result<Tensor> {
    let erf = (x * std::f64::consts::FRAC_1_SQRT_2)?.erf()?;
    (x * 0.5)? * (erf + 1.0)?
}

/// max(x, 0), without a gradient at exactly 0 (candle's own passes one on to dead units).
///
/// # Errors
/// Failures of the device.
pub fn relu(x: &Tensor) -> Result<Tensor> {
    x * x.gt(0f32)?.to_dtype(x.dtype())?
}

struct Gelu;

impl CustomOp1 for Gelu {
    fn name(&self) -> &'static str {
        "gelu"
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let x = cpu::slice(x, layout)?;
        let y = par::build(x.len(), CHUNK, |index, y| rows::gelu(&x[index * CHUNK..][..y.len()], y));
        Ok((CpuStorage::F32(y), layout.shape().clone()))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, x: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        let count = layout.shape().elem_count();
        tensors::forward([(x, layout)], layout.shape(), |device, [x]| device_rows::gelu(device, x, count))
    }

    fn bwd(&self, x: &Tensor, _: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        let grad = grad.contiguous()?;
        #[cfg(feature = "cuda")]
        if x.device().is_cuda() {
            return tensors::with_views([x, &grad], |device, operands| {
                let dx = device_rows::gelu_backward(device, operands, x.elem_count())?;
                Ok(Some(tensors::tensor(device, dx, x.shape())))
            });
        }
        let dx = cpu::with_slices([x, &grad], |[x, dy]| {
            Ok(par::build(x.len(), CHUNK, |index, dx| {
                let here = index * CHUNK..index * CHUNK + dx.len();
                rows::gelu_backward(&x[here.clone()], &dy[here], dx);
            }))
        })?;
        Ok(Some(Tensor::from_vec(dx, x.shape(), &Device::Cpu)?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::testing::{check, randn};

    #[test]
    fn fused_is_the_twin() {
        for dims in [vec![1], vec![3, 17], vec![2, 20_011]] {
            check(&format!("{dims:?}"), &[(randn("x", &dims) * 2.0).unwrap()], 1e-6, |x| gelu(&x[0]));
        }
    }

    #[test]
    fn a_transposed_input_is_copied() {
        let x = randn("x", &[3, 5]);
        check("transposed", &[x], 1e-6, |x| gelu(&x[0].t()?));
    }
}
