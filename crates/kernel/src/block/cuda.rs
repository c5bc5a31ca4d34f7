//! The blocks on a device: products and row-wise kernels, forward and backward.

use std::ops::Range;

use candle_core::Result;

use super::ffn::Ffn;
use super::output::Output;
use super::project::Project;
use super::{Residual, Weight};
use crate::cuda::{BufferView, KernelDevice, MatmulTarget, Matrix, rows};
use crate::norm::EPS;

/// A part of a flat parameter.
fn part<'a, M: KernelDevice>(flat: BufferView<'a, M>, at: &Range<usize>) -> BufferView<'a, M> {
    BufferView { start: flat.start + at.start, ..flat }
}

/// A weight [out, inp] in a flat parameter.
fn weight<'a, M: KernelDevice>(flat: BufferView<'a, M>, weight: &Weight) -> Matrix<'a, M> {
    Matrix::new(part(flat, &weight.at), weight.out, weight.at.len() / weight.out.max(1))
}

/// a b as rows of their own.
fn product<M: KernelDevice>(machine: &M, a: Matrix<M>, b: Matrix<M>) -> Result<M::Floats> {
    let ((rows, depth), (_, width)) = (a.dims(), b.dims());
    let len = rows * width;
    let mut floats = if depth == 0 { machine.zeros(len)? } else { machine.fresh(len)? };
    machine.multiply(a, b, MatmulTarget { floats: &mut floats, start: 0, stride: width, add: false })?;
    Ok(floats)
}

/// The gradient dy^T x of a weight, to its place in that of the flat parameter.
fn weight_gradient<M: KernelDevice>(
    machine: &M,
    dy: Matrix<M>,
    x: Matrix<M>,
    weight: &Weight,
    dflat: &mut M::Floats,
) -> Result<()> {
    let stride = x.cols;
    machine.multiply(dy.t(), x, MatmulTarget { floats: dflat, start: weight.at.start, stride, add: false })
}

/// Gradients of the input and of the group.
pub type Gradients<M> = [<M as KernelDevice>::Floats; 2];

impl Ffn {
    /// The result and the input of the GELU without its bias, for `count` rows.
    pub fn forward_on<M: KernelDevice>(
        &self,
        machine: &M,
        x: BufferView<M>,
        flat: BufferView<M>,
        count: usize,
    ) -> Result<[M::Floats; 2]> {
        let (d, f) = (self.width, self.hidden);
        let norm = [part(flat, &self.norm.0), part(flat, &self.norm.1)];
        let normal = rows::layer_norm(machine, x, norm, [count, d], self.eps)?;
        let input = Matrix::new(BufferView::all(&normal), count, d);
        let hidden = product(machine, input, weight(flat, &self.fc1.0).t())?;
        let active =
            rows::bias_gelu(machine, [BufferView::all(&hidden), part(flat, &self.fc1.1)], [count, f])?;
        let mut y =
            product(machine, Matrix::new(BufferView::all(&active), count, f), weight(flat, &self.fc2.0).t())?;
        let residual = match self.residual {
            Residual::Raw => x,
            Residual::Normed => BufferView::all(&normal),
        };
        rows::add(machine, residual, count * d, &mut y, 0)?;
        let to = MatmulTarget { floats: &mut y, start: 0, stride: d, add: true };
        rows::add_bias(machine, part(flat, &self.fc2.1), [count, d], to)?;
        Ok([y, hidden])
    }

    /// Gradients for `count` rows and a group of `len` elements; `hidden` is what [`Self::forward_on`] gave.
    pub fn backward_on<M: KernelDevice>(
        &self,
        machine: &M,
        [x, flat, dy]: [BufferView<M>; 3],
        hidden: BufferView<M>,
        [count, len]: [usize; 2],
    ) -> Result<Gradients<M>> {
        let (d, f) = (self.width, self.hidden);
        let norm = [part(flat, &self.norm.0), part(flat, &self.norm.1)];
        let normal = rows::layer_norm(machine, x, norm, [count, d], self.eps)?;
        let slope = || Matrix::new(dy, count, d);
        let dactive = product(machine, slope(), weight(flat, &self.fc2.0))?;
        let operands = [hidden, part(flat, &self.fc1.1), BufferView::all(&dactive)];
        let [active, dhidden] = rows::bias_gelu_backward(machine, operands, [count, f])?;
        let mut dflat = machine.zeros(len)?;
        let inner = || Matrix::new(BufferView::all(&dhidden), count, f);
        weight_gradient(
            machine,
            slope(),
            Matrix::new(BufferView::all(&active), count, f),
            &self.fc2.0,
            &mut dflat,
        )?;
        weight_gradient(
            machine,
            inner(),
            Matrix::new(BufferView::all(&normal), count, d),
            &self.fc1.0,
            &mut dflat,
        )?;
        let db2 = rows::column_sums(machine, dy, [count, d])?;
        rows::add(machine, BufferView::all(&db2), d, &mut dflat, self.fc2.1.start)?;
        let db1 = rows::column_sums(machine, BufferView::all(&dhidden), [count, f])?;
        rows::add(machine, BufferView::all(&db1), f, &mut dflat, self.fc1.1.start)?;
        let mut dnormal = product(machine, inner(), weight(flat, &self.fc1.0))?;
        if self.residual == Residual::Normed {
            rows::add(machine, dy, count * d, &mut dnormal, 0)?;
        }
        let mut dx = norm_backward(
            machine,
            [x, norm[0], BufferView::all(&dnormal)],
            ([count, d], self.eps),
            &self.norm,
            &mut dflat,
        )?;
        if self.residual == Residual::Raw {
            rows::add(machine, dy, count * d, &mut dx, 0)?;
        }
        Ok([dx, dflat])
    }
}

/// The gradient of LayerNorm's x; those of its parameters go to their places.
fn norm_backward<M: KernelDevice>(
    machine: &M,
    operands: [BufferView<M>; 3],
    ([count, width], eps): ([usize; 2], f32),
    norm: &(Range<usize>, Range<usize>),
    dflat: &mut M::Floats,
) -> Result<M::Floats> {
    let [dx, sums] = rows::layer_norm_backward(machine, operands, [count, width], eps)?;
    rows::add(machine, BufferView::all(&sums), width, dflat, norm.0.start)?;
    rows::add(machine, BufferView { floats: &sums, start: width }, width, dflat, norm.1.start)?;
    Ok(dx)
}

impl Project {
    /// The rows that are projected, if they are normalised first.
    fn normal_on<M: KernelDevice>(
        &self,
        machine: &M,
        x: BufferView<M>,
        flat: BufferView<M>,
        count: usize,
    ) -> Result<Option<M::Floats>> {
        let Some((weight, bias)) = &self.norm else { return Ok(None) };
        let norm = [part(flat, weight), part(flat, bias)];
        rows::layer_norm(machine, x, norm, [count, self.inp], EPS as f32).map(Some)
    }

    /// The outputs side by side, for `count` rows.
    pub fn forward_on<M: KernelDevice>(
        &self,
        machine: &M,
        x: BufferView<M>,
        flat: BufferView<M>,
        count: usize,
    ) -> Result<M::Floats> {
        let normal = self.normal_on(machine, x, flat, count)?;
        let x = normal.as_ref().map_or(x, BufferView::all);
        let mut y = machine.fresh(count * self.width)?;
        for linear in &self.linears {
            let (start, stride) = (linear.columns.start, self.width);
            let to = MatmulTarget { floats: &mut y, start, stride, add: false };
            machine.multiply(Matrix::new(x, count, self.inp), weight(flat, &linear.weight).t(), to)?;
            if let Some(bias) = &linear.bias {
                let to = MatmulTarget { floats: &mut y, start, stride, add: true };
                rows::add_bias(machine, part(flat, bias), [count, bias.len()], to)?;
            }
        }
        Ok(y)
    }

    /// Gradients for `count` rows and a group of `len` elements.
    pub fn backward_on<M: KernelDevice>(
        &self,
        machine: &M,
        [x, flat, dy]: [BufferView<M>; 3],
        [count, len]: [usize; 2],
    ) -> Result<Gradients<M>> {
        let (inp, width) = (self.inp, self.width);
        let normal = self.normal_on(machine, x, flat, count)?;
        let input = normal.as_ref().map_or(x, BufferView::all);
        let (mut dx, mut dflat) = (machine.fresh(count * inp)?, machine.zeros(len)?);
        let sums = rows::column_sums(machine, dy, [count, width])?;
        for (index, linear) in self.linears.iter().enumerate() {
            let slope = || Matrix::new(dy, count, width).columns(linear.columns.clone());
            let to = MatmulTarget { floats: &mut dx, start: 0, stride: inp, add: index > 0 };
            machine.multiply(slope(), weight(flat, &linear.weight), to)?;
            weight_gradient(machine, slope(), Matrix::new(input, count, inp), &linear.weight, &mut dflat)?;
            if let Some(bias) = &linear.bias {
                let sums = BufferView { floats: &sums, start: linear.columns.start };
                rows::add(machine, sums, bias.len(), &mut dflat, bias.start)?;
            }
        }
        if let Some(norm) = &self.norm {
            let operands = [x, part(flat, &norm.0), BufferView::all(&dx)];
            dx = norm_backward(machine, operands, ([count, inp], EPS as f32), norm, &mut dflat)?;
        }
        Ok([dx, dflat])
    }
}

impl Output {
    /// residual + x W^T + b, for `count` rows.
    pub fn forward_on<M: KernelDevice>(
        &self,
        machine: &M,
        [x, residual, flat]: [BufferView<M>; 3],
        count: usize,
    ) -> Result<M::Floats> {
        let out = self.weight.out;
        let mut y = product(machine, Matrix::new(x, count, self.inp), weight(flat, &self.weight).t())?;
        rows::add(machine, residual, count * out, &mut y, 0)?;
        if let Some(bias) = &self.bias {
            let to = MatmulTarget { floats: &mut y, start: 0, stride: out, add: true };
            rows::add_bias(machine, part(flat, bias), [count, out], to)?;
        }
        Ok(y)
    }

    /// Gradients of x and of the group of `len` elements; that of the residual is `dy`.
    pub fn backward_on<M: KernelDevice>(
        &self,
        machine: &M,
        [x, flat, dy]: [BufferView<M>; 3],
        [count, len]: [usize; 2],
    ) -> Result<Gradients<M>> {
        let slope = || Matrix::new(dy, count, self.weight.out);
        let dx = product(machine, slope(), weight(flat, &self.weight))?;
        let mut dflat = machine.zeros(len)?;
        weight_gradient(machine, slope(), Matrix::new(x, count, self.inp), &self.weight, &mut dflat)?;
        if let Some(bias) = &self.bias {
            let sums = rows::column_sums(machine, dy, [count, self.weight.out])?;
            rows::add(machine, BufferView::all(&sums), bias.len(), &mut dflat, bias.start)?;
        }
        Ok([dx, dflat])
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Tensor;

    use super::*;
    use crate::KernelMode;
    use crate::block::tests::{flat, group, shapes};
    use crate::block::{FfnCall, Projection, ffn, output, project};
    use crate::cuda::emulated::Emulated;
    use crate::testing::{evaluate, normal, randn};

    fn floats(tensor: &Tensor) -> Vec<f32> {
        tensor.flatten_all().unwrap().to_vec1().unwrap()
    }

    /// Small shapes only: every thread of a block is a thread of the system.
    fn small() -> impl Iterator<Item = (Vec<usize>, usize)> {
        shapes().into_iter().filter(|(dims, _)| dims.iter().product::<usize>() <= 5000)
    }

    /// Asserts that these are value and gradients of the fused CPU kernel.
    fn assert_same(label: &str, got: &[&Vec<f32>], want: &[Vec<f32>]) {
        assert_eq!(got.len(), want.len(), "{label}");
        for (number, (got, want)) in got.iter().zip(want).enumerate() {
            // LayerNorm of a single column multiplies rounding errors by 1 / sqrt(eps)
            let largest = want.iter().fold(0.2f32, |largest, x| largest.max(x.abs()));
            let gap = got.iter().zip(want).map(|(got, want)| (got - want).abs()).fold(0.0, f32::max);
            assert!(
                got.len() == want.len() && gap <= 2e-5 * largest && got.iter().all(|x| x.is_finite()),
                "{label}: result {number} is off by {gap} of {largest}"
            );
        }
    }

    #[test]
    fn the_feed_forward_half() {
        let machine = Emulated::default();
        for (dims, hidden) in small() {
            let (d, count) = (dims[2], dims[0] * dims[1]);
            let shapes = [vec![d], vec![d], vec![hidden, d], vec![hidden], vec![d, hidden], vec![d]];
            for residual in [Residual::Raw, Residual::Normed] {
                let inputs = [randn("x", &dims), flat(&shapes)];
                let run = |x: &[Tensor]| ffn(&x[0], &group(&x[1], &shapes), FfnCall::new(residual, EPS));
                let want = evaluate(KernelMode::Fused, &inputs, run).unwrap();
                let op =
                    Ffn::new(&inputs[0], &group(&inputs[1], &shapes), FfnCall::new(residual, EPS)).unwrap();
                let [x, flat] = inputs.each_ref().map(floats);
                let dy = floats(&normal("cotangent", &dims).unwrap());
                let (x, flat) = (BufferView::all(&x), BufferView::all(&flat));
                let [y, saved] = op.forward_on(&machine, x, flat, count).unwrap();
                let lens = [count, flat.floats.len()];
                let operands = [x, flat, BufferView::all(&dy)];
                let [dx, dflat] = op.backward_on(&machine, operands, BufferView::all(&saved), lens).unwrap();
                assert_same(&format!("{dims:?} {hidden} {residual:?}"), &[&y, &dx, &dflat], &want);
            }
        }
    }

    #[test]
    fn projections_side_by_side() {
        let machine = Emulated::default();
        for (dims, out) in small() {
            let (d, count) = (dims[2], dims[0] * dims[1]);
            for (norm, bias, normalise) in
                [(true, true, true), (true, false, true), (false, true, false), (true, true, false)]
            {
                let spec = Projection { norm, outputs: 3, bias };
                let mut shapes = if norm { vec![vec![d], vec![d]] } else { vec![] };
                for out in [out, 1, out + 2] {
                    shapes.push(vec![out, d]);
                    shapes.extend(bias.then(|| vec![out]));
                }
                let inputs = [randn("x", &dims), flat(&shapes)];
                let run = |x: &[Tensor]| project(&x[0], &group(&x[1], &shapes), spec, normalise);
                let want = evaluate(KernelMode::Fused, &inputs, run).unwrap();
                let op = Project::new(&inputs[0], &group(&inputs[1], &shapes), spec, normalise).unwrap();
                let [x, flat] = inputs.each_ref().map(floats);
                let dy = floats(&normal("cotangent", &[dims[0], dims[1], 2 * out + 3]).unwrap());
                let (x, flat) = (BufferView::all(&x), BufferView::all(&flat));
                let y = op.forward_on(&machine, x, flat, count).unwrap();
                let lens = [count, flat.floats.len()];
                let [dx, dflat] = op.backward_on(&machine, [x, flat, BufferView::all(&dy)], lens).unwrap();
                assert_same(&format!("{dims:?} {out} {spec:?}"), &[&y, &dx, &dflat], &want);
            }
        }
    }

    #[test]
    fn the_output_with_its_residual() {
        let machine = Emulated::default();
        for (dims, out) in small() {
            let count = dims[0] * dims[1];
            let shapes = [vec![out, dims[2]], vec![out]];
            for parts in [1, 2] {
                let shapes = &shapes[..parts];
                let to = [dims[0], dims[1], out];
                let inputs = [randn("x", &dims), randn("residual", &to), flat(shapes)];
                let run = |x: &[Tensor]| output(&x[0], &x[1], &group(&x[2], shapes), None);
                let want = evaluate(KernelMode::Fused, &inputs, run).unwrap();
                let op = Output::new(&inputs[0], &inputs[1], &group(&inputs[2], shapes), None).unwrap();
                let [x, residual, flat] = inputs.each_ref().map(floats);
                let dy = floats(&normal("cotangent", &to).unwrap());
                let [x, residual, flat, slope] = [&x, &residual, &flat, &dy].map(BufferView::all);
                let y = op.forward_on(&machine, [x, residual, flat], count).unwrap();
                let lens = [count, flat.floats.len()];
                let [dx, dflat] = op.backward_on(&machine, [x, flat, slope], lens).unwrap();
                assert_same(&format!("{dims:?} {out} {parts}"), &[&y, &dx, &dy, &dflat], &want);
            }
        }
    }
}
