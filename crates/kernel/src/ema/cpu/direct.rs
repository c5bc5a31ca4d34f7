//! Kernels of few lags as plain convolutions: the recurrence of a truncated kernel takes off what leaves the window, and for decays
//! close to 1 what remains would be a small difference of long sums.

use super::{BLOCK, Filter, SPAN, TILE, rows};
use crate::cpu::columns::{Columns, ColumnsMut};
use crate::cpu::math::{load, store};
use crate::cpu::simd::Simd;
use crate::simd_fn;

/// The longest truncation that is convolved.
pub(super) const LONGEST: usize = 128;

/// The kernel of a block of channels, [truncation, BLOCK].
pub(super) fn kernel(filter: &Filter) -> Vec<f32> {
    let mut kernel = vec![0.0; filter.truncation * BLOCK];
    let mut terms: Vec<f64> = filter.weight.iter().map(|&weight| f64::from(weight)).collect();
    for values in kernel.chunks_exact_mut(BLOCK) {
        for (column, value) in values.iter_mut().enumerate() {
            *value = terms.iter().skip(column).step_by(BLOCK).sum::<f64>() as f32;
        }
        terms.iter_mut().zip(&filter.decay).for_each(|(term, &decay)| *term *= f64::from(decay));
    }
    kernel
}

/// Gradients of weight, then of decay, [ndim, BLOCK] each, from that of the kernel.
pub(super) fn parameter_gradients(filter: &Filter, dkernel: &[f32]) -> Vec<f32> {
    let room = filter.decay.len();
    let mut grads = vec![0.0; 2 * room];
    let (dweight, ddecay) = grads.split_at_mut(room);
    for (at, (&weight, &decay)) in filter.weight.iter().zip(&filter.decay).enumerate() {
        let (weight, decay) = (f64::from(weight), f64::from(decay));
        // decay^lag and its derivative
        let (mut power, mut slope) = (1.0, 0.0);
        let (mut of_weight, mut of_decay) = (0.0, 0.0);
        for grad in dkernel.iter().skip(at % BLOCK).step_by(BLOCK) {
            of_weight += f64::from(*grad) * power;
            of_decay += f64::from(*grad) * slope * weight;
            (power, slope) = (power * decay, slope * decay + power);
        }
        (dweight[at], ddecay[at]) = (of_weight as f32, of_decay as f32);
    }
    grads
}

/// Adds the convolution of `x` at `T` positions from `step` on to `y`.
#[inline(always)]
fn tile<S: Simd, const T: usize>(
    simd: S,
    x: Columns,
    filter: &Filter,
    kernel: &[f32],
    (step, at): (usize, usize),
    y: &mut ColumnsMut,
) {
    let n = y.rows();
    let mut sums = [simd.splat_f32s(0.0); T];
    for (lag, values) in kernel.chunks_exact(BLOCK).enumerate().take(step + T) {
        let value = load(simd, values, at);
        for (sum, x) in sums.iter_mut().zip(rows::<S, T>(simd, x, filter, (step, n, lag), at)) {
            *sum = simd.mul_add_e_f32s(value, x, *sum);
        }
    }
    for (t, sum) in sums.into_iter().enumerate() {
        let y = y.row(filter.row(step + t, n));
        store(simd, y, at, simd.add_f32s(load(simd, y, at), sum));
    }
}

simd_fn! {
    /// Adds the convolution of `x` with `kernel` to `y`.
    pub(super) fn run<S>(simd, x: Columns<'a>, filter: &'a Filter, kernel: &'a [f32], y: ColumnsMut<'a>) {
        let mut y = y;
        let n = y.rows();
        for at in (0..x.width()).step_by(S::F32_LANES) {
            let whole = n - n % TILE;
            for step in (0..whole).step_by(TILE) {
                tile::<S, TILE>(simd, x, filter, kernel, (step, at), &mut y);
            }
            for step in whole..n {
                tile::<S, 1>(simd, x, filter, kernel, (step, at), &mut y);
            }
        }
    }
}

/// Adds to `dkernel` what `T` positions from `step` on give.
#[inline(always)]
fn gradient_tile<S: Simd, const T: usize>(
    simd: S,
    [x, dy]: [Columns; 2],
    filter: &Filter,
    (step, n, at): (usize, usize, usize),
    dkernel: &mut [f32],
) {
    let dy = rows::<S, T>(simd, dy, filter, (step, n, 0), at);
    for (lag, values) in dkernel.chunks_exact_mut(BLOCK).enumerate().take(step + T) {
        let mut sum = load(simd, values, at);
        for (dy, x) in dy.into_iter().zip(rows::<S, T>(simd, x, filter, (step, n, lag), at)) {
            sum = simd.mul_add_e_f32s(dy, x, sum);
        }
        store(simd, values, at, sum);
    }
}

simd_fn! {
    /// Adds the gradient of the kernel to `dkernel`; `part` is working memory of its size.
    pub(super) fn add_kernel_gradient<S>(
        simd, pair: [Columns<'a>; 2], n: usize, filter: &'a Filter, part: &'a mut [f32], dkernel: &'a mut [f32],
    ) {
        part.fill(0.0);
        for at in (0..pair[0].width()).step_by(S::F32_LANES) {
            for first in (0..n).step_by(SPAN) {
                let last = (first + SPAN).min(n);
                let whole = last - (last - first) % TILE;
                for step in (first..whole).step_by(TILE) {
                    gradient_tile::<S, TILE>(simd, pair, filter, (step, n, at), part);
                }
                for step in whole..last {
                    gradient_tile::<S, 1>(simd, pair, filter, (step, n, at), part);
                }
                for (part, sum) in part.chunks_exact_mut(BLOCK).zip(dkernel.chunks_exact_mut(BLOCK)) {
                    store(simd, sum, at, simd.add_f32s(load(simd, sum, at), load(simd, part, at)));
                    store(simd, part, at, simd.splat_f32s(0.0));
                }
            }
        }
    }
}
