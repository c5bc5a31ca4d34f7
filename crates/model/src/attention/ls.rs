//! Transformer-LS: one softmax over a window and a dynamic projection, with DualLN.
//!
//! Transformer-LS eq. 6 (concatenation) and eq. 7 (DualLN) over eq. 3-5 (slots, see `dp`) and the window of section
//! 3.2 (see `window`). The class token, relative positions and cached positions are those of the
//! released code.

use candle_core::{Result, bail};

use super::knobs::{Knob, Knobs};
use super::long_short::{
    DualNorm, Extras, LongShort, Positions, SlotProjection, Slots, decoder_state, dynamic_group,
};
use super::{
    Cost, Exception, Growth, Idle, InModels, Mechanism, MechanismConfig, MechanismEntry, Needs, Paper,
    Property, Shape, Support, long_short,
};
use crate::nn::params::{Init, ParamBuilder};
use effattn_record::pattern::Pattern;

/// Where this family was published.
pub(super) const PAPER: Paper = Paper {
    authors: "Zhu et al.",
    title: "Long-Short Transformer: Efficient Transformers for Language and Vision",
    year: 2021,
    locator: "arXiv:2107.02192",
};

pub(super) const L: Knob<usize> = Knob::int("l", 16, 1..=usize::MAX)
    .doc("positions per segment (causal only)")
    .source("Transformer-LS section 4.2, both language models");
pub(super) const NORMED_INPUT: Knob<bool> = Knob::words("dp_input", &[("normed", true), ("raw", false)])
    .doc("what is projected under DualLN: normalised keys and values (the paper's text), or raw ones (causal only: the released language model)")
    .source("Transformer-LS section 3.3");
pub(super) const REL_POS: Knob<bool> = Knob::bool("rel_pos", false)
    .doc("relative positions in the logits (causal only; language models)")
    .source("released autoregressive code");
const COMPAT: Knob<bool> = Knob::words("compat", &[("paper", false), ("code", true)])
    .doc("code: as the released language model, mem_compress=hidden")
    .source("Transformer-LS eq. 5");
const HIDDEN: Knob<bool> = Knob::words("mem_compress", &[("projected", false), ("hidden", true)])
    .doc("how cached segments become slots: like current ones, or (hidden) head slices of x compressed, then projected")
    .source("Transformer-LS eq. 5");

/// Window.
pub const W: Knob<usize> = Knob::int("w", 8, 0..=usize::MAX)
    .doc("window: segment length, or with causal the number of visible positions; 0: no window")
    .source("Transformer-LS Table 1");
const R: Knob<usize> = Knob::int("r", 32, 0..=usize::MAX)
    .doc("slots per head (causal: per head and segment); 0: none")
    .source("Transformer-LS Table 1");
const DUAL_LN: Knob<bool> = Knob::bool("dual_ln", true)
    .doc("one LayerNorm for the window's keys and values, another for the slots")
    .source("Transformer-LS eq. 7");

/// The table line.
pub static ENTRY: MechanismEntry = MechanismEntry {
    name: "ls",
    title: "Transformer-LS",
    paper: PAPER,
    support: Support {
        bidirectional: true,
        causal: true,
        memory: true,
        cls: true,
        dropout: true,
        ..Support::NONE
    },
    knobs: &[
        W.spec(),
        R.spec(),
        L.spec(),
        DUAL_LN.spec(),
        NORMED_INPUT.spec(),
        REL_POS.spec(),
        COMPAT.spec(),
        HIDDEN.spec(),
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
        applies: |knobs, causal| settings(knobs).mixes_heads(causal),
        reason: MIXES_HEADS,
    }],
    idle: &[
        IDLE_L,
        Idle { knob: L.name(), when: |knobs, _| knobs.get(&R) == 0, why: "without slots (r=0)" },
        Idle { knob: HIDDEN.name(), when: |knobs, _| knobs.get(&R) == 0, why: "without slots (r=0)" },
        Idle { knob: COMPAT.name(), when: |knobs, _| knobs.get(&R) == 0, why: "without slots (r=0)" },
        Idle { knob: NORMED_INPUT.name(), when: |knobs, _| knobs.get(&R) == 0, why: "without slots (r=0)" },
        IDLE_INPUT,
    ],
    in_models: InModels {
        language: &[
            (W.name(), "512"),
            (L.name(), "16"),
            (R.name(), "1"),
            (REL_POS.name(), "true"),
            (NORMED_INPUT.name(), "raw"),
            (DUAL_LN.name(), "true"),
        ],
        released_block: Some(HIDDEN),
        fits_full_weights: true,
        dual_norm: Some(DUAL_LN),
        ..InModels::PLAIN
    },
    validate: |knobs, shape| settings(knobs).validate(shape),
    needs: |knobs| Needs { x: knobs.get(&R) > 0, ..Needs::default() },
    cost: |knobs, shape| settings(knobs).cost(shape),
    pattern: |knobs, shape| Some(settings(knobs).pattern(shape)),
    build: |config, builder| settings(&config.knobs).build(config, builder),
};

/// Why heads are not independent.
pub(super) const MIXES_HEADS: &str = "SPEC-ls section 5: DualLN runs over the concatenated heads; mem_compress=hidden multiplies all heads' slots by w_k";
/// Where [`L`] has no effect.
pub(super) const IDLE_L: Idle =
    Idle { knob: L.name(), when: |_, shape| !shape.causal, why: "outside the causal form" };
/// Where [`NORMED_INPUT`] has no effect.
pub(super) const IDLE_INPUT: Idle =
    Idle { knob: NORMED_INPUT.name(), when: |knobs, _| !knobs.get(&DUAL_LN), why: "without dual_ln=true" };

fn settings(knobs: &Knobs) -> Settings {
    Settings {
        window: knobs.get(&W),
        rank: knobs.get(&R),
        segment: knobs.get(&L),
        dual_ln: knobs.get(&DUAL_LN),
        normed: knobs.get(&NORMED_INPUT),
        rel_pos: knobs.get(&REL_POS),
        hidden: knobs.get(&HIDDEN) || knobs.get(&COMPAT),
    }
}

/// The settings of one variant of `ls` or `dp`.
pub(super) struct Settings {
    /// Window, 0: none.
    pub window: usize,
    /// Slots per head (causal: and segment), 0: none.
    pub rank: usize,
    /// Length of a segment.
    pub segment: usize,
    /// DualLN.
    pub dual_ln: bool,
    /// Whether normalised keys and values are projected.
    pub normed: bool,
    /// Relative positions.
    pub rel_pos: bool,
    /// Whether cached segments are compressed before they are projected.
    pub hidden: bool,
}

impl Settings {
    /// Whether a head reads another.
    pub const fn mixes_heads(&self, causal: bool) -> bool {
        self.dual_ln || (causal && self.hidden)
    }

    fn projection(&self, causal: bool) -> SlotProjection {
        let Self { rank, segment, .. } = *self;
        if causal && rank > 0 {
            SlotProjection::Segments { rank, segment }
        } else {
            SlotProjection::Whole { rank }
        }
    }

    /// Who sees whom.
    pub fn pattern(&self, shape: &Shape) -> Pattern {
        long_short::pattern(self.window, self.projection(shape.causal), shape)
    }

    /// Settings against each other and the shape.
    pub fn validate(&self, shape: &Shape) -> std::result::Result<(), String> {
        let Self { window, rank, rel_pos, hidden, segment, .. } = *self;
        if window == 0 && rank == 0 {
            return Err("w=0,r=0 leaves nothing to attend to; set w or r".into());
        }
        if rel_pos && window == 0 {
            return Err("relative positions belong to a window; set w".into());
        }
        if !shape.causal {
            let causal_only =
                [(!self.normed, "dp_input=raw"), (rel_pos, "rel_pos=true"), (hidden, "mem_compress=hidden")];
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
        if (rel_pos || hidden) && !memory.is_multiple_of(segment) {
            return Err(format!(
                "{memory} cached positions are not a multiple of l={segment}; cache a multiple"
            ));
        }
        Ok(())
    }

    /// Cost of a call.
    pub fn cost(&self, shape: &Shape) -> Cost {
        let Self { window, rank, segment, dual_ln, rel_pos, normed, .. } = *self;
        let extras = Extras { window, dual_ln, local_norm: window > 0 || normed, rel_pos };
        let state_bytes = decoder_state(window, rank, segment, shape);
        Cost { state_bytes, ..long_short::cost(self.projection(shape.causal), extras, shape) }
    }

    /// The mechanism.
    pub fn build(&self, config: &MechanismConfig, builder: &ParamBuilder) -> Result<Box<dyn Mechanism>> {
        let (rank, e) = (self.rank, config.heads * config.head_dim);
        let hidden = self.hidden && config.causal;
        if hidden && config.width != e {
            bail!("mem_compress=hidden needs a layer input as wide as all heads, {e}, not {}", config.width);
        }
        let slots = if rank == 0 {
            Slots::None
        } else {
            let group = dynamic_group(config, builder, rank)?;
            let weight = |name: &str| builder.param(name, &[e, e], Init::normal(0.02));
            let hidden = if hidden { Some((weight("w_k.weight")?, weight("w_v.weight")?)) } else { None };
            Slots::Dynamic { group, rank, segment: config.causal.then_some(self.segment), hidden }
        };
        let norm = if self.dual_ln { Some(DualNorm::build(config, builder)?) } else { None };
        let positions =
            if self.rel_pos { Some(Positions::build(config, builder, rank > 0, false)?) } else { None };
        Ok(Box::new(LongShort {
            window: self.window,
            slots,
            norm,
            normed: self.normed,
            positions,
            heads: config.heads,
            head_dim: config.head_dim,
            causal: config.causal,
        }))
    }
}
