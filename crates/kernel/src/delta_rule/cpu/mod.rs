//! The fused CPU kernel: one job per sample and head, which walks over its chunks.
//!
//! All products are f32 whatever the number format of the process: an error in S feeds back into every later step.

mod backward;
mod chunk;
mod solve;

use std::sync::OnceLock;

use candle_core::{CpuStorage, DType, Device, Layout, Result, Shape, Tensor, bail};

use super::{DeltaRows, DeltaRule};
use crate::cpu::gemm::{Mat, MatMut, Threads, gemm_exact};
use crate::cpu::{self, par};
use crate::heads::Heads;
use crate::op::{FusedOp, SavedOutput};
use crate::tape;
use chunk::Chunk;

/// Positions per chunk.
const CHUNK: usize = 32;

/// Runs the fused kernel on f32 tensors.
pub(super) fn fused(rows: &DeltaRows, call: &DeltaRule) -> Result<Heads> {
    let (samples, len, _) = rows.rows.dims3()?;
    let DeltaRows { heads, key_width, value_width, .. } = *rows;
    let keep = match call.mask {
        Some(mask) => Some(mask.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?),
        None => None,
    };
    let mut operands = vec![rows.rows.contiguous()?, call.beta.contiguous()?];
    if let Some(log_decay) = call.log_decay {
        operands.push(log_decay.contiguous()?);
    }
    let op = Delta {
        shape: Dims { samples, heads, len, key_width, value_width },
        keep,
        trains: operands.iter().any(Tensor::track_op),
        states: OnceLock::new(),
    };
    let rows = tape::apply(&operands.iter().collect::<Vec<_>>(), op)?;
    Ok(Heads::Merged { rows, heads })
}

/// Sizes of a call.
#[derive(Clone, Copy, Debug)]
struct Dims {
    samples: usize,
    heads: usize,
    len: usize,
    key_width: usize,
    value_width: usize,
}

impl Dims {
    /// Width of a row `[q heads | k heads | v heads]`.
    fn row(&self) -> usize {
        self.heads * (2 * self.key_width + self.value_width)
    }

    /// Number of chunks.
    fn chunks(&self) -> usize {
        self.len.div_ceil(CHUNK)
    }

    /// Elements of a state.
    fn state(&self) -> usize {
        self.key_width * self.value_width
    }
}

/// Operands of a call.
#[derive(Clone, Copy)]
struct Problem<'a> {
    dims: Dims,
    rows: &'a [f32],
    beta: &'a [f32],
    log_decay: Option<&'a [f32]>,
    keep: Option<&'a [f32]>,
}

impl<'a> Problem<'a> {
    fn new(op: &'a Delta, operands: &[&'a [f32]]) -> Self {
        let log_decay = operands.get(2).copied();
        Self { dims: op.shape, rows: operands[0], beta: operands[1], log_decay, keep: op.keep.as_deref() }
    }
}

struct Delta {
    shape: Dims,
    /// [samples, len]: 0 leaves the state as it is.
    keep: Option<Vec<f32>>,
    /// Whether a backward pass may follow.
    trains: bool,
    /// The state before each chunk, [samples, heads, chunks, key_width, value_width].
    states: OnceLock<Vec<f32>>,
}

impl FusedOp for Delta {
    fn name(&self) -> &'static str {
        "delta-rule"
    }

    fn forward(&self, operands: &[(&CpuStorage, &Layout)]) -> Result<(Vec<f32>, Shape)> {
        let dims = self.shape;
        let slices = operands.iter().map(|(storage, layout)| cpu::slice(storage, layout));
        let slices = slices.collect::<Result<Vec<_>>>()?;
        let (out, states) = forward(&Problem::new(self, &slices), self.trains);
        if self.trains && self.states.set(states).is_err() {
            bail!("a delta rule operation ran twice");
        }
        Ok((out, (dims.samples, dims.len, dims.heads * dims.value_width).into()))
    }

    fn backward(&self, operands: &[&Tensor], _: SavedOutput, grad: &Tensor) -> Result<Vec<Option<Tensor>>> {
        let Some(states) = self.states.get() else { bail!("the delta rule runs backward before forward") };
        let grads = match *operands {
            [rows, beta] => cpu::with_slices([rows, beta, grad], |[rows, beta, grad]| {
                Ok(backward::backward(&Problem::new(self, &[rows, beta]), states, grad))
            }),
            [rows, beta, decay] => {
                cpu::with_slices([rows, beta, decay, grad], |[rows, beta, decay, grad]| {
                    Ok(backward::backward(&Problem::new(self, &[rows, beta, decay]), states, grad))
                })
            }
            _ => bail!("the delta rule has two or three operands, not {}", operands.len()),
        }?;
        let grads = operands.iter().zip(grads);
        grads.map(|(like, grad)| Tensor::from_vec(grad, like.shape(), &Device::Cpu).map(Some)).collect()
    }
}

/// The columns of every head in rows of `heads * width` elements: one slice per position, in order of sample and head.
fn head_rows(rows: &mut [f32], dims: Dims, width: usize) -> Vec<Vec<&mut [f32]>> {
    let mut all = heads_of(dims);
    for (index, row) in rows.chunks_exact_mut(dims.heads * width).enumerate() {
        let first = index / dims.len * dims.heads;
        row.chunks_exact_mut(width).enumerate().for_each(|(head, part)| all[first + head].push(part));
    }
    all
}

/// An empty list with room for every position, per sample and head.
fn heads_of<T>(dims: Dims) -> Vec<Vec<T>> {
    (0..dims.samples * dims.heads).map(|_| Vec::with_capacity(dims.len)).collect()
}

/// The result rows [samples, len, heads * value_width], and the state before each chunk if `keep_states`.
fn forward(problem: &Problem, keep_states: bool) -> (Vec<f32>, Vec<f32>) {
    let dims = problem.dims;
    let per_head = if keep_states { dims.chunks() * dims.state() } else { 0 };
    let mut out = vec![0.0; dims.samples * dims.len * dims.heads * dims.value_width];
    let mut states = vec![0.0; dims.samples * dims.heads * per_head];
    let mut kept = states.chunks_mut(per_head.max(1));
    let jobs = head_rows(&mut out, dims, dims.value_width).into_iter();
    let jobs = jobs.map(|rows| (rows, kept.next().unwrap_or_default()));
    par::each_piece_with(
        jobs,
        || Chunk::new(dims),
        |chunk, head, (mut out, states)| {
            let mut state = vec![0.0; dims.state()];
            for index in 0..dims.chunks() {
                if keep_states {
                    states[index * dims.state()..][..dims.state()].copy_from_slice(&state);
                }
                chunk.load(problem, head, index);
                chunk.update(&state);
                let results = chunk.results().chunks_exact(dims.value_width);
                let rows = out[index * CHUNK..].iter_mut();
                rows.zip(results).for_each(|(to, from)| to.copy_from_slice(from));
                chunk.advance(&mut state);
            }
        },
    );
    (out, states)
}

/// c = a b, or a b + factor c.
fn product(c: MatMut, a: Mat, b: Mat, factor: Option<f32>) {
    gemm_exact(c, a, b, 1.0, factor, Threads::One);
}
