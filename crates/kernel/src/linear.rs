//! y = x W^T + b with W [out, in].

use candle_core::{CpuStorage, DType, Layout, Result, Shape, Tensor, bail};

use super::cpu::compact;
use super::cpu::dense::{Panels, WeightGradient};
use super::cpu::few::{self, FewRows, Layer};
use super::cpu::gemm::Mat;
use super::cpu::layers::Layers;
use super::cpu::par::{self, Chunks};
use super::cpu::{self, rows};
use super::op::{FusedOp, SavedOutput};
use super::tape;

/// x W^T + b over the last dimension of `x` (any number of leading dimensions).
pub fn linear(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    if super::fused_cpu(x.device()) && x.dtype() == DType::F32 {
        let (x, weight) = (x.contiguous()?, weight.contiguous()?);
        return match bias {
            Some(bias) => tape::apply(&[&x, &weight, &bias.contiguous()?], Linear),
            None => tape::apply(&[&x, &weight], Linear),
        };
    }
    composed(x, weight, bias)
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

struct Linear;

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
    let panels = Panels::turned(w, out, inp);
    let size = Chunks::dense(count, inp + out).size;
    par::build(count * out, size * out, |index, y| {
        let rows = y.len() / out.max(1);
        panels.multiply(Mat::new(&x[index * size * inp..], rows, inp), y, out, false);
        rows::add_row_in_place(y, bias);
    })
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
        let (out, inp) = operands[1].1.shape().dims2()?;
        let mut dims = operands[0].1.dims().to_vec();
        let (count, width) = cpu::matrix_dims(&dims)?;
        if width != inp || !(bias.is_empty() || bias.len() == out) {
            bail!("weight [{out}, {inp}] and {} biases for rows of {width}", bias.len());
        }
        if let Some(last) = dims.last_mut() {
            *last = out;
        }
        Ok((forward(x, count, w, out, inp, bias), dims.into()))
    }

    /// Gradients of x, the weight, and (where there are some) the biases.
    fn backward(&self, operands: &[&Tensor], _: SavedOutput, grad: &Tensor) -> Result<Vec<Option<Tensor>>> {
        let (x, weight, bias) = (operands[0], operands[1], operands.len() > 2);
        let (out, inp) = weight.dims2()?;
        compact::with_elements([x], [weight, grad], |[data], [w, dy]| {
            let needs_x = x.track_op();
            let mut sum = WeightGradient::new(out, inp);
            let layers = Layers { inp, norm: None, weights: vec![w], needs_x, needs_bias: bias };
            let (dx, dbias) = layers.gradients(data, dy, &mut sum);
            let mut dw = vec![0.0; w.len()];
            sum.finish(&mut dw);
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
