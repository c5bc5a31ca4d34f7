//! The micro-kernel: blocks of c = a b by the processor's dot product of pairs of bf16 (AVX512-BF16).
//!
//! A *pair* is two bf16 that follow each other in the summed dimension, the first in the low half. Every element
//! of the result is one chain of additions over pairs in order, however the result is cut into blocks.

use std::arch::x86_64::{
    __m512, __m512bh, __mmask16, _mm512_dpbf16_ps, _mm512_fmadd_ps, _mm512_loadu_si512,
    _mm512_mask_storeu_ps, _mm512_maskz_loadu_ps, _mm512_mul_ps, _mm512_set1_epi32, _mm512_set1_ps,
    _mm512_setzero_ps,
};

use crate::profile::{self, ProductKernel};

/// Elements of a vector; rows of the right factor are padded to multiples of it.
pub const LANES: usize = 16;

/// The left factor: pair (i, k) is `data[i * row + k * step]`.
#[derive(Clone, Copy)]
pub struct Left<'a> {
    pub data: &'a [u32],
    pub row: usize,
    pub step: usize,
}

/// The right factor: pair (k, j) is `data[k * row + j]`.
#[derive(Clone, Copy)]
pub struct Right<'a> {
    pub data: &'a [u32],
    pub row: usize,
}

/// The result: element (i, j) is `data[i * row + j]`; it becomes alpha a b + beta c, or alpha a b without `beta`.
pub struct BlockOut<'a> {
    pub data: &'a mut [f32],
    pub row: usize,
    pub alpha: f32,
    pub beta: Option<f32>,
}

/// Computes `rows` x `width` elements from `depth` pairs each.
///
/// Panics like indexing if a slice is too short, and on a processor without AVX512-BF16.
pub fn multiply(mut c: BlockOut, a: Left, b: Right, rows: usize, depth: usize, width: usize) {
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
    let mut column = 0;
    while column < width {
        let vectors = (width - column).div_ceil(LANES).min(4);
        let last = (width - column - (vectors - 1) * LANES).min(LANES);
        let part = Part { column, depth, mask: u16::MAX >> (LANES - last) };
        // SAFETY: the processor has the instructions; the asserts above hold every access of `Part::block` within
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
