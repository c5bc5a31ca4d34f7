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
use crate::cpu::{gradient, slices, with_slices};
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

/// One sample and head, gathered: rows [valid.len() * block, d], zeros at hidden positions.
struct Gathered {
    /// Row of position 0, as dropout counts.
    first: usize,
    valid: Vec<usize>,
    hidden: Vec<bool>,
    nowhere: Vec<bool>,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    pooled: Vec<f32>,
    mixture: Mixture,
    sk: Vec<f32>,
    sv: Vec<f32>,
}

impl Gathered {
    fn block<'a>(&'a self, sizes: &Sizes, index: usize) -> Block<'a> {
        let (size, len) = (sizes.block * sizes.d, sizes.block);
        let rows = |x: &'a [f32]| &x[index * size..][..size];
        Block {
            q: rows(&self.q),
            k: rows(&self.k),
            v: rows(&self.v),
            sk: rows(&self.sk),
            sv: rows(&self.sv),
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
        let rows_of = |part: usize| {
            let mut out = vec![0.0; hidden.len() * d];
            let places = out.chunks_exact_mut(d).zip(positions()).zip(&hidden);
            for ((out, at), _) in places.filter(|(_, hidden)| !**hidden) {
                out.copy_from_slice(&rows[(sample * n + at) * row + part + head * d..][..d]);
            }
            out
        };
        let (q, k, v) = (rows_of(q), rows_of(k), rows_of(v));
        let mut pooled = vec![0.0; valid.len() * d];
        for (pooled, keys) in pooled.chunks_exact_mut(d).zip(k.chunks_exact(block * d)) {
            for key in keys.chunks_exact(d) {
                pooled.iter_mut().zip(key).for_each(|(pooled, key)| *pooled += key);
            }
        }
        let nowhere = (0..block).map(|at| hidden.iter().skip(at).step_by(block).all(|&hidden| hidden));
        let nowhere = nowhere.collect();
        let (temperature, activation) = (self.spec.temperature as f32, self.spec.activation);
        let net = self.net(flat, head);
        let mixture = Mixture::new(&pooled, &valid, blocks, &net, temperature, activation, backward);
        let (mut sk, mut sv) = (zeros(k.len()), zeros(v.len()));
        mix(&mixture.r, false, &k, 0.0, &mut sk);
        mix(&mixture.r, false, &v, 0.0, &mut sv);
        let first = (sample * self.sizes.heads + head) * n;
        Gathered { first, valid, hidden, nowhere, q, k, v, pooled, mixture, sk, sv }
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

    /// Gradients of queries, keys and values of the valid blocks, [_, d] each, and of the head's parameters.
    fn attend_backward(&self, gathered: &Gathered, flat: &[f32], head: usize, grad: &[f32]) -> [Vec<f32>; 4] {
        let sizes = &self.sizes;
        let (size, len) = (sizes.block * sizes.d, gathered.q.len());
        let mut grads: [Vec<f32>; 5] = std::array::from_fn(|_| zeros(len));
        let [dq, dk, dv, dsk, dsv] = grads.each_mut();
        let jobs = dq.chunks_mut(size).zip(dk.chunks_mut(size)).zip(dv.chunks_mut(size));
        let jobs = jobs.zip(dsk.chunks_mut(size)).zip(dsv.chunks_mut(size)).zip(grad.chunks(size));
        par::each_piece_with(
            jobs,
            || [vec![0.0; 2 * sizes.block * sizes.block], vec![0.0; 2 * sizes.block * sizes.block]],
            |[weights, scratch], index, (((((q, k), v), sk), sv), grad)| {
                let out = BlockGrads { q, k, v, sk, sv };
                gathered.block(sizes, index).backward(sizes, grad, (weights, scratch), out);
            },
        );
        let [dq, mut dk, mut dv, dsk, dsv] = grads;
        let (count, r) = (gathered.valid.len(), &gathered.mixture.r);
        let mut dr = vec![0.0; count * count];
        if let Some(width) = len.checked_div(count) {
            let wide = |x| Mat::new(x, count, width);
            let out = MatMut::new(&mut dr, count, count);
            gemm(out, wide(&dsk), wide(&gathered.k).t(), 1.0, Threads::One);
            let out = MatMut::new(&mut dr, count, count);
            gemm_add(out, wide(&dsv), wide(&gathered.v).t(), 1.0, 1.0, Threads::One);
        }
        mix(r, true, &dsk, 1.0, &mut dk);
        mix(r, true, &dsv, 1.0, &mut dv);
        let mut params = vec![0.0; sizes.params()];
        let (net, blocks) = (self.net(flat, head), (gathered.valid.as_slice(), sizes.blocks));
        let temperature = self.spec.temperature as f32;
        let dpooled = gathered.mixture.backward(dr, &gathered.pooled, blocks, &net, temperature, &mut params);
        let keys = dk.chunks_exact_mut(sizes.d).zip(&gathered.hidden).enumerate();
        for (at, (dk, _)) in keys.filter(|(_, (_, hidden))| !**hidden) {
            let dpooled = &dpooled[at / sizes.block * sizes.d..][..sizes.d];
            dk.iter_mut().zip(dpooled).for_each(|(dk, dpooled)| *dk += dpooled);
        }
        [dq, dk, dv, params]
    }

    /// Runs `f(sample, head)` for all, and returns the results in order, sample by sample.
    fn each<T: Send>(&self, f: impl Fn(usize, usize) -> T + Sync + Send) -> Vec<T> {
        let Sizes { b, heads, .. } = self.sizes;
        par::map_pieces(0..b * heads, |_, index| f(index / heads, index % heads))
    }

    /// Writes rows [_, d] of valid blocks to their positions in `out`, whose rows are `stride` long, from `start` on;
    /// nothing at hidden positions.
    fn spread(
        &self,
        valid: &[usize],
        sample: usize,
        rows: &[f32],
        out: &mut [f32],
        (stride, start): (usize, usize),
    ) {
        let Sizes { d, block, .. } = self.sizes;
        let positions = valid.iter().flat_map(|index| index * block..(index + 1) * block);
        for (row, at) in rows.chunks_exact(d).zip(positions).filter(|(_, at)| !self.hidden(sample, *at)) {
            out[at * stride + start..][..d].copy_from_slice(row);
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
                self.spread(valid, sample, rows, out, (heads * d, head * d));
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
            for (head, (valid, [dq, dk, dv, _])) in results[sample * heads..][..heads].iter().enumerate() {
                for (part, rows) in [(q, dq), (k, dk), (v, dv)] {
                    self.spread(valid, sample, rows, out, (row, part + head * d));
                }
            }
        });
        let mut dflat = vec![0.0; flat.len()];
        for (index, (_, [.., params])) in results.iter().enumerate() {
            let mut params = params.as_slice();
            for part in &self.parts {
                let len = part.len() / heads;
                let (mine, rest) = params.split_at(len);
                let out = &mut dflat[part.offset + index % heads * len..][..len];
                out.iter_mut().zip(mine).for_each(|(out, mine)| *out += mine);
                params = rest;
            }
        }
        (drows, dflat)
    }
}
