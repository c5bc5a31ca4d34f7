//! Multi-dimensional damped exponential moving average, the recurrence of Mega (Ma et al. 2023, section 3.2): every channel is
//! filtered by a kernel that is a sum of `ndim` real exponentials.
//!
//! Mega's parameters `delta`, `alpha`, `beta`, `gamma` [k, ndim] give, with p = sigmoid(delta):
//!
//! ```
//! # use candle_core::{Device, Result, Tensor};
//! use effattn_kernel::diagonal_scan::Direction;
//! use effattn_kernel::ema::ema;
//! # fn sigmoid(x: &Tensor) -> Result<Tensor> { (x.neg()?.exp()? + 1.0)?.recip() }
//! # fn average(x: &Tensor, [delta, alpha, beta, gamma, omega]: [&Tensor; 5]) -> Result<Tensor> {
//! let p = sigmoid(delta)?;
//! let decay = (1.0 - (&p * sigmoid(alpha)?)?)?;
//! let coefficient = ((&p * beta)? * gamma)?.affine(1.0 / (delta.dim(1)? as f64).sqrt(), 0.0)?;
//! // k = 2 e rows: the first e of the forward recurrence, the others of the reverse one
//! let y = (ema(x, &coefficient, &decay, Direction::Both, None)? + x.broadcast_mul(omega)?)?;
//! y.silu()
//! # }
//! # let ones = |shape: &[usize]| Tensor::ones(shape, candle_core::DType::F32, &Device::Cpu);
//! # let each = ones(&[6, 4])?;
//! # let y = average(&ones(&[1, 9, 3])?, [&each, &each, &each, &each, &ones(&[3])?])?;
//! # assert_eq!(y.dims(), [1, 9, 3]);
//! # candle_core::Result::Ok(())
//! ```
//!
//! Padding is the caller's: set `x` to 0 there. Causal decoding goes token by token with [`step`].

mod composed;
mod cpu;
mod decode;
#[cfg(test)]
mod tests;

use candle_core::{DType, Result, Tensor, bail};

pub use composed::composed;
pub use decode::{EmaState, step};

use super::diagonal_scan::Direction;
use super::tape;

/// y_t = sum_{s <= t} kernel_{t-s} x_s per channel, with kernel_j = sum_n coefficient_n decay_n^j.
///
/// `x` [b, n, e]; `coefficient` and `decay` [k, ndim] with k = e, or k = 2 e for [`Direction::Both`]: the rows of the forward
/// recurrence, then those of the reverse one, and y is the sum of both (the current position counts in each). `truncation`
/// sets the kernel to 0 from that distance on; `None` keeps all of it. The result is [b, n, e]. States are computed again in the
/// backward pass: memory beyond operands and result does not depend on `ndim` times n.
pub fn ema(
    x: &Tensor,
    coefficient: &Tensor,
    decay: &Tensor,
    direction: Direction,
    truncation: Option<usize>,
) -> Result<Tensor> {
    check(x, [coefficient, decay], direction, truncation)?;
    let truncation = truncation.filter(|&distance| distance < x.dims()[1]);
    if super::fused_cpu(x.device()) && x.dtype() == DType::F32 {
        let operands = [&x.contiguous()?, &coefficient.contiguous()?, &decay.contiguous()?];
        return tape::apply(&operands, cpu::Ema { direction, truncation });
    }
    composed(x, coefficient, decay, direction, truncation)
}

fn check(
    x: &Tensor,
    [coefficient, decay]: [&Tensor; 2],
    direction: Direction,
    truncation: Option<usize>,
) -> Result<()> {
    let ((_, _, e), (k, _)) = (x.dims3()?, coefficient.dims2()?);
    if k != direction.count() * e || decay.dims() != coefficient.dims() {
        bail!(
            "coefficient {:?} and decay {:?} do not fit {e} channels: both are [{}, ndim] for {direction:?}",
            coefficient.dims(),
            decay.dims(),
            direction.count() * e
        );
    }
    if truncation == Some(0) {
        bail!("a kernel of no lags; the truncation is at least 1");
    }
    Ok(())
}
