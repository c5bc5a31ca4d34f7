//! Dynamic projection: a low-rank projection of keys and values whose weights come from the input.
//!
//! Transformer-LS eq. 3-4 (bidirectional) and eq. 5 (causal): P = softmax over positions of X W^P, then attention
//! to P^T K, P^T V. `ls` without its window.

use super::knobs::{Knob, Knobs};
use super::ls::{self, L, NORMED_INPUT, REL_POS, Settings};
use super::{Exception, Growth, InModels, MechanismEntry, Needs, Property, Shape, Support};

const R: Knob<usize> = Knob::int("r", 128, 1..=usize::MAX)
    .doc("slots per head (causal: per head and segment)")
    .source("Transformer-LS Table 1, best on Text");
const DUAL_LN: Knob<bool> = Knob::bool("dual_ln", false)
    .doc("normalise keys and values before and after the projection; the released code always does")
    .source("Transformer-LS eq. 3-4");
const W: Knob<usize> =
    Knob::int("w", 0, 0..=0).doc("no window; `ls` has one").source("Transformer-LS eq. 3-4");

/// The table line.
pub static ENTRY: MechanismEntry = MechanismEntry {
    name: "dp",
    title: "Dynamic projection",
    paper: ls::PAPER,
    support: Support {
        bidirectional: true,
        causal: true,
        memory: true,
        cls: true,
        dropout: true,
        ..Support::NONE
    },
    knobs: &[R.spec(), L.spec(), DUAL_LN.spec(), NORMED_INPUT.spec(), W.spec(), REL_POS.spec()],
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
        applies: |knobs, causal| settings(knobs).mixes_heads(causal),
        reason: ls::MIXES_HEADS,
    }],
    idle: &[ls::IDLE_L, ls::IDLE_INPUT],
    in_models: InModels {
        language: &[
            (L.name(), "16"),
            (R.name(), "1"),
            (NORMED_INPUT.name(), "raw"),
            (DUAL_LN.name(), "true"),
        ],
        dual_norm: Some(DUAL_LN),
        ..InModels::PLAIN
    },
    validate,
    needs: |_| Needs { x: true, ..Needs::default() },
    cost: |knobs, shape| settings(knobs).cost(shape),
    pattern: |knobs, shape| Some(settings(knobs).pattern(shape)),
    build: |config, builder| settings(&config.knobs).build(config, builder),
};

fn settings(knobs: &Knobs) -> Settings {
    Settings {
        window: knobs.get(&W),
        rank: knobs.get(&R),
        segment: knobs.get(&L),
        dual_ln: knobs.get(&DUAL_LN),
        normed: knobs.get(&NORMED_INPUT),
        rel_pos: knobs.get(&REL_POS),
        hidden: false,
    }
}

fn validate(knobs: &Knobs, shape: &Shape) -> Result<(), String> {
    if knobs.get(&REL_POS) {
        return Err("relative positions belong to a window; use ls with rel_pos=true".into());
    }
    settings(knobs).validate(shape)
}
