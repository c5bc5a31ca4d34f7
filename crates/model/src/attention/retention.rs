//! Retention (Sun et al. 2023, RetNet): linear attention whose weights decay with the distance, by a constant per head
//! (SPEC-modern section 1).

use candle_core::{Device, Result, Tensor};

use super::decode::{DecodeState, LinearSums};
use super::knobs::{Knob, Knobs};
use super::output_stage::{self, GATE_BIAS, NORM, OutputStage};
use super::{
    AttentionInput, AttentionOutput, Cost, Exception, Growth, InModels, Mechanism, MechanismConfig,
    MechanismEntry, Needs, Paper, Property, Shape, Support, mixer,
};
use crate::nn::params::{Init, ParamBuilder};
use effattn_kernel::heads::{Heads, Qkv};
use effattn_kernel::linear_attention::{
    Decay, FeatureActivation, Features, LinearAttention, linear_attention,
};
use effattn_kernel::rotary::{Pairing, Rotary};

/// Rotation of queries and keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rotation {
    /// Pairs of neighbours, frequencies from 1 to 1/10000 with both ends in.
    RetNet,
    Rope(Pairing),
    None,
}

/// How rows of scores are scaled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ScoreNorm {
    None,
    /// By the sums of decays and of scores, without a gradient through the latter.
    TorchScale,
}

const GAMMA: Knob<Option<Vec<f64>>> = Knob::auto_floats("gamma", 1e-6..=1.0)
    .doc("decay per step of each head; auto: 1 - 2^(-5 - h)")
    .source("RetNet eq. 8");
const ROTARY: Knob<Rotation> = Knob::words(
    "rotary",
    &[
        ("retnet", Rotation::RetNet),
        ("rope-half", Rotation::Rope(Pairing::Half)),
        ("rope-interleaved", Rotation::Rope(Pairing::Interleaved)),
        ("none", Rotation::None),
    ],
)
.doc("rotation of queries and keys: retnet (slowest pair 1/10000), rope-half, rope-interleaved or none")
.source("torchscale");
const SCORE_NORM: Knob<ScoreNorm> =
    Knob::words("score_norm", &[("none", ScoreNorm::None), ("torchscale", ScoreNorm::TorchScale)])
        .doc("torchscale: rows of scores are divided by their sums, computed densely")
        .source("RetNet sec. 2.1: the group norm makes it superfluous");

/// The table line.
pub static ENTRY: MechanismEntry = MechanismEntry {
    name: "retention",
    title: "Retention",
    paper: Paper {
        authors: "Sun et al.",
        title: "Retentive Network: A Successor to Transformer for Large Language Models",
        year: 2023,
        locator: "arXiv:2307.08621",
    },
    support: Support { bidirectional: true, causal: true, ..Support::NONE },
    knobs: &[
        GAMMA.spec(),
        ROTARY.spec(),
        SCORE_NORM.spec(),
        NORM.source("torchscale").spec(),
        output_stage::norm_eps(1e-6).source("torchscale").spec(),
        output_stage::norm_affine(false).source("torchscale").spec(),
        output_stage::gate(1).source("RetNet eq. 8").spec(),
        GATE_BIAS.source("torchscale").spec(),
    ],
    complexity: "O(n d^2)",
    time: Growth::Linear,
    memory: Growth::Linear,
    equations: "\
s_ij = rot(q_i) . rot(k_j) gamma^|i - j| / sqrt(D) over keys j that are not padded and, when causal, j <= i; o_i = sum_j s_ij v_j
out = norm per head and position, then o * silu(x w_g)",
    deviations: &[
        "The paper defines the causal form; in both directions the decay is gamma^|i - j| and the own position counts once.",
        "torchscale's default scales rows of scores first; up to norm_eps that is the same, and score_norm=torchscale is its code exactly.",
        "score_norm=torchscale stores rows of n scores, so that time and memory grow with the square of the length, and has no form that decodes.",
        "The decay counts positions, masked ones too. The paper's values are twice as wide as its keys; here both have the width of a head.",
    ],
    exceptions: &[Exception {
        property: Property::HeadsIndependent,
        applies: |_, _| true,
        reason: "SPEC-modern 1: every head has a decay of its own, which is no parameter and stays where it is",
    }],
    idle: &output_stage::IDLE,
    in_models: InModels { linear_form: output_stage::LINEAR_FORM, ..InModels::PLAIN },
    validate,
    needs: |knobs| Needs { x: knobs.get(&output_stage::GATE), ..Needs::default() },
    cost,
    pattern: |_, _| None,
    build,
};

fn validate(knobs: &Knobs, shape: &Shape) -> std::result::Result<(), String> {
    mixer::validate(knobs, shape)?;
    let Shape { heads, head_dim, .. } = *shape;
    if knobs.get(&ROTARY) != Rotation::None && !head_dim.is_multiple_of(2) {
        return Err(format!(
            "heads of width {head_dim} do not form pairs; choose an even width or rotary=none"
        ));
    }
    match knobs.get(&GAMMA) {
        Some(gamma) if gamma.len() != heads => {
            Err(format!("gamma has {} values for {heads} heads; give one per head", gamma.len()))
        }
        _ => Ok(()),
    }
}

fn cost(knobs: &Knobs, shape: &Shape) -> Cost {
    let Shape { batch, heads, head_dim, queries, causal, .. } = *shape;
    let directions = if causal { 1 } else { 2 };
    let macs = 2 * directions * heads * queries * head_dim * head_dim;
    Cost {
        core_macs: (batch * (macs + output_stage::macs(knobs, shape))) as u64,
        flops: (macs + output_stage::flops(knobs, shape)) as u64,
        state_bytes: (4 * heads * head_dim * head_dim) as u64,
    }
}

struct Retention {
    rotary: Option<Rotary>,
    /// gamma of every head.
    gamma: Vec<f64>,
    /// ln gamma.
    log: Vec<f64>,
    score_norm: ScoreNorm,
    scale: f64,
    causal: bool,
    output: OutputStage,
}

fn rotary(rotation: Rotation, head_dim: usize) -> Result<Option<Rotary>> {
    Ok(match rotation {
        Rotation::None => None,
        Rotation::Rope(pairing) => Some(Rotary::new(pairing, head_dim, 1e4)?),
        Rotation::RetNet => {
            let last = (head_dim / 2).saturating_sub(1).max(1) as f64;
            let frequencies = (0..head_dim / 2).map(|pair| 1e4f64.powf(-(pair as f64) / last)).collect();
            Some(Rotary::with_frequencies(Pairing::Interleaved, frequencies))
        }
    })
}

fn build(config: &MechanismConfig, builder: &ParamBuilder) -> Result<Box<dyn Mechanism>> {
    let MechanismConfig { knobs, heads, head_dim, width, causal, .. } = config;
    let usual = || (0..*heads).map(|head| 1.0 - 2f64.powi(-5 - head as i32)).collect();
    let gamma: Vec<f64> = knobs.get(&GAMMA).unwrap_or_else(usual);
    let bound = 2f64.powf(-2.5) * (6.0 / (width + heads * head_dim) as f64).sqrt();
    Ok(Box::new(Retention {
        rotary: rotary(knobs.get(&ROTARY), *head_dim)?,
        log: gamma.iter().map(|gamma| gamma.ln()).collect(),
        gamma,
        score_norm: knobs.get(&SCORE_NORM),
        scale: (*head_dim as f64).powf(-0.5),
        causal: *causal,
        output: OutputStage::new(config, builder, Init::Uniform { bound })?,
    }))
}

impl Mechanism for Retention {
    fn forward(&self, input: &AttentionInput) -> Result<AttentionOutput> {
        let qkv = self.rotated(input.qkv, 0)?;
        let out = match self.score_norm {
            ScoreNorm::None => (linear_attention(&qkv, &self.call(input))?, self.scale),
            ScoreNorm::TorchScale => (self.dense(&qkv, input.mask)?, 1.0),
        };
        self.finish(out, input)
    }

    fn init_decode(&self, batch: usize, _: usize, _: &Device) -> Result<Option<Box<dyn DecodeState>>> {
        Ok((self.causal && self.score_norm == ScoreNorm::None).then(|| LinearSums::start(batch)))
    }

    fn decode_step(&self, input: &AttentionInput, state: &mut dyn DecodeState) -> Result<AttentionOutput> {
        let state = state.downcast::<LinearSums>()?;
        let qkv = self.rotated(input.qkv, state.position())?;
        self.finish((state.attend(&qkv, &self.call(input))?, self.scale), input)
    }
}

/// Features and normaliser of a recurrence without either.
pub(super) const PLAIN: Features =
    Features::Elementwise { activation: FeatureActivation::Identity, reweight: None };

impl Retention {
    fn call<'a>(&'a self, input: &AttentionInput<'a>) -> LinearAttention<'a> {
        let decay = Decay::PerHead(&self.log);
        LinearAttention { features: PLAIN, guard: None, mask: input.mask, causal: self.causal, decay }
    }

    fn rotated(&self, qkv: &Qkv, start: usize) -> Result<Qkv> {
        self.rotary.as_ref().map_or_else(|| Ok(qkv.clone()), |rotary| rotary.rotate_qk(qkv, start))
    }

    /// torchscale's rows of scores, [b, h, n, n].
    fn dense(&self, qkv: &Qkv, mask: Option<&Tensor>) -> Result<Heads> {
        let (q, k, v) = (qkv.q()?, (qkv.k()? * self.scale)?, qkv.v()?.contiguous()?);
        let (b, h, n, _) = q.dims4()?;
        let mut decay = Vec::with_capacity(h * n * n);
        for gamma in &self.gamma {
            for i in 0..n {
                let weight = |j: usize| {
                    if self.causal && j > i { 0.0 } else { gamma.powi(i.abs_diff(j) as i32) }
                };
                let sum: f64 = (0..n).map(weight).sum();
                decay.extend((0..n).map(|j| (weight(j) / sum.sqrt()) as f32));
            }
        }
        let decay = Tensor::from_vec(decay, (1, h, n, n), q.device())?.to_dtype(q.dtype())?;
        let mut scores = q.contiguous()?.matmul(&k.t()?.contiguous()?)?.broadcast_mul(&decay)?;
        if let Some(mask) = mask {
            scores = scores.broadcast_mul(&mask.to_dtype(q.dtype())?.reshape((b, 1, 1, n))?)?;
        }
        let sums = scores.detach().abs()?.sum_keepdim(3)?.clamp(1.0, 5e4)?;
        Ok(Heads::Split(scores.broadcast_div(&sums)?.matmul(&v)?))
    }

    fn finish(&self, (out, scale): (Heads, f64), input: &AttentionInput) -> Result<AttentionOutput> {
        Ok(self.output.apply(out, scale, input.x)?.into())
    }
}
