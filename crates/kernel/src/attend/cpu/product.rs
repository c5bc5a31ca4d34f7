//! Small matrix products whose left factor is read as scalars and whose right factor as vectors.
//!
//! All five products of softmax attention and its gradient have this form, with tiles that stand in the
//! first-level cache. Every element of the result is one chain of multiply-adds over k in order, however the
//! result is cut into blocks, so its bits do not depend on the blocking.

use std::cell::RefCell;

use pulp::{Simd, WithSimd};

use crate::attend::tile::WIDTH;
use crate::cpu::bf16;
use crate::cpu::gemm::{Mat, MatMut};
use crate::cpu::matmul_format::{MatmulFormat, matmul_format};
use crate::cpu::panel;
use crate::cpu::simd::arch;
use crate::profile::{self, ProductKernel};

/// The left factor: element (i, k) is `data[i * row + k * step]`.
#[derive(Clone, Copy)]
pub struct Scalars<'a> {
    /// Where element (0, 0) is the first.
    pub data: &'a [f32],
    /// Distance of two i.
    pub row: usize,
    /// Distance of two k.
    pub step: usize,
    /// The same as [`pack_rows`] packs it where `step` is 1, else as [`pack_columns`] does, from the first element on; or nothing.
    pub pairs: &'a [u32],
}

/// Rows of the right factor: element (k, j) is `data[k * row + j]`.
#[derive(Clone, Copy)]
pub struct Vectors<'a> {
    /// Where element (0, 0) is the first.
    pub data: &'a [f32],
    /// Distance of two rows.
    pub row: usize,
    /// The same as [`pack_lines`] packs it, from the first element on; or nothing.
    pub pairs: &'a [u32],
}

/// The result: element (i, j) is `data[i * row + j]`.
pub struct ProductOut<'a> {
    /// Where element (0, 0) is the first.
    pub data: &'a mut [f32],
    /// Distance of two rows.
    pub row: usize,
    /// Whether the product is added to what stands there.
    pub add: bool,
}

/// c = a b or c += a b, with `rows` x `width` elements summed over `depth`.
///
/// `width` is a multiple of [`WIDTH`]. Panics like indexing if a slice is too short.
pub fn product(c: ProductOut, a: Scalars, b: Vectors, rows: usize, depth: usize, width: usize) {
    if rows == 0 || width == 0 {
        return;
    }
    let whole = Product { c, a, b, rows, depth, width };
    whole.check();
    match matmul_format() {
        MatmulFormat::F32 => {
            profile::count(ProductKernel::Tile, rows, depth, width);
            arch().dispatch(whole);
        }
        MatmulFormat::Bf16 => rounded(whole.c, a, b, rows, depth, width),
    }
}

/// c = a b of contiguous matrices [rows, depth] and [depth, width]: to measure how long a product of this shape takes.
pub(crate) fn plain(c: &mut [f32], a: &[f32], b: &[f32], rows: usize, depth: usize, width: usize) {
    let c = ProductOut { data: c, row: width, add: false };
    let a = Scalars { data: a, row: depth, step: 1, pairs: &[] };
    product(c, a, Vectors { data: b, row: width, pairs: &[] }, rows, depth, width);
}

/// The product of factors rounded to bf16.
fn rounded(c: ProductOut, a: Scalars, b: Vectors, rows: usize, depth: usize, width: usize) {
    let left = a.mat(rows, depth);
    let right = Mat::strided(b.data, depth, width, b.row);
    #[cfg(target_arch = "x86_64")]
    if bf16::is_native() {
        let (left, right) = (bf16::Factor::new(left, a.pairs), bf16::Factor::new(right, b.pairs));
        let apart = if a.step == 1 { a.row / 2 } else { bf16::pairs(depth) };
        return bf16::product((c.data, c.row, c.add), (left, apart), (right, b.row));
    }
    if !panel::has_vectors() {
        return bf16::gemm(
            MatMut::strided(c.data, rows, width, c.row),
            left,
            right,
            1.0,
            c.add.then_some(1.0),
        );
    }
    profile::count(ProductKernel::Tile, rows, depth, width);
    ROUNDED.with_borrow_mut(|[x, y]| {
        let a = if a.pairs.is_empty() {
            // what of the left factor is contiguous
            let (data, apart) = rounded_lines(if a.step == 1 { left } else { left.t() }, x);
            let (row, step) = if a.step == 1 { (apart, 1) } else { (1, apart) };
            Scalars { data, row, step, pairs: &[] }
        } else {
            Scalars { data: bytemuck::cast_slice(a.pairs), ..a }
        };
        let b = if b.pairs.is_empty() {
            let (data, row) = rounded_lines(right, y);
            Vectors { data, row, pairs: &[] }
        } else {
            Vectors { data: bytemuck::cast_slice(b.pairs), ..b }
        };
        let product = Product { c, a, b, rows, depth, width };
        product.check();
        arch().dispatch(product);
    });
}

thread_local! {
    static ROUNDED: RefCell<[Vec<f32>; 2]> = const { RefCell::new([Vec::new(), Vec::new()]) };
}

/// Contiguous rows rounded to bf16, and their distance.
fn rounded_lines<'a>(x: Mat, to: &'a mut Vec<f32>) -> (&'a [f32], usize) {
    let (len, apart) = (x.rows() * x.cols(), x.cols());
    if to.len() < len {
        to.resize(len, 0.0);
    }
    panel::copy_rows(x, true, (&mut to[..len], apart));
    (&to[..len], apart)
}

/// How products take the factors that were packed for them.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Packing {
    /// Products are of f32, or round each time: nothing is packed.
    None,
    /// Pairs of bf16.
    Pairs,
    /// Rounded elements in f32, as bits.
    Rounded,
}

fn packing() -> Packing {
    match matmul_format() {
        MatmulFormat::F32 => Packing::None,
        MatmulFormat::Bf16 if bf16::is_native() => Packing::Pairs,
        MatmulFormat::Bf16 if panel::has_vectors() => Packing::Rounded,
        MatmulFormat::Bf16 => Packing::None,
    }
}

/// Packs rows of a left factor, `row` (an even number) elements apart, if products read packed ones; else makes `to` empty.
pub fn pack_rows(data: &[f32], row: usize, to: &mut Vec<u32>) {
    to.clear();
    match packing() {
        Packing::None => (),
        Packing::Rounded => round_behind(data, to),
        Packing::Pairs => {
            #[cfg(target_arch = "x86_64")]
            {
                to.resize(data.len() / 2, 0);
                bf16::pack_rows(Mat::new(data, data.len() / row, row), to);
            }
        }
    }
    let _ = row;
}

/// Packs the rows of a right factor, `row` elements apart, behind what is in `to`, if products read packed ones. Rows 2 k and
/// 2 k + 1 become row k of pairs.
pub fn pack_lines(data: &[f32], row: usize, to: &mut Vec<u32>) {
    pack_behind(data, row, to, false);
}

/// Packs the columns of `data`, whose rows are `row` (a multiple of 16) elements apart, as rows of a left factor behind what is in
/// `to`, if products read packed ones.
pub fn pack_columns(data: &[f32], row: usize, to: &mut Vec<u32>) {
    pack_behind(data, row, to, true);
}

/// [`pack_columns`] if `turned`, else [`pack_lines`].
fn pack_behind(data: &[f32], row: usize, to: &mut Vec<u32>, turned: bool) {
    match packing() {
        Packing::None => (),
        Packing::Rounded => round_behind(data, to),
        Packing::Pairs => {
            #[cfg(target_arch = "x86_64")]
            {
                let (start, rows) = (to.len(), data.len() / row);
                to.resize(start + bf16::pairs(rows) * row, 0);
                let pack = if turned { bf16::pack_columns } else { bf16::pack_lines };
                pack(Mat::new(data, rows, row), &mut to[start..]);
            }
        }
    }
    let _ = (row, turned);
}

/// Appends rounded elements.
fn round_behind(data: &[f32], to: &mut Vec<u32>) {
    let start = to.len();
    to.extend_from_slice(bytemuck::cast_slice(data));
    panel::round_in_place(bytemuck::cast_slice_mut(&mut to[start..]));
}

/// The part of `pairs` from `start` on, or nothing where nothing was packed.
pub fn from(pairs: &[u32], start: usize) -> &[u32] {
    pairs.get(start..).unwrap_or_default()
}

/// The part of what [`pack_rows`] packed that starts with element `start` (an even number).
pub fn from_row(packed: &[u32], start: usize) -> &[u32] {
    from(packed, if packing() == Packing::Rounded { start } else { start / 2 })
}

/// The part of what [`pack_lines`] packed that starts with row `first` of `row` elements, which is in line `line` of pairs.
pub fn from_line(packed: &[u32], (first, line): (usize, usize), row: usize) -> &[u32] {
    from(packed, row * if packing() == Packing::Rounded { first } else { line })
}

impl<'a> Scalars<'a> {
    /// As a matrix; one of `row` and `step` is 1.
    fn mat(self, rows: usize, depth: usize) -> Mat<'a> {
        let Self { data, row, step, .. } = self;
        if step == 1 {
            Mat::strided(data, rows, depth, row)
        } else {
            Mat::strided(data, depth, rows, step).t()
        }
    }
}

struct Product<'a> {
    c: ProductOut<'a>,
    a: Scalars<'a>,
    b: Vectors<'a>,
    rows: usize,
    depth: usize,
    width: usize,
}

impl Product<'_> {
    /// Panics if a slice is too short.
    fn check(&self) {
        let Self { ref c, a, b, rows, depth, width } = *self;
        let reach = |rows: usize, row: usize, last: usize| (rows - 1) * row + last;
        assert!(width.is_multiple_of(WIDTH), "width {width} is not a multiple of {WIDTH}");
        assert!(c.row >= width || rows == 1, "rows of the result overlap");
        assert!(reach(rows, c.row, width) <= c.data.len(), "result");
        if depth > 0 {
            assert!(reach(rows, a.row, 0) + reach(depth, a.step, 0) < a.data.len(), "left factor");
            assert!(reach(depth, b.row, width) <= b.data.len(), "right factor");
        }
    }
}

impl WithSimd for Product<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(mut self, simd: S) {
        let lanes = S::F32_LANES;
        // Accumulators of a block, a row of b and one scalar fit the vector registers.
        let most = if S::REGISTER_COUNT >= 32 { 4 } else { 2 };
        let mut column = 0;
        while column < self.width {
            let vectors = ((self.width - column) / lanes).clamp(1, most);
            match vectors {
                1 => self.column::<S, 8, 1>(simd, column),
                2 if most == 2 => self.column::<S, 6, 2>(simd, column),
                2 => self.column::<S, 8, 2>(simd, column),
                3 => self.column::<S, 8, 3>(simd, column),
                _ => self.column::<S, 6, 4>(simd, column),
            }
            column += vectors * lanes;
        }
    }
}

impl Product<'_> {
    /// `V` vectors of every row from `column` on, `R` rows at a time.
    #[inline(always)]
    fn column<S: Simd, const R: usize, const V: usize>(&mut self, simd: S, column: usize) {
        let mut row = 0;
        while row + R <= self.rows {
            self.block::<S, R, V>(simd, row, column);
            row += R;
        }
        if row + 4 <= self.rows {
            self.block::<S, 4, V>(simd, row, column);
            row += 4;
        }
        if row + 2 <= self.rows {
            self.block::<S, 2, V>(simd, row, column);
            row += 2;
        }
        if row < self.rows {
            self.block::<S, 1, V>(simd, row, column);
        }
    }

    #[inline(always)]
    fn block<S: Simd, const R: usize, const V: usize>(&mut self, simd: S, row: usize, column: usize) {
        let lanes = S::F32_LANES;
        let (c_row, a_row) = (self.c.row, self.a.row);
        let mut sums = [[simd.splat_f32s(0.0); V]; R];
        // SAFETY: `check` held that `rows` x `width` elements of c, `rows` x `depth` of a and `depth` x
        // `width` of b lie inside their slices; `with_simd` and `column` stay below `rows` and `width`, which is
        // a multiple of the lanes. f32s is plain data of that many f32, read and written unaligned. c is
        // borrowed exclusively.
        unsafe {
            let c = self.c.data.as_mut_ptr().add(row * c_row + column);
            let at = |i: usize, j: usize| c.add(i * c_row + j * lanes).cast::<S::f32s>();
            if self.c.add {
                for (i, sums) in sums.iter_mut().enumerate() {
                    for (j, sum) in sums.iter_mut().enumerate() {
                        *sum = at(i, j).read_unaligned();
                    }
                }
            }
            let (mut a, mut b) = (self.a.data.as_ptr(), self.b.data.as_ptr());
            if self.depth > 0 {
                a = a.add(row * a_row);
                b = b.add(column);
            }
            for k in 0..self.depth {
                let (a, b) = (a.add(k * self.a.step), b.add(k * self.b.row));
                let mut vectors = [simd.splat_f32s(0.0); V];
                for (j, vector) in vectors.iter_mut().enumerate() {
                    *vector = b.add(j * lanes).cast::<S::f32s>().read_unaligned();
                }
                for (i, sums) in sums.iter_mut().enumerate() {
                    let scalar = simd.splat_f32s(*a.add(i * a_row));
                    for (sum, &vector) in sums.iter_mut().zip(&vectors) {
                        *sum = simd.mul_add_e_f32s(scalar, vector, *sum);
                    }
                }
            }
            for (i, sums) in sums.iter().enumerate() {
                for (j, &sum) in sums.iter().enumerate() {
                    at(i, j).write_unaligned(sum);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(count: usize, seed: usize) -> Vec<f32> {
        (0..count).map(|i| ((i * 31 + seed * 17) % 19) as f32 - 9.0).collect()
    }

    #[test]
    fn products_of_all_block_sizes() {
        for width in [16, 32, 48, 64, 80, 112] {
            for (rows, depth) in (0..20).map(|rows| (rows, 5)).chain([(67, 64), (3, 0), (13, 1)]) {
                for (row, step) in [(depth + 2, 1), (1, rows + 3)] {
                    let a = numbers(rows * row + depth * step + 1, 1);
                    let b = numbers(depth * (width + 5), 2);
                    let start = numbers(rows * (width + 3), 3);
                    for add in [false, true] {
                        let mut c = start.clone();
                        let result = ProductOut { data: &mut c, row: width + 3, add };
                        let (a, b) = (
                            Scalars { data: &a, row, step, pairs: &[] },
                            Vectors { data: &b, row: width + 5, pairs: &[] },
                        );
                        product(result, a, b, rows, depth, width);
                        for (at, (c, start)) in c.iter().zip(&start).enumerate() {
                            let (i, j) = (at / (width + 3), at % (width + 3));
                            let sum = (0..depth)
                                .map(|k| a.data[i * row + k * step] * b.data[k * b.row + j.min(width - 1)]);
                            let sum: f32 = sum.sum();
                            let want = if j >= width { *start } else { sum + if add { *start } else { 0.0 } };
                            assert_eq!(*c, want, "{rows} {depth} {width} at {i} {j}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    #[should_panic(expected = "right factor")]
    fn a_short_factor_is_refused() {
        let result = ProductOut { data: &mut [0.0; 32], row: 16, add: false };
        let a = Scalars { data: &[0.0; 6], row: 3, step: 1, pairs: &[] };
        product(result, a, Vectors { data: &[0.0; 47], row: 16, pairs: &[] }, 2, 3, 16);
    }
}
