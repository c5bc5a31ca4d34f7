//! Gradients: against the order of the chunks, with the gradient of the state after each.
//!
//! With D the gradient of the state after a chunk, dO that of the results and the names of [`super::chunk`]:
//!
//! ```text
//! dU = P^T dO + (L(last, .) * K) D;  dY = beta dU, dU <- dU - B^T dY       (back substitution)
//! G = since * [-dY; dO]              W = L * [-dY; dO] U^T, triangular as B and P are
//! [dK; dQ] = G S^T + W K             dK += W^T [K; Q] + L(last, .) * (U D^T)
//! dV = dY,  dbeta = dU . Y           D <- since(last) D + [K; Q]^T G
//! ```

use super::chunk::Chunk;
use super::{CHUNK, Dims, Mat, MatMut, Problem, heads_of, product, solve};
use crate::cpu::elements::{dot, multiply, row_dots, scale};
use crate::cpu::rows::add;
use crate::cpu::{math, par};

/// Gradients of the rows, beta and log decay (empty if there is none).
pub(super) fn backward(problem: &Problem, states: &[f32], grad: &[f32]) -> [Vec<f32>; 3] {
    let dims = problem.dims;
    let steps = dims.samples * dims.heads * dims.len;
    let mut rows = vec![0.0; dims.samples * dims.len * dims.row()];
    let mut beta = vec![0.0; steps];
    let mut decay = vec![0.0; if problem.log_decay.is_some() { steps } else { 0 }];
    let mut decays = decay.chunks_mut(dims.len);
    let heads = split_rows(&mut rows, dims).into_iter().zip(beta.chunks_mut(dims.len));
    let heads = heads.map(|(rows, beta)| Head { rows, beta, decay: decays.next().unwrap_or_default() });
    par::each_piece_with(
        heads,
        || Scratch::new(dims),
        |scratch, head, target| {
            let states = &states[head * dims.chunks() * dims.state()..][..dims.chunks() * dims.state()];
            scratch.head(problem, head, states, grad, target);
        },
    );
    [rows, beta, decay]
}

/// Gradients of one head.
struct Head<'a> {
    /// Of query, key and value, per position.
    rows: Vec<[&'a mut [f32]; 3]>,
    beta: &'a mut [f32],
    decay: &'a mut [f32],
}

/// Query, key and value of every head in rows `[q heads | k heads | v heads]`, per position.
fn split_rows(rows: &mut [f32], dims: Dims) -> Vec<Vec<[&mut [f32]; 3]>> {
    let Dims { heads, len, key_width: dk, value_width: d, .. } = dims;
    let mut all = heads_of(dims);
    for (index, row) in rows.chunks_exact_mut(dims.row()).enumerate() {
        let (queries, rest) = row.split_at_mut(heads * dk);
        let (keys, values) = rest.split_at_mut(heads * dk);
        let keys = keys.chunks_exact_mut(dk).zip(values.chunks_exact_mut(d));
        let parts = queries.chunks_exact_mut(dk).zip(keys);
        for (head, (q, (k, v))) in parts.enumerate() {
            all[index / len * heads + head].push([q, k, v]);
        }
    }
    all
}

/// Working space of one thread.
struct Scratch {
    chunk: Chunk,
    /// Gradient of the state after the chunk.
    dstate: Vec<f32>,
    /// -dY, then dO, [2 count, value_width].
    g: Vec<f32>,
    du: Vec<f32>,
    /// W, [2 count, count].
    w: Vec<f32>,
    /// Gradients of keys, then queries, [2 count, key_width].
    dkq: Vec<f32>,
    /// What keys get as the earlier of two, [count, key_width].
    dk: Vec<f32>,
    decay: DecayScratch,
}

/// What the gradient of the decay needs.
struct DecayScratch {
    /// Per position, what it reads of the state before the chunk.
    read: Vec<f32>,
    /// Per position, what it writes to the state after the chunk.
    written: Vec<f32>,
    /// Sums of pairs over all later positions, per earlier one.
    later: Vec<f32>,
}

impl Scratch {
    fn new(dims: Dims) -> Self {
        let space = |width: usize| vec![0.0; CHUNK * width];
        let (dk, d) = (dims.key_width, dims.value_width);
        Self {
            chunk: Chunk::new(dims),
            dstate: vec![0.0; dims.state()],
            g: space(2 * d),
            du: space(d),
            w: space(2 * CHUNK),
            dkq: space(2 * dk),
            dk: space(dk),
            decay: DecayScratch { read: space(1), written: space(1), later: space(1) },
        }
    }

    fn head(&mut self, problem: &Problem, head: usize, states: &[f32], grad: &[f32], target: Head) {
        let Head { mut rows, beta, decay } = target;
        let dims = problem.dims;
        let (size, d) = (dims.state(), dims.value_width);
        let (sample, column, width) = (head / dims.heads, head % dims.heads, dims.heads * d);
        self.dstate.fill(0.0);
        for index in (0..dims.chunks()).rev() {
            let state = &states[index * size..][..size];
            self.chunk.load(problem, head, index);
            self.chunk.update_keys(state);
            let (count, first) = (self.chunk.count, index * CHUNK);
            let douts = grad[(sample * dims.len + first) * width..].chunks_exact(width);
            let to = self.g[count * d..2 * count * d].chunks_exact_mut(d);
            to.zip(douts).for_each(|(to, from)| to.copy_from_slice(&from[column * d..][..d]));
            self.solve();
            let at = first..first + count;
            row_dots(&self.du[..count * d], &self.chunk.y[..count * d], d, &mut beta[at.clone()]);
            let rows = &mut rows[at.clone()];
            self.pairs();
            for ([_, _, dv], dy) in rows.iter_mut().zip(self.g.chunks_exact(d)) {
                dv.iter_mut().zip(dy).for_each(|(dv, dy)| *dv = -dy);
            }
            self.keys_and_queries(state, decay.get_mut(at.clone()));
            self.write(rows);
            let keep = problem.keep.map(|keep| &keep[sample * dims.len..][at.clone()]);
            if let Some(keep) = keep {
                multiply(keep, &mut beta[at.clone()]);
                if let Some(decay) = decay.get_mut(at) {
                    multiply(keep, decay);
                }
            }
        }
    }

    /// dU, and dY with its sign changed.
    fn solve(&mut self) {
        let Self { chunk, dstate, g, du, .. } = self;
        let (count, dk, d) = (chunk.count, chunk.dims.key_width, chunk.dims.value_width);
        let (dy, dout) = g[..2 * count * d].split_at_mut(count * d);
        let du = &mut du[..count * d];
        let keys = Mat::new(&chunk.kq, count, dk);
        product(MatMut::new(du, count, d), keys, Mat::new(dstate, dk, d), None);
        chunk.decay.weigh_rest(du, d, count);
        let pairs = Mat::new(&chunk.pairs[count * count..], count, count);
        product(MatMut::new(du, count, d), pairs.t(), Mat::new(dout, count, d), Some(1.0));
        solve::backward(&chunk.pairs[..count * count], &chunk.beta[..count], du, dy);
        scale(-1.0, dy);
    }

    /// The gradients of the pairs before they are weighed; the pairs become products of both if there is a decay.
    fn pairs(&mut self) {
        let Self { chunk, g, w, .. } = self;
        let (count, d) = (chunk.count, chunk.dims.value_width);
        let u = Mat::new(&chunk.u, count, d);
        product(MatMut::new(w, 2 * count, count), Mat::new(g, 2 * count, d), u.t(), None);
        if chunk.decay.active {
            multiply(&w[..2 * count * count], &mut chunk.pairs[..2 * count * count]);
        }
    }

    /// Gradients of keys, queries, the log decay if `decay`, and the state before the chunk.
    fn keys_and_queries(&mut self, state: &[f32], decay: Option<&mut [f32]>) {
        let Self { chunk, dstate, g, w, dkq, dk: dkeys, decay: sums, .. } = self;
        let (count, dk, d) = (chunk.count, chunk.dims.key_width, chunk.dims.value_width);
        let (kq, g) = (&chunk.kq[..2 * count * dk], &mut g[..2 * count * d]);
        let (dkq, dkeys) = (&mut dkq[..2 * count * dk], &mut dkeys[..count * dk]);
        chunk.decay.weigh_since(g, d, count);
        product(MatMut::new(dkq, 2 * count, dk), Mat::new(g, 2 * count, d), Mat::new(state, dk, d).t(), None);
        let (u, after) = (Mat::new(&chunk.u, count, d), Mat::new(dstate, dk, d));
        product(MatMut::new(dkeys, count, dk), u, after.t(), None);
        chunk.decay.weigh_rest(dkeys, dk, count);
        let w = &mut w[..2 * count * count];
        chunk.decay.weigh_pairs(w, count);
        if let Some(decay) = decay {
            let read = &mut sums.read[..count];
            row_dots(kq, dkq, dk, read);
            let queries = kq[count * dk..].chunks_exact(dk).zip(dkq[count * dk..].chunks_exact(dk));
            read.iter_mut().zip(queries).for_each(|(read, (q, dq))| *read += dot(q, dq));
            row_dots(kq, dkeys, dk, &mut sums.written[..count]);
            let through = chunk.decay.total(count) * dot(state, dstate);
            sums.gradient(&chunk.pairs[..2 * count * count], through, decay);
        }
        let (all, keys) = (Mat::new(kq, 2 * count, dk), Mat::new(kq, count, dk));
        let pairs = Mat::new(w, 2 * count, count);
        product(MatMut::new(dkq, 2 * count, dk), pairs, keys, Some(1.0));
        product(MatMut::new(dkeys, count, dk), pairs.t(), all, Some(1.0));
        let (total, g) = (chunk.decay.total(count), Mat::new(g, 2 * count, d));
        product(MatMut::new(dstate, dk, d), all.t(), g, Some(total));
    }

    /// Writes the gradients of queries and keys.
    fn write(&self, rows: &mut [[&mut [f32]; 3]]) {
        let (count, dk) = (self.chunk.count, self.chunk.dims.key_width);
        let (keys, queries) = self.dkq[..2 * count * dk].split_at(count * dk);
        let parts = keys.chunks_exact(dk).zip(self.dk.chunks_exact(dk)).zip(queries.chunks_exact(dk));
        for ([dq, dk, _], ((later, earlier), query)) in rows.iter_mut().zip(parts) {
            dq.copy_from_slice(query);
            dk.copy_from_slice(later);
            add(earlier, dk);
        }
    }
}

impl DecayScratch {
    /// The gradient by the log decay of step r: everything that passes over it, that is `pairs` (their gradients times their
    /// weighed values) of s < r <= t, reads of the state before the chunk by t >= r, writes of s < r to the state after it,
    /// and the state itself (`through`).
    ///
    /// Only sums of what carries the factor exp(g_r): under a strong decay nothing large cancels.
    fn gradient(&mut self, pairs: &[f32], through: f32, decay: &mut [f32]) {
        let count = decay.len();
        let mut before = through;
        for (decay, written) in decay.iter_mut().zip(&self.written) {
            *decay = before;
            before += written;
        }
        self.later.fill(0.0);
        let (keys, queries) = pairs.split_at(count * count);
        let mut reads = 0.0;
        for r in (0..count).rev() {
            let later = &mut self.later[..r];
            add(&keys[r * count..][..r], later);
            add(&queries[r * count..][..r], later);
            reads += self.read[r];
            decay[r] += reads + sum(later);
        }
    }
}

crate::simd_fn! {
    fn sum<S>(simd, x: &'a [f32]) -> f32 {
        math::sum(simd, x)
    }
}
