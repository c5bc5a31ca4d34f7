//! The halves of a transformer block, each one operation: projections, output, feed-forward.
//!
//! Weights come as one [`ParamGroup`], because a candle custom op takes three tensors at most, and because one
//! flat gradient per group spares an addition per weight.

#[cfg(any(feature = "cuda", test))]
mod cuda;
mod ffn;
mod output;
mod project;

use std::ops::Range;

use candle_core::{Result, Tensor, bail};

use super::group::ParamGroup;
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

    fn check(self, group: &ParamGroup, normalise: bool) -> Result<()> {
        if group.parts.len() != self.first() + self.stride() * self.outputs || (normalise && !self.norm) {
            bail!("a group of {} parts does not fit {self:?}", group.parts.len());
        }
        Ok(())
    }
}

/// The linear outputs side by side, [b, n, sum of widths]. `normalise` applies the group's LayerNorm to `x`
/// first (the class token of Transformer-LS goes in raw).
pub fn project(x: &Tensor, group: &ParamGroup, spec: Projection, normalise: bool) -> Result<Tensor> {
    if fused(x, group) {
        let op = project::Project::new(x, group, spec, normalise)?;
        return tape::apply(&[&x.contiguous()?, &group.flat], op);
    }
    project_composed(x, group, spec, normalise)
}

/// [`project`] of its parts, each by its own kernel or twin.
pub fn project_composed(x: &Tensor, group: &ParamGroup, spec: Projection, normalise: bool) -> Result<Tensor> {
    spec.check(group, normalise)?;
    let x = if normalise { &norm::layer_norm(x, &group.part(0)?, &group.part(1)?, EPS)? } else { x };
    let outputs = (0..spec.outputs).map(|index| {
        let at = spec.first() + spec.stride() * index;
        let bias = if spec.bias { Some(group.part(at + 1)?) } else { None };
        linear::composed(x, &group.part(at)?, bias.as_ref())
    });
    Tensor::cat(&outputs.collect::<Result<Vec<_>>>()?, candle_core::D::Minus1)
}

/// What the branch of every sample is multiplied by before it is added (stochastic depth); none: 1.
pub type Scales<'a> = Option<&'a [f32]>;

/// `residual + scale Linear(x)`, group `[weight]` or `[weight, bias]`.
pub fn output(x: &Tensor, residual: &Tensor, group: &ParamGroup, scales: Scales) -> Result<Tensor> {
    if fused(x, group) && (scales.is_none() || x.device().is_cpu()) {
        let op = output::Output::new(x, residual, group, scales)?;
        return tape::apply(&[&x.contiguous()?, &residual.contiguous()?, &group.flat], op);
    }
    output_composed(x, residual, group, scales)
}

/// [`output`] of its parts.
pub fn output_composed(x: &Tensor, residual: &Tensor, group: &ParamGroup, scales: Scales) -> Result<Tensor> {
    let bias = if group.parts.len() > 1 { Some(group.part(1)?) } else { None };
    residual + scaled(linear::composed(x, &group.part(0)?, bias.as_ref())?, scales)?
}

/// `branch` [b, ..] with every sample multiplied by its scale.
pub fn scaled(branch: Tensor, scales: Scales) -> Result<Tensor> {
    let Some(scales) = scales else { return Ok(branch) };
    check_scales(scales, branch.dims()[0])?;
    let shape: Vec<usize> = (0..branch.rank()).map(|dim| if dim == 0 { scales.len() } else { 1 }).collect();
    let scales = Tensor::from_slice(scales, shape, branch.device())?.to_dtype(branch.dtype())?;
    branch.broadcast_mul(&scales)
}

fn check_scales(scales: &[f32], samples: usize) -> Result<()> {
    if scales.len() == samples { Ok(()) } else { bail!("{} scales for {samples} samples", scales.len()) }
}

/// `y` becomes the rows of `residual` + scale y; `y` begins with row `first` of rows of `width`, of which every sample has
/// `each`.
fn add_scaled(residual: &[f32], scales: &[f32], (first, each): (usize, usize), width: usize, y: &mut [f32]) {
    for (row, (y, residual)) in y.chunks_exact_mut(width).zip(residual.chunks_exact(width)).enumerate() {
        let scale = scales[(first + row) / each];
        y.iter_mut().zip(residual).for_each(|(y, residual)| *y = residual + scale * *y);
    }
}

/// Rows of `dy` from row `first` on times the scales of their samples, into `to`.
fn scale_rows(dy: &[f32], scales: &[f32], (first, each): (usize, usize), width: usize, to: &mut [f32]) {
    for (row, (to, dy)) in to.chunks_exact_mut(width).zip(dy.chunks_exact(width)).enumerate() {
        let scale = scales[(first + row) / each];
        to.iter_mut().zip(dy).for_each(|(to, dy)| *to = scale * dy);
    }
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

/// What one call of [`ffn`] needs besides its input and parameters.
#[derive(Clone, Copy, Debug)]
pub struct FfnCall<'a> {
    /// What the half adds to.
    pub residual: Residual,
    /// Epsilon of the LayerNorm.
    pub eps: f64,
    /// Factors on FFN.
    pub scales: Scales<'a>,
}

impl FfnCall<'_> {
    /// A half that adds to `residual`, nothing scaled.
    pub fn new(residual: Residual, eps: f64) -> Self {
        Self { residual, eps, scales: None }
    }
}

/// The feed-forward half with its LayerNorm and residual. FFN(x) = fc2(GELU(fc1(x))); group
/// `[norm.weight, norm.bias, fc1.weight, fc1.bias, fc2.weight, fc2.bias]`.
pub fn ffn(x: &Tensor, group: &ParamGroup, call: FfnCall) -> Result<Tensor> {
    if fused(x, group) && (call.scales.is_none() || x.device().is_cpu()) {
        return tape::apply(&[&x.contiguous()?, &group.flat], ffn::Ffn::new(x, group, call)?);
    }
    ffn_composed(x, group, call)
}

/// [`ffn`] of its parts, each by its own kernel or twin.
pub fn ffn_composed(x: &Tensor, group: &ParamGroup, call: FfnCall) -> Result<Tensor> {
    let normal = norm::layer_norm(x, &group.part(0)?, &group.part(1)?, call.eps)?;
    let hidden = linear::composed(&normal, &group.part(2)?, Some(&group.part(3)?))?;
    let hidden = activation::gelu(&hidden)?;
    let change = scaled(linear::composed(&hidden, &group.part(4)?, Some(&group.part(5)?))?, call.scales)?;
    match call.residual {
        Residual::Raw => x + change,
        Residual::Normed => normal + change,
    }
}

/// Whether fused kernels take these operands.
fn fused(x: &Tensor, group: &ParamGroup) -> bool {
    super::fused(x) && group.flat.is_contiguous()
}

/// Where a weight [out, inp] of a group lies.
#[derive(Clone, Debug)]
struct Weight {
    at: Range<usize>,
    out: usize,
}

/// The weight that is part `index` of `group`, for inputs of width `inp`.
fn weight(group: &ParamGroup, index: usize, inp: usize) -> Result<Weight> {
    match group.parts.get(index) {
        Some(part) if part.shape.len() == 2 && part.shape[1] == inp => {
            Ok(Weight { at: part.offset..part.offset + part.len(), out: part.shape[0] })
        }
        part => bail!("part {index} of a group should be a weight for rows of {inp}, not {part:?}"),
    }
}

/// Where the vector of `len` elements lies that is part `index` of `group`.
fn vector(group: &ParamGroup, index: usize, len: usize) -> Result<Range<usize>> {
    match group.parts.get(index) {
        Some(part) if part.shape == [len] => Ok(part.offset..part.offset + len),
        part => bail!("part {index} of a group should be a vector of {len}, not {part:?}"),
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device};

    use super::*;
    use crate::cpu::few;
    use crate::group::ParamPart;
    use crate::testing::{check, randn};

    /// A group around `flat` with parts of the given shapes.
    pub(super) fn group(flat: &Tensor, shapes: &[Vec<usize>]) -> ParamGroup {
        let mut offset = 0;
        let parts = shapes.iter().map(|shape| {
            let part = ParamPart { name: String::new(), shape: shape.clone(), offset };
            offset += part.len();
            part
        });
        ParamGroup { parts: parts.collect(), flat: flat.clone() }
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
            let scales: Vec<f32> = [1.25, 0.0, 0.5].into_iter().cycle().take(dims[0]).collect();
            for (residual, eps, scales) in [
                (Residual::Raw, EPS, None),
                (Residual::Normed, EPS, None),
                (Residual::Raw, 0.1, Some(&scales[..])),
                (Residual::Normed, EPS, Some(&scales[..])),
            ] {
                let inputs = [randn("x", &dims), flat(&shapes)];
                let call = FfnCall { residual, eps, scales };
                check(&format!("{dims:?} {hidden} {call:?}"), &inputs, 2e-5, |x| {
                    ffn(&x[0], &group(&x[1], &shapes), call)
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
                let scales: Vec<f32> = [0.0, 1.5].into_iter().cycle().take(dims[0]).collect();
                for scales in [None, Some(&scales[..])] {
                    check(&format!("{dims:?} {out} {count} {scales:?}"), &inputs, 1e-5, |x| {
                        output(&x[0], &x[1], &group(&x[2], &shapes[..count]), scales)
                    });
                }
            }
        }
    }

    #[test]
    fn halves_of_few_rows_are_the_twins() {
        let apart = |what: &str, fused: Tensor, twin: Tensor| {
            let flat = |x: Tensor| x.flatten_all().unwrap().to_dtype(DType::F64).unwrap().to_vec1().unwrap();
            let apart = crate::testing::difference(&flat(fused), &flat(twin));
            assert!(apart < 2e-5, "{what}: {apart}");
        };
        let rows = [[1, 1, 1], [1, 1, 37], [3, 1, 130], [16, 1, 64], [2, 16, 19]];
        for (dims, out) in rows.into_iter().flat_map(|dims| [1, 33, 600].map(|out| (dims, out))) {
            let (what, d, x) = (format!("{dims:?} {out}"), dims[2], randn("x", &dims));
            let scales: Vec<f32> = (0..dims[0]).map(|sample| sample as f32 * 0.5).collect();
            for scales in [None, Some(&scales[..])] {
                let shapes = [vec![d], vec![d], vec![out, d], vec![out], vec![d, out], vec![d]];
                let group = group(&flat(&shapes), &shapes);
                for residual in [Residual::Raw, Residual::Normed] {
                    let call = FfnCall { residual, eps: EPS, scales };
                    let fused = few::of_tokens(|| ffn(&x, &group, call)).unwrap();
                    apart(&format!("ffn {what}"), fused, ffn_composed(&x, &group, call).unwrap());
                }
                let (group, residual) =
                    (group.slice(2..4).unwrap(), randn("residual", &[dims[0], dims[1], out]));
                let fused = few::of_tokens(|| output(&x, &residual, &group, scales)).unwrap();
                apart(
                    &format!("output {what}"),
                    fused,
                    output_composed(&x, &residual, &group, scales).unwrap(),
                );
            }
            for (norm, bias) in [(true, true), (true, false), (false, true)] {
                let spec = Projection { norm, outputs: 2, bias };
                let mut shapes = if norm { vec![vec![d], vec![d]] } else { vec![] };
                for out in [out, 5] {
                    shapes.push(vec![out, d]);
                    shapes.extend(bias.then(|| vec![out]));
                }
                let group = group(&flat(&shapes), &shapes);
                let fused = few::of_tokens(|| project(&x, &group, spec, norm)).unwrap();
                apart(&format!("project {what}"), fused, project_composed(&x, &group, spec, norm).unwrap());
            }
            let (w, b) = (randn("w", &[out, d]), randn("b", &[out]));
            let fused = few::of_tokens(|| linear::linear(&x, &w, Some(&b))).unwrap();
            apart(&format!("linear {what}"), fused, linear::composed(&x, &w, Some(&b)).unwrap());
        }
    }

    #[test]
    fn a_second_backward_pass_gives_the_same_gradient() {
        const RAW: FfnCall = FfnCall { residual: Residual::Raw, eps: EPS, scales: None };
        let shapes = [vec![8], vec![8], vec![24, 8], vec![24], vec![8, 24], vec![8]];
        let var = candle_core::Var::from_tensor(&flat(&shapes)).unwrap();
        let y = ffn(&randn("x", &[2, 5, 8]), &group(var.as_tensor(), &shapes), RAW).unwrap();
        let loss = y.sqr().unwrap().sum_all().unwrap();
        let grad = || loss.backward().unwrap().get(&var).unwrap().to_vec1::<f32>().unwrap();
        assert_eq!(grad(), grad());
    }

    #[test]
    fn groups_that_do_not_fit_are_errors() {
        let x = Tensor::ones((1, 2, 4), DType::F32, &Device::Cpu).unwrap();
        let shapes = [vec![5, 3], vec![5]];
        let bad = group(&flat(&shapes), &shapes);
        assert!(ffn(&x, &bad, FfnCall::new(Residual::Raw, EPS)).is_err());
        assert!(output(&x, &x, &bad, None).is_err());
        let spec = Projection { norm: false, outputs: 1, bias: true };
        assert!(project(&x, &bad, spec, false).is_err());
        assert!(project(&x, &bad, spec, true).is_err());
    }
}
