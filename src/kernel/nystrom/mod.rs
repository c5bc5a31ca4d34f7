//! Nystrom attention: softmax attention through landmarks and an iterated pseudo-inverse (Nystromformer,
//! Xiong et al. 2021, eq. 13 and 14).
//!
//! With q' = q D^(-1/4), k' = k D^(-1/4) (0 at padded positions) and landmarks Ql, Kl, the means of equally
//! long segments: F = softmax(q' Kl^T), A = softmax(Ql Kl^T), B = softmax(Ql k'^T) over kept positions, and
//! out = F Z (B v) with Z the pseudo-inverse of A by iteration.

mod backward;
mod composed;
mod cpu;
mod inverse;
mod rows;
#[cfg(test)]
mod tests;

use candle_core::{Result, Tensor};

use super::heads::{Heads, Qkv};
pub use composed::composed;

/// What the start of the pseudo-inverse is divided by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Start {
    /// The largest column sum of each matrix.
    PerMatrix,
    /// The largest column sum of all matrices of the batch and heads, as the released code has it.
    Original,
}

/// Settings of one call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Landmarks {
    /// Number of landmarks, below the sequence length.
    pub count: usize,
    /// Iterations of the pseudo-inverse.
    pub iterations: usize,
    /// Its start.
    pub start: Start,
}

/// Attention through landmarks; `mask` [b, n]. Hidden queries give 0.
///
/// # Errors
/// Shapes that do not fit.
pub fn nystrom(qkv: &Qkv, mask: Option<&Tensor>, spec: Landmarks) -> Result<Heads> {
    if qkv.value_dims()?.2 > 0 && super::fused_cpu(&qkv.device()?) {
        return cpu::nystrom(qkv, mask, spec);
    }
    composed(qkv, mask, spec)
}
