//! A training run from its first to its last step: evaluations on the way, a checkpoint to go on from, the best weights.
//!
//! The loop knows nothing of tasks: a [`Trainable`] gives the loss of a step and a score of the current weights. A run
//! that was killed goes on from its last checkpoint and makes the same steps as one that was not, bit for bit (same
//! threads, same build), because everything a step depends on is a function of seed and step number or stands in
//! the checkpoint.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use candle_core::{Result, Tensor};
use serde::{Deserialize, Serialize};
use serde_json::Value as Json;

use super::checkpoint::{self, Checkpoint, CheckpointError};
use super::step::{StepError, Trainer};
use effattn_model::family::Loss;

/// What is trained, as the loop sees it.
pub trait Trainable {
    /// Micro-batches that make a step: the memory of one, the update of all.
    fn micro_batches(&self) -> usize {
        1
    }

    /// Loss of micro-batch `part` of step `step` with the current weights, differentiable.
    fn loss(&mut self, step: u64, part: usize) -> Result<Loss>;

    /// Evaluation number `number` (from 0) with the current weights.
    fn evaluate(&mut self, number: u64) -> Result<EvalScore>;

    /// Tensors that belong to the state besides the weights (the cache of a language model).
    fn extra(&self) -> Vec<(String, Tensor)> {
        Vec::new()
    }
}

/// Result of an evaluation.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct EvalScore {
    /// Mean loss in nats.
    pub loss: f64,
    /// What weights are selected by: more is better.
    pub value: f64,
}

/// One evaluation on the learning curve.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct EvalPoint {
    /// Steps made.
    pub step: u64,
    /// Mean training loss since the evaluation before.
    pub train_loss: f64,
    /// The evaluation.
    pub score: EvalScore,
    /// Learning rate of its run, where a cell trains at several; steps are those of that run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rate: Option<f64>,
}

/// Length and rhythm of a run.
#[derive(Clone, Copy, Debug)]
pub struct LoopConfig {
    /// Steps.
    pub steps: u64,
    /// Steps between evaluations; one more follows the last step.
    pub eval_every: u64,
    /// Time between checkpoints.
    pub save_interval: Duration,
    /// An evaluation whose value is above this is the last: training ends with it. `None`: all steps are made.
    pub enough: Option<f64>,
}

/// Where a run keeps its files.
#[derive(Clone, Debug)]
pub struct CheckpointFiles {
    /// The checkpoint to go on from.
    pub last: PathBuf,
    /// The weights of the best evaluation so far.
    pub best: PathBuf,
}

impl CheckpointFiles {
    /// `last.safetensors` and `best.safetensors` in `folder`.
    pub fn in_folder(folder: &Path) -> Self {
        Self { last: folder.join("last.safetensors"), best: folder.join("best.safetensors") }
    }
}

/// Where a run stands, besides weights and moments.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TrainingState {
    /// Evaluations so far.
    pub curve: Vec<EvalPoint>,
    /// Number of the best evaluation, the first among equals.
    pub best: Option<usize>,
    /// Sum of training losses since the last evaluation.
    sum: f64,
    /// Steps in it.
    summed: u64,
}

impl TrainingState {
    /// The state in `checkpoint`.
    pub fn read(checkpoint: &Checkpoint, path: &Path) -> std::result::Result<Self, CheckpointError> {
        serde_json::from_value(checkpoint.state.clone()).map_err(|error| CheckpointError::Damaged {
            path: path.to_owned(),
            reason: format!("its state cannot be read ({error})"),
        })
    }

    /// The best evaluation.
    pub fn best_point(&self) -> Option<&EvalPoint> {
        self.curve.get(self.best?)
    }

    /// Whether the last evaluation is one that training ends with.
    pub fn reached(&self, enough: Option<f64>) -> bool {
        let value = |enough| self.curve.last().is_some_and(|point| point.score.value > enough);
        enough.is_some_and(value)
    }

    fn add(&mut self, loss: f64) {
        self.sum += loss;
        self.summed += 1;
    }

    /// Puts an evaluation on the curve; whether it is the best so far.
    fn evaluated(&mut self, step: u64, score: EvalScore) -> bool {
        let train_loss = self.sum / self.summed.max(1) as f64;
        (self.sum, self.summed) = (0.0, 0);
        let better = self.best_point().is_none_or(|best| score.value > best.score.value);
        if better {
            self.best = Some(self.curve.len());
        }
        self.curve.push(EvalPoint { step, train_loss, score, rate: None });
        better
    }
}

/// What a run tells while it goes on.
#[derive(Debug)]
pub enum Event<'a> {
    /// A step was made.
    Step {
        /// Its number, from 1.
        step: u64,
        /// Its loss.
        loss: f64,
    },
    /// An evaluation was made.
    Evaluated(&'a EvalPoint),
}

/// Why a run ended before its last step.
#[derive(Debug, thiserror::Error)]
pub enum TrainingError {
    /// The step was not made.
    #[error(transparent)]
    Step(#[from] StepError),
    /// An evaluation failed.
    #[error(transparent)]
    Evaluation(#[from] candle_core::Error),
    /// An evaluation gave a loss that is not finite.
    #[error("the validation loss after step {step} is {loss}")]
    Diverged {
        /// Steps made.
        step: u64,
        /// The loss.
        loss: f64,
    },
    /// A checkpoint cannot be written.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// Nobody listens any more.
    #[error(transparent)]
    ParentGone(#[from] std::io::Error),
    /// The run was asked to end; its checkpoint is behind the last step.
    #[error("stopped after step {step}")]
    Stopped {
        /// Steps made.
        step: u64,
    },
}

/// Whether a run goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LoopControl {
    /// It does.
    GoOn,
    /// It keeps what it has and ends.
    Stop,
}

/// Trains from where `trainer` and `state` stand to the end of `course`. `model` describes the model in checkpoints.
pub fn run_loop(
    trainer: &mut Trainer,
    learner: &mut dyn Trainable,
    state: &mut TrainingState,
    (course, files, model): (&LoopConfig, &CheckpointFiles, &Json),
    mut tell: impl FnMut(Event) -> std::io::Result<LoopControl>,
) -> std::result::Result<(), TrainingError> {
    let mut saved = Instant::now();
    while trainer.optimizer().updates() < course.steps && !state.reached(course.enough) {
        let number = trainer.optimizer().updates();
        let made = trainer.accumulate(learner.micro_batches(), |part| learner.loss(number, part))?;
        state.add(made.loss);
        let done = number + 1;
        let mut next = tell(Event::Step { step: done, loss: made.loss })?;
        let evaluate = done.is_multiple_of(course.eval_every.max(1)) || done == course.steps;
        if evaluate {
            let score = learner.evaluate(state.curve.len() as u64)?;
            if !score.loss.is_finite() {
                return Err(TrainingError::Diverged { step: done, loss: score.loss });
            }
            if state.evaluated(done, score) {
                save(&files.best, trainer, state, model, &[])?;
            }
            if let Some(point) = state.curve.last() {
                next = tell(Event::Evaluated(point))?;
            }
        }
        let last = done == course.steps || state.reached(course.enough);
        let stop = next == LoopControl::Stop && !last;
        if saved.elapsed() >= course.save_interval || last || stop {
            save(&files.last, trainer, state, model, &learner.extra())?;
            saved = Instant::now();
        }
        if stop {
            return Err(TrainingError::Stopped { step: done });
        }
    }
    Ok(())
}

fn save(
    path: &Path,
    trainer: &Trainer,
    state: &TrainingState,
    model: &Json,
    extra: &[(String, Tensor)],
) -> std::result::Result<(), TrainingError> {
    let state = serde_json::to_value(state).map_err(std::io::Error::other)?;
    Ok(checkpoint::save(path, trainer, model, &state, extra)?)
}

#[cfg(test)]
mod tests {
    use candle_core::Device;
    use serde_json::json;

    use super::*;
    use crate::train::optim::AdamW;
    use crate::train::schedule::Schedule;
    use effattn_model::nn::params::{Init, ParamBuilder};

    const OPTIMIZER: AdamW = AdamW { beta2: 0.99, eps: 1e-8, weight_decay: 0.01, clip: None };
    const SCHEDULE: Schedule = Schedule::WarmupConstant { peak_lr: 0.05, warmup: 3 };

    /// Fits a vector to targets that depend on the step.
    struct Fit(Tensor);

    impl Trainable for Fit {
        fn loss(&mut self, step: u64, _: usize) -> Result<Loss> {
            Ok(Loss::mean(((&self.0 - (step as f64 * 0.7).sin())?).sqr()?.mean_all()?))
        }

        fn evaluate(&mut self, number: u64) -> Result<EvalScore> {
            let loss = f64::from((&self.0 - 0.2)?.sqr()?.mean_all()?.to_scalar::<f32>()?);
            Ok(EvalScore { loss, value: -loss + number as f64 * 1e-9 })
        }
    }

    fn start(files: &CheckpointFiles) -> (Trainer, Fit, TrainingState) {
        let restored = files.last.exists().then(|| Checkpoint::load(&files.last).unwrap());
        let builder = match &restored {
            Some(checkpoint) => checkpoint.builder(&Device::Cpu, true).unwrap(),
            None => ParamBuilder::seeded(1, &Device::Cpu, true),
        };
        let weights = builder.param("weights", &[3], Init::ONE).unwrap();
        let params = builder.finish();
        match restored {
            Some(checkpoint) => {
                let state = TrainingState::read(&checkpoint, &files.last).unwrap();
                (checkpoint.trainer(params, OPTIMIZER, SCHEDULE).unwrap(), Fit(weights), state)
            }
            None => {
                (Trainer::new(params, OPTIMIZER, SCHEDULE).unwrap(), Fit(weights), TrainingState::default())
            }
        }
    }

    fn train(
        files: &CheckpointFiles,
        stop: Option<u64>,
    ) -> std::result::Result<TrainingState, TrainingError> {
        let (mut trainer, mut fit, mut state) = start(files);
        let course = LoopConfig { steps: 23, eval_every: 5, save_interval: Duration::ZERO, enough: None };
        let tell = |event: Event| match event {
            Event::Step { step, .. } if Some(step) == stop => Err(std::io::Error::other("killed")),
            _ => Ok(LoopControl::GoOn),
        };
        run_loop(&mut trainer, &mut fit, &mut state, (&course, files, &json!({})), tell)?;
        Ok(state)
    }

    #[test]
    fn a_run_that_is_stopped_anywhere_ends_like_one_that_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let files = |name: &str| {
            let folder = folder.path().join(name);
            std::fs::create_dir_all(&folder).unwrap();
            CheckpointFiles::in_folder(&folder)
        };
        let whole = files("whole");
        let state = train(&whole, None).unwrap();
        assert_eq!(state.curve.iter().map(|point| point.step).collect::<Vec<_>>(), [5, 10, 15, 20, 23]);
        assert!(state.best_point().is_some() && whole.best.exists());
        let broken = files("broken");
        for stop in [1, 4, 5, 6, 17, 23] {
            assert!(matches!(train(&broken, Some(stop)), Err(TrainingError::ParentGone(_))));
        }
        assert_eq!(train(&broken, None).unwrap(), state);
        let read = |files: &CheckpointFiles| {
            (std::fs::read(&files.last).unwrap(), std::fs::read(&files.best).unwrap())
        };
        let tensors = |bytes: &[u8]| bytes[bytes.len() - 36..].to_vec();
        let (a, b) = (read(&whole), read(&broken));
        assert_eq!((tensors(&a.0), tensors(&a.1)), (tensors(&b.0), tensors(&b.1)));
    }

    #[test]
    fn an_evaluation_that_is_good_enough_is_the_last() {
        let folder = tempfile::tempdir().unwrap();
        let files = CheckpointFiles::in_folder(folder.path());
        let (mut trainer, mut fit, mut state) = start(&files);
        let course = LoopConfig {
            steps: 1000,
            eval_every: 5,
            save_interval: Duration::from_secs(3600),
            enough: Some(-0.2),
        };
        let go_on = |_: Event| Ok(LoopControl::GoOn);
        run_loop(&mut trainer, &mut fit, &mut state, (&course, &files, &json!({})), go_on).unwrap();
        let steps = trainer.optimizer().updates();
        assert!(steps < 1000 && steps.is_multiple_of(5), "{steps}");
        let above: Vec<bool> = state.curve.iter().map(|point| point.score.value > -0.2).collect();
        assert_eq!(above.iter().position(|above| *above), Some(above.len() - 1));
        let (mut trainer, mut fit, mut again) = start(&files);
        assert_eq!(
            (trainer.optimizer().updates(), &again),
            (steps, &state),
            "its checkpoint is that of the end"
        );
        run_loop(&mut trainer, &mut fit, &mut again, (&course, &files, &json!({})), go_on).unwrap();
        assert_eq!((trainer.optimizer().updates(), again), (steps, state), "and nothing is added to it");
    }

    #[test]
    fn a_loss_that_is_not_finite_ends_the_run_with_its_step() {
        struct Bad;
        impl Trainable for Bad {
            fn loss(&mut self, _: u64, _: usize) -> Result<Loss> {
                Ok(Loss::mean(Tensor::new(f32::NAN, &Device::Cpu)?))
            }
            fn evaluate(&mut self, _: u64) -> Result<EvalScore> {
                Ok(EvalScore { loss: 0.0, value: 0.0 })
            }
        }
        let folder = tempfile::tempdir().unwrap();
        let files = CheckpointFiles::in_folder(folder.path());
        let (mut trainer, _, mut state) = start(&files);
        let course = LoopConfig { steps: 3, eval_every: 1, save_interval: Duration::ZERO, enough: None };
        let result = run_loop(&mut trainer, &mut Bad, &mut state, (&course, &files, &json!({})), |_| {
            Ok(LoopControl::GoOn)
        });
        assert!(matches!(result, Err(TrainingError::Step(StepError::Diverged { step: 0, .. }))));
    }
}
