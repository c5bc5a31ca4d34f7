//! Projected keys and values: a few slots that stand for all positions.
//!
//! [`dynamic`]: weights computed from the layer input, softmax over positions (Transformer-LS eq. 3-5).
//! [`learned`]: a matrix of parameters (Linformer).

mod cpu;
mod geometry;
mod learned;
#[cfg(test)]
mod tests;
mod weights;

use std::sync::OnceLock;

use candle_core::{D, DType, Result, Tensor, bail};

use super::group::ParamGroup;
use super::norm_parts::{flags, hide_composed as hide};
use super::{fused_cpu, tape};

/// Settings of a [`dynamic`] projection.
#[derive(Clone, Copy, Debug)]
pub struct Dynamic<'a> {
    /// Number of heads.
    pub heads: usize,
    /// Slots per head and segment.
    pub rank: usize,
    /// Length of a segment; `None`: the whole sequence is one.
    pub segment: Option<usize>,
    /// Which parts of a row are projected, in the order of the result.
    pub parts: &'a [usize],
    /// Number of parts in a row.
    pub count: usize,
    /// [b, t], 1 keep, 0 hidden.
    pub mask: Option<&'a Tensor>,
}

/// Dynamic projection of packed `rows` [b, t, count * e] by the layer input `x` [b, t, width]:
/// `[b, slots, parts * e]`, slot `g * rank + m` of segment g.
///
/// With `group` = `[weight [heads * rank, width], bias [heads * rank]]`, a = x weight^T + bias and P = softmax of a
/// over the valid positions of a segment; a slot of head h is sum_j P_jhm row_j (channels of head h). A segment without valid
/// position gives zeros. Hidden positions pass no gradient, whatever stands in them.
pub fn dynamic(rows: &Tensor, x: &Tensor, group: &ParamGroup, spec: &Dynamic) -> Result<Tensor> {
    if !fused_cpu(rows.device()) || rows.dtype() != DType::F32 {
        return dynamic_composed(rows, x, group, spec);
    }
    let (batch, len, row) = rows.dims3()?;
    check(rows, x, group, spec)?;
    let e = row / spec.count;
    let geometry = geometry::Geometry {
        batch,
        len,
        row,
        parts: spec.parts.iter().map(|part| part * e).collect(),
        heads: spec.heads,
        head_dim: e / spec.heads,
        rank: spec.rank,
        width: x.dim(2)?,
        segment: spec.segment.unwrap_or(len).max(1),
    };
    let mask = spec.mask.map(|mask| flags(mask, rows)).transpose()?;
    let op = cpu::Project { geometry, mask, stats: OnceLock::new() };
    tape::apply(&[&rows.contiguous()?, &x.contiguous()?, &group.flat], op)
}

fn check(rows: &Tensor, x: &Tensor, group: &ParamGroup, spec: &Dynamic) -> Result<()> {
    let (b, t, width) = rows.dims3()?;
    let slots = spec.heads * spec.rank;
    let (parts, x_dims) = (&group.parts, x.dims3()?);
    let fits = x_dims == (b, t, x_dims.2)
        && parts.len() == 2
        && parts[0].shape == [slots, x_dims.2]
        && parts[1].shape == [slots];
    if !fits || width % (spec.count * spec.heads) != 0 || spec.parts.iter().any(|&part| part >= spec.count) {
        bail!(
            "layer input {:?} and parameters {parts:?} do not fit rows {:?} and {spec:?}",
            x.dims(),
            rows.dims()
        );
    }
    Ok(())
}

/// [`dynamic`] in plain candle operations.
pub fn dynamic_composed(rows: &Tensor, x: &Tensor, group: &ParamGroup, spec: &Dynamic) -> Result<Tensor> {
    let (b, t, width) = rows.dims3()?;
    let segment = spec.segment.unwrap_or(t).max(1);
    let segments = t.div_ceil(segment);
    let slots = spec.heads * spec.rank;
    let e = width / spec.count;
    check(rows, x, group, spec)?;
    let (rows, x) = (hide(rows, spec.mask)?, hide(x, spec.mask)?);
    let pad = |x: &Tensor| x.pad_with_zeros(1, 0, segments * segment - t);
    // The bias cancels in the softmax: its gradient is exactly zero, not rounding noise.
    let bias = group.part(1)?.detach();
    let logits = super::linear::composed(&x, &group.part(0)?, Some(&bias))?;
    let logits = pad(&logits)?.reshape((b, segments, segment, slots))?;
    let valid = match spec.mask {
        Some(mask) => mask.clone(),
        None => Tensor::ones((b, t), rows.dtype(), rows.device())?,
    };
    let valid = pad(&valid)?.reshape((b, segments, segment, 1))?.broadcast_as(logits.shape())?;
    let hidden = Tensor::full(-1e30f32, logits.shape(), logits.device())?.to_dtype(logits.dtype())?;
    let logits = valid.ne(0f32)?.where_cond(&logits, &hidden)?;
    let max = logits.max_keepdim(2)?.detach();
    let weights = (logits.broadcast_sub(&max)?.exp()? * &valid)?;
    let sum = weights.sum_keepdim(2)?;
    let empty = sum.eq(0f32)?.to_dtype(sum.dtype())?;
    let weights = weights.broadcast_div(&(sum + empty)?)?; // [b, segments, segment, slots]
    let weights = weights
        .reshape((b * segments, segment, spec.heads, spec.rank))?
        .permute((0, 2, 3, 1))?
        .contiguous()?
        .reshape((b * segments * spec.heads, spec.rank, segment))?;
    let projected = spec.parts.iter().map(|&part| {
        let heads = pad(&rows.narrow(D::Minus1, part * e, e)?)?
            .reshape((b * segments, segment, spec.heads, e / spec.heads))?
            .transpose(1, 2)?
            .contiguous()?
            .reshape((b * segments * spec.heads, segment, e / spec.heads))?;
        weights
            .matmul(&heads)? // [.., rank, d]
            .reshape((b * segments, spec.heads, spec.rank, e / spec.heads))?
            .transpose(1, 2)?
            .contiguous()?
            .reshape((b, segments * spec.rank, e))
    });
    Tensor::cat(&projected.collect::<Result<Vec<_>>>()?, D::Minus1)
}

/// Which slots of a [`dynamic`] projection exist: [b, slots], 1 where the slot's segment has a valid position.
pub fn dynamic_mask(mask: &Tensor, rank: usize, segment: Option<usize>) -> Result<Tensor> {
    let (b, t) = mask.dims2()?;
    let segment = segment.unwrap_or(t).max(1);
    let segments = t.div_ceil(segment);
    let padded = mask.ne(0f32)?.to_dtype(mask.dtype())?.pad_with_zeros(1, 0, segments * segment - t)?;
    let any = padded.reshape((b, segments, segment))?.max(2)?; // [b, segments]
    any.unsqueeze(2)?.broadcast_as((b, segments, rank))?.contiguous()?.reshape((b, segments * rank))
}

/// Projection of packed `rows` [b, n, count * e] by parameters: `[b, k, parts * e]`; the part at `parts[i]` is
/// multiplied by the first n columns of the only part of `matrices[i]`, [heads, k, n_max] or [k, n_max]. Rows that must not count
/// have to be zeros.
pub fn learned(rows: &Tensor, matrices: &[&ParamGroup], parts: &[usize], count: usize) -> Result<Tensor> {
    check_learned(rows, matrices, parts, count)?;
    if !fused_cpu(rows.device()) || rows.dtype() != DType::F32 {
        return learned_composed(rows, matrices, parts, count);
    }
    let rows = rows.contiguous()?;
    // Parts under the same matrix are one operation.
    let shared = matrices.iter().all(|matrix| matrix.flat.id() == matrices[0].flat.id());
    let project = |parts: &[usize], matrix: &ParamGroup| {
        let op = learned::Learned::new(&rows, &matrix.parts[0].shape, parts, count)?;
        tape::apply(&[&rows, &matrix.flat.contiguous()?], op)
    };
    if shared {
        return project(parts, matrices[0]);
    }
    let projected = parts.iter().zip(matrices).map(|(&part, matrix)| project(&[part], matrix));
    Tensor::cat(&projected.collect::<Result<Vec<_>>>()?, D::Minus1)
}

fn check_learned(rows: &Tensor, matrices: &[&ParamGroup], parts: &[usize], count: usize) -> Result<()> {
    let (_, n, width) = rows.dims3()?;
    if parts.is_empty() || parts.len() != matrices.len() || parts.iter().any(|&part| part >= count) {
        bail!("parts {parts:?} of {count} do not fit {} matrices", matrices.len());
    }
    for matrix in matrices {
        let dims = matrix.parts.first().map_or(&[][..], |part| &part.shape);
        let heads = if dims.len() == 3 { dims[0] } else { 1 };
        if matrix.parts.len() != 1
            || !(2..=3).contains(&dims.len())
            || width % (count * heads) != 0
            || dims[dims.len() - 2] != slots(matrices[0])
        {
            bail!("a matrix {dims:?} does not fit {count} parts in rows of {width}");
        }
        let columns = dims[dims.len() - 1];
        if n > columns {
            bail!("{n} positions are more than the {columns} that the projection was built for");
        }
    }
    Ok(())
}

/// Rows of a matrix of parameters.
pub fn slots(matrix: &ParamGroup) -> usize {
    let shape = matrix.parts.first().map_or(&[][..], |part| &part.shape);
    shape.len().checked_sub(2).map_or(0, |index| shape[index])
}

/// [`learned`] in plain candle operations.
pub fn learned_composed(
    rows: &Tensor,
    matrices: &[&ParamGroup],
    parts: &[usize],
    count: usize,
) -> Result<Tensor> {
    let (b, n, width) = rows.dims3()?;
    let e = width / count;
    let projected = parts.iter().zip(matrices).map(|(&part, matrix)| {
        let matrix = matrix.part(0)?;
        let k = matrix.dim(D::Minus2)?;
        let heads = if matrix.rank() == 3 { matrix.dim(0)? } else { 1 };
        let matrix = matrix.narrow(D::Minus1, 0, n)?.contiguous()?.reshape((1, heads, k, n))?;
        let values = rows
            .narrow(D::Minus1, part * e, e)?
            .reshape((b, n, heads, e / heads))?
            .transpose(1, 2)?
            .contiguous()?; // [b, heads, n, d]
        let matrix = matrix.broadcast_as((b, heads, k, n))?.contiguous()?;
        matrix.matmul(&values)?.transpose(1, 2)?.contiguous()?.reshape((b, k, e))
    });
    Tensor::cat(&projected.collect::<Result<Vec<_>>>()?, D::Minus1)
}
