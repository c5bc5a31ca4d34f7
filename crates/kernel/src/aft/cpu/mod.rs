//! The fused CPU kernel: jobs of one block of channels, which walk over the positions of their samples.

mod keys;
mod queries;
mod space;
mod vectors;

use candle_core::{CpuStorage, DType, Device, Layout, Result, Shape, Tensor, bail};

use super::Aft;
use crate::cpu::{self, math, par, par::Chunks};
use crate::heads::{Heads, PackedLayout, Qkv};
use crate::op::{FusedOp, SavedOutput};
use crate::tape;
use space::{Block, Space};

/// Channels per job, a few vectors.
const CHANNELS: usize = 64;
/// Most groups of samples whose gradients of the bias are summed apart.
const SAMPLE_GROUPS: usize = 4;

/// Runs the fused kernel on f32 tensors.
pub(super) fn fused(qkv: &Qkv, call: &Aft) -> Result<Heads> {
    let (rows, heads, parts) = qkv.packed()?;
    let PackedLayout { q: Some(q), k: Some(k), v: Some(v), count } = parts else {
        bail!("AFT needs queries, keys and values of their own");
    };
    let (samples, len, width) = rows.dims3()?;
    let keep = match call.mask {
        Some(mask) => Some(mask.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?),
        None => None,
    };
    let bias = call.bias.map(|bias| bias.band.contiguous()).transpose()?;
    let (groups, columns) = match &bias {
        Some(band) => (band.dim(0)?, band.dim(2)?),
        None => (1, 0),
    };
    let op = AftOp {
        dims: Dims {
            samples,
            len,
            width: width / count,
            parts: [q, k, v],
            row: width,
            groups,
            window: call.bias.map_or(0, |bias| bias.window),
            columns,
            causal: call.causal,
        },
        keep,
        trains_bias: bias.as_ref().is_some_and(Tensor::track_op),
    };
    let operands: Vec<&Tensor> = std::iter::once(&rows).chain(&bias).collect();
    Ok(Heads::Merged { rows: tape::apply(&operands, op)?, heads })
}

/// Sizes of a call.
#[derive(Clone, Copy, Debug)]
struct Dims {
    samples: usize,
    len: usize,
    /// Channels.
    width: usize,
    /// Which part of a row holds queries, keys and values.
    parts: [usize; 3],
    /// Elements of a row.
    row: usize,
    /// Biases for parts of the channels.
    groups: usize,
    /// 0 without bias.
    window: usize,
    /// Columns of the bias.
    columns: usize,
    causal: bool,
}

/// Some channels that have one bias.
#[derive(Clone, Copy, Debug)]
struct Channels {
    first: usize,
    count: usize,
    group: usize,
}

impl Dims {
    fn blocks(&self) -> Vec<Channels> {
        let width = self.width / self.groups;
        let cut = Chunks::of(width, CHANNELS);
        let block = |group: usize, index: usize| {
            let range = cut.range(index);
            Channels { first: group * width + range.start, count: range.len(), group }
        };
        (0..self.groups).flat_map(|group| (0..cut.count()).map(move |index| block(group, index))).collect()
    }

    fn sample_groups(&self) -> Chunks {
        Chunks::of(self.samples, self.samples.div_ceil(SAMPLE_GROUPS))
    }
}

/// exp of the biases relative to the largest weight of a row, so that none is above 1.
struct Weights {
    /// [groups, len, columns], 0 where there is no such position.
    inside: Vec<f32>,
    /// [groups, len]: weight of positions outside the window.
    outside: Vec<f32>,
}

impl Weights {
    fn new(dims: &Dims, band: Option<&[f32]>) -> Self {
        let Dims { len, window, columns, causal, .. } = *dims;
        let Some(band) = band else { return Self { inside: Vec::new(), outside: vec![1.0; len] } };
        let (inside, outside) = par::build_two(
            (band.len(), columns * 64),
            (band.len() / columns, 64),
            || (),
            |(), index, inside, outside| {
                for (row, (inside, outside)) in inside.chunks_exact_mut(columns).zip(outside).enumerate() {
                    let row = index * 64 + row;
                    let i = row % len;
                    let first = (window - 1).saturating_sub(i);
                    let last = columns.min(len + window - 1 - i);
                    let band = &band[row * columns..][first..last];
                    let others = i >= window || (!causal && i + window < len);
                    let least = if others { 0.0 } else { f32::NEG_INFINITY };
                    let top = band.iter().fold(least, |top, &w| top.max(w));
                    *outside = if others { (-top).exp() } else { 0.0 };
                    inside[first..last].copy_from_slice(band);
                    exp_below(top, &mut inside[first..last]);
                }
            },
        );
        Self { inside, outside }
    }
}

crate::simd_fn! {
    /// y = exp(y - top).
    fn exp_below<S>(simd, top: f32, y: &'a mut [f32]) {
        math::exp_in_place(simd, top, y);
    }
}

struct AftOp {
    dims: Dims,
    /// [samples, len].
    keep: Option<Vec<f32>>,
    /// Whether the bias takes a gradient.
    trains_bias: bool,
}

impl AftOp {
    /// The channels of a block in one sample.
    fn block<'a>(
        &'a self,
        rows: &'a [f32],
        weights: &'a Weights,
        sample: usize,
        channels: Channels,
    ) -> Block<'a> {
        let Dims { len, width, parts, row, window, columns, causal, .. } = self.dims;
        let inside = &weights.inside[channels.group * len * columns..][..len * columns];
        Block {
            rows: &rows[sample * len * row..][..len * row],
            row,
            parts: parts.map(|part| part * width + channels.first),
            width: channels.count,
            keep: self.keep.as_deref().map(|keep| &keep[sample * len..][..len]),
            inside,
            outside: &weights.outside[channels.group * len..][..len],
            len,
            window,
            columns,
            causal,
        }
    }

    fn forward(&self, rows: &[f32], band: Option<&[f32]>) -> Vec<f32> {
        let dims = &self.dims;
        let (blocks, weights) = (dims.blocks(), Weights::new(dims, band));
        let mut out = par::zeros(dims.samples * dims.len * dims.width);
        let jobs = split_parts(&mut out, dims.width, dims, &blocks, &[0]);
        par::each_piece_with(
            jobs.into_iter(),
            || Space::new(dims, false),
            |space, index, mut parts| {
                let block = self.block(rows, &weights, index / blocks.len(), blocks[index % blocks.len()]);
                space.sums(&block, false);
                let rows = parts[0].iter_mut();
                rows.enumerate().for_each(|(i, out)| queries::result(&block, space, i, out));
            },
        );
        out
    }

    /// Gradients of the rows, and of the band if it takes one.
    fn backward(&self, rows: &[f32], band: Option<&[f32]>, grad: &[f32]) -> (Vec<f32>, Option<Vec<f32>>) {
        let dims = &self.dims;
        let (blocks, weights) = (dims.blocks(), Weights::new(dims, band));
        let mut drows = par::zeros(rows.len());
        let mut parts = split_parts(&mut drows, dims.row, dims, &blocks, &dims.parts).into_iter();
        // a job is a group of samples and a block
        let samples = dims.sample_groups();
        let mut jobs: Vec<Vec<_>> = (0..samples.count() * blocks.len()).map(|_| Vec::new()).collect();
        for sample in 0..dims.samples {
            for block in 0..blocks.len() {
                jobs[sample / samples.size * blocks.len() + block].extend(parts.next());
            }
        }
        let band_len = if self.trains_bias { dims.len * dims.columns } else { 0 };
        let bands = par::map_pieces_with(
            jobs.into_iter(),
            || Space::new(dims, true),
            |space, index, parts| {
                let (group, channels) = (index / blocks.len(), blocks[index % blocks.len()]);
                let mut dband = vec![0.0; band_len];
                for (sample, parts) in samples.range(group).zip(parts) {
                    let block = self.block(rows, &weights, sample, channels);
                    let grad = &grad[sample * dims.len * dims.width..][..dims.len * dims.width];
                    space.sums(&block, true);
                    let [mut dq, mut dk, mut dv] = parts;
                    for (i, dq) in dq.iter_mut().enumerate() {
                        let grad = &grad[i * dims.width + channels.first..][..channels.count];
                        queries::gradient(&block, space, i, grad, dq);
                    }
                    keys::sums(&block, space, &mut dband);
                    let rows = dk.iter_mut().zip(&mut dv).enumerate();
                    rows.for_each(|(j, (dk, dv))| keys::gradient(&block, space, j, dk, dv));
                }
                dband
            },
        );
        if !self.trains_bias {
            return (drows, None);
        }
        let mut dband = vec![0.0; dims.groups * band_len];
        for (index, part) in bands.iter().enumerate() {
            let group = blocks[index % blocks.len()].group;
            cpu::rows::add(part, &mut dband[group * band_len..][..band_len]);
        }
        (drows, Some(dband))
    }
}

/// Slices of `rows` of `row` elements: for every sample and block, for up to three parts of a row, one per position.
fn split_parts<'a>(
    rows: &'a mut [f32],
    row: usize,
    dims: &Dims,
    blocks: &[Channels],
    parts: &[usize],
) -> Vec<[Vec<&'a mut [f32]>; 3]> {
    let list = |slot: usize| Vec::with_capacity(if slot < parts.len() { dims.len } else { 0 });
    let mut all: Vec<_> = (0..dims.samples * blocks.len()).map(|_| [0, 1, 2].map(list)).collect();
    for (index, row) in rows.chunks_exact_mut(row).enumerate() {
        let first = index / dims.len * blocks.len();
        for (part, mut columns) in row.chunks_exact_mut(dims.width).enumerate() {
            let Some(slot) = parts.iter().position(|&wanted| wanted == part) else { continue };
            for (block, channels) in blocks.iter().enumerate() {
                let (own, rest) = columns.split_at_mut(channels.count);
                all[first + block][slot].push(own);
                columns = rest;
            }
        }
    }
    all
}

impl FusedOp for AftOp {
    fn name(&self) -> &'static str {
        "aft"
    }

    fn forward(&self, operands: &[(&CpuStorage, &Layout)]) -> Result<(Vec<f32>, Shape)> {
        let slices = operands.iter().map(|(storage, layout)| cpu::slice(storage, layout));
        let slices = slices.collect::<Result<Vec<_>>>()?;
        let out = AftOp::forward(self, slices[0], slices.get(1).copied());
        Ok((out, (self.dims.samples, self.dims.len, self.dims.width).into()))
    }

    fn backward(&self, operands: &[&Tensor], _: SavedOutput, grad: &Tensor) -> Result<Vec<Option<Tensor>>> {
        let (rows, band) = match *operands {
            [rows] => {
                cpu::with_slices([rows, grad], |[rows, grad]| Ok(AftOp::backward(self, rows, None, grad)))
            }
            [rows, band] => cpu::with_slices([rows, band, grad], |[rows, band, grad]| {
                Ok(AftOp::backward(self, rows, Some(band), grad))
            }),
            _ => bail!("AFT has one or two operands, not {}", operands.len()),
        }?;
        let rows = cpu::gradient(operands[0], rows)?;
        let Some(like) = operands.get(1) else { return Ok(vec![rows]) };
        let band = band.map(|band| Tensor::from_vec(band, like.shape(), &Device::Cpu)).transpose()?;
        Ok(vec![rows, band])
    }
}
