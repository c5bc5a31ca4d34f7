//! cosFormer: ReLU features re-weighted by the cosine of the distance (Qin et al. 2022, eq. 7-12, Algorithm 1).
//!
//! With a_i = pi (i + 1) / (2 M), cos(a_i - a_j) = cos a_i cos a_j + sin a_i sin a_j: the features
//! [relu(x) sin a, relu(x) cos a] make the re-weighting linear in length.

use super::knobs::{Kind, Knob, Knobs, Value};
use super::{Growth, Idle, MechanismEntry, Needs, Paper, Shape, Support, feature};

/// The table line.
pub static ENTRY: MechanismEntry = MechanismEntry {
    name: "cosformer",
    title: "cosFormer",
    paper: Paper {
        authors: "Qin et al.",
        title: "cosFormer: Rethinking Softmax in Attention",
        year: 2022,
        locator: "arXiv:2202.08791",
    },
    support: Support { bidirectional: true, causal: true, cross: true, memory: false, cls: false, dropout: false },
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
        Idle { knob: "m", when: |knobs, _| knobs.word("reweight") == "none", why: "with reweight=none" },
        Idle {
            knob: "negative_slope",
            when: |knobs, _| knobs.word("feature") != "leaky_relu",
            why: "without feature=leaky_relu",
        },
    ],
    validate,
    needs: |_| Needs::default(),
    cost: feature::cost,
    pattern: feature::pattern,
    build: feature::build,
};

static KNOBS: &[Knob] = &[
    feature::feature(&["relu", "identity", "leaky_relu", "elu1"], "cosFormer eq. 8"),
    Knob {
        name: "reweight",
        kind: Kind::Word(&["cos", "none"]),
        default: Value::Word("cos"),
        doc: "cos: re-weighting by distance; none: without (Table 6)",
        source: "cosFormer eq. 9",
    },
    Knob {
        name: "m",
        kind: Kind::AutoInt { min: 1, max: 1 << 30 },
        default: Value::Auto,
        doc: "M of the re-weighting, at least the length; auto: the padded length",
        source: "released code",
    },
    Knob {
        name: "negative_slope",
        kind: Kind::Float { min: 0.0, max: 1.0 },
        default: Value::Float(0.01),
        doc: "slope of feature=leaky_relu",
        source: "framework default",
    },
    feature::guard("clamp_min", "released code"),
    feature::eps("released code"),
];

/// M must cover the sequence, so that no weight is negative.
fn validate(knobs: &Knobs, shape: &Shape) -> Result<(), String> {
    let longest = shape.queries.max(shape.keys);
    match knobs.opt_int("m") {
        Some(m) if m < longest => Err(format!(
            "m={m} is shorter than the sequence of {longest} positions; take m={longest} or more, or m=auto"
        )),
        _ => feature::validate(knobs, shape),
    }
}
