//! Gated linear attention (Yang et al. 2023): a recurrence that forgets by a gate per key channel and position
//! (SPEC-modern section 2).

use candle_core::{Device, Result, Tensor};

use super::decode::{DecodeState, LinearSums};
use super::knobs::{Knob, Knobs};
use super::output_stage::{self, GATE_BIAS, NORM, NORM_AFFINE, NORM_EPS, OutputStage};
use super::retention::PLAIN;
use super::{
    AttentionInput, AttentionOutput, Cost, Growth, Idle, InModels, Mechanism, MechanismConfig,
    MechanismEntry, Needs, Paper, Shape, Support, mixer,
};
use crate::nn::params::{Init, ParamBuilder};
use effattn_kernel::activation::scaled_softplus;
use effattn_kernel::linear::{linear, linear_in_out};
use effattn_kernel::linear_attention::{Decay, LinearAttention, linear_attention};
use effattn_kernel::tape::split_heads;

const RANK: Knob<usize> =
    Knob::int("rank", 16, 1..=1 << 12).doc("rank of the projection to gates").source("GLA sec. 4.4");
const TAU: Knob<f64> =
    Knob::float("tau", 16.0, 1e-3..=1e6).doc("log gates are divided by it").source("GLA sec. 4.4");
const CLAMP_MIN: Knob<Option<f64>> =
    Knob::auto_float("clamp_min", -1e3..=0.0).doc("smallest log gate; auto: none").source("released code");
const SEPARATE: Knob<bool> = Knob::words("bidir_gate", &[("shared", false), ("separate", true)])
    .doc("gates of the pass from the right: shared, or separate with parameters of their own")
    .source("our choice: the paper has no bidirectional form");

/// The table line.
pub static ENTRY: MechanismEntry = MechanismEntry {
    name: "gla",
    title: "Gated linear attention",
    paper: Paper {
        authors: "Yang et al.",
        title: "Gated Linear Attention Transformers with Hardware-Efficient Training",
        year: 2023,
        locator: "arXiv:2312.06635",
    },
    support: Support { bidirectional: true, causal: true, ..Support::NONE },
    knobs: &[
        RANK.spec(),
        TAU.spec(),
        CLAMP_MIN.spec(),
        SEPARATE.spec(),
        NORM.source("released code").spec(),
        NORM_EPS.source("released code").spec(),
        NORM_AFFINE.source("released code").spec(),
        output_stage::gate(1).source("GLA eq. 5").spec(),
        GATE_BIAS.source("released code").spec(),
    ],
    complexity: "O(n d^2)",
    time: Growth::Linear,
    memory: Growth::Linear,
    equations: "\
alpha_t = sigmoid((x_t w_gk1) w_gk2 + b_gk)^(1 / tau) per key channel
S_t = diag(alpha_t) S_{t-1} + k_t v_t^T, o_t = S_t^T q_t / sqrt(D); then norm, weight and gate per head",
    deviations: &[
        "The paper defines the causal form; in both directions the same recurrence runs from the right as well, and the own position counts once.",
        "The paper's LayerNorm and biased output gate are norm=ln,gate_bias=true; the default is the released code's.",
        "The released layer has keys of half the model's width; here keys and values have the width of a head.",
        "A masked position leaves the state as it is: no write and no decay.",
    ],
    exceptions: &[],
    idle: &[
        Idle { knob: NORM_EPS.name(), when: output_stage::IDLE[0].when, why: output_stage::IDLE[0].why },
        Idle { knob: GATE_BIAS.name(), when: output_stage::IDLE[1].when, why: output_stage::IDLE[1].why },
        Idle { knob: SEPARATE.name(), when: |_, shape| shape.causal, why: "in the causal form" },
    ],
    in_models: InModels { linear_form: output_stage::LINEAR_FORM, ..InModels::PLAIN },
    validate: mixer::validate,
    needs: |_| Needs { x: true, ..Needs::default() },
    cost,
    pattern: |_, _| None,
    build,
};

fn cost(knobs: &Knobs, shape: &Shape) -> Cost {
    let Shape { batch, heads, head_dim, width, queries, causal, .. } = *shape;
    let directions = if causal { 1 } else { 2 };
    let gates = if knobs.get(&SEPARATE) && !causal { 2 } else { 1 };
    let macs = 2 * directions * heads * queries * head_dim * head_dim
        + gates * queries * knobs.get(&RANK) * (width + heads * head_dim);
    Cost {
        core_macs: (batch * (macs + output_stage::macs(knobs, shape))) as u64,
        flops: (macs + output_stage::flops(knobs, shape)) as u64,
        state_bytes: (4 * heads * head_dim * head_dim) as u64,
    }
}

/// A projection of x to log gates.
struct Gates {
    down: Tensor, // [e, r]
    up: Tensor,   // [h, r, d]
    bias: Tensor, // [h, d]
}

impl Gates {
    fn new(config: &MechanismConfig, builder: &ParamBuilder, suffix: &str) -> Result<Self> {
        let MechanismConfig { knobs, heads, head_dim, width, .. } = config;
        let rank = knobs.get(&RANK);
        let param =
            |name: &str, shape: &[usize], init| builder.param(&format!("{name}{suffix}"), shape, init);
        Ok(Self {
            down: param("w_gk1", &[*width, rank], Init::normal(0.02))?,
            up: param("w_gk2", &[*heads, rank, *head_dim], Init::normal(0.02))?,
            bias: param("b_gk", &[*heads, *head_dim], Init::ZERO)?,
        })
    }
}

struct Gla {
    gates: Gates,
    backward: Option<Gates>,
    tau: f64,
    clamp_min: Option<f64>,
    scale: f64,
    causal: bool,
    output: OutputStage,
}

fn build(config: &MechanismConfig, builder: &ParamBuilder) -> Result<Box<dyn Mechanism>> {
    let MechanismConfig { knobs, head_dim, causal, .. } = config;
    let separate = knobs.get(&SEPARATE) && !causal;
    Ok(Box::new(Gla {
        gates: Gates::new(config, builder, "")?,
        backward: separate.then(|| Gates::new(config, builder, "_bwd")).transpose()?,
        tau: knobs.get(&TAU),
        clamp_min: knobs.get(&CLAMP_MIN),
        scale: (*head_dim as f64).powf(-0.5),
        causal: *causal,
        output: OutputStage::new(config, builder, Init::normal(0.02))?,
    }))
}

impl Mechanism for Gla {
    fn forward(&self, input: &AttentionInput) -> Result<AttentionOutput> {
        self.run(input, |call| linear_attention(input.qkv, call))
    }

    fn init_decode(&self, batch: usize, _: usize, _: &Device) -> Result<Option<Box<dyn DecodeState>>> {
        Ok(self.causal.then(|| LinearSums::start(batch)))
    }

    fn decode_step(&self, input: &AttentionInput, state: &mut dyn DecodeState) -> Result<AttentionOutput> {
        let state = state.downcast::<LinearSums>()?;
        self.run(input, |call| state.attend(input.qkv, call))
    }
}

impl Gla {
    fn run(
        &self,
        input: &AttentionInput,
        attend: impl FnOnce(&LinearAttention) -> Result<effattn_kernel::heads::Heads>,
    ) -> Result<AttentionOutput> {
        let x = input.layer_input()?;
        let log = self.log(&self.gates, x)?;
        let backward = self.backward.as_ref().map(|gates| self.log(gates, x)).transpose()?;
        let decay = Decay::PerChannel { log: &log, backward: backward.as_ref() };
        let call =
            LinearAttention { features: PLAIN, guard: None, mask: input.mask, causal: self.causal, decay };
        Ok(self.output.apply(attend(&call)?, self.scale, Some(x))?.into())
    }

    /// Log gates [b, h, n, d] of `x` [b, n, e].
    fn log(&self, gates: &Gates, x: &Tensor) -> Result<Tensor> {
        let low = linear_in_out(x, &gates.down, None)?;
        let up = gates.up.transpose(1, 2)?.contiguous()?.flatten_to(1)?; // [h d, r]
        let logits = linear(&low, &up, Some(&gates.bias.flatten_all()?))?;
        let mut log = scaled_softplus(&logits, -1.0, -1.0 / self.tau)?;
        if let Some(least) = self.clamp_min {
            log = log.maximum(least)?;
        }
        split_heads(&log, gates.up.dim(0)?, (0, 1))
    }
}
