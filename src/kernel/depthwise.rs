//! Depthwise convolution along the sequence, one kernel per head (the residual of Nystromformer).

use candle_core::{CpuStorage, CustomOp2, Layout, Result, Shape, Tensor, bail};
use rayon::prelude::*;

use super::cpu::{math, slice, with_slice};
use super::heads::{Heads, Qkv};
use super::tape;
use super::visible::keep_rows;

/// Positions per job: a partition fixed by shape.
const JOB: usize = 256;

/// `out[i]` = sum_t weight[h, t] v[i + t - taps / 2], with the values v of `qkv` being 0 outside the sequence and where
/// `mask` [b, n] hides them. `weight` [h, taps] with an odd number of taps.
///
/// # Errors
/// Shapes that do not fit.
pub fn depthwise(qkv: &Qkv, weight: &Tensor, mask: Option<&Tensor>) -> Result<Heads> {
    if qkv.value_dims()?.2 == 0 || !super::fused_cpu(&qkv.device()?) {
        return composed(qkv, weight, mask);
    }
    let (rows, heads, parts) = qkv.packed()?;
    let Some(v) = parts.v else { bail!("a depthwise convolution reads values") };
    let ((b, n, row), (kernels, taps)) = (rows.dims3()?, weight.dims2()?);
    if kernels != heads || taps % 2 == 0 {
        bail!(
            "a convolution of {kernels} kernels with {taps} taps does not fit {heads} heads and an odd number"
        );
    }
    let e = row / parts.count;
    let keep = mask.map(|mask| mask.flatten_all()?.to_vec1::<f32>()).transpose()?;
    let op = Depthwise { b, n, heads, d: e / heads, row, v: v * e, taps, keep };
    Ok(Heads::Merged { rows: tape::apply2(&rows, &weight.contiguous()?, op)?, heads })
}

/// The definition in plain candle operations: a sum of shifted copies (candle's own convolution has wrong
/// gradients for grouped kernels).
///
/// # Errors
/// Shapes that do not fit.
pub fn composed(qkv: &Qkv, weight: &Tensor, mask: Option<&Tensor>) -> Result<Heads> {
    let v = keep_rows(&qkv.v()?.contiguous()?, mask)?;
    let (heads, taps) = weight.dims2()?;
    let (n, half) = (v.dim(2)?, taps / 2);
    let padded = v.pad_with_zeros(2, half, half)?;
    let mut out = v.zeros_like()?;
    for tap in 0..taps {
        let factor = weight.narrow(1, tap, 1)?.reshape((1, heads, 1, 1))?;
        out = (out + padded.narrow(2, tap, n)?.broadcast_mul(&factor)?)?;
    }
    Ok(Heads::Split(out))
}

struct Depthwise {
    b: usize,
    n: usize,
    heads: usize,
    d: usize,
    /// Length of a packed row, and where values start in it.
    row: usize,
    v: usize,
    taps: usize,
    /// [b, n], 0 where a position is hidden.
    keep: Option<Vec<f32>>,
}

impl Depthwise {
    /// `at + tap - taps / 2`, if it is a position that `sample` keeps.
    #[inline(always)]
    fn neighbour(&self, sample: usize, at: usize, tap: usize) -> Option<usize> {
        let other = (at + tap).checked_sub(self.taps / 2).filter(|&other| other < self.n)?;
        self.kept(sample, other).then_some(other)
    }

    #[inline(always)]
    fn kept(&self, sample: usize, at: usize) -> bool {
        self.keep.as_ref().is_none_or(|keep| keep[sample * self.n + at] != 0.0)
    }

    /// The value row of `head` at position `at` of `sample`.
    #[inline(always)]
    fn value<'a>(&self, rows: &'a [f32], sample: usize, at: usize, head: usize) -> &'a [f32] {
        &rows[(sample * self.n + at) * self.row + self.v + head * self.d..][..self.d]
    }

    /// Gradients of the rows and of the weight.
    fn backward(&self, rows: &[f32], weight: &[f32], grad: &[f32]) -> (Vec<f32>, Vec<f32>) {
        let jobs = self.n.div_ceil(JOB);
        let mut drows = vec![0.0; rows.len()];
        let mut parts = vec![0.0; self.b * jobs * weight.len()];
        let samples = drows.par_chunks_mut(self.n * self.row).zip(parts.par_chunks_mut(jobs * weight.len()));
        samples.enumerate().for_each(|(sample, (drows, parts))| {
            let pieces = drows.par_chunks_mut(JOB * self.row).zip(parts.par_chunks_mut(weight.len()));
            pieces.enumerate().for_each(|(job, (drows, dweight))| {
                gather_grads(self, sample, job * JOB, (rows, weight, grad), drows, dweight);
            });
        });
        let mut dweight = vec![0.0; weight.len()];
        for part in parts.chunks_exact(weight.len()) {
            dweight.iter_mut().zip(part).for_each(|(total, part)| *total += part);
        }
        (drows, dweight)
    }
}

crate::simd_fn! {
    /// Output rows [_, heads * d] from position `first` of `sample` on.
    fn convolve<S>(
        simd,
        op: &'a Depthwise,
        sample: usize,
        first: usize,
        data: (&'a [f32], &'a [f32]),
        out: &'a mut [f32],
    ) {
        for (index, out) in out.chunks_exact_mut(op.d).enumerate() {
            let (at, head) = (first + index / op.heads, index % op.heads);
            for tap in 0..op.taps {
                if let Some(other) = op.neighbour(sample, at, tap) {
                    math::axpy(simd, data.1[head * op.taps + tap], op.value(data.0, sample, other, head), out);
                }
            }
        }
    }
}

crate::simd_fn! {
    /// Gradients of the rows from position `first` of `sample` on, and what these positions' outputs add to that of
    /// the weight.
    fn gather_grads<S>(
        simd,
        op: &'a Depthwise,
        sample: usize,
        first: usize,
        data: (&'a [f32], &'a [f32], &'a [f32]),
        drows: &'a mut [f32],
        dweight: &'a mut [f32],
    ) {
        let (rows, weight, grad) = data;
        let grad_of = |at: usize, head: usize| {
            &grad[((sample * op.n + at) * op.heads + head) * op.d..][..op.d]
        };
        for (index, drow) in drows.chunks_exact_mut(op.row).enumerate() {
            let at = first + index;
            for head in 0..op.heads {
                let out = &mut drow[op.v + head * op.d..][..op.d];
                for tap in 0..op.taps {
                    if let Some(other) = op.neighbour(sample, at, tap) {
                        let value = op.value(rows, sample, other, head);
                        dweight[head * op.taps + tap] += math::dot(simd, grad_of(at, head), value);
                    }
                    // this value's part in the output at - tap + taps / 2
                    let other = (at + op.taps / 2).checked_sub(tap).filter(|&other| other < op.n);
                    if let Some(other) = other.filter(|_| op.kept(sample, at)) {
                        math::axpy(simd, weight[head * op.taps + tap], grad_of(other, head), out);
                    }
                }
            }
        }
    }
}

impl CustomOp2 for Depthwise {
    fn name(&self) -> &'static str {
        "depthwise"
    }

    fn cpu_fwd(
        &self,
        rows: &CpuStorage,
        rows_layout: &Layout,
        weight: &CpuStorage,
        weight_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let data = (slice(rows, rows_layout)?, slice(weight, weight_layout)?);
        let e = self.heads * self.d;
        let mut out = vec![0.0; self.b * self.n * e];
        out.par_chunks_mut(self.n * e).enumerate().for_each(|(sample, out)| {
            let jobs = out.par_chunks_mut(JOB * e).enumerate();
            jobs.for_each(|(job, out)| convolve(self, sample, job * JOB, data, out));
        });
        Ok((CpuStorage::F32(out), (self.b, self.n, e).into()))
    }

    fn bwd(
        &self,
        rows: &Tensor,
        weight: &Tensor,
        _: &Tensor,
        grad: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let grad = grad.contiguous()?;
        let (drows, dweight) = with_slice(rows, |rows| {
            with_slice(weight, |weight| with_slice(&grad, |grad| Ok(self.backward(rows, weight, grad))))
        })?;
        Ok((
            Some(Tensor::from_vec(drows, rows.shape(), rows.device())?),
            Some(Tensor::from_vec(dweight, weight.shape(), weight.device())?),
        ))
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;
    use crate::kernel::heads::Parts;
    use crate::kernel::testing::{assert_twin, normal};

    #[test]
    fn fused_and_twin_agree() -> Result<()> {
        for (b, n, heads, d, taps) in
            [(1, 1, 1, 1, 1), (2, 5, 2, 3, 3), (1, 7, 3, 5, 35), (2, 300, 2, 16, 5), (1, 520, 1, 20, 35)]
        {
            let inputs = [normal("rows", &[b, n, 2 * heads * d])?, normal("weight", &[heads, taps])?];
            let holes = (0..b * n).map(|i| f32::from(u8::from((i * 5) % 7 < 4))).collect::<Vec<_>>();
            for mask in [None, Some(Tensor::from_vec(holes, (b, n), &Device::Cpu)?)] {
                let label = format!("b={b} n={n} heads={heads} d={d} taps={taps} mask={}", mask.is_some());
                assert_twin(&label, &inputs, 1e-5, |inputs| {
                    let qkv = Qkv::Packed { rows: inputs[0].clone(), heads, parts: Parts::KV };
                    depthwise(&qkv, &inputs[1], mask.as_ref())?.merged()
                })?;
            }
        }
        Ok(())
    }

    #[test]
    fn kernels_that_do_not_fit_are_refused() -> Result<()> {
        let qkv = Qkv::Packed { rows: normal("rows", &[1, 4, 4])?, heads: 2, parts: Parts::V };
        for shape in [[1, 3], [2, 4]] {
            assert!(depthwise(&qkv, &normal("weight", &shape)?, None).is_err());
        }
        Ok(())
    }
}
