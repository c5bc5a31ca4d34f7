//! The worker's side of every training run.

use std::time::{Duration, Instant};

use serde_json::Value as Json;

use super::{Answer, Done};
use crate::kernel;
use crate::protocol::model_spec::{ModelSpec, compute_as};
use crate::protocol::table::Conditions;
use crate::record::Outcome;
use crate::run::outcome::{self, Ending};
use crate::run::worker::Link;
use crate::train::checkpoint::Checkpoint;
use crate::train::session::{self, Course, Event, Files, Learner, Next, Point, SessionError, State};
use crate::train::step::{StepError, Trainer};

/// Time between progress messages.
const TELL: Duration = Duration::from_millis(500);

/// Tells the parent how `result` came out.
///
/// # Errors
/// The parent is gone.
pub fn report(link: &Link, result: Result<Done, Ending>) -> anyhow::Result<()> {
    let answer = match result {
        Ok(done) => Answer::Done(done),
        Err(Ending { outcome, reason }) => Answer::Ended { outcome, reason },
    };
    Ok(link.send(&answer)?)
}

/// An error as the end of a cell.
pub fn failed(error: &impl ToString) -> Ending {
    Ending::new(Outcome::Failed, error.to_string())
}

/// An error of candle as the end of a cell.
pub fn candle(error: candle_core::Error) -> Ending {
    outcome::of_error(&error)
}

/// Chooses kernels and the format of products, and whether results are looked at.
pub fn choose_kernels(spec: &ModelSpec, conditions: &Conditions) {
    kernel::nan_trace::set(conditions.detect_anomaly);
    compute_as(spec.kernel, spec.dtype);
}

/// The checkpoint to go on from, if there is one; it must belong to `model`.
///
/// # Errors
/// A checkpoint that cannot be used.
pub fn restore(files: &Files, model: &Json) -> Result<Option<Checkpoint>, Ending> {
    if !files.last.exists() {
        return Ok(None);
    }
    let checkpoint = Checkpoint::load(&files.last).map_err(|error| failed(&error))?;
    checkpoint.expect_model(model).map_err(|error| failed(&error))?;
    Ok(Some(checkpoint))
}

/// Trains to the end of `course`, telling the parent how it goes. Steps made before this course are `before`.
///
/// # Errors
/// How the cell ended instead.
pub fn drive(
    link: &Link,
    (trainer, learner, state): (&mut Trainer, &mut impl Learner, &mut State),
    (course, files, model): (&Course, &Files, &Json),
    before: u64,
) -> Result<(), Ending> {
    let (mut last, mut steps) = (Instant::now(), 0u32);
    let mut stopped = false;
    let tell = |event: Event| {
        match event {
            Event::Step { step, loss } => {
                steps += 1;
                if last.elapsed() >= TELL || step >= course.steps {
                    let seconds = last.elapsed().as_secs_f64() / f64::from(steps);
                    (last, steps) = (Instant::now(), 0);
                    link.send(&Answer::Step { step: before + step, loss, seconds })?;
                }
            }
            Event::Evaluated(point) => {
                link.send(&Answer::Evaluated(Point { step: before + point.step, ..*point }))?;
                (last, steps) = (Instant::now(), 0); // its time is not a step's
            }
        }
        stopped |= link.is_stopped();
        Ok(if stopped { Next::Stop } else { Next::GoOn })
    };
    session::run(trainer, learner, state, (course, files, model), tell).map_err(ending)
}

fn ending(error: SessionError) -> Ending {
    match error {
        SessionError::Step(StepError::Failed(error)) | SessionError::Evaluation(error) => candle(error),
        SessionError::Step(error @ StepError::Diverged { .. }) => {
            Ending::new(Outcome::Diverged, error.to_string())
        }
        error @ SessionError::Stopped { .. } => Ending::new(Outcome::Interrupted, error.to_string()),
        error @ SessionError::Diverged { .. } => Ending::new(Outcome::Diverged, error.to_string()),
        error => failed(&error),
    }
}
