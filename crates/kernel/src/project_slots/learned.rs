//! The fused CPU kernel of a projection by parameters, forward and backward.

use candle_core::{CpuStorage, Layout, Result, Shape, Tensor, bail};

use crate::cpu;
use crate::cpu::compact::{self, Elements};
use crate::cpu::gemm::{Mat, MatMut, Threads, gemm, gemm_add};
use crate::cpu::jobs::{build_jobs, jobs_onto};
use crate::cpu::{par, rows};
use crate::op::{self, FusedOp, SavedOutput};

/// Columns of one product in the forward pass.
const COLUMNS: usize = 64;
/// Rows of the matrix whose gradient one job computes, and columns that it adds to at a time.
const ROWS: usize = 128;
const ADDED: usize = 512;
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
    /// For `rows` [b, n, count * e] and a matrix [heads, k, n_max] or [k, n_max].
    pub fn new(rows: &Tensor, matrix: &[usize], parts: &[usize], count: usize) -> Result<Self> {
        let (batch, len, row) = rows.dims3()?;
        let width = row / count;
        let &[.., slots, columns] = matrix else { bail!("{matrix:?} are not the dimensions of a matrix") };
        Ok(Self {
            batch,
            len,
            row,
            parts: parts.iter().map(|part| part * width).collect(),
            width,
            heads: if matrix.len() == 3 { matrix[0] } else { 1 },
            slots,
            columns,
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

    /// Gradient of the rows, E^T times the gradient of the slots, added to `before` if that is not empty.
    fn row_grads(&self, matrix: &[f32], grad: &[f32], before: Vec<f32>) -> Vec<f32> {
        let (d, per_sample, count) = (self.head_dim(), self.len.div_ceil(POSITIONS), self.parts.len());
        let positions = |job: usize| {
            let start = job % per_sample * POSITIONS;
            start..(start + POSITIONS).min(self.len)
        };
        let lens: Vec<usize> =
            (0..self.batch * per_sample).map(|job| positions(job).len() * self.row).collect();
        let grads = self.beside(grad);
        let [drows] = jobs_onto(
            [before],
            [&lens],
            || (),
            |(), job, [drows]| {
                let (sample, positions) = (job / per_sample, positions(job));
                let mut product = par::scratch(positions.len() * count * d);
                for head in 0..self.heads {
                    let matrix = &matrix[head * self.slots * self.columns + positions.start..];
                    let matrix = Mat::strided(matrix, self.slots, positions.len(), self.columns);
                    let grads = &grads[(sample * self.heads + head) * self.slots * count * d..];
                    let grads = Mat::new(grads, self.slots, count * d);
                    let out = MatMut::new(&mut product, positions.len(), count * d);
                    gemm(out, matrix.t(), grads, 1.0, Threads::One);
                    for (row, product) in
                        drows.chunks_exact_mut(self.row).zip(product.chunks_exact(count * d))
                    {
                        for (&at, product) in self.parts.iter().zip(product.chunks_exact(d)) {
                            rows::add(product, &mut row[at + head * d..][..d]);
                        }
                    }
                }
            },
        );
        drows
    }

    /// The gradients of the slots with the columns that one matrix made side by side: per sample and matrix
    /// [slots, parts * d], so that the matrix is packed once for all parts.
    fn beside(&self, grad: &[f32]) -> Vec<f32> {
        let (d, count) = (self.head_dim(), self.parts.len());
        let mut beside = vec![0.0; grad.len()];
        for (index, to) in beside.chunks_exact_mut(count * d).enumerate() {
            let (place, slot) = (index / self.slots, index % self.slots);
            let (sample, head) = (place / self.heads, place % self.heads);
            for (part, to) in to.chunks_exact_mut(d).enumerate() {
                let at = (sample * self.slots + slot) * self.out_width() + part * self.width + head * d;
                to.copy_from_slice(&grad[at..at + d]);
            }
        }
        beside
    }

    /// Gradient of the matrix, gradient of the slots times the rows, over samples and parts in order, added to `before` if
    /// that is not empty.
    fn matrix_grad(&self, rows: Elements, grad: &[f32], before: Vec<f32>) -> Vec<f32> {
        let (d, per_head) = (self.head_dim(), self.slots.div_ceil(ROWS));
        let range = |job: usize| {
            let start = job % per_head * ROWS;
            start..(start + ROWS).min(self.slots)
        };
        let lens: Vec<usize> =
            (0..self.heads * per_head).map(|job| range(job).len() * self.columns).collect();
        let [dmatrix] = jobs_onto(
            [before],
            [&lens],
            || par::scratch(rows.room(ADDED * d)),
            |room, job, [out]| {
                let (head, range) = (job / per_head, range(job));
                // block by block, so that what is added to stays in the cache
                for start in (0..self.len).step_by(ADDED) {
                    let len = ADDED.min(self.len - start);
                    for sample in 0..self.batch {
                        for (part, &at) in self.parts.iter().enumerate() {
                            let first = (sample * self.len + start) * self.row + at + head * d;
                            let values = match rows {
                                Elements::F32(rows) => Mat::strided(&rows[first..], len, d, self.row),
                                Elements::Bf16(_) => {
                                    rows.copy_rows((first, self.row), d, &mut room[..len * d], d);
                                    Mat::new(&room[..len * d], len, d)
                                }
                            };
                            let grad = self.grad(grad, sample, part, head, range.start, range.len());
                            let out = MatMut::strided(&mut out[start..], range.len(), len, self.columns);
                            gemm_add(out, grad, values.t(), 1.0, 1.0, Threads::One);
                        }
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

impl FusedOp for Learned {
    fn name(&self) -> &'static str {
        "project-slots-learned"
    }

    fn forward(&self, operands: &[(&CpuStorage, &Layout)]) -> Result<(Vec<f32>, Shape)> {
        let [rows, matrix] = cpu::slices(operands)?;
        Ok((self.project(rows, matrix), (self.batch, self.slots, self.out_width()).into()))
    }

    /// Rows, whose gradient attention has begun, and the matrix, which other layers may share.
    fn accumulates_into(&self) -> &'static [usize] {
        &[0, 1]
    }

    fn backward_accumulate(
        &self,
        operands: &[&Tensor],
        _: SavedOutput,
        grad: &Tensor,
        held: Vec<Vec<f32>>,
    ) -> Result<Vec<Option<Tensor>>> {
        let [rows, matrix] = op::operands(operands)?;
        let [of_rows, of_matrix] = op::held(held);
        compact::with_elements([rows], [matrix, grad], |[values], [weights, grad]| {
            let drows = cpu::gradient(rows, self.row_grads(weights, grad, of_rows))?;
            Ok(vec![drows, cpu::gradient(matrix, self.matrix_grad(values, grad, of_matrix))?])
        })
    }
}
