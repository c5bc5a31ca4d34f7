//! Based's linear attention (Arora et al. 2024): the softmax's exponential is replaced by its Taylor polynomial of second order
//! (SPEC-modern section 5).

use candle_core::{Device, Result};

use super::decode::{DecodeState, LinearSums};
use super::knobs::{Knob, Knobs};
use super::{
    AttentionInput, AttentionOutput, Cost, Growth, HeadShape, Idle, InModels, Mechanism, MechanismEntry,
    Needs, Paper, Projections, Shape, Support, mixer,
};
use crate::nn::params::ParamBuilder;
use effattn_kernel::linear_attention::{Decay, Features, Guard, LinearAttention, linear_attention};

const KEY_DIM: Knob<Option<usize>> = Knob::int_or_auto("Dk", Some(16), 1..=256)
    .doc("width of queries and keys; auto: the width of a head")
    .source("Based sec. 3.2");
const EPS: Knob<f64> =
    Knob::float("eps", 1e-12, 0.0..=1.0).doc("added to the denominator").source("released code");
const NORMALISE: Knob<bool> =
    Knob::bool("normalise", true).doc("whether weights are divided by their sum").source("Based eq. 4");

/// The table line.
pub static ENTRY: MechanismEntry = MechanismEntry {
    name: "based",
    title: "Based (Taylor features)",
    paper: Paper {
        authors: "Arora et al.",
        title: "Simple linear attention language models balance the recall-throughput tradeoff",
        year: 2024,
        locator: "arXiv:2402.18668",
    },
    support: Support { bidirectional: true, causal: true, ..Support::NONE },
    knobs: &[KEY_DIM.spec(), EPS.spec(), NORMALISE.spec()],
    complexity: "O(n r^2 d)",
    time: Growth::Linear,
    memory: Growth::Linear,
    equations: "\
s = q_i . k_j / sqrt(Dk), a_ij = 1 + s + s^2 / 2, over keys j that are not padded and, when causal, j <= i
out_i = sum_j a_ij v_j / (sum_j a_ij + eps); computed with 1 + Dk + Dk (Dk + 1) / 2 features",
    deviations: &[
        "flash-linear-attention's layer drops 1/sqrt(Dk) in one of its modes and splits queries by the head's width; Based's code is followed.",
        "The released models alternate this layer with sliding windows and convolutions; here it is every layer.",
    ],
    exceptions: &[],
    idle: &[Idle { knob: EPS.name(), when: |knobs, _| !knobs.get(&NORMALISE), why: "with normalise=false" }],
    in_models: InModels::PLAIN,
    validate: mixer::validate,
    needs: |knobs| {
        let narrow = Some(HeadShape { heads: None, dim: knobs.get(&KEY_DIM) });
        Needs {
            projections: Projections { q: narrow, k: narrow, v: Some(HeadShape::LAYER) },
            ..Needs::default()
        }
    },
    cost,
    pattern: |_, _| None,
    build: |config, _: &ParamBuilder| {
        let guard = config.knobs.get(&NORMALISE).then(|| Guard::Add(config.knobs.get(&EPS)));
        Ok(Box::new(Based { guard, causal: config.causal }))
    },
};

fn cost(knobs: &Knobs, shape: &Shape) -> Cost {
    let Shape { batch, heads, head_dim, queries, .. } = *shape;
    let width = knobs.get(&KEY_DIM).unwrap_or(head_dim);
    let features = 1 + width + width * (width + 1) / 2;
    let macs = heads * queries * features * (2 * head_dim + 1);
    Cost {
        core_macs: (batch * macs) as u64,
        flops: macs as u64,
        state_bytes: (4 * heads * features * (head_dim + 1)) as u64,
    }
}

struct Based {
    guard: Option<Guard>,
    causal: bool,
}

impl Based {
    fn call<'a>(&self, input: &AttentionInput<'a>) -> LinearAttention<'a> {
        LinearAttention {
            features: Features::Taylor,
            guard: self.guard,
            mask: input.mask,
            causal: self.causal,
            decay: Decay::None,
        }
    }
}

impl Mechanism for Based {
    fn forward(&self, input: &AttentionInput) -> Result<AttentionOutput> {
        Ok(linear_attention(input.qkv, &self.call(input))?.into())
    }

    fn init_decode(&self, batch: usize, _: usize, _: &Device) -> Result<Option<Box<dyn DecodeState>>> {
        Ok(self.causal.then(|| LinearSums::start(batch)))
    }

    fn decode_step(&self, input: &AttentionInput, state: &mut dyn DecodeState) -> Result<AttentionOutput> {
        Ok(state.downcast::<LinearSums>()?.attend(input.qkv, &self.call(input))?.into())
    }
}
