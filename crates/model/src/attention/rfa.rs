//! Random Feature Attention (Peng et al. 2021): random features of normalised queries and keys, with an
//! optional gate that forgets.

use candle_core::{Device, Result, Tensor, bail};

use super::decode::DecodeState;
use super::knobs::{Kind, Knob, Knobs, Value};
use super::{
    AttentionInput, AttentionOutput, Cost, Growth, Mechanism, MechanismConfig, MechanismEntry, Needs, Paper,
    Shape, Support, feature,
};
use crate::nn::params::{Init, ParamBuilder};
use effattn_kernel::linear;
use effattn_kernel::linear_attention::{
    Decay, Features, Guard, LinearAttention, RandomKernel, linear_attention,
};

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
    support: Support { bidirectional: true, causal: true, cross: true, memory: false, cls: false, dropout: false },
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
        "The released code's masked form has yet another guard; not followed.",
        "Arc-cosine features and the gate are not in the release: the paper's formulas are followed, one gate per head and position.",
        "The released code draws proj anew from a pool of 500 while training; here it is drawn once.",
    ],
    exceptions: &[],
    idle: &[],
    validate,
    needs: |knobs| Needs { x: knobs.bool("gate"), ..Needs::default() },
    cost,
    pattern: feature::pattern,
    build,
};

static KNOBS: &[Knob] = &[
    Knob {
        name: "kernel",
        kind: Kind::Word(&["gaussian", "arccos"]),
        default: Value::Word("gaussian"),
        doc: "kernel that the features estimate",
        source: "Peng et al. sec. 3.1",
    },
    Knob {
        name: "proj_dim",
        kind: Kind::Int { min: 1, max: 1 << 16 },
        default: Value::Int(64),
        doc: "random projections P; gaussian has 2 P features, arccos P",
        source: "released code",
    },
    Knob {
        name: "tau",
        kind: Kind::Float { min: 1e-3, max: 1e3 },
        default: Value::Float(1.0),
        doc: "temperature",
        source: "released code",
    },
    Knob {
        name: "learned_sigma",
        kind: Kind::Bool,
        default: Value::Bool(true),
        doc: "whether each dimension has a learned scale, starting at 1",
        source: "released code",
    },
    Knob {
        name: "norm_eps",
        kind: Kind::Float { min: 1e-12, max: 1.0 },
        default: Value::Float(1e-3),
        doc: "added to the norm of queries and keys",
        source: "released code",
    },
    Knob {
        name: "scale",
        kind: Kind::AutoFloat { min: 1e-6, max: 1e3 },
        default: Value::Auto,
        doc: "factor on every feature; auto: proj_dim^(-1/2)",
        source: "Peng et al. eq. 4",
    },
    Knob {
        name: "guard",
        kind: Kind::Word(&["auto", "clamp_min", "abs_clamp_min"]),
        default: Value::Word("auto"),
        doc: "clamp_min: max(den, eps); abs_clamp_min: max(|den|, eps); auto: clamp_min when causal, else abs_clamp_min",
        source: "released code",
    },
    Knob {
        name: "eps",
        kind: Kind::Float { min: 1e-12, max: 1e6 },
        default: Value::Float(1e-4),
        doc: "eps of the guard",
        source: "our choice; the paper has none, the released code 1",
    },
    Knob {
        name: "gate",
        kind: Kind::Bool,
        default: Value::Bool(false),
        doc: "whether the causal sums forget by a learned gate",
        source: "Peng et al. sec. 3.2",
    },
];

fn validate(knobs: &Knobs, shape: &Shape) -> std::result::Result<(), String> {
    if knobs.bool("gate") && !shape.causal {
        return Err("gate=true is causal only; take gate=false or a causal task".into());
    }
    feature::validate(knobs, shape)
}

fn cost(knobs: &Knobs, shape: &Shape) -> Cost {
    let Shape { batch, heads, head_dim, width, queries, keys, .. } = *shape;
    let p = knobs.int("proj_dim");
    let features = if knobs.word("kernel") == "gaussian" { 2 * p } else { p };
    let gate = if knobs.bool("gate") { queries * width * heads } else { 0 };
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
    let p = knobs.int("proj_dim");
    let proj =
        builder.constant("proj", |stream, device| stream.normal_tensor((h, p, d), 0.0, 1.0, device))?;
    if proj.dims() != [h, p, d] {
        bail!("proj has shape {:?}, expected [{h}, {p}, {d}]", proj.dims());
    }
    let sigma =
        knobs.bool("learned_sigma").then(|| builder.param("sigma", &[h, d], Init::ONE)).transpose()?;
    let gate = if knobs.bool("gate") {
        let start = Init::fan_in(config.width);
        let weight = builder.param("w_gate", &[h, config.width], start)?;
        Some((weight, builder.param("b_gate", &[h], start)?))
    } else {
        None
    };
    let guard = match knobs.word("guard") {
        "auto" if config.causal => "clamp_min",
        "auto" => "abs_clamp_min",
        word => word,
    };
    Ok(Box::new(Rfa {
        proj: (proj / knobs.float("tau"))?,
        sigma,
        gate,
        kernel: match knobs.word("kernel") {
            "arccos" => RandomKernel::ArcCos,
            _ => RandomKernel::Gaussian,
        },
        norm_eps: knobs.float("norm_eps"),
        scale: knobs.opt_float("scale").unwrap_or_else(|| (p as f64).powf(-0.5)),
        guard: feature::read_guard(guard, knobs.float("eps")),
        causal: config.causal,
    }))
}

impl Mechanism for Rfa {
    fn forward(&self, input: &AttentionInput) -> Result<AttentionOutput> {
        self.with_call(input, |call| Ok(linear_attention(input.qkv, call)?.into()))
    }

    fn init_decode(&self, _: usize, _: usize, _: &Device) -> Result<Option<DecodeState>> {
        Ok(self.causal.then(DecodeState::sums))
    }

    fn decode_step(&self, input: &AttentionInput, state: &mut DecodeState) -> Result<AttentionOutput> {
        self.with_call(input, |call| Ok(state.linear(input.qkv, call)?.into()))
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
