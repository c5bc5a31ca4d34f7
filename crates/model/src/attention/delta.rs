//! DeltaNet (Schlag et al. 2021; Yang et al. 2024), linear attention that replaces what is stored under a key, and Gated DeltaNet
//! (Yang et al. 2025), whose state decays per token and head.

use candle_core::{Device, Result, Tensor};
use candle_nn::ops::sigmoid;

use super::decode::{Carried, DecodeState};
use super::knobs::{Knob, KnobSpec, Knobs};
use super::output_stage::{self, GATE_BIAS, NORM, NORM_AFFINE, NORM_EPS, OutputStage};
use super::{
    AttentionInput, AttentionOutput, ConvForm, Cost, Growth, InModels, Mechanism, MechanismConfig,
    MechanismEntry, Needs, Paper, Shape, Support, mixer,
};
use crate::nn::params::{Init, ParamBuilder};
use effattn_kernel::activation::softplus;
use effattn_kernel::delta_rule::{DeltaRows, DeltaRule, NormalizeConfig, decode, delta_rule, normalize};
use effattn_kernel::device::rng::RngStream;
use effattn_kernel::heads::Heads;
use effattn_kernel::linear::linear;

/// `deltanet`.
pub static DELTANET: MechanismEntry = PLAIN;

const PLAIN: MechanismEntry = MechanismEntry {
    name: "deltanet",
    title: "DeltaNet",
    paper: Paper {
        authors: "Yang et al.",
        title: "Parallelizing Linear Transformers with the Delta Rule over Sequence Length",
        year: 2024,
        locator: "arXiv:2406.06484",
    },
    support: SUPPORT,
    knobs: &knobs(0),
    complexity: "O(n d^2)",
    time: Growth::Linear,
    memory: Growth::Linear,
    equations: "\
k <- act(k) / |act(k)|, q <- act(q) / |act(q)| / sqrt(D), v <- act(v), beta_t = sigmoid(x_t w_beta), times 2 with neg_eigval
S <- S + k_t (beta_t (v_t - S^T k_t))^T, o_t = S^T q_t; then norm, weight and gate per head",
    deviations: DEVIATIONS,
    exceptions: &[],
    idle: &output_stage::IDLE,
    in_models: InModels { linear_form: LINEAR_FORM, ..InModels::PLAIN },
    validate,
    needs,
    cost: |knobs, shape| cost(1, knobs, shape),
    pattern: |_, _| None, // every pair, but what is stored is overwritten: how much is left depends on the input
    build: |config, builder| build(false, config, builder),
};

/// `gated-deltanet`.
pub static GATED_DELTANET: MechanismEntry = MechanismEntry {
    name: "gated-deltanet",
    title: "Gated DeltaNet",
    paper: Paper {
        authors: "Yang et al.",
        title: "Gated Delta Networks: Improving Mamba2 with Delta Rule",
        year: 2025,
        locator: "arXiv:2412.06464",
    },
    knobs: &knobs(1),
    equations: "\
As deltanet with a decay before the old value is read: alpha_t = exp(-exp(A_log) softplus(x_t w_a + dt_bias)) per head
S <- alpha_t S; S <- S + k_t (beta_t (v_t - S^T k_t))^T, o_t = S^T q_t; then norm, weight and gate per head",
    in_models: InModels {
        without_decay: &["A_log", "dt_bias"],
        linear_form: LINEAR_FORM,
        ..InModels::PLAIN
    },
    cost: |knobs, shape| cost(2, knobs, shape),
    build: |config, builder| build(true, config, builder),
    ..PLAIN
};

/// The knobs, with word `gate` of the output gate as the default.
const fn knobs(gate: usize) -> [KnobSpec; 10] {
    [
        QK_ACT.spec(),
        V_ACT.spec(),
        L2_EPS.spec(),
        NEG_EIGVAL.spec(),
        CONV.spec(),
        NORM.source("released code").spec(),
        NORM_EPS.source("released code").spec(),
        NORM_AFFINE.source("released code").spec(),
        output_stage::gate(gate).source("released code").spec(),
        GATE_BIAS.source("released code").spec(),
    ]
}

const ACTIVATIONS: &[(&str, bool); 2] = &[("silu", true), ("identity", false)];
const QK_ACT: Knob<bool> = Knob::words("qk_act", ACTIVATIONS)
    .doc("activation of queries and keys, silu or identity")
    .source("released code");
const V_ACT: Knob<bool> =
    Knob::words("v_act", ACTIVATIONS).doc("activation of values, silu or identity").source("released code");
const L2_EPS: Knob<f64> = Knob::float("l2_eps", 1e-6, 1e-12..=1.0)
    .doc("added to the squared length that queries and keys are divided by")
    .source("released code");
const NEG_EIGVAL: Knob<bool> = Knob::bool("neg_eigval", false)
    .doc("beta in (0, 2), so that a step may turn the sign of what is stored")
    .source("released code");
pub(super) const CONV: Knob<usize> = Knob::int("conv", 4, 0..=64)
    .doc("taps of the causal convolution of q, k and v in front of the activations; 0: without")
    .source("DeltaNet sec. 4.2 and released code");

/// The forms: defined from the first position to the last only.
const SUPPORT: Support = Support { causal: true, ..Support::NONE };

const DEVIATIONS: &[&str] = &[
    "The paper has no factor 1/sqrt(D) on queries; the released code has, and behind the norm it matters through norm_eps: the code's is taken.",
    "Where conv is set, the released code's activation belongs to the convolution; here it follows it: the same function.",
    "No bidirectional form is defined by the papers, so there is none here.",
    "A masked position leaves the state as it is: no write and no decay.",
];

/// [`InModels::linear_form`](super::InModels::linear_form): that of the output stage, and values as they are.
const LINEAR_FORM: &[(&str, &str)] =
    &[("v_act", "identity"), ("norm", "none"), ("norm_affine", "false"), ("gate", "none")];

/// As many keys as queries, in the causal form.
fn validate(knobs: &Knobs, shape: &Shape) -> std::result::Result<(), String> {
    if !shape.causal {
        return Err(
            "the delta rule is defined for causal models only; choose gla or retention for both directions"
                .into(),
        );
    }
    mixer::validate(knobs, shape)
}

/// Projections, x and the convolution.
fn needs(knobs: &Knobs) -> Needs {
    let taps = knobs.get(&CONV);
    let conv = (taps > 0).then_some(ConvForm { taps, bias: false, silu: false });
    Needs { x: true, conv, ..Needs::default() }
}

/// Multiply-adds of the recurrence, of `gates` projections to one number per head and of the output gate.
fn cost(gates: usize, knobs: &Knobs, shape: &Shape) -> Cost {
    let Shape { batch, heads, head_dim, width, queries, .. } = *shape;
    let macs = queries * heads * (3 * head_dim * head_dim + gates * width);
    Cost {
        core_macs: (batch * (macs + output_stage::macs(knobs, shape))) as u64,
        flops: (macs + output_stage::flops(knobs, shape)) as u64,
        state_bytes: (4 * heads * head_dim * head_dim) as u64,
    }
}

/// exp(-exp(A_log) softplus(x w_a + dt_bias)) per head.
struct Decay {
    weight: Tensor, // [h, e]
    rate: Tensor,   // A_log [h]
    bias: Tensor,   // dt_bias [h]
}

impl Decay {
    fn new(config: &MechanismConfig, builder: &ParamBuilder) -> Result<Self> {
        let heads = config.heads;
        Ok(Self {
            weight: builder.param("w_a", &[heads, config.width], Init::normal(0.02))?,
            rate: builder.drawn("A_log", &[heads], |stream| {
                (0..heads).map(|_| stream.uniform(1e-6, 16.0).ln() as f32).collect()
            })?,
            bias: builder
                .drawn("dt_bias", &[heads], |stream| (0..heads).map(|_| step_bias(stream)).collect())?,
        })
    }

    /// ln of the decay, [b, n, h].
    fn log(&self, x: &Tensor) -> Result<Tensor> {
        let step = softplus(&linear(x, &self.weight, Some(&self.bias))?)?;
        step.broadcast_mul(&self.rate.exp()?.neg()?)
    }
}

/// The number whose softplus is log-uniform in (0.001, 0.1), at least 1e-4 (Mamba-2).
pub(super) fn step_bias(stream: &mut RngStream) -> f32 {
    let step = stream.uniform(0.001f64.ln(), 0.1f64.ln()).exp().max(1e-4);
    (step + (-(-step).exp_m1()).ln()) as f32
}

struct Delta {
    normalize: NormalizeConfig,
    beta: Tensor, // [h, e]
    /// Largest beta.
    most: f64,
    decay: Option<Decay>,
    output: OutputStage,
}

/// Builds DeltaNet, or with `decays` Gated DeltaNet.
fn build(decays: bool, config: &MechanismConfig, builder: &ParamBuilder) -> Result<Box<dyn Mechanism>> {
    let MechanismConfig { knobs, heads, head_dim, width, .. } = config;
    Ok(Box::new(Delta {
        normalize: NormalizeConfig {
            silu_qk: knobs.get(&QK_ACT),
            silu_v: knobs.get(&V_ACT),
            eps: knobs.get(&L2_EPS),
            query_scale: (*head_dim as f64).powf(-0.5),
        },
        beta: builder.param("w_beta", &[*heads, *width], Init::normal(0.02))?,
        most: if knobs.get(&NEG_EIGVAL) { 2.0 } else { 1.0 },
        decay: if decays { Some(Decay::new(config, builder)?) } else { None },
        output: OutputStage::new(config, builder, Init::normal(0.02))?,
    }))
}

type State = Carried<Option<Tensor>>;

impl Mechanism for Delta {
    fn forward(&self, input: &AttentionInput) -> Result<AttentionOutput> {
        self.run(input, delta_rule)
    }

    fn init_decode(&self, batch: usize, _: usize, _: &Device) -> Result<Option<Box<dyn DecodeState>>> {
        Ok(Some(State::start(batch)))
    }

    fn decode_step(&self, input: &AttentionInput, state: &mut dyn DecodeState) -> Result<AttentionOutput> {
        let state = state.downcast::<State>()?;
        state.advance(|held, _| self.run(input, |rows, call| decode::step(rows, call, held)))
    }
}

impl Delta {
    fn run(
        &self,
        input: &AttentionInput,
        rule: impl FnOnce(&DeltaRows, &DeltaRule) -> Result<Heads>,
    ) -> Result<AttentionOutput> {
        let x = input.layer_input()?;
        let rows = normalize(&DeltaRows::new(input.qkv)?, &self.normalize)?;
        let per_head = |x: Tensor| x.transpose(1, 2)?.contiguous(); // [b, n, h] -> [b, h, n]
        let beta = per_head((sigmoid(&linear(x, &self.beta, None)?)? * self.most)?)?;
        let decay = self.decay.as_ref().map(|decay| per_head(decay.log(x)?)).transpose()?;
        let call = DeltaRule { beta: &beta, log_decay: decay.as_ref(), mask: input.mask };
        Ok(self.output.apply(rule(&rows, &call)?, 1.0, Some(x))?.into())
    }
}
