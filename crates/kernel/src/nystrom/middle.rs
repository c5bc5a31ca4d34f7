//! The small matrices between the two softmaxes: A, its pseudo-inverse Z, and Z B v.

use std::sync::OnceLock;

use candle_core::{CpuStorage, Layout, Result, Shape, Tensor, bail};

use super::inverse::{backward, iterates};
use super::{InverseInit, Landmarks};
use crate::cpu::gemm::{Mat, MatMut, Threads, gemm, gemm_add};
use crate::cpu::softmax::{softmax_rows, softmax_rows_backward};
use crate::cpu::{self, par, rows};
use crate::op::{self, FusedOp, SavedOutput};
use crate::tape;

/// Rows `[Kl | Z y]` [b, m, 2 e] from `landmarks`, rows `[Ql | Kl]` [b, m, 2 e], and `y` = B v [b, m, e], all with the heads
/// side by side: Z is the pseudo-inverse of A = softmax(Ql Kl^T D^(-1/2)) by iteration.
pub fn middle(landmarks: &Tensor, y: &Tensor, heads: usize, spec: Landmarks) -> Result<Tensor> {
    let (b, m, e) = y.dims3()?;
    let train = landmarks.track_op() || y.track_op();
    let op = Middle { b, m, heads, d: e / heads, spec, train, state: OnceLock::new() };
    tape::apply(&[&landmarks.contiguous()?, &y.contiguous()?], op)
}

/// Parts of rows, and of how many: of `landmarks`, of the result, of y.
const QL: (usize, usize) = (0, 2);
const KL: (usize, usize) = (1, 2);
const KL_OUT: (usize, usize) = (0, 2);
const X: (usize, usize) = (1, 2);
const ALL: (usize, usize) = (0, 1);

/// The operation.
struct Middle {
    b: usize,
    m: usize,
    heads: usize,
    d: usize,
    spec: Landmarks,
    /// Whether a gradient may be asked for.
    train: bool,
    /// Left by the forward pass, [b * heads].
    state: OnceLock<Vec<Inverse>>,
}

/// What the backward pass needs of one sample and head.
struct Inverse {
    /// A, [m, m].
    a: Vec<f32>,
    /// The largest column sum that the start is divided by; whose matrix and which column it is.
    c: f32,
    owner: (usize, usize),
    /// The iterates [m, m] of the pseudo-inverse.
    iterates: Vec<f32>,
}

impl Inverse {
    /// The last iterate, [m, m].
    fn last(&self) -> &[f32] {
        &self.iterates[self.iterates.len() - self.a.len()..]
    }
}

/// Copies a part of width `e` of rows of two, from the first to the second number.
fn copy_part(from: &[f32], parts: [usize; 2], e: usize, to: &mut [f32]) {
    for (from, to) in from.chunks_exact(2 * e).zip(to.chunks_exact_mut(2 * e)) {
        to[parts[1] * e..][..e].copy_from_slice(&from[parts[0] * e..][..e]);
    }
}

impl Middle {
    fn scale(&self) -> f32 {
        (self.d as f32).powf(-0.5)
    }

    /// The rows [m, d] of head number `index` of all samples in part `part` of `rows` [b, m, count * e].
    fn head<'a>(&self, rows: &'a [f32], index: usize, (part, count): (usize, usize)) -> Mat<'a> {
        let Self { m, heads, d, .. } = *self;
        let (e, sample, head) = (heads * d, index / heads, index % heads);
        Mat::strided(&rows[(sample * m * count + part) * e + head * d..], m, d, count * e)
    }

    fn inverses(&self, landmarks: &[f32]) -> Vec<Inverse> {
        let Self { b, m, heads, spec, .. } = *self;
        let inverse = |index: usize| {
            let [ql, kl] = [QL, KL].map(|part| self.head(landmarks, index, part));
            let (mut a, mut columns) = (vec![0.0; m * m], vec![0.0; m]);
            gemm(MatMut::new(&mut a, m, m), ql, kl.t(), self.scale(), Threads::One);
            softmax_rows(&mut a, m);
            a.chunks_exact(m).for_each(|row| rows::add(row, &mut columns));
            // the first of equal sums, as candle's argmax has it
            let (column, c) =
                columns.iter().enumerate().fold((0, f32::NEG_INFINITY), |best, (column, &sum)| {
                    if sum > best.1 { (column, sum) } else { best }
                });
            Inverse { a, c, owner: (index, column), iterates: Vec::new() }
        };
        let mut all = par::map_pieces(0..b * heads, |_, index| inverse(index));
        if spec.start == InverseInit::Original {
            let best = all.iter().fold((f32::NEG_INFINITY, (0, 0)), |best, one| {
                if one.c > best.0 { (one.c, one.owner) } else { best }
            });
            all.iter_mut().for_each(|one| (one.c, one.owner) = best);
        }
        let iterate = |one: &mut Inverse| one.iterates = iterates(&one.a, m, one.c, spec.iterations);
        par::each_piece(all.iter_mut(), |_, one| iterate(one));
        all
    }

    /// Rows `[Kl | Z y]`.
    fn rows(&self, landmarks: &[f32], y: &[f32], all: &[Inverse]) -> Vec<f32> {
        let Self { b, m, heads, d, .. } = *self;
        let e = heads * d;
        let mut out = vec![0.0; b * m * 2 * e];
        par::each_piece(out.chunks_mut(m * 2 * e), |sample, out| {
            copy_part(&landmarks[sample * m * 2 * e..], [KL.0, KL_OUT.0], e, out);
            for head in 0..heads {
                let index = sample * heads + head;
                let (z, y) = (Mat::new(all[index].last(), m, m), self.head(y, index, ALL));
                gemm(MatMut::strided(&mut out[e + head * d..], m, d, 2 * e), z, y, 1.0, Threads::One);
            }
        });
        out
    }

    /// Gradients of landmarks and of y from `grad` [b, m, 2 e].
    fn gradients(&self, (landmarks, y): (&[f32], &[f32]), all: &[Inverse], grad: &[f32]) -> [Vec<f32>; 2] {
        let Self { b, m, heads, d, .. } = *self;
        let e = heads * d;
        let through_inverse = |index: usize| {
            let (one, mut dz) = (&all[index], vec![0.0; m * m]);
            let (dx, y) = (self.head(grad, index, X), self.head(y, index, ALL));
            gemm(MatMut::new(&mut dz, m, m), dx, y.t(), 1.0, Threads::One);
            backward(&one.a, m, one.c, &one.iterates, dz)
        };
        let back = par::map_pieces(0..b * heads, |_, index| through_inverse(index));
        let (mut das, dcs): (Vec<_>, Vec<_>) = back.into_iter().unzip();
        for (one, dc) in all.iter().zip(dcs) {
            // c is the sum of one column of its owner's matrix
            let (owner, column) = one.owner;
            das[owner][column..].iter_mut().step_by(m).for_each(|da| *da += dc);
        }
        par::each_piece(das.iter_mut().zip(all), |_, (da, one)| softmax_rows_backward(&one.a, da, m));
        let (mut dlandmarks, mut dy) = (vec![0.0; b * m * 2 * e], vec![0.0; b * m * e]);
        let samples = dlandmarks.chunks_mut(m * 2 * e).zip(dy.chunks_mut(m * e));
        par::each_piece(samples, |sample, (dlandmarks, dy)| {
            copy_part(&grad[sample * m * 2 * e..], [KL_OUT.0, KL.0], e, dlandmarks);
            for head in 0..heads {
                let (index, at) = (sample * heads + head, head * d);
                let [ql, kl] = [QL, KL].map(|part| self.head(landmarks, index, part));
                let (da, z) = (Mat::new(&das[index], m, m), Mat::new(all[index].last(), m, m));
                let dql = MatMut::strided(&mut dlandmarks[at..], m, d, 2 * e);
                gemm(dql, da, kl, self.scale(), Threads::One);
                let dkl = MatMut::strided(&mut dlandmarks[e + at..], m, d, 2 * e);
                gemm_add(dkl, da.t(), ql, self.scale(), 1.0, Threads::One);
                let dx = self.head(grad, index, X);
                gemm(MatMut::strided(&mut dy[at..], m, d, e), z.t(), dx, 1.0, Threads::One);
            }
        });
        [dlandmarks, dy]
    }
}

impl FusedOp for Middle {
    fn name(&self) -> &'static str {
        "nystrom-inverse"
    }

    fn forward(&self, operands: &[(&CpuStorage, &Layout)]) -> Result<(Vec<f32>, Shape)> {
        let [landmarks, y] = cpu::slices(operands)?;
        let all = self.inverses(landmarks);
        let out = self.rows(landmarks, y, &all);
        if self.train {
            let _ = self.state.set(all); // the first run's stay: they are the same
        }
        Ok((out, (self.b, self.m, 2 * self.heads * self.d).into()))
    }

    fn backward(&self, operands: &[&Tensor], _: SavedOutput, grad: &Tensor) -> Result<Vec<Option<Tensor>>> {
        let Some(all) = self.state.get() else {
            bail!("Nystrom attention's backward pass runs before its forward pass")
        };
        let [landmarks, y] = op::operands(operands)?;
        cpu::with_slices([landmarks, y, grad], |[rows, values, grad]| {
            let [dlandmarks, dy] = self.gradients((rows, values), all, grad);
            Ok(vec![cpu::gradient(landmarks, dlandmarks)?, cpu::gradient(y, dy)?])
        })
    }
}
