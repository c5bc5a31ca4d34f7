//! Softmax attention with rotary position embedding (Su et al. 2021, RoFormer), as in Llama (SPEC-modern section 11).

use super::rotary_softmax::{
    BASE, IDLE, OFFSET, ROTARY, ROTARY_DIM, RotarySoftmax, check_rotation, check_shape, cost,
};
use super::{Growth, InModels, MechanismEntry, Needs, Paper, Support};
use crate::nn::params::ParamBuilder;
use effattn_record::pattern::Pattern;

/// The table line.
pub static ENTRY: MechanismEntry = MechanismEntry {
    name: "rope",
    title: "Rotary attention",
    paper: Paper {
        authors: "Su et al.",
        title: "RoFormer: Enhanced Transformer with Rotary Position Embedding",
        year: 2021,
        locator: "arXiv:2104.09864",
    },
    support: Support { bidirectional: true, causal: true, dropout: true, ..Support::NONE },
    knobs: &[ROTARY.spec(), BASE.spec(), ROTARY_DIM.spec(), OFFSET.spec()],
    complexity: "O(n^2 d)",
    time: Growth::Quadratic,
    memory: Growth::Linear,
    equations: "\
out_i = sum_j softmax_j(rot(q_i) . rot(k_j) / sqrt(D)) v_j over keys j that are not padded and, when causal, j <= i
rot turns pair m of the first rotary_dim channels by (i + offset) base^(-2m / rotary_dim)",
    deviations: &["Angles are computed in f64; libraries compute them in f32, which differs at far positions."],
    exceptions: &[],
    idle: &IDLE,
    in_models: InModels { fits_full_weights: false, ..InModels::PLAIN },
    validate: |knobs, shape| {
        check_rotation(knobs.get(&ROTARY), knobs.get(&ROTARY_DIM), shape.head_dim)?;
        check_shape(None, knobs, shape)
    },
    needs: |_| Needs::default(),
    cost: |_, shape| cost(shape, None, shape.queries * shape.keys, shape.keys),
    pattern: |_, shape| Some(Pattern::full(shape.queries, shape.keys, shape.causal)),
    build: |config, _: &ParamBuilder| Ok(Box::new(RotarySoftmax::full(config, None)?)),
};
