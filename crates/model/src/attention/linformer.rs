//! Linformer: keys and values projected to k slots by learned matrices.
//!
//! Wang et al. 2020 (linear self-attention, E_i and F_i): kg = E (mask k), vg = F (mask v), attention over the k slots.

use candle_core::{Result, bail};

use super::knobs::{Kind, Knob, Knobs, Value};
use super::long_short::{DualNorm, Extras, LongShort, SlotProjection, Slots};
use super::{
    Cost, Exception, Growth, Idle, Mechanism, MechanismConfig, MechanismEntry, Needs, Paper, Property, Shape,
    Support, long_short,
};
use crate::nn::params::{Init, ParamBuilder, ParamSpec};

/// Where Linformer was published.
pub(super) const PAPER: Paper = Paper {
    authors: "Wang et al.",
    title: "Linformer: Self-Attention with Linear Complexity",
    year: 2020,
    locator: "arXiv:2006.04768",
};

pub(super) const K: Knob = Knob {
    name: "k",
    kind: Kind::Int { min: 1, max: usize::MAX },
    default: Value::Int(256),
    doc: "projected length",
    source: "Transformer-LS Table 1",
};
pub(super) const N_MAX: Knob = Knob {
    name: "n_max",
    kind: Kind::AutoInt { min: 1, max: usize::MAX },
    default: Value::Auto,
    doc: "longest sequence; auto: the model's",
    source: "padded task length",
};
pub(super) const SHARE_KV: Knob = Knob {
    name: "share_kv",
    kind: Kind::Bool,
    default: Value::Bool(true),
    doc: "one matrix for keys, values and all layers (the LRA code); false: E and F in every layer",
    source: "LRA code of Nystromformer",
};
pub(super) const PER_LAYER: Knob = Knob {
    name: "per_layer",
    kind: Kind::Bool,
    default: Value::Bool(false),
    doc: "with share_kv=true: a matrix per layer, still one for keys and values (the Long Range Arena code)",
    source: "LRA code of Nystromformer",
};
pub(super) const PER_HEAD: Knob = Knob {
    name: "per_head",
    kind: Kind::Bool,
    default: Value::Bool(true),
    doc: "a matrix per head",
    source: "LRA code of Nystromformer",
};

/// The table line.
pub static ENTRY: MechanismEntry = MechanismEntry {
    name: "linformer",
    title: "Linformer",
    paper: PAPER,
    support: Support {
        bidirectional: true,
        causal: false,
        cross: false,
        memory: false,
        cls: false,
        dropout: true,
    },
    knobs: &[
        K,
        N_MAX,
        SHARE_KV,
        PER_LAYER,
        PER_HEAD,
        Knob {
            name: "w",
            kind: Kind::Int { min: 0, max: 0 },
            default: Value::Int(0),
            doc: "no window; `linformer-window` has one",
            source: "Linformer",
        },
        Knob {
            name: "dual_ln",
            kind: Kind::Bool,
            default: Value::Bool(false),
            doc: "LayerNorm on keys and values before and after the projection",
            source: "Linformer",
        },
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
        applies: |knobs, _| knobs.bool("dual_ln"),
        reason: "SPEC-ls section 5: DualLN runs over the concatenated heads",
    }],
    idle: IDLE,
    validate,
    needs: |_| Needs::default(),
    cost,
    pattern: |knobs, shape| {
        Some(long_short::pattern(0, SlotProjection::Learned { k: knobs.int("k") }, shape))
    },
    build: |config, builder| build_with(config, builder, 0),
};

/// Knobs of both Linformer forms without effect.
pub(super) const IDLE: &[Idle] =
    &[Idle { knob: "per_layer", when: |knobs, _| !knobs.bool("share_kv"), why: "with share_kv=false" }];

/// Knobs against the shape, for both Linformer forms.
pub(super) fn validate(knobs: &Knobs, shape: &Shape) -> std::result::Result<(), String> {
    if shape.causal {
        return Err("Linformer mixes all positions into its slots; it has no causal form".into());
    }
    if shape.queries != shape.keys {
        return Err(format!("as many queries as keys are needed, not {} and {}", shape.queries, shape.keys));
    }
    match knobs.opt_int("n_max") {
        Some(n_max) if shape.keys > n_max => {
            Err(format!("{} positions are more than n_max={n_max}; raise n_max", shape.keys))
        }
        _ => Ok(()),
    }
}

/// Cost of both Linformer forms.
pub(super) fn cost(knobs: &Knobs, shape: &Shape) -> Cost {
    let extras =
        Extras { dual_ln: knobs.bool("dual_ln"), local_norm: true, window: knobs.int("w"), rel_pos: false };
    long_short::cost(SlotProjection::Learned { k: knobs.int("k") }, extras, shape)
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
    let (k, n_max) = (knobs.int("k"), knobs.opt_int("n_max").unwrap_or(config.max_len));
    let shape = if knobs.bool("per_head") { vec![config.heads, k, n_max] } else { vec![k, n_max] };
    let init = Init::normal(0.02);
    let slots = if knobs.bool("share_kv") {
        let own = if knobs.bool("per_layer") { builder.clone() } else { builder.root() };
        Slots::Learned { keys: own.group(&[ParamSpec::new("E", &shape, init)])?, values: None }
    } else {
        let matrix = |name: &str| builder.group(&[ParamSpec::new(name, &shape, init)]);
        Slots::Learned { keys: matrix("E")?, values: Some(matrix("F")?) }
    };
    let norm = if knobs.bool("dual_ln") { Some(DualNorm::build(config, builder)?) } else { None };
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
