//! Dropout: every element is kept with probability 1 - rate and then divided by 1 - rate, or set to 0.
//!
//! What is kept is a function of a seed and the element's number alone. Nothing is stored for the backward pass,
//! and every backend drops the same elements.

use candle_core::{CpuStorage, DType, Layout, Result, Shape, Tensor, bail};

use super::cpu::{self, par};
use super::op::{Op, Out};
use super::tape;

/// Elements that one thread handles at a time (even: one draw decides two elements).
const CHUNK: usize = 1 << 15;

/// `x` with elements dropped at `rate`, chosen by `seed`; at rate 0 `x` itself.
///
/// # Errors
/// A rate outside [0, 1).
pub fn dropout(x: &Tensor, rate: f64, seed: u64) -> Result<Tensor> {
    if !(0.0..1.0).contains(&rate) {
        bail!("a dropout of {rate} is not allowed; it must be at least 0 and below 1");
    }
    if rate == 0.0 {
        return Ok(x.clone());
    }
    if super::fused_cpu(x.device()) && x.dtype() == DType::F32 {
        return tape::apply(&[&x.contiguous()?], Dropout::new(rate, seed));
    }
    composed(x, rate, seed)
}

/// The definition in plain candle operations: a product with a mask made on the host.
pub fn composed(x: &Tensor, rate: f64, seed: u64) -> Result<Tensor> {
    let mut mask = vec![1.0; x.elem_count()];
    Dropout::new(rate, seed).apply(0, &mut mask);
    x * Tensor::from_vec(mask, x.shape(), x.device())?.to_dtype(x.dtype())?
}

#[derive(Clone, Copy)]
struct Dropout {
    /// Draws below this drop.
    threshold: u32,
    scale: f32,
    seed: u64,
}

impl Dropout {
    fn new(rate: f64, seed: u64) -> Self {
        let threshold = (rate * (f64::from(u32::MAX) + 1.0)) as u32;
        Self { threshold, scale: (1.0 / (1.0 - rate)) as f32, seed }
    }

    /// Drops and scales `values`, which start at the even element number `first`.
    fn apply(self, first: usize, values: &mut [f32]) {
        for (pair, values) in values.chunks_mut(2).enumerate() {
            let draw = mix(self.seed.wrapping_add((first / 2 + pair) as u64));
            for (value, draw) in values.iter_mut().zip([draw as u32, (draw >> 32) as u32]) {
                *value = if draw < self.threshold { 0.0 } else { *value * self.scale };
            }
        }
    }

    fn map(self, x: &[f32]) -> Vec<f32> {
        par::build(x.len(), CHUNK, |index, y| {
            y.copy_from_slice(&x[index * CHUNK..][..y.len()]);
            self.apply(index * CHUNK, y);
        })
    }
}

/// 64 well mixed bits of a counter (SplitMix64: Steele, Lea, Flood 2014).
pub fn mix(counter: u64) -> u64 {
    let mut z = counter.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

impl Op for Dropout {
    fn name(&self) -> &'static str {
        "dropout"
    }

    fn forward(&self, operands: &[(&CpuStorage, &Layout)]) -> Result<(Vec<f32>, Shape)> {
        let [x] = cpu::slices(operands)?;
        Ok((self.map(x), operands[0].1.shape().clone()))
    }

    fn backward(&self, _: &[&Tensor], _: Out, grad: &Tensor) -> Result<Vec<Option<Tensor>>> {
        Ok(vec![cpu::gradient(grad, cpu::with_slices([grad], |[grad]| Ok(self.map(grad)))?)?])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::testing::{check, randn};

    #[test]
    fn fused_is_the_twin() {
        for dims in [vec![1], vec![3, 17], vec![2, 40_001]] {
            check(&format!("{dims:?}"), &[randn("x", &dims)], 1e-7, |x| dropout(&x[0], 0.3, 99));
        }
    }

    #[test]
    fn the_kept_share_is_the_rate_and_the_mean_stays() {
        let x = Tensor::ones(400_001, DType::F32, &candle_core::Device::Cpu).unwrap();
        for rate in [0.1, 0.5, 0.9] {
            let y = dropout(&x, rate, 7).unwrap().to_vec1::<f32>().unwrap();
            let kept = y.iter().filter(|y| **y != 0.0).count() as f64 / y.len() as f64;
            assert!((kept - (1.0 - rate)).abs() < 4e-3, "{rate}: {kept}");
            let scale = (1.0 / (1.0 - rate)) as f32;
            assert!(y.iter().all(|y| *y == 0.0 || *y == scale));
        }
    }

    #[test]
    fn seeds_choose_different_elements_and_the_same_again() {
        let x = randn("x", &[1000]);
        let draw = |seed| dropout(&x, 0.5, seed).unwrap().to_vec1::<f32>().unwrap();
        assert_eq!(draw(1), draw(1));
        let (a, b) = (draw(1), draw(2));
        let agree = a.iter().zip(&b).filter(|(a, b)| (**a == 0.0) == (**b == 0.0)).count();
        assert!((400..600).contains(&agree), "{agree} of 1000 agree");
    }

    #[test]
    fn a_rate_of_zero_is_free_and_rates_of_one_are_refused() {
        let x = randn("x", &[3]);
        assert_eq!(dropout(&x, 0.0, 1).unwrap().id(), x.id());
        for rate in [1.0, -0.1, f64::NAN] {
            assert!(dropout(&x, rate, 1).is_err());
        }
    }
}
