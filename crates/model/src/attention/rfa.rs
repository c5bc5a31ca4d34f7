//! Random Feature Attention (Peng et al. 2021): random features of normalised queries and keys, with an
//! optional gate that forgets.

use candle_core::{Device, Result, Tensor, bail};

use super::decode::{DecodeState, LinearSums};
use super::knobs::{Knob, KnobSpec, Knobs};
use super::{
    AttentionInput, AttentionOutput, Cost, Growth, InModels, Mechanism, MechanismConfig, MechanismEntry,
    Needs, Paper, Shape, Support, feature,
};
use crate::nn::params::{Init, ParamBuilder};
use effattn_kernel::linear;
use effattn_kernel::linear_attention::{
    Decay, Features, Guard, LinearAttention, RandomKernel, linear_attention,
};

const KERNEL: Knob<RandomKernel> =
    Knob::words("kernel", &[("gaussian", RandomKernel::Gaussian), ("arccos", RandomKernel::ArcCos)])
        .doc("kernel that the features estimate")
        .source("Peng et al. sec. 3.1");
const PROJ_DIM: Knob<usize> = Knob::int("proj_dim", 64, 1..=1 << 16)
    .doc("random projections P; gaussian has 2 P features, arccos P")
    .source("released code");
const TAU: Knob<f64> = Knob::float("tau", 1.0, 1e-3..=1e3).doc("temperature").source("released code");
const LEARNED_SIGMA: Knob<bool> = Knob::bool("learned_sigma", true)
    .doc("whether each dimension has a learned scale, starting at 1")
    .source("released code");
const NORM_EPS: Knob<f64> = Knob::float("norm_eps", 1e-3, 1e-12..=1.0)
    .doc("added to the norm of queries and keys")
    .source("released code");
const SCALE: Knob<Option<f64>> = Knob::auto_float("scale", 1e-6..=1e3)
    .doc("factor on every feature; auto: proj_dim^(-1/2)")
    .source("Peng et al. eq. 4");
const GUARD: Knob<Option<feature::MakeGuard>> = Knob::words(
    "guard",
    &[("auto", None), ("clamp_min", Some(Guard::ClampMin as _)), ("abs_clamp_min", Some(Guard::AbsClampMin as _))],
)
    .doc("clamp_min: max(den, eps); abs_clamp_min: max(|den|, eps); auto: clamp_min when causal, else abs_clamp_min")
    .source("released code");
const EPS: Knob<f64> = Knob::float("eps", 1e-4, 1e-12..=1e6)
    .doc("eps of the guard")
    .source("our choice; the paper has none, the released code 1");
const GATE: Knob<bool> = Knob::bool("gate", false)
    .doc("whether the causal sums forget by a learned gate")
    .source("Peng et al. sec. 3.2");

/// The table line.
pub static ENTRY: MechanismEntry = MechanismEntry {
    name: "rfa",
    title: "Random Feature Attention",
    paper: Paper {
        authors: "Peng et al.",
        title: "Random Feature Attention",
        year: 2021,
        locator: "arXiv:2103.02143",
    },
    support: Support { bidirectional: true, causal: true, cross: true, ..Support::NONE },
    knobs: KNOBS,
    complexity: "O(n p d)",
    time: Growth::Linear,
    memory: Growth::Linear,
    equations: "\
xh = x / (|x| + norm_eps) for queries and keys; p = (sigma proj / tau) xh, proj [H, proj_dim, D] normal, sigma learned
phi = scale [sin p, cos p] (gaussian) or scale relu(p) (arccos)
out_i = sum_j <phi(q_i), phi(k_j)> v_j / guard(sum_j <phi(q_i), phi(k_j)>), over keys j that are not padded and, when causal, j <= i
gate (causal): g_t = sigmoid(w_gate . x_t + b_gate), S_t = g_t S_{t-1} + (1 - g_t) phi(k_t) v_t^T, z_t alike; a masked step leaves both",
    deviations: &[
        "The released code scales features by 0.1 and clamps denominators at 1 (scale=0.1,eps=1 reproduces it); the default here is the paper's scale proj_dim^(-1/2) with a small clamp.",
        "Features have both signs, so that denominators come near 0, where a small clamp bounds neither outputs nor gradients: a small encoder of masked words learned nothing with the default and learned with scale=0.1,eps=1 (docs/words.md).",
        "The released code's masked form has yet another guard; not followed.",
        "Arc-cosine features and the gate are not in the release: the paper's formulas are followed, one gate per head and position.",
        "The released code draws proj anew from a pool of 500 while training; here it is drawn once.",
    ],
    exceptions: &[],
    idle: &[],
    in_models: InModels::PLAIN,
    validate,
    needs: |knobs| Needs { x: knobs.get(&GATE), ..Needs::default() },
    cost,
    pattern: feature::pattern,
    build,
};

static KNOBS: &[KnobSpec] = &[
    KERNEL.spec(),
    PROJ_DIM.spec(),
    TAU.spec(),
    LEARNED_SIGMA.spec(),
    NORM_EPS.spec(),
    SCALE.spec(),
    GUARD.spec(),
    EPS.spec(),
    GATE.spec(),
];

fn validate(knobs: &Knobs, shape: &Shape) -> std::result::Result<(), String> {
    if knobs.get(&GATE) && !shape.causal {
        return Err("gate=true is causal only; take gate=false or a causal task".into());
    }
    feature::validate(knobs, shape)
}

fn cost(knobs: &Knobs, shape: &Shape) -> Cost {
    let Shape { batch, heads, head_dim, width, queries, keys, .. } = *shape;
    let p = knobs.get(&PROJ_DIM);
    let features = match knobs.get(&KERNEL) {
        RandomKernel::Gaussian => 2 * p,
        RandomKernel::ArcCos => p,
    };
    let gate = if knobs.get(&GATE) { queries * width * heads } else { 0 };
    let extra = heads * p * head_dim * (queries + keys) + gate;
    let sums = feature::linear_cost(features, shape);
    Cost {
        core_macs: sums.core_macs + (batch * extra) as u64,
        flops: sums.flops + extra as u64,
        state_bytes: sums.state_bytes,
    }
}

struct Rfa {
    /// sigma proj / tau [h, p, d].
    proj: Tensor,
    sigma: Option<Tensor>,
    gate: Option<(Tensor, Tensor)>,
    kernel: RandomKernel,
    norm_eps: f64,
    scale: f64,
    guard: Guard,
    causal: bool,
}

fn build(config: &MechanismConfig, builder: &ParamBuilder) -> Result<Box<dyn Mechanism>> {
    let (knobs, h, d) = (&config.knobs, config.heads, config.head_dim);
    let p = knobs.get(&PROJ_DIM);
    let proj =
        builder.constant("proj", |stream, device| stream.normal_tensor((h, p, d), 0.0, 1.0, device))?;
    if proj.dims() != [h, p, d] {
        bail!("proj has shape {:?}, expected [{h}, {p}, {d}]", proj.dims());
    }
    let sigma = knobs.get(&LEARNED_SIGMA).then(|| builder.param("sigma", &[h, d], Init::ONE)).transpose()?;
    let gate = if knobs.get(&GATE) {
        let start = Init::fan_in(config.width);
        let weight = builder.param("w_gate", &[h, config.width], start)?;
        Some((weight, builder.param("b_gate", &[h], start)?))
    } else {
        None
    };
    let auto = if config.causal { Guard::ClampMin } else { Guard::AbsClampMin };
    Ok(Box::new(Rfa {
        proj: (proj / knobs.get(&TAU))?,
        sigma,
        gate,
        kernel: knobs.get(&KERNEL),
        norm_eps: knobs.get(&NORM_EPS),
        scale: knobs.get(&SCALE).unwrap_or_else(|| (p as f64).powf(-0.5)),
        guard: knobs.get(&GUARD).unwrap_or(auto)(knobs.get(&EPS)),
        causal: config.causal,
    }))
}

impl Mechanism for Rfa {
    fn forward(&self, input: &AttentionInput) -> Result<AttentionOutput> {
        self.with_call(input, |call| Ok(linear_attention(input.qkv, call)?.into()))
    }

    fn init_decode(&self, batch: usize, _: usize, _: &Device) -> Result<Option<Box<dyn DecodeState>>> {
        Ok(self.causal.then(|| LinearSums::start(batch)))
    }

    fn decode_step(&self, input: &AttentionInput, state: &mut dyn DecodeState) -> Result<AttentionOutput> {
        self.with_call(input, |call| Ok(state.downcast::<LinearSums>()?.attend(input.qkv, call)?.into()))
    }
}

impl Rfa {
    /// What is computed from `input`.
    fn with_call<T>(
        &self,
        input: &AttentionInput,
        then: impl FnOnce(&LinearAttention) -> Result<T>,
    ) -> Result<T> {
        let weight = match &self.sigma {
            Some(sigma) => self.proj.broadcast_mul(&sigma.unsqueeze(1)?)?,
            None => self.proj.clone(),
        };
        let gate = match (&self.gate, input.x) {
            (None, _) => None,
            (Some(_), None) => bail!("rfa with gate=true was given no layer input x"),
            (Some((weight, bias)), Some(x)) => {
                let logits = linear::linear(x, weight, Some(bias))?; // [b, n, h]
                Some(logits.transpose(1, 2)?.contiguous()?) // [b, h, n]
            }
        };
        let features =
            Features::Random { weight, kernel: self.kernel, norm_eps: self.norm_eps, scale: self.scale };
        then(&LinearAttention {
            features,
            guard: Some(self.guard),
            mask: input.mask,
            causal: self.causal,
            decay: gate.as_ref().map_or(Decay::None, Decay::Gate),
        })
    }
}
