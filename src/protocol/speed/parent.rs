//! The parent's side: workers that take turns, and rows as cells end.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use super::bracket::Brackets;
use super::interleave::{self, Budget, CellSamples, CellWorkers, Started, TurnResult};
use super::limit::limit_seconds;
use super::plan::{NAME, PROFILE_TIME, SpeedRequest, seconds};
use super::program::{Finished, ProgramCell};
use super::rows;
use super::worker::{SpeedReply, TurnRequest};
use crate::protocol::cell_runner::{CellResult, CellRunner, request};
use crate::protocol::definition::EstimateContext;
use crate::protocol::model_spec::ModelSpec;
use crate::protocol::worker_context::{WorkerContext, WorkerRequest};
use crate::run::RunError;
use crate::run::outcome::CellFailure;
use crate::run::plan::Plan;
use crate::run::turn::{Judge, Turn};
use crate::run::worker::{Received, Worker};
use crate::term::Warning;
use effattn_kernel::profile::Product;
use effattn_record::config::settings::DeviceName;
use effattn_record::config::units::Bytes;
use effattn_record::stats::median;
use effattn_record::{Outcome, Row};

/// Lets the cells `open` take turns.
pub fn compute(runner: &mut CellRunner, open: &[usize]) -> Result<(), RunError> {
    let requests = open.iter().map(|&index| Ok((index, request(&runner.plan.cells[index])?)));
    let requests = requests.collect::<Result<HashMap<usize, SpeedRequest>, RunError>>()?;
    let limit = runner.session.memory_limit;
    let timeouts: HashMap<usize, f64> =
        open.iter().filter_map(|&index| Some((index, runner.plan.cells[index].timeout?))).collect();
    let budget = |cell: usize| {
        // repeats leave most of the time limit to what was asked for
        let repeats = timeouts.get(&cell).map_or(f64::INFINITY, |timeout| timeout / 4.0);
        let budget = requests.get(&cell).map_or(NO_BUDGET, SpeedRequest::budget);
        Budget { repeats, ..budget }
    };
    let (alive, programs) = Default::default();
    let brackets = (runner.plan.device == DeviceName::Cpu.to_string() && !open.is_empty()).then(|| {
        let best = runner.session.steadiness().map(|known| known.best);
        Brackets::new(runner.session.launcher.threads, best)
    });
    interleave::run(open, budget, limit, &mut Workers { runner, alive, programs, brackets })
}

const NO_BUDGET: Budget = Budget { seconds: 0.0, min_runs: 1, runs: 1, repeats: 0.0 };

/// A worker and what is known of it.
struct Running {
    worker: Worker,
    /// How long it may still compute; waiting for others does not count.
    left: Duration,
    peak: Option<u64>,
    held: u64,
    /// Seconds of the progress bar that it has moved.
    moved: f64,
    /// The products of a step.
    products: Vec<(Product, u64)>,
}

struct Workers<'a, 'b> {
    runner: &'a mut CellRunner<'b>,
    alive: HashMap<usize, Running>,
    programs: HashMap<usize, ProgramCell>,
    /// None on devices other than the processor, whose rate they would not tell.
    brackets: Option<Brackets>,
}

impl Workers<'_, '_> {
    /// Resident bytes that cell `index` may reach beside the others.
    fn resident_limit(&self, index: usize) -> u64 {
        let workers = self.alive.iter().map(|(other, running)| (*other, running.held));
        let programs = self.programs.iter().map(|(other, cell)| (*other, cell.held));
        let others: u64 =
            workers.chain(programs).filter(|(other, _)| *other != index).map(|(_, held)| held).sum();
        self.runner.session.resident_limit.saturating_sub(others)
    }

    /// Starts the cell of the program `word`.
    fn start_program(
        &mut self,
        index: usize,
        word: &str,
        request: &SpeedRequest,
    ) -> Result<Started, RunError> {
        let limit = self.resident_limit(index);
        let timeout = self.runner.plan.cells[index].timeout;
        Ok(match ProgramCell::start(word, request, timeout, limit, self.runner.session)? {
            Ok(cell) => {
                let held = cell.held;
                self.programs.insert(index, cell);
                Started::Ready { held }
            }
            Err(failure) => Started::Ended(failure),
        })
    }

    /// Ends a program's cell and records it.
    fn program_done(
        &mut self,
        index: usize,
        cell: ProgramCell,
        samples: &CellSamples,
        ending: Option<&CellFailure>,
    ) -> Result<(), RunError> {
        let Finished { peak_bytes: peak, clocks, version } = cell.finish(self.runner.session)?;
        if ending.is_none() {
            let (term, said) =
                (&self.runner.session.term, format!("{}: {clocks}", self.runner.plan.name(index)));
            match clocks.disagree() {
                true => term.warn(&Warning::Other(said)),
                false => term.detail(&said),
            }
        }
        let row = Row { version, ..self.runner.plan.cells[index].row.clone() };
        let rows = rows::program_rows(&row, &samples.values(), peak, ending);
        let summary = result_line(&rows[1], ending);
        let samples = rows::samples(samples, self.judge());
        self.runner.record_result(index, CellResult { rows, samples, summary, progress_seconds: 0.0 })
    }

    fn hear(&mut self, index: usize) -> Result<SpeedReply, RunError> {
        let limit = self.resident_limit(index);
        let Some(running) = self.alive.get_mut(&index) else {
            return Err(RunError::Internal("a worker that was never started had its turn".to_owned()));
        };
        let start = Instant::now();
        let deadline = start.checked_add(running.left);
        let heard = running.worker.receive::<SpeedReply>(deadline, limit, &self.runner.session.stop)?;
        let spent = start.elapsed();
        running.left = running.left.saturating_sub(spent);
        let share = spent.as_secs_f64().min(self.runner.plan.cells[index].seconds - running.moved).max(0.0);
        running.moved += share;
        self.runner.session.term.advance(share, "");
        let answer = match heard {
            Received::Message(answer) => answer,
            Received::Ended(ending) => SpeedReply::from(ending),
        };
        if let SpeedReply::Samples { peak_bytes, held_bytes, products, .. } = &answer {
            (running.peak, running.held) = (*peak_bytes, *held_bytes);
            if !products.is_empty() {
                running.products.clone_from(products);
            }
        }
        Ok(answer)
    }

    /// Lets cell `index` step for `seconds`, at most `runs` times: the steps' seconds and the bytes that it holds.
    fn steps(&mut self, index: usize, seconds: f64, runs: usize) -> Result<Stepped, RunError> {
        let limit = self.resident_limit(index);
        if let Some(cell) = self.programs.get_mut(&index) {
            let steps = cell.turn(seconds, runs as u64, limit, self.runner.session)?;
            return Ok(steps.map(|steps| (steps, cell.held)));
        }
        if let Some(running) = self.alive.get_mut(&index) {
            running.worker.send(&TurnRequest { seconds, runs: runs as u64, profile: false });
        }
        match self.hear(index)? {
            SpeedReply::Samples { seconds, held_bytes, .. } => Ok(Ok((seconds, held_bytes))),
            SpeedReply::Ended { outcome, reason } => Ok(Err(CellFailure { outcome, reason })),
            SpeedReply::Profile { .. } => Err(unasked()),
        }
    }

    /// The row that says how near the steps of cell `index` are to the limit, where their products are known.
    fn share_of_limit(&self, index: usize, samples: &[f64]) -> Option<Row> {
        let products = &self.alive.get(&index)?.products;
        let fastest = samples.iter().copied().fold(f64::INFINITY, f64::min);
        let limit = limit_seconds(products, self.runner.session.launcher.threads, fastest)?;
        Some(rows::share_of_limit(&self.runner.plan.cells[index].row, samples, limit))
    }
}

/// Seconds of steps and the bytes that are held, or how it ended.
type Stepped = Result<(Vec<f64>, u64), CellFailure>;

impl Workers<'_, '_> {
    /// The rows about the operations of cell `index`, if they are asked for.
    fn profile(&mut self, index: usize) -> Result<Vec<Row>, RunError> {
        let cell = &self.runner.plan.cells[index];
        let SpeedRequest { profile: true, runs, .. } = request(cell)? else { return Ok(Vec::new()) };
        let row = cell.row.with_outcome(Outcome::Ok, None);
        if let Some(running) = self.alive.get_mut(&index) {
            running.worker.send(&TurnRequest { seconds: PROFILE_TIME, runs: runs.max(2), profile: true });
        }
        match self.hear(index)? {
            SpeedReply::Profile { steps, spent, rates } => Ok(rows::operations(&row, steps, &spent, rates)),
            SpeedReply::Ended { outcome, reason } => {
                let name = self.runner.plan.name(index);
                let said = format!("{name}: no profile, {outcome}: {reason}");
                self.runner.session.term.warn(&Warning::Other(said));
                Ok(Vec::new())
            }
            SpeedReply::Samples { .. } => Err(unasked()),
        }
    }
}

/// A worker answered something else than it was asked.
fn unasked() -> RunError {
    RunError::Internal("a worker answered what it was not asked".to_owned())
}

impl CellWorkers for Workers<'_, '_> {
    fn start(&mut self, index: usize, limit: u64) -> Result<Started, RunError> {
        let cell = &self.runner.plan.cells[index];
        self.runner.session.term.at(self.runner.plan.name(index));
        let asked: SpeedRequest = request(cell)?;
        if let Some(word) = &asked.program {
            return self.start_program(index, word, &asked);
        }
        let worker = self.runner.start(index, limit, WorkerContext::default())?;
        let left = cell.timeout.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
        let left = left.unwrap_or(Duration::MAX);
        self.alive
            .insert(index, Running { worker, left, peak: None, held: 0, moved: 0.0, products: Vec::new() });
        match self.hear(index)? {
            SpeedReply::Samples { held_bytes, .. } => Ok(Started::Ready { held: held_bytes }),
            SpeedReply::Ended { outcome, reason } => Ok(Started::Ended(CellFailure { outcome, reason })),
            SpeedReply::Profile { .. } => Err(unasked()),
        }
    }

    fn turn(&mut self, index: usize, seconds: f64, runs: usize) -> Result<TurnResult, RunError> {
        self.runner.session.term.at(self.runner.plan.name(index));
        let own = self.alive.get(&index).map(|running| running.worker.id());
        let process = own.or_else(|| self.programs.get(&index).map(ProgramCell::id));
        let (steps, bracket) = match (self.brackets.take(), process) {
            (Some(mut brackets), Some(process)) => {
                let (steps, bracket) = brackets.around(&[process], || self.steps(index, seconds, runs));
                self.brackets = Some(brackets);
                (steps, Some(bracket))
            }
            (brackets, _) => {
                self.brackets = brackets;
                (self.steps(index, seconds, runs), None)
            }
        };
        Ok(match steps? {
            Ok((seconds, held)) => TurnResult::Steps(Turn { seconds, bracket }, held),
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
        if let Some(cell) = self.programs.remove(&index) {
            return self.program_done(index, cell, &samples, ending.as_ref());
        }
        let values = samples.values();
        let (profile, share) = match ending {
            None => (self.profile(index)?, self.share_of_limit(index, &values)),
            Some(_) => (Vec::new(), None),
        };
        let (peak, progress_seconds) = match self.alive.remove(&index) {
            Some(running) => {
                running.worker.finish();
                (running.peak, running.moved)
            }
            None => (None, 0.0),
        };
        let mut rows = rows::rows(&self.runner.plan.cells[index].row, &values, peak, ending.as_ref());
        let summary = result_line(&rows[1], ending.as_ref());
        // the bytes stand in a column of every row
        rows.extend(share.map(|share| Row { peak_bytes: rows[0].peak_bytes, ..share }));
        rows.extend(profile);
        let samples = rows::samples(&samples, self.judge());
        self.runner.record_result(index, CellResult { rows, samples, summary, progress_seconds })
    }

    fn requeue(&mut self, index: usize) {
        self.programs.remove(&index);
        let moved = self.alive.remove(&index).map_or(0.0, |running| running.moved);
        self.runner.session.term.advance(-moved, "");
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

/// Multiply-adds of the longest step that is tried before a run, by thread: some tenths of a second.
const TRIED: f64 = 2e9;

/// Prices the cells of `plan` by a few steps of every mechanism and pass, at the longest length that takes no time.
pub fn price(plan: &mut Plan, context: &EstimateContext) -> Result<(), RunError> {
    let most = TRIED * plan.threads as f64;
    let mut probes: HashMap<_, Option<StepProbe>> = HashMap::new();
    let mut requests = Vec::new();
    for cell in plan.cells.iter().filter(|cell| !cell.request.is_null() && !(context.done)(cell)) {
        let request = request::<SpeedRequest>(cell)?;
        if request.program.is_none() {
            requests.push((cell.key.clone(), request, cell.row.flops));
        }
    }
    for (name, request, flops) in &requests {
        let Some(flops) = *flops else { continue };
        let spec = &request.spec;
        let alike = |other: &SpeedRequest| {
            let ModelSpec { model, pass, kernel, .. } = &other.spec;
            (model, *pass, kernel.word()) == (&spec.model, spec.pass, spec.kernel.word())
        };
        let key = (spec.model.clone(), spec.pass, spec.kernel.word());
        if !probes.contains_key(&key) {
            let small = |(_, other, flops): &&(String, SpeedRequest, Option<u64>)| {
                alike(other) && flops.is_some_and(|flops| other.spec.step_flops(flops) <= most)
            };
            let longest = requests.iter().filter(small).max_by_key(|(_, other, _)| other.spec.len);
            let tried = longest.map_or(request, |(_, other, _)| other);
            (context.tell)(name);
            probes.insert(key.clone(), probe(tried, most, context)?);
        }
        let Some(Some(probed)) = probes.get(&key) else { continue };
        let step = spec.step_flops(flops);
        if let Some(cell) = plan.cells.iter_mut().find(|cell| cell.key == *name) {
            cell.seconds = seconds(request, step / probed.rate);
            cell.memory = Some(probed.memory(step, cell.row.bytes.unwrap_or(0)));
        }
    }
    Ok(())
}

/// Multiply-adds per second of a model, and the bytes that a step of its whole batch takes, by a step that may be smaller;
/// nothing if it cannot run.
pub fn measure_rate(
    spec: &ModelSpec,
    context: &EstimateContext,
) -> Result<Option<(f64, Option<u64>)>, RunError> {
    let request = SpeedRequest {
        spec: spec.clone(),
        warmup: 1,
        min_runs: 1,
        runs: 3,
        max_time: 0.5,
        profile: false,
        program: None,
    };
    let most = 5.0 * TRIED * context.launcher.threads as f64;
    Ok(probe(&request, most, context)?.map(|probed| (probed.rate, None)))
}

/// What a step that was tried says.
#[derive(Clone, Copy)]
struct StepProbe {
    /// Multiply-adds per second.
    rate: f64,
    /// Highest live bytes, weights and moments among them.
    peak: u64,
    /// Multiply-adds of the step.
    flops: f64,
}

impl StepProbe {
    /// Bytes of a worker whose step takes `flops` and whose weights and moments take `bytes`: activations are taken to grow
    /// as the multiply-adds do, which is what most of them do and more than the others.
    fn memory(&self, flops: f64, bytes: u64) -> u64 {
        let moving = self.peak.saturating_sub(bytes) as f64;
        bytes + (moving * (flops / self.flops).max(1.0)) as u64
    }
}

/// What a step of `request` says, with as much of its batch, and then as much of its length, as stays below `most`
/// multiply-adds; none if it cannot run. Images stay as large as they are.
fn probe(
    request: &SpeedRequest,
    most: f64,
    context: &EstimateContext,
) -> Result<Option<StepProbe>, RunError> {
    let asked = &request.spec;
    let flops = |spec: &ModelSpec| {
        let resolved = spec.choice().and_then(|choice| spec.resolve_measured(&choice)).ok()?;
        Some(spec.step_flops(resolved.flops(spec.len as usize)))
    };
    let mut spec = asked.clone();
    let Some(all) = flops(&spec) else { return Ok(None) };
    let each = all / spec.batch as f64;
    spec.batch = ((most / each) as u64).clamp(1, spec.batch);
    while each > most && spec.len > SHORTEST && flops(&spec).is_some_and(|flops| flops > most) {
        let shorter = ModelSpec { len: spec.len / 2, ..spec.clone() };
        if flops(&shorter).is_none() {
            break;
        }
        spec = shorter;
    }
    let Some(flops) = flops(&spec) else { return Ok(None) };
    let request = SpeedRequest { spec, warmup: 1, max_time: 0.1, profile: false, ..request.clone() };
    let order = WorkerRequest::Cell {
        protocol: NAME.to_owned(),
        memory_limit: context.memory_limit,
        request: serde_json::to_value(request).map_err(|error| RunError::Internal(error.to_string()))?,
        conditions: WorkerContext::default(),
    };
    let mut worker = Worker::start(&context.launcher, &order)?;
    let deadline = Instant::now() + Duration::from_secs(20);
    for _ in 0..2 {
        match worker.receive::<SpeedReply>(Some(deadline), context.memory_limit, &context.stop)? {
            Received::Message(SpeedReply::Samples { seconds, held_bytes, .. }) => match median(&seconds) {
                Some(seconds) => {
                    worker.finish();
                    return Ok(Some(StepProbe { rate: flops / seconds.max(1e-9), peak: held_bytes, flops }));
                }
                None => worker.send(&TurnRequest { seconds: 0.1, runs: 5, profile: false }),
            },
            Received::Message(SpeedReply::Ended { .. } | SpeedReply::Profile { .. }) | Received::Ended(_) => {
                break;
            }
        }
    }
    Ok(None)
}

/// Shortest length of a step that is tried in the place of a longer one.
const SHORTEST: u64 = 256;
