//! What every training worker does, whatever is trained: opens the device, goes on from a checkpoint or begins, trains
//! to the end, and hands over the weights that are tested. A protocol says the rest as an [`Experiment`].

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use candle_core::{Device, Result as Candle};
use serde::Serialize;
use serde_json::Value as Json;

use super::worker::{Job, choose_kernels, failed, run_training};
use super::{EvalCost, MetricValue, TrainingMessage, TrainingRequest, TrialTiming};
use crate::protocol::definition::WorkerContext;
use crate::protocol::model_spec::ModelSpec;
use crate::run::outcome::CellFailure;
use crate::run::worker::ParentLink;
use crate::train::checkpoint::Checkpoint;
use crate::train::optim::OptimizerConfig;
use crate::train::order::BatchOrder;
use crate::train::schedule::Schedule;
use crate::train::step::Trainer;
use crate::train::training_loop::{
    CheckpointFiles, EvalPoint, EvalScore, LoopConfig, Trainable, TrainingState,
};
use effattn_kernel::device::{Backend, alloc};
use effattn_model::batch::Batch;
use effattn_model::family::{Architecture, Metric, Model};
use effattn_model::nn::dropout::DropoutRng;
use effattn_model::nn::params::ParamBuilder;
use effattn_record::Outcome;
use effattn_record::config::settings::DeviceName;

/// Where a worker trains: its device, and what it held before.
pub struct TrainingDevice {
    backend: Backend,
    /// Live bytes before, where they are counted.
    before: Option<usize>,
    /// Whether steps were made.
    trained: AtomicBool,
}

impl TrainingDevice {
    /// Chooses kernels and opens the device. Memory is counted from here: data that are read before are not in it.
    pub fn open(spec: &ModelSpec, conditions: &WorkerContext) -> Result<Self, CellFailure> {
        choose_kernels(spec, conditions);
        let backend = Backend::open(spec.device)?;
        let before = (spec.device == DeviceName::Cpu).then(alloc::live);
        Ok(Self { backend, before, trained: AtomicBool::new(false) })
    }

    /// The device.
    pub fn device(&self) -> &Device {
        self.backend.device()
    }

    /// Most live bytes so far above those before; nothing on devices whose memory is not counted.
    pub fn peak(&self) -> Option<u64> {
        Some(alloc::peak().saturating_sub(self.before?) as u64)
    }

    /// The same after training; nothing where all steps had been made before, by another process.
    pub fn training_peak(&self) -> Option<u64> {
        self.peak().filter(|_| self.trained.load(Relaxed))
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

/// Number of steps in all and between evaluations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepCounts {
    /// Steps in all.
    pub total: u64,
    /// Steps between evaluations.
    pub eval_every: u64,
}

/// One phase of training, as a protocol defines it. Steps of a protocol that has several are counted on by [`EarlierPhases`].
pub trait Experiment {
    /// Request of the cell.
    type Request: TrainingRequest + Serialize;

    /// The cell.
    fn job(&self) -> &Job<'_, Self::Request>;

    /// Files of its checkpoints.
    fn files(&self) -> CheckpointFiles {
        CheckpointFiles::in_folder(&self.job().context.folder)
    }

    /// The run as checkpoints describe it: training resumes from those with the same description only.
    fn description(&self) -> Result<Json, CellFailure> {
        Ok(serde_json::to_value(&self.job().request)?)
    }

    /// Optimizer and schedule.
    fn optimizer_and_schedule(&self) -> Result<(OptimizerConfig, Schedule), CellFailure>;

    /// Number of steps.
    fn steps(&self) -> StepCounts;

    /// An evaluation whose value is above this is the last one; `None`: all steps are made.
    fn enough(&self) -> Option<f64> {
        None
    }

    /// Cost of evaluations, for estimates.
    fn eval_cost(&self) -> EvalCost;

    /// Which weights are tested.
    fn select(&self) -> WeightChoice {
        WeightChoice::Best
    }

    /// Weights to begin with: drawn from the seed, or stored ones.
    fn initial_weights(&self, device: &Device) -> Result<ParamBuilder, CellFailure> {
        Ok(ParamBuilder::seeded(self.job().request.info().spec.seed, device, true))
    }

    /// The model that is trained: it says which parameters weight decay takes part in.
    fn model(&self) -> &dyn Architecture;

    /// The model with the weights of `builder`, and its data: how a part of a step's batch is made, how it is evaluated.
    /// What a [`Trainable`] carries from step to step besides the weights is in `restored`, where training goes on.
    fn trainable<'a>(
        &'a self,
        builder: &ParamBuilder,
        restored: Option<&Checkpoint>,
    ) -> Result<Box<dyn Trainable + 'a>, CellFailure>;
}

/// Evaluations and steps of the phases before one.
#[derive(Clone, Copy, Default)]
pub struct EarlierPhases<'a> {
    /// Evaluations.
    pub points: &'a [EvalPoint],
    /// Steps.
    pub steps: u64,
    /// Learning rate of the phase that follows, where a phase is a run of its own at one rate of several.
    pub rate: Option<f64>,
}

/// Trains an `experiment` of one phase to its end, or what is left of it, and reads the weights that are tested. Also gives the
/// highest live bytes of training.
pub fn train(
    laboratory: &TrainingDevice,
    experiment: &impl Experiment,
) -> Result<(TrainedWeights, Option<u64>), CellFailure> {
    EarlierPhases::default().train(laboratory, experiment)?;
    let peak_bytes = laboratory.training_peak();
    Ok((TrainedWeights::read(&experiment.files(), experiment)?, peak_bytes))
}

impl EarlierPhases<'_> {
    /// Trains `experiment` to its end, or what is left of it.
    pub fn train(
        &self,
        laboratory: &TrainingDevice,
        experiment: &impl Experiment,
    ) -> Result<TrainingState, CellFailure> {
        let (files, description, device) =
            (experiment.files(), experiment.description()?, laboratory.device());
        let StepCounts { total: steps, eval_every } = experiment.steps();
        let restored = if files.last.exists() { Some(load(&files, &description)?) } else { None };
        let enough = experiment.enough();
        let ended =
            |(last, state): &&(Checkpoint, TrainingState)| last.updates >= steps || state.reached(enough);
        if let Some((done, state)) = restored.as_ref().filter(ended) {
            self.started(experiment.job().link, done.updates, &state.curve)?;
            return Ok(state.clone());
        }
        let (method, schedule) = experiment.optimizer_and_schedule()?;
        let checkpoint = restored.as_ref().map(|(checkpoint, _)| checkpoint);
        let builder = match checkpoint {
            Some(checkpoint) => checkpoint.builder(device, true)?,
            None => experiment.initial_weights(device)?,
        };
        let mut learner = experiment.trainable(&builder, checkpoint)?;
        let params = builder.finish();
        let (trainer, mut state) = match restored {
            Some((checkpoint, state)) => (checkpoint.trainer(params, method, schedule)?, state),
            None => (Trainer::new(params, method, schedule)?, TrainingState::default()),
        };
        let mut trainer = trainer.decay_only(&|name| experiment.model().decays(name))?;
        if experiment.job().context.trial {
            let seen = trial_steps(laboratory, experiment, (&mut trainer, learner.as_mut()))?;
            experiment.job().link.send(&TrainingMessage::Rehearsed(seen))?;
            return Err(CellFailure::new(Outcome::Interrupted, "a few steps were asked for"));
        }
        self.started(experiment.job().link, trainer.optimizer().updates(), &state.curve)?;
        let course = LoopConfig { steps, eval_every, save_interval: experiment.job().context.save(), enough };
        let what = (&course, &files, &description);
        let place: (u64, &dyn Fn(&EvalPoint) -> EvalPoint) = (self.steps, &|point| self.placed(point));
        laboratory.trained.store(true, Relaxed);
        run_training(experiment.job().link, (&mut trainer, learner.as_mut(), &mut state), what, place)?;
        Ok(state)
    }

    /// An evaluation of the phase that follows on the curve of the cell: its steps are counted on, unless every rate has its own curve.
    pub fn placed(&self, point: &EvalPoint) -> EvalPoint {
        match self.rate {
            Some(rate) => EvalPoint { rate: Some(rate), ..*point },
            None => EvalPoint { step: self.steps + point.step, ..*point },
        }
    }

    /// Says where training resumes; steps are counted from the first phase on.
    fn started(&self, link: &ParentLink, updates: u64, own: &[EvalPoint]) -> Result<(), CellFailure> {
        let curve = self.points.iter().copied().chain(own.iter().map(|point| self.placed(point))).collect();
        let started = TrainingMessage::Started { step: self.steps + updates, resumed: updates > 0, curve };
        Ok(link.send(&started)?)
    }
}

/// Most trial steps after the first, and the time that they may take together.
const TRIAL_STEPS: usize = 12;
const TRIAL_TIME: Duration = Duration::from_millis(1200);

/// Makes a few steps. The first one warms up, and counts only where it took so long that it is the only one; not on a GPU, where it compiles
/// kernels for as long as a minute.
fn trial_steps(
    laboratory: &TrainingDevice,
    experiment: &impl Experiment,
    (trainer, learner): (&mut Trainer, &mut dyn Trainable),
) -> Result<TrialTiming, CellFailure> {
    let start = Instant::now();
    let (mut times, mut counted) = (Vec::new(), start);
    while times.is_empty() || times.len() <= TRIAL_STEPS && counted.elapsed() < TRIAL_TIME {
        let (number, began) = (trainer.optimizer().updates(), Instant::now());
        let made = trainer.accumulate(learner.micro_batches(), |part| learner.loss(number, part));
        made?;
        times.push(began.elapsed().as_secs_f64());
        if times.len() == 1 && !laboratory.device().is_cpu() {
            counted = Instant::now();
        }
    }
    let made = start.elapsed().as_secs_f64();
    let mut warm = if times.len() > 1 { times.split_off(1) } else { times };
    warm.sort_by(f64::total_cmp);
    Ok(TrialTiming {
        step: warm[warm.len() / 2], // the median: other programs disturb single steps
        made,
        every: experiment.steps().eval_every,
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
    pub fn read(files: &CheckpointFiles, experiment: &impl Experiment) -> Result<Self, CellFailure> {
        let (last, state) = load(files, &experiment.description()?)?;
        if last.updates < experiment.steps().total {
            return Err(failed(&format!("{} is not trained to its end", files.last.display())));
        }
        let best = experiment.select() == WeightChoice::Best;
        let selected = if best { state.best_point() } else { state.curve.last() };
        let selected = *selected.ok_or_else(|| failed(&"nothing was evaluated"))?;
        if !best {
            return Ok(Self { selected, weights: last, last: None });
        }
        let weights = Checkpoint::load(&files.best)?;
        Ok(Self { selected, weights, last: Some(last) })
    }
}

/// What rows of classifiers have of the evaluation that weights were selected by.
pub fn selection(selected: &EvalPoint, steps: u64) -> [MetricValue; 5] {
    [
        MetricValue::new("validation_accuracy", "%", selected.score.value),
        MetricValue::new("validation_loss", "nat", selected.score.loss),
        MetricValue::new("selected_step", "1", selected.step as f64),
        MetricValue::new("train_loss", "nat", selected.train_loss),
        MetricValue::new("steps", "1", steps as f64),
    ]
}

/// Loss and accuracy in percent of `net` on `batches`.
pub fn classifier_score(
    net: &mut dyn Model,
    batches: impl Iterator<Item = Candle<Batch>>,
) -> Candle<EvalScore> {
    let all = scores(net, batches)?;
    Ok(EvalScore { loss: mean(&all, "loss"), value: 100.0 * mean(&all, "accuracy") })
}

/// Micro-batches of training examples: their order, and the dropout of each.
pub struct MicroBatches {
    order: BatchOrder,
    epoch: Option<(u64, Vec<usize>)>,
    rng: DropoutRng,
    /// Number of micro-batches of a step.
    pub count: usize,
}

impl MicroBatches {
    /// `count` micro-batches of every batch of `order`; `seed` is that of dropout.
    pub fn new(order: BatchOrder, seed: u64, count: u64) -> Self {
        Self { order, epoch: None, rng: DropoutRng::new(seed), count: count as usize }
    }

    /// The examples of micro-batch `part` of `step`.
    pub fn examples(&mut self, step: u64, part: usize) -> Vec<usize> {
        let batch = self.order.batch(step, &mut self.epoch);
        let size = batch.len() / self.count;
        batch[part * size..(part + 1) * size].to_vec()
    }

    /// The dropout of micro-batch `part` of `step`.
    pub fn dropout(&self, step: u64, part: usize) -> DropoutRng {
        self.rng.branch(step).branch(part as u64)
    }
}

/// The last checkpoint and where it stands; it must be one of `description`.
fn load(files: &CheckpointFiles, description: &Json) -> Result<(Checkpoint, TrainingState), CellFailure> {
    let checkpoint = Checkpoint::load(&files.last)?;
    checkpoint.expect_model(description)?;
    let state = TrainingState::read(&checkpoint, &files.last)?;
    Ok((checkpoint, state))
}

/// Scores of `net` on `batches` added up, by name.
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
