//! Linear recurrence over complex diagonal states, the core of S5 (Smith et al. 2023) and LRU (Orvieto et al. 2023):
//! h_t = a h_{t-1} + u_t.
//!
//! Complex rows of `p` states are stored as `2 p` real numbers, all real parts before all imaginary parts, so that the
//! products around the scan are real matrix products. A state space layer y = s Re(C h) + D x with h_t = a h_{t-1} + B x_t,
//! B = b_re + i b_im `[p, e]`, C = c_re + i c_im `[e, p]`:
//!
//! ```
//! # use candle_core::{Device, Result, Tensor};
//! use effattn_kernel::diagonal_scan::{Direction, diagonal_scan};
//! # fn layer(x: &Tensor, [a_re, a_im, b_re, b_im, c_re, c_im, d]: [&Tensor; 7], s: f64) -> Result<Tensor> {
//! let a = Tensor::stack(&[a_re, a_im], 0)?; // [2, p]
//! let b = Tensor::cat(&[b_re, b_im], 0)?; // [2 p, e]
//! let c = (Tensor::cat(&[c_re, &c_im.neg()?], 1)? * s)?; // [e, 2 p]: Re(C h) = c_re h_re - c_im h_im
//! let h = diagonal_scan(&x.broadcast_matmul(&b.t()?)?, &a, Direction::Forward)?; // [b, n, 2 p]
//! h.broadcast_matmul(&c.t()?)? + x.broadcast_mul(d)?
//! # }
//! # let ones = |shape: &[usize]| Tensor::ones(shape, candle_core::DType::F32, &Device::Cpu);
//! # let (x, state, b, c) = (ones(&[1, 9, 3])?, ones(&[2])?, ones(&[2, 3])?, ones(&[3, 2])?);
//! # let y = layer(&x, [&state, &state, &b, &b, &c, &c, &ones(&[3])?], 2.0)?;
//! # assert_eq!(y.dims(), [1, 9, 3]);
//! # candle_core::Result::Ok(())
//! ```
//!
//! S5: a = exp(Lambda dt), b = (a - 1) / Lambda B (zero-order hold) or the bilinear rule, s = 2 where conjugate states are implied.
//! LRU: a = exp(-exp(nu) + i exp(theta)), b = exp(gamma) B, s = 1. Bidirectional layers scan with [`Direction::Both`] and have
//! `c` `[e, 4 p]`: the columns of C, then those of C_bwd. Padding is the caller's: set `u` to 0 there.

mod composed;
mod cpu;
#[cfg(any(feature = "cuda", test))]
pub(crate) mod cuda;
#[cfg(test)]
mod tests;

use candle_core::{DType, Result, Tensor, bail};

pub use composed::composed;
pub(super) use composed::shift;

use super::tape;

/// In which direction of the sequence a recurrence runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the first position to the last.
    Forward,
    /// From the last position to the first.
    Reverse,
    /// Once in each direction; both include the current position.
    Both,
}

impl Direction {
    /// Number of recurrences.
    pub fn count(self) -> usize {
        if self == Self::Both { 2 } else { 1 }
    }

    /// Whether each recurrence runs from the last position to the first.
    pub(super) fn reversed(self) -> &'static [bool] {
        match self {
            Self::Forward => &[false],
            Self::Reverse => &[true],
            Self::Both => &[false, true],
        }
    }
}

/// h_t = a h_{t-1} + u_t from h = 0, element-wise over complex states.
///
/// `u` [b, n, 2 p] (real parts, then imaginary parts), `a` [2, p] (row 0 real, row 1 imaginary). The result is [b, n, 2 p] or, for
/// [`Direction::Both`], [b, n, 4 p]: the states of the forward recurrence, then those of the reverse one. Only the result is kept for
/// the backward pass.
pub fn diagonal_scan(u: &Tensor, a: &Tensor, direction: Direction) -> Result<Tensor> {
    check(u, a)?;
    match u.device() {
        _ if !super::fused(u) || a.dtype() != DType::F32 => composed(u, a, direction),
        #[cfg(feature = "cuda")]
        candle_core::Device::Cuda(_) => cuda::fused(u, a, direction),
        _ => tape::apply(&[&u.contiguous()?, &a.contiguous()?], cpu::Scan { direction }),
    }
}

/// One position of [`diagonal_scan`] in [`Direction::Forward`]: the new state [b, 1, 2 p], which also replaces `state` (`None`
/// before the first position), for `u` [b, 1, 2 p].
pub fn step(u: &Tensor, a: &Tensor, state: &mut Option<Tensor>) -> Result<Tensor> {
    let p = check(u, a)?;
    if u.dim(1)? != 1 {
        bail!("a decode step takes one position, not {}", u.dim(1)?);
    }
    let next = match state.take() {
        None => u.clone(),
        Some(before) => {
            let (re, im) = composed::multiply(
                &before.narrow(2, 0, p)?,
                &before.narrow(2, p, p)?,
                &a.get(0)?,
                &a.get(1)?,
            )?;
            (Tensor::cat(&[re, im], 2)? + u)?
        }
    };
    *state = Some(next.clone());
    Ok(next)
}

/// Number of states.
fn check(u: &Tensor, a: &Tensor) -> Result<usize> {
    let ((_, _, width), (two, p)) = (u.dims3()?, a.dims2()?);
    if two != 2 || width != 2 * p {
        bail!("u {:?} and a {:?} do not fit: [b, n, 2 p] and [2, p] are needed", u.dims(), a.dims());
    }
    Ok(p)
}
