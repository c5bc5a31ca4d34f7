//! LayerNorm and projections as one operation. Nothing is saved: backward normalises again.

use std::ops::Range;

#[cfg(feature = "cuda")]
use candle_core::cuda_backend::CudaStorage;
use candle_core::{CpuStorage, Layout, Result, Shape, Tensor, bail};

use super::{Projection, Weight, vector, weight};
use crate::cpu::compact::{self, Elements};
use crate::cpu::dense::{self, Panels, WeightGradient};
use crate::cpu::few::{self, FewRows, Layer};
use crate::cpu::gemm::Mat;
use crate::cpu::layers::Layers;
use crate::cpu::par;
use crate::cpu::{self, rows};
#[cfg(feature = "cuda")]
use crate::cuda::tensors;
use crate::group::ParamGroup;
use crate::norm::EPS;
use crate::op::{self, FusedOp, SavedOutput};

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
    pub(super) fn new(x: &Tensor, group: &ParamGroup, spec: Projection, normalise: bool) -> Result<Self> {
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

    /// The result for few rows.
    fn project_few(&self, x: &[f32], flat: &[f32]) -> Vec<f32> {
        let mut normal = par::scratch(if self.norm.is_some() { x.len() } else { 0 });
        self.normalise(x, flat, &mut normal);
        let x = if self.norm.is_some() { &normal } else { x };
        let layer = |x: &Linear| Layer { weight: &flat[x.weight.at.clone()], columns: x.columns.clone() };
        let (layers, biases): (Vec<_>, _) = (self.linears.iter().map(layer).collect(), self.biases(flat));
        FewRows::new(x, self.inp).multiply(&layers, self.width, |columns, _, y| {
            rows::add_row_in_place(y, biases.get(columns).unwrap_or_default());
        })
    }

    fn project(&self, x: &[f32], flat: &[f32]) -> Vec<f32> {
        let (inp, width) = (self.inp, self.width);
        let count = x.len() / inp.max(1);
        if few::are(count) {
            return self.project_few(x, flat);
        }
        let turned = |x: &Linear| Panels::turned(&flat[x.weight.at.clone()], x.weight.out, inp);
        let (panels, biases): (Vec<_>, _) = (self.linears.iter().map(turned).collect(), self.biases(flat));
        let size = dense::chunks(count, inp + width).size;
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
    fn gradients(&self, x: Elements, flat: &[f32], dy: &[f32]) -> (Vec<f32>, Vec<f32>) {
        let part = |range: &Range<usize>| &flat[range.clone()];
        let layers = Layers {
            inp: self.inp,
            norm: self.norm.as_ref().map(|(weight, bias)| (part(weight), part(bias), EPS as f32)),
            weights: self.linears.iter().map(|linear| part(&linear.weight.at)).collect(),
            needs_x: true,
            needs_bias: self.linears.iter().any(|linear| linear.bias.is_some()),
        };
        let mut gradient = WeightGradient::new(self.width, self.inp);
        let (dx, sums) = layers.gradients(x, dy, &mut gradient);
        (dx, self.assemble(flat.len(), &gradient, &sums))
    }

    fn assemble(&self, len: usize, gradient: &WeightGradient, sums: &[f32]) -> Vec<f32> {
        let mut dflat = par::zeros(len);
        let mut weights = vec![0.0; self.width * self.inp];
        gradient.finish(&mut weights);
        let mut biases = sums;
        if let Some((weight, bias)) = &self.norm {
            dflat[weight.clone()].copy_from_slice(&sums[..self.inp]);
            dflat[bias.clone()].copy_from_slice(&sums[self.inp..2 * self.inp]);
            biases = &sums[2 * self.inp..];
        }
        for Linear { weight, bias, columns } in &self.linears {
            let rows = columns.start * self.inp..columns.end * self.inp;
            dflat[weight.at.clone()].copy_from_slice(&weights[rows]);
            if let Some(bias) = bias {
                dflat[bias.clone()].copy_from_slice(&biases[columns.clone()]);
            }
        }
        dflat
    }
}

impl FusedOp for Project {
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

    fn backward(&self, operands: &[&Tensor], _: SavedOutput, grad: &Tensor) -> Result<Vec<Option<Tensor>>> {
        let [x, flat] = op::operands(operands)?;
        #[cfg(feature = "cuda")]
        if x.device().is_cuda() {
            let lens = [cpu::matrix_dims(x.dims())?.0, flat.elem_count()];
            let operands = [x, flat, grad];
            return tensors::gradients(operands, |device, operands| self.backward_on(device, operands, lens))
                .map(Vec::from);
        }
        let (dx, dflat) =
            compact::with_elements([x], [flat, grad], |[x], [flat, dy]| Ok(self.gradients(x, flat, dy)))?;
        Ok(vec![cpu::gradient(x, dx)?, cpu::gradient(flat, dflat)?])
    }
}
