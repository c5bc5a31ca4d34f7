//! The halves of a transformer block, each one operation: projections, output, feed-forward.
//!
//! Weights come as one [`Group`], because a candle custom op takes three tensors at most, and because one
//! flat gradient per group spares an addition per weight.

#[cfg(any(feature = "cuda", test))]
mod cuda;
mod ffn;
mod output;
mod project;

use std::ops::Range;

use candle_core::{Result, Tensor, bail};

use super::group::Group;
use super::norm::EPS;
use super::{activation, linear, norm, tape};

/// Shape of a projection's group: `[norm.weight, norm.bias]` if `norm`, then per output its weight and,
/// if `bias`, its bias.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Projection {
    /// Whether the group starts with the LayerNorm in front of the projections.
    pub norm: bool,
    /// Number of outputs.
    pub outputs: usize,
    /// Whether every output has a bias.
    pub bias: bool,
}

impl Projection {
    /// Part of the first weight.
    fn first(self) -> usize {
        if self.norm { 2 } else { 0 }
    }

    /// Parts per output.
    fn stride(self) -> usize {
        if self.bias { 2 } else { 1 }
    }

    fn check(self, group: &Group, normalise: bool) -> Result<()> {
        if group.parts.len() != self.first() + self.stride() * self.outputs || (normalise && !self.norm) {
            bail!("a group of {} parts does not fit {self:?}", group.parts.len());
        }
        Ok(())
    }
}

/// The linear outputs side by side, [b, n, sum of widths]. `normalise` applies the group's LayerNorm to `x`
/// first (the class token of Transformer-LS goes in raw).
///
/// # Errors
/// A group that does not fit `spec`.
pub fn project(x: &Tensor, group: &Group, spec: Projection, normalise: bool) -> Result<Tensor> {
    if fused(x, group) {
        let op = project::Project::new(x, group, spec, normalise)?;
        return tape::apply(&[&x.contiguous()?, &group.flat], op);
    }
    project_composed(x, group, spec, normalise)
}

/// [`project`] of its parts, each by its own kernel or twin.
///
/// # Errors
/// A group that does not fit `spec`.
pub fn project_composed(x: &Tensor, group: &Group, spec: Projection, normalise: bool) -> Result<Tensor> {
    spec.check(group, normalise)?;
    let x = if normalise { &norm::layer_norm(x, &group.part(0)?, &group.part(1)?, EPS)? } else { x };
    let outputs = (0..spec.outputs).map(|index| {
        let at = spec.first() + spec.stride() * index;
        let bias = if spec.bias { Some(group.part(at + 1)?) } else { None };
        linear::composed(x, &group.part(at)?, bias.as_ref())
    });
    Tensor::cat(&outputs.collect::<Result<Vec<_>>>()?, candle_core::D::Minus1)
}

/// `residual + Linear(x)`, group `[weight]` or `[weight, bias]`.
///
/// # Errors
/// Shapes that do not fit.
pub fn output(x: &Tensor, residual: &Tensor, group: &Group) -> Result<Tensor> {
    if fused(x, group) {
        let op = output::Output::new(x, residual, group)?;
        return tape::apply(&[&x.contiguous()?, &residual.contiguous()?, &group.flat], op);
    }
    output_composed(x, residual, group)
}

/// [`output`] of its parts.
///
/// # Errors
/// Shapes that do not fit.
pub fn output_composed(x: &Tensor, residual: &Tensor, group: &Group) -> Result<Tensor> {
    let bias = if group.parts.len() > 1 { Some(group.part(1)?) } else { None };
    residual + linear::composed(x, &group.part(0)?, bias.as_ref())?
}

/// What the feed-forward half adds to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Residual {
    /// x + FFN(LN(x)): pre-norm.
    #[default]
    Raw,
    /// y + FFN(y) with y = LN(x): the released language model of Transformer-LS.
    Normed,
}

/// The feed-forward half with its LayerNorm and residual. FFN(x) = fc2(GELU(fc1(x))); group
/// `[norm.weight, norm.bias, fc1.weight, fc1.bias, fc2.weight, fc2.bias]`, `eps` that of the LayerNorm.
///
/// # Errors
/// Shapes that do not fit.
pub fn ffn(x: &Tensor, group: &Group, residual: Residual, eps: f64) -> Result<Tensor> {
    if fused(x, group) {
        return tape::apply(&[&x.contiguous()?, &group.flat], ffn::Ffn::new(x, group, residual, eps)?);
    }
    ffn_composed(x, group, residual, eps)
}

/// [`ffn`] of its parts, each by its own kernel or twin.
///
/// # Errors
/// Shapes that do not fit.
pub fn ffn_composed(x: &Tensor, group: &Group, residual: Residual, eps: f64) -> Result<Tensor> {
    let normal = norm::layer_norm(x, &group.part(0)?, &group.part(1)?, eps)?;
    let hidden = linear::composed(&normal, &group.part(2)?, Some(&group.part(3)?))?;
    let hidden = activation::gelu(&hidden)?;
    let change = linear::composed(&hidden, &group.part(4)?, Some(&group.part(5)?))?;
    match residual {
        Residual::Raw => x + change,
        Residual::Normed => normal + change,
    }
}

/// Whether fused kernels take these operands.
fn fused(x: &Tensor, group: &Group) -> bool {
    super::fused(x) && group.flat.is_contiguous()
}

/// Where a weight [out, inp] of a group lies.
#[derive(Clone, Debug)]
struct Weight {
    at: Range<usize>,
    out: usize,
}

/// The weight that is part `index` of `group`, for inputs of width `inp`.
fn weight(group: &Group, index: usize, inp: usize) -> Result<Weight> {
    match group.parts.get(index) {
        Some(part) if part.shape.len() == 2 && part.shape[1] == inp => {
            Ok(Weight { at: part.offset..part.offset + part.len(), out: part.shape[0] })
        }
        part => bail!("part {index} of a group should be a weight for rows of {inp}, not {part:?}"),
    }
}

/// Where the vector of `len` elements lies that is part `index` of `group`.
fn vector(group: &Group, index: usize, len: usize) -> Result<Range<usize>> {
    match group.parts.get(index) {
        Some(part) if part.shape == [len] => Ok(part.offset..part.offset + len),
        part => bail!("part {index} of a group should be a vector of {len}, not {part:?}"),
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device};

    use super::*;
    use crate::kernel::group::Part;
    use crate::kernel::testing::{check, randn};

    /// A group around `flat` with parts of the given shapes.
    pub(super) fn group(flat: &Tensor, shapes: &[Vec<usize>]) -> Group {
        let mut offset = 0;
        let parts = shapes.iter().map(|shape| {
            let part = Part { name: String::new(), shape: shape.clone(), offset };
            offset += part.len();
            part
        });
        Group { parts: parts.collect(), flat: flat.clone() }
    }

    pub(super) fn flat(shapes: &[Vec<usize>]) -> Tensor {
        (randn("flat", &[shapes.iter().map(|shape| shape.iter().product::<usize>()).sum()]) * 0.3).unwrap()
    }

    /// (dimensions of x, hidden width or outputs): one row, primes, several chunks and blocks.
    pub(super) fn shapes() -> Vec<(Vec<usize>, usize)> {
        vec![
            (vec![1, 1, 1], 1),
            (vec![1, 1, 8], 3),
            (vec![1, 7, 3], 17),
            (vec![2, 131, 17], 33),
            (vec![3, 67, 64], 128),
            (vec![1, 37, 256], 70),
        ]
    }

    #[test]
    fn the_fused_ffn_is_the_twin() {
        for (dims, hidden) in shapes() {
            let d = dims[2];
            let shapes = [vec![d], vec![d], vec![hidden, d], vec![hidden], vec![d, hidden], vec![d]];
            for (residual, eps) in [(Residual::Raw, EPS), (Residual::Normed, EPS), (Residual::Raw, 0.1)] {
                let inputs = [randn("x", &dims), flat(&shapes)];
                check(&format!("{dims:?} {hidden} {residual:?} {eps}"), &inputs, 2e-5, |x| {
                    ffn(&x[0], &group(&x[1], &shapes), residual, eps)
                });
            }
        }
    }

    #[test]
    fn the_fused_projection_is_the_twin() {
        for (dims, out) in shapes() {
            let d = dims[2];
            for (norm, bias) in [(true, true), (true, false), (false, true)] {
                let spec = Projection { norm, outputs: 3, bias };
                let mut shapes = if norm { vec![vec![d], vec![d]] } else { vec![] };
                for out in [out, 1, out + 2] {
                    shapes.push(vec![out, d]);
                    if bias {
                        shapes.push(vec![out]);
                    }
                }
                let inputs = [randn("x", &dims), flat(&shapes)];
                for normalise in [norm, false] {
                    check(&format!("{dims:?} {out} {spec:?} {normalise}"), &inputs, 2e-5, |x| {
                        project(&x[0], &group(&x[1], &shapes), spec, normalise)
                    });
                }
            }
        }
    }

    #[test]
    fn the_fused_output_is_the_twin() {
        for (dims, out) in shapes() {
            let shapes = [vec![out, dims[2]], vec![out]];
            for count in [1, 2] {
                let residual = randn("residual", &[dims[0], dims[1], out]);
                let inputs = [randn("x", &dims), residual, flat(&shapes[..count])];
                check(&format!("{dims:?} {out} {count}"), &inputs, 1e-5, |x| {
                    output(&x[0], &x[1], &group(&x[2], &shapes[..count]))
                });
            }
        }
    }

    #[test]
    fn a_second_backward_pass_gives_the_same_gradient() {
        let shapes = [vec![8], vec![8], vec![24, 8], vec![24], vec![8, 24], vec![8]];
        let var = candle_core::Var::from_tensor(&flat(&shapes)).unwrap();
        let y = ffn(&randn("x", &[2, 5, 8]), &group(var.as_tensor(), &shapes), Residual::Raw, EPS).unwrap();
        let loss = y.sqr().unwrap().sum_all().unwrap();
        let grad = || loss.backward().unwrap().get(&var).unwrap().to_vec1::<f32>().unwrap();
        assert_eq!(grad(), grad());
    }

    #[test]
    fn groups_that_do_not_fit_are_errors() {
        let x = Tensor::ones((1, 2, 4), DType::F32, &Device::Cpu).unwrap();
        let shapes = [vec![5, 3], vec![5]];
        let bad = group(&flat(&shapes), &shapes);
        assert!(ffn(&x, &bad, Residual::Raw, EPS).is_err());
        assert!(output(&x, &x, &bad).is_err());
        let spec = Projection { norm: false, outputs: 1, bias: true };
        assert!(project(&x, &bad, spec, false).is_err());
        assert!(project(&x, &bad, spec, true).is_err());
    }
}
