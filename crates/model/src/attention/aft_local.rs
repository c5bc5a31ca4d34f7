//! AFT-local (Zhai et al. 2021, section 3.2): AFT with a bias of pairs in a window. With a window as long as the sequence it is
//! AFT-full.

use candle_core::{Device, Result, Tensor};

use super::aft_simple;
use super::decode::{Carried, DecodeState};
use super::knobs::{Knob, Knobs};
use super::{
    AttentionInput, AttentionOutput, Cost, Growth, InModels, Mechanism, MechanismConfig, MechanismEntry,
    Needs, Shape,
};
use crate::nn::params::{Init, ParamBuilder};
use effattn_kernel::aft::decode::{AftState, step};
use effattn_kernel::aft::{Aft, WindowBias, aft};
use effattn_record::pattern::Pattern;

const WINDOW: Knob<usize> = Knob::int("window", 32, 1..=1 << 30)
    .doc("pairs at a distance below it have a bias; at the length and beyond: AFT-full")
    .source("AFT sec. 4.2");
const MAX_LEN: Knob<Option<usize>> = Knob::auto_int("max_len", 1..=1 << 20)
    .doc("positions that the bias has parameters for; auto: the longest that the model is for")
    .source("AFT sec. 3.1");
const PER_HEAD: Knob<bool> = Knob::bool("per_head", false)
    .doc("whether every head has a bias of its own")
    .source("AFT sec. 3.2 (one head)");
const FACTOR: Knob<Option<usize>> = Knob::int_or_auto("factor", Some(64), 1..=1 << 14)
    .doc("rank r of the bias w = u v^T; auto: a parameter per pair, which grow with the square of the longest sequence")
    .source("AFT sec. 3.3; the rank is our choice");

/// The table line.
pub static ENTRY: MechanismEntry = MechanismEntry {
    name: "aft-local",
    title: "AFT-local",
    paper: aft_simple::PAPER,
    support: aft_simple::SUPPORT,
    knobs: &[WINDOW.spec(), MAX_LEN.spec(), PER_HEAD.spec(), FACTOR.spec()],
    complexity: "O(n window d)",
    time: Growth::Linear,
    memory: Growth::Linear,
    equations: "\
out_i = sigmoid(q_i) sum_j exp(k_j + w_ij) v_j / sum_j exp(k_j + w_ij) per channel, over keys j that are not padded and, when
causal, j <= i; w_ij = 0 where |i - j| >= window (such keys still count), w = u v^T with factor",
    deviations: &[
        "A public implementation creates its bias in every call, so that it is not trained; here it is a parameter.",
        "Sums are relative to the largest key so far, as in aft-simple.",
    ],
    exceptions: &[],
    idle: &[],
    in_models: InModels { follows_length: Some(MAX_LEN), ..InModels::PLAIN },
    validate,
    needs: |_| Needs::default(),
    cost,
    pattern: |_, shape| Some(Pattern::full(shape.queries, shape.keys, shape.causal)),
    build,
};

fn validate(knobs: &Knobs, shape: &Shape) -> std::result::Result<(), String> {
    match knobs.get(&MAX_LEN) {
        Some(most) if most < shape.queries => Err(format!(
            "max_len={most} is shorter than the sequence of {} positions; take more, or max_len=auto",
            shape.queries
        )),
        _ => aft_simple::validate(knobs, shape),
    }
}

fn groups(knobs: &Knobs, heads: usize) -> usize {
    if knobs.get(&PER_HEAD) { heads } else { 1 }
}

fn cost(knobs: &Knobs, shape: &Shape) -> Cost {
    let Shape { batch, heads, head_dim, queries, causal, .. } = *shape;
    let window = knobs.get(&WINDOW);
    let pairs = if causal { window } else { 2 * window - 1 };
    let macs = 2 * heads * queries * head_dim * (1 + pairs);
    let bias = groups(knobs, heads) * queries * pairs * knobs.get(&FACTOR).unwrap_or(0);
    let state = if causal { 2 * heads * head_dim * window } else { 0 };
    Cost {
        core_macs: (batch * macs + bias) as u64,
        flops: (macs + bias) as u64,
        state_bytes: 4 * state as u64,
    }
}

/// Parameters of the bias, [1 or heads, max_len, _].
enum Bias {
    Pairs(Tensor),
    Factors(Tensor, Tensor),
}

struct Local {
    bias: Bias,
    window: usize,
    causal: bool,
}

fn build(config: &MechanismConfig, builder: &ParamBuilder) -> Result<Box<dyn Mechanism>> {
    let knobs = &config.knobs;
    let (groups, len) = (groups(knobs, config.heads), knobs.get(&MAX_LEN).unwrap_or(config.max_len));
    let param = |name: &str, last: usize| builder.param(name, &[groups, len, last], Init::normal(0.01));
    let bias = match knobs.get(&FACTOR) {
        Some(rank) => Bias::Factors(param("w_u", rank)?, param("w_v", rank)?),
        None => Bias::Pairs(param("w_bias", len)?),
    };
    Ok(Box::new(Local { bias, window: knobs.get(&WINDOW), causal: config.causal }))
}

type State = Carried<AftState>;

impl Mechanism for Local {
    fn forward(&self, input: &AttentionInput) -> Result<AttentionOutput> {
        let (_, _, n, _) = input.qkv.value_dims()?;
        let bias = match &self.bias {
            Bias::Pairs(w) => WindowBias::from_bias(w, n, self.window, self.causal)?,
            Bias::Factors(u, v) => WindowBias::from_factors(u, v, n, self.window, self.causal)?,
        };
        Ok(aft(input.qkv, &Aft { bias: Some(&bias), mask: input.mask, causal: self.causal })?.into())
    }

    fn init_decode(&self, batch: usize, _: usize, _: &Device) -> Result<Option<Box<dyn DecodeState>>> {
        Ok(self.causal.then(|| State::start(batch)))
    }

    fn decode_step(&self, input: &AttentionInput, state: &mut dyn DecodeState) -> Result<AttentionOutput> {
        let row = self.row(state.position())?;
        let state = state.downcast::<State>()?;
        Ok(state.advance(|held, _| step(input.qkv, Some(&row), input.mask, held))?.into())
    }
}

impl Local {
    /// Biases of the query at `position` and of the window that ends with it, [1 or heads, window]; 0 before the first key.
    fn row(&self, position: usize) -> Result<Tensor> {
        let keys = self.window.min(position + 1);
        let first = position + 1 - keys;
        let row = match &self.bias {
            Bias::Pairs(w) => w.narrow(1, position, 1)?.narrow(2, first, keys)?.squeeze(1)?,
            Bias::Factors(u, v) => {
                u.narrow(1, position, 1)?.broadcast_mul(&v.narrow(1, first, keys)?)?.sum(2)?
            }
        };
        row.pad_with_zeros(1, self.window - keys, 0)
    }
}
