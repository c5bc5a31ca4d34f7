//! The recurrence in plain candle operations, token by token.

use candle_core::{DType, Result, Tensor};

use super::{DeltaRows, DeltaRule};
use crate::heads::Heads;

/// [`super::delta_rule`] in plain candle operations. Half precision is widened to f32.
pub fn composed(rows: &DeltaRows, call: &DeltaRule) -> Result<Heads> {
    call.check(rows)?;
    let dtype = rows.rows.dtype();
    let wide = match dtype {
        DType::BF16 | DType::F16 => DType::F32,
        other => other,
    };
    let [q, k, v] = rows.with_rows(rows.rows.to_dtype(wide)?).split()?;
    let (b, h, n, dk) = k.dims4()?;
    // [b, h, n], masked steps zero
    let per_step = |x: &Tensor| -> Result<Tensor> {
        let x = x.to_dtype(wide)?;
        match call.mask {
            Some(mask) => x.broadcast_mul(&mask.to_dtype(wide)?.reshape((b, 1, n))?),
            None => Ok(x),
        }
    };
    let beta = per_step(call.beta)?;
    let log_decay = call.log_decay.map(per_step).transpose()?;
    let mut state = Tensor::zeros((b, h, dk, rows.value_width), wide, v.device())?;
    let mut outputs = Vec::with_capacity(n);
    for t in 0..n {
        let at = |x: &Tensor| x.narrow(2, t, 1)?.contiguous();
        let scalar = |x: &Tensor| x.narrow(2, t, 1)?.reshape((b, h, 1, 1));
        let decay = log_decay.as_ref().map(scalar).transpose()?;
        let (out, after) = advance([&at(&q)?, &at(&k)?, &at(&v)?], &scalar(&beta)?, decay.as_ref(), &state)?;
        state = after;
        outputs.push(out);
    }
    Ok(Heads::Split(Tensor::cat(&outputs, 2)?.to_dtype(dtype)?))
}

/// One step: the result [b, h, 1, d] and the state after it. Query, key and value are [b, h, 1, _], `beta` and `log_decay`
/// [b, h, 1, 1].
pub(super) fn advance(
    [q, k, v]: [&Tensor; 3],
    beta: &Tensor,
    log_decay: Option<&Tensor>,
    state: &Tensor,
) -> Result<(Tensor, Tensor)> {
    let state = match log_decay {
        Some(log_decay) => state.broadcast_mul(&log_decay.exp()?)?,
        None => state.clone(),
    };
    // element by element: a product of one row would cost more in calls than in arithmetic
    let column = |x: &Tensor| x.transpose(2, 3);
    let read = |state: &Tensor, x: &Tensor| state.broadcast_mul(&column(x)?)?.sum_keepdim(2);
    let update = (v - read(&state, k)?)?.broadcast_mul(beta)?;
    let state = (&state + column(k)?.broadcast_mul(&update)?)?;
    Ok((read(&state, q)?, state))
}
