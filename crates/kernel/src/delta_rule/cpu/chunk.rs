//! One chunk of one head: the pairs of its positions and what they write to the state.
//!
//! With c positions, L(t, s) the decay between s and t and since(t) the decay from before the chunk:
//!
//! ```text
//! B = strictly lower (L * K K^T)      P = lower (L * Q K^T)
//! Y = V - since * (K S) - B U,  U = beta * Y      (forward substitution)
//! O = since * (Q S) + P U
//! S <- since(last) S + (L(last, .) * K)^T U
//! ```

use super::{CHUNK, Dims, Mat, MatMut, Problem, product, solve};
use crate::cpu::elements::{multiply, scale};
use crate::cpu::math;

/// Decays within a chunk, as products of the steps between two positions: never differences of long sums.
pub(super) struct Decay {
    /// Row t holds L(t, 0..=t), CHUNK apart.
    pub(super) pairs: Vec<f32>,
    /// prod of the steps up to and including t.
    pub(super) since: Vec<f32>,
    /// Without it every factor is 1.
    pub(super) active: bool,
}

impl Decay {
    fn new() -> Self {
        Self { pairs: vec![0.0; CHUNK * CHUNK], since: vec![1.0; CHUNK], active: false }
    }

    /// Takes the factors of the steps of one chunk.
    fn set(&mut self, factors: impl Iterator<Item = f32>) {
        self.active = true;
        let mut since = 1.0;
        for (t, factor) in factors.enumerate() {
            let (before, row) = self.pairs.split_at_mut(t * CHUNK);
            if t > 0 {
                row[..t].copy_from_slice(&before[(t - 1) * CHUNK..][..t]);
                scale(factor, &mut row[..t]);
            }
            row[t] = 1.0;
            since *= factor;
            self.since[t] = since;
        }
    }

    /// What a chunk of `count` positions leaves of the state before it.
    pub(super) fn total(&self, count: usize) -> f32 {
        if self.active { self.since[count - 1] } else { 1.0 }
    }

    /// What position `s` of `count` is worth at the last one.
    pub(super) fn rest(&self, count: usize) -> &[f32] {
        &self.pairs[(count - 1) * CHUNK..][..count]
    }

    /// Multiplies row t by since(t); rows of `width` that repeat after `count`.
    pub(super) fn weigh_since(&self, rows: &mut [f32], width: usize, count: usize) {
        if self.active {
            for (index, row) in rows.chunks_exact_mut(width).enumerate() {
                scale(self.since[index % count], row);
            }
        }
    }

    /// Multiplies row s by L(last, s).
    pub(super) fn weigh_rest(&self, rows: &mut [f32], width: usize, count: usize) {
        if self.active {
            rows.chunks_exact_mut(width).zip(self.rest(count)).for_each(|(row, &rest)| scale(rest, row));
        }
    }

    /// Weighs two square matrices one after another: the first keeps what lies below its diagonal, the second the
    /// diagonal too.
    pub(super) fn weigh_pairs(&self, pairs: &mut [f32], count: usize) {
        let (keys, queries) = pairs.split_at_mut(count * count);
        for (first, matrix) in [keys, queries].into_iter().enumerate() {
            for (t, row) in matrix.chunks_exact_mut(count).enumerate() {
                let (seen, rest) = row.split_at_mut(t + first);
                rest.fill(0.0);
                if self.active {
                    multiply(&self.pairs[t * CHUNK..][..seen.len()], seen);
                }
            }
        }
    }
}

/// Working space for a chunk and its pairs; matrices are packed for its number of positions.
pub(super) struct Chunk {
    pub(super) dims: Dims,
    pub(super) count: usize,
    /// Keys, then queries, [2 count, key_width].
    pub(super) kq: Vec<f32>,
    /// Values, [count, value_width]; after [`Self::update`] Y.
    pub(super) y: Vec<f32>,
    /// beta Y, [count, value_width].
    pub(super) u: Vec<f32>,
    /// B, then P, [2 count, count].
    pub(super) pairs: Vec<f32>,
    /// (K S), then since (Q S), then the results, [2 count, value_width].
    pub(super) seen: Vec<f32>,
    pub(super) beta: Vec<f32>,
    pub(super) decay: Decay,
}

impl Chunk {
    pub(super) fn new(dims: Dims) -> Self {
        let space = |width: usize| vec![0.0; CHUNK * width];
        Self {
            dims,
            count: 0,
            kq: space(2 * dims.key_width),
            y: space(dims.value_width),
            u: space(dims.value_width),
            pairs: space(2 * CHUNK),
            seen: space(2 * dims.value_width),
            beta: space(1),
            decay: Decay::new(),
        }
    }

    /// Reads chunk `index` of a head (counted over samples and heads) and forms its pairs.
    pub(super) fn load(&mut self, problem: &Problem, head: usize, index: usize) {
        let Dims { heads, len, key_width: dk, value_width: d, .. } = problem.dims;
        let (sample, column) = (head / heads, head % heads);
        let first = index * CHUNK;
        let count = CHUNK.min(len - first);
        self.count = count;
        let rows =
            problem.rows[(sample * len + first) * problem.dims.row()..].chunks_exact(problem.dims.row());
        let (keys, queries) = self.kq[..2 * count * dk].split_at_mut(count * dk);
        let to = keys.chunks_exact_mut(dk).zip(queries.chunks_exact_mut(dk)).zip(self.y.chunks_exact_mut(d));
        for (row, ((key, query), value)) in rows.zip(to) {
            query.copy_from_slice(&row[column * dk..][..dk]);
            key.copy_from_slice(&row[(heads + column) * dk..][..dk]);
            value.copy_from_slice(&row[2 * heads * dk + column * d..][..d]);
        }
        let at = head * len + first..head * len + first + count;
        let keep = problem.keep.map(|keep| &keep[sample * len + first..][..count]);
        let kept = |t: usize| keep.map_or(1.0, |keep| keep[t]);
        let steps = problem.beta[at.clone()].iter().enumerate();
        self.beta.iter_mut().zip(steps).for_each(|(beta, (t, step))| *beta = step * kept(t));
        if let Some(log_decay) = problem.log_decay {
            let steps = log_decay[at].iter().enumerate();
            self.decay.set(steps.map(|(t, step)| (step * kept(t)).exp()));
        }
        let (all, keys) = (Mat::new(&self.kq, 2 * count, dk), Mat::new(&self.kq, count, dk));
        product(MatMut::new(&mut self.pairs, 2 * count, count), all, keys.t(), None);
        self.decay.weigh_pairs(&mut self.pairs[..2 * count * count], count);
    }

    /// Y, U and the results from the state before the chunk.
    pub(super) fn update(&mut self, state: &[f32]) {
        let (count, dk, d) = (self.count, self.dims.key_width, self.dims.value_width);
        let state = Mat::new(state, dk, d);
        product(MatMut::new(&mut self.seen, 2 * count, d), Mat::new(&self.kq, 2 * count, dk), state, None);
        self.solve(2);
        let results = &mut self.seen[count * d..];
        let pairs = Mat::new(&self.pairs[count * count..], count, count);
        product(MatMut::new(results, count, d), pairs, Mat::new(&self.u, count, d), Some(1.0));
    }

    /// Y and U from the state before the chunk.
    pub(super) fn update_keys(&mut self, state: &[f32]) {
        let (count, dk, d) = (self.count, self.dims.key_width, self.dims.value_width);
        let state = Mat::new(state, dk, d);
        product(MatMut::new(&mut self.seen, count, d), Mat::new(&self.kq, count, dk), state, None);
        self.solve(1);
    }

    /// `parts` of what is seen are read.
    fn solve(&mut self, parts: usize) {
        let (count, d) = (self.count, self.dims.value_width);
        self.decay.weigh_since(&mut self.seen[..parts * count * d], d, count);
        let y = &mut self.y[..count * d];
        subtract(&self.seen[..count * d], y);
        solve::forward(&self.pairs[..count * count], &self.beta[..count], y, &mut self.u[..count * d]);
    }

    /// The results, [count, value_width], after [`Self::update`].
    pub(super) fn results(&self) -> &[f32] {
        let len = self.count * self.dims.value_width;
        &self.seen[len..2 * len]
    }

    /// Moves `state` over the chunk; weighs the keys.
    pub(super) fn advance(&mut self, state: &mut [f32]) {
        let (count, dk, d) = (self.count, self.dims.key_width, self.dims.value_width);
        let keys = &mut self.kq[..count * dk];
        self.decay.weigh_rest(keys, dk, count);
        let (keys, total) = (Mat::new(keys, count, dk), self.decay.total(count));
        product(MatMut::new(state, dk, d), keys.t(), Mat::new(&self.u, count, d), Some(total));
    }
}

crate::simd_fn! {
    /// y -= x.
    fn subtract<S>(simd, x: &'a [f32], y: &'a mut [f32]) {
        math::update(simd, x, y, #[inline(always)] |x, y| simd.sub_f32s(y, x));
    }
}
