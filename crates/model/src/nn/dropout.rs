//! Which elements a forward pass drops.

use candle_core::{Result, Tensor};

use effattn_kernel::dropout::{AttentionDropout, dropout, mix};
use effattn_kernel::kept_rows::KeptRows;

/// The random stream of one step, for whatever rates a model drops at. It branches by step and micro-batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DropoutRng(u64);

impl DropoutRng {
    /// The stream of a run.
    pub const fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The stream of branch `number`.
    #[must_use]
    pub fn branch(self, number: u64) -> Self {
        Self(mix(mix(self.0) ^ number))
    }

    /// Dropout at `rate`, drawn from it.
    pub const fn at(self, rate: f64) -> Dropout<'static> {
        Dropout::new(rate, self.0)
    }
}

/// Rates and random stream of one forward pass. The stream branches at every layer and place, so that what is
/// dropped is a function of the seed and the place alone.
#[derive(Clone, Copy, Debug)]
pub struct Dropout<'a> {
    rate: f64,
    /// That of attention weights.
    attention: f64,
    seed: u64,
    /// The rows of the batch that activations have; absent: all.
    rows: Option<&'a KeptRows>,
}

impl Default for Dropout<'_> {
    fn default() -> Self {
        Self::NONE
    }
}

impl Dropout<'_> {
    /// Nothing is dropped.
    pub const NONE: Self = Self::new(0.0, 0);

    /// Drops hidden activations at `rate`. `seed` should be another one in every step and micro-batch: [`Dropout::branch`] of the
    /// run's seed.
    pub const fn new(rate: f64, seed: u64) -> Self {
        Self { rate, attention: 0.0, seed, rows: None }
    }

    /// The same, and attention weights at `rate`.
    #[must_use]
    pub const fn with_attention(self, rate: f64) -> Self {
        Self { attention: rate, ..self }
    }

    /// The same for activations that have only `rows` of the batch: what is dropped of them stays the same.
    #[must_use]
    pub const fn of_rows<'b>(&self, rows: Option<&'b KeptRows>) -> Dropout<'b> {
        Dropout { rate: self.rate, attention: self.attention, seed: self.seed, rows }
    }

    /// The stream of branch `number`.
    #[must_use]
    pub fn branch(self, number: u64) -> Self {
        Self { seed: mix(mix(self.seed) ^ number), ..self }
    }

    /// The same stream at another rate; where nothing is dropped, nothing still is.
    #[must_use]
    pub fn with_rate(self, rate: f64) -> Self {
        if self.is_none() { self } else { Self { rate, ..self } }
    }

    /// Dropout of attention weights, as place `number` of this stream says.
    pub fn weights(&self, number: u64) -> Result<Option<AttentionDropout>> {
        AttentionDropout::new(self.attention, self.branch(number).seed)
    }

    /// Whether no hidden activation is dropped.
    pub fn is_none(&self) -> bool {
        self.rate == 0.0
    }

    /// `x` with elements dropped, as place `number` of this stream says.
    pub fn apply(&self, x: &Tensor, number: u64) -> Result<Tensor> {
        dropout(x, self.rate, self.branch(number).seed, self.rows)
    }
}
