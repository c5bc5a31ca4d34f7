//! Fourier mixing of FNet (Lee-Thorp et al. 2022, equation 3): the real part of the discrete Fourier transform over positions and
//! channels, without parameters.
//!
//! ```
//! # use candle_core::{DType, Device, Tensor};
//! use effattn_kernel::fourier::{Norm, fourier_mix};
//! let x = Tensor::ones((2, 37, 12), DType::F32, &Device::Cpu)?; // padding set to 0
//! let y = fourier_mix(&x, Norm::None)?;
//! assert_eq!(y.dims(), [2, 37, 12]);
//! # candle_core::Result::Ok(())
//! ```

mod composed;
mod cpu;
#[cfg(test)]
mod tests;

use candle_core::{DType, Result, Tensor};

pub use composed::composed;

use super::tape;

/// Scale of the transform.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Norm {
    /// 1, as in the paper.
    None,
    /// 1 / sqrt(n e): the two-dimensional transform is unitary.
    Ortho,
}

impl Norm {
    /// The factor for `n` positions of `e` channels.
    fn scale(self, n: usize, e: usize) -> f64 {
        match self {
            Self::None => 1.0,
            Self::Ortho => 1.0 / ((n * e).max(1) as f64).sqrt(),
        }
    }
}

/// y[n, e] = scale * sum over m, f of cos(2 pi (n m / N + e f / E)) x[m, f], for `x` [b, N, E] of any sizes.
///
/// The operator is symmetric, so the gradient of x is the operator applied to that of y.
pub fn fourier_mix(x: &Tensor, norm: Norm) -> Result<Tensor> {
    x.dims3()?;
    if super::fused_cpu(x.device()) && x.dtype() == DType::F32 {
        return tape::apply(&[&x.contiguous()?], cpu::FourierMix { norm });
    }
    composed(x, norm)
}
