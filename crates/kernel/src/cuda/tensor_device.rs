//! Machines whose buffers are those of candle's tensors, and operations that are written once for all of them: on CUDA, and in tests
//! on the CPU by emulation.

#[cfg(feature = "cuda")]
use candle_core::cuda_backend::{CudaDevice, CudaStorage};
use candle_core::{CpuStorage, Device, Layout, Result, Shape, Storage, Tensor, bail};

use super::KernelDevice;
use crate::op::{FusedOp, SavedOutput};

/// A [`KernelDevice`] that computes on tensors of candle.
pub trait TensorDevice: KernelDevice {
    /// The f32 elements behind a tensor.
    fn floats(storage: &Storage) -> Result<&Self::Floats>;

    /// A tensor of what a kernel has written.
    fn tensor(&self, floats: Self::Floats, shape: Shape) -> Result<Tensor>;
}

/// An operation on f32 tensors by kernels alone.
pub trait DeviceOp: Send + Sync + 'static {
    /// What messages call it.
    fn name(&self) -> &'static str;

    /// That of the result.
    fn shape(&self) -> Shape;

    /// Whether the backward pass reads the result.
    fn needs_output(&self) -> bool {
        false
    }

    /// The result.
    fn forward_on<M: TensorDevice>(
        &self,
        machine: &M,
        operands: &[(&M::Floats, &Layout)],
    ) -> Result<M::Floats>;

    /// Gradients of the operands from that of the result `out`, which is there if [`Self::needs_output`].
    fn backward_on<M: TensorDevice>(
        &self,
        machine: &M,
        operands: &[&Tensor],
        out: SavedOutput,
        grad: &Tensor,
    ) -> Result<Vec<Option<Tensor>>>;
}

/// Such an operation on the device of its operands.
pub struct OnDevice<T>(pub T);

impl<T: DeviceOp> FusedOp for OnDevice<T> {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    #[cfg(not(test))]
    fn forward(&self, _: &[(&CpuStorage, &Layout)]) -> Result<(Vec<f32>, Shape)> {
        bail!("the CUDA kernels of {} were given tensors on the CPU", self.name())
    }

    #[cfg(test)]
    fn forward(&self, operands: &[(&CpuStorage, &Layout)]) -> Result<(Vec<f32>, Shape)> {
        super::emulated::forward(operands, |machine, floats| {
            Ok((self.0.forward_on(machine, floats)?, self.0.shape()))
        })
    }

    #[cfg(feature = "cuda")]
    fn forward_cuda(&self, operands: &[(&CudaStorage, &Layout)]) -> Result<(CudaStorage, Shape)> {
        let device = operands[0].0.device.clone();
        let floats = operands.iter().map(|(storage, layout)| Ok((storage.as_cuda_slice::<f32>()?, *layout)));
        let out = self.0.forward_on(&device, &floats.collect::<Result<Vec<_>>>()?)?;
        Ok((CudaStorage::wrap_cuda_slice(out, device), self.0.shape()))
    }

    fn needs_output(&self) -> bool {
        self.0.needs_output()
    }

    fn backward(&self, operands: &[&Tensor], out: SavedOutput, grad: &Tensor) -> Result<Vec<Option<Tensor>>> {
        match grad.device() {
            #[cfg(feature = "cuda")]
            Device::Cuda(device) => self.0.backward_on::<CudaDevice>(device, operands, out, grad),
            #[cfg(test)]
            Device::Cpu => super::emulated::here(|machine| self.0.backward_on(machine, operands, out, grad)),
            other => bail!("{} has no kernels for {other:?}", self.name()),
        }
    }
}

#[cfg(feature = "cuda")]
impl TensorDevice for CudaDevice {
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
            Storage::Cpu(CpuStorage::F32(floats)) => Ok(floats),
            _ => bail!("an emulated kernel was given something else than f32 on the CPU"),
        }
    }

    fn tensor(&self, floats: Vec<f32>, shape: Shape) -> Result<Tensor> {
        Tensor::from_vec(floats, shape, &Device::Cpu)
    }
}
