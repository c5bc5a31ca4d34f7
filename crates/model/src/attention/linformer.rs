//! Linformer: keys and values projected to k slots by learned matrices.
//!
//! Wang et al. 2020 (linear self-attention, E_i and F_i): kg = E (mask k), vg = F (mask v), attention over the k slots.

use candle_core::{Result, bail};

use super::knobs::{Knob, Knobs};
use super::long_short::{DualNorm, Extras, LongShort, SlotProjection, Slots};
use super::{
    Cost, Exception, Growth, Idle, InModels, Mechanism, MechanismConfig, MechanismEntry, Needs, Paper,
    Property, Shape, Support, long_short,
};
use crate::nn::params::{Init, ParamBuilder, ParamSpec};

/// Where Linformer was published.
pub(super) const PAPER: Paper = Paper {
    authors: "Wang et al.",
    title: "Linformer: Self-Attention with Linear Complexity",
    year: 2020,
    locator: "arXiv:2006.04768",
};

pub(super) const K: Knob<usize> =
    Knob::int("k", 256, 1..=usize::MAX).doc("projected length").source("Transformer-LS Table 1");
pub(super) const N_MAX: Knob<Option<usize>> = Knob::auto_int("n_max", 1..=usize::MAX)
    .doc("longest sequence; auto: the model's")
    .source("padded task length");
pub(super) const SHARE_KV: Knob<bool> = Knob::bool("share_kv", true)
    .doc("one matrix for keys, values and all layers (the LRA code); false: E and F in every layer")
    .source("LRA code of Nystromformer");
pub(super) const PER_LAYER: Knob<bool> = Knob::bool("per_layer", false)
    .doc("with share_kv=true: a matrix per layer, still one for keys and values (the Long Range Arena code)")
    .source("LRA code of Nystromformer");
pub(super) const PER_HEAD: Knob<bool> =
    Knob::bool("per_head", true).doc("a matrix per head").source("LRA code of Nystromformer");

const W: Knob<usize> =
    Knob::int("w", 0, 0..=0).doc("no window; `linformer-window` has one").source("Linformer");
const DUAL_LN: Knob<bool> = Knob::bool("dual_ln", false)
    .doc("LayerNorm on keys and values before and after the projection")
    .source("Linformer");

/// The table line.
pub static ENTRY: MechanismEntry = MechanismEntry {
    name: "linformer",
    title: "Linformer",
    paper: PAPER,
    support: Support { bidirectional: true, dropout: true, ..Support::NONE },
    knobs: &[
        K.spec(),
        N_MAX.spec(),
        SHARE_KV.spec(),
        PER_LAYER.spec(),
        PER_HEAD.spec(),
        W.spec(),
        DUAL_LN.spec(),
    ],
    complexity: "O(n k d)",
    time: Growth::Linear,
    memory: Growth::Linear,
    equations: "kg = E (mask k), vg = F (mask v) with E, F of k rows, F = E when shared; \
        out_i = softmax over the k slots of (q_i . kg_m / sqrt(D)) applied to vg.",
    deviations: &[
        "The LRA code has one E per head, for keys, values and all layers alike (share_kv=true); the paper presents E and F per layer and head and lists sharing as options.",
        "The slots are never masked: a padded position only counts as zeros.",
    ],
    exceptions: &[Exception {
        property: Property::HeadsIndependent,
        applies: |knobs, _| knobs.get(&DUAL_LN),
        reason: "SPEC-ls section 5: DualLN runs over the concatenated heads",
    }],
    idle: IDLE,
    in_models: InModels { dual_norm: Some(DUAL_LN), ..InModels::PLAIN },
    validate,
    needs: |_| Needs::default(),
    cost,
    pattern: |knobs, shape| Some(long_short::pattern(0, SlotProjection::Learned { k: knobs.get(&K) }, shape)),
    build: |config, builder| build_with(config, builder, 0),
};

/// Knobs of both Linformer forms without effect.
pub(super) const IDLE: &[Idle] =
    &[Idle { knob: PER_LAYER.name(), when: |knobs, _| !knobs.get(&SHARE_KV), why: "with share_kv=false" }];

/// Knobs against the shape, for both Linformer forms.
pub(super) fn validate(knobs: &Knobs, shape: &Shape) -> std::result::Result<(), String> {
    if shape.causal {
        return Err("Linformer mixes all positions into its slots; it has no causal form".into());
    }
    if shape.queries != shape.keys {
        return Err(format!("as many queries as keys are needed, not {} and {}", shape.queries, shape.keys));
    }
    match knobs.get(&N_MAX) {
        Some(n_max) if shape.keys > n_max => {
            Err(format!("{} positions are more than n_max={n_max}; raise n_max", shape.keys))
        }
        _ => Ok(()),
    }
}

/// Cost of both Linformer forms.
pub(super) fn cost(knobs: &Knobs, shape: &Shape) -> Cost {
    let extras =
        Extras { dual_ln: knobs.get(&DUAL_LN), local_norm: true, window: knobs.get(&W), rel_pos: false };
    long_short::cost(SlotProjection::Learned { k: knobs.get(&K) }, extras, shape)
}

/// Builds Linformer with a window of `window` (0: none).
pub(super) fn build_with(
    config: &MechanismConfig,
    builder: &ParamBuilder,
    window: usize,
) -> Result<Box<dyn Mechanism>> {
    if config.causal {
        bail!("Linformer mixes all positions into its slots; it has no causal form");
    }
    let knobs = &config.knobs;
    let (k, n_max) = (knobs.get(&K), knobs.get(&N_MAX).unwrap_or(config.max_len));
    let shape = if knobs.get(&PER_HEAD) { vec![config.heads, k, n_max] } else { vec![k, n_max] };
    let init = Init::normal(0.02);
    let slots = if knobs.get(&SHARE_KV) {
        let own = if knobs.get(&PER_LAYER) { builder.clone() } else { builder.root() };
        Slots::Learned { keys: own.group(&[ParamSpec::new("E", &shape, init)])?, values: None }
    } else {
        let matrix = |name: &str| builder.group(&[ParamSpec::new(name, &shape, init)]);
        Slots::Learned { keys: matrix("E")?, values: Some(matrix("F")?) }
    };
    let norm = if knobs.get(&DUAL_LN) { Some(DualNorm::build(config, builder)?) } else { None };
    Ok(Box::new(LongShort {
        window,
        slots,
        norm,
        normed: true,
        positions: None,
        heads: config.heads,
        head_dim: config.head_dim,
        causal: false,
    }))
}
