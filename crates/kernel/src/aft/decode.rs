//! One token after another. AFT-simple carries a maximum and two sums per channel; AFT-local the last window - 1 keys and
//! values too, which enter the sums when they leave the window.

use candle_core::{Result, Tensor, bail};

use crate::heads::{Heads, Qkv};

/// What is carried from token to token; all tensors are [b, h, _, d].
#[derive(Clone, Debug, Default)]
pub struct AftState {
    /// Of all keys outside the window.
    sums: Option<Sums>,
    /// Keys and values inside the window, and which of them count, [b, 1, _, 1].
    recent: Option<[Tensor; 3]>,
}

/// Sums relative to the largest key, one row each.
#[derive(Clone, Debug)]
struct Sums {
    top: Tensor,
    num: Tensor,
    den: Tensor,
}

/// A key that no exponential survives, small enough to be added to another.
const HIDDEN: f64 = -1e30;

impl Sums {
    /// Of keys and values with biases (0 without) that broadcast.
    fn of([k, v, keep]: &[Tensor; 3], bias: Option<&Tensor>) -> Result<Self> {
        let logits = match bias {
            Some(bias) => k.broadcast_add(bias)?,
            None => k.clone(),
        };
        let logits = logits.broadcast_mul(keep)?.broadcast_add(&keep.affine(-HIDDEN, HIDDEN)?)?;
        let top = logits.max_keepdim(2)?;
        let weights = logits.broadcast_sub(&top)?.exp()?.broadcast_mul(keep)?;
        Ok(Self { num: (&weights * v)?.sum_keepdim(2)?, den: weights.sum_keepdim(2)?, top })
    }

    fn add(&self, other: &Self) -> Result<Self> {
        let top = self.top.maximum(&other.top)?;
        let (mine, others) = ((&self.top - &top)?.exp()?, (&other.top - &top)?.exp()?);
        let sum = |a: &Tensor, b: &Tensor| (a * &mine)? + (b * &others)?;
        Ok(Self { num: sum(&self.num, &other.num)?, den: sum(&self.den, &other.den)?, top })
    }
}

/// [`super::aft`] (causal) of one token after those in `state`, which moves on. Queries, keys and values are [b, h, 1, d],
/// `bias` is the row [1 or h, window] of this position in the band of a bias ([`super::WindowBias::band`]; a band of a length
/// below the window has fewer columns and serves positions below that length only), `keep` [b, 1] is 0 for a hidden token.
pub fn step(qkv: &Qkv, bias: Option<&Tensor>, keep: Option<&Tensor>, state: &mut AftState) -> Result<Heads> {
    let (q, k, v) = (qkv.q()?.contiguous()?, qkv.k()?.contiguous()?, qkv.v()?.contiguous()?);
    let (b, h, n, _) = v.dims4()?;
    if n != 1 {
        bail!("a decoding step takes one token, got {n}");
    }
    let keep = match keep {
        Some(keep) => keep.to_dtype(v.dtype())?.reshape((b, 1, 1, 1))?,
        None => Tensor::ones((b, 1, 1, 1), v.dtype(), v.device())?,
    };
    let own = [k, v, keep];
    let all = match bias {
        None => {
            let own = Sums::of(&own, None)?;
            let all = state.sums.as_ref().map_or_else(|| Ok(own.clone()), |sums| sums.add(&own))?;
            state.sums = Some(all.clone());
            all
        }
        Some(bias) => {
            let (groups, window) = bias.dims2()?;
            if groups != 1 && groups != h {
                bail!("a bias of {groups} heads for {h} heads");
            }
            let mut recent = match state.recent.take() {
                Some(before) => pairwise(&before, &own)?,
                None => own,
            };
            let count = recent[0].dim(2)?;
            if count > window {
                let first = Sums::of(&part(&recent, 0, count - window)?, None)?;
                state.sums =
                    Some(state.sums.as_ref().map_or_else(|| Ok(first.clone()), |sums| sums.add(&first))?);
                recent = part(&recent, count - window, window)?;
            }
            let count = count.min(window);
            let bias = bias.narrow(1, window - count, count)?.reshape((1, groups, count, 1))?;
            let inside = Sums::of(&recent, Some(&bias))?;
            state.recent = Some(recent);
            state.sums.as_ref().map_or_else(|| Ok(inside.clone()), |sums| sums.add(&inside))?
        }
    };
    let empty = all.den.eq(0.0)?.to_dtype(all.den.dtype())?;
    let gate = (q.neg()?.exp()? + 1.0)?.recip()?;
    Ok(Heads::Split(((gate * all.num)? / (all.den + empty)?)?))
}

fn part(all: &[Tensor; 3], start: usize, len: usize) -> Result<[Tensor; 3]> {
    let [k, v, keep] = all;
    let narrow = |x: &Tensor| x.narrow(2, start, len)?.contiguous();
    Ok([narrow(k)?, narrow(v)?, narrow(keep)?])
}

fn pairwise([a, b, c]: &[Tensor; 3], [x, y, z]: &[Tensor; 3]) -> Result<[Tensor; 3]> {
    Ok([Tensor::cat(&[a, x], 2)?, Tensor::cat(&[b, y], 2)?, Tensor::cat(&[c, z], 2)?])
}
