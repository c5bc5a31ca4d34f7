//! Fourier mixing on the CPU by real transforms over channels, then positions.
//!
//! The Hartley transform of a real vector x is H x = sum_j (cos + sin)(2 pi j k / size) x_j = Re F x - Im F x for its Fourier
//! transform F x. One complex transform of x + i y gives those of two real vectors ([`hartley`]). With r[m, e] the transform
//! of row m over channels, column e of the result is the Hartley transform over positions of (r[m, -e] + r[-m, e]) / 2
//! (indices modulo the sizes): its even part has the cosines over channels, its odd part the sines. The result is the
//! same at (n, e) and (-n, -e), so only columns up to E / 2 are transformed.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use candle_core::{CpuStorage, Layout, Result, Shape, Tensor};
use rustfft::num_complex::Complex32;
use rustfft::{Fft, FftPlanner};

use super::Norm;
use crate::kernel::cpu::par::{self, Chunks};
use crate::kernel::cpu::{self, transpose::transpose};
use crate::kernel::op::{self, Op, Out};

/// Rows of the result that are put together at a time.
const ROWS: usize = 64;

pub(super) struct FourierMix {
    pub norm: Norm,
}

impl Op for FourierMix {
    fn name(&self) -> &'static str {
        "fourier-mix"
    }

    fn forward(&self, operands: &[(&CpuStorage, &Layout)]) -> Result<(Vec<f32>, Shape)> {
        let [x] = cpu::slices(operands)?;
        let (b, n, e) = operands[0].1.shape().dims3()?;
        Ok((mix(x, (b, n, e), self.norm), (b, n, e).into()))
    }

    fn backward(&self, operands: &[&Tensor], _: Out, grad: &Tensor) -> Result<Vec<Option<Tensor>>> {
        let [x] = op::operands(operands)?;
        let dims = x.dims3()?;
        let dx = cpu::with_slices([grad], |[dy]| Ok(mix(dy, dims, self.norm)))?;
        Ok(vec![cpu::gradient(x, dx)?])
    }
}

/// The transform of `size` complex numbers; plans are kept.
fn plan(size: usize) -> Arc<dyn Fft<f32>> {
    static PLANNER: OnceLock<Mutex<FftPlanner<f32>>> = OnceLock::new();
    let planner = PLANNER.get_or_init(|| Mutex::new(FftPlanner::new()));
    planner.lock().unwrap_or_else(PoisonError::into_inner).plan_fft_forward(size)
}

/// Working memory of one thread for transforms of `count` pairs of vectors.
struct Room {
    pairs: Vec<Complex32>,
    scratch: Vec<Complex32>,
}

impl Room {
    fn new(fft: &dyn Fft<f32>, count: usize) -> Self {
        let zero = Complex32::default();
        Self { pairs: vec![zero; count * fft.len()], scratch: vec![zero; fft.get_inplace_scratch_len()] }
    }
}

/// The Hartley transforms, times `scale`, of two real vectors x and y from the Fourier transform `z` of x + i y; `second` may be
/// empty.
fn hartley(z: &[Complex32], scale: f32, first: &mut [f32], second: &mut [f32]) {
    let half = 0.5 * scale;
    let size = z.len();
    let mirrored = z[..1].iter().chain(z[1..].iter().rev()); // z[-k]
    if second.is_empty() {
        for ((first, z), m) in first.iter_mut().zip(z).zip(mirrored) {
            *first = half * ((z.re - z.im) + (m.re + m.im));
        }
        return;
    }
    let second = &mut second[..size];
    for (((first, second), z), m) in first.iter_mut().zip(second).zip(z).zip(mirrored) {
        *first = half * ((z.re - z.im) + (m.re + m.im));
        *second = half * ((z.re + z.im) - (m.re - m.im));
    }
}

/// The real part of the transform of every [n, e] matrix of `x`.
fn mix(x: &[f32], (b, n, e): (usize, usize, usize), norm: Norm) -> Vec<f32> {
    if x.is_empty() {
        return Vec::new();
    }
    let rows = over_channels(x, e);
    let columns = over_positions(&rows, (b, n, e), norm.scale(n, e) as f32);
    drop(rows);
    put_together(&columns, (b, n, e))
}

/// The Hartley transform of every row.
fn over_channels(x: &[f32], e: usize) -> Vec<f32> {
    let fft = plan(e);
    let size = Chunks::rows(x.len() / e, 2 * e).size.next_multiple_of(2) * e;
    par::build_with(
        x.len(),
        size,
        || Room::new(&*fft, 1),
        |room, index, y| {
            for (pair, y) in y.chunks_mut(2 * e).enumerate() {
                let (first, second) = x[index * size + pair * 2 * e..][..y.len()].split_at(e);
                if second.is_empty() {
                    room.pairs.iter_mut().zip(first).for_each(|(z, &x)| *z = Complex32::new(x, 0.0));
                } else {
                    let both = first.iter().zip(second);
                    room.pairs.iter_mut().zip(both).for_each(|(z, (&x, &y))| *z = Complex32::new(x, y));
                }
                fft.process_with_scratch(&mut room.pairs, &mut room.scratch);
                let (first, second) = y.split_at_mut(e);
                hartley(&room.pairs, 1.0, first, second);
            }
        },
    )
}

/// Columns 0 to e / 2 of the result, [b, e / 2 + 1, n], from the transformed rows.
fn over_positions(rows: &[f32], (b, n, e): (usize, usize, usize), scale: f32) -> Vec<f32> {
    let (fft, half) = (plan(n), e / 2 + 1);
    // a cache line of columns, fewer where their transforms would leave the cache
    let size = ((1 << 17) / n).clamp(2, 16).next_multiple_of(2);
    let chunks = Chunks::of(half, size);
    let lens: Vec<usize> =
        (0..b * chunks.count()).map(|job| chunks.range(job % chunks.count()).len() * n).collect();
    let [columns] = crate::kernel::cpu::jobs::build_jobs(
        [&lens],
        || Room::new(&*fft, size / 2),
        |room, job, [out]| {
            let rows = &rows[job / chunks.count() * n * e..][..n * e];
            let here = chunks.range(job % chunks.count());
            let pairs = here.len().div_ceil(2);
            gather(rows, (n, e), here.start, here.len(), &mut room.pairs[..pairs * n]);
            fft.process_with_scratch(&mut room.pairs[..pairs * n], &mut room.scratch);
            for (z, out) in room.pairs.chunks_exact(n).zip(out.chunks_mut(2 * n)) {
                let (first, second) = out.split_at_mut(n);
                hartley(z, scale, first, second);
            }
        },
    );
    columns
}

/// (r[m, -e] + r[-m, e]) / 2 of `count` columns from `start` on, two in the parts of one complex number.
fn gather(r: &[f32], (n, e): (usize, usize), start: usize, count: usize, pairs: &mut [Complex32]) {
    for m in 0..n {
        let (row, mirrored) = (&r[m * e..][..e], &r[(n - m) % n * e..][..e]);
        let value = |column: usize| 0.5 * (row[(e - column) % e] + mirrored[column]);
        for (pair, column) in (start..start + count).step_by(2).enumerate() {
            let second = if column + 1 < start + count { value(column + 1) } else { 0.0 };
            pairs[pair * n + m] = Complex32::new(value(column), second);
        }
    }
}

/// The result from its columns 0 to e / 2: the others are those at (-n, -e).
fn put_together(columns: &[f32], (b, n, e): (usize, usize, usize)) -> Vec<f32> {
    let half = e / 2 + 1;
    let rows = Chunks::of(n, ROWS);
    let (y, _) = cpu::sample_rows::build_rows(
        b,
        rows,
        e,
        || par::scratch(ROWS * e),
        |tile, sample, range, y| {
            let columns = &columns[sample * half * n..][..half * n];
            for (column, line) in tile.chunks_exact_mut(range.len()).take(e).enumerate() {
                if column < half {
                    line.copy_from_slice(&columns[column * n..][..n][range.clone()]);
                } else {
                    let mirrored = &columns[(e - column) * n..][..n];
                    for (value, row) in line.iter_mut().zip(range.clone()) {
                        *value = mirrored[(n - row) % n];
                    }
                }
            }
            transpose(tile, e, range.len(), y);
        },
    );
    y
}
