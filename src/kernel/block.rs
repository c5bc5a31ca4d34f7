//! The halves of a transformer block, each one operation: projections, output, feed-forward.
//!
//! Weights come as one [`Group`], because a candle custom op takes three tensors at most, and because one
//! flat gradient per group spares an addition per weight.

use candle_core::{Result, Tensor, bail};

use super::group::Group;
use super::norm::EPS;
use super::{activation, linear, norm};

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

/// The linear outputs side by side, [b, n, sum of widths]. `normalise` applies the group's LayerNorm to `x`
/// first (the class token of Transformer-LS goes in raw).
///
/// # Errors
/// A group that does not fit `spec`.
pub fn project(x: &Tensor, group: &Group, spec: Projection, normalise: bool) -> Result<Tensor> {
    project_composed(x, group, spec, normalise)
}

/// [`project`] in plain candle operations.
///
/// # Errors
/// A group that does not fit `spec`.
pub fn project_composed(x: &Tensor, group: &Group, spec: Projection, normalise: bool) -> Result<Tensor> {
    let first = if spec.norm { 2 } else { 0 };
    let stride = if spec.bias { 2 } else { 1 };
    if group.parts.len() != first + stride * spec.outputs || (normalise && !spec.norm) {
        bail!("a group of {} parts does not fit {spec:?}", group.parts.len());
    }
    let x = if normalise { &norm::composed(x, &group.part(0)?, &group.part(1)?, EPS)? } else { x };
    let outputs = (0..spec.outputs).map(|index| {
        let at = first + stride * index;
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
    output_composed(x, residual, group)
}

/// [`output`] in plain candle operations.
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
/// `[norm.weight, norm.bias, fc1.weight, fc1.bias, fc2.weight, fc2.bias]`.
///
/// # Errors
/// Shapes that do not fit.
pub fn ffn(x: &Tensor, group: &Group, residual: Residual) -> Result<Tensor> {
    ffn_composed(x, group, residual)
}

/// [`ffn`] in plain candle operations.
///
/// # Errors
/// Shapes that do not fit.
pub fn ffn_composed(x: &Tensor, group: &Group, residual: Residual) -> Result<Tensor> {
    let normal = norm::composed(x, &group.part(0)?, &group.part(1)?, EPS)?;
    let hidden = linear::composed(&normal, &group.part(2)?, Some(&group.part(3)?))?;
    let hidden = activation::composed(&hidden)?;
    let change = linear::composed(&hidden, &group.part(4)?, Some(&group.part(5)?))?;
    match residual {
        Residual::Raw => x + change,
        Residual::Normed => normal + change,
    }
}
