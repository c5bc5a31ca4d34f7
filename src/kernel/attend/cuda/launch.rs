//! Running the kernels on a device.

use candle_core::cuda_backend::cudarc::driver::{CudaFunction, CudaSlice, LaunchConfig, PushKernelArg};
use candle_core::cuda_backend::{CudaDevice, CudaStorage};
use candle_core::{CustomOp1, Error, Layout, Result, Shape, Storage, Tensor, bail};

use super::SOURCE;
use super::tables::{Places, THREADS, Tables, block, header, memory_bytes};
use crate::kernel::attend::cpu::arguments::{Operand, Operands};
use crate::kernel::attend::cpu::operands::{Dims, Place};
use crate::kernel::attend::cpu::plan::Plan;
use crate::kernel::cuda::{Module, function};

/// A call, whatever its tensors.
pub struct Call<'a> {
    pub plan: &'a Plan,
    pub dims: Dims,
    pub scale: f32,
    pub operands: &'a Operands,
    /// Hidden keys and slots of every sample; empty if none is.
    pub hidden: &'a [bool],
}

/// What a forward pass leaves for the backward pass.
pub struct Saved {
    /// Every query's largest logit and reciprocal sum, [b, h, n, 2].
    stats: CudaSlice<f32>,
    given: Given,
}

/// Tables on a device.
struct Given {
    tiles: CudaSlice<i32>,
    head_tiles: CudaSlice<i32>,
    streams: CudaSlice<i32>,
    bounds: CudaSlice<i32>,
    queries: CudaSlice<i32>,
    hidden: CudaSlice<u8>,
    blocks: CudaSlice<i32>,
    visits: CudaSlice<i32>,
    most_tiles: usize,
    key_blocks: usize,
    shared: bool,
}

impl Given {
    fn new(device: &CudaDevice, call: &Call) -> Result<Self> {
        let tables = Tables::new(call.plan, &call.dims)?;
        // a device has no empty allocations
        let words = |words: &[i32]| device.clone_htod(if words.is_empty() { &[0][..] } else { words });
        let hidden: Vec<u8> = call.hidden.iter().map(|&hidden| hidden.into()).collect();
        Ok(Self {
            tiles: words(&tables.tiles)?,
            head_tiles: words(&tables.head_tiles)?,
            streams: words(&tables.streams)?,
            bounds: words(&tables.bounds)?,
            queries: words(&tables.queries)?,
            hidden: device.clone_htod(if hidden.is_empty() { &[0u8][..] } else { &hidden })?,
            blocks: words(&tables.blocks)?,
            visits: words(&tables.visits)?,
            most_tiles: tables.most_tiles,
            key_blocks: tables.key_blocks,
            shared: tables.shared,
        })
    }
}

impl Call<'_> {
    fn function(&self, device: &CudaDevice, kernel: &str) -> Result<CudaFunction> {
        let width = self.dims.width;
        let defines = [("WIDTH", width), ("BLOCK", block(width))];
        let module = Module { name: "attend", source: SOURCE, defines: &defines };
        function(device, &module, kernel, memory_bytes(width))
    }

    fn grid(&self, blocks: usize, memory: usize) -> LaunchConfig {
        LaunchConfig {
            grid_dim: (blocks as u32, self.dims.heads as u32, self.dims.batch as u32),
            block_dim: (THREADS as u32, 1, 1),
            shared_mem_bytes: memory as u32,
        }
    }

    fn merged(&self) -> Place {
        let Dims { heads, width, queries, .. } = self.dims;
        let row = heads * width;
        Place { start: 0, batch: queries * row, head: width, row }
    }

    /// Places of the five operands in arguments of these layouts.
    fn places(&self, layouts: &[Layout]) -> Result<Places> {
        let place = |operand: &Operand| operand.place(&layouts[operand.argument]).map(Some);
        let [q, k, v] = &self.operands.main;
        let (slot_k, slot_v) = match &self.operands.slots {
            Some([k, v]) => (place(k)?, place(v)?),
            None => (None, None),
        };
        let out = Some(self.merged());
        Ok(Places { q: place(q)?, k: place(k)?, v: place(v)?, slot_k, slot_v, out, ..Places::default() })
    }

    /// Queries, keys, values, keys and values of the slots; where there are none, the queries stand in unread.
    fn inputs<'a>(&self, storages: &[&'a CudaStorage]) -> Result<[&'a CudaSlice<f32>; 5]> {
        let slice = |operand: &Operand| storages[operand.argument].as_cuda_slice::<f32>();
        let [q, k, v] = &self.operands.main;
        let [slot_k, slot_v] = self.operands.slots.as_ref().unwrap_or(const { &[Operand::NONE; 2] });
        Ok([slice(q)?, slice(k)?, slice(v)?, slice(slot_k)?, slice(slot_v)?])
    }

    fn factor(&self) -> f32 {
        self.scale * std::f32::consts::LOG2_E
    }

    /// The output, merged heads, and what its backward pass needs.
    pub fn forward(&self, arguments: &[(&CudaStorage, &Layout)]) -> Result<(CudaStorage, Shape, Saved)> {
        let Dims { batch, heads, width, queries, .. } = self.dims;
        let device = &arguments[0].0.device;
        let stream = device.cuda_stream();
        let layouts: Vec<Layout> = arguments.iter().map(|(_, layout)| (*layout).clone()).collect();
        let storages: Vec<&CudaStorage> = arguments.iter().map(|(storage, _)| *storage).collect();
        let inputs = self.inputs(&storages)?;
        let given = Given::new(device, self)?;
        let header = header(&self.dims, self.plan.offset, !self.hidden.is_empty(), &self.places(&layouts)?);
        let header = device.clone_htod(&header)?;
        let shape = Shape::from((batch, queries, heads * width));
        // queries in no tile see nothing: zeros
        let mut out = device.alloc_zeros::<f32>(shape.elem_count().max(1))?;
        let mut stats = device.alloc_zeros::<f32>((2 * batch * heads * queries).max(1))?;
        if given.most_tiles > 0 {
            let kernel = self.function(device, "attend_forward")?;
            let factor = self.factor();
            let mut builder = stream.launch_builder(&kernel);
            builder.arg(&header).arg(&given.tiles).arg(&given.head_tiles).arg(&given.streams);
            builder.arg(&given.bounds).arg(&given.queries).arg(&given.hidden);
            for input in inputs {
                builder.arg(input);
            }
            builder.arg(&factor).arg(&mut out).arg(&mut stats);
            // SAFETY: the arguments are those of the kernel in number, order and type, and `header` keeps its accesses
            // within them.
            unsafe { builder.launch(self.grid(given.most_tiles, memory_bytes(width))) }
                .map_err(Error::wrap)?;
        }
        Ok((CudaStorage::wrap_cuda_slice(out, device.clone()), shape, Saved { stats, given }))
    }

    /// The gradients of `tensors`.
    pub fn backward(
        &self,
        tensors: &[&Tensor],
        out: &Tensor,
        grad: &Tensor,
        saved: &Saved,
    ) -> Result<Vec<Tensor>> {
        let (out, grad) = (out.contiguous()?.detach(), grad.contiguous()?.detach());
        let flat = grad.apply_op1_no_bwd(&Backward { call: self, tensors, out: &out, saved })?;
        let mut start = 0;
        let parts = tensors.iter().map(|tensor| {
            let part = flat.narrow(0, start, tensor.elem_count())?.reshape(tensor.shape());
            start += tensor.elem_count();
            part
        });
        parts.collect()
    }
}

/// From the gradient of the output to those of all arguments, one after another.
struct Backward<'a> {
    call: &'a Call<'a>,
    tensors: &'a [&'a Tensor],
    out: &'a Tensor,
    saved: &'a Saved,
}

impl Backward<'_> {
    /// The operands' places with those of their gradients.
    fn places(&self, layouts: &[Layout]) -> Result<Places> {
        let (mut starts, mut start) = (Vec::new(), 0);
        for tensor in self.tensors {
            starts.push(start);
            start += tensor.elem_count();
        }
        let contiguous: Vec<Layout> =
            self.tensors.iter().map(|tensor| Layout::contiguous_with_offset(tensor.shape(), 0)).collect();
        let place = |operand: &Operand| -> Result<Option<Place>> {
            let place = operand.place(&contiguous[operand.argument])?;
            Ok(Some(Place { start: starts[operand.argument] + place.start, ..place }))
        };
        let [q, k, v] = &self.call.operands.main;
        let (d_slot_k, d_slot_v) = match &self.call.operands.slots {
            Some([k, v]) => (place(k)?, place(v)?),
            None => (None, None),
        };
        let places = self.call.places(layouts)?;
        Ok(Places { d_q: place(q)?, d_k: place(k)?, d_v: place(v)?, d_slot_k, d_slot_v, ..places })
    }
}

impl CustomOp1 for Backward<'_> {
    fn name(&self) -> &'static str {
        "pattern-attention-backward"
    }

    fn cpu_fwd(&self, _: &candle_core::CpuStorage, _: &Layout) -> Result<(candle_core::CpuStorage, Shape)> {
        bail!("this is the backward pass of the CUDA kernel")
    }

    fn cuda_fwd(&self, grad: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        let call = self.call;
        let Dims { batch, heads, width, queries, .. } = call.dims;
        let device = &grad.device;
        let stream = device.cuda_stream();
        let guards: Vec<_> = self.tensors.iter().map(|tensor| tensor.storage_and_layout()).collect();
        let cuda = |storage: &'_ Storage| match storage {
            Storage::Cuda(_) => Ok(()),
            _ => bail!("an operand of a CUDA kernel left the device"),
        };
        guards.iter().try_for_each(|(storage, _)| cuda(storage))?;
        let storages: Vec<&CudaStorage> = guards
            .iter()
            .filter_map(|(storage, _)| match &**storage {
                Storage::Cuda(storage) => Some(storage),
                _ => None,
            })
            .collect();
        let layouts: Vec<Layout> = guards.iter().map(|(_, layout)| (*layout).clone()).collect();
        let inputs = call.inputs(&storages)?;
        let (out, out_layout) = self.out.storage_and_layout();
        let Storage::Cuda(out) = &*out else { bail!("the output of a CUDA kernel left the device") };
        if layout.start_offset() != 0 || out_layout.start_offset() != 0 {
            bail!("outputs and their gradients must start at 0");
        }
        let (grad, out) = (grad.as_cuda_slice::<f32>()?, out.as_cuda_slice::<f32>()?);
        let Saved { stats, given } = self.saved;
        let words = header(&call.dims, call.plan.offset, !call.hidden.is_empty(), &self.places(&layouts)?);
        let header = device.clone_htod(&words)?;
        let mut means = device.alloc_zeros::<f32>((batch * heads * queries).max(1))?;
        let total: usize = self.tensors.iter().map(|tensor| tensor.elem_count()).sum();
        let mut grads = device.alloc_zeros::<f32>(total.max(1))?;
        let (factor, scale, memory) = (call.factor(), call.scale, memory_bytes(width));

        let kernel = call.function(device, "attend_means")?;
        let mut builder = stream.launch_builder(&kernel);
        builder.arg(&header).arg(out).arg(grad).arg(&mut means);
        // SAFETY: as in `forward`.
        unsafe { builder.launch(call.grid(queries.div_ceil(THREADS), 0)) }.map_err(Error::wrap)?;
        if given.most_tiles > 0 {
            let kernel = call.function(device, "attend_back_queries")?;
            let mut builder = stream.launch_builder(&kernel);
            builder.arg(&header).arg(&given.tiles).arg(&given.head_tiles).arg(&given.streams);
            builder.arg(&given.bounds).arg(&given.queries).arg(&given.hidden);
            for input in inputs {
                builder.arg(input);
            }
            builder.arg(grad).arg(stats).arg(&means).arg(&factor).arg(&scale).arg(&mut grads);
            // SAFETY: as in `forward`.
            unsafe { builder.launch(call.grid(given.most_tiles, memory)) }.map_err(Error::wrap)?;

            let kernel = call.function(device, "attend_back_keys")?;
            let shared = i32::from(given.shared);
            let mut builder = stream.launch_builder(&kernel);
            builder.arg(&header).arg(&given.tiles).arg(&given.blocks).arg(&given.visits);
            builder.arg(&given.streams).arg(&given.bounds).arg(&given.queries).arg(&given.hidden);
            for input in inputs {
                builder.arg(input);
            }
            builder.arg(grad).arg(stats).arg(&means).arg(&factor).arg(&scale).arg(&shared);
            builder.arg(&mut grads);
            // SAFETY: as in `forward`.
            unsafe { builder.launch(call.grid(given.key_blocks, memory)) }.map_err(Error::wrap)?;
        }
        Ok((CudaStorage::wrap_cuda_slice(grads, device.clone()), Shape::from(total)))
    }
}
