//! Rows of a table by index.

use candle_core::{Result, Tensor};

/// `table` [rows, d] at `ids` (any shape, u32): ids' shape + [d].
///
/// # Errors
/// An index outside the table.
pub fn embedding(ids: &Tensor, table: &Tensor) -> Result<Tensor> {
    composed(ids, table)
}

/// The definition in plain candle operations.
///
/// # Errors
/// An index outside the table.
pub fn composed(ids: &Tensor, table: &Tensor) -> Result<Tensor> {
    let mut dims = ids.dims().to_vec();
    dims.push(table.dim(1)?);
    table.index_select(&ids.flatten_all()?, 0)?.reshape(dims)
}
