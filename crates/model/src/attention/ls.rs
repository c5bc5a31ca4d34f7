//! Transformer-LS: one softmax over a window and a dynamic projection, with DualLN.
//!
//! Transformer-LS eq. 6 (concatenation) and eq. 7 (DualLN) over eq. 3-5 (slots, see `dp`) and the window of section
//! 3.2 (see `window`). The class token, relative positions and cached positions are those of the
//! released code.

use candle_core::{Result, bail};

use super::knobs::{Kind, Knob, Knobs, Value};
use super::long_short::{
    DualNorm, Extras, LongShort, Positions, SlotProjection, Slots, decoder_state, dynamic_group,
};
use super::{
    Cost, Exception, Growth, Idle, Mechanism, MechanismConfig, MechanismEntry, Needs, Paper, Property, Shape,
    Support, long_short,
};
use crate::nn::params::{Init, ParamBuilder};

/// Where this family was published.
pub(super) const PAPER: Paper = Paper {
    authors: "Zhu et al.",
    title: "Long-Short Transformer: Efficient Transformers for Language and Vision",
    year: 2021,
    locator: "arXiv:2107.02192",
};

pub(super) const L: Knob = Knob {
    name: "l",
    kind: Kind::Int { min: 1, max: usize::MAX },
    default: Value::Int(16),
    doc: "positions per segment (causal only)",
    source: "Transformer-LS section 4.2, both language models",
};
pub(super) const DP_INPUT: Knob = Knob {
    name: "dp_input",
    kind: Kind::Word(&["normed", "raw"]),
    default: Value::Word("normed"),
    doc: "what is projected under DualLN: normalised keys and values (the paper's text), or raw ones (causal only: the released language model)",
    source: "Transformer-LS section 3.3",
};
pub(super) const REL_POS: Knob = Knob {
    name: "rel_pos",
    kind: Kind::Bool,
    default: Value::Bool(false),
    doc: "relative positions in the logits (causal only; language models)",
    source: "released autoregressive code",
};
pub(super) const COMPAT: Knob = Knob {
    name: "compat",
    kind: Kind::Word(&["paper", "code"]),
    default: Value::Word("paper"),
    doc: "code: as the released language model, mem_compress=hidden",
    source: "Transformer-LS eq. 5",
};
pub(super) const MEM_COMPRESS: Knob = Knob {
    name: "mem_compress",
    kind: Kind::Word(&["projected", "hidden"]),
    default: Value::Word("projected"),
    doc: "how cached segments become slots: like current ones, or (hidden) head slices of x compressed, then projected",
    source: "Transformer-LS eq. 5",
};

/// The table line.
pub static ENTRY: MechanismEntry = MechanismEntry {
    name: "ls",
    title: "Transformer-LS",
    paper: PAPER,
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
            name: "w",
            kind: Kind::Int { min: 0, max: usize::MAX },
            default: Value::Int(8),
            doc: "window: segment length, or with causal the number of visible positions; 0: no window",
            source: "Transformer-LS Table 1",
        },
        Knob {
            name: "r",
            kind: Kind::Int { min: 0, max: usize::MAX },
            default: Value::Int(32),
            doc: "slots per head (causal: per head and segment); 0: none",
            source: "Transformer-LS Table 1",
        },
        L,
        Knob {
            name: "dual_ln",
            kind: Kind::Bool,
            default: Value::Bool(true),
            doc: "one LayerNorm for the window's keys and values, another for the slots",
            source: "Transformer-LS eq. 7",
        },
        DP_INPUT,
        REL_POS,
        COMPAT,
        MEM_COMPRESS,
    ],
    complexity: "O(n (r + w) d); causal O(n (w + n r / l) d)",
    time: Growth::Linear,
    memory: Growth::Linear,
    equations: "One softmax over [slots; window]: logits q_i . kg_m / sqrt(D) and q_i . kl_j / sqrt(D), applied to [vg; vl]. \
        Window: s = floor(i/w), s w - ext <= j < (s+1) w + ext, ext = max(floor(w/2), 1); causal t - w < j <= t. \
        Slots as in dp. DualLN: kl = LN_local(k), kg = LN_global(P^T kl), values likewise, over the concatenated heads. \
        Class token: its key and value join the slots before LN_global; it then attends to [itself; out]. \
        Relative positions: window logit (q/sqrt(D) + u) . kl_j + (q/sqrt(D) + v) . R(t - j); slot logit q/sqrt(D) . (kg_e + C(floor(t/l) r - 1 - e)).",
    deviations: &[
        "The paper says a window always spans 2w; for w = 1 the released code uses 3, and so does this.",
        "The paper gives no causal window; the released code's is per token, w keys including itself.",
        "The released language model projects raw keys and values (dp_input=raw); the paper's text gives normed.",
        "The released language model compresses cached hidden states head slice by head slice and projects afterwards, which is not eq. 5 for more than one head: compat=code.",
        "The released language model attends to a cache of zeros at the start of a stream; here positions before the memory are absent, pass such a memory to reproduce it.",
        "The window's position biases are not divided by sqrt(D), unlike Transformer-XL's (as released).",
    ],
    exceptions: &[Exception {
        property: Property::HeadsIndependent,
        applies: |knobs, causal| knobs.bool("dual_ln") || (causal && hidden(knobs)),
        reason: "SPEC-ls section 5: DualLN runs over the concatenated heads; mem_compress=hidden multiplies all heads' slots by w_k",
    }],
    idle: IDLE,
    validate,
    needs: |knobs| Needs { x: knobs.int("r") > 0, ..Needs::default() },
    cost,
    pattern: |knobs, shape| Some(long_short::pattern(knobs.int("w"), projection(knobs, shape.causal), shape)),
    build: |config, builder| build_with(config, builder, config.knobs.int("w")),
};

/// Knobs of `ls` and `dp` without effect.
pub(super) const IDLE: &[Idle] = &[
    Idle { knob: "l", when: |_, shape| !shape.causal, why: "outside the causal form" },
    Idle { knob: "l", when: |knobs, _| knobs.int("r") == 0, why: "without slots (r=0)" },
    Idle { knob: "mem_compress", when: |knobs, _| knobs.int("r") == 0, why: "without slots (r=0)" },
    Idle { knob: "compat", when: |knobs, _| knobs.int("r") == 0, why: "without slots (r=0)" },
    Idle { knob: "dp_input", when: |knobs, _| knobs.int("r") == 0, why: "without slots (r=0)" },
    Idle { knob: "dp_input", when: |knobs, _| !knobs.bool("dual_ln"), why: "without dual_ln=true" },
];

pub(super) fn hidden(knobs: &Knobs) -> bool {
    knobs.word("mem_compress") == "hidden" || knobs.word("compat") == "code"
}

/// Where the slots come from, for pattern and cost.
pub(super) fn projection(knobs: &Knobs, causal: bool) -> SlotProjection {
    let rank = knobs.int("r");
    if causal && rank > 0 {
        SlotProjection::Segments { rank, segment: knobs.int("l") }
    } else {
        SlotProjection::Whole { rank }
    }
}

/// Knobs against each other and the shape, for `ls` and `dp`.
pub(super) fn validate(knobs: &Knobs, shape: &Shape) -> std::result::Result<(), String> {
    let (raw, rel_pos, l) = (knobs.word("dp_input") == "raw", knobs.bool("rel_pos"), knobs.int("l"));
    if knobs.int("w") == 0 && knobs.int("r") == 0 {
        return Err("w=0,r=0 leaves nothing to attend to; set w or r".into());
    }
    if rel_pos && knobs.int("w") == 0 {
        return Err("relative positions belong to a window; set w".into());
    }
    if !shape.causal {
        let causal_only =
            [(raw, "dp_input=raw"), (rel_pos, "rel_pos=true"), (hidden(knobs), "mem_compress=hidden")];
        if let Some((_, knob)) = causal_only.iter().find(|(set, _)| *set) {
            return Err(format!("{knob} is defined for the causal form only; leave it at its default"));
        }
        if shape.queries != shape.keys {
            return Err(format!(
                "the bidirectional form needs as many queries as keys, not {} and {}",
                shape.queries, shape.keys
            ));
        }
    }
    if shape.causal && shape.cls {
        return Err("the class token is defined for the bidirectional form only".into());
    }
    let memory = shape.keys.saturating_sub(shape.queries);
    if (rel_pos || hidden(knobs)) && !memory.is_multiple_of(l) {
        return Err(format!("{memory} cached positions are not a multiple of l={l}; cache a multiple"));
    }
    Ok(())
}

fn cost(knobs: &Knobs, shape: &Shape) -> Cost {
    let w = knobs.int("w");
    let extras = Extras {
        window: w,
        dual_ln: knobs.bool("dual_ln"),
        local_norm: w > 0 || knobs.word("dp_input") == "normed",
        rel_pos: knobs.bool("rel_pos"),
    };
    let state_bytes = decoder_state(w, knobs.int("r"), knobs.int("l"), shape);
    Cost { state_bytes, ..long_short::cost(projection(knobs, shape.causal), extras, shape) }
}

/// Builds `ls` or, with window 0, `dp`.
pub(super) fn build_with(
    config: &MechanismConfig,
    builder: &ParamBuilder,
    window: usize,
) -> Result<Box<dyn Mechanism>> {
    let knobs = &config.knobs;
    let (rank, e) = (knobs.int("r"), config.heads * config.head_dim);
    let hidden = hidden(knobs) && config.causal;
    if hidden && config.width != e {
        bail!("mem_compress=hidden needs a layer input as wide as all heads, {e}, not {}", config.width);
    }
    let slots = if rank == 0 {
        Slots::None
    } else {
        let group = dynamic_group(config, builder, rank)?;
        let weight = |name: &str| builder.param(name, &[e, e], Init::normal(0.02));
        let hidden = if hidden { Some((weight("w_k.weight")?, weight("w_v.weight")?)) } else { None };
        Slots::Dynamic { group, rank, segment: config.causal.then(|| knobs.int("l")), hidden }
    };
    let norm = if knobs.bool("dual_ln") { Some(DualNorm::build(config, builder)?) } else { None };
    let positions =
        if knobs.bool("rel_pos") { Some(Positions::build(config, builder, rank > 0, false)?) } else { None };
    Ok(Box::new(LongShort {
        window,
        slots,
        norm,
        normed: knobs.word("dp_input") == "normed",
        positions,
        heads: config.heads,
        head_dim: config.head_dim,
        causal: config.causal,
    }))
}
