//! Gradients of the decays of a chunk, from what its rows read and write.

use super::CHUNK;
use crate::cpu::math;

/// What the gradient of the decays of a chunk, in one direction, is summed from.
pub(super) struct LogTerms {
    pub(super) width: usize,
    /// What step r of the chunk gets from all rows at and behind it.
    pub(super) readers: Vec<f32>,
    /// What it gets from all rows before it.
    pub(super) writers: Vec<f32>,
    /// What every step gets.
    pub(super) across: Vec<f32>,
}

impl LogTerms {
    pub(super) fn new(width: usize) -> Self {
        let room = || vec![0.0; CHUNK * width];
        Self { width, readers: room(), writers: room(), across: vec![0.0; width] }
    }

    /// The gradients of the steps of `count` rows, row r at `out[r * stride..]`; the sums are used up.
    pub(super) fn finish(&mut self, count: usize, out: &mut [f32], stride: usize) {
        let used = count * self.width;
        running_sums(&self.readers[..used], &self.writers[..used], &mut self.across, out, stride);
    }
}

crate::simd_fn! {
    /// Row r of `out` gets `sum`, the writers before r and the readers from r on.
    fn running_sums<S>(
        simd,
        readers: &'a [f32],
        writers: &'a [f32],
        sum: &'a mut [f32],
        out: &'a mut [f32],
        stride: usize,
    ) {
        let width = sum.len();
        for (writers, out) in writers.chunks_exact(width).zip(out.chunks_mut(stride)) {
            out[..width].copy_from_slice(sum);
            math::add(simd, writers, sum);
        }
        sum.fill(0.0);
        let rows = readers.chunks_exact(width).zip(out.chunks_mut(stride));
        for (readers, out) in rows.rev() {
            math::add(simd, readers, sum);
            math::add(simd, sum, &mut out[..width]);
        }
    }
}
