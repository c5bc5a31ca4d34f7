//! Fused against twin, for the tests of kernels.

use candle_core::{DType, Device, Result, Tensor, Var};

use super::{KernelMode, with_mode};
use crate::device::rng::RngStream;

/// Normal numbers.
pub fn normal(name: &str, shape: &[usize]) -> Result<Tensor> {
    RngStream::new(11, name).normal_tensor(shape, 0.0, 1.0, &Device::Cpu)
}

/// [`normal`] for tests that return nothing.
pub fn randn(name: &str, shape: &[usize]) -> Tensor {
    normal(name, shape).unwrap()
}

/// Value and gradients of every input, for a fixed cotangent.
pub fn evaluate(
    mode: KernelMode,
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
pub fn assert_matches_composed(
    label: &str,
    inputs: &[Tensor],
    tolerance: f32,
    f: impl Fn(&[Tensor]) -> Result<Tensor> + Sync,
) -> Result<()> {
    let fused = evaluate(KernelMode::Fused, inputs, &f)?;
    let composed = evaluate(KernelMode::Composed, inputs, &f)?;
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
        let again = pool.install(|| evaluate(KernelMode::Fused, inputs, &f))?;
        let bits = |results: &[Vec<f32>]| results.iter().flatten().map(|x| x.to_bits()).collect::<Vec<_>>();
        assert!(bits(&fused) == bits(&again), "{label}: {threads} threads change the bits");
    }
    Ok(())
}

/// Output and gradients of sum(f(inputs) * w) for a fixed random w.
pub fn value_and_grads(
    inputs: &[Tensor],
    dtype: DType,
    f: &(dyn Fn(&[Tensor]) -> Result<Tensor> + Sync),
) -> Result<Vec<Vec<f64>>> {
    let vars = inputs.iter().map(|x| Var::from_tensor(&x.to_dtype(dtype)?)).collect::<Result<Vec<_>>>()?;
    let tensors: Vec<Tensor> = vars.iter().map(|var| var.as_tensor().clone()).collect();
    let out = f(&tensors)?;
    let cotangent = normal("cotangent", out.dims())?.to_dtype(dtype)?;
    let grads = (&out * cotangent)?.sum_all()?.backward()?;
    let flat = |x: &Tensor| x.to_dtype(DType::F64)?.flatten_all()?.to_vec1::<f64>();
    let mut all = vec![flat(&out)?];
    for var in &vars {
        let Some(grad) = grads.get(var) else { candle_core::bail!("no gradient for an input") };
        assert_eq!(grad.dims(), var.dims());
        all.push(flat(grad)?);
    }
    Ok(all)
}

/// Asserts that a gradient which enters `f`, [.., n, width], at the first position alone, and fades along the others, ends in zeros at
/// `inputs[of]`, [.., n, width], and is nowhere subnormal.
pub fn assert_fades_to_zero(
    what: &str,
    inputs: &[Tensor],
    of: usize,
    f: impl Fn(&[Tensor]) -> Result<Tensor>,
) {
    let vars: Vec<Var> = inputs.iter().map(|x| Var::from_tensor(x).unwrap()).collect();
    let tensors: Vec<Tensor> = vars.iter().map(|x| x.as_tensor().clone()).collect();
    let first = f(&tensors).unwrap().narrow(candle_core::D::Minus2, 0, 1).unwrap();
    let grads = first.sum_all().unwrap().backward().unwrap();
    let grad = grads.get(&vars[of]).unwrap().abs().unwrap();
    let largest = |at: usize| {
        let row = grad.narrow(candle_core::D::Minus2, at, 1).unwrap();
        row.max_all().unwrap().to_scalar::<f32>().unwrap()
    };
    assert!(largest(0) > 0.0, "{what}: no gradient at the first position");
    assert_eq!(largest(grad.dim(candle_core::D::Minus2).unwrap() - 1), 0.0, "{what}: the last position");
    let values = grad.flatten_all().unwrap().to_vec1::<f32>().unwrap();
    let subnormal = values.iter().filter(|value| value.is_subnormal()).count();
    assert_eq!(subnormal, 0, "{what}: subnormal numbers in {} of the gradient", values.len());
}

/// Largest difference of `got` to `exact`, relative to the largest element of `exact` (at least 1).
pub fn difference(got: &[f64], exact: &[f64]) -> f64 {
    assert_eq!(got.len(), exact.len());
    let scale = exact.iter().fold(1.0, |scale: f64, x| scale.max(x.abs()));
    let difference = got.iter().zip(exact).fold(0.0, |max: f64, (got, exact)| {
        let difference = (got - exact).abs();
        if difference.is_nan() { f64::INFINITY } else { max.max(difference) }
    });
    difference / scale
}

/// Proves that `f`, an operation that dispatches by mode and type, has the value and the gradients of its twin
/// in f64 within `tolerance`, that those are the central differences, and that bits do not depend on the run or
/// on the number of threads.
pub fn check(what: &str, inputs: &[Tensor], tolerance: f64, f: impl Fn(&[Tensor]) -> Result<Tensor> + Sync) {
    let exact = with_mode(KernelMode::Composed, || value_and_grads(inputs, DType::F64, &f)).unwrap();
    let fused = value_and_grads(inputs, DType::F32, &f).unwrap();
    for (index, (fused, exact)) in fused.iter().zip(&exact).enumerate() {
        let part = if index == 0 { "value".to_owned() } else { format!("gradient {index}") };
        let found = difference(fused, exact);
        assert!(found <= tolerance, "{what}: {part} differs by {found:e}");
    }
    for threads in [1, 2] {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        let again = pool.install(|| value_and_grads(inputs, DType::F32, &f)).unwrap();
        assert!(again == fused, "{what}: other bits on {threads} threads");
    }
    check_differences(what, inputs, &exact, &f);
}

/// Central differences of the twin in f64 at up to 12 elements of every input.
fn check_differences(
    what: &str,
    inputs: &[Tensor],
    exact: &[Vec<f64>],
    f: &(dyn Fn(&[Tensor]) -> Result<Tensor> + Sync),
) {
    let loss = |inputs: &[Tensor]| -> f64 {
        let out = with_mode(KernelMode::Composed, || f(inputs)).unwrap();
        let cotangent = randn("cotangent", out.dims()).to_dtype(DType::F64).unwrap();
        (out * cotangent).unwrap().sum_all().unwrap().to_scalar().unwrap()
    };
    let doubles: Vec<Tensor> = inputs.iter().map(|x| x.to_dtype(DType::F64).unwrap()).collect();
    for (index, input) in doubles.iter().enumerate() {
        let data: Vec<f64> = input.flatten_all().unwrap().to_vec1().unwrap();
        for at in (0..data.len()).step_by(data.len().div_ceil(12).max(1)) {
            let moved = |step: f64| {
                let mut data = data.clone();
                data[at] += step;
                let mut inputs = doubles.clone();
                inputs[index] = Tensor::from_vec(data, input.dims(), &Device::Cpu).unwrap();
                loss(&inputs)
            };
            let step = 1e-5;
            let slope = (moved(step) - moved(-step)) / (2.0 * step);
            let grad = exact[index + 1][at];
            let close = (slope - grad).abs() <= 1e-6 * (1.0 + grad.abs());
            assert!(close, "{what}: gradient {index} at {at} is {grad}, differences say {slope}");
        }
    }
}
