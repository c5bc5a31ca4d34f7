//! Short causal depthwise convolution over positions, as in front of the recurrences of Mamba-2 and DeltaNet.
//!
//! ```
//! # use candle_core::{DType, Device, Tensor};
//! use effattn_kernel::short_conv::{ShortConv, short_conv, step};
//! # let ones = |shape: &[usize]| Tensor::ones(shape, DType::F32, &Device::Cpu);
//! # let (x, w, b) = (ones(&[1, 9, 3])?, ones(&[3, 4])?, ones(&[3])?);
//! let conv = ShortConv { weight: &w, bias: Some(&b), silu: true };
//! let y = short_conv(&x, conv)?; // all positions
//! let mut state = None;
//! let first = step(&x.narrow(1, 0, 1)?, conv, &mut state)?; // the next one
//! # assert_eq!(first.flatten_all()?.to_vec1::<f32>()?, y.narrow(1, 0, 1)?.flatten_all()?.to_vec1::<f32>()?);
//! # candle_core::Result::Ok(())
//! ```

mod cpu;
#[cfg(test)]
mod tests;

use candle_core::{DType, Result, Tensor, bail};

use super::tape;

/// Parameters of a short convolution.
#[derive(Clone, Copy, Debug)]
pub struct ShortConv<'a> {
    /// [e, taps]; the last tap is that of the current position.
    pub weight: &'a Tensor,
    /// `[e]`.
    pub bias: Option<&'a Tensor>,
    /// Whether SiLU follows.
    pub silu: bool,
}

impl ShortConv<'_> {
    /// Number of taps.
    fn check(&self, x: &Tensor) -> Result<usize> {
        let ((_, _, e), (channels, taps)) = (x.dims3()?, self.weight.dims2()?);
        if channels != e || taps == 0 || self.bias.is_some_and(|bias| bias.dims() != [e]) {
            bail!(
                "weight {:?} and bias {:?} do not fit {e} channels: [{e}, taps] and [{e}] are needed",
                self.weight.dims(),
                self.bias.map(Tensor::dims)
            );
        }
        Ok(taps)
    }
}

/// y_t = sum over i < taps of weight_i x_{t - taps + 1 + i} + bias for `x` [b, n, e], zeros before the start; SiLU of it if so set.
///
/// Padding is the caller's: set `x` to 0 there.
pub fn short_conv(x: &Tensor, conv: ShortConv) -> Result<Tensor> {
    conv.check(x)?;
    if !super::fused_cpu(x.device()) || x.dtype() != DType::F32 {
        return composed(x, conv);
    }
    let taps = conv.weight.t()?.contiguous()?; // [taps, e]
    let bias = match conv.bias {
        Some(bias) => bias.contiguous()?,
        None => Tensor::zeros(conv.weight.dim(0)?, x.dtype(), x.device())?,
    };
    tape::apply(&[&x.contiguous()?, &taps, &bias], cpu::Conv { silu: conv.silu })
}

/// The definition in plain candle operations: one shifted product per tap.
pub fn composed(x: &Tensor, conv: ShortConv) -> Result<Tensor> {
    let (taps, n) = (conv.check(x)?, x.dim(1)?);
    valid(&x.pad_with_zeros(1, taps - 1, 0)?, n, conv)
}

/// `n` positions of the convolution over `x` [b, taps - 1 + n, e].
fn valid(x: &Tensor, n: usize, conv: ShortConv) -> Result<Tensor> {
    let taps = conv.weight.t()?;
    let mut sum = x.narrow(1, 0, n)?.broadcast_mul(&taps.get(0)?)?;
    for tap in 1..taps.dim(0)? {
        sum = (sum + x.narrow(1, tap, n)?.broadcast_mul(&taps.get(tap)?)?)?;
    }
    let sum = match conv.bias {
        Some(bias) => sum.broadcast_add(bias)?,
        None => sum,
    };
    if conv.silu { sum.silu() } else { Ok(sum) }
}

/// [`short_conv`] of the next position `x` [b, 1, e]; `state` holds the taps - 1 positions before it, [b, taps - 1, e] (`None`
/// before the first).
pub fn step(x: &Tensor, conv: ShortConv, state: &mut Option<Tensor>) -> Result<Tensor> {
    let taps = conv.check(x)?;
    let (b, n, e) = x.dims3()?;
    if n != 1 {
        bail!("a decode step takes one position, not {n}");
    }
    let before = match state.take() {
        Some(before) => before,
        None => Tensor::zeros((b, taps - 1, e), x.dtype(), x.device())?,
    };
    let all = Tensor::cat(&[&before, x], 1)?;
    let y = valid(&all, 1, conv)?;
    *state = Some(all.narrow(1, 1, taps - 1)?.contiguous()?);
    Ok(y)
}
