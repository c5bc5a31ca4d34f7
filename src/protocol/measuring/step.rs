//! What `speed` and `memory` measure: one step of a model of any family on made-up input.
//!
//! A step is forward to the outputs (infer), forward, loss, backward and AdamW (train), or the next token of every sequence
//! behind a state (decode), on batches made beforehand, with the device synchronised before and after.

use std::time::Instant;

use crate::protocol::model_spec::{ModelSpec, compute_as};
use crate::run::outcome::{self, CellFailure};
use crate::train::optim::AdamW;
use crate::train::schedule::Schedule;
use crate::train::step::{StepError, Trainer};
use candle_core::Device;
use effattn_kernel::cpu::gemm;
use effattn_kernel::device::Backend;
use effattn_kernel::profile::{self, StepPart};
use effattn_model::batch::{Batch, SyntheticInput};
use effattn_model::family::{Model, ResolveError};
use effattn_model::nn::dropout::DropoutRng;
use effattn_model::nn::params::ParamBuilder;
use effattn_record::config::settings::{DtypeName, KernelName};
use effattn_record::{Outcome, Pass};

/// Optimizer and schedule of the Long Range Arena's text task.
const OPTIMIZER: AdamW = AdamW { beta2: 0.98, eps: 1e-9, weight_decay: 0.1, clip: None };
const SCHEDULE: Schedule = Schedule::Rsqrt { base_lr: 0.05, warmup: 8000 };

/// A model with its inputs, ready to step.
pub struct MeasuredStep {
    backend: Backend,
    net: Box<dyn Model>,
    trainer: Option<Trainer>,
    batches: Vec<Batch>,
    noise: DropoutRng,
    next: usize,
    baseline: Option<u64>,
    kernel: KernelName,
    dtype: DtypeName,
}

impl MeasuredStep {
    /// Builds the model of `spec` with inputs cut from `text`.
    pub fn open(spec: &ModelSpec, text: &[u8]) -> Result<Self, CellFailure> {
        let refuse = |error: ResolveError| match error {
            ResolveError::Invalid(reason) => CellFailure::new(Outcome::Failed, reason),
            ResolveError::Unsupported(reason) => CellFailure::new(Outcome::Unsupported, reason),
        };
        let resolved = spec.choice().and_then(|choice| spec.resolve_measured(&choice)).map_err(refuse)?;
        let backend = Backend::open(spec.device)
            .map_err(|error| CellFailure::new(Outcome::Unsupported, error.to_string()))?;
        let baseline = backend.live();
        gemm::warm(); // what a thread keeps for products belongs to the peak, whichever thread makes the first
        let (kernel, dtype) = (spec.kernel, spec.dtype);
        compute_as(kernel, dtype);
        let build = || -> candle_core::Result<_> {
            let train = spec.pass == Pass::Train;
            let builder = ParamBuilder::seeded(spec.seed, backend.device(), train);
            let batch = spec.batch as usize;
            let net = match spec.pass {
                Pass::Infer | Pass::Train => resolved.build_measured(&builder, batch)?,
                Pass::Decode => match resolved.build_decoder(&builder, batch)? {
                    Some(net) => net,
                    None => {
                        candle_core::bail!("{} cannot generate one token at a time", spec.model)
                    }
                },
            };
            let params = builder.finish();
            let trainer = if train {
                let trainer = Trainer::new(params, OPTIMIZER, SCHEDULE)?;
                Some(trainer.decay_only(&|name| resolved.decays(name))?)
            } else {
                None
            };
            let len = if spec.pass == Pass::Decode { 2 } else { spec.len as usize };
            let wanted = SyntheticInput { text, batch, len, seed: spec.seed };
            Ok((net, trainer, resolved.synthetic_batches(&wanted, backend.device())?))
        };
        let (net, trainer, batches) = build().map_err(|error| outcome::of_error(&error))?;
        let noise = DropoutRng::new(spec.seed);
        Ok(Self { backend, net, trainer, batches, noise, next: 0, baseline, kernel, dtype })
    }

    /// One step; seconds from the synchronised start to the synchronised end.
    pub fn step(&mut self) -> Result<f64, CellFailure> {
        compute_as(self.kernel, self.dtype);
        let batch = &self.batches[self.next % self.batches.len()];
        self.next += 1;
        let failed = |error: candle_core::Error| outcome::of_error(&error);
        self.backend.sync().map_err(failed)?;
        let start = Instant::now();
        match &mut self.trainer {
            Some(trainer) => {
                let loss = || self.net.loss(batch, self.noise.branch(self.next as u64));
                trainer.step(loss).map_err(|error| match error {
                    StepError::Diverged { .. } => CellFailure::new(Outcome::Diverged, error.to_string()),
                    StepError::Failed(error) => outcome::of_error(&error),
                })?;
                self.backend.sync().map_err(failed)?;
                Ok(start.elapsed().as_secs_f64())
            }
            None => {
                let forward = || self.net.forward(batch);
                let outputs = profile::time(profile::OTHER, StepPart::Forward, profile::none, forward);
                let outputs = outputs.map_err(failed)?;
                self.backend.sync().map_err(failed)?;
                let seconds = start.elapsed().as_secs_f64();
                let sum = outputs.sum_all().and_then(|sum| sum.to_scalar::<f32>()).map_err(failed)?;
                if sum.is_finite() {
                    return Ok(seconds);
                }
                Err(CellFailure::new(Outcome::Diverged, "the logits are not finite"))
            }
        }
    }

    /// Where the steps are computed.
    pub fn device(&self) -> &Device {
        self.backend.device()
    }

    /// Forgets the peak so far.
    pub fn reset_peak(&self) {
        self.backend.reset_peak();
    }

    /// Highest live bytes since [`Self::reset_peak`], above what was there before the model was built; none
    /// where the device's memory is not counted.
    pub fn peak_bytes(&self) -> Option<u64> {
        Some(self.backend.peak()?.saturating_sub(self.baseline?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use effattn_kernel::device::alloc;
    use effattn_model::family::{Architecture, SizeOverrides};
    use effattn_record::config::settings::DeviceName;

    fn spec(model: &str, pass: Pass) -> ModelSpec {
        ModelSpec {
            model: model.to_owned(),
            preset: "ls-lra".to_owned(),
            sizes: SizeOverrides::default(),
            batch: 3,
            len: 37,
            pass,
            seed: 1,
            device: DeviceName::Cpu,
            dtype: DtypeName::F32,
            kernel: KernelName::Fused,
        }
    }

    fn resolve(spec: &ModelSpec) -> Result<Box<dyn Architecture>, ResolveError> {
        spec.resolve_measured(&spec.choice()?)
    }

    #[test]
    fn both_passes_step_on_short_text() {
        for pass in [Pass::Infer, Pass::Train] {
            for text in [&b""[..], b"x", b"a text that is read again and again"] {
                let mut step = MeasuredStep::open(&spec("ls:w=4,r=2", pass), text).unwrap();
                assert!(step.step().unwrap() > 0.0 && step.step().unwrap() > 0.0);
            }
        }
    }

    #[test]
    fn sizes_that_do_not_fit_are_the_users_mistake() {
        let mut odd = spec("full", Pass::Infer);
        odd.sizes.heads = Some(3);
        let error = resolve(&odd).err().unwrap();
        assert!(matches!(&error, ResolveError::Invalid(reason) if reason.contains("3 heads do not divide")));
        odd.preset = "ls-lr".to_owned();
        assert!(resolve(&odd).err().unwrap().to_string().contains("did you mean ls-lra?"));
        let causal = resolve(&spec("transformer-xl", Pass::Infer)).err().unwrap();
        assert!(matches!(causal, ResolveError::Unsupported(_)));
    }

    #[test]
    fn rows_know_costs_beforehand_without_memory() {
        let big = ModelSpec { len: 1 << 16, ..spec("synthesizer", Pass::Train) };
        let live = alloc::live();
        let config = resolve(&big).unwrap();
        let row = big.row("speed", 2, Some(config.as_ref()));
        assert!(row.params.unwrap() > 1 << 30 && row.flops.unwrap() > 0, "{row:?}");
        assert!(alloc::live() < live + (64 << 20));
        assert_eq!(row.bytes.unwrap(), 12 * row.params.unwrap());
    }
}
