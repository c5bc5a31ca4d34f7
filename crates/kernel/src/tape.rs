//! Backward passes across fused operations without candle's price per edge.
//!
//! candle starts every gradient as a tensor of zeros and adds to it, which for each tensor between two operations
//! costs two more passes over memory than needed, and it keeps every tensor of the graph until the pass is over.
//! While a tape records, [`apply`] hands out its results as new leaves of candle's graph and notes the operation on
//! the tape. [`Tape::backward`] walks the tape from its end: the first gradient of a
//! tensor is moved, not added, and what an operation saved is freed as soon as it has been used. Views of a
//! result (heads, columns, other shapes) stand on the tape, too. Between the leaves candle's own operations and gradients work as ever.

use std::cell::RefCell;
use std::collections::HashSet;
use std::sync::Mutex;

use candle_core::backprop::GradStore;
#[cfg(feature = "cuda")]
use candle_core::cuda_backend::CudaStorage;
use candle_core::op::BackpropOp;
use candle_core::{
    CpuStorage, CustomOp1, DType, InplaceOp1, Layout, Result, Shape, Storage, Tensor, TensorId, bail,
};

use super::cpu::{par, rows, with_slices};
use super::nan_trace;
use super::op::{self, FusedOp};
use super::profile::{self, StepPart};

mod part;
mod recompute;
mod view;

pub use part::with_bf16_activations;
pub use recompute::recompute_in_backward;
pub use view::{columns, contiguous, merge_heads, reshape, split_heads, transpose};

thread_local! {
    static RECORDING: RefCell<Option<Vec<Entry>>> = const { RefCell::new(None) };
}

/// The fused operations of one forward pass, in order.
pub struct Tape(Vec<Entry>);

struct Entry {
    out: Tensor,
    operands: Vec<Tensor>,
    op: Box<dyn FusedOp>,
    /// Where in the model, while the thread is traced.
    place: Option<String>,
    /// Whether the result was given up after the forward pass and is made again when something reads it.
    given_up: bool,
}

impl Entry {
    /// Whether the result is a view of its operand, with a place in candle's graph of its own.
    fn is_view(&self) -> bool {
        !self.out.is_variable()
    }
}

/// Runs `forward` on this thread while a tape records. The gradients of what it returns are to be had from
/// [`Tape::backward`] only: candle's `backward` ends at the outputs of fused operations.
pub fn record<T, E>(
    forward: impl FnOnce() -> std::result::Result<T, E>,
) -> std::result::Result<(T, Tape), E> {
    /// Puts back what was there before, also when `forward` panics.
    struct Restore(Option<Vec<Entry>>);
    impl Drop for Restore {
        fn drop(&mut self) {
            RECORDING.set(self.0.take());
        }
    }
    let before = Restore(RECORDING.replace(Some(Vec::new())));
    let result = forward()?;
    let entries = RECORDING.take().unwrap_or_default();
    drop(before);
    Ok((result, Tape(entries)))
}

impl Tape {
    /// Gradients of the scalar `loss`, which was computed while this tape recorded.
    pub fn backward(mut self, loss: &Tensor) -> Result<GradStore> {
        self.make_again([loss])?;
        let views = self.0.iter().filter(|entry| entry.is_view()).map(|entry| entry.out.id()).collect();
        let mut grads = Grads { store: loss.backward()?, own: HashSet::new(), views };
        while let Some(Entry { out, operands, op, place, .. }) = self.0.pop() {
            let Some(grad) = grads.store.remove(&out) else { continue };
            self.make_again(&operands)?;
            let all: Vec<&Tensor> = operands.iter().collect();
            let grad = grad.detach();
            let grad = if grads.views.contains(&out.id()) { grad } else { grad.contiguous()? };
            let held = grads.hold(op.accumulates_into(), &all)?;
            let moved = |found: &Result<Vec<Option<Tensor>>>| {
                profile::bytes(all.iter().copied().chain([&grad]).chain(found.iter().flatten().flatten()))
            };
            let out = op.needs_output().then_some(out);
            let backward = || op.backward_accumulate(&all, out.as_ref(), &grad, held);
            let found = profile::time(op.name(), StepPart::Backward, moved, backward)?;
            if let Some(place) = &place {
                let what = format!("backward of {}", op.name());
                found.iter().flatten().try_for_each(|grad| nan_trace::check_at(place, &what, grad))?;
            }
            grads.note(&found, all.iter().copied().chain(&out).chain([&grad]));
            for (operand, grad) in operands.iter().zip(found) {
                grads.add(operand, grad)?;
            }
        }
        Ok(grads.store)
    }
}

/// The gradients so far.
struct Grads {
    store: GradStore,
    /// Those whose memory nobody else has: they may be added to in place.
    own: HashSet<TensorId>,
    /// Views that the tape sends gradients on from.
    views: HashSet<TensorId>,
}

impl Grads {
    /// Takes the gradients of the operands numbered `wanted` out as vectors; an empty one where there is none that may be
    /// added to. Nothing at all where there is no other.
    fn hold(&mut self, wanted: &[usize], operands: &[&Tensor]) -> Result<Vec<Vec<f32>>> {
        let held = |&index: &usize| {
            let Some(&operand) = operands.get(index).filter(|operand| self.is_on_tape(operand)) else {
                return Ok(Vec::new());
            };
            match self.store.get_id(operand.id()).map(|grad| self.own.contains(&grad.id())) {
                Some(true) => self.store.remove(operand).map_or(Ok(Vec::new()), |grad| take(&grad)),
                _ => Ok(Vec::new()),
            }
        };
        let held = wanted.iter().map(held).collect::<Result<Vec<_>>>()?;
        Ok(if held.iter().all(Vec::is_empty) { Vec::new() } else { held })
    }

    /// Notes which of the gradients that an operation `found` have memory of their own: neither each other's nor that of
    /// the tensors that it was `given`.
    fn note<'a>(&mut self, found: &[Option<Tensor>], given: impl Iterator<Item = &'a Tensor>) {
        let given: Vec<_> = given.filter_map(memory).map(|(at, _)| at).collect();
        let all: Vec<_> = found.iter().flatten().filter_map(|grad| Some((grad, memory(grad)?))).collect();
        for (grad, (at, whole)) in &all {
            let alone = all.iter().filter(|(_, (other, _))| other == at).count() == 1;
            if !alone {
                self.own.remove(&grad.id()); // what was given goes to several operands
            } else if *whole && !given.contains(at) {
                self.own.insert(grad.id());
            }
        }
    }

    /// Whether gradients of a tensor are collected here: it is a leaf of candle's graph or a view on the tape.
    fn is_on_tape(&self, tensor: &Tensor) -> bool {
        tensor.is_variable() || self.views.contains(&tensor.id())
    }

    /// Adds a gradient to a leaf or a view, or sends it through candle's operations down to the leaves.
    fn add(&mut self, tensor: &Tensor, grad: Option<Tensor>) -> Result<()> {
        let Some(grad) = grad else { return Ok(()) };
        if self.is_on_tape(tensor) {
            let sum = match self.store.remove(tensor) {
                Some(before) => {
                    let sum = || self.sum(before, grad);
                    profile::time("sum of gradients", StepPart::Backward, profile::none, sum)?
                }
                None => grad,
            };
            self.store.insert(tensor, sum);
        } else if tensor.track_op() {
            part::expand(tensor)?;
            let through = || tensor.apply_op1(Seed(grad))?.backward();
            self.store.extend(profile::time(
                "plain operations",
                StepPart::Backward,
                profile::none,
                through,
            )?)?;
        }
        Ok(())
    }

    /// a + b on our own threads: candle's pool waits for work in a loop, which takes a core from the kernels. In the memory
    /// of one of them where nobody else has it.
    fn sum(&mut self, a: Tensor, b: Tensor) -> Result<Tensor> {
        let ours = |x: &Tensor| x.device().is_cpu() && x.dtype() == DType::F32;
        if a.shape() != b.shape() || !ours(&a) || !ours(&b) {
            return a + b;
        }
        let (a, b) = if self.own.contains(&a.id()) { (a, b) } else { (b, a) };
        let (shape, b) = (a.shape().clone(), b.contiguous()?);
        let sum = if self.own.remove(&a.id()) {
            let mut sum = take(&a)?;
            with_slices([&b], |[b]| {
                let chunks = sum.chunks_mut(SUM_CHUNK).zip(b.chunks(SUM_CHUNK));
                par::each_piece(chunks, |_, (sum, b)| rows::add(b, sum));
                Ok(())
            })?;
            sum
        } else {
            with_slices([&a.contiguous()?, &b], |[a, b]| {
                Ok(par::build(a.len(), SUM_CHUNK, |index, out| {
                    out.copy_from_slice(&a[index * SUM_CHUNK..][..out.len()]);
                    rows::add(&b[index * SUM_CHUNK..][..out.len()], out);
                }))
            })?
        };
        let sum = Tensor::from_vec(sum, shape, a.device())?;
        self.own.insert(sum.id());
        Ok(sum)
    }
}

/// Elements that one thread adds at a time.
const SUM_CHUNK: usize = 1 << 14;

/// Where the elements of a tensor of our kind begin, and whether they are all that its memory holds.
fn memory(tensor: &Tensor) -> Option<(*const f32, bool)> {
    let (storage, layout) = tensor.storage_and_layout();
    match &*storage {
        Storage::Cpu(CpuStorage::F32(data)) => {
            Some((data.as_ptr(), layout.is_contiguous() && data.len() == layout.shape().elem_count()))
        }
        _ => None,
    }
}

/// The elements of a tensor that nobody else reads, without a copy; nothing is left in it.
fn take(tensor: &Tensor) -> Result<Vec<f32>> {
    let taken = Take(Mutex::new(Vec::new()));
    tensor.inplace_op1(&taken)?;
    Ok(taken.0.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner))
}

struct Take(Mutex<Vec<f32>>);

impl InplaceOp1 for Take {
    fn name(&self) -> &'static str {
        "take"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, _: &Layout) -> Result<()> {
        let CpuStorage::F32(data) = storage else { bail!("only f32 is taken") };
        *self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = std::mem::take(data);
        Ok(())
    }
}

/// A scalar whose gradient is the given tensor.
struct Seed(Tensor);

impl CustomOp1 for Seed {
    fn name(&self) -> &'static str {
        "seed"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        Ok((CpuStorage::F32(vec![0.0]), Shape::from(())))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, x: &CudaStorage, _: &Layout) -> Result<(CudaStorage, Shape)> {
        let zero = x.device.alloc_zeros::<f32>(1)?;
        Ok((CudaStorage::wrap_cuda_slice(zero, x.device.clone()), Shape::from(())))
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, _: &Tensor) -> Result<Option<Tensor>> {
        Ok(Some(self.0.clone()))
    }
}

/// Whether an operation on these tensors has to be noted.
fn records(tensors: &[&Tensor]) -> bool {
    let ours = |x: &&&Tensor| x.device().is_cpu() || cfg!(feature = "cuda") && x.device().is_cuda();
    tensors.iter().filter(ours).any(|x| x.track_op()) && RECORDING.with_borrow(|entries| entries.is_some())
}

/// The result of `op`, noted on the tape if one records.
pub fn apply<O: FusedOp>(operands: &[&Tensor], op: O) -> Result<Tensor> {
    let name = op.name();
    let moved = |out: &Result<Tensor>| profile::bytes(operands.iter().copied().chain(out));
    if !records(operands) {
        let out = profile::time(name, StepPart::Forward, moved, || op::in_graph(op, operands))?;
        return nan_trace::check(name, &out).map(|()| out);
    }
    let run = || {
        let (storage, shape) = op::run(&op, operands)?;
        Ok(Tensor::from_storage(storage, shape, BackpropOp::none(), true))
    };
    let out = profile::time(name, StepPart::Forward, moved, run)?;
    nan_trace::check(name, &out)?;
    RECORDING.with_borrow_mut(|entries| {
        if let Some(entries) = entries {
            let operands = operands.iter().map(|&x| x.clone()).collect();
            let (out, place) = (out.clone(), nan_trace::place());
            entries.push(Entry { out, operands, op: Box::new(op), place, given_up: false });
        }
    });
    Ok(out)
}

#[cfg(test)]
mod tests;
