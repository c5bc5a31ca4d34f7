//! The CUDA kernels ([`SOURCE`], compiled at run time) and what they read.

pub mod launch;
pub mod tables;
#[cfg(feature = "cuda")]
pub mod tensors;
#[cfg(test)]
mod tests;

/// CUDA C, compiled with [`launch::defines`].
pub const SOURCE: &str = include_str!("attend.cu");

/// Whether there are kernels for this call; relative positions and wider heads run composed.
///
/// # Errors
/// Queries that are not [b, h, n, d].
#[cfg(feature = "cuda")]
pub fn takes(q: &candle_core::Tensor, call: &super::Attend) -> candle_core::Result<bool> {
    Ok(call.relative.is_none() && q.dim(3)? <= tables::WIDEST)
}
