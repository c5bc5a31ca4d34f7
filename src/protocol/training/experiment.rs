//! What every training worker does, whatever is trained: opens the device, goes on from a checkpoint or begins, trains
//! to the end, and hands over the weights that are tested. A protocol says the rest as an [`Experiment`].

use std::time::{Duration, Instant};

use candle_core::{Device, Result as Candle};
use serde_json::Value as Json;

use super::worker::{candle, choose_kernels, failed, run_training};
use super::{TrainingMessage, TrialTiming};
use crate::protocol::definition::WorkerContext;
use crate::protocol::model_spec::ModelSpec;
use crate::run::outcome::CellFailure;
use crate::run::worker::ParentLink;
use crate::train::checkpoint::Checkpoint;
use crate::train::optim::OptimizerConfig;
use crate::train::schedule::Schedule;
use crate::train::step::Trainer;
use crate::train::training_loop::{CheckpointFiles, EvalPoint, LoopConfig, Trainable, TrainingState};
use effattn_kernel::device::{Backend, alloc};
use effattn_model::batch::Batch;
use effattn_model::family::{Architecture, Metric, Model};
use effattn_model::nn::params::ParamBuilder;
use effattn_record::Outcome;
use effattn_record::config::settings::DeviceName;

/// Training device and the bytes in use before the model was built.
pub struct TrainingDevice {
    backend: Backend,
    /// Live bytes before, where they are counted.
    before: Option<usize>,
}

impl TrainingDevice {
    /// Chooses kernels and opens the device. Memory is counted from here: data that are read before are not in it.
    ///
    /// # Errors
    /// A device that is not there.
    pub fn open(spec: &ModelSpec, conditions: &WorkerContext) -> Result<Self, CellFailure> {
        choose_kernels(spec, conditions);
        let backend = Backend::open(spec.device).map_err(|error| failed(&error))?;
        let before = (spec.device == DeviceName::Cpu).then(alloc::live);
        Ok(Self { backend, before })
    }

    /// The device.
    pub fn device(&self) -> &Device {
        self.backend.device()
    }

    /// Most live bytes so far above those before; nothing on devices whose memory is not counted.
    pub fn peak(&self) -> Option<u64> {
        Some(alloc::peak().saturating_sub(self.before?) as u64)
    }
}

/// Which weights are tested.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WeightChoice {
    /// Those of the best evaluation.
    Best,
    /// Those of the last step.
    Last,
}

/// One course of training, as a protocol defines it. Steps of a protocol that has several are counted on by [`ExperimentDriver::before`].
pub trait Experiment {
    /// Where it keeps its checkpoints.
    fn files(&self) -> CheckpointFiles;

    /// What is trained, as checkpoints describe it: training goes on from those with the same description only.
    ///
    /// # Errors
    /// None that a user could make.
    fn description(&self) -> Result<Json, CellFailure>;

    /// Optimizer and schedule.
    ///
    /// # Errors
    /// A protocol that has none for this task.
    fn optimizer_and_schedule(&self) -> Result<(OptimizerConfig, Schedule), CellFailure>;

    /// Steps in all, and steps between evaluations.
    fn steps(&self) -> (u64, u64);

    /// Forward passes of a step's batch in an evaluation, and in the test at the end: what a price is made of.
    fn eval_cost(&self) -> (f64, f64);

    /// Which weights are tested.
    fn select(&self) -> WeightChoice {
        WeightChoice::Best
    }

    /// Weights to begin with: drawn from the seed, or stored ones.
    ///
    /// # Errors
    /// Stored weights that cannot be used.
    fn initial_weights(&self, device: &Device) -> Result<ParamBuilder, CellFailure>;

    /// The model that is trained: it says which parameters weight decay takes part in.
    fn model(&self) -> &dyn Architecture;

    /// The model with the weights of `builder`, and its data: how a part of a step's batch is made, how it is evaluated.
    /// What a [`Trainable`] carries from step to step besides the weights is in `restored`, where training goes on.
    ///
    /// # Errors
    /// Data that are too few, a model that cannot be built.
    fn trainable<'a>(
        &'a self,
        builder: &ParamBuilder,
        restored: Option<&Checkpoint>,
    ) -> Result<Box<dyn Trainable + 'a>, CellFailure>;
}

/// Runs an experiment: progress messages and checkpoints.
pub struct ExperimentDriver<'a> {
    /// The parent.
    pub link: &'a ParentLink,
    /// Rhythm of checkpoints.
    pub conditions: &'a WorkerContext,
    /// Evaluations and steps of courses before this one.
    pub before: (&'a [EvalPoint], u64),
}

impl ExperimentDriver<'_> {
    /// Trains `experiment` to its end, or what is left of it.
    ///
    /// # Errors
    /// How the cell ended instead.
    pub fn run(
        &self,
        laboratory: &TrainingDevice,
        experiment: &impl Experiment,
    ) -> Result<TrainingState, CellFailure> {
        let (files, description, device) =
            (experiment.files(), experiment.description()?, laboratory.device());
        let (steps, eval_every) = experiment.steps();
        let restored = if files.last.exists() { Some(load(&files, &description)?) } else { None };
        if let Some((done, state)) = restored.as_ref().filter(|(last, _)| last.updates >= steps) {
            self.started(done.updates, &state.curve)?;
            return Ok(state.clone());
        }
        let (method, schedule) = experiment.optimizer_and_schedule()?;
        let checkpoint = restored.as_ref().map(|(checkpoint, _)| checkpoint);
        let builder = match checkpoint {
            Some(checkpoint) => checkpoint.builder(device, true).map_err(candle)?,
            None => experiment.initial_weights(device)?,
        };
        let mut learner = experiment.trainable(&builder, checkpoint)?;
        let params = builder.finish();
        let (trainer, mut state) = match restored {
            Some((checkpoint, state)) => {
                (checkpoint.trainer(params, method, schedule).map_err(|error| failed(&error))?, state)
            }
            None => (Trainer::new(params, method, schedule).map_err(candle)?, TrainingState::default()),
        };
        let mut trainer = trainer.decay_only(&|name| experiment.model().decays(name)).map_err(candle)?;
        if self.conditions.trial {
            let seen = trial_steps(laboratory, experiment, (&mut trainer, learner.as_mut()))?;
            self.link.send(&TrainingMessage::Rehearsed(seen)).map_err(|error| failed(&error))?;
            return Err(CellFailure::new(Outcome::Interrupted, "a few steps were asked for"));
        }
        self.started(trainer.optimizer().updates(), &state.curve)?;
        let course = LoopConfig { steps, eval_every, save_interval: self.conditions.save() };
        let what = (&course, &files, &description);
        run_training(self.link, (&mut trainer, learner.as_mut(), &mut state), what, self.before.1)?;
        Ok(state)
    }

    /// Says where training goes on; everything is counted from the first course on.
    fn started(&self, updates: u64, own: &[EvalPoint]) -> Result<(), CellFailure> {
        let (curve, before) = self.before;
        let own = own.iter().map(|point| EvalPoint { step: before + point.step, ..*point });
        let curve = curve.iter().copied().chain(own).collect();
        let started = TrainingMessage::Started { step: before + updates, curve };
        self.link.send(&started).map_err(|error| failed(&error))
    }
}

/// Most steps of a rehearsal behind the first, and the time that they may take together.
const FEW: (usize, Duration) = (12, Duration::from_millis(1200));

/// Makes a few steps. The first one warms up, and counts only where it took so long that it is the only one.
fn trial_steps(
    laboratory: &TrainingDevice,
    experiment: &impl Experiment,
    (trainer, learner): (&mut Trainer, &mut dyn Trainable),
) -> Result<TrialTiming, CellFailure> {
    let start = Instant::now();
    let mut times = Vec::new();
    while times.is_empty() || times.len() <= FEW.0 && start.elapsed() < FEW.1 {
        let (number, began) = (trainer.optimizer().updates(), Instant::now());
        let made = trainer.accumulate(learner.micro_batches(), |part| learner.loss(number, part));
        made.map_err(|error| failed(&error))?;
        times.push(began.elapsed().as_secs_f64());
    }
    let warm = if times.len() > 1 { &times[1..] } else { &times[..] };
    Ok(TrialTiming {
        step: warm.iter().sum::<f64>() / warm.len() as f64,
        made: start.elapsed().as_secs_f64(),
        every: experiment.steps().1,
        forwards: experiment.eval_cost(),
        peak_bytes: laboratory.peak(),
    })
}

/// The outcome of a finished course.
pub struct TrainedWeights {
    /// The evaluation that the weights were selected by.
    pub selected: EvalPoint,
    /// The selected weights.
    pub weights: Checkpoint,
    /// Those of the last update, where others were selected.
    pub last: Option<Checkpoint>,
}

impl TrainedWeights {
    /// Reads what `experiment` left.
    ///
    /// # Errors
    /// Checkpoints that are not there, of another run, or of one that is not finished.
    pub fn read(files: &CheckpointFiles, experiment: &impl Experiment) -> Result<Self, CellFailure> {
        let (last, state) = load(files, &experiment.description()?)?;
        if last.updates < experiment.steps().0 {
            return Err(failed(&format!("{} is not trained to its end", files.last.display())));
        }
        let best = experiment.select() == WeightChoice::Best;
        let selected = if best { state.best_point() } else { state.curve.last() };
        let selected = *selected.ok_or_else(|| failed(&"nothing was evaluated"))?;
        if !best {
            return Ok(Self { selected, weights: last, last: None });
        }
        let weights = Checkpoint::load(&files.best).map_err(|error| failed(&error))?;
        Ok(Self { selected, weights, last: Some(last) })
    }
}

/// The last checkpoint and where it stands; it must be one of `description`.
fn load(files: &CheckpointFiles, description: &Json) -> Result<(Checkpoint, TrainingState), CellFailure> {
    let checkpoint = Checkpoint::load(&files.last).map_err(|error| failed(&error))?;
    checkpoint.expect_model(description).map_err(|error| failed(&error))?;
    let state = TrainingState::read(&checkpoint, &files.last).map_err(|error| failed(&error))?;
    Ok((checkpoint, state))
}

/// Scores of `net` on `batches` added up, by name.
///
/// # Errors
/// As [`Model::metrics`], and those of the batches.
pub fn scores(net: &mut dyn Model, batches: impl Iterator<Item = Candle<Batch>>) -> Candle<Vec<Metric>> {
    let mut sums: Vec<Metric> = Vec::new();
    for batch in batches {
        for metric in net.metrics(&batch?)? {
            match sums.iter_mut().find(|sum| sum.name == metric.name) {
                Some(sum) => (sum.sum, sum.count) = (sum.sum + metric.sum, sum.count + metric.count),
                None => sums.push(metric),
            }
        }
    }
    Ok(sums)
}

/// Mean of the score called `name` over everything that was counted; 0 where nothing was.
pub fn mean(scores: &[Metric], name: &str) -> f64 {
    let found = scores.iter().find(|metric| metric.name == name);
    found.map_or(0.0, |metric| metric.sum / metric.count.max(1.0))
}
