//! Luna (Ma et al. 2021): a sequence of `l` rows packs the keys and values, and the queries read what is packed
//! (SPEC-modern section 6). The packed rows go from layer to layer as a second stream.

use candle_core::{Result, Tensor, bail};

use super::knobs::{Knob, Knobs};
use super::{
    AttentionInput, AttentionOutput, Cost, Exception, Growth, InModels, Mechanism, MechanismConfig,
    MechanismEntry, Needs, Paper, Projections, Property, Shape, Support, mixer,
};
use crate::nn::params::{Init, ParamBuilder};
use effattn_kernel::attend::{Attend, attend};
use effattn_kernel::heads::{Heads, Qkv};
use effattn_kernel::linear::linear_in_out;
use effattn_kernel::tape::split_heads;
use effattn_record::pattern::Pattern;

const ROWS: Knob<usize> = Knob::int("l", 256, 1..=1 << 16)
    .doc("packed rows")
    .source("Luna-256; 16, 128 or 256 on the Long Range Arena");
const TIED: Knob<bool> = Knob::bool("tie_kv", true)
    .doc("whether keys serve as values, packed and unpacked")
    .source("released code, Long Range Arena");
const DYNAMIC: Knob<bool> = Knob::bool("dynamic_p", true)
    .doc("whether a sample uses no more packed rows than it has tokens")
    .source("released code");

/// The table line.
pub static ENTRY: MechanismEntry = MechanismEntry {
    name: "luna",
    title: "Luna",
    paper: Paper {
        authors: "Ma et al.",
        title: "Luna: Linear Unified Nested Attention",
        year: 2021,
        locator: "arXiv:2106.01540",
    },
    support: Support { bidirectional: true, ..Support::NONE },
    knobs: &[ROWS.spec(), TIED.spec(), DYNAMIC.spec()],
    complexity: "O(n l d)",
    time: Growth::Linear,
    memory: Growth::Linear,
    equations: "\
y = softmax((p w_pq + b_pq) k^T / sqrt(D)) v over keys that are not padded: the packed rows, which are added to p
out = softmax(q (y w_k + b_k)^T / sqrt(D)) (y w_v + b_v) over the packed rows",
    deviations: &[
        "The causal variant of the released code replaces the first softmax and takes running means; it is not here.",
        "Packed rows have a residual and a LayerNorm from layer to layer, the feed-forward half sees the sequence only, as in the code.",
    ],
    exceptions: &[Exception {
        property: Property::HeadsIndependent,
        applies: |_, _| true,
        reason: "SPEC-modern 6: what is packed is mapped across all heads before it is read",
    }],
    idle: &[],
    in_models: InModels::PLAIN,
    validate: |knobs, shape| match shape.causal {
        true => Err("luna has no causal form here; choose linear or window".into()),
        false => mixer::validate(knobs, shape),
    },
    needs: |knobs| Needs {
        projections: if knobs.get(&TIED) { Projections::SHARED_KV } else { Projections::QKV },
        stream: Some(knobs.get(&ROWS)),
        ..Needs::default()
    },
    cost,
    pattern: |_, _| None,
    build,
};

fn cost(knobs: &Knobs, shape: &Shape) -> Cost {
    let Shape { batch, heads, head_dim, width, queries, .. } = *shape;
    let (rows, inner) = (knobs.get(&ROWS), heads * head_dim);
    let unpack = if knobs.get(&TIED) { 1 } else { 2 };
    let macs = 4 * queries * rows * inner + rows * (width * inner + unpack * inner * inner);
    Cost { core_macs: (batch * macs) as u64, flops: macs as u64, state_bytes: 0 }
}

/// A linear map x w + b, w [in, out].
struct Map {
    weight: Tensor,
    bias: Tensor,
}

impl Map {
    fn new(builder: &ParamBuilder, name: &str, from: usize, to: usize) -> Result<Self> {
        let bound = (6.0 / (from + to) as f64).sqrt() * std::f64::consts::FRAC_1_SQRT_2;
        Ok(Self {
            weight: builder.param(&format!("w_{name}"), &[from, to], Init::Uniform { bound })?,
            bias: builder.param(&format!("b_{name}"), &[to], Init::ZERO)?,
        })
    }

    fn apply(&self, x: &Tensor) -> Result<Tensor> {
        linear_in_out(x, &self.weight, Some(&self.bias))
    }
}

struct Luna {
    query: Map,
    key: Map,
    /// `None` where keys serve as values.
    value: Option<Map>,
    heads: usize,
    head_dim: usize,
    dynamic: bool,
}

fn build(config: &MechanismConfig, builder: &ParamBuilder) -> Result<Box<dyn Mechanism>> {
    let MechanismConfig { knobs, heads, head_dim, width, .. } = config;
    let inner = heads * head_dim;
    Ok(Box::new(Luna {
        query: Map::new(builder, "pq", *width, inner)?,
        key: Map::new(builder, "k", inner, inner)?,
        value: (!knobs.get(&TIED)).then(|| Map::new(builder, "v", inner, inner)).transpose()?,
        heads: *heads,
        head_dim: *head_dim,
        dynamic: knobs.get(&DYNAMIC),
    }))
}

impl Mechanism for Luna {
    fn forward(&self, input: &AttentionInput) -> Result<AttentionOutput> {
        let Some(p) = input.stream else { bail!("luna was given no packed rows") };
        let qkv = input.qkv.apart()?;
        let (q, k) = (qkv.q()?, qkv.k()?);
        let v = if self.value.is_some() { qkv.v()? } else { k.clone() };
        let (n, rows) = (k.dim(2)?, p.dim(1)?);
        let heads = |x: &Tensor| split_heads(x, self.heads, (0, 1));
        let pack = Pattern::full(rows, n, false);
        let packed = Qkv::separate(heads(&self.query.apply(p)?)?, k, v);
        let packed = attend(&packed, &Attend::plain(&pack, input.mask, self.head_dim))?.merged()?; // [b, l, h d]
        let keys = heads(&self.key.apply(&packed)?)?;
        let values =
            self.value.as_ref().map_or_else(|| Ok(keys.clone()), |map| heads(&map.apply(&packed)?))?;
        let mask = self.visible(input.mask, p.dim(0)?, rows, n)?;
        let unpack = Pattern::full(n, rows, false);
        let call = Attend::plain(&unpack, mask.as_ref(), self.head_dim);
        let out: Heads = attend(&Qkv::separate(q, keys, values), &call)?;
        Ok(AttentionOutput { out, cls: None, stream: Some(packed) })
    }
}

impl Luna {
    /// Packed rows that queries see [b, l], fewer than all where a sample has fewer tokens.
    fn visible(&self, mask: Option<&Tensor>, batch: usize, rows: usize, n: usize) -> Result<Option<Tensor>> {
        if !self.dynamic || mask.is_none() && rows <= n {
            return Ok(None);
        }
        let counts: Vec<f32> = match mask {
            Some(mask) => mask.to_dtype(candle_core::DType::F32)?.sum(1)?.to_vec1()?,
            None => vec![n as f32; batch],
        };
        let seen = |count: &f32| {
            let count = *count;
            (0..rows).map(move |row| f32::from(u8::from((row as f32) < count)))
        };
        let seen: Vec<f32> = counts.iter().flat_map(seen).collect();
        let device = mask.map_or(self.query.bias.device(), Tensor::device);
        Ok(Some(Tensor::from_vec(seen, (batch, rows), device)?))
    }
}
