//! The definition in plain candle operations: chunks of positions as matrix products, the states between chunks by recursive
//! doubling.

use candle_core::{D, Result, Tensor};

use super::Direction;
use crate::diagonal_scan::shift;

/// Positions per chunk.
const CHUNK: usize = 32;

/// [`super::ema`] of any type on any device. A truncated kernel is the kernel less its tail, which is the kernel again, shifted:
/// `truncation` lags later with the coefficients coefficient * decay^truncation.
pub fn composed(
    x: &Tensor,
    coefficient: &Tensor,
    decay: &Tensor,
    direction: Direction,
    truncation: Option<usize>,
) -> Result<Tensor> {
    let (_, n, e) = x.dims3()?;
    if n == 0 {
        return Ok(x.clone());
    }
    let one_way = |side: usize, reverse: bool| {
        let rows = |parameter: &Tensor| parameter.narrow(0, side * e, e);
        let (coefficient, decay) = (rows(coefficient)?, rows(decay)?);
        let all = whole(x, &coefficient, &decay, reverse)?;
        match truncation.filter(|&distance| distance < n) {
            None => Ok(all),
            Some(distance) => {
                let tail = (coefficient * power(&decay, distance)?)?;
                all - whole(&shift(x, distance, reverse)?, &tail, &decay, reverse)?
            }
        }
    };
    let mut sum: Option<Tensor> = None;
    for (side, &reverse) in direction.reversed().iter().enumerate() {
        let y = one_way(side, reverse)?;
        sum = Some(match sum {
            None => y,
            Some(sum) => (sum + y)?,
        });
    }
    sum.map_or_else(|| Ok(x.clone()), Ok)
}

/// x^exponent by repeated squaring.
fn power(x: &Tensor, exponent: usize) -> Result<Tensor> {
    let (mut result, mut square, mut rest) = (x.ones_like()?, x.clone(), exponent);
    while rest > 0 {
        if rest % 2 == 1 {
            result = (result * &square)?;
        }
        square = square.sqr()?;
        rest /= 2;
    }
    Ok(result)
}

/// The moving average in one direction without truncation.
fn whole(x: &Tensor, coefficient: &Tensor, decay: &Tensor, reverse: bool) -> Result<Tensor> {
    if reverse {
        let x = flip(x)?;
        return flip(&whole(&x, coefficient, decay, false)?);
    }
    let ((b, n, e), ndim) = (x.dims3()?, decay.dim(1)?);
    let size = CHUNK.min(n);
    let count = n.div_ceil(size);
    let x = x.pad_with_zeros(1, 0, count * size - n)?;
    let x = x.permute((2, 0, 1))?.contiguous()?.reshape((e, b * count, size))?;
    let powers = powers(decay, size)?; // [e, ndim, size + 1]
    let coefficient = coefficient.unsqueeze(2)?;
    // pairs within a chunk: [e, from, to]
    let kernel = powers.narrow(2, 0, size)?.broadcast_mul(&coefficient)?.sum(1)?;
    let padded = kernel.pad_with_zeros(1, size - 1, 0)?;
    let lags = (0..size).flat_map(|from| (0..size).map(move |to| (to + size - 1 - from) as u32));
    let lags = Tensor::from_iter(lags, x.device())?;
    let within = x.matmul(&padded.index_select(&lags, 1)?.reshape((e, size, size))?)?;
    // what the chunks before have left
    let ages = Tensor::from_iter((0..size as u32).rev(), x.device())?;
    let own = x.matmul(&powers.index_select(&ages, 2)?.transpose(1, 2)?.contiguous()?)?;
    let per_chunk = powers.narrow(2, size, 1)?.reshape((e, 1, ndim))?;
    let states = states(&own.reshape((e * b, count, ndim))?, &per_chunk, b)?;
    let before = shift(&states, 1, false)?.reshape((e, b * count, ndim))?;
    let since = powers.narrow(2, 1, size)?.broadcast_mul(&coefficient)?;
    let y = (within + before.matmul(&since)?)?;
    y.reshape((e, b, count * size))?.permute((1, 2, 0))?.narrow(1, 0, n)?.contiguous()
}

/// The states at the ends of chunks from what every chunk adds, `own` [e * b, count, ndim]; `decay` [e, 1, ndim] per chunk.
fn states(own: &Tensor, decay: &Tensor, b: usize) -> Result<Tensor> {
    let (_, count, ndim) = own.dims3()?;
    let (mut states, mut distance) = (own.clone(), 1);
    let mut decay = decay.broadcast_as((decay.dim(0)?, b, ndim))?.reshape(((), 1, ndim))?;
    while distance < count {
        let more = shift(&states, distance, false)?.broadcast_mul(&decay)?;
        states = (states + more)?;
        decay = decay.sqr()?;
        distance *= 2;
    }
    Ok(states)
}

/// x^0 .. x^count along a new last dimension.
fn powers(x: &Tensor, count: usize) -> Result<Tensor> {
    let mut factor = x.unsqueeze(D::Minus1)?;
    let mut powers = factor.ones_like()?;
    while powers.dim(D::Minus1)? <= count {
        powers = Tensor::cat(&[&powers, &powers.broadcast_mul(&factor)?], 2)?;
        factor = factor.sqr()?;
    }
    powers.narrow(2, 0, count + 1)?.contiguous()
}

/// The rows of `x` [b, n, e] from the last to the first.
fn flip(x: &Tensor) -> Result<Tensor> {
    let rows = Tensor::from_iter((0..x.dim(1)? as u32).rev(), x.device())?;
    x.contiguous()?.index_select(&rows, 1)
}
