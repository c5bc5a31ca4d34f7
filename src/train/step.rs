//! One training step: forward, loss, backward, update.

use candle_core::{Error, Result, Tensor};

use super::optim::{AdamW, Gradients, Optimizer};
use super::schedule::{Rates, Schedule};
use crate::kernel::loss::cross_entropy;
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
            let loss = loss(part)?;
            let value = f64::from(loss.to_scalar::<f32>()?);
            if !value.is_finite() {
                return Err(StepError::Diverged { step: number, loss: value });
            }
            total += value;
            gradients.add(Gradients::take(&self.params, &mut loss.backward()?))?;
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

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;
    use crate::attention::find;
    use crate::attention::knobs::Knobs;
    use crate::model::preset::Preset;
    use crate::model::{Backbone, Classifier, ModelConfig};
    use crate::nn::params::Builder;

    const ADAMW: AdamW = AdamW { beta2: 0.98, eps: 1e-9, weight_decay: 0.0, clip: None };
    const CONSTANT: Schedule = Schedule::WarmupConstant { peak_lr: 1e-3, warmup: 1 };

    fn model(mechanism: &str) -> (Classifier, Trainer) {
        let entry = find(mechanism).unwrap();
        let form = Preset::find("ls-lra").unwrap().form(Some("listops"), mechanism).unwrap();
        let config = ModelConfig {
            backbone: Backbone::new(2, 16, 2, 32),
            vocab: 20,
            ..form.model(entry, Knobs::defaults(entry.knobs), 24)
        };
        let builder = Builder::seeded(7, &Device::Cpu, true);
        let model = Classifier::new(&config, &builder).unwrap();
        (model, Trainer::new(builder.finish(), ADAMW, CONSTANT).unwrap())
    }

    /// Ids below 12 only: rows 12..20 of the embedding are never used (but for the class id, 19).
    fn batch(from: u32, rows: usize) -> (Tensor, Tensor) {
        let ids: Vec<u32> = (0..rows as u32 * 24).map(|i| (i * 7 + from + i / 5) % 12).collect();
        let labels: Vec<u32> = (0..rows as u32).map(|i| (i + from) % 10).collect();
        let ids = Tensor::from_vec(ids, (rows, 24), &Device::Cpu).unwrap();
        (ids, Tensor::from_vec(labels, rows, &Device::Cpu).unwrap())
    }

    fn loss(model: &Classifier, (ids, labels): &(Tensor, Tensor)) -> Result<Tensor> {
        let mask = ids.ne(0u32)?.to_dtype(candle_core::DType::F32)?;
        classification_loss(&model.forward(ids, Some(&mask))?, labels)
    }

    #[test]
    fn loss_falls_and_unused_rows_stay_exactly() {
        for mechanism in ["full", "ls"] {
            let (model, mut trainer) = model(mechanism);
            let table = |trainer: &Trainer| trainer.params().value("token_embedding.weight").unwrap();
            let before = table(&trainer);
            let data = batch(0, 4);
            let losses: Vec<f64> =
                (0..30).map(|_| trainer.step(loss(&model, &data).unwrap()).unwrap().loss).collect();
            assert!(losses[29] < 0.7 * losses[0], "{mechanism}: {losses:?}");
            let rows = |x: &Tensor| x.narrow(0, 12, 7).unwrap().to_vec2::<f32>().unwrap();
            assert_eq!(rows(&before), rows(&table(&trainer)), "{mechanism}");
        }
    }

    #[test]
    fn micro_batches_make_the_update_of_the_whole_batch() {
        let (whole_model, mut whole) = model("full");
        let (parts_model, mut parts) = model("full");
        for step in 0..3 {
            let (ids, labels) = batch(step, 4);
            let a = whole.step(loss(&whole_model, &(ids.clone(), labels.clone())).unwrap()).unwrap();
            let part = |i: usize| {
                loss(&parts_model, &(ids.narrow(0, 2 * i, 2)?.contiguous()?, labels.narrow(0, 2 * i, 2)?))
            };
            let b = parts.accumulate(2, part).unwrap();
            assert!((a.loss - b.loss).abs() < 1e-6 * a.loss);
            assert_eq!(a.rates, b.rates);
        }
        let value = |trainer: &Trainer| {
            trainer
                .params()
                .value("head.fc1.weight")
                .unwrap()
                .flatten_all()
                .unwrap()
                .to_vec1::<f32>()
                .unwrap()
        };
        for (a, b) in value(&whole).iter().zip(value(&parts)) {
            assert!((a - b).abs() < 1e-4, "{a} {b}");
        }
    }

    #[test]
    fn a_model_that_shares_parameters_follows_the_training() {
        let (model, mut trainer) = model("full");
        let entry = find("full").unwrap();
        let form = Preset::find("ls-lra").unwrap().form(Some("listops"), "full").unwrap();
        let config = ModelConfig {
            backbone: Backbone::new(2, 16, 2, 32),
            vocab: 20,
            ..form.model(entry, Knobs::defaults(entry.knobs), 24)
        };
        let shared = Classifier::new(&config, &Builder::sharing(trainer.params(), &Device::Cpu)).unwrap();
        let data = batch(0, 2);
        let logits = |model: &Classifier| model.forward(&data.0, None).unwrap();
        let before = logits(&shared).to_vec2::<f32>().unwrap();
        trainer.step(loss(&model, &data).unwrap()).unwrap();
        let after = logits(&shared).to_vec2::<f32>().unwrap();
        assert_eq!(after, logits(&model).to_vec2::<f32>().unwrap());
        assert_ne!(before, after);
        assert!(!logits(&shared).track_op() && logits(&model).track_op());
    }

    #[test]
    fn a_loss_that_is_not_finite_stops_before_the_update() {
        let (model, mut trainer) = model("full");
        let before = trainer.params().value("head.fc2.bias").unwrap().to_vec1::<f32>().unwrap();
        let loss = (loss(&model, &batch(0, 2)).unwrap() * f64::NAN).unwrap();
        let error = trainer.step(loss).unwrap_err();
        assert!(matches!(error, StepError::Diverged { step: 0, .. }), "{error}");
        assert_eq!(trainer.params().value("head.fc2.bias").unwrap().to_vec1::<f32>().unwrap(), before);
        assert_eq!(trainer.optimizer().updates(), 0);
    }
}
