//! The parent's side: one worker after another, curves while they train, rows when they are done.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use super::{Answer, Done, Job, Place, Shown, folder};
use crate::record::{Outcome, Row, file};
use crate::run::RunError;
use crate::run::journal::Samples;
use crate::run::outcome::Ending;
use crate::run::plan::{Cell, Plan};
use crate::run::session::Session;
use crate::run::worker::{Heard, Worker};
use crate::stats::Summary;
use crate::term::clock;
use crate::train::session::Point;

/// Time that a worker has on Ctrl-C to finish its step and write a checkpoint.
const GRACE: Duration = Duration::from_secs(20);

/// The learning curve of one cell.
#[derive(Clone, Debug)]
pub struct Curve {
    /// The chart it belongs in.
    pub group: String,
    /// Mechanism, and the seed where there are several.
    pub label: String,
    /// The evaluations.
    pub points: Vec<Point>,
}

/// Trains every cell of `plan` that has no rows yet, each in a folder of its own beside what `place` says; `drawn` is called
/// with all curves whenever one has grown.
///
/// # Errors
/// Ctrl-C, a full disk: what is finished stays, what is half trained goes on from its checkpoint.
pub fn conduct<J: Job>(
    plan: &Plan,
    requests: &[Option<J>],
    place: &Place,
    session: &mut Session,
    mut drawn: impl FnMut(&[Curve]),
) -> Result<(), RunError> {
    let mut curves = Vec::new();
    for (cell, request) in plan.cells.iter().zip(requests) {
        if session.is_done(cell) {
            session.term.advance(cell.seconds, &format!("{}: done before", cell.key));
            continue;
        }
        let ending = match request {
            None => {
                let reason = cell.row.error.clone().unwrap_or_default();
                Err(Ending::new(Outcome::Unsupported, reason))
            }
            Some(request) => {
                let place = Place { folder: folder(session.path(), &cell.key), ..place.clone() };
                std::fs::create_dir_all(&place.folder).map_err(RunError::file(&place.folder))?;
                let mut run = Running::new(cell, request, place, plan);
                let result = run.train(session, |curve| {
                    let mut all = curves.clone();
                    all.push(curve.clone());
                    drawn(&all);
                });
                match result {
                    Ok(ending) => {
                        curves.push(run.curve.clone());
                        ending.map(|done| (done, run.seconds))
                    }
                    Err(error) => {
                        let ending = Ending::new(Outcome::Interrupted, "stopped before it was finished");
                        session.pass_over(cell, ended(&cell.row, &ending));
                        return Err(error);
                    }
                }
            }
        };
        let (rows, samples) = match (&ending, request) {
            (Ok((done, seconds)), Some(request)) => {
                (rows(&cell.row, request, done, seconds), samples(seconds))
            }
            (Err(ending), _) => (ended(&cell.row, ending), Vec::new()),
            (Ok(_), None) => (Vec::new(), Vec::new()),
        };
        let line = tell(cell, &rows, (session.finished() + 1, plan.cells.len()));
        session.record(cell, rows, samples)?;
        session.term.advance(0.0, &line);
    }
    Ok(())
}

/// One cell under training.
struct Running<'a, J> {
    cell: &'a Cell,
    request: &'a J,
    place: Place,
    curve: Curve,
    /// Seconds per step, one value per message.
    seconds: Vec<f64>,
    /// Predicted seconds that the bar has been moved by.
    moved: f64,
    started: Instant,
    spoken: Instant,
}

impl<'a, J: Job> Running<'a, J> {
    fn new(cell: &'a Cell, request: &'a J, place: Place, plan: &Plan) -> Self {
        let label = cell.row.label();
        let several = plan.seeds.len() > 1;
        let label = if several { format!("{label} s{}", request.seed()) } else { label };
        let curve = Curve { group: request.group().to_owned(), label, points: Vec::new() };
        let now = Instant::now();
        Self { cell, request, place, curve, seconds: Vec::new(), moved: 0.0, started: now, spoken: now }
    }

    fn train(
        &mut self,
        session: &mut Session,
        mut drawn: impl FnMut(&Curve),
    ) -> Result<Result<Done, Ending>, RunError> {
        let task = self.request.task(session.memory_limit, self.place.clone());
        let mut worker = Worker::start(&session.launcher, &task)?;
        worker.grace = GRACE;
        let deadline = self.request.timeout().and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
        let deadline = deadline.and_then(|time| Instant::now().checked_add(time));
        session.term.at(&format!("{}: reads its data", self.cell.key));
        loop {
            match worker.hear::<Answer>(deadline, session.resident_limit, &session.stop)? {
                Heard::Message(Answer::Done(done)) => {
                    self.write()?;
                    worker.finish();
                    session.term.advance(self.cell.seconds - self.moved, "");
                    return Ok(Ok(done));
                }
                Heard::Message(Answer::Ended { outcome, reason }) => {
                    return Ok(Err(Ending { outcome, reason }));
                }
                Heard::Ended(ending) => return Ok(Err(ending)),
                Heard::Message(Answer::Started { step, curve }) => {
                    if step > 0 {
                        session.term.say(&format!("{}: goes on behind step {step}", self.cell.key));
                    }
                    self.curve.points = curve;
                    (self.started, self.spoken) = (Instant::now(), Instant::now());
                    self.at(step, None, session);
                }
                Heard::Message(Answer::Step { step, loss, seconds }) => {
                    self.seconds.push(seconds);
                    self.at(step, Some(loss), session);
                }
                Heard::Message(Answer::Doing { what }) => {
                    session.term.at(&format!("{}: {what}", self.cell.key));
                }
                Heard::Message(Answer::Evaluated(point)) => {
                    self.curve.points.push(point);
                    self.write()?;
                    drawn(&self.curve);
                }
            }
        }
    }

    /// Moves the bar; without a terminal a line every minute.
    fn at(&mut self, step: u64, loss: Option<f64>, session: &mut Session) {
        let share = self.cell.seconds * step as f64 / self.request.steps().max(1) as f64;
        session.term.advance(share - self.moved, "");
        self.moved = share;
        let loss = loss.map_or_else(String::new, |loss| format!(" loss {loss:.4}"));
        let shown = self.request.shown();
        let best = shown.best(&self.curve.points);
        let best = best.map_or_else(String::new, |best| format!(" best {best:.2} {}", shown.unit));
        let text = format!("{} step {step}/{}{loss}{best}", self.cell.key, self.request.steps());
        session.term.at(&text);
        if self.spoken.elapsed() > Duration::from_secs(60) && !session.term.has_bar() {
            self.spoken = Instant::now();
            session.term.say(&format!("{text} after {}", clock(self.started.elapsed().as_secs_f64())));
        }
    }

    /// Writes `curve.csv` beside the checkpoints.
    fn write(&self) -> Result<(), RunError> {
        let path = self.place.folder.join("curve.csv");
        let text = curve_csv(&self.curve.points, &self.request.shown());
        file::write(&path, text.as_bytes()).map_err(RunError::file(path))
    }
}

fn curve_csv(points: &[Point], shown: &Shown) -> String {
    let mut text = format!("step,train_loss,validation_loss,{}\n", shown.name);
    for Point { step, train_loss, score } in points {
        let value = (shown.value)(score);
        text.push_str(&format!("{step},{train_loss:.6},{:.6},{value:.4}\n", score.loss));
    }
    text
}

/// The curve of a finished cell.
pub fn curve_file(run: &std::path::Path, key: &str) -> PathBuf {
    folder(run, key).join("curve.csv")
}

/// The row of a cell without a result; its metric is the cell's.
fn ended(row: &Row, ending: &Ending) -> Vec<Row> {
    vec![row.ended(ending.outcome, Some(ending.reason.clone()))]
}

fn rows<J: Job>(row: &Row, request: &J, done: &Done, seconds: &[f64]) -> Vec<Row> {
    let words: Vec<&str> = [&row.differs, &done.differs].into_iter().flatten().map(String::as_str).collect();
    let row = Row {
        peak_bytes: done.peak_bytes,
        fraction: row.fraction.map(|part| part * done.data_share),
        differs: (!words.is_empty()).then(|| words.join("; ")),
        ..row.ended(Outcome::Ok, None)
    };
    let plain = Row { published: None, ..row.clone() };
    let mut rows = Vec::new();
    for (index, measure) in done.measures.iter().enumerate() {
        let mut row = if index == 0 { Row { n: Some(1), ..row.clone() } } else { plain.clone() };
        if let Some(task) = &measure.task {
            row.published = request.published(task);
            row.task = Some(task.clone());
        }
        if let Some((std, n)) = measure.spread {
            (row.std, row.n) = (Some(std), Some(n));
        }
        rows.push(row.with(&measure.metric, &measure.unit, Some(measure.value)));
    }
    let time = plain.with("step_time", "s", None);
    rows.push(match Summary::of(seconds) {
        Some(step) => Row { value: Some(step.median), std: step.std, n: Some(step.n as u64), ..time },
        None => time.ended(
            Outcome::Ok,
            Some("the run was stopped after its last step, and went on from there".to_owned()),
        ),
    });
    rows
}

fn samples(seconds: &[f64]) -> Vec<Samples> {
    vec![Samples { metric: "step_time".to_owned(), unit: "s".to_owned(), values: seconds.to_vec() }]
}

fn tell(cell: &Cell, rows: &[Row], (number, of): (usize, usize)) -> String {
    let result = rows.first().map_or_else(String::new, |row| match row.value {
        Some(value) => format!("{value:.2} {}", row.unit),
        None => format!("{}: {}", row.outcome, row.error.as_deref().unwrap_or("")),
    });
    format!("[{number}/{of}] {}: {result}", cell.key)
}
