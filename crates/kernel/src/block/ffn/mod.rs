//! The feed-forward half with its LayerNorm and residual as one operation.
//!
//! Forward runs over chunks of rows, so that the hidden layer of a chunk stays in the cache. For the backward
//! pass only the input of the GELU is saved, as bf16 where products are; LayerNorm and GELU are computed again.

#[cfg(target_arch = "x86_64")]
mod packed;

use std::ops::Range;
use std::sync::Mutex;

#[cfg(feature = "cuda")]
use candle_core::cuda_backend::{CudaStorage, cudarc::driver::CudaSlice};
use candle_core::{CpuStorage, Layout, Result, Shape, Tensor, bail};

use super::{FfnCall, Residual, Weight, add_scaled, check_scales, scale_rows, vector, weight};
use crate::cpu::bf16;
use crate::cpu::compact::{self, Elements};
use crate::cpu::dense::{self, Panels, WeightGradient, is_packed};
use crate::cpu::few::{self, FewRows, Layer};
use crate::cpu::gemm::Mat;
use crate::cpu::matmul_format::{MatmulFormat, matmul_format};
use crate::cpu::par::{self, Chunks};
use crate::cpu::{self, rows};
#[cfg(feature = "cuda")]
use crate::cuda::{BufferView, tensors};
use crate::group::ParamGroup;
use crate::op::{self, FusedOp, SavedOutput};

/// x + FFN(LN(x)), or y + FFN(y) with y = LN(x).
pub(super) struct Ffn {
    pub(super) width: usize,
    pub(super) hidden: usize,
    pub(super) norm: (Range<usize>, Range<usize>),
    pub(super) fc1: (Weight, Range<usize>),
    pub(super) fc2: (Weight, Range<usize>),
    pub(super) residual: Residual,
    pub(super) eps: f32,
    /// Factors on the branches of samples.
    scales: Option<Vec<f32>>,
    /// Whether a gradient may be asked for.
    train: bool,
    /// Whether products are of packed bf16.
    packed: bool,
    /// Whether products are of bf16, packed or not.
    halves: bool,
    /// The input of the GELU, from forward to backward; if `halves`, as bf16, two in the place of one.
    saved: Mutex<Option<Vec<f32>>>,
    /// The same on a device.
    #[cfg(feature = "cuda")]
    on_device: Mutex<Option<CudaSlice<f32>>>,
}

/// The weights of one call.
struct Parameters<'a> {
    norm: (&'a [f32], &'a [f32]),
    w1: &'a [f32],
    b1: &'a [f32],
    w2: &'a [f32],
    b2: &'a [f32],
}

impl Ffn {
    pub(super) fn new(x: &Tensor, group: &ParamGroup, call: FfnCall) -> Result<Self> {
        let (_, width) = cpu::matrix_dims(x.dims())?;
        if group.parts.len() != 6 {
            bail!("a feed-forward group has 6 parts, not {}", group.parts.len());
        }
        let fc1 = weight(group, 2, width)?;
        let hidden = fc1.out;
        let fc2 = weight(group, 4, hidden)?;
        if fc2.out != width {
            bail!("fc2 gives rows of {}, the residual has {width}", fc2.out);
        }
        call.scales.map_or(Ok(()), |scales| check_scales(scales, x.dims()[0]))?;
        Ok(Self {
            width,
            hidden,
            norm: (vector(group, 0, width)?, vector(group, 1, width)?),
            fc1: (fc1, vector(group, 3, hidden)?),
            fc2: (fc2, vector(group, 5, width)?),
            residual: call.residual,
            eps: call.eps as f32,
            scales: call.scales.map(<[f32]>::to_vec),
            train: x.track_op() || group.flat.track_op(),
            packed: is_packed(),
            halves: matmul_format() == MatmulFormat::Bf16,
            saved: Mutex::new(None),
            #[cfg(feature = "cuda")]
            on_device: Mutex::new(None),
        })
    }

    fn parameters<'a>(&self, flat: &'a [f32]) -> Parameters<'a> {
        let part = |range: &Range<usize>| &flat[range.clone()];
        Parameters {
            norm: (part(&self.norm.0), part(&self.norm.1)),
            w1: part(&self.fc1.0.at),
            b1: part(&self.fc1.1),
            w2: part(&self.fc2.0.at),
            b2: part(&self.fc2.1),
        }
    }

    /// The result for few rows, of which no gradient is asked for.
    fn few_rows(&self, x: &[f32], flat: &[f32]) -> Vec<f32> {
        let (d, f, p) = (self.width, self.hidden, self.parameters(flat));
        let count = x.len() / d;
        let mut normal = par::scratch(x.len());
        rows::layer_norm(x, p.norm.0, p.norm.1, self.eps, &mut normal);
        let fc1 = Layer { weight: p.w1, columns: 0..f };
        let hidden = FewRows::new(&normal, d).multiply(&[fc1], f, |columns, _, hidden| {
            rows::bias_gelu_in_place(hidden, &p.b1[columns]);
        });
        let residual = match self.residual {
            Residual::Raw => x,
            Residual::Normed => &normal,
        };
        let fc2 = Layer { weight: p.w2, columns: 0..d };
        FewRows::new(&hidden, f).multiply(&[fc2], d, |columns, row, y| {
            let residual = &residual[row * d..][columns.clone()];
            rows::add_row_in_place(y, &p.b2[columns]);
            match &self.scales {
                None => rows::add(residual, y),
                Some(scales) => add_scaled(residual, scales, (row, count / scales.len()), y.len(), y),
            }
        })
    }

    /// The result, and with `keep` the input of the GELU (else nothing).
    fn rows(&self, x: &[f32], flat: &[f32], keep: bool) -> (Vec<f32>, Vec<f32>) {
        if !keep && self.hidden > 0 && few::are(x.len() / self.width.max(1)) {
            return (self.few_rows(x, flat), Vec::new());
        }
        #[cfg(target_arch = "x86_64")]
        if self.packed {
            return self.rows_packed(x, flat, keep);
        }
        let (d, f) = (self.width, self.hidden);
        let p = self.parameters(flat);
        let (w1, w2) = (Panels::turned(p.w1, f, d), Panels::turned(p.w2, d, f));
        let count = x.len() / d.max(1);
        let size = dense::chunks(count, f).size;
        let saved = if keep { (self.held(count, size), self.held(size, size)) } else { (0, 0) };
        let scratch = || (par::scratch(size * d), par::scratch(size * f));
        par::build_two((x.len(), size * d), saved, scratch, |scratch, index, y, saved| {
            let rows = y.len() / d;
            let x = &x[index * size * d..][..y.len()];
            let (normal, hidden) = (&mut scratch.0[..y.len()], &mut scratch.1[..rows * f]);
            rows::layer_norm(x, p.norm.0, p.norm.1, self.eps, normal);
            let input = Mat::new(normal, rows, d);
            if keep && !self.halves {
                w1.multiply(input, saved, f, false);
                rows::bias_gelu(saved, p.b1, hidden);
            } else {
                w1.multiply(input, hidden, f, false);
                if keep {
                    bf16::store(hidden, p.b1, &mut bytemuck::cast_slice_mut(saved)[..rows * f]);
                }
                rows::bias_gelu_in_place(hidden, p.b1);
            }
            let fc2 = |y: &mut [f32]| w2.multiply(Mat::new(hidden, rows, f), y, d, true);
            self.join((x, normal), p.b2, y, (index * size, count), fc2);
        })
    }

    /// Floats that hold the input of the GELU of `rows` in chunks of `size`.
    fn held(&self, rows: usize, size: usize) -> usize {
        let of =
            |rows: usize| if self.halves { (rows * self.hidden).div_ceil(2) } else { rows * self.hidden };
        rows / size * of(size) + of(rows % size)
    }

    /// `y`, zeros before, becomes the residual (one of `inputs`: x and LN(x)) and, scaled, `bias` with what `fc2` adds to it;
    /// it begins with row `first` of `count`.
    fn join(
        &self,
        inputs: (&[f32], &[f32]),
        bias: &[f32],
        y: &mut [f32],
        (first, count): (usize, usize),
        fc2: impl FnOnce(&mut [f32]),
    ) {
        let residual = match self.residual {
            Residual::Raw => inputs.0,
            Residual::Normed => inputs.1,
        };
        match &self.scales {
            None => rows::add_row(residual, bias, y),
            Some(_) => rows::add_row_in_place(y, bias), // of zeros
        }
        fc2(y);
        if let Some(scales) = &self.scales {
            add_scaled(residual, scales, (first, count / scales.len()), self.width, y);
        }
    }

    /// Gradients of x and of the group; `hidden` is what [`Self::rows`] kept.
    fn gradients(&self, x: Elements, flat: &[f32], dy: &[f32], mut hidden: Vec<f32>) -> (Vec<f32>, Vec<f32>) {
        let (d, f) = (self.width, self.hidden);
        let count = x.count() / d.max(1);
        let chunks = dense::chunks(count, f);
        let blocks = chunks.blocks(f);
        let parts = 3 * d + f;
        let mut sums = vec![0.0; chunks.count() * parts];
        let mut dx = Vec::with_capacity(x.count());
        let (mut normal, mut active) = (par::scratch(blocks.size * d), par::scratch(blocks.size * f));
        let mut scaled = par::scratch(if self.scales.is_some() { blocks.size * d } else { 0 });
        let mut wide = par::scratch(if self.halves { blocks.size * f } else { 0 });
        let p = self.parameters(flat);
        let (w1, w2) = (Panels::new(p.w1, f, d), Panels::new(p.w2, d, f));
        let (mut dw1, mut dw2) = (WeightGradient::new(f, d), WeightGradient::new(d, f));
        for block in (0..blocks.count()).map(|index| blocks.range(index)) {
            let (first, rows) = (block.start, block.len());
            let (x, dy) = (x.slice(first * d..(first + rows) * d), &dy[first * d..][..rows * d]);
            let held = &mut hidden[self.held(first, chunks.size)..][..self.held(rows, chunks.size)];
            let (held, hidden) = if self.halves { (&*held, &mut wide[..rows * f]) } else { (&[][..], held) };
            let (normal, active) = (&mut normal[..rows * d], &mut active[..rows * f]);
            let here = Chunks::of(rows, chunks.size);
            let sums = &mut sums[first / chunks.size * parts..][..here.count() * parts];
            let whole = dy; // what flows to the residual
            let dy = self.scaled(dy, (first, count), &mut scaled);
            let step = Step { op: self, norm: p.norm, w1: &w1, w2: &w2, x, dy, whole, held, chunks: here };
            step.run(&mut dx, hidden, normal, active, sums);
            let dy = Mat::new(dy, rows, d);
            rayon::join(
                || dw1.add(Mat::new(hidden, rows, f), Mat::new(normal, rows, d)),
                || dw2.add(dy, Mat::new(active, rows, f)),
            );
        }
        drop((normal, active, hidden, wide));
        (dx, self.assemble(flat.len(), &par::sum_parts(&sums, parts), &dw1, &dw2))
    }

    /// `dy` times the scales of its samples, in `to`, or as it is where there are none; it begins with row `first` of `count`.
    fn scaled<'a>(&self, dy: &'a [f32], (first, count): (usize, usize), to: &'a mut [f32]) -> &'a [f32] {
        let Some(scales) = &self.scales else { return dy };
        let to = &mut to[..dy.len()];
        scale_rows(dy, scales, (first, count / scales.len()), self.width, to);
        to
    }

    /// The gradient of the group: `sums` are those of the norm and of the biases of fc2 and fc1.
    fn assemble(&self, len: usize, sums: &[f32], dw1: &WeightGradient, dw2: &WeightGradient) -> Vec<f32> {
        let mut dflat = par::zeros(len);
        dw1.finish(&mut dflat[self.fc1.0.at.clone()]);
        dw2.finish(&mut dflat[self.fc2.0.at.clone()]);
        let mut rest = sums;
        for range in [&self.norm.0, &self.norm.1, &self.fc2.1, &self.fc1.1] {
            let (sum, others) = rest.split_at(range.len());
            dflat[range.clone()].copy_from_slice(sum);
            rest = others;
        }
        dflat
    }

    /// Adds to `dx`, which is zero before, what comes back through the LayerNorm from `dnormal` and beside it from `whole`,
    /// and to `sums` the gradients of the norm's weight and bias.
    fn through_norm(
        &self,
        (x, whole): (&[f32], &[f32]),
        weight: &[f32],
        dnormal: &mut [f32],
        dx: &mut [f32],
        sums: &mut [f32],
    ) {
        match self.residual {
            Residual::Raw => dx.copy_from_slice(whole),
            Residual::Normed => rows::add(whole, dnormal),
        }
        let (dweight, dbias) = sums.split_at_mut(self.width);
        rows::layer_norm_backward(x, weight, self.eps, dnormal, rows::LayerNormGrads { dx, dweight, dbias });
    }
}

/// The row-wise part of backward for one block of rows.
struct Step<'a> {
    op: &'a Ffn,
    norm: (&'a [f32], &'a [f32]),
    w1: &'a Panels,
    w2: &'a Panels,
    x: Elements<'a>,
    /// Gradient of the branch.
    dy: &'a [f32],
    /// Gradient of the result.
    whole: &'a [f32],
    /// The input of the GELU as bf16, or nothing where it is what becomes its gradient.
    held: &'a [f32],
    chunks: Chunks,
}

impl Step<'_> {
    /// Appends to `dx`, writes LN(x) to `normal`, the output of the GELU to `active` and sums over the rows of each
    /// chunk to `sums` (weight and bias of the norm, bias of fc2, bias of fc1); `hidden`, the input of the GELU, becomes
    /// its gradient.
    fn run(
        &self,
        dx: &mut Vec<f32>,
        hidden: &mut [f32],
        normal: &mut [f32],
        active: &mut [f32],
        sums: &mut [f32],
    ) {
        let (d, f, size) = (self.op.width, self.op.hidden, self.chunks.size);
        let outputs = [(hidden, size * f), (normal, size * d), (active, size * f), (sums, 3 * d + f)];
        par::extend_beside(
            dx,
            (self.x.count(), size * d),
            outputs,
            || (par::scratch(size * f), par::scratch(size * d), par::scratch(self.x.room(size * d))),
            |(dactive, dnormal, room), index, dx, [hidden, normal, active, sums]| {
                let rows = self.chunks.range(index);
                let here = rows.start * d..rows.end * d;
                let (x, dy) = (self.x.read(here.clone(), room), &self.dy[here.clone()]);
                if !self.held.is_empty() {
                    let held: &[u16] = bytemuck::cast_slice(&self.held[index * self.op.held(size, size)..]);
                    bf16::load(&held[..hidden.len()], hidden);
                }
                let (dactive, dnormal) = (&mut dactive[..hidden.len()], &mut dnormal[..x.len()]);
                let rows = rows.len();
                rows::layer_norm(x, self.norm.0, self.norm.1, self.op.eps, normal);
                self.w2.multiply(Mat::new(dy, rows, d), dactive, f, false);
                rows::gelu_and_gradient(hidden, dactive, active);
                self.w1.multiply(Mat::new(hidden, rows, f), dnormal, d, false);
                let (norm_sums, rest) = sums.split_at_mut(2 * d);
                self.op.through_norm((x, &self.whole[here]), self.norm.0, dnormal, dx, norm_sums);
                let (db2, db1) = rest.split_at_mut(d);
                rows::add_column_sums(dy, db2);
                rows::add_column_sums(hidden, db1);
            },
        );
    }
}

impl FusedOp for Ffn {
    fn name(&self) -> &'static str {
        "ffn"
    }

    fn forward(&self, operands: &[(&CpuStorage, &Layout)]) -> Result<(Vec<f32>, Shape)> {
        let [x, flat] = cpu::slices(operands)?;
        let (y, hidden) = self.rows(x, flat, self.train);
        if self.train {
            *self.saved.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = Some(hidden);
        }
        Ok((y, operands[0].1.shape().clone()))
    }

    #[cfg(feature = "cuda")]
    fn forward_cuda(&self, operands: &[(&CudaStorage, &Layout)]) -> Result<(CudaStorage, Shape)> {
        let x = operands[0].1;
        let (count, _) = cpu::matrix_dims(x.dims())?;
        tensors::forward(operands, x.shape(), |device, [x, flat]| {
            let [y, hidden] = self.forward_on(device, x, flat, count)?;
            if self.train {
                *self.on_device.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = Some(hidden);
            }
            Ok(y)
        })
    }

    fn backward(&self, operands: &[&Tensor], _: SavedOutput, grad: &Tensor) -> Result<Vec<Option<Tensor>>> {
        let [x, flat] = op::operands(operands)?;
        #[cfg(feature = "cuda")]
        if x.device().is_cuda() {
            let saved = self.on_device.lock().unwrap_or_else(std::sync::PoisonError::into_inner).take();
            let ((count, _), flat_len) = (cpu::matrix_dims(x.dims())?, flat.elem_count());
            return tensors::gradients([x, flat, grad], |device, [x, flat, dy]| {
                let hidden = match saved {
                    Some(hidden) => hidden,
                    None => self.forward_on(device, x, flat, count).map(|[_, hidden]| hidden)?,
                };
                self.backward_on(device, [x, flat, dy], BufferView::all(&hidden), [count, flat_len])
            })
            .map(Vec::from);
        }
        // Taken, so that its memory can hold the gradient; a second backward pass computes it again.
        let saved = self.saved.lock().unwrap_or_else(std::sync::PoisonError::into_inner).take();
        let hidden = match saved {
            Some(hidden) => hidden,
            None => cpu::with_slices([x, flat], |[x, flat]| Ok(self.rows(x, flat, true).1))?,
        };
        let (dx, dflat) = compact::with_elements([x], [flat, grad], |[x], [flat, dy]| {
            Ok(match self.packed {
                #[cfg(target_arch = "x86_64")]
                true => self.gradients_packed(x, flat, dy, hidden),
                _ => self.gradients(x, flat, dy, hidden),
            })
        })?;
        Ok(vec![cpu::gradient(x, dx)?, cpu::gradient(flat, dflat)?])
    }
}
