//! What training runs cost, found out before they start: the worker of a cell makes a few of its real steps, on its real data.

use std::time::{Duration, Instant};

use super::{TrainingMessage, TrainingRequest, TrialTiming};
use crate::protocol::cell_runner::request;
use crate::protocol::definition::EstimateContext;
use crate::protocol::measuring::measure_rate;
use crate::protocol::worker_context::{WorkerContext, WorkerRequest};
use crate::run::RunError;
use crate::run::plan::{Cell, Plan};
use crate::run::worker::{Received, Worker};

/// Multiply-adds per second and thread that predictions start from.
pub const RATE: f64 = 1e10;
/// Seconds that all cells of a `--quick` training may take together.
pub const QUICK_SECONDS: f64 = 45.0;
/// Most seconds that one cell is tried, and that are spent on all of them.
const ONE: Duration = Duration::from_secs(10);
const ALL: Duration = Duration::from_secs(12);
/// Runs of fewer steps that are guessed to take fewer seconds are not tried: that would take as long.
const SHORT: (u64, f64) = (30, 15.0);
/// A forward pass of a batch costs so much of its training step.
const FORWARD: f64 = 0.36;

/// What was seen of cells that differ in their seeds only.
struct Seen {
    key: String,
    /// Seconds, as a multiple of what was guessed.
    times: f64,
    /// The share of them that steps of training take.
    training: f64,
    memory: Option<u64>,
}

/// Prices the cells of `plan` that are not done. Where a cell's data are not there, or there is no time left to try it, it is
/// taken to be as much slower or faster than its guess as those that were tried.
pub fn estimate<J: TrainingRequest>(plan: &mut Plan, context: &EstimateContext) -> Result<(), RunError> {
    let start = Instant::now();
    let mut seen: Vec<Seen> = Vec::new();
    let (command, threads) = (plan.command.clone(), plan.threads as f64);
    let open = |cell: &Cell| !cell.request.is_null() && !(context.done)(cell);
    for index in (0..plan.cells.len()).filter(|&index| open(&plan.cells[index])).collect::<Vec<_>>() {
        let cell = &plan.cells[index];
        let Ok(job) = request::<J>(cell) else { continue };
        let key = key(cell);
        let short = job.info().steps < SHORT.0 && cell.seconds < SHORT.1;
        if short || start.elapsed() > ALL || seen.iter().any(|seen| seen.key == key) {
            continue;
        }
        (context.tell)(plan.name(index));
        let (rehearsed, setup) = rehearse(cell, &command, context)?;
        let steps = job.trained(&context.results, plan).is_none().then_some(job.info().steps);
        let (times, training, memory) = match rehearsed {
            Some(seen) => {
                let (rest, training) = costs(&job, steps, &seen, setup);
                let all = rest + training;
                (all / cell.seconds, training / all, seen.peak_bytes)
            }
            None => match measure_rate(job.info().spec, context)? {
                Some(rate) => (RATE * threads / rate, 1.0, None),
                None => continue,
            },
        };
        seen.push(Seen { key, times, training, memory });
    }
    let mut all: Vec<(f64, f64)> = seen.iter().map(|seen| (seen.times, seen.training)).collect();
    all.sort_by(|a, b| a.0.total_cmp(&b.0));
    let usual = all.get(all.len() / 2).copied();
    for cell in plan.cells.iter_mut().filter(|cell| open(cell)) {
        let key = key(cell);
        let found = seen.iter().find(|seen| seen.key == key);
        if let Some((times, training)) = found.map(|seen| (seen.times, seen.training)).or(usual) {
            cell.seconds *= times;
            cell.training = Some(cell.seconds * training);
        }
        cell.memory = found.and_then(|seen| seen.memory);
    }
    Ok(())
}

/// The key of `cell` without its seed.
fn key(cell: &Cell) -> String {
    cell.row.seed.map_or_else(|| cell.key.clone(), |seed| cell.key.replacen(&format!(" s{seed}"), "", 1))
}

/// Seconds of a run with so many steps of training, `None` if the model is trained already: those of its start, its evaluations
/// and its tests, and those of its steps.
fn costs(job: &impl TrainingRequest, steps: Option<u64>, seen: &TrialTiming, setup: f64) -> (f64, f64) {
    let tests = setup + seen.step * FORWARD * job.tests() * seen.forwards.final_test;
    let Some(steps) = steps else { return (tests, 0.0) };
    let evaluations = steps.div_ceil(seen.every.max(1)) as f64;
    let evaluated = seen.step * FORWARD * evaluations * seen.forwards.per_eval;
    (tests + evaluated, seen.step * job.first_step_equivalents())
}

/// What a few steps of `cell` say, and the seconds that it took to begin; nothing where they cannot be made.
fn rehearse(
    cell: &Cell,
    command: &str,
    context: &EstimateContext,
) -> Result<(Option<TrialTiming>, f64), RunError> {
    let Ok(folder) = tempfile::tempdir() else { return Ok((None, 0.0)) };
    let conditions = WorkerContext {
        folder: folder.path().to_owned(),
        data: context.data.clone(),
        trial: true,
        ..WorkerContext::default()
    };
    let order = WorkerRequest::Cell {
        protocol: command.to_owned(),
        memory_limit: context.memory_limit,
        request: cell.request.clone(),
        conditions,
    };
    let start = Instant::now();
    let mut worker = Worker::start(&context.launcher, &order)?;
    loop {
        match worker.receive::<TrainingMessage>(Some(start + ONE), context.memory_limit, &context.stop)? {
            Received::Message(TrainingMessage::Rehearsed(seen)) => {
                return Ok((Some(seen), (start.elapsed().as_secs_f64() - seen.made).max(0.0)));
            }
            Received::Message(TrainingMessage::Ended { .. } | TrainingMessage::Done(_))
            | Received::Ended(_) => {
                return Ok((None, 0.0));
            }
            Received::Message(_) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::EvalCost;
    use super::*;
    use crate::protocol::training::RequestInfo;

    #[derive(serde::Deserialize)]
    struct Fake;

    impl TrainingRequest for Fake {
        fn info(&self) -> RequestInfo<'_> {
            unreachable!("not asked")
        }

        fn first_step_equivalents(&self) -> f64 {
            100.0
        }

        fn tests(&self) -> f64 {
            2.0
        }
    }

    #[test]
    fn evaluations_and_tests_are_priced() {
        let seen = TrialTiming {
            step: 0.5,
            made: 1.0,
            every: 30,
            forwards: EvalCost { per_eval: 10.0, final_test: 20.0 },
            peak_bytes: None,
        };
        let rest = 3.0 + 0.5 * FORWARD * (4.0 * 10.0 + 2.0 * 20.0);
        let (found, training) = costs(&Fake, Some(100), &seen, 3.0);
        assert!((found - rest).abs() < 1e-9 && (training - 50.0).abs() < 1e-9);
        let tested = 3.0 + 0.5 * FORWARD * 40.0;
        let (found, training) = costs(&Fake, None, &seen, 3.0);
        assert!((found - tested).abs() < 1e-9 && training == 0.0, "trained before");
    }
}
