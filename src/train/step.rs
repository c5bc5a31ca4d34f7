//! One training step: forward, loss, backward, update.

use candle_core::Result;

use super::optim::{Gradients, Optimizer, OptimizerConfig};
use super::schedule::{Schedule, StepRates};
use effattn_kernel::profile::{self, StepPart, none};
use effattn_kernel::{nan_trace, tape};
use effattn_model::family::Loss;
use effattn_model::nn::params::Params;

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
    pub rates: StepRates,
}

/// Why a step was not made.
#[derive(Debug, thiserror::Error)]
pub enum StepError {
    /// The loss or a gradient is not finite.
    #[error("step {step}: {what}")]
    Diverged {
        /// Number of the step, from 0.
        step: u64,
        /// What is not finite, and the first operation that is not.
        what: String,
    },
    /// The step failed.
    #[error(transparent)]
    Failed(#[from] candle_core::Error),
}

impl Trainer {
    /// Starts at step 0.
    pub fn new(params: Params, optimizer: impl Into<OptimizerConfig>, schedule: Schedule) -> Result<Self> {
        let optimizer = Optimizer::new(optimizer, &params)?;
        Ok(Self { params, optimizer, schedule })
    }

    /// Lets only the parameters decay that `decays` names; without this, all do.
    pub fn decay_only(mut self, decays: &dyn Fn(&str) -> bool) -> Result<Self> {
        self.optimizer.decay_only(&self.params, decays)?;
        Ok(self)
    }

    /// Goes on where `optimizer` stands.
    pub fn restore(params: Params, optimizer: Optimizer, schedule: Schedule) -> Self {
        Self { params, optimizer, schedule }
    }

    /// One step on the loss that `loss` computes with the current weights, on this thread. Its graph ends here.
    ///
    /// # Errors
    /// A loss or a gradient that is not finite: then nothing is updated, and `loss` is computed again to find the
    /// first operation that is not. Whatever `loss` fails with.
    pub fn step(&mut self, mut loss: impl FnMut() -> Result<Loss>) -> std::result::Result<Step, StepError> {
        let (sum, count, gradients) = self.part(&mut loss)?;
        self.update((sum, count), &gradients)
    }

    /// One step on the losses of `parts` micro-batches, computed one after another: the memory of one, the update of all.
    /// Sums and counts are added, so that the update is the mean over everything however it is cut.
    pub fn accumulate(
        &mut self,
        parts: usize,
        mut loss: impl FnMut(usize) -> Result<Loss>,
    ) -> std::result::Result<Step, StepError> {
        let (mut sum, mut count, mut gradients) = (0.0, 0.0, Gradients::default());
        for part in 0..parts {
            let (more, of, fresh) = self.part(&mut || loss(part))?;
            (sum, count) = (sum + more, count + of);
            gradients.add(fresh)?;
        }
        self.update((sum, count), &gradients)
    }

    /// Sum and count of the loss of one micro-batch, and the gradients of the sum.
    fn part(
        &self,
        loss: &mut dyn FnMut() -> Result<Loss>,
    ) -> std::result::Result<(f64, f64, Gradients), StepError> {
        let made = self.compute(loss).map_err(|error| match nan_trace::found() {
            Some(what) => self.diverged(what),
            None => error.into(),
        });
        let (value, count, gradients) = made?;
        let what = if value.is_finite() {
            match profile::time("check of gradients", StepPart::Update, none, || {
                gradients.not_finite(&self.params)
            })? {
                None => return Ok((value, count, gradients)),
                Some(name) => format!("the gradient of {name} is not finite"),
            }
        } else {
            format!("the loss is {value}")
        };
        drop(gradients);
        let _ = nan_trace::traced(|| self.compute(loss)); // ends at the first operation that is not finite
        let first = nan_trace::found().map_or_else(String::new, |first| format!("; first in {first}"));
        Err(self.diverged(what + &first))
    }

    fn compute(&self, loss: &mut dyn FnMut() -> Result<Loss>) -> Result<(f64, f64, Gradients)> {
        let mut count = 0.0;
        let (loss, tape) = profile::time(profile::OTHER, StepPart::Forward, none, || {
            tape::record(|| {
                loss().map(|loss| {
                    count = loss.count;
                    loss.sum
                })
            })
        })?;
        let value = f64::from(loss.to_scalar::<f32>()?);
        if !value.is_finite() && !nan_trace::is_on() {
            return Ok((value, count, Gradients::default()));
        }
        let mut gradients = profile::time(profile::OTHER, StepPart::Backward, none, || tape.backward(&loss))?;
        Ok((value, count, Gradients::take(&self.params, &mut gradients)))
    }

    fn diverged(&self, what: String) -> StepError {
        StepError::Diverged { step: self.optimizer.updates(), what }
    }

    /// A batch in which nothing counts changes nothing but the number of updates.
    fn update(
        &mut self,
        (sum, count): (f64, f64),
        gradients: &Gradients,
    ) -> std::result::Result<Step, StepError> {
        let number = self.optimizer.updates();
        let rates = self.schedule.at(number);
        let update = || self.optimizer.update(&self.params, gradients, rates, 1.0 / count);
        profile::time("optimizer", StepPart::Update, none, update)?;
        Ok(Step { number, loss: sum / count, rates })
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
