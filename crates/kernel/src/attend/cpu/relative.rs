//! Logits that depend on the distance of query and key (see [`Relative`](crate::attend::Relative)).
//!
//! For a chunk the products of all queries with all rows of the table within reach are computed at once, one row
//! per distance and one lane per query; every pair then picks its own.

use std::f32::consts::LOG2_E;

use super::lanes;
use super::problem::{Problem, Table, Tables, load_lanes, padded};
use super::product::{ProductOut, Scalars, Vectors, from, pack_lines, product};
use crate::attend::tile::{Chunk, ROW, TileView};

/// Queries as lanes, with the biases that different logits add to them.
#[derive(Default)]
pub struct Terms {
    plain: Vec<f32>,
    content: Vec<f32>,
    plain_pairs: Vec<u32>,
    content_pairs: Vec<u32>,
    position: Vec<f32>,
    products: Vec<f32>,
}

/// The distances of a chunk.
pub struct Term<'a> {
    table: Table<'a>,
    slots: bool,
    /// Distance of every lane to key 0 of the chunk; may be negative.
    base: Vec<isize>,
    /// How much nearer the next key is.
    step: isize,
    /// First row of the table within reach.
    first: usize,
    /// Number of rows within reach.
    count: usize,
}

impl<'a> Term<'a> {
    /// The distances of `chunk`; none if no row of the table belongs to any.
    pub fn new(x: &Problem, tables: &Tables<'a>, view: &TileView, chunk: &Chunk) -> Option<Self> {
        let stream = &view.streams[chunk.stream];
        let table = tables.table(stream.slots)?;
        let position = (stream.start + chunk.first * stream.step) as isize;
        let newest = |query: usize| {
            let t = x.plan.offset + query;
            match tables.slots {
                Some((_, segment, rank)) if stream.slots => (t / segment * rank) as isize - 1,
                _ => t as isize,
            }
        };
        let queries = &view.queries[chunk.lane..chunk.lane + chunk.lanes];
        let base: Vec<isize> = queries.iter().map(|&query| newest(query) - position).collect();
        let step = stream.step as isize;
        let nearest = base.iter().min()? - step * (chunk.keys as isize - 1);
        let first = nearest.max(0) as usize;
        let end = ((*base.iter().max()? + 1).max(0) as usize).min(table.distances);
        let count = end.checked_sub(first).filter(|&count| count > 0)?;
        Some(Self { table, slots: stream.slots, base, step, first, count })
    }

    /// Calls `f(place in the chunk, place among the products)` for every pair with a row; both have rows of
    /// `width` lanes.
    fn pairs(&self, keys: usize, width: usize, mut f: impl FnMut(usize, usize)) {
        for key in 0..keys {
            let nearer = key as isize * self.step + self.first as isize;
            for (lane, base) in self.base.iter().enumerate() {
                let row = base - nearer;
                if row >= 0 && (row as usize) < self.count {
                    f(key * width + lane, row as usize * width + lane);
                }
            }
        }
    }

    fn rows(&self, head: usize, width: usize) -> &'a [f32] {
        &self.table.data[(head * self.table.distances + self.first) * width..][..self.count * width]
    }
}

impl Terms {
    /// Reads the tile's queries.
    pub fn load(&mut self, x: &Problem, at: (usize, usize), view: &TileView) {
        let factor = x.scale * LOG2_E;
        load_lanes(x, &x.q, at, view, factor, &mut self.plain);
        self.plain_pairs.clear();
        pack_lines(&self.plain, ROW, &mut self.plain_pairs);
        let Some(tables) = &x.relative else { return };
        for (lanes, bias) in
            [(&mut self.content, tables.content_bias), (&mut self.position, tables.position_bias)]
        {
            lanes.clone_from(&self.plain);
            let bias = &bias[at.1 * x.dims.width..];
            for (row, bias) in lanes.chunks_exact_mut(ROW).zip(bias) {
                row.iter_mut().for_each(|lane| *lane += bias * factor);
            }
        }
        self.content_pairs.clear();
        pack_lines(&self.content, ROW, &mut self.content_pairs);
    }

    /// What is multiplied with keys (or slots), from lane `lane` on.
    pub fn content(&self, slots: bool, lane: usize) -> Vectors<'_> {
        let (data, pairs) = if slots || self.content.is_empty() {
            (&self.plain, &self.plain_pairs)
        } else {
            (&self.content, &self.content_pairs)
        };
        Vectors { data: &data[lane..], row: ROW, pairs: from(pairs, lane) }
    }

    /// Adds a chunk's position-dependent logits.
    pub fn add(&mut self, x: &Problem, head: usize, term: &Term, chunk: &Chunk, logits: &mut [f32]) {
        let (depth, width) = (x.dims.width, chunk.width());
        self.products.resize(term.count * width, 0.0);
        let a = Scalars { data: term.rows(head, depth), row: depth, step: 1, pairs: &[] };
        let queries = if term.slots { &self.plain } else { &self.position };
        let b = Vectors { data: &queries[chunk.lane..], row: ROW, pairs: &[] };
        product(
            ProductOut { data: &mut self.products, row: width, add: false },
            a,
            b,
            term.count,
            depth,
            width,
        );
        term.pairs(chunk.keys, width, |to, from| logits[to] += self.products[from]);
    }
}

/// Gradients of the tables of one head, and of its biases.
pub struct TableGrads {
    /// [distances, d] of keys.
    pub keys: Vec<f32>,
    /// u.
    pub content_bias: Vec<f32>,
    /// v.
    pub position_bias: Vec<f32>,
    /// [distances, d] of slots.
    pub slots: Vec<f32>,
    products: Vec<f32>,
    rows: Vec<f32>,
}

impl TableGrads {
    /// Zeros.
    pub fn new(tables: &Tables, width: usize) -> Self {
        let table = |table: Table| vec![0.0; table.distances * width];
        Self {
            keys: table(tables.keys),
            content_bias: vec![0.0; width],
            position_bias: vec![0.0; width],
            slots: tables.slots.map_or_else(Vec::new, |(slots, ..)| table(slots)),
            products: Vec::new(),
            rows: Vec::new(),
        }
    }

    /// Takes the gradients of a chunk's logits: to the rows of the table, and to `d_queries` (padded rows by lane).
    /// `queries` are the rows that the table was multiplied with.
    pub fn take(
        &mut self,
        x: &Problem,
        head: usize,
        term: &Term,
        chunk: &Chunk,
        slopes: &[f32],
        (queries, d_queries): (&[f32], &mut [f32]),
    ) {
        let (depth, width, row) = (x.dims.width, chunk.width(), padded(x.dims.width));
        self.products.clear();
        self.products.resize(term.count * width, 0.0);
        term.pairs(chunk.keys, width, |from, to| self.products[to] += slopes[from]);
        self.rows.clear();
        self.rows.resize(term.count * row, 0.0);
        for (to, from) in self.rows.chunks_exact_mut(row).zip(term.rows(head, depth).chunks_exact(depth)) {
            to[..depth].copy_from_slice(from);
        }
        let a = Scalars { data: &self.products, row: 1, step: width, pairs: &[] };
        let to = ProductOut { data: &mut d_queries[chunk.lane * row..], row, add: true };
        let rows = Vectors { data: &self.rows, row, pairs: &[] };
        product(to, a, rows, chunk.lanes, term.count, row);
        let a = Scalars { data: &self.products, row: width, step: 1, pairs: &[] };
        let to = ProductOut { data: &mut self.rows, row, add: false };
        let queries = Vectors { data: &queries[chunk.lane * row..], row, pairs: &[] };
        product(to, a, queries, term.count, chunk.lanes, row);
        let table = if term.slots { &mut self.slots } else { &mut self.keys };
        let table = table[term.first * depth..].chunks_exact_mut(depth);
        for (to, from) in table.zip(self.rows.chunks_exact(row)).take(term.count) {
            lanes::add_row(&from[..depth], to);
        }
    }
}
