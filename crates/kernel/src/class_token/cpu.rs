//! The fused CPU kernel of the class token, forward and backward: one pass over the outputs each.

use std::sync::OnceLock;

use candle_core::{CpuStorage, Layout, Result, Shape, Tensor, bail};

use crate::cpu::jobs::build_jobs;
use crate::cpu::{self, math};
use crate::op::{self, FusedOp, SavedOutput};

/// The class token of every sample over `out` [b, n, heads * d] and its own row [b, 1, count * heads * d].
pub struct ClassToken {
    heads: usize,
    d: usize,
    /// Where query, key and value start in the class token's row.
    qkv: [usize; 3],
    /// Parts of that row.
    count: usize,
    scale: f32,
    /// [b * n], 0 where a position is hidden.
    mask: Option<Vec<f32>>,
    /// Left by the forward pass: softmax weights [b, 1 + n, heads], the class token's own first.
    weights: OnceLock<Vec<f32>>,
}

impl ClassToken {
    /// `parts`: which parts of the class token's row are query, key and value.
    pub fn new(
        heads: usize,
        d: usize,
        parts: [usize; 3],
        count: usize,
        scale: f32,
        mask: Option<Vec<f32>>,
    ) -> Self {
        let qkv = parts.map(|part| part * heads * d);
        Self { heads, d, qkv, count, scale, mask, weights: OnceLock::new() }
    }

    fn width(&self) -> usize {
        self.heads * self.d
    }

    /// Sample `index` of `rows`, `n` positions each, and of the class token's rows.
    fn sample<'a>(&self, rows: &'a [f32], cls: &'a [f32], index: usize, n: usize) -> Sample<'a> {
        let e = self.width();
        let row = &cls[index * self.count * e..];
        let qkv = self.qkv.map(|start| &row[start..start + e]);
        Sample { d: self.d, scale: self.scale, qkv, rows: &rows[index * n * e..][..n * e] }
    }

    fn mask(&self, sample: usize, n: usize) -> Option<&[f32]> {
        self.mask.as_ref().map(|mask| &mask[sample * n..][..n])
    }

    fn forward(&self, rows: &[f32], cls: &[f32], b: usize) -> [Vec<f32>; 2] {
        let (e, n) = (self.width(), rows.len() / self.width() / b.max(1));
        build_jobs(
            [&vec![e; b], &vec![(1 + n) * self.heads; b]],
            || (),
            |(), sample, [out, weights]| {
                read(self.sample(rows, cls, sample, n), self.mask(sample, n), weights, out);
            },
        )
    }

    fn backward(
        &self,
        rows: &[f32],
        cls: &[f32],
        out: &[f32],
        grad: &[f32],
        b: usize,
    ) -> Result<[Vec<f32>; 2]> {
        let Some(weights) = self.weights.get() else {
            bail!("the class token's backward pass runs before its forward pass")
        };
        let (e, n) = (self.width(), rows.len() / self.width() / b.max(1));
        let (row_lens, own_lens) = (vec![n * e; b], vec![self.count * e; b]);
        Ok(build_jobs(
            [&row_lens, &own_lens],
            || (),
            |(), sample, [drows, dcls]| {
                let at = sample * e..(sample + 1) * e;
                let (out, grad) = (&out[at.clone()], &grad[at]);
                let weights = &weights[sample * (1 + n) * self.heads..][..(1 + n) * self.heads];
                let (mut dq, mut dk, mut dv) = (vec![0.0; e], vec![0.0; e], vec![0.0; e]);
                let own = [&mut dq[..], &mut dk, &mut dv];
                read_backward(self.sample(rows, cls, sample, n), weights, out, grad, drows, own);
                for (start, part) in self.qkv.into_iter().zip([dq, dk, dv]) {
                    dcls[start..start + e].copy_from_slice(&part);
                }
            },
        ))
    }
}

/// What the class token of one sample reads.
#[derive(Clone, Copy)]
struct Sample<'a> {
    /// Width of a head.
    d: usize,
    scale: f32,
    /// The class token's own query, key and value.
    qkv: [&'a [f32]; 3],
    /// The other positions.
    rows: &'a [f32],
}

crate::simd_fn! {
    /// One sample: `out` (zeros before) and the softmax weights.
    fn read<S>(
        simd, sample: Sample<'a>, mask: Option<&'a [f32]>, weights: &'a mut [f32], out: &'a mut [f32],
    ) {
        let Sample { d, scale, qkv: [q, k, v], rows } = sample;
        let (e, heads) = (q.len(), q.len() / d);
        for head in 0..heads {
            let part = head * d..(head + 1) * d;
            let q = &q[part.clone()];
            let mut max = scale * math::dot(simd, q, &k[part.clone()]);
            weights[head] = max;
            for (j, row) in rows.chunks_exact(e).enumerate() {
                let logit = match mask {
                    Some(mask) if mask[j] == 0.0 => f32::NEG_INFINITY,
                    _ => scale * math::dot(simd, q, &row[part.clone()]),
                };
                weights[(1 + j) * heads + head] = logit;
                max = max.max(logit);
            }
            let mut sum = 0.0;
            for weight in weights[head..].iter_mut().step_by(heads) {
                *weight = (*weight - max).exp();
                sum += *weight;
            }
            weights[head..].iter_mut().step_by(heads).for_each(|weight| *weight /= sum);
            math::axpy(simd, weights[head], &v[part.clone()], &mut out[part.clone()]);
            for (j, row) in rows.chunks_exact(e).enumerate() {
                let weight = weights[(1 + j) * heads + head];
                if weight != 0.0 {
                    math::axpy(simd, weight, &row[part.clone()], &mut out[part.clone()]);
                }
            }
        }
    }
}

crate::simd_fn! {
    /// Gradients of one sample: the rows' and the class token's (zeros before).
    fn read_backward<S>(
        simd, sample: Sample<'a>, weights: &'a [f32], out: &'a [f32], grad: &'a [f32], drows: &'a mut [f32],
        own: [&'a mut [f32]; 3],
    ) {
        let Sample { d, scale, qkv: [q, k, v], rows } = sample;
        let [dq, dk, dv] = own;
        let (e, heads) = (q.len(), q.len() / d);
        for head in 0..heads {
            let part = head * d..(head + 1) * d;
            let (q, grad) = (&q[part.clone()], &grad[part.clone()]);
            let delta = math::dot(simd, grad, &out[part.clone()]);
            let dq = &mut dq[part.clone()];
            let own = scale * weights[head] * (math::dot(simd, grad, &v[part.clone()]) - delta);
            math::axpy(simd, own, &k[part.clone()], dq);
            math::axpy(simd, own, q, &mut dk[part.clone()]);
            math::axpy(simd, weights[head], grad, &mut dv[part.clone()]);
            for (j, (row, drow)) in rows.chunks_exact(e).zip(drows.chunks_exact_mut(e)).enumerate() {
                let weight = weights[(1 + j) * heads + head];
                if weight == 0.0 {
                    continue;
                }
                let (row, drow) = (&row[part.clone()], &mut drow[part.clone()]);
                let dlogit = scale * weight * (math::dot(simd, grad, row) - delta);
                math::axpy(simd, dlogit, row, dq);
                math::axpy(simd, weight, grad, drow);
                math::axpy(simd, dlogit, q, drow);
            }
        }
    }
}

impl FusedOp for ClassToken {
    fn name(&self) -> &'static str {
        "class-token"
    }

    fn forward(&self, operands: &[(&CpuStorage, &Layout)]) -> Result<(Vec<f32>, Shape)> {
        let ([rows, cls], b) = (cpu::slices(operands)?, operands[0].1.dims()[0]);
        let [out, weights] = self.forward(rows, cls, b);
        let _ = self.weights.set(weights); // a second run would find the same
        Ok((out, (b, 1, self.width()).into()))
    }

    fn needs_output(&self) -> bool {
        true
    }

    fn backward(&self, operands: &[&Tensor], out: SavedOutput, grad: &Tensor) -> Result<Vec<Option<Tensor>>> {
        let [rows, cls] = op::operands(operands)?;
        let out = op::result(out)?;
        let [drows, dcls] = cpu::with_slices([rows, cls, out, grad], |[data, cls, out, grad]| {
            self.backward(data, cls, out, grad, rows.dim(0)?)
        })?;
        Ok(vec![cpu::gradient(rows, drows)?, cpu::gradient(cls, dcls)?])
    }
}
