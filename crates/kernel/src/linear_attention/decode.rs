//! One token after another: the sums of all keys so far are carried, so that a step costs the same at any position.

use candle_core::{DType, Result, Tensor, bail};

use super::composed::{divide, of_heads};
use super::cpu::Token;
use super::features::{Mapped, favor_logits, map};
use super::{Decay, FeatureActivation, Features, LinearAttention};
use crate::heads::{Heads, Qkv};

/// What is carried from token to token: sum_j w_j phi(k_j) [v_j, 1]^T (without the 1 where nothing is divided), and for FAVOR+ the maximum that features are shifted by.
/// A step of the CPU's kernel writes the sums where they lie.
#[derive(Debug)]
pub struct LinearState {
    sums: Tensor,          // [b, h, f, d + 1] or [b, h, f, d]
    shift: Option<Tensor>, // [b, h, 1, 1]
}

impl LinearState {
    /// What it holds.
    pub fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        std::iter::once(&self.sums).chain(&self.shift)
    }
}

/// Whether `call` can go on token by token: FAVOR+ with an eps shifts all keys by a maximum that later keys may raise.
pub fn recurrent(call: &LinearAttention) -> bool {
    call.causal && !matches!(&call.features, Features::Favor(favor) if !favor.stable())
}

/// [`super::linear_attention`] of the token at `position` (from 0) behind those in `carried`, to which it is added. Queries,
/// keys and values are [b, h, 1, d], and decays those of this token.
pub fn step(
    qkv: &Qkv,
    call: &LinearAttention,
    carried: &mut Option<LinearState>,
    position: usize,
) -> Result<Heads> {
    let (q, k, v) = (qkv.q()?, qkv.k()?, qkv.v()?);
    call.check(&q, &k, &v)?;
    if v.dim(2)? != 1 || !recurrent(call) {
        bail!("{} tokens at once, or features without a recurrent form", v.dim(2)?);
    }
    let tracked = [&q, &k, &v].iter().any(|x| x.track_op());
    if crate::fused_cpu(v.device()) && v.dtype() == DType::F32 && !tracked {
        let rows = |x: Tensor| if x.stride().last() == Some(&1) { Ok(x) } else { x.contiguous() };
        return fused([rows(q)?, rows(k)?, rows(v)?], call, carried, position);
    }
    composed([q, k, v], call, carried, position)
}

/// [`step`] in plain candle operations.
fn composed(
    [q, k, v]: [Tensor; 3],
    call: &LinearAttention,
    carried: &mut Option<LinearState>,
    position: usize,
) -> Result<Heads> {
    let v = v.contiguous()?;
    let (b, h, _, d) = v.dims4()?;
    let (Mapped { q, k, log_decay }, shift) = features_of_heads(call, (&q, &k), h, carried, position)?;
    let decay = log_decay_of(call, &v, log_decay)?;
    let values = match call.guard {
        Some(_) => Tensor::cat(&[&v, &Tensor::ones((b, h, 1, 1), v.dtype(), v.device())?], 3)?,
        None => v,
    };
    let own = k.transpose(2, 3)?.contiguous()?.matmul(&values)?;
    let sums = match (carried.take(), decay) {
        (None, _) => own,
        (Some(before), None) => (before.sums + own)?,
        (Some(before), Some(decay)) => (before.sums.broadcast_mul(&decay.exp()?)? + own)?,
    };
    let all = q.matmul(&sums)?;
    *carried = Some(LinearState { sums, shift });
    match call.guard {
        Some(guard) => Ok(Heads::Split(divide(&all.narrow(3, 0, d)?, &all.narrow(3, d, 1)?, guard)?)),
        None => Ok(Heads::Split(all)),
    }
}

/// [`step`] by the kernel for one token.
fn fused(
    [q, k, v]: [Tensor; 3],
    call: &LinearAttention,
    carried: &mut Option<LinearState>,
    position: usize,
) -> Result<Heads> {
    let (b, h, _, d) = v.dims4()?;
    let mut token = Token {
        q: &q,
        k: &k,
        v: &v,
        activation: FeatureActivation::Identity,
        turn: None,
        log_decay: None,
        guard: call.guard,
    };
    let (mapped, shift) = match (&call.features, &call.decay) {
        (Features::Elementwise { .. }, Decay::Gate(_)) => {
            features_of_heads(call, (&q, &k), h, carried, position)?
        }
        (Features::Elementwise { activation, reweight }, _) => {
            token.activation = *activation;
            token.turn = reweight.map(|m| angle(position, m)).transpose()?;
            (Mapped { q: q.clone(), k: k.clone(), log_decay: None }, None)
        }
        _ => features_of_heads(call, (&q, &k), h, carried, position)?,
    };
    let decay = log_decay_of(call, &v, mapped.log_decay)?;
    let width = mapped.k.dim(3)? * if token.turn.is_some() { 2 } else { 1 };
    let sums = match carried.take() {
        Some(before) => before.sums,
        None => {
            let columns = if call.guard.is_some() { d + 1 } else { d };
            Tensor::zeros((b, h, width, columns), DType::F32, v.device())?
        }
    };
    let rows = Token { q: &mapped.q, k: &mapped.k, log_decay: decay.as_ref(), ..token }.advance(&sums)?;
    *carried = Some(LinearState { sums, shift });
    Ok(Heads::Merged { rows, heads: h })
}

/// The logarithm of what all sums lose, [b, h, 1 or f, 1], together with `own` of the features.
fn log_decay_of(call: &LinearAttention, v: &Tensor, own: Option<Tensor>) -> Result<Option<Tensor>> {
    let (b, h, _, _) = v.dims4()?;
    let own = own.map(|own| own.reshape((b, h, 1, 1))).transpose()?;
    let given = call.decay.logs(v, None)?.map(|(log, _)| log.reshape((b, h, (), 1))).transpose()?;
    match (given, own) {
        (Some(given), Some(own)) => given.broadcast_add(&own).map(Some),
        (given, own) => Ok(given.or(own)),
    }
}

/// Sine and cosine of the angle of `position` where keys are weighted by cosFormer's M.
fn angle(position: usize, m: usize) -> Result<(f64, f64)> {
    if position >= m {
        bail!("position {position} is behind the last of m = {m}");
    }
    Ok((std::f64::consts::FRAC_PI_2 * (position + 1) as f64 / m as f64).sin_cos())
}

/// [`features`] of queries and keys that `heads` heads may share.
fn features_of_heads(
    call: &LinearAttention,
    (q, k): (&Tensor, &Tensor),
    heads: usize,
    carried: &Option<LinearState>,
    position: usize,
) -> Result<(Mapped, Option<Tensor>)> {
    let (q, k) = (of_heads(&q.contiguous()?, heads)?, of_heads(&k.contiguous()?, heads)?);
    features(call, (&q, &k), carried.as_ref(), position)
}

/// Features of one token, the decay of what was before, and the new shift.
fn features(
    call: &LinearAttention,
    (q, k): (&Tensor, &Tensor),
    carried: Option<&LinearState>,
    position: usize,
) -> Result<(Mapped, Option<Tensor>)> {
    match &call.features {
        Features::Elementwise { activation, reweight: Some(m) } => {
            let (sin, cos) = angle(position, *m)?;
            let plain = Features::Elementwise { activation: *activation, reweight: None };
            let mapped = map(&LinearAttention { features: plain, ..call.clone() }, q, k, None)?;
            let turn = |y: &Tensor| Tensor::cat(&[(y * sin)?, (y * cos)?], 3);
            Ok((Mapped { q: turn(&mapped.q)?, k: turn(&mapped.k)?, log_decay: None }, None))
        }
        Features::Favor(favor) => {
            let (dots, _) = favor_logits(favor, q)?;
            let q = dots.broadcast_sub(&dots.max_keepdim(3)?)?.exp()?;
            let (dots, half) = favor_logits(favor, k)?;
            let logits = dots.broadcast_sub(&half)?;
            let own = logits.max_keepdim(3)?;
            let before = carried.and_then(|sums| sums.shift.as_ref());
            let shift = before.map_or_else(|| Ok(own.clone()), |before| before.maximum(&own))?;
            let log_decay = before.map(|before| before - &shift).transpose()?;
            Ok((Mapped { q, k: logits.broadcast_sub(&shift)?.exp()?, log_decay }, Some(shift)))
        }
        Features::Elementwise { .. } | Features::Random { .. } | Features::Taylor => {
            Ok((map(call, q, k, None)?.gated(call, None)?, None))
        }
    }
}
