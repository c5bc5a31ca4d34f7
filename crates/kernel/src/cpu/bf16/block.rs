//! The micro-kernel: blocks of c = a b by the processor's dot product of pairs of bf16 (AVX512-BF16), or by its tiles (AMX).
//!
//! Every element of the result is one chain of additions over pairs in order, however the result is cut into blocks.

use std::arch::x86_64::{
    __m512, __m512bh, __mmask16, _mm512_dpbf16_ps, _mm512_fmadd_ps, _mm512_loadu_si512,
    _mm512_mask_storeu_ps, _mm512_maskz_loadu_ps, _mm512_mul_ps, _mm512_set1_epi32, _mm512_set1_ps,
    _mm512_setzero_ps,
};

use super::operands::{BlockOut, LANES, Left, Right};
use crate::profile::{self, ProductKernel};

/// Computes `rows` x `width` elements from `depth` pairs each.
///
/// Panics like indexing if a slice is too short, and on a processor without AVX512-BF16.
pub fn multiply(c: BlockOut, a: Left, b: Right, rows: usize, depth: usize, width: usize) {
    if rows == 0 || width == 0 {
        return;
    }
    profile::count(ProductKernel::Pairs, rows, 2 * depth, width);
    assert!(super::is_native(), "this processor has no bf16 dot product");
    assert!(c.row >= width || rows == 1, "rows of the result overlap");
    assert!((rows - 1) * c.row + width <= c.data.len(), "result");
    if depth > 0 {
        assert!((rows - 1) * a.row + (depth - 1) * a.step < a.data.len(), "left factor");
        assert!((depth - 1) * b.row + width.next_multiple_of(LANES) <= b.data.len(), "right factor");
    }
    if super::has_tiles() && depth > 0 {
        // SAFETY: the process may use tiles, and the asserts above hold.
        return unsafe { super::tiles::multiply(c, a, b, rows, depth, width) };
    }
    multiply_by_vectors(c, a, b, rows, depth, width);
}

/// [`multiply`] by vectors, after its checks.
fn multiply_by_vectors(mut c: BlockOut, a: Left, b: Right, rows: usize, depth: usize, width: usize) {
    let mut column = 0;
    while column < width {
        let vectors = (width - column).div_ceil(LANES).min(4);
        let last = (width - column - (vectors - 1) * LANES).min(LANES);
        let part = Part { column, depth, mask: u16::MAX >> (LANES - last) };
        // SAFETY: the processor has the instructions; the asserts of `multiply` hold every access of `Part::block` within
        // the slices, as rows stay below `rows` and columns below `width`, rounded up to vectors where c is
        // masked and b is padded.
        unsafe {
            match vectors {
                1 => part.rows::<12, 1>(&mut c, a, b, rows),
                2 => part.rows::<12, 2>(&mut c, a, b, rows),
                3 => part.rows::<8, 3>(&mut c, a, b, rows),
                _ => part.rows::<6, 4>(&mut c, a, b, rows),
            }
        }
        column += vectors * LANES;
    }
}

/// Some columns of the result.
struct Part {
    column: usize,
    depth: usize,
    /// Elements of the last vector that exist.
    mask: __mmask16,
}

impl Part {
    /// `V` vectors of all rows, `R` rows at a time.
    #[target_feature(enable = "avx512f,avx512bf16")]
    unsafe fn rows<const R: usize, const V: usize>(&self, c: &mut BlockOut, a: Left, b: Right, rows: usize) {
        let mut row = 0;
        // SAFETY: passed on to the caller.
        unsafe {
            while row + R <= rows {
                self.block::<R, V>(c, a, b, row);
                row += R;
            }
            if row + 8 <= rows {
                self.block::<8, V>(c, a, b, row);
                row += 8;
            }
            if row + 4 <= rows {
                self.block::<4, V>(c, a, b, row);
                row += 4;
            }
            if row + 2 <= rows {
                self.block::<2, V>(c, a, b, row);
                row += 2;
            }
            if row < rows {
                self.block::<1, V>(c, a, b, row);
            }
        }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bf16")]
    unsafe fn block<const R: usize, const V: usize>(&self, c: &mut BlockOut, a: Left, b: Right, row: usize) {
        let mut sums = [[_mm512_setzero_ps(); V]; R];
        // SAFETY: `multiply` checked the extents; loads and stores need no alignment, and c is borrowed exclusively.
        unsafe {
            let from = a.data.as_ptr().wrapping_add(row * a.row);
            let right = b.data.as_ptr().wrapping_add(self.column);
            for k in 0..self.depth {
                let (from, right) = (from.add(k * a.step), right.add(k * b.row));
                let mut vectors = [as_pairs(_mm512_set1_epi32(0)); V];
                for (j, vector) in vectors.iter_mut().enumerate() {
                    *vector = as_pairs(_mm512_loadu_si512(right.add(j * LANES).cast()));
                }
                for (i, sums) in sums.iter_mut().enumerate() {
                    let pair = as_pairs(_mm512_set1_epi32(*from.add(i * a.row) as i32));
                    for (sum, &vector) in sums.iter_mut().zip(&vectors) {
                        *sum = _mm512_dpbf16_ps(*sum, pair, vector);
                    }
                }
            }
            let to = c.data.as_mut_ptr().add(row * c.row + self.column);
            let alpha = _mm512_set1_ps(c.alpha);
            for (i, sums) in sums.iter().enumerate() {
                for (j, &sum) in sums.iter().enumerate() {
                    let to = to.add(i * c.row + j * LANES);
                    let mask = if j + 1 == V { self.mask } else { u16::MAX };
                    let sum: __m512 = _mm512_mul_ps(alpha, sum);
                    let sum = match c.beta {
                        Some(beta) => {
                            _mm512_fmadd_ps(_mm512_set1_ps(beta), _mm512_maskz_loadu_ps(mask, to), sum)
                        }
                        None => sum,
                    };
                    _mm512_mask_storeu_ps(to, mask, sum);
                }
            }
        }
    }
}

/// Bits as pairs.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
fn as_pairs(bits: std::arch::x86_64::__m512i) -> __m512bh {
    // SAFETY: both types are 64 bytes of plain data.
    unsafe { std::mem::transmute(bits) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::bf16::{has_tiles, tiles};

    /// Pairs of bf16 fractions.
    fn pairs(count: usize, seed: usize) -> Vec<u32> {
        let number =
            |i: usize| half::bf16::from_f32(((i * 31 + seed * 17) % 19) as f32 * 0.37 - 3.0).to_bits();
        (0..count).map(|i| u32::from(number(2 * i)) | u32::from(number(2 * i + 1)) << 16).collect()
    }

    const SHAPES: [[usize; 3]; 9] = [
        [1, 1, 1],
        [1, 40, 70],
        [15, 16, 16],
        [16, 17, 64],
        [17, 31, 33],
        [32, 32, 96],
        [47, 5, 130],
        [48, 64, 64],
        [100, 33, 1],
    ];

    /// c of a shape in both layouts of the left factor, set, and added to.
    fn products([rows, depth, width]: [usize; 3], multiply: impl Fn(BlockOut, Left, Right)) -> Vec<f32> {
        let (padded, row) = (width.next_multiple_of(LANES), width + 3);
        let (a, b) = (pairs(rows * (depth + 2), 1), pairs(depth * padded, 2));
        let turned: Vec<u32> = (0..depth * rows).map(|i| a[i % rows * (depth + 2) + i / rows]).collect();
        let mut all = Vec::new();
        for left in [Left { data: &a, row: depth + 2, step: 1 }, Left { data: &turned, row: 1, step: rows }] {
            let mut c = vec![0.5; rows * row];
            for (alpha, beta) in [(1.0, None), (0.5, Some(1.0)), (1.0, Some(2.0)), (1.0, Some(1.0))] {
                multiply(BlockOut { data: &mut c, row, alpha, beta }, left, Right { data: &b, row: padded });
                all.extend_from_slice(&c);
            }
        }
        all
    }

    #[test]
    fn tiles_and_vectors_are_the_same_products() {
        if !has_tiles() {
            return;
        }
        for shape in SHAPES {
            let [rows, depth, width] = shape;
            // SAFETY: the process may use tiles; factors and results have these extents.
            let by_tiles = products(shape, |c, a, b| unsafe { tiles::multiply(c, a, b, rows, depth, width) });
            let vectors = products(shape, |c, a, b| multiply_by_vectors(c, a, b, rows, depth, width));
            let most = vectors.iter().fold(0.0, |most: f32, x| most.max(x.abs()));
            let gap = by_tiles.iter().zip(&vectors).map(|(x, y)| (x - y).abs()).fold(0.0, f32::max);
            assert!(gap < 2e-6 * most, "{shape:?}: {gap} of {most}");
        }
    }

    #[test]
    fn a_result_is_the_same_however_it_is_cut() {
        if !has_tiles() {
            return;
        }
        for shape in SHAPES {
            let [rows, depth, width] = shape;
            // SAFETY: as above.
            let whole = products(shape, |c, a, b| unsafe { tiles::multiply(c, a, b, rows, depth, width) });
            let cut = products(shape, |c, left, right| {
                let BlockOut { data, row, alpha, beta } = c;
                for first in (0..rows).step_by(7) {
                    for column in (0..width).step_by(2 * LANES) {
                        let c = BlockOut { data: &mut data[first * row + column..], row, alpha, beta };
                        let (a, b) = (&left.data[first * left.row..], &right.data[column..]);
                        let (a, b) = (Left { data: a, ..left }, Right { data: b, ..right });
                        let (rows, width) = (7.min(rows - first), (2 * LANES).min(width - column));
                        // SAFETY: as above.
                        unsafe { tiles::multiply(c, a, b, rows, depth, width) }
                    }
                }
            });
            assert!(whole == cut, "{shape:?}");
        }
    }
}
