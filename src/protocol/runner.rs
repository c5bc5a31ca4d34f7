//! The one runner of cells: those that are done are passed over, those that cannot be run get their rows, the others are
//! computed as their protocol does; what is finished is recorded at once, what is stopped runs again.

use std::collections::HashMap;
use std::path::PathBuf;

pub use super::definition::Runner;
use super::definition::WorkerContext;
use super::golden_gate;
use crate::run::RunError;
use crate::run::journal::Samples;
use crate::run::outcome::CellFailure;
use crate::run::plan::{self, Cell};
use crate::run::session::Session;
use crate::run::worker::Worker;
use crate::term::{Warning, clock};
use effattn_record::stats::Summary;
use effattn_record::{Outcome, Row};

/// The result of a cell.
pub struct CellResult {
    /// Its rows.
    pub rows: Vec<Row>,
    /// Raw samples.
    pub samples: Vec<Samples>,
    /// What is said of it.
    pub summary: String,
    /// Predicted seconds that the progress bar was moved by already.
    pub progress_seconds: f64,
}

impl Runner<'_> {
    /// Runs every cell that has no rows yet.
    ///
    /// # Errors
    /// Ctrl-C, a full disk: what is finished stays.
    pub fn run(mut self) -> Result<(), RunError> {
        self.announce();
        let red = if self.protocol.needs_golden_check { self.check()? } else { HashMap::new() };
        self.session.term.start_progress(self.plan.seconds());
        let (cells, mut at) = (&self.plan.cells, 0);
        let mut scattered = Scattered::default();
        while at < cells.len() {
            let group = cells[at..].iter().take_while(|cell| {
                std::ptr::eq(*cell, &raw const cells[at]) || (self.protocol.same_group)(&cells[at], cell)
            });
            let group = at..at + group.count();
            at = group.end;
            let mut open = Vec::new();
            for index in group.clone() {
                if self.needs_compute(index, &red)? {
                    open.push(index);
                }
            }
            if let Err(error) = (self.protocol.compute)(&mut self, &open) {
                self.interrupt(&open);
                return Err(error);
            }
            if self.protocol.times_steps() {
                group.for_each(|index| {
                    scattered.look(&cells[index].key, self.session.samples(&cells[index].key))
                });
            }
        }
        scattered.tell(self.session);
        Ok(())
    }

    /// `12 cells, about 3:20; results in results/speed/...`.
    fn announce(&self) {
        let waiting = self.plan.cells.iter().filter(|cell| !self.session.is_done(cell));
        let (count, seconds) = waiting.fold((0, 0.0), |(n, sum), cell| (n + 1, sum + cell.seconds));
        let what = match (self.protocol.reuses_finished, count) {
            (true, 1) => "run",
            (true, _) => "runs",
            (false, 1) => "cell",
            (false, _) => "cells",
        };
        let folder = self.session.path().display();
        self.session.term.info(&match count {
            0 => format!("every {} is finished already; results in {folder}", what.trim_end_matches('s')),
            _ => format!("{count} {what}, about {}; results in {folder}", clock(seconds)),
        });
    }

    /// Mechanisms whose golden files are red, with the reason.
    fn check(&self) -> Result<HashMap<golden_gate::GateKey, String>, RunError> {
        let waiting =
            self.plan.cells.iter().filter(|cell| !self.session.is_done(cell) && !cell.request.is_null());
        let places: Vec<golden_gate::GateKey> =
            waiting.map(|cell| golden_gate::GateKey::of(&cell.row)).collect();
        golden_gate::check(&places, self.session)
    }

    /// Whether `cell` has to be computed. Writes its rows if not: it cannot, may not, or need not.
    fn needs_compute(
        &mut self,
        index: usize,
        red: &HashMap<golden_gate::GateKey, String>,
    ) -> Result<bool, RunError> {
        let cell = &self.plan.cells[index];
        if self.session.is_done(cell) {
            self.session.term.advance(cell.seconds, &format!("{}: done before", self.plan.name(index)));
            return Ok(false);
        }
        let ending = if cell.request.is_null() {
            Some(CellFailure::new(Outcome::Unsupported, cell.row.error.clone().unwrap_or_default()))
        } else if let Some(reason) = red.get(&golden_gate::GateKey::of(&cell.row)) {
            Some(CellFailure::new(Outcome::Failed, format!("its check is red: {reason}")))
        } else {
            self.implied_by_shorter(cell)
        };
        let Some(ending) = ending else { return Ok(true) };
        self.record_failure(index, &ending, 0.0)?;
        Ok(false)
    }

    /// The shorter cell that differs in nothing but its length and ran out of memory or time.
    fn implied_by_shorter(&self, cell: &Cell) -> Option<CellFailure> {
        let shorter = self.plan.cells.iter().filter(|other| {
            !cell.series.is_empty() && other.series == cell.series && other.row.len < cell.row.len
        });
        shorter.into_iter().find_map(|other| {
            let outcome = self.session.outcome(&other.key)?;
            let len = other.row.len?;
            matches!(outcome, Outcome::Oom | Outcome::Timeout)
                .then(|| CellFailure::new(Outcome::Implied, format!("{outcome} at length {len}")))
        })
    }

    /// Records cell `index` with its result.
    pub fn record_result(&mut self, index: usize, finished: CellResult) -> Result<(), RunError> {
        let CellResult { rows, samples, summary, progress_seconds } = finished;
        let (cell, of) = (&self.plan.cells[index], self.plan.cells.len());
        let line = format!("[{}/{of}] {}: {summary}", self.session.finished() + 1, self.plan.name(index));
        self.session.record(cell, rows, samples)?;
        self.session.term.advance(cell.seconds - progress_seconds, &line);
        Ok(())
    }

    /// Records cell `index`, which ended without a result, `progress_seconds` into the progress bar.
    pub fn record_failure(
        &mut self,
        index: usize,
        failure: &CellFailure,
        progress_seconds: f64,
    ) -> Result<(), RunError> {
        let rows = (self.protocol.failure_rows)(&self.plan.cells[index].row, failure);
        let summary = format!("{}: {}", failure.outcome, failure.reason);
        self.record_result(index, CellResult { rows, samples: Vec::new(), summary, progress_seconds })
    }

    /// Rows of the cells that were stopped on the way; they run again.
    fn interrupt(&mut self, cells: &[usize]) {
        for &index in cells {
            let cell = &self.plan.cells[index];
            if !self.session.is_done(cell) {
                let ending = CellFailure::new(Outcome::Interrupted, "stopped before it was finished");
                self.session.add_interrupted(cell, (self.protocol.failure_rows)(&cell.row, &ending));
            }
        }
    }

    /// Starts a worker for cell `index`, which may reach `memory_limit` live bytes.
    ///
    /// # Errors
    /// The system cannot start a process.
    pub fn start(
        &self,
        index: usize,
        memory_limit: u64,
        conditions: WorkerContext,
    ) -> Result<Worker, RunError> {
        let protocol = self.protocol.name.to_owned();
        let request = self.plan.cells[index].request.clone();
        let order = super::WorkerRequest::Cell { protocol, memory_limit, request, conditions };
        Worker::start(&self.session.launcher, &order)
    }

    /// The folder of cell `index` in the folder of the run.
    pub fn folder(&self, index: usize) -> PathBuf {
        plan::folder(self.session.path(), &self.plan.cells[index].key)
    }
}

/// The request of `cell`.
///
/// # Errors
/// A cell of another protocol.
pub fn request<R: serde::de::DeserializeOwned>(cell: &Cell) -> Result<R, RunError> {
    serde_json::from_value(cell.request.clone())
        .map_err(|error| RunError::Internal(format!("{} has no request of its protocol: {error}", cell.key)))
}

/// Cells with many outliers: how many, and the worst one.
#[derive(Default)]
struct Scattered {
    cells: usize,
    worst: Option<Warning>,
    share: f64,
}

impl Scattered {
    fn look(&mut self, key: &str, samples: &[Samples]) {
        let times = samples.iter().find(|samples| samples.metric == "step_time");
        let Some(summary) = times.and_then(|times| Summary::of(&times.values)) else { return };
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
