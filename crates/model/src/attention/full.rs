//! Full softmax attention.
//!
//! out_i = sum_j softmax_j(q_i . k_j / sqrt(D)) v_j over visible j (Vaswani et al. 2017 eq. 1;
//! Transformer-LS eq. 2). Visible: not padded and, when causal, j <= i.

use candle_core::{Device, Result};

use super::decode::{Carried, DecodeState, KeyValueCache};
use super::knobs::Knobs;
use super::{
    AttentionInput, AttentionOutput, Cost, Growth, InModels, Mechanism, MechanismConfig, MechanismEntry,
    Needs, Paper, Shape, Support,
};
use crate::nn::params::ParamBuilder;
use effattn_kernel::attend::attend;
use effattn_kernel::heads::Qkv;
use effattn_record::pattern::Pattern;

/// The table line.
pub static ENTRY: MechanismEntry = MechanismEntry {
    name: "full",
    title: "Full attention",
    paper: Paper {
        authors: "Vaswani et al.",
        title: "Attention Is All You Need",
        year: 2017,
        locator: "arXiv:1706.03762",
    },
    support: Support {
        bidirectional: true,
        causal: true,
        cross: true,
        memory: true,
        dropout: true,
        ..Support::NONE
    },
    knobs: &[],
    complexity: "O(n^2 d)",
    time: Growth::Quadratic,
    memory: Growth::Linear,
    equations: "out_i = sum_j softmax_j(q_i . k_j / sqrt(D)) v_j, over keys j that are not padded and, when causal, j <= i.",
    deviations: &[
        "The LRA code adds -1e6 to masked logits instead of removing them; equal except where every key is masked.",
    ],
    exceptions: &[],
    idle: &[],
    in_models: InModels { rotary: true, ..InModels::PLAIN },
    validate: |_, _| Ok(()),
    needs: |_| Needs { decodes_groups: true, ..Needs::default() },
    cost,
    pattern: |_, shape| Some(Pattern::full(shape.queries, shape.keys, shape.causal)),
    build,
};

fn cost(_: &Knobs, shape: &Shape) -> Cost {
    let pairs = 2 * shape.heads * shape.queries * shape.keys * shape.head_dim;
    Cost {
        core_macs: (shape.batch * pairs) as u64,
        flops: pairs as u64,
        state_bytes: (4 * 2 * shape.heads * shape.head_dim * shape.keys) as u64,
    }
}

struct Full {
    causal: bool,
    head_dim: usize,
}

fn build(config: &MechanismConfig, _: &ParamBuilder) -> Result<Box<dyn Mechanism>> {
    Ok(Box::new(Full { causal: config.causal, head_dim: config.head_dim }))
}

impl Mechanism for Full {
    fn forward(&self, input: &AttentionInput) -> Result<AttentionOutput> {
        let (queries, keys) = input.lengths()?;
        if input.first_row && !self.causal && input.dropout.is_none() {
            let q = input.qkv.q()?.narrow(2, 0, 1)?;
            let first = Qkv::separate(q, input.qkv.k()?, input.qkv.v()?);
            let pattern = Pattern::full(1, keys, false);
            return Ok(attend(&first, &input.over(&pattern, self.head_dim))?.into());
        }
        let pattern = Pattern::full(queries, keys, self.causal);
        Ok(attend(input.qkv, &input.over(&pattern, self.head_dim))?.into())
    }

    fn init_decode(
        &self,
        batch: usize,
        room: usize,
        _device: &Device,
    ) -> Result<Option<Box<dyn DecodeState>>> {
        Ok(self.causal.then(|| Carried::holding(batch, KeyValueCache::new(room))))
    }

    fn decode_step(&self, input: &AttentionInput, state: &mut dyn DecodeState) -> Result<AttentionOutput> {
        Ok(state.downcast::<Carried<KeyValueCache>>()?.attend(input.qkv)?.into())
    }
}
