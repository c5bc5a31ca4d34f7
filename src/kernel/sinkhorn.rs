//! Sparse Sinkhorn attention (Tay et al. 2020; SPEC-cos 4): every block attends to itself and to a mixture
//! of all blocks, whose weights come from a small network over the blocks' summed keys.

use candle_core::{D, Result, Tensor, bail};

use super::heads::{Heads, Qkv};
use super::visible::{keep_rows, masked_softmax};

/// Logit of a pair of blocks that takes no part.
const HIDDEN: f32 = -1e30;

/// The network that scores pairs of blocks.
pub enum Net<'a> {
    /// pooled w + b, `w` [h, d, max_blocks], `b` [h, max_blocks].
    Linear {
        /// Weight.
        w: &'a Tensor,
        /// Bias.
        b: &'a Tensor,
    },
    /// relu(relu(pooled w1 + b1) w + b), `w1` [h, d, hidden], `b1` [h, hidden].
    Mlp {
        /// First weight.
        w1: &'a Tensor,
        /// First bias.
        b1: &'a Tensor,
        /// Second weight, [h, hidden, max_blocks].
        w: &'a Tensor,
        /// Second bias, [h, max_blocks].
        b: &'a Tensor,
    },
}

/// How scores become weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// Rows and columns normalised in turn, this often.
    Sinkhorn(usize),
    /// Softmax over the source blocks.
    Softmax,
}

/// Where the mixture comes from.
pub enum Sorting<'a> {
    /// A weighted sum of the blocks.
    Net {
        /// Scores.
        net: Net<'a>,
        /// Divides the scores.
        temperature: f64,
        /// Weights.
        activation: Activation,
    },
    /// Released code of the Long Range Arena: the plain sum of all blocks, and blocks of every n/block-th position.
    Released,
}

/// Settings of one call.
pub struct Sinkhorn<'a> {
    /// Length of a block.
    pub block: usize,
    /// Mixture.
    pub sorting: Sorting<'a>,
    /// One softmax over mixture and block (true), or the sum of two.
    pub concat: bool,
}

/// Sinkhorn attention; `mask` [b, n].
///
/// # Errors
/// Shapes that do not fit; more blocks than the network scores.
pub fn sinkhorn(qkv: &Qkv, mask: Option<&Tensor>, call: &Sinkhorn) -> Result<Heads> {
    composed(qkv, mask, call)
}

/// The definition in plain candle operations.
///
/// # Errors
/// Shapes that do not fit; more blocks than the network scores.
pub fn composed(qkv: &Qkv, mask: Option<&Tensor>, call: &Sinkhorn) -> Result<Heads> {
    let q = qkv.q()?.contiguous()?;
    let k = keep_rows(&qkv.k()?.contiguous()?, mask)?;
    let v = keep_rows(&qkv.v()?.contiguous()?, mask)?;
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
        Sorting::Net { net, temperature, activation } => {
            let valid = local.max(3)?.reshape((b, h, blocks))?;
            let pooled = k.sum(2)?.reshape((b, h, blocks, d))?;
            let weights = mixture(&pooled, &valid, net, *temperature, *activation)?;
            let weights = weights.reshape((b * h, blocks, blocks))?;
            let mix = |x: &Tensor| weights.matmul(&x.flatten_from(2)?)?.reshape(x.shape());
            (mix(&k)?, mix(&v)?)
        }
    };
    let scale = 1.0 / (d as f64).sqrt();
    let logits = |k: &Tensor| q.matmul(&k.t()?)? * scale;
    let out = if call.concat {
        let logits = Tensor::cat(&[logits(&sk)?, logits(&k)?], 3)?;
        let weights = masked_softmax(&logits, &Tensor::cat(&[any, local], 3)?)?;
        weights.matmul(&Tensor::cat(&[sv, v], 2)?)?
    } else {
        let near = masked_softmax(&logits(&k)?, &local)?.matmul(&v)?;
        (near + masked_softmax(&logits(&sk)?, &any)?.matmul(&sv)?)?
    };
    let out = if released { out.transpose(1, 2)?.contiguous()? } else { out };
    Ok(Heads::Split(out.reshape((b, h, padded, d))?.narrow(2, 0, n)?))
}

/// R [b, h, blocks, blocks]: row u holds the weights of the source blocks in the mixture of block u.
/// `pooled` [b, h, blocks, d], `valid` [b, h, blocks] 1 where a block has a kept key.
fn mixture(
    pooled: &Tensor,
    valid: &Tensor,
    net: &Net,
    temperature: f64,
    activation: Activation,
) -> Result<Tensor> {
    let blocks = pooled.dim(2)?;
    let affine = |x: &Tensor, w: &Tensor, b: &Tensor| {
        x.broadcast_matmul(&w.contiguous()?.unsqueeze(0)?)?.broadcast_add(&b.unsqueeze(1)?.unsqueeze(0)?)
    };
    let cut = |x: &Tensor| {
        let most = x.dim(D::Minus1)?;
        if most < blocks {
            bail!(
                "{blocks} blocks, but the sorting network was built for max_blocks={most}; raise max_blocks"
            );
        }
        x.narrow(D::Minus1, 0, blocks)
    };
    let scores = match net {
        Net::Linear { w, b } => affine(pooled, &cut(w)?, &cut(b)?)?,
        Net::Mlp { w1, b1, w, b } => affine(&affine(pooled, w1, b1)?.relu()?, &cut(w)?, &cut(b)?)?.relu()?,
    };
    let scores = (scores / temperature)?;
    let pairs = valid.unsqueeze(3)?.broadcast_mul(&valid.unsqueeze(2)?)?;
    let Activation::Sinkhorn(iterations) = activation else { return masked_softmax(&scores, &pairs) };
    let free = pairs.ne(0f32)?;
    let hidden = Tensor::full(HIDDEN, scores.shape(), scores.device())?;
    let mut scores = free.where_cond(&scores, &hidden)?;
    for dim in [3, 2].repeat(iterations) {
        let max = scores.max_keepdim(dim)?.detach();
        let sum = scores.broadcast_sub(&max)?.exp()?.sum_keepdim(dim)?;
        scores = free.where_cond(&scores.broadcast_sub(&(sum.log()? + max)?)?, &hidden)?;
    }
    scores.exp()? * pairs
}
