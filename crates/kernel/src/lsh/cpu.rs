//! The fused CPU kernel of LSH attention, forward and backward.
//!
//! Chunks of the sorted chain are gathered, attended by small products and written in sorted order; a second
//! pass joins the rounds of every position. The backward pass goes by chunks of keys, each with the two
//! chunks of queries that see it, so that no two jobs write to the same place; weights are computed again from
//! the maximum and sum of every query.

use std::sync::OnceLock;

use candle_core::{CpuStorage, Layout, Result, Shape, Tensor, bail};

use super::order::{JOB_ROWS, Sample, Sizes};
use super::rows::{Join, Scatter, grad_rows, join, scatter, unit_rows, weigh_rows};
use super::{Lsh, rows};
use crate::cpu::elements::dot;
use crate::cpu::gemm::{Mat, MatMut, Threads, gemm, gemm_add};
use crate::cpu::par::{self, build_with, zeros};
use crate::cpu::{gradient, slices, with_slices};
use crate::heads::{Heads, Qkv};
use crate::op::{self, FusedOp, SavedOutput};
use crate::tape;

/// LSH attention on packed rows.
pub fn lsh(qkv: &Qkv, mask: Option<&Tensor>, call: &Lsh) -> Result<Heads> {
    let (rows, heads, parts) = qkv.packed()?;
    let (b, n, row) = rows.dims3()?;
    let (Some(q), Some(v)) = (parts.q, parts.v) else { bail!("LSH attention reads queries and values") };
    let (e, d) = (row / parts.count, row / parts.count / heads);
    let keep = mask.map(|mask| mask.flatten_all()?.to_vec1::<f32>()).transpose()?;
    let (rounds, padded, chunk) = match n <= call.chunk {
        true => (1, n, n),
        false => (call.rotation_dims(heads, d, n)?.1, n.next_multiple_of(call.chunk), call.chunk),
    };
    let back = n > call.chunk;
    let sizes =
        Sizes { b, n, heads, d, row, q: q * e, v: v * e, rounds, padded, chunk, back, causal: call.causal };
    let order = with_slices([&rows], |[rows]| sizes.order(rows, keep.as_deref(), call))?;
    let rows = tape::apply(&[&rows], Chunked { sizes, keep, order, stats: OnceLock::new() })?;
    Ok(Heads::Merged { rows, heads })
}

/// The operation; `stats` [b, n, heads, 2] are maximum and reciprocal sum of every query's softmax.
struct Chunked {
    sizes: Sizes,
    keep: Option<Vec<f32>>,
    order: Vec<u32>,
    stats: OnceLock<Vec<f32>>,
}

impl Sample<'_> {
    /// Whether `position` is one of the sequence and not hidden.
    #[inline(always)]
    pub fn visible(&self, position: u32) -> bool {
        let at = position as usize;
        at < self.sizes.n && self.keep.is_none_or(|keep| keep[at] != 0.0)
    }

    /// The positions of chunk `index` of a head's chain.
    fn chunk(&self, head: usize, index: usize) -> &[u32] {
        let Sizes { rounds, padded, chunk, .. } = *self.sizes;
        &self.order[head * rounds * padded + index * chunk..][..chunk]
    }

    /// Gathers queries or values of `head`, which start at `part` in a row; zeros for what is not visible.
    fn gather(&self, part: usize, head: usize, positions: &[u32], out: &mut [f32]) {
        let Sizes { d, row, .. } = *self.sizes;
        for (out, &position) in out.chunks_exact_mut(d).zip(positions) {
            if self.visible(position) {
                out.copy_from_slice(&self.rows[position as usize * row + part + head * d..][..d]);
            } else {
                out.fill(0.0);
            }
        }
    }

    /// The places [heads, rounds, n] of every position in its chain.
    fn places(&self) -> Vec<u32> {
        let Sizes { n, padded, .. } = *self.sizes;
        let mut places = vec![0; self.order.len() / padded * n];
        for (order, places) in self.order.chunks(padded).zip(places.chunks_mut(n)) {
            for (place, &position) in order.iter().enumerate().filter(|(_, at)| (**at as usize) < n) {
                places[position as usize] = place as u32;
            }
        }
        places
    }
}

/// The result of a sample.
struct Attended<'a> {
    /// [n, heads * d].
    out: &'a [f32],
    /// Its gradient.
    grad: &'a [f32],
    /// Maximum and reciprocal sum of every query's softmax, [n, heads, 2].
    stats: &'a [f32],
}

/// Scratch of one worker.
struct Scratch {
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    other: Vec<f32>,
    logits: Vec<f32>,
    weights: Vec<f32>,
    stats: Vec<f32>,
    queries: Vec<u32>,
    keys: Vec<u32>,
}

impl Scratch {
    fn new(sizes: &Sizes) -> Self {
        let (span, chunk) = (sizes.span(), sizes.chunk);
        let rows = || vec![0.0; span * sizes.d];
        Self {
            q: rows(),
            k: rows(),
            v: rows(),
            other: rows(),
            logits: vec![0.0; span * chunk],
            weights: vec![0.0; span * chunk],
            stats: vec![0.0; 3 * span],
            queries: Vec::with_capacity(span),
            keys: Vec::with_capacity(span),
        }
    }
}

impl Sample<'_> {
    /// Chunk `index` of `head`: unnormalised output rows [chunk, d], then maximum and sum of every row.
    fn forward_chunk(&self, head: usize, index: usize, scratch: &mut Scratch, out: &mut [f32]) {
        let Sizes { d, chunk, back, causal, q, v, .. } = *self.sizes;
        let span = self.sizes.span();
        let own = self.chunk(head, index);
        let before = self.chunk(head, (index + self.sizes.chunks() - 1) % self.sizes.chunks());
        scratch.keys.clear();
        scratch.keys.extend(before.iter().take(if back { chunk } else { 0 }).chain(own));
        self.gather(q, head, &scratch.keys, &mut scratch.q);
        self.gather(v, head, &scratch.keys, &mut scratch.v);
        unit_rows(&scratch.q, d, &mut scratch.k);
        self.hide(&mut scratch.keys);
        let queries = Mat::new(&scratch.q[(span - chunk) * d..], chunk, d);
        let keys = Mat::new(&scratch.k, span, d);
        gemm(MatMut::new(&mut scratch.logits, chunk, span), queries, keys.t(), 1.0, Threads::One);
        let (out, stats) = out.split_at_mut(chunk * d);
        weigh_rows(&mut scratch.logits, own, &scratch.keys, causal, stats);
        let (weights, values) = (Mat::new(&scratch.logits, chunk, span), Mat::new(&scratch.v, span, d));
        gemm(MatMut::new(out, chunk, d), weights, values, 1.0, Threads::One);
    }

    /// Marks keys that nobody sees.
    fn hide(&self, keys: &mut [u32]) {
        for key in keys {
            if !self.visible(*key) {
                *key = rows::NOBODY;
            }
        }
    }

    /// `out` [n, heads * d] and `stats` [n, heads, 2].
    fn forward(&self, out: &mut [f32], stats: &mut [f32]) {
        let sizes = self.sizes;
        let Sizes { heads, d, chunk, .. } = *sizes;
        let (chunks, record) = (sizes.chunks(), chunk * (d + 2));
        let sorted = build_with(
            heads * chunks * record,
            sizes.group() * record,
            || Scratch::new(sizes),
            |scratch, job, out| {
                for (at, out) in out.chunks_exact_mut(record).enumerate() {
                    let index = job * sizes.group() + at;
                    self.forward_chunk(index / chunks, index % chunks, scratch, out);
                }
            },
        );
        let places = self.places();
        let parts = Join { sample: *self, places: &places, sorted: &sorted };
        let outs = out.chunks_mut(JOB_ROWS * heads * d).zip(stats.chunks_mut(JOB_ROWS * heads * 2));
        par::each_piece(outs, |job, (out, stats)| join(&parts, job * JOB_ROWS, out, stats));
    }

    /// Keys of chunk `index` of `head`, with the queries that see them: gradients of unit keys, values, own
    /// queries and the next chunk's queries, [chunk, d] each.
    fn backward_chunk(
        &self,
        (head, index): (usize, usize),
        result: &Attended,
        scratch: &mut Scratch,
        out: &mut [f32],
    ) {
        let Sizes { d, heads, chunk, back, causal, q, v, .. } = *self.sizes;
        let span = self.sizes.span();
        let own = self.chunk(head, index);
        let next = self.chunk(head, (index + 1) % self.sizes.chunks());
        scratch.queries.clear();
        scratch.queries.extend(own.iter().chain(next.iter().take(if back { chunk } else { 0 })));
        self.gather(q, head, &scratch.queries, &mut scratch.q);
        self.gather(v, head, own, &mut scratch.v[..chunk * d]);
        for (at, &position) in scratch.queries.iter().enumerate() {
            let (stat, row) = (&mut scratch.stats[at * 3..][..3], &mut scratch.other[at * d..][..d]);
            if self.visible(position) {
                let from = position as usize * heads + head;
                row.copy_from_slice(&result.grad[from * d..][..d]);
                stat[..2].copy_from_slice(&result.stats[from * 2..][..2]);
                stat[2] = dot(row, &result.out[from * d..][..d]);
            } else {
                stat.fill(0.0);
                row.fill(0.0);
            }
        }
        unit_rows(&scratch.q[..chunk * d], d, &mut scratch.k[..chunk * d]);
        scratch.keys.clear();
        scratch.keys.extend(own);
        self.hide(&mut scratch.keys);
        let (queries, keys) = (Mat::new(&scratch.q, span, d), Mat::new(&scratch.k, chunk, d));
        let (values, grads) = (Mat::new(&scratch.v, chunk, d), Mat::new(&scratch.other, span, d));
        gemm(MatMut::new(&mut scratch.weights, span, chunk), queries, keys.t(), 1.0, Threads::One);
        gemm(MatMut::new(&mut scratch.logits, span, chunk), grads, values.t(), 1.0, Threads::One);
        grad_rows(
            &mut scratch.weights,
            &mut scratch.logits,
            &scratch.queries,
            &scratch.keys,
            causal,
            &scratch.stats,
        );
        let (weights, dlogits) =
            (Mat::new(&scratch.weights, span, chunk), Mat::new(&scratch.logits, span, chunk));
        let (dk, rest) = out.split_at_mut(chunk * d);
        let (dv, dq) = rest.split_at_mut(chunk * d);
        gemm(MatMut::new(dk, chunk, d), dlogits.t(), queries, 1.0, Threads::One);
        gemm(MatMut::new(dv, chunk, d), weights.t(), grads, 1.0, Threads::One);
        gemm_add(MatMut::new(dq, span, d), dlogits, keys, 1.0, 0.0, Threads::One);
    }

    /// Gradient of the rows, [n, row].
    fn backward(&self, result: &Attended, out: &mut [f32]) {
        let sizes = self.sizes;
        let Sizes { heads, d, chunk, row, .. } = *sizes;
        let (chunks, record) = (sizes.chunks(), (2 * chunk + sizes.span()) * d);
        let sorted = build_with(
            heads * chunks * record,
            sizes.group() * record,
            || Scratch::new(sizes),
            |scratch, job, out| {
                for (at, out) in out.chunks_exact_mut(record).enumerate() {
                    let index = job * sizes.group() + at;
                    self.backward_chunk((index / chunks, index % chunks), result, scratch, out);
                }
            },
        );
        let places = self.places();
        let parts = Scatter { sample: *self, places: &places, sorted: &sorted };
        let outs = out.chunks_mut(JOB_ROWS * row);
        par::each_piece(outs, |job, out| scatter(&parts, job * JOB_ROWS, out));
    }
}

impl Chunked {
    fn sample<'a>(&'a self, rows: &'a [f32], index: usize) -> Sample<'a> {
        let sizes = &self.sizes;
        let chain = sizes.heads * sizes.rounds * sizes.padded;
        Sample {
            sizes,
            rows: &rows[index * sizes.n * sizes.row..][..sizes.n * sizes.row],
            order: &self.order[index * chain..][..chain],
            keep: self.keep.as_ref().map(|keep| &keep[index * sizes.n..][..sizes.n]),
        }
    }
}

impl FusedOp for Chunked {
    fn name(&self) -> &'static str {
        "lsh-attention"
    }

    fn forward(&self, operands: &[(&CpuStorage, &Layout)]) -> Result<(Vec<f32>, Shape)> {
        let [rows] = slices(operands)?;
        let Sizes { b, n, heads, d, .. } = self.sizes;
        let (mut out, mut stats) = (zeros(b * n * heads * d), zeros(b * n * heads * 2));
        let outs = out.chunks_mut(n * heads * d).zip(stats.chunks_mut(n * heads * 2));
        par::each_piece(outs, |index, (out, stats)| self.sample(rows, index).forward(out, stats));
        let _ = self.stats.set(stats); // the first run's stay: they are the same
        Ok((out, (b, n, heads * d).into()))
    }

    fn needs_output(&self) -> bool {
        true
    }

    fn backward(&self, operands: &[&Tensor], out: SavedOutput, grad: &Tensor) -> Result<Vec<Option<Tensor>>> {
        let Some(stats) = self.stats.get() else {
            bail!("LSH attention's backward pass runs before its forward pass")
        };
        let Sizes { n, heads, d, row, .. } = self.sizes;
        let [rows] = op::operands(operands)?;
        let drows = with_slices([rows, op::result(out)?, grad], |[data, out, grad]| {
            let mut drows = zeros(data.len());
            par::each_piece(drows.chunks_mut(n * row), |index, drows| {
                let first = index * n * heads;
                let result =
                    Attended { out: &out[first * d..], grad: &grad[first * d..], stats: &stats[2 * first..] };
                self.sample(data, index).backward(&result, drows);
            });
            Ok(drows)
        })?;
        Ok(vec![gradient(rows, drows)?])
    }
}
