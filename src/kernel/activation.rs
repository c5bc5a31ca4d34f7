//! GELU in its exact form: x/2 (1 + erf(x / sqrt 2)).

use candle_core::{Result, Tensor};

/// Exact GELU.
///
/// # Errors
/// Failures of the device.
pub fn gelu(x: &Tensor) -> Result<Tensor> {
    composed(x)
}

/// The definition in plain candle operations.
///
/// # Errors
/// Failures of the device.
pub fn composed(x: &Tensor) -> Result<Tensor> {
    let erf = (x * std::f64::consts::FRAC_1_SQRT_2)?.erf()?;
    (x * 0.5)? * (erf + 1.0)?
}
