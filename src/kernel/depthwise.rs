//! Depthwise convolution along the sequence, one kernel per head (the residual of Nystromformer).

use candle_core::{Result, Tensor};

use super::visible::keep_rows;

/// `out[i]` = sum_t weight[h, t] v[i + t - taps / 2], v being 0 outside the sequence and where `mask` [b, n]
/// hides it. `v` [b, h, n, d], `weight` [h, taps] with an odd number of taps.
///
/// # Errors
/// Shapes that do not fit.
pub fn depthwise(v: &Tensor, weight: &Tensor, mask: Option<&Tensor>) -> Result<Tensor> {
    composed(v, weight, mask)
}

/// The definition in plain candle operations: a sum of shifted copies (candle's own convolution has wrong
/// gradients for grouped kernels).
///
/// # Errors
/// Shapes that do not fit.
pub fn composed(v: &Tensor, weight: &Tensor, mask: Option<&Tensor>) -> Result<Tensor> {
    let (heads, taps) = weight.dims2()?;
    let n = v.dim(2)?;
    let half = taps / 2;
    let padded = keep_rows(&v.contiguous()?, mask)?.pad_with_zeros(2, half, half)?;
    let mut out = v.zeros_like()?;
    for tap in 0..taps {
        let factor = weight.narrow(1, tap, 1)?.reshape((1, heads, 1, 1))?;
        out = (out + padded.narrow(2, tap, n)?.broadcast_mul(&factor)?)?;
    }
    Ok(out)
}
