//! Hiding padded positions in composed code.

use candle_core::{Result, Tensor};

/// `x` [b, h, n, d] with the rows that `mask` [b, n] hides set to 0; they receive no gradient.
pub fn zero_hidden_rows(x: &Tensor, mask: Option<&Tensor>) -> Result<Tensor> {
    let Some(mask) = mask else { return Ok(x.clone()) };
    let (b, n) = mask.dims2()?;
    let keep = mask.ne(0f32)?.reshape((b, 1, n, 1))?.broadcast_as(x.shape())?;
    keep.where_cond(x, &x.zeros_like()?)
}
