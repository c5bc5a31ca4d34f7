//! Seeded random streams: the same numbers on every backend.
//!
//! candle cannot seed its CPU generator, so every weight, constant and data order is drawn here on
//! the host from ChaCha and uploaded. A stream is keyed by a seed and a name, so what one parameter
//! draws does not depend on the order in which others are built.

use candle_core::{Device, Result, Shape, Tensor};
use rand::{Rng, SeedableRng, seq::SliceRandom};
use rand_chacha::ChaCha8Rng;
use rand_distr::StandardNormal;
use sha2::{Digest, Sha256};

/// One stream of random numbers.
pub struct RngStream(ChaCha8Rng);

impl RngStream {
    /// The stream called `name` under `seed`.
    pub fn new(seed: u64, name: &str) -> Self {
        let mut hash = Sha256::new();
        hash.update(seed.to_le_bytes());
        hash.update(name.as_bytes());
        Self(ChaCha8Rng::from_seed(hash.finalize().into()))
    }

    /// Uniform in `[low, high)`.
    pub fn uniform(&mut self, low: f64, high: f64) -> f64 {
        low + (high - low) * self.0.random::<f64>()
    }

    /// Standard normal.
    pub fn normal(&mut self) -> f64 {
        self.0.sample(StandardNormal)
    }

    /// Uniform integer in `0..n` (`n` > 0).
    pub fn below(&mut self, n: usize) -> usize {
        self.0.random_range(0..n)
    }

    /// A random order of `0..n`.
    pub fn permutation(&mut self, n: usize) -> Vec<usize> {
        let mut order: Vec<usize> = (0..n).collect();
        order.shuffle(&mut self.0);
        order
    }

    /// A tensor of normal numbers with the given mean and standard deviation.
    pub fn normal_tensor(
        &mut self,
        shape: impl Into<Shape>,
        mean: f64,
        std: f64,
        device: &Device,
    ) -> Result<Tensor> {
        let shape = shape.into();
        let data: Vec<f32> = (0..shape.elem_count()).map(|_| (mean + std * self.normal()) as f32).collect();
        Tensor::from_vec(data, shape, device)
    }

    /// A tensor of uniform numbers in `[low, high)`.
    pub fn uniform_tensor(
        &mut self,
        shape: impl Into<Shape>,
        low: f64,
        high: f64,
        device: &Device,
    ) -> Result<Tensor> {
        let shape = shape.into();
        let data: Vec<f32> = (0..shape.elem_count()).map(|_| self.uniform(low, high) as f32).collect();
        Tensor::from_vec(data, shape, device)
    }

    /// The underlying generator, for crates that take one.
    pub fn rng(&mut self) -> &mut impl Rng {
        &mut self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_depends_on_seed_and_name_only() {
        let draw = |seed, name| RngStream::new(seed, name).normal();
        assert_eq!(draw(1, "a"), draw(1, "a"));
        assert_ne!(draw(1, "a"), draw(2, "a"));
        assert_ne!(draw(1, "a"), draw(1, "b"));
    }

    #[test]
    fn a_permutation_holds_every_index_once() {
        let mut order = RngStream::new(0, "p").permutation(100);
        assert_ne!(order, (0..100).collect::<Vec<_>>());
        order.sort_unstable();
        assert_eq!(order, (0..100).collect::<Vec<_>>());
    }
}
