//! What retention, gated linear attention and the delta rule do to the results of their heads (SPEC-modern section 0): a norm per
//! head and position, its weight, a gate of the layer input.

use candle_core::{D, Result, Tensor};

use super::knobs::{Knob, Knobs};
use super::{Idle, MechanismConfig, Shape};
use crate::nn::params::{Init, ParamBuilder};
use effattn_kernel::activation::swiglu;
use effattn_kernel::heads::Heads;
use effattn_kernel::linear::linear;
use effattn_kernel::norm::rms_norm;
use effattn_kernel::tape;

/// Norm of a head's result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Norm {
    None,
    /// Root mean square.
    Rms,
    /// LayerNorm, biased variance.
    Layer,
}

/// [`Norm`]; the default is RMS.
pub(super) const NORM: Knob<Norm> =
    Knob::words("norm", &[("rms", Norm::Rms), ("ln", Norm::Layer), ("none", Norm::None)])
        .doc("norm of every head's result: rms, ln (LayerNorm) or none");
/// The norm's eps, `default` where nothing is said.
pub(super) const fn norm_eps(default: f64) -> Knob<f64> {
    Knob::float("norm_eps", default, 1e-12..=1.0).doc("eps of the norm")
}
pub(super) const NORM_EPS: Knob<f64> = norm_eps(1e-5);

/// Whether a weight follows the norm, `default` where nothing is said.
pub(super) const fn norm_affine(default: bool) -> Knob<bool> {
    Knob::bool("norm_affine", default).doc("whether a weight, one for all heads, follows the norm")
}
pub(super) const NORM_AFFINE: Knob<bool> = norm_affine(true);
pub(super) const GATE_BIAS: Knob<bool> = Knob::bool("gate_bias", false).doc("whether the gate has a bias");

const GATES: &[(&str, bool); 2] = &[("none", false), ("swish", true)];

/// Whether a gate silu(x w_g) follows, with the word number `default` of none, swish.
pub(super) const fn gate(default: usize) -> Knob<bool> {
    Knob::words_from("gate", default, GATES).doc("none, or swish: results times silu of a projection of x")
}
pub(super) const GATE: Knob<bool> = gate(0);

/// `norm_eps` and `gate_bias` where there is neither norm nor gate.
pub(super) const IDLE: [Idle; 2] = [
    Idle { knob: NORM_EPS.name(), when: |knobs, _| knobs.get(&NORM) == Norm::None, why: "with norm=none" },
    Idle { knob: GATE_BIAS.name(), when: |knobs, _| !knobs.get(&GATE), why: "with gate=none" },
];

/// [`InModels::linear_form`](super::InModels::linear_form): no norm, no gate.
pub(super) const LINEAR_FORM: &[(&str, &str)] =
    &[("norm", "none"), ("norm_affine", "false"), ("gate", "none")];

/// Multiply-adds of the gate for one sample.
pub(super) fn macs(knobs: &Knobs, shape: &Shape) -> usize {
    let gate = if knobs.get(&GATE) { shape.width } else { 0 };
    shape.queries * shape.heads * shape.head_dim * gate
}

/// FLOPs of norm and gate for one sample.
pub(super) fn flops(knobs: &Knobs, shape: &Shape) -> usize {
    let elements = shape.queries * shape.heads * shape.head_dim;
    let norm = if knobs.get(&NORM) == Norm::None { 0 } else { 5 * elements };
    macs(knobs, shape) + norm
}

/// The stage with its parameters.
pub(super) struct OutputStage {
    norm: Norm,
    eps: f64,
    /// `norm_w` [d].
    weight: Option<Tensor>,
    /// `w_g` [h, e, d].
    gate: Option<Tensor>,
    /// `b_g` [h, d].
    bias: Option<Tensor>,
}

impl OutputStage {
    /// Parameters `norm_w` (ones), `w_g` (drawn as `init` says) and `b_g` (zeros), as far as the knobs ask for them.
    pub fn new(config: &MechanismConfig, builder: &ParamBuilder, init: Init) -> Result<Self> {
        let MechanismConfig { knobs, heads, head_dim, width, .. } = config;
        let (gated, biased) = (knobs.get(&GATE), knobs.get(&GATE) && knobs.get(&GATE_BIAS));
        let param = |wanted: bool, name: &str, shape: &[usize], init: Init| {
            wanted.then(|| builder.param(name, shape, init)).transpose()
        };
        Ok(Self {
            norm: knobs.get(&NORM),
            eps: knobs.get(&NORM_EPS),
            weight: param(knobs.get(&NORM_AFFINE), "norm_w", &[*head_dim], Init::ONE)?,
            gate: param(gated, "w_g", &[*heads, *width, *head_dim], init)?,
            bias: param(biased, "b_g", &[*heads, *head_dim], Init::ZERO)?,
        })
    }

    /// Norm, weight and gate of `scale` times `out` [b, h, n, d]; `x` [b, n, e], which the gate reads.
    pub fn apply(&self, out: Heads, scale: f64, x: Option<&Tensor>) -> Result<Heads> {
        let plain = self.norm == Norm::None && scale == 1.0;
        if plain && self.weight.is_none() && self.gate.is_none() {
            return Ok(out);
        }
        let (b, h, n, d) = match &out {
            Heads::Merged { rows, heads } => {
                let (b, n, width) = rows.dims3()?;
                (b, *heads, n, width / heads)
            }
            Heads::Split(out) => out.dims4()?,
        };
        let mut y = tape::reshape(&out.merged()?, (b, n, h, d))?;
        let eps = self.eps / (scale * scale); // a norm takes every factor out of its rows but for eps
        if self.norm == Norm::Layer {
            y = y.broadcast_sub(&y.mean_keepdim(D::Minus1)?)?; // what is left is normed as by RMS
        }
        y = match (self.norm, &self.weight) {
            (Norm::None, None) if plain => y,
            (Norm::None, None) => (y * scale)?,
            (Norm::None, Some(weight)) => y.broadcast_mul(&(weight * scale)?)?,
            (Norm::Rms | Norm::Layer, Some(weight)) => rms_norm(&y, weight, eps)?,
            (Norm::Rms | Norm::Layer, None) => rms_norm(&y, &Tensor::ones(d, y.dtype(), y.device())?, eps)?,
        };
        if let Some(gate) = &self.gate {
            let x = x.ok_or_else(|| candle_core::Error::msg("the output gate was given no layer input x"))?;
            let rows = tape::contiguous(&tape::transpose(gate, 1, 2)?)?;
            let rows = tape::reshape(&rows, (h * d, rows.dim(2)?))?; // [h d, e]
            let bias = self.bias.as_ref().map(Tensor::flatten_all).transpose()?;
            y = swiglu(&tape::reshape(&linear(x, &rows, bias.as_ref())?, (b, n, h, d))?, &y)?;
        }
        Ok(Heads::Merged { rows: tape::reshape(&y, (b, n, h * d))?, heads: h })
    }
}
