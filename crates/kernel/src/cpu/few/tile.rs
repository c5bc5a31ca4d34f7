//! Tiles of products of few rows, summed in registers.

use pulp::{Simd, WithSimd};

use crate::cpu::panel::add_line;

/// Outputs of a tile of turned rows: as many lines of weights stay in the first cache, wherever they lie.
pub const OUTPUTS: usize = 6;

/// Outputs of a tile of scalar products.
const DOTS: usize = 4;

/// Elements of a line of the cache.
const LINE: usize = 16;

/// Asks for the elements of a vector.
pub struct Lanes;

impl WithSimd for Lanes {
    type Output = usize;

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) -> usize {
        S::F32_LANES
    }
}

/// Scalar products of all weights with all rows.
pub struct Outputs<'a> {
    /// [outputs, depth].
    pub weight: &'a [f32],
    /// Summed elements.
    pub depth: usize,
    /// [count, depth], or [depth, count] if they are `turned`, whose `count` is a multiple of a vector.
    pub rows: &'a [f32],
    /// Rows, those of the padding included.
    pub count: usize,
    /// Whether an element of every row stands beside those of the others.
    pub turned: bool,
    /// The results, [outputs, count].
    pub sums: &'a mut [f32],
}

impl WithSimd for Outputs<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(mut self, simd: S) {
        let Self { weight, depth, rows, count, turned, .. } = self;
        let outputs = self.sums.len() / count.max(1);
        assert!(weight.len() >= outputs * depth && rows.len() >= count * depth, "weights and rows");
        assert!(!turned || count.is_multiple_of(S::F32_LANES), "lines of whole vectors");
        let mut first = 0;
        while first < outputs {
            let some = match (outputs - first, turned) {
                (OUTPUTS.., true) => OUTPUTS,
                (DOTS.., false) => DOTS,
                (2.., _) => 2,
                _ => 1,
            };
            match (some, turned) {
                (OUTPUTS, true) => self.lines::<S, OUTPUTS>(simd, first),
                (2, true) => self.lines::<S, 2>(simd, first),
                (_, true) => self.lines::<S, 1>(simd, first),
                (DOTS, false) => self.dots::<S, DOTS>(simd, first),
                (2, false) => self.dots::<S, 2>(simd, first),
                (_, false) => self.dots::<S, 1>(simd, first),
            }
            first += some;
        }
    }
}

impl Outputs<'_> {
    /// `N` outputs of turned rows.
    #[inline(always)]
    fn lines<S: Simd, const N: usize>(&mut self, simd: S, first: usize) {
        let mut at = 0;
        while at < self.count {
            // SAFETY: `with_simd` held the weights, the rows and the sums of all outputs inside of their slices; `at` and the
            // vectors behind it are within a line.
            unsafe {
                if at + 2 * S::F32_LANES <= self.count {
                    self.line::<S, N, 2>(simd, first, at);
                    at += 2 * S::F32_LANES;
                } else {
                    self.line::<S, N, 1>(simd, first, at);
                    at += S::F32_LANES;
                }
            }
        }
    }

    /// `N` outputs of `V` vectors of turned rows, from row `at` on.
    ///
    /// # Safety
    /// There are so many outputs from `first` on, and so many rows.
    #[inline(always)]
    unsafe fn line<S: Simd, const N: usize, const V: usize>(&mut self, simd: S, first: usize, at: usize) {
        let (depth, count) = (self.depth, self.count);
        let mut sums = [[simd.splat_f32s(0.0); V]; N];
        // SAFETY: the caller vouches for it; f32s is plain data of its lanes, read and written unaligned. What is prefetched need
        // not exist.
        unsafe {
            let mut weight = self.weight.as_ptr().add(first * depth);
            let mut rows = self.rows.as_ptr().add(at);
            for _ in 0..depth / LINE {
                for i in 0..N {
                    prefetch(weight.wrapping_add((N + i) * depth));
                }
                for k in 0..LINE {
                    add_line::<S, N, V>(simd, weight.add(k), depth, rows.add(k * count), &mut sums);
                }
                (rows, weight) = (rows.wrapping_add(LINE * count), weight.wrapping_add(LINE));
            }
            for _ in 0..depth % LINE {
                add_line::<S, N, V>(simd, weight, depth, rows, &mut sums);
                (rows, weight) = (rows.wrapping_add(count), weight.wrapping_add(1));
            }
            let to = self.sums.as_mut_ptr().add(first * count + at);
            for (i, sums) in sums.iter().enumerate() {
                for (j, &sum) in sums.iter().enumerate() {
                    to.add(i * count + j * S::F32_LANES).cast::<S::f32s>().write_unaligned(sum);
                }
            }
        }
    }

    /// `N` outputs of rows that are not turned.
    #[inline(always)]
    fn dots<S: Simd, const N: usize>(&mut self, simd: S, first: usize) {
        let (most, mut at) = (if S::REGISTER_COUNT >= 32 { 4 } else { 2 }, 0);
        while at < self.count {
            // SAFETY: `with_simd` held the weights, the rows and the sums of all outputs inside of their slices; `at` and the
            // rows behind it are below `count`.
            at += unsafe {
                match most.min(self.count - at) {
                    4 => self.dot::<S, N, 4>(simd, first, at),
                    2 | 3 => self.dot::<S, N, 2>(simd, first, at),
                    _ => self.dot::<S, N, 1>(simd, first, at),
                }
            };
        }
    }

    /// `N` outputs of `R` rows from row `at` on; gives `R`.
    ///
    /// # Safety
    /// There are so many outputs from `first` on, and so many rows.
    #[inline(always)]
    unsafe fn dot<S: Simd, const N: usize, const R: usize>(
        &mut self,
        simd: S,
        first: usize,
        at: usize,
    ) -> usize {
        let (depth, count) = (self.depth, self.count);
        let (vectors, rest) = (depth / S::F32_LANES, depth % S::F32_LANES);
        let mut sums = [[simd.splat_f32s(0.0); R]; N];
        // SAFETY: the caller vouches for it; f32s is plain data of its lanes, read unaligned. What is prefetched need not exist.
        unsafe {
            let (weight, rows) =
                (self.weight.as_ptr().add(first * depth), self.rows.as_ptr().add(at * depth));
            for k in (0..vectors).map(|vector| vector * S::F32_LANES) {
                if k.is_multiple_of(LINE) && at == 0 {
                    for i in 0..N {
                        prefetch(weight.wrapping_add((N + i) * depth + k));
                    }
                }
                let whole = S::F32_LANES;
                add_products::<S, N, R>(simd, (weight.add(k), rows.add(k)), depth, whole, &mut sums);
            }
            if rest > 0 {
                let k = depth - rest;
                add_products::<S, N, R>(simd, (weight.add(k), rows.add(k)), depth, rest, &mut sums);
            }
        }
        for (i, sums) in sums.iter().enumerate() {
            for (j, &sum) in sums.iter().enumerate() {
                self.sums[(first + i) * count + at + j] = simd.reduce_sum_f32s(sum);
            }
        }
        R
    }
}

/// Adds the products of `len` elements of weights and rows, up to a vector of them; lines are `depth` apart.
///
/// # Safety
/// `N` and `R` lines of such elements can be read.
#[inline(always)]
unsafe fn add_products<S: Simd, const N: usize, const R: usize>(
    simd: S,
    (weight, rows): (*const f32, *const f32),
    depth: usize,
    len: usize,
    sums: &mut [[S::f32s; R]; N],
) {
    let mut some = [simd.splat_f32s(0.0); R];
    // SAFETY: the caller vouches for it.
    unsafe {
        for (j, row) in some.iter_mut().enumerate() {
            *row = load(simd, rows.add(j * depth), len);
        }
        for (i, sums) in sums.iter_mut().enumerate() {
            let weight = load(simd, weight.add(i * depth), len);
            for (sum, &row) in sums.iter_mut().zip(&some) {
                *sum = simd.mul_add_e_f32s(weight, row, *sum);
            }
        }
    }
}

/// `len` elements, up to a vector of them, and zeros.
///
/// # Safety
/// They can be read.
#[inline(always)]
unsafe fn load<S: Simd>(simd: S, from: *const f32, len: usize) -> S::f32s {
    // SAFETY: the caller vouches for it; f32s is plain data of its lanes, read unaligned.
    unsafe {
        if len == S::F32_LANES {
            from.cast::<S::f32s>().read_unaligned()
        } else {
            simd.partial_load_f32s(std::slice::from_raw_parts(from, len))
        }
    }
}

/// Asks the processor for the line of the cache at `at`, which need not exist.
#[inline(always)]
fn prefetch(at: *const f32) {
    // SAFETY: a prefetch reads nothing.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(at.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}
