//! Linear attention with LeakyReLU features, an ablation of cosFormer (Qin et al. 2022, Table 1).

use super::MechanismEntry;
use super::cosformer::PAPER;
use super::feature::{EPS, SIGNED_CLAMP, SLOPE, feature, guard};
use super::knobs::KnobSpec;
use super::linear::LINEAR;
use effattn_kernel::linear_attention::FeatureActivation;

/// The table line.
pub static ENTRY: MechanismEntry = MechanismEntry {
    name: "leakyrelu-linear",
    title: "LeakyReLU linear attention",
    paper: PAPER,
    knobs: KNOBS,
    equations: "\
a_ij = <phi(q_i), phi(k_j)> with phi(x) = x if x > 0 else negative_slope x, over keys j that are not padded and, when causal, j <= i
out_i = sum_j a_ij v_j / max(|sum_j a_ij|, eps) with the sign of the sum (+ at 0)",
    deviations: &[
        "The paper gives neither code nor guard; a plain max(den, eps) would turn every negative denominator into eps, so the clamp keeps the sign.",
        "Outputs are not convex combinations and can be large where the denominator is near 0; training may need a larger eps.",
    ],
    ..LINEAR
};

static KNOBS: &[KnobSpec] = &[
    feature(&[("leaky_relu", FeatureActivation::LeakyRelu(0.0))]).source("cosFormer Table 1").spec(),
    SLOPE.doc("slope of phi below 0").spec(),
    guard(SIGNED_CLAMP).source("our definition").spec(),
    EPS.source("our definition").spec(),
];
