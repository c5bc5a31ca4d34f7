//! Views of tensors whose gradients the tape sends back itself. candle's own way down from a view starts the gradient of
//! every step (reshape, narrow, transpose) as a tensor of zeros and adds to it, element by element where it is strided.

use candle_core::{CpuStorage, D, DType, Layout, Result, Shape, Tensor, bail};

use super::{Entry, RECORDING, nan_trace, records};
use crate::cpu::{gradient, par, rows, with_slices};
use crate::op::{self, FusedOp, SavedOutput};

/// How a view lies in its source.
enum View {
    /// The same elements in the same order.
    Reshaped,
    /// Two dimensions exchanged.
    Turned(usize, usize),
    /// Heads [b, h, n, d] as rows [b, n, h d].
    Merged { heads: usize },
    /// Columns of rows [.., width] from `start` on; split into heads, [b, h, n, d].
    Columns { start: usize, split: bool },
}

/// [`Tensor::reshape`].
pub fn reshape(x: &Tensor, shape: impl Into<Shape>) -> Result<Tensor> {
    noted(x, x.reshape(shape.into())?, View::Reshaped)
}

/// [`Tensor::transpose`].
pub fn transpose(x: &Tensor, a: usize, b: usize) -> Result<Tensor> {
    noted(x, x.transpose(a, b)?, View::Turned(a, b))
}

/// [`Tensor::contiguous`].
pub fn contiguous(x: &Tensor) -> Result<Tensor> {
    noted(x, x.contiguous()?, View::Reshaped)
}

/// Heads [b, h, n, d] as contiguous rows [b, n, h d].
pub fn merge_heads(x: &Tensor) -> Result<Tensor> {
    let rows = x.transpose(1, 2)?.contiguous()?.flatten_from(2)?;
    noted(x, rows, View::Merged { heads: x.dim(1)? })
}

/// Elements `start..start + width` of the last dimension.
pub fn columns(x: &Tensor, start: usize, width: usize) -> Result<Tensor> {
    noted(x, x.narrow(D::Minus1, start, width)?, View::Columns { start, split: false })
}

/// Part number `index` of `count` equal ones of rows [b, n, count h d], split into heads: [b, h, n, d].
pub fn split_heads(x: &Tensor, heads: usize, (index, count): (usize, usize)) -> Result<Tensor> {
    let (b, n, width) = x.dims3()?;
    let part = width / count;
    let all = x.reshape((b, n, count, heads, part / heads))?;
    let view = all.narrow(2, index, 1)?.squeeze(2)?.transpose(1, 2)?;
    noted(x, view, View::Columns { start: index * part, split: true })
}

/// `out`, noted as a `view` of `source` if a tape records.
fn noted(source: &Tensor, out: Tensor, view: View) -> Result<Tensor> {
    if out.id() != source.id() && source.dtype() == DType::F32 && records(&[source]) {
        RECORDING.with_borrow_mut(|entries| {
            if let Some(entries) = entries {
                let (operands, place) = (vec![source.clone()], nan_trace::place());
                entries.push(Entry {
                    out: out.clone(),
                    operands,
                    op: Box::new(view),
                    place,
                    given_up: false,
                });
            }
        });
    }
    Ok(out)
}

impl FusedOp for View {
    fn name(&self) -> &'static str {
        "view"
    }

    fn forward(&self, _: &[(&CpuStorage, &Layout)]) -> Result<(Vec<f32>, Shape)> {
        bail!("a view has no elements of its own")
    }

    fn accumulates_into(&self) -> &'static [usize] {
        match self {
            Self::Reshaped | Self::Turned(..) | Self::Merged { .. } => &[],
            Self::Columns { .. } => &[0],
        }
    }

    fn backward_accumulate(
        &self,
        operands: &[&Tensor],
        _: SavedOutput,
        grad: &Tensor,
        held: Vec<Vec<f32>>,
    ) -> Result<Vec<Option<Tensor>>> {
        let [source] = op::operands(operands)?;
        let (start, split) = match *self {
            Self::Reshaped => return Ok(vec![Some(grad.contiguous()?.reshape(source.shape())?)]),
            Self::Turned(a, b) => return Ok(vec![Some(grad.transpose(a, b)?)]),
            Self::Merged { heads } => {
                let (b, n, width) = grad.dims3()?;
                let grad = grad.contiguous()?.reshape((b, n, heads, width / heads))?;
                return Ok(vec![Some(grad.transpose(1, 2)?)]);
            }
            Self::Columns { start, split } => (start, split),
        };
        let grad =
            if split { grad.transpose(1, 2)?.contiguous()?.flatten_from(2)? } else { grad.contiguous()? };
        let [held]: [Vec<f32>; 1] = op::held(held);
        if held.is_empty() && grad.shape() == source.shape() {
            return Ok(vec![Some(grad)]);
        }
        if !grad.device().is_cpu() {
            let behind = source.dim(D::Minus1)? - start - grad.dim(D::Minus1)?;
            return Ok(vec![Some(grad.pad_with_zeros(D::Minus1, start, behind)?)]);
        }
        add_columns(&grad, source, start, held)
    }
}

/// Rows to add at a time.
const ROWS: usize = 64;

/// `sum` (zeros where it is empty) with `grad` added to its columns from `start` on, in the shape of `source`.
fn add_columns(grad: &Tensor, source: &Tensor, start: usize, sum: Vec<f32>) -> Result<Vec<Option<Tensor>>> {
    let (narrow, wide) = (grad.dim(D::Minus1)?, source.dim(D::Minus1)?);
    let mut sum = if sum.is_empty() { par::zeros(source.elem_count()) } else { sum };
    with_slices([grad], |[grad]| {
        let pieces = sum.chunks_mut(ROWS * wide).zip(grad.chunks((ROWS * narrow).max(1)));
        par::each_piece(pieces, |_, (sum, grad)| {
            for (sum, grad) in sum.chunks_exact_mut(wide).zip(grad.chunks_exact(narrow)) {
                rows::add(grad, &mut sum[start..start + narrow]);
            }
        });
        Ok(())
    })?;
    Ok(vec![gradient(source, sum)?])
}
