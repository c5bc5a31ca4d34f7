//! Pattern softmax attention: `out_i = sum_j softmax_j(logit_ij) v_j` over the pairs of a [`Pattern`].
//!
//! No score matrix is stored by the fused kernel; the twin gathers the candidate keys of equally sized
//! groups and masks them.

mod arguments;
mod cached;
mod composed;
mod cpu;
#[cfg(any(feature = "cuda", test))]
pub(crate) mod cuda;
mod dims;
mod op;
#[cfg(test)]
mod tests;
mod tile;
mod tile_plan;

use candle_core::{DType, Result, Tensor};

pub use cached::attend_cached;
pub use composed::composed;
pub(crate) use cpu::product::plain as tile_product;

use super::dropout::AttentionDropout;
use super::heads::{Heads, Qkv};
use effattn_record::pattern::Pattern;

/// What one call needs besides queries, keys and values.
pub struct Attend<'a> {
    /// Who sees whom.
    pub pattern: &'a Pattern,
    /// [b, keys + slots], 1 keep, 0 hidden; absent keeps all.
    pub mask: Option<&'a Tensor>,
    /// Factor on every logit.
    pub scale: f64,
    /// Keys and values of the slots, [b, h, slots, d] or packed rows `[k | v]`.
    pub slots: Option<&'a Qkv>,
    /// Position-dependent logits.
    pub relative: Option<&'a Relative>,
    /// [h, queries, keys]: added to the scaled logits of the keys, the same for all samples; not beside `relative`.
    pub bias: Option<&'a Tensor>,
    /// Dropout of the weights; slots are counted behind the keys.
    pub dropout: Option<AttentionDropout>,
}

impl<'a> Attend<'a> {
    /// Logits q.k / sqrt(`head_dim`) over the pairs of `pattern`, without slots.
    pub fn plain(pattern: &'a Pattern, mask: Option<&'a Tensor>, head_dim: usize) -> Self {
        Self::scaled(pattern, mask, 1.0 / (head_dim as f64).sqrt())
    }

    /// Logits `scale` q.k over the pairs of `pattern`, without anything else.
    pub fn scaled(pattern: &'a Pattern, mask: Option<&'a Tensor>, scale: f64) -> Self {
        Self { pattern, mask, scale, slots: None, relative: None, bias: None, dropout: None }
    }
}

/// Relative position terms (Transformer-XL sec. 3.3; Transformer-LS autoregressive code).
///
/// key logit = scale ((q + u) . k_j + (q + v) . table[t - j]);
/// slot logit = scale (q . (k_e + slot_table[floor(t / segment) rank - 1 - e])).
pub struct Relative {
    /// [h, distances, d]: one row per distance t - j >= 0.
    pub table: Tensor,
    /// u, [h, d].
    pub content_bias: Tensor,
    /// v, [h, d].
    pub position_bias: Tensor,
    /// One row per slot distance, [h, distances, d].
    pub slots: Option<SlotTable>,
}

/// Relative positions of slots.
pub struct SlotTable {
    /// [h, distances, d].
    pub table: Tensor,
    /// Length of a segment.
    pub segment: usize,
    /// Slots per segment.
    pub rank: usize,
}

/// Softmax attention over the visible pairs. A query that sees no key gives 0 and passes no gradient.
pub fn attend(qkv: &Qkv, call: &Attend) -> Result<Heads> {
    let q = qkv.q()?;
    let fused = match cuda_takes(&q, call)? {
        true => super::fused(&q),
        false => super::fused_cpu(q.device()) && q.dtype() == DType::F32,
    };
    if fused { op::attend(qkv, call) } else { composed(qkv, call) }
}

/// Widest head that the CUDA kernels take: more does not fit the shared memory of a block.
const CUDA_WIDEST: usize = 128;

/// The same if logits depend on distances.
const CUDA_WIDEST_RELATIVE: usize = 64;

/// The same of tensor cores, which also drop weights.
const CUDA_WIDEST_TENSOR_CORES: usize = 64;

/// Whether there are CUDA kernels for this call.
fn cuda_takes(q: &Tensor, call: &Attend) -> Result<bool> {
    let widest = match (call.dropout, &call.relative) {
        (Some(_), Some(_)) => return Ok(false),
        (Some(_), None) => CUDA_WIDEST_TENSOR_CORES,
        (None, Some(_)) => CUDA_WIDEST_RELATIVE,
        (None, None) => CUDA_WIDEST,
    };
    Ok(call.bias.is_none() && q.dim(3)? <= widest)
}
