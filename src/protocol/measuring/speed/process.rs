//! The processes that take turns: a worker of this program, or another program.

use std::time::{Duration, Instant};

use serde::de::DeserializeOwned;

use super::limit::limit_seconds;
use super::plan::{PROFILE_TIME, Timing};
use super::rows;
use super::worker::{Profiled, Stepped, TurnRequest};
use crate::protocol::measuring::program::{Finished, ProgramCell};
use crate::protocol::measuring::worker::{Answer, Bounds, time_limit};
use crate::run::RunError;
use crate::run::outcome::CellFailure;
use crate::run::plan::Cell;
use crate::run::session::Session;
use crate::run::worker::Worker;
use crate::term::Warning;
use effattn_kernel::profile::Product;
use effattn_record::Row;

/// A started cell.
pub trait CellProcess {
    /// Its process.
    fn id(&self) -> u32;

    /// Bytes that it holds and may reach again.
    fn held(&self) -> u64;

    /// Seconds that it has moved the progress bar.
    fn progress(&self) -> f64 {
        0.0
    }

    /// Steps for `seconds`, at most `runs` times, within `limit` resident bytes: the seconds of every step.
    fn turn(&mut self, seconds: f64, runs: usize, limit: u64, session: &mut Session) -> Answer<Vec<f64>>;

    /// Measures what is left after the turns and ends the process: its rows, and the seconds that it moved the progress bar.
    fn finish(self: Box<Self>, end: &CellEnd, session: &mut Session) -> Result<(Vec<Row>, f64), RunError>;
}

/// A cell after its last turn.
pub struct CellEnd<'a> {
    pub cell: &'a Cell,
    /// Its name in its plan.
    pub name: &'a str,
    /// Resident bytes that it may reach.
    pub limit: u64,
    /// Seconds of the steps that count.
    pub samples: &'a [f64],
    /// How it ended, if early.
    pub failure: Option<&'a CellFailure>,
}

/// A worker of this program.
pub struct OwnProcess {
    worker: Worker,
    timing: Timing,
    /// How long it may still compute; waiting for others does not count.
    left: Duration,
    peak: Option<u64>,
    held: u64,
    /// Predicted seconds of the cell, and how many of them the progress bar shows.
    predicted: f64,
    progress: f64,
    /// The products of a step.
    products: Vec<(Product, u64)>,
}

impl OwnProcess {
    /// The `worker` of `cell`, which is warming up.
    pub fn new(worker: Worker, timing: Timing, cell: &Cell) -> Self {
        let left = time_limit(cell.timeout).unwrap_or(Duration::MAX);
        let (peak, held, progress, products) = Default::default();
        Self { worker, timing, left, peak, held, predicted: cell.seconds, progress, products }
    }

    /// Waits until it is warm, or has made its steps: their seconds.
    pub fn stepped(&mut self, limit: u64, session: &mut Session) -> Answer<Vec<f64>> {
        Ok(self.hear::<Stepped>(limit, session)?.map(
            |Stepped { seconds, peak_bytes, held_bytes, products }| {
                (self.peak, self.held) = (peak_bytes, held_bytes);
                self.products.extend(products);
                seconds
            },
        ))
    }

    fn hear<T: DeserializeOwned>(&mut self, resident_limit: u64, session: &mut Session) -> Answer<T> {
        let start = Instant::now();
        let bounds = Bounds { resident_limit, ..Bounds::of(session) };
        let answer = bounds.hear(&mut self.worker, start.checked_add(self.left))?;
        let spent = start.elapsed();
        self.left = self.left.saturating_sub(spent);
        let share = spent.as_secs_f64().min(self.predicted - self.progress).max(0.0);
        self.progress += share;
        session.term.advance(share, "");
        Ok(answer)
    }

    /// The rows about its operations.
    fn profile(&mut self, end: &CellEnd, session: &mut Session) -> Result<Vec<Row>, RunError> {
        let runs = self.timing.runs.max(2);
        self.worker.send(&TurnRequest { seconds: PROFILE_TIME, runs, profile: true });
        Ok(match self.hear::<Profiled>(end.limit, session)? {
            Ok(Profiled { steps, spent, rates }) => rows::operations(&end.cell.row, steps, &spent, rates),
            Err(CellFailure { outcome, reason }) => {
                let said = format!("{}: no profile, {outcome}: {reason}", end.name);
                session.term.warn(&Warning::Other(said));
                Vec::new()
            }
        })
    }

    /// The row that says how near its steps are to the limit, where their products are known.
    fn share_of_limit(&self, end: &CellEnd, session: &Session) -> Option<Row> {
        let fastest = end.samples.iter().copied().fold(f64::INFINITY, f64::min);
        let limit = limit_seconds(&self.products, session.launcher.threads, fastest)?;
        // the bytes stand in a column of every row
        let row = Row { peak_bytes: self.peak, ..end.cell.row.clone() };
        Some(rows::share_of_limit(&row, end.samples, limit))
    }
}

impl CellProcess for OwnProcess {
    fn id(&self) -> u32 {
        self.worker.id()
    }

    fn held(&self) -> u64 {
        self.held
    }

    fn progress(&self) -> f64 {
        self.progress
    }

    fn turn(&mut self, seconds: f64, runs: usize, limit: u64, session: &mut Session) -> Answer<Vec<f64>> {
        self.worker.send(&TurnRequest { seconds, runs: runs as u64, profile: false });
        self.stepped(limit, session)
    }

    fn finish(
        mut self: Box<Self>,
        end: &CellEnd,
        session: &mut Session,
    ) -> Result<(Vec<Row>, f64), RunError> {
        let profile = match end.failure {
            None if self.timing.profile => self.profile(end, session)?,
            _ => Vec::new(),
        };
        let share = if end.failure.is_none() { self.share_of_limit(end, session) } else { None };
        let mut rows = rows::rows(&end.cell.row, end.samples, self.peak, end.failure);
        rows.extend(share);
        rows.extend(profile);
        self.worker.finish();
        Ok((rows, self.progress))
    }
}

impl CellProcess for ProgramCell {
    fn id(&self) -> u32 {
        self.program.id()
    }

    fn held(&self) -> u64 {
        self.held
    }

    fn turn(&mut self, seconds: f64, runs: usize, limit: u64, session: &mut Session) -> Answer<Vec<f64>> {
        Ok(self.steps(runs as u64, seconds, limit, session)?.map(|steps| steps.seconds))
    }

    fn finish(self: Box<Self>, end: &CellEnd, session: &mut Session) -> Result<(Vec<Row>, f64), RunError> {
        let Finished { peak_bytes, clocks, version } = self.end(session)?;
        if end.failure.is_none() {
            let said = format!("{}: {clocks}", end.name);
            match clocks.disagree() {
                true => session.term.warn(&Warning::Other(said)),
                false => session.term.detail(&said),
            }
        }
        let row = Row { version, ..end.cell.row.clone() };
        Ok((rows::program_rows(&row, end.samples, peak_bytes, end.failure), 0.0))
    }
}
