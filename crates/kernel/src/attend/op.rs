//! The custom operation: where operands and gradients lie in candle's tensors.

use std::sync::OnceLock;

use candle_core::{CpuStorage, Layout, Result, Shape, Tensor, bail};

#[cfg(feature = "cuda")]
use candle_core::cuda_backend::{CudaDevice, CudaStorage};

use super::Attend;
use super::arguments::{Operand, Operands, dims, hidden};
use super::cpu::arguments::Argument;
use super::cpu::backward::{BackwardInputs, Grads, backward};
use super::cpu::bias::Bias;
use super::cpu::forward::forward;
use super::cpu::operands::{Shared, Target};
use super::cpu::problem::Problem;
#[cfg(feature = "cuda")]
use super::cuda::{
    launch::{Call, Saved},
    tensors,
};
use super::dims::Dims;
use super::tile_plan::TilePlan;
use crate::cpu::compact::{self, Elements};
#[cfg(feature = "cuda")]
use crate::cpu::matmul_format::matmul_format;
use crate::cpu::{gradient, par, rows};
use crate::dropout::AttentionDropout;
use crate::heads::{Heads, Qkv};
use crate::op::{self, FusedOp, SavedOutput};
use crate::tape;

/// Softmax attention over the visible pairs in f32, by the kernel of the tensors' device.
pub fn attend(qkv: &Qkv, call: &Attend) -> Result<Heads> {
    let dims = dims(qkv, call)?;
    let (arguments, operands) = Operands::gather(qkv, call)?;
    let op = Attention {
        plan: TilePlan::new(call.pattern, dims.heads)?,
        dims,
        scale: call.scale as f32,
        dropout: call.dropout,
        operands,
        hidden: hidden(call, &dims)?,
        save: arguments.iter().any(Tensor::track_op),
        stats: OnceLock::new(),
        #[cfg(feature = "cuda")]
        on_device: OnceLock::new(),
    };
    let rows = tape::apply(&arguments.iter().collect::<Vec<_>>(), op)?;
    Ok(Heads::Merged { rows, heads: dims.heads })
}

struct Attention {
    plan: TilePlan,
    dims: Dims,
    scale: f32,
    dropout: Option<AttentionDropout>,
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

impl Attention {
    fn problem<'a>(&'a self, arguments: &[Argument<'a>]) -> Result<Problem<'a>> {
        let Operands { main: [q, k, v], slots, relative, bias } = &self.operands;
        Ok(Problem {
            plan: &self.plan,
            dims: self.dims,
            scale: self.scale,
            dropout: self.dropout,
            q: q.rows(arguments)?,
            k: k.rows(arguments)?,
            v: v.rows(arguments)?,
            slots: match slots {
                Some([k, v]) => Some((k.rows(arguments)?, v.rows(arguments)?)),
                None => None,
            },
            hidden: &self.hidden,
            relative: match relative {
                Some(form) => {
                    let (data, layout) = arguments[form.argument];
                    Some(form.tables(&data.f32()?[layout.start_offset()..], &self.dims))
                }
                None => None,
            },
            bias: match bias {
                Some(bias) => {
                    let (data, layout) = arguments[bias.argument];
                    Some(Bias { data: data.f32()?, place: bias.place(layout)? })
                }
                None => None,
            },
        })
    }

    #[cfg(feature = "cuda")]
    fn call(&self) -> Call<'_> {
        let Self { plan, dims, scale, hidden, dropout, .. } = self;
        let relative = self.operands.relative.map(tensors::distances);
        Call {
            plan,
            dims: *dims,
            scale: *scale,
            hidden,
            relative,
            dropout: *dropout,
            format: matmul_format(),
        }
    }
}

impl FusedOp for Attention {
    fn name(&self) -> &'static str {
        "pattern-attention"
    }

    fn forward(&self, arguments: &[(&CpuStorage, &Layout)]) -> Result<(Vec<f32>, Shape)> {
        let arguments = arguments
            .iter()
            .map(|(storage, layout)| Ok((Elements::F32(storage.as_slice()?), *layout)))
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
        Ok((out, shape))
    }

    #[cfg(feature = "cuda")]
    fn forward_cuda(&self, arguments: &[(&CudaStorage, &Layout)]) -> Result<(CudaStorage, Shape)> {
        let (out, shape, saved) = tensors::forward(&self.call(), &self.operands, arguments)?;
        if self.save {
            self.on_device.get_or_init(|| saved);
        }
        Ok((out, shape))
    }

    fn needs_output(&self) -> bool {
        true
    }

    /// All: two calls may read the same rows.
    fn accumulates_into(&self) -> &'static [usize] {
        &[0, 1, 2]
    }

    fn backward_accumulate(
        &self,
        tensors: &[&Tensor],
        out: SavedOutput,
        grad: &Tensor,
        held: Vec<Vec<f32>>,
    ) -> Result<Vec<Option<Tensor>>> {
        let out = op::result(out)?;
        #[cfg(feature = "cuda")]
        if let Some(saved) = self.on_device.get() {
            let grads = tensors::backward(&self.call(), &self.operands, tensors, out, grad, saved)?;
            return Ok(grads.into_iter().map(Some).collect());
        }
        let Some(stats) = self.stats.get() else {
            bail!("attention was run without a backward pass in view")
        };
        let out = out.contiguous()?;
        let all = || tensors.iter().copied().chain([&out, grad]);
        let Operands { main: [q, k, v], slots, relative, bias } = &self.operands;
        let read_in_f32 = [relative.map(|form| form.argument), bias.map(|bias| bias.argument)];
        read_in_f32.iter().flatten().try_for_each(|&argument| compact::expand(tensors[argument]))?;
        let guards: Vec<_> = all().map(Tensor::storage_and_layout).collect();
        let slices = guards
            .iter()
            .map(|(storage, layout)| Ok((compact::elements(storage)?, *layout)))
            .collect::<Result<Vec<Argument>>>()?;
        let held: [Vec<f32>; 3] = op::held(held);
        let mut buffers: Vec<Vec<f32>> =
            tensors.iter().zip(held).map(|(tensor, held)| op::begun(held, tensor)).collect();
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
            let bias = bias.as_ref().map(target).transpose()?;
            let grads = Grads { q: target(q)?, k: target(k)?, v: target(v)?, slots, bias };
            backward(&self.problem(&slices)?, &BackwardInputs { out, grad, stats }, &grads)
        };
        if let Some(form) = relative {
            rows::add(&form.collect(&tables, &self.dims), &mut buffers[form.argument]);
        }
        tensors.iter().zip(buffers).map(|(tensor, buffer)| gradient(tensor, buffer)).collect()
    }
}
