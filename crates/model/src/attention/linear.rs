//! Linear attention (Katharopoulos et al. 2020, eq. 4-12).

use super::feature::{self, ADD, EPS, feature, guard};
use super::knobs::KnobSpec;
use super::{Growth, InModels, MechanismEntry, Needs, Paper, Support};
use effattn_kernel::linear_attention::FeatureActivation;

/// The table line.
pub static ENTRY: MechanismEntry = LINEAR;

/// Linear attention; its relatives differ from it in name, features and guard.
pub(super) const LINEAR: MechanismEntry = MechanismEntry {
    name: "linear",
    title: "Linear attention",
    paper: Paper {
        authors: "Katharopoulos et al.",
        title: "Transformers are RNNs: Fast Autoregressive Transformers with Linear Attention",
        year: 2020,
        locator: "arXiv:2006.16236",
    },
    support: Support { bidirectional: true, causal: true, cross: true, ..Support::NONE },
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
    in_models: InModels::PLAIN,
    validate: feature::validate,
    needs: |_| Needs::default(),
    cost: feature::cost,
    pattern: feature::pattern,
    build: feature::build,
};

static KNOBS: &[KnobSpec] = &[
    feature(&[("elu1", FeatureActivation::Elu1)]).source("Katharopoulos et al. eq. 7").spec(),
    guard(ADD).source("code of the authors").spec(),
    EPS.source("code of the authors").spec(),
];
