//! The definition in plain candle operations.

use candle_core::{D, DType, Result, Tensor};

use super::features::{Mapped, map};
use super::scan::{Own, scan, scan_channels};
use super::{Features, Guard, LinearAttention, TINY};
use crate::heads::{Heads, Qkv};

/// [`super::linear_attention`] in plain candle operations. Half precision is widened to f32.
pub fn composed(qkv: &Qkv, call: &LinearAttention) -> Result<Heads> {
    let (q, k, v) = (qkv.q()?, qkv.k()?, qkv.v()?);
    call.check(&q, &k, &v)?;
    let dtype = q.dtype();
    let wide = |x: &Tensor| match x.dtype() {
        DType::BF16 | DType::F16 => x.to_dtype(DType::F32),
        _ => x.contiguous(),
    };
    let heads = v.dim(1)?;
    let (q, k, mut v) = (of_heads(&wide(&q)?, heads)?, of_heads(&wide(&k)?, heads)?, wide(&v)?);
    let mask = match call.mask {
        Some(mask) => {
            let (b, t) = mask.dims2()?;
            Some(mask.to_dtype(q.dtype())?.reshape((b, 1, t, 1))?)
        }
        None => None,
    };
    if let (Features::Favor(favor), Some(mask)) = (&call.features, &mask)
        && favor.masked_as_zero
    {
        v = v.broadcast_mul(mask)?;
    }
    let mapped = map(call, &q, &k, mask.as_ref())?;
    let queries = mapped.q.clone();
    let (b, h, t, d) = v.dims4()?;
    let values = match call.guard {
        Some(_) => {
            let ones = Tensor::ones((b, h, t, 1), v.dtype(), v.device())?;
            Tensor::cat(&[&v, &ones], 3)? // the last column sums to the denominator
        }
        None => v,
    };
    let sums = if let Some((log, backward)) = call.decay.logs(&values, mask.as_ref())? {
        decayed_sums(&mapped, &values, &log, (!call.causal).then_some(&backward))?
    } else if call.causal {
        causal_sums(&mapped.gated(call, mask.as_ref())?, &values)?
    } else {
        let state = mapped.k.transpose(2, 3)?.matmul(&values)?; // [b, h, f, d + 1]
        queries.matmul(&state)?
    };
    let Some(guard) = call.guard else { return Ok(Heads::Split(sums.to_dtype(dtype)?)) };
    let mut den = sums.narrow(3, d, 1)?;
    if let Features::Favor(favor) = &call.features
        && favor.den_eps != 0.0
    {
        let factor = favor.den_eps * (favor.omega.dim(0)? as f64).sqrt();
        den = (den + (queries.sum_keepdim(3)? * factor)?)?;
    }
    let out = divide(&sums.narrow(3, 0, d)?, &den, guard)?;
    Ok(Heads::Split(out.to_dtype(dtype)?))
}

fn causal_sums(mapped: &Mapped, values: &Tensor) -> Result<Tensor> {
    let (b, h, n, e) = values.dims4()?;
    let flat = |x: &Tensor| x.reshape((b * h, n, x.dim(D::Minus1)?));
    let decay = mapped.log_decay.as_ref().map(|decay| decay.reshape((b * h, n))).transpose()?;
    let (q, k, v) = (flat(&mapped.q)?, flat(&mapped.k)?, flat(values)?);
    scan((&q, &k, &v), decay.as_ref(), Own::Counts)?.reshape((b, h, n, e))
}

/// Sums that decay by `log` [b, h, n] or [b, h, n, f], and by `backward` over the keys after the query.
fn decayed_sums(mapped: &Mapped, values: &Tensor, log: &Tensor, backward: Option<&Tensor>) -> Result<Tensor> {
    let (b, h, n, e) = values.dims4()?;
    let flat = |x: &Tensor| x.reshape((b * h, n, x.elem_count() / (b * h * n)));
    let sums = |q: &Tensor, k: &Tensor, v: &Tensor, log: &Tensor, own: Own| match log.dim(2)? {
        1 if mapped.k.dim(3)? > 1 => scan((q, k, v), Some(&log.squeeze(2)?), own),
        _ => scan_channels((q, k, v), log, own),
    };
    let (q, k, v, mut log) = (flat(&mapped.q)?, flat(&mapped.k)?, flat(values)?, flat(log)?);
    if let Some(own) = &mapped.log_decay {
        log = log.broadcast_add(&flat(own)?)?;
    }
    let mut out = sums(&q, &k, &v, &log, Own::Counts)?;
    if let Some(backward) = backward {
        let last_first = Tensor::from_vec((0..n as u32).rev().collect(), n, v.device())?;
        let turn = |x: &Tensor| x.index_select(&last_first, 1);
        let later = sums(&turn(&q)?, &turn(&k)?, &turn(&v)?, &turn(&flat(backward)?)?, Own::Skipped)?;
        out = (out + turn(&later)?)?;
    }
    out.reshape((b, h, n, e))
}

/// [b, groups, n, d] repeated for `heads` heads, those of a group next to each other.
pub(super) fn of_heads(x: &Tensor, heads: usize) -> Result<Tensor> {
    let (b, groups, n, d) = x.dims4()?;
    if groups == heads {
        return Ok(x.clone());
    }
    x.unsqueeze(2)?.broadcast_as((b, groups, heads / groups, n, d))?.contiguous()?.reshape((b, heads, n, d))
}

/// num / guard(den), `den` [.., 1].
pub(super) fn divide(num: &Tensor, den: &Tensor, guard: Guard) -> Result<Tensor> {
    let like = |condition: Tensor| condition.to_dtype(den.dtype());
    // keep where the denominator passes, `fill` elsewhere
    let select = |keep: &Tensor, fill: Tensor| (den * keep)? + ((1.0 - keep)? * fill)?;
    match guard {
        Guard::Add(eps) => num.broadcast_div(&(den + eps)?),
        Guard::ClampMin(eps) => {
            let keep = like(den.gt(eps)?)?;
            num.broadcast_div(&select(&keep, keep.ones_like()?.affine(eps, 0.0)?)?)
        }
        Guard::SignedClamp(eps) => {
            let keep = like(den.abs()?.ge(eps)?)?;
            let sign = like(den.ge(0.0)?)?.affine(2.0 * eps, -eps)?;
            num.broadcast_div(&select(&keep, sign)?)
        }
        Guard::AbsClampMin(eps) => {
            let sign = like(den.ge(0.0)?)?.affine(2.0, -1.0)?;
            let size = (den * sign)?;
            let keep = like(size.gt(eps)?)?;
            num.broadcast_div(&((size * &keep)? + ((1.0 - &keep)? * eps)?)?)
        }
        Guard::NonZero => {
            let keep = like(den.abs()?.ge(TINY)?)?;
            num.broadcast_mul(&keep)?.broadcast_div(&select(&keep, keep.ones_like()?)?)
        }
    }
}
