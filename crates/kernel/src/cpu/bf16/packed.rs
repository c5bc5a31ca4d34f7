//! Products of factors that a kernel packs itself, chunk by chunk, while their rows are in the cache.

use super::block::multiply;
use super::native::{PANEL, Panels, band};
use super::operands::{BlockOut, LANES, Left, Right};
use super::pack;
pub use super::pack::pairs;
use crate::cpu::matrix::Mat;
use crate::cpu::par::{self, Chunks};

/// Packs rows of `width` elements as a left factor whose rows are `apart` pairs apart.
pub fn pack_left(x: &[f32], width: usize, to: &mut [u32], apart: usize) {
    pack::rows_apart(x, width, x.len() / width.max(1), width, to, apart);
}

impl Panels {
    /// The numbers of all panels.
    pub fn all(&self) -> std::ops::Range<usize> {
        0..self.columns.div_ceil(PANEL)
    }

    /// y = x M, or y += x M, on this thread, of the panels numbered `panels`, for `x` that [`pack_left`] packed whole (rows
    /// stand next to each other). Rows of `y` are `stride` apart and begin with the first of these columns.
    pub fn multiply_packed(
        &self,
        x: &[u32],
        panels: std::ops::Range<usize>,
        (y, stride): (&mut [f32], usize),
        add: bool,
    ) {
        let pairs = pairs(self.depth);
        assert!(pairs > 0, "a product over nothing");
        let (rows, beta) = (x.len() / pairs, add.then_some(1.0));
        for panel in panels.clone() {
            let column = panel * PANEL;
            let width = PANEL.min(self.columns - column);
            let right = Right { data: &self.data[column * pairs..], row: width.next_multiple_of(LANES) };
            for first in (0..rows).step_by(band()) {
                let height = band().min(rows - first);
                let left = Left { data: &x[first * pairs..], row: pairs, step: 1 };
                let to = &mut y[first * stride + column - panels.start * PANEL..];
                let to = BlockOut { data: to, row: stride, alpha: 1.0, beta };
                multiply(to, left, right, height, pairs, width);
            }
        }
    }
}

/// Pairs of a chunk of `rows` of `width` elements in [`Lines`].
pub fn lines_room(rows: usize, width: usize) -> usize {
    pairs(rows) * width.next_multiple_of(LANES)
}

/// Pairs of all `chunks` of rows of `width` elements in [`Lines`].
pub fn lines_len(chunks: Chunks, width: usize) -> usize {
    (0..chunks.count()).map(|index| lines_room(chunks.range(index).len(), width)).sum()
}

/// A matrix whose rows are summed over, adjacent rows interleaved to pairs: chunk after chunk of rows, in each panel after
/// panel of [`PANEL`] columns.
#[derive(Clone, Copy)]
pub struct Lines<'a> {
    /// What [`Lines::pack`] wrote.
    pub data: &'a [u32],
    /// Number of columns.
    pub width: usize,
}

impl Lines<'_> {
    /// Packs the columns from `first` (a multiple of [`PANEL`]) on of a chunk; `x` holds these columns only.
    pub fn pack(x: Mat, first: usize, to: &mut [u32]) {
        pack::lines(x.data, x.row_stride, x.rows, x.cols, PANEL, &mut to[first * pairs(x.rows)..]);
    }

    /// Panel `index` of chunk `chunk`: where it begins, and its width.
    fn panel(&self, chunks: Chunks, chunk: usize, index: usize) -> (&[u32], usize) {
        let at = chunk * lines_room(chunks.size, self.width);
        let first = index * PANEL;
        let data = &self.data[at + first * pairs(chunks.range(chunk).len())..];
        (data, PANEL.min(self.width - first))
    }
}

/// Adds x^T dy (or sets it, without `add`) to `tiles`: tile after tile [columns of x, up to 64 columns of dy]. Both factors
/// have the rows of `chunks`.
pub fn add_lines(tiles: &mut [f32], x: Lines, dy: Lines, chunks: Chunks, add: bool) {
    assert!(tiles.len() == x.width * dy.width && chunks.count() > 0, "tiles of {} elements", tiles.len());
    // a single tile is cut finer, so that it is work for several threads
    let band = if dy.width > PANEL { PANEL } else { PANEL / 2 };
    par::each_piece(tiles.chunks_mut((PANEL * x.width).max(1)), |index, tile| {
        let width = tile.len() / x.width;
        par::each_piece(tile.chunks_mut(band * width), |part, to| {
            let (first, height) = (part * band, to.len() / width);
            for chunk in 0..chunks.count() {
                let (left, step) = x.panel(chunks, chunk, first / PANEL);
                let left = &left[first % PANEL..];
                let left = Left { data: left, row: 1, step: step.next_multiple_of(LANES) };
                let (right, row) = dy.panel(chunks, chunk, index);
                let right = Right { data: right, row: row.next_multiple_of(LANES) };
                let beta = (add || chunk > 0).then_some(1.0);
                let to = BlockOut { data: to, row: width, alpha: 1.0, beta };
                multiply(to, left, right, height, pairs(chunks.range(chunk).len()), width);
            }
        });
    });
}
