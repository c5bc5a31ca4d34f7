//! Layer normalisation over the last dimension: biased variance, affine.

use candle_core::{D, Result, Tensor};

/// Epsilon of every LayerNorm in the specifications.
pub const EPS: f64 = 1e-5;

/// (x - mean) / sqrt(var + eps) * weight + bias over the last dimension; `weight` and `bias` [d].
///
/// # Errors
/// Shapes that do not fit.
pub fn layer_norm(x: &Tensor, weight: &Tensor, bias: &Tensor, eps: f64) -> Result<Tensor> {
    composed(x, weight, bias, eps)
}

/// The definition in plain candle operations.
///
/// # Errors
/// Shapes that do not fit.
pub fn composed(x: &Tensor, weight: &Tensor, bias: &Tensor, eps: f64) -> Result<Tensor> {
    let centred = x.broadcast_sub(&x.mean_keepdim(D::Minus1)?)?;
    let variance = centred.sqr()?.mean_keepdim(D::Minus1)?;
    let normal = centred.broadcast_div(&(variance + eps)?.sqrt()?)?;
    normal.broadcast_mul(weight)?.broadcast_add(bias)
}
