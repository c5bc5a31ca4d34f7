//! The sums of a block over its keys, and the working space that they are in.

use pulp::Simd;

use super::Dims;
use super::vectors::{ALIGN, add_weighted};
use crate::cpu::math::{self, load, store};
use crate::cpu::par::{Scratch, scratch};

/// Some channels of one sample.
pub(super) struct Block<'a> {
    pub(super) rows: &'a [f32],
    pub(super) row: usize,
    /// First column of queries, keys and values.
    pub(super) parts: [usize; 3],
    /// Channels.
    pub(super) width: usize,
    pub(super) keep: Option<&'a [f32]>,
    /// [len, columns].
    pub(super) inside: &'a [f32],
    /// [len].
    pub(super) outside: &'a [f32],
    pub(super) len: usize,
    pub(super) window: usize,
    pub(super) columns: usize,
    pub(super) causal: bool,
}

impl<'a> Block<'a> {
    /// Query, key or value (0, 1, 2) of position `i`.
    #[inline(always)]
    pub(super) fn part(&self, part: usize, i: usize) -> &'a [f32] {
        &self.rows[i * self.row + self.parts[part]..][..self.width]
    }

    #[inline(always)]
    fn visible(&self, i: usize) -> bool {
        self.keep.is_none_or(|keep| keep[i] != 0.0)
    }

    /// Elements of a row of working space.
    #[inline(always)]
    pub(super) fn lanes(&self) -> usize {
        self.width.next_multiple_of(ALIGN)
    }
}

/// Working space of one thread; rows are a whole number of vectors, written before they are read.
pub(super) struct Space {
    /// Keys exp(k - maximum), and times their values, relative to the maximum of the position that reads them. Later the
    /// gradients of keys.
    pub(super) keys: [Scratch; 2],
    /// Denominators and numerators of every position. Later what a position passes on to its keys: the gradient by the
    /// numerator, and that times the quotient.
    pub(super) sums: [Scratch; 2],
    /// Keys relative to the maximum of their own position; for training.
    pub(super) own: Scratch,
    /// exp(maximum before - maximum at a position); for training, if causal.
    pub(super) shrink: Scratch,
    /// Positions where it is not 1.
    pub(super) shrinks: Vec<bool>,
    /// Maximum so far.
    top: Vec<f32>,
    /// Sums of keys and values outside the window, or of gradients.
    pub(super) carried: [Vec<f32>; 2],
    /// Key times value of one position; for training.
    pub(super) values: Vec<f32>,
}

impl Space {
    pub(super) fn new(dims: &Dims, trains: bool) -> Self {
        let lanes = (dims.width / dims.groups).min(super::CHANNELS).next_multiple_of(ALIGN);
        let rows = |wanted: bool| scratch(if wanted { dims.len * lanes } else { lanes });
        let line = || vec![0.0; lanes];
        Self {
            keys: [rows(true), rows(true)],
            sums: [rows(true), rows(true)],
            own: rows(trains),
            shrink: rows(trains && dims.causal),
            shrinks: vec![false; dims.len],
            top: line(),
            carried: [line(), line()],
            values: line(),
        }
    }

    /// Fills numerators, denominators and what backward needs if it `trains`.
    pub(super) fn sums(&mut self, block: &Block, trains: bool) {
        if block.causal {
            causal(block, self, trains);
        } else {
            bidirectional(block, self);
            if trains {
                let len = block.len * block.lanes();
                self.own[..len].copy_from_slice(&self.keys[0][..len]);
            }
        }
    }

    /// Adds the keys of row `from` to what is carried.
    #[inline(always)]
    fn carry<S: Simd>(&mut self, simd: S, from: usize, lanes: usize) {
        for (carried, keys) in self.carried.iter_mut().zip(&self.keys) {
            math::add(simd, &keys[from * lanes..][..lanes], &mut carried[..lanes]);
        }
    }
}

/// Multiplies rows of `factors.len()` elements by `factors`.
#[inline(always)]
pub(super) fn multiply_rows<S: Simd>(simd: S, factors: &[f32], rows: &mut [f32]) {
    for row in rows.chunks_exact_mut(factors.len()) {
        math::update(
            simd,
            factors,
            row,
            #[inline(always)]
            |factor, x| simd.mul_f32s(factor, x),
        );
    }
}

/// y = weight x.
#[inline(always)]
fn weigh<S: Simd>(simd: S, weight: f32, x: &[f32], y: &mut [f32]) {
    let weight = simd.splat_f32s(weight);
    math::map(
        simd,
        x,
        y,
        #[inline(always)]
        |x| simd.mul_f32s(weight, x),
    );
}

/// The maximum moves on to the key of position `i`, which is written relative to it; returns whether it grew.
#[inline(always)]
fn next_key<S: Simd>(simd: S, block: &Block, space: &mut Space, i: usize, shrink: usize) -> bool {
    let (lanes, one) = (block.lanes(), simd.splat_f32s(1.0));
    let (k, v) = (block.part(1, i), block.part(2, i));
    let [keys, values] = &mut space.keys;
    let (keys, values) = (&mut keys[i * lanes..][..lanes], &mut values[i * lanes..][..lanes]);
    let shrink = &mut space.shrink[shrink..][..lanes];
    let mut least = one;
    for at in (0..lanes).step_by(S::F32_LANES) {
        // channels that are not there are keys of 0
        let (k, v) = if at < block.width {
            (load(simd, k, at), load(simd, v, at))
        } else {
            (simd.splat_f32s(0.0), simd.splat_f32s(0.0))
        };
        let top = load(simd, &space.top, at);
        let grew = simd.greater_than_f32s(k, top);
        let below = math::exp(simd, simd.neg_f32s(simd.abs_f32s(simd.sub_f32s(k, top))));
        let (factor, key) = (simd.select_f32s(grew, below, one), simd.select_f32s(grew, one, below));
        least = simd.min_f32s(least, factor);
        store(simd, &mut space.top, at, simd.max_f32s(k, top));
        store(simd, shrink, at, factor);
        store(simd, keys, at, key);
        store(simd, values, at, simd.mul_f32s(key, v));
    }
    simd.reduce_min_f32s(least) < 1.0
}

crate::simd_fn! {
    fn causal<S>(simd, block: &'a Block<'a>, space: &'a mut Space, trains: bool) {
        let (lanes, window) = (block.lanes(), block.window);
        space.top.fill(f32::NEG_INFINITY);
        space.carried.iter_mut().for_each(|carried| carried.fill(0.0));
        for i in 0..block.len {
            if window > 0 && i >= window {
                space.carry(simd, i - window, lanes);
            }
            let (row, shrink) = (i * lanes, if trains { i * lanes } else { 0 });
            let grew = block.visible(i) && next_key(simd, block, space, i, shrink);
            space.shrinks[i] = grew;
            if grew {
                let factors = &space.shrink[shrink..][..lanes];
                let first = (i + 1).saturating_sub(window.max(1)) * lanes;
                for (carried, keys) in space.carried.iter_mut().zip(&mut space.keys) {
                    multiply_rows(simd, factors, &mut carried[..lanes]);
                    multiply_rows(simd, factors, &mut keys[first..row]);
                }
            }
            if !block.visible(i) {
                space.keys.iter_mut().for_each(|keys| keys[row..row + lanes].fill(0.0));
            }
            if trains {
                space.own[row..row + lanes].copy_from_slice(&space.keys[0][row..row + lanes]);
            }
            if window == 0 {
                space.carry(simd, i, lanes);
            }
            add_up(simd, block, space, i, i);
        }
    }
}

/// Numerator and denominator of position `i` from what is carried and the keys of the window up to `last`.
#[inline(always)]
fn add_up<S: Simd>(simd: S, block: &Block, space: &mut Space, i: usize, last: usize) {
    let (lanes, window) = (block.lanes(), block.window);
    let [den, num] = &mut space.sums;
    let (den, num) = (&mut den[i * lanes..][..lanes], &mut num[i * lanes..][..lanes]);
    let outside = block.outside[i];
    weigh(simd, outside, &space.carried[0][..lanes], den);
    weigh(simd, outside, &space.carried[1][..lanes], num);
    if window > 0 {
        let first = (i + 1).saturating_sub(window);
        let weights = &block.inside[i * block.columns..][first + window - 1 - i..last + window - i];
        let [keys, values] = &space.keys;
        add_weighted(simd, weights, [&keys[first * lanes..], &values[first * lanes..]], lanes, [den, num]);
    }
}

crate::simd_fn! {
    fn bidirectional<S>(simd, block: &'a Block<'a>, space: &'a mut Space) {
        let (lanes, window, len) = (block.lanes(), block.window, block.len);
        space.top.fill(f32::NEG_INFINITY);
        for i in (0..len).filter(|&i| block.visible(i)) {
            let top = &mut space.top[..block.width];
            math::update(simd, block.part(1, i), top, #[inline(always)] |k, top| simd.max_f32s(k, top));
        }
        space.carried.iter_mut().for_each(|carried| carried.fill(0.0));
        for i in 0..len {
            let row = i * lanes;
            let [keys, values] = &mut space.keys;
            let (keys, values) = (&mut keys[row..row + lanes], &mut values[row..row + lanes]);
            keys.fill(0.0);
            values.fill(0.0);
            if block.visible(i) {
                let (k, v) = (block.part(1, i), block.part(2, i));
                for at in (0..block.width).step_by(S::F32_LANES) {
                    let below = simd.sub_f32s(load(simd, k, at), load(simd, &space.top[..block.width], at));
                    let key = math::exp(simd, below);
                    store(simd, &mut keys[..block.width], at, key);
                    store(simd, &mut values[..block.width], at, simd.mul_f32s(key, load(simd, v, at)));
                }
            }
            if window == 0 {
                space.carry(simd, i, lanes);
            }
        }
        for i in 0..len {
            if window > 0 && i >= window {
                space.carry(simd, i - window, lanes);
            }
            add_up(simd, block, space, i, (i + window.max(1) - 1).min(len - 1));
        }
        if window > 0 {
            space.carried.iter_mut().for_each(|carried| carried.fill(0.0));
            for i in (0..len.saturating_sub(window)).rev() {
                space.carry(simd, i + window, lanes);
                for (sums, carried) in space.sums.iter_mut().zip(&space.carried) {
                    math::axpy(simd, block.outside[i], &carried[..lanes], &mut sums[i * lanes..][..lanes]);
                }
            }
        }
    }
}
