//! cosFormer without re-weighting (Qin et al. 2022, eq. 8-9 and the ablation of Table 6).

use super::feature::{self, CLAMP_MIN, EPS, feature, guard};
use super::knobs::KnobSpec;
use super::{Growth, InModels, MechanismEntry, Needs, Paper, Support};
use effattn_kernel::linear_attention::FeatureActivation;

/// The table line.
pub static ENTRY: MechanismEntry = MechanismEntry {
    name: "relu-linear",
    title: "ReLU linear attention",
    paper: Paper {
        authors: "Qin et al.",
        title: "cosFormer: Rethinking Softmax in Attention",
        year: 2022,
        locator: "arXiv:2202.08791",
    },
    support: Support {
        bidirectional: true,
        causal: true,
        cross: true,
        memory: false,
        cls: false,
        dropout: false,
    },
    knobs: KNOBS,
    complexity: "O(n d^2)",
    time: Growth::Linear,
    memory: Growth::Linear,
    equations: "\
a_ij = <phi(q_i), phi(k_j)> with phi(x) = max(x, 0), over keys j that are not padded and, when causal, j <= i
out_i = sum_j a_ij v_j / max(sum_j a_ij, eps)",
    deviations: &[],
    exceptions: &[],
    idle: &[],
    in_models: InModels::PLAIN,
    validate: feature::validate,
    needs: |_| Needs::default(),
    cost: feature::cost,
    pattern: feature::pattern,
    build: feature::build,
};

static KNOBS: &[KnobSpec] = &[
    feature(&[("relu", FeatureActivation::Relu)]).source("cosFormer eq. 8").spec(),
    guard(CLAMP_MIN).source("released code of cosFormer").spec(),
    EPS.source("released code of cosFormer").spec(),
];
