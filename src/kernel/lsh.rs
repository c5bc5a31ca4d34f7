//! LSH attention with one projection for queries and keys (Reformer, Kitaev et al. 2020; SPEC-ls 10).
//!
//! Every round hashes the positions into buckets by random rotations, sorts them by (bucket, position) and
//! cuts the concatenated rounds into chunks. A chunk attends to itself and to the chunk before it, the first
//! to the last. Combining the rounds by their log-sum-exp is the same as one softmax over the keys of all
//! rounds, duplicates counted, and that is how it is computed: no difference of large logarithms appears.

use candle_core::{D, Result, Tensor, bail};

use super::heads::{Heads, Qkv};
use super::visible::keep_rows;

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
///
/// # Errors
/// Shapes that do not fit.
pub fn lsh(qkv: &Qkv, mask: Option<&Tensor>, call: &Lsh) -> Result<Heads> {
    composed(qkv, mask, call)
}

/// The definition in plain candle operations (hashes and sorting on the host: they have no gradient).
///
/// # Errors
/// Shapes that do not fit.
pub fn composed(qkv: &Qkv, mask: Option<&Tensor>, call: &Lsh) -> Result<Heads> {
    let q = keep_rows(&qkv.q()?.contiguous()?, mask)?;
    let v = keep_rows(&qkv.v()?.contiguous()?, mask)?;
    let (b, _, n, d) = q.dims4()?;
    let norm = ((q.sqr()?.mean_keepdim(D::Minus1)? + 1e-6)?.sqrt()? * (d as f64).sqrt())?;
    let k = q.broadcast_div(&norm)?;
    let chain = Chain::new(&q, mask, call)?;
    let rules = Rules { kept: kept(mask, b, n)?, causal: call.causal };
    Ok(Heads::Split(keep_rows(&attend(&q, &k, &v, &chain, &rules)?, mask)?))
}

/// Which positions are kept, [b * n].
fn kept(mask: Option<&Tensor>, b: usize, n: usize) -> Result<Vec<bool>> {
    match mask {
        Some(mask) => Ok(mask.flatten_all()?.to_vec1::<f32>()?.iter().map(|&keep| keep != 0.0).collect()),
        None => Ok(vec![true; b * n]),
    }
}

/// The bucket of every position and round, [b, h, rounds, n] in row-major order; positions that `mask` hides
/// are in one extra, last bucket. `q` [b, h, n, d].
///
/// # Errors
/// Rotations that do not fit.
pub fn buckets(q: &Tensor, mask: Option<&Tensor>, call: &Lsh) -> Result<Vec<u32>> {
    let (b, h, n, d) = q.dims4()?;
    let Some(rotations) = call.rotations else {
        bail!("a sequence of {n} positions needs hash rotations, which were built for at most {}", call.chunk)
    };
    let (heads, width, rounds, columns) = rotations.dims4()?;
    let halves: usize = call.factors.iter().map(|factor| factor / 2).sum();
    if (heads, width, columns) != (h, d, halves) {
        let factors = call.factors;
        bail!("rotations {:?} do not fit {h} heads of {d} and bucket factors {factors:?}", rotations.dims());
    }
    let flat = rotations.reshape((h, d, rounds * columns))?;
    let last = call.factors.iter().product::<usize>() as u32;
    let kept = kept(mask, b, n)?;
    let mut buckets = vec![0; b * h * rounds * n];
    for (sample, buckets) in buckets.chunks_mut(h * rounds * n).enumerate() {
        let turned = q.get(sample)?.detach().matmul(&flat)?; // [h, n, rounds * columns]
        let turned = turned.flatten_all()?.to_vec1::<f32>()?;
        for (head, buckets) in buckets.chunks_mut(rounds * n).enumerate() {
            for (round, buckets) in buckets.chunks_mut(n).enumerate() {
                for (position, bucket) in buckets.iter_mut().enumerate() {
                    let at = ((head * n + position) * rounds + round) * columns;
                    *bucket = if kept[sample * n + position] {
                        bucket_of(&turned[at..at + columns], call.factors)
                    } else {
                        last
                    };
                }
            }
        }
    }
    Ok(buckets)
}

/// The bucket of one rotated row: per factor the index of the largest of [y, -y], the lowest one if there
/// are several, combined as b_1 + f_1 b_2 + f_1 f_2 b_3.
pub(super) fn bucket_of(mut turned: &[f32], factors: &[usize]) -> u32 {
    let (mut bucket, mut unit) = (0, 1);
    for &factor in factors {
        let (mine, rest) = turned.split_at(factor / 2);
        let mut best = (f32::NEG_INFINITY, 0);
        let both = mine.iter().copied().chain(mine.iter().map(|y| -y));
        for (index, y) in both.enumerate() {
            if y > best.0 {
                best = (y, index);
            }
        }
        bucket += unit * best.1;
        unit *= factor;
        turned = rest;
    }
    bucket as u32
}

/// Appends the positions 0..n of one round, sorted by (bucket, position), and the padding n..padded.
pub(super) fn sort(buckets: &[u32], padded: usize, order: &mut Vec<u32>) {
    let last = buckets.iter().copied().max().unwrap_or(0) as usize;
    let mut starts = vec![0; last + 2];
    for &bucket in buckets {
        starts[bucket as usize + 1] += 1;
    }
    for index in 1..starts.len() {
        starts[index] += starts[index - 1];
    }
    let base = order.len();
    order.extend(0..padded as u32);
    for (position, &bucket) in buckets.iter().enumerate() {
        let place = &mut starts[bucket as usize];
        order[base + *place] = position as u32;
        *place += 1;
    }
}

/// The chain of chunks of every sample and head.
pub(super) struct Chain {
    /// [b * h, rounds * padded]: positions in sorted order; `n..padded` is padding.
    pub order: Vec<u32>,
    /// Rounds in a chain.
    pub rounds: usize,
    /// Positions of a round, a multiple of the chunk.
    pub padded: usize,
    /// Length of a chunk.
    pub chunk: usize,
    /// Whether a chunk sees the one before it.
    pub back: bool,
}

impl Chain {
    /// Hashes and sorts; `q` [b, h, n, d].
    pub fn new(q: &Tensor, mask: Option<&Tensor>, call: &Lsh) -> Result<Self> {
        let (b, h, n, _) = q.dims4()?;
        if n <= call.chunk {
            let order = (0..b * h).flat_map(|_| 0..n as u32).collect();
            return Ok(Self { order, rounds: 1, padded: n, chunk: n, back: false });
        }
        let buckets = buckets(q, mask, call)?;
        let (rounds, padded) = (buckets.len() / (b * h * n), n.next_multiple_of(call.chunk));
        let mut order = Vec::with_capacity(b * h * rounds * padded);
        for buckets in buckets.chunks(n) {
            sort(buckets, padded, &mut order);
        }
        Ok(Self { order, rounds, padded, chunk: call.chunk, back: true })
    }

    /// Chunks of a chain.
    pub fn chunks(&self) -> usize {
        self.rounds * self.padded / self.chunk
    }
}

/// Softmax attention along the chains; `q`, `k`, `v` [b, h, n, d].
fn attend(q: &Tensor, k: &Tensor, v: &Tensor, chain: &Chain, rules: &Rules) -> Result<Tensor> {
    let (b, h, n, d) = q.dims4()?;
    let (padded, chunk, chunks) = (chain.padded, chain.chunk, chain.chunks());
    let device = q.device();
    let flat = chain.order.chunks(chain.rounds * padded).enumerate();
    let rows = flat.flat_map(|(row, order)| order.iter().map(move |&at| (row * padded) as u32 + at));
    let rows = Tensor::from_iter(rows, device)?;
    let sorted = |x: &Tensor| {
        let x = x.pad_with_zeros(2, 0, padded - n)?.reshape((b * h * padded, d))?;
        x.index_select(&rows, 0)?.reshape((b * h, chunks, chunk, d))
    };
    let with_back = |x: Tensor| {
        if !chain.back {
            return Ok(x);
        }
        let before = Tensor::cat(&[x.narrow(1, chunks - 1, 1)?, x.narrow(1, 0, chunks - 1)?], 1)?;
        Tensor::cat(&[before, x], 2)
    };
    let (queries, keys, values) = (sorted(q)?, with_back(sorted(k)?)?, with_back(sorted(v)?)?);
    let logits = queries.matmul(&keys.t()?)?; // [b * h, chunks, chunk, span]
    let (free, fixed) = rules.tables(chain, h, n);
    let free = Tensor::from_vec(free, logits.shape(), device)?;
    let logits = free.where_cond(&logits, &Tensor::from_vec(fixed, logits.shape(), device)?)?;
    let max = logits.max_keepdim(D::Minus1)?.detach();
    let weights = logits.broadcast_sub(&max)?.exp()?;
    let sum = weights.sum_keepdim(D::Minus1)?;
    let out = weights.matmul(&values)?;

    let mut places = vec![0u32; b * h * chain.rounds * n];
    for (index, order) in chain.order.chunks(padded).enumerate() {
        for (place, &position) in order.iter().enumerate() {
            if (position as usize) < n {
                places[index * n + position as usize] = (index * padded + place) as u32;
            }
        }
    }
    let places = Tensor::new(places, device)?;
    let back = |x: Tensor| {
        let width = x.dim(3)?;
        let x = x.reshape((b * h * chain.rounds * padded, width))?.index_select(&places, 0)?;
        x.reshape((b, h, chain.rounds, n, width))
    };
    let (max, sum, out) = (back(max)?, back(sum)?, back(out)?);
    let scale = max.broadcast_sub(&max.max_keepdim(2)?)?.exp()?;
    (out.broadcast_mul(&scale)?.sum(2)?).broadcast_div(&(sum * scale)?.sum(2)?)
}

/// Which logits are replaced.
struct Rules {
    kept: Vec<bool>, // [b, n]
    causal: bool,
}

impl Rules {
    /// Per pair of a chunk's queries and keys: 1 where the logit stands, and what replaces it elsewhere.
    fn tables(&self, chain: &Chain, heads: usize, n: usize) -> (Vec<u8>, Vec<f32>) {
        let (chunk, chunks) = (chain.chunk, chain.chunks());
        let (mut free, mut fixed) = (Vec::new(), Vec::new());
        for (row, order) in chain.order.chunks(chain.rounds * chain.padded).enumerate() {
            let kept = &self.kept[row / heads * n..][..n];
            for c in 0..chunks {
                let own = &order[c * chunk..][..chunk];
                let before = (c + chunks - 1) % chunks * chunk;
                let before = if chain.back { &order[before..][..chunk] } else { &[] };
                for &i in own {
                    for &j in before.iter().chain(own) {
                        let hidden = !kept.get(j as usize).copied().unwrap_or(false);
                        let future = self.causal && j > i;
                        let rule = if i == j {
                            Some(OWN)
                        } else if hidden || future {
                            Some(HIDDEN)
                        } else {
                            None
                        };
                        free.push(u8::from(rule.is_none()));
                        fixed.push(rule.unwrap_or(0.0));
                    }
                }
            }
        }
        (free, fixed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ties_go_to_the_lowest_bucket() {
        assert_eq!(bucket_of(&[0.0, 0.0], &[4]), 0);
        assert_eq!(bucket_of(&[-1.0, 1.0], &[4]), 1);
        assert_eq!(bucket_of(&[-2.0, 1.0], &[4]), 2);
        assert_eq!(bucket_of(&[-2.0, 1.0, 0.5, -3.0, 1.0], &[4, 6]), 2 + 4 * 4);
    }

    #[test]
    fn sorting_is_stable_and_appends_the_padding() {
        let mut order = vec![9];
        sort(&[2, 0, 2, 1, 0], 8, &mut order);
        assert_eq!(order, [9, 1, 4, 3, 0, 2, 5, 6, 7]);
    }
}
