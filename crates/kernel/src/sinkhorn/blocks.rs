//! One block's attention to its own keys and to the mixture, forward and backward.

use crate::cpu::gemm::{Mat, MatMut, Threads, gemm, gemm_add};
use crate::cpu::softmax::{softmax_rows, softmax_rows_backward};
use crate::dropout::AttentionDropout;

/// Sizes of one call, in elements.
#[derive(Clone, Copy)]
pub struct Sizes {
    pub b: usize,
    pub n: usize,
    pub heads: usize,
    /// Width of a head.
    pub d: usize,
    /// Length of a packed row, and where queries, keys and values start in it.
    pub row: usize,
    pub q: usize,
    pub k: usize,
    pub v: usize,
    /// Length and number of blocks.
    pub block: usize,
    pub blocks: usize,
    /// Hidden width and most blocks of the sorting network.
    pub hidden: usize,
    pub most: usize,
    /// Factor on logits.
    pub scale: f32,
    pub concat: bool,
    pub dropout: Option<AttentionDropout>,
}

impl Sizes {
    /// Columns of one softmax.
    pub fn part(&self) -> usize {
        if self.concat { 2 * self.block } else { self.block }
    }

    /// Parameters of one head.
    pub fn params(&self) -> usize {
        let inputs = if self.hidden > 0 { self.hidden } else { self.d };
        (if self.hidden > 0 { (self.d + 1) * self.hidden } else { 0 }) + (inputs + 1) * self.most
    }
}

/// Rows of one block: queries [block, d]; keys and values side by side [block, 2 d], its own and mixed ones.
#[derive(Clone, Copy)]
pub struct Block<'a> {
    pub q: &'a [f32],
    pub own: &'a [f32],
    pub mixed: &'a [f32],
    /// Which own keys are hidden, [block].
    pub hidden: &'a [bool],
    /// Which offsets have a kept key in no block, [block].
    pub nowhere: &'a [bool],
    /// Number of the first row, as dropout counts.
    pub row: usize,
}

/// Gradients of one block.
pub struct BlockGrads<'a> {
    pub q: &'a mut [f32],
    pub own: &'a mut [f32],
    pub mixed: &'a mut [f32],
}

impl Block<'_> {
    /// Weights [block, 2 block]: of the mixture, then of the block's own keys.
    fn weights(&self, sizes: &Sizes, weights: &mut [f32]) {
        let (d, block) = (sizes.d, sizes.block);
        let both = 2 * block;
        for (at, pairs) in [self.mixed, self.own].into_iter().enumerate() {
            let out = MatMut::strided(&mut weights[at * block..], block, block, both);
            let (q, keys) = (Mat::new(self.q, block, d), Mat::strided(pairs, block, d, 2 * d));
            gemm(out, q, keys.t(), sizes.scale, Threads::One);
        }
        let columns = self.nowhere.iter().chain(self.hidden).enumerate();
        for (at, _) in columns.filter(|(_, hidden)| **hidden) {
            weights[at..].iter_mut().step_by(both).for_each(|logit| *logit = f32::NEG_INFINITY);
        }
        softmax_rows(&mut weights[..block * both], sizes.part());
    }

    /// Drops weights, or what they are multiplied by, [block, 2 block].
    fn drop(&self, sizes: &Sizes, weights: &mut [f32]) {
        let Some(dropout) = sizes.dropout else { return };
        for (at, weights) in weights.chunks_exact_mut(2 * sizes.block).take(sizes.block).enumerate() {
            let keys = (0..2).flat_map(|half| (0..sizes.block).map(move |key| 2 * key + half));
            let factors = dropout.factors(self.row + at, keys);
            weights.iter_mut().zip(factors).for_each(|(weight, factor)| *weight *= factor);
        }
    }

    /// Output rows [block, d]; zero where the query is hidden.
    pub fn forward(&self, sizes: &Sizes, weights: &mut [f32], out: &mut [f32]) {
        let (d, block) = (sizes.d, sizes.block);
        self.weights(sizes, weights);
        self.drop(sizes, weights);
        for (at, pairs) in [self.mixed, self.own].into_iter().enumerate() {
            let weights = Mat::strided(&weights[at * block..], block, block, 2 * block);
            let values = Mat::strided(&pairs[d..], block, d, 2 * d);
            gemm_add(MatMut::new(out, block, d), weights, values, 1.0, at as f32, Threads::One);
        }
        hide(out, d, self.hidden);
    }

    /// `grad` [block, d] is 0 where the query is hidden; gradients of own keys and values are written, not added.
    pub fn backward(
        &self,
        sizes: &Sizes,
        grad: &[f32],
        (weights, grads): (&mut [f32], &mut [f32]),
        out: BlockGrads,
    ) {
        let (d, block) = (sizes.d, sizes.block);
        let both = 2 * block;
        self.weights(sizes, weights);
        let (dout, q) = (Mat::new(grad, block, d), Mat::new(self.q, block, d));
        for (at, pairs) in [self.mixed, self.own].into_iter().enumerate() {
            let half = MatMut::strided(&mut grads[at * block..], block, block, both);
            gemm(half, dout, Mat::strided(&pairs[d..], block, d, 2 * d).t(), 1.0, Threads::One);
        }
        self.drop(sizes, grads);
        softmax_rows_backward(&weights[..block * both], &mut grads[..block * both], sizes.part());
        self.drop(sizes, weights);
        for (at, (pairs, dpairs)) in [(self.mixed, out.mixed), (self.own, out.own)].into_iter().enumerate() {
            let weights = Mat::strided(&weights[at * block..], block, block, both);
            gemm(MatMut::strided(&mut dpairs[d..], block, d, 2 * d), weights.t(), dout, 1.0, Threads::One);
            let half = Mat::strided(&grads[at * block..], block, block, both);
            gemm(MatMut::strided(dpairs, block, d, 2 * d), half.t(), q, sizes.scale, Threads::One);
            let keys = Mat::strided(pairs, block, d, 2 * d);
            gemm_add(MatMut::new(out.q, block, d), half, keys, sizes.scale, at as f32, Threads::One);
        }
    }
}

/// Zeroes the hidden rows of `x` [block, d].
fn hide(x: &mut [f32], d: usize, hidden: &[bool]) {
    for (row, _) in x.chunks_exact_mut(d).zip(hidden).filter(|(_, hidden)| **hidden) {
        row.fill(0.0);
    }
}
