//! The bias of AFT-local, of which only pairs in the window are stored.

use std::ops::Range;

use candle_core::{CpuStorage, DType, Layout, Result, Shape, Tensor, bail};

use crate::cpu::{self, par};
use crate::op::{self, FusedOp, SavedOutput};
use crate::{fused_cpu, tape};

/// Biases w(i, j) of pairs with |i - j| < window; j <= i if causal.
#[derive(Clone, Debug)]
pub struct WindowBias {
    /// [1 or heads, n, columns]: column c of row i is w(i, i + c - window + 1), 0 where there is no such position. There are
    /// `window` columns if causal, else 2 window - 1.
    pub(super) band: Tensor,
    /// At most n.
    pub(super) window: usize,
    pub(super) causal: bool,
}

impl WindowBias {
    /// From `w` [1 or heads, L, L] with L >= `len`: its first `len` rows and columns.
    pub fn from_bias(w: &Tensor, len: usize, window: usize, causal: bool) -> Result<Self> {
        let (groups, max_len, columns) = w.dims3()?;
        let shape = BandShape::new([groups, max_len, columns], len, window, causal)?;
        if max_len != columns {
            bail!("a bias of shape {:?}, expected [1 or heads, length, length]", w.dims());
        }
        let band = if fused_cpu(w.device()) && w.dtype() == DType::F32 {
            tape::apply(&[&w.contiguous()?], FromBias { shape })?
        } else {
            shape.gather(&w.narrow(1, 0, len)?.narrow(2, 0, len)?)?
        };
        Ok(Self { band, window: shape.window, causal })
    }

    /// w = u v^T from factors `u`, `v` [1 or heads, L, r] with L >= `len`; time `len` window r.
    pub fn from_factors(u: &Tensor, v: &Tensor, len: usize, window: usize, causal: bool) -> Result<Self> {
        let (groups, max_len, rank) = u.dims3()?;
        if v.dims() != u.dims() || rank == 0 {
            bail!(
                "factors of shapes {:?} and {:?}, expected both [1 or heads, length, rank]",
                u.dims(),
                v.dims()
            );
        }
        let shape = BandShape::new([groups, max_len, max_len], len, window, causal)?;
        let band = if fused_cpu(u.device()) && u.dtype() == DType::F32 && v.dtype() == DType::F32 {
            tape::apply(&[&u.contiguous()?, &v.contiguous()?], FromFactors { shape, rank })?
        } else {
            let (u, v) = (u.narrow(1, 0, len)?.contiguous()?, v.narrow(1, 0, len)?.contiguous()?);
            shape.gather(&u.matmul(&v.transpose(1, 2)?.contiguous()?)?)?
        };
        Ok(Self { band, window: shape.window, causal })
    }

    /// The band [1 or heads, n, columns]: row i is what [`super::decode::step`] takes at position i.
    pub fn band(&self) -> &Tensor {
        &self.band
    }

    /// All pairs, 0 outside the window: [1 or heads, n, n].
    pub(super) fn dense(&self) -> Result<Tensor> {
        let (groups, n, columns) = self.band.dims3()?;
        // rows of n + columns elements read as rows of one less: row i moves right by i
        let rows = self.band.pad_with_zeros(2, 0, n)?.flatten_from(1)?;
        let rows = rows.narrow(1, 0, n * (n + columns - 1))?.reshape((groups, n, n + columns - 1))?;
        rows.narrow(2, self.window - 1, n)?.contiguous()
    }
}

/// Which pairs a band holds.
#[derive(Clone, Copy, Debug)]
struct BandShape {
    groups: usize,
    /// Length of the parameters.
    max_len: usize,
    len: usize,
    window: usize,
    columns: usize,
}

impl BandShape {
    fn new([groups, max_len, _]: [usize; 3], len: usize, window: usize, causal: bool) -> Result<Self> {
        if window == 0 || len == 0 || len > max_len {
            bail!(
                "a bias of {max_len} positions and a window of {window} for {len} positions; at least 1 and at most that many"
            );
        }
        let window = window.min(len);
        let columns = if causal { window } else { 2 * window - 1 };
        Ok(Self { groups, max_len, len, window, columns })
    }

    /// The band of dense biases [groups, n, n] in plain candle operations.
    fn gather(&self, dense: &Tensor) -> Result<Tensor> {
        let Self { groups, len: n, window, columns, .. } = *self;
        let rows = dense.pad_with_zeros(2, window - 1, columns - window)?.contiguous()?.flatten_from(1)?;
        let rows = rows.pad_with_zeros(1, 0, n)?.reshape((groups, n, n + columns))?;
        rows.narrow(2, 0, columns)?.contiguous()
    }

    /// Columns of row `i` that exist.
    fn columns(&self, i: usize) -> Range<usize> {
        let shift = self.window - 1;
        shift.saturating_sub(i)..self.columns.min(self.len + shift - i)
    }

    /// The key of column `column` of row `i`.
    fn key(&self, i: usize, column: usize) -> usize {
        i + column + 1 - self.window
    }
}

struct FromBias {
    shape: BandShape,
}

impl FusedOp for FromBias {
    fn name(&self) -> &'static str {
        "aft-band"
    }

    fn forward(&self, operands: &[(&CpuStorage, &Layout)]) -> Result<(Vec<f32>, Shape)> {
        let [w] = cpu::slices(operands)?;
        let shape @ BandShape { groups, max_len, len, columns, .. } = self.shape;
        let band = par::build(groups * len * columns, len * columns, |group, band| {
            for (i, row) in band.chunks_exact_mut(columns).enumerate() {
                let seen = shape.columns(i);
                let from = (group * max_len + i) * max_len + shape.key(i, seen.start);
                row[seen.clone()].copy_from_slice(&w[from..from + seen.len()]);
            }
        });
        Ok((band, (groups, len, columns).into()))
    }

    fn backward(&self, operands: &[&Tensor], _: SavedOutput, grad: &Tensor) -> Result<Vec<Option<Tensor>>> {
        let [w] = op::operands(operands)?;
        let shape @ BandShape { groups, max_len, len, columns, .. } = self.shape;
        let dw = cpu::with_slices([grad], |[grad]| {
            // a row at a time: the parameters are many more than the band
            Ok(par::build(groups * max_len * max_len, max_len, |index, dw| {
                let (group, i) = (index / max_len, index % max_len);
                if i < len {
                    let seen = shape.columns(i);
                    let to = shape.key(i, seen.start);
                    let row = &grad[(group * len + i) * columns..][..columns];
                    dw[to..to + seen.len()].copy_from_slice(&row[seen]);
                }
            }))
        })?;
        Ok(vec![cpu::gradient(w, dw)?])
    }
}

struct FromFactors {
    shape: BandShape,
    rank: usize,
}

impl FusedOp for FromFactors {
    fn name(&self) -> &'static str {
        "aft-factors"
    }

    fn forward(&self, operands: &[(&CpuStorage, &Layout)]) -> Result<(Vec<f32>, Shape)> {
        let [u, v] = cpu::slices(operands)?;
        let (shape @ BandShape { groups, max_len, len, columns, .. }, rank) = (self.shape, self.rank);
        let band = par::build(groups * len * columns, columns, |index, row| {
            let (group, i) = (index / len, index % len);
            let seen = shape.columns(i);
            let first = (group * max_len + shape.key(i, seen.start)) * rank;
            let u = &u[(group * max_len + i) * rank..][..rank];
            products(u, &v[first..first + seen.len() * rank], &mut row[seen]);
        });
        Ok((band, (groups, len, columns).into()))
    }

    fn backward(&self, operands: &[&Tensor], _: SavedOutput, grad: &Tensor) -> Result<Vec<Option<Tensor>>> {
        let [u, v] = op::operands(operands)?;
        let (shape @ BandShape { groups, max_len, len, columns, .. }, rank) = (self.shape, self.rank);
        let (du, dv) = cpu::with_slices([u, v, grad], |[u, v, grad]| {
            let band = |group: usize, i: usize| &grad[(group * len + i) * columns..][..columns];
            let du = par::build(groups * max_len * rank, rank, |index, du| {
                let (group, i) = (index / max_len, index % max_len);
                if i < len {
                    let seen = shape.columns(i);
                    let first = (group * max_len + shape.key(i, seen.start)) * rank;
                    weighted_rows(&band(group, i)[seen], &v[first..], du);
                }
            });
            let dv = par::build(groups * max_len * rank, rank, |index, dv| {
                let (group, j) = (index / max_len, index % max_len);
                if j < len {
                    // rows i whose band holds j, and their weights
                    let last = (j + shape.window).min(len);
                    let first = (j + shape.window).saturating_sub(shape.columns);
                    let weights: Vec<f32> =
                        (first..last).map(|i| band(group, i)[j + shape.window - 1 - i]).collect();
                    weighted_rows(&weights, &u[(group * max_len + first) * rank..], dv);
                }
            });
            Ok((du, dv))
        })?;
        Ok(vec![cpu::gradient(u, du)?, cpu::gradient(v, dv)?])
    }
}

crate::simd_fn! {
    /// The scalar product of x with every row.
    fn products<S>(simd, x: &'a [f32], rows: &'a [f32], out: &'a mut [f32]) {
        for (row, out) in rows.chunks_exact(x.len()).zip(out) {
            *out = cpu::math::dot(simd, x, row);
        }
    }
}

crate::simd_fn! {
    /// sum += sum_i weight_i row_i.
    fn weighted_rows<S>(simd, weights: &'a [f32], rows: &'a [f32], sum: &'a mut [f32]) {
        for (row, &weight) in rows.chunks_exact(sum.len()).zip(weights) {
            cpu::math::axpy(simd, weight, row, sum);
        }
    }
}
