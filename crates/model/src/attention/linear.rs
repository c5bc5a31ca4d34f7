//! Linear attention (Katharopoulos et al. 2020, eq. 4-12).

use super::knobs::Knob;
use super::{Growth, MechanismEntry, Needs, Paper, Support, feature};

/// The table line.
pub static ENTRY: MechanismEntry = MechanismEntry {
    name: "linear",
    title: "Linear attention",
    paper: Paper {
        authors: "Katharopoulos et al.",
        title: "Transformers are RNNs: Fast Autoregressive Transformers with Linear Attention",
        year: 2020,
        locator: "arXiv:2006.16236",
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
a_ij = <phi(q_i), phi(k_j)> with phi(x) = elu(x) + 1, over keys j that are not padded and, when causal, j <= i
out_i = sum_j a_ij v_j / (sum_j a_ij + eps)",
    deviations: &[
        "The LRA code has the same formula but ignores the causal flag and every padding mask; here masked keys are left out.",
        "The linear attention of the Nystromformer code has no denominator and is a different function.",
    ],
    exceptions: &[],
    idle: &[],
    validate: feature::validate,
    needs: |_| Needs::default(),
    cost: feature::cost,
    pattern: feature::pattern,
    build: feature::build,
};

static KNOBS: &[Knob] = &[
    feature::feature(&["elu1"], "Katharopoulos et al. eq. 7"),
    feature::guard("add", "code of the authors"),
    feature::eps("code of the authors"),
];
