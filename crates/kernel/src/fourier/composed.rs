//! The definition in plain candle operations: C_N x C_E - S_N x S_E with matrices of cosines and sines.

use std::f64::consts::TAU;

use candle_core::{Device, Result, Tensor};

use super::Norm;

/// [`super::fourier_mix`] of any type on any device.
pub fn composed(x: &Tensor, norm: Norm) -> Result<Tensor> {
    let (_, n, e) = x.dims3()?;
    let table = |size: usize, f: fn(f64) -> f64| waves(size, f)?.to_dtype(x.dtype())?.to_device(x.device());
    let product =
        |f: fn(f64) -> f64| table(n, f)?.broadcast_matmul(&x.contiguous()?.broadcast_matmul(&table(e, f)?)?);
    (product(f64::cos)? - product(f64::sin)?)? * norm.scale(n, e)
}

/// f(2 pi j k / size) for all j and k. j k is reduced before it becomes an angle, which keeps all digits.
fn waves(size: usize, f: fn(f64) -> f64) -> Result<Tensor> {
    let values: Vec<f64> = (0..size).map(|step| f(TAU * step as f64 / size as f64)).collect();
    let cells = (0..size).flat_map(|j| {
        let values = &values;
        (0..size).map(move |k| values[j * k % size])
    });
    Tensor::from_iter(cells, &Device::Cpu)?.reshape((size, size))
}
