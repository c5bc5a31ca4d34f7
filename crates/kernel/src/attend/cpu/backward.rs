//! The backward pass: probabilities are computed again, tile by tile, from the saved maxima and sums.
//!
//! With p the probabilities and o the output, `dv_j = sum_i p_ij do_i`, `ds_ij = scale p_ij (v_j . do_i - o_i . do_i)`,
//! `dq_i = sum_j ds_ij k_j` and `dk_j = sum_i ds_ij q_i`. Under dropout the factors m_ij multiply p_ij in the first sum
//! and v_j . do_i in the second. Every element is summed in an order that follows from the
//! pattern: over queries by tile, over keys by chunk. So it does not matter whether a thread computes all of a head
//! or (where there are fewer heads than threads) first some queries and then some keys.

use std::ops::Range;

use super::bias;
use super::forward::{logits, next_tile};
use super::lanes;
use super::operands::{Rows, Target};
use super::packed::Packed;
use super::problem::{Problem, SIDE, load_lanes, padded};
use super::product::{ProductOut, Scalars, Vectors, from, from_line, pack_lines, product};
use super::relative::{TableGrads, Term, Terms};
use crate::attend::tile::{CHUNK, Chunk, KeyStream, ROW, TileView};
use crate::attend::tile_plan::{TILE, Tile};
use crate::cpu::par;

/// What the backward pass reads besides the operands.
pub struct BackwardInputs<'a> {
    /// Output, merged heads.
    pub out: Rows<'a>,
    /// Its gradient.
    pub grad: Rows<'a>,
    /// Largest logit and reciprocal sum of every query, [b, h, n, 2].
    pub stats: &'a [f32],
}

/// Where gradients are added to.
pub struct Grads<'a> {
    /// Queries.
    pub q: Target<'a>,
    /// Keys.
    pub k: Target<'a>,
    /// Values.
    pub v: Target<'a>,
    /// Keys and values of the slots.
    pub slots: Option<(Target<'a>, Target<'a>)>,
    /// What is added to logits.
    pub bias: Option<Target<'a>>,
}

/// Adds to `grads`; returns the gradients of the position-dependent operands of every sample and head, in order.
pub fn backward(x: &Problem, given: &BackwardInputs, grads: &Grads) -> Vec<TableGrads> {
    let heads = x.dims.batch * x.dims.heads;
    let at = |index: usize| (index / x.dims.heads, index % x.dims.heads);
    // Samples add to the same biases, so one thread computes a head of all of them.
    let together = if x.bias.is_some() { x.dims.batch } else { 1 };
    let shares = heads / together.max(1);
    let samples = |share: usize| (0..together).map(move |sample| sample * x.dims.heads + share);
    let scratch = || Scratch::new(x);
    let all = 0..x.dims.keys + x.dims.slots;
    let threads = rayon::current_num_threads();
    // Shares of whole heads idle some threads at the end; computing logits twice costs 40 % more.
    let rounds = shares.div_ceil(threads);
    if x.relative.is_some() || 7 * shares >= 5 * rounds * threads {
        let share = |share: usize| {
            let mut scratch = scratch();
            for index in samples(share) {
                for tiles in x.plan.head(at(index).1).tiles.chunks(SIDE) {
                    scratch.run(x, given, at(index), tiles, grads, true, all.clone());
                }
            }
            scratch.tables
        };
        let tables = par::map_pieces(0..shares, |_, index| share(index));
        return tables.into_iter().flatten().collect();
    }
    let pieces = x.tiles().into_iter().filter(|(batch, ..)| together == 1 || *batch == 0);
    par::each_piece_with(pieces, scratch, |scratch, _, (batch, head, tiles)| {
        for sample in 0..together {
            scratch.run(x, given, (batch + sample, head), tiles, grads, true, 0..0);
        }
    });
    let share = all.end.div_ceil(4 * threads).max(CHUNK);
    let pieces = (0..heads).flat_map(|index| all.clone().step_by(share).map(move |start| (index, start)));
    par::each_piece_with(pieces, scratch, |scratch, _, (index, start)| {
        let range = start..(start + share).min(all.end);
        for tiles in x.plan.head(at(index).1).tiles.chunks(SIDE) {
            scratch.run(x, given, at(index), tiles, grads, false, range.clone());
        }
    });
    Vec::new()
}

/// Rows of a tile, padded to whole vectors; lines of pairs where products read them and [`Padded::pack`] was called.
#[derive(Default)]
struct Padded(Vec<f32>, Vec<u32>);

impl Padded {
    fn load(&mut self, x: &Problem, rows: &Rows, at: (usize, usize), view: &TileView) {
        let width = padded(x.dims.width);
        self.0.clear();
        self.0.resize(TILE * width, 0.0);
        for (to, &query) in self.0.chunks_exact_mut(width).zip(&view.queries) {
            rows.copy(at.0, at.1, query, &mut to[..x.dims.width]);
        }
    }

    fn add(&mut self, from: &Self, bias: &[f32], width: usize) {
        self.0.clone_from(&from.0);
        for row in self.0.chunks_exact_mut(padded(width)) {
            lanes::add_row(&bias[..width], &mut row[..width]);
        }
    }

    /// Packs the rows for [`Self::vectors`].
    fn pack(&mut self, row: usize) {
        self.1.clear();
        pack_lines(&self.0, row, &mut self.1);
    }

    /// Rows from `first` on, to be weighed; rows are packed in twos from the first.
    fn vectors(&self, first: usize, row: usize) -> Vectors<'_> {
        let pairs = if first.is_multiple_of(2) { from_line(&self.1, (first, first / 2), row) } else { &[] };
        Vectors { data: &self.0[first * row..], row, pairs }
    }

    fn zeros(&mut self, len: usize) {
        self.0.clear();
        self.0.resize(len, 0.0);
    }
}

/// One of the tiles that are computed side by side.
#[derive(Default)]
struct Lanes {
    view: TileView,
    terms: Terms,
    /// Next chunk.
    next: usize,
    /// What tells the rows of weights apart, where some are dropped.
    rows: Vec<u32>,
    /// Outputs and their gradients as lanes.
    out_lanes: Vec<f32>,
    grad_lanes: Vec<f32>,
    grad_pairs: Vec<u32>,
    /// Gradients of the output.
    grad: Padded,
    /// Queries, and queries with the two biases.
    q: Padded,
    content: Padded,
    position: Padded,
    /// Gradients of these.
    d_q: Padded,
    d_content: Padded,
    d_position: Padded,
    max: Vec<f32>,
    share: Vec<f32>,
    mean: Vec<f32>,
}

impl Lanes {
    fn read(&mut self, x: &Problem, given: &BackwardInputs, at: (usize, usize), tile: &Tile) {
        let (batch, head) = at;
        let width = x.dims.width;
        self.next = 0;
        x.read(at, tile, &mut self.view);
        self.d_q.zeros(TILE * padded(width));
        if x.relative.is_some() {
            self.d_content.zeros(TILE * padded(width));
            self.d_position.zeros(TILE * padded(width));
        }
        load_lanes(x, &given.grad, at, &self.view, 1.0, &mut self.grad_lanes);
        if self.grad_lanes.iter().all(|&grad| grad == 0.0) {
            // padding, or outputs that nothing behind them reads: all these tiles would add is zero
            self.view.chunks.clear();
            return;
        }
        self.terms.load(x, at, &self.view);
        x.dropout_rows(at, &self.view, &mut self.rows);
        self.grad_pairs.clear();
        pack_lines(&self.grad_lanes, ROW, &mut self.grad_pairs);
        load_lanes(x, &given.out, at, &self.view, 1.0, &mut self.out_lanes);
        self.mean.resize(ROW, 0.0);
        lanes::dot(&self.out_lanes, &self.grad_lanes, &mut self.mean);
        self.grad.load(x, &given.grad, at, &self.view);
        self.grad.pack(padded(width));
        self.q.load(x, &x.q, at, &self.view);
        self.q.pack(padded(width));
        if let Some(tables) = &x.relative {
            self.content.add(&self.q, &tables.content_bias[head * width..], width);
            self.content.pack(padded(width));
            self.position.add(&self.q, &tables.position_bias[head * width..], width);
        }
        for values in [&mut self.max, &mut self.share] {
            values.clear();
            values.resize(ROW, 0.0);
        }
        for (lane, &query) in self.view.queries.iter().enumerate() {
            let row = (batch * x.dims.heads + head) * x.dims.queries + query;
            let (max, share) = (given.stats[2 * row], given.stats[2 * row + 1]);
            self.max[lane] = if max == f32::NEG_INFINITY { 0.0 } else { max };
            self.share[lane] = share;
        }
    }

    /// Queries as a stream's keys are multiplied with them, and the gradients of these.
    fn queries(&mut self, x: &Problem, slots: bool) -> (&Padded, &mut Padded) {
        if x.relative.is_some() && !slots {
            (&self.content, &mut self.d_content)
        } else {
            (&self.q, &mut self.d_q)
        }
    }

    /// Stores the gradients of the tile's queries and adds those of the biases.
    fn store(&self, x: &Problem, at: (usize, usize), grads: &Grads, tables: Option<&mut TableGrads>) {
        let (row, width) = (padded(x.dims.width), x.dims.width);
        let span = |lane: usize| lane * row..lane * row + width;
        for (lane, &query) in self.view.queries.iter().enumerate() {
            // SAFETY: the plan has every query in at most one tile of a head, rows of different queries do not
            // overlap, and the slice ends with this turn of the loop.
            let to = unsafe { grads.q.row(at.0, at.1, query, width) };
            lanes::add_row(&self.d_q.0[span(lane)], to);
            if x.relative.is_some() {
                lanes::add_row(&self.d_content.0[span(lane)], to);
                lanes::add_row(&self.d_position.0[span(lane)], to);
            }
        }
        let Some(tables) = tables else { return };
        for lane in 0..self.view.queries.len() {
            lanes::add_row(&self.d_content.0[span(lane)], &mut tables.content_bias);
            lanes::add_row(&self.d_position.0[span(lane)], &mut tables.position_bias);
        }
    }
}

/// Working memory of one thread.
struct Scratch {
    tiles: Vec<Lanes>,
    packed: Packed,
    probabilities: Vec<f32>,
    slopes: Vec<f32>,
    /// Gradients of the packed keys and values.
    d_keys: Vec<f32>,
    d_values: Vec<f32>,
    tables: Option<TableGrads>,
    /// Slopes as rows of queries.
    room: Vec<f32>,
}

impl Scratch {
    fn new(x: &Problem) -> Self {
        let width = padded(x.dims.width);
        Self {
            tiles: (0..SIDE).map(|_| Lanes::default()).collect(),
            packed: Packed::new(CHUNK, x.dims.width, true),
            probabilities: vec![0.0; CHUNK * TILE],
            slopes: vec![0.0; CHUNK * TILE],
            d_keys: vec![0.0; CHUNK * width],
            d_values: vec![0.0; CHUNK * width],
            tables: x.relative.as_ref().map(|tables| TableGrads::new(tables, x.dims.width)),
            room: Vec::new(),
        }
    }

    /// Adds what up to [`SIDE`] tiles of one head contribute: to their queries if `queries`, and to those keys and
    /// values whose number (slots behind the keys) is in `range`.
    #[allow(clippy::too_many_arguments)]
    fn run(
        &mut self,
        x: &Problem,
        given: &BackwardInputs,
        at: (usize, usize),
        tiles: &[Tile],
        grads: &Grads,
        queries: bool,
        range: Range<usize>,
    ) {
        for (lanes, tile) in self.tiles.iter_mut().zip(tiles) {
            lanes.read(x, given, at, tile);
        }
        self.packed.clear();
        let mut open = None;
        loop {
            let views = self.tiles[..tiles.len()].iter().map(|lanes| (&lanes.view, lanes.next));
            let Some(number) = next_tile(views) else { break };
            let lanes = &mut self.tiles[number];
            let chunk = lanes.view.chunks[lanes.next];
            lanes.next += 1;
            let stream = &lanes.view.streams[chunk.stream];
            let keys = Keys::new(x, stream, &chunk, &range);
            if !queries && keys.rows.is_empty() {
                continue;
            }
            if self.packed.find(&lanes.view, &[chunk]).is_none() {
                self.flush(x, at, grads, open.take());
                self.packed.load(x, at, &self.tiles[number].view, &[chunk]);
            }
            self.chunk(x, at, number, &chunk, queries);
            if queries && let Some(target) = &grads.bias {
                let view = &self.tiles[number].view;
                if !view.streams[chunk.stream].slots {
                    let slopes = &self.slopes[..chunk.keys * chunk.width()];
                    // SAFETY: one thread computes a query of all samples of a head.
                    unsafe { bias::add(target, at.1, view, &chunk, slopes, 1.0 / x.scale, &mut self.room) };
                }
            }
            if !keys.rows.is_empty() {
                self.add_keys(x, number, &chunk, &keys);
                open = Some(keys);
            }
        }
        self.flush(x, at, grads, open);
        if queries {
            for lanes in &self.tiles[..tiles.len()] {
                lanes.store(x, at, grads, self.tables.as_mut());
            }
        }
    }

    /// Probabilities of a chunk and gradients of its logits; with `queries` those of the queries, too.
    fn chunk(&mut self, x: &Problem, at: (usize, usize), number: usize, chunk: &Chunk, queries: bool) {
        let lanes = &mut self.tiles[number];
        let stream = &lanes.view.streams[chunk.stream];
        let (width, row, slots) = (chunk.width(), padded(x.dims.width), stream.slots);
        let area = chunk.keys * width;
        let (probabilities, slopes) = (&mut self.probabilities[..area], &mut self.slopes[..area]);
        logits(x, at, &lanes.view, chunk, self.packed.key_scalars(0), &mut lanes.terms, probabilities);
        let pairs = from(&lanes.grad_pairs, chunk.lane);
        let b = Vectors { data: &lanes.grad_lanes[chunk.lane..], row: ROW, pairs };
        let result = ProductOut { data: &mut *slopes, row: width, add: false };
        product(result, self.packed.value_scalars(0), b, chunk.keys, x.dims.width, width);
        x.drop(&lanes.view, chunk, &lanes.rows, slopes);
        let span = chunk.lane..chunk.lane + width;
        let (max, share, mean) = (&lanes.max[span.clone()], &lanes.share[span.clone()], &lanes.mean[span]);
        lanes::differentiate(probabilities, slopes, max, share, mean, x.scale);
        x.drop(&lanes.view, chunk, &lanes.rows, probabilities);
        if !queries {
            return;
        }
        let a = Scalars { data: slopes, row: 1, step: width, pairs: &[] };
        let to = &mut lanes.queries(x, slots).1.0[chunk.lane * row..];
        let keys = self.packed.key_vectors();
        product(ProductOut { data: to, row, add: true }, a, keys, chunk.lanes, chunk.keys, row);
        if let (Some(tables), Some(grads)) = (&x.relative, &mut self.tables)
            && let Some(term) = Term::new(x, tables, &lanes.view, chunk)
        {
            let (from, to) =
                if slots { (&lanes.q, &mut lanes.d_q) } else { (&lanes.position, &mut lanes.d_position) };
            grads.take(x, at.1, &term, chunk, &self.slopes, (&from.0, &mut to.0));
        }
    }

    /// Adds a chunk's part to the gradients of the packed keys and values.
    fn add_keys(&mut self, x: &Problem, number: usize, chunk: &Chunk, keys: &Keys) {
        let lanes = &mut self.tiles[number];
        let slots = lanes.view.streams[chunk.stream].slots;
        let (width, row) = (chunk.width(), padded(x.dims.width));
        let queries = if x.relative.is_some() && !slots { &lanes.content } else { &lanes.q };
        let (first, count) = (keys.rows.start, keys.rows.len());
        for (weights, from, to) in [
            (&self.probabilities, &lanes.grad, &mut self.d_values),
            (&self.slopes, queries, &mut self.d_keys),
        ] {
            let a = Scalars { data: &weights[first * width..], row: width, step: 1, pairs: &[] };
            let b = from.vectors(chunk.lane, row);
            let to = ProductOut { data: &mut to[first * row..], row, add: true };
            product(to, a, b, count, chunk.lanes, row);
        }
    }

    /// Moves the gradients of the packed keys and values to where they belong.
    fn flush(&mut self, x: &Problem, at: (usize, usize), grads: &Grads, keys: Option<Keys>) {
        let Some(keys) = keys else { return };
        let (k, v) = match &grads.slots {
            Some((k, v)) if keys.slots => (k, v),
            _ => (&grads.k, &grads.v),
        };
        let row = padded(x.dims.width);
        for (from, target) in [(&mut self.d_keys, k), (&mut self.d_values, v)] {
            for number in keys.rows.clone() {
                let from = &mut from[number * row..(number + 1) * row];
                let position = keys.position + number * keys.step;
                // SAFETY: this thread alone adds to keys of this head (or of this range of keys), rows of different
                // keys do not overlap, and the slice ends with this turn of the loop.
                let to = unsafe { target.row(at.0, at.1, position, x.dims.width) };
                lanes::add_row(&from[..x.dims.width], to);
                from.fill(0.0);
            }
        }
    }
}

/// Those keys of a chunk whose gradients are wanted.
struct Keys {
    /// Position of the chunk's first key.
    position: usize,
    step: usize,
    slots: bool,
    /// Numbers within the chunk.
    rows: Range<usize>,
}

impl Keys {
    fn new(x: &Problem, stream: &KeyStream, chunk: &Chunk, range: &Range<usize>) -> Self {
        let KeyStream { step, slots, .. } = *stream;
        let position = stream.start + chunk.first * step;
        let start = position + if slots { x.dims.keys } else { 0 };
        let below = |end: usize| end.saturating_sub(start).div_ceil(step).min(chunk.keys);
        let rows = below(range.start)..below(range.end).max(below(range.start));
        Self { position, step, slots, rows }
    }
}
