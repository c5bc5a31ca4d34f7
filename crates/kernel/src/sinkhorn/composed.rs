//! The composed twin of Sinkhorn attention.

use candle_core::{D, Result, Tensor, bail};

use super::{Sinkhorn, SortNorm, Sorting};
use crate::dropout::AttentionDropout;
use crate::group::ParamGroup;
use crate::heads::{Heads, Qkv};
use crate::masking::zero_hidden_rows;
use crate::softmax::masked_softmax;

/// Logit of a pair of blocks that takes no part.
const HIDDEN: f32 = -1e30;

/// The definition in plain candle operations.
pub fn composed(qkv: &Qkv, mask: Option<&Tensor>, call: &Sinkhorn) -> Result<Heads> {
    let q = zero_hidden_rows(&qkv.q()?.contiguous()?, mask)?;
    let k = zero_hidden_rows(&qkv.k()?.contiguous()?, mask)?;
    let v = zero_hidden_rows(&qkv.v()?.contiguous()?, mask)?;
    let (b, h, n, d) = q.dims4()?;
    let (block, blocks) = (call.block, n.div_ceil(call.block));
    let padded = block * blocks;
    let released = matches!(call.sorting, Sorting::Released);
    if released && padded != n {
        bail!("the released sinkhorn needs a length that is a multiple of {block}, not {n}");
    }
    let cut = |x: &Tensor| {
        let x = x.pad_with_zeros(2, 0, padded - n)?;
        if released {
            x.reshape((b * h, block, blocks, d))?.transpose(1, 2)?.contiguous()
        } else {
            x.reshape((b * h, blocks, block, d))
        }
    };
    let (q, k, v) = (cut(&q)?, cut(&k)?, cut(&v)?); // [b * h, blocks, block, d]
    let keep = match mask {
        Some(mask) => mask.ne(0f32)?.to_dtype(q.dtype())?,
        None => Tensor::ones((b, n), q.dtype(), q.device())?,
    };
    let keep = cut(&keep.reshape((b, 1, n, 1))?.broadcast_as((b, h, n, d))?.contiguous()?)?;
    let local = keep.narrow(3, 0, 1)?.transpose(2, 3)?.contiguous()?; // [b * h, blocks, 1, block]
    let any = local.max_keepdim(1)?.broadcast_as(local.shape())?.contiguous()?;
    let (sk, sv) = match &call.sorting {
        Sorting::Released => {
            let total = |x: &Tensor| x.sum_keepdim(1)?.broadcast_as(x.shape())?.contiguous();
            (total(&k)?, total(&v)?)
        }
        Sorting::Net { group, temperature, activation } => {
            super::net_sizes(group, h, d, blocks)?;
            let valid = local.max(3)?.reshape((b, h, blocks))?;
            let pooled = k.sum(2)?.reshape((b, h, blocks, d))?;
            let weights = mixture(&pooled, &valid, group, *temperature, *activation)?;
            let weights = weights.reshape((b * h, blocks, blocks))?;
            let mix = |x: &Tensor| weights.matmul(&x.flatten_from(2)?)?.reshape(x.shape());
            (mix(&k)?, mix(&v)?)
        }
    };
    // what dropout multiplies the weights of one half by: of the mixture (0) or of the own keys (1)
    let factors = |dropout: AttentionDropout, half: usize| {
        let rows = (0..b * h).flat_map(|at| (0..padded).map(move |position| at * n + position));
        rows.flat_map(|row| dropout.factors(row, (0..block).map(|key| 2 * key + half))).collect::<Vec<_>>()
    };
    let drop = |weights: Tensor, half: usize| match call.dropout {
        Some(dropout) => dropout.scaled(&weights, factors(dropout, half)),
        None => Ok(weights),
    };
    let scale = 1.0 / (d as f64).sqrt();
    let logits = |k: &Tensor| q.matmul(&k.t()?)? * scale;
    let out = if call.concat {
        let logits = Tensor::cat(&[logits(&sk)?, logits(&k)?], 3)?;
        let weights = masked_softmax(&logits, &Tensor::cat(&[any, local], 3)?)?;
        let half = |at: usize| drop(weights.narrow(3, at * block, block)?.contiguous()?, at);
        (half(0)?.matmul(&sv)? + half(1)?.matmul(&v)?)?
    } else {
        let near = drop(masked_softmax(&logits(&k)?, &local)?, 1)?.matmul(&v)?;
        (near + drop(masked_softmax(&logits(&sk)?, &any)?, 0)?.matmul(&sv)?)?
    };
    let out = if released { out.transpose(1, 2)?.contiguous()? } else { out };
    let out = out.reshape((b, h, padded, d))?.narrow(2, 0, n)?;
    Ok(Heads::Split(zero_hidden_rows(&out, mask)?))
}

/// R [b, h, blocks, blocks]: row u holds the weights of the source blocks in the mixture of block u.
/// `pooled` [b, h, blocks, d], `valid` [b, h, blocks] 1 where a block has a kept key.
fn mixture(
    pooled: &Tensor,
    valid: &Tensor,
    group: &ParamGroup,
    temperature: f64,
    activation: SortNorm,
) -> Result<Tensor> {
    let blocks = pooled.dim(2)?;
    let affine = |x: &Tensor, w: &Tensor, b: &Tensor| {
        x.broadcast_matmul(&w.contiguous()?.unsqueeze(0)?)?.broadcast_add(&b.unsqueeze(1)?.unsqueeze(0)?)
    };
    let cut = |x: Tensor| x.narrow(D::Minus1, 0, blocks);
    let scores = match group.parts.len() {
        2 => affine(pooled, &cut(group.part(0)?)?, &cut(group.part(1)?)?)?,
        _ => {
            let inner = affine(pooled, &group.part(0)?, &group.part(1)?)?.relu()?;
            affine(&inner, &cut(group.part(2)?)?, &cut(group.part(3)?)?)?.relu()?
        }
    };
    let scores = (scores / temperature)?;
    let pairs = valid.unsqueeze(3)?.broadcast_mul(&valid.unsqueeze(2)?)?;
    let SortNorm::Sinkhorn(iterations) = activation else { return masked_softmax(&scores, &pairs) };
    let free = pairs.ne(0f32)?;
    let hidden = Tensor::full(HIDDEN, scores.shape(), scores.device())?.to_dtype(scores.dtype())?;
    let mut scores = free.where_cond(&scores, &hidden)?;
    for dim in [3, 2].repeat(iterations) {
        let max = scores.max_keepdim(dim)?.detach();
        let sum = scores.broadcast_sub(&max)?.exp()?.sum_keepdim(dim)?;
        scores = free.where_cond(&scores.broadcast_sub(&(sum.log()? + max)?)?, &hidden)?;
    }
    scores.exp()? * pairs
}
