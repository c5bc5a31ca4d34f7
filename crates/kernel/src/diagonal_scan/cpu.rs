//! The scan on the CPU: samples and blocks of states in parallel, positions one after another with the state in registers.
//!
//! The gradient of the states runs the other way: g_t = dh_t + conj(a) g_{t+1}; then du = g and da = sum_t g_t conj(h_{t-1}).

use std::ops::Range;

use candle_core::{CpuStorage, Layout, Result, Shape, Tensor};

use super::Direction;
use crate::cpu;
use crate::cpu::columns::{Columns, ColumnsMut, cut};
use crate::cpu::math::{flush, load, store};
use crate::cpu::par::{self, Chunks};
use crate::op::{self, FusedOp, SavedOutput};
use crate::simd_fn;

/// States per block: a cache line of real parts.
const BLOCK: usize = 16;
/// Positions whose products are summed before they are added to the gradient of a.
const SPAN: usize = 128;
/// Positions after which a gradient that has faded is dropped.
const FLUSHED: usize = 8;

pub(super) struct Scan {
    pub direction: Direction,
}

/// Real and imaginary columns of a block of states.
type Pair<'a> = [Columns<'a>; 2];
type PairMut<'a> = [ColumnsMut<'a>; 2];

/// Cuts rows of `planes` x p numbers into blocks of states: for every block its columns in each plane.
fn blocks(data: &mut [f32], planes: usize, p: usize) -> Vec<Vec<ColumnsMut<'_>>> {
    let chunks = Chunks::of(p, BLOCK);
    let ranges = (0..planes)
        .flat_map(|plane| (0..chunks.count()).map(move |index| plane_of(plane, p, chunks.range(index))));
    let mut all: Vec<Vec<_>> = (0..chunks.count()).map(|_| Vec::with_capacity(planes)).collect();
    for (at, block) in cut(data, planes * p, ranges).into_iter().enumerate() {
        all[at % chunks.count()].push(block);
    }
    all
}

fn plane_of(plane: usize, p: usize, states: Range<usize>) -> Range<usize> {
    plane * p + states.start..plane * p + states.end
}

/// Planes `2 side` and `2 side + 1` of rows of `planes` x p numbers.
fn pair(data: &[f32], planes: usize, p: usize, side: usize, states: Range<usize>) -> Pair<'_> {
    [2 * side, 2 * side + 1].map(|plane| Columns::new(data, planes * p, plane_of(plane, p, states.clone())))
}

impl FusedOp for Scan {
    fn name(&self) -> &'static str {
        "diagonal-scan"
    }

    fn forward(&self, operands: &[(&CpuStorage, &Layout)]) -> Result<(Vec<f32>, Shape)> {
        let [u, a] = cpu::slices(operands)?;
        let (b, n, _) = operands[0].1.shape().dims3()?;
        let (p, planes) = (a.len() / 2, 2 * self.direction.count());
        let mut h = par::zeros(b * n * planes * p);
        let jobs = h.chunks_mut((n * planes * p).max(1)).enumerate().flat_map(|(sample, h)| {
            blocks(h, planes, p).into_iter().enumerate().map(move |(block, h)| (sample, block, h))
        });
        par::each_piece(jobs, |_, (sample, block, h)| {
            let states = Chunks::of(p, BLOCK).range(block);
            let u = pair(&u[sample * n * 2 * p..][..n * 2 * p], 2, p, 0, states.clone());
            let a = [&a[states.clone()], &a[plane_of(1, p, states)]];
            let mut h = h.into_iter();
            for &reverse in self.direction.reversed() {
                if let (Some(re), Some(im)) = (h.next(), h.next()) {
                    run(u, a, reverse, [re, im]);
                }
            }
        });
        Ok((h, (b, n, planes * p).into()))
    }

    fn needs_output(&self) -> bool {
        true
    }

    fn backward(&self, operands: &[&Tensor], out: SavedOutput, grad: &Tensor) -> Result<Vec<Option<Tensor>>> {
        let [u, a] = op::operands(operands)?;
        let (b, n, _) = u.dims3()?;
        let (p, planes) = (a.dim(1)?, 2 * self.direction.count());
        let (du, da) = cpu::with_slices([a, op::result(out)?, grad], |[a, h, dh]| {
            let mut du = par::zeros(b * n * 2 * p);
            let jobs = du.chunks_mut((n * 2 * p).max(1)).enumerate().flat_map(|(sample, du)| {
                blocks(du, 2, p).into_iter().enumerate().map(move |(block, du)| (sample, block, du))
            });
            let chunks = Chunks::of(p, BLOCK);
            let sums = par::map_pieces(jobs, |_, (sample, block, du)| {
                let states = chunks.range(block);
                let a = [&a[states.clone()], &a[plane_of(1, p, states.clone())]];
                let rows = sample * n * planes * p..(sample + 1) * n * planes * p;
                let (dh, h) = (&dh[rows.clone()], &h[rows]);
                let (mut sums, mut du) = ([[0.0; BLOCK]; 2], du.into_iter());
                if let (Some(mut re), Some(mut im)) = (du.next(), du.next()) {
                    for (side, &reverse) in self.direction.reversed().iter().enumerate() {
                        let [dh, h] = [dh, h].map(|x| pair(x, planes, p, side, states.clone()));
                        run_back(dh, h, a, reverse, [re.reborrow(), im.reborrow()], &mut sums);
                    }
                }
                sums
            });
            let mut da = vec![0.0; 2 * p];
            for (job, sums) in sums.iter().enumerate() {
                let states = chunks.range(job % chunks.count());
                for (plane, sums) in sums.iter().enumerate() {
                    cpu::rows::add(&sums[..states.len()], &mut da[plane_of(plane, p, states.clone())]);
                }
            }
            Ok((du, da))
        })?;
        Ok(vec![cpu::gradient(u, du)?, cpu::gradient(a, da)?])
    }
}

simd_fn! {
    /// h_t = a h_{t-1} + u_t over all rows.
    fn run<S>(simd, u: Pair<'a>, a: [&'a [f32]; 2], reverse: bool, h: PairMut<'a>) {
        let [mut h_re, mut h_im] = h;
        let n = h_re.rows();
        for at in (0..u[0].width()).step_by(S::F32_LANES) {
            let (a_re, a_im) = (load(simd, a[0], at), load(simd, a[1], at));
            let (mut re, mut im) = (simd.splat_f32s(0.0), simd.splat_f32s(0.0));
            for step in 0..n {
                let row = if reverse { n - 1 - step } else { step };
                let rest = simd.negate_mul_add_e_f32s(a_im, im, load(simd, u[0].row(row), at));
                let more = simd.mul_add_e_f32s(a_im, re, load(simd, u[1].row(row), at));
                re = simd.mul_add_e_f32s(a_re, re, rest);
                im = simd.mul_add_e_f32s(a_re, im, more);
                store(simd, h_re.row(row), at, re);
                store(simd, h_im.row(row), at, im);
            }
        }
    }
}

simd_fn! {
    /// Adds the gradient of u to `du` and that of a to `da`, for the gradient `dh` of the states `h`, which [`run`] made in the
    /// direction `reverse`.
    fn run_back<S>(
        simd,
        dh: Pair<'a>,
        h: Pair<'a>,
        a: [&'a [f32]; 2],
        reverse: bool,
        du: PairMut<'a>,
        da: &'a mut [[f32; BLOCK]; 2],
    ) {
        let [mut du_re, mut du_im] = du;
        let (n, width) = (du_re.rows(), dh[0].width());
        for at in (0..width).step_by(S::F32_LANES) {
            let (a_re, a_im) = (load(simd, a[0], at), load(simd, a[1], at));
            let zero = simd.splat_f32s(0.0);
            let (mut re, mut im) = (zero, zero);
            let mut last = n;
            while last > 0 {
                let first = last.saturating_sub(SPAN);
                let (mut sum_re, mut sum_im) = (zero, zero);
                for step in (first..last).rev() {
                    let row = if reverse { n - 1 - step } else { step };
                    // conj(a) (re + i im)
                    let rest = simd.mul_add_e_f32s(a_im, im, load(simd, dh[0].row(row), at));
                    let more = simd.negate_mul_add_e_f32s(a_im, re, load(simd, dh[1].row(row), at));
                    re = simd.mul_add_e_f32s(a_re, re, rest);
                    im = simd.mul_add_e_f32s(a_re, im, more);
                    if step % FLUSHED == 0 {
                        (re, im) = (flush(simd, re), flush(simd, im));
                    }
                    let (du_re, du_im) = (du_re.row(row), du_im.row(row));
                    store(simd, du_re, at, simd.add_f32s(load(simd, du_re, at), re));
                    store(simd, du_im, at, simd.add_f32s(load(simd, du_im, at), im));
                    if step > 0 {
                        let before = if reverse { row + 1 } else { row - 1 };
                        let (h_re, h_im) = (load(simd, h[0].row(before), at), load(simd, h[1].row(before), at));
                        sum_re = simd.mul_add_e_f32s(re, h_re, simd.mul_add_e_f32s(im, h_im, sum_re));
                        sum_im = simd.negate_mul_add_e_f32s(re, h_im, simd.mul_add_e_f32s(im, h_re, sum_im));
                    }
                }
                let [da_re, da_im] = da.each_mut().map(|da| &mut da[..width]);
                store(simd, da_re, at, simd.add_f32s(load(simd, da_re, at), sum_re));
                store(simd, da_im, at, simd.add_f32s(load(simd, da_im, at), sum_im));
                last = first;
            }
        }
    }
}
