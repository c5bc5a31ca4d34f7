//! Machines whose buffers are those of candle's tensors, for operations that are written once for all of them.

use candle_core::{Result, Shape, Storage, Tensor, bail};

use super::KernelDevice;

/// A [`KernelDevice`] that computes on tensors of candle.
pub trait TensorDevice: KernelDevice {
    /// The f32 elements behind a tensor.
    fn floats(storage: &Storage) -> Result<&Self::Floats>;

    /// A tensor of what a kernel has written.
    fn tensor(&self, floats: Self::Floats, shape: Shape) -> Result<Tensor>;
}

#[cfg(feature = "cuda")]
impl TensorDevice for candle_core::cuda_backend::CudaDevice {
    fn floats(storage: &Storage) -> Result<&Self::Floats> {
        match storage {
            Storage::Cuda(storage) => storage.as_cuda_slice::<f32>(),
            _ => bail!("a CUDA kernel was given a tensor of another device"),
        }
    }

    fn tensor(&self, floats: Self::Floats, shape: Shape) -> Result<Tensor> {
        Ok(super::tensors::tensor(self, floats, shape))
    }
}

#[cfg(test)]
impl TensorDevice for super::emulated::Emulated {
    fn floats(storage: &Storage) -> Result<&Vec<f32>> {
        match storage {
            Storage::Cpu(candle_core::CpuStorage::F32(floats)) => Ok(floats),
            _ => bail!("an emulated kernel was given something else than f32 on the CPU"),
        }
    }

    fn tensor(&self, floats: Vec<f32>, shape: Shape) -> Result<Tensor> {
        Tensor::from_vec(floats, shape, &candle_core::Device::Cpu)
    }
}
