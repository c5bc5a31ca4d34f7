//! Fused against twin, for the tests of kernels.

use candle_core::{Device, Result, Tensor, Var};

use super::{Mode, with_mode};
use crate::device::rng::Stream;

/// Normal numbers.
pub fn normal(name: &str, shape: &[usize]) -> Result<Tensor> {
    Stream::new(11, name).normal_tensor(shape, 0.0, 1.0, &Device::Cpu)
}

/// Value and gradients of every input, for a fixed cotangent.
pub fn evaluate(
    mode: Mode,
    inputs: &[Tensor],
    f: impl Fn(&[Tensor]) -> Result<Tensor>,
) -> Result<Vec<Vec<f32>>> {
    with_mode(mode, || {
        let vars = inputs.iter().map(Var::from_tensor).collect::<Result<Vec<_>>>()?;
        let tensors: Vec<Tensor> = vars.iter().map(|var| var.as_tensor().clone()).collect();
        let out = f(&tensors)?;
        let grads = (&out * normal("cotangent", out.dims())?)?.sum_all()?.backward()?;
        let flat = |tensor: &Tensor| tensor.flatten_all()?.to_vec1::<f32>();
        let mut results = vec![flat(&out)?];
        for var in &vars {
            results.push(grads.get(var).map_or_else(|| flat(&var.zeros_like()?), flat)?);
        }
        Ok(results)
    })
}

/// Asserts that fused and composed agree within `tolerance` of each result's largest entry, in value
/// and in every gradient, and that the fused one gives the same bits again, on one thread and on three.
pub fn assert_twin(
    label: &str,
    inputs: &[Tensor],
    tolerance: f32,
    f: impl Fn(&[Tensor]) -> Result<Tensor> + Sync,
) -> Result<()> {
    let fused = evaluate(Mode::Fused, inputs, &f)?;
    let composed = evaluate(Mode::Composed, inputs, &f)?;
    for (index, (fused, composed)) in fused.iter().zip(&composed).enumerate() {
        assert_eq!(fused.len(), composed.len(), "{label}: result {index}");
        let largest = composed.iter().fold(0f32, |largest, value| largest.max(value.abs())).max(0.1);
        for (at, (fused, composed)) in fused.iter().zip(composed).enumerate() {
            let error = (fused - composed).abs();
            assert!(
                error <= tolerance * largest,
                "{label}: result {index} at {at}: fused {fused}, composed {composed}, largest {largest}"
            );
        }
    }
    for threads in [1, 3] {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a thread pool");
        let again = pool.install(|| evaluate(Mode::Fused, inputs, &f))?;
        let bits = |results: &[Vec<f32>]| results.iter().flatten().map(|x| x.to_bits()).collect::<Vec<_>>();
        assert!(bits(&fused) == bits(&again), "{label}: {threads} threads change the bits");
    }
    Ok(())
}
