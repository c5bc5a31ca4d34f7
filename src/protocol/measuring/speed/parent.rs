//! The parent's side: processes that take turns, and rows as cells end.

use std::collections::HashMap;

use super::bracket::Brackets;
use super::interleave::{self, Budget, CellSamples, CellWorkers, Started, TurnResult};
use super::plan::SpeedRequest;
use super::process::{CellEnd, CellProcess, OwnProcess};
use super::rows;
use crate::protocol::cell_runner::{CellResult, CellRunner, request};
use crate::protocol::measuring::program::{ProgramCell, WarmUp};
use crate::protocol::measuring::worker::Bounds;
use crate::protocol::worker_context::WorkerContext;
use crate::run::RunError;
use crate::run::outcome::CellFailure;
use crate::run::turn::{Judge, Turn};
use effattn_record::Row;
use effattn_record::config::settings::DeviceName;
use effattn_record::config::units::Bytes;

/// Lets the cells `open` take turns.
pub fn compute(runner: &mut CellRunner, open: &[usize]) -> Result<(), RunError> {
    let cells = &runner.plan.cells[..];
    let requests = open.iter().map(|&index| Ok((index, request(&cells[index])?)));
    let requests = requests.collect::<Result<HashMap<usize, SpeedRequest>, RunError>>()?;
    let limit = runner.session.memory_limit;
    let budget = |cell: usize| {
        // repeats leave most of the time limit to what was asked for
        let repeats = cells[cell].timeout.map_or(f64::INFINITY, |timeout| timeout / 4.0);
        Budget { repeats, ..requests[&cell].measure.budget() }
    };
    let brackets = (runner.plan.device == DeviceName::Cpu.to_string() && !open.is_empty())
        .then(|| Brackets::new(runner.session.launcher.threads, runner.session.steadiness().as_ref()));
    let mut workers = Workers { runner, requests: &requests, alive: HashMap::new(), brackets };
    interleave::run(open, budget, limit, &mut workers)
}

struct Workers<'a, 'b> {
    runner: &'a mut CellRunner<'b>,
    requests: &'a HashMap<usize, SpeedRequest>,
    alive: HashMap<usize, Box<dyn CellProcess>>,
    /// None on devices other than the processor, whose rate they would not tell.
    brackets: Option<Brackets>,
}

impl Workers<'_, '_> {
    /// Resident bytes that cell `index` may reach beside the others.
    fn resident_limit(&self, index: usize) -> u64 {
        let others = self.alive.iter().filter(|(other, _)| **other != index);
        let held: u64 = others.map(|(_, process)| process.held()).sum();
        self.runner.session.resident_limit.saturating_sub(held)
    }
}

impl CellWorkers for Workers<'_, '_> {
    fn start(&mut self, index: usize, limit: u64) -> Result<Started, RunError> {
        let (cell, request) = (&self.runner.plan.cells[index], &self.requests[&index]);
        self.runner.session.term.at(self.runner.plan.name(index));
        let resident_limit = self.resident_limit(index);
        let (process, warm): (Box<dyn CellProcess>, _) = match &request.program {
            Some(word) => {
                let warmup = WarmUp { steps: request.measure.warmup, seconds: request.measure.max_time };
                let (spec, session) = (&request.spec, &*self.runner.session);
                let bounds = Bounds { memory_limit: limit, resident_limit, ..Bounds::of(session) };
                match ProgramCell::start(word, spec, warmup, cell.timeout, bounds, session)? {
                    Ok(process) => (Box::new(process), Ok(())),
                    Err(failure) => return Ok(Started::Ended(failure)),
                }
            }
            None => {
                let worker = self.runner.start(index, limit, WorkerContext::default())?;
                let mut process = OwnProcess::new(worker, request.measure.clone(), cell);
                let warm = process.stepped(resident_limit, self.runner.session)?;
                (Box::new(process), warm.map(drop))
            }
        };
        let held = process.held();
        self.alive.insert(index, process);
        Ok(warm.map_or_else(Started::Ended, |()| Started::Ready { held }))
    }

    fn turn(&mut self, index: usize, seconds: f64, runs: usize) -> Result<TurnResult, RunError> {
        self.runner.session.term.at(self.runner.plan.name(index));
        let limit = self.resident_limit(index);
        let Some(process) = self.alive.get_mut(&index) else {
            return Err(RunError::Internal("a worker that was never started had its turn".to_owned()));
        };
        let id = process.id();
        let mut turn = || process.turn(seconds, runs, limit, self.runner.session);
        let (steps, bracket) = match &mut self.brackets {
            Some(brackets) => {
                let (steps, bracket) = brackets.around(&[id], turn);
                (steps, Some(bracket))
            }
            None => (turn(), None),
        };
        Ok(match steps? {
            Ok(seconds) => TurnResult::Steps(Turn { seconds, bracket }, self.alive[&index].held()),
            Err(failure) => TurnResult::Ended(failure),
        })
    }

    fn judge(&self) -> Option<Judge> {
        self.brackets.as_ref().map(Brackets::judge)
    }

    fn done(
        &mut self,
        index: usize,
        samples: CellSamples,
        ending: Option<CellFailure>,
    ) -> Result<(), RunError> {
        let (plan, limit) = (self.runner.plan, self.resident_limit(index));
        let (values, cell, failure) = (samples.values(), &plan.cells[index], ending.as_ref());
        let end = CellEnd { cell, name: plan.name(index), limit, samples: &values, failure };
        let (rows, progress_seconds) = match self.alive.remove(&index) {
            Some(process) => process.finish(&end, self.runner.session)?,
            None => (rows::rows(&cell.row, &values, None, failure), 0.0),
        };
        let summary = result_line(&rows[1], failure);
        let samples = rows::samples(&samples, self.judge());
        self.runner.record_result(index, CellResult { rows, samples, summary, progress_seconds })
    }

    fn requeue(&mut self, index: usize) {
        let progress = self.alive.remove(&index).map_or(0.0, |process| process.progress());
        self.runner.session.term.advance(-progress, "");
    }
}

/// What is said of a finished cell: `12.3 steps/s (n 20), peak 81 MiB`.
fn result_line(steps: &Row, ending: Option<&CellFailure>) -> String {
    match (ending, steps.value) {
        (Some(ending), _) => format!("{}: {}", ending.outcome, ending.reason),
        (None, Some(value)) => {
            let peak = steps.peak_bytes.map_or_else(String::new, |peak| format!(", peak {}", Bytes(peak)));
            format!("{value:.3} steps/s (n {}){peak}", steps.n.unwrap_or(0))
        }
        (None, None) => "no sample".to_owned(),
    }
}
