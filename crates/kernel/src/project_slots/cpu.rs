//! The fused CPU kernel of a dynamic projection, forward and backward.
//!
//! Positions are taken in tiles that fit the cache. A tile's logits are one product; the softmax over positions
//! is folded tile by tile (running maximum, sum and weighted rows), so the weights are never stored.
//! The backward pass computes them again from the maxima and sums that the forward pass leaves behind.

use std::ops::Range;
use std::sync::OnceLock;

use candle_core::{CpuStorage, Layout, Result, Shape, Tensor, bail};

use crate::cpu;
use crate::cpu::compact::{self, Elements};
use crate::cpu::gemm::{Mat, MatMut, Threads, gemm, gemm_add};
use crate::cpu::jobs::{build_jobs, jobs_onto};
use crate::cpu::par::zeros;
use crate::op::{self, FusedOp, SavedOutput};

use super::geometry::{Geometry, TILE};
use super::weights::{Columns, fold_weights, logit_grads, weights_again};

/// Dynamic projection; `stats` is what the forward pass leaves for the backward pass: per sample, segment
/// and slot the maximum of the logits and the reciprocal of the sum of exponentials.
pub struct Project {
    /// Sizes.
    pub geometry: Geometry,
    /// [b * t], 0 where a position is hidden.
    pub mask: Option<Vec<f32>>,
    /// Left by the forward pass.
    pub stats: OnceLock<Vec<[f32; 2]>>,
}

/// Operands of one call as slices.
#[derive(Clone, Copy)]
struct Operands<'a> {
    rows: Elements<'a>,
    x: Elements<'a>,
    /// [heads * rank, width]; the bias behind it cancels in the softmax.
    weight: &'a [f32],
}

/// Scratch of one worker.
#[derive(Default)]
struct Scratch {
    rows: Vec<f32>,
    x: Vec<f32>,
    logits: Vec<f32>,
    grads: Vec<f32>,
}

/// One tile: its operands (zeros at hidden positions) and logits [slots, len].
struct Tile<'a> {
    len: usize,
    rows: &'a [f32],
    x: &'a [f32],
    logits: &'a mut [f32],
    grads: &'a mut Vec<f32>,
}

/// The elements `range` of `data` with zeros where `mask` is 0, copied only if something is hidden or they wait.
fn clean<'a>(
    data: Elements<'a>,
    range: Range<usize>,
    width: usize,
    mask: Option<&[f32]>,
    scratch: &'a mut Vec<f32>,
) -> &'a [f32] {
    let count = range.len();
    let Some(mask) = mask.filter(|mask| mask.contains(&0.0)) else {
        scratch.resize(data.room(count), 0.0);
        return data.read(range, scratch);
    };
    scratch.resize(count, 0.0);
    data.copy_rows((range.start, count), count, scratch, count);
    for (row, _) in scratch.chunks_exact_mut(width).zip(mask).filter(|(_, keep)| **keep == 0.0) {
        row.fill(0.0);
    }
    scratch
}

impl Project {
    /// The tile of `positions`; `None` if all of it is hidden.
    fn tile<'a>(
        &self,
        data: Operands<'a>,
        sample: usize,
        positions: &Range<usize>,
        scratch: &'a mut Scratch,
    ) -> Option<Tile<'a>> {
        let Geometry { len: total, row, width, .. } = self.geometry;
        let (len, first) = (positions.len(), sample * total + positions.start);
        let mask = self.mask.as_ref().map(|mask| &mask[first..first + len]);
        if mask.is_some_and(|mask| mask.iter().all(|&keep| keep == 0.0)) {
            return None;
        }
        let Scratch { rows, x, logits, grads } = scratch;
        let rows = clean(data.rows, first * row..(first + len) * row, row, mask, rows);
        let x = clean(data.x, first * width..(first + len) * width, width, mask, x);
        let slots = self.geometry.slots();
        logits.resize(slots * TILE, 0.0);
        let logits = &mut logits[..slots * len];
        let weight = Mat::new(data.weight, slots, width);
        gemm(MatMut::new(logits, slots, len), weight, Mat::new(x, len, width).t(), 1.0, Threads::One);
        for at in mask.into_iter().flat_map(|mask| (0..len).filter(|&at| mask[at] == 0.0)) {
            logits[at..].iter_mut().step_by(len).for_each(|logit| *logit = f32::NEG_INFINITY);
        }
        Some(Tile { len, rows, x, logits, grads })
    }

    fn project(&self, data: Operands) -> (Vec<f32>, Vec<[f32; 2]>) {
        let g = &self.geometry;
        let jobs = g.jobs();
        let lens: Vec<usize> = jobs.iter().map(|job| job.segments.len() * g.state()).collect();
        let [states] = build_jobs([&lens], Scratch::default, |scratch, index, [states]| {
            let job = &jobs[index];
            for state in states.chunks_exact_mut(g.state()) {
                state[..g.slots()].fill(f32::NEG_INFINITY);
            }
            for positions in job.tiles() {
                let Some(tile) = self.tile(data, job.sample, &positions, scratch) else { continue };
                for (segment, columns) in g.pieces(&positions) {
                    let state = &mut states[(segment - job.segments.start) * g.state()..][..g.state()];
                    self.fold(&tile.rows[columns.start * g.row..], tile.logits, tile.len, columns, state);
                }
            }
        });
        self.finish(&jobs, &lens, &states)
    }

    /// Adds the positions of `columns` to the state of their segment; their logits become weights.
    fn fold(
        &self,
        rows: &[f32],
        logits: &mut [f32],
        stride: usize,
        columns: Range<usize>,
        state: &mut [f32],
    ) {
        let g = &self.geometry;
        let (max, rest) = state.split_at_mut(g.slots());
        let (sum, sums) = rest.split_at_mut(g.slots());
        let (width, len) = (g.slot_width(), columns.len());
        fold_weights(logits, Columns { stride, first: columns.start, len }, max, sum, sums, width);
        for head in 0..g.heads {
            let weights =
                Mat::strided(&logits[head * g.rank * stride + columns.start..], g.rank, len, stride);
            for (part, &start) in g.parts.iter().enumerate() {
                let out = &mut sums[head * g.rank * width + part * g.head_dim..];
                let out = MatMut::strided(out, g.rank, g.head_dim, width);
                let values = Mat::strided(&rows[start + head * g.head_dim..], len, g.head_dim, g.row);
                gemm_add(out, weights, values, 1.0, 1.0, Threads::One);
            }
        }
    }

    /// Joins what jobs know of the same segment, in order, and divides by the sums.
    fn finish(
        &self,
        jobs: &[super::geometry::Job],
        lens: &[usize],
        states: &[f32],
    ) -> (Vec<f32>, Vec<[f32; 2]>) {
        let g = &self.geometry;
        let (slots, width, out_width) = (g.slots(), g.slot_width(), g.out_width());
        let mut out = vec![0.0; g.batch * g.segments() * g.rank * out_width];
        let mut stats = vec![[f32::NEG_INFINITY, 0.0]; g.batch * g.segments() * slots];
        let pieces = || {
            let mut at = 0;
            jobs.iter().zip(lens).flat_map(move |(job, &len)| {
                let states = &states[at..at + len];
                at += len;
                let first = job.sample * g.segments() + job.segments.start;
                states.chunks_exact(g.state()).enumerate().map(move |(i, state)| (first + i, state))
            })
        };
        for (segment, state) in pieces() {
            for (stat, &max) in stats[segment * slots..][..slots].iter_mut().zip(state) {
                stat[0] = stat[0].max(max);
            }
        }
        for (segment, state) in pieces() {
            for slot in 0..slots {
                let stat = &mut stats[segment * slots + slot];
                let factor =
                    if state[slot] == f32::NEG_INFINITY { 0.0 } else { (state[slot] - stat[0]).exp() };
                stat[1] += factor * state[slots + slot];
                let sums = &state[2 * slots + slot * width..][..width];
                for (part, sums) in sums.chunks_exact(g.head_dim).enumerate() {
                    let at = g.out_at(segment, slot, part);
                    let out = &mut out[at..at + g.head_dim];
                    out.iter_mut().zip(sums).for_each(|(out, sum)| *out += factor * sum);
                }
            }
        }
        for (index, stat) in stats.iter_mut().enumerate() {
            stat[1] = if stat[1] > 0.0 { 1.0 / stat[1] } else { 0.0 };
            for part in 0..g.parts.len() {
                let at = g.out_at(index / slots, index % slots, part);
                out[at..at + g.head_dim].iter_mut().for_each(|out| *out *= stat[1]);
            }
        }
        (out, stats)
    }

    /// Gradients of rows (added to `before` if that is not empty), layer input and weight.
    fn gradients(
        &self,
        data: Operands,
        stats: &[[f32; 2]],
        (out, grad): (&[f32], &[f32]),
        before: Vec<f32>,
    ) -> [Vec<f32>; 3] {
        let g = &self.geometry;
        let jobs = g.jobs();
        let params = g.slots() * g.width;
        let lens = |width: usize| jobs.iter().map(|job| job.positions.len() * width).collect::<Vec<_>>();
        let (row_lens, x_lens, param_lens) = (lens(g.row), lens(g.width), vec![params; jobs.len()]);
        let slots = Slots { stats, deltas: &self.deltas(out, grad), grad };
        let [drows, dx, partial] = jobs_onto(
            [before, Vec::new(), Vec::new()],
            [&row_lens, &x_lens, &param_lens],
            Scratch::default,
            |scratch, index, [rows, x, dw]| {
                let job = &jobs[index];
                for positions in job.tiles() {
                    let Some(tile) = self.tile(data, job.sample, &positions, scratch) else { continue };
                    let at = positions.start - job.positions.start;
                    let rows = &mut rows[at * g.row..][..tile.len * g.row];
                    let x = &mut x[at * g.width..][..tile.len * g.width];
                    self.tile_backward(tile, &slots, job.sample, &positions, data.weight, [rows, x, dw]);
                }
            },
        );
        let mut dweight = zeros(params);
        for partial in partial.chunks_exact(params) {
            dweight.iter_mut().zip(partial).for_each(|(total, part)| *total += part);
        }
        [drows, dx, dweight]
    }

    /// Per sample, segment and slot: sum over positions of weight times its gradient, which is the product of
    /// the slot and its gradient.
    fn deltas(&self, out: &[f32], grad: &[f32]) -> Vec<f32> {
        let g = &self.geometry;
        let products = (0..g.batch * g.segments() * g.slots()).map(|index| {
            let part = |part: usize| {
                let at = g.out_at(index / g.slots(), index % g.slots(), part);
                let pairs = out[at..at + g.head_dim].iter().zip(&grad[at..at + g.head_dim]);
                pairs.map(|(out, grad)| out * grad).sum::<f32>()
            };
            (0..g.parts.len()).map(part).sum()
        });
        products.collect()
    }

    fn tile_backward(
        &self,
        tile: Tile,
        slots: &Slots,
        sample: usize,
        positions: &Range<usize>,
        weight: &[f32],
        [drows, dx, dweight]: [&mut [f32]; 3],
    ) {
        let g = &self.geometry;
        let Tile { len, rows, x, logits, grads } = tile;
        grads.resize(g.slots() * TILE, 0.0);
        let grads = &mut grads[..g.slots() * len];
        for (segment, columns) in g.pieces(positions) {
            let segment = sample * g.segments() + segment;
            let stats = &slots.stats[segment * g.slots()..][..g.slots()];
            let deltas = &slots.deltas[segment * g.slots()..][..g.slots()];
            let count = columns.len();
            let here = Columns { stride: len, first: columns.start, len: count };
            weights_again(logits, here, stats);
            for head in 0..g.heads {
                let at = head * g.rank * len + columns.start;
                for (part, &start) in g.parts.iter().enumerate() {
                    let grad = &slots.grad[g.out_at(segment, head * g.rank, part)..];
                    let grad = Mat::strided(grad, g.rank, g.head_dim, g.out_width());
                    let first = columns.start * g.row + start + head * g.head_dim;
                    let values = Mat::strided(&rows[first..], count, g.head_dim, g.row);
                    let dweights = MatMut::strided(&mut grads[at..], g.rank, count, len);
                    gemm_add(
                        dweights,
                        grad,
                        values.t(),
                        1.0,
                        if part == 0 { 0.0 } else { 1.0 },
                        Threads::One,
                    );
                    let weights = Mat::strided(&logits[at..], g.rank, count, len);
                    let dvalues = MatMut::strided(&mut drows[first..], count, g.head_dim, g.row);
                    gemm_add(dvalues, weights.t(), grad, 1.0, 1.0, Threads::One);
                }
            }
            logit_grads(logits, grads, here, stats, deltas);
        }
        let grads = Mat::new(grads, g.slots(), len);
        let weight = Mat::new(weight, g.slots(), g.width);
        gemm(MatMut::new(dx, len, g.width), grads.t(), weight, 1.0, Threads::One);
        let dweight = MatMut::new(dweight, g.slots(), g.width);
        gemm_add(dweight, grads, Mat::new(x, len, g.width), 1.0, 1.0, Threads::One);
    }
}

/// What the backward pass knows of all slots.
struct Slots<'a> {
    stats: &'a [[f32; 2]],
    deltas: &'a [f32],
    grad: &'a [f32],
}

impl FusedOp for Project {
    fn name(&self) -> &'static str {
        "project-slots"
    }

    fn forward(&self, operands: &[(&CpuStorage, &Layout)]) -> Result<(Vec<f32>, Shape)> {
        let [rows, x, weight] = cpu::slices(operands)?;
        let (rows, x) = (Elements::F32(rows), Elements::F32(x));
        let (out, stats) = self.project(Operands { rows, x, weight });
        let _ = self.stats.set(stats); // the first run's stay: they are the same
        let g = &self.geometry;
        Ok((out, (g.batch, g.segments() * g.rank, g.out_width()).into()))
    }

    fn needs_output(&self) -> bool {
        true
    }

    /// Rows, whose gradient attention has begun.
    fn accumulates_into(&self) -> &'static [usize] {
        &[0]
    }

    fn backward_accumulate(
        &self,
        operands: &[&Tensor],
        out: SavedOutput,
        grad: &Tensor,
        held: Vec<Vec<f32>>,
    ) -> Result<Vec<Option<Tensor>>> {
        let Some(stats) = self.stats.get() else {
            bail!("the projection's backward pass runs before its forward pass")
        };
        let ([rows, x, flat], out) = (op::operands(operands)?, op::result(out)?);
        let [before] = op::held(held);
        let [drows, dx, mut dflat] =
            compact::with_elements([rows, x], [flat, out, grad], |[rows, x], [weight, out, grad]| {
                Ok(self.gradients(Operands { rows, x, weight }, stats, (out, grad), before))
            })?;
        dflat.resize(flat.elem_count(), 0.0); // the bias cancels in the softmax: exactly zero
        Ok(vec![cpu::gradient(rows, drows)?, cpu::gradient(x, dx)?, cpu::gradient(flat, dflat)?])
    }
}
