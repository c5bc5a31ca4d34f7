//! Softmax over the last dimension.

use candle_core::{CpuStorage, CustomOp1, D, Device, Layout, Result, Shape, Tensor};

#[cfg(feature = "cuda")]
use candle_core::cuda_backend::CudaStorage;

use super::cpu::par::{self, Chunks};
use super::cpu::{self, math};
#[cfg(feature = "cuda")]
use super::cuda::{rows, tensors};
use super::tape;

/// exp(x - max) / sum exp(x - max) over the last dimension.
///
/// # Errors
/// Failures of the device.
pub fn softmax(x: &Tensor) -> Result<Tensor> {
    if super::fused(x) {
        return tape::apply1(&x.contiguous()?, Softmax);
    }
    composed(x)
}

/// The definition in plain candle operations.
///
/// # Errors
/// Failures of the device.
pub fn composed(x: &Tensor) -> Result<Tensor> {
    let max = x.max_keepdim(D::Minus1)?.detach();
    let weights = x.broadcast_sub(&max)?.exp()?;
    weights.broadcast_div(&weights.sum_keepdim(D::Minus1)?)
}

struct Softmax;

impl CustomOp1 for Softmax {
    fn name(&self) -> &'static str {
        "softmax"
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let x = cpu::slice(x, layout)?;
        let (rows, width) = cpu::matrix_dims(layout.dims())?;
        let chunk = Chunks::rows(rows, width).size * width;
        let y = par::build(x.len(), chunk, |index, y| forward(&x[index * chunk..][..y.len()], width, y));
        Ok((CpuStorage::F32(y), layout.shape().clone()))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, x: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        let (count, width) = cpu::matrix_dims(layout.dims())?;
        tensors::forward([(x, layout)], layout.shape(), |device, [x]| {
            rows::softmax(device, x, [count, width])
        })
    }

    fn bwd(&self, x: &Tensor, y: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        let (rows, width) = cpu::matrix_dims(y.dims())?;
        #[cfg(feature = "cuda")]
        if x.device().is_cuda() {
            return tensors::with_views([y, &grad.contiguous()?], |device, operands| {
                let dx = self::rows::softmax_backward(device, operands, [rows, width])?;
                Ok(Some(tensors::tensor(device, dx, x.shape())))
            });
        }
        let chunk = Chunks::rows(rows, width).size * width;
        let dx = cpu::with_slices([y, &grad.contiguous()?], |[y, dy]| {
            Ok(par::build(y.len(), chunk, |index, dx| {
                let here = index * chunk..index * chunk + dx.len();
                backward(&y[here.clone()], &dy[here], width, dx);
            }))
        })?;
        Ok(Some(Tensor::from_vec(dx, x.shape(), &Device::Cpu)?))
    }
}

crate::simd_fn! {
    fn forward<S>(simd, x: &'a [f32], width: usize, y: &'a mut [f32]) {
        for (x, y) in x.chunks_exact(width.max(1)).zip(y.chunks_exact_mut(width.max(1))) {
            let sum = math::exp_sum(simd, math::max(simd, x), x, y);
            math::scale(simd, 1.0 / sum, y);
        }
    }
}

crate::simd_fn! {
    /// dx = y (dy - sum y dy), row by row.
    fn backward<S>(simd, y: &'a [f32], dy: &'a [f32], width: usize, dx: &'a mut [f32]) {
        let rows = y.chunks_exact(width.max(1)).zip(dy.chunks_exact(width.max(1)));
        for ((y, dy), dx) in rows.zip(dx.chunks_exact_mut(width.max(1))) {
            let product = simd.splat_f32s(math::dot(simd, y, dy));
            for at in (0..width).step_by(S::F32_LANES) {
                let grad = simd.sub_f32s(math::load(simd, dy, at), product);
                math::store(simd, dx, at, simd.mul_f32s(math::load(simd, y, at), grad));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::testing::{check, randn};

    #[test]
    fn fused_is_the_twin() {
        for dims in [vec![1, 1], vec![3, 8], vec![2, 5, 17], vec![700, 64], vec![3, 1025]] {
            check(&format!("{dims:?}"), &[(randn("x", &dims) * 3.0).unwrap()], 1e-6, |x| softmax(&x[0]));
        }
    }

    #[test]
    fn large_and_hidden_logits() {
        let x =
            Tensor::new(&[[1e4f32, -1e4, f32::NEG_INFINITY], [-3e38, -3e38, -1e9]], &Device::Cpu).unwrap();
        let y = softmax(&x).unwrap().to_vec2::<f32>().unwrap();
        assert_eq!(y, [[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]);
    }
}
