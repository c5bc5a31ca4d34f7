//! The moving average on the CPU: samples and blocks of channels in parallel, a few positions at a time in registers.
//!
//! With h_t = c h_{t-1} + x_t (for every channel and dimension), y_t = sum_n w h_t. The gradient of x is the moving average of dy in
//! the other direction. Those of the parameters are sums of dy_t h_t and w dy_t d_t, where d_t = c d_{t-1} + h_{t-1} is the
//! derivative of h_t by c; both recurrences run along with the sums, so no states are stored. A truncated kernel of T lags
//! takes c^T x_{t-T} off each step, or is convolved if T is small ([`direct`]).

mod direct;

use std::ops::Range;

use candle_core::{CpuStorage, Layout, Result, Shape, Tensor};

use super::Direction;
use crate::cpu::columns::{Columns, ColumnsMut, cut};
use crate::cpu::math::{flush, load, store};
use crate::cpu::par::{self, Chunks};
use crate::cpu::{self, simd::Simd};
use crate::op::{self, FusedOp, SavedOutput};
use crate::simd_fn;

/// Channels per block: a cache line.
pub(super) const BLOCK: usize = 16;
/// Positions in registers.
pub(super) const TILE: usize = 8;
/// Positions whose products are summed before they are added to the gradients of parameters.
pub(super) const SPAN: usize = 128;

pub(super) struct Ema {
    pub direction: Direction,
    /// Less than the number of positions.
    pub truncation: Option<usize>,
}

/// The parameters of a block of channels in one direction, [ndim, BLOCK] each, zeros for channels that do not exist.
pub(super) struct Filter {
    pub weight: Vec<f32>,
    pub decay: Vec<f32>,
    /// decay^truncation and its derivative by decay.
    tail: [Vec<f32>; 2],
    /// 0 for none.
    pub truncation: usize,
    reverse: bool,
}

impl Filter {
    /// Whether the kernel is short enough for a convolution.
    fn is_short(&self) -> bool {
        (1..=direct::LONGEST).contains(&self.truncation)
    }

    /// Row of the matrices at position `step` of the recurrence.
    #[inline(always)]
    pub fn row(&self, step: usize, n: usize) -> usize {
        if self.reverse { n - 1 - step } else { step }
    }
}

/// Samples, positions, channels, exponentials per channel.
#[derive(Clone, Copy)]
struct Dims {
    b: usize,
    n: usize,
    e: usize,
    ndim: usize,
}

impl Ema {
    /// The parameters of the `channels` on `side` from `weight` and `decay` [k, ndim].
    fn filter(&self, parameters: [&[f32]; 2], dims: Dims, side: usize, channels: Range<usize>) -> Filter {
        let Dims { e, ndim, .. } = dims;
        let [weight, decay] = parameters.map(|x| {
            let mut block = vec![0.0; ndim * BLOCK];
            for (column, channel) in channels.clone().enumerate() {
                let values = &x[(side * e + channel) * ndim..][..ndim];
                for (row, value) in values.iter().enumerate() {
                    block[row * BLOCK + column] = *value;
                }
            }
            block
        });
        let truncation = self.truncation.unwrap_or(0);
        let power = |exponent: usize, scale: f64| -> Vec<f32> {
            let exponent = i32::try_from(exponent).unwrap_or(i32::MAX);
            decay.iter().map(|&c| (f64::from(c).powi(exponent) * scale) as f32).collect()
        };
        let tail = match truncation {
            0 => [Vec::new(), Vec::new()],
            distance => [power(distance, 1.0), power(distance - 1, distance as f64)],
        };
        Filter { weight, decay, tail, truncation, reverse: self.direction.reversed()[side] }
    }

    /// The moving average of `x`, or with `turned` that in the other direction, which is the gradient of x for that of the result.
    fn average(&self, x: &[f32], parameters: [&[f32]; 2], dims: Dims, turned: bool) -> Vec<f32> {
        let Dims { b, n, e, ndim } = dims;
        let mut y = par::zeros(b * n * e);
        let chunks = Chunks::of(e, BLOCK);
        let jobs = y.chunks_mut((n * e).max(1)).enumerate().flat_map(|(sample, y)| {
            let blocks = cut(y, e, (0..chunks.count()).map(|index| chunks.range(index)));
            blocks.into_iter().enumerate().map(move |(index, y)| (sample, chunks.range(index), y))
        });
        let states = || vec![0.0; ndim * BLOCK];
        par::each_piece_with(jobs, states, |states, _, (sample, channels, mut y)| {
            let x = Columns::new(&x[sample * n * e..][..n * e], e, channels.clone());
            for side in 0..self.direction.count() {
                let mut filter = self.filter(parameters, dims, side, channels.clone());
                filter.reverse ^= turned;
                if filter.is_short() {
                    direct::run(x, &filter, &direct::kernel(&filter), y.reborrow());
                } else {
                    run(x, &filter, states, y.reborrow());
                }
            }
        });
        y
    }

    /// Gradients of weight and decay.
    fn parameter_gradients(
        &self,
        [x, dy]: [&[f32]; 2],
        parameters: [&[f32]; 2],
        dims: Dims,
    ) -> [Vec<f32>; 2] {
        let Dims { b, n, e, ndim } = dims;
        let (chunks, room) = (Chunks::of(e, BLOCK), ndim * BLOCK);
        let jobs = (0..b).flat_map(|sample| {
            let sides = 0..self.direction.count();
            sides.flat_map(move |side| {
                (0..chunks.count()).map(move |block| (sample, side, chunks.range(block)))
            })
        });
        let parts = par::map_pieces(jobs, |_, (sample, side, channels)| {
            let columns = |x| Columns::new(x, e, channels.clone());
            let [x, dy] = [x, dy].map(|x| columns(&x[sample * n * e..][..n * e]));
            let filter = self.filter(parameters, dims, side, channels.clone());
            let sums = if filter.is_short() {
                let mut dkernel = vec![0.0; filter.truncation * BLOCK];
                let mut part = par::scratch(dkernel.len());
                direct::add_kernel_gradient([x, dy], n, &filter, &mut part, &mut dkernel);
                direct::parameter_gradients(&filter, &dkernel)
            } else {
                let (mut sums, mut scratch) = (vec![0.0; 2 * room], par::scratch(4 * room));
                add_gradients([x, dy], n, &filter, &mut scratch, &mut sums);
                sums
            };
            (side, channels, sums)
        });
        let mut grads = [(); 2].map(|()| vec![0.0; self.direction.count() * e * ndim]);
        for (side, channels, sums) in parts {
            for (grad, sums) in grads.iter_mut().zip(sums.chunks_exact(room.max(1))) {
                for (column, channel) in channels.clone().enumerate() {
                    let grad = &mut grad[(side * e + channel) * ndim..][..ndim];
                    for (row, grad) in grad.iter_mut().enumerate() {
                        *grad += sums[row * BLOCK + column];
                    }
                }
            }
        }
        grads
    }
}

impl FusedOp for Ema {
    fn name(&self) -> &'static str {
        "moving-average"
    }

    fn forward(&self, operands: &[(&CpuStorage, &Layout)]) -> Result<(Vec<f32>, Shape)> {
        let [x, weight, decay] = cpu::slices(operands)?;
        let (b, n, e) = operands[0].1.shape().dims3()?;
        let (_, ndim) = operands[2].1.shape().dims2()?;
        Ok((self.average(x, [weight, decay], Dims { b, n, e, ndim }, false), (b, n, e).into()))
    }

    fn backward(&self, operands: &[&Tensor], _: SavedOutput, grad: &Tensor) -> Result<Vec<Option<Tensor>>> {
        let [x, weight, decay] = op::operands(operands)?;
        let (b, n, e) = x.dims3()?;
        let dims = Dims { b, n, e, ndim: decay.dim(1)? };
        cpu::with_slices([x, weight, decay, grad], |[of_x, of_weight, of_decay, dy]| {
            let parameters = [of_weight, of_decay];
            let dx = self.average(dy, parameters, dims, true);
            let [dweight, ddecay] = self.parameter_gradients([of_x, dy], parameters, dims);
            Ok(vec![cpu::gradient(x, dx)?, cpu::gradient(weight, dweight)?, cpu::gradient(decay, ddecay)?])
        })
    }
}

/// Vectors `at` of `T` rows of `x` from position `step` on, `back` positions earlier; zeros before the start.
#[inline(always)]
pub(super) fn rows<S: Simd, const T: usize>(
    simd: S,
    x: Columns,
    filter: &Filter,
    (step, n, back): (usize, usize, usize),
    at: usize,
) -> [S::f32s; T] {
    let mut rows = [simd.splat_f32s(0.0); T];
    for (t, row) in rows.iter_mut().enumerate() {
        if let Some(step) = (step + t).checked_sub(back) {
            *row = load(simd, x.row(filter.row(step, n)), at);
        }
    }
    rows
}

/// x - factor * rows.
#[inline(always)]
fn subtract<S: Simd, const T: usize>(
    simd: S,
    factor: S::f32s,
    rows: [S::f32s; T],
    mut x: [S::f32s; T],
) -> [S::f32s; T] {
    for (x, row) in x.iter_mut().zip(rows) {
        *x = simd.negate_mul_add_e_f32s(factor, row, *x);
    }
    x
}

/// Adds the moving average at `T` positions from `step` on to `y`.
#[inline(always)]
fn tile<S: Simd, const T: usize, const CUT: bool>(
    simd: S,
    x: Columns,
    filter: &Filter,
    (step, at): (usize, usize),
    states: &mut [f32],
    y: &mut ColumnsMut,
) {
    let n = y.rows();
    let now = rows::<S, T>(simd, x, filter, (step, n, 0), at);
    let old = if CUT { rows(simd, x, filter, (step, n, filter.truncation), at) } else { now };
    let mut sums = [simd.splat_f32s(0.0); T];
    let parameters = filter.decay.chunks_exact(BLOCK).zip(filter.weight.chunks_exact(BLOCK));
    for (index, (state, (decay, weight))) in states.chunks_exact_mut(BLOCK).zip(parameters).enumerate() {
        let (decay, weight, mut h) = (load(simd, decay, at), load(simd, weight, at), load(simd, state, at));
        let mut now = now;
        if CUT {
            now = subtract(simd, load(simd, &filter.tail[0][index * BLOCK..][..BLOCK], at), old, now);
        }
        for (sum, now) in sums.iter_mut().zip(now) {
            h = simd.mul_add_e_f32s(decay, h, now);
            *sum = simd.mul_add_e_f32s(weight, h, *sum);
        }
        store(simd, state, at, flush(simd, h));
    }
    for (t, sum) in sums.into_iter().enumerate() {
        let y = y.row(filter.row(step + t, n));
        store(simd, y, at, simd.add_f32s(load(simd, y, at), sum));
    }
}

simd_fn! {
    /// Adds the moving average of `x` to `y`; `states` [ndim, BLOCK] is working memory.
    fn run<S>(simd, x: Columns<'a>, filter: &'a Filter, states: &'a mut [f32], y: ColumnsMut<'a>) {
        let mut y = y;
        let (n, cut) = (y.rows(), filter.truncation > 0);
        states.fill(0.0);
        for at in (0..x.width()).step_by(S::F32_LANES) {
            let whole = n - n % TILE;
            for step in (0..whole).step_by(TILE) {
                match cut {
                    false => tile::<S, TILE, false>(simd, x, filter, (step, at), states, &mut y),
                    true => tile::<S, TILE, true>(simd, x, filter, (step, at), states, &mut y),
                }
            }
            for step in whole..n {
                match cut {
                    false => tile::<S, 1, false>(simd, x, filter, (step, at), states, &mut y),
                    true => tile::<S, 1, true>(simd, x, filter, (step, at), states, &mut y),
                }
            }
        }
    }
}

/// Adds to `sums` (gradients of weight and of decay / weight) what `T` positions from `step` on give. `states` holds h, then d.
#[inline(always)]
fn gradient_tile<S: Simd, const T: usize, const CUT: bool>(
    simd: S,
    [x, dy]: [Columns; 2],
    filter: &Filter,
    (step, n, at): (usize, usize, usize),
    [states, slopes]: [&mut [f32]; 2],
    [dweight, ddecay]: [&mut [f32]; 2],
) {
    let now = rows::<S, T>(simd, x, filter, (step, n, 0), at);
    let old = if CUT { rows(simd, x, filter, (step, n, filter.truncation), at) } else { now };
    let dy = rows::<S, T>(simd, dy, filter, (step, n, 0), at);
    let states = states.chunks_exact_mut(BLOCK).zip(slopes.chunks_exact_mut(BLOCK));
    let grads = dweight.chunks_exact_mut(BLOCK).zip(ddecay.chunks_exact_mut(BLOCK));
    let all = filter.decay.chunks_exact(BLOCK).zip(states).zip(grads).enumerate();
    for (index, ((decay, (state, slope)), (dweight, ddecay))) in all {
        let decay = load(simd, decay, at);
        let (mut h, mut d) = (load(simd, state, at), load(simd, slope, at));
        let (mut of_weight, mut of_decay) = (load(simd, dweight, at), load(simd, ddecay, at));
        let (mut now, mut slopes) = (now, [simd.splat_f32s(0.0); T]);
        if CUT {
            let tail = |part: usize| load(simd, &filter.tail[part][index * BLOCK..][..BLOCK], at);
            now = subtract(simd, tail(0), old, now);
            slopes = subtract(simd, tail(1), old, slopes);
        }
        for ((now, more), dy) in now.into_iter().zip(slopes).zip(dy) {
            let before = if CUT { simd.add_f32s(h, more) } else { h };
            d = simd.mul_add_e_f32s(decay, d, before);
            h = simd.mul_add_e_f32s(decay, h, now);
            of_weight = simd.mul_add_e_f32s(dy, h, of_weight);
            of_decay = simd.mul_add_e_f32s(dy, d, of_decay);
        }
        store(simd, state, at, h);
        store(simd, slope, at, d);
        store(simd, dweight, at, of_weight);
        store(simd, ddecay, at, of_decay);
    }
}

simd_fn! {
    /// Adds the gradients of weight and decay, [ndim, BLOCK] each, to `sums`; `scratch` has room for twice as much.
    fn add_gradients<S>(
        simd, rows: [Columns<'a>; 2], n: usize, filter: &'a Filter, scratch: &'a mut [f32], sums: &'a mut [f32],
    ) {
        let room = filter.decay.len();
        scratch.fill(0.0);
        let [h, d, dweight, ddecay] = par::carve(scratch, [room; 4]);
        for at in (0..rows[0].width()).step_by(S::F32_LANES) {
            for first in (0..n).step_by(SPAN) {
                let last = (first + SPAN).min(n);
                let whole = last - (last - first) % TILE;
                for step in (first..whole).step_by(TILE) {
                    let (here, states) = ((step, n, at), [&mut *h, &mut *d]);
                    let grads = [&mut *dweight, &mut *ddecay];
                    match filter.truncation {
                        0 => gradient_tile::<S, TILE, false>(simd, rows, filter, here, states, grads),
                        _ => gradient_tile::<S, TILE, true>(simd, rows, filter, here, states, grads),
                    }
                }
                for step in whole..last {
                    let (here, states) = ((step, n, at), [&mut *h, &mut *d]);
                    let grads = [&mut *dweight, &mut *ddecay];
                    match filter.truncation {
                        0 => gradient_tile::<S, 1, false>(simd, rows, filter, here, states, grads),
                        _ => gradient_tile::<S, 1, true>(simd, rows, filter, here, states, grads),
                    }
                }
                let parts = dweight.chunks_exact_mut(BLOCK).chain(ddecay.chunks_exact_mut(BLOCK));
                for (part, sum) in parts.zip(sums.chunks_exact_mut(BLOCK)) {
                    store(simd, sum, at, simd.add_f32s(load(simd, sum, at), load(simd, part, at)));
                    store(simd, part, at, simd.splat_f32s(0.0));
                }
            }
        }
        for (weight, ddecay) in filter.weight.iter().zip(&mut sums[room..]) {
            *ddecay *= weight;
        }
    }
}
