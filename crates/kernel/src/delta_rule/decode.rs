//! One token after another: the state is carried, so that a step costs the same at any position.

use candle_core::{Result, Tensor, bail};

use super::composed::advance;
use super::{DeltaRows, DeltaRule};
use crate::heads::Heads;

/// [`super::delta_rule`] of one token after those in `state` [b, h, key_width, value_width], which moves on; `None` is the
/// zero state before the first token. Rows are [b, 1, _], beta and log decay [b, h, 1].
pub fn step(rows: &DeltaRows, call: &DeltaRule, state: &mut Option<Tensor>) -> Result<Heads> {
    call.check(rows)?;
    let (b, n, _) = rows.rows.dims3()?;
    if n != 1 {
        bail!("a decoding step takes one token, got {n}");
    }
    let scalar = |x: &Tensor| {
        let x = x.reshape((b, rows.heads, 1, 1))?;
        match call.mask {
            Some(mask) => x.broadcast_mul(&mask.to_dtype(x.dtype())?.reshape((b, 1, 1, 1))?),
            None => Ok(x),
        }
    };
    let [q, k, v] = rows.split()?;
    let (q, k, v) = (q.contiguous()?, k.contiguous()?, v.contiguous()?);
    let before = match state.take() {
        Some(before) => before,
        None => Tensor::zeros((b, rows.heads, rows.key_width, rows.value_width), v.dtype(), v.device())?,
    };
    let decay = call.log_decay.map(scalar).transpose()?;
    let (out, after) = advance([&q, &k, &v], &scalar(call.beta)?, decay.as_ref(), &before)?;
    *state = Some(after);
    Ok(Heads::Split(out))
}
