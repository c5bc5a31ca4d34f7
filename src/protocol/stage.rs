//! The model that `speed` and `memory` measure: a byte-level text classifier on real text.
//!
//! A step is forward to logits (infer), or forward, loss, backward and AdamW (train), on inputs made
//! beforehand, with the device synchronised before and after.

use std::time::Instant;

use candle_core::Tensor;
use serde::{Deserialize, Serialize};

use super::grid::{Pick, PlanError};
use super::subject::{Net, Subject, inputs};
use crate::attention::choose::choose;
use crate::config::settings::{DeviceName, DtypeName, KernelName, Settings};
use crate::config::unknown;
use crate::data;
use crate::device::{Backend, set_tf32};
use crate::kernel::cpu::products::{Products, set_products};
use crate::kernel::{self, Mode};
use crate::model::language_preset::LanguagePreset;
use crate::model::preset::{Preset, TABLE};
use crate::model::{Backbone, ConfigError, ModelConfig, Pooling};
use crate::nn::params::Builder;
use crate::record::{Outcome, Pass, Row};
use crate::run::outcome::{self, Ending};
use crate::train::optim::AdamW;
use crate::train::schedule::Schedule;
use crate::train::step::{StepError, Trainer};

/// Optimizer and schedule of the Long Range Arena's text task.
const OPTIMIZER: AdamW = AdamW { beta2: 0.98, eps: 1e-9, weight_decay: 0.1, clip: None };
const SCHEDULE: Schedule = Schedule::Rsqrt { base_lr: 0.05, warmup: 8000 };

/// What a worker builds: everything that defines one model and its step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Spec {
    /// Mechanism and knobs, as on the command line.
    pub model: String,
    /// Preset.
    pub preset: String,
    /// Sizes instead of the preset's.
    pub sizes: Sizes,
    /// Samples per step.
    pub batch: u64,
    /// Length.
    pub len: u64,
    /// Inference or training.
    pub pass: Pass,
    /// Seed of the weights and of where the text is cut.
    pub seed: u64,
    /// Where to compute.
    pub device: DeviceName,
    /// Number format.
    pub dtype: DtypeName,
    /// Fused kernels or plain operations.
    pub kernel: KernelName,
}

/// Sizes that replace the preset's.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Sizes {
    layers: Option<u64>,
    width: Option<u64>,
    heads: Option<u64>,
    ffn: Option<u64>,
    pooling: Option<String>,
    #[serde(default)]
    dropout: Option<f64>,
}

/// Why there is no model for a [`Spec`].
#[derive(Debug, thiserror::Error)]
pub enum SpecError {
    /// The user asked for something that nobody has: a usage error.
    #[error("{0}")]
    Wrong(String),
    /// This mechanism cannot do it: a row that says `unsupported`.
    #[error("{0}")]
    Unsupported(String),
}

/// Why a number format cannot be had, with what to do instead.
fn refused(dtype: DtypeName, kernel: KernelName, device: DeviceName) -> Option<String> {
    let bf16 = "bf16 means products of bf16 operands in the fused kernels of the CPU";
    match dtype {
        DtypeName::F32 => None,
        DtypeName::F16 => Some("--dtype f16: there are no kernels for f16; use bf16 or f32".to_owned()),
        DtypeName::Tf32 if !matches!(device, DeviceName::Cuda(_)) => {
            Some(format!("--dtype tf32: {device} has no TF32; it is a format of CUDA devices"))
        }
        DtypeName::Bf16 if kernel != KernelName::Fused => {
            Some(format!("--dtype bf16: {bf16}; leave --kernel {kernel} out, or the number format"))
        }
        DtypeName::Bf16 if device != DeviceName::Cpu => {
            Some(format!("--dtype bf16: {bf16}; leave --device {device} out, or the number format"))
        }
        DtypeName::Bf16 | DtypeName::Tf32 => None,
    }
}

/// Makes this thread (as to the number format of products: this process) compute as a cell asks.
pub fn compute_as(kernel: KernelName, dtype: DtypeName) {
    kernel::set_mode(match kernel {
        KernelName::Fused => Mode::Fused,
        KernelName::Composed => Mode::Composed,
    });
    set_products(match dtype {
        DtypeName::F32 | DtypeName::F16 | DtypeName::Tf32 => Products::F32,
        DtypeName::Bf16 => Products::Bf16,
    });
    set_tf32(dtype == DtypeName::Tf32);
}

/// What was built for `pick`, or why its row says `unsupported`.
///
/// # Errors
/// The user's mistake.
pub fn settle<T>(pick: &Pick, built: Result<T, SpecError>) -> Result<(Option<T>, Option<String>), PlanError> {
    match (&pick.choice, built) {
        (Err(reason), _) => Ok((None, Some(reason.clone()))),
        (Ok(_), Ok(built)) => Ok((Some(built), None)),
        (Ok(_), Err(SpecError::Unsupported(reason))) => Ok((None, Some(reason))),
        (Ok(_), Err(SpecError::Wrong(reason))) => Err(PlanError(reason)),
    }
}

impl Spec {
    /// The specification of one cell.
    ///
    /// # Errors
    /// Settings that name nothing.
    pub fn new(pick: &Pick, len: u64, batch: u64, pass: Pass, seed: u64) -> Result<Self, PlanError> {
        let settings = &pick.settings;
        let label = pick.choice.as_ref().map_or_else(|_| pick.model.clone(), |choice| choice.label());
        let preset = settings.preset.clone().unwrap_or_else(|| "lra-repo".to_owned());
        let dtype = settings.dtype.unwrap_or_default();
        let (device, kernel) = (settings.device.unwrap_or_default(), settings.kernel.unwrap_or_default());
        if let Some(reason) = refused(dtype, kernel, device) {
            return Err(PlanError(reason));
        }
        Ok(Self {
            model: label,
            preset,
            sizes: Sizes::of(settings),
            batch,
            len,
            pass,
            seed,
            device,
            dtype,
            kernel,
        })
    }

    /// The preset's model for `task`.
    ///
    /// # Errors
    /// Unknown names, impossible sizes, a mechanism that cannot do this, a preset without this task.
    pub fn config_for(&self, task: Option<&str>) -> Result<ModelConfig, SpecError> {
        let wrong = |error: &dyn ToString| SpecError::Wrong(error.to_string());
        let models = self.model.parse().map_err(|error| wrong(&error))?;
        let choices = choose(&models).map_err(|error| wrong(&error))?;
        let [choice] = choices.as_slice() else { return Err(wrong(&"one mechanism is built at a time")) };
        let preset = Preset::find(&self.preset);
        let names = TABLE.iter().map(|preset| preset.name);
        let preset = preset.ok_or_else(|| SpecError::Wrong(unknown("preset", &self.preset, names)))?;
        let set = task.and_then(|task| data::task(task).ok());
        let mut form = match (preset.form(task, choice.entry.name), set) {
            (Ok(form), _) => form,
            // a data set that the preset's source does not have: the sizes without a task, the ids and classes of the set
            (Err(_), Some((set, examples))) => {
                preset.form_for((examples.vocabulary, examples.classes, examples.len), set.kind.documents())
            }
            (Err(error), None) => return Err(wrong(&error)),
        };
        self.sizes.apply(&mut form.backbone);
        let sizes = &self.sizes;
        if let Some(name) = &sizes.pooling {
            let pooling = Pooling::find(name);
            let names = Pooling::ALL.iter().map(|pooling| pooling.name());
            form.pooling = Some(pooling.ok_or_else(|| SpecError::Wrong(unknown("pooling", name, names)))?);
        }
        let config = form.model(choice.entry, choice.knobs.clone(), self.len as usize);
        match config.validate() {
            Ok(()) => Ok(config),
            Err(error @ (ConfigError::Unsupported { .. } | ConfigError::Knobs { .. })) => {
                Err(SpecError::Unsupported(error.to_string()))
            }
            Err(error) => Err(wrong(&error)),
        }
    }

    /// The row of this cell with everything that is known without running it.
    pub fn row(&self, protocol: &str, threads: usize, subject: Option<&Subject>) -> Row {
        let (model, variant) = match self.model.split_once(':') {
            Some((model, variant)) => (model, Some(variant.to_owned())),
            None => (self.model.as_str(), None),
        };
        let task = if LanguagePreset::find(&self.preset).is_some() { "charlm" } else { "text" };
        let mut row = Row {
            task: Some(task.to_owned()),
            variant,
            preset: Some(self.preset.clone()),
            device: self.device.to_string(),
            dtype: self.dtype.to_string(),
            kernel: self.kernel.to_string(),
            threads: Some(threads as u64),
            batch: Some(self.batch),
            len: Some(self.len),
            pass: Some(self.pass),
            seed: Some(self.seed),
            ..Row::new(protocol, model)
        };
        if let Some(subject) = subject {
            let len = self.len as usize;
            let flops = subject.flops(len);
            row.flops = Some(flops);
            row.flops_2x = Some(2 * flops);
            row.core_macs = Some(subject.core_macs(self.batch as usize, len));
            row.state_bytes = Some(subject.state_bytes(len)).filter(|bytes| *bytes > 0);
            row.params = subject.parameters();
            let copies = if self.pass == Pass::Train { 3 } else { 1 }; // weights, and AdamW's two moments
            row.bytes = row.params.map(|count| 4 * copies * count);
            row.simulated = Some(false);
        }
        row
    }

    /// Name of the cell within its plan.
    pub fn key(&self) -> String {
        format!("{} n{} b{} {} s{}", self.model, self.len, self.batch, self.pass, self.seed)
    }

    /// Multiply-adds of one step, roughly: backward costs two forwards.
    pub fn step_flops(&self, subject: &Subject) -> f64 {
        let passes = if self.pass == Pass::Train { 3.0 } else { 1.0 };
        passes * subject.flops(self.len as usize) as f64 * self.batch as f64
    }
}

impl Sizes {
    /// Those that `settings` name.
    pub fn of(settings: &Settings) -> Self {
        Self {
            layers: settings.layers,
            width: settings.width,
            heads: settings.heads,
            ffn: settings.ffn,
            pooling: settings.pooling.clone(),
            dropout: settings.dropout,
        }
    }

    /// Puts these sizes in the place of the preset's.
    pub fn apply(&self, backbone: &mut Backbone) {
        let set = |place: &mut usize, value: Option<u64>| {
            if let Some(value) = value {
                *place = value as usize;
            }
        };
        set(&mut backbone.layers, self.layers);
        set(&mut backbone.width, self.width);
        set(&mut backbone.inner, self.width);
        set(&mut backbone.heads, self.heads);
        set(&mut backbone.ffn, self.ffn);
        backbone.dropout = self.dropout.unwrap_or(backbone.dropout);
    }
}

/// A model with its inputs, ready to step.
pub struct Stage {
    backend: Backend,
    net: Net,
    trainer: Option<Trainer>,
    inputs: Vec<(Tensor, Tensor)>,
    next: usize,
    baseline: Option<u64>,
    kernel: KernelName,
    dtype: DtypeName,
}

impl Stage {
    /// Builds the model of `spec` with inputs cut from `text`.
    ///
    /// # Errors
    /// How the cell ended instead.
    pub fn open(spec: &Spec, text: &[u8]) -> Result<Self, Ending> {
        let refuse = |error: SpecError| match error {
            SpecError::Wrong(reason) => Ending::new(Outcome::Failed, reason),
            SpecError::Unsupported(reason) => Ending::new(Outcome::Unsupported, reason),
        };
        let subject = spec.subject().map_err(refuse)?;
        let backend = Backend::open(spec.device)
            .map_err(|error| Ending::new(Outcome::Unsupported, error.to_string()))?;
        let baseline = backend.live();
        let (kernel, dtype) = (spec.kernel, spec.dtype);
        compute_as(kernel, dtype);
        let build = || -> candle_core::Result<_> {
            let train = spec.pass == Pass::Train;
            let builder = Builder::seeded(spec.seed, backend.device(), train);
            let net = Net::new(&subject, &builder, spec)?;
            let params = builder.finish();
            let trainer = if train { Some(Trainer::new(params, OPTIMIZER, SCHEDULE)?) } else { None };
            let inputs = inputs(spec, net.labels(), text, backend.device())?;
            Ok((net, trainer, inputs))
        };
        let (net, trainer, inputs) = build().map_err(|error| outcome::of_error(&error))?;
        Ok(Self { backend, net, trainer, inputs, next: 0, baseline, kernel, dtype })
    }

    /// One step; seconds from the synchronised start to the synchronised end.
    ///
    /// # Errors
    /// How the cell ended instead.
    pub fn step(&mut self) -> Result<f64, Ending> {
        compute_as(self.kernel, self.dtype);
        let (ids, labels) = &self.inputs[self.next % self.inputs.len()];
        self.next += 1;
        let failed = |error: candle_core::Error| outcome::of_error(&error);
        self.backend.sync().map_err(failed)?;
        let start = Instant::now();
        match &mut self.trainer {
            Some(trainer) => {
                let loss = || self.net.loss(ids, labels, self.next as u64);
                trainer.step(loss).map_err(|error| match error {
                    StepError::Diverged { .. } => Ending::new(Outcome::Diverged, error.to_string()),
                    StepError::Failed(error) => outcome::of_error(&error),
                })?;
                self.backend.sync().map_err(failed)?;
                Ok(start.elapsed().as_secs_f64())
            }
            None => {
                let logits = self.net.logits(ids).map_err(failed)?;
                self.backend.sync().map_err(failed)?;
                let seconds = start.elapsed().as_secs_f64();
                let sum = logits.sum_all().and_then(|sum| sum.to_scalar::<f32>()).map_err(failed)?;
                if sum.is_finite() {
                    return Ok(seconds);
                }
                Err(Ending::new(Outcome::Diverged, "the logits are not finite"))
            }
        }
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
    use crate::device::alloc;

    fn spec(model: &str, pass: Pass) -> Spec {
        Spec {
            model: model.to_owned(),
            preset: "ls-lra".to_owned(),
            sizes: Sizes::default(),
            batch: 3,
            len: 37,
            pass,
            seed: 1,
            device: DeviceName::Cpu,
            dtype: DtypeName::F32,
            kernel: KernelName::Fused,
        }
    }

    #[test]
    fn both_passes_step_on_short_text() {
        for pass in [Pass::Infer, Pass::Train] {
            for text in [&b""[..], b"x", b"a text that is read again and again"] {
                let mut stage = Stage::open(&spec("ls:w=4,r=2", pass), text).unwrap();
                assert!(stage.step().unwrap() > 0.0 && stage.step().unwrap() > 0.0);
            }
        }
    }

    #[test]
    fn sizes_that_do_not_fit_are_the_users_mistake() {
        let mut odd = spec("full", Pass::Infer);
        odd.sizes.heads = Some(3);
        let error = odd.subject().err().unwrap();
        assert!(matches!(&error, SpecError::Wrong(reason) if reason.contains("3 heads do not divide")));
        odd.preset = "ls-lr".to_owned();
        assert!(odd.subject().err().unwrap().to_string().contains("did you mean ls-lra?"));
        let causal = spec("transformer-xl", Pass::Infer).subject().err().unwrap();
        assert!(matches!(causal, SpecError::Unsupported(_)));
    }

    #[test]
    fn rows_know_costs_beforehand_without_memory() {
        let big = Spec { len: 1 << 16, ..spec("synthesizer", Pass::Train) };
        let live = alloc::live();
        let config = big.subject().unwrap();
        let row = big.row("speed", 2, Some(&config));
        assert!(row.params.unwrap() > 1 << 30 && row.flops.unwrap() > 0, "{row:?}");
        assert!(alloc::live() < live + (64 << 20));
        assert_eq!(row.bytes.unwrap(), 12 * row.params.unwrap());
    }
}
