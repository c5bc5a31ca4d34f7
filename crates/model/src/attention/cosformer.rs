//! cosFormer: ReLU features re-weighted by the cosine of the distance (Qin et al. 2022, eq. 7-12, Algorithm 1).
//!
//! With a_i = pi (i + 1) / (2 M), cos(a_i - a_j) = cos a_i cos a_j + sin a_i sin a_j: the features
//! [relu(x) sin a, relu(x) cos a] make the re-weighting linear in length.

use super::feature::{self, EPS, FEATURE, GUARD, SLOPE};
use super::knobs::{Knob, KnobSpec, Knobs};
use super::{Cost, Growth, Idle, InModels, MechanismEntry, Needs, Paper, Shape, Support};
use effattn_kernel::linear_attention::FeatureActivation;

const REWEIGHT: Knob<bool> = Knob::words("reweight", &[("cos", true), ("none", false)])
    .doc("cos: re-weighting by distance; none: without (Table 6)")
    .source("cosFormer eq. 9");
const M: Knob<Option<usize>> = Knob::auto_int("m", 1..=1 << 30)
    .doc("M of the re-weighting, at least the length; auto: the padded length")
    .source("released code");
/// Where cosFormer and its ablations were published.
pub(super) const PAPER: Paper = Paper {
    authors: "Qin et al.",
    title: "cosFormer: Rethinking Softmax in Attention",
    year: 2022,
    locator: "arXiv:2202.08791",
};

/// The table line.
pub static ENTRY: MechanismEntry = MechanismEntry {
    name: "cosformer",
    title: "cosFormer",
    paper: PAPER,
    support: Support { bidirectional: true, causal: true, cross: true, ..Support::NONE },
    knobs: KNOBS,
    complexity: "O(n d^2)",
    time: Growth::Linear,
    memory: Growth::Linear,
    equations: "\
a_ij = cos(pi/2 (i - j) / M) <relu(q_i), relu(k_j)> over keys j that are not padded and, when causal, j <= i
out_i = sum_j a_ij v_j / max(sum_j a_ij, eps)
computed with features [relu(x) sin a_i, relu(x) cos a_i], a_i = pi (i + 1) / (2 M), M = m or max(queries, keys)",
    deviations: &[
        "The paper has no guard, the released code clamps the denominator at 1e-6: this follows the code.",
        "Algorithm 1 takes the angles of both sides from the key length, which gives negative weights for i > M; the code's max(queries, keys) is taken.",
        "The released code has no padding mask: here features of masked keys are zero and M stays the padded length.",
        "The released code's elu branch is broken (it adds 1 to a function); feature=elu1 here is elu(x) + 1.",
    ],
    exceptions: &[],
    idle: &[
        Idle { knob: M.name(), when: |knobs, _| !knobs.get(&REWEIGHT), why: "with reweight=none" },
        Idle {
            knob: SLOPE.name(),
            when: |knobs, _| !matches!(knobs.get(&FEATURE), FeatureActivation::LeakyRelu(_)),
            why: "without feature=leaky_relu",
        },
    ],
    in_models: InModels { follows_length: Some(M), ..InModels::PLAIN },
    validate,
    needs: |_| Needs::default(),
    cost,
    pattern: feature::pattern,
    build: |config, _| {
        let knobs = &config.knobs;
        Ok(feature::build_with(config, knobs.get(&REWEIGHT).then(|| knobs.get(&M))))
    },
};

static KNOBS: &[KnobSpec] = &[
    FEATURE.source("cosFormer eq. 8").spec(),
    REWEIGHT.spec(),
    M.spec(),
    SLOPE.doc("slope of feature=leaky_relu").spec(),
    GUARD.source("released code").spec(),
    EPS.source("released code").spec(),
];

/// M must cover the sequence, so that no weight is negative.
fn validate(knobs: &Knobs, shape: &Shape) -> Result<(), String> {
    let longest = shape.queries.max(shape.keys);
    match knobs.get(&M) {
        Some(m) if m < longest => Err(format!(
            "m={m} is shorter than the sequence of {longest} positions; take m={longest} or more, or m=auto"
        )),
        _ => feature::validate(knobs, shape),
    }
}

/// Re-weighting doubles the features.
fn cost(knobs: &Knobs, shape: &Shape) -> Cost {
    feature::linear_cost(if knobs.get(&REWEIGHT) { 2 * shape.head_dim } else { shape.head_dim }, shape)
}
