//! Gradients of weights: products over many rows, whose right factor is packed by all threads before parts of the result are
//! computed from it.

use std::ops::Range;

use super::tile::{Block, Right, TileOut};
use super::{COLUMNS, LINE, SCRATCH, Scratch, aligned, blocks, left_factor, pack, shape};
use crate::cpu::matrix::Mat;
use crate::cpu::par::{self, Chunks};
use crate::cpu::simd::arch;
use crate::profile::{self, ProductKernel};

/// Columns of the right factor that one thread packs at a time.
const GROUP: usize = 64;

/// Elements of the right factor that are packed at a time, if they are of more than one block of rows: what stays in the second
/// cache. Threads wait between packing and computing, so more is better.
const ELEMENTS: usize = 1 << 17;

/// Rows of the result that one thread computes at a time: enough to pay for loading panels, few enough that all threads have some,
/// and an even number of bands, of whole tiles, before the rest.
fn band(out: usize) -> usize {
    let most = match out {
        0..192 => 24,
        192..512 => 48,
        _ => 96,
    };
    let tile = shape()[0];
    (out / out.div_ceil(most).next_multiple_of(2) / tile * tile).max(tile.max(24))
}

/// c += a^T b (or =, without `add`) of a [rows, out] and b [rows, inp] with contiguous rows, c [out, inp]; factors are rounded
/// to bf16 if `round`.
pub fn add_outer(c: &mut [f32], a: Mat, b: Mat, add: bool, round: bool) {
    let (rows, out, inp) = (a.rows, a.cols, b.cols);
    assert!(
        b.rows == rows && c.len() == out * inp,
        "[{rows}, {out}] and [{}, {inp}] into {}",
        b.rows,
        c.len()
    );
    if out == 0 || inp == 0 {
        return;
    }
    if rows == 0 && !add {
        c.fill(0.0);
    }
    let (chunks, columns) = (blocks(rows), Chunks::of(inp, COLUMNS));
    let width = inp.min(COLUMNS).next_multiple_of(shape()[1]);
    let most = (ELEMENTS / width).max(chunks.size) / chunks.size * chunks.size;
    let steps = Chunks::of(rows, most);
    // once into the pool, not for each of the steps
    rayon::scope(|_| {
        let mut memory = par::scratch(most.min(rows) * width + LINE);
        let start = aligned(&memory);
        for lines in (0..steps.count()).map(|index| steps.range(index)) {
            for span in (0..columns.count()).map(|index| columns.range(index)) {
                let here = Chunks::of(lines.len(), chunks.size);
                let right = &mut memory[start..][..lines.len() * span.len().next_multiple_of(shape()[1])];
                pack_blocks(b.lines(lines.clone()).columns(span.clone()), here, round, right);
                let to = Part { c: &mut *c, inp, span, add: add || lines.start > 0 };
                add_blocks(to, a.lines(lines.clone()), right, here, round);
            }
        }
    });
}

/// Some columns of the result.
struct Part<'a> {
    c: &'a mut [f32],
    inp: usize,
    span: Range<usize>,
    /// Whether to add to what is there.
    add: bool,
}

/// Packs blocks of lines to panels, on all threads.
fn pack_blocks(b: Mat, chunks: Chunks, round: bool, to: &mut [f32]) {
    let columns = shape()[1];
    let blocks = to.chunks_mut(chunks.size * b.cols.next_multiple_of(columns)).enumerate();
    let parts = blocks.flat_map(|(index, block)| {
        let lines = chunks.range(index);
        let groups = block.chunks_mut(GROUP * lines.len()).enumerate();
        groups.map(move |(index, to)| (lines.clone(), index * GROUP, to))
    });
    par::each_piece(parts, |_, (lines, first, to)| {
        let x = b.lines(lines).columns(first..b.cols.min(first + GROUP));
        pack::right_lines(x, columns, round, to);
    });
}

/// Adds the product of `a` and of packed blocks of lines, on all threads.
fn add_blocks(to: Part, a: Mat, right: &[f32], chunks: Chunks, round: bool) {
    let Part { c, inp, span, add } = to;
    let (band, columns) = (band(a.cols), shape()[1]);
    let padded = span.len().next_multiple_of(columns);
    par::each_piece(c.chunks_mut(band * inp), |index, c| {
        let rows = c.len() / inp;
        let a = a.columns(index * band..index * band + rows);
        for lines in (0..chunks.count()).map(|index| chunks.range(index)) {
            let depth = lines.len();
            profile::count(ProductKernel::Panel, rows, depth, span.len());
            let beta = (add || lines.start > 0).then_some(1.0);
            let b = Right { data: &right[lines.start * padded..], panel: depth * columns, step: columns };
            let c = TileOut { data: &mut c[span.start..], row: inp, alpha: 1.0, beta };
            SCRATCH.with_borrow_mut(|Scratch { left, .. }| {
                let a = left_factor(a.lines(lines).t(), round, left);
                arch().dispatch(Block { c, a, b, rows, depth, width: span.len() });
            });
        }
    });
}
