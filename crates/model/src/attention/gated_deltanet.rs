//! Gated DeltaNet (Yang et al. 2025): the delta rule with a decay of the state per token and head.

use super::delta::{self, CONV, L2_EPS, NEG_EIGVAL, QK_ACT, V_ACT};
use super::output_stage::{self, GATE_BIAS, NORM, NORM_AFFINE, NORM_EPS};
use super::{Growth, InModels, MechanismEntry, Paper};

/// The table line.
pub static ENTRY: MechanismEntry = MechanismEntry {
    name: "gated-deltanet",
    title: "Gated DeltaNet",
    paper: Paper {
        authors: "Yang et al.",
        title: "Gated Delta Networks: Improving Mamba2 with Delta Rule",
        year: 2025,
        locator: "arXiv:2412.06464",
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
        output_stage::gate(1).source("released code").spec(),
        GATE_BIAS.source("released code").spec(),
    ],
    complexity: "O(n d^2)",
    time: Growth::Linear,
    memory: Growth::Linear,
    equations: "\
As deltanet with a decay before the old value is read: alpha_t = exp(-exp(A_log) softplus(x_t w_a + dt_bias)) per head
S <- alpha_t S; S <- S + k_t (beta_t (v_t - S^T k_t))^T, o_t = S^T q_t; then norm, weight and gate per head",
    deviations: delta::DEVIATIONS,
    exceptions: &[],
    idle: &output_stage::IDLE,
    in_models: InModels {
        without_decay: &["A_log", "dt_bias"],
        linear_form: delta::LINEAR_FORM,
        ..InModels::PLAIN
    },
    validate: delta::validate,
    needs: delta::needs,
    cost: |knobs, shape| delta::cost(2, knobs, shape),
    pattern: |_, _| None, // as deltanet
    build: |config, builder| delta::build(true, config, builder),
};
