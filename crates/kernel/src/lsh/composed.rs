//! The composed twin of LSH attention.

use candle_core::{D, DType, Result, Tensor};

use super::hash::{bucket_of, sort};
use super::{HIDDEN, Lsh, OWN};
use crate::heads::{Heads, Qkv};
use crate::masking::zero_hidden_rows;

/// The definition in plain candle operations (hashes and sorting on the host: they have no gradient).
pub fn composed(qkv: &Qkv, mask: Option<&Tensor>, call: &Lsh) -> Result<Heads> {
    let q = zero_hidden_rows(&qkv.q()?.contiguous()?, mask)?;
    let v = zero_hidden_rows(&qkv.v()?.contiguous()?, mask)?;
    let (b, _, n, d) = q.dims4()?;
    let norm = ((q.sqr()?.mean_keepdim(D::Minus1)? + 1e-6)?.sqrt()? * (d as f64).sqrt())?;
    let k = q.broadcast_div(&norm)?;
    let chain = Chain::new(&q, mask, call)?;
    let rules = Rules { kept: kept(mask, b, n)?, causal: call.causal };
    Ok(Heads::Split(zero_hidden_rows(&attend(&q, &k, &v, &chain, &rules)?, mask)?))
}

/// Which positions are kept, [b * n].
fn kept(mask: Option<&Tensor>, b: usize, n: usize) -> Result<Vec<bool>> {
    match mask {
        Some(mask) => {
            let mask = mask.flatten_all()?.to_dtype(DType::F32)?.to_vec1::<f32>()?;
            Ok(mask.iter().map(|&keep| keep != 0.0).collect())
        }
        None => Ok(vec![true; b * n]),
    }
}

/// The bucket of every position and round, [b, h, rounds, n] in row-major order; positions that `mask` hides
/// are in one extra, last bucket. `q` [b, h, n, d].
pub fn buckets(q: &Tensor, mask: Option<&Tensor>, call: &Lsh) -> Result<Vec<u32>> {
    let (b, h, n, d) = q.dims4()?;
    let (rotations, rounds, columns) = call.rotation_dims(h, d, n)?;
    let flat = rotations.reshape((h, d, rounds * columns))?;
    let last = call.factors.iter().product::<usize>() as u32;
    let kept = kept(mask, b, n)?;
    let mut buckets = vec![0; b * h * rounds * n];
    for (sample, buckets) in buckets.chunks_mut(h * rounds * n).enumerate() {
        let turned = q.get(sample)?.detach().matmul(&flat)?; // [h, n, rounds * columns]
        let turned = turned.flatten_all()?.to_dtype(DType::F32)?.to_vec1::<f32>()?;
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

/// The chain of chunks of every sample and head.
struct Chain {
    /// [b * h, rounds * padded]: positions in sorted order; `n..padded` is padding.
    order: Vec<u32>,
    /// Rounds in a chain.
    rounds: usize,
    /// Positions of a round, a multiple of the chunk.
    padded: usize,
    /// Length of a chunk.
    chunk: usize,
    /// Whether a chunk sees the one before it.
    back: bool,
}

impl Chain {
    /// Hashes and sorts; `q` [b, h, n, d].
    fn new(q: &Tensor, mask: Option<&Tensor>, call: &Lsh) -> Result<Self> {
        let (b, h, n, _) = q.dims4()?;
        if n <= call.chunk {
            let order = (0..b * h).flat_map(|_| 0..n as u32).collect();
            return Ok(Self { order, rounds: 1, padded: n, chunk: n, back: false });
        }
        let buckets = buckets(q, mask, call)?;
        let (rounds, padded) = (buckets.len() / (b * h * n), n.next_multiple_of(call.chunk));
        let mut order = vec![0; b * h * rounds * padded];
        for (buckets, order) in buckets.chunks(n).zip(order.chunks_mut(padded)) {
            sort(buckets, order);
        }
        Ok(Self { order, rounds, padded, chunk: call.chunk, back: true })
    }

    /// Chunks of a chain.
    fn chunks(&self) -> usize {
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
    let fixed = Tensor::from_vec(fixed, logits.shape(), device)?.to_dtype(logits.dtype())?;
    let logits = free.where_cond(&logits, &fixed)?;
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
