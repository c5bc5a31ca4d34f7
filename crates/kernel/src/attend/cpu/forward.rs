//! The forward pass: online softmax over chunks of keys, tile by tile.

use super::lanes;
use super::operands::Shared;
use super::problem::{Problem, SIDE, padded};
use super::product::{ProductOut, Scalars, Vectors, from_line, from_row, pack_lines, pack_rows, product};
use super::relative::{Term, Terms};
use crate::attend::dims::RowLayout;
use crate::attend::tile::{Chunk, ROW, TileView};
use crate::attend::tile_plan::{TILE, Tile};
use crate::cpu::par;

/// Most logits that are computed before their softmax.
const LOGITS: usize = 64 * TILE;

/// Most keys whose values are packed at a time.
const KEYS: usize = 128;

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

/// Rows of the keys and values of some chunks, one behind another and padded to whole vectors.
pub struct Packed {
    /// Keys.
    pub keys: Vec<f32>,
    /// Values.
    pub values: Vec<f32>,
    /// Distance of two rows.
    row: usize,
    /// Rows of keys, lines of values, and for backward rows of values and lines of keys, where products read pairs.
    key_rows: Vec<u32>,
    value_lines: Vec<u32>,
    value_rows: Vec<u32>,
    key_lines: Vec<u32>,
    backward: bool,
    /// What is packed: first position, distance, number, whether these are slots.
    chunks: Vec<(usize, usize, usize, bool)>,
}

impl Packed {
    /// Space for `keys` keys, for the products of the forward or of both passes.
    pub fn new(keys: usize, width: usize, backward: bool) -> Self {
        let row = padded(width);
        let (buffer, empty) = (|| vec![0.0; keys * row], Vec::new);
        Self {
            keys: buffer(),
            values: buffer(),
            row,
            key_rows: empty(),
            value_lines: empty(),
            value_rows: empty(),
            key_lines: empty(),
            backward,
            chunks: Vec::new(),
        }
    }

    /// Keys from number `key` on, to be multiplied with lanes.
    pub fn key_scalars(&self, key: usize) -> Scalars<'_> {
        let start = key * self.row;
        Scalars { data: &self.keys[start..], row: self.row, step: 1, pairs: from_row(&self.key_rows, start) }
    }

    /// Values from number `key` on, to be multiplied with lanes.
    pub fn value_scalars(&self, key: usize) -> Scalars<'_> {
        let start = key * self.row;
        Scalars {
            data: &self.values[start..],
            row: self.row,
            step: 1,
            pairs: from_row(&self.value_rows, start),
        }
    }

    /// Values of the chunk that starts with number `key` and line `line`, to be weighed.
    fn value_vectors(&self, key: usize, line: usize) -> Vectors<'_> {
        let row = self.row;
        Vectors {
            data: &self.values[key * row..],
            row,
            pairs: from_line(&self.value_lines, (key, line), row),
        }
    }

    /// Keys of the only chunk, to be weighed.
    pub fn key_vectors(&self) -> Vectors<'_> {
        Vectors { data: &self.keys, row: self.row, pairs: &self.key_lines }
    }

    /// Whether just these chunks are packed.
    pub fn holds(&self, view: &TileView, chunks: &[Chunk]) -> bool {
        self.chunks.iter().copied().eq(chunks.iter().map(|chunk| identity(view, chunk)))
    }

    /// Forgets what is packed.
    pub fn clear(&mut self) {
        self.chunks.clear();
    }

    /// Packs chunks; hidden rows become zeros.
    pub fn load(&mut self, x: &Problem, at: (usize, usize), view: &TileView, chunks: &[Chunk]) {
        self.chunks.clear();
        self.value_lines.clear();
        self.key_lines.clear();
        let row = self.row;
        let mut start = 0;
        for chunk in chunks {
            let (position, step, count, slots) = identity(view, chunk);
            let (keys, values) = x.sides(slots);
            for (rows, to) in [(keys, &mut self.keys), (values, &mut self.values)] {
                let to = &mut to[start..start + count * row];
                rows.copy_every(at, (position, step), x.dims.width, to, row);
                if !x.hidden.is_empty() {
                    let to = to.chunks_exact_mut(row).enumerate();
                    to.filter(|(number, _)| x.is_hidden(at.0, slots, position + number * step))
                        .for_each(|(_, to)| to.fill(0.0));
                }
            }
            self.chunks.push((position, step, count, slots));
            let span = start..start + count * row;
            pack_lines(&self.values[span.clone()], row, &mut self.value_lines);
            if self.backward {
                pack_lines(&self.keys[span], row, &mut self.key_lines);
            }
            start += count * row;
        }
        pack_rows(&self.keys[..start], row, &mut self.key_rows);
        if self.backward {
            pack_rows(&self.values[..start], row, &mut self.value_rows);
        }
    }
}

/// What tells chunks of different tiles apart: first position, distance, number of keys, whether they are slots.
fn identity(view: &TileView, chunk: &Chunk) -> (usize, usize, usize, bool) {
    let stream = &view.streams[chunk.stream];
    (stream.start + chunk.first * stream.step, stream.step, chunk.keys, stream.slots)
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
    /// Outputs, not yet divided by `sum`.
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
            out: vec![0.0; TILE * padded(width)],
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

    /// Folds the chunks up to `end` into outputs, maxima and sums.
    fn advance(&mut self, x: &Problem, at: (usize, usize), end: usize, packed: &Packed, logits: &mut [f32]) {
        self.old = self.max;
        let width = padded(x.dims.width);
        let (mut area, mut key) = (0, 0);
        for chunk in &self.view.chunks[self.next..end] {
            let logits = &mut logits[area..area + chunk.keys * chunk.width()];
            self::logits(x, at, &self.view, chunk, packed.key_scalars(key), &mut self.terms, logits);
            lanes::raise_max(logits, &mut self.max[chunk.lane..chunk.lane + chunk.width()]);
            area += logits.len();
            key += chunk.keys;
        }
        self.rescale(x);
        let (mut area, mut key, mut line) = (0, 0, 0);
        for chunk in &self.view.chunks[self.next..end] {
            let logits = &mut logits[area..area + chunk.keys * chunk.width()];
            let span = chunk.lane..chunk.lane + chunk.width();
            lanes::weigh(logits, &self.old[span.clone()], &mut self.sum[span]);
            x.drop(&self.view, chunk, &self.rows, logits);
            let a = Scalars { data: logits, row: 1, step: chunk.width(), pairs: &[] };
            let values = packed.value_vectors(key, line);
            let out = ProductOut { data: &mut self.out[chunk.lane * width..], row: width, add: true };
            product(out, a, values, chunk.lanes, chunk.keys, width);
            area += logits.len();
            key += chunk.keys;
            line += chunk.keys.div_ceil(2);
        }
        self.next = end;
    }

    /// Brings outputs and sums to the new maxima; leaves in `old` what weights are relative to.
    fn rescale(&mut self, x: &Problem) {
        let base = self.max.map(|max| if max == f32::NEG_INFINITY { 0.0 } else { max });
        lanes::correct(&self.old, &base, &mut self.factor, &mut self.sum);
        let rows = self.out.chunks_exact_mut(padded(x.dims.width));
        for ((row, &factor), &old) in rows.zip(&self.factor).zip(&self.old) {
            if factor != 1.0 && old > f32::NEG_INFINITY {
                lanes::scale_row(factor, row);
            }
        }
        self.old = base;
    }
}

/// Working memory of one thread.
struct Scratch {
    tiles: Vec<Lanes>,
    packed: Packed,
    logits: Vec<f32>,
}

impl Scratch {
    fn new(width: usize) -> Self {
        let tiles = (0..SIDE).map(|_| Lanes::new(width)).collect();
        Self { tiles, packed: Packed::new(KEYS, width, false), logits: vec![0.0; LOGITS] }
    }

    /// Computes up to [`SIDE`] tiles of one head.
    fn attend(&mut self, x: &Problem, at: (usize, usize), tiles: &[Tile]) {
        let lanes = &mut self.tiles[..tiles.len()];
        for (lanes, tile) in lanes.iter_mut().zip(tiles) {
            lanes.read(x, at, tile);
        }
        self.packed.clear();
        while let Some(number) = next_tile(lanes.iter().map(|lanes| (&lanes.view, lanes.next))) {
            let lanes = &mut lanes[number];
            let end = lanes.batch();
            let chunks = &lanes.view.chunks[lanes.next..end];
            if !self.packed.holds(&lanes.view, chunks) {
                self.packed.load(x, at, &lanes.view, chunks);
            }
            lanes.advance(x, at, end, &self.packed, &mut self.logits);
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
        || Scratch::new(width),
        |scratch, _, (batch, head, tiles)| {
            scratch.attend(x, (batch, head), tiles);
            for lanes in &scratch.tiles[..tiles.len()] {
                for (lane, &query) in lanes.view.queries.iter().enumerate() {
                    let (max, sum) = (lanes.max[lane], lanes.sum[lane]);
                    let share = if sum > 0.0 { 1.0 / sum } else { 0.0 };
                    let from = &lanes.out[lane * padded(width)..][..width];
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
