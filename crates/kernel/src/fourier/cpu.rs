//! Fourier mixing on the CPU: fast transforms over channels, then positions.
//!
//! Two rows a and b of real numbers are one row z = a + i b of complex ones; from its transform Z come A[e] = (Z[e] + conj Z[-e]) / 2
//! and B[e] = (Z[e] - conj Z[-e]) / 2i. The pairs are rows j and j + n / 2, so that a column of A and one of B follow each other. The
//! real part of the result is the same at (n, e) and (-n, -e) (indices modulo the sizes): only columns up to e / 2 are
//! transformed over positions.

use std::ops::Range;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use candle_core::{CpuStorage, Layout, Result, Shape, Tensor};
use rustfft::num_complex::Complex32;
use rustfft::{Fft, FftPlanner};

use super::Norm;
use crate::cpu::jobs::build_jobs;
use crate::cpu::par::{self, Chunks};
use crate::cpu::sample_rows::build_rows;
use crate::cpu::{self, transpose::transpose};
use crate::op::{self, FusedOp, SavedOutput};
use crate::simd_fn;

/// Pairs of rows that are transformed together.
const PAIRS: usize = 16;
/// Rows of the result that are put together at a time.
const ROWS: usize = 64;

pub(super) struct FourierMix {
    pub norm: Norm,
}

impl FusedOp for FourierMix {
    fn name(&self) -> &'static str {
        "fourier-mix"
    }

    fn forward(&self, operands: &[(&CpuStorage, &Layout)]) -> Result<(Vec<f32>, Shape)> {
        let [x] = cpu::slices(operands)?;
        let (b, n, e) = operands[0].1.shape().dims3()?;
        Ok((mix(x, Dims { b, n, e }, self.norm), (b, n, e).into()))
    }

    fn backward(&self, operands: &[&Tensor], _: SavedOutput, grad: &Tensor) -> Result<Vec<Option<Tensor>>> {
        let [x] = op::operands(operands)?;
        let (b, n, e) = x.dims3()?;
        let dx = cpu::with_slices([grad], |[dy]| Ok(mix(dy, Dims { b, n, e }, self.norm)))?;
        Ok(vec![cpu::gradient(x, dx)?])
    }
}

/// Samples, positions, channels.
#[derive(Clone, Copy)]
struct Dims {
    b: usize,
    n: usize,
    e: usize,
}

impl Dims {
    /// Pairs of rows of a sample, in groups that are transformed together. The last of an odd number has no second row.
    fn pairs(self) -> Chunks {
        Chunks::of(self.n.div_ceil(2), PAIRS)
    }

    /// Columns that are transformed over positions.
    fn half(self) -> usize {
        self.e / 2 + 1
    }
}

/// The real part of the transform of every [n, e] matrix of `x`.
fn mix(x: &[f32], dims: Dims, norm: Norm) -> Vec<f32> {
    if x.is_empty() {
        return Vec::new();
    }
    let spectra = over_channels(x, dims);
    let columns = over_positions(&spectra, dims, norm.scale(dims.n, dims.e) as f32);
    drop(spectra);
    put_together(&columns, dims)
}

/// The transform of `size` complex numbers; plans are kept.
fn plan(size: usize) -> Arc<dyn Fft<f32>> {
    static PLANNER: OnceLock<Mutex<FftPlanner<f32>>> = OnceLock::new();
    let planner = PLANNER.get_or_init(|| Mutex::new(FftPlanner::new()));
    planner.lock().unwrap_or_else(PoisonError::into_inner).plan_fft_forward(size)
}

/// Working memory of one thread for `count` transforms.
struct Room {
    rows: Vec<Complex32>,
    scratch: Vec<Complex32>,
}

impl Room {
    fn new(fft: &dyn Fft<f32>, count: usize) -> Self {
        let zeros = |len| vec![Complex32::default(); len];
        Self { rows: zeros(count * fft.len()), scratch: zeros(fft.get_inplace_scratch_len()) }
    }
}

/// The transforms of all pairs of rows, [b, groups, e, pairs of the group] complex numbers.
fn over_channels(x: &[f32], dims: Dims) -> Vec<f32> {
    let Dims { b, n, e } = dims;
    let (fft, pairs) = (plan(e), dims.pairs());
    let lens: Vec<usize> =
        (0..b * pairs.count()).map(|job| pairs.range(job % pairs.count()).len() * 2 * e).collect();
    let [spectra] = build_jobs(
        [&lens],
        || Room::new(&*fft, PAIRS),
        |room, job, [out]| {
            let x = &x[job / pairs.count() * n * e..][..n * e];
            let here = pairs.range(job % pairs.count());
            let rows = &mut room.rows[..here.len() * e];
            for (z, row) in rows.chunks_exact_mut(e).zip(here.clone()) {
                let second = x.get((row + pairs.len) * e..).unwrap_or_default();
                pack(&x[row * e..][..e], second.get(..e).unwrap_or_default(), z);
            }
            fft.process_with_scratch(rows, &mut room.scratch);
            turn(rows, e, bytemuck::cast_slice_mut(out));
        },
    );
    spectra
}

simd_fn! {
    /// z = first + i second; `second` is as long as `first`, or empty for zeros.
    fn pack<S>(_simd, first: &'a [f32], second: &'a [f32], z: &'a mut [Complex32]) {
        if second.is_empty() {
            z.iter_mut().zip(first).for_each(|(z, &re)| *z = Complex32::new(re, 0.0));
        } else {
            let pairs = first.iter().zip(second);
            z.iter_mut().zip(pairs).for_each(|(z, (&re, &im))| *z = Complex32::new(re, im));
        }
    }
}

simd_fn! {
    /// The transpose of rows of `width` numbers, a cache line of columns at a time.
    fn turn<S>(_simd, x: &'a [Complex32], width: usize, y: &'a mut [Complex32]) {
        let rows = x.len() / width;
        for left in (0..width).step_by(8) {
            let right = (left + 8).min(width);
            let y = &mut y[left * rows..right * rows];
            for (row, x) in x.chunks_exact(width).enumerate() {
                for (column, x) in x[left..right].iter().enumerate() {
                    y[column * rows + row] = *x;
                }
            }
        }
    }
}

/// Columns 0 to e / 2 of the result, [b, e / 2 + 1, n].
fn over_positions(spectra: &[f32], dims: Dims, scale: f32) -> Vec<f32> {
    let Dims { b, n, e } = dims;
    let spectra: &[Complex32] = bytemuck::cast_slice(spectra);
    let fft = plan(n);
    // columns that follow each other in memory, as many as stay in the cache
    let chunks = Chunks::of(dims.half(), ((1 << 16) / n).clamp(1, 8));
    let lens: Vec<usize> =
        (0..b * chunks.count()).map(|job| chunks.range(job % chunks.count()).len() * n).collect();
    let per_sample = dims.pairs().len * e;
    let [columns] = build_jobs(
        [&lens],
        || Room::new(&*fft, chunks.size),
        |room, job, [out]| {
            let spectra = &spectra[job / chunks.count() * per_sample..][..per_sample];
            let here = chunks.range(job % chunks.count());
            let columns = &mut room.rows[..here.len() * n];
            gather(spectra, dims, here, 0.5 * scale, columns);
            fft.process_with_scratch(columns, &mut room.scratch);
            real_parts(columns, out);
        },
    );
    columns
}

/// The spectra of all rows at some channels, 2 `factor` times, from those of pairs.
fn gather(spectra: &[Complex32], dims: Dims, channels: Range<usize>, factor: f32, columns: &mut [Complex32]) {
    let Dims { n, e, .. } = dims;
    let pairs = dims.pairs();
    for group in 0..pairs.count() {
        let here = pairs.range(group);
        let spectra = &spectra[here.start * e..here.end * e];
        let column = |channel: usize| &spectra[channel % e * here.len()..][..here.len()];
        for (channel, to) in channels.clone().zip(columns.chunks_exact_mut(n)) {
            let (first, second) = to.split_at_mut(pairs.len);
            let second = &mut second[here.start.min(n - pairs.len)..here.end.min(n - pairs.len)];
            unpack(column(channel), column(e - channel), factor, &mut first[here.clone()], second);
        }
    }
}

simd_fn! {
    /// The spectra of two real vectors, 2 `factor` times, from that of their pair at e and -e; `second` may be shorter.
    fn unpack<S>(
        _simd,
        z: &'a [Complex32],
        mirrored: &'a [Complex32],
        factor: f32,
        first: &'a mut [Complex32],
        second: &'a mut [Complex32],
    ) {
        for ((to, z), m) in first.iter_mut().zip(z).zip(mirrored) {
            *to = Complex32::new(factor * (z.re + m.re), factor * (z.im - m.im));
        }
        for ((to, z), m) in second.iter_mut().zip(z).zip(mirrored) {
            *to = Complex32::new(factor * (z.im + m.im), factor * (m.re - z.re));
        }
    }
}

simd_fn! {
    /// The real parts of `z`.
    fn real_parts<S>(_simd, z: &'a [Complex32], to: &'a mut [f32]) {
        to.iter_mut().zip(z).for_each(|(to, z)| *to = z.re);
    }
}

/// The result from its columns 0 to e / 2: the others are those at (-n, -e).
fn put_together(columns: &[f32], dims: Dims) -> Vec<f32> {
    let Dims { b, n, e } = dims;
    let (y, _) = build_rows(
        b,
        Chunks::of(n, ROWS),
        e,
        || par::scratch(ROWS * e),
        |tile, sample, rows, y| {
            let columns = &columns[sample * dims.half() * n..][..dims.half() * n];
            for (channel, line) in tile.chunks_exact_mut(rows.len()).take(e).enumerate() {
                if channel < dims.half() {
                    line.copy_from_slice(&columns[channel * n..][..n][rows.clone()]);
                } else {
                    mirror(&columns[(e - channel) * n..][..n], rows.start, line);
                }
            }
            transpose(tile, e, rows.len(), y);
        },
    );
    y
}

simd_fn! {
    /// Elements -first, -first - 1, .. of `x`, indices modulo its length.
    fn mirror<S>(_simd, x: &'a [f32], first: usize, to: &'a mut [f32]) {
        let (first, to) = match first {
            0 => {
                to[0] = x[0];
                (1, &mut to[1..])
            }
            first => (first, to),
        };
        let end = x.len() + 1 - first;
        let from = &x[end - to.len()..end];
        to.iter_mut().zip(from.iter().rev()).for_each(|(to, from)| *to = *from);
    }
}
