//! y = x W^T + b with W [out, in].

use candle_core::{CpuStorage, DType, Layout, Result, Shape, Tensor, bail};

use super::cpu::compact;
use super::cpu::dense::{self, Panels, WeightGradient};
use super::cpu::few::{self, FewRows, Layer};
use super::cpu::gemm::Mat;
use super::cpu::layers::Layers;
use super::cpu::par;
use super::cpu::transpose::transpose;
use super::cpu::{self, rows};
use super::op::{FusedOp, SavedOutput};
use super::tape;

/// x W^T + b over the last dimension of `x` (any number of leading dimensions).
pub fn linear(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    if super::fused_cpu(x.device()) && x.dtype() == DType::F32 {
        let (x, weight) = (x.contiguous()?, weight.contiguous()?);
        return match bias {
            Some(bias) => tape::apply(&[&x, &weight, &bias.contiguous()?], Linear { in_out: false }),
            None => tape::apply(&[&x, &weight], Linear { in_out: false }),
        };
    }
    composed(x, weight, bias)
}

/// x W + b with W [in, out], as [`linear`] otherwise.
pub fn linear_in_out(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    if super::fused_cpu(x.device()) && x.dtype() == DType::F32 {
        let (x, weight) = (tape::contiguous(x)?, weight.contiguous()?);
        return match bias {
            Some(bias) => tape::apply(&[&x, &weight, &bias.contiguous()?], Linear { in_out: true }),
            None => tape::apply(&[&x, &weight], Linear { in_out: true }),
        };
    }
    composed(x, &weight.t()?, bias)
}

/// The definition in plain candle operations.
pub fn composed(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    let (out, width) = weight.dims2()?;
    let mut dims = x.dims().to_vec();
    let rows = x.elem_count() / width.max(1);
    if let Some(last) = dims.last_mut() {
        *last = out;
    }
    let y = x.contiguous()?.reshape((rows, width))?.matmul(&weight.t()?)?;
    let y = if let Some(bias) = bias { y.broadcast_add(bias)? } else { y };
    y.reshape(dims)
}

struct Linear {
    /// Whether the weight is [in, out].
    in_out: bool,
}

/// The transpose of a matrix [rows, width].
fn turned(x: &[f32], rows: usize, width: usize) -> Vec<f32> {
    let mut y = vec![0.0; x.len()];
    transpose(x, rows, width, &mut y);
    y
}

/// x W^T + bias (none if empty), [count, out].
pub(super) fn forward(x: &[f32], count: usize, w: &[f32], out: usize, inp: usize, bias: &[f32]) -> Vec<f32> {
    if few::are(x.len() / inp.max(1)) {
        return FewRows::new(x, inp).multiply(
            &[Layer { weight: w, columns: 0..out }],
            out,
            |columns, _, y| {
                rows::add_row_in_place(y, bias.get(columns).unwrap_or_default());
            },
        );
    }
    multiply(x, count, &Panels::turned(w, out, inp), bias)
}

/// x times what is packed + bias.
fn multiply(x: &[f32], count: usize, panels: &Panels, bias: &[f32]) -> Vec<f32> {
    let (inp, out) = (panels.depth(), panels.columns());
    let size = dense::chunks(count, inp + out).size;
    par::build(count * out, size * out, |index, y| {
        let rows = y.len() / out.max(1);
        panels.multiply(Mat::new(&x[index * size * inp..], rows, inp), y, out, false);
        rows::add_row_in_place(y, bias);
    })
}

impl Linear {
    /// Widths of outputs and inputs.
    fn widths(&self, weight: &Shape) -> Result<[usize; 2]> {
        let (rows, columns) = weight.dims2()?;
        Ok(if self.in_out { [columns, rows] } else { [rows, columns] })
    }
}

impl FusedOp for Linear {
    fn name(&self) -> &'static str {
        "linear"
    }

    fn forward(&self, operands: &[(&CpuStorage, &Layout)]) -> Result<(Vec<f32>, Shape)> {
        let (x, w, bias) = match operands.len() {
            2 => cpu::slices(operands).map(|[x, w]| (x, w, &[][..]))?,
            _ => cpu::slices(operands).map(|[x, w, bias]| (x, w, bias))?,
        };
        let [out, inp] = self.widths(operands[1].1.shape())?;
        let mut dims = operands[0].1.dims().to_vec();
        let (count, width) = cpu::matrix_dims(&dims)?;
        if width != inp || !(bias.is_empty() || bias.len() == out) {
            bail!("a weight from {inp} to {out} and {} biases for rows of {width}", bias.len());
        }
        if let Some(last) = dims.last_mut() {
            *last = out;
        }
        let y = match self.in_out {
            false => forward(x, count, w, out, inp, bias),
            true if few::are(count) => forward(x, count, &turned(w, inp, out), out, inp, bias),
            true => multiply(x, count, &Panels::new(w, inp, out), bias),
        };
        Ok((y, dims.into()))
    }

    /// Gradients of x, the weight, and (where there are some) the biases.
    fn backward(&self, operands: &[&Tensor], _: SavedOutput, grad: &Tensor) -> Result<Vec<Option<Tensor>>> {
        let (x, weight, bias) = (operands[0], operands[1], operands.len() > 2);
        let [out, inp] = self.widths(weight.shape())?;
        compact::with_elements([x], [weight, grad], |[data], [w, dy]| {
            let needs_x = x.track_op();
            let straight = self.in_out.then(|| turned(w, inp, out));
            let w = straight.as_deref().unwrap_or(w);
            let mut sum = WeightGradient::new(out, inp);
            let layers = Layers { inp, norm: None, weights: vec![w], needs_x, needs_bias: bias };
            let (dx, dbias) = layers.gradients(data, dy, &mut sum);
            let mut dw = vec![0.0; w.len()];
            sum.finish(&mut dw);
            let dw = if self.in_out { turned(&dw, out, inp) } else { dw };
            let dx = if needs_x { cpu::gradient(x, dx)? } else { None };
            let mut grads = vec![dx, cpu::gradient(weight, dw)?];
            if bias {
                grads.push(cpu::gradient(operands[2], dbias)?);
            }
            Ok(grads)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{check, randn};

    #[test]
    fn fused_is_the_twin() {
        for (dims, out) in [
            (vec![1, 1], 1),
            (vec![1, 3], 5),
            (vec![7, 8], 1),
            (vec![2, 67, 17], 33),
            (vec![300, 64], 70),
            (vec![67, 130], 3),
        ] {
            let inp = dims[dims.len() - 1];
            let inputs = [randn("x", &dims), randn("w", &[out, inp]), randn("b", &[out])];
            check(&format!("{dims:?} to {out}"), &inputs, 1e-5, |x| linear(&x[0], &x[1], Some(&x[2])));
            check(&format!("{dims:?} to {out}, no bias"), &inputs[..2], 1e-5, |x| linear(&x[0], &x[1], None));
            let inputs = [randn("x", &dims), randn("w", &[inp, out]), randn("b", &[out])];
            let turned = format!("{dims:?} to {out}, in by out");
            check(&turned, &inputs, 1e-5, |x| linear_in_out(&x[0], &x[1], Some(&x[2])));
            check(&turned, &inputs[..2], 1e-5, |x| linear_in_out(&x[0], &x[1], None));
        }
    }

    #[test]
    fn a_constant_input_gets_no_gradient_and_wrong_shapes_are_errors() {
        let (x, w) = (randn("x", &[5, 4]), randn("w", &[3, 4]));
        let var = candle_core::Var::from_tensor(&w).unwrap();
        let grads = linear(&x, var.as_tensor(), None).unwrap().sum_all().unwrap().backward().unwrap();
        assert!(grads.get(&var).is_some() && grads.get(&x).is_none());
        assert!(linear(&x, &randn("w", &[3, 5]), None).is_err());
        assert!(linear(&x, &w, Some(&randn("b", &[2]))).is_err());
    }
}
