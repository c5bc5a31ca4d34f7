//! LSH attention with one projection for queries and keys (Reformer, Kitaev et al. 2020; SPEC-ls 10).
//!
//! Every round hashes the positions into buckets by random rotations, sorts them by (bucket, position) and
//! cuts the concatenated rounds into chunks. A chunk attends to itself and to the chunk before it, the first
//! to the last. Combining the rounds by their log-sum-exp is the same as one softmax over the keys of all
//! rounds, duplicates counted, and that is how it is computed: no difference of large logarithms appears.

mod composed;
mod cpu;
mod hash;
mod order;
mod rows;
#[cfg(test)]
mod tests;

use candle_core::{Result, Tensor, bail};

use super::heads::{Heads, Qkv};
pub use composed::{buckets, composed};

/// Logit of a padded or future key.
const HIDDEN: f32 = -1e9;
/// Logit of the query's own position.
const OWN: f32 = -1e5;

/// Settings of one call.
pub struct Lsh<'a> {
    /// Length of a chunk. A sequence that is not longer attends to itself without hashing.
    pub chunk: usize,
    /// Even factors of the number of buckets.
    pub factors: &'a [usize],
    /// [h, d, rounds, half the sum of the factors].
    pub rotations: Option<&'a Tensor>,
    /// Whether future keys are hidden.
    pub causal: bool,
}

/// LSH attention. The queries of `qkv` are its keys too; `mask` [b, n].
pub fn lsh(qkv: &Qkv, mask: Option<&Tensor>, call: &Lsh) -> Result<Heads> {
    if qkv.value_dims()?.2 > 0 && super::fused_cpu(&qkv.device()?) {
        return cpu::lsh(qkv, mask, call);
    }
    composed(qkv, mask, call)
}

impl Lsh<'_> {
    /// Rounds and, per round, columns of the rotations.
    fn rotation_dims(&self, heads: usize, width: usize, n: usize) -> Result<(&Tensor, usize, usize)> {
        let Some(rotations) = self.rotations else {
            bail!(
                "a sequence of {n} positions needs hash rotations, which were built for at most {}",
                self.chunk
            )
        };
        let (h, d, rounds, columns) = rotations.dims4()?;
        let halves: usize = self.factors.iter().map(|factor| factor / 2).sum();
        if (h, d, columns) != (heads, width, halves) {
            let factors = self.factors;
            bail!(
                "rotations {:?} do not fit {heads} heads of {width} and bucket factors {factors:?}",
                rotations.dims()
            );
        }
        Ok((rotations, rounds, columns))
    }
}
