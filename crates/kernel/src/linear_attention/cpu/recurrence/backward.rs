//! Gradients of queries, keys, values and decays.

use std::ops::Range;

use super::forward::{Scratch, product};
use super::log_terms::LogTerms;
use super::states::{Side, States, states};
use super::{CHUNK, Inputs, Logs, Place, Plan, Targets};
use crate::cpu::gemm::{Mat, MatMut, Threads, gemm, gemm_add};
use crate::cpu::rows::add;
use crate::cpu::{jobs, math, par};
use crate::linear_attention::cpu::rows::{Operand, Rows, RowsMut};

/// Gradients of all operands.
pub(super) struct Gradients {
    /// Of queries, keys and values, as [`Targets`] says.
    pub(super) rows: [Vec<f32>; 3],
    /// Of the logarithms of decays, [samples, n, heads * log width] each.
    pub(super) logs: Vec<Vec<f32>>,
}

/// Working space of one thread for a chunk of one head.
struct Space {
    forward: Scratch,
    /// dout v^T, then weighted.
    grads: Vec<f32>,
    dq: Vec<f32>,
    dk: Vec<f32>,
    /// What the states give to queries or keys, for each direction.
    across: Vec<f32>,
    logs: [LogTerms; 2],
}

impl Space {
    fn new(plan: &Plan) -> Self {
        let d = plan.key_width;
        let room = |width: usize| vec![0.0; CHUNK * width];
        let logs = || LogTerms::new(if plan.learned() { plan.log_width() } else { 0 });
        Self {
            forward: Scratch::new(plan),
            grads: room(CHUNK),
            dq: room(d),
            dk: room(d),
            across: room(plan.state_rows()),
            logs: [logs(), logs()],
        }
    }
}

/// Everything that a chunk reads.
struct Given<'a> {
    inputs: &'a Inputs<'a>,
    dout: Operand<'a>,
    states: Option<&'a States>,
    dstates: Option<&'a States>,
}

pub(super) fn backward(inputs: &Inputs, dout: Operand, targets: &Targets) -> Gradients {
    let plan = inputs.plan;
    let states = [states(inputs, Side::Keys, inputs.v), states(inputs, Side::Queries, dout)];
    let given = Given { inputs, dout, states: states[0].as_ref(), dstates: states[1].as_ref() };
    let chunks = plan.chunks();
    let log_row = if plan.learned() { plan.heads * plan.log_width() } else { 0 };
    let widths = [
        targets.widths[0],
        targets.widths[1],
        targets.widths[2],
        log_row,
        if plan.causal { 0 } else { log_row },
    ];
    let count = chunks.count();
    let lens = widths.map(|width| {
        (0..plan.samples * count).map(|job| chunks.range(job % count).len() * width).collect::<Vec<_>>()
    });
    let [first, second, third, forward, backward] = jobs::build_jobs(
        lens.each_ref().map(|lens| &lens[..]),
        || Space::new(plan),
        |space, job, [first, second, third, forward, backward]| {
            let (sample, rows) = (job / count, chunks.range(job % count));
            let mut buffers = [first, second, third];
            for head in 0..plan.heads {
                let place = Place { sample, head };
                chunk(&given, place, &rows, (targets, &mut buffers), space);
                if plan.learned() {
                    let width = plan.log_width();
                    for (terms, out) in space.logs.iter_mut().zip([&mut *forward, &mut *backward]) {
                        if !out.is_empty() {
                            terms.finish(rows.len(), &mut out[head * width..], log_row);
                        }
                    }
                }
            }
        },
    );
    let logs = if plan.learned() { gather_logs(plan, forward, &backward, log_row) } else { Vec::new() };
    Gradients { rows: [first, second, third], logs }
}

/// Gradients by the decays as they were given: backward ones are counted one position late, and hidden steps have none.
fn gather_logs(plan: &Plan, mut forward: Vec<f32>, backward: &[f32], row: usize) -> Vec<Vec<f32>> {
    let len = plan.len * row;
    let chunk = CHUNK * row;
    let hide = |sample: usize, first: usize, rows: &mut [f32]| {
        for (index, row) in rows.chunks_exact_mut(row).enumerate() {
            if plan.mask.hides(sample, first + index) {
                row.fill(0.0);
            }
        }
    };
    let earlier = |sample: usize, first: usize, rows: &mut [f32]| {
        let from = sample * len + (first + 1) * row;
        let count = rows.len().min((sample + 1) * len - from);
        add(&backward[from..from + count], &mut rows[..count]);
    };
    let each = |data: &mut [f32], shift: bool| {
        let pieces = data.chunks_mut(len).enumerate().flat_map(|(sample, data)| {
            data.chunks_mut(chunk).enumerate().map(move |(index, rows)| (sample, index * CHUNK, rows))
        });
        par::each_piece(pieces, |_, (sample, first, rows)| {
            if shift {
                earlier(sample, first, rows);
            }
            hide(sample, first, rows);
        });
    };
    if plan.causal {
        each(&mut forward, false);
        return vec![forward];
    }
    if !plan.separate {
        each(&mut forward, true);
        return vec![forward];
    }
    each(&mut forward, false);
    let mut shifted = par::zeros(forward.len());
    each(&mut shifted, true);
    vec![forward, shifted]
}

/// Gradients of one chunk of a head.
fn chunk(
    given: &Given,
    place: Place,
    rows: &Range<usize>,
    (targets, buffers): (&Targets, &mut [&mut [f32]; 3]),
    space: &mut Space,
) {
    let (inputs, plan, count) = (given.inputs, given.inputs.plan, rows.len());
    let (d, e) = (plan.key_width, plan.value_width);
    let (q, k) = inputs.queries_keys(place, rows);
    let values = inputs.values(place, rows);
    let dout = given.dout.rows(place.sample, place.head, rows.clone(), &mut []);
    let Space { forward, grads, dq, dk, across, logs } = space;
    forward.pairs(inputs, place, rows);
    let pairs = Mat::new(&forward.pairs, count, count);
    let of_value = |buffers: &mut [&mut [f32]; 3], f: &mut dyn FnMut(MatMut)| {
        let (buffer, columns) = targets.v;
        f(columns.of(&mut *buffers[buffer], place.head, 0..count).mat());
    };
    of_value(buffers, &mut |dv| gemm(dv, pairs.t(), dout.mat(), 1.0, Threads::One));
    let grads = &mut grads[..count * count];
    gemm(MatMut::new(grads, count, count), dout.mat(), values.mat().t(), 1.0, Threads::One);
    let (dq, dk) = (&mut dq[..count * d], &mut dk[..count * d]);
    if let Logs::PerChannel = plan.logs {
        forward.channel.back(&forward.factors, plan.causal, grads, (dq, dk), logs);
    } else {
        if plan.learned() {
            let [forward_logs, backward_logs] = logs;
            within(&forward.pairs[..count * count], grads, plan.causal, forward_logs, backward_logs);
        }
        let weighted = &mut forward.pairs[..count * count];
        product(&forward.weights[..count * count], grads, weighted);
        let weighted = Mat::new(weighted, count, count);
        gemm(MatMut::new(dq, count, d), weighted, k.mat(), 1.0, Threads::One);
        gemm(MatMut::new(dk, count, d), weighted.t(), q.mat(), 1.0, Threads::One);
    }
    if let (Some(states), Some(dstates)) = (given.states, given.dstates) {
        let (index, width) = (rows.start / CHUNK, plan.state_rows());
        let (state, dstate) = (states.of(place, index), dstates.of(place, index));
        forward.weigh(plan, Side::Keys, k);
        let weighted = Mat::new(&forward.weighted, count, width);
        let dstate_mat = Mat::new(dstate, width, e);
        of_value(buffers, &mut |dv| gemm_add(dv, weighted, dstate_mat, 1.0, 1.0, Threads::One));
        let across = &mut across[..count * width];
        for (side, x, dx, values, state) in
            [(Side::Queries, q, &mut *dq, dout, state), (Side::Keys, k, &mut *dk, values, dstate)]
        {
            let state = Mat::new(state, width, e);
            gemm(MatMut::new(across, count, width), values.mat(), state.t(), 1.0, Threads::One);
            for (index, terms) in logs.iter_mut().enumerate().take(plan.directions().len()) {
                let factors = match side {
                    Side::Queries => forward.factors.queries(index),
                    Side::Keys => forward.factors.keys(index),
                };
                let reads = (index == 0) == (side == Side::Queries);
                let terms = match (plan.learned(), reads) {
                    (false, _) => &mut [][..],
                    (true, true) => &mut terms.readers[..],
                    (true, false) => &mut terms.writers[..],
                };
                let of = Rows { data: &across[index * d..], stride: width, count, width: d };
                gather(of, factors, x, dx, terms);
            }
        }
        if plan.learned() {
            let total = states.total(place, index);
            for (half, terms) in logs.iter_mut().enumerate().take(plan.directions().len()) {
                let total = &total[half * terms.width..][..terms.width];
                let half = half * d * e..(half + 1) * d * e;
                row_products(&state[half.clone()], &dstate[half], total, &mut terms.across);
            }
        }
    } else {
        logs.iter_mut().for_each(|terms| terms.across.fill(0.0));
    }
    for (hidden, row) in dk.chunks_exact_mut(d).enumerate().map(|(row, dk)| (row + rows.start, dk)) {
        if plan.mask.hides(place.sample, hidden) {
            row.fill(0.0);
        }
    }
    let first = (place.head * plan.groups).is_multiple_of(plan.heads);
    let group = place.head * plan.groups / plan.heads;
    for ((buffer, columns), dx) in [(targets.q, &*dq), (targets.k, &*dk)] {
        put(dx, first, columns.of(&mut *buffers[buffer], group, 0..count));
    }
}

/// Writes rows, or adds them where others of the group came before.
fn put(x: &[f32], first: bool, to: RowsMut) {
    let mut to = to;
    for (row, x) in x.chunks_exact(to.width).enumerate() {
        if first {
            to.row(row).copy_from_slice(x);
        } else {
            add(x, to.row(row));
        }
    }
}

crate::simd_fn! {
    /// Of the shares `pairs * grads` of the pairs of a chunk, what readers and writers of the decays add: sums of rows and
    /// columns, without the diagonal.
    fn within<S>(
        simd,
        pairs: &'a [f32],
        grads: &'a [f32],
        causal: bool,
        forward: &'a mut LogTerms,
        backward: &'a mut LogTerms,
    ) {
        let count = pairs.len().isqrt();
        let mut shares = [0.0; CHUNK];
        let shares = &mut shares[..count];
        for terms in [&mut *forward, &mut *backward] {
            terms.readers[..count].fill(0.0);
            terms.writers[..count].fill(0.0);
        }
        for (i, (pairs, grads)) in pairs.chunks_exact(count).zip(grads.chunks_exact(count)).enumerate() {
            shares.copy_from_slice(pairs);
            super::factors::multiply(simd, grads, shares);
            // a writer takes away behind itself what its readers brought
            forward.readers[i] += math::sum(simd, &shares[..i]);
            math::axpy(simd, -1.0, &shares[..i], &mut forward.readers[..i]);
            if !causal {
                let later = &shares[i + 1..];
                math::add(simd, later, &mut backward.readers[i + 1..count]);
                backward.readers[i] -= math::sum(simd, later);
            }
        }
    }
}

crate::simd_fn! {
    /// dx += factors y; adds x factors y to the `terms` of decays: per row, or per element where there is a factor for each.
    fn gather<S>(
        simd, y: Rows<'a>, factors: &'a [f32], x: Rows<'a>, dx: &'a mut [f32], terms: &'a mut [f32],
    ) {
        let (count, width) = (y.count, y.width);
        if factors.len() == count && width != 1 {
            for row in 0..count {
                math::axpy(simd, factors[row], y.row(row), &mut dx[row * width..][..width]);
                if !terms.is_empty() {
                    terms[row] += factors[row] * math::dot(simd, x.row(row), y.row(row));
                }
            }
            return;
        }
        for row in 0..count {
            let (x, y, at) = (x.row(row), y.row(row), row * width..(row + 1) * width);
            let (factors, dx) = (&factors[at.clone()], &mut dx[at.clone()]);
            let mut terms = if terms.is_empty() { None } else { Some(&mut terms[at]) };
            for at in (0..width).step_by(S::F32_LANES) {
                let part = simd.mul_f32s(math::load(simd, y, at), math::load(simd, factors, at));
                math::store(simd, dx, at, simd.add_f32s(math::load(simd, dx, at), part));
                if let Some(terms) = &mut terms {
                    let sum = simd.mul_add_e_f32s(math::load(simd, x, at), part, math::load(simd, terms, at));
                    math::store(simd, terms, at, sum);
                }
            }
        }
    }
}

crate::simd_fn! {
    /// sums = factors (x . y), over all elements where there is one factor, else row by row.
    fn row_products<S>(simd, x: &'a [f32], y: &'a [f32], factors: &'a [f32], sums: &'a mut [f32]) {
        let row = x.len() / factors.len();
        for (index, (sum, factor)) in sums.iter_mut().zip(factors).enumerate() {
            let at = index * row..(index + 1) * row;
            *sum = factor * math::dot(simd, &x[at.clone()], &y[at]);
        }
    }
}
