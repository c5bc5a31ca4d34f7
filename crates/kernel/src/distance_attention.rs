//! Attention of one head with a learned bias of the distance (T5; Mega, equation 20), where values may be wider than keys.
//!
//! ```text
//! w_ij = softmax over visible j of (scale q_i . k_j + bias[M - 1 + j - i]),  out_i = sum_j w_ij v_j,  bias [2 M - 1]
//! ```
//!
//! Weights are computed for some queries at a time, and again in the backward pass: none are kept.

use candle_core::{CpuStorage, DType, Layout, Result, Shape, Tensor, bail};

use super::cpu::dense::Panels;
use super::cpu::gemm::{Mat, MatMut, Threads, gemm_add};
use super::cpu::math::{self, load, store};
use super::cpu::par::{self, Chunks};
use super::cpu::{self, jobs, rows};
use super::op::{self, FusedOp, SavedOutput};
use super::softmax::masked_softmax;
use super::{simd_fn, tape};

/// Who sees whom, and what is added to products.
#[derive(Clone, Copy, Debug)]
pub struct DistanceAttention<'a> {
    /// Factor on every product.
    pub scale: f64,
    /// [2 M - 1]: the bias of key j for query i stands at M - 1 + j - i.
    pub bias: &'a Tensor,
    /// [groups, keys]: 1 keep, 0 hidden.
    pub keep: &'a Tensor,
    /// Whether queries see no later keys.
    pub causal: bool,
}

/// Attended values [groups, n, h] of `q` and `k` [groups, n, z] and `v` [groups, n, h]; a query that sees no key has zeros.
pub fn distance_attention([q, k, v]: [&Tensor; 3], call: &DistanceAttention) -> Result<Tensor> {
    let ((groups, n, _), longest) = (q.dims3()?, call.bias.dim(0)?.div_ceil(2));
    let fits = k.dims() == q.dims() && v.dims3()?.0 == groups && v.dim(1)? == n;
    if !fits || n > longest || call.keep.dims() != [groups, n] {
        let ([q, k, v], keep) = ([q, k, v].map(Tensor::dims), call.keep.dims());
        bail!(
            "{q:?}, {k:?}, {v:?} and a mask {keep:?} do not fit each other and biases for {longest} positions"
        );
    }
    if super::fused_cpu(q.device()) && q.dtype() == DType::F32 {
        let op = Attention { scale: call.scale as f32, causal: call.causal };
        let operands = [q, k, v, call.bias, call.keep].map(tape::contiguous);
        let operands = operands.into_iter().collect::<Result<Vec<_>>>()?;
        return tape::apply(&operands.iter().collect::<Vec<_>>(), op);
    }
    let at = (0..n).flat_map(|i| (0..n).map(move |j| (longest - 1 + j - i) as u32));
    let at = Tensor::from_vec(at.collect::<Vec<_>>(), n * n, q.device())?;
    let bias = call.bias.index_select(&at, 0)?.reshape((n, n))?;
    let keep = call.keep.reshape((groups, 1, n))?;
    let visible = match call.causal {
        true => keep.broadcast_mul(&Tensor::tril2(n, keep.dtype(), keep.device())?)?,
        false => keep,
    };
    let products = q.contiguous()?.matmul(&k.transpose(1, 2)?.contiguous()?)?;
    let weights = masked_softmax(&(products * call.scale)?.broadcast_add(&bias)?, &visible)?;
    weights.matmul(&v.contiguous()?)
}

struct Attention {
    scale: f32,
    causal: bool,
}

/// Queries of one piece of work.
const ROWS: usize = 64;

/// Queries whose weights and their gradients are there at a time in the backward pass.
const BLOCK: usize = 4 * ROWS;

/// Elements between the rows of weights in the backward pass: rows a power of two apart push each other out of the first cache.
const GAP: usize = 16;

/// Lengths of a call: positions and widths of keys and values.
#[derive(Clone, Copy)]
struct Sizes {
    n: usize,
    z: usize,
    h: usize,
}

/// What queries of a group read.
struct Group<'a> {
    q: &'a [f32],
    k: &'a [f32],
    v: &'a [f32],
    bias: &'a [f32],
    keep: &'a [f32],
}

impl<'a> Group<'a> {
    fn new(index: usize, [q, k, v, bias, keep]: [&'a [f32]; 5], Sizes { n, z, h }: Sizes) -> Self {
        let of = |x: &'a [f32], width: usize| &x[index * n * width..][..n * width];
        Self { q: of(q, z), k: of(k, z), v: of(v, h), bias, keep: of(keep, 1) }
    }
}

impl Attention {
    /// Keys that query `row` may see.
    fn reach(&self, row: usize, n: usize) -> usize {
        if self.causal { row + 1 } else { n }
    }

    /// Where the biases of query `row` begin.
    fn start(row: usize, biases: usize) -> usize {
        biases.div_ceil(2) - 1 - row
    }

    /// Weights of the queries from `first` on, in rows that are `stride` apart; `keys` are packed.
    fn weights(&self, group: &Group, keys: &Panels, first: usize, weights: &mut [f32], stride: usize) {
        let (n, z) = (keys.columns(), keys.depth());
        let count = weights.len().div_ceil(stride);
        keys.multiply(Mat::new(&group.q[first * z..], count, z), weights, stride, false);
        for (row, weights) in weights.chunks_mut(stride).enumerate() {
            let (reach, start) = (self.reach(first + row, n), Self::start(first + row, group.bias.len()));
            weigh(self.scale, &group.bias[start..start + reach], &group.keep[..reach], &mut weights[..reach]);
            weights[reach..].fill(0.0);
        }
    }

    /// Adds the gradients of a group to zeros.
    fn group_back(
        &self,
        (group, [keys, turned, values]): (&Group, &[Panels; 3]),
        dout: &[f32],
        [dq, dk, dv, dbias]: [&mut [f32]; 4],
        threads: Threads,
    ) {
        let (n, z, h) = (keys.columns(), keys.depth(), values.depth());
        let (stride, biases) = (n + GAP, group.bias.len());
        let room = BLOCK.min(n);
        let (mut weights, mut slopes) = (par::scratch(room * stride), par::scratch(room * stride));
        let mut parts = vec![0.0; room.div_ceil(ROWS) * biases];
        for first in (0..n).step_by(BLOCK) {
            let count = BLOCK.min(n - first);
            let (weights, slopes) = (&mut weights[..count * stride], &mut slopes[..count * stride]);
            parts.fill(0.0);
            let pieces = weights.chunks_mut(ROWS * stride).zip(slopes.chunks_mut(ROWS * stride));
            let dq = dq[first * z..].chunks_mut(ROWS * z);
            let pieces = pieces.zip(dq.zip(parts.chunks_mut(biases)));
            let one = |index: usize, ((weights, slopes), (dq, part)): Piece| {
                let first = first + index * ROWS;
                self.weights(group, keys, first, weights, stride);
                let count = weights.len() / stride;
                values.multiply(Mat::new(&dout[first * h..], count, h), slopes, stride, false);
                let rows = weights.chunks_exact(stride).zip(slopes.chunks_exact_mut(stride)).enumerate();
                for (row, (weights, slopes)) in rows {
                    let (reach, start) = (self.reach(first + row, n), Self::start(first + row, biases));
                    let part = &mut part[start..start + reach];
                    weigh_back(self.scale, &weights[..reach], &mut slopes[..reach], part);
                    slopes[reach..].fill(0.0);
                }
                turned.multiply(Mat::strided(slopes, count, n, stride), &mut dq[..count * z], z, false);
            };
            match threads {
                Threads::All => par::each_piece(pieces, one),
                Threads::One => pieces.enumerate().for_each(|(index, piece)| one(index, piece)),
            }
            for part in parts.chunks_exact(biases) {
                rows::add(part, dbias);
            }
            let product = |left: &[f32], right: &[f32], width: usize, sum: &mut [f32]| {
                let left = Mat::strided(left, count, n, stride).t();
                let right = Mat::new(&right[first * width..], count, width);
                gemm_add(MatMut::new(sum, n, width), left, right, 1.0, 1.0, threads);
            };
            product(weights, dout, h, dv);
            product(slopes, group.q, z, dk);
        }
    }
}

/// Weights and their gradients, gradients of queries and those of biases.
type Piece<'a> = ((&'a mut [f32], &'a mut [f32]), (&'a mut [f32], &'a mut [f32]));

fn sizes(q: &[usize], v: &[usize]) -> Result<(usize, Sizes)> {
    match (q, v) {
        (&[groups, n, z], &[_, _, h]) => Ok((groups, Sizes { n, z, h })),
        _ => bail!("queries {q:?} and values {v:?} have no groups"),
    }
}

impl FusedOp for Attention {
    fn name(&self) -> &'static str {
        "distance-attention"
    }

    fn forward(&self, operands: &[(&CpuStorage, &Layout)]) -> Result<(Vec<f32>, Shape)> {
        let data: [&[f32]; 5] = cpu::slices(operands)?;
        let (groups, sizes) = sizes(operands[0].1.dims(), operands[2].1.dims())?;
        let Sizes { n, z, h } = sizes;
        let all: Vec<Group> = (0..groups).map(|index| Group::new(index, data, sizes)).collect();
        let panels = all.iter().map(|group| [Panels::turned(group.k, n, z), Panels::new(group.v, n, h)]);
        let panels: Vec<_> = panels.collect();
        let blocks = Chunks::of(n, ROWS);
        let lens = (0..groups * blocks.count()).map(|job| blocks.range(job % blocks.count()).len() * h);
        let [out] = jobs::build_jobs(
            [&lens.collect::<Vec<_>>()],
            || par::scratch(ROWS.min(n) * n),
            |weights, job, [out]| {
                let (group, rows) = (job / blocks.count(), blocks.range(job % blocks.count()));
                let ([keys, values], weights) = (&panels[group], &mut weights[..rows.len() * n]);
                self.weights(&all[group], keys, rows.start, weights, n);
                values.multiply(Mat::new(weights, rows.len(), n), out, h, false);
            },
        );
        Ok((out, (groups, n, h).into()))
    }

    fn backward(&self, operands: &[&Tensor], _: SavedOutput, grad: &Tensor) -> Result<Vec<Option<Tensor>>> {
        let [q, k, v, bias, keep] = op::operands(operands)?;
        let (groups, sizes) = sizes(q.dims(), v.dims())?;
        let Sizes { n, z, h } = sizes;
        let biases = bias.dim(0)?;
        let [mut dq, mut dk, mut dv] = [q, k, v].map(|x| par::zeros(x.elem_count()));
        let mut parts = vec![0.0; groups * biases];
        cpu::with_slices([q, k, v, bias, keep, grad], |[q, k, v, bias, keep, dout]| {
            let all: Vec<Group> =
                (0..groups).map(|index| Group::new(index, [q, k, v, bias, keep], sizes)).collect();
            let panels: Vec<_> = all
                .iter()
                .map(|x| [Panels::turned(x.k, n, z), Panels::new(x.k, n, z), Panels::turned(x.v, n, h)])
                .collect();
            let threads = if groups > 1 { Threads::One } else { Threads::All };
            let keys = dq.chunks_mut(n * z).zip(dk.chunks_mut(n * z));
            let pieces = keys.zip(dv.chunks_mut(n * h).zip(parts.chunks_mut(biases)));
            let one = |index: usize, ((dq, dk), (dv, part)): Piece| {
                let dout = &dout[index * n * h..][..n * h];
                self.group_back((&all[index], &panels[index]), dout, [dq, dk, dv, part], threads);
            };
            match threads {
                Threads::One => par::each_piece(pieces, one),
                Threads::All => pieces.enumerate().for_each(|(index, piece)| one(index, piece)),
            }
            Ok(())
        })?;
        let dbias = cpu::gradient(bias, par::sum_parts(&parts, biases))?;
        Ok(vec![cpu::gradient(q, dq)?, cpu::gradient(k, dk)?, cpu::gradient(v, dv)?, dbias, None])
    }
}

simd_fn! {
    /// Weights of one query over the keys in reach, in the place of their products.
    fn weigh<S>(simd, scale: f32, bias: &'a [f32], keep: &'a [f32], out: &'a mut [f32]) {
        const HIDDEN: f32 = 1e30;
        let (factor, hidden) = (simd.splat_f32s(scale), simd.splat_f32s(HIDDEN));
        for at in (0..out.len()).step_by(S::F32_LANES) {
            let logit = simd.mul_add_e_f32s(load(simd, out, at), factor, load(simd, bias, at));
            let keep = load(simd, keep, at);
            let away = simd.mul_f32s(simd.sub_f32s(keep, simd.splat_f32s(1.0)), hidden);
            store(simd, out, at, simd.mul_add_e_f32s(logit, keep, away));
        }
        let max = math::max(simd, out);
        math::exp_in_place(simd, max, out);
        math::update(simd, keep, out, #[inline(always)] |keep, weight| simd.mul_f32s(keep, weight));
        let sum = math::sum(simd, out);
        if sum > 0.0 {
            math::scale(simd, 1.0 / sum, out);
        }
    }
}

simd_fn! {
    /// dl = w (dw - sum w dw); the biases add dl, and scale dl takes the place of dw.
    fn weigh_back<S>(simd, scale: f32, weights: &'a [f32], dw: &'a mut [f32], dbias: &'a mut [f32]) {
        let total = simd.splat_f32s(math::dot(simd, weights, dw));
        let scale = simd.splat_f32s(scale);
        for at in (0..dw.len()).step_by(S::F32_LANES) {
            let slope = simd.mul_f32s(load(simd, weights, at), simd.sub_f32s(load(simd, dw, at), total));
            store(simd, dbias, at, simd.add_f32s(load(simd, dbias, at), slope));
            store(simd, dw, at, simd.mul_f32s(slope, scale));
        }
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;
    use crate::testing::{check, randn};

    /// 1 where a key of a group is kept; the last group hides all of its keys.
    fn keep(groups: usize, n: usize) -> Tensor {
        let kept = |at: usize| f32::from(u8::from(at / n + 1 < groups && at % 5 != 2));
        Tensor::from_vec((0..groups * n).map(kept).collect(), (groups, n), &Device::Cpu).unwrap()
    }

    #[test]
    fn fused_is_the_twin() {
        for (groups, n, longest, z, h) in
            [(1, 1, 1, 1, 1), (2, 3, 3, 4, 5), (3, 7, 9, 2, 8), (2, 65, 70, 8, 3), (1, 300, 300, 16, 40)]
        {
            let of = |name: &str, width| randn(name, &[groups, n, width]);
            let inputs = [of("q", z), of("k", z), of("v", h), randn("bias", &[2 * longest - 1])];
            for causal in [false, true] {
                let what = format!("{groups} groups of {n}, widths {z} and {h}, causal {causal}");
                check(&what, &inputs, 1e-5, |x| {
                    let keep = if groups == 1 {
                        Tensor::ones((1, n), x[0].dtype(), &Device::Cpu)?
                    } else {
                        keep(groups, n)
                    };
                    let keep = keep.to_dtype(x[0].dtype())?;
                    let call = DistanceAttention { scale: 0.3, bias: &x[3], keep: &keep, causal };
                    distance_attention([&x[0], &x[1], &x[2]], &call)
                });
            }
        }
    }

    #[test]
    fn misfits_are_errors() {
        let ones = |dims: &[usize]| Tensor::ones(dims, DType::F32, &Device::Cpu).unwrap();
        let attend = |q: &[usize], v: &[usize], bias: usize, keep: &[usize]| {
            let (q, v, bias, keep) = (ones(q), ones(v), ones(&[bias]), ones(keep));
            let call = DistanceAttention { scale: 1.0, bias: &bias, keep: &keep, causal: false };
            distance_attention([&q, &q, &v], &call).map(|out| out.dims().to_vec())
        };
        assert_eq!(attend(&[2, 4, 3], &[2, 4, 5], 7, &[2, 4]).unwrap(), [2, 4, 5]);
        assert!(attend(&[2, 4, 3], &[2, 3, 5], 7, &[2, 4]).is_err());
        assert!(attend(&[2, 5, 3], &[2, 5, 5], 7, &[2, 5]).is_err());
        assert!(attend(&[2, 4, 3], &[2, 4, 5], 7, &[1, 4]).is_err());
    }
}
