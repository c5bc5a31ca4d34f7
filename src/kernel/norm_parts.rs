//! LayerNorm over some parts of packed rows, the others passed through (DualLN, Transformer-LS eq. 7).
//!
//! Keys and values of a projection `[q | k | v]` are normalised over the concatenated heads with one weight
//! and one bias. One operation on whole rows: slicing them with candle would cost a full-size gradient per
//! slice.

use candle_core::{D, Result, Tensor, bail};

use super::group::Group;
use super::norm::{self, EPS};

/// `rows` [b, n, count * e] with every part in `parts` normalised by `group` = `[weight, bias]`, each [e].
/// Without a group nothing is normalised. Rows whose `mask` [b, n] is 0 come out as zeros and pass no
/// gradient, whatever stands in them.
///
/// # Errors
/// Shapes that do not fit.
pub fn norm_parts(
    rows: &Tensor,
    group: Option<&Group>,
    parts: &[usize],
    count: usize,
    mask: Option<&Tensor>,
) -> Result<Tensor> {
    composed(rows, group, parts, count, mask)
}

/// The definition in plain candle operations.
///
/// # Errors
/// Shapes that do not fit.
pub fn composed(
    rows: &Tensor,
    group: Option<&Group>,
    parts: &[usize],
    count: usize,
    mask: Option<&Tensor>,
) -> Result<Tensor> {
    let rows = hide(rows, mask)?;
    let Some(group) = group else { return Ok(rows) };
    let width = rows.dim(D::Minus1)? / count.max(1);
    if group.parts.len() != 2 || group.parts[0].len() != width || parts.iter().any(|&part| part >= count) {
        bail!(
            "parts {parts:?} of {count} in rows {:?} do not fit norm parameters {:?}",
            rows.dims(),
            group.parts
        );
    }
    let (weight, bias) = (group.part(0)?, group.part(1)?);
    let pieces = (0..count).map(|part| {
        let piece = rows.narrow(D::Minus1, part * width, width)?;
        if parts.contains(&part) { norm::composed(&piece, &weight, &bias, EPS) } else { Ok(piece) }
    });
    hide(&Tensor::cat(&pieces.collect::<Result<Vec<_>>>()?, D::Minus1)?, mask)
}

/// `rows` [b, n, width] with zeros in place of the rows whose `mask` [b, n] is 0.
///
/// # Errors
/// Shapes that do not fit.
pub fn hide(rows: &Tensor, mask: Option<&Tensor>) -> Result<Tensor> {
    let Some(mask) = mask else { return Ok(rows.clone()) };
    let keep = mask.ne(0f32)?.unsqueeze(2)?.broadcast_as(rows.shape())?;
    keep.where_cond(rows, &rows.zeros_like()?)
}
