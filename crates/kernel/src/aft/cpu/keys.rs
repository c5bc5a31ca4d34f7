//! Gradients of keys, values and biases: sums over the queries that see a key.
//!
//! With A_i the gradient by the numerator of position i and r_i the quotient, both relative to the maximum of the position
//! whose key is at hand,
//!
//! ```text
//! dv_j = e_j sum_i w_ij A_i     dk_j = e_j (v_j sum_i w_ij A_i - sum_i w_ij A_i r_i)
//! d ln w_ij = sum over channels of w_ij e_j (v_j A_i - A_i r_i)
//! ```

use pulp::Simd;

use super::space::{Block, Space, multiply_rows};
use super::vectors::{vectors, vectors_mut};
use crate::cpu::math::{self, load, store};

/// The sums of every key in the place of the keys; gradients of the biases are added to `dband`, unless it is empty.
pub(super) fn sums(block: &Block, space: &mut Space, dband: &mut [f32]) {
    against_time(block, space, dband);
    if !block.causal {
        in_time(block, space);
    }
}

/// Adds what is passed by row `i`, weighted by `weight`, to what is carried.
#[inline(always)]
fn carry<S: Simd>(simd: S, space: &mut Space, i: usize, lanes: usize, weight: f32) {
    for (carried, passed) in space.carried.iter_mut().zip(&space.sums) {
        math::axpy(simd, weight, &passed[i * lanes..][..lanes], &mut carried[..lanes]);
    }
}

crate::simd_fn! {
    /// From queries inside the window and after it; without a window and not causal, from all.
    fn against_time<S>(simd, block: &'a Block<'a>, space: &'a mut Space, dband: &'a mut [f32]) {
        let (lanes, window, len) = (block.lanes(), block.window, block.len);
        space.carried.iter_mut().for_each(|carried| carried.fill(0.0));
        let all = window == 0 && !block.causal;
        if all {
            for i in 0..len {
                carry(simd, space, i, lanes, block.outside[i]);
            }
        }
        for j in (0..len).rev() {
            if window > 0 && j + window < len {
                carry(simd, space, j + window, lanes, block.outside[j + window]);
            }
            if block.causal && j + 1 < len && space.shrinks[j + 1] {
                let factors = &space.shrink[(j + 1) * lanes..][..lanes];
                let inside = (j + 1) * lanes..(j + window.max(1)).min(len) * lanes;
                for (carried, passed) in space.carried.iter_mut().zip(&mut space.sums) {
                    multiply_rows(simd, factors, &mut carried[..lanes]);
                    multiply_rows(simd, factors, &mut passed[inside.clone()]);
                }
            }
            if window == 0 && !all {
                carry(simd, space, j, lanes, block.outside[j]);
            }
            // e_j v_j before the sums take its place
            values(simd, block, space, j);
            for (keys, carried) in space.keys.iter_mut().zip(&space.carried) {
                keys[j * lanes..][..lanes].copy_from_slice(&carried[..lanes]);
            }
            if window > 0 {
                let mut at = 0;
                while at + 4 * S::F32_LANES <= lanes {
                    window_sums::<S, 4>(simd, block, space, j, at, dband);
                    at += 4 * S::F32_LANES;
                }
                while at < lanes {
                    window_sums::<S, 1>(simd, block, space, j, at, dband);
                    at += S::F32_LANES;
                }
            }
        }
    }
}

/// e_j v_j, relative to the maximum of position `j`.
#[inline(always)]
fn values<S: Simd>(simd: S, block: &Block, space: &mut Space, j: usize) {
    let (lanes, width) = (block.lanes(), block.width);
    let (v, own) = (block.part(2, j), &space.own[j * lanes..][..width]);
    for at in (0..width).step_by(S::F32_LANES) {
        let value = simd.mul_f32s(load(simd, own, at), load(simd, v, at));
        store(simd, &mut space.values[..width], at, value);
    }
}

/// Adds what the queries in the window of key `j` pass, for `V` vectors of channels.
#[inline(always)]
fn window_sums<S: Simd, const V: usize>(
    simd: S,
    block: &Block,
    space: &mut Space,
    j: usize,
    at: usize,
    dband: &mut [f32],
) {
    let (lanes, window) = (block.lanes(), block.window);
    let first = if block.causal { j } else { (j + 1).saturating_sub(window) };
    let last = (j + window).min(block.len);
    let own = vectors::<S, V>(&space.own[j * lanes..], at);
    let values = vectors::<S, V>(&space.values, at);
    let passed = space.sums.each_ref().map(|sums| &sums[..block.len * lanes]);
    let mut sums = [[simd.splat_f32s(0.0); V]; 2];
    for i in first..last {
        let index = i * block.columns + j + window - 1 - i;
        let weight = block.inside[index];
        let a = vectors::<S, V>(&passed[0][i * lanes..], at);
        let ar = vectors::<S, V>(&passed[1][i * lanes..], at);
        let w = simd.splat_f32s(weight);
        for v in 0..V {
            sums[0][v] = simd.mul_add_e_f32s(w, a[v], sums[0][v]);
            sums[1][v] = simd.mul_add_e_f32s(w, ar[v], sums[1][v]);
        }
        if let Some(dw) = dband.get_mut(index) {
            let mut dot = simd.splat_f32s(0.0);
            for v in 0..V {
                let share = simd.mul_f32s(values[v], a[v]);
                dot = simd.add_f32s(dot, simd.negate_mul_add_e_f32s(own[v], ar[v], share));
            }
            *dw += weight * simd.reduce_sum_f32s(dot);
        }
    }
    for (keys, sums) in space.keys.iter_mut().zip(sums) {
        let keys = vectors_mut::<S, V>(&mut keys[j * lanes..], at);
        for (key, sum) in keys.iter_mut().zip(sums) {
            *key = simd.add_f32s(*key, sum);
        }
    }
}

crate::simd_fn! {
    /// From queries before the window.
    fn in_time<S>(simd, block: &'a Block<'a>, space: &'a mut Space) {
        let (lanes, window) = (block.lanes(), block.window);
        if window == 0 {
            return; // all are summed already
        }
        space.carried.iter_mut().for_each(|carried| carried.fill(0.0));
        for j in window..block.len {
            carry(simd, space, j - window, lanes, block.outside[j - window]);
            for (keys, carried) in space.keys.iter_mut().zip(&space.carried) {
                math::add(simd, &carried[..lanes], &mut keys[j * lanes..][..lanes]);
            }
        }
    }
}

crate::simd_fn! {
    /// The gradients of the key and value of position `j`.
    pub(super) fn gradient<S>(
        simd,
        block: &'a Block<'a>,
        space: &'a Space,
        j: usize,
        dk: &'a mut [f32],
        dv: &'a mut [f32],
    ) {
        let (v, width, row) = (block.part(2, j), block.width, j * block.lanes());
        let own = &space.own[row..row + width];
        let [a, ar] = space.keys.each_ref().map(|keys| &keys[row..row + width]);
        for at in (0..width).step_by(S::F32_LANES) {
            let (own, a) = (load(simd, own, at), load(simd, a, at));
            store(simd, dv, at, simd.mul_f32s(own, a));
            let both = simd.sub_f32s(simd.mul_f32s(load(simd, v, at), a), load(simd, ar, at));
            store(simd, dk, at, simd.mul_f32s(own, both));
        }
    }
}
