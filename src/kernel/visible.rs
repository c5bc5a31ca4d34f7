//! Hiding padded positions in composed code.

use candle_core::{D, Result, Tensor};

/// `x` [b, h, n, d] with the rows that `mask` [b, n] hides set to 0; they receive no gradient.
///
/// # Errors
/// Shapes that do not fit.
pub fn keep_rows(x: &Tensor, mask: Option<&Tensor>) -> Result<Tensor> {
    let Some(mask) = mask else { return Ok(x.clone()) };
    let (b, n) = mask.dims2()?;
    let keep = mask.ne(0f32)?.reshape((b, 1, n, 1))?.broadcast_as(x.shape())?;
    keep.where_cond(x, &x.zeros_like()?)
}

/// Softmax over the last dimension of the entries whose `visible` (broadcast to `logits`) is not 0; a row
/// without any is zero.
///
/// # Errors
/// Shapes that do not fit.
pub fn masked_softmax(logits: &Tensor, visible: &Tensor) -> Result<Tensor> {
    let visible = visible.broadcast_as(logits.shape())?;
    let hidden = Tensor::full(-1e30f32, logits.shape(), logits.device())?;
    let logits = visible.ne(0f32)?.where_cond(logits, &hidden)?;
    let max = logits.max_keepdim(D::Minus1)?.detach();
    let weights = (logits.broadcast_sub(&max)?.exp()? * &visible)?;
    let sum = weights.sum_keepdim(D::Minus1)?;
    let empty = sum.eq(0f32)?.to_dtype(sum.dtype())?;
    weights.broadcast_div(&(sum + empty)?)
}
