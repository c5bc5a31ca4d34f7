//! Feature linear attention: `out_i = phi(q_i)^T S_i / guard(phi(q_i) . z_i)` with
//! `S_i = sum_j w_ij phi(k_j) v_j^T` and `z_i = sum_j w_ij phi(k_j)`; without a guard nothing is divided.
//!
//! One operation for cosFormer (eq. 8-12), linear attention (Katharopoulos et al. 2020, eq. 4-12), Performer
//! (FAVOR+), Random Feature Attention, Based, retention, GLA and Mamba-2. Sums run over all visible keys, or when causal
//! over j <= i by a chunked scan; memory is linear in length, no n x n matrix exists.
//!
//! Sums may decay ([`Decay`]), in both directions: `S_t = exp(log_t) S_{t-1} + ...`. So do causal FAVOR+ sums, by the
//! running maximum that keeps their features from under- and overflowing.
//!
//! How recent mechanisms call it (queries and keys of several heads may be shared, [b, groups, n, d]):
//!
//! ```
//! # use candle_core::{Device, Result, Tensor};
//! # use effattn_kernel::heads::{Heads, Qkv};
//! use effattn_kernel::linear_attention::{Decay, FeatureActivation, Features, Guard, LinearAttention, linear_attention};
//!
//! # fn main() -> Result<()> {
//! # let (b, h, n, d) = (1, 2, 5, 4);
//! # let ones = |shape: &[usize]| Tensor::ones(shape, candle_core::DType::F32, &Device::Cpu);
//! # let (q, k, v) = (ones(&[b, h, n, d])?, ones(&[b, h, n, d])?, ones(&[b, h, n, d])?);
//! # let (dt, log_alpha) = (ones(&[b, h, n])?, (ones(&[b, h, n, d])? * -0.1)?);
//! let plain = || Features::Elementwise { activation: FeatureActivation::Identity, reweight: None };
//! let call = |features, decay| LinearAttention { features, guard: None, mask: None, causal: true, decay };
//! let qkv = |v: &Tensor| Qkv::separate(q.clone(), k.clone(), v.clone());
//! // retention: ln gamma per head; rotation and scale are the caller's
//! let retention = linear_attention(&qkv(&v), &call(plain(), Decay::PerHead(&[-0.03, -0.02])))?;
//! // GLA: logsigmoid(z) / tau per channel; gates of their own for keys after the query in `backward`
//! let gla = linear_attention(&qkv(&v), &call(plain(), Decay::PerChannel { log: &log_alpha, backward: None }))?;
//! // Mamba-2: log a = -exp(A_log) dt, and dt weighs what is written
//! let (log_a, written) = ((&dt * -2.0)?, v.broadcast_mul(&dt.unsqueeze(3)?)?);
//! let mamba2 = linear_attention(&qkv(&written), &call(plain(), Decay::PerToken { log: &log_a, backward: None }))?;
//! // Based
//! let based = LinearAttention { guard: Some(Guard::Add(1e-12)), ..call(Features::Taylor, Decay::None) };
//! let based: Heads = linear_attention(&qkv(&v), &based)?;
//! # for out in [retention, gla, mamba2, based] { assert_eq!(out.split()?.dims(), [b, h, n, d]); }
//! # Ok(())
//! # }
//! ```

mod composed;
mod cpu;
#[cfg(any(feature = "cuda", test))]
pub(crate) mod cuda;
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
pub enum FeatureActivation {
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
        activation: FeatureActivation,
        /// cosFormer's M: every pair is weighted by cos(pi/2 (i - j) / M), that is the features are
        /// [phi sin a_i, phi cos a_i] with a_i = pi (i + 1) / (2 M).
        reweight: Option<usize>,
    },
    /// Positive random features of the softmax kernel.
    Favor(Favor),
    /// phi(q) . phi(k) = 1 + s + s^2 / 2 with s = q . k / sqrt(d): the second-order Taylor polynomial of exp (Arora et al.
    /// 2024, Based), 1 + d + d (d + 1) / 2 features.
    Taylor,
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
pub fn linear_attention(qkv: &Qkv, call: &LinearAttention) -> Result<Heads> {
    let q = qkv.q()?;
    call.check(&q, &qkv.k()?, &qkv.v()?)?;
    let heads = match q.device() {
        _ if !super::fused(&q) => None,
        #[cfg(feature = "cuda")]
        candle_core::Device::Cuda(_) => cuda::fused(qkv, call)?,
        _ => cpu::fused(qkv, call)?,
    };
    heads.map_or_else(|| composed(qkv, call), Ok)
}

#[cfg(test)]
mod tests;
