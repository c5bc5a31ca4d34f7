//! Packing right factors to panels and copying left ones, as they are or rounded to bf16.

use std::ops::Range;

use pulp::{Simd, WithSimd};

use crate::cpu::matrix::Mat;
use crate::cpu::simd::arch;
use crate::cpu::transpose::transpose_apart;

/// Lines that are packed at a time: they stay in the first cache while panel after panel of them is read.
const LINES: usize = 16;

/// A matrix [depth, width] with contiguous rows as panels of `columns` each ([`super::shape`]), the last padded with zeros. Panics
/// if a slice is too short.
pub fn right_lines(x: Mat, columns: usize, round: bool, to: &mut [f32]) {
    assert!(x.col_stride == 1 || x.cols <= 1, "lines that are contiguous");
    assert!(x.rows * x.cols.next_multiple_of(columns) <= to.len(), "room for panels");
    if x.rows > 0 && x.cols > 0 {
        assert!((x.rows - 1) * x.row_stride + x.cols <= x.data.len(), "lines");
        arch().dispatch(Lines { x, columns, round, to });
    }
}

/// The transpose [depth, width] of a matrix with contiguous rows as panels of `columns` each, the last padded with zeros.
pub fn right_turned(x: Mat, columns: usize, round: bool, to: &mut [f32]) {
    let (width, depth) = (x.rows, x.cols);
    for first in (0..width).step_by(columns) {
        let here = columns.min(width - first);
        let to = &mut to[first * depth..][..columns * depth];
        if here < columns {
            to.fill(0.0);
        }
        let from = x.lines(first..first + here);
        transpose_apart((from.data, x.row_stride), here, depth, (to, columns));
        if round {
            round_in_place(to);
        }
    }
}

/// Contiguous rows to rows that are `apart`; what lies between those is left as it is.
pub fn copy_rows(x: Mat, round: bool, (to, apart): (&mut [f32], usize)) {
    assert!(x.col_stride == 1 || x.cols <= 1, "rows that are contiguous");
    if x.cols > 0 {
        copy((x.data, x.row_stride.max(x.cols)), x.cols, (to, apart), round);
    }
}

crate::simd_fn! {
    fn copy<S>(simd, from: (&'a [f32], usize), width: usize, to: (&'a mut [f32], usize), round: bool) {
        let rows = from.0.chunks(from.1).zip(to.0.chunks_mut(to.1));
        for (from, to) in rows {
            let (from, to) = (&from[..width], &mut to[..width]);
            if round {
                let (head, tail) = S::as_simd_f32s(from);
                let (to, last) = S::as_mut_simd_f32s(to);
                to.iter_mut().zip(head).for_each(#[inline(always)] |(to, x)| *to = rounded(simd, *x));
                if !last.is_empty() {
                    let x = simd.partial_load_f32s(tail);
                    simd.partial_store_f32s(last, rounded(simd, x));
                }
            } else {
                to.copy_from_slice(from);
            }
        }
    }
}

crate::simd_fn! {
    /// Rounds elements to bf16.
    pub fn round_in_place<S>(simd, x: &'a mut [f32]) {
        let (head, tail) = S::as_mut_simd_f32s(x);
        head.iter_mut().for_each(|x| *x = rounded(simd, *x));
        let last = simd.partial_load_f32s(tail);
        simd.partial_store_f32s(tail, rounded(simd, last));
    }
}

/// Elements rounded to bf16, to nearest and ties to even, as `half::bf16::from_f32` does.
#[inline(always)]
fn rounded<S: Simd>(simd: S, x: S::f32s) -> S::f32s {
    let bits = simd.transmute_u32s_f32s(x);
    let splat = |x: u32| simd.splat_u32s(x);
    let odd = simd.and_u32s(simd.wrapping_dyn_shr_u32s(bits, splat(16)), splat(1));
    let near = simd.add_u32s(bits, simd.add_u32s(odd, splat(0x7fff)));
    let number = simd.equal_f32s(x, x);
    let all = simd.select_u32s(number, near, simd.or_u32s(bits, splat(0x40_0000)));
    simd.transmute_f32s_u32s(simd.and_u32s(all, splat(0xffff_0000)))
}

struct Lines<'a> {
    x: Mat<'a>,
    columns: usize,
    round: bool,
    to: &'a mut [f32],
}

impl WithSimd for Lines<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(mut self, simd: S) {
        let depth = self.x.rows;
        for first in (0..depth).step_by(LINES) {
            let lines = first..depth.min(first + LINES);
            match (self.columns / S::F32_LANES, self.round) {
                (2, false) => self.pack::<S, 2, false>(simd, lines),
                (2, true) => self.pack::<S, 2, true>(simd, lines),
                (_, false) => self.pack::<S, 4, false>(simd, lines),
                (_, true) => self.pack::<S, 4, true>(simd, lines),
            }
        }
    }
}

impl Lines<'_> {
    /// Packs some lines of all panels, which are as wide as `V` vectors.
    #[inline(always)]
    fn pack<S: Simd, const V: usize, const ROUND: bool>(&mut self, simd: S, lines: Range<usize>) {
        let (depth, width, columns, stride) = (self.x.rows, self.x.cols, self.columns, self.x.row_stride);
        assert!(columns == V * S::F32_LANES, "panels of {columns} columns");
        for column in (0..width).step_by(columns) {
            let to = &mut self.to[column * depth..][..columns * depth];
            if column + columns <= width {
                // SAFETY: `right_lines` checked that `depth` lines of `width` elements lie inside x, `to` is a panel of whole
                // lines of V vectors; f32s is plain data of its lanes, read and written unaligned.
                unsafe {
                    let (from, to) = (self.x.data.as_ptr().add(column), to.as_mut_ptr());
                    for line in lines.clone() {
                        for at in (0..V).map(|vector| vector * S::F32_LANES) {
                            let x = from.add(line * stride + at).cast::<S::f32s>().read_unaligned();
                            let x = if ROUND { rounded(simd, x) } else { x };
                            to.add(line * columns + at).cast::<S::f32s>().write_unaligned(x);
                        }
                    }
                }
                continue;
            }
            for line in lines.clone() {
                let (to, padding) = to[line * columns..][..columns].split_at_mut(width - column);
                for (to, &x) in to.iter_mut().zip(&self.x.data[line * stride + column..]) {
                    *to = if ROUND { half::bf16::from_f32(x).to_f32() } else { x };
                }
                padding.fill(0.0);
            }
        }
    }
}
