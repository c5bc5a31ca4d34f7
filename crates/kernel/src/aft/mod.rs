//! Attention-free transformer (Zhai et al. 2021): AFT-simple, AFT-local and, with a window as long as the sequence, AFT-full.
//!
//! Per channel, with a bias w of the window and 0 outside of it (equations 2 to 4),
//!
//! ```text
//! out_i = sigmoid(q_i) sum_j exp(k_j + w_ij) v_j / sum_j exp(k_j + w_ij)        j <= i if causal
//! ```
//!
//! The fused kernel carries sums over keys relative to a maximum per channel: the running one if causal. Keys inside the
//! window are summed pair by pair, those outside by prefix sums, so nothing is subtracted. No exponent is positive, memory
//! is linear in the length, time n d (1 + window).
//!
//! ```
//! use candle_core::{Device, Tensor};
//! use effattn_kernel::device::rng::RngStream;
//! use effattn_kernel::aft::{Aft, WindowBias, aft};
//! use effattn_kernel::heads::{PackedLayout, Qkv};
//!
//! # fn main() -> candle_core::Result<()> {
//! let draw = |name: &str, shape: &[usize]| RngStream::new(0, name).normal_tensor(shape, 0.0, 1.0, &Device::Cpu);
//! let qkv = Qkv::Packed { rows: draw("rows", &[1, 20, 3 * 16])?, heads: 2, parts: PackedLayout::QKV };
//! // AFT-simple
//! let out = aft(&qkv, &Aft { bias: None, mask: None, causal: true })?;
//! assert_eq!(out.split()?.dims(), [1, 2, 20, 8]);
//! // AFT-local: factors for up to 32 positions, w = u v^T
//! let (u, v) = (draw("u", &[1, 32, 4])?, draw("v", &[1, 32, 4])?);
//! let bias = WindowBias::from_factors(&u, &v, 20, 5, true)?;
//! let out = aft(&qkv, &Aft { bias: Some(&bias), mask: None, causal: true })?;
//! assert_eq!(out.split()?.dims(), [1, 2, 20, 8]);
//! # Ok(())
//! # }
//! ```

mod band;
mod composed;
mod cpu;
pub mod decode;

use candle_core::{DType, Result, Tensor, bail};

use super::heads::{Heads, Qkv};

pub use band::WindowBias;
pub use composed::composed;

/// What one call needs besides queries, keys and values.
#[derive(Clone, Copy, Debug)]
pub struct Aft<'a> {
    /// Bias of the pairs in the window, for the same length and direction; `None` is AFT-simple.
    pub bias: Option<&'a WindowBias>,
    /// [b, n]: 1 keep, 0 hidden; `None` keeps all.
    pub mask: Option<&'a Tensor>,
    /// Whether query i sees keys j <= i only.
    pub causal: bool,
}

impl Aft<'_> {
    /// Checks shapes; `dims` are samples, heads, positions and head width.
    fn check(&self, (b, h, n, d): (usize, usize, usize, usize)) -> Result<()> {
        if n == 0 || h * d == 0 {
            bail!(
                "AFT needs at least one position, head and channel, got {n} positions of {h} heads of width {d}"
            );
        }
        if let Some(mask) = self.mask
            && mask.dims() != [b, n]
        {
            bail!("a mask of shape {:?} does not fit {b} samples of {n} positions", mask.dims());
        }
        let Some(bias) = self.bias else { return Ok(()) };
        let (groups, len, _) = bias.band.dims3()?;
        if bias.causal != self.causal || len != n || (groups != 1 && groups != h) {
            bail!(
                "a bias of {groups} heads and {len} positions (causal: {}) does not fit a call of {h} heads and {n} positions \
                 (causal: {}); build it by WindowBias for this call",
                bias.causal,
                self.causal
            );
        }
        Ok(())
    }
}

/// AFT; a query that sees no key gives 0.
pub fn aft(qkv: &Qkv, call: &Aft) -> Result<Heads> {
    let (q, k, v) = (qkv.q()?, qkv.k()?, qkv.v()?);
    if q.dims() != v.dims() || k.dims() != v.dims() {
        bail!("queries {:?}, keys {:?} and values {:?} of AFT have one shape", q.dims(), k.dims(), v.dims());
    }
    call.check(v.dims4()?)?;
    let single = |x: &Tensor| x.dtype() == DType::F32;
    if super::fused_cpu(v.device()) && single(&v) && call.bias.is_none_or(|bias| single(&bias.band)) {
        return cpu::fused(qkv, call);
    }
    composed(qkv, call)
}

#[cfg(test)]
mod tests;
