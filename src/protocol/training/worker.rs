//! The worker's side of every training run.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde_json::Value as Json;

use super::{TrainingMessage, TrainingResult};
use crate::protocol::definition::WorkerContext;
use crate::protocol::model_spec::{ModelSpec, compute_as};
use crate::run::outcome::{self, CellFailure};
use crate::run::worker::ParentLink;
use crate::train::step::{StepError, Trainer};
use crate::train::training_loop::{
    self, CheckpointFiles, EvalPoint, Event, LoopConfig, LoopControl, Trainable, TrainingError, TrainingState,
};
use effattn_kernel as kernel;
use effattn_kernel::device::machine;
use effattn_record::{Outcome, file};

/// The file with the seconds per step.
const TIMES: &str = "times.csv";
/// Time between progress messages.
const TELL: Duration = Duration::from_millis(500);

/// Tells the parent how `result` came out.
pub fn report(link: &ParentLink, result: Result<TrainingResult, CellFailure>) -> anyhow::Result<()> {
    let answer = match result {
        Ok(done) => TrainingMessage::Done(done),
        Err(CellFailure { outcome, reason }) => TrainingMessage::Ended { outcome, reason },
    };
    Ok(link.send(&answer)?)
}

/// A cell to be trained, in its worker.
pub struct Job<'a, R> {
    /// The parent.
    pub link: &'a ParentLink,
    /// Request of the cell.
    pub request: R,
    /// Paths and options of the run.
    pub context: &'a WorkerContext,
}

impl<R> Job<'_, R> {
    /// Tells the parent what is done when nothing is trained.
    pub fn tell(&self, what: impl Into<String>) -> Result<(), CellFailure> {
        Ok(self.link.send(&TrainingMessage::Doing { what: what.into() })?)
    }

    /// Tells the parent what a person should know.
    pub fn warn(&self, what: String) -> Result<(), CellFailure> {
        Ok(self.link.send(&TrainingMessage::Warned { what })?)
    }
}

/// An error as the end of a cell.
pub fn failed(error: &impl ToString) -> CellFailure {
    CellFailure::new(Outcome::Failed, error.to_string())
}

/// An error of candle as the end of a cell.
pub fn candle(error: candle_core::Error) -> CellFailure {
    outcome::of_error(&error)
}

/// Chooses kernels and the format of products, and whether results are looked at.
pub fn choose_kernels(spec: &ModelSpec, conditions: &WorkerContext) {
    kernel::nan_trace::set(conditions.detect_anomaly);
    compute_as(spec.kernel, spec.dtype);
}

/// Trains to the end of `course`, telling the parent how it goes. Steps made before this course are `before`; `placed` says
/// where an evaluation stands on the curve of the cell.
pub fn run_training(
    link: &ParentLink,
    (trainer, learner, state): (&mut Trainer, &mut dyn Trainable, &mut TrainingState),
    (course, files, model): (&LoopConfig, &CheckpointFiles, &Json),
    (before, placed): (u64, &dyn Fn(&EvalPoint) -> EvalPoint),
) -> Result<(), CellFailure> {
    let mut times = Times::open(files, before + trainer.optimizer().updates())?;
    // the steps that were not told yet: since when, how many, and the last of them with its end and its loss
    let (mut start, mut steps) = (Instant::now(), 0u32);
    let mut end = (0, start, 0.0);
    let mut tell_steps = |(step, at, loss): (u64, Instant, f64), start: Instant, steps: u32| {
        let seconds = (at - start).as_secs_f64() / f64::from(steps);
        times.put(before + step, seconds)?;
        link.send(&TrainingMessage::Step { step: before + step, loss, seconds })
    };
    let mut stopped = false;
    let tell = |event: Event| {
        match event {
            Event::Step { step, loss } => {
                steps += 1;
                end = (step, Instant::now(), loss);
                if start.elapsed() >= TELL || step >= course.steps {
                    tell_steps(end, start, steps)?;
                    (start, steps) = (Instant::now(), 0);
                }
            }
            Event::Evaluated(point) => {
                // its time is not a step's
                if steps > 0 {
                    tell_steps(end, start, steps)?;
                }
                link.send(&TrainingMessage::Evaluated(placed(point)))?;
                (start, steps) = (Instant::now(), 0);
            }
        }
        stopped |= link.is_stopped();
        Ok(if stopped { LoopControl::Stop } else { LoopControl::GoOn })
    };
    training_loop::run_loop(trainer, learner, state, (course, files, model), tell).map_err(
        |error| match error {
            TrainingError::Stopped { step } => ending(TrainingError::Stopped { step: before + step }),
            error => ending(error),
        },
    )
}

/// Seconds per step in a file beside the checkpoints, so that a kill does not cost what was measured before it.
struct Times {
    host: String,
    path: PathBuf,
    file: File,
}

impl Times {
    /// Goes on behind `step` steps, or starts anew.
    fn open(files: &CheckpointFiles, step: u64) -> io::Result<Self> {
        let path = files.last.with_file_name(TIMES);
        let named = |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", path.display()));
        let mut options = OpenOptions::new();
        options.create(true).write(true);
        let options = if step == 0 { options.truncate(true) } else { options.append(true) };
        Ok(Self { file: options.open(&path).map_err(named)?, path, host: machine::host() })
    }

    fn put(&mut self, step: u64, seconds: f64) -> io::Result<()> {
        let named =
            |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", self.path.display()));
        let line = format!("{step},{seconds},{}\n", self.host);
        self.file.write_all(line.as_bytes()).map_err(named)
    }
}

/// The times in `folder` by the step they were taken at. A line that was cut off is passed over, and of a step that was
/// made twice the second counts. Steps that another machine made before the run came here are left out.
pub fn times(folder: &Path) -> Vec<f64> {
    let host = machine::host();
    let text = file::read_to_string(&folder.join(TIMES)).unwrap_or_default();
    let line = |line: &str| {
        let mut fields = line.splitn(3, ',');
        let (step, seconds) = (fields.next()?, fields.next()?);
        if fields.next().is_some_and(|machine| machine != host) {
            return None;
        }
        let seconds = seconds.parse::<f64>().ok().filter(|seconds| seconds.is_finite())?;
        Some((step.parse::<u64>().ok()?, seconds))
    };
    let by_step: BTreeMap<u64, f64> = text.lines().filter_map(line).collect();
    by_step.into_values().collect()
}

/// How many steps the training in `folder` has made; none where it has not begun.
pub fn steps_made(folder: &Path) -> Option<u64> {
    let text = file::read_to_string(&folder.join(TIMES)).ok()?;
    text.lines().filter_map(|line| line.split(',').next()?.parse().ok()).next_back()
}

fn ending(error: TrainingError) -> CellFailure {
    match error {
        TrainingError::Step(StepError::Failed(error)) | TrainingError::Evaluation(error) => candle(error),
        TrainingError::Step(error @ StepError::Diverged { .. }) => {
            CellFailure::new(Outcome::Diverged, error.to_string())
        }
        error @ TrainingError::Stopped { .. } => CellFailure::new(Outcome::Interrupted, error.to_string()),
        error @ TrainingError::Diverged { .. } => CellFailure::new(Outcome::Diverged, error.to_string()),
        error => failed(&error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_outlive_the_process_that_took_them() {
        let folder = tempfile::tempdir().unwrap();
        let files = CheckpointFiles::in_folder(folder.path());
        let put = |from, steps: &[(u64, f64)]| {
            let mut times = Times::open(&files, from).unwrap();
            steps.iter().for_each(|(step, seconds)| times.put(*step, *seconds).unwrap());
        };
        put(0, &[(9, 9.0)]);
        put(0, &[(10, 1.0), (20, 2.0)]);
        put(15, &[(20, 3.0), (30, 4.0)]); // killed behind step 20, went on behind 15
        assert_eq!(times(folder.path()), [1.0, 3.0, 4.0]);
        assert_eq!((steps_made(folder.path()), steps_made(&folder.path().join("other"))), (Some(30), None));
        put(30, &[]);
        assert_eq!(times(folder.path()).len(), 3, "killed behind its last step");
        let path = folder.path().join(TIMES);
        let text = std::fs::read_to_string(&path).unwrap();
        std::fs::write(&path, format!("5,7.0,another machine\n4,0.5\n{text}")).unwrap();
        assert_eq!(times(folder.path()), [0.5, 1.0, 3.0, 4.0], "steps of one machine");
    }
}
