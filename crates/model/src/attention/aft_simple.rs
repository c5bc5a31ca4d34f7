//! AFT-simple (Zhai et al. 2021, section 3.2): a softmax over positions per channel, without queries in it.

use candle_core::{Device, Result};

use super::decode::{Carried, DecodeState, Held, bytes};
use super::knobs::Knobs;
use super::{
    AttentionInput, AttentionOutput, Cost, Growth, InModels, Mechanism, MechanismEntry, Needs, Paper, Shape,
    Support,
};
use effattn_kernel::aft::decode::{AftState, step};
use effattn_kernel::aft::{Aft, aft};
use effattn_record::pattern::Pattern;

pub(super) const PAPER: Paper = Paper {
    authors: "Zhai et al.",
    title: "An Attention Free Transformer",
    year: 2021,
    locator: "arXiv:2105.14103",
};

pub(super) const SUPPORT: Support = Support { bidirectional: true, causal: true, ..Support::NONE };

/// The table line.
pub static ENTRY: MechanismEntry = MechanismEntry {
    name: "aft-simple",
    title: "AFT-simple",
    paper: PAPER,
    support: SUPPORT,
    knobs: &[],
    complexity: "O(n d)",
    time: Growth::Linear,
    memory: Growth::Linear,
    equations: "out_i = sigmoid(q_i) sum_j exp(k_j) v_j / sum_j exp(k_j) per channel, over keys j that are not padded and, when causal, j <= i.",
    deviations: &[
        "Sums are relative to the largest key so far (a public implementation has no maximum, so that keys near 60 overflow).",
    ],
    exceptions: &[],
    idle: &[],
    in_models: InModels::PLAIN,
    validate,
    needs: |_| Needs::default(),
    cost: |_, shape| {
        let Shape { batch, heads, head_dim, queries, causal, .. } = *shape;
        let macs = 2 * heads * queries * head_dim;
        let state = if causal { 2 * heads * head_dim } else { 0 };
        Cost { core_macs: (batch * macs) as u64, flops: macs as u64, state_bytes: 4 * state as u64 }
    },
    pattern: |_, shape| Some(Pattern::full(shape.queries, shape.keys, shape.causal)),
    build: |config, _| Ok(Box::new(Simple { causal: config.causal })),
};

/// As many keys as queries.
pub(super) fn validate(_: &Knobs, shape: &Shape) -> std::result::Result<(), String> {
    match shape.queries == shape.keys {
        true => Ok(()),
        false => Err(format!(
            "{} queries and {} keys; AFT takes one of each per position",
            shape.queries, shape.keys
        )),
    }
}

impl Held for AftState {
    fn bytes(&self) -> usize {
        self.tensors().map(bytes).sum()
    }
}

struct Simple {
    causal: bool,
}

type State = Carried<AftState>;

impl Mechanism for Simple {
    fn forward(&self, input: &AttentionInput) -> Result<AttentionOutput> {
        Ok(aft(input.qkv, &Aft { bias: None, mask: input.mask, causal: self.causal })?.into())
    }

    fn init_decode(&self, batch: usize, _: usize, _: &Device) -> Result<Option<Box<dyn DecodeState>>> {
        Ok(self.causal.then(|| State::start(batch)))
    }

    fn decode_step(&self, input: &AttentionInput, state: &mut dyn DecodeState) -> Result<AttentionOutput> {
        let state = state.downcast::<State>()?;
        Ok(state.advance(|held, _| step(input.qkv, None, input.mask, held))?.into())
    }
}
