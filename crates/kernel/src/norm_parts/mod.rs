//! LayerNorm over some parts of packed rows, the others passed through (DualLN, Transformer-LS eq. 7).
//!
//! Keys and values of a projection `[q | k | v]` are normalised over the concatenated heads with one weight
//! and one bias. One operation on whole rows: slicing them with candle would cost a full-size gradient per
//! slice.

mod cpu;
#[cfg(test)]
mod tests;

use candle_core::{D, DType, Result, Tensor, bail};

use super::group::ParamGroup;
use super::norm::{self, EPS};
use super::{fused_cpu, tape};

/// `rows` [b, n, count * e] with every part in `parts` normalised by `group` = `[weight, bias]`, each `[e]`.
/// Without a group nothing is normalised. Rows whose `mask` [b, n] is 0 come out as zeros and pass no
/// gradient, whatever stands in them.
pub fn norm_parts(
    rows: &Tensor,
    group: Option<&ParamGroup>,
    parts: &[usize],
    count: usize,
    mask: Option<&Tensor>,
) -> Result<Tensor> {
    let Some(group) = group else { return hide(rows, mask) };
    if !fused_cpu(rows.device()) || rows.dtype() != DType::F32 {
        return composed(rows, Some(group), parts, count, mask);
    }
    let width = check(rows, group, parts, count)?;
    let mask = mask.map(|mask| flags(mask, rows)).transpose()?;
    let parts = (0..count).map(|part| parts.contains(&part)).collect();
    tape::apply(&[&rows.contiguous()?, &group.flat], cpu::NormParts { width, parts, mask })
}

/// Width of a part, if everything fits.
fn check(rows: &Tensor, group: &ParamGroup, parts: &[usize], count: usize) -> Result<usize> {
    let width = rows.dim(D::Minus1)? / count.max(1);
    let fits = group.parts.len() == 2 && group.parts.iter().all(|part| part.len() == width);
    if !fits || width * count != rows.dim(D::Minus1)? || parts.iter().any(|&part| part >= count) {
        bail!(
            "parts {parts:?} of {count} in rows {:?} do not fit norm parameters {:?}",
            rows.dims(),
            group.parts
        );
    }
    Ok(width)
}

/// The mask of rows [b, n, ..] as numbers.
pub(super) fn flags(mask: &Tensor, rows: &Tensor) -> Result<Vec<f32>> {
    if mask.dims() != &rows.dims()[..2] {
        bail!("a mask {:?} does not fit rows {:?}", mask.dims(), rows.dims());
    }
    mask.to_dtype(DType::F32)?.flatten_all()?.to_vec1()
}

/// The definition of its parts, the LayerNorm by its own kernel or twin.
pub fn composed(
    rows: &Tensor,
    group: Option<&ParamGroup>,
    parts: &[usize],
    count: usize,
    mask: Option<&Tensor>,
) -> Result<Tensor> {
    let rows = hide_composed(rows, mask)?;
    let Some(group) = group else { return Ok(rows) };
    let width = check(&rows, group, parts, count)?;
    let (weight, bias) = (group.part(0)?, group.part(1)?);
    let pieces = (0..count).map(|part| {
        let piece = rows.narrow(D::Minus1, part * width, width)?;
        if parts.contains(&part) { norm::layer_norm(&piece, &weight, &bias, EPS) } else { Ok(piece) }
    });
    hide_composed(&Tensor::cat(&pieces.collect::<Result<Vec<_>>>()?, D::Minus1)?, mask)
}

/// `rows` [b, n, width] with zeros in place of the rows whose `mask` [b, n] is 0.
pub fn hide(rows: &Tensor, mask: Option<&Tensor>) -> Result<Tensor> {
    let Some(mask) = mask else { return Ok(rows.clone()) };
    if !fused_cpu(rows.device()) || rows.dtype() != DType::F32 {
        return hide_composed(rows, Some(mask));
    }
    let mask = flags(mask, rows)?;
    tape::apply(&[&rows.contiguous()?], cpu::Hide { width: rows.dim(D::Minus1)?, mask })
}

/// [`hide`] in plain candle operations.
pub fn hide_composed(rows: &Tensor, mask: Option<&Tensor>) -> Result<Tensor> {
    let Some(mask) = mask else { return Ok(rows.clone()) };
    let keep = mask.ne(0f32)?.unsqueeze(2)?.broadcast_as(rows.shape())?;
    keep.where_cond(rows, &rows.zeros_like()?)
}
