//! Landmarks: the means of equally long segments of queries and keys.

use candle_core::{CpuStorage, Layout, Result, Shape, Tensor};

use crate::cpu::{self, par, rows::axpy};
use crate::op::{self, FusedOp, SavedOutput};
use crate::tape;

/// Rows `[Ql | Kl]` [b, m, 2 e] of packed `rows` [b, n, count * e], in which queries and keys start at `starts` (in
/// elements): landmark s is the mean of the rows s ceil(n / m) .. (s + 1) ceil(n / m), of which those from n on count as zeros.
pub fn segment_means(rows: &Tensor, m: usize, starts: [usize; 2], e: usize) -> Result<Tensor> {
    let (b, n, row) = rows.dims3()?;
    tape::apply(&[&rows.contiguous()?], Means { b, n, row, e, starts, m, segment: n.div_ceil(m) })
}

/// The operation; lengths in elements.
struct Means {
    b: usize,
    n: usize,
    /// Length of a packed row, of one of its parts, and where the two parts start.
    row: usize,
    e: usize,
    starts: [usize; 2],
    /// Landmarks, and positions per landmark.
    m: usize,
    segment: usize,
}

impl Means {
    fn factor(&self) -> f32 {
        1.0 / self.segment as f32
    }

    fn means(&self, rows: &[f32]) -> Vec<f32> {
        let Self { b, n, row, e, starts, m, segment, .. } = *self;
        par::build(b * m * 2 * e, 2 * e, |index, mean| {
            let (sample, landmark) = (&rows[index / m * n * row..][..n * row], index % m);
            let positions = sample.chunks_exact(row).skip(landmark * segment).take(segment);
            for x in positions {
                for (start, mean) in starts.into_iter().zip(mean.chunks_exact_mut(e)) {
                    axpy(self.factor(), &x[start..start + e], mean);
                }
            }
        })
    }

    /// Adds the gradient of the rows to `drows` [b, n, row].
    fn gradient(&self, grad: &[f32], drows: &mut [f32]) {
        let Self { n, row, e, starts, m, segment, .. } = *self;
        let chunks = par::Chunks::rows(drows.len() / row, row);
        par::each_piece(drows.chunks_mut(chunks.size * row), |chunk, drows| {
            for (index, drow) in drows.chunks_exact_mut(row).enumerate() {
                let position = chunk * chunks.size + index;
                let landmark = position / n * m + position % n / segment;
                for (start, grad) in starts.into_iter().zip(grad[landmark * 2 * e..].chunks_exact(e)) {
                    axpy(self.factor(), grad, &mut drow[start..start + e]);
                }
            }
        });
    }
}

impl FusedOp for Means {
    fn name(&self) -> &'static str {
        "nystrom-landmarks"
    }

    fn forward(&self, operands: &[(&CpuStorage, &Layout)]) -> Result<(Vec<f32>, Shape)> {
        let [rows] = cpu::slices(operands)?;
        Ok((self.means(rows), (self.b, self.m, 2 * self.e).into()))
    }

    /// Rows, whose gradient attention has begun.
    fn accumulates_into(&self) -> &'static [usize] {
        &[0]
    }

    fn backward_accumulate(
        &self,
        operands: &[&Tensor],
        _: SavedOutput,
        grad: &Tensor,
        held: Vec<Vec<f32>>,
    ) -> Result<Vec<Option<Tensor>>> {
        let [rows] = op::operands(operands)?;
        let [before] = op::held(held);
        let mut drows = op::begun(before, rows);
        cpu::with_slices([grad], |[grad]| {
            self.gradient(grad, &mut drows);
            Ok(())
        })?;
        Ok(vec![cpu::gradient(rows, drows)?])
    }
}
