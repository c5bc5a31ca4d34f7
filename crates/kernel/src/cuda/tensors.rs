//! From candle's tensors on a CUDA device to what kernels take, and back.

use candle_core::cuda_backend::cudarc::driver::CudaSlice;
use candle_core::cuda_backend::{CudaDevice, CudaStorage};
use candle_core::op::BackpropOp;
use candle_core::{Error, Layout, Result, Shape, Storage, Tensor, bail};

use super::BufferView;

/// The floats of a contiguous f32 operand.
///
/// # Errors
/// Another type, or a layout with gaps: the caller must have called `contiguous`.
pub fn view<'a>(storage: &'a CudaStorage, layout: &Layout) -> Result<BufferView<'a, CudaDevice>> {
    match layout.contiguous_offsets() {
        Some((start, _)) => Ok(BufferView { floats: storage.as_cuda_slice::<f32>()?, start }),
        None => bail!("a CUDA kernel was given a strided operand of layout {layout:?}"),
    }
}

/// What [`crate::op::Op::forward_cuda`] returns: the floats that `f` makes of contiguous f32 operands.
pub fn forward<const N: usize>(
    operands: &[(&CudaStorage, &Layout)],
    shape: impl Into<Shape>,
    f: impl FnOnce(&CudaDevice, [BufferView<CudaDevice>; N]) -> Result<CudaSlice<f32>>,
) -> Result<(CudaStorage, Shape)> {
    let device = &operands[0].0.device;
    let mut views = Vec::with_capacity(N);
    for (storage, layout) in operands {
        views.push(view(storage, layout)?);
    }
    let Ok(views) = views.try_into() else { bail!("{} operands were given, not {N}", operands.len()) };
    Ok((CudaStorage::wrap_cuda_slice(f(device, views)?, device.clone()), shape.into()))
}

/// Runs `f` on the floats of contiguous f32 tensors of a device.
pub fn with_views<T, const N: usize>(
    tensors: [&Tensor; N],
    f: impl FnOnce(&CudaDevice, [BufferView<CudaDevice>; N]) -> Result<T>,
) -> Result<T> {
    let guards = tensors.map(Tensor::storage_and_layout);
    let mut views = Vec::with_capacity(N);
    for (storage, layout) in &guards {
        match &**storage {
            Storage::Cuda(storage) => views.push(view(storage, layout)?),
            _ => bail!("a CUDA kernel was given a tensor of another device"),
        }
    }
    let Ok(views) = views.try_into() else { bail!("there are {N} tensors") };
    f(tensors[0].device().as_cuda_device()?, views)
}

/// What a backward pass returns: gradients of the first two of contiguous f32 tensors of a device.
pub fn gradients(
    operands: [&Tensor; 3],
    f: impl FnOnce(&CudaDevice, [BufferView<CudaDevice>; 3]) -> Result<[CudaSlice<f32>; 2]>,
) -> Result<[Option<Tensor>; 2]> {
    let [first, second, _] = operands;
    with_views(operands, |device, views| {
        let [dx, dy] = f(device, views)?;
        Ok([Some(tensor(device, dx, first.shape())), Some(tensor(device, dy, second.shape()))])
    })
}

/// The first `len` floats of a view, in a buffer of their own.
pub fn copy(device: &CudaDevice, view: BufferView<CudaDevice>, len: usize) -> Result<CudaSlice<f32>> {
    let floats = view.floats.slice(view.start..view.start + len);
    device.cuda_stream().clone_dtod(&floats).map_err(Error::wrap)
}

/// A tensor of these floats on the device that made them.
pub fn tensor(device: &CudaDevice, floats: CudaSlice<f32>, shape: impl Into<Shape>) -> Tensor {
    let storage = CudaStorage::wrap_cuda_slice(floats, device.clone());
    Tensor::from_storage(Storage::Cuda(storage), shape, BackpropOp::none(), false)
}
