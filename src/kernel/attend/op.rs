//! The custom operation: where operands and gradients lie in candle's tensors.

use std::sync::OnceLock;

use candle_core::{
    CpuStorage, CustomOp1, CustomOp2, CustomOp3, Layout, Result, Shape, Storage, Tensor, bail,
};

#[cfg(feature = "cuda")]
use candle_core::cuda_backend::{CudaDevice, CudaStorage};

use super::Attend;
use super::cpu::arguments::{Argument, Operand, Operands, dims, hidden};
use super::cpu::backward::{Given, Grads, backward};
use super::cpu::forward::{Problem, forward};
use super::cpu::operands::{Dims, Shared, Target};
use super::cpu::plan::Plan;
#[cfg(feature = "cuda")]
use super::cuda::{
    launch::{Call, Saved},
    tensors,
};
use crate::kernel::cpu::par;
use crate::kernel::heads::{Heads, Qkv};
use crate::kernel::tape;

/// Softmax attention over the visible pairs in f32, by the kernel of the tensors' device.
///
/// # Errors
/// Shapes that do not fit the pattern.
pub fn attend(qkv: &Qkv, call: &Attend) -> Result<Heads> {
    let dims = dims(qkv, call)?;
    let (arguments, operands) = Operands::gather(qkv, call)?;
    let op = Op {
        plan: Plan::new(call.pattern, dims.heads)?,
        dims,
        scale: call.scale as f32,
        operands,
        hidden: hidden(call, &dims)?,
        save: arguments.iter().any(Tensor::track_op),
        stats: OnceLock::new(),
        #[cfg(feature = "cuda")]
        on_device: OnceLock::new(),
    };
    let rows = match arguments.as_slice() {
        [a] => tape::apply1(a, op)?,
        [a, b] => tape::apply2(a, b, op)?,
        [a, b, c] => tape::apply3(a, b, c, op)?,
        _ => bail!("attention over {} tensors", arguments.len()),
    };
    Ok(Heads::Merged { rows, heads: dims.heads })
}

struct Op {
    plan: Plan,
    dims: Dims,
    scale: f32,
    operands: Operands,
    hidden: Vec<bool>,
    /// Whether there will be a backward pass.
    save: bool,
    /// Largest logit and reciprocal sum of every query.
    stats: OnceLock<Vec<f32>>,
    /// What the kernels of a device left.
    #[cfg(feature = "cuda")]
    on_device: OnceLock<Saved<CudaDevice>>,
}

impl Op {
    fn problem<'a>(&'a self, arguments: &[Argument<'a>]) -> Result<Problem<'a>> {
        let Operands { main: [q, k, v], slots, relative } = &self.operands;
        Ok(Problem {
            plan: &self.plan,
            dims: self.dims,
            scale: self.scale,
            q: q.rows(arguments)?,
            k: k.rows(arguments)?,
            v: v.rows(arguments)?,
            slots: match slots {
                Some([k, v]) => Some((k.rows(arguments)?, v.rows(arguments)?)),
                None => None,
            },
            hidden: &self.hidden,
            relative: relative.as_ref().map(|form| {
                let (data, layout) = arguments[form.argument];
                form.tables(&data[layout.start_offset()..], &self.dims)
            }),
        })
    }

    fn forward(&self, arguments: &[(&CpuStorage, &Layout)]) -> Result<(CpuStorage, Shape)> {
        let arguments = arguments
            .iter()
            .map(|(storage, layout)| Ok((storage.as_slice::<f32>()?, *layout)))
            .collect::<Result<Vec<Argument>>>()?;
        let Dims { batch, heads, width, queries, .. } = self.dims;
        let shape = Shape::from((batch, queries, heads * width));
        let place = Operand::merged(0, heads).place(&Layout::contiguous(&shape))?;
        let mut out = par::zeros(shape.elem_count());
        let mut stats = vec![0.0; if self.save { 2 * batch * heads * queries } else { 0 }];
        let saved = self.save.then_some(stats.as_mut_slice());
        forward(&self.problem(&arguments)?, &mut out, place, saved);
        if self.save {
            self.stats.get_or_init(|| stats);
        }
        Ok((CpuStorage::F32(out), shape))
    }

    #[cfg(feature = "cuda")]
    fn call(&self) -> Call<'_> {
        let Self { plan, dims, scale, hidden, .. } = self;
        let relative = self.operands.relative.map(tensors::distances);
        Call { plan, dims: *dims, scale: *scale, hidden, relative }
    }

    #[cfg(feature = "cuda")]
    fn cuda(&self, arguments: &[(&CudaStorage, &Layout)]) -> Result<(CudaStorage, Shape)> {
        let (out, shape, saved) = tensors::forward(&self.call(), &self.operands, arguments)?;
        if self.save {
            self.on_device.get_or_init(|| saved);
        }
        Ok((out, shape))
    }

    fn backward(&self, tensors: &[&Tensor], out: &Tensor, grad: &Tensor) -> Result<Vec<Option<Tensor>>> {
        #[cfg(feature = "cuda")]
        if let Some(saved) = self.on_device.get() {
            let grads = tensors::backward(&self.call(), &self.operands, tensors, out, grad, saved)?;
            return Ok(grads.into_iter().map(Some).collect());
        }
        let Some(stats) = self.stats.get() else {
            bail!("attention was run without a backward pass in view")
        };
        let (out, grad) = (out.contiguous()?, grad.contiguous()?);
        let guards: Vec<_> =
            tensors.iter().chain([&&out, &&grad]).map(|tensor| tensor.storage_and_layout()).collect();
        let slices = guards
            .iter()
            .map(|(storage, layout)| match &**storage {
                Storage::Cpu(storage) => Ok((storage.as_slice::<f32>()?, *layout)),
                _ => bail!("an operand of a CPU kernel left the CPU"),
            })
            .collect::<Result<Vec<Argument>>>()?;
        let mut buffers: Vec<Vec<f32>> =
            tensors.iter().map(|tensor| par::zeros(tensor.elem_count())).collect();
        let Operands { main: [q, k, v], slots, relative } = &self.operands;
        let tables = {
            let shared: Vec<Shared> = buffers.iter_mut().map(|buffer| Shared::new(buffer)).collect();
            let target = |operand: &Operand| -> Result<Target> {
                let layout = Layout::contiguous(tensors[operand.argument].shape());
                Ok(Target { data: &shared[operand.argument], place: operand.place(&layout)? })
            };
            let merged = |argument| Operand::merged(argument, self.dims.heads).rows(&slices);
            let (out, grad) = (merged(tensors.len())?, merged(tensors.len() + 1)?);
            let slots = match slots {
                Some([k, v]) => Some((target(k)?, target(v)?)),
                None => None,
            };
            let grads = Grads { q: target(q)?, k: target(k)?, v: target(v)?, slots };
            backward(&self.problem(&slices)?, &Given { out, grad, stats }, &grads)
        };
        if let Some(form) = relative {
            buffers[form.argument] = form.collect(&tables, &self.dims);
        }
        let device = tensors[0].device();
        let tensor =
            |(buffer, like): (Vec<f32>, &&Tensor)| Tensor::from_vec(buffer, like.shape(), device).map(Some);
        buffers.into_iter().zip(tensors).map(tensor).collect()
    }
}

const NAME: &str = "pattern-attention";

impl CustomOp1 for Op {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cpu_fwd(&self, s1: &CpuStorage, l1: &Layout) -> Result<(CpuStorage, Shape)> {
        self.forward(&[(s1, l1)])
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, s1: &CudaStorage, l1: &Layout) -> Result<(CudaStorage, Shape)> {
        self.cuda(&[(s1, l1)])
    }

    fn bwd(&self, a: &Tensor, res: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        Ok(self.backward(&[a], res, grad)?.swap_remove(0))
    }
}

impl CustomOp2 for Op {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cpu_fwd(
        &self,
        s1: &CpuStorage,
        l1: &Layout,
        s2: &CpuStorage,
        l2: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        self.forward(&[(s1, l1), (s2, l2)])
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        s1: &CudaStorage,
        l1: &Layout,
        s2: &CudaStorage,
        l2: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        self.cuda(&[(s1, l1), (s2, l2)])
    }

    fn bwd(
        &self,
        a: &Tensor,
        b: &Tensor,
        res: &Tensor,
        grad: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let mut grads = self.backward(&[a, b], res, grad)?.into_iter();
        Ok((grads.next().flatten(), grads.next().flatten()))
    }
}

impl CustomOp3 for Op {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cpu_fwd(
        &self,
        s1: &CpuStorage,
        l1: &Layout,
        s2: &CpuStorage,
        l2: &Layout,
        s3: &CpuStorage,
        l3: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        self.forward(&[(s1, l1), (s2, l2), (s3, l3)])
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        s1: &CudaStorage,
        l1: &Layout,
        s2: &CudaStorage,
        l2: &Layout,
        s3: &CudaStorage,
        l3: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        self.cuda(&[(s1, l1), (s2, l2), (s3, l3)])
    }

    fn bwd(
        &self,
        a: &Tensor,
        b: &Tensor,
        c: &Tensor,
        res: &Tensor,
        grad: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let mut grads = self.backward(&[a, b, c], res, grad)?.into_iter();
        Ok((grads.next().flatten(), grads.next().flatten(), grads.next().flatten()))
    }
}
