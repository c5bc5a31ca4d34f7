//! Pairs within a chunk where every channel decays on its own: p_ij = sum_c x_ic y_jc prod_{j < r <= i} a_rc, j <= i.
//!
//! In blocks: rows of a block read earlier ones by a product of x, weighted from the start of its block on, and y, weighted
//! to the end of its own block and over the blocks in between. No exponent is above 0, as it would be if both counted from
//! one place. Pairs within a block are summed channel by channel.

use std::ops::Range;

use super::factors::{multiply, products, weigh};
use super::log_terms::LogTerms;
use super::{CHUNK, ChunkFactors, Factors, Inputs, Logs, Place, Plan};
use crate::cpu::gemm::{Mat, MatMut, Threads, gemm, gemm_add};
use crate::cpu::simd::Simd;
use crate::cpu::{elements, math, rows, transpose::transpose};
use crate::linear_attention::cpu::rows::Rows;

/// Rows per block.
const BLOCK: usize = 16;

/// Numbers of the pairs of a block.
type Square = [[f32; BLOCK]; BLOCK];

/// Working space of one thread.
pub(super) struct Scratch {
    width: usize,
    count: usize,
    /// Queries and keys, 0 where hidden and behind the last row.
    q: Vec<f32>,
    k: Vec<f32>,
    /// A square of pairs, transposed.
    turned: Vec<f32>,
    /// Gradients of one direction.
    dx: Vec<f32>,
    dy: Vec<f32>,
    blocks: Blocks,
}

impl Scratch {
    pub(super) fn new(plan: &Plan) -> Self {
        let width = if matches!(plan.logs, Logs::PerChannel) { plan.key_width } else { 0 };
        let room = || vec![0.0; CHUNK * width];
        let turned = vec![0.0; if width > 0 { 2 * CHUNK * CHUNK } else { 0 }];
        Self {
            width,
            count: 0,
            q: room(),
            k: room(),
            turned,
            dx: room(),
            dy: room(),
            blocks: Blocks::new(width),
        }
    }

    /// Reads queries and keys.
    pub(super) fn load(&mut self, inputs: &Inputs, place: Place, rows: &Range<usize>) {
        let (q, k) = inputs.queries_keys(place, rows);
        self.count = rows.len();
        for (x, to) in [(q, &mut self.q), (k, &mut self.k)] {
            for row in 0..x.count {
                to[row * x.width..][..x.width].copy_from_slice(x.row(row));
            }
            to[x.count * x.width..].fill(0.0);
        }
        for (row, position) in rows.clone().enumerate() {
            if inputs.plan.mask.hides(place.sample, position) {
                self.k[row * self.width..][..self.width].fill(0.0);
            }
        }
    }

    /// What each key counts at each query, [rows, rows].
    pub(super) fn pairs(&mut self, factors: &ChunkFactors, causal: bool, pairs: &mut [f32]) {
        let count = self.count;
        pairs.fill(0.0);
        self.blocks.pairs(&self.q, &self.k, &factors.both[0], pairs);
        if causal {
            return;
        }
        let (lower, upper) = self.turned[..2 * count * count].split_at_mut(count * count);
        lower.fill(0.0);
        self.blocks.pairs(&self.k, &self.q, &factors.both[1], lower);
        transpose(lower, count, count, upper);
        for i in 0..count {
            let row = i * count + i + 1..(i + 1) * count;
            pairs[row.clone()].copy_from_slice(&upper[row]);
        }
    }

    /// Gradients of queries and keys, and the terms of those of decays, from the gradients of pairs.
    pub(super) fn back(
        &mut self,
        factors: &ChunkFactors,
        causal: bool,
        grads: &[f32],
        (dq, dk): (&mut [f32], &mut [f32]),
        [forward, backward]: &mut [LogTerms; 2],
    ) {
        let (count, used) = (self.count, self.count * self.width);
        let (q, k) = (&self.q, &self.k);
        self.blocks.back((q, k), &factors.both[0], grads, (dq, dk));
        terms((&q[..used], dq), (&k[..used], dk), &mut forward.readers);
        forward.writers[..used].fill(0.0);
        if !causal {
            let turned = &mut self.turned[..count * count];
            transpose(grads, count, count, turned);
            let (dx, dy) = (&mut self.dx[..used], &mut self.dy[..used]);
            self.blocks.back((k, q), &factors.both[1], turned, (dx, dy));
            terms((&k[..used], dx), (&q[..used], dy), &mut backward.readers);
            backward.writers[..used].fill(0.0);
            rows::add(dx, dk);
            rows::add(dy, dq);
        }
        own(grads, &q[..used], dk);
        own(grads, &k[..used], dq);
    }
}

crate::simd_fn! {
    /// to = x dx - y dy.
    fn terms<S>(
        simd, readers: (&'a [f32], &'a [f32]), writers: (&'a [f32], &'a [f32]), to: &'a mut [f32],
    ) {
        let ((x, dx), (y, dy)) = (readers, writers);
        for at in (0..x.len()).step_by(S::F32_LANES) {
            let writers = simd.mul_f32s(math::load(simd, y, at), math::load(simd, dy, at));
            let readers = simd.mul_f32s(math::load(simd, x, at), math::load(simd, dx, at));
            math::store(simd, &mut to[..x.len()], at, simd.sub_f32s(readers, writers));
        }
    }
}

crate::simd_fn! {
    /// Row i of dx gets the pair with itself: grads_ii x_i.
    fn own<S>(simd, grads: &'a [f32], x: &'a [f32], dx: &'a mut [f32]) {
        let count = grads.len().isqrt();
        let width = x.len() / count;
        for (row, (x, dx)) in x.chunks_exact(width).zip(dx.chunks_exact_mut(width)).enumerate() {
            math::axpy(simd, grads[row * count + row], x, dx);
        }
    }
}

/// Working space for the blocks of a chunk.
struct Blocks {
    width: usize,
    /// Products of steps within each block, as those of [`Factors`] within a chunk.
    up: Vec<f32>,
    down: Vec<f32>,
    /// Readers weighted from the start of their block.
    x: Vec<f32>,
    /// Writers weighted to the end of the blocks so far.
    y: Vec<f32>,
    /// The writers of a block, [channels, BLOCK].
    turned: Vec<f32>,
}

impl Blocks {
    fn new(width: usize) -> Self {
        let room = || vec![0.0; CHUNK * width];
        Self { width, up: room(), down: room(), x: room(), y: room(), turned: vec![0.0; BLOCK * width] }
    }

    fn ranges(count: usize) -> impl DoubleEndedIterator<Item = Range<usize>> {
        (0..count.div_ceil(BLOCK)).map(move |block| block * BLOCK..((block + 1) * BLOCK).min(count))
    }

    /// Elements of some rows.
    fn at(&self, rows: &Range<usize>) -> Range<usize> {
        rows.start * self.width..rows.end * self.width
    }

    /// Decays within blocks, and the readers weighted by them.
    fn start(&mut self, x: &[f32], factors: &Factors) {
        for rows in Self::ranges(factors.count) {
            let at = self.at(&rows);
            products(
                &factors.steps[at.clone()],
                self.width,
                &mut self.up[at.clone()],
                &mut self.down[at.clone()],
            );
            weigh(
                Rows::packed(&x[at.clone()], self.width),
                &self.up[at.clone()],
                &mut self.x[at],
                self.width,
            );
        }
    }

    /// Takes the writers of block `rows` to those before, which decay over it.
    fn advance(&mut self, rows: &Range<usize>, y: &[f32]) {
        let (at, width) = (self.at(rows), self.width);
        let (before, own) = self.y.split_at_mut(at.start);
        let own = &mut own[..at.len()];
        decay_rows(&self.up[at.end - width..at.end], before);
        weigh(Rows::packed(&y[at.clone()], width), &self.down[at], own, width);
    }

    /// Writes p_ij for j <= i, [count, count].
    fn pairs(&mut self, x: &[f32], y: &[f32], factors: &Factors, pairs: &mut [f32]) {
        let (count, d) = (factors.count, self.width);
        self.start(x, factors);
        for rows in Self::ranges(count) {
            let at = self.at(&rows);
            if rows.start > 0 {
                let out = MatMut::strided(&mut pairs[rows.start * count..], rows.len(), rows.start, count);
                let (x, y) = (Mat::new(&self.x[at], rows.len(), d), Mat::new(&self.y, rows.start, d));
                gemm(out, x, y.t(), 1.0, Threads::One);
            }
            let padded = rows.start * d..(rows.start + BLOCK) * d;
            transpose(&y[padded.clone()], BLOCK, d, &mut self.turned);
            let mut square = [[0.0; BLOCK]; BLOCK];
            block_pairs(&x[padded.clone()], &mut self.turned, &factors.steps[padded], &mut square);
            for (row, from) in rows.clone().zip(&square) {
                let from = &from[..=row - rows.start];
                pairs[row * count + rows.start..][..from.len()].copy_from_slice(from);
            }
            self.advance(&rows, y);
        }
    }

    /// Gradients of x and y from those of p_ij with j < i (the pairs of a row with itself do not count).
    fn back(
        &mut self,
        (x, y): (&[f32], &[f32]),
        factors: &Factors,
        grads: &[f32],
        (dx, dy): (&mut [f32], &mut [f32]),
    ) {
        let (count, d) = (factors.count, self.width);
        self.start(x, factors);
        let between =
            |rows: &Range<usize>| Mat::strided(&grads[rows.start * count..], rows.len(), rows.start, count);
        for rows in Self::ranges(count) {
            let dx = &mut dx[self.at(&rows)];
            if rows.start == 0 {
                dx.fill(0.0);
            } else {
                let y = Mat::new(&self.y, rows.start, d);
                gemm(MatMut::new(dx, rows.len(), d), between(&rows), y, 1.0, Threads::One);
                let up = &self.up[self.at(&rows)];
                elements::multiply(up, dx);
            }
            self.advance(&rows, y);
        }
        dy.fill(0.0);
        for rows in Self::ranges(count).rev() {
            let at = self.at(&rows);
            if rows.start > 0 {
                let before = &mut dy[..at.start];
                decay_rows(&self.up[at.end - d..at.end], before);
                let x = Mat::new(&self.x[at.clone()], rows.len(), d);
                gemm_add(MatMut::new(before, rows.start, d), between(&rows).t(), x, 1.0, 1.0, Threads::One);
            }
            elements::multiply(&self.down[at.clone()], &mut dy[at.clone()]);
            let mut square = [[0.0; BLOCK]; BLOCK];
            for (row, to) in rows.clone().zip(&mut square) {
                let from = &grads[row * count + rows.start..][..row - rows.start];
                to[..from.len()].copy_from_slice(from);
            }
            let padded = at.start..at.start + BLOCK * d;
            let steps = &factors.steps[padded.clone()];
            block_back(&x[padded.clone()], &y[padded], steps, &square, &mut dx[at.clone()], &mut dy[at]);
        }
    }
}

crate::simd_fn! {
    /// Every row of `rows` times `factors`.
    fn decay_rows<S>(simd, factors: &'a [f32], rows: &'a mut [f32]) {
        for row in rows.chunks_exact_mut(factors.len()) {
            multiply(simd, factors, row);
        }
    }
}

/// A vector of every row of a block, from channel `at` on.
#[inline(always)]
fn column<S: Simd>(simd: S, x: &[f32], width: usize, at: usize) -> [S::f32s; BLOCK] {
    let mut rows = [simd.splat_f32s(0.0); BLOCK];
    for (row, x) in rows.iter_mut().zip(x.chunks_exact(width)) {
        *row = math::load(simd, x, at);
    }
    rows
}

/// 1 below the diagonal, else 0: whether step i lies between i and j.
const BETWEEN: Square = {
    let mut square = [[0.0; BLOCK]; BLOCK];
    let mut i = 0;
    while i < BLOCK {
        let mut j = 0;
        while j < i {
            square[i][j] = 1.0;
            j += 1;
        }
        i += 1;
    }
    square
};

crate::simd_fn! {
    /// The pairs of a block, lanes along the writers: `x` and `steps` are [BLOCK, channels], `y` [channels, BLOCK], which is used
    /// up. Numbers above the diagonal have no meaning.
    fn block_pairs<S>(simd, x: &'a [f32], y: &'a mut [f32], steps: &'a [f32], pairs: &'a mut Square) {
        // half of the readers at a time, so that their sums stay in registers
        const HALF: usize = BLOCK / 2;
        let width = y.len() / BLOCK;
        let one = simd.splat_f32s(1.0);
        for at in (0..BLOCK).step_by(S::F32_LANES) {
            for first in (0..BLOCK).step_by(HALF).filter(|first| first + HALF > at) {
                let masked = first < at + S::F32_LANES;
                let mut between = [simd.greater_than_f32s(one, one); HALF];
                for (mask, row) in between.iter_mut().zip(&BETWEEN[first..]) {
                    *mask = simd.greater_than_f32s(math::load(simd, row, at), simd.splat_f32s(0.0));
                }
                let mut sums = [simd.splat_f32s(0.0); HALF];
                for (channel, y) in y.chunks_exact_mut(BLOCK).enumerate() {
                    let mut weighted = math::load(simd, y, at);
                    for (i, sum) in sums.iter_mut().enumerate() {
                        let from = (first + i) * width + channel;
                        let step = simd.splat_f32s(steps[from]);
                        let step = if masked { simd.select_f32s(between[i], step, one) } else { step };
                        weighted = simd.mul_f32s(weighted, step);
                        *sum = simd.mul_add_e_f32s(simd.splat_f32s(x[from]), weighted, *sum);
                    }
                    math::store(simd, y, at, weighted);
                }
                for (row, sum) in pairs[first..].iter_mut().zip(sums) {
                    math::store(simd, row, at, sum);
                }
            }
        }
    }
}

crate::simd_fn! {
    /// Adds the gradients of a block by its pairs below the diagonal, `x`, `y` and `steps` [BLOCK, channels].
    fn block_back<S>(
        simd,
        x: &'a [f32],
        y: &'a [f32],
        steps: &'a [f32],
        grads: &'a Square,
        dx: &'a mut [f32],
        dy: &'a mut [f32],
    ) {
        let width = x.len() / BLOCK;
        let count = dx.len() / width;
        for at in (0..width).step_by(S::F32_LANES) {
            let (x, y, steps) = (column(simd, x, width, at), column(simd, y, width, at), column(simd, steps, width, at));
            for i in 1..count {
                let mut sum = simd.splat_f32s(0.0);
                for j in 0..i {
                    let part = simd.mul_f32s(simd.splat_f32s(grads[i][j]), y[j]);
                    sum = simd.mul_add_e_f32s(sum, steps[j], part);
                }
                let dx = &mut dx[i * width..][..width];
                let sum = simd.mul_add_e_f32s(sum, steps[i], math::load(simd, dx, at));
                math::store(simd, dx, at, sum);
            }
            for j in 0..count - 1 {
                let mut sum = simd.splat_f32s(0.0);
                for i in (j + 1..count).rev() {
                    sum = simd.mul_add_e_f32s(simd.splat_f32s(grads[i][j]), x[i], sum);
                    sum = simd.mul_f32s(sum, steps[i]);
                }
                let dy = &mut dy[j * width..][..width];
                math::store(simd, dy, at, simd.add_f32s(math::load(simd, dy, at), sum));
            }
        }
    }
}
