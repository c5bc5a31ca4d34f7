//! cosFormer without re-weighting (Qin et al. 2022, eq. 8-9 and the ablation of Table 6).

use super::MechanismEntry;
use super::cosformer::PAPER;
use super::feature::{CLAMP_MIN, EPS, feature, guard};
use super::knobs::KnobSpec;
use super::linear::LINEAR;
use effattn_kernel::linear_attention::FeatureActivation;

/// The table line.
pub static ENTRY: MechanismEntry = MechanismEntry {
    name: "relu-linear",
    title: "ReLU linear attention",
    paper: PAPER,
    knobs: KNOBS,
    equations: "\
a_ij = <phi(q_i), phi(k_j)> with phi(x) = max(x, 0), over keys j that are not padded and, when causal, j <= i
out_i = sum_j a_ij v_j / max(sum_j a_ij, eps)",
    deviations: &[],
    ..LINEAR
};

static KNOBS: &[KnobSpec] = &[
    feature(&[("relu", FeatureActivation::Relu)]).source("cosFormer eq. 8").spec(),
    guard(CLAMP_MIN).source("released code of cosFormer").spec(),
    EPS.source("released code of cosFormer").spec(),
];
