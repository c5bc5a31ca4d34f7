//! Softmax over the last dimension.

use candle_core::{D, Result, Tensor};

/// exp(x - max) / sum exp(x - max) over the last dimension.
///
/// # Errors
/// Failures of the device.
pub fn softmax(x: &Tensor) -> Result<Tensor> {
    composed(x)
}

/// The definition in plain candle operations.
///
/// # Errors
/// Failures of the device.
pub fn composed(x: &Tensor) -> Result<Tensor> {
    let max = x.max_keepdim(D::Minus1)?.detach();
    let weights = x.broadcast_sub(&max)?.exp()?;
    weights.broadcast_div(&weights.sum_keepdim(D::Minus1)?)
}
