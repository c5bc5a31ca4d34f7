//! Mamba-2's state space duality (Dao and Gu 2024): a recurrence whose decay and write weight come from one time step per head and
//! position (SPEC-modern section 3). Queries, keys and values are the paper's C, B and x.

use candle_core::{Device, Result, Tensor};

use super::decode::{DecodeState, LinearSums};
use super::knobs::{Knob, Knobs};
use super::retention::PLAIN;
use super::{
    AttentionInput, AttentionOutput, ConvForm, Cost, Exception, Growth, HeadShape, Idle, InModels, Mechanism,
    MechanismConfig, MechanismEntry, Needs, Paper, Projections, Property, Shape, Support, delta,
    rotary_softmax,
};
use crate::nn::params::{Init, ParamBuilder};
use effattn_kernel::activation::{softplus, swiglu};
use effattn_kernel::gating::{skip, weigh_heads};
use effattn_kernel::heads::{Heads, Qkv};
use effattn_kernel::linear::linear;
use effattn_kernel::linear_attention::{Decay, LinearAttention, linear_attention};
use effattn_kernel::norm::rms_norm;
use effattn_kernel::tape::{merge_heads, split_heads};

const GROUPS: Knob<Option<usize>> = Knob::int_or_auto("groups", Some(1), 1..=1 << 12)
    .doc("heads of queries and keys, each shared by neighbouring heads; auto: one per head")
    .source("released code");
const KEY_DIM: Knob<Option<usize>> = Knob::auto_int("Dk", 1..=1 << 12)
    .doc("state size: width of queries and keys; auto: the width of a head")
    .source("our choice; the released blocks have 128 for heads of 64");
const DT_LIMIT: Knob<Option<Vec<f64>>> = Knob::auto_floats("dt_limit", 0.0..=f64::INFINITY)
    .doc("smallest and largest time step, such as 0.02+0.3; auto: none")
    .source("released code");
const GATED: Knob<bool> = Knob::words("out_norm", &[("none", false), ("gated-rms", true)])
    .doc("gated-rms: results times silu(x w_z), then one RMS norm over all heads")
    .source("the bare core; the released block has gated-rms");
const NORM_EPS: Knob<f64> =
    Knob::float("norm_eps", 1e-5, 1e-12..=1.0).doc("eps of the norm").source("released code");
const CONV: Knob<usize> = delta::CONV
    .doc("taps of the causal convolution and SiLU of q, k and v in front; 0: without")
    .source("Mamba-2 sec. 7 and released code");

/// The table line.
pub static ENTRY: MechanismEntry = MechanismEntry {
    name: "mamba2",
    title: "Mamba-2 (SSD)",
    paper: Paper {
        authors: "Dao and Gu",
        title: "Transformers are SSMs: Generalized Models and Efficient Algorithms Through Structured State Space Duality",
        year: 2024,
        locator: "arXiv:2405.21060",
    },
    support: Support { bidirectional: true, causal: true, ..Support::NONE },
    knobs: &[GROUPS.spec(), KEY_DIM.spec(), DT_LIMIT.spec(), GATED.spec(), NORM_EPS.spec(), CONV.spec()],
    complexity: "O(n d^2)",
    time: Growth::Linear,
    memory: Growth::Linear,
    equations: "\
dt_t = softplus(x_t w_dt + dt_bias), a_t = exp(-exp(A_log) dt_t)
S_t = a_t S_{t-1} + dt_t k_t v_t^T, y_t = S_t^T q_t + D_skip v_t; gated-rms: rms(y * silu(x w_z)) * norm_w",
    deviations: &[
        "The paper defines the causal form; in both directions the same recurrence runs from the right as well, and the own position and D_skip count once. Hydra shifts both passes instead.",
        "The gate comes before the norm, as in the released code (the other recurrences norm first).",
        "The released block doubles the model's width and takes q, k and v from one projection; here they are projections of the layer.",
        "A masked position leaves the state as it is: no write and no decay.",
    ],
    exceptions: &[Exception {
        property: Property::HeadsIndependent,
        applies: |knobs, _| knobs.get(&GATED),
        reason: "SPEC-modern 3: one norm over the channels of all heads",
    }],
    idle: &[Idle { knob: NORM_EPS.name(), when: |knobs, _| !knobs.get(&GATED), why: "with out_norm=none" }],
    in_models: InModels {
        without_decay: &["A_log", "dt_bias", "D_skip"],
        linear_form: &[("out_norm", "none")],
        ..InModels::PLAIN
    },
    validate,
    needs,
    cost,
    pattern: |_, _| None,
    build,
};

fn validate(knobs: &Knobs, shape: &Shape) -> std::result::Result<(), String> {
    rotary_softmax::check_shape(knobs.get(&GROUPS), knobs, shape)?;
    match knobs.get(&DT_LIMIT).as_deref() {
        None => Ok(()),
        Some([least, most]) if least <= most => Ok(()),
        Some(_) => Err("dt_limit takes the smallest and the largest time step, such as 0.02+0.3".into()),
    }
}

fn needs(knobs: &Knobs) -> Needs {
    let shared = Some(HeadShape { heads: knobs.get(&GROUPS), dim: knobs.get(&KEY_DIM) });
    let taps = knobs.get(&CONV);
    Needs {
        projections: Projections { q: shared, k: shared, v: Some(HeadShape::LAYER) },
        x: true,
        conv: (taps > 0).then_some(ConvForm { taps, bias: true, silu: true }),
        ..Needs::default()
    }
}

fn cost(knobs: &Knobs, shape: &Shape) -> Cost {
    let Shape { batch, heads, head_dim, width, queries, causal, .. } = *shape;
    let key_dim = knobs.get(&KEY_DIM).unwrap_or(head_dim);
    let directions = if causal { 1 } else { 2 };
    let channels = heads * head_dim;
    let gate = if knobs.get(&GATED) { width * channels } else { 0 };
    let macs = queries * (channels * (2 * directions * key_dim + 1) + width * heads + gate);
    let norm = if knobs.get(&GATED) { 5 * queries * channels } else { 0 };
    Cost {
        core_macs: (batch * macs) as u64,
        flops: (macs + norm) as u64,
        state_bytes: (4 * channels * key_dim) as u64,
    }
}

struct Mamba2 {
    step: Tensor,      // w_dt [h, e]
    step_bias: Tensor, // dt_bias [h]
    rate: Tensor,      // A_log [h]
    skip: Tensor,      // D_skip [h]
    /// w_z [h, e, d] and norm_w [h, d].
    gated: Option<[Tensor; 2]>,
    limit: Option<[f64; 2]>,
    eps: f64,
    causal: bool,
}

fn build(config: &MechanismConfig, builder: &ParamBuilder) -> Result<Box<dyn Mechanism>> {
    let MechanismConfig { knobs, heads, head_dim, width, causal, .. } = config;
    let gated = knobs.get(&GATED).then(|| -> Result<_> {
        let weight = builder.param("w_z", &[*heads, *width, *head_dim], Init::fan_in(*width))?;
        Ok([weight, builder.param("norm_w", &[*heads, *head_dim], Init::ONE)?])
    });
    Ok(Box::new(Mamba2 {
        step: builder.param("w_dt", &[*heads, *width], Init::fan_in(*width))?,
        step_bias: builder
            .drawn("dt_bias", &[*heads], |stream| (0..*heads).map(|_| delta::step_bias(stream)).collect())?,
        rate: builder.drawn("A_log", &[*heads], |stream| {
            (0..*heads).map(|_| stream.uniform(1.0, 16.0).ln() as f32).collect()
        })?,
        skip: builder.param("D_skip", &[*heads], Init::ONE)?,
        gated: gated.transpose()?,
        limit: knobs.get(&DT_LIMIT).and_then(|limit| limit.try_into().ok()),
        eps: knobs.get(&NORM_EPS),
        causal: *causal,
    }))
}

impl Mechanism for Mamba2 {
    fn forward(&self, input: &AttentionInput) -> Result<AttentionOutput> {
        self.run(input, linear_attention)
    }

    fn init_decode(&self, batch: usize, _: usize, _: &Device) -> Result<Option<Box<dyn DecodeState>>> {
        Ok(self.causal.then(|| LinearSums::start(batch)))
    }

    fn decode_step(&self, input: &AttentionInput, state: &mut dyn DecodeState) -> Result<AttentionOutput> {
        let state = state.downcast::<LinearSums>()?;
        self.run(input, |qkv, call| state.attend(qkv, call))
    }
}

impl Mamba2 {
    fn run(
        &self,
        input: &AttentionInput,
        attend: impl FnOnce(&Qkv, &LinearAttention) -> Result<Heads>,
    ) -> Result<AttentionOutput> {
        let x = input.layer_input()?;
        let mut step = softplus(&linear(x, &self.step, Some(&self.step_bias))?)?; // [b, n, h]
        if let Some([least, most]) = self.limit {
            step = step.maximum(least)?;
            if most.is_finite() {
                step = step.minimum(most)?;
            }
        }
        let log = step.broadcast_mul(&self.rate.exp()?.neg()?)?.transpose(1, 2)?.contiguous()?; // [b, h, n]
        let qkv = input.qkv.apart()?;
        let v = qkv.v()?;
        let (heads, width) = (v.dim(1)?, v.dim(3)?);
        let v = merge_heads(&v)?; // [b, n, h d]
        let written = split_heads(&weigh_heads(&v, &step)?, heads, (0, 1))?;
        let qkv = Qkv::separate(qkv.q()?, qkv.k()?, written);
        let decay = Decay::PerToken { log: &log, backward: None };
        let call =
            LinearAttention { features: PLAIN, guard: None, mask: input.mask, causal: self.causal, decay };
        let read = attend(&qkv, &call)?.merged()?;
        let channels = self.skip.unsqueeze(1)?.broadcast_as((heads, width))?.flatten_all()?;
        let y = skip(&read, &v, &channels, false)?;
        let Some([weight, scale]) = &self.gated else { return Ok(Heads::Merged { rows: y, heads }.into()) };
        let rows = weight.transpose(1, 2)?.contiguous()?.flatten_to(1)?;
        let y = swiglu(&linear(x, &rows, None)?, &y)?;
        let y = rms_norm(&y, &scale.flatten_all()?, self.eps)?;
        Ok(Heads::Merged { rows: y, heads: scale.dim(0)? }.into())
    }
}
