//! Packed products on processors with AVX512-BF16.

use std::cell::RefCell;

use super::block::multiply;
use super::operands::{BlockOut, LANES, Left, Right};
use super::pack;
use crate::cpu::matrix::{Mat, MatMut};
use crate::cpu::par;
use crate::cpu::transpose::transpose;

/// Columns of the right factor that are packed as a panel.
pub const PANEL: usize = 64;

/// Rows of the left factor that are multiplied by a panel at a time, and of a transposed one packed as a panel: whole blocks of the
/// micro-kernel, which takes 12 or (two tiles) 32 rows.
pub(super) fn band() -> usize {
    if super::has_tiles() { 96 } else { 48 }
}

/// Summed elements that are packed at a time.
const DEPTH: usize = 1024;

/// Working memory of one thread.
#[derive(Default)]
struct Scratch {
    left: Vec<u32>,
    right: Vec<u32>,
    turn: Vec<u32>,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// At least `len` elements; what they hold is old.
fn space(buffer: &mut Vec<u32>, len: usize) -> &mut [u32] {
    if buffer.len() < len {
        buffer.resize(len, 0);
    }
    &mut buffer[..len]
}

/// c = alpha a b, or alpha a b + beta c. Panics if the shapes do not fit.
pub fn gemm(c: MatMut, a: Mat, b: Mat, alpha: f32, beta: Option<f32>) {
    if c.col_stride != 1 {
        return gemm(c.t(), b.t(), a.t(), alpha, beta);
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
    SCRATCH.with_borrow_mut(|Scratch { left, right, turn }| {
        let mut beta = beta;
        // a product over nothing still sets c
        for first in (0..k.max(1)).step_by(DEPTH) {
            let depth = DEPTH.min(k - first);
            let pairs = pack::pairs(depth);
            let right = space(right, pairs * n.next_multiple_of(LANES));
            pack_right(b.lines(first..first + depth), turn, right);
            for top in (0..m).step_by(5 * band()) {
                let rows = (5 * band()).min(m - top);
                let left = space(left, pairs * rows.next_multiple_of(LANES));
                let a = a.lines(top..top + rows).columns(first..first + depth);
                for (at, height, left) in pack_left(a, left) {
                    for column in (0..n).step_by(PANEL) {
                        let width = PANEL.min(n - column);
                        let to = &mut c[(top + at) * row + column..];
                        let right =
                            Right { data: &right[column * pairs..], row: width.next_multiple_of(LANES) };
                        multiply(BlockOut { data: to, row, alpha, beta }, left, right, height, pairs, width);
                    }
                }
            }
            beta = Some(1.0);
        }
    });
}

fn pack_right(b: Mat, turn: &mut Vec<u32>, to: &mut [u32]) {
    if b.col_stride == 1 || b.cols <= 1 {
        pack::lines(b.data, b.row_stride, b.rows, b.cols, PANEL, to);
    } else {
        assert!(b.row_stride == 1 || b.rows <= 1, "neither rows nor columns of a factor are contiguous");
        pack::columns(b.data, b.col_stride, b.rows, b.cols, PANEL, turn, to);
    }
}

/// Packs `a` to `to`: first row, number of rows, and pairs of the parts that are multiplied one after another.
fn pack_left<'a>(a: Mat, to: &'a mut [u32]) -> impl Iterator<Item = (usize, usize, Left<'a>)> {
    let (rows, pairs) = (a.rows, pack::pairs(a.cols));
    let whole = a.col_stride == 1 || a.cols <= 1;
    if whole {
        pack::rows(a.data, a.row_stride, rows, a.cols, to);
    } else {
        assert!(a.row_stride == 1 || rows <= 1, "neither rows nor columns of a factor are contiguous");
        pack::lines(a.data, a.col_stride, a.cols, rows, band(), to);
    }
    let to = &*to;
    (0..rows).step_by(band()).map(move |first| {
        let height = band().min(rows - first);
        let data = &to[first * pairs..];
        let (row, step) = if whole { (pairs, 1) } else { (1, height.next_multiple_of(LANES)) };
        (first, height, Left { data, row, step })
    })
}

/// A matrix [depth, columns] on the right of many products, packed once for all of them.
pub struct Panels {
    pub(super) data: Vec<u32>,
    pub(super) depth: usize,
    pub(super) columns: usize,
}

impl Panels {
    /// Packs `b`, on all threads.
    pub fn new(b: Mat) -> Self {
        let pairs = pack::pairs(b.rows);
        let mut data = vec![0; pairs * b.cols.next_multiple_of(LANES)];
        par::each_piece_with(data.chunks_mut((pairs * PANEL).max(1)), Vec::new, |turn, index, to| {
            let first = index * PANEL;
            pack_right(b.columns(first..b.cols.min(first + PANEL)), turn, to);
        });
        Self { data, depth: b.rows, columns: b.cols }
    }

    /// y = x M, or y += x M, on this thread. Rows of `y` are `stride` apart.
    pub fn multiply(&self, x: Mat, y: &mut [f32], stride: usize, add: bool) {
        let Self { ref data, depth, columns } = *self;
        assert!(x.cols == depth, "rows of {} for a matrix of depth {depth}", x.cols);
        let pairs = pack::pairs(depth);
        let beta = add.then_some(1.0);
        SCRATCH.with_borrow_mut(|Scratch { left, .. }| {
            let left = space(left, pairs * x.rows.next_multiple_of(LANES));
            let parts: Vec<_> = pack_left(x, left).collect();
            for column in (0..columns).step_by(PANEL) {
                let width = PANEL.min(columns - column);
                let right = Right { data: &data[column * pairs..], row: width.next_multiple_of(LANES) };
                for &(first, height, left) in &parts {
                    let to = &mut y[first * stride + column..];
                    let to = BlockOut { data: to, row: stride, alpha: 1.0, beta };
                    multiply(to, left, right, height, pairs, width);
                }
            }
        });
    }
}

/// A factor, packed already if `pairs` are not empty.
pub struct Factor<'a> {
    mat: Mat<'a>,
    pairs: &'a [u32],
}

impl<'a> Factor<'a> {
    /// `mat`, and what was packed of it by [`pack_rows`] (a left factor) or [`pack_lines`] (a right one).
    pub fn new(mat: Mat<'a>, pairs: &'a [u32]) -> Self {
        Self { mat, pairs }
    }
}

/// c = a b, or c += a b: `c` with the distance of its rows and whether to add, factors with the distances of their packed
/// rows. Small products: what is not packed is packed whole.
pub fn product(
    (c, row, add): (&mut [f32], usize, bool),
    (a, a_row): (Factor, usize),
    (b, b_row): (Factor, usize),
) {
    let (rows, depth, width) = (a.mat.rows, a.mat.cols, b.mat.cols);
    let pairs = pack::pairs(depth);
    let c = BlockOut { data: c, row, alpha: 1.0, beta: add.then_some(1.0) };
    SCRATCH.with_borrow_mut(|Scratch { left, right, .. }| {
        let left = if !a.pairs.is_empty() {
            Left { data: a.pairs, row: a_row, step: 1 }
        } else if a.mat.col_stride == 1 {
            let left = space(left, rows * pairs);
            pack::rows(a.mat.data, a.mat.row_stride, rows, depth, left);
            Left { data: left, row: pairs, step: 1 }
        } else {
            let step = rows.next_multiple_of(LANES);
            let left = space(left, pairs * step);
            pack::lines(a.mat.data, a.mat.col_stride, depth, rows, step, left);
            Left { data: left, row: 1, step }
        };
        let right = if b.pairs.is_empty() {
            let row = width.next_multiple_of(LANES);
            let right = space(right, pairs * row);
            pack::lines(b.mat.data, b.mat.row_stride, depth, width, row, right);
            Right { data: right, row }
        } else {
            Right { data: b.pairs, row: b_row }
        };
        multiply(c, left, right, rows, pairs, width);
    });
}

/// Rows of pairs of a contiguous matrix.
pub fn pack_rows(x: Mat, to: &mut [u32]) {
    pack::rows(x.data, x.row_stride, x.rows, x.cols, to);
}

/// Adjacent rows interleaved to rows of pairs of a contiguous matrix whose width is a multiple of 16.
pub fn pack_lines(x: Mat, to: &mut [u32]) {
    pack::lines(x.data, x.row_stride, x.rows, x.cols, x.cols.max(1), to);
}

/// The columns of a contiguous matrix whose width is a multiple of 16, as rows of pairs.
pub fn pack_columns(x: Mat, to: &mut [u32]) {
    SCRATCH.with_borrow_mut(|Scratch { turn, .. }| {
        let pairs = pack::pairs(x.rows);
        let turn = space(turn, pairs * x.cols);
        pack::lines(x.data, x.row_stride, x.rows, x.cols, x.cols.max(1), turn);
        transpose(bytemuck::cast_slice(turn), pairs, x.cols, bytemuck::cast_slice_mut(to));
    });
}
