//! What cells take, by a few steps before the run.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::time::{Duration, Instant};

use super::plan::{NAME, SpeedRequest, Timing};
use super::worker::{Stepped, TurnRequest};
use crate::protocol::cell_runner::request;
use crate::protocol::definition::EstimateContext;
use crate::protocol::measuring::plan::StepRequest;
use crate::protocol::measuring::worker::Bounds;
use crate::protocol::model_spec::ModelSpec;
use crate::run::RunError;
use crate::run::plan::Plan;
use effattn_record::Pass;
use effattn_record::stats::median;

/// Multiply-adds of the longest step that is tried before a run, by thread: some tenths of a second.
const TRIED: f64 = 2e9;

/// Prices the cells of `plan` by a few steps of every mechanism and pass, at the longest length that takes no time.
pub fn price(plan: &mut Plan, context: &EstimateContext) -> Result<(), RunError> {
    /// Cells with the same of these share one try.
    fn alike(spec: &ModelSpec) -> (&str, Pass, &'static str) {
        (&spec.model, spec.pass, spec.kernel.word())
    }
    let most = TRIED * plan.threads as f64;
    let mut probes = HashMap::new();
    let mut requests = Vec::new();
    for cell in plan.cells.iter().filter(|cell| !cell.request.is_null() && !(context.done)(cell)) {
        let request = request::<SpeedRequest>(cell)?;
        if request.program.is_none() {
            requests.push((cell.key.clone(), request, cell.row.flops));
        }
    }
    for (name, request, flops) in &requests {
        let Some(flops) = *flops else { continue };
        let key = alike(&request.spec);
        let probed = match probes.entry(key) {
            Entry::Occupied(known) => *known.get(),
            Entry::Vacant(unknown) => {
                let small = |(_, other, flops): &&(String, SpeedRequest, Option<u64>)| {
                    alike(&other.spec) == key
                        && flops.is_some_and(|flops| other.spec.step_flops(flops) <= most)
                };
                let longest = requests.iter().filter(small).max_by_key(|(_, other, _)| other.spec.len);
                let tried = longest.map_or(request, |(_, other, _)| other);
                (context.tell)(name);
                *unknown.insert(probe(tried, most, context)?)
            }
        };
        let Some(probed) = probed else { continue };
        let step = request.spec.step_flops(flops);
        if let Some(cell) = plan.cells.iter_mut().find(|cell| cell.key == *name) {
            cell.seconds = request.measure.seconds(step / probed.rate);
            cell.memory = Some(probed.memory(step, cell.row.bytes.unwrap_or(0)));
        }
    }
    Ok(())
}

/// Multiply-adds per second of a model, by a step that may be smaller; nothing if it cannot run.
pub fn measure_rate(spec: &ModelSpec, context: &EstimateContext) -> Result<Option<f64>, RunError> {
    let timing = Timing { warmup: 1, min_runs: 1, runs: 3, max_time: 0.5, profile: false };
    let request = StepRequest::new(spec.clone(), timing);
    let most = 5.0 * TRIED * context.launcher.threads as f64;
    Ok(probe(&request, most, context)?.map(|probed| probed.rate))
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
    let timing = Timing { warmup: 1, max_time: 0.1, profile: false, ..request.measure };
    let request = StepRequest::new(spec, timing);
    let limit = context.memory_limit;
    let EstimateContext { launcher, stop, .. } = context;
    let bounds = Bounds { launcher, memory_limit: limit, resident_limit: limit, stop };
    let mut worker = bounds.start(NAME, &request)?;
    let deadline = Some(Instant::now() + Duration::from_secs(20));
    if bounds.hear::<Stepped>(&mut worker, deadline)?.is_err() {
        return Ok(None);
    }
    worker.send(&TurnRequest { seconds: 0.1, runs: 5, profile: false });
    let Ok(Stepped { seconds, held_bytes, .. }) = bounds.hear(&mut worker, deadline)? else {
        return Ok(None);
    };
    worker.finish();
    let rate = |seconds: f64| flops / seconds.max(1e-9);
    Ok(median(&seconds).map(|seconds| StepProbe { rate: rate(seconds), peak: held_bytes, flops }))
}

/// Shortest length of a step that is tried in the place of a longer one.
const SHORTEST: u64 = 256;
