//! Softmax attention with today's options, which RoPE, grouped-query and streaming attention share (SPEC-modern section 11): rotary
//! positions, keys and values shared by neighbouring heads, a sliding window beside the first keys.

use candle_core::{D, Device, Result, Tensor};
use candle_nn::ops::softmax_last_dim;

use super::decode::{Carried, DecodeState, KeyValueCache};
use super::knobs::{Knob, Knobs};
use super::{AttentionInput, AttentionOutput, Cost, Idle, Mechanism, MechanismConfig, Shape, mixer};
use effattn_kernel::attend::{Attend, attend};
use effattn_kernel::heads::{self, Heads, Qkv};
use effattn_kernel::rotary::{Pairing, Rotary};
use effattn_record::pattern::{KeySpan, Pattern, QueryGroup, Rule, Span};

/// Which channels turn together; `None`: no rotation.
pub(super) const ROTARY: Knob<Option<Pairing>> = Knob::words(
    "rotary",
    &[("half", Some(Pairing::Half)), ("interleaved", Some(Pairing::Interleaved)), ("none", None)],
)
.doc("rotation of queries and keys: half (Llama), interleaved (RoFormer) or none")
.source("Llama");
pub(super) const BASE: Knob<f64> =
    Knob::float("base", 1e4, 1.0..=1e9).doc("base of the angles").source("RoFormer sec. 3.2.2");
pub(super) const ROTARY_DIM: Knob<Option<usize>> = Knob::auto_int("rotary_dim", 2..=1 << 12)
    .doc("channels of a head that turn; auto: all")
    .source("RoFormer");
pub(super) const OFFSET: Knob<usize> = Knob::int("offset", 0, 0..=1 << 20)
    .doc("position of the first row; changes nothing but rounding")
    .source("our choice");

const fn idle(knob: &'static str) -> Idle {
    Idle { knob, when: |knobs, _| knobs.get(&ROTARY).is_none(), why: "with rotary=none" }
}

/// Settings of a rotation that there is not.
pub(super) const IDLE: [Idle; 3] = [idle(BASE.name()), idle(ROTARY_DIM.name()), idle(OFFSET.name())];

/// What is wrong with the rotation of heads of width `head_dim`.
pub(super) fn check_rotation(
    rotary: Option<Pairing>,
    rotary_dim: Option<usize>,
    head_dim: usize,
) -> std::result::Result<(), String> {
    let width = rotary_dim.unwrap_or(head_dim);
    if rotary.is_some() && !width.is_multiple_of(2) {
        return Err(format!("{width} channels do not form pairs; choose an even rotary_dim or rotary=none"));
    }
    if width > head_dim {
        return Err(format!("rotary_dim={width} is more than the width of a head, {head_dim}"));
    }
    Ok(())
}

/// What is wrong with `groups` of `heads`, and with other keys than queries.
pub(super) fn check_shape(
    groups: Option<usize>,
    knobs: &Knobs,
    shape: &Shape,
) -> std::result::Result<(), String> {
    mixer::validate(knobs, shape)?;
    match groups {
        Some(groups) if !shape.heads.is_multiple_of(groups) => {
            Err(format!("groups={groups} does not divide the {} heads; choose a divisor", shape.heads))
        }
        _ => Ok(()),
    }
}

/// Multiply-adds over `pairs` visible pairs per head, and a cache of `kept` positions.
pub(super) fn cost(shape: &Shape, groups: Option<usize>, pairs: usize, kept: usize) -> Cost {
    let Shape { batch, heads, head_dim, causal, .. } = *shape;
    let macs = 2 * heads * head_dim * pairs;
    let kept = if causal { kept } else { 0 };
    Cost {
        core_macs: (batch * macs) as u64,
        flops: macs as u64,
        state_bytes: (4 * 2 * groups.unwrap_or(heads) * head_dim * kept) as u64,
    }
}

/// The last `window` keys, the query's own among them, and the first `sinks`, up to the query.
pub(super) fn streaming_pattern(len: usize, sinks: usize, window: usize) -> Pattern {
    let tile = window.clamp(16, 1 << 10);
    let group = |start: usize| {
        let end = (start + tile).min(len);
        let recent = Span::range((start + 1).saturating_sub(window).max(sinks), end);
        let band = Rule::Band { left: Some(window - 1), right: Some(0), skip: None };
        let first = KeySpan { span: Span::range(0, sinks.min(end)), rule: Rule::CAUSAL };
        let recent = KeySpan { span: recent, rule: band };
        let keys = [first, recent].into_iter().filter(|key| key.span.len > 0).collect();
        QueryGroup { queries: Span::range(start, end), keys }
    };
    Pattern::shared(len, len, 0, 0, (0..len).step_by(tile).map(group).collect())
}

/// Which keys a query sees.
#[derive(Clone, Copy, Debug)]
pub(super) enum View {
    /// All, or all up to its own.
    Full,
    /// Causal: the first `sinks` and the last `window`. With `in_cache` positions are those inside a cache of `sinks + window`
    /// keys, so that a first key is never further away than the cache is long.
    Streaming { sinks: usize, window: usize, in_cache: bool },
}

/// The built mechanism.
pub(super) struct RotarySoftmax {
    pub rotary: Option<Rotary>,
    pub offset: usize,
    pub heads: usize,
    pub head_dim: usize,
    /// Heads of keys and values.
    pub groups: usize,
    pub view: View,
    pub causal: bool,
    /// One more logit per head in the denominator, without a value, [h].
    pub sink_logit: Option<Tensor>,
}

impl RotarySoftmax {
    /// Full attention with the rotation of `knobs` and `groups` heads of keys and values.
    pub fn full(config: &MechanismConfig, groups: Option<usize>) -> Result<Self> {
        let MechanismConfig { knobs, heads, head_dim, causal, .. } = config;
        let offset = knobs.get(&OFFSET);
        Ok(Self {
            rotary: rotary(knobs, *head_dim, knobs.get(&ROTARY_DIM))?,
            offset,
            heads: *heads,
            head_dim: *head_dim,
            groups: groups.unwrap_or(*heads),
            view: View::Full,
            causal: *causal,
            sink_logit: None,
        })
    }

    fn scale(&self) -> f64 {
        (self.head_dim as f64).powf(-0.5)
    }

    /// Position of a query at `position` for the first keys.
    fn capped(&self, position: usize) -> usize {
        match self.view {
            View::Streaming { sinks, window, in_cache: true } => position.min(sinks + window - 1),
            View::Streaming { .. } | View::Full => position,
        }
    }

    fn turned(&self, x: &Tensor, start: usize) -> Result<Tensor> {
        self.rotary.as_ref().map_or_else(|| Ok(x.clone()), |rotary| rotary.rotate(x, start + self.offset))
    }

    /// `x` [b, g, n, d] for every query head, [b, h, n, d].
    fn repeated(&self, x: &Tensor) -> Result<Tensor> {
        heads::repeat(x, self.heads / self.groups)
    }

    /// Queries, keys and values that make first keys in a cache and the sink's logit part of plain attention: channels are added,
    /// of which every key uses its own. Also the slot of the sink.
    fn extended(&self, qkv: &Qkv, sinks: usize) -> Result<(Qkv, Option<Qkv>)> {
        let (q, k, v) = (qkv.q()?.contiguous()?, self.repeated(&qkv.k()?)?, self.repeated(&qkv.v()?)?);
        let (b, h, n, d) = q.dims4()?;
        let zeros = |n: usize, width: usize| Tensor::zeros((b, h, n, width), q.dtype(), q.device());
        let (mut queries, mut keys) = (vec![self.turned(&q, 0)?], vec![self.turned(&k, 0)?]);
        if let (true, Some(rotary)) = (sinks > 0, &self.rotary) {
            let positions: Vec<usize> = (0..n).map(|position| self.capped(position) + self.offset).collect();
            queries.push(rotary.rotate_at(&q, &positions)?);
            let sinks = sinks.min(n);
            let (first, rest) = (keys[0].narrow(2, 0, sinks)?, keys[0].narrow(2, sinks, n - sinks)?);
            keys = vec![
                Tensor::cat(&[&zeros(sinks, d)?, &rest], 2)?,
                Tensor::cat(&[&first, &zeros(n - sinks, d)?], 2)?,
            ];
        }
        let mut slot = None;
        if let Some(logit) = &self.sink_logit {
            const WIDTH: usize = 8; // of which one channel counts
            let width = keys.len() * d;
            queries.push(Tensor::cat(&[&zeros(n, 1)?.ones_like()?, &zeros(n, WIDTH - 1)?], 3)?);
            keys.push(zeros(n, WIDTH)?);
            let logit = (logit.reshape((1, h, 1, 1))? / self.scale())?.broadcast_as((b, h, 1, 1))?;
            let key = Tensor::cat(&[&zeros(1, width)?, &logit.contiguous()?, &zeros(1, WIDTH - 1)?], 3)?;
            let value = zeros(1, width + WIDTH)?;
            slot = Some(Qkv::Separate { q: None, k: Some(key), v: Some(value) });
        }
        let (q, k) = (Tensor::cat(&queries, 3)?, Tensor::cat(&keys, 3)?);
        let v = Tensor::cat(&[&v.contiguous()?, &zeros(n, k.dim(3)? - d)?], 3)?;
        Ok((Qkv::separate(q, k, v), slot))
    }
}

/// The rotation that `knobs` ask for.
pub(super) fn rotary(knobs: &Knobs, head_dim: usize, width: Option<usize>) -> Result<Option<Rotary>> {
    let new = |pairing| Rotary::new(pairing, width.unwrap_or(head_dim), knobs.get(&BASE));
    knobs.get(&ROTARY).map(new).transpose()
}

impl Mechanism for RotarySoftmax {
    fn forward(&self, input: &AttentionInput) -> Result<AttentionOutput> {
        let (n, _) = input.lengths()?;
        let (pattern, sinks) = match self.view {
            View::Full => (Pattern::full(n, n, self.causal), 0),
            View::Streaming { sinks, window, in_cache } => {
                (streaming_pattern(n, sinks, window), if in_cache { sinks } else { 0 })
            }
        };
        if sinks == 0 && self.sink_logit.is_none() {
            let qkv = match &self.rotary {
                Some(rotary) => rotary.rotate_qk(input.qkv, self.offset)?,
                None => input.qkv.clone(),
            };
            let qkv = match self.groups == self.heads {
                true => qkv,
                false => Qkv::separate(qkv.q()?, self.repeated(&qkv.k()?)?, self.repeated(&qkv.v()?)?),
            };
            return Ok(attend(&qkv, &input.over(&pattern, self.head_dim))?.into());
        }
        let (qkv, slot) = self.extended(input.qkv, sinks)?;
        let (pattern, mask) = match (&slot, input.mask) {
            (None, mask) => (pattern, mask.cloned()),
            (Some(_), None) => (pattern.with_slots(1, Rule::All), None),
            (Some(_), Some(mask)) => {
                let seen = Tensor::ones((mask.dim(0)?, 1), mask.dtype(), mask.device())?;
                (pattern.with_slots(1, Rule::All), Some(Tensor::cat(&[mask, &seen], 1)?))
            }
        };
        let call = Attend {
            slots: slot.as_ref(),
            dropout: input.dropout,
            ..Attend::scaled(&pattern, mask.as_ref(), self.scale())
        };
        let out = attend(&qkv, &call)?.split()?;
        Ok(Heads::Split(out.narrow(D::Minus1, 0, self.head_dim)?.contiguous()?).into())
    }

    fn init_decode(
        &self,
        batch: usize,
        room: usize,
        _device: &Device,
    ) -> Result<Option<Box<dyn DecodeState>>> {
        if !self.causal {
            return Ok(None);
        }
        let rows = match self.view {
            View::Full => room.max(1),
            View::Streaming { sinks, window, .. } => sinks + window,
        };
        Ok(Some(Carried::holding(batch, KeyValueCache::new(rows))))
    }

    /// The cache has the first keys in front, the last ones behind them in a ring.
    fn decode_step(&self, input: &AttentionInput, state: &mut dyn DecodeState) -> Result<AttentionOutput> {
        let out = state.downcast::<Carried<KeyValueCache>>()?.advance(|cache, position| {
            let sinks = match self.view {
                View::Full => 0,
                View::Streaming { sinks, .. } => sinks,
            };
            let rows = cache.rows();
            let row = if position < sinks { position } else { sinks + (position - sinks) % (rows - sinks) };
            cache.set(&self.turned(&input.qkv.k()?, position)?, &input.qkv.v()?, row)?;
            self.read(&input.qkv.q()?, cache, position, sinks)
        })?;
        Ok(out.into())
    }
}

impl RotarySoftmax {
    /// Attention of the query `q` [b, h, 1, d] at `position` over what the cache holds; the query heads of a group lie side by
    /// side, so that keys and values need no copies.
    fn read(&self, q: &Tensor, cache: &KeyValueCache, position: usize, sinks: usize) -> Result<Heads> {
        let (b, h, _, d) = q.dims4()?;
        let first = self.capped(position);
        if first == position && self.sink_logit.is_none() {
            return cache.attend(&self.turned(q, position)?, position + 1, self.scale());
        }
        let shape = (b * self.groups, h / self.groups, d);
        let seen = (position + 1).min(cache.rows());
        let q = q.contiguous()?;
        let logits = |position: usize, from: usize, len: usize| -> Result<Tensor> {
            let q = (self.turned(&q, position)?.reshape(shape)? * self.scale())?;
            q.matmul(&cache.read(from, len)?[0].t()?)
        };
        let mut scores = if first == position {
            vec![logits(position, 0, seen)?]
        } else {
            vec![logits(first, 0, sinks)?, logits(position, sinks, seen - sinks)?]
        };
        if let Some(logit) = &self.sink_logit {
            let logit = logit.reshape((1, self.groups, h / self.groups, 1))?;
            let logit = logit.broadcast_as((b, self.groups, h / self.groups, 1))?.contiguous()?;
            scores.push(logit.reshape((b * self.groups, h / self.groups, 1))?);
        }
        let weights = softmax_last_dim(&Tensor::cat(&scores, 2)?)?.narrow(2, 0, seen)?.contiguous()?;
        Ok(Heads::Split(weights.matmul(&cache.read(0, seen)?[1])?.reshape((b, h, 1, d))?))
    }
}
