//! What one forward of a block needs besides its input.

use std::cell::RefCell;

use candle_core::{Result, Tensor};

use crate::nn::dropout::Dropout;
use crate::nn::short_conv::ConvPast;
use effattn_kernel::kept_rows::KeptRows;

/// What one forward of a block needs besides its input.
#[derive(Clone, Copy, Default)]
pub struct ForwardArgs<'a> {
    /// [b, n]: 1 keep, 0 padding; absent keeps all.
    pub mask: Option<&'a Tensor>,
    /// The rows that `mask` keeps, where the input has only those: [1, kept, width].
    pub kept: Option<&'a KeptRows>,
    /// The rows that are read behind the block: it gives only those, [1, rows, width]. What is not row by row sees all.
    pub only: Option<&'a KeptRows>,
    /// Cached inputs of this layer [b, m, width] that stand in front; they are normalised like its input.
    pub memory: Option<&'a Tensor>,
    /// The second stream [b, rows, width], for mechanisms with [`Needs::stream`](crate::attention::Needs::stream).
    pub stream: Option<&'a Tensor>,
    /// What the convolution of the projections saw before, where one token comes after another.
    pub past: Option<&'a RefCell<ConvPast>>,
    /// Position of the first row, cached ones included, where queries and keys are rotated.
    pub position: usize,
    /// What is dropped.
    pub dropout: Dropout<'a>,
}

impl<'a> ForwardArgs<'a> {
    pub(super) fn branch(&self, number: u64) -> Self {
        Self { dropout: self.dropout.branch(number), ..*self }
    }

    /// What is dropped of rows behind the mechanism.
    pub(crate) fn dropout_behind(&self) -> Dropout<'a> {
        self.dropout.of_rows(self.only.or(self.kept))
    }

    /// What goes on behind the mechanism of its `rows` [b, n, e].
    pub(crate) fn behind(&self, rows: Tensor) -> Result<Tensor> {
        match self.only {
            // a mechanism that computed no others
            Some(_) if rows.dim(1)? == 1 => rows.transpose(0, 1)?.contiguous(),
            Some(only) => only.pack(&rows),
            None => self.pack(rows),
        }
    }

    /// What goes on behind the mechanism of the rows in front of it, as the input has them.
    pub(crate) fn residual_behind(&self, rows: Tensor) -> Result<Tensor> {
        self.only.map_or(Ok(rows.clone()), |only| only.pack(&self.unpack(rows)?))
    }

    /// `rows` of the kept positions, or of all, as [b, n, width].
    pub(crate) fn unpack(&self, rows: Tensor) -> Result<Tensor> {
        self.kept.map_or(Ok(rows.clone()), |kept| kept.unpack(&rows))
    }

    /// `rows` [b, n, width] as the input has them.
    fn pack(&self, rows: Tensor) -> Result<Tensor> {
        self.kept.map_or(Ok(rows.clone()), |kept| kept.pack(&rows))
    }
}
