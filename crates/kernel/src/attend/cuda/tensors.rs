//! The kernels on candle's tensors.

use candle_core::cuda_backend::{CudaDevice, CudaStorage};
use candle_core::{Layout, Result, Shape, Storage, Tensor, bail};

use super::launch::{Call, Inputs, Outputs, Saved};
use super::tables::{Distances, Places};
use crate::attend::arguments::{Operand, Operands, RelativeForm};
use crate::attend::dims::{Dims, RowLayout};
use crate::cuda::{BufferView, tensors};

/// What the kernels know of tables of distances.
pub fn distances(form: RelativeForm) -> Distances {
    let (slots, segment, rank) = form.slots.unwrap_or((0, 1, 0));
    Distances { keys: form.distances, slots, segment, rank }
}

/// Places of the operands in arguments of these layouts.
fn places(operands: &Operands, layouts: &[Layout]) -> Result<Places> {
    let place = |operand: &Operand| operand.place(&layouts[operand.argument]).map(Some);
    let [q, k, v] = &operands.main;
    let (slot_k, slot_v) = match &operands.slots {
        Some([k, v]) => (place(k)?, place(v)?),
        None => (None, None),
    };
    let slab = operands.relative.as_ref().map_or(0, |form| layouts[form.argument].start_offset());
    Ok(Places { q: place(q)?, k: place(k)?, v: place(v)?, slot_k, slot_v, slab, ..Places::default() })
}

/// Queries, keys, values, keys and values of the slots, tables of distances; where there are none, the queries stand in
/// unread.
fn inputs<'a>(operands: &Operands, storages: &[&'a CudaStorage]) -> Result<Inputs<'a, CudaDevice>> {
    let argument = |number: usize| storages[number].as_cuda_slice::<f32>().map(BufferView::all);
    let view = |operand: &Operand| argument(operand.argument);
    let [q, k, v] = &operands.main;
    let [slot_k, slot_v] = operands.slots.as_ref().unwrap_or(const { &[Operand::NONE; 2] });
    let slab = argument(operands.relative.as_ref().map_or(q.argument, |form| form.argument))?;
    Ok([view(q)?, view(k)?, view(v)?, view(slot_k)?, view(slot_v)?, slab])
}

/// The output, merged heads, and what its backward pass needs.
pub fn forward(
    call: &Call,
    operands: &Operands,
    arguments: &[(&CudaStorage, &Layout)],
) -> Result<(CudaStorage, Shape, Saved<CudaDevice>)> {
    let Dims { batch, heads, width, queries, .. } = call.dims;
    let device = &arguments[0].0.device;
    let layouts: Vec<Layout> = arguments.iter().map(|(_, layout)| (*layout).clone()).collect();
    let storages: Vec<&CudaStorage> = arguments.iter().map(|(storage, _)| *storage).collect();
    let (out, saved) = call.forward(device, inputs(operands, &storages)?, &places(operands, &layouts)?)?;
    let shape = Shape::from((batch, queries, heads * width));
    Ok((CudaStorage::wrap_cuda_slice(out, device.clone()), shape, saved))
}

/// Places of the operands with those of their gradients, which stand one after another in the order of `tensors`;
/// and the length of all.
fn with_gradients(operands: &Operands, tensors: &[&Tensor], layouts: &[Layout]) -> Result<(Places, usize)> {
    let (mut starts, mut total) = (Vec::new(), 0);
    for tensor in tensors {
        starts.push(total);
        total += tensor.elem_count();
    }
    let contiguous: Vec<Layout> =
        tensors.iter().map(|tensor| Layout::contiguous_with_offset(tensor.shape(), 0)).collect();
    let place = |operand: &Operand| -> Result<Option<RowLayout>> {
        let place = operand.place(&contiguous[operand.argument])?;
        Ok(Some(RowLayout { start: starts[operand.argument] + place.start, ..place }))
    };
    let [q, k, v] = &operands.main;
    let (d_slot_k, d_slot_v) = match &operands.slots {
        Some([k, v]) => (place(k)?, place(v)?),
        None => (None, None),
    };
    let d_slab = operands.relative.as_ref().map_or(0, |form| starts[form.argument]);
    let places = places(operands, layouts)?;
    Ok((
        Places { d_q: place(q)?, d_k: place(k)?, d_v: place(v)?, d_slot_k, d_slot_v, d_slab, ..places },
        total,
    ))
}

/// The gradients of `tensors`.
pub fn backward(
    call: &Call,
    operands: &Operands,
    tensors: &[&Tensor],
    out: &Tensor,
    grad: &Tensor,
    saved: &Saved<CudaDevice>,
) -> Result<Vec<Tensor>> {
    let guards: Vec<_> = tensors.iter().map(|tensor| tensor.storage_and_layout()).collect();
    let layouts: Vec<Layout> = guards.iter().map(|(_, layout)| (*layout).clone()).collect();
    let mut storages = Vec::with_capacity(guards.len());
    for (storage, _) in &guards {
        match &**storage {
            Storage::Cuda(storage) => storages.push(storage),
            _ => bail!("an operand of a CUDA kernel left the device"),
        }
    }
    let (places, total) = with_gradients(operands, tensors, &layouts)?;
    let flat = tensors::with_views([&out.contiguous()?, &grad.contiguous()?], |device, [out, grad]| {
        let outputs = Outputs { out, grad };
        let grads = call.backward(device, inputs(operands, &storages)?, outputs, saved, &places, total)?;
        Ok(tensors::tensor(device, grads, total))
    })?;
    let mut start = 0;
    let parts = tensors.iter().map(|tensor| {
        let part = flat.narrow(0, start, tensor.elem_count())?.reshape(tensor.shape());
        start += tensor.elem_count();
        part
    });
    parts.collect()
}
