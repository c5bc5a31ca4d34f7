//! The parent's side: workers that take turns, and rows as cells end.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use super::plan::Request;
use super::rows;
use super::turns::{self, Bench, Started, Turned};
use super::work::{Answer, Turn};
use crate::config::units::Bytes;
use crate::protocol::Task;
use crate::protocol::model_spec::ModelSpec;
use crate::record::{Outcome, Row};
use crate::run::outcome::Ending;
use crate::run::plan::{Cell, Plan};
use crate::run::session::Session;
use crate::run::worker::{Heard, Launcher, Worker};
use crate::run::{RunError, Stop};
use crate::stats::{Summary, median};
use crate::term::Warning;

/// Runs every cell of `plan` that has no rows yet. `red`: mechanisms whose check is red, with the reason;
/// they get no speed.
///
/// # Errors
/// Ctrl-C, a full disk: what is finished stays.
pub fn conduct(
    plan: &Plan,
    requests: &[Option<Request>],
    red: &HashMap<String, String>,
    session: &mut Session,
) -> Result<(), RunError> {
    let mut at = 0;
    let mut scattered = Scattered::default();
    while at < plan.cells.len() {
        let place = |cell: &Cell| (cell.row.len, cell.row.batch, cell.row.pass, cell.row.seed);
        let same = plan.cells[at..].iter().take_while(|cell| place(cell) == place(&plan.cells[at]));
        let group: Vec<usize> = (at..at + same.count()).collect();
        at += group.len();
        let mut workers = Workers {
            plan,
            requests,
            session: &mut *session,
            alive: HashMap::new(),
            scattered: &mut scattered,
        };
        let mut cells = Vec::new();
        for &cell in &group {
            if workers.settle(cell, red)? {
                cells.push(cell);
            }
        }
        let limit = workers.session.memory_limit;
        let budget = |cell: usize| requests[cell].as_ref().map_or(NO_BUDGET, Request::budget);
        let result = turns::run(&cells, budget, limit, &mut workers);
        if let Err(error) = result {
            workers.interrupt(&cells);
            return Err(error);
        }
    }
    scattered.tell(session);
    Ok(())
}

/// Cells with many outliers: how many, and the worst one.
#[derive(Default)]
struct Scattered {
    cells: usize,
    worst: Option<Warning>,
    share: f64,
}

impl Scattered {
    fn look(&mut self, key: &str, samples: &[f64]) {
        let Some(summary) = Summary::of(samples) else { return };
        let share = summary.outliers as f64 / summary.n as f64;
        if summary.n < 10 || share < 0.1 {
            return;
        }
        self.cells += 1;
        if share > self.share {
            self.share = share;
            let (count, n) = (summary.outliers, summary.n);
            self.worst = Some(Warning::Outliers { cell: key.to_owned(), count, n });
        }
    }

    fn tell(&self, session: &Session) {
        if let Some(worst) = &self.worst {
            session.term.warn(worst);
        }
        if self.cells > 1 {
            let more = self.cells - 1;
            session.term.warn(&Warning::Other(format!("{more} more cells have 10 % outliers or more")));
        }
    }
}

const NO_BUDGET: turns::Budget = turns::Budget { seconds: 0.0, min_runs: 1, runs: 1 };

/// A worker and what is known of it.
struct Running {
    worker: Worker,
    /// How long it may still compute; waiting for others does not count.
    left: Duration,
    peak: Option<u64>,
    held: u64,
}

struct Workers<'a> {
    plan: &'a Plan,
    requests: &'a [Option<Request>],
    session: &'a mut Session,
    alive: HashMap<usize, Running>,
    scattered: &'a mut Scattered,
}

impl Workers<'_> {
    /// Whether `cell` has to run. Writes its rows if not: it cannot, may not, or need not.
    fn settle(&mut self, index: usize, red: &HashMap<String, String>) -> Result<bool, RunError> {
        let cell = &self.plan.cells[index];
        if self.session.is_done(cell) {
            self.session.term.advance(cell.seconds, &format!("{}: done before", cell.key));
            return Ok(false);
        }
        let ending = if self.requests[index].is_none() {
            Some(Ending::new(Outcome::Unsupported, cell.row.error.clone().unwrap_or_default()))
        } else if let Some(reason) = red.get(&cell.row.model) {
            Some(Ending::new(Outcome::Failed, format!("its check is red: {reason}")))
        } else {
            self.ran_out_before(cell)
        };
        let Some(ending) = ending else { return Ok(true) };
        self.write(index, &[], None, Some(&ending))?;
        Ok(false)
    }

    /// The shorter cell of the same model that ran out of memory or time.
    fn ran_out_before(&self, cell: &Cell) -> Option<Ending> {
        let identity = |row: &Row| (row.model.clone(), row.variant.clone(), row.batch, row.pass, row.seed);
        let shorter = self
            .plan
            .cells
            .iter()
            .filter(|other| other.row.len < cell.row.len && identity(&other.row) == identity(&cell.row));
        shorter.into_iter().find_map(|other| {
            let outcome = self.session.outcome(&other.key)?;
            let len = other.row.len?;
            matches!(outcome, Outcome::Oom | Outcome::Timeout)
                .then(|| Ending::new(Outcome::Implied, format!("{outcome} at length {len}")))
        })
    }

    fn write(
        &mut self,
        index: usize,
        samples: &[f64],
        peak: Option<u64>,
        ending: Option<&Ending>,
    ) -> Result<(), RunError> {
        let cell = &self.plan.cells[index];
        let rows = rows::rows(&cell.row, samples, peak, ending);
        let line = tell(cell, &rows[1], ending, (self.session.finished() + 1, self.plan.cells.len()));
        self.scattered.look(&cell.key, samples);
        self.session.record(cell, rows, rows::samples(samples))?;
        self.session.term.advance(cell.seconds, &line);
        Ok(())
    }

    /// Rows of the cells that were stopped on the way; they run again.
    fn interrupt(&mut self, cells: &[usize]) {
        self.alive.clear();
        for &index in cells {
            let cell = &self.plan.cells[index];
            if !self.session.is_done(cell) {
                let ending = Ending::new(Outcome::Interrupted, "stopped before it was finished");
                self.session.pass_over(cell, rows::rows(&cell.row, &[], None, Some(&ending)));
            }
        }
    }

    fn hear(&mut self, index: usize) -> Result<Answer, RunError> {
        let others: u64 = self.alive.iter().filter(|(other, _)| **other != index).map(|(_, r)| r.held).sum();
        let limit = self.session.resident_limit.saturating_sub(others);
        let Some(running) = self.alive.get_mut(&index) else {
            return Err(RunError::Internal("a worker that was never started had its turn".to_owned()));
        };
        let start = Instant::now();
        let deadline = start.checked_add(running.left);
        let heard = running.worker.hear::<Answer>(deadline, limit, &self.session.stop)?;
        running.left = running.left.saturating_sub(start.elapsed());
        let answer = match heard {
            Heard::Message(answer) => answer,
            Heard::Ended(ending) => Answer::from(ending),
        };
        if let Answer::Samples { peak_bytes, held_bytes, .. } = &answer {
            (running.peak, running.held) = (*peak_bytes, *held_bytes);
        }
        Ok(answer)
    }
}

impl Bench for Workers<'_> {
    fn start(&mut self, index: usize, limit: u64) -> Result<Started, RunError> {
        let cell = &self.plan.cells[index];
        let Some(request) = &self.requests[index] else {
            return Err(RunError::Internal(format!("{} has no request", cell.key)));
        };
        self.session.term.at(&cell.key);
        let task = Task::Speed { memory_limit: limit, request: request.clone() };
        let worker = Worker::start(&self.session.launcher, &task)?;
        let left = Duration::try_from_secs_f64(request.timeout).unwrap_or(Duration::MAX);
        self.alive.insert(index, Running { worker, left, peak: None, held: 0 });
        match self.hear(index)? {
            Answer::Samples { held_bytes, .. } => Ok(Started::Ready { held: held_bytes }),
            Answer::Ended { outcome, reason } => Ok(Started::Ended(Ending { outcome, reason })),
        }
    }

    fn turn(&mut self, index: usize, seconds: f64, runs: usize) -> Result<Turned, RunError> {
        self.session.term.at(&self.plan.cells[index].key);
        if let Some(running) = self.alive.get_mut(&index) {
            running.worker.send(&Turn { seconds, runs: runs as u64 });
        }
        match self.hear(index)? {
            Answer::Samples { seconds, held_bytes, .. } => Ok(Turned::Samples(seconds, held_bytes)),
            Answer::Ended { outcome, reason } => Ok(Turned::Ended(Ending { outcome, reason })),
        }
    }

    fn done(&mut self, index: usize, samples: Vec<f64>, ending: Option<Ending>) -> Result<(), RunError> {
        let peak = match self.alive.remove(&index) {
            Some(running) => {
                running.worker.finish();
                running.peak
            }
            None => None,
        };
        self.write(index, &samples, peak, ending.as_ref())
    }

    fn put_back(&mut self, index: usize) {
        self.alive.remove(&index);
    }
}

/// A line per finished cell: `[3/24] ls n1024 b1 train s0: 12.3 steps/s (n 20), peak 81 MiB`.
fn tell(cell: &Cell, steps: &Row, ending: Option<&Ending>, (number, of): (usize, usize)) -> String {
    let what = match (ending, steps.value) {
        (Some(ending), _) => format!("{}: {}", ending.outcome, ending.reason),
        (None, Some(value)) => {
            let peak = steps.peak_bytes.map_or_else(String::new, |peak| format!(", peak {}", Bytes(peak)));
            format!("{value:.3} steps/s (n {}){peak}", steps.n.unwrap_or(0))
        }
        (None, None) => "no sample".to_owned(),
    };
    format!("[{number}/{of}] {}: {what}", cell.key)
}

/// Multiply-adds per second of one step at length `len` (or the request's, if shorter); none if it cannot run.
///
/// # Errors
/// A worker that cannot be started.
pub fn probe(
    request: &Request,
    len: u64,
    launcher: &Launcher,
    memory_limit: u64,
    stop: &Stop,
) -> Result<Option<f64>, RunError> {
    let len = len.min(request.spec.len);
    let spec = ModelSpec { len, batch: 1, ..request.spec.clone() };
    let resolved = spec.choice().and_then(|choice| spec.measured(&choice));
    let Ok(resolved) = resolved else { return Ok(None) };
    let flops = spec.step_flops(resolved.flops(len as usize));
    let request = Request { spec, warmup: 1, max_time: 0.1, timeout: 60.0, ..request.clone() };
    let mut worker = Worker::start(launcher, &Task::Speed { memory_limit, request })?;
    let deadline = Instant::now() + Duration::from_secs(60);
    for _ in 0..2 {
        match worker.hear::<Answer>(Some(deadline), memory_limit, stop)? {
            Heard::Message(Answer::Samples { seconds, .. }) => match median(&seconds) {
                Some(seconds) => {
                    worker.finish();
                    return Ok(Some(flops / seconds.max(1e-9)));
                }
                None => worker.send(&Turn { seconds: 0.05, runs: 5 }),
            },
            Heard::Message(Answer::Ended { .. }) | Heard::Ended(_) => break,
        }
    }
    Ok(None)
}
