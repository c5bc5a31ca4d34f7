//! What the kernel family shares: cosFormer, relu-, identity-, leakyrelu-linear and linear attention differ
//! in knobs only.

use candle_core::{Device, Result, Tensor};

use super::decode::{DecodeState, LinearSums};
use super::knobs::{Knob, Knobs};
use super::{AttentionInput, AttentionOutput, Cost, Mechanism, MechanismConfig, Shape};
use crate::nn::params::ParamBuilder;
use effattn_kernel::linear_attention::{
    Decay, FeatureActivation, Features, Guard, LinearAttention, linear_attention,
};
use effattn_record::pattern::Pattern;

const FEATURE_HELP: &str = "feature map phi: relu, identity, leaky_relu or elu1 (elu(x) + 1)";

/// The feature map; the slope of `leaky_relu` is a knob of its own, [`SLOPE`].
pub(super) const FEATURE: Knob<FeatureActivation> = Knob::words(
    "feature",
    &[
        ("relu", FeatureActivation::Relu),
        ("identity", FeatureActivation::Identity),
        ("leaky_relu", FeatureActivation::LeakyRelu(0.0)),
        ("elu1", FeatureActivation::Elu1),
    ],
)
.doc(FEATURE_HELP);

/// [`FEATURE`] with one word.
pub(super) const fn feature(
    word: &'static [(&'static str, FeatureActivation); 1],
) -> Knob<FeatureActivation> {
    Knob::words("feature", word).doc(FEATURE_HELP)
}

/// Slope of [`FeatureActivation::LeakyRelu`].
pub(super) const SLOPE: Knob<f64> =
    Knob::float("negative_slope", 0.01, 0.0..=1.0).source("framework default");

/// A guard of a given eps.
pub(super) type MakeGuard = fn(f64) -> Guard;

/// What keeps a denominator away from 0, given [`EPS`].
pub(super) const GUARD: Knob<MakeGuard> = guard(CLAMP_MIN);
pub(super) const CLAMP_MIN: usize = 0;
pub(super) const SIGNED_CLAMP: usize = 1;
pub(super) const ADD: usize = 2;

/// [`GUARD`] with another default.
pub(super) const fn guard(default: usize) -> Knob<MakeGuard> {
    let words: &[(&str, MakeGuard); 3] =
        &[("clamp_min", Guard::ClampMin), ("signed_clamp", Guard::SignedClamp), ("add", Guard::Add)];
    Knob::words_from("guard", default, words)
        .doc("clamp_min: max(den, eps); signed_clamp: den with |den| raised to eps; add: den + eps")
}

/// Eps of the guard.
pub(super) const EPS: Knob<f64> = Knob::float("eps", 1e-6, 1e-12..=1e6).doc("eps of the guard");

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

/// Cost of a call with as many features as a head is wide.
pub(super) fn cost(_: &Knobs, shape: &Shape) -> Cost {
    linear_cost(shape.head_dim, shape)
}

/// Every query sees every key, or every earlier one and its own.
pub(super) fn pattern(_: &Knobs, shape: &Shape) -> Option<Pattern> {
    Some(Pattern::full(shape.queries, shape.keys, shape.causal))
}

struct Kernel {
    activation: FeatureActivation,
    reweight: Option<Option<usize>>,
    max_len: usize,
    guard: Guard,
    causal: bool,
}

/// Builds a mechanism of the family without re-weighting.
pub(super) fn build(config: &MechanismConfig, _: &ParamBuilder) -> Result<Box<dyn Mechanism>> {
    Ok(build_with(config, None))
}

/// Builds a mechanism of the family. `reweight`: cosFormer's M, itself `None` for the longest length.
pub(super) fn build_with(config: &MechanismConfig, reweight: Option<Option<usize>>) -> Box<dyn Mechanism> {
    let knobs = &config.knobs;
    let activation = match knobs.get(&FEATURE) {
        FeatureActivation::LeakyRelu(_) => FeatureActivation::LeakyRelu(knobs.get(&SLOPE)),
        other => other,
    };
    Box::new(Kernel {
        activation,
        reweight,
        max_len: config.max_len,
        guard: knobs.get(&GUARD)(knobs.get(&EPS)),
        causal: config.causal,
    })
}

impl Mechanism for Kernel {
    fn forward(&self, input: &AttentionInput) -> Result<AttentionOutput> {
        let (_, _, keys, _) = input.qkv.value_dims()?;
        let longest = keys.max(input.qkv.q()?.dim(2)?);
        Ok(linear_attention(input.qkv, &self.call(input.mask, longest))?.into())
    }

    fn init_decode(&self, batch: usize, _: usize, _: &Device) -> Result<Option<Box<dyn DecodeState>>> {
        Ok(self.causal.then(|| LinearSums::start(batch)))
    }

    /// How long the sequence gets is not known on the way: without M it is the longest that the model is for.
    fn decode_step(&self, input: &AttentionInput, state: &mut dyn DecodeState) -> Result<AttentionOutput> {
        Ok(state.downcast::<LinearSums>()?.attend(input.qkv, &self.call(None, self.max_len))?.into())
    }
}

impl Kernel {
    fn call<'a>(&self, mask: Option<&'a Tensor>, longest: usize) -> LinearAttention<'a> {
        let reweight = self.reweight.map(|m| m.unwrap_or(longest));
        LinearAttention {
            features: Features::Elementwise { activation: self.activation, reweight },
            guard: Some(self.guard),
            mask,
            causal: self.causal,
            decay: Decay::None,
        }
    }
}
