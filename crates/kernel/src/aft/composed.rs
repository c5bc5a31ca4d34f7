//! The definition in plain candle operations: dense weights of all pairs.

use candle_core::{DType, Result, Tensor};

use super::Aft;
use crate::heads::{Heads, Qkv};

/// [`super::aft`] in plain candle operations, with memory quadratic in the length. Half precision is widened to f32, and the
/// causal form to f64.
///
/// Keys are exponentiated relative to the largest of all positions, so a causal query whose keys are all more than 690 below a
/// later one gives 0.
pub fn composed(qkv: &Qkv, call: &Aft) -> Result<Heads> {
    let (q, k, v) = (qkv.q()?, qkv.k()?, qkv.v()?);
    let (b, h, n, d) = v.dims4()?;
    call.check((b, h, n, d))?;
    let (dtype, device) = (v.dtype(), v.device());
    let wide = match dtype {
        _ if call.causal => DType::F64,
        DType::BF16 | DType::F16 => DType::F32,
        other => other,
    };
    let (q, k, v) = (q.to_dtype(wide)?, k.to_dtype(wide)?, v.to_dtype(wide)?);
    // [1, 1 or h, n, n]
    let mut weights = match call.bias {
        Some(bias) => bias.dense()?.to_dtype(wide)?.exp()?.unsqueeze(0)?,
        None => Tensor::ones((1, 1, n, n), wide, device)?,
    };
    if call.causal {
        weights = weights.broadcast_mul(&Tensor::tril2(n, wide, device)?)?;
    }
    let top = k.detach().max_keepdim(2)?;
    let mut keys = k.broadcast_sub(&top)?.exp()?;
    if let Some(mask) = call.mask {
        let mask = mask.to_dtype(wide)?.reshape((b, 1, n, 1))?;
        // relative to the largest visible key
        let hidden = mask.affine(1e30, -1e30)?;
        let top = k.detach().broadcast_add(&hidden)?.max_keepdim(2)?;
        keys = k.broadcast_sub(&top)?.broadcast_mul(&mask)?.exp()?.broadcast_mul(&mask)?;
    }
    let sums = |x: &Tensor| weights.broadcast_matmul(&x.contiguous()?);
    let (num, den) = (sums(&(&keys * v)?)?, sums(&keys)?);
    let seen =
        den.ge(if wide == DType::F64 { 1e-300 } else { f64::from(f32::MIN_POSITIVE) })?.to_dtype(wide)?;
    // both relative to the denominator, whose square, as in the gradient of a quotient, has half the range
    let size = ((&den * &seen)? + (1.0 - &seen)?)?.detach();
    let (num, den) = (((num * &seen)? / &size)?, ((den / &size)? * &seen)?);
    let gate = (q.maximum(-80.0)?.neg()?.exp()? + 1.0)?.recip()?; // below, its gradient would be 0 times infinity
    Ok(Heads::Split(((gate * num)? / (den + (1.0 - seen)?)?)?.to_dtype(dtype)?))
}
