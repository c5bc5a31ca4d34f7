//! Cross entropy: logsumexp(z) - z_y, natural logarithm.

use candle_core::{D, Result, Tensor};

/// Cross entropy of every row of `logits` [rows, classes] with `labels` [rows] (u32): [rows].
///
/// # Errors
/// Shapes that do not fit, labels out of range.
pub fn cross_entropy(logits: &Tensor, labels: &Tensor) -> Result<Tensor> {
    composed(logits, labels)
}

/// The definition in plain candle operations.
///
/// # Errors
/// Shapes that do not fit.
pub fn composed(logits: &Tensor, labels: &Tensor) -> Result<Tensor> {
    let max = logits.max_keepdim(D::Minus1)?.detach();
    let shifted = logits.broadcast_sub(&max)?;
    let log_sum = shifted.exp()?.sum_keepdim(D::Minus1)?.log()?;
    let picked = shifted.gather(&labels.unsqueeze(1)?, 1)?;
    (log_sum - picked)?.squeeze(1)
}
