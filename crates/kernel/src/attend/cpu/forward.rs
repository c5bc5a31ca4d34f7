//! The forward pass: online softmax over chunks of keys, tile by tile.

use super::lanes;
use super::operands::Shared;
use super::packed::{Packed, identity};
use super::problem::{Problem, SIDE};
use super::product::{ProductOut, Scalars, Vectors, product};
use super::relative::{Term, Terms};
use crate::attend::dims::RowLayout;
use crate::attend::tile::{Chunk, ROW, TileView};
use crate::attend::tile_plan::{TILE, Tile};
use crate::cpu::par;
use crate::cpu::transpose::transpose;

/// Most logits that are computed before their softmax.
const LOGITS: usize = 64 * TILE;

/// Most keys that are computed before the next softmax, unless they are one chunk.
const KEYS: usize = 128;

/// Most keys that are packed at a time: a tile goes through all of them while its queries and outputs are in the first-level cache.
const PACKED: usize = 256;

/// Logits of a chunk in units of ln 2, minus infinity where a key is not seen. `keys` are its packed keys.
pub fn logits(
    x: &Problem,
    (batch, head): (usize, usize),
    view: &TileView,
    chunk: &Chunk,
    keys: Scalars,
    terms: &mut Terms,
    to: &mut [f32],
) {
    let stream = &view.streams[chunk.stream];
    let position = |number: usize| stream.start + (chunk.first + number) * stream.step;
    let width = chunk.width();
    let queries = terms.content(stream.slots, chunk.lane);
    let bias = x.bias.filter(|_| !stream.slots);
    if let Some(bias) = bias {
        bias.load(head, view, chunk, to);
    }
    let result = ProductOut { data: &mut *to, row: width, add: bias.is_some() };
    product(result, keys, queries, chunk.keys, x.dims.width, width);
    if let Some(tables) = &x.relative
        && let Some(term) = Term::new(x, tables, view, chunk)
    {
        terms.add(x, head, &term, chunk, to);
    }
    let span = chunk.lane..chunk.lane + width;
    if chunk.partial {
        lanes::hide(to, chunk.first as f32, &stream.low[span.clone()], &stream.high[span]);
    }
    if let Some(skip) = stream.skip {
        for (number, row) in to.chunks_exact_mut(width).enumerate() {
            for (logit, query) in row.iter_mut().zip(&view.queries[chunk.lane..]) {
                if position(number).abs_diff(x.plan.offset + query).is_multiple_of(skip) {
                    *logit = f32::NEG_INFINITY;
                }
            }
        }
    }
    if !x.hidden.is_empty() {
        for (number, row) in to.chunks_exact_mut(width).enumerate() {
            if x.is_hidden(batch, stream.slots, position(number)) {
                row.fill(f32::NEG_INFINITY);
            }
        }
    }
}

/// Of several tiles the one whose next chunk comes first, by stream and position.
pub fn next_tile<'a>(tiles: impl Iterator<Item = (&'a TileView, usize)>) -> Option<usize> {
    let order = |(number, (view, at)): (usize, (&TileView, usize))| {
        let chunk = view.chunks.get(at)?;
        let (position, step, keys, slots) = identity(view, chunk);
        Some((chunk.stream, position, keys, step, slots, number))
    };
    tiles.enumerate().filter_map(order).min().map(|(.., number)| number)
}

/// One of the tiles that are computed side by side.
struct Lanes {
    view: TileView,
    terms: Terms,
    /// Next chunk.
    next: usize,
    /// What tells the rows of weights apart, where some are dropped.
    rows: Vec<u32>,
    /// Outputs, not yet divided by `sum`: a row of lanes per element.
    out: Vec<f32>,
    /// Largest logits so far, and what they were before the last chunks.
    max: [f32; ROW],
    old: [f32; ROW],
    sum: [f32; ROW],
    factor: [f32; ROW],
}

impl Lanes {
    fn new(width: usize) -> Self {
        Self {
            view: TileView::default(),
            terms: Terms::default(),
            next: 0,
            rows: Vec::new(),
            out: vec![0.0; width * ROW],
            max: [0.0; ROW],
            old: [0.0; ROW],
            sum: [0.0; ROW],
            factor: [0.0; ROW],
        }
    }

    fn read(&mut self, x: &Problem, at: (usize, usize), tile: &Tile) {
        x.read(at, tile, &mut self.view);
        self.terms.load(x, at, &self.view);
        x.dropout_rows(at, &self.view, &mut self.rows);
        self.next = 0;
        self.out.fill(0.0);
        self.sum.fill(0.0);
        self.max.fill(f32::NEG_INFINITY);
    }

    /// The end of the next chunks that are computed together.
    fn batch(&self) -> usize {
        let (mut end, mut logits, mut keys) = (self.next, 0, 0);
        while let Some(chunk) = self.view.chunks.get(end) {
            logits += chunk.keys * chunk.width();
            keys += chunk.keys;
            if end > self.next && (logits > LOGITS || keys > KEYS) {
                break;
            }
            end += 1;
        }
        end
    }

    /// The end of the next chunks that are packed together: of this batch, and of what else there is room for.
    fn group(&self, room: usize) -> usize {
        let mut keys = 0;
        let fits = |chunk: &Chunk| {
            keys += chunk.keys;
            keys <= room
        };
        let count = self.view.chunks[self.next..].iter().map(fits).take_while(|&fits| fits).count();
        self.batch().max(self.next + count)
    }

    /// Folds the chunks up to `end`, the first of which is packed chunk `first`, into outputs, maxima and sums.
    fn advance(
        &mut self,
        x: &Problem,
        at: (usize, usize),
        end: usize,
        (packed, first): (&Packed, usize),
        logits: &mut [f32],
    ) {
        self.old = self.max;
        let mut area = 0;
        for (chunk, number) in self.view.chunks[self.next..end].iter().zip(first..) {
            let logits = &mut logits[area..area + chunk.keys * chunk.width()];
            self::logits(x, at, &self.view, chunk, packed.key_scalars(number), &mut self.terms, logits);
            lanes::raise_max(logits, &mut self.max[chunk.lane..chunk.lane + chunk.width()]);
            area += logits.len();
        }
        self.rescale();
        let mut area = 0;
        for (chunk, number) in self.view.chunks[self.next..end].iter().zip(first..) {
            let logits = &mut logits[area..area + chunk.keys * chunk.width()];
            let span = chunk.lane..chunk.lane + chunk.width();
            lanes::weigh(logits, &self.old[span.clone()], &mut self.sum[span]);
            x.drop(&self.view, chunk, &self.rows, logits);
            let weights = Vectors { data: logits, row: chunk.width(), pairs: &[] };
            let out = ProductOut { data: &mut self.out[chunk.lane..], row: ROW, add: true };
            product(out, packed.value_columns(number), weights, x.dims.width, chunk.keys, chunk.width());
            area += logits.len();
        }
        self.next = end;
    }

    /// Brings outputs and sums to the new maxima; leaves in `old` what weights are relative to.
    fn rescale(&mut self) {
        let base = self.max.map(|max| if max == f32::NEG_INFINITY { 0.0 } else { max });
        lanes::correct(&self.old, &base, &mut self.factor, &mut self.sum);
        if self.factor.iter().any(|&factor| factor != 1.0) {
            lanes::scale_lanes(&self.factor, &mut self.out);
        }
        self.old = base;
    }
}

/// Working memory of one thread.
struct Scratch {
    tiles: Vec<Lanes>,
    packed: Packed,
    logits: Vec<f32>,
    /// Outputs of a tile, a row per lane.
    rows: Vec<f32>,
}

impl Scratch {
    fn new(x: &Problem) -> Self {
        let width = x.dims.width;
        let keys = (x.dims.keys + x.dims.slots).clamp(KEYS, PACKED);
        Self {
            tiles: (0..SIDE).map(|_| Lanes::new(width)).collect(),
            packed: Packed::new(keys, width, false),
            logits: vec![0.0; LOGITS],
            rows: vec![0.0; ROW * width],
        }
    }

    /// Computes up to [`SIDE`] tiles of one head.
    fn attend(&mut self, x: &Problem, at: (usize, usize), tiles: &[Tile]) {
        let lanes = &mut self.tiles[..tiles.len()];
        for (lanes, tile) in lanes.iter_mut().zip(tiles) {
            lanes.read(x, at, tile);
        }
        self.packed.clear();
        // of tiles that are equally far the last one goes on: where queries see what is before them it sees most of what follows
        while let Some(number) = next_tile(lanes.iter().rev().map(|lanes| (&lanes.view, lanes.next))) {
            let lanes = lanes.iter_mut().rev().nth(number).expect("a tile of these");
            let mut end = lanes.batch();
            let mut packed = self.packed.find(&lanes.view, &lanes.view.chunks[lanes.next..end]);
            if packed.is_none() {
                let group = lanes.next..lanes.group(self.packed.room());
                self.packed.load(x, at, &lanes.view, &lanes.view.chunks[group]);
                packed = Some(0);
            }
            while let Some(first) = packed {
                lanes.advance(x, at, end, (&self.packed, first), &mut self.logits);
                end = lanes.batch();
                packed = self.packed.find(&lanes.view, &lanes.view.chunks[lanes.next..end]);
            }
        }
    }
}

/// The output rows (to `out`, merged heads) and, where `stats` is given, every query's largest logit (in units of
/// ln 2) and the reciprocal of its sum of weights (0 for a query that sees nothing), [b, h, n, 2].
pub fn forward(x: &Problem, out: &mut [f32], place: RowLayout, stats: Option<&mut [f32]>) {
    let out = Shared::new(out);
    let mut none = [];
    let save = stats.is_some();
    let stats = Shared::new(stats.unwrap_or(&mut none));
    let width = x.dims.width;
    par::each_piece_with(
        x.tiles().into_iter(),
        || Scratch::new(x),
        |scratch, _, (batch, head, tiles)| {
            scratch.attend(x, (batch, head), tiles);
            for lanes in &scratch.tiles[..tiles.len()] {
                transpose(&lanes.out, width, ROW, &mut scratch.rows);
                for (lane, &query) in lanes.view.queries.iter().enumerate() {
                    let (max, sum) = (lanes.max[lane], lanes.sum[lane]);
                    let share = if sum > 0.0 { 1.0 / sum } else { 0.0 };
                    let from = &scratch.rows[lane * width..][..width];
                    // SAFETY: the plan has every query in at most one tile of a head, and rows of different queries,
                    // heads and samples do not overlap.
                    unsafe {
                        lanes::scaled_row(share, from, out.row(place.at(batch, head, query), width));
                        if save {
                            let row = (batch * x.dims.heads + head) * x.dims.queries + query;
                            stats.row(2 * row, 2).copy_from_slice(&[max, share]);
                        }
                    }
                }
            }
        },
    );
}
