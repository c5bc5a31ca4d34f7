//! DeltaNet (Schlag et al. 2021; Yang et al. 2024): linear attention that replaces what is stored under a key.

use super::delta::{self, CONV, L2_EPS, NEG_EIGVAL, QK_ACT, V_ACT};
use super::output_stage::{self, GATE_BIAS, NORM, NORM_AFFINE, NORM_EPS};
use super::{Growth, InModels, MechanismEntry, Paper};

/// The table line.
pub static ENTRY: MechanismEntry = MechanismEntry {
    name: "deltanet",
    title: "DeltaNet",
    paper: Paper {
        authors: "Yang et al.",
        title: "Parallelizing Linear Transformers with the Delta Rule over Sequence Length",
        year: 2024,
        locator: "arXiv:2406.06484",
    },
    support: delta::SUPPORT,
    knobs: &[
        QK_ACT.spec(),
        V_ACT.spec(),
        L2_EPS.spec(),
        NEG_EIGVAL.spec(),
        CONV.spec(),
        NORM.source("released code").spec(),
        NORM_EPS.source("released code").spec(),
        NORM_AFFINE.source("released code").spec(),
        output_stage::gate(0).source("released code").spec(),
        GATE_BIAS.source("released code").spec(),
    ],
    complexity: "O(n d^2)",
    time: Growth::Linear,
    memory: Growth::Linear,
    equations: "\
k <- act(k) / |act(k)|, q <- act(q) / |act(q)| / sqrt(D), v <- act(v), beta_t = sigmoid(x_t w_beta), times 2 with neg_eigval
S <- S + k_t (beta_t (v_t - S^T k_t))^T, o_t = S^T q_t; then norm, weight and gate per head",
    deviations: delta::DEVIATIONS,
    exceptions: &[],
    idle: &output_stage::IDLE,
    in_models: InModels { linear_form: delta::LINEAR_FORM, ..InModels::PLAIN },
    validate: delta::validate,
    needs: delta::needs,
    cost: |knobs, shape| delta::cost(1, knobs, shape),
    pattern: |_, _| None, // every pair, but what is stored is overwritten: how much is left depends on the input
    build: |config, builder| delta::build(false, config, builder),
};
