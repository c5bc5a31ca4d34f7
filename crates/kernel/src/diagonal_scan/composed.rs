//! The definition in plain candle operations: recursive doubling.

use candle_core::{Result, Tensor};

use super::Direction;

/// [`super::diagonal_scan`] in log2(n) rounds: after round k, h_t is the sum of a^j u_{t-j} over j < 2^k.
pub fn composed(u: &Tensor, a: &Tensor, direction: Direction) -> Result<Tensor> {
    let p = a.dim(1)?;
    let (u_re, u_im) = (u.narrow(2, 0, p)?, u.narrow(2, p, p)?);
    let mut parts = Vec::new();
    for &reverse in direction.reversed() {
        let (re, im) = one_way([&u_re, &u_im], a, reverse)?;
        parts.extend([re, im]);
    }
    Tensor::cat(&parts, 2)
}

fn one_way([u_re, u_im]: [&Tensor; 2], a: &Tensor, reverse: bool) -> Result<(Tensor, Tensor)> {
    let n = u_re.dim(1)?;
    let (mut re, mut im) = (u_re.clone(), u_im.clone());
    let (mut a_re, mut a_im) = (a.get(0)?, a.get(1)?);
    let mut distance = 1;
    // at least once, so that a has a gradient for one position too
    while distance < n.max(2) {
        let (more_re, more_im) =
            multiply(&shift(&re, distance, reverse)?, &shift(&im, distance, reverse)?, &a_re, &a_im)?;
        (re, im) = ((re + more_re)?, (im + more_im)?);
        (a_re, a_im) = multiply(&a_re, &a_im, &a_re, &a_im)?;
        distance *= 2;
    }
    Ok((re, im))
}

/// The rows of `x` [b, n, w] `distance` positions later (`reverse`: earlier), zeros where there is no such row.
pub fn shift(x: &Tensor, distance: usize, reverse: bool) -> Result<Tensor> {
    let n = x.dim(1)?;
    if distance >= n {
        return x.zeros_like();
    }
    if reverse {
        x.narrow(1, distance, n - distance)?.pad_with_zeros(1, 0, distance)
    } else {
        x.narrow(1, 0, n - distance)?.pad_with_zeros(1, distance, 0)
    }
}

/// Real and imaginary part of (x_re + i x_im) (a_re + i a_im).
pub fn multiply(x_re: &Tensor, x_im: &Tensor, a_re: &Tensor, a_im: &Tensor) -> Result<(Tensor, Tensor)> {
    let re = (x_re.broadcast_mul(a_re)? - x_im.broadcast_mul(a_im)?)?;
    let im = (x_re.broadcast_mul(a_im)? + x_im.broadcast_mul(a_re)?)?;
    Ok((re, im))
}
