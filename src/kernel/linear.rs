//! y = x W^T + b with W [out, in].

use candle_core::{Result, Tensor};

/// x W^T + b over the last dimension of `x` (any number of leading dimensions).
///
/// # Errors
/// Shapes that do not fit.
pub fn linear(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    composed(x, weight, bias)
}

/// The definition in plain candle operations.
///
/// # Errors
/// Shapes that do not fit.
pub fn composed(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    let (out, width) = weight.dims2()?;
    let mut dims = x.dims().to_vec();
    let rows = x.elem_count() / width.max(1);
    if let Some(last) = dims.last_mut() {
        *last = out;
    }
    let y = x.contiguous()?.reshape((rows, width))?.matmul(&weight.t()?)?;
    let y = if let Some(bias) = bias { y.broadcast_add(bias)? } else { y };
    y.reshape(dims)
}
