//! Which elements a forward pass drops.

use candle_core::{Result, Tensor};

use crate::kernel::dropout::{dropout, mix};

/// Rate and random stream of one forward pass. The stream branches at every layer and place, so that what is
/// dropped is a function of the seed and the place alone.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Dropout {
    rate: f64,
    seed: u64,
}

impl Dropout {
    /// Nothing is dropped.
    pub const NONE: Self = Self { rate: 0.0, seed: 0 };

    /// Drops at `rate`. `seed` should be another one in every step and micro-batch: [`Dropout::branch`] of the
    /// run's seed.
    pub const fn new(rate: f64, seed: u64) -> Self {
        Self { rate, seed }
    }

    /// The stream of branch `number`.
    #[must_use]
    pub fn branch(self, number: u64) -> Self {
        Self { seed: mix(mix(self.seed) ^ number), ..self }
    }

    /// Whether nothing is dropped.
    pub fn is_none(&self) -> bool {
        self.rate == 0.0
    }

    /// `x` with elements dropped, as place `number` of this stream says.
    ///
    /// # Errors
    /// A rate outside [0, 1).
    pub fn apply(&self, x: &Tensor, number: u64) -> Result<Tensor> {
        dropout(x, self.rate, self.branch(number).seed)
    }
}
