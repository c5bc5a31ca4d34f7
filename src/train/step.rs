//! One training step: forward, loss, backward, update.

use candle_core::{Error, Result, Tensor};

use super::optim::{AdamW, Gradients, Optimizer};
use super::schedule::{Rates, Schedule};
use crate::kernel::loss::cross_entropy;
use crate::kernel::tape;
use crate::nn::params::Params;

/// The parameters of a model under training, with optimizer and schedule.
///
/// Nothing of a step's graph is kept after it.
pub struct Trainer {
    params: Params,
    optimizer: Optimizer,
    schedule: Schedule,
}

/// What a step reports.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Step {
    /// Number of the step, from 0.
    pub number: u64,
    /// Loss before the update.
    pub loss: f64,
    /// What the update used.
    pub rates: Rates,
}

/// Why a step was not made.
#[derive(Debug, thiserror::Error)]
pub enum StepError {
    /// The loss is not finite.
    #[error("the loss of step {step} is {loss}")]
    Diverged {
        /// Number of the step, from 0.
        step: u64,
        /// The loss.
        loss: f64,
    },
    /// The step failed.
    #[error(transparent)]
    Failed(#[from] candle_core::Error),
}

impl Trainer {
    /// Starts at step 0.
    ///
    /// # Errors
    /// Failures of the device.
    pub fn new(params: Params, optimizer: AdamW, schedule: Schedule) -> Result<Self> {
        let optimizer = Optimizer::new(optimizer, &params)?;
        Ok(Self { params, optimizer, schedule })
    }

    /// Goes on where `optimizer` stands.
    pub fn restore(params: Params, optimizer: Optimizer, schedule: Schedule) -> Self {
        Self { params, optimizer, schedule }
    }

    /// One step on `loss`, a scalar computed with the current weights. Its graph ends here.
    ///
    /// # Errors
    /// A loss that is not finite: then nothing is updated.
    pub fn step(&mut self, loss: Tensor) -> std::result::Result<Step, StepError> {
        let mut loss = Some(loss);
        self.accumulate(1, |_| loss.take().ok_or_else(|| Error::msg("one loss makes one micro-batch")))
    }

    /// One step on the mean of the losses of `parts` micro-batches of equal size, computed one after another:
    /// the memory of one, the update of all.
    ///
    /// # Errors
    /// As [`Self::step`], and whatever `loss` fails with.
    pub fn accumulate(
        &mut self,
        parts: usize,
        mut loss: impl FnMut(usize) -> Result<Tensor>,
    ) -> std::result::Result<Step, StepError> {
        let number = self.optimizer.updates();
        let rates = self.schedule.at(number);
        let mut gradients = Gradients::default();
        let mut total = 0.0;
        for part in 0..parts {
            let (loss, tape) = tape::record(|| loss(part))?;
            let value = f64::from(loss.to_scalar::<f32>()?);
            if !value.is_finite() {
                return Err(StepError::Diverged { step: number, loss: value });
            }
            total += value;
            gradients.add(Gradients::take(&self.params, &mut tape.backward(&loss)?))?;
        }
        self.optimizer.update(&self.params, &gradients, rates, 1.0 / parts as f64)?;
        Ok(Step { number, loss: total / parts as f64, rates })
    }

    /// The parameters.
    pub fn params(&self) -> &Params {
        &self.params
    }

    /// The optimizer.
    pub fn optimizer(&self) -> &Optimizer {
        &self.optimizer
    }
}

/// Mean cross entropy of `logits` [b, classes] with `labels` [b] (u32).
///
/// # Errors
/// Labels out of range.
pub fn classification_loss(logits: &Tensor, labels: &Tensor) -> Result<Tensor> {
    cross_entropy(logits, labels)?.mean_all()
}
