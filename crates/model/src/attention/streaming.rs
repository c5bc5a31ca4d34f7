//! Streaming attention (Xiao et al. 2023, StreamingLLM): a sliding window and the first keys, which softmax needs as sinks
//! (SPEC-modern section 11).

use candle_core::Result;

use super::knobs::Knob;
use super::rotary_softmax::{
    BASE, IDLE, OFFSET, ROTARY, ROTARY_DIM, RotarySoftmax, View, check_rotation, check_shape, cost, rotary,
    streaming_pattern,
};
use super::{
    Growth, Idle, InModels, Mechanism, MechanismConfig, MechanismEntry, Needs, Paper, Projections, Support,
};
use crate::nn::params::{Init, ParamBuilder};

const WINDOW: Knob<usize> = Knob::int("window", 256, 1..=1 << 24)
    .doc("last keys that a query sees, its own included")
    .source("our choice: the paper has 1020 to 2044");
const SINKS: Knob<usize> = Knob::int("sinks", 4, 0..=1 << 16)
    .doc("first keys that every query sees")
    .source("StreamingLLM sec. 3.2");
const IN_CACHE: Knob<bool> = Knob::words("positions", &[("cache", true), ("absolute", false)])
    .doc("positions of first keys: inside the cache, so that they are never far, or absolute")
    .source("StreamingLLM sec. 3.2");
const GROUPS: Knob<Option<usize>> = Knob::auto_int("groups", 1..=1 << 12)
    .doc("heads of keys and values, each shared by neighbouring query heads; auto: one per head")
    .source("our choice");
const SINK_LOGIT: Knob<bool> = Knob::bool("sink_logit", false)
    .doc("one more learned logit per head in the denominator, without a value")
    .source("gpt-oss");

/// The table line.
pub static ENTRY: MechanismEntry = MechanismEntry {
    name: "streaming",
    title: "Streaming attention",
    paper: Paper {
        authors: "Xiao et al.",
        title: "Efficient Streaming Language Models with Attention Sinks",
        year: 2023,
        locator: "arXiv:2309.17453",
    },
    support: Support { causal: true, dropout: true, ..Support::NONE },
    knobs: &[
        WINDOW.spec(),
        SINKS.spec(),
        IN_CACHE.spec(),
        GROUPS.spec(),
        SINK_LOGIT.spec(),
        ROTARY.spec(),
        BASE.spec(),
        ROTARY_DIM.spec(),
        OFFSET.spec(),
    ],
    complexity: "O(n w d)",
    time: Growth::Linear,
    memory: Growth::Linear,
    equations: "\
out_i = sum_j softmax_j(rot(q_i) . rot(k_j) / sqrt(D)) v_j over unpadded keys j <= i with j < sinks or i - j < window
positions=cache: a first key j has distance min(i, sinks + window - 1) - j; sink_logit adds exp(s_h) to the denominator",
    deviations: &[
        "StreamingLLM uses the cache while decoding only; here training computes the same attention.",
        "positions=cache makes heads twice as wide, each key using its half, so that first keys meet queries at another angle.",
    ],
    exceptions: &[],
    idle: &[
        IDLE[0],
        IDLE[1],
        IDLE[2],
        Idle { knob: IN_CACHE.name(), when: |knobs, _| knobs.get(&ROTARY).is_none(), why: "with rotary=none" },
        Idle { knob: IN_CACHE.name(), when: |knobs, _| knobs.get(&SINKS) == 0, why: "with sinks=0" },
    ],
    in_models: InModels::PLAIN,
    validate: |knobs, shape| {
        if !shape.causal {
            return Err("streaming attention is causal; choose longformer or bigbird for both directions".into());
        }
        check_rotation(knobs.get(&ROTARY), knobs.get(&ROTARY_DIM), shape.head_dim)?;
        check_shape(knobs.get(&GROUPS), knobs, shape)
    },
    needs: |knobs| Needs { projections: Projections::grouped(knobs.get(&GROUPS)), ..Needs::default() },
    cost: |knobs, shape| {
        let (sinks, window) = (knobs.get(&SINKS), knobs.get(&WINDOW));
        // query i sees i + 1 keys until sinks and window are full
        let most = shape.keys.min(sinks + window);
        let pairs = most * (most + 1) / 2 + (shape.keys - most) * (sinks + window);
        cost(shape, knobs.get(&GROUPS), pairs, sinks + window)
    },
    pattern: |knobs, shape| Some(streaming_pattern(shape.keys, knobs.get(&SINKS), knobs.get(&WINDOW))),
    build,
};

fn build(config: &MechanismConfig, builder: &ParamBuilder) -> Result<Box<dyn Mechanism>> {
    let MechanismConfig { knobs, heads, head_dim, causal, .. } = config;
    let (sinks, window) = (knobs.get(&SINKS), knobs.get(&WINDOW));
    let in_cache = knobs.get(&IN_CACHE) && knobs.get(&ROTARY).is_some();
    let logit = knobs.get(&SINK_LOGIT).then(|| builder.param("sink_logit", &[*heads], Init::ZERO));
    Ok(Box::new(RotarySoftmax {
        rotary: rotary(knobs, *head_dim, knobs.get(&ROTARY_DIM))?,
        offset: knobs.get(&OFFSET),
        heads: *heads,
        head_dim: *head_dim,
        groups: knobs.get(&GROUPS).unwrap_or(*heads),
        view: View::Streaming { sinks, window, in_cache },
        causal: *causal,
        sink_logit: logit.transpose()?,
    }))
}
