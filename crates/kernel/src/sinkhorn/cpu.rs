//! The fused CPU kernel of Sinkhorn attention, forward and backward.
//!
//! One job per sample and head: its valid blocks are gathered, mixed by one product with R, and attended block by
//! block. Nothing but the result is kept; the backward pass mixes again.

use candle_core::{CpuStorage, Layout, Result, Shape, Tensor, bail};

use super::blocks::{Block, BlockGrads, Sizes};
use super::mixture::{Mixture, Net};
use super::{SortNorm, net_sizes};
use crate::cpu::gemm::{Mat, MatMut, Threads, gemm, gemm_add};
use crate::cpu::par::{self, zeros};
use crate::cpu::{gradient, rows as vectors, slices, with_slices};
use crate::dropout::AttentionDropout;
use crate::group::{ParamGroup, ParamPart};
use crate::heads::{Heads, Qkv};
use crate::op::{self, FusedOp, SavedOutput};
use crate::tape;

/// Settings of one call.
#[derive(Clone, Copy)]
pub struct Spec {
    pub block: usize,
    pub concat: bool,
    pub temperature: f64,
    pub activation: SortNorm,
    pub dropout: Option<AttentionDropout>,
}

/// Sinkhorn attention on packed rows.
pub fn sinkhorn(qkv: &Qkv, mask: Option<&Tensor>, group: &ParamGroup, spec: Spec) -> Result<Heads> {
    let (rows, heads, parts) = qkv.packed()?;
    let (b, n, row) = rows.dims3()?;
    let (Some(q), Some(k), Some(v)) = (parts.q, parts.k, parts.v) else {
        bail!("Sinkhorn attention reads queries, keys and values")
    };
    let e = row / parts.count;
    let (d, block) = (e / heads, spec.block.min(n));
    let blocks = n.div_ceil(block.max(1));
    let (hidden, most) = net_sizes(group, heads, d, blocks)?;
    let scale = 1.0 / (d as f32).sqrt();
    let (q, k, v) = (q * e, k * e, v * e);
    let sizes = Sizes {
        b,
        n,
        heads,
        d,
        row,
        q,
        k,
        v,
        block,
        blocks,
        hidden,
        most,
        scale,
        concat: spec.concat,
        dropout: spec.dropout,
    };
    let keep = mask.map(|mask| mask.flatten_all()?.to_vec1::<f32>()).transpose()?;
    let op = Mixed { sizes, spec, keep, parts: group.parts.clone() };
    Ok(Heads::Merged { rows: tape::apply(&[&rows, &group.flat], op)?, heads })
}

/// The operation.
struct Mixed {
    sizes: Sizes,
    spec: Spec,
    /// [b, n], 0 where a position is hidden.
    keep: Option<Vec<f32>>,
    parts: Vec<ParamPart>,
}

/// The blocks with a kept key of one sample and head; zeros at hidden positions.
struct Gathered {
    /// Row of position 0, as dropout counts.
    first: usize,
    valid: Vec<usize>,
    hidden: Vec<bool>,
    nowhere: Vec<bool>,
    /// [valid, block, d].
    q: Vec<f32>,
    /// Keys and values side by side, and their mixtures: [valid, block, 2 d].
    pairs: Vec<f32>,
    mixed: Vec<f32>,
    pooled: Vec<f32>,
    mixture: Mixture,
}

impl Gathered {
    fn block<'a>(&'a self, sizes: &Sizes, index: usize) -> Block<'a> {
        let (size, len) = (sizes.block * sizes.d, sizes.block);
        Block {
            q: &self.q[index * size..][..size],
            own: &self.pairs[2 * index * size..][..2 * size],
            mixed: &self.mixed[2 * index * size..][..2 * size],
            hidden: &self.hidden[index * len..][..len],
            nowhere: &self.nowhere,
            row: self.first + self.valid[index] * len,
        }
    }
}

/// out = R x + beta out over blocks as long rows, or with R transposed.
fn mix(r: &[f32], transposed: bool, x: &[f32], beta: f32, out: &mut [f32]) {
    let count = r.len().isqrt();
    let width = x.len() / count.max(1);
    let r = Mat::new(r, count, count);
    let (r, x) = (if transposed { r.t() } else { r }, Mat::new(x, count, width));
    gemm_add(MatMut::new(out, count, width), r, x, 1.0, beta, Threads::One);
}

impl Mixed {
    fn hidden(&self, sample: usize, at: usize) -> bool {
        let n = self.sizes.n;
        at >= n || self.keep.as_ref().is_some_and(|keep| keep[sample * n + at] == 0.0)
    }

    fn net<'a>(&self, flat: &'a [f32], head: usize) -> Net<'a> {
        let Sizes { d, hidden, most, heads, .. } = self.sizes;
        let part = |index: usize| {
            let part = &self.parts[index];
            let len = part.len() / heads;
            &flat[part.offset + head * len..][..len]
        };
        let last = self.parts.len() - 2;
        let first = if hidden > 0 { (part(0), part(1)) } else { (&flat[..0], &flat[..0]) };
        Net { d, hidden, most, first, last: (part(last), part(last + 1)) }
    }

    /// `backward`: whether the backward pass is to come.
    fn gather(&self, rows: &[f32], flat: &[f32], (sample, head): (usize, usize), backward: bool) -> Gathered {
        let Sizes { n, d, row, q, k, v, block, blocks, .. } = self.sizes;
        let kept = |index: &usize| (index * block..(index + 1) * block).any(|at| !self.hidden(sample, at));
        let valid: Vec<usize> = (0..blocks).filter(kept).collect();
        let positions = || valid.iter().flat_map(|index| index * block..(index + 1) * block);
        let hidden: Vec<bool> = positions().map(|at| self.hidden(sample, at)).collect();
        let rows_of = |parts: &[usize]| {
            let mut out = vec![0.0; hidden.len() * parts.len() * d];
            let places = out.chunks_exact_mut(parts.len() * d).zip(positions()).zip(&hidden);
            for ((out, at), _) in places.filter(|(_, hidden)| !**hidden) {
                for (out, part) in out.chunks_exact_mut(d).zip(parts) {
                    out.copy_from_slice(&rows[(sample * n + at) * row + part + head * d..][..d]);
                }
            }
            out
        };
        let (q, pairs) = (rows_of(&[q]), rows_of(&[k, v]));
        let mut pooled = vec![0.0; valid.len() * d];
        for (pooled, pairs) in pooled.chunks_exact_mut(d).zip(pairs.chunks_exact(block * 2 * d)) {
            pairs.chunks_exact(2 * d).for_each(|pair| vectors::add(&pair[..d], pooled));
        }
        let nowhere = (0..block).map(|at| hidden.iter().skip(at).step_by(block).all(|&hidden| hidden));
        let nowhere = nowhere.collect();
        let (temperature, activation) = (self.spec.temperature as f32, self.spec.activation);
        let net = self.net(flat, head);
        let mixture = Mixture::new(&pooled, &valid, blocks, &net, temperature, activation, backward);
        let mut mixed = zeros(pairs.len());
        mix(&mixture.r, false, &pairs, 0.0, &mut mixed);
        let first = (sample * self.sizes.heads + head) * n;
        Gathered { first, valid, hidden, nowhere, q, pairs, mixed, pooled, mixture }
    }

    /// Output rows of the valid blocks, [_, d].
    fn attend(&self, gathered: &Gathered) -> Vec<f32> {
        let sizes = &self.sizes;
        let mut out = zeros(gathered.q.len());
        par::each_piece_with(
            out.chunks_mut(sizes.block * sizes.d),
            || vec![0.0; 2 * sizes.block * sizes.block],
            |weights, index, out| gathered.block(sizes, index).forward(sizes, weights, out),
        );
        out
    }

    /// Gradients of queries [_, d] and of keys and values [_, 2 d] of the valid blocks, and of the head's parameters.
    fn attend_backward(&self, gathered: &Gathered, flat: &[f32], head: usize, grad: &[f32]) -> [Vec<f32>; 3] {
        let sizes = &self.sizes;
        let (size, len) = (sizes.block * sizes.d, gathered.q.len());
        let [mut dq, mut dpairs, mut dmixed] = [len, 2 * len, 2 * len].map(zeros);
        let jobs = dq.chunks_mut(size).zip(dpairs.chunks_mut(2 * size)).zip(dmixed.chunks_mut(2 * size));
        let jobs = jobs.zip(grad.chunks(size));
        par::each_piece_with(
            jobs,
            || [vec![0.0; 2 * sizes.block * sizes.block], vec![0.0; 2 * sizes.block * sizes.block]],
            |[weights, scratch], index, (((q, own), mixed), grad)| {
                let out = BlockGrads { q, own, mixed };
                gathered.block(sizes, index).backward(sizes, grad, (weights, scratch), out);
            },
        );
        let (count, r) = (gathered.valid.len(), &gathered.mixture.r);
        let mut dr = vec![0.0; count * count];
        if let Some(width) = dmixed.len().checked_div(count) {
            let [dmixed, pairs] = [&dmixed, &gathered.pairs].map(|x| Mat::new(x, count, width));
            gemm(MatMut::new(&mut dr, count, count), dmixed, pairs.t(), 1.0, Threads::One);
        }
        mix(r, true, &dmixed, 1.0, &mut dpairs);
        let mut params = vec![0.0; sizes.params()];
        let (net, blocks) = (self.net(flat, head), (gathered.valid.as_slice(), sizes.blocks));
        let temperature = self.spec.temperature as f32;
        let dpooled = gathered.mixture.backward(dr, &gathered.pooled, blocks, &net, temperature, &mut params);
        for (dpairs, dpooled) in dpairs.chunks_exact_mut(2 * size).zip(dpooled.chunks_exact(sizes.d)) {
            dpairs.chunks_exact_mut(2 * sizes.d).for_each(|pair| vectors::add(dpooled, &mut pair[..sizes.d]));
        }
        [dq, dpairs, params]
    }

    /// Runs `f(sample, head)` for all, and returns the results in order, sample by sample.
    fn each<T: Send>(&self, f: impl Fn(usize, usize) -> T + Sync + Send) -> Vec<T> {
        let Sizes { b, heads, .. } = self.sizes;
        par::map_pieces(0..b * heads, |_, index| f(index / heads, index % heads))
    }

    /// Writes rows [_, starts, d] of valid blocks to their positions in `out`, whose rows are `stride` long, from the `starts`
    /// on; nothing at hidden positions.
    fn spread(
        &self,
        valid: &[usize],
        sample: usize,
        rows: &[f32],
        out: &mut [f32],
        (stride, starts): (usize, &[usize]),
    ) {
        let Sizes { d, block, .. } = self.sizes;
        let positions = valid.iter().flat_map(|index| index * block..(index + 1) * block);
        let rows = rows.chunks_exact(starts.len() * d).zip(positions);
        for (row, at) in rows.filter(|(_, at)| !self.hidden(sample, *at)) {
            for (row, start) in row.chunks_exact(d).zip(starts) {
                out[at * stride + start..][..d].copy_from_slice(row);
            }
        }
    }
}

impl FusedOp for Mixed {
    fn name(&self) -> &'static str {
        "sinkhorn-attention"
    }

    fn forward(&self, operands: &[(&CpuStorage, &Layout)]) -> Result<(Vec<f32>, Shape)> {
        let [rows, flat] = slices(operands)?;
        let Sizes { b, n, heads, d, .. } = self.sizes;
        let results = self.each(|sample, head| {
            let gathered = self.gather(rows, flat, (sample, head), false);
            let out = self.attend(&gathered);
            (gathered.valid, out)
        });
        let mut out = zeros(b * n * heads * d);
        par::each_piece(out.chunks_mut(n * heads * d), |sample, out| {
            for (head, (valid, rows)) in results[sample * heads..][..heads].iter().enumerate() {
                self.spread(valid, sample, rows, out, (heads * d, &[head * d]));
            }
        });
        Ok((out, (b, n, heads * d).into()))
    }

    fn backward(&self, operands: &[&Tensor], _: SavedOutput, grad: &Tensor) -> Result<Vec<Option<Tensor>>> {
        let [rows, flat] = op::operands(operands)?;
        let (drows, dflat) =
            with_slices([rows, flat, grad], |[rows, flat, grad]| Ok(self.gradients(rows, flat, grad)))?;
        Ok(vec![gradient(rows, drows)?, gradient(flat, dflat)?])
    }
}

impl Mixed {
    /// Gradients of the rows and of the network's parameters.
    fn gradients(&self, rows: &[f32], flat: &[f32], grad: &[f32]) -> (Vec<f32>, Vec<f32>) {
        let Sizes { n, heads, d, row, q, k, v, .. } = self.sizes;
        let e = heads * d;
        let results = self.each(|sample, head| {
            let gathered = self.gather(rows, flat, (sample, head), true);
            let mut dout = zeros(gathered.q.len());
            let positions = gathered
                .valid
                .iter()
                .flat_map(|index| index * self.sizes.block..(index + 1) * self.sizes.block);
            let places = dout.chunks_exact_mut(d).zip(positions).zip(&gathered.hidden);
            for ((dout, at), _) in places.filter(|(_, hidden)| !**hidden) {
                dout.copy_from_slice(&grad[(sample * n + at) * e + head * d..][..d]);
            }
            let grads = self.attend_backward(&gathered, flat, head, &dout);
            (gathered.valid, grads)
        });
        let mut drows = zeros(rows.len());
        par::each_piece(drows.chunks_mut(n * row), |sample, out| {
            for (head, (valid, [dq, dpairs, _])) in results[sample * heads..][..heads].iter().enumerate() {
                self.spread(valid, sample, dq, out, (row, &[q + head * d]));
                self.spread(valid, sample, dpairs, out, (row, &[k + head * d, v + head * d]));
            }
        });
        let mut dflat = vec![0.0; flat.len()];
        for (index, (_, [.., params])) in results.iter().enumerate() {
            let mut params = params.as_slice();
            for part in &self.parts {
                let len = part.len() / heads;
                let (mine, rest) = params.split_at(len);
                vectors::add(mine, &mut dflat[part.offset + index % heads * len..][..len]);
                params = rest;
            }
        }
        (drows, dflat)
    }
}
