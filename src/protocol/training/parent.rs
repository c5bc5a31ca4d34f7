//! The parent's side: one worker after another, curves while they train, rows when they are done.

use std::time::{Duration, Instant};

use super::{TrainingMessage, TrainingRequest, TrainingResult, worker};
use crate::protocol::cell_runner::{CellResult, CellRunner, request};
use crate::protocol::curve::{CellCurve, CurveSpec};
use crate::protocol::definition::WorkerContext;
use crate::run::RunError;
use crate::run::journal::Samples;
use crate::run::outcome::CellFailure;
use crate::run::plan::Cell;
use crate::run::session::Session;
use crate::run::worker::{Received, Worker};
use crate::term::{Warning, clock};
use crate::train::training_loop::EvalPoint;
use effattn_record::stats::Summary;
use effattn_record::{Outcome, Row, departures, file};

/// Time that a worker has on Ctrl-C to finish its step and write a checkpoint.
const GRACE: Duration = Duration::from_secs(20);

/// Longest wait for a message where several workers are listened to.
const WAIT: Duration = Duration::from_millis(25);

/// Trains the cells `open`, each in a folder of its own in the folder of the run, `jobs` of the settings at once.
pub fn compute<J: TrainingRequest>(
    runner: &mut CellRunner,
    open: &[usize],
    shown: CurveSpec,
) -> Result<(), RunError> {
    let jobs = runner.plan.settings["jobs"].as_u64().unwrap_or(1).max(1);
    let (mut open, mut running) = (open.iter(), Vec::<Running>::new());
    loop {
        while (running.len() as u64) < jobs
            && let Some(&index) = open.next()
        {
            running.push(Running::start::<J>(index, jobs, shown, runner)?);
        }
        if running.is_empty() {
            return Ok(());
        }
        let wait = WAIT / running.len() as u32;
        let mut ended = None;
        for place in 0..running.len() {
            match running[place].listen(wait, runner) {
                Ok(None) => {}
                Ok(Some(end)) => {
                    ended = Some((place, end));
                    break;
                }
                Err(error) => {
                    running.remove(place);
                    // those beside it keep what they have, too
                    for other in &mut running {
                        while matches!(error, RunError::Stopped) && other.listen(wait, runner).is_ok() {}
                    }
                    return Err(error);
                }
            }
        }
        if let Some((place, end)) = ended {
            running.remove(place).record(end, runner)?;
        }
    }
}

/// How a worker ended.
type End = Result<TrainingResult, CellFailure>;

/// One cell under training.
struct Running<'a> {
    index: usize,
    worker: Option<Worker>,
    deadline: Option<Instant>,
    resident_limit: u64,
    cell: &'a Cell,
    name: &'a str,
    steps: u64,
    conditions: WorkerContext,
    shown: CurveSpec,
    curve: CellCurve,
    /// Seconds per step, one value per message.
    seconds: Vec<f64>,
    /// Predicted seconds that the bar has been moved by.
    moved: f64,
    started: Instant,
    spoken: Instant,
}

impl<'a> Running<'a> {
    /// Starts the worker of cell `index`, which has a `jobs`-th of the memory.
    fn start<J: TrainingRequest>(
        index: usize,
        jobs: u64,
        shown: CurveSpec,
        runner: &mut CellRunner<'a>,
    ) -> Result<Self, RunError> {
        let job: J = request(&runner.plan.cells[index])?;
        let folder = runner.folder(index);
        std::fs::create_dir_all(&folder).map_err(RunError::file(&folder))?;
        let trained = job.trained(runner.session.results(), runner.plan);
        let conditions = WorkerContext { folder, trained, ..runner.conditions.clone() };
        let (cell, name) = (&runner.plan.cells[index], runner.plan.name(index));
        let mut worker = runner.start(index, runner.session.memory_limit / jobs, conditions.clone())?;
        worker.grace = GRACE;
        let deadline = cell.timeout.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
        let label = cell.row.label();
        let seed = cell.row.seed.filter(|_| runner.plan.seeds.len() > 1);
        let label = seed.map_or_else(|| label.clone(), |seed| format!("{label} s{seed}"));
        let group = cell.row.task.clone().unwrap_or_default();
        runner.session.term.at(&format!("{name}: reads its data"));
        Ok(Self {
            index,
            worker: Some(worker),
            deadline: deadline.and_then(|time| Instant::now().checked_add(time)),
            resident_limit: runner.session.resident_limit / jobs,
            cell,
            name,
            steps: job.info().steps,
            conditions,
            shown,
            curve: CellCurve { group, label, points: Vec::new() },
            seconds: Vec::new(),
            moved: 0.0,
            started: Instant::now(),
            spoken: Instant::now(),
        })
    }

    /// Hears what the worker says within `wait`; its end where that is it.
    fn listen(&mut self, wait: Duration, runner: &mut CellRunner) -> Result<Option<End>, RunError> {
        let session = &mut *runner.session;
        let Some(worker) = &mut self.worker else { return Ok(None) };
        let heard = worker.poll::<TrainingMessage>(wait, self.deadline, self.resident_limit, &session.stop);
        if matches!(heard, Err(RunError::Stopped)) {
            self.print_stopped_at(session);
        }
        match heard? {
            None => {}
            Some(Received::Message(TrainingMessage::Done(done))) => {
                self.write()?;
                self.seconds = worker::times(&self.conditions.folder);
                if let Some(worker) = self.worker.take() {
                    worker.finish();
                }
                return Ok(Some(Ok(done)));
            }
            Some(Received::Message(TrainingMessage::Ended { outcome, reason })) => {
                return Ok(Some(Err(CellFailure { outcome, reason })));
            }
            Some(Received::Ended(ending)) => return Ok(Some(Err(ending))),
            Some(Received::Message(TrainingMessage::Started { step, resumed, curve })) => {
                if resumed {
                    session.term.info(&format!("{}: resuming after step {step}", self.name));
                }
                self.curve.points = curve;
                (self.started, self.spoken) = (Instant::now(), Instant::now());
                self.show_progress(step, None, session);
            }
            Some(Received::Message(TrainingMessage::Step { step, loss, .. })) => {
                self.show_progress(step, Some(loss), session);
            }
            Some(Received::Message(TrainingMessage::Rehearsed(_))) => {} // asked for before a run only
            Some(Received::Message(TrainingMessage::Doing { what })) => {
                session.term.at(&format!("{}: {what}", self.name));
            }
            Some(Received::Message(TrainingMessage::Warned { what })) => {
                session.term.warn(&Warning::Other(format!("{}: {what}", self.name)));
            }
            Some(Received::Message(TrainingMessage::Evaluated(point))) => {
                self.curve.points.push(point);
                self.write()?;
                let curves = runner.curves.iter().cloned().chain([self.curve.clone()]);
                (runner.draw)(&curves.collect::<Vec<_>>());
            }
        }
        Ok(None)
    }

    fn record(self, end: End, runner: &mut CellRunner) -> Result<(), RunError> {
        runner.curves.push(self.curve);
        match end {
            Ok(done) => {
                let rows = rows(self.cell, &done, &self.seconds);
                let samples = samples(&self.seconds);
                let summary = rows.first().map_or_else(String::new, |row| match row.value {
                    Some(value) => format!("{value:.2} {}", row.unit),
                    None => row.outcome.to_string(),
                });
                let progress_seconds = self.moved;
                runner.record_result(self.index, CellResult { rows, samples, summary, progress_seconds })
            }
            Err(ending) => runner.record_failure(self.index, &ending, self.moved),
        }
    }

    /// `listops ls: stopped after step 836 of 1500; its checkpoint is saved`: what the worker said at last.
    fn print_stopped_at(&self, session: &Session) {
        let Some(worker) = &self.worker else { return };
        for answer in worker.drain_messages() {
            if let TrainingMessage::Ended { outcome: Outcome::Interrupted, reason } = answer {
                let (name, steps) = (self.name, self.steps);
                session.term.info(&format!("{name}: {reason} of {steps}; its checkpoint is saved"));
            }
        }
    }

    /// Moves the bar; without a terminal a line every minute.
    fn show_progress(&mut self, step: u64, loss: Option<f64>, session: &mut Session) {
        let share = self.cell.seconds * step as f64 / self.steps.max(1) as f64;
        session.term.advance(share - self.moved, "");
        self.moved = share;
        let loss = loss.map_or_else(String::new, |loss| format!(" loss {loss:.4}"));
        let best = self.shown.best(&self.curve.points);
        let best = best.map_or_else(String::new, |best| format!(" best {best:.2} {}", self.shown.unit));
        let text = format!("{} step {step}/{}{loss}{best}", self.name, self.steps);
        session.term.at(&text);
        if self.spoken.elapsed() > Duration::from_secs(60) && !session.term.has_bar() {
            self.spoken = Instant::now();
            session.term.info(&format!("{text} after {}", clock(self.started.elapsed().as_secs_f64())));
        }
    }

    /// Writes `curve.csv` beside the checkpoints.
    fn write(&self) -> Result<(), RunError> {
        let path = self.conditions.folder.join("curve.csv");
        let text = curve_csv(&self.curve.points, &self.shown);
        file::write(&path, text.as_bytes()).map_err(RunError::file(path))
    }
}

fn curve_csv(points: &[EvalPoint], shown: &CurveSpec) -> String {
    let mut text = format!("step,train_loss,validation_loss,{}", shown.column);
    text.push_str(if shown.by_rate { ",rate\n" } else { "\n" });
    for EvalPoint { step, train_loss, score, rate } in points {
        let value = (shown.value)(score);
        text.push_str(&format!("{step},{train_loss:.6},{:.6},{value:.4}", score.loss));
        if let Some(rate) = rate.filter(|_| shown.by_rate) {
            text.push_str(&format!(",{rate:e}"));
        }
        text.push('\n');
    }
    text
}

fn rows(cell: &Cell, done: &TrainingResult, seconds: &[f64]) -> Vec<Row> {
    let row = &cell.row;
    let words: Vec<&str> = [&row.differs, &done.differs].into_iter().flatten().map(String::as_str).collect();
    let row = Row {
        peak_bytes: done.peak_bytes,
        fraction: row.fraction.map(|part| part * done.data_share),
        differs: (!words.is_empty()).then(|| words.join("; ")),
        ..row.with_outcome(Outcome::Ok, None)
    };
    let plain = Row { published: None, ..row.clone() };
    let mut rows = Vec::new();
    for (index, measure) in done.measures.iter().enumerate() {
        let mut row = if index == 0 { Row { n: Some(1), ..row.clone() } } else { plain.clone() };
        // the first has the number of its cell
        let other = |task: &&String| index > 0 || cell.row.task.as_ref() != Some(task);
        if let Some(task) = measure.task.as_ref().filter(other) {
            let beside = cell.published(&measure.metric, task);
            row.published = beside.map(|beside| beside.published);
            beside.iter().flat_map(|beside| &beside.foreign).for_each(|word| departures::add(&mut row, word));
            row.task = Some(task.clone());
        }
        row.len = measure.len.or(row.len);
        if let Some((std, n)) = measure.spread {
            (row.std, row.n) = (Some(std), Some(n));
        }
        rows.push(row.with(&measure.metric, &measure.unit, Some(measure.value)));
    }
    let time = plain.with("step_time", "s", None);
    // weights that are only tested have no steps
    rows.extend(Summary::of(seconds).map(|step| Row {
        value: Some(step.median),
        std: step.std,
        n: Some(step.n as u64),
        ..time
    }));
    rows
}

fn samples(seconds: &[f64]) -> Vec<Samples> {
    vec![Samples::new("step_time", "s", seconds.to_vec())]
}
