//! The composed twin of Nystrom attention.

use candle_core::{D, Result, Tensor};

use super::{InverseInit, Landmarks};
use crate::heads::{Heads, Qkv};
use crate::masking::zero_hidden_rows;
use crate::softmax::{masked_softmax, softmax};

/// The definition in plain candle operations.
pub fn composed(qkv: &Qkv, mask: Option<&Tensor>, spec: Landmarks) -> Result<Heads> {
    let q = zero_hidden_rows(&qkv.q()?.contiguous()?, mask)?;
    let k = zero_hidden_rows(&qkv.k()?.contiguous()?, mask)?;
    let v = zero_hidden_rows(&qkv.v()?.contiguous()?, mask)?;
    let (b, h, n, d) = q.dims4()?;
    let root = (d as f64).powf(-0.25);
    let (q, k) = ((q * root)?, (k * root)?);
    let (m, segment) = (spec.count, n.div_ceil(spec.count));
    let means = |x: &Tensor| x.pad_with_zeros(2, 0, segment * m - n)?.reshape((b, h, m, segment, d))?.mean(3);
    let (ql, kl) = (means(&q)?, means(&k)?); // [b, h, m, d]
    let far = softmax(&q.matmul(&kl.t()?)?)?; // [b, h, n, m]
    let middle = softmax(&ql.matmul(&kl.t()?)?)?; // [b, h, m, m]
    let near = ql.matmul(&k.t()?)?; // [b, h, m, n]
    let near = match mask {
        Some(mask) => masked_softmax(&near, &mask.reshape((b, 1, 1, n))?)?,
        None => softmax(&near)?,
    };
    let inverse = pseudo_inverse(&middle, spec)?;
    let out = far.matmul(&inverse)?.matmul(&near.matmul(&v)?)?;
    Ok(Heads::Split(zero_hidden_rows(&out, mask)?))
}

/// `spec.iterations` steps Z <- Z (13 I - Y (15 I - Y (7 I - Y))) / 4 with Y = A Z, from A^T / c.
fn pseudo_inverse(a: &Tensor, spec: Landmarks) -> Result<Tensor> {
    let (_, _, m, _) = a.dims4()?;
    let columns = a.sum(2)?; // [b, h, m]
    let columns = match spec.start {
        InverseInit::PerMatrix => columns,
        InverseInit::Original => columns.reshape((1, 1, columns.elem_count()))?,
    };
    // gather, since the gradient of candle's max goes in full to every one of equal entries
    let largest = columns.gather(&columns.argmax_keepdim(D::Minus1)?, D::Minus1)?.unsqueeze(3)?;
    let mut z = a.t()?.broadcast_div(&largest)?;
    let identity = Tensor::eye(m, a.dtype(), a.device())?;
    let minus = |factor: f64, y: &Tensor| y.neg()?.broadcast_add(&(&identity * factor)?);
    for _ in 0..spec.iterations {
        let y = a.matmul(&z)?;
        let inner = minus(15.0, &y.matmul(&minus(7.0, &y)?)?)?;
        z = (z.matmul(&minus(13.0, &y.matmul(&inner)?)?)? * 0.25)?;
    }
    Ok(z)
}
