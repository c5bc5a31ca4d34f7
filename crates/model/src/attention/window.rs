//! Window attention, the short-range half of Transformer-LS (SPEC-ls section 3).
//!
//! Bidirectional (segment-wise, sec. 3.2): with s = floor(i / w) and ext = max(floor(w / 2), 1), query i sees
//! keys s w - ext <= j < (s + 1) w + ext. Causal (token-wise, the released language model): t - w < j <= t.

use candle_core::{Device, Result};

use super::decode::{Carried, DecodeState, KeyValueCache};
use super::knobs::{Knob, Knobs};
use super::{
    AttentionInput, AttentionOutput, Cost, Growth, InModels, Mechanism, MechanismConfig, MechanismEntry,
    Needs, Paper, Shape, Support,
};
use crate::nn::params::ParamBuilder;
use effattn_kernel::attend::attend;
use effattn_record::pattern::Pattern;

const W: Knob<usize> = Knob::int("w", 8, 1..=1 << 24)
    .doc("segment length; causal: number of keys a query sees, itself included")
    .source("Transformer-LS, Long Range Arena runs (w = 8); its language models use 512");

/// The table line.
pub static ENTRY: MechanismEntry = MechanismEntry {
    name: "window",
    title: "Window attention",
    paper: Paper {
        authors: "Zhu et al.",
        title: "Long-Short Transformer: Efficient Transformers for Language and Vision",
        year: 2021,
        locator: "arXiv:2107.02192",
    },
    support: Support { bidirectional: true, causal: true, memory: true, dropout: true, ..Support::NONE },
    knobs: &[W.spec()],
    complexity: "O(n w d)",
    time: Growth::Linear,
    memory: Growth::Linear,
    equations: "\
out_i = sum_j softmax_j(q_i . k_j / sqrt(D)) v_j over visible, unpadded keys j.
Bidirectional: s w - ext <= j < (s + 1) w + ext with s = floor(i / w), ext = max(floor(w / 2), 1).
Causal: t - w < j <= t.",
    deviations: &[
        "The paper says the span is always 2w; for w = 1 the released code uses 3, which is followed.",
        "The paper gives no causal rule; the released code's is per token, which is followed.",
        "In the released code a window without a valid key gives NaN rows that are overwritten by 0; here such rows are 0.",
    ],
    exceptions: &[],
    idle: &[],
    in_models: InModels {
        language: &[(W.name(), "512")],
        fits_full_weights: true,
        rotary: true,
        ..InModels::PLAIN
    },
    validate: |_, _| Ok(()),
    needs: |_| Needs { decodes_groups: true, ..Needs::default() },
    cost,
    pattern: |knobs, shape| Some(Pattern::window(shape.queries, shape.keys, knobs.get(&W), shape.causal)),
    build,
};

/// Multiply-adds 2 B H up(N, w) S D; S is the span of a segment, or 2w for causal tiles.
fn cost(knobs: &Knobs, shape: &Shape) -> Cost {
    let w = knobs.get(&W);
    let span = if shape.causal { 2 * w } else { w + 2 * (w / 2).max(1) };
    let macs = 2 * shape.heads * shape.queries.next_multiple_of(w) * span * shape.head_dim;
    let kept = if shape.causal { shape.keys.min(w) } else { 0 };
    Cost {
        core_macs: (shape.batch * macs) as u64,
        flops: macs as u64,
        state_bytes: (4 * 2 * shape.heads * shape.head_dim * kept) as u64,
    }
}

struct Window {
    w: usize,
    causal: bool,
    head_dim: usize,
}

fn build(config: &MechanismConfig, _: &ParamBuilder) -> Result<Box<dyn Mechanism>> {
    let MechanismConfig { causal, head_dim, .. } = *config;
    Ok(Box::new(Window { w: config.knobs.get(&W), causal, head_dim }))
}

impl Mechanism for Window {
    fn forward(&self, input: &AttentionInput) -> Result<AttentionOutput> {
        let (queries, keys) = input.lengths()?;
        let pattern = Pattern::window(queries, keys, self.w, self.causal);
        Ok(attend(input.qkv, &input.over(&pattern, self.head_dim))?.into())
    }

    fn init_decode(
        &self,
        batch: usize,
        room: usize,
        _device: &Device,
    ) -> Result<Option<Box<dyn DecodeState>>> {
        Ok(self.causal.then(|| Carried::holding(batch, KeyValueCache::new(room.min(self.w)))))
    }

    fn decode_step(&self, input: &AttentionInput, state: &mut dyn DecodeState) -> Result<AttentionOutput> {
        Ok(state.downcast::<Carried<KeyValueCache>>()?.attend(input.qkv)?.into())
    }
}
