//! Dynamic projection: a low-rank projection of keys and values whose weights come from the input.
//!
//! Transformer-LS eq. 3-4 (bidirectional) and eq. 5 (causal): P = softmax over positions of X W^P, then attention
//! to P^T K, P^T V. `ls` without its window.

use candle_core::Result;

use super::knobs::{Kind, Knob, Knobs, Value};
use super::long_short::{Extras, decoder_state};
use super::{
    Cost, Exception, Growth, Mechanism, MechanismConfig, MechanismEntry, Needs, Property, Shape, Support,
    long_short, ls,
};
use crate::nn::params::ParamBuilder;

/// The table line.
pub static ENTRY: MechanismEntry = MechanismEntry {
    name: "dp",
    title: "Dynamic projection",
    paper: ls::PAPER,
    support: Support {
        bidirectional: true,
        causal: true,
        cross: false,
        memory: true,
        cls: true,
        dropout: true,
    },
    knobs: &[
        Knob {
            name: "r",
            kind: Kind::Int { min: 1, max: usize::MAX },
            default: Value::Int(128),
            doc: "slots per head (causal: per head and segment)",
            source: "Transformer-LS Table 1, best on Text",
        },
        ls::L,
        Knob {
            name: "dual_ln",
            kind: Kind::Bool,
            default: Value::Bool(false),
            doc: "normalise keys and values before and after the projection; the released code always does",
            source: "Transformer-LS eq. 3-4",
        },
        ls::DP_INPUT,
        Knob {
            name: "w",
            kind: Kind::Int { min: 0, max: 0 },
            default: Value::Int(0),
            doc: "no window; `ls` has one",
            source: "Transformer-LS eq. 3-4",
        },
        ls::REL_POS,
    ],
    complexity: "O(n r d); causal O(n^2 r d / l)",
    time: Growth::Linear,
    memory: Growth::Linear,
    equations: "P = softmax over valid positions of x W^P (per head, r columns); kg = P^T k, vg = P^T v; \
        out_i = softmax over the r slots of (q_i . kg_m / sqrt(D)) applied to vg. Causal: the same inside every segment \
        of l positions; query t sees the slots of segments before floor(t / l).",
    deviations: &[
        "Causal: with 1-based t the paper's floor(t/l) would show the last token of a segment its own slots; the released code never does, and neither does this.",
        "The released LRA code always applies DualLN, also without a window: dual_ln=true. The default is eq. 3-4.",
        "A causal form without a window is not in the paper; it is the long-range half of causal ls.",
    ],
    exceptions: &[Exception {
        property: Property::HeadsIndependent,
        applies: |knobs, causal| knobs.bool("dual_ln") || (causal && ls::hidden(knobs)),
        reason: "SPEC-ls section 5: DualLN runs over the concatenated heads; mem_compress=hidden multiplies all heads' slots by w_k",
    }],
    idle: ls::IDLE,
    validate,
    needs: |_| Needs { x: true, ..Needs::default() },
    cost,
    pattern: |knobs, shape| Some(long_short::pattern(0, ls::projection(knobs, shape.causal), shape)),
    build,
};

fn validate(knobs: &Knobs, shape: &Shape) -> std::result::Result<(), String> {
    if knobs.bool("rel_pos") {
        return Err("relative positions belong to a window; use ls with rel_pos=true".into());
    }
    ls::validate(knobs, shape)
}

fn cost(knobs: &Knobs, shape: &Shape) -> Cost {
    let extras = Extras {
        window: 0,
        dual_ln: knobs.bool("dual_ln"),
        local_norm: knobs.word("dp_input") == "normed",
        rel_pos: false,
    };
    let state_bytes = decoder_state(0, knobs.int("r"), knobs.int("l"), shape);
    Cost { state_bytes, ..long_short::cost(ls::projection(knobs, shape.causal), extras, shape) }
}

fn build(config: &MechanismConfig, builder: &ParamBuilder) -> Result<Box<dyn Mechanism>> {
    ls::build_with(config, builder, 0)
}
