//! Blocks of c = a b by the tile registers of AMX.
//!
//! A tile is 16 rows of 64 bytes: 16 rows of 16 pairs of the left factor, 16 pairs of rows of 16 columns of the right one, or 16 x 16 sums.
//! Every element of the result is one chain over tiles of pairs in order, from zero or from what it is added to, however the result is
//! cut into blocks; a factor that ends within a tile is continued with zeros.

use std::arch::asm;
use std::cell::RefCell;

use super::operands::{BlockOut, LANES, Left, Right};
use super::registers::{BYTES, Line, PAIRS, Place, ROWS, Scales, ZEROS, configure, release};
use crate::cpu::transpose::transpose_apart;

/// Copies of what cannot be loaded from where it lies.
#[derive(Default)]
struct Copies {
    /// Of up to two bands of rows of the left factor, one behind the other.
    left: Vec<Line>,
    /// The last pairs of rows of the right factor, if they are less than a tile.
    right: Vec<Line>,
}

thread_local! {
    static COPIES: RefCell<Copies> = RefCell::default();
}

/// `block::multiply` on a processor with AMX; `depth` counts pairs and is not zero.
///
/// # Safety
///
/// The process may use the tiles, and slices have the extents that `block::multiply` demands.
pub unsafe fn multiply(mut c: BlockOut, a: Left, b: Right, rows: usize, depth: usize, width: usize) {
    COPIES.with_borrow_mut(|copies| {
        copies.right.clear();
        copy_last_pairs(b, depth, width, &mut copies.right);
        let height = rows.min(ROWS);
        // SAFETY: passed on to the caller.
        unsafe {
            configure(height);
            let mut from = 0;
            while from < rows {
                let bands = if from + 2 * ROWS <= rows { 2 } else { 1 };
                // a last band that is not whole begins with rows of the one before, which it does not store
                let first = from.min(rows - height);
                let left = LeftTiles::new(a, first, [bands, height], depth, &mut copies.left);
                let block = Block { left, b, depth, height, last: &copies.right, skip: from - first };
                block.columns(&mut c, first, bands, width);
                from = first + bands * height;
            }
            release();
        }
    });
}

/// Copies the pairs of rows of `b` behind the last whole tile, with zeros behind them.
fn copy_last_pairs(b: Right, depth: usize, width: usize, to: &mut Vec<Line>) {
    let rest = depth % PAIRS;
    if rest == 0 {
        return;
    }
    let lines = width.div_ceil(LANES);
    to.resize(PAIRS * lines, ZEROS);
    for (pair, to) in to.chunks_mut(lines).take(rest).enumerate() {
        let from = &b.data[(depth - rest + pair) * b.row..][..lines * LANES];
        for (to, from) in to.iter_mut().zip(from.chunks(LANES)) {
            to.0.copy_from_slice(from);
        }
    }
}

/// Tiles that follow each other in the summed dimension: the first and the bytes between rows and between tiles.
#[derive(Clone, Copy)]
struct Run {
    from: *const u8,
    row: usize,
    tile: usize,
    count: usize,
}

/// Bands of rows of the left factor: tiles that are whole, and the last one, continued with zeros.
struct LeftTiles {
    whole: Run,
    last: Run,
    /// Bytes between two bands.
    band: [usize; 2],
}

impl LeftTiles {
    /// `bands` times `height` rows from `first` on. Rows whose pairs lie next to each other are loaded from there; others are turned.
    fn new(a: Left, first: usize, [bands, height]: [usize; 2], depth: usize, to: &mut Vec<Line>) -> Self {
        let (tiles, rest) = (depth / PAIRS, depth % PAIRS);
        let in_place = if a.step == 1 { tiles } else { 0 };
        let copied = tiles - in_place + usize::from(rest > 0);
        to.resize(to.len().max(bands * copied * ROWS), ZEROS);
        let copies = to.chunks_mut((copied * ROWS).max(1)).enumerate();
        for (band, to) in copies.take(if copied == 0 { 0 } else { bands }) {
            if rest > 0 {
                to[(copied - 1) * ROWS..].fill(ZEROS);
            }
            let from = &a.data[(first + band * ROWS) * a.row..];
            for (tile, to) in to.chunks_mut(ROWS).enumerate() {
                let at = (in_place + tile) * PAIRS;
                let pairs = PAIRS.min(depth - at);
                if a.step == 1 {
                    for (row, to) in to.iter_mut().enumerate().take(height) {
                        to.0[..pairs].copy_from_slice(&from[row * a.row + at..][..pairs]);
                    }
                } else {
                    let to: &mut [f32] = bytemuck::cast_slice_mut(as_words(to));
                    turn((bytemuck::cast_slice(&from[at * a.step..]), a.step), a.row, [pairs, height], to);
                }
            }
        }
        let copy = to.as_ptr().cast::<u8>();
        let in_place_run = Run {
            from: a.data.as_ptr().wrapping_add(first * a.row).cast(),
            row: 4 * a.row,
            tile: BYTES,
            count: in_place,
        };
        let copied_run = Run { from: copy, row: BYTES, tile: ROWS * BYTES, count: tiles };
        let whole = if a.step == 1 { in_place_run } else { copied_run };
        let last = copy.wrapping_add((tiles - in_place) * ROWS * BYTES);
        let copied_band = copied * ROWS * BYTES;
        Self {
            whole,
            last: Run { from: last, row: BYTES, tile: 0, count: usize::from(rest > 0) },
            band: [if a.step == 1 { ROWS * whole.row } else { copied_band }, copied_band],
        }
    }
}

/// The transpose of [pairs, rows] whose rows are `step` apart, to lines.
fn turn((x, step): (&[f32], usize), row: usize, [pairs, rows]: [usize; 2], to: &mut [f32]) {
    if row == 1 {
        return transpose_apart((x, step), pairs, rows, (to, PAIRS));
    }
    for (at, to) in to.chunks_mut(PAIRS).enumerate().take(rows) {
        for (pair, to) in to.iter_mut().enumerate().take(pairs) {
            *to = x[at * row + pair * step];
        }
    }
}

fn as_words(lines: &mut [Line]) -> &mut [u32] {
    let len = lines.len() * PAIRS;
    // SAFETY: a line is nothing but its words.
    unsafe { std::slice::from_raw_parts_mut(lines.as_mut_ptr().cast(), len) }
}

/// Bands of rows of a product.
struct Block<'a> {
    left: LeftTiles,
    b: Right<'a>,
    depth: usize,
    height: usize,
    last: &'a [Line],
    /// Rows that are not stored.
    skip: usize,
}

impl Block<'_> {
    /// All columns: 2 x 2 tiles of the result at a time, or 1 x 4.
    #[target_feature(enable = "avx512f")]
    unsafe fn columns(&self, c: &mut BlockOut, first: usize, bands: usize, width: usize) {
        let mut column = 0;
        while column < width {
            let vectors = (width - column).div_ceil(LANES).min(if bands == 2 { 2 } else { 4 });
            let to = Place {
                data: c.data.as_mut_ptr().wrapping_add(first * c.row + column),
                row: c.row,
                vectors,
                mask: u16::MAX >> (LANES - (width - column - (vectors - 1) * LANES).min(LANES)),
                skip: self.skip,
                height: self.height,
            };
            let adds = (c.alpha, c.beta) == (1.0, Some(1.0));
            let by = (c.alpha, c.beta.filter(|_| !adds));
            // SAFETY: passed on to the caller.
            unsafe {
                match (bands, vectors) {
                    (2, 1) => self.two_bands::<1>(column, to, by, adds),
                    (2, _) => self.two_bands::<2>(column, to, by, adds),
                    (_, 1) => self.one_band::<1>(column, to, by, adds),
                    (_, 2) => self.one_band::<2>(column, to, by, adds),
                    (_, 3) => self.one_band::<3>(column, to, by, adds),
                    _ => self.one_band::<4>(column, to, by, adds),
                }
            }
            column += vectors * LANES;
        }
    }

    /// Tiles of the left factor, those of the right one from `column` on, and the bytes between two bands.
    fn runs(&self, column: usize) -> [(Run, Run, usize); 2] {
        let right = Run {
            from: self.b.data.as_ptr().wrapping_add(column).cast(),
            row: 4 * self.b.row,
            tile: PAIRS * 4 * self.b.row,
            count: self.depth / PAIRS,
        };
        let lines = self.last.len() / PAIRS;
        let last = Run {
            from: self.last.as_ptr().wrapping_add(column / LANES).cast(),
            row: lines * BYTES,
            tile: 0,
            count: self.left.last.count,
        };
        [(self.left.whole, right, self.left.band[0]), (self.left.last, last, self.left.band[1])]
    }

    /// The product of two bands by up to two tiles of columns, in registers 0 and 2, 1 and 3.
    #[target_feature(enable = "avx512f")]
    unsafe fn two_bands<const V: usize>(&self, column: usize, to: Place, by: Scales, adds: bool) {
        let places = [to.tile(0, 0), to.tile(0, 1), to.tile(1, 0), to.tile(1, 1)];
        // SAFETY: the tiles are configured; all that is loaded lies within the factors and their copies, as the caller holds.
        unsafe {
            places[0].start::<0>(adds);
            places[2].start::<2>(adds);
            if V == 2 {
                places[1].start::<1>(adds);
                places[3].start::<3>(adds);
            }
            for (left, right, band) in self.runs(column) {
                let (mut a, mut b) = (left.from, right.from);
                for _ in 0..left.count {
                    asm!(
                        "tileloadd tmm4, [{a} + {a_row}*1]",
                        "tileloadd tmm6, [{b} + {b_row}*1]",
                        "tdpbf16ps tmm0, tmm4, tmm6",
                        "tileloadd tmm5, [{a2} + {a_row}*1]",
                        "tdpbf16ps tmm2, tmm5, tmm6",
                        a = in(reg) a, a2 = in(reg) a.wrapping_add(band), a_row = in(reg) left.row,
                        b = in(reg) b, b_row = in(reg) right.row,
                        options(nostack, readonly, preserves_flags),
                    );
                    if V == 2 {
                        asm!(
                            "tileloadd tmm7, [{b} + {b_row}*1 + 64]",
                            "tdpbf16ps tmm1, tmm4, tmm7",
                            "tdpbf16ps tmm3, tmm5, tmm7",
                            b = in(reg) b, b_row = in(reg) right.row,
                            options(nostack, readonly, preserves_flags),
                        );
                    }
                    (a, b) = (a.wrapping_add(left.tile), b.wrapping_add(right.tile));
                }
            }
            places[0].end::<0>(by);
            places[2].end::<2>(by);
            if V == 2 {
                places[1].end::<1>(by);
                places[3].end::<3>(by);
            }
        }
    }

    /// The product of a band by up to four tiles of columns, in registers 0 to 3.
    #[target_feature(enable = "avx512f")]
    unsafe fn one_band<const V: usize>(&self, column: usize, to: Place, by: Scales, adds: bool) {
        let places = [to.tile(0, 0), to.tile(0, 1), to.tile(0, 2), to.tile(0, 3)];
        // SAFETY: as in `two_bands`.
        unsafe {
            places[0].start::<0>(adds);
            if V > 1 {
                places[1].start::<1>(adds);
            }
            if V > 2 {
                places[2].start::<2>(adds);
            }
            if V > 3 {
                places[3].start::<3>(adds);
            }
            for (left, right, _) in self.runs(column) {
                let (mut a, mut b) = (left.from, right.from);
                for _ in 0..left.count {
                    asm!(
                        "tileloadd tmm4, [{a} + {a_row}*1]",
                        "tileloadd tmm5, [{b} + {b_row}*1]",
                        "tdpbf16ps tmm0, tmm4, tmm5",
                        a = in(reg) a, a_row = in(reg) left.row, b = in(reg) b, b_row = in(reg) right.row,
                        options(nostack, readonly, preserves_flags),
                    );
                    if V > 1 {
                        asm!(
                            "tileloadd tmm6, [{b} + {b_row}*1 + 64]",
                            "tdpbf16ps tmm1, tmm4, tmm6",
                            b = in(reg) b, b_row = in(reg) right.row,
                            options(nostack, readonly, preserves_flags),
                        );
                    }
                    if V > 2 {
                        asm!(
                            "tileloadd tmm7, [{b} + {b_row}*1 + 128]",
                            "tdpbf16ps tmm2, tmm4, tmm7",
                            b = in(reg) b, b_row = in(reg) right.row,
                            options(nostack, readonly, preserves_flags),
                        );
                    }
                    if V > 3 {
                        asm!(
                            "tileloadd tmm5, [{b} + {b_row}*1 + 192]",
                            "tdpbf16ps tmm3, tmm4, tmm5",
                            b = in(reg) b, b_row = in(reg) right.row,
                            options(nostack, readonly, preserves_flags),
                        );
                    }
                    (a, b) = (a.wrapping_add(left.tile), b.wrapping_add(right.tile));
                }
            }
            places[0].end::<0>(by);
            if V > 1 {
                places[1].end::<1>(by);
            }
            if V > 2 {
                places[2].end::<2>(by);
            }
            if V > 3 {
                places[3].end::<3>(by);
            }
        }
    }
}
