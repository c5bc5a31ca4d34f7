//! Backward passes across fused operations without candle's price per edge.
//!
//! candle starts every gradient as a tensor of zeros and adds to it, which for each tensor between two operations
//! costs two more passes over memory than needed, and it keeps every tensor of the graph until the pass is over.
//! While a tape records, [`apply1`], [`apply2`] and [`apply3`] hand out their results as new leaves of candle's graph
//! and note the operation on the tape. [`Tape::backward`] walks the tape from its end: the first gradient of a
//! tensor is moved, not added, and what an operation saved is freed as soon as it has been used. Between the
//! leaves candle's own operations and gradients work as ever.

use std::cell::RefCell;

use candle_core::backprop::GradStore;
#[cfg(feature = "cuda")]
use candle_core::cuda_backend::CudaStorage;
use candle_core::op::BackpropOp;
use candle_core::{
    CpuStorage, CustomOp1, CustomOp2, CustomOp3, DType, Layout, Result, Shape, Storage, Tensor, bail,
};

use super::cpu::{par, rows, with_slices};
use super::nan_trace;

thread_local! {
    static RECORDING: RefCell<Option<Vec<Entry>>> = const { RefCell::new(None) };
}

/// The fused operations of one forward pass, in order.
pub struct Tape(Vec<Entry>);

struct Entry {
    out: Tensor,
    call: Call,
    /// Where in the model, while the thread is traced.
    place: Option<String>,
}

enum Call {
    One(Tensor, Box<dyn CustomOp1>),
    Two([Tensor; 2], Box<dyn CustomOp2>),
    Three([Tensor; 3], Box<dyn CustomOp3>),
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
        let mut grads = loss.backward()?;
        while let Some(Entry { out, call, place }) = self.0.pop() {
            let Some(grad) = grads.remove(&out) else { continue };
            let grad = grad.detach();
            let look = |name: &str, grad: &Option<Tensor>| match (&place, grad) {
                (Some(place), Some(grad)) => nan_trace::check_at(place, &format!("backward of {name}"), grad),
                _ => Ok(()),
            };
            match call {
                Call::One(x, op) => {
                    let dx = op.bwd(&x, &out, &grad)?;
                    look(op.name(), &dx)?;
                    add(&mut grads, &x, dx)?;
                }
                Call::Two([x, y], op) => {
                    let (dx, dy) = op.bwd(&x, &y, &out, &grad)?;
                    [&dx, &dy].into_iter().try_for_each(|grad| look(op.name(), grad))?;
                    add(&mut grads, &x, dx)?;
                    add(&mut grads, &y, dy)?;
                }
                Call::Three([x, y, z], op) => {
                    let (dx, dy, dz) = op.bwd(&x, &y, &z, &out, &grad)?;
                    [&dx, &dy, &dz].into_iter().try_for_each(|grad| look(op.name(), grad))?;
                    add(&mut grads, &x, dx)?;
                    add(&mut grads, &y, dy)?;
                    add(&mut grads, &z, dz)?;
                }
            }
        }
        Ok(grads)
    }
}

/// Adds a gradient to a leaf, or sends it through candle's operations down to the leaves.
fn add(grads: &mut GradStore, tensor: &Tensor, grad: Option<Tensor>) -> Result<()> {
    let Some(grad) = grad else { return Ok(()) };
    if tensor.is_variable() {
        let sum = match grads.remove(tensor) {
            Some(before) => sum(&before, &grad)?,
            None => grad,
        };
        grads.insert(tensor, sum);
    } else if tensor.track_op() {
        grads.extend(tensor.apply_op1(Seed(grad))?.backward()?)?;
    }
    Ok(())
}

/// a + b on our own threads: candle's pool waits for work in a loop, which takes a core from the kernels.
fn sum(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    let ours = |x: &Tensor| x.device().is_cpu() && x.dtype() == DType::F32;
    if a.shape() != b.shape() || !ours(a) || !ours(b) {
        return a + b;
    }
    let data = with_slices([&a.contiguous()?, &b.contiguous()?], |[a, b]| {
        Ok(par::build(a.len(), SUM_CHUNK, |index, out| {
            out.copy_from_slice(&a[index * SUM_CHUNK..][..out.len()]);
            rows::add(&b[index * SUM_CHUNK..][..out.len()], out);
        }))
    })?;
    Tensor::from_vec(data, a.shape(), a.device())
}

/// Elements that one thread adds at a time.
const SUM_CHUNK: usize = 1 << 14;

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

fn leaf(storage: Storage, shape: Shape) -> Tensor {
    Tensor::from_storage(storage, shape, BackpropOp::none(), true)
}

fn foreign(op: &str) -> Result<Tensor> {
    bail!("{op} was given tensors of different devices, or of one without kernels")
}

fn note(out: &Tensor, call: Call) {
    RECORDING.with_borrow_mut(|entries| {
        if let Some(entries) = entries {
            entries.push(Entry { out: out.clone(), call, place: nan_trace::place() });
        }
    });
}

/// Like `x.apply_op1(op)`, noted on the tape if one records.
///
/// # Errors
/// Whatever the operation fails with.
pub fn apply1<C: CustomOp1 + Send + Sync + 'static>(x: &Tensor, op: C) -> Result<Tensor> {
    if !records(&[x]) {
        let name = op.name();
        return x.apply_op1(op).and_then(|out| nan_trace::check(name, &out).map(|()| out));
    }
    let out = {
        let (storage, layout) = x.storage_and_layout();
        match &*storage {
            Storage::Cpu(x) => op.cpu_fwd(x, layout).map(|(out, shape)| leaf(Storage::Cpu(out), shape))?,
            #[cfg(feature = "cuda")]
            Storage::Cuda(x) => op.cuda_fwd(x, layout).map(|(out, shape)| leaf(Storage::Cuda(out), shape))?,
            _ => foreign(op.name())?,
        }
    };
    nan_trace::check(op.name(), &out)?;
    note(&out, Call::One(x.clone(), Box::new(op)));
    Ok(out)
}

/// Like `x.apply_op2(y, op)`, noted on the tape if one records.
///
/// # Errors
/// Whatever the operation fails with.
pub fn apply2<C: CustomOp2 + Send + Sync + 'static>(x: &Tensor, y: &Tensor, op: C) -> Result<Tensor> {
    if !records(&[x, y]) {
        let name = op.name();
        return x.apply_op2(y, op).and_then(|out| nan_trace::check(name, &out).map(|()| out));
    }
    let out = {
        let ((s1, l1), (s2, l2)) = (x.storage_and_layout(), y.storage_and_layout());
        match (&*s1, &*s2) {
            (Storage::Cpu(s1), Storage::Cpu(s2)) => {
                op.cpu_fwd(s1, l1, s2, l2).map(|(out, shape)| leaf(Storage::Cpu(out), shape))?
            }
            #[cfg(feature = "cuda")]
            (Storage::Cuda(s1), Storage::Cuda(s2)) => {
                op.cuda_fwd(s1, l1, s2, l2).map(|(out, shape)| leaf(Storage::Cuda(out), shape))?
            }
            _ => foreign(op.name())?,
        }
    };
    nan_trace::check(op.name(), &out)?;
    note(&out, Call::Two([x.clone(), y.clone()], Box::new(op)));
    Ok(out)
}

/// Like `x.apply_op3(y, z, op)`, noted on the tape if one records.
///
/// # Errors
/// Whatever the operation fails with.
pub fn apply3<C: CustomOp3 + Send + Sync + 'static>(
    x: &Tensor,
    y: &Tensor,
    z: &Tensor,
    op: C,
) -> Result<Tensor> {
    if !records(&[x, y, z]) {
        let name = op.name();
        return x.apply_op3(y, z, op).and_then(|out| nan_trace::check(name, &out).map(|()| out));
    }
    let out = {
        let ((s1, l1), (s2, l2)) = (x.storage_and_layout(), y.storage_and_layout());
        let (s3, l3) = z.storage_and_layout();
        match (&*s1, &*s2, &*s3) {
            (Storage::Cpu(s1), Storage::Cpu(s2), Storage::Cpu(s3)) => {
                op.cpu_fwd(s1, l1, s2, l2, s3, l3).map(|(out, shape)| leaf(Storage::Cpu(out), shape))?
            }
            #[cfg(feature = "cuda")]
            (Storage::Cuda(s1), Storage::Cuda(s2), Storage::Cuda(s3)) => {
                op.cuda_fwd(s1, l1, s2, l2, s3, l3).map(|(out, shape)| leaf(Storage::Cuda(out), shape))?
            }
            _ => foreign(op.name())?,
        }
    };
    nan_trace::check(op.name(), &out)?;
    note(&out, Call::Three([x.clone(), y.clone(), z.clone()], Box::new(op)));
    Ok(out)
}

#[cfg(test)]
mod tests {
    use candle_core::Var;

    use super::*;
    use crate::kernel::activation::gelu;
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
        impl CustomOp1 for Counted {
            fn name(&self) -> &'static str {
                "counted"
            }
            fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
                ALIVE.fetch_add(1, SeqCst);
                Ok((x.clone(), layout.shape().clone()))
            }
            fn bwd(&self, _: &Tensor, _: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
                // Operation number i runs backward when all later ones are gone.
                assert_eq!(ALIVE.load(SeqCst), self.0 + 1);
                Ok(Some(grad.clone()))
            }
        }
        let var = Var::from_tensor(&randn("x", &[3])).unwrap();
        let forward = || {
            let mut x = var.as_tensor().clone();
            for i in 0..4 {
                x = apply1(&x, Counted(i))?;
            }
            x.sum_all()
        };
        let (loss, tape) = record(forward).unwrap();
        assert_eq!(flat(&tape.backward(&loss).unwrap(), &[var]), [[1.0, 1.0, 1.0]]);
    }
}
