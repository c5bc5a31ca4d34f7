//! Our products in f32, of factors as they are or rounded to bf16: tiles that are summed in registers.
//!
//! The right factor is packed to *panels* of as many columns as a tile has, the left one is read in place or copied. At most
//! `DEPTH` elements are summed before the result is written, so that a panel stays in the first cache; what several such
//! blocks give is added in order. Which elements are summed in which order depends on the shape only.

mod gradient;
#[allow(unsafe_code)]
mod pack;
#[allow(unsafe_code)]
mod tile;

use std::cell::RefCell;
use std::sync::OnceLock;

pub use gradient::add_outer;
pub use pack::{copy_rows, round_in_place};
pub(in crate::cpu) use tile::add_line;
use tile::{Block, Left, Right, ShapeOf, TileOut};

use super::matrix::{Mat, MatMut};
use super::par::{self, Chunks};
use super::simd::{Arch, arch};
use crate::device::simd::{SimdLevel, level};
use crate::profile::{self, ProductKernel};

/// Most elements that are summed before the result is written.
const DEPTH: usize = 256;

/// Columns of the right factor that are packed at a time, where nobody else has packed it.
const COLUMNS: usize = 512;

/// Rows of the left factor that are multiplied at a time: they stay in the second cache.
const ROWS: usize = 192;

/// Up to how many rows a right factor with contiguous rows is read in place: packing it would take longer.
const FEW: usize = 24;

/// Whether there are vector instructions for it.
pub fn has_vectors() -> bool {
    !matches!(arch(), Arch::Scalar)
}

/// Whether products in f32 are ours: with AVX2. With AVX-512 those of the `gemm` crate are as fast, and what other architectures reach
/// nobody has measured.
pub fn is_used() -> bool {
    level() == SimdLevel::Avx2
}

/// Rows and columns of a tile.
fn shape() -> [usize; 2] {
    static SHAPE: OnceLock<[usize; 2]> = OnceLock::new();
    *SHAPE.get_or_init(|| arch().dispatch(ShapeOf))
}

/// Summed elements in blocks.
fn blocks(depth: usize) -> Chunks {
    Chunks::balanced(depth, DEPTH, 4)
}

/// Working memory of one thread.
#[derive(Default)]
struct Scratch {
    left: Vec<f32>,
    right: Vec<f32>,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// At least `len` elements from the beginning of a line of the cache on; what they hold is old.
fn space(buffer: &mut Vec<f32>, len: usize) -> &mut [f32] {
    if buffer.len() < len + LINE {
        buffer.clear();
        buffer.resize(len + LINE, 0.0);
    }
    let start = aligned(buffer);
    &mut buffer[start..start + len]
}

/// Makes the working memory of this thread as large as any product needs.
pub fn reserve() {
    SCRATCH.with_borrow_mut(|Scratch { left, right }| {
        space(left, (ROWS * apart(DEPTH)).max(DEPTH * apart(ROWS)));
        space(right, DEPTH * COLUMNS);
    });
}

/// Elements of a line of the cache.
const LINE: usize = 16;

/// Elements before the first line of the cache that begins in `data`.
fn aligned(data: &[f32]) -> usize {
    data.as_ptr().align_offset(LINE * size_of::<f32>()).min(LINE)
}

/// c = alpha a b, or alpha a b + beta c, of factors as they are or rounded to bf16, on this thread.
///
/// Panics if the shapes do not fit, and where neither rows nor columns of a matrix are contiguous.
pub fn multiply(c: MatMut, a: Mat, b: Mat, alpha: f32, beta: Option<f32>, round: bool) {
    if c.col_stride != 1 {
        return multiply(c.t(), b.t(), a.t(), alpha, beta, round);
    }
    let MatMut { data: c, rows: m, cols: n, row_stride: row, .. } = c;
    let k = a.cols;
    assert!(
        (a.rows, b.rows, b.cols) == (m, k, n),
        "[{}, {k}] x [{}, {}] into [{m}, {n}]",
        a.rows,
        b.rows,
        b.cols
    );
    if m == 0 || n == 0 {
        return;
    }
    SCRATCH.with_borrow_mut(|Scratch { left, right }| {
        for first in (0..n).step_by(COLUMNS) {
            let columns = first..n.min(first + COLUMNS);
            let mut beta = beta;
            // a product over nothing still sets c
            for index in 0..blocks(k).count().max(1) {
                let depth = if k == 0 { 0..0 } else { blocks(k).range(index) };
                let b = b.lines(depth.clone()).columns(columns.clone());
                for (panels, width, b) in right_factor(b, m, round, right) {
                    for top in (0..m).step_by(ROWS) {
                        let rows = ROWS.min(m - top);
                        let a = a.lines(top..top + rows).columns(depth.clone());
                        let data = &mut c[top * row + first + panels..];
                        let c = TileOut { data, row, alpha, beta };
                        let a = left_factor(a, round, left);
                        arch().dispatch(Block { c, a, b, rows, depth: depth.len(), width });
                    }
                }
                beta = Some(1.0);
            }
        }
    });
}

/// The left factor in a form that tiles read: in place, but copied if it is rounded, or if lines of it would push each other out of
/// the first cache.
fn left_factor<'a>(a: Mat<'a>, round: bool, to: &'a mut Vec<f32>) -> Left<'a> {
    let in_rows = a.col_stride == 1 || a.cols <= 1;
    let x = if in_rows { a } else { a.t() };
    assert!(x.col_stride == 1 || x.cols <= 1, "neither rows nor columns of a factor are contiguous");
    let x = if round || (!in_rows && is_crowded(x)) {
        let apart = apart(x.cols);
        let to = space(to, x.rows * apart);
        pack::copy_rows(x, round, (to, apart));
        Mat { data: to, row_stride: apart, ..x }
    } else {
        x
    };
    let Mat { data, row_stride: stride, .. } = x;
    if in_rows { Left::Rows { data, stride } } else { Left::Columns { data, stride } }
}

/// Elements of half a page.
const HALF_PAGE: usize = 512;

/// Whether the same columns of different rows share few places in the first cache.
fn is_crowded(x: Mat) -> bool {
    x.row_stride.is_multiple_of(HALF_PAGE)
}

/// The distance of copied rows of `width` elements, which are not crowded.
fn apart(width: usize) -> usize {
    let apart = width.next_multiple_of(LINE);
    if apart.is_multiple_of(HALF_PAGE / 2) { apart + LINE } else { apart }
}

/// The right factor of `m` rows in forms that tiles read, each with its first column and number of columns.
fn right_factor<'a>(
    b: Mat<'a>,
    m: usize,
    round: bool,
    to: &'a mut Vec<f32>,
) -> impl Iterator<Item = (usize, usize, Right<'a>)> + use<'a> {
    let [_, columns] = shape();
    let in_rows = b.col_stride == 1 || b.cols <= 1;
    // whole panels that are read in place
    let whole = if in_rows && !round && m <= FEW { b.cols / columns * columns } else { 0 };
    let in_place =
        (whole > 0).then_some((0, whole, Right { data: b.data, panel: columns, step: b.row_stride }));
    let rest = whole..b.cols;
    let packed = (!rest.is_empty()).then(|| {
        let to = space(to, b.rows * rest.len().next_multiple_of(columns));
        pack_right(b.columns(rest.clone()), round, to);
        (whole, rest.len(), Right { data: to, panel: columns * b.rows, step: columns })
    });
    in_place.into_iter().chain(packed)
}

/// Packs [depth, columns] to panels.
fn pack_right(b: Mat, round: bool, to: &mut [f32]) {
    let [_, columns] = shape();
    if b.col_stride == 1 || b.cols <= 1 {
        pack::right_lines(b, columns, round, to);
    } else {
        assert!(b.row_stride == 1 || b.rows <= 1, "neither rows nor columns of a factor are contiguous");
        pack::right_turned(b.t(), columns, round, to);
    }
}

/// A matrix [depth, columns] on the right of many products, packed once for all of them: block after block of its lines, in each
/// panel after panel.
pub struct Panels {
    data: Vec<f32>,
    /// Where they begin.
    start: usize,
    depth: usize,
    columns: usize,
    round: bool,
}

impl Panels {
    /// Packs `b`, on all threads; products round their factors to bf16 if `round`.
    pub fn new(b: Mat, round: bool) -> Self {
        let [_, width] = shape();
        let padded = b.cols.next_multiple_of(width);
        let mut data = vec![0.0; b.rows * padded + LINE];
        let start = aligned(&data);
        let chunks = blocks(b.rows);
        let pieces =
            data[start..start + b.rows * padded].chunks_mut((chunks.size * padded).max(1)).enumerate();
        let pieces = pieces.flat_map(|(index, to)| {
            let lines = chunks.range(index);
            let panels = to.chunks_mut(lines.len() * width).enumerate();
            panels.map(move |(panel, to)| (lines.clone(), panel * width, to))
        });
        par::each_piece(pieces, |_, (lines, first, to)| {
            pack_right(b.lines(lines).columns(first..b.cols.min(first + width)), round, to);
        });
        Self { data, start, depth: b.rows, columns: b.cols, round }
    }

    /// y = x M, or y += x M, on this thread. Rows of `y` are `stride` apart.
    pub fn multiply(&self, x: Mat, y: &mut [f32], stride: usize, add: bool) {
        let Self { ref data, start, depth, columns, round } = *self;
        assert!(x.cols == depth, "rows of {} for a matrix of depth {depth}", x.cols);
        profile::count(ProductKernel::Panel, x.rows, depth, columns);
        if x.rows == 0 || columns == 0 {
            return;
        }
        let (chunks, width) = (blocks(depth), shape()[1]);
        let padded = columns.next_multiple_of(width);
        SCRATCH.with_borrow_mut(|Scratch { left, .. }| {
            for top in (0..x.rows).step_by(ROWS) {
                let rows = ROWS.min(x.rows - top);
                let x = x.lines(top..top + rows);
                // a product over nothing still sets y
                for index in 0..chunks.count().max(1) {
                    let lines = if depth == 0 { 0..0 } else { chunks.range(index) };
                    let data = &data[start + lines.start * padded..];
                    let b = Right { data, panel: lines.len() * width, step: width };
                    let a = left_factor(x.columns(lines.clone()), round, left);
                    let beta = (add || index > 0).then_some(1.0);
                    let c = TileOut { data: &mut y[top * stride..], row: stride, alpha: 1.0, beta };
                    arch().dispatch(Block { c, a, b, rows, depth: lines.len(), width: columns });
                }
            }
        });
    }
}

#[cfg(test)]
mod tests;
