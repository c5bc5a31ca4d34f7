//! Finding the first operation whose result is not finite.
//!
//! While a thread is traced, every fused operation's result is looked at, forward and backward, and the first that has
//! a NaN or an infinity ends the pass with the operation and the place in the model. Otherwise this costs one look
//! at a thread's flag per operation.

use std::cell::{Cell, RefCell};

use candle_core::{DType, Result, Tensor, bail};

use super::cpu::with_slices;

thread_local! {
    static TRACED: Cell<bool> = const { Cell::new(false) };
    static PLACE: RefCell<String> = const { RefCell::new(String::new()) };
    static FOUND: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// Whether this thread is traced.
pub fn is_on() -> bool {
    TRACED.get()
}

/// Traces this thread from now on, or no longer.
pub fn set(on: bool) {
    TRACED.set(on);
}

/// Runs `f` on this thread while it is traced.
pub fn traced<T>(f: impl FnOnce() -> T) -> T {
    struct Restore(bool);
    impl Drop for Restore {
        fn drop(&mut self) {
            TRACED.set(self.0);
        }
    }
    let _restore = Restore(TRACED.replace(true));
    f()
}

/// Says where in the model the operations inside `f` are.
pub fn in_scope<T>(place: impl FnOnce() -> String, f: impl FnOnce() -> T) -> T {
    if !is_on() {
        return f();
    }
    struct Restore(String);
    impl Drop for Restore {
        fn drop(&mut self) {
            PLACE.set(std::mem::take(&mut self.0));
        }
    }
    let _restore = Restore(PLACE.replace(place()));
    f()
}

/// Where this thread is, if it is traced.
pub(super) fn place() -> Option<String> {
    is_on().then(|| PLACE.with_borrow(String::clone))
}

/// Fails if this thread is traced and `tensor`, the result of `what`, is not finite.
pub fn check(what: &str, tensor: &Tensor) -> Result<()> {
    match place() {
        Some(place) => check_at(&place, what, tensor),
        None => Ok(()),
    }
}

/// [`check`] with a scope recorded earlier.
pub(super) fn check_at(place: &str, what: &str, tensor: &Tensor) -> Result<()> {
    if is_finite(tensor)? {
        return Ok(());
    }
    let comma = if place.is_empty() { "" } else { ", " };
    let found = format!("{place}{comma}{what}: the result {:?} is not finite", tensor.dims());
    FOUND.set(Some(found.clone()));
    bail!("{found}")
}

/// What the last failed [`check`] of this thread said; it is forgotten.
pub fn found() -> Option<String> {
    FOUND.take()
}

/// Whether every number of `tensor` is finite; whole numbers are.
pub fn is_finite(tensor: &Tensor) -> Result<bool> {
    if !tensor.dtype().is_float() {
        return Ok(true);
    }
    if tensor.device().is_cpu() && tensor.dtype() == DType::F32 && tensor.is_contiguous() {
        return with_slices([tensor], |[values]| Ok(all_finite(values)));
    }
    let sum = tensor.to_dtype(DType::F32)?.affine(0.0, 0.0)?.sum_all()?.to_scalar::<f32>()?;
    Ok(sum.is_finite())
}

/// 0 x is NaN for what is not finite, and a NaN stays in a sum.
fn all_finite(values: &[f32]) -> bool {
    let (chunks, rest) = values.as_chunks::<16>();
    let mut sums = [0.0f32; 16];
    for chunk in chunks {
        sums.iter_mut().zip(chunk).for_each(|(sum, value)| *sum += value * 0.0);
    }
    sums.iter().sum::<f32>().is_finite() && rest.iter().all(|value| value.is_finite())
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;
    use crate::activation::gelu;
    use crate::tape;

    #[test]
    fn every_position_is_looked_at() {
        for len in [1, 15, 16, 17, 100] {
            assert!(all_finite(&vec![f32::MAX; len]));
            for at in 0..len {
                for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                    let mut values = vec![1.0; len];
                    values[at] = bad;
                    assert!(!all_finite(&values), "{bad} at {at} of {len}");
                }
            }
        }
        let view = Tensor::new(&[[1f32, f32::NAN], [3.0, 4.0]], &Device::Cpu).unwrap();
        assert!(is_finite(&view.narrow(1, 0, 1).unwrap()).unwrap());
        assert!(!is_finite(&view.t().unwrap()).unwrap());
    }

    #[test]
    fn the_first_operation_is_named_and_only_while_traced() {
        let x = candle_core::Var::new(&[1f32, f32::INFINITY], &Device::Cpu).unwrap();
        let run = || tape::record(|| in_scope(|| "layer 3".to_owned(), || gelu(x.as_tensor())));
        assert!(run().is_ok());
        let error = traced(run).err().unwrap().to_string();
        assert!(error.starts_with("layer 3, gelu: the result [2] is not finite"), "{error}");
        assert_eq!(found().unwrap(), "layer 3, gelu: the result [2] is not finite");
        assert!(!is_on() && run().is_ok() && found().is_none());
    }
}
