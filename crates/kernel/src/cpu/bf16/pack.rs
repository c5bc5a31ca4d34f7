//! Rounding f32 matrices to pairs of bf16.

use std::arch::x86_64::{
    __m512bh, __m512i, _mm512_cvtne2ps_pbh, _mm512_loadu_si512, _mm512_mask_storeu_epi32,
    _mm512_maskz_loadu_ps, _mm512_permutexvar_epi16,
};

use super::operands::LANES;
use crate::cpu::transpose::transpose;

/// Pairs that hold `depth` elements.
pub fn pairs(depth: usize) -> usize {
    depth.div_ceil(2)
}

/// Rows of `depth` elements, `stride` apart, as rows of pairs.
pub fn rows(x: &[f32], stride: usize, count: usize, depth: usize, to: &mut [u32]) {
    rows_apart(x, stride, count, depth, to, pairs(depth));
}

/// [`rows`] that stand `apart` pairs apart.
pub fn rows_apart(x: &[f32], stride: usize, count: usize, depth: usize, to: &mut [u32], apart: usize) {
    let pairs = pairs(depth);
    assert!(super::is_native() && (count == 0 || (count - 1) * apart + pairs <= to.len()));
    assert!(count == 0 || depth == 0 || (count - 1) * stride + depth <= x.len());
    // SAFETY: the processor has the instructions, and the asserts hold all accesses within the slices.
    unsafe { rows_native(x, stride, count, depth, to, apart) }
}

/// Adjacent rows of a matrix [depth, width], `stride` apart, interleaved to rows of pairs.
///
/// Panels of `panel` columns (a multiple of [`LANES`]) stand one behind another, the last narrower but padded with zeros to
/// whole vectors; each is [pairs, its width].
pub fn lines(x: &[f32], stride: usize, depth: usize, width: usize, panel: usize, to: &mut [u32]) {
    assert!(super::is_native() && to.len() >= pairs(depth) * width.next_multiple_of(LANES));
    assert!(depth == 0 || width == 0 || (depth - 1) * stride + width <= x.len());
    for first in (0..width).step_by(panel) {
        let width = panel.min(width - first);
        let to = &mut to[first * pairs(depth)..][..pairs(depth) * width.next_multiple_of(LANES)];
        // SAFETY: the processor has the instructions, and the asserts hold all accesses within the slices.
        unsafe { lines_native(&x[first.min(x.len())..], stride, depth, width, to) }
    }
}

/// As [`lines`] from the transpose of that matrix: `width` rows of `depth` elements.
pub fn columns(
    x: &[f32],
    stride: usize,
    depth: usize,
    width: usize,
    panel: usize,
    scratch: &mut Vec<u32>,
    to: &mut [u32],
) {
    let pairs = pairs(depth);
    for first in (0..width).step_by(panel) {
        let width = panel.min(width - first);
        let padded = width.next_multiple_of(LANES);
        scratch.clear();
        scratch.resize(padded * pairs, 0);
        rows(&x[(first * stride).min(x.len())..], stride, width, depth, scratch);
        let to = &mut to[first * pairs..][..padded * pairs];
        transpose(bytemuck::cast_slice(scratch), padded, pairs, bytemuck::cast_slice_mut(to));
    }
}

/// The lowest `count` of 16 or more.
fn mask(count: usize) -> u16 {
    if count >= LANES { u16::MAX } else { (1 << count) - 1 }
}

#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
unsafe fn rows_native(x: &[f32], stride: usize, count: usize, depth: usize, to: &mut [u32], apart: usize) {
    for row in 0..count {
        for first in (0..depth).step_by(2 * LANES) {
            let left = depth - first;
            // SAFETY: masks keep loads within the row's `depth` elements and stores within its pairs.
            unsafe {
                let from = x.as_ptr().add(row * stride + first);
                let low = _mm512_maskz_loadu_ps(mask(left), from);
                let high = _mm512_maskz_loadu_ps(mask(left.saturating_sub(LANES)), from.wrapping_add(LANES));
                let both = bits(_mm512_cvtne2ps_pbh(high, low));
                let to = to.as_mut_ptr().add(row * apart + first / 2);
                _mm512_mask_storeu_epi32(to.cast(), mask(left.div_ceil(2)), both);
            }
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
unsafe fn lines_native(x: &[f32], stride: usize, depth: usize, width: usize, to: &mut [u32]) {
    let padded = width.next_multiple_of(LANES);
    let order: [u16; 32] = std::array::from_fn(|at| (at / 2 + at % 2 * LANES) as u16);
    for pair in 0..pairs(depth) {
        for first in (0..width).step_by(LANES) {
            let here = mask(width - first);
            let second = if 2 * pair + 1 < depth { here } else { 0 };
            // SAFETY: masks keep loads within the two rows (none is read behind the last); `to` is padded.
            unsafe {
                let order = _mm512_loadu_si512(order.as_ptr().cast());
                let from = x.as_ptr().add(2 * pair * stride + first);
                let low = _mm512_maskz_loadu_ps(here, from);
                let high = _mm512_maskz_loadu_ps(second, from.wrapping_add(stride));
                let both = _mm512_permutexvar_epi16(order, bits(_mm512_cvtne2ps_pbh(high, low)));
                let to = to.as_mut_ptr().add(pair * padded + first);
                _mm512_mask_storeu_epi32(to.cast(), u16::MAX, both);
            }
        }
    }
}

/// Pairs as bits.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
fn bits(pairs: __m512bh) -> __m512i {
    // SAFETY: both types are 64 bytes of plain data.
    unsafe { std::mem::transmute(pairs) }
}
