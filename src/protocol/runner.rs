//! The one runner of cells: those that are done are passed over, those that cannot be run get their rows, the others are
//! computed as their protocol does; what is finished is recorded at once, what is stopped runs again.

use std::collections::HashMap;

use super::cell_runner::CellRunner;
use super::curve::CellCurve;
use super::definition::{Protocol, WorkerContext};
use super::golden_gate;
use crate::run::RunError;
use crate::run::journal::Samples;
use crate::run::outcome::CellFailure;
use crate::run::plan::{Cell, Plan};
use crate::run::session::Session;
use crate::term::{Warning, clock};
use effattn_record::Outcome;
use effattn_record::stats::Summary;

/// A protocol and the cells that it computes.
pub struct Runner<'a> {
    protocol: &'static dyn Protocol,
    cells: CellRunner<'a>,
}

impl<'a> Runner<'a> {
    /// A run of `plan` by `protocol`; `draw` is called with the learning curves so far whenever one has grown.
    pub fn new(
        protocol: &'static dyn Protocol,
        plan: &'a Plan,
        session: &'a mut Session,
        conditions: WorkerContext,
        draw: &'a mut dyn FnMut(&[CellCurve]),
    ) -> Self {
        let failure_rows = Box::new(|row: &_, failure: &_| protocol.failure_rows(row, failure));
        let (curves, unverified) = (Vec::new(), Vec::new());
        let cells = CellRunner { plan, session, conditions, draw, curves, failure_rows, unverified };
        Self { protocol, cells }
    }

    /// Runs every cell that has no rows yet.
    pub fn run(mut self) -> Result<(), RunError> {
        self.announce();
        let red = self.check()?;
        self.cells.session.term.start_progress(self.cells.plan.seconds());
        let (cells, mut at) = (&self.cells.plan.cells, 0);
        let mut scattered = Scattered::default();
        while at < cells.len() {
            let group = cells[at..].iter().take_while(|cell| {
                std::ptr::eq(*cell, &raw const cells[at]) || self.protocol.same_group(&cells[at], cell)
            });
            // trained at the same time: whatever comes next may begin
            let count = if self.at_once() { cells.len() - at } else { group.count() };
            let group = at..at + count;
            at = group.end;
            let mut open = Vec::new();
            for index in group.clone() {
                if self.needs_compute(index, &red)? {
                    open.push(index);
                }
            }
            if let Err(error) = self.protocol.compute(&mut self.cells, &open) {
                self.interrupt(&open);
                return Err(error);
            }
            if self.protocol.info().times_steps() {
                group.for_each(|index| {
                    scattered.look(&cells[index].key, self.cells.session.samples(&cells[index].key))
                });
            }
        }
        scattered.tell(self.cells.session);
        Ok(())
    }

    /// Whether several cells are computed at the same time.
    fn at_once(&self) -> bool {
        self.cells.plan.settings["jobs"].as_u64().is_some_and(|jobs| jobs > 1)
    }

    /// `12 cells, about 3:20; results in results/speed/...`.
    fn announce(&self) {
        let waiting = self.cells.plan.cells.iter().filter(|cell| !self.cells.session.is_done(cell));
        let (count, seconds) = waiting.fold((0, 0.0), |(n, sum), cell| (n + 1, sum + cell.seconds));
        let what = match (self.protocol.trains(), count) {
            (true, 1) => "run",
            (true, _) => "runs",
            (false, 1) => "cell",
            (false, _) => "cells",
        };
        let folder = self.cells.session.path().display();
        self.cells.session.term.info(&match count {
            0 => format!("every {} is finished already; results in {folder}", what.trim_end_matches('s')),
            _ => format!("{count} {what}, about {}; results in {folder}", clock(seconds)),
        });
    }

    /// Mechanisms whose golden files are red, with the reason: ours where the protocol wants it, those of programs always.
    fn check(&mut self) -> Result<HashMap<golden_gate::GateKey, CellFailure>, RunError> {
        let waiting = self
            .cells
            .plan
            .cells
            .iter()
            .filter(|cell| !self.cells.session.is_done(cell) && !cell.request.is_null());
        let (mut ours, mut theirs) = (Vec::new(), Vec::new());
        for cell in waiting {
            let place = golden_gate::GateKey::of(&cell.row);
            match cell.request.get("program").and_then(serde_json::Value::as_str) {
                Some(word) => theirs.push((place, word)),
                None if self.protocol.info().needs_golden_check => ours.push(place),
                None => {}
            }
        }
        let (mut red, unverified) = golden_gate::check(&ours, self.cells.session)?;
        self.cells.unverified = unverified;
        red.extend(golden_gate::check_programs(&theirs, self.cells.session)?);
        Ok(red)
    }

    /// Whether `cell` has to be computed. Writes its rows if not: it cannot, may not, or need not.
    fn needs_compute(
        &mut self,
        index: usize,
        red: &HashMap<golden_gate::GateKey, CellFailure>,
    ) -> Result<bool, RunError> {
        let cell = &self.cells.plan.cells[index];
        if self.cells.session.is_done(cell) {
            self.cells
                .session
                .term
                .advance(cell.seconds, &format!("{}: done before", self.cells.plan.name(index)));
            return Ok(false);
        }
        let ending = if cell.request.is_null() {
            Some(CellFailure::new(Outcome::Unsupported, cell.row.error.clone().unwrap_or_default()))
        } else if let Some(failure) = red.get(&golden_gate::GateKey::of(&cell.row)) {
            Some(failure.clone())
        } else {
            self.implied_by_shorter(cell)
        };
        let Some(ending) = ending else { return Ok(true) };
        self.cells.record_failure(index, &ending, 0.0)?;
        Ok(false)
    }

    /// The shorter cell that differs in nothing but its length and ran out of memory or time.
    fn implied_by_shorter(&self, cell: &Cell) -> Option<CellFailure> {
        let shorter = self.cells.plan.cells.iter().filter(|other| {
            !cell.series.is_empty() && other.series == cell.series && other.row.len < cell.row.len
        });
        shorter.into_iter().find_map(|other| {
            let outcome = self.cells.session.outcome(&other.key)?;
            let len = other.row.len?;
            matches!(outcome, Outcome::Oom | Outcome::Timeout)
                .then(|| CellFailure::new(Outcome::Implied, format!("{outcome} at length {len}")))
        })
    }

    /// Rows of the cells that were stopped on the way; they run again.
    fn interrupt(&mut self, cells: &[usize]) {
        for &index in cells {
            let cell = &self.cells.plan.cells[index];
            let begun = !self.at_once() || self.cells.folder(index).is_dir();
            if begun && !self.cells.session.is_done(cell) {
                let ending = CellFailure::new(Outcome::Interrupted, "stopped before it was finished");
                self.cells.session.add_interrupted(cell, self.protocol.failure_rows(&cell.row, &ending));
            }
        }
    }
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
            let more = match self.cells - 1 {
                1 => "1 more cell has".to_owned(),
                more => format!("{more} more cells have"),
            };
            session.term.warn(&Warning::Other(format!("{more} 10 % outliers or more")));
        }
    }
}
