//! LayerNorm and projections as one operation. Nothing is saved: backward normalises again.

use std::ops::Range;

#[cfg(feature = "cuda")]
use candle_core::cuda_backend::CudaStorage;
use candle_core::{CpuStorage, Layout, Result, Shape, Tensor, bail};

use super::{Projection, Weight, vector, weight};
use crate::kernel::cpu::dense::{Panels, WeightGradient};
use crate::kernel::cpu::gemm::Mat;
use crate::kernel::cpu::par::{self, Chunks};
use crate::kernel::cpu::{self, rows};
#[cfg(feature = "cuda")]
use crate::kernel::cuda::tensors;
use crate::kernel::group::Group;
use crate::kernel::norm::EPS;
use crate::kernel::op::{self, Op};

/// One of the linear layers and the columns it writes.
pub(super) struct Linear {
    pub weight: Weight,
    pub bias: Option<Range<usize>>,
    pub columns: Range<usize>,
}

/// Linear layers of the same, perhaps normalised, rows.
pub(super) struct Project {
    pub(super) inp: usize,
    /// Sum of the outputs.
    pub(super) width: usize,
    /// Weight and bias of the LayerNorm, if it is applied.
    pub(super) norm: Option<(Range<usize>, Range<usize>)>,
    pub(super) linears: Vec<Linear>,
}

impl Project {
    pub(super) fn new(x: &Tensor, group: &Group, spec: Projection, normalise: bool) -> Result<Self> {
        spec.check(group, normalise)?;
        let (_, inp) = cpu::matrix_dims(x.dims())?;
        let norm = if normalise { Some((vector(group, 0, inp)?, vector(group, 1, inp)?)) } else { None };
        let mut linears = Vec::with_capacity(spec.outputs);
        let mut width = 0;
        for index in 0..spec.outputs {
            let at = spec.first() + spec.stride() * index;
            let weight = weight(group, at, inp)?;
            let bias = spec.bias.then(|| vector(group, at + 1, weight.out)).transpose()?;
            let columns = width..width + weight.out;
            width = columns.end;
            linears.push(Linear { weight, bias, columns });
        }
        Ok(Self { inp, width, norm, linears })
    }

    fn out_shape(&self, x: &Layout) -> Result<Shape> {
        let mut dims = x.dims().to_vec();
        match dims.last_mut() {
            Some(last) => *last = self.width,
            None => bail!("a scalar cannot be projected"),
        }
        Ok(dims.into())
    }

    /// All weights, packed for the products of forward or (`back`) backward.
    fn panels(&self, flat: &[f32], back: bool) -> Vec<Panels> {
        let pack = if back { Panels::new } else { Panels::turned };
        self.linears.iter().map(|x| pack(&flat[x.weight.at.clone()], x.weight.out, self.inp)).collect()
    }

    /// The biases side by side; nothing if there are none.
    fn biases(&self, flat: &[f32]) -> Vec<f32> {
        self.linears
            .iter()
            .filter_map(|linear| linear.bias.clone())
            .flat_map(|bias| &flat[bias])
            .copied()
            .collect()
    }

    fn normalise(&self, x: &[f32], flat: &[f32], normal: &mut [f32]) {
        if let Some((weight, bias)) = &self.norm {
            rows::layer_norm(x, &flat[weight.clone()], &flat[bias.clone()], EPS as f32, normal);
        }
    }

    fn project(&self, x: &[f32], flat: &[f32]) -> Vec<f32> {
        let (inp, width) = (self.inp, self.width);
        let count = x.len() / inp.max(1);
        let (panels, biases) = (self.panels(flat, false), self.biases(flat));
        let size = Chunks::dense(count, inp + width).size;
        let scratch = || par::scratch(if self.norm.is_some() { size * inp } else { 0 });
        par::build_with(count * width, size * width, scratch, |normal, index, y| {
            let rows = y.len() / width;
            let mut x = &x[index * size * inp..][..rows * inp];
            if self.norm.is_some() {
                self.normalise(x, flat, normal);
                x = normal;
            }
            for (panels, linear) in panels.iter().zip(&self.linears) {
                panels.multiply(Mat::new(x, rows, inp), &mut y[linear.columns.start..], width, false);
            }
            rows::add_row_in_place(y, &biases);
        })
    }

    /// Gradients of x and of the group.
    fn gradients(&self, x: &[f32], flat: &[f32], dy: &[f32]) -> (Vec<f32>, Vec<f32>) {
        let (inp, width) = (self.inp, self.width);
        let count = x.len() / inp.max(1);
        let chunks = Chunks::dense(count, inp + width);
        let panels = self.panels(flat, true);
        // Sums over rows: weight and bias of the norm, then all biases.
        let parts = 2 * inp + width;
        let mut sums = vec![0.0; chunks.count() * parts];
        let mut dx = Vec::with_capacity(x.len());
        let mut gradient = WeightGradient::new(width, inp);
        let blocks = chunks.blocks(inp);
        let mut normal = par::scratch(if self.norm.is_some() { blocks.size * inp } else { 0 });
        for block in (0..blocks.count()).map(|index| blocks.range(index)) {
            let (x, dy) =
                (&x[block.start * inp..block.end * inp], &dy[block.start * width..block.end * width]);
            let rows = block.len();
            let normal = &mut normal[..if self.norm.is_some() { rows * inp } else { 0 }];
            let first = block.start / chunks.size;
            let sums = &mut sums[first * parts..][..rows.div_ceil(chunks.size) * parts];
            let step = Step { op: self, panels: &panels, flat, x, dy, size: chunks.size };
            step.run(&mut dx, normal, sums);
            let inputs = if self.norm.is_some() { &*normal } else { x };
            gradient.add(Mat::new(dy, rows, width), Mat::new(inputs, rows, inp));
        }
        (dx, self.assemble(flat.len(), &gradient, &par::sum_parts(&sums, parts)))
    }

    fn assemble(&self, len: usize, gradient: &WeightGradient, sums: &[f32]) -> Vec<f32> {
        let mut dflat = par::zeros(len);
        let mut weights = vec![0.0; self.width * self.inp];
        gradient.finish(&mut weights);
        if let Some((weight, bias)) = &self.norm {
            dflat[weight.clone()].copy_from_slice(&sums[..self.inp]);
            dflat[bias.clone()].copy_from_slice(&sums[self.inp..2 * self.inp]);
        }
        for Linear { weight, bias, columns } in &self.linears {
            let rows = columns.start * self.inp..columns.end * self.inp;
            dflat[weight.at.clone()].copy_from_slice(&weights[rows]);
            if let Some(bias) = bias {
                let sums = &sums[2 * self.inp..][columns.clone()];
                dflat[bias.clone()].copy_from_slice(sums);
            }
        }
        dflat
    }
}

/// The row-wise part of backward for one block of rows.
struct Step<'a> {
    op: &'a Project,
    panels: &'a [Panels],
    flat: &'a [f32],
    x: &'a [f32],
    dy: &'a [f32],
    /// Rows per chunk.
    size: usize,
}

impl Step<'_> {
    /// Appends to `dx`, writes the normalised rows to `normal` and sums over the rows of each chunk to `sums`.
    fn run(&self, dx: &mut Vec<f32>, normal: &mut [f32], sums: &mut [f32]) {
        let (inp, width) = (self.op.inp, self.op.width);
        let chunk = self.size * inp;
        par::extend_beside(
            dx,
            (self.x.len(), chunk),
            [(normal, chunk), (sums, 2 * inp + width)],
            || par::scratch(chunk),
            |dnormal, index, dx, [normal, sums]| {
                let x = &self.x[index * chunk..][..dx.len()];
                let rows = x.len() / inp;
                let dy = &self.dy[index * self.size * width..][..rows * width];
                let (norm_sums, bias_sums) = sums.split_at_mut(2 * inp);
                rows::add_column_sums(dy, bias_sums);
                let Some((weight, _)) = &self.op.norm else {
                    self.input_gradient(dy, rows, dx);
                    return;
                };
                self.op.normalise(x, self.flat, normal);
                self.input_gradient(dy, rows, dnormal);
                let (dweight, dbias) = norm_sums.split_at_mut(inp);
                let (weight, dnormal) = (&self.flat[weight.clone()], &dnormal[..x.len()]);
                rows::layer_norm_backward(x, weight, EPS as f32, dnormal, dx, dweight, dbias);
            },
        );
    }

    /// dx = sum over the linear layers of dy W.
    fn input_gradient(&self, dy: &[f32], rows: usize, dx: &mut [f32]) {
        let dy = Mat::new(dy, rows, self.op.width);
        for (index, (panels, linear)) in self.panels.iter().zip(&self.op.linears).enumerate() {
            panels.multiply(dy.columns(linear.columns.clone()), dx, self.op.inp, index > 0);
        }
    }
}

impl Op for Project {
    fn name(&self) -> &'static str {
        "project"
    }

    fn forward(&self, operands: &[(&CpuStorage, &Layout)]) -> Result<(Vec<f32>, Shape)> {
        let [x, flat] = cpu::slices(operands)?;
        Ok((self.project(x, flat), self.out_shape(operands[0].1)?))
    }

    #[cfg(feature = "cuda")]
    fn forward_cuda(&self, operands: &[(&CudaStorage, &Layout)]) -> Result<(CudaStorage, Shape)> {
        let (shape, (count, _)) = (self.out_shape(operands[0].1)?, cpu::matrix_dims(operands[0].1.dims())?);
        tensors::forward(operands, shape, |device, [x, flat]| self.forward_on(device, x, flat, count))
    }

    fn backward(&self, operands: &[&Tensor], _: &Tensor, grad: &Tensor) -> Result<Vec<Option<Tensor>>> {
        let [x, flat] = op::operands(operands)?;
        #[cfg(feature = "cuda")]
        if x.device().is_cuda() {
            let lens = [cpu::matrix_dims(x.dims())?.0, flat.elem_count()];
            let operands = [x, flat, grad];
            return tensors::gradients(operands, |device, operands| self.backward_on(device, operands, lens))
                .map(Vec::from);
        }
        let (dx, dflat) = cpu::with_slices([x, flat, grad], |[x, flat, dy]| Ok(self.gradients(x, flat, dy)))?;
        Ok(vec![cpu::gradient(x, dx)?, cpu::gradient(flat, dflat)?])
    }
}
