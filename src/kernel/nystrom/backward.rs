//! The fused CPU kernel of Nystrom attention: backward pass.
//!
//! Three sweeps over the positions, with the small matrices between them: queries through F, keys and values
//! through B, and the landmarks' gradients back to their segments.

use rayon::prelude::*;

use super::cpu::{Middle, Nystrom, Sample, Scratch, Sizes, TILE};
use super::inverse::backward;
use super::rows::{add_rows, dots, logit_grads, weights_again};
use crate::kernel::cpu::gemm::{Mat, MatMut, Threads, gemm, gemm_add};
use crate::kernel::cpu::par::zeros;

/// Gradients of the small matrices of one sample and head.
struct Small {
    /// Of landmarks, [m, d].
    dql: Vec<f32>,
    dkl: Vec<f32>,
    /// Of A, [m, m].
    da: Vec<f32>,
    /// Of c.
    dc: f32,
    /// Of B v, [m, d].
    dy: Vec<f32>,
    /// Products of the rows of B v with their gradients, [m].
    deltas: Vec<f32>,
}

impl Sample<'_> {
    /// Through F: the gradients of queries go to `drows` [len, row], those of X and of the key landmarks, [2, m, d] per
    /// head, to `parts`. `out` and `grad` [len, heads * d] start at position `first`.
    fn through_far(
        &self,
        first: usize,
        middles: &[Middle],
        (out, grad): (&[f32], &[f32]),
        scratch: &mut Scratch,
        (drows, parts): (&mut [f32], &mut [f32]),
    ) {
        let Sizes { heads, d, row, m, q, root, .. } = *self.sizes;
        let (e, count) = (heads * d, drows.len() / row);
        for start in (0..count).step_by(TILE) {
            let len = TILE.min(count - start);
            for (head, middle) in middles.iter().enumerate() {
                let Scratch { k: clean, logits, grads, deltas, .. } = scratch;
                let (dx, dkl) = parts[head * 2 * m * d..][..2 * m * d].split_at_mut(m * d);
                let queries = self.part(q, head, first + start, len, clean);
                self.far_weights(queries, first + start, len, middle, logits);
                let (logits, grads, at) = (&logits[..len * m], &mut grads[..len * m], start * e + head * d);
                let dout = Mat::strided(&grad[at..], len, d, e);
                let weights = Mat::new(logits, len, m);
                gemm(MatMut::new(grads, len, m), dout, Mat::new(&middle.x, m, d).t(), 1.0, Threads::One);
                gemm_add(MatMut::new(dx, m, d), weights.t(), dout, 1.0, 1.0, Threads::One);
                dots(&out[at..], &grad[at..], d, e, &mut deltas[..len]);
                logit_grads(logits, grads, m, deltas);
                let grads = Mat::new(grads, len, m);
                let dq = MatMut::strided(&mut drows[start * row + q + head * d..], len, d, row);
                gemm(dq, grads, Mat::new(&middle.kl, m, d), root, Threads::One);
                gemm_add(MatMut::new(dkl, m, d), grads.t(), queries, root, 1.0, Threads::One);
            }
        }
    }

    /// Through B: gradients of keys and values go to `drows` [len, row], those of the query landmarks, [m, d] per
    /// head, to `parts`.
    fn through_near(
        &self,
        first: usize,
        (middles, small): (&[Middle], &[Small]),
        scratch: &mut Scratch,
        (drows, parts): (&mut [f32], &mut [f32]),
    ) {
        let Sizes { heads, d, row, m, k, v, root, .. } = *self.sizes;
        let count = drows.len() / row;
        for start in (0..count).step_by(TILE) {
            let len = TILE.min(count - start);
            for head in 0..heads {
                let (middle, small) = (&middles[head], &small[head]);
                let Scratch { k: clean_k, v: clean_v, logits, grads, .. } = scratch;
                let (logits, grads) = (&mut logits[..m * len], &mut grads[..m * len]);
                let keys = self.part(k, head, first + start, len, clean_k);
                let values = self.part(v, head, first + start, len, clean_v);
                let (ql, dy) = (Mat::new(&middle.ql, m, d), Mat::new(&small.dy, m, d));
                gemm(MatMut::new(logits, m, len), ql, keys.t(), root, Threads::One);
                weights_again(logits, len, &middle.stats);
                for at in (0..len).filter(|&at| self.hidden(first + start + at)) {
                    logits[at..].iter_mut().step_by(len).for_each(|weight| *weight = 0.0);
                }
                gemm(MatMut::new(grads, m, len), dy, values.t(), 1.0, Threads::One);
                logit_grads(logits, grads, len, &small.deltas);
                let (weights, grads, at) =
                    (Mat::new(logits, m, len), Mat::new(grads, m, len), start * row + head * d);
                gemm(MatMut::strided(&mut drows[at + k..], len, d, row), grads.t(), ql, root, Threads::One);
                gemm(MatMut::strided(&mut drows[at + v..], len, d, row), weights.t(), dy, 1.0, Threads::One);
                let dql = MatMut::new(&mut parts[head * m * d..], m, d);
                gemm_add(dql, grads, keys, root, 1.0, Threads::One);
            }
        }
    }

    /// The landmarks' gradients, back to the positions of their segments.
    fn through_means(&self, first: usize, small: &[Small], drows: &mut [f32]) {
        let Sizes { d, row, q, k, segment, root, .. } = *self.sizes;
        let factor = root / segment as f32;
        for (at, drow) in drows.chunks_exact_mut(row).enumerate().filter(|(at, _)| !self.hidden(first + at)) {
            let landmark = (first + at) / segment;
            for (head, small) in small.iter().enumerate() {
                add_rows(factor, &small.dql[landmark * d..][..d], d, d, &mut drow[q + head * d..][..d]);
                add_rows(factor, &small.dkl[landmark * d..][..d], d, d, &mut drow[k + head * d..][..d]);
            }
        }
    }
}

impl Nystrom {
    /// Gradient of the rows, [b, n, row].
    pub fn gradients(&self, rows: &[f32], middles: &[Middle], out: &[f32], grad: &[f32]) -> Vec<f32> {
        let Sizes { b, n, heads, d, m, split: size, .. } = self.sizes;
        let (splits, far, near) = (n.div_ceil(size), heads * 2 * m * d, heads * m * d);
        let mut drows = zeros(rows.len());

        let mut parts = vec![0.0; b * splits * far];
        self.sweep(&mut drows, (&mut parts, far), rows, |sample, index, split, scratch, grads| {
            let at = (index * n + split * size) * heads * d;
            let middles = &middles[index * heads..][..heads];
            sample.through_far(split * size, middles, (&out[at..], &grad[at..]), scratch, grads);
        });
        let mut small = self.small(middles, &parts);

        parts.clear();
        parts.resize(b * splits * near, 0.0);
        self.sweep(&mut drows, (&mut parts, near), rows, |sample, index, split, scratch, grads| {
            let both = (&middles[index * heads..][..heads], &small[index * heads..][..heads]);
            sample.through_near(split * size, both, scratch, grads);
        });
        for (index, small) in small.iter_mut().enumerate() {
            for split in 0..splits {
                let part = &parts[(index / heads * splits + split) * near + index % heads * m * d..][..m * d];
                add_rows(1.0, part, m * d, m * d, &mut small.dql);
            }
        }
        self.sweep(
            &mut drows,
            (&mut vec![0.0; b * splits], 1),
            rows,
            |sample, index, split, _, (drows, _)| {
                sample.through_means(split * size, &small[index * heads..][..heads], drows);
            },
        );
        drows
    }

    /// Runs `f(sample, its index, split, scratch, (rows of the split, part of the split))` in parallel.
    fn sweep(
        &self,
        drows: &mut [f32],
        (parts, part): (&mut [f32], usize),
        rows: &[f32],
        f: impl Fn(Sample, usize, usize, &mut Scratch, (&mut [f32], &mut [f32])) + Sync,
    ) {
        let Sizes { n, row, split: size, .. } = self.sizes;
        let splits = n.div_ceil(size);
        let samples = drows.par_chunks_mut(n * row).zip(parts.par_chunks_mut(splits * part));
        samples.enumerate().for_each(|(index, (drows, parts))| {
            let pieces = drows.par_chunks_mut(size * row).zip(parts.par_chunks_mut(part));
            pieces.enumerate().for_each_init(
                || Scratch::new(&self.sizes),
                |scratch, (split, pieces)| f(self.sample(rows, index), index, split, scratch, pieces),
            );
        });
    }

    /// Through X = Z Y, the pseudo-inverse and A. `parts` holds the gradients of X and of the key landmarks.
    fn small(&self, middles: &[Middle], parts: &[f32]) -> Vec<Small> {
        let Sizes { n, heads, d, m, split, .. } = self.sizes;
        let (splits, far) = (n.div_ceil(split), heads * 2 * m * d);
        let all = middles.par_iter().enumerate().map(|(index, middle)| {
            let mut sum = vec![0.0; 2 * m * d];
            for split in 0..splits {
                let part = &parts[(index / heads * splits + split) * far + index % heads * 2 * m * d..];
                add_rows(1.0, &part[..2 * m * d], 2 * m * d, 2 * m * d, &mut sum);
            }
            let (dx, dkl) = sum.split_at(m * d);
            let (dx, y) = (Mat::new(dx, m, d), Mat::new(&middle.y, m, d));
            let (mut dz, mut dy, mut deltas) = (vec![0.0; m * m], vec![0.0; m * d], vec![0.0; m]);
            gemm(MatMut::new(&mut dz, m, m), dx, y.t(), 1.0, Threads::One);
            gemm(MatMut::new(&mut dy, m, d), Mat::new(middle.inverse(), m, m).t(), dx, 1.0, Threads::One);
            dots(&dy, &middle.y, d, d, &mut deltas);
            let (da, dc) = backward(&middle.a, m, middle.c, &middle.iterates, dz);
            Small { dql: Vec::new(), dkl: dkl.to_vec(), da, dc, dy, deltas }
        });
        let mut all: Vec<Small> = all.collect();
        for index in 0..all.len() {
            // c is the sum of one column of its owner's matrix
            let ((owner, column), dc) = (middles[index].owner, all[index].dc);
            all[owner].da[column..].iter_mut().step_by(m).for_each(|da| *da += dc);
        }
        all.par_iter_mut().zip(middles).for_each(|(small, middle)| {
            let mut deltas = vec![0.0; m];
            dots(&middle.a, &small.da, m, m, &mut deltas);
            logit_grads(&middle.a, &mut small.da, m, &deltas);
            let da = Mat::new(&small.da, m, m);
            small.dql = vec![0.0; m * d];
            gemm(MatMut::new(&mut small.dql, m, d), da, Mat::new(&middle.kl, m, d), 1.0, Threads::One);
            let dkl = MatMut::new(&mut small.dkl, m, d);
            gemm_add(dkl, da.t(), Mat::new(&middle.ql, m, d), 1.0, 1.0, Threads::One);
        });
        all
    }
}
