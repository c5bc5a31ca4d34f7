//! Linear attention with other feature maps: cosFormer without re-weighting (Qin et al. 2022, eq. 8-9 and the ablation of Table 6), and
//! the ablations of its Table 1.

use super::MechanismEntry;
use super::cosformer::PAPER;
use super::feature::{CLAMP_MIN, EPS, SIGNED_CLAMP, SLOPE, feature, guard};
use super::linear::LINEAR;
use effattn_kernel::linear_attention::FeatureActivation;

/// `relu-linear`.
pub static RELU: MechanismEntry = MechanismEntry {
    name: "relu-linear",
    title: "ReLU linear attention",
    paper: PAPER,
    knobs: &[
        feature(&[("relu", FeatureActivation::Relu)]).source("cosFormer eq. 8").spec(),
        guard(CLAMP_MIN).source("released code of cosFormer").spec(),
        EPS.source("released code of cosFormer").spec(),
    ],
    equations: "\
a_ij = <phi(q_i), phi(k_j)> with phi(x) = max(x, 0), over keys j that are not padded and, when causal, j <= i
out_i = sum_j a_ij v_j / max(sum_j a_ij, eps)",
    deviations: &[],
    ..LINEAR
};

/// `identity-linear`: without a feature map.
pub static IDENTITY: MechanismEntry = MechanismEntry {
    name: "identity-linear",
    title: "Identity linear attention",
    paper: PAPER,
    knobs: &[
        feature(&[("identity", FeatureActivation::Identity)]).source("cosFormer Table 1").spec(),
        guard(SIGNED_CLAMP).source("our definition").spec(),
        EPS.source("our definition").spec(),
    ],
    equations: "\
a_ij = <phi(q_i), phi(k_j)> with phi(x) = x, over keys j that are not padded and, when causal, j <= i
out_i = sum_j a_ij v_j / max(|sum_j a_ij|, eps) with the sign of the sum (+ at 0)",
    deviations: SIGNED,
    ..LINEAR
};

/// `leakyrelu-linear`.
pub static LEAKY_RELU: MechanismEntry = MechanismEntry {
    name: "leakyrelu-linear",
    title: "LeakyReLU linear attention",
    paper: PAPER,
    knobs: &[
        feature(&[("leaky_relu", FeatureActivation::LeakyRelu(0.0))]).source("cosFormer Table 1").spec(),
        SLOPE.doc("slope of phi below 0").spec(),
        guard(SIGNED_CLAMP).source("our definition").spec(),
        EPS.source("our definition").spec(),
    ],
    equations: "\
a_ij = <phi(q_i), phi(k_j)> with phi(x) = x if x > 0 else negative_slope x, over keys j that are not padded and, when causal, j <= i
out_i = sum_j a_ij v_j / max(|sum_j a_ij|, eps) with the sign of the sum (+ at 0)",
    deviations: SIGNED,
    ..LINEAR
};

const SIGNED: &[&str] = &[
    "The paper gives neither code nor guard; a plain max(den, eps) would turn every negative denominator into eps, so the clamp keeps the sign.",
    "Outputs are not convex combinations and can be large where the denominator is near 0; training may need a larger eps.",
];
