//! One token after another. AFT-simple carries the mean value and the logarithm of the sum of weights per channel; AFT-local the
//! last window - 1 keys and values too, which enter the mean when they leave the window.

use candle_core::{Result, Tensor, bail};

use crate::heads::{Heads, Qkv};

/// What is carried from token to token; all tensors are [b, h, _, d].
#[derive(Clone, Debug, Default)]
pub struct AftState {
    /// Of all keys outside the window.
    mean: Option<Mean>,
    /// Keys and values inside the window of the next token.
    recent: Option<[Tensor; 2]>,
}

impl AftState {
    /// What it holds.
    pub fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        let mean = self.mean.iter().flat_map(|mean| [&mean.log_sum, &mean.value]);
        mean.chain(self.recent.iter().flatten())
    }
}

/// A weighted mean of values and ln of the sum of its weights, one row each.
#[derive(Clone, Debug)]
struct Mean {
    log_sum: Tensor,
    value: Tensor,
}

/// A key that no exponential survives, small enough to be added to another.
const HIDDEN: f64 = -1e30;

impl Mean {
    /// Over the rows of `values` with weights exp(`logits`).
    fn of(logits: &Tensor, values: &Tensor) -> Result<Self> {
        let top = logits.max_keepdim(2)?;
        let weights = logits.broadcast_sub(&top)?.exp()?;
        let sum = weights.sum_keepdim(2)?;
        let value = ((&weights * values)?.sum_keepdim(2)? / &sum)?;
        Ok(Self { log_sum: (top + sum.log()?)?, value })
    }

    /// Of both together.
    fn join(before: Option<&Self>, new: Self) -> Result<Self> {
        let Some(before) = before else { return Ok(new) };
        Self::of(
            &Tensor::cat(&[&before.log_sum, &new.log_sum], 2)?,
            &Tensor::cat(&[&before.value, &new.value], 2)?,
        )
    }
}

/// [`super::aft`] (causal) of one token after those in `state`, which moves on. Queries, keys and values are [b, h, 1, d],
/// `bias` is the row [1 or h, window] of this position in the band of a bias ([`super::WindowBias::band`]; a band of a length
/// below the window has fewer columns and serves positions below that length only), `keep` [b, 1] is 0 for a hidden token.
pub fn step(qkv: &Qkv, bias: Option<&Tensor>, keep: Option<&Tensor>, state: &mut AftState) -> Result<Heads> {
    let (q, mut k, v) = (qkv.q()?.contiguous()?, qkv.k()?.contiguous()?, qkv.v()?.contiguous()?);
    let (b, h, n, _) = v.dims4()?;
    if n != 1 {
        bail!("a decoding step takes one token, got {n}");
    }
    if let Some(keep) = keep {
        let keep = keep.ne(0f32)?.reshape((b, 1, 1, 1))?.broadcast_as(k.shape())?;
        k = keep.where_cond(&k, &k.zeros_like()?.affine(0.0, HIDDEN)?)?;
    }
    let all = match bias {
        None => {
            let all = Mean::join(state.mean.as_ref(), Mean::of(&k, &v)?)?;
            state.mean = Some(all.clone());
            all
        }
        Some(bias) => in_window([k, v], bias, h, state)?,
    };
    let empty = all.log_sum.lt(HIDDEN / 2.0)?;
    let value = empty.where_cond(&all.value.zeros_like()?, &all.value)?;
    let gate = (q.neg()?.exp()? + 1.0)?.recip()?;
    Ok(Heads::Split((gate * value)?))
}

/// The mean over the window with its biases and everything before it.
fn in_window([k, v]: [Tensor; 2], bias: &Tensor, h: usize, state: &mut AftState) -> Result<Mean> {
    let (groups, window) = bias.dims2()?;
    if groups != 1 && groups != h {
        bail!("a bias of {groups} heads for {h} heads");
    }
    let [k, v] = match &state.recent {
        Some([keys, values]) => [Tensor::cat(&[keys, &k], 2)?, Tensor::cat(&[values, &v], 2)?],
        None => [k, v],
    };
    let count = k.dim(2)?;
    let bias = bias.narrow(1, window - count, count)?.reshape((1, groups, count, 1))?;
    let all = Mean::join(state.mean.as_ref(), Mean::of(&k.broadcast_add(&bias)?, &v)?)?;
    let leaves = usize::from(count == window);
    if leaves == 1 {
        let oldest = Mean::of(&k.narrow(2, 0, 1)?, &v.narrow(2, 0, 1)?)?;
        state.mean = Some(Mean::join(state.mean.as_ref(), oldest)?);
    }
    let stays = |x: &Tensor| x.narrow(2, leaves, count - leaves)?.contiguous();
    state.recent = if count > leaves { Some([stays(&k)?, stays(&v)?]) } else { None };
    Ok(all)
}
