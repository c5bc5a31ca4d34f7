//! Logits that are added by head, query and key (see [`Attend::bias`](crate::attend::Attend)).

use std::f32::consts::LOG2_E;

use super::lanes;
use super::operands::Target;
use crate::attend::dims::RowLayout;
use crate::attend::tile::{CHUNK, Chunk, TileView};

/// The operand: rows of queries, the same for all samples.
#[derive(Clone, Copy)]
pub struct Bias<'a> {
    /// The buffer.
    pub data: &'a [f32],
    /// Where its rows lie.
    pub place: RowLayout,
}

/// Position of the first key of a chunk, and the distance of two.
fn keys(view: &TileView, chunk: &Chunk) -> (usize, usize) {
    let stream = &view.streams[chunk.stream];
    (stream.start + chunk.first * stream.step, stream.step)
}

impl Bias<'_> {
    /// A chunk's biases in units of ln 2: one row per key, one lane per query.
    pub fn load(&self, head: usize, view: &TileView, chunk: &Chunk, to: &mut [f32]) {
        let (first, step) = keys(view, chunk);
        let width = chunk.width();
        let queries = &view.queries[chunk.lane..];
        for lane in (0..width).step_by(4) {
            // lanes behind the last query repeat it; no key is visible to them
            let query = |lane: usize| queries[lane.min(queries.len() - 1)];
            let starts = [0, 1, 2, 3].map(|next| self.place.at(0, head, query(lane + next)) + first);
            if step == 1 {
                lanes::transpose(self.data, starts, chunk.keys, LOG2_E, &mut to[lane..], width);
                continue;
            }
            for (number, to) in to.chunks_exact_mut(width).enumerate() {
                to[lane..lane + 4].copy_from_slice(&starts.map(|at| LOG2_E * self.data[at + number * step]));
            }
        }
    }
}

/// Adds `factor` times the gradients of a chunk's logits (one row per key, one lane per query) to those of the biases.
///
/// # Safety
/// No other thread reads or writes these queries' rows of `target`.
pub unsafe fn add(
    target: &Target,
    head: usize,
    view: &TileView,
    chunk: &Chunk,
    slopes: &[f32],
    factor: f32,
    room: &mut Vec<f32>,
) {
    let (first, step) = keys(view, chunk);
    let (width, reach) = (chunk.width(), (chunk.keys - 1) * step + 1);
    room.resize(CHUNK * width, 0.0);
    for key in (0..chunk.keys).step_by(4) {
        // keys behind the last repeat it; nobody reads what they leave
        let starts = [0, 1, 2, 3].map(|next| (key + next).min(chunk.keys - 1) * width);
        lanes::transpose(slopes, starts, width, factor, &mut room[key..], CHUNK);
    }
    let queries = &view.queries[chunk.lane..chunk.lane + chunk.lanes];
    for (row, &query) in room.chunks_exact(CHUNK).zip(queries) {
        // SAFETY: the caller's; the row ends with this turn of the loop.
        let to = unsafe { target.data.row(target.place.at(0, head, query) + first, reach) };
        if step == 1 {
            lanes::add_row(&row[..chunk.keys], to);
        } else {
            to.iter_mut().step_by(step).zip(row).for_each(|(to, slope)| *to += slope);
        }
    }
}
