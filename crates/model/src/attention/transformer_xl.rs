//! Transformer-XL: full causal attention over the cache and the block, with relative positions.
//!
//! Dai et al. 2019 sec. 3.3: logit(t, j) = ((q_t + u) . k_j + (q_t + v) . R(t - j)) / sqrt(D), j <= t.

use candle_core::{Device, Result, bail};

use super::decode::{Carried, DecodeState};
use super::knobs::Knobs;
use super::long_short::{LongShortCache, LongShortState, Positions};
use super::{
    AttentionInput, AttentionOutput, Cost, Growth, InModels, Mechanism, MechanismConfig, MechanismEntry,
    Needs, Paper, Shape, Support,
};
use crate::nn::params::ParamBuilder;
use effattn_kernel::attend::{Attend, attend};
use effattn_record::pattern::Pattern;

/// The table line.
pub static ENTRY: MechanismEntry = MechanismEntry {
    name: "transformer-xl",
    title: "Transformer-XL",
    paper: Paper {
        authors: "Dai et al.",
        title: "Transformer-XL: Attentive Language Models beyond a Fixed-Length Context",
        year: 2019,
        locator: "arXiv:1901.02860",
    },
    support: Support { causal: true, memory: true, dropout: true, ..Support::NONE },
    knobs: &[],
    complexity: "O(n^2 d)",
    time: Growth::Quadratic,
    memory: Growth::Linear,
    equations: "out_t = sum_j softmax_j(((q_t + u) . k_j + (q_t + v) . R(t - j)) / sqrt(D)) v_j over j <= t, cached positions included; \
        R(n) = S(n) r_net^T, S(n) = [sin(n f), cos(n f)], f_i = 10000^(-2i/E).",
    deviations: &[
        "No clamp of distances and no `same_length`: every query sees the whole cache.",
        "At the start of a stream there is no memory.",
    ],
    exceptions: &[],
    idle: &[],
    in_models: InModels::PLAIN,
    validate: |_, shape| match shape.causal {
        true => Ok(()),
        false => Err("Transformer-XL is defined for the causal form only".into()),
    },
    needs: |_| Needs::default(),
    cost,
    pattern: |_, shape| Some(Pattern::full(shape.queries, shape.keys, true)),
    build,
};

fn cost(_: &Knobs, shape: &Shape) -> Cost {
    let Shape { batch, heads, head_dim, queries, keys, .. } = *shape;
    let e = heads * head_dim;
    let (pairs, table) = (3 * heads * queries * keys * head_dim, keys * e * e);
    Cost {
        core_macs: (batch * pairs + table) as u64,
        flops: (pairs + table) as u64,
        state_bytes: (4 * 2 * e * keys) as u64,
    }
}

struct TransformerXl {
    positions: Positions,
    scale: f64,
}

fn build(config: &MechanismConfig, builder: &ParamBuilder) -> Result<Box<dyn Mechanism>> {
    if !config.causal {
        bail!("Transformer-XL is defined for the causal form only");
    }
    let positions = Positions::build(config, builder, false, true)?;
    Ok(Box::new(TransformerXl { positions, scale: 1.0 / (config.head_dim as f64).sqrt() }))
}

impl Mechanism for TransformerXl {
    fn forward(&self, input: &AttentionInput) -> Result<AttentionOutput> {
        let q = input.qkv.q()?;
        let (_, _, keys, _) = input.qkv.value_dims()?;
        if q.dim(2)? + input.memory != keys {
            bail!("{} queries behind {} cached positions do not fit {keys} keys", q.dim(2)?, input.memory);
        }
        let relative = self.positions.relative(keys, None, q.device())?;
        let pattern = Pattern::full(q.dim(2)?, keys, true);
        let call = Attend {
            relative: Some(&relative),
            dropout: input.dropout,
            ..Attend::scaled(&pattern, input.mask, self.scale)
        };
        Ok(attend(input.qkv, &call)?.into())
    }

    fn init_decode(
        &self,
        batch: usize,
        room: usize,
        device: &Device,
    ) -> Result<Option<Box<dyn DecodeState>>> {
        let relative = self.positions.relative(room.max(1), None, device)?;
        Ok(Some(Carried::holding(batch, LongShortCache::new(room, room.max(1), None, Some(relative)))))
    }

    fn decode_step(&self, input: &AttentionInput, state: &mut dyn DecodeState) -> Result<AttentionOutput> {
        let (q, key_value) = (input.qkv.q()?, [input.qkv.k()?, input.qkv.v()?]);
        let state = state.downcast::<LongShortState>()?;
        Ok(state.advance(|cache, position| cache.attend(&q, &key_value, position, self.scale))?.into())
    }
}
