//! Keys and values of some chunks as products read them.

use super::problem::{Problem, padded};
use super::product::{Scalars, Vectors, from_line, from_row, pack_columns, pack_lines, pack_rows};
use crate::attend::tile::{Chunk, TileView};

/// What tells chunks of different tiles apart: first position, distance, number of keys, whether they are slots.
type Identity = (usize, usize, usize, bool);

pub fn identity(view: &TileView, chunk: &Chunk) -> Identity {
    let stream = &view.streams[chunk.stream];
    (stream.start + chunk.first * stream.step, stream.step, chunk.keys, stream.slots)
}

/// Where a packed chunk begins.
struct Place {
    chunk: Identity,
    /// Number of its first key.
    key: usize,
    /// Number of its first pair of values.
    line: usize,
}

/// Rows of the keys and values of some chunks, one behind another and padded to whole vectors.
pub struct Packed {
    /// Keys.
    keys: Vec<f32>,
    /// Values.
    values: Vec<f32>,
    /// Distance of two rows.
    row: usize,
    /// Where products read pairs: rows of keys, and for forward columns of values, for backward rows of values and lines of keys.
    key_rows: Vec<u32>,
    value_columns: Vec<u32>,
    value_rows: Vec<u32>,
    key_lines: Vec<u32>,
    backward: bool,
    /// What is packed.
    places: Vec<Place>,
}

impl Packed {
    /// Space for `keys` keys, for the products of the forward or of the backward pass.
    pub fn new(keys: usize, width: usize, backward: bool) -> Self {
        let row = padded(width);
        let (buffer, empty) = (|| vec![0.0; keys * row], Vec::new);
        Self {
            keys: buffer(),
            values: buffer(),
            row,
            key_rows: empty(),
            value_columns: empty(),
            value_rows: empty(),
            key_lines: empty(),
            backward,
            places: Vec::new(),
        }
    }

    /// Keys that there is space for.
    pub fn room(&self) -> usize {
        self.keys.len() / self.row
    }

    /// Keys of packed chunk `number`, to be multiplied with lanes.
    pub fn key_scalars(&self, number: usize) -> Scalars<'_> {
        let start = self.places[number].key * self.row;
        Scalars { data: &self.keys[start..], row: self.row, step: 1, pairs: from_row(&self.key_rows, start) }
    }

    /// Values of packed chunk `number`, to be multiplied with lanes.
    pub fn value_scalars(&self, number: usize) -> Scalars<'_> {
        let start = self.places[number].key * self.row;
        Scalars {
            data: &self.values[start..],
            row: self.row,
            step: 1,
            pairs: from_row(&self.value_rows, start),
        }
    }

    /// The transpose of these values, to be multiplied with weights.
    pub fn value_columns(&self, number: usize) -> Scalars<'_> {
        let (row, Place { key, line, .. }) = (self.row, &self.places[number]);
        Scalars {
            data: &self.values[key * row..],
            row: 1,
            step: row,
            pairs: from_line(&self.value_columns, (*key, *line), row),
        }
    }

    /// Keys of the only chunk, to be weighed.
    pub fn key_vectors(&self) -> Vectors<'_> {
        Vectors { data: &self.keys, row: self.row, pairs: &self.key_lines }
    }

    /// The number of the first of these chunks, if all of them are packed one behind another.
    pub fn find(&self, view: &TileView, chunks: &[Chunk]) -> Option<usize> {
        let first = identity(view, chunks.first()?);
        let number = self.places.iter().position(|place| place.chunk == first)?;
        let places = self.places.get(number..number + chunks.len())?;
        let same = places.iter().zip(chunks).all(|(place, chunk)| place.chunk == identity(view, chunk));
        same.then_some(number)
    }

    /// Forgets what is packed.
    pub fn clear(&mut self) {
        self.places.clear();
    }

    /// Packs chunks; hidden rows become zeros.
    pub fn load(&mut self, x: &Problem, at: (usize, usize), view: &TileView, chunks: &[Chunk]) {
        self.places.clear();
        self.value_columns.clear();
        self.key_lines.clear();
        let row = self.row;
        let (mut key, mut line) = (0, 0);
        for chunk in chunks {
            let identity = identity(view, chunk);
            let (position, step, count, slots) = identity;
            let (keys, values) = x.sides(slots);
            let span = key * row..(key + count) * row;
            for (rows, to) in [(keys, &mut self.keys), (values, &mut self.values)] {
                let to = &mut to[span.clone()];
                rows.copy_every(at, (position, step), x.dims.width, to, row);
                if !x.hidden.is_empty() {
                    let to = to.chunks_exact_mut(row).enumerate();
                    to.filter(|(number, _)| x.is_hidden(at.0, slots, position + number * step))
                        .for_each(|(_, to)| to.fill(0.0));
                }
            }
            self.places.push(Place { chunk: identity, key, line });
            if self.backward {
                pack_lines(&self.keys[span], row, &mut self.key_lines);
            } else {
                pack_columns(&self.values[span], row, &mut self.value_columns);
            }
            key += count;
            line += count.div_ceil(2);
        }
        pack_rows(&self.keys[..key * row], row, &mut self.key_rows);
        if self.backward {
            pack_rows(&self.values[..key * row], row, &mut self.value_rows);
        }
    }
}
