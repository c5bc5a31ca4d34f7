//! "Linformer + Win." of Transformer-LS Table 2: one softmax over Linformer's slots and a window.
//!
//! Neither code nor equation was published; defined by analogy with Transformer-LS eq. 6 (and eq. 7 with `dual_ln`).

use super::knobs::{Kind, Knob, Value};
use super::long_short::{self, SlotProjection};
use super::{Exception, Growth, MechanismEntry, Needs, Property, Support, linformer, ls};

/// The table line.
pub static ENTRY: MechanismEntry = MechanismEntry {
    name: "linformer-window",
    title: "Linformer + window",
    paper: ls::PAPER,
    support: Support {
        bidirectional: true,
        causal: false,
        cross: false,
        memory: false,
        cls: true,
        dropout: true,
    },
    knobs: &[
        linformer::K,
        linformer::N_MAX,
        linformer::SHARE_KV,
        linformer::PER_LAYER,
        linformer::PER_HEAD,
        Knob {
            name: "w",
            kind: Kind::Int { min: 1, max: usize::MAX },
            default: Value::Int(8),
            doc: "window: segment length",
            source: "Transformer-LS Table 1 (its value in Table 2 is not stated)",
        },
        Knob {
            name: "dual_ln",
            kind: Kind::Bool,
            default: Value::Bool(false),
            doc: "one LayerNorm for the window's keys and values, another for the slots",
            source: "Transformer-LS eq. 6; not stated for Table 2",
        },
    ],
    complexity: "O(n (k + w) d)",
    time: Growth::Linear,
    memory: Growth::Linear,
    equations: "One softmax over [slots; window]: slots kg = E (mask k), vg = F (mask v) as in linformer, window as in ls. \
        dual_ln: LN_local on k and v, E and F applied to them, LN_global on the slots.",
    deviations: &["Neither code nor equation was published; window, k and DualLN of Table 2 are not stated."],
    exceptions: &[Exception {
        property: Property::HeadsIndependent,
        applies: |knobs, _| knobs.bool("dual_ln"),
        reason: "SPEC-ls section 5: DualLN runs over the concatenated heads",
    }],
    idle: linformer::IDLE,
    validate: linformer::validate,
    needs: |_| Needs::default(),
    cost: linformer::cost,
    pattern: |knobs, shape| {
        Some(long_short::pattern(knobs.int("w"), SlotProjection::Learned { k: knobs.int("k") }, shape))
    },
    build: |config, builder| linformer::build_with(config, builder, config.knobs.int("w")),
};
