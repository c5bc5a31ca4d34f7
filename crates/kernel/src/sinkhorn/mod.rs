//! Sparse Sinkhorn attention (Tay et al. 2020; SPEC-cos 4): every block attends to itself and to a mixture
//! of all blocks, whose weights come from a small network over the blocks' summed keys.

mod blocks;
mod composed;
mod cpu;
mod mixture;
#[cfg(test)]
mod tests;

use candle_core::{Result, Tensor, bail};

use super::dropout::AttentionDropout;
use super::group::ParamGroup;
use super::heads::{Heads, Qkv};
pub use composed::composed;

/// How scores become weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SortNorm {
    /// Rows and columns normalised in turn, this often.
    Sinkhorn(usize),
    /// Softmax over the source blocks.
    Softmax,
}

/// Where the mixture comes from.
pub enum Sorting<'a> {
    /// A weighted sum of the blocks.
    Net {
        /// The network that scores pairs of blocks: `[w, b]` for pooled w + b, or `[w1, b1, w, b]` for
        /// relu(relu(pooled w1 + b1) w + b); `w1` [h, d, hidden], `b1` [h, hidden], `w` [h, d or hidden, max_blocks],
        /// `b` [h, max_blocks].
        group: &'a ParamGroup,
        /// Divides the scores.
        temperature: f64,
        /// Weights.
        activation: SortNorm,
    },
    /// Released code of the Long Range Arena: the plain sum of all blocks, and blocks of every n/block-th position.
    Released,
}

/// Settings of one call.
pub struct Sinkhorn<'a> {
    /// Length of a block.
    pub block: usize,
    /// Mixture.
    pub sorting: Sorting<'a>,
    /// One softmax over mixture and block (true), or the sum of two.
    pub concat: bool,
    /// Dropout of the weights: rows are positions, key 2 j is number j of the mixture and 2 j + 1 of the block.
    pub dropout: Option<AttentionDropout>,
}

/// Sinkhorn attention; `mask` [b, n]. Hidden queries give 0.
pub fn sinkhorn(qkv: &Qkv, mask: Option<&Tensor>, call: &Sinkhorn) -> Result<Heads> {
    if let Sorting::Net { group, temperature, activation } = call.sorting
        && qkv.value_dims()?.2 > 0
        && super::fused_cpu(&qkv.device()?)
    {
        let spec = cpu::Spec {
            block: call.block,
            concat: call.concat,
            temperature,
            activation,
            dropout: call.dropout,
        };
        return cpu::sinkhorn(qkv, mask, group, spec);
    }
    composed(qkv, mask, call)
}

/// The network of `group`: width of its input and of its hidden layer (0 if there is none), and the most blocks it
/// scores.
fn net_sizes(group: &ParamGroup, heads: usize, width: usize, blocks: usize) -> Result<(usize, usize)> {
    let shapes: Vec<&[usize]> = group.parts.iter().map(|part| part.shape.as_slice()).collect();
    let (hidden, most) = match shapes[..] {
        [&[h, d, most], &[hb, mb]] if (h, d, hb, mb) == (heads, width, heads, most) => (0, most),
        [&[h1, d, hidden], &[hb1, b1], &[h, inputs, most], &[hb, mb]]
            if [h1, hb1, h, hb] == [heads; 4] && d == width && [b1, inputs] == [hidden; 2] && mb == most =>
        {
            (hidden, most)
        }
        _ => bail!("a sorting network of shapes {shapes:?} does not fit {heads} heads of {width}"),
    };
    if most < blocks {
        bail!("{blocks} blocks, but the sorting network was built for max_blocks={most}; raise max_blocks");
    }
    Ok((hidden, most))
}
