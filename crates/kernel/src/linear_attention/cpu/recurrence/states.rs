//! The states between chunks.

use super::factors::weigh;
use super::{ChunkFactors, Inputs, Place};
use crate::cpu::gemm::{Mat, MatMut, Threads, gemm};
use crate::cpu::math::flush;
use crate::cpu::par;
use crate::linear_attention::cpu::rows::Operand;

/// What is summed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    /// Keys with values.
    Keys,
    /// Queries with the gradient of the result: the gradient of the states, which runs against them.
    Queries,
}

/// For every sample, head and chunk the states [directions * key channels, value channels] that its queries read
/// ([`Side::Keys`]: forward of chunks before, backward of those after), or the gradient of those that its keys write to;
/// and the decays over each chunk [directions, 1 or channels].
pub(super) struct States {
    pub(super) data: Vec<f32>,
    pub(super) totals: Vec<f32>,
    len: usize,
    totals_len: usize,
    count: usize,
    heads: usize,
}

impl States {
    fn index(&self, place: Place, chunk: usize) -> usize {
        (place.sample * self.heads + place.head) * self.count + chunk
    }

    /// The states of one chunk.
    pub(super) fn of(&self, place: Place, chunk: usize) -> &[f32] {
        &self.data[self.index(place, chunk) * self.len..][..self.len]
    }

    /// The decay over one chunk.
    pub(super) fn total(&self, place: Place, chunk: usize) -> &[f32] {
        &self.totals[self.index(place, chunk) * self.totals_len..][..self.totals_len]
    }
}

/// The states of all chunks; `None` where there is only one.
pub(super) fn states(inputs: &Inputs, side: Side, values: Operand) -> Option<States> {
    let plan = inputs.plan;
    let (chunks, heads) = (plan.chunks(), plan.heads);
    let (count, len, width) = (chunks.count(), plan.state_len(), plan.log_width());
    if count == 1 {
        return None;
    }
    let (directions, d, e) = (plan.directions().len(), plan.key_width, plan.value_width);
    let totals_len = directions * width;
    let pieces = plan.samples * heads * count;
    let (mut data, totals) = par::build_two(
        (pieces * len, len),
        (pieces * totals_len, totals_len),
        || (ChunkFactors::new(plan), vec![0.0; super::CHUNK * directions * d]),
        |(factors, weighted), index, state, total| {
            let (place, chunk) =
                (Place { sample: index / count / heads, head: index / count % heads }, index % count);
            let rows = chunks.range(chunk);
            factors.load(inputs, place, &rows);
            for (total, factors) in total.chunks_exact_mut(width).zip(&factors.both) {
                total.copy_from_slice(factors.total());
            }
            let unread = if side == Side::Keys { count - 1 } else { 0 };
            if plan.causal && chunk == unread {
                return;
            }
            let (q, k) = inputs.queries_keys(place, &rows);
            let stride = directions * d;
            for index in 0..directions {
                let (x, factors) = match side {
                    Side::Keys => (k, factors.keys(index)),
                    Side::Queries => (q, factors.queries(index)),
                };
                weigh(x, factors, &mut weighted[index * d..], stride);
            }
            let weighted = Mat::new(weighted, rows.len(), stride);
            let values = values.rows(place.sample, place.head, rows.clone(), &mut []);
            gemm(MatMut::new(state, stride, e), weighted.t(), values.mat(), 1.0, Threads::One);
        },
    );
    par::each_beside(
        [(&mut data, count * len)],
        || vec![0.0; len / directions],
        |carried, index, [data]| {
            for direction in 0..directions {
                let of = Walk {
                    len,
                    from: direction * d * e,
                    ascending: (direction == 0) == (side == Side::Keys),
                    width,
                    value_width: e,
                };
                let totals = &totals[index * count * totals_len..][..count * totals_len];
                of.scan(data, |chunk| &totals[chunk * totals_len + direction * width..][..width], carried);
            }
        },
    );
    Some(States { data, totals, len, totals_len, count, heads })
}

/// The way of one direction over the states of a head.
struct Walk {
    len: usize,
    from: usize,
    ascending: bool,
    width: usize,
    value_width: usize,
}

impl Walk {
    /// What a chunk adds becomes what was carried to it.
    fn scan<'a>(&self, data: &mut [f32], total: impl Fn(usize) -> &'a [f32], carried: &mut [f32]) {
        carried.fill(0.0);
        let count = data.len() / self.len;
        for step in 0..count {
            let chunk = if self.ascending { step } else { count - 1 - step };
            let state = &mut data[chunk * self.len + self.from..][..carried.len()];
            advance(total(chunk), self.width, self.value_width, state, carried);
        }
    }
}

crate::simd_fn! {
    /// (state, carried) becomes (carried, total carried + state); `total` is one number or one per row of `row` elements.
    fn advance<S>(
        simd, total: &'a [f32], width: usize, row: usize, state: &'a mut [f32], carried: &'a mut [f32],
    ) {
        let row = if width == 1 { state.len() } else { row };
        for ((state, carried), &total) in
            state.chunks_exact_mut(row).zip(carried.chunks_exact_mut(row)).zip(total)
        {
            let total = simd.splat_f32s(total);
            let (state, state_tail) = S::as_mut_simd_f32s(state);
            let (carried, carried_tail) = S::as_mut_simd_f32s(carried);
            for (state, carried) in state.iter_mut().zip(carried) {
                let before = *carried;
                *carried = flush(simd, simd.mul_add_e_f32s(total, before, *state));
                *state = before;
            }
            if !state_tail.is_empty() {
                let (added, before) = (simd.partial_load_f32s(state_tail), simd.partial_load_f32s(carried_tail));
                let after = flush(simd, simd.mul_add_e_f32s(total, before, added));
                simd.partial_store_f32s(carried_tail, after);
                simd.partial_store_f32s(state_tail, before);
            }
        }
    }
}
