//! One token after another: the sums of all keys so far are carried, so that a step costs the same at any position.

use candle_core::{Result, Tensor, bail};

use super::composed::{divide, of_heads};
use super::features::{Mapped, favor_logits, map};
use super::{Features, LinearAttention};
use crate::heads::{Heads, Qkv};

/// What is carried from token to token: sum_j w_j phi(k_j) [v_j, 1]^T (without the 1 where nothing is divided), and for FAVOR+ the maximum that features are shifted by.
#[derive(Clone, Debug)]
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
    let v = qkv.v()?.contiguous()?;
    let (b, h, n, d) = v.dims4()?;
    let (q, k) = (of_heads(&qkv.q()?.contiguous()?, h)?, of_heads(&qkv.k()?.contiguous()?, h)?);
    call.check(&q, &k, &v)?;
    if n != 1 || !recurrent(call) {
        bail!("{n} tokens at once, or features without a recurrent form");
    }
    let (mapped, shift) = features(call, (&q, &k), carried.as_ref(), position)?;
    let Mapped { q, k, log_decay } = mapped;
    let decay = match (call.decay.logs(&v, None)?, log_decay) {
        (None, None) => None,
        (None, Some(log)) => Some(log.reshape((b, h, 1, 1))?),
        (Some((log, _)), None) => Some(log.reshape((b, h, (), 1))?),
        (Some((log, _)), Some(own)) => {
            Some(log.reshape((b, h, (), 1))?.broadcast_add(&own.reshape((b, h, 1, 1))?)?)
        }
    };
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

/// Features of one token, the decay of what was before, and the new shift.
fn features(
    call: &LinearAttention,
    (q, k): (&Tensor, &Tensor),
    carried: Option<&LinearState>,
    position: usize,
) -> Result<(Mapped, Option<Tensor>)> {
    match &call.features {
        Features::Elementwise { activation, reweight: Some(m) } => {
            if position >= *m {
                bail!("position {position} is behind the last of m = {m}");
            }
            let plain = Features::Elementwise { activation: *activation, reweight: None };
            let mapped = map(&LinearAttention { features: plain, ..call.clone() }, q, k, None)?;
            let angle = std::f64::consts::FRAC_PI_2 * (position + 1) as f64 / *m as f64;
            let turn = |y: &Tensor| Tensor::cat(&[(y * angle.sin())?, (y * angle.cos())?], 3);
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
