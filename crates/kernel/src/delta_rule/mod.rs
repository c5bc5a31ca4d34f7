//! The delta rule: a linear recurrence that replaces the value stored under a key (Schlag et al. 2021; Yang et al. 2024),
//! with an optional decay per token (Gated DeltaNet, Yang et al. 2025).
//!
//! With a state S [dk, d] that starts at zero,
//!
//! ```text
//! S <- exp(g_t) S;   u_t = beta_t (v_t - S^T k_t);   S <- S + k_t u_t^T;   o_t = S^T q_t
//! ```
//!
//! The fused kernel works on chunks (the WY form of Yang et al. 2024, section 3.2): within a chunk the u_t are the
//! solution of a unit lower triangular system, found by forward substitution in f32; S moves from chunk to chunk.
//! Memory is linear in the length: a training step keeps one state per chunk.
//!
//! ```
//! use candle_core::{Device, Tensor};
//! use effattn_kernel::device::rng::RngStream;
//! use effattn_kernel::delta_rule::{DeltaRows, DeltaRule, NormalizeConfig, delta_rule, normalize};
//! use effattn_kernel::heads::{PackedLayout, Qkv};
//!
//! # fn main() -> candle_core::Result<()> {
//! // DeltaNet: rows [q | k | v] of the projection, two heads of width 8
//! let draw = |name: &str, shape: &[usize]| RngStream::new(0, name).normal_tensor(shape, 0.0, 1.0, &Device::Cpu);
//! let qkv = Qkv::Packed { rows: draw("rows", &[1, 20, 3 * 16])?, heads: 2, parts: PackedLayout::QKV };
//! let rows = DeltaRows::new(&qkv)?;
//! let rows = normalize(&rows, &NormalizeConfig { silu_qk: true, silu_v: true, eps: 1e-6, query_scale: 8f64.powf(-0.5) })?;
//! let beta = (draw("beta", &[1, 2, 20])?.neg()?.exp()? + 1.0)?.recip()?; // sigmoid
//! let call = DeltaRule { beta: &beta, log_decay: None, mask: None };
//! let out = delta_rule(&rows, &call)?;
//! assert_eq!(out.split()?.dims(), [1, 2, 20, 8]);
//! # Ok(())
//! # }
//! ```

mod composed;
mod cpu;
#[cfg(any(feature = "cuda", test))]
pub(crate) mod cuda;
pub mod decode;
mod normalize;

use candle_core::{DType, Result, Tensor, bail};

use super::heads::{Heads, PackedLayout, Qkv, merge};

pub use composed::composed;
pub use normalize::normalize;

/// Queries, keys and values of all heads side by side, in rows `[q heads | k heads | v heads]`.
#[derive(Clone, Debug)]
pub struct DeltaRows {
    /// [b, n, heads * (2 key_width + value_width)].
    pub rows: Tensor,
    /// Number of heads.
    pub heads: usize,
    /// Width of a query and of a key.
    pub key_width: usize,
    /// Width of a value.
    pub value_width: usize,
}

impl DeltaRows {
    /// The rows of `qkv`: as they are where packed as `[q | k | v]`, copied side by side otherwise.
    pub fn new(qkv: &Qkv) -> Result<Self> {
        if let Qkv::Packed { rows, heads, parts } = qkv
            && *parts == PackedLayout::QKV
        {
            let width = rows.dim(2)? / 3 / heads;
            return Ok(Self { rows: rows.clone(), heads: *heads, key_width: width, value_width: width });
        }
        let (q, k, v) = (qkv.q()?, qkv.k()?, qkv.v()?);
        let ((b, h, n, key_width), (_, _, _, value_width)) = (q.dims4()?, v.dims4()?);
        if k.dims() != q.dims() || v.dims() != [b, h, n, value_width] {
            bail!(
                "queries {:?}, keys {:?} and values {:?} do not fit together: the delta rule takes as many of each",
                q.dims(),
                k.dims(),
                v.dims()
            );
        }
        let rows = Tensor::cat(&[merge(&q)?, merge(&k)?, merge(&v)?], 2)?;
        Ok(Self { rows, heads: h, key_width, value_width })
    }

    /// Queries, keys [b, h, n, key_width] and values [b, h, n, value_width], as views.
    pub fn split(&self) -> Result<[Tensor; 3]> {
        let (b, n, _) = self.rows.dims3()?;
        let (h, dk, d) = (self.heads, self.key_width, self.value_width);
        let part = |start: usize, width: usize| {
            self.rows.narrow(2, start, h * width)?.reshape((b, n, h, width))?.transpose(1, 2)
        };
        Ok([part(0, dk)?, part(h * dk, dk)?, part(2 * h * dk, d)?])
    }

    fn with_rows(&self, rows: Tensor) -> Self {
        Self { rows, ..*self }
    }

    /// Checks the width of the rows.
    fn check(&self) -> Result<()> {
        let (_, n, width) = self.rows.dims3()?;
        let (h, dk, d) = (self.heads, self.key_width, self.value_width);
        if n == 0 || h * dk * d == 0 {
            bail!(
                "the delta rule needs at least one position, head and channel, got rows {:?}",
                self.rows.dims()
            );
        }
        if width != h * (2 * dk + d) {
            bail!(
                "rows of width {width} do not hold queries and keys of width {dk} and values of width {d} for {h} heads"
            );
        }
        Ok(())
    }
}

/// What one call needs besides queries, keys and values.
#[derive(Clone, Copy, Debug)]
pub struct DeltaRule<'a> {
    /// Share of the old value that is replaced, [b, h, n], in [0, 2] for keys of length 1.
    pub beta: &'a Tensor,
    /// ln of the decay of the state before each step, [b, h, n], not positive; `None` does not decay.
    pub log_decay: Option<&'a Tensor>,
    /// [b, n]: 1 keep, 0 leaves the state as it is; `None` keeps all.
    pub mask: Option<&'a Tensor>,
}

impl DeltaRule<'_> {
    fn check(&self, rows: &DeltaRows) -> Result<()> {
        rows.check()?;
        let (b, n, _) = rows.rows.dims3()?;
        let per_step = [b, rows.heads, n];
        let all = [("beta", Some(self.beta)), ("log decay", self.log_decay)];
        for (name, tensor) in all.into_iter().filter_map(|(name, tensor)| Some((name, tensor?))) {
            if tensor.dims() != per_step {
                bail!(
                    "{name} of shape {:?}, expected {per_step:?} (samples, heads, positions)",
                    tensor.dims()
                );
            }
        }
        match self.mask {
            Some(mask) if mask.dims() != [b, n] => {
                bail!("a mask of shape {:?} does not fit {b} samples of {n} positions", mask.dims())
            }
            _ => Ok(()),
        }
    }
}

/// Widest key that the CUDA kernels take: more does not fit the shared memory of a block.
const CUDA_WIDEST: usize = 128;

/// Settings of [`normalize()`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NormalizeConfig {
    /// Whether queries and keys go through x sigmoid(x).
    pub silu_qk: bool,
    /// Whether values do.
    pub silu_v: bool,
    /// Added to the squared length.
    pub eps: f64,
    /// Factor on queries, usually 1 / sqrt(key_width).
    pub query_scale: f64,
}

/// Results of the delta rule; queries and keys are taken as they are (see [`normalize()`]).
pub fn delta_rule(rows: &DeltaRows, call: &DeltaRule) -> Result<Heads> {
    call.check(rows)?;
    let tensors = [Some(&rows.rows), Some(call.beta), call.log_decay];
    let is_f32 = tensors.iter().flatten().all(|x| x.dtype() == DType::F32);
    let has_kernel = match rows.key_width <= CUDA_WIDEST {
        true => super::fused(&rows.rows),
        false => super::fused_cpu(rows.rows.device()),
    };
    match rows.rows.device() {
        _ if !has_kernel || !is_f32 => composed(rows, call),
        #[cfg(feature = "cuda")]
        candle_core::Device::Cuda(_) => cuda::fused(rows, call),
        _ => cpu::fused(rows, call),
    }
}

#[cfg(test)]
mod tests;
