//! The cells of a plan under way: the handle by which a protocol starts their workers and records their results.

use std::path::PathBuf;

use super::curve::CellCurve;
use super::worker_context::{WorkerContext, WorkerRequest};
use crate::run::RunError;
use crate::run::journal::Samples;
use crate::run::outcome::CellFailure;
use crate::run::plan::{self, Cell, Plan};
use crate::run::session::Session;
use crate::run::worker::Worker;
use effattn_record::Row;

/// The rows of a cell that ended without a result.
pub type FailureRows<'a> = Box<dyn Fn(&Row, &CellFailure) -> Vec<Row> + 'a>;

/// A run of the cells of a plan.
pub struct CellRunner<'a> {
    /// The plan.
    pub plan: &'a Plan,
    /// The run.
    pub session: &'a mut Session,
    /// Paths and options of its workers.
    pub conditions: WorkerContext,
    /// Called with the learning curves so far whenever one has grown.
    pub draw: &'a mut dyn FnMut(&[CellCurve]),
    /// Learning curves of this run.
    pub curves: Vec<CellCurve>,
    /// The rows of a cell that ended without a result.
    pub failure_rows: FailureRows<'a>,
    /// Mechanisms that were to be checked and that no golden file covers: their rows say so.
    pub unverified: Vec<String>,
}

/// What rows of a mechanism say that no golden file covers.
const UNVERIFIED: &str = "unverified: no golden file covers it";

/// The result of a cell.
pub struct CellResult {
    /// Its rows.
    pub rows: Vec<Row>,
    /// Raw samples.
    pub samples: Vec<Samples>,
    /// One-line summary for the log.
    pub summary: String,
    /// Predicted seconds that the progress bar was moved by already.
    pub progress_seconds: f64,
}

impl CellRunner<'_> {
    /// Records cell `index` with its result.
    pub fn record_result(&mut self, index: usize, finished: CellResult) -> Result<(), RunError> {
        let CellResult { mut rows, samples, summary, progress_seconds } = finished;
        mark(&mut rows, &self.unverified);
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
        let rows = (self.failure_rows)(&self.plan.cells[index].row, failure);
        let summary = format!("{}: {}", failure.outcome, failure.reason);
        self.record_result(index, CellResult { rows, samples: Vec::new(), summary, progress_seconds })
    }

    /// Starts a worker for cell `index`, which may reach `memory_limit` live bytes.
    pub fn start(
        &self,
        index: usize,
        memory_limit: u64,
        conditions: WorkerContext,
    ) -> Result<Worker, RunError> {
        let protocol = self.plan.command.clone();
        let Cell { request, row, .. } = &self.plan.cells[index];
        let order = WorkerRequest::Cell { protocol, memory_limit, request: request.clone(), conditions };
        Worker::start(&self.session.launcher.of_kernel(&row.kernel), &order)
    }

    /// The folder of cell `index` in the folder of the run.
    pub fn folder(&self, index: usize) -> PathBuf {
        plan::folder(self.session.path(), &self.plan.cells[index].key)
    }
}

/// Says in the rows of our own mechanisms among `unverified` that nothing proves them.
fn mark(rows: &mut [Row], unverified: &[String]) {
    let ours = |row: &&mut Row| row.other_program().is_none() && unverified.contains(&row.model);
    for row in rows.iter_mut().filter(ours) {
        let said = row.differs.take().into_iter().chain([UNVERIFIED.to_owned()]);
        row.differs = Some(said.collect::<Vec<_>>().join("; "));
    }
}

/// The request of `cell`.
pub fn request<R: serde::de::DeserializeOwned>(cell: &Cell) -> Result<R, RunError> {
    serde_json::from_value(cell.request.clone())
        .map_err(|error| RunError::Internal(format!("{} has no request of its protocol: {error}", cell.key)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_mechanisms_that_nothing_proves_say_so() {
        let mut rows = ["mine", "full", "mine"].map(|model| Row::new("speed", model));
        rows[0].differs = Some("batch 1 (2)".to_owned());
        mark(&mut rows, &["mine".to_owned()]);
        let differs = rows.map(|row| row.differs);
        let said = |text: &str| Some(text.to_owned());
        assert_eq!(differs, [said(&format!("batch 1 (2); {UNVERIFIED}")), None, said(UNVERIFIED)]);
    }
}
