use candle_core::{Var, bail};

use super::*;
use crate::activation::gelu;
use crate::cpu::slices;
use crate::linear::linear;
use crate::op::SavedOutput;
use crate::testing::randn;

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
        assert!((found - expected).abs() <= 1e-5 * (1.0 + expected.abs()), "{found} instead of {expected}");
    }
}

#[test]
fn what_is_given_up_is_made_again_for_whoever_reads_it() {
    let vars = vars();
    let run = |gives_up: bool| {
        record(|| {
            let norm = crate::norm::layer_norm(&vars[0], &vars[2].narrow(0, 0, 3)?, &vars[2].narrow(0, 1, 3)?, 1e-5)?;
            let again = crate::norm::layer_norm(&norm, &vars[2].narrow(0, 0, 3)?, &vars[2].narrow(0, 2, 3)?, 1e-5)?;
            let hidden = linear(&again, &vars[1], None)?;
            let plain = (again.narrow(0, 2, 4)?.sqr()? * norm.narrow(0, 1, 4)?)?; // reads both in its backward pass
            let loss = (hidden.sum_all()? + linear(&plain, &vars[1], None)?.sum_all()?)?;
            let weighed = (loss + again.sqr()?.sum_all()?)?;
            if gives_up {
                recompute_in_backward(&again)?;
                recompute_in_backward(&norm)?;
                recompute_in_backward(&vars[0])?; // no operation gave it
                let is_empty = |x: &Tensor| {
                    matches!(&*x.storage_and_layout().0, Storage::Cpu(CpuStorage::F32(data)) if data.is_empty())
                };
                assert!(is_empty(&again) && is_empty(&norm) && !is_empty(&vars[0]));
            }
            Ok::<_, candle_core::Error>(weighed)
        })
        .unwrap()
    };
    let [kept, given_up] = [false, true].map(|gives_up| {
        let (loss, tape) = run(gives_up);
        flat(&tape.backward(&loss).unwrap(), &vars)
    });
    assert_eq!(kept, given_up);
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

impl FusedOp for Both {
    fn name(&self) -> &'static str {
        "both"
    }
    fn forward(&self, operands: &[(&CpuStorage, &Layout)]) -> Result<(Vec<f32>, Shape)> {
        let [a, b] = slices(operands)?;
        Ok((a.iter().zip(b).map(|(a, b)| a + b).collect(), operands[0].1.shape().clone()))
    }
    fn backward(&self, _: &[&Tensor], _: SavedOutput, grad: &Tensor) -> Result<Vec<Option<Tensor>>> {
        Ok(vec![Some(grad.clone()), Some(grad.clone())])
    }
}

/// 2 x, which adds to the gradient of x that is there.
struct Onto;

impl FusedOp for Onto {
    fn name(&self) -> &'static str {
        "onto"
    }
    fn forward(&self, operands: &[(&CpuStorage, &Layout)]) -> Result<(Vec<f32>, Shape)> {
        let [x] = slices(operands)?;
        Ok((x.iter().map(|x| 2.0 * x).collect(), operands[0].1.shape().clone()))
    }
    fn accumulates_into(&self) -> &'static [usize] {
        &[0]
    }
    fn backward_accumulate(
        &self,
        _: &[&Tensor],
        _: SavedOutput,
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
        parts.iter().try_fold(Tensor::zeros(3, DType::F32, x.device())?, |sum, part| sum + part)?.sum_all()
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
    impl FusedOp for Counted {
        fn name(&self) -> &'static str {
            "counted"
        }
        fn forward(&self, operands: &[(&CpuStorage, &Layout)]) -> Result<(Vec<f32>, Shape)> {
            ALIVE.fetch_add(1, SeqCst);
            let [x] = slices(operands)?;
            Ok((x.to_vec(), operands[0].1.shape().clone()))
        }
        fn backward(&self, _: &[&Tensor], _: SavedOutput, grad: &Tensor) -> Result<Vec<Option<Tensor>>> {
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

#[test]
fn gradients_of_views_are_those_of_candle() {
    let vars = [randn("x", &[2, 5, 3]), randn("w", &[12, 3])].map(|x| Var::from_tensor(&x).unwrap());
    let run = || {
        let rows = linear(&vars[0], &vars[1], None)?; // [2, 5, 12]
        let (first, last) = (split_heads(&rows, 2, (0, 3))?, split_heads(&rows, 2, (2, 3))?);
        let middle = contiguous(&columns(&rows, 3, 4)?)?;
        let product = crate::activation::swiglu(&merge_heads(&first)?, &middle)?;
        let again = gelu(&reshape(&product, (10, 4))?)?.sum_all()?;
        let plain = (&last * &last)?.sum_all()?; // an operation of candle's that reads a view
        (again + plain)? + gelu(&merge_heads(&last)?)?.sum_all()?
    };
    let expected = flat(&run().unwrap().backward().unwrap(), &vars);
    let (loss, tape) = record(run).unwrap();
    assert!(tape.0.iter().filter(|entry| entry.is_view()).count() >= 7);
    let found = flat(&tape.backward(&loss).unwrap(), &vars);
    for (found, expected) in found.iter().flatten().zip(expected.iter().flatten()) {
        assert!((found - expected).abs() <= 1e-5 * (1.0 + expected.abs()), "{found} instead of {expected}");
    }
}

#[test]
fn a_gradient_that_several_operands_get_is_not_added_to_in_place() {
    let vars = vars();
    let run = || {
        let (a, b) = (gelu(&vars[0])?, gelu(&linear(&vars[0], &vars[1].narrow(0, 0, 3)?, None)?)?);
        let before = (gelu(&a)?.sum_all()? + gelu(&b)?.sum_all()?)?; // adds to what the sum gave to a and b
        gelu(&crate::gating::add(&a, &b)?)?.sum_all()? + before
    };
    let expected = flat(&run().unwrap().backward().unwrap(), &vars[..2]);
    let (loss, tape) = record(run).unwrap();
    let found = flat(&tape.backward(&loss).unwrap(), &vars[..2]);
    for (found, expected) in found.iter().flatten().zip(expected.iter().flatten()) {
        assert!((found - expected).abs() <= 1e-5 * (1.0 + expected.abs()), "{found} instead of {expected}");
    }
}
