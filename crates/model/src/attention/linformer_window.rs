//! "Linformer + Win." of Transformer-LS Table 2: one softmax over Linformer's slots and a window.
//!
//! Neither code nor equation was published; defined by analogy with Transformer-LS eq. 6 (and eq. 7 with `dual_ln`).

use super::knobs::Knob;
use super::linformer::{self, K, N_MAX, PER_HEAD, PER_LAYER, SHARE_KV};
use super::long_short::{self, SlotProjection};
use super::{Exception, Growth, InModels, MechanismEntry, Needs, Property, Support, ls};

const W: Knob<usize> = Knob::int("w", 8, 1..=usize::MAX)
    .doc("window: segment length")
    .source("Transformer-LS Table 1 (its value in Table 2 is not stated)");
const DUAL_LN: Knob<bool> = Knob::bool("dual_ln", false)
    .doc("one LayerNorm for the window's keys and values, another for the slots")
    .source("Transformer-LS eq. 6; not stated for Table 2");

/// The table line.
pub static ENTRY: MechanismEntry = MechanismEntry {
    name: "linformer-window",
    title: "Linformer + window",
    paper: ls::PAPER,
    support: Support { bidirectional: true, cls: true, dropout: true, ..Support::NONE },
    knobs: &[
        K.spec(),
        N_MAX.spec(),
        SHARE_KV.spec(),
        PER_LAYER.spec(),
        PER_HEAD.spec(),
        W.spec(),
        DUAL_LN.spec(),
    ],
    complexity: "O(n (k + w) d)",
    time: Growth::Linear,
    memory: Growth::Linear,
    equations: "One softmax over [slots; window]: slots kg = E (mask k), vg = F (mask v) as in linformer, window as in ls. \
        dual_ln: LN_local on k and v, E and F applied to them, LN_global on the slots.",
    deviations: &["Neither code nor equation was published; window, k and DualLN of Table 2 are not stated."],
    exceptions: &[Exception {
        property: Property::HeadsIndependent,
        applies: |knobs, _| knobs.get(&DUAL_LN),
        reason: "SPEC-ls section 5: DualLN runs over the concatenated heads",
    }],
    idle: linformer::IDLE,
    in_models: InModels { dual_norm: Some(DUAL_LN), ..InModels::PLAIN },
    validate: linformer::validate,
    needs: |_| Needs::default(),
    cost: linformer::cost,
    pattern: |knobs, shape| {
        Some(long_short::pattern(knobs.get(&W), SlotProjection::Learned { k: knobs.get(&K) }, shape))
    },
    build: |config, builder| linformer::build_with(config, builder, config.knobs.get(&W)),
};
