//! Feature linear attention: `out_i = phi(q_i)^T S_i / guard(phi(q_i) . z_i)` with
//! `S_i = sum_j w_ij phi(k_j) v_j^T` and `z_i = sum_j w_ij phi(k_j)`.
//!
//! One operation for cosFormer (eq. 8-12), linear attention (Katharopoulos et al. 2020, eq. 4-12), Performer
//! (FAVOR+) and Random Feature Attention. Sums run over all visible keys, or when causal over j <= i by a
//! chunked scan; memory is linear in length, no n x n matrix exists.
//!
//! Causal sums may decay: `S_t = g_t S_{t-1} + ...`. The gates of Random Feature Attention are such a decay,
//! and so is the running maximum that keeps causal FAVOR+ features from under- and overflowing.

mod composed;
mod cpu;
mod decay;
pub mod decode;
mod features;
mod scan;

use candle_core::{Result, Tensor, bail};

use super::heads::{Heads, Qkv};

pub use composed::composed;
pub use decay::Decay;

/// An elementwise feature map.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Activation {
    /// max(x, 0), derivative 0 at 0.
    Relu,
    /// x.
    Identity,
    /// x where x > 0, else `slope` x.
    LeakyRelu(f64),
    /// elu(x) + 1: x + 1 where x > 0, else exp(x).
    Elu1,
}

/// Kernel that random features estimate (Peng et al. 2021).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RandomKernel {
    /// [sin p, cos p].
    Gaussian,
    /// relu(p): the arc-cosine kernel of order 1.
    ArcCos,
}

/// How queries and keys become features.
#[derive(Clone, Debug)]
pub enum Features {
    /// An activation per entry.
    Elementwise {
        /// The activation.
        activation: Activation,
        /// cosFormer's M: every pair is weighted by cos(pi/2 (i - j) / M), that is the features are
        /// [phi sin a_i, phi cos a_i] with a_i = pi (i + 1) / (2 M).
        reweight: Option<usize>,
    },
    /// Positive random features of the softmax kernel.
    Favor(Favor),
    /// Random features of a normalised vector.
    Random {
        /// W [h, p, d], the learned scale included.
        weight: Tensor,
        /// Kernel.
        kernel: RandomKernel,
        /// Added to the norm: x / (|x| + norm_eps).
        norm_eps: f64,
        /// Factor on every feature.
        scale: f64,
    },
}

/// FAVOR+ (Choromanski et al. 2021): with x' = `scale` x,
/// phi(x) = exp(omega x' - |x'|^2 / 2 - c) + `feature_eps`.
///
/// c is the maximum of omega x' over the features of a query; for keys, over features and visible keys of the
/// sample and head. The factor 1 / sqrt(m) of the definition cancels except in front of `den_eps`.
#[derive(Clone, Debug)]
pub struct Favor {
    /// Random directions [m, d].
    pub omega: Tensor,
    /// Factor on queries and keys.
    pub scale: f64,
    /// Added to every exponential.
    pub feature_eps: f64,
    /// The denominator gets `den_eps` sum phi(q) / sqrt(m) on top.
    pub den_eps: f64,
    /// Whether gradients flow through c.
    pub through: bool,
    /// Masked keys and values become zero vectors that still count (the LRA code), instead of being left out.
    pub masked_as_zero: bool,
}

impl Favor {
    /// Without either eps every c cancels, and one may be chosen that is strictly causal.
    fn stable(&self) -> bool {
        self.feature_eps == 0.0 && self.den_eps == 0.0
    }
}

/// What keeps the division defined. Where it acts, no gradient passes through the denominator.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Guard {
    /// max(den, eps).
    ClampMin(f64),
    /// den if |den| >= eps, else eps with the sign of den (+ at 0).
    SignedClamp(f64),
    /// max(|den|, eps).
    AbsClampMin(f64),
    /// den + eps.
    Add(f64),
    /// den; where it is smaller than [`TINY`] the result is 0 and passes no gradient.
    NonZero,
}

/// Denominators below this count as 0 for [`Guard::NonZero`]: their square still is a normal f32.
pub const TINY: f64 = 1e-18;

/// What one call needs besides queries, keys and values.
#[derive(Clone, Debug)]
pub struct LinearAttention<'a> {
    /// Feature map.
    pub features: Features,
    /// Guard of the division; without one nothing is divided: out_i = phi(q_i)^T S_i.
    pub guard: Option<Guard>,
    /// [b, t]: 1 keep, 0 hidden; absent keeps all.
    pub mask: Option<&'a Tensor>,
    /// Whether query i sees keys j <= i only.
    pub causal: bool,
    /// What earlier keys lose per step.
    pub decay: Decay<'a>,
}

impl LinearAttention<'_> {
    /// Checks shapes: batch, heads, queries, keys and head width.
    fn check(&self, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<()> {
        let (b, groups, n, d) = q.dims4()?;
        let (_, h, t, e) = v.dims4()?;
        let shared = groups > 0 && h.is_multiple_of(groups);
        if k.dims() != [b, groups, t, d] || v.dims() != [b, h, t, e] || !shared {
            bail!(
                "queries {:?}, keys {:?} and values {:?} do not fit together",
                q.dims(),
                k.dims(),
                v.dims()
            );
        }
        if n == 0 || t == 0 {
            bail!("linear attention needs at least one query and one key, got {n} and {t}");
        }
        if self.causal && n != t {
            bail!("causal linear attention needs as many keys as queries, got {n} queries and {t} keys");
        }
        self.decay.check([b, h, n, d], t, self.causal)?;
        if let Some(mask) = self.mask
            && mask.dims() != [b, t]
        {
            bail!("a mask of shape {:?} does not fit {b} samples of {t} keys", mask.dims());
        }
        if let Features::Elementwise { reweight: Some(m), .. } = self.features
            && m < n.max(t)
        {
            bail!("m = {m} is shorter than the sequence of {} positions", n.max(t));
        }
        Ok(())
    }
}

/// Linear attention; a query that sees no key gives 0.
///
/// # Errors
/// Shapes that do not fit together, a causal call with more keys than queries or the reverse.
pub fn linear_attention(qkv: &Qkv, call: &LinearAttention) -> Result<Heads> {
    let q = qkv.q()?;
    call.check(&q, &qkv.k()?, &qkv.v()?)?;
    if super::fused_cpu(q.device())
        && let Some(heads) = cpu::fused(qkv, call)?
    {
        return Ok(heads);
    }
    composed(qkv, call)
}

#[cfg(test)]
mod tests;
