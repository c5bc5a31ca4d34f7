//! Results that are given up after the forward pass and made again in the backward pass.

use std::sync::Mutex;

use candle_core::{CpuStorage, DType, InplaceOp1, Layout, Result, Storage, Tensor, bail};

use super::{Entry, RECORDING, Tape, take};
use crate::op;
use crate::profile::{self, StepPart};

/// Gives up the elements of `result`, which nothing reads any more before the backward pass: when that reads it, the operation
/// that gave it runs again. For what costs less to compute than to keep, such as a normalisation. Nothing happens to a result that
/// no fused operation of this recording on the CPU gave.
pub fn recompute_in_backward(result: &Tensor) -> Result<()> {
    RECORDING.with_borrow_mut(|entries| {
        let entry = entries.iter_mut().flatten().rev().find(|entry| entry.out.id() == result.id());
        let Some(entry) = entry.filter(|entry| entry.can_be_given_up()) else { return Ok(()) };
        entry.given_up = true;
        take(result).map(drop)
    })
}

impl Entry {
    fn can_be_given_up(&self) -> bool {
        let on_cpu = || matches!(&*self.out.storage_and_layout().0, Storage::Cpu(CpuStorage::F32(_)));
        !self.given_up
            && !self.is_view()
            && !self.op.needs_output()
            && self.out.dtype() == DType::F32
            && on_cpu()
    }
}

impl Tape {
    /// Makes again what was given up of `tensors` and of what they are views of.
    pub(super) fn make_again<'a>(&mut self, tensors: impl IntoIterator<Item = &'a Tensor>) -> Result<()> {
        if !self.0.iter().any(|entry| entry.given_up) {
            return Ok(());
        }
        for tensor in tensors {
            for node in tensor.sorted_nodes() {
                let given_up = |entry: &Entry| entry.given_up && entry.out.id() == node.id();
                if let Some(index) = self.0.iter().rposition(given_up) {
                    self.run_again(index)?;
                }
            }
        }
        Ok(())
    }

    fn run_again(&mut self, index: usize) -> Result<()> {
        self.0[index].given_up = false;
        let operands = self.0[index].operands.clone();
        self.make_again(&operands)?;
        let Entry { out, op, .. } = &self.0[index];
        let operands: Vec<&Tensor> = operands.iter().collect();
        let moved = |_: &Result<()>| profile::bytes(operands.iter().copied().chain([out]));
        profile::time(op.name(), StepPart::Backward, moved, || {
            let (Storage::Cpu(CpuStorage::F32(elements)), _) = op::run(op.as_ref(), &operands)? else {
                bail!("{} gave something else the second time", op.name())
            };
            out.inplace_op1(&Put(Mutex::new(elements)))
        })
    }
}

/// Gives a tensor its elements back.
struct Put(Mutex<Vec<f32>>);

impl InplaceOp1 for Put {
    fn name(&self) -> &'static str {
        "put"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, _: &Layout) -> Result<()> {
        let elements = std::mem::take(&mut *self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner));
        *storage = CpuStorage::F32(elements);
        Ok(())
    }
}
