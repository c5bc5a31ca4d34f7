//! The fused CPU kernel of Nystrom attention: forward pass.
//!
//! Neither of the two [n, m] softmaxes is stored. B v is folded tile by tile with a running maximum; what stays is per
//! head a few [m, m] and [m, d] matrices. The product is taken from the right, F (Z (B v)), which spares n m^2.

use std::sync::OnceLock;

use candle_core::{CpuStorage, Layout, Result, Shape, Tensor, bail};
use rayon::prelude::*;

use super::inverse::iterates;
use super::rows::{add_rows, fold_rows, softmax_rows};
use super::{Landmarks, Start};
use crate::kernel::cpu::gemm::{Mat, MatMut, Threads, gemm, gemm_add};
use crate::kernel::cpu::par::zeros;
use crate::kernel::cpu::{gradient, slices, with_slices};
use crate::kernel::heads::{Heads, Qkv};
use crate::kernel::op::{self, Op};
use crate::kernel::tape;

/// Positions per tile.
pub const TILE: usize = 128;
/// Jobs that a sample is cut into.
const SPLITS: usize = 8;

/// Nystrom attention on packed rows.
pub fn nystrom(qkv: &Qkv, mask: Option<&Tensor>, spec: Landmarks) -> Result<Heads> {
    let (rows, heads, parts) = qkv.packed()?;
    let (b, n, row) = rows.dims3()?;
    let (Some(q), Some(k), Some(v)) = (parts.q, parts.k, parts.v) else {
        bail!("Nystrom attention reads queries, keys and values")
    };
    let (e, m) = (row / parts.count, spec.count);
    let d = e / heads;
    let keep = mask.map(|mask| mask.flatten_all()?.to_vec1::<f32>()).transpose()?;
    let (q, k, v, segment) = (q * e, k * e, v * e, n.div_ceil(m));
    let root = (d as f32).powf(-0.25);
    let split = n.div_ceil(SPLITS).next_multiple_of(TILE);
    let sizes = Sizes { b, n, heads, d, row, q, k, v, m, segment, root, split };
    let train = rows.track_op();
    let rows = tape::apply(&[&rows], Nystrom { sizes, spec, keep, train, state: OnceLock::new() })?;
    Ok(Heads::Merged { rows, heads })
}

/// Sizes of one call, in elements.
#[derive(Clone, Copy)]
pub struct Sizes {
    pub b: usize,
    pub n: usize,
    pub heads: usize,
    pub d: usize,
    /// Length of a packed row, and where queries, keys and values start in it.
    pub row: usize,
    pub q: usize,
    pub k: usize,
    pub v: usize,
    /// Landmarks, and positions per landmark.
    pub m: usize,
    pub segment: usize,
    /// d^(-1/4), on queries and on keys.
    pub root: f32,
    /// Positions per job: a partition fixed by shape, a multiple of the tile.
    pub split: usize,
}

/// The operation.
pub struct Nystrom {
    pub sizes: Sizes,
    pub spec: Landmarks,
    /// [b, n], 0 where a position is hidden.
    pub keep: Option<Vec<f32>>,
    /// Whether a gradient may be asked for.
    pub train: bool,
    /// Left by the forward pass, [b * heads].
    pub state: OnceLock<Vec<Middle>>,
}

/// What the backward pass needs of one sample and head.
pub struct Middle {
    /// Landmarks of queries and keys, [m, d].
    pub ql: Vec<f32>,
    pub kl: Vec<f32>,
    /// A, [m, m].
    pub a: Vec<f32>,
    /// The largest column sum that the start is divided by; whose matrix and which column it is.
    pub c: f32,
    pub owner: (usize, usize),
    /// The iterates [m, m] of the pseudo-inverse; for inference the last alone.
    pub iterates: Vec<f32>,
    /// Maximum and reciprocal sum of every row of B's softmax, [m, 2].
    pub stats: Vec<f32>,
    /// B v and Z B v, [m, d].
    pub y: Vec<f32>,
    pub x: Vec<f32>,
}

impl Middle {
    /// The pseudo-inverse, [m, m].
    pub fn inverse(&self) -> &[f32] {
        &self.iterates[self.iterates.len() - self.a.len()..]
    }
}

/// One sample.
#[derive(Clone, Copy)]
pub struct Sample<'a> {
    pub sizes: &'a Sizes,
    /// [n, row].
    pub rows: &'a [f32],
    /// [n].
    pub keep: Option<&'a [f32]>,
}

impl<'a> Sample<'a> {
    pub fn hidden(&self, at: usize) -> bool {
        self.keep.is_some_and(|keep| keep[at] == 0.0)
    }

    /// Rows [len, d] of `head` from position `start` on; `part` is where queries, keys or values start. Copied with
    /// zeros at hidden positions if there are any.
    pub fn part(&self, part: usize, head: usize, start: usize, len: usize, clean: &'a mut [f32]) -> Mat<'a> {
        let Sizes { d, row, .. } = *self.sizes;
        let rows = &self.rows[start * row + part + head * d..];
        if !(start..start + len).any(|at| self.hidden(at)) {
            return Mat::strided(rows, len, d, row);
        }
        for (at, clean) in clean.chunks_exact_mut(d).take(len).enumerate() {
            if self.hidden(start + at) {
                clean.fill(0.0);
            } else {
                clean.copy_from_slice(&rows[at * row..][..d]);
            }
        }
        Mat::new(clean, len, d)
    }

    /// Means of the segments, [m, d]; hidden positions and those beyond the end count as zeros.
    fn landmarks(&self, part: usize, head: usize) -> Vec<f32> {
        let Sizes { n, d, row, m, segment, root, .. } = *self.sizes;
        let mut means = vec![0.0; m * d];
        for (index, mean) in means.chunks_exact_mut(d).enumerate() {
            for at in index * segment..((index + 1) * segment).min(n) {
                if !self.hidden(at) {
                    let x = &self.rows[at * row + part + head * d..][..d];
                    add_rows(root / segment as f32, x, d, d, mean);
                }
            }
        }
        means
    }

    /// Landmarks, A and its largest column sum. `index` counts samples and heads.
    fn middle(&self, head: usize, index: usize) -> Middle {
        let Sizes { d, m, q, k, .. } = *self.sizes;
        let (ql, kl) = (self.landmarks(q, head), self.landmarks(k, head));
        let mut a = vec![0.0; m * m];
        gemm(MatMut::new(&mut a, m, m), Mat::new(&ql, m, d), Mat::new(&kl, m, d).t(), 1.0, Threads::One);
        softmax_rows(&mut a, m);
        let mut columns = vec![0.0; m];
        add_rows(1.0, &a, m, m, &mut columns);
        // the first of equal sums, as candle's argmax has it
        let (column, c) = columns.iter().enumerate().fold((0, f32::NEG_INFINITY), |best, (column, &sum)| {
            if sum > best.1 { (column, sum) } else { best }
        });
        let (iterates, stats, y, x) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        Middle { ql, kl, a, c, owner: (index, column), iterates, stats, y, x }
    }

    /// Maxima [m], sums [m] and unnormalised B v [m, d] of the positions of split `split`.
    fn fold(&self, head: usize, split: usize, ql: &[f32], scratch: &mut Scratch, state: &mut [f32]) {
        let Sizes { n, d, m, k, v, root, split: size, .. } = *self.sizes;
        let (max, rest) = state.split_at_mut(m);
        let (sum, sums) = rest.split_at_mut(m);
        max.fill(f32::NEG_INFINITY);
        let end = ((split + 1) * size).min(n);
        for start in (split * size..end).step_by(TILE) {
            let len = TILE.min(end - start);
            let keys = self.part(k, head, start, len, &mut scratch.k);
            let logits = &mut scratch.logits[..m * len];
            gemm(MatMut::new(logits, m, len), Mat::new(ql, m, d), keys.t(), root, Threads::One);
            for at in (0..len).filter(|&at| self.hidden(start + at)) {
                logits[at..].iter_mut().step_by(len).for_each(|logit| *logit = f32::NEG_INFINITY);
            }
            fold_rows(logits, len, max, sum, sums);
            let values = self.part(v, head, start, len, &mut scratch.v);
            gemm_add(MatMut::new(sums, m, d), Mat::new(logits, m, len), values, 1.0, 1.0, Threads::One);
        }
    }

    /// F X for the positions `start..start + len` into `out` [len, heads * d].
    fn far(&self, start: usize, len: usize, middles: &[Middle], scratch: &mut Scratch, out: &mut [f32]) {
        let Sizes { d, heads, m, .. } = *self.sizes;
        for (head, middle) in middles.iter().enumerate() {
            let queries = self.part(self.sizes.q, head, start, len, &mut scratch.k);
            self.far_weights(queries, start, len, middle, &mut scratch.logits);
            let weights = Mat::new(&scratch.logits, len, m);
            let out = MatMut::strided(&mut out[head * d..], len, d, heads * d);
            gemm(out, weights, Mat::new(&middle.x, m, d), 1.0, Threads::One);
        }
    }

    /// Rows of F [len, m]; zero at hidden positions.
    pub fn far_weights(&self, queries: Mat, start: usize, len: usize, middle: &Middle, out: &mut [f32]) {
        let Sizes { d, m, root, .. } = *self.sizes;
        let out = &mut out[..len * m];
        gemm(MatMut::new(out, len, m), queries, Mat::new(&middle.kl, m, d).t(), root, Threads::One);
        softmax_rows(out, m);
        for (at, row) in out.chunks_exact_mut(m).enumerate() {
            if self.hidden(start + at) {
                row.fill(0.0);
            }
        }
    }
}

/// Scratch of one worker.
pub struct Scratch {
    pub k: Vec<f32>,
    pub v: Vec<f32>,
    pub logits: Vec<f32>,
    pub grads: Vec<f32>,
    pub deltas: Vec<f32>,
}

impl Scratch {
    pub fn new(sizes: &Sizes) -> Self {
        let Sizes { d, m, .. } = *sizes;
        let tile = |width: usize| vec![0.0; TILE * width];
        Self { k: tile(d), v: tile(d), logits: tile(m), grads: tile(m), deltas: vec![0.0; TILE.max(m)] }
    }
}

impl Nystrom {
    pub fn sample<'a>(&'a self, rows: &'a [f32], index: usize) -> Sample<'a> {
        let Sizes { n, row, .. } = self.sizes;
        let keep = self.keep.as_ref().map(|keep| &keep[index * n..][..n]);
        Sample { sizes: &self.sizes, rows: &rows[index * n * row..][..n * row], keep }
    }

    fn middles(&self, rows: &[f32]) -> Vec<Middle> {
        let Sizes { b, n, heads, d, m, split, .. } = self.sizes;
        let pairs = (0..b * heads).into_par_iter();
        let mut middles: Vec<Middle> =
            pairs.map(|index| self.sample(rows, index / heads).middle(index % heads, index)).collect();
        if self.spec.start == Start::Original {
            let best = middles.iter().fold((f32::NEG_INFINITY, (0, 0)), |best, middle| {
                if middle.c > best.0 { (middle.c, middle.owner) } else { best }
            });
            middles.iter_mut().for_each(|middle| (middle.c, middle.owner) = best);
        }
        let (splits, state) = (n.div_ceil(split), m * (d + 2));
        let mut states = vec![0.0; b * heads * splits * state];
        states.par_chunks_mut(state).enumerate().for_each_init(
            || Scratch::new(&self.sizes),
            |scratch, (job, state)| {
                let (index, split) = (job / splits, job % splits);
                let sample = self.sample(rows, index / heads);
                sample.fold(index % heads, split, &middles[index].ql, scratch, state);
            },
        );
        middles.par_iter_mut().zip(states.par_chunks(splits * state)).for_each(|(middle, states)| {
            (middle.stats, middle.y) = join(states, m, d);
            let mut all = iterates(&middle.a, m, middle.c, self.spec.iterations);
            middle.iterates = if self.train { all } else { all.split_off(self.spec.iterations * m * m) };
            let mut x = vec![0.0; m * d];
            let (z, y) = (Mat::new(middle.inverse(), m, m), Mat::new(&middle.y, m, d));
            gemm(MatMut::new(&mut x, m, d), z, y, 1.0, Threads::One);
            middle.x = x;
        });
        middles
    }
}

/// Joins the splits in order: maxima and reciprocal sums [m, 2], and B v [m, d].
fn join(states: &[f32], m: usize, d: usize) -> (Vec<f32>, Vec<f32>) {
    let (mut stats, mut y) = (vec![0.0; m * 2], vec![0.0; m * d]);
    for (index, (stat, y)) in stats.chunks_exact_mut(2).zip(y.chunks_exact_mut(d)).enumerate() {
        let parts = || states.chunks_exact(m * (d + 2));
        let max = parts().map(|part| part[index]).fold(f32::NEG_INFINITY, f32::max);
        if max == f32::NEG_INFINITY {
            continue; // no position at all: weights are 0
        }
        let factor = |part: &[f32]| (part[index] - max).exp();
        let sum: f32 = parts().map(|part| factor(part) * part[m + index]).sum();
        for part in parts() {
            add_rows(factor(part) / sum, &part[2 * m + index * d..][..d], d, d, y);
        }
        (stat[0], stat[1]) = (max, 1.0 / sum);
    }
    (stats, y)
}

impl Op for Nystrom {
    fn name(&self) -> &'static str {
        "nystrom-attention"
    }

    fn forward(&self, operands: &[(&CpuStorage, &Layout)]) -> Result<(Vec<f32>, Shape)> {
        let [rows] = slices(operands)?;
        let Sizes { b, n, heads, d, .. } = self.sizes;
        let middles = self.middles(rows);
        let mut out = zeros(b * n * heads * d);
        out.par_chunks_mut(n * heads * d).enumerate().for_each(|(index, out)| {
            let (sample, middles) = (self.sample(rows, index), &middles[index * heads..][..heads]);
            out.par_chunks_mut(TILE * heads * d).enumerate().for_each_init(
                || Scratch::new(&self.sizes),
                |scratch, (tile, out)| {
                    let len = out.len() / (heads * d);
                    sample.far(tile * TILE, len, middles, scratch, out);
                },
            );
        });
        let _ = self.state.set(middles); // the first run's stay: they are the same
        Ok((out, (b, n, heads * d).into()))
    }

    fn backward(&self, operands: &[&Tensor], out: &Tensor, grad: &Tensor) -> Result<Vec<Option<Tensor>>> {
        let Some(middles) = self.state.get() else {
            bail!("Nystrom attention's backward pass runs before its forward pass")
        };
        let [rows] = op::operands(operands)?;
        let drows =
            with_slices([rows, out, grad], |[data, out, grad]| Ok(self.gradients(data, middles, out, grad)))?;
        Ok(vec![gradient(rows, drows)?])
    }
}
