//! The result.

use std::ops::Range;

use super::factors::{weigh, weigh_pairs};
use super::states::{Side, States, states};
use super::{CHUNK, ChunkFactors, Inputs, Logs, Place, Plan, channel};
use crate::cpu::gemm::{Mat, MatMut, Threads, gemm, gemm_add};
use crate::cpu::sample_rows;
use crate::linear_attention::cpu::rows::{Columns, Rows, RowsMut};

/// Working space of one thread.
pub(super) struct Scratch {
    pub(super) factors: ChunkFactors,
    /// q k^T of a chunk, without decays.
    pub(super) products: Vec<f32>,
    /// Weights of the pairs of a chunk, 0 at hidden keys; where decays are scalars.
    pub(super) weights: Vec<f32>,
    /// What each key counts at each query.
    pub(super) pairs: Vec<f32>,
    /// Queries or keys, weighted for each direction.
    pub(super) weighted: Vec<f32>,
    pub(super) channel: channel::Scratch,
}

impl Scratch {
    pub(super) fn new(plan: &Plan) -> Self {
        let square = || vec![0.0; CHUNK * CHUNK];
        Self {
            factors: ChunkFactors::new(plan),
            products: square(),
            weights: square(),
            pairs: square(),
            weighted: vec![0.0; CHUNK * plan.state_rows()],
            channel: channel::Scratch::new(plan),
        }
    }

    /// Reads the decays of a chunk and finds what its keys count at its queries.
    pub(super) fn pairs(&mut self, inputs: &Inputs, place: Place, rows: &Range<usize>) {
        let (plan, count) = (inputs.plan, rows.len());
        let (q, k) = inputs.queries_keys(place, rows);
        self.factors.load(inputs, place, rows);
        let pairs = &mut self.pairs[..count * count];
        if let Logs::PerChannel = plan.logs {
            self.channel.load(inputs, place, rows);
            self.channel.pairs(&self.factors, plan.causal, pairs);
            return;
        }
        if (place.head * plan.groups).is_multiple_of(plan.heads) || place.head == 0 {
            let products = MatMut::new(&mut self.products, count, count);
            gemm(products, q.mat(), k.mat().t(), 1.0, Threads::One);
        }
        let weights = &mut self.weights[..count * count];
        let [forward, backward] = &self.factors.both;
        weigh_pairs(forward, (!plan.causal).then_some(backward), plan.powers(place.head), weights);
        clear_hidden(inputs, place, rows, weights);
        product(weights, &self.products[..count * count], pairs);
    }

    /// Rows of `x` weighted for each direction, side by side.
    pub(super) fn weigh(&mut self, plan: &Plan, side: Side, x: Rows) {
        let directions = plan.directions().len();
        for index in 0..directions {
            let factors = match side {
                Side::Keys => self.factors.keys(index),
                Side::Queries => self.factors.queries(index),
            };
            weigh(x, factors, &mut self.weighted[index * x.width..], directions * x.width);
        }
    }
}

/// Clears the columns of hidden keys.
fn clear_hidden(inputs: &Inputs, place: Place, rows: &Range<usize>, weights: &mut [f32]) {
    for (column, position) in rows.clone().enumerate() {
        if inputs.plan.mask.hides(place.sample, position) {
            weights.iter_mut().skip(column).step_by(rows.len()).for_each(|weight| *weight = 0.0);
        }
    }
}

crate::simd_fn! {
    /// z = x y, element by element.
    pub(super) fn product<S>(simd, x: &'a [f32], y: &'a [f32], z: &'a mut [f32]) {
        super::factors::product(simd, x, y, z);
    }
}

/// The result rows [samples, n, heads * value channels].
pub(super) fn forward(inputs: &Inputs) -> Vec<f32> {
    let plan = inputs.plan;
    let (e, chunks) = (plan.value_width, plan.chunks());
    let states = states(inputs, Side::Keys, inputs.v);
    let columns = Columns { first: 0, width: e, stride: plan.heads * e };
    let init = || Scratch::new(plan);
    let each = |scratch: &mut Scratch, sample: usize, rows: Range<usize>, out: &mut [f32]| {
        for head in 0..plan.heads {
            let place = Place { sample, head };
            let out = columns.of(out, head, 0..rows.len());
            chunk_out(inputs, place, &rows, states.as_ref(), out, scratch);
        }
    };
    sample_rows::build_rows(plan.samples, chunks, columns.stride, init, each).0
}

/// The results of one chunk of a head.
fn chunk_out(
    inputs: &Inputs,
    place: Place,
    rows: &Range<usize>,
    states: Option<&States>,
    mut out: RowsMut,
    scratch: &mut Scratch,
) {
    let (plan, count) = (inputs.plan, rows.len());
    scratch.pairs(inputs, place, rows);
    let pairs = Mat::new(&scratch.pairs, count, count);
    gemm(out.mat(), pairs, inputs.values(place, rows).mat(), 1.0, Threads::One);
    let Some(states) = states else { return };
    let (q, _) = inputs.queries_keys(place, rows);
    scratch.weigh(plan, Side::Queries, q);
    let width = plan.state_rows();
    let state = Mat::new(states.of(place, rows.start / CHUNK), width, plan.value_width);
    gemm_add(out.mat(), Mat::new(&scratch.weighted, count, width), state, 1.0, 1.0, Threads::One);
}
