//! Gradients of the chunked scan.

use std::ops::Range;

use super::super::guard::{add_outer, add_to_rows, invert, weighted_sum};
use super::super::map::{Peak, Side, Tile};
use super::super::rows::{Columns, Operand, Rows, RowsMut};
use super::super::{Call, GatesBy, Gradients, Targets, axpy, scale};
use super::{CHUNK, Gate, Saved, Scratch, State, Step, chunks, parts};
use crate::cpu::elements::row_dots;
use crate::cpu::gemm::{Mat, MatMut, Threads, gemm, gemm_add};
use crate::cpu::{math, sample_rows};

/// What a part leaves after the pass in time order.
struct Left {
    /// Per head: what the part adds to the reverse state in front of it, and what the reverse state behind it is
    /// worth there.
    reverse: Vec<(State, f32)>,
    /// The peak in front of each chunk, [chunks, heads].
    peaks: Vec<Peak>,
    dparams: Vec<f32>,
    /// phi(q) . dphi(q) per row, [heads, rows]; where there are gates.
    dots: Vec<f32>,
}

type Inputs<'a> = super::super::Inputs<'a, Saved>;

pub(in super::super) fn backward(inputs: &Inputs, targets: &Targets) -> Gradients {
    let call = inputs.call;
    let (heads, params) = (call.heads, call.map.params());
    let rows = parts(call.queries);
    let count = rows.count();
    let init = || Scratch::new(call);
    let (mut query_rows, left) = sample_rows::build_rows(
        call.samples,
        rows,
        targets.q.stride,
        init,
        |scratch, sample, part, chunk| query_part(inputs, (sample, part), (targets.q, chunk), scratch),
    );
    let ends = ends(call, &left, count);
    let key_pass = |scratch: &mut Scratch, sample: usize, part: Range<usize>, chunk: &mut [f32]| {
        let index = sample * count + part.start / rows.size;
        let states = ends[index * heads..][..heads].to_vec();
        key_part(inputs, (sample, part), &left[index].peaks, states, (targets, chunk), scratch)
    };
    let (key_rows, results) = if targets.shared {
        let stride = targets.k.stride;
        (None, sample_rows::update_rows(&mut query_rows, call.samples, rows, stride, init, key_pass))
    } else {
        let (rows, results) = sample_rows::build_rows(call.samples, rows, targets.k.stride, init, key_pass);
        (Some(rows), results)
    };
    let mut dparams = vec![0.0; heads * params];
    left.iter().for_each(|left| axpy(1.0, &left.dparams, &mut dparams));
    results.iter().for_each(|(part, _)| axpy(1.0, part, &mut dparams));
    let gates = call.gates.as_ref().filter(|_| call.gates_by != GatesBy::Constant);
    let gates = gates.map(|gates| gate_gradients(call, gates, &left, &results));
    Gradients { query_rows, key_rows, params: dparams, gates }
}

impl Inputs<'_> {
    /// Gradients of the numerators and denominators of a chunk.
    fn undivide(&self, step: &Step, part: &Range<usize>, scratch: &mut Scratch) {
        let (call, e, count) = (self.call, self.call.value_width, step.count());
        let parts = parts(call.queries);
        let dens = &self.saved.dens[step.sample * parts.count() + part.start / parts.size];
        let dens = &dens[step.head * part.len() + step.rows.start - part.start..][..count];
        let (out, dout) = self.results(step.at(), count, &mut []);
        for (row, den) in dens.iter().enumerate() {
            let (inverse, slope) = invert(call.guard, *den);
            let dnum = &mut scratch.dnum[row * e..][..e];
            let dot = scale_dot(inverse, dout.row(row), out.row(row), dnum);
            scratch.dden[row] = -dot * slope;
        }
    }
}

crate::simd_fn! {
    /// y = factor x; returns y . other.
    fn scale_dot<S>(simd, factor: f32, x: &'a [f32], other: &'a [f32], y: &'a mut [f32]) -> f32 {
        y.copy_from_slice(x);
        math::scale(simd, factor, y);
        math::dot(simd, y, other)
    }
}

impl Scratch {
    /// Gradients of the pairs of a chunk: (dnum_t . v_s + dden_t), weighted.
    fn pair_gradients(&mut self, call: &Call, step: &Step, v: Operand) {
        let (e, count) = (call.value_width, step.count());
        let values = call.values(v, step.at(), count, &mut self.values);
        let pairs = &mut self.pairs[..count * count];
        let dnum = Mat::new(&self.dnum, count, e);
        gemm(MatMut::new(pairs, count, count), dnum, values.mat().t(), 1.0, Threads::One);
        for (row, dden) in pairs.chunks_exact_mut(count).zip(&self.dden) {
            row.iter_mut().for_each(|pair| *pair += dden);
        }
        self.decay.weigh(pairs);
    }

    /// Moves the reverse state over the chunk; weighs the query features.
    fn retreat(&mut self, call: &Call, count: usize, state: &mut State) {
        let (f, e) = (call.map.width(), call.value_width);
        let features = &mut self.q[..count * f];
        self.decay.weigh_queries(features, f);
        state.scale(self.decay.total());
        let features = Rows::packed(features, f);
        state.add_rows(features, Rows::packed(&self.dnum[..count * e], e));
        weighted_sum(&self.dden[..count], features, &mut state.z);
    }
}

/// dQ of one part, in time order.
fn query_part(
    inputs: &Inputs,
    (sample, part): (usize, Range<usize>),
    (target, chunk): (Columns, &mut [f32]),
    scratch: &mut Scratch,
) -> Left {
    let call = inputs.call;
    let (q, k, v) = inputs.operands;
    let (f, e, heads, params) = (call.map.width(), call.value_width, call.heads, call.map.params());
    let rows = parts(call.queries);
    let first = (sample * rows.count() + part.start / rows.size) * heads;
    let mut states = inputs.saved.starts[first..first + heads].to_vec();
    let mut left = Left {
        reverse: vec![(State::empty(f, e), 1.0); heads],
        peaks: Vec::new(),
        dparams: vec![0.0; heads * params],
        dots: if call.gates.is_some() { vec![0.0; heads * part.len()] } else { Vec::new() },
    };
    for span in chunks(part.clone()) {
        let (local, count) = (span.start - part.start..span.end - part.start, span.len());
        for (head, state) in states.iter_mut().enumerate() {
            let step = Step { sample, head, rows: span.clone() };
            left.peaks.push(state.peak);
            scratch.queries(call, &step, q);
            scratch.keys(call, &step, k, &mut state.peak);
            inputs.undivide(&step, &part, scratch);
            scratch.pair_gradients(call, &step, v);
            let (dnum, dden) = (Mat::new(&scratch.dnum, count, e), &scratch.dden[..count]);
            let df = &mut scratch.df[..count * f];
            gemm(MatMut::new(df, count, f), dnum, Mat::new(&state.s, f, e).t(), 1.0, Threads::One);
            add_outer(dden, &state.z, df);
            scratch.decay.weigh_queries(df, f);
            let (pairs, keys) = (Mat::new(&scratch.pairs, count, count), Mat::new(&scratch.k, count, f));
            gemm_add(MatMut::new(df, count, f), pairs, keys, 1.0, 1.0, Threads::One);
            if call.gates.is_some() {
                let dots = &mut left.dots[head * part.len()..][local.clone()];
                row_dots(&scratch.q[..count * f], df, f, dots);
            }
            let (x, features) = (q.rows(sample, head, span.clone(), &mut []), &scratch.q[..count * f]);
            let tile = Tile { x, f: features, df, scratch: &mut scratch.map };
            let dparams = &mut left.dparams[head * params..][..params];
            call.map.back(Side::Query, step.at(), tile, target.of(chunk, head, local.clone()), dparams);
            // the part's share of the reverse state in front of it
            let (reverse, keep) = &mut left.reverse[head];
            add_reverse(call, count, *keep, reverse, scratch);
            *keep *= scratch.decay.total();
            scratch.advance(call, &step, v, state);
        }
    }
    left
}

/// reverse += keep (weighted queries)^T (dnum, dden); weighs the query features.
fn add_reverse(call: &Call, count: usize, keep: f32, reverse: &mut State, scratch: &mut Scratch) {
    let (f, e) = (call.map.width(), call.value_width);
    let features = &mut scratch.q[..count * f];
    scratch.decay.weigh_queries(features, f);
    if keep != 1.0 {
        scale(keep, features);
    }
    let features = Rows::packed(features, f);
    reverse.add_rows(features, Rows::packed(&scratch.dnum[..count * e], e));
    weighted_sum(&scratch.dden[..count], features, &mut reverse.z);
}

/// The reverse state behind every part, in order of sample, part and head.
fn ends(call: &Call, left: &[Left], count: usize) -> Vec<State> {
    let (f, e, heads) = (call.map.width(), call.value_width, call.heads);
    let mut ends = vec![State::empty(f, e); call.samples * count * heads];
    for sample in 0..call.samples {
        for part in (1..count).rev() {
            for head in 0..heads {
                let at = (sample * count + part) * heads + head;
                let (added, keep) = &left[sample * count + part].reverse[head];
                let mut end = ends[at].clone();
                end.scale(*keep);
                end.add(1.0, added);
                ends[at - heads] = end;
            }
        }
    }
    ends
}

/// dK and dV of one part, against time. Returns the gradients of the parameters, and phi(k) . dphi(k) per row
/// [heads, rows] where there are gates.
fn key_part(
    inputs: &Inputs,
    (sample, part): (usize, Range<usize>),
    peaks: &[Peak],
    mut states: Vec<State>,
    (targets, chunk): (&Targets, &mut [f32]),
    scratch: &mut Scratch,
) -> (Vec<f32>, Vec<f32>) {
    let call = inputs.call;
    let (q, k, v) = inputs.operands;
    let (f, e, heads, params) = (call.map.width(), call.value_width, call.heads, call.map.params());
    let mut dparams = vec![0.0; heads * params];
    let mut dots = if call.gates.is_some() { vec![0.0; heads * part.len()] } else { Vec::new() };
    for span in chunks(part.clone()).rev() {
        let (local, count) = (span.start - part.start..span.end - part.start, span.len());
        for (head, state) in states.iter_mut().enumerate() {
            let step = Step { sample, head, rows: span.clone() };
            let mut peak = peaks[local.start / CHUNK * heads + head];
            scratch.queries(call, &step, q);
            scratch.keys(call, &step, k, &mut peak);
            inputs.undivide(&step, &part, scratch);
            scratch.pairs(f, count);
            let mut dv = targets.v.of(chunk, head, local.clone());
            let dnum = Mat::new(&scratch.dnum, count, e);
            gemm(dv.mat(), Mat::new(&scratch.pairs, count, count).t(), dnum, 1.0, Threads::One);
            scratch.pair_gradients(call, &step, v);
            let df = &mut scratch.df[..count * f];
            let values = call.values(v, step.at(), count, &mut scratch.values);
            gemm(MatMut::new(df, count, f), values.mat(), Mat::new(&state.s, f, e).t(), 1.0, Threads::One);
            add_to_rows(&state.z, RowsMut { data: df, stride: f, count, width: f });
            scratch.decay.weigh_keys(df, f);
            let pairs = Mat::new(&scratch.pairs, count, count).t();
            gemm_add(
                MatMut::new(df, count, f),
                pairs,
                Mat::new(&scratch.q, count, f),
                1.0,
                1.0,
                Threads::One,
            );
            if call.gates.is_some() {
                let dots = &mut dots[head * part.len()..][local.clone()];
                row_dots(&scratch.k[..count * f], df, f, dots);
            }
            // dV: what queries behind the chunk see
            let behind = &mut scratch.behind[..count * e];
            let keys = Mat::new(&scratch.k, count, f);
            gemm(MatMut::new(behind, count, e), keys, Mat::new(&state.s, f, e), 1.0, Threads::One);
            for (row, behind) in behind.chunks_exact(e).enumerate() {
                axpy(scratch.decay.rest(row), behind, dv.row(row));
            }
            call.mask.clear_hidden(step.at(), dv);
            let (x, features) = (k.rows(sample, head, span.clone(), &mut []), &scratch.k[..count * f]);
            let tile = Tile { x, f: features, df: &mut scratch.df[..count * f], scratch: &mut scratch.map };
            let dparams = &mut dparams[head * params..][..params];
            call.map.back(Side::Key, step.at(), tile, targets.k.of(chunk, head, local.clone()), dparams);
            scratch.retreat(call, count, state);
        }
    }
    (dparams, dots)
}

/// Gradients of the gates' logits or logarithms, [samples, heads, n].
///
/// With P(t, s) the share of pair (t, s) in the change of the result, phi(q_t) . dphi(q_t) sums P over s and
/// phi(k_s) . dphi(k_s) sums it over t. The derivative by ln g_r sums P over s < r <= t, which is what rows from r
/// on have more of the first than of the second.
fn gate_gradients(call: &Call, gates: &[Gate], left: &[Left], results: &[(Vec<f32>, Vec<f32>)]) -> Vec<f32> {
    let (n, heads) = (call.queries, call.heads);
    let rows = parts(n);
    let mut gradients = vec![0.0; gates.len()];
    for (index, (gradients, gates)) in gradients.chunks_exact_mut(n).zip(gates.chunks_exact(n)).enumerate() {
        let (sample, head) = (index / heads, index % heads);
        let mut sum = 0.0;
        for part in (0..rows.count()).rev() {
            let (range, at) = (rows.range(part), sample * rows.count() + part);
            let of_head = head * range.len()..(head + 1) * range.len();
            let (queries, keys) = (&left[at].dots[of_head.clone()], &results[at].1[of_head]);
            for (row, t) in range.enumerate().rev() {
                sum += f64::from(queries[row]) - f64::from(keys[row]);
                let Gate { log_keep, open } = gates[t];
                gradients[t] = match call.gates_by {
                    GatesBy::Logit => sum as f32 * open - log_keep.exp() * keys[row],
                    _ if open == 0.0 => 0.0, // a hidden step has no decay
                    _ => sum as f32,
                };
            }
        }
    }
    gradients
}
