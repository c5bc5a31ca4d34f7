//! What the kernel family shares: cosFormer, relu-, identity-, leakyrelu-linear and linear attention differ
//! in knobs only.

use candle_core::{Device, Result, Tensor};

use super::decode::DecodeState;
use super::knobs::{Kind, Knob, Knobs, Value};
use super::{AttentionInput, AttentionOutput, Cost, Mechanism, MechanismConfig, Shape};
use crate::nn::params::ParamBuilder;
use effattn_kernel::linear_attention::{
    Decay, FeatureActivation, Features, Guard, LinearAttention, linear_attention,
};
use effattn_record::pattern::Pattern;

const GUARDS: &[&str] = &["clamp_min", "signed_clamp", "add"];

/// The knob `feature` with the words it takes; the first is the default.
pub(super) const fn feature(words: &'static [&'static str], source: &'static str) -> Knob {
    Knob {
        name: "feature",
        kind: Kind::Word(words),
        default: Value::Word(words[0]),
        doc: "feature map phi: relu, identity, leaky_relu or elu1 (elu(x) + 1)",
        source,
    }
}

/// The knob `guard`.
pub(super) const fn guard(default: &'static str, source: &'static str) -> Knob {
    Knob {
        name: "guard",
        kind: Kind::Word(GUARDS),
        default: Value::Word(default),
        doc: "clamp_min: max(den, eps); signed_clamp: den with |den| raised to eps; add: den + eps",
        source,
    }
}

/// The knob `eps`.
pub(super) const fn eps(source: &'static str) -> Knob {
    Knob {
        name: "eps",
        kind: Kind::Float { min: 1e-12, max: 1e6 },
        default: Value::Float(1e-6),
        doc: "eps of the guard",
        source,
    }
}

/// A causal call has as many keys as queries.
pub(super) fn validate(_: &Knobs, shape: &Shape) -> std::result::Result<(), String> {
    let Shape { queries, keys, .. } = shape;
    if shape.causal && queries != keys {
        return Err(format!("causal attention needs as many keys as queries, got {queries} and {keys}"));
    }
    Ok(())
}

/// Multiply-adds of phi(K)^T V, phi(Q) (phi(K)^T V) and phi(Q) z with `features` features per head, and the
/// state of a causal decoder.
pub(super) fn linear_cost(features: usize, shape: &Shape) -> Cost {
    let Shape { batch, heads, head_dim, queries, keys, .. } = *shape;
    let macs = heads * (features * head_dim * (queries + keys) + features * queries);
    Cost {
        core_macs: (batch * macs) as u64,
        flops: macs as u64,
        state_bytes: (4 * heads * features * (head_dim + 1)) as u64,
    }
}

/// Cost of a call.
pub(super) fn cost(knobs: &Knobs, shape: &Shape) -> Cost {
    let turned = knobs.word("reweight") == "cos";
    linear_cost(if turned { 2 * shape.head_dim } else { shape.head_dim }, shape)
}

/// Every query sees every key, or every earlier one and its own.
pub(super) fn pattern(_: &Knobs, shape: &Shape) -> Option<Pattern> {
    Some(Pattern::full(shape.queries, shape.keys, shape.causal))
}

/// Reads the guard.
pub(super) fn read_guard(word: &str, eps: f64) -> Guard {
    match word {
        "add" => Guard::Add(eps),
        "signed_clamp" => Guard::SignedClamp(eps),
        "abs_clamp_min" => Guard::AbsClampMin(eps),
        _ => Guard::ClampMin(eps),
    }
}

struct Kernel {
    activation: FeatureActivation,
    reweight: bool,
    m: Option<usize>,
    max_len: usize,
    guard: Guard,
    causal: bool,
}

/// Builds a mechanism of the family.
///
/// # Errors
/// None.
pub(super) fn build(config: &MechanismConfig, _: &ParamBuilder) -> Result<Box<dyn Mechanism>> {
    let knobs = &config.knobs;
    let activation = match knobs.word("feature") {
        "relu" => FeatureActivation::Relu,
        "leaky_relu" => FeatureActivation::LeakyRelu(knobs.float("negative_slope")),
        "elu1" => FeatureActivation::Elu1,
        _ => FeatureActivation::Identity,
    };
    Ok(Box::new(Kernel {
        activation,
        reweight: knobs.word("reweight") == "cos",
        m: knobs.opt_int("m"),
        max_len: config.max_len,
        guard: read_guard(knobs.word("guard"), knobs.float("eps")),
        causal: config.causal,
    }))
}

impl Mechanism for Kernel {
    fn forward(&self, input: &AttentionInput) -> Result<AttentionOutput> {
        let (_, _, keys, _) = input.qkv.value_dims()?;
        let longest = keys.max(input.qkv.q()?.dim(2)?);
        Ok(linear_attention(input.qkv, &self.call(input.mask, longest))?.into())
    }

    fn init_decode(&self, _: usize, _: usize, _: &Device) -> Result<Option<DecodeState>> {
        Ok(self.causal.then(DecodeState::sums))
    }

    /// How long the sequence gets is not known on the way: without M it is the longest that the model is for.
    fn decode_step(&self, input: &AttentionInput, state: &mut DecodeState) -> Result<AttentionOutput> {
        Ok(state.linear(input.qkv, &self.call(None, self.max_len))?.into())
    }
}

impl Kernel {
    fn call<'a>(&self, mask: Option<&'a Tensor>, longest: usize) -> LinearAttention<'a> {
        let reweight = self.reweight.then(|| self.m.unwrap_or(longest));
        LinearAttention {
            features: Features::Elementwise { activation: self.activation, reweight },
            guard: Some(self.guard),
            mask,
            causal: self.causal,
            decay: Decay::None,
        }
    }
}
