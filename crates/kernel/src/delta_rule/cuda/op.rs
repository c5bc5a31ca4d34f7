//! The kernels as an operation on candle's tensors.

use std::sync::OnceLock;

use candle_core::{DType, Layout, Result, Shape, Tensor, bail};

use super::launch::{Call, Inputs};
use crate::cuda::BufferView;
use crate::cuda::tensor_device::{DeviceOp, OnDevice, TensorDevice};
use crate::delta_rule::{DeltaRows, DeltaRule};
use crate::heads::Heads;
use crate::op::SavedOutput;
use crate::tape;

/// Runs the kernels on f32 tensors; keys must not be wider than [`crate::delta_rule::CUDA_WIDEST`].
pub(in crate::delta_rule) fn fused(rows: &DeltaRows, call: &DeltaRule) -> Result<Heads> {
    let (samples, len, _) = rows.rows.dims3()?;
    let DeltaRows { heads, key_width, value_width, .. } = *rows;
    let keep = match call.mask {
        Some(mask) => Some(mask.to_dtype(DType::F32)?.contiguous()?),
        None => None,
    };
    let mut operands = vec![rows.rows.contiguous()?, call.beta.contiguous()?];
    if let Some(log_decay) = call.log_decay {
        operands.push(log_decay.contiguous()?);
    }
    let (decays, masked) = (operands.len() > 2, keep.is_some());
    let op = Delta {
        call: Call { samples, heads, len, key_width, value_width, decays, masked },
        keep,
        trains: operands.iter().any(Tensor::track_op),
        states: OnceLock::new(),
    };
    let rows = tape::apply(&operands.iter().collect::<Vec<_>>(), OnDevice(op))?;
    Ok(Heads::Merged { rows, heads })
}

struct Delta {
    call: Call,
    keep: Option<Tensor>,
    /// Whether a backward pass may follow.
    trains: bool,
    /// The state before each chunk.
    states: OnceLock<Tensor>,
}

impl Delta {
    /// Runs `f` on operands, and on what is kept.
    fn with_inputs<M: TensorDevice, T>(
        &self,
        operands: &[(&M::Floats, &Layout)],
        f: impl FnOnce(&Inputs<M>) -> Result<T>,
    ) -> Result<T> {
        let view = |index: usize| {
            let (floats, layout) = operands[index];
            BufferView::<M> { floats, start: layout.start_offset() }
        };
        let keep = self.keep.as_ref().map(Tensor::storage_and_layout);
        let keep = match &keep {
            Some((storage, layout)) => {
                BufferView { floats: M::floats(storage)?, start: layout.start_offset() }
            }
            None => view(0),
        };
        let log_decay = view(if self.call.decays { 2 } else { 0 });
        f(&Inputs { rows: view(0), beta: view(1), log_decay, keep })
    }
}

impl DeviceOp for Delta {
    fn name(&self) -> &'static str {
        "delta-rule"
    }

    fn forward_on<M: TensorDevice>(
        &self,
        machine: &M,
        operands: &[(&M::Floats, &Layout)],
    ) -> Result<M::Floats> {
        let run = |inputs: &Inputs<M>| self.call.forward(machine, inputs, self.trains);
        let (out, states) = self.with_inputs(operands, run)?;
        if self.trains {
            let Call { samples, heads, len, key_width, value_width, .. } = self.call;
            let shape = (samples, heads, len.div_ceil(super::launch::CHUNK), key_width, value_width);
            if self.states.set(machine.tensor(states, shape.into())?).is_err() {
                bail!("a delta rule operation ran twice");
            }
        }
        Ok(out)
    }

    fn backward_on<M: TensorDevice>(
        &self,
        machine: &M,
        operands: &[&Tensor],
        _: SavedOutput,
        grad: &Tensor,
    ) -> Result<Vec<Option<Tensor>>> {
        let Some(states) = self.states.get() else { bail!("the delta rule runs backward before forward") };
        let guards: Vec<_> = operands.iter().map(|x| x.storage_and_layout()).collect();
        let all = guards.iter().map(|(storage, layout)| Ok((M::floats(storage)?, *layout)));
        let all = all.collect::<Result<Vec<_>>>()?;
        let ((states, _), (grad, layout)) = (states.storage_and_layout(), grad.storage_and_layout());
        let states = BufferView::all(M::floats(&states)?);
        let grad = BufferView { floats: M::floats(&grad)?, start: layout.start_offset() };
        let grads =
            self.with_inputs(&all, |inputs: &Inputs<M>| self.call.backward(machine, inputs, states, grad))?;
        let like = operands.iter().zip(grads);
        like.map(|(like, floats)| machine.tensor(floats, like.shape().clone()).map(Some)).collect()
    }

    fn shape(&self) -> Shape {
        (self.call.samples, self.call.len, self.call.heads * self.call.value_width).into()
    }
}
