//! Feature maps of the twin, and the exact angles of cosFormer.

use std::f64::consts::FRAC_PI_2;

use candle_core::{D, Result, Tensor};

use super::{Decay, Favor, FeatureActivation, Features, LinearAttention, RandomKernel};

/// A logit that no exponential survives.
const HIDDEN: f64 = -1e30;

/// Features of queries and keys [b, h, n, f] (hidden keys are zero rows) and the logarithm of the decay in
/// front of each step [b, h, n].
pub(super) struct Mapped {
    pub(super) q: Tensor,
    pub(super) k: Tensor,
    pub(super) log_decay: Option<Tensor>,
}

impl Mapped {
    /// Applies the gate of `call`: keys are weighted by 1 - g, states decay by g.
    pub(super) fn gated(self, call: &LinearAttention, mask: Option<&Tensor>) -> Result<Self> {
        let Decay::Gate(gate) = call.decay else { return Ok(self) };
        let logits = gate.to_dtype(self.k.dtype())?.contiguous()?.unsqueeze(3)?; // [b, h, n, 1]
        let mut log_gate = log_sigmoid(&logits)?;
        if let Some(mask) = mask {
            log_gate = log_gate.broadcast_mul(mask)?;
        }
        let open = log_sigmoid(&logits.neg()?)?.exp()?;
        let log_gate = log_gate.squeeze(3)?;
        let log_decay = match self.log_decay {
            Some(own) => (own + log_gate)?,
            None => log_gate,
        };
        Ok(Self { q: self.q, k: self.k.broadcast_mul(&open)?, log_decay: Some(log_decay) })
    }
}

/// ln(1 / (1 + exp(-x))) without overflow.
fn log_sigmoid(x: &Tensor) -> Result<Tensor> {
    let positive = x.gt(0.0)?.to_dtype(x.dtype())?;
    let high = (x * positive)?; // max(x, 0)
    let low = (x - &high)?; // min(x, 0)
    let tail = (low.clone() - high)?.exp()?; // exp(-|x|)
    low - (tail + 1.0)?.log()?
}

/// The features of one call.
pub(super) fn map(call: &LinearAttention, q: &Tensor, k: &Tensor, mask: Option<&Tensor>) -> Result<Mapped> {
    match &call.features {
        Features::Elementwise { activation, reweight } => {
            let phi = |x: &Tensor| {
                let y = activate(x, *activation)?;
                match reweight {
                    Some(m) => turn(&y, *m),
                    None => Ok(y),
                }
            };
            Ok(Mapped { q: phi(q)?, k: hide(phi(k)?, mask)?, log_decay: None })
        }
        Features::Favor(favor) if favor.stable() => stable_favor(favor, call.causal, q, k, mask),
        Features::Favor(favor) => plain_favor(favor, q, k, mask),
        Features::Taylor => Ok(Mapped { q: taylor(q)?, k: hide(taylor(k)?, mask)?, log_decay: None }),
        Features::Random { weight, kernel, norm_eps, scale } => {
            let phi = |x: &Tensor| {
                let p = unit(x, *norm_eps)?.broadcast_matmul(&weight.transpose(1, 2)?.contiguous()?)?;
                let y = match kernel {
                    RandomKernel::Gaussian => Tensor::cat(&[p.sin()?, p.cos()?], 3)?,
                    RandomKernel::ArcCos => activate(&p, FeatureActivation::Relu)?,
                };
                y * *scale
            };
            Ok(Mapped { q: phi(q)?, k: hide(phi(k)?, mask)?, log_decay: None })
        }
    }
}

/// Factors of the features of [`Features::Taylor`].
#[derive(Clone, Copy, Debug)]
pub(super) struct TaylorFactors<T = f64> {
    /// Of x_i.
    pub(super) linear: T,
    /// Of x_i^2.
    pub(super) square: T,
    /// Of x_i x_j, j > i, which stands for both orders.
    pub(super) product: T,
}

impl TaylorFactors {
    pub(super) fn new(d: usize) -> Self {
        let d = d as f64;
        Self { linear: d.powf(-0.25), square: (2.0 * d).powf(-0.5), product: d.powf(-0.5) }
    }

    pub(super) fn map<T>(self, f: impl Fn(f64) -> T) -> TaylorFactors<T> {
        TaylorFactors { linear: f(self.linear), square: f(self.square), product: f(self.product) }
    }
}

/// Number of features of [`Features::Taylor`] in `d` dimensions.
pub(super) fn taylor_width(d: usize) -> usize {
    1 + d + d * (d + 1) / 2
}

/// [1, x_i, x_i x_j for j >= i] with the factors of [`TaylorFactors`], the products by i.
fn taylor(x: &Tensor) -> Result<Tensor> {
    let d = x.dim(3)?;
    let factors = TaylorFactors::new(d);
    let pairs = || (0..d as u32).flat_map(|i| (i..d as u32).map(move |j| (i, j)));
    let pick = |index: fn((u32, u32)) -> u32| {
        let indices = Tensor::from_iter(pairs().map(index), x.device())?;
        x.contiguous()?.index_select(&indices, 3)
    };
    let weights = pairs().map(|(i, j)| if i == j { factors.square } else { factors.product });
    let weights =
        Tensor::from_iter(weights, &candle_core::Device::Cpu)?.to_dtype(x.dtype())?.to_device(x.device())?;
    let products = (pick(|(i, _)| i)? * pick(|(_, j)| j)?)?.broadcast_mul(&weights)?;
    let ones = x.narrow(3, 0, 1)?.ones_like()?;
    Tensor::cat(&[ones, (x * factors.linear)?, products], 3)
}

fn hide(features: Tensor, mask: Option<&Tensor>) -> Result<Tensor> {
    match mask {
        Some(mask) => features.broadcast_mul(mask),
        None => Ok(features),
    }
}

fn activate(x: &Tensor, activation: FeatureActivation) -> Result<Tensor> {
    let above = || x.gt(0.0)?.to_dtype(x.dtype());
    match activation {
        FeatureActivation::Identity => Ok(x.clone()),
        FeatureActivation::Relu => x * above()?,
        FeatureActivation::LeakyRelu(slope) => x * above()?.affine(1.0 - slope, slope)?,
        FeatureActivation::Elu1 => {
            let high = (x * above()?)?; // max(x, 0)
            let low = (x - &high)?.exp()?; // exp(min(x, 0)), which is 1 where x > 0
            high + low
        }
    }
}

/// [y sin a_i, y cos a_i].
fn turn(y: &Tensor, m: usize) -> Result<Tensor> {
    let n = y.dim(2)?;
    let angles = angles(n, m);
    let column = |pick: fn(&(f64, f64)) -> f64| {
        let values: Vec<f64> = angles.iter().map(pick).collect();
        Tensor::from_vec(values, (1, 1, n, 1), &candle_core::Device::Cpu)?
            .to_dtype(y.dtype())?
            .to_device(y.device())
    };
    let (sin, cos) = (column(|angle| angle.0)?, column(|angle| angle.1)?);
    Tensor::cat(&[y.broadcast_mul(&sin)?, y.broadcast_mul(&cos)?], 3)
}

/// sin and cos of pi (i + 1) / (2 m) for i in 0..n, in f64: angles of multiples of 64 and of the rest, put
/// together by the addition theorems.
pub(super) fn angles(n: usize, m: usize) -> Vec<(f64, f64)> {
    const STEP: usize = 64;
    let angle = |i: usize| (FRAC_PI_2 * (i as f64 / m as f64)).sin_cos();
    let fine: [(f64, f64); STEP] = std::array::from_fn(angle);
    let coarse = (0..=n / STEP).map(|block| angle(block * STEP));
    let turned = coarse.flat_map(|(s, c)| fine.map(|(fs, fc)| (s * fc + c * fs, c * fc - s * fs)));
    turned.skip(1).take(n).collect()
}

/// x / (|x| + eps); the derivative of the norm at 0 is 0.
fn unit(x: &Tensor, eps: f64) -> Result<Tensor> {
    let square = x.sqr()?.sum_keepdim(D::Minus1)?;
    let zero = square.eq(0.0)?.to_dtype(x.dtype())?;
    let norm = ((&square + &zero)?.sqrt()? * (1.0 - zero)?)?;
    x.broadcast_div(&(norm + eps)?)
}

/// omega x' [b, h, n, m] and |x'|^2 / 2 [b, h, n, 1].
pub(super) fn favor_logits(favor: &Favor, x: &Tensor) -> Result<(Tensor, Tensor)> {
    let (b, h, n, d) = x.dims4()?;
    let x = (x * favor.scale)?;
    let dots = x.reshape((b * h * n, d))?.matmul(&favor.omega.to_dtype(x.dtype())?.t()?)?;
    let half = (x.sqr()?.sum_keepdim(3)? * 0.5)?;
    Ok((dots.reshape((b, h, n, ()))?, half))
}

/// `mask` as a condition of the shape of `like`.
fn condition(mask: &Tensor, like: &Tensor) -> Result<Tensor> {
    mask.ne(0.0)?.broadcast_as(like.shape())?.contiguous()
}

fn hide_logits(logits: Tensor, mask: Option<&Tensor>) -> Result<Tensor> {
    let Some(mask) = mask else { return Ok(logits) };
    let hidden = Tensor::full(HIDDEN as f32, logits.shape(), logits.device())?.to_dtype(logits.dtype())?;
    condition(mask, &logits)?.where_cond(&logits, &hidden)
}

fn plain_favor(favor: &Favor, q: &Tensor, k: &Tensor, mask: Option<&Tensor>) -> Result<Mapped> {
    let constant = |c: Tensor| if favor.through { c } else { c.detach() };
    let features = |logits: Tensor| logits.exp()? + favor.feature_eps;
    let (dots, half) = favor_logits(favor, q)?;
    let c = constant(dots.max_keepdim(3)?);
    let q = features(dots.broadcast_sub(&half)?.broadcast_sub(&c)?)?;
    let (k, mask) = match mask {
        Some(mask) if favor.masked_as_zero => (k.broadcast_mul(mask)?, None),
        mask => (k.clone(), mask),
    };
    let (dots, half) = favor_logits(favor, &k)?;
    let (b, h, n, m) = dots.dims4()?;
    let c = hide_logits(dots.clone(), mask)?.reshape((b, h, 1, n * m))?.max_keepdim(3)?;
    let logits = dots.broadcast_sub(&half)?.broadcast_sub(&constant(c))?;
    let k = hide(features(hide_logits(logits, mask)?)?, mask)?;
    Ok(Mapped { q, k, log_decay: None })
}

/// FAVOR+ without eps: any shift of the logits cancels. Queries are shifted by their own maximum; keys by the
/// maximum of all, or when causal by the running maximum, whose steps become decays.
fn stable_favor(
    favor: &Favor,
    causal: bool,
    q: &Tensor,
    k: &Tensor,
    mask: Option<&Tensor>,
) -> Result<Mapped> {
    let (dots, _) = favor_logits(favor, q)?;
    let q = dots.broadcast_sub(&dots.max_keepdim(3)?.detach())?.exp()?;
    let (k, mask) = match mask {
        Some(mask) if favor.masked_as_zero => (k.broadcast_mul(mask)?, None),
        mask => (k.clone(), mask),
    };
    let (dots, half) = favor_logits(favor, &k)?;
    let logits = hide_logits(dots.broadcast_sub(&half)?, mask)?;
    let largest = logits.detach().max_keepdim(3)?; // [b, h, n, 1]
    let (c, log_decay) = if causal {
        let running = running_max(&largest)?;
        let n = running.dim(2)?;
        let before = running.narrow(2, 0, 1)?; // no step in front of the first
        let before = Tensor::cat(&[&before, &running.narrow(2, 0, n - 1)?], 2)?;
        let decay = (before - &running)?.squeeze(3)?;
        (running, Some(decay))
    } else {
        (largest.max_keepdim(2)?, None)
    };
    let k = hide(logits.broadcast_sub(&c)?.exp()?, mask)?;
    Ok(Mapped { q, k, log_decay })
}

/// Maximum over positions 0..=i of [b, h, n, 1], by doubling.
fn running_max(x: &Tensor) -> Result<Tensor> {
    let n = x.dim(2)?;
    let (mut x, mut step) = (x.clone(), 1);
    while step < n {
        let shifted = Tensor::cat(&[&x.narrow(2, 0, step)?, &x.narrow(2, 0, n - step)?], 2)?;
        x = x.maximum(&shifted)?;
        step *= 2;
    }
    Ok(x)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn angles_are_exact_to_f64() {
        for (n, m) in [(1, 1), (63, 64), (64, 64), (5000, 7777)] {
            let angles = angles(n, m);
            assert_eq!(angles.len(), n);
            for (i, (sin, cos)) in angles.into_iter().enumerate() {
                let (s, c) = (FRAC_PI_2 * ((i + 1) as f64 / m as f64)).sin_cos();
                assert!((sin - s).abs() < 1e-15 && (cos - c).abs() < 1e-15, "{i} of {n}, {m}");
            }
        }
    }
}
