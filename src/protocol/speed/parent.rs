//! The parent's side: workers that take turns, and rows as cells end.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use super::interleave::{self, Bench, Started, Turned};
use super::plan::{PROFILE_TIME, Request, seconds};
use super::worker::{Answer, Turn};
use super::{PROTOCOL, rows};
use crate::config::units::Bytes;
use crate::protocol::Order;
use crate::protocol::model_spec::ModelSpec;
use crate::protocol::runner::{Finished, Runner, request};
use crate::protocol::table::{Conditions, Prober};
use crate::record::{Outcome, Row};
use crate::run::RunError;
use crate::run::outcome::Ending;
use crate::run::plan::Plan;
use crate::run::worker::{Heard, Worker};
use crate::stats::median;
use crate::term::Warning;

/// Lets the cells `open` take turns.
///
/// # Errors
/// Ctrl-C, a full disk: what is finished stays.
pub fn compute(runner: &mut Runner, open: &[usize]) -> Result<(), RunError> {
    let requests = open.iter().map(|&index| Ok((index, request(&runner.plan.cells[index])?)));
    let requests = requests.collect::<Result<HashMap<usize, Request>, RunError>>()?;
    let limit = runner.session.memory_limit;
    let budget = |cell: usize| requests.get(&cell).map_or(NO_BUDGET, Request::budget);
    interleave::run(open, budget, limit, &mut Workers { runner, alive: HashMap::new() })
}

const NO_BUDGET: interleave::Budget = interleave::Budget { seconds: 0.0, min_runs: 1, runs: 1 };

/// A worker and what is known of it.
struct Running {
    worker: Worker,
    /// How long it may still compute; waiting for others does not count.
    left: Duration,
    peak: Option<u64>,
    held: u64,
    /// Seconds of the progress bar that it has moved.
    moved: f64,
}

struct Workers<'a, 'b> {
    runner: &'a mut Runner<'b>,
    alive: HashMap<usize, Running>,
}

impl Workers<'_, '_> {
    fn hear(&mut self, index: usize) -> Result<Answer, RunError> {
        let others: u64 = self.alive.iter().filter(|(other, _)| **other != index).map(|(_, r)| r.held).sum();
        let limit = self.runner.session.resident_limit.saturating_sub(others);
        let Some(running) = self.alive.get_mut(&index) else {
            return Err(RunError::Internal("a worker that was never started had its turn".to_owned()));
        };
        let start = Instant::now();
        let deadline = start.checked_add(running.left);
        let heard = running.worker.hear::<Answer>(deadline, limit, &self.runner.session.stop)?;
        let spent = start.elapsed();
        running.left = running.left.saturating_sub(spent);
        let share = spent.as_secs_f64().min(self.runner.plan.cells[index].seconds - running.moved).max(0.0);
        running.moved += share;
        self.runner.session.term.advance(share, "");
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

impl Workers<'_, '_> {
    /// The rows about the operations of cell `index`, if they are asked for.
    fn profile(&mut self, index: usize) -> Result<Vec<Row>, RunError> {
        let cell = &self.runner.plan.cells[index];
        let Request { profile: true, runs, .. } = request(cell)? else { return Ok(Vec::new()) };
        let row = cell.row.ended(Outcome::Ok, None);
        if let Some(running) = self.alive.get_mut(&index) {
            running.worker.send(&Turn { seconds: PROFILE_TIME, runs: runs.max(2), profile: true });
        }
        match self.hear(index)? {
            Answer::Profile { steps, spent, rates } => Ok(rows::operations(&row, steps, &spent, rates)),
            Answer::Ended { outcome, reason } => {
                let name = self.runner.plan.name(index);
                let said = format!("{name}: no profile, {outcome}: {reason}");
                self.runner.session.term.warn(&Warning::Other(said));
                Ok(Vec::new())
            }
            Answer::Samples { .. } => Err(unasked()),
        }
    }
}

/// A worker answered something else than it was asked.
fn unasked() -> RunError {
    RunError::Internal("a worker answered what it was not asked".to_owned())
}

impl Bench for Workers<'_, '_> {
    fn start(&mut self, index: usize, limit: u64) -> Result<Started, RunError> {
        let cell = &self.runner.plan.cells[index];
        self.runner.session.term.at(self.runner.plan.name(index));
        let worker = self.runner.start(index, limit, Conditions::default())?;
        let left = cell.timeout.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
        let left = left.unwrap_or(Duration::MAX);
        self.alive.insert(index, Running { worker, left, peak: None, held: 0, moved: 0.0 });
        match self.hear(index)? {
            Answer::Samples { held_bytes, .. } => Ok(Started::Ready { held: held_bytes }),
            Answer::Ended { outcome, reason } => Ok(Started::Ended(Ending { outcome, reason })),
            Answer::Profile { .. } => Err(unasked()),
        }
    }

    fn turn(&mut self, index: usize, seconds: f64, runs: usize) -> Result<Turned, RunError> {
        self.runner.session.term.at(self.runner.plan.name(index));
        if let Some(running) = self.alive.get_mut(&index) {
            running.worker.send(&Turn { seconds, runs: runs as u64, profile: false });
        }
        match self.hear(index)? {
            Answer::Samples { seconds, held_bytes, .. } => Ok(Turned::Samples(seconds, held_bytes)),
            Answer::Ended { outcome, reason } => Ok(Turned::Ended(Ending { outcome, reason })),
            Answer::Profile { .. } => Err(unasked()),
        }
    }

    fn done(&mut self, index: usize, samples: Vec<f64>, ending: Option<Ending>) -> Result<(), RunError> {
        let profile = if ending.is_none() { self.profile(index)? } else { Vec::new() };
        let (peak, moved) = match self.alive.remove(&index) {
            Some(running) => {
                running.worker.finish();
                (running.peak, running.moved)
            }
            None => (None, 0.0),
        };
        let mut rows = rows::rows(&self.runner.plan.cells[index].row, &samples, peak, ending.as_ref());
        let said = tell(&rows[1], ending.as_ref());
        rows.extend(profile);
        self.runner.finish(index, Finished { rows, samples: rows::samples(&samples), said, moved })
    }

    fn put_back(&mut self, index: usize) {
        let moved = self.alive.remove(&index).map_or(0.0, |running| running.moved);
        self.runner.session.term.advance(-moved, "");
    }
}

/// What is said of a finished cell: `12.3 steps/s (n 20), peak 81 MiB`.
fn tell(steps: &Row, ending: Option<&Ending>) -> String {
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
///
/// # Errors
/// A worker that cannot be started; Ctrl-C.
pub fn price(plan: &mut Plan, prober: &Prober) -> Result<(), RunError> {
    let most = TRIED * plan.threads as f64;
    let mut probes: HashMap<_, Option<Probed>> = HashMap::new();
    let mut requests = Vec::new();
    for cell in plan.cells.iter().filter(|cell| !cell.request.is_null() && !(prober.done)(cell)) {
        requests.push((cell.key.clone(), request::<Request>(cell)?, cell.row.flops));
    }
    for (name, request, flops) in &requests {
        let Some(flops) = *flops else { continue };
        let spec = &request.spec;
        let alike = |other: &Request| {
            let ModelSpec { model, pass, kernel, .. } = &other.spec;
            (model, *pass, kernel.word()) == (&spec.model, spec.pass, spec.kernel.word())
        };
        let key = (spec.model.clone(), spec.pass, spec.kernel.word());
        if !probes.contains_key(&key) {
            let small = |(_, other, flops): &&(String, Request, Option<u64>)| {
                alike(other) && flops.is_some_and(|flops| other.spec.step_flops(flops) <= most)
            };
            let longest = requests.iter().filter(small).max_by_key(|(_, other, _)| other.spec.len);
            let tried = longest.map_or(request, |(_, other, _)| other);
            (prober.tell)(name);
            probes.insert(key.clone(), probe(tried, most, prober)?);
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
///
/// # Errors
/// A worker that cannot be started; Ctrl-C.
pub fn rate(spec: &ModelSpec, prober: &Prober) -> Result<Option<(f64, Option<u64>)>, RunError> {
    let request =
        Request { spec: spec.clone(), warmup: 1, min_runs: 1, runs: 3, max_time: 0.5, profile: false };
    let most = 5.0 * TRIED * prober.launcher.threads as f64;
    Ok(probe(&request, most, prober)?.map(|probed| (probed.rate, None)))
}

/// What a step that was tried says.
#[derive(Clone, Copy)]
struct Probed {
    /// Multiply-adds per second.
    rate: f64,
    /// Highest live bytes, weights and moments among them.
    peak: u64,
    /// Multiply-adds of the step.
    flops: f64,
}

impl Probed {
    /// Bytes of a worker whose step takes `flops` and whose weights and moments take `bytes`: activations are taken to grow
    /// as the multiply-adds do, which is what most of them do and more than the others.
    fn memory(&self, flops: f64, bytes: u64) -> u64 {
        let moving = self.peak.saturating_sub(bytes) as f64;
        bytes + (moving * (flops / self.flops).max(1.0)) as u64
    }
}

/// What a step of `request` says, with as much of its batch, and then as much of its length, as stays below `most`
/// multiply-adds; none if it cannot run. Images stay as large as they are.
fn probe(request: &Request, most: f64, prober: &Prober) -> Result<Option<Probed>, RunError> {
    let asked = &request.spec;
    let flops = |spec: &ModelSpec| {
        let resolved = spec.choice().and_then(|choice| spec.measured(&choice)).ok()?;
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
    let request = Request { spec, warmup: 1, max_time: 0.1, profile: false, ..request.clone() };
    let order = Order::Cell {
        protocol: PROTOCOL.name.to_owned(),
        memory_limit: prober.memory_limit,
        request: serde_json::to_value(request).map_err(|error| RunError::Internal(error.to_string()))?,
        conditions: Conditions::default(),
    };
    let mut worker = Worker::start(&prober.launcher, &order)?;
    let deadline = Instant::now() + Duration::from_secs(20);
    for _ in 0..2 {
        match worker.hear::<Answer>(Some(deadline), prober.memory_limit, &prober.stop)? {
            Heard::Message(Answer::Samples { seconds, held_bytes, .. }) => match median(&seconds) {
                Some(seconds) => {
                    worker.finish();
                    return Ok(Some(Probed { rate: flops / seconds.max(1e-9), peak: held_bytes, flops }));
                }
                None => worker.send(&Turn { seconds: 0.1, runs: 5, profile: false }),
            },
            Heard::Message(Answer::Ended { .. } | Answer::Profile { .. }) | Heard::Ended(_) => break,
        }
    }
    Ok(None)
}

/// Shortest length of a step that is tried in the place of a longer one.
const SHORTEST: u64 = 256;
