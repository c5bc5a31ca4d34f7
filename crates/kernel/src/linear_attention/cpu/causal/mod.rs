//! Sums over keys up to the query: a chunked scan.
//!
//! Within a chunk the pairs are formed; a state carries what came before. Parts of a sequence (their number
//! depends on its length only) run in parallel: a first pass finds the state that each part adds, and a short
//! scan the state that each starts with. Backward mirrors this: a pass in time order gives dQ and what each part
//! adds to the reverse state, a pass against it dK and dV.

mod backward;
mod decay;

use std::ops::Range;

use super::guard::{invert, plain_sum};
use super::map::{At, Peak};
use super::rows::{Columns, Operand, Rows, RowsMut};
use super::{Call, axpy, scale};
use crate::cpu::gemm::{Mat, MatMut, Threads, gemm, gemm_add};
use crate::cpu::par::{self, Chunks};
use crate::cpu::sample_rows;
use decay::Decay;

pub(super) use backward::backward;
pub(super) use decay::Gate;

/// Rows per chunk.
const CHUNK: usize = 64;
/// Most parts of a sequence, so that their states take constant memory.
const PARTS: usize = 16;

/// The parts of a sequence, whole chunks each.
fn parts(len: usize) -> Chunks {
    Chunks::balanced(len, 256.max(len.div_ceil(PARTS)), CHUNK)
}

/// The chunks of a part.
fn chunks(part: Range<usize>) -> impl DoubleEndedIterator<Item = Range<usize>> {
    let end = part.end;
    part.step_by(CHUNK).map(move |start| start..(start + CHUNK).min(end))
}

/// What forward leaves for backward.
pub(super) struct Saved {
    /// The states that parts start with, in order of sample, part and head.
    starts: Vec<State>,
    /// Denominators, per sample and part: [heads, rows of the part].
    dens: Vec<Vec<f32>>,
}

/// S [f, e] and z [f], relative to a peak.
#[derive(Clone)]
struct State {
    s: Vec<f32>,
    z: Vec<f32>,
    peak: Peak,
}

impl State {
    fn empty(f: usize, e: usize) -> Self {
        Self { s: vec![0.0; f * e], z: vec![0.0; f], peak: Peak::NONE }
    }

    fn scale(&mut self, factor: f32) {
        if factor != 1.0 {
            scale(factor, &mut self.s);
            scale(factor, &mut self.z);
        }
    }

    fn add(&mut self, factor: f32, other: &Self) {
        axpy(factor, &other.s, &mut self.s);
        axpy(factor, &other.z, &mut self.z);
    }

    /// s += features^T values.
    fn add_rows(&mut self, features: Rows, values: Rows) {
        let (f, e) = (features.width, values.width);
        gemm_add(MatMut::new(&mut self.s, f, e), features.mat().t(), values.mat(), 1.0, 1.0, Threads::One);
    }
}

/// One chunk of a head, as all passes see it.
struct Step {
    sample: usize,
    head: usize,
    rows: Range<usize>,
}

impl Step {
    fn at(&self) -> At {
        At { sample: self.sample, head: self.head, first: self.rows.start }
    }

    fn count(&self) -> usize {
        self.rows.len()
    }
}

/// Working space of one thread.
struct Scratch {
    q: Vec<f32>,
    k: Vec<f32>,
    df: Vec<f32>,
    pairs: Vec<f32>,
    values: Vec<f32>,
    dnum: Vec<f32>,
    dden: Vec<f32>,
    behind: Vec<f32>,
    steps: Vec<f32>,
    map: Vec<f32>,
    decay: Decay,
}

impl Scratch {
    fn new(call: &Call) -> Self {
        let (f, e) = (call.map.width(), call.value_width);
        let space = |width: usize| vec![0.0; CHUNK * width];
        Self {
            q: space(f),
            k: space(f),
            df: space(f),
            pairs: space(CHUNK),
            values: space(e),
            dnum: space(e),
            dden: space(1),
            behind: space(e),
            steps: space(1),
            map: Vec::new(),
            decay: Decay::new(CHUNK),
        }
    }

    /// Features of the chunk's keys and the weights within it; `peak` moves on.
    fn keys(&mut self, call: &Call, step: &Step, k: Operand, peak: &mut Peak) {
        let (f, count) = (call.map.width(), step.count());
        let x = k.rows(step.sample, step.head, step.rows.clone(), &mut []);
        let (features, steps) = (&mut self.k[..count * f], &mut self.steps[..count]);
        call.map.causal_keys(step.at(), x, features, &mut self.map, peak, steps);
        let gates = call.gates(step.at(), count);
        if let Some(gates) = gates {
            steps.iter_mut().zip(gates).for_each(|(step, gate)| *step += gate.log_keep);
        }
        self.decay.set(steps, gates);
    }

    /// Features of the chunk's queries.
    fn queries(&mut self, call: &Call, step: &Step, q: Operand) {
        let x = q.rows(step.sample, step.head, step.rows.clone(), &mut []);
        let features = &mut self.q[..step.count() * call.map.width()];
        call.map.queries(step.at(), x, features, &mut self.map);
    }

    /// Weighted products of query and key features of the chunk.
    fn pairs(&mut self, f: usize, count: usize) {
        let (q, k) = (Mat::new(&self.q, count, f), Mat::new(&self.k, count, f));
        let pairs = &mut self.pairs[..count * count];
        gemm(MatMut::new(pairs, count, count), q, k.t(), 1.0, Threads::One);
        self.decay.weigh(pairs);
    }

    /// Moves `state` over the chunk; weighs the key features.
    fn advance(&mut self, call: &Call, step: &Step, v: Operand, state: &mut State) {
        let (f, count) = (call.map.width(), step.count());
        let features = &mut self.k[..count * f];
        self.decay.weigh_keys(features, f);
        state.scale(self.decay.total());
        let features = Rows::packed(features, f);
        state.add_rows(features, call.values(v, step.at(), count, &mut self.values));
        plain_sum(features, &mut state.z);
    }
}

/// The result rows [samples, n, heads * e].
pub(super) fn forward(call: &Call, q: Operand, k: Operand, v: Operand) -> (Vec<f32>, Saved) {
    let starts = starts(call, k, v);
    let (heads, e) = (call.heads, call.value_width);
    let rows = parts(call.queries);
    let columns = Columns { first: 0, width: e, stride: heads * e };
    let init = || Scratch::new(call);
    let (out, dens) =
        sample_rows::build_rows(call.samples, rows, columns.stride, init, |scratch, sample, part, chunk| {
            let first = (sample * rows.count() + part.start / rows.size) * heads;
            let mut states = starts[first..first + heads].to_vec();
            let mut dens = vec![0.0; heads * part.len()];
            for span in chunks(part.clone()) {
                for (head, state) in states.iter_mut().enumerate() {
                    let local = span.start - part.start..span.end - part.start;
                    let dens = &mut dens[head * part.len()..][local.clone()];
                    let step = Step { sample, head, rows: span.clone() };
                    let out = columns.of(chunk, head, local);
                    chunk_out(call, &step, (q, k, v), state, (out, dens), scratch);
                }
            }
            dens
        });
    (out, Saved { starts, dens })
}

/// The results and denominators of one chunk; `state` moves over it.
fn chunk_out(
    call: &Call,
    step: &Step,
    (q, k, v): (Operand, Operand, Operand),
    state: &mut State,
    (mut out, dens): (RowsMut, &mut [f32]),
    scratch: &mut Scratch,
) {
    let (f, e, count) = (call.map.width(), call.value_width, step.count());
    scratch.queries(call, step, q);
    scratch.keys(call, step, k, &mut state.peak);
    scratch.pairs(f, count);
    let values = call.values(v, step.at(), count, &mut scratch.values);
    gemm(out.mat(), Mat::new(&scratch.pairs, count, count), values.mat(), 1.0, Threads::One);
    let queries = &mut scratch.q[..count * f];
    scratch.decay.weigh_queries(queries, f);
    gemm_add(out.mat(), Mat::new(queries, count, f), Mat::new(&state.s, f, e), 1.0, 1.0, Threads::One);
    denominators(&scratch.pairs[..count * count], queries, &state.z, dens);
    for (row, &den) in dens.iter().enumerate() {
        scale(invert(call.guard, den).0, out.row(row));
    }
    scratch.advance(call, step, v, state);
}

crate::simd_fn! {
    /// The sum of each row of `pairs` plus f_i . z.
    fn denominators<S>(simd, pairs: &'a [f32], f: &'a [f32], z: &'a [f32], dens: &'a mut [f32]) {
        use crate::cpu::math;
        let count = dens.len();
        for ((pairs, f), den) in pairs.chunks_exact(count).zip(f.chunks_exact(z.len())).zip(dens) {
            *den = math::sum(simd, pairs) + math::dot(simd, f, z);
        }
    }
}

/// The state that every part of every head starts with.
fn starts(call: &Call, k: Operand, v: Operand) -> Vec<State> {
    let rows = parts(call.keys);
    let (count, heads) = (rows.count(), call.heads);
    let (f, e) = (call.map.width(), call.value_width);
    // what a part adds (the last part's is of no use), and what the state before is worth at its end
    let added: Vec<Vec<(State, f32)>> = par::map_pieces_with(
        0..call.samples * (count - 1),
        || Scratch::new(call),
        |scratch, _, index| {
            let (sample, part) = (index / (count - 1), index % (count - 1));
            let mut states = vec![(State::empty(f, e), 1.0); heads];
            for span in chunks(rows.range(part)) {
                for (head, (state, keep)) in states.iter_mut().enumerate() {
                    let step = Step { sample, head, rows: span.clone() };
                    scratch.keys(call, &step, k, &mut state.peak);
                    scratch.advance(call, &step, v, state);
                    if let Some(gates) = call.gates(step.at(), step.count()) {
                        *keep *= gates.iter().map(|gate| gate.log_keep).sum::<f32>().exp();
                    }
                }
            }
            states
        },
    );
    let mut starts = vec![State::empty(f, e); call.samples * count * heads];
    for sample in 0..call.samples {
        for part in 1..count {
            let first = (sample * count + part) * heads;
            for (head, (state, keep)) in added[sample * (count - 1) + part - 1].iter().enumerate() {
                let mut start = starts[first - heads + head].clone();
                let before = start.peak;
                if state.peak.value > before.value {
                    start.peak = state.peak;
                }
                start.scale(keep * start.peak.shrink(before));
                let factor = start.peak.shrink(state.peak);
                start.add(factor, state);
                starts[first + head] = start;
            }
        }
    }
    starts
}
