//! What `dp`, `ls`, `linformer` and `linformer-window` share: one softmax over projected keys (slots) and a
//! window, with DualLN, a class token, cached positions and relative positions where the variant has them.
//!
//! Transformer-LS (Zhu et al. 2021) eq. 3-7; the equations stand with each mechanism.

mod cost;
mod decode;
mod inputs;
mod relative;
#[cfg(test)]
mod tests;

use candle_core::{Device, Result, Tensor, bail};

pub use cost::{Extras, SlotProjection, cost, decoder_state};
pub use decode::{LongShortCache, LongShortState};
pub use relative::Positions;

use super::decode::{Carried, DecodeState};
use super::{AttentionInput, AttentionOutput, Mechanism, MechanismConfig, Shape};
use crate::nn::params::{Init, ParamBuilder, ParamSpec};
use decode::OpenProjection;
use effattn_kernel::attend::{Attend, Relative, attend};
use effattn_kernel::class_token::class_token;
use effattn_kernel::group::ParamGroup;
use effattn_kernel::norm_parts::norm_parts;
use effattn_kernel::project_slots::{Dynamic, dynamic, dynamic_mask, learned, slots};
use effattn_kernel::tape::recompute_in_backward;
use effattn_record::pattern::{Pattern, Rule};
use inputs::Rows;

/// Where the slots come from.
pub enum Slots {
    /// There are none.
    None,
    /// Weights computed from the layer input (eq. 3-5).
    Dynamic {
        /// `[dp.weight, dp.bias]`.
        group: ParamGroup,
        /// Slots per head and segment.
        rank: usize,
        /// Length of a segment; `None`: the whole sequence is one (bidirectional).
        segment: Option<usize>,
        /// Key and value projection, where cached segments are compressed before they are projected
        /// (the released language model).
        hidden: Option<(Tensor, Tensor)>,
    },
    /// Matrices of parameters for keys and values (Linformer).
    Learned {
        /// For keys.
        keys: ParamGroup,
        /// For values; `None`: the same.
        values: Option<ParamGroup>,
    },
}

/// DualLN (eq. 7): one LayerNorm for the window's keys and values, one for the slots.
pub struct DualNorm {
    local: ParamGroup,
    global: ParamGroup,
}

impl DualNorm {
    /// Builds `ln_local.*` and `ln_global.*`, each over the concatenated heads.
    pub fn build(config: &MechanismConfig, builder: &ParamBuilder) -> Result<Self> {
        let e = config.heads * config.head_dim;
        // The language models draw every gain from N(1, 0.02^2).
        let gain = if config.causal { Init::Normal { mean: 1.0, std: 0.02 } } else { Init::ONE };
        let group = |name: &str| {
            builder
                .pp(name)
                .group(&[ParamSpec::new("weight", &[e], gain), ParamSpec::new("bias", &[e], Init::ZERO)])
        };
        Ok(Self { local: group("ln_local")?, global: group("ln_global")? })
    }
}

/// A mechanism of this family.
pub struct LongShort {
    /// Window, 0: none.
    pub window: usize,
    /// Source of the slots.
    pub slots: Slots,
    /// DualLN.
    pub norm: Option<DualNorm>,
    /// Whether the slots are projected from the normalised keys and values.
    pub normed: bool,
    /// Relative positions.
    pub positions: Option<Positions>,
    /// Heads.
    pub heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Whether the causal form runs.
    pub causal: bool,
}

/// The parameters of a dynamic projection.
pub fn dynamic_group(config: &MechanismConfig, builder: &ParamBuilder, rank: usize) -> Result<ParamGroup> {
    let slots = config.heads * rank;
    let (weight, bias) = if config.causal {
        (Init::normal(0.02), Init::ZERO)
    } else {
        (Init::fan_in(config.width), Init::fan_in(config.width))
    };
    let specs =
        [ParamSpec::new("weight", &[slots, config.width], weight), ParamSpec::new("bias", &[slots], bias)];
    builder.pp("dp").group(&specs)
}

/// Who sees whom: the window of `w` (0: none) and the slots of `projection`.
pub fn pattern(w: usize, projection: SlotProjection, shape: &Shape) -> Pattern {
    let Shape { queries, keys, causal, .. } = *shape;
    let base = match w {
        0 => Pattern::blind(queries, keys, causal),
        w => Pattern::window(queries, keys, w, causal),
    };
    let slots = projection.slots(keys) + usize::from(shape.cls);
    match projection {
        SlotProjection::Segments { rank, segment } => {
            base.with_slots(slots, Rule::EarlierSegments { segment, rank })
        }
        SlotProjection::Whole { .. } | SlotProjection::Learned { .. } => base.with_slots(slots, Rule::All),
    }
}

impl LongShort {
    fn projection(&self) -> SlotProjection {
        match &self.slots {
            Slots::None => SlotProjection::Whole { rank: 0 },
            Slots::Dynamic { rank, segment: None, .. } => SlotProjection::Whole { rank: *rank },
            Slots::Dynamic { rank, segment: Some(segment), .. } => {
                SlotProjection::Segments { rank: *rank, segment: *segment }
            }
            Slots::Learned { keys, .. } => SlotProjection::Learned { k: slots(keys) },
        }
    }

    /// The slots as packed rows [b, slots, 2 e], before LN_global and without a class token.
    fn project(&self, source: &Rows, input: &AttentionInput) -> Result<Option<Tensor>> {
        let (parts, count) = (source.keys_values()?, source.parts.count);
        match &self.slots {
            Slots::None => Ok(None),
            Slots::Learned { keys, values } => {
                let matrices = [keys, values.as_ref().unwrap_or(keys)];
                learned(&source.rows, &matrices, &parts, count).map(Some)
            }
            Slots::Dynamic { group, rank, segment, hidden } => {
                let Some(x) = input.x else {
                    bail!("dynamic projection reads the layer input, none was given")
                };
                let spec = Dynamic {
                    heads: self.heads,
                    rank: *rank,
                    segment: *segment,
                    parts: &parts,
                    count,
                    mask: input.mask,
                };
                match hidden {
                    Some(weights) if input.memory > 0 => {
                        hidden_slots(source, x, group, &spec, weights, input.memory).map(Some)
                    }
                    _ => dynamic(&source.rows, x, group, &spec).map(Some),
                }
            }
        }
    }

    /// Slots [b, slots, 2 e] with the class token in front and LN_global applied, and which of them exist.
    fn finish_slots(
        &self,
        slots: Option<Tensor>,
        cls: Option<&Tensor>,
        input: &AttentionInput,
    ) -> Result<Option<(Tensor, Option<Tensor>)>> {
        let slots = match (cls, slots) {
            (Some(cls), Some(slots)) => Tensor::cat(&[cls, &slots], 1)?,
            (Some(only), None) => only.clone(),
            (None, Some(slots)) => slots,
            (None, None) => return Ok(None),
        };
        let slots = match &self.norm {
            Some(norm) => norm_parts(&slots, Some(&norm.global), &[0, 1], 2, None)?,
            None => slots,
        };
        let (b, count, _) = slots.dims3()?;
        let ones = |count: usize| Tensor::ones((b, count), slots.dtype(), slots.device());
        let exist = match (input.mask, &self.slots) {
            (None, _) => None,
            (Some(mask), Slots::Dynamic { rank, segment, .. }) => {
                let exist = dynamic_mask(mask, *rank, *segment)?;
                Some(if cls.is_some() { Tensor::cat(&[ones(1)?, exist], 1)? } else { exist })
            }
            (Some(_), Slots::None | Slots::Learned { .. }) => Some(ones(count)?),
        };
        Ok(Some((slots, exist)))
    }

    fn relative(&self, keys: usize, device: &Device) -> Result<Option<Relative>> {
        let Some(positions) = &self.positions else { return Ok(None) };
        let distances = if self.window > 0 { self.window.min(keys) } else { 1 };
        positions.relative(distances, self.projection().segments(keys), device).map(Some)
    }

    fn scale(&self) -> f64 {
        1.0 / (self.head_dim as f64).sqrt()
    }

    fn check(&self, input: &AttentionInput, queries: usize, keys: usize) -> Result<()> {
        if !self.causal && input.memory > 0 {
            bail!("cached positions need the causal form");
        }
        if queries + input.memory != keys {
            bail!("{queries} queries behind {} cached positions do not fit {keys} keys", input.memory);
        }
        if input.cls.is_some() && self.causal {
            bail!("the class token is defined for the bidirectional form only");
        }
        if let Slots::Dynamic { segment: Some(segment), hidden, .. } = &self.slots
            && (self.positions.is_some() || hidden.is_some())
            && !input.memory.is_multiple_of(*segment)
        {
            bail!(
                "{} cached positions are not a multiple of the segment length l = {segment}; cache a multiple",
                input.memory
            );
        }
        Ok(())
    }
}

/// Slots of the released language model: cached segments are compressed head slice by head slice
/// of x and projected afterwards, current ones as everywhere.
fn hidden_slots(
    source: &Rows,
    x: &Tensor,
    group: &ParamGroup,
    spec: &Dynamic,
    (w_k, w_v): &(Tensor, Tensor),
    memory: usize,
) -> Result<Tensor> {
    let queries = x.dim(1)? - memory;
    let mask = |start: usize, len: usize| spec.mask.map(|mask| mask.narrow(1, start, len)).transpose();
    let (old, new) = (mask(0, memory)?, mask(memory, queries)?);
    let cached = x.narrow(1, 0, memory)?;
    let spec_old = Dynamic { parts: &[0], count: 1, mask: old.as_ref(), ..*spec };
    let compressed = dynamic(&cached, &cached, group, &spec_old)?; // [b, slots, e]
    let linear = |weight: &Tensor| effattn_kernel::linear::linear(&compressed, weight, None);
    let old = Tensor::cat(&[linear(w_k)?, linear(w_v)?], 2)?;
    let spec_new = Dynamic { mask: new.as_ref(), ..*spec };
    let rows = source.rows.narrow(1, memory, queries)?;
    let new = dynamic(&rows, &x.narrow(1, memory, queries)?, group, &spec_new)?;
    Tensor::cat(&[old, new], 1)
}

/// What the softmax reads.
struct Prepared {
    /// The rows of positions, normalised.
    local: Rows,
    /// Slots with the class token in front, and which of them exist.
    slots: Option<(Tensor, Option<Tensor>)>,
}

impl LongShort {
    /// LN_local, where keys and values go through it.
    fn local_norm(&self) -> Option<&ParamGroup> {
        self.norm.as_ref().filter(|_| self.window > 0 || self.normed).map(|norm| &norm.local)
    }

    fn prepare(&self, input: &AttentionInput) -> Result<Prepared> {
        let raw = Rows::new(input.qkv)?;
        self.check(input, raw.queries()?, raw.rows.dim(1)?)?;
        let local = raw.normed(self.local_norm(), input.mask, input.memory)?;
        let slots = self.project(if self.normed { &local } else { &raw }, input)?;
        let cls = input.cls.map(|cls| Rows::new(cls)?.only_keys_values()).transpose()?;
        let slots = self.finish_slots(slots, cls.as_ref(), input)?;
        Ok(Prepared { local, slots })
    }
}

impl Mechanism for LongShort {
    fn forward(&self, input: &AttentionInput) -> Result<AttentionOutput> {
        let Prepared { local, slots } = self.prepare(input)?;
        let (b, queries, keys) = (local.rows.dim(0)?, local.queries()?, local.rows.dim(1)?);
        let shape = Shape {
            batch: b,
            queries,
            keys,
            causal: self.causal,
            cls: input.cls.is_some(),
            ..Shape::default()
        };
        let pattern = pattern(self.window, self.projection(), &shape);
        let relative = self.relative(keys, local.rows.device())?;
        let mask = match (input.mask, &slots) {
            (Some(mask), Some((_, Some(exist)))) => Some(Tensor::cat(&[mask, exist], 1)?),
            (mask, _) => mask.cloned(),
        };
        let slots = slots.map(|(rows, _)| Rows::slots(rows, self.heads));
        let rows = local.rows.clone();
        let call = Attend {
            slots: slots.as_ref(),
            relative: relative.as_ref(),
            dropout: input.dropout,
            ..Attend::scaled(&pattern, mask.as_ref(), self.scale())
        };
        let out = attend(&local.qkv(self.heads)?, &call)?;
        let cls = input.cls.map(|cls| class_token(&out, cls, input.mask, self.scale())).transpose()?;
        if self.local_norm().is_some() {
            recompute_in_backward(&rows)?; // normalised copies of the projections
        }
        Ok(AttentionOutput { out, cls, stream: None })
    }

    fn init_decode(
        &self,
        batch: usize,
        room: usize,
        device: &Device,
    ) -> Result<Option<Box<dyn DecodeState>>> {
        let slots = match &self.slots {
            _ if !self.causal => return Ok(None),
            Slots::None => None,
            Slots::Dynamic { rank, segment: Some(segment), .. } => Some((*rank, *segment)),
            Slots::Dynamic { segment: None, .. } | Slots::Learned { .. } => return Ok(None),
        };
        let relative = self.relative(room.max(1), device)?;
        Ok(Some(Carried::holding(batch, LongShortCache::new(room, self.window, slots, relative))))
    }

    fn decode_step(&self, input: &AttentionInput, state: &mut dyn DecodeState) -> Result<AttentionOutput> {
        let raw = Rows::new(input.qkv)?;
        let local = raw.normed(self.local_norm(), None, 0)?.qkv(self.heads)?;
        let (q, key_value) = (local.q()?, [local.k()?, local.v()?]);
        let raw = [input.qkv.k()?, input.qkv.v()?];
        let out = state.downcast::<LongShortState>()?.advance(|cache, position| {
            let out = cache.attend(&q, &key_value, position, self.scale())?;
            if let Slots::Dynamic { group, .. } = &self.slots {
                let source = if self.normed { &key_value } else { &raw };
                let open = OpenProjection { group, x: input.layer_input()?, key_value: source };
                let global = self.norm.as_ref().map(|norm| &norm.global);
                cache.project(&open, position, |rows| norm_parts(rows, global, &[0, 1], 2, None))?;
            }
            Ok(out)
        })?;
        Ok(out.into())
    }

    fn softmax_inputs(&self, input: &AttentionInput) -> Result<Option<(Tensor, Tensor)>> {
        if self.window == 0 {
            return Ok(None);
        }
        let Prepared { local, slots } = self.prepare(input)?;
        slots.map(|(slots, _)| Ok((local.only_keys_values()?, slots))).transpose()
    }
}
