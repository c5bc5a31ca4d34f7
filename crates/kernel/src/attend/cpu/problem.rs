//! What the forward and the backward pass read.

use super::bias::Bias;
use super::lanes;
use super::operands::Rows;
use crate::attend::dims::Dims;
use crate::attend::tile::WIDTH;
use crate::attend::tile::{Chunk, ROW, TileView};
use crate::attend::tile_plan::{Tile, TilePlan};
use crate::cpu::compact::Elements;
use crate::dropout::AttentionDropout;

/// Tiles that are computed side by side: chunks that several of them see are packed once.
pub const SIDE: usize = 8;

/// One row per distance.
#[derive(Clone, Copy)]
pub struct Table<'a> {
    /// [h, distances, d].
    pub data: &'a [f32],
    /// Number of distances.
    pub distances: usize,
}

/// All position-dependent operands.
#[derive(Clone, Copy)]
pub struct Tables<'a> {
    /// Distances of keys.
    pub keys: Table<'a>,
    /// u, [h, d].
    pub content_bias: &'a [f32],
    /// v, [h, d].
    pub position_bias: &'a [f32],
    /// Distances of slots, length of a segment, slots per segment.
    pub slots: Option<(Table<'a>, usize, usize)>,
}

impl<'a> Tables<'a> {
    /// The table of a stream.
    pub fn table(&self, slots: bool) -> Option<Table<'a>> {
        if slots { self.slots.map(|(table, ..)| table) } else { Some(self.keys) }
    }
}

/// What both passes read.
pub struct Problem<'a> {
    /// Who sees whom.
    pub plan: &'a TilePlan,
    /// Sizes.
    pub dims: Dims,
    /// Factor on every logit.
    pub scale: f32,
    /// Dropout of the weights.
    pub dropout: Option<AttentionDropout>,
    /// Queries.
    pub q: Rows<'a>,
    /// Keys.
    pub k: Rows<'a>,
    /// Values.
    pub v: Rows<'a>,
    /// Keys and values of the slots.
    pub slots: Option<(Rows<'a>, Rows<'a>)>,
    /// Hidden keys and slots of every sample, one after another; empty if none is hidden.
    pub hidden: &'a [bool],
    /// Position-dependent logits.
    pub relative: Option<Tables<'a>>,
    /// What is added to logits.
    pub bias: Option<Bias<'a>>,
}

impl<'a> Problem<'a> {
    /// Keys and values of a stream.
    pub fn sides(&self, slots: bool) -> (Rows<'a>, Rows<'a>) {
        match self.slots {
            Some(rows) if slots => rows,
            _ => (self.k, self.v),
        }
    }

    /// Whether a key (or a slot) is hidden from every query of sample `batch`.
    pub fn is_hidden(&self, batch: usize, slots: bool, position: usize) -> bool {
        let Dims { keys, slots: count, .. } = self.dims;
        let at = batch * (keys + count) + if slots { keys } else { 0 } + position;
        self.hidden.get(at).copied().unwrap_or(false)
    }

    /// Reads a tile of one sample and head, without the chunks whose keys are all hidden there (padding).
    pub fn read(&self, (batch, head): (usize, usize), tile: &Tile, view: &mut TileView) {
        view.read(self.plan, head, tile);
        if self.hidden.is_empty() {
            return;
        }
        let TileView { streams, chunks, .. } = view;
        chunks.retain(|chunk| {
            let stream = &streams[chunk.stream];
            let position = |number: usize| stream.start + number * stream.step;
            let mut keys = chunk.first..chunk.first + chunk.keys;
            keys.any(|number| !self.is_hidden(batch, stream.slots, position(number)))
        });
    }

    /// What tells the rows of a tile's queries apart where weights are dropped, by lane; nothing elsewhere.
    pub fn dropout_rows(&self, (batch, head): (usize, usize), view: &TileView, to: &mut Vec<u32>) {
        let Some(dropout) = self.dropout else { return };
        let first = (batch * self.dims.heads + head) * self.dims.queries;
        to.clear();
        to.extend(view.queries.iter().map(|query| dropout.row(first + query)));
        to.resize(ROW, 0);
    }

    /// Drops weights of a chunk, or what they are multiplied by; `rows` as [`Self::dropout_rows`] says.
    pub fn drop(&self, view: &TileView, chunk: &Chunk, rows: &[u32], weights: &mut [f32]) {
        let Some(dropout) = self.dropout else { return };
        let stream = &view.streams[chunk.stream];
        let first = stream.start + chunk.first * stream.step + if stream.slots { self.dims.keys } else { 0 };
        lanes::drop(weights, &rows[chunk.lane..chunk.lane + chunk.width()], first, stream.step, dropout);
    }

    /// All tiles, those that are computed side by side together: sample, head, tiles. Fewer than [`SIDE`] where
    /// some threads would have nothing to do.
    pub fn tiles(&self) -> Vec<(usize, usize, &'a [Tile])> {
        let plan = self.plan;
        let heads = || (0..self.dims.batch).flat_map(|b| (0..self.dims.heads).map(move |h| (b, h)));
        let all: usize = heads().map(|(_, h)| plan.head(h).tiles.len()).sum();
        let side = all.div_ceil(4 * rayon::current_num_threads()).clamp(1, SIDE);
        heads().flat_map(|(b, h)| plan.head(h).tiles.chunks(side).map(move |tiles| (b, h, tiles))).collect()
    }
}

/// Rounds the width of a head up to whole vectors.
pub fn padded(width: usize) -> usize {
    width.next_multiple_of(WIDTH)
}

/// The tile's rows, transposed and scaled: one row of lanes per element.
pub fn load_lanes(
    x: &Problem,
    rows: &Rows,
    (batch, head): (usize, usize),
    view: &TileView,
    factor: f32,
    to: &mut Vec<f32>,
) {
    let width = x.dims.width;
    to.clear();
    to.resize(width * ROW, 0.0);
    let mut room = vec![0.0; rows.data.room(4 * width)];
    for (block, queries) in view.queries.chunks(4).enumerate() {
        // lanes behind the last query repeat it; no key is visible to them
        let query = |lane: usize| queries[lane.min(queries.len() - 1)];
        let to = &mut to[4 * block..];
        match rows.data {
            Elements::F32(data) => {
                let starts = [0, 1, 2, 3].map(|lane| rows.place.at(batch, head, query(lane)));
                lanes::transpose(data, starts, width, factor, to, ROW);
            }
            Elements::Bf16(_) => {
                let all = room.chunks_exact_mut(width).enumerate();
                all.for_each(|(lane, row)| rows.copy(batch, head, query(lane), row));
                lanes::transpose(&room, [0, 1, 2, 3].map(|lane| lane * width), width, factor, to, ROW);
            }
        }
    }
}
