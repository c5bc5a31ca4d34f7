//! cosFormer without re-weighting (Qin et al. 2022, eq. 8-9 and the ablation of Table 6).

use super::knobs::Knob;
use super::{Growth, MechanismEntry, Needs, Paper, Support, feature};

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
    validate: feature::validate,
    needs: |_| Needs::default(),
    cost: feature::cost,
    pattern: feature::pattern,
    build: feature::build,
};

static KNOBS: &[Knob] = &[
    feature::feature(&["relu"], "cosFormer eq. 8"),
    feature::guard("clamp_min", "released code of cosFormer"),
    feature::eps("released code of cosFormer"),
];
