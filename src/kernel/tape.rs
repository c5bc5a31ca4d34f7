//! Backward passes across fused operations without candle's price per edge.
//!
//! candle starts every gradient as a tensor of zeros and adds to it, which for each tensor between two operations
//! costs two more passes over memory than needed, and it keeps every tensor of the graph until the pass is over.
//! While a tape records, [`apply`] hands out its results as new leaves of candle's graph and notes the operation on
//! the tape. [`Tape::backward`] walks the tape from its end: the first gradient of a
//! tensor is moved, not added, and what an operation saved is freed as soon as it has been used. Between the
//! leaves candle's own operations and gradients work as ever.

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
use rayon::prelude::*;

use super::cpu::{par, rows, with_slices};
use super::nan_trace;
use super::op::{self, Op};
use super::profile::{self, Part};

thread_local! {
    static RECORDING: RefCell<Option<Vec<Entry>>> = const { RefCell::new(None) };
}

/// The fused operations of one forward pass, in order.
pub struct Tape(Vec<Entry>);

struct Entry {
    out: Tensor,
    operands: Vec<Tensor>,
    op: Box<dyn Op>,
    /// Where in the model, while the thread is traced.
    place: Option<String>,
}

/// Runs `forward` on this thread while a tape records. The gradients of what it returns are to be had from
/// [`Tape::backward`] only: candle's `backward` ends at the outputs of fused operations.
///
/// # Errors
/// Whatever `forward` fails with.
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
    ///
    /// # Errors
    /// Failures of an operation.
    pub fn backward(mut self, loss: &Tensor) -> Result<GradStore> {
        let mut grads = Grads { store: loss.backward()?, own: HashSet::new() };
        while let Some(Entry { out, operands, op, place }) = self.0.pop() {
            let Some(grad) = grads.store.remove(&out) else { continue };
            let all: Vec<&Tensor> = operands.iter().collect();
            let grad = grad.detach().contiguous()?;
            let held = grads.hold(op.adds_to(), &all)?;
            let moved = |found: &Result<Vec<Option<Tensor>>>| {
                profile::bytes(all.iter().copied().chain([&grad]).chain(found.iter().flatten().flatten()))
            };
            let backward = || match held.is_empty() {
                true => op.backward(&all, &out, &grad),
                false => op.backward_onto(&all, &out, &grad, held),
            };
            let found = profile::time(op.name(), Part::Backward, moved, backward)?;
            if let Some(place) = &place {
                let what = format!("backward of {}", op.name());
                found.iter().flatten().try_for_each(|grad| nan_trace::check_at(place, &what, grad))?;
            }
            grads.note(&found, all.iter().copied().chain([&out, &grad]));
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
}

impl Grads {
    /// Takes the gradients of the operands numbered `wanted` out as vectors; an empty one where there is none that may be
    /// added to. Nothing at all where there is no other.
    fn hold(&mut self, wanted: &[usize], operands: &[&Tensor]) -> Result<Vec<Vec<f32>>> {
        let held = |&index: &usize| {
            let Some(&operand) = operands.get(index).filter(|operand| operand.is_variable()) else {
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
            let alone = !given.contains(at) && all.iter().filter(|(_, (other, _))| other == at).count() == 1;
            if alone && *whole {
                self.own.insert(grad.id());
            }
        }
    }

    /// Adds a gradient to a leaf, or sends it through candle's operations down to the leaves.
    fn add(&mut self, tensor: &Tensor, grad: Option<Tensor>) -> Result<()> {
        let Some(grad) = grad else { return Ok(()) };
        if tensor.is_variable() {
            let sum = match self.store.remove(tensor) {
                Some(before) => {
                    let sum = || self.sum(before, grad);
                    profile::time("sum of gradients", Part::Backward, profile::none, sum)?
                }
                None => grad,
            };
            self.store.insert(tensor, sum);
        } else if tensor.track_op() {
            let through = || tensor.apply_op1(Seed(grad))?.backward();
            self.store.extend(profile::time("plain operations", Part::Backward, profile::none, through)?)?;
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
                let chunks = sum.par_chunks_mut(SUM_CHUNK).zip(b.par_chunks(SUM_CHUNK));
                chunks.for_each(|(sum, b)| rows::add(b, sum));
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
///
/// # Errors
/// Whatever the operation fails with.
pub fn apply<O: Op>(operands: &[&Tensor], op: O) -> Result<Tensor> {
    let name = op.name();
    let moved = |out: &Result<Tensor>| profile::bytes(operands.iter().copied().chain(out));
    if !records(operands) {
        let out = profile::time(name, Part::Forward, moved, || op::in_graph(op, operands))?;
        return nan_trace::check(name, &out).map(|()| out);
    }
    let run = || {
        let (storage, shape) = op::run(&op, operands)?;
        Ok(Tensor::from_storage(storage, shape, BackpropOp::none(), true))
    };
    let out = profile::time(name, Part::Forward, moved, run)?;
    nan_trace::check(name, &out)?;
    RECORDING.with_borrow_mut(|entries| {
        if let Some(entries) = entries {
            let operands = operands.iter().map(|&x| x.clone()).collect();
            let (out, place) = (out.clone(), nan_trace::place());
            entries.push(Entry { out, operands, op: Box::new(op), place });
        }
    });
    Ok(out)
}

#[cfg(test)]
mod tests {
    use candle_core::{Var, bail};

    use super::*;
    use crate::kernel::activation::gelu;
    use crate::kernel::cpu::slices;
    use crate::kernel::linear::linear;
    use crate::kernel::testing::randn;

    /// Fused operations in a chain, shared inputs, candle operations between, an unused output, a fused result that
    /// is the loss's only input, and a parameter that is used twice, once as a view.
    fn loss(x: &Tensor, w: &Tensor, b: &Tensor) -> Result<Tensor> {
        let hidden = gelu(&linear(x, w, Some(b))?)?;
        let _unused = gelu(&hidden)?;
        let mixed = (gelu(&(&hidden * 2.0)?)? + &hidden)?.narrow(1, 1, 3)?.contiguous()?;
        let again = linear(&mixed, &w.narrow(0, 0, 3)?.narrow(1, 0, 3)?, None)?;
        let product = (&again * &gelu(&again)?)?;
        linear(&product.sum_keepdim(0)?, &Tensor::ones((1, 3), x.dtype(), x.device())?, None)?.sum_all()
    }

    fn vars() -> [Var; 3] {
        [randn("x", &[7, 3]), randn("w", &[5, 3]), randn("b", &[5])].map(|x| Var::from_tensor(&x).unwrap())
    }

    fn flat(grads: &GradStore, vars: &[Var]) -> Vec<Vec<f32>> {
        vars.iter().map(|var| grads.get(var).unwrap().flatten_all().unwrap().to_vec1().unwrap()).collect()
    }

    #[test]
    fn the_tape_gives_candles_gradients() {
        let vars = vars();
        let run = || loss(vars[0].as_tensor(), vars[1].as_tensor(), vars[2].as_tensor());
        let plain = run().unwrap();
        let expected = flat(&plain.backward().unwrap(), &vars);
        let (taped, tape) = record(run).unwrap();
        assert!(tape.0.len() > 5);
        assert_eq!(plain.to_scalar::<f32>().unwrap(), taped.to_scalar::<f32>().unwrap());
        let found = flat(&tape.backward(&taped).unwrap(), &vars);
        for (found, expected) in found.iter().flatten().zip(expected.iter().flatten()) {
            assert!(
                (found - expected).abs() <= 1e-5 * (1.0 + expected.abs()),
                "{found} instead of {expected}"
            );
        }
    }

    #[test]
    fn a_loss_that_is_a_fused_result_has_gradients() {
        let var = Var::from_tensor(&randn("x", &[1])).unwrap();
        let (loss, tape) = record(|| gelu(var.as_tensor())?.squeeze(0)).unwrap();
        assert!(tape.backward(&loss).unwrap().get(&var).is_some());
        let (loss, tape) = record(|| gelu(&var.squeeze(0)?)).unwrap();
        assert!(tape.backward(&loss).unwrap().get(&var).is_some());
    }

    #[test]
    fn nothing_is_noted_for_constants_or_outside_of_a_recording() {
        let constant = randn("x", &[2, 3]);
        let (_, tape) = record(|| gelu(&constant)).unwrap();
        assert!(tape.0.is_empty());
        let var = Var::from_tensor(&constant).unwrap();
        assert!(record(|| -> Result<()> { bail!("no") }).is_err());
        let y = gelu(var.as_tensor()).unwrap();
        assert!(!y.is_variable() && y.track_op());
    }

    /// a + b, whose gradients are one tensor.
    struct Both;

    impl Op for Both {
        fn name(&self) -> &'static str {
            "both"
        }
        fn forward(&self, operands: &[(&CpuStorage, &Layout)]) -> Result<(Vec<f32>, Shape)> {
            let [a, b] = slices(operands)?;
            Ok((a.iter().zip(b).map(|(a, b)| a + b).collect(), operands[0].1.shape().clone()))
        }
        fn backward(&self, _: &[&Tensor], _: &Tensor, grad: &Tensor) -> Result<Vec<Option<Tensor>>> {
            Ok(vec![Some(grad.clone()), Some(grad.clone())])
        }
    }

    /// 2 x, which adds to the gradient of x that is there.
    struct Onto;

    impl Op for Onto {
        fn name(&self) -> &'static str {
            "onto"
        }
        fn forward(&self, operands: &[(&CpuStorage, &Layout)]) -> Result<(Vec<f32>, Shape)> {
            let [x] = slices(operands)?;
            Ok((x.iter().map(|x| 2.0 * x).collect(), operands[0].1.shape().clone()))
        }
        fn backward(&self, x: &[&Tensor], out: &Tensor, grad: &Tensor) -> Result<Vec<Option<Tensor>>> {
            self.backward_onto(x, out, grad, Vec::new())
        }
        fn adds_to(&self) -> &'static [usize] {
            &[0]
        }
        fn backward_onto(
            &self,
            _: &[&Tensor],
            _: &Tensor,
            grad: &Tensor,
            held: Vec<Vec<f32>>,
        ) -> Result<Vec<Option<Tensor>>> {
            let [mut held] = op::held(held);
            held.resize(grad.elem_count(), 0.0);
            let sum = held.iter().zip(grad.to_vec1::<f32>()?).map(|(held, grad)| held + 2.0 * grad).collect();
            Ok(vec![Tensor::from_vec::<_, f32>(sum, grad.shape(), grad.device()).map(Some)?])
        }
    }

    #[test]
    fn gradients_are_added_in_place_only_where_nobody_else_has_their_memory() {
        let [x, y] = ["x", "y"].map(|name| Var::from_tensor(&randn(name, &[3])).unwrap());
        let forward = || {
            // backward runs from the last: the shared gradient comes first, then two sums and what adds by itself
            let parts = [
                apply(&[x.as_tensor()], Onto)?,
                apply(&[x.as_tensor()], Onto)?,
                apply(&[x.as_tensor()], Onto)?,
                apply(&[x.as_tensor(), y.as_tensor()], Both)?,
            ];
            parts
                .iter()
                .try_fold(Tensor::zeros(3, DType::F32, x.device())?, |sum, part| sum + part)?
                .sum_all()
        };
        let (loss, tape) = record(forward).unwrap();
        assert_eq!(flat(&tape.backward(&loss).unwrap(), &[x, y]), [[7.0; 3], [1.0; 3]]);
    }

    #[test]
    fn saved_tensors_are_freed_on_the_way() {
        use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
        static ALIVE: AtomicUsize = AtomicUsize::new(0);
        struct Counted(usize);
        impl Drop for Counted {
            fn drop(&mut self) {
                ALIVE.fetch_sub(1, SeqCst);
            }
        }
        impl Op for Counted {
            fn name(&self) -> &'static str {
                "counted"
            }
            fn forward(&self, operands: &[(&CpuStorage, &Layout)]) -> Result<(Vec<f32>, Shape)> {
                ALIVE.fetch_add(1, SeqCst);
                let [x] = slices(operands)?;
                Ok((x.to_vec(), operands[0].1.shape().clone()))
            }
            fn backward(&self, _: &[&Tensor], _: &Tensor, grad: &Tensor) -> Result<Vec<Option<Tensor>>> {
                // Operation number i runs backward when all later ones are gone.
                assert_eq!(ALIVE.load(SeqCst), self.0 + 1);
                Ok(vec![Some(grad.clone())])
            }
        }
        let var = Var::from_tensor(&randn("x", &[3])).unwrap();
        let forward = || {
            let mut x = var.as_tensor().clone();
            for i in 0..4 {
                x = apply(&[&x], Counted(i))?;
            }
            x.sum_all()
        };
        let (loss, tape) = record(forward).unwrap();
        assert_eq!(flat(&tape.backward(&loss).unwrap(), &[var]), [[1.0, 1.0, 1.0]]);
    }
}
