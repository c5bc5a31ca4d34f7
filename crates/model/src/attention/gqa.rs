//! Grouped-query attention (Ainslie et al. 2023): neighbouring query heads share keys and values (SPEC-modern section 11).

use super::knobs::Knob;
use super::rotary_softmax::{
    BASE, IDLE, OFFSET, ROTARY, ROTARY_DIM, RotarySoftmax, check_rotation, check_shape, cost,
};
use super::{Growth, InModels, MechanismEntry, Needs, Paper, Projections, Support};
use crate::nn::params::ParamBuilder;
use effattn_record::pattern::Pattern;

const GROUPS: Knob<usize> = Knob::int("groups", 2, 1..=1 << 12)
    .doc("heads of keys and values, each shared by neighbouring query heads")
    .source("our choice: the paper keeps 8 of 64");

/// The table line.
pub static ENTRY: MechanismEntry = MechanismEntry {
    name: "gqa",
    title: "Grouped-query attention",
    paper: Paper {
        authors: "Ainslie et al.",
        title: "GQA: Training Generalized Multi-Query Transformer Models from Multi-Head Checkpoints",
        year: 2023,
        locator: "arXiv:2305.13245",
    },
    support: Support { bidirectional: true, causal: true, dropout: true, ..Support::NONE },
    knobs: &[GROUPS.spec(), ROTARY.spec(), BASE.spec(), ROTARY_DIM.spec(), OFFSET.spec()],
    complexity: "O(n^2 d)",
    time: Growth::Quadratic,
    memory: Growth::Linear,
    equations: "\
out_i = sum_j softmax_j(rot(q_i) . rot(k_j) / sqrt(D)) v_j over keys j that are not padded and, when causal, j <= i
query head h reads key and value head floor(h groups / H)",
    deviations: &["Keys and values are repeated for the query heads before they are attended to; a decoder keeps them once."],
    exceptions: &[],
    idle: &IDLE,
    in_models: InModels::PLAIN,
    validate: |knobs, shape| {
        check_rotation(knobs.get(&ROTARY), knobs.get(&ROTARY_DIM), shape.head_dim)?;
        check_shape(Some(knobs.get(&GROUPS)), knobs, shape)
    },
    needs: |knobs| Needs { projections: Projections::grouped(Some(knobs.get(&GROUPS))), ..Needs::default() },
    cost: |knobs, shape| cost(shape, Some(knobs.get(&GROUPS)), shape.queries * shape.keys, shape.keys),
    pattern: |_, shape| Some(Pattern::full(shape.queries, shape.keys, shape.causal)),
    build: |config, _: &ParamBuilder| {
        Ok(Box::new(RotarySoftmax::full(config, Some(config.knobs.get(&GROUPS)))?))
    },
};
