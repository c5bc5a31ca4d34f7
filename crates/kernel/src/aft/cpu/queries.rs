//! Results, and what they pass back, row by row.

use pulp::Simd;

use super::space::{Block, Space};
use crate::cpu::math::{self, load, store};

/// sigmoid(x).
#[inline(always)]
fn sigmoid<S: Simd>(simd: S, x: S::f32s) -> S::f32s {
    let one = simd.splat_f32s(1.0);
    simd.div_f32s(one, simd.add_f32s(one, math::exp(simd, simd.neg_f32s(x))))
}

/// 1 / x, 0 where no key is seen.
#[inline(always)]
fn inverse<S: Simd>(simd: S, x: S::f32s) -> S::f32s {
    let zero = simd.splat_f32s(0.0);
    let some = simd.greater_than_f32s(x, zero);
    simd.select_f32s(some, simd.div_f32s(simd.splat_f32s(1.0), x), zero)
}

crate::simd_fn! {
    /// The result at position `i`.
    pub(super) fn result<S>(simd, block: &'a Block<'a>, space: &'a Space, i: usize, out: &'a mut [f32]) {
        let (q, row, width) = (block.part(0, i), i * block.lanes(), block.width);
        let [den, num] = space.sums.each_ref().map(|sums| &sums[row..row + width]);
        for at in (0..width).step_by(S::F32_LANES) {
            let quotient = simd.mul_f32s(load(simd, num, at), inverse(simd, load(simd, den, at)));
            store(simd, out, at, simd.mul_f32s(sigmoid(simd, load(simd, q, at)), quotient));
        }
    }
}

crate::simd_fn! {
    /// The gradient of the query at position `i`; its sums become what it passes to its keys.
    pub(super) fn gradient<S>(
        simd,
        block: &'a Block<'a>,
        space: &'a mut Space,
        i: usize,
        dout: &'a [f32],
        dq: &'a mut [f32],
    ) {
        let (q, row, width) = (block.part(0, i), i * block.lanes(), block.width);
        let one = simd.splat_f32s(1.0);
        let [den, num] = space.sums.each_mut().map(|sums| &mut sums[row..row + block.lanes()]);
        den[width..].fill(0.0);
        num[width..].fill(0.0);
        let (den, num) = (&mut den[..width], &mut num[..width]);
        for at in (0..width).step_by(S::F32_LANES) {
            let share = inverse(simd, load(simd, den, at));
            let quotient = simd.mul_f32s(load(simd, num, at), share);
            let gate = sigmoid(simd, load(simd, q, at));
            let passed = simd.mul_f32s(load(simd, dout, at), gate);
            let slope = simd.mul_f32s(passed, simd.sub_f32s(one, gate));
            store(simd, dq, at, simd.mul_f32s(slope, quotient));
            let by_num = simd.mul_f32s(passed, share);
            store(simd, den, at, by_num);
            store(simd, num, at, simd.mul_f32s(by_num, quotient));
        }
    }
}
