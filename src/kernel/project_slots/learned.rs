//! The fused CPU kernel of a projection by parameters, forward and backward.

use candle_core::{CpuStorage, D, Layout, Result, Shape, Tensor};

use crate::kernel::cpu;
use crate::kernel::cpu::gemm::{Mat, MatMut, Threads, gemm, gemm_add};
use crate::kernel::cpu::jobs::build_jobs;
use crate::kernel::op::{self, Op};

/// Columns of one product in the forward pass.
const COLUMNS: usize = 64;
/// Rows of the matrix whose gradient one job computes.
const ROWS: usize = 64;
/// Positions whose gradient one job computes.
const POSITIONS: usize = 256;

/// Several parts of packed rows, all multiplied by one matrix (per head).
pub struct Learned {
    batch: usize,
    len: usize,
    /// Width of a row.
    row: usize,
    /// Where the projected parts start within a row.
    parts: Vec<usize>,
    /// Width of a part.
    width: usize,
    /// Matrices: one per head, or one.
    heads: usize,
    /// Slots.
    slots: usize,
    /// Columns of a matrix.
    columns: usize,
}

/// Columns of one product: those of `part` from `start` on, under matrix `head`.
#[derive(Clone, Copy)]
struct Block {
    sample: usize,
    part: usize,
    head: usize,
    start: usize,
    len: usize,
}

impl Learned {
    /// For `rows` [b, n, count * e] and `matrix` [heads, k, n_max] or [k, n_max].
    ///
    /// # Errors
    /// Shapes that do not fit.
    pub fn new(rows: &Tensor, matrix: &Tensor, parts: &[usize], count: usize) -> Result<Self> {
        let (batch, len, row) = rows.dims3()?;
        let width = row / count;
        Ok(Self {
            batch,
            len,
            row,
            parts: parts.iter().map(|part| part * width).collect(),
            width,
            heads: if matrix.rank() == 3 { matrix.dim(0)? } else { 1 },
            slots: matrix.dim(D::Minus2)?,
            columns: matrix.dim(D::Minus1)?,
        })
    }

    /// Width of a part under one matrix.
    fn head_dim(&self) -> usize {
        self.width / self.heads
    }

    /// Width of a row of the result.
    fn out_width(&self) -> usize {
        self.parts.len() * self.width
    }

    /// Rows `from..from + len` of matrix `head`, the columns that are used.
    fn matrix<'a>(&self, data: &'a [f32], head: usize, from: usize, len: usize) -> Mat<'a> {
        Mat::strided(&data[(head * self.slots + from) * self.columns..], len, self.len, self.columns)
    }

    fn blocks(&self) -> Vec<Block> {
        let mut blocks = Vec::new();
        for sample in 0..self.batch {
            for part in 0..self.parts.len() {
                for head in 0..self.heads {
                    blocks.extend((0..self.head_dim()).step_by(COLUMNS).map(|start| {
                        let len = COLUMNS.min(self.head_dim() - start);
                        Block { sample, part, head, start: head * self.head_dim() + start, len }
                    }));
                }
            }
        }
        blocks
    }

    fn project(&self, rows: &[f32], matrix: &[f32]) -> Vec<f32> {
        let blocks = self.blocks();
        let lens: Vec<usize> = blocks.iter().map(|block| self.slots * block.len).collect();
        let [products] = build_jobs(
            [&lens],
            || (),
            |(), job, [out]| {
                let Block { sample, part, head, start, len } = blocks[job];
                let first = sample * self.len * self.row + self.parts[part] + start;
                let values = Mat::strided(&rows[first..], self.len, len, self.row);
                let matrix = self.matrix(matrix, head, 0, self.slots);
                gemm(MatMut::new(out, self.slots, len), matrix, values, 1.0, Threads::One);
            },
        );
        let mut out = vec![0.0; self.batch * self.slots * self.out_width()];
        let mut rest = products.as_slice();
        for Block { sample, part, start, len, .. } in blocks {
            let (product, tail) = rest.split_at(self.slots * len);
            rest = tail;
            for (slot, values) in product.chunks_exact(len).enumerate() {
                let at = (sample * self.slots + slot) * self.out_width() + part * self.width + start;
                out[at..at + len].copy_from_slice(values);
            }
        }
        out
    }

    /// Gradient of the rows: E^T times the gradient of the slots.
    fn row_grads(&self, matrix: &[f32], grad: &[f32]) -> Vec<f32> {
        let (d, per_sample) = (self.head_dim(), self.len.div_ceil(POSITIONS));
        let positions = |job: usize| {
            let start = job % per_sample * POSITIONS;
            start..(start + POSITIONS).min(self.len)
        };
        let lens: Vec<usize> =
            (0..self.batch * per_sample).map(|job| positions(job).len() * self.row).collect();
        let [drows] = build_jobs(
            [&lens],
            || (),
            |(), job, [drows]| {
                let (sample, positions) = (job / per_sample, positions(job));
                for (part, &at) in self.parts.iter().enumerate() {
                    for head in 0..self.heads {
                        let matrix = &matrix[head * self.slots * self.columns + positions.start..];
                        let matrix = Mat::strided(matrix, self.slots, positions.len(), self.columns);
                        let grad = self.grad(grad, sample, part, head, 0, self.slots);
                        let out = MatMut::strided(&mut drows[at + head * d..], positions.len(), d, self.row);
                        gemm(out, matrix.t(), grad, 1.0, Threads::One);
                    }
                }
            },
        );
        drows
    }

    /// Gradient of the matrix: gradient of the slots times the rows, over samples and parts in order.
    fn matrix_grad(&self, rows: &[f32], grad: &[f32]) -> Vec<f32> {
        let (d, per_head) = (self.head_dim(), self.slots.div_ceil(ROWS));
        let range = |job: usize| {
            let start = job % per_head * ROWS;
            start..(start + ROWS).min(self.slots)
        };
        let lens: Vec<usize> =
            (0..self.heads * per_head).map(|job| range(job).len() * self.columns).collect();
        let [dmatrix] = build_jobs(
            [&lens],
            || (),
            |(), job, [out]| {
                let (head, range) = (job / per_head, range(job));
                for sample in 0..self.batch {
                    for (part, &at) in self.parts.iter().enumerate() {
                        let first = sample * self.len * self.row + at + head * d;
                        let values = Mat::strided(&rows[first..], self.len, d, self.row);
                        let grad = self.grad(grad, sample, part, head, range.start, range.len());
                        let out = MatMut::strided(out, range.len(), self.len, self.columns);
                        gemm_add(out, grad, values.t(), 1.0, 1.0, Threads::One);
                    }
                }
            },
        );
        dmatrix
    }

    /// Slots `from..from + len` of the result's gradient, the columns of one part under one matrix.
    fn grad<'a>(
        &self,
        grad: &'a [f32],
        sample: usize,
        part: usize,
        head: usize,
        from: usize,
        len: usize,
    ) -> Mat<'a> {
        let at = (sample * self.slots + from) * self.out_width() + part * self.width + head * self.head_dim();
        Mat::strided(&grad[at..], len, self.head_dim(), self.out_width())
    }
}

impl Op for Learned {
    fn name(&self) -> &'static str {
        "project-slots-learned"
    }

    fn forward(&self, operands: &[(&CpuStorage, &Layout)]) -> Result<(Vec<f32>, Shape)> {
        let [rows, matrix] = cpu::slices(operands)?;
        Ok((self.project(rows, matrix), (self.batch, self.slots, self.out_width()).into()))
    }

    fn backward(&self, operands: &[&Tensor], _: &Tensor, grad: &Tensor) -> Result<Vec<Option<Tensor>>> {
        let [rows, matrix] = op::operands(operands)?;
        cpu::with_slices([rows, matrix, grad], |[values, weights, grad]| {
            let drows = cpu::gradient(rows, self.row_grads(weights, grad))?;
            Ok(vec![drows, cpu::gradient(matrix, self.matrix_grad(values, grad))?])
        })
    }
}
