//! `memory`: exact peak bytes of one step over lengths and batch sizes (Transformer-LS Figure 3, right
//! half), one worker at a time; and with `--fit` the longest length that stays below a budget.

mod fit;

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::cell_runner::{CellResult, CellRunner, request};
use super::definition::{DataDirs, EstimateContext, Prepared, Protocol, ProtocolInfo, ResultView};
use super::differing::differing_words;
use super::grid::{Grid, GridDefaults, GridEntry, GridFlags, PlanError, Point, cells_by_place};
use super::input_text;
use super::measured_step::MeasuredStep;
use super::model_spec::{ModelSpec, resolve_or_unsupported};
use super::speed::plan::{PRESET, SpeedRequest};
use super::speed::program::{Finished, ProgramCell};
use super::worker_context::{WorkerContext, WorkerInput, WorkerRequest};
use crate::run::outcome::CellFailure;
use crate::run::plan::{Cell, Plan, unusual_values};
use crate::run::worker::{Launcher, ParentLink, Received, Worker};
use crate::run::{CancelToken, RunError};
use effattn_kernel::device::alloc;
use effattn_kernel::device::machine::Resident;
use effattn_model::family;
use effattn_record::config::lists::{Batches, Lengths, MAX_LEN, Modes, Seeds};
use effattn_record::config::settings::Settings;
use effattn_record::config::settings::groups::{MACHINE, MODEL, POINTS};
use effattn_record::config::units::{Bytes, Seconds};
use effattn_record::{Metric, Outcome, Pass, Row};

/// Minimum and maximum number of measured steps: the second one finds every cache filled. With several threads it is chance
/// whether they hold their working memory at the same moment, and which of them has what it keeps for the next kernel, so
/// that more steps are made, until [`STEADY`] of them bring no new peak or [`PATIENCE`] is over.
const STEPS: (usize, usize) = (2, 40);
const STEADY: usize = 8;
const PATIENCE: Duration = Duration::from_secs(1);
/// Workers that are asked where several threads compute and four times that patience is not over.
const WORKERS: usize = 4;
/// What the worker of a cell is asked.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MemoryRequest {
    /// The model and its step.
    pub spec: ModelSpec,
    /// Bytes that a step may reach, where the longest length is looked for.
    pub fit: Option<u64>,
    /// The program whose cell it is, as on the command line; none: effattn.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub program: Option<String>,
}

/// What the worker answers.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
struct Peak {
    /// Highest live bytes above the empty process.
    peak_bytes: u64,
    /// The same of the step that had the least of all behind the first.
    least_bytes: u64,
    /// Steps that were made.
    steps: u64,
    /// Seconds that they took.
    seconds: f64,
    /// Growth of the highest resident size, counted by the system.
    resident_bytes: u64,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "say", rename_all = "snake_case")]
enum MemoryReply {
    Peak(Peak),
    Ended { outcome: Outcome, reason: String },
}

const INFO: ProtocolInfo = ProtocolInfo {
    examples: EXAMPLES,
    settings: &[POINTS, MODEL, &["fit"], MACHINE, &["timeout"]],
    reads: &[input_text::SET],
    metrics: &[
        Metric { name: "peak_memory", title: "Peak memory", unit: "B", lower_is_better: true },
        Metric {
            name: "resident_growth",
            title: "Growth of the resident size",
            unit: "B",
            lower_is_better: true,
        },
        Metric { name: "longest_length", title: "Longest length", unit: "positions", lower_is_better: false },
    ],
    takes_programs: true,
    ..ProtocolInfo::new(
        "memory",
        "Measure the peak memory of a step against length, or find the longest length that fits (Transformer-LS, Figure 3)",
    )
};

/// `memory`.
pub struct Memory;

/// Time that all searches together are priced in.
const PRICING: Duration = Duration::from_secs(3);

impl Protocol for Memory {
    fn info(&self) -> &'static ProtocolInfo {
        &INFO
    }

    fn defaults(&self, flags: &GridFlags) -> GridDefaults {
        let fit = flags.user_settings().fit.is_some();
        let usual = flags.user_settings().preset.as_deref().and_then(family::usual);
        let len = usual.filter(|_| !fit).map(|usual| vec![usual.len as u64]);
        let settings = Settings {
            len: Some(Lengths(len.unwrap_or_else(|| match fit {
                true => vec![MAX_LEN],
                false => vec![1024, 2048, 4096, 8192],
            }))),
            batch: Some(Batches(vec![1])),
            seeds: Some(Seeds(vec![0])),
            mode: Some(Modes(vec![Pass::Infer, Pass::Train])),
            preset: Some(PRESET.to_owned()),
            timeout: Some(Seconds(600.0)),
            ..Settings::NONE
        };
        GridDefaults { settings, models: usual.map_or("full,linear,cosformer,ls", |usual| usual.models) }
    }

    /// The cells of `grid`. With `fit`, lengths are bounds of the search.
    fn cells(&self, grid: &Grid, threads: usize) -> Result<Vec<Cell>, PlanError> {
        cells_by_place(grid, |pick, place| {
            let longest = pick.settings.len.iter().flat_map(|list| &list.0).max();
            // with a budget, the longest length only bounds the search
            let wanted = pick.settings.fit.is_none() || Some(&place.0) == longest;
            wanted.then(|| cell(grid, pick, place, threads)).transpose()
        })
    }

    fn prepare(&self, plan: &mut Plan, dirs: &DataDirs) -> anyhow::Result<Prepared> {
        input_text::prepare(plan, dirs)
    }

    fn summary(&self, plan: &Plan) -> String {
        super::grid::steps_amount(plan)
    }

    /// Prices searches: what takes long in them is known only when short lengths were tried. Cells for which there is no time
    /// left are taken to need as long as the others.
    fn estimate(&self, plan: &mut Plan, context: &EstimateContext) -> Result<(), RunError> {
        let start = Instant::now();
        let (mut priced, mut left) = (Vec::new(), Vec::new());
        for index in 0..plan.cells.len() {
            let cell = &plan.cells[index];
            if cell.request.is_null() || (context.done)(cell) {
                continue;
            }
            let asked: MemoryRequest = request(cell)?;
            let Some(bytes) = asked.fit else { continue };
            if start.elapsed() > PRICING {
                left.push(index);
                continue;
            }
            (context.tell)(&format!("{}: short lengths", plan.name(index)));
            let seconds = fit::price(cell, &asked, bytes, context)?;
            plan.cells[index].seconds = seconds;
            priced.push(seconds);
        }
        let usual = priced.iter().sum::<f64>() / priced.len().max(1) as f64;
        left.into_iter().for_each(|index| plan.cells[index].seconds = usual);
        Ok(())
    }

    /// Measures the cells `open`, one at a time.
    fn compute(&self, runner: &mut CellRunner, open: &[usize]) -> Result<(), RunError> {
        for &index in open {
            let cell = &runner.plan.cells[index];
            runner.session.term.at(runner.plan.name(index));
            let asked: MemoryRequest = request(cell)?;
            let measured = match (asked.fit, &asked.program) {
                (_, Some(word)) => measure_program(runner, index, word, &asked.spec)?,
                (Some(bytes), None) => Ok(fit::fit(runner, index, &asked, bytes)?),
                (None, None) => measure(runner, index, &asked)?.map(|peak| rows(&cell.row, peak)),
            };
            match measured {
                Ok(rows) => {
                    let summary = result_line(&rows);
                    runner.record_result(
                        index,
                        CellResult { rows, samples: Vec::new(), summary, progress_seconds: 0.0 },
                    )?;
                }
                Err(ending) => runner.record_failure(index, &ending, 0.0)?,
            }
        }
        Ok(())
    }

    fn failure_rows(&self, row: &Row, failure: &CellFailure) -> Vec<Row> {
        let metric = if row.other_program().is_some() { "resident_growth" } else { "peak_memory" };
        vec![row.with(metric, "B", None).with_outcome(failure.outcome, Some(failure.reason.clone()))]
    }

    /// The worker's side: builds, steps, tells the peak.
    fn work(&self, link: &ParentLink, request: Value, input: &WorkerInput) -> anyhow::Result<()> {
        let request: MemoryRequest = serde_json::from_value(request)?;
        alloc::return_pages();
        let mut resident = Resident::default();
        let before = resident.own();
        let most = if request.fit.is_some() || rayon::current_num_threads() == 1 { STEPS.0 } else { STEPS.1 };
        let answer = match peaks(&request.spec, input.text, most) {
            Ok((peaks, seconds)) => MemoryReply::Peak(Peak {
                seconds,
                peak_bytes: peaks.iter().copied().max().unwrap_or(0),
                least_bytes: peaks.iter().skip(1).copied().min().unwrap_or(0),
                steps: peaks.len() as u64,
                resident_bytes: resident.own_peak().saturating_sub(before),
            }),
            Err(ending) => MemoryReply::Ended { outcome: ending.outcome, reason: ending.reason },
        };
        Ok(link.send(&answer)?)
    }

    fn view(&self) -> ResultView {
        ResultView::Growth
    }
}

const EXAMPLES: &str = "\
Examples:
  # Peak memory against length, for two batch sizes
  effattn memory --len 1024..16384 --model full,ls --batch 1,4
  # The longest length that fits, per mechanism
  effattn memory --model all --mode train --fit 2GiB
  # What the papers' own operations need
  effattn memory --kernel composed --model full
  # PyTorch's resident growth beside ours, on the same weights and inputs
  effattn memory --program torch --model full,linear --len 1024..4096

Memory is counted by the allocator as live bytes: parameters, optimizer moments, activations and inputs. One worker process runs at a time.";

fn cell(
    grid: &Grid,
    pick: &GridEntry,
    (len, batch, pass, seed): Point,
    threads: usize,
) -> Result<Cell, PlanError> {
    if pass == Pass::Decode {
        return Err(PlanError("memory takes --mode infer and train; decode is a mode of speed".to_owned()));
    }
    let fit = pick.settings.fit;
    let spec = ModelSpec::new(pick, len, batch, pass, seed)?;
    let probe = ModelSpec { len: if fit.is_some() { fit::FIRST.min(len) } else { len }, ..spec.clone() };
    let (resolved, reason) = resolve_or_unsupported(pick, |choice| probe.resolve_measured(choice))?;
    let mut row = probe.row("memory", threads, resolved.as_deref());
    row.suite = grid.suite.as_ref().map(|suite| suite.name.clone());
    row.published = pick.published("peak_memory", pass, len);
    let request = MemoryRequest { spec, fit: fit.map(|bytes| bytes.0), program: None };
    if let Some(own) = pick.of_suite() {
        let batches = own.settings.batch.as_ref().map_or(&[][..], |list| &list.0);
        let usual = if batches.contains(&batch) { batch } else { batches.first().copied().unwrap_or(batch) };
        let spec = ModelSpec::new(&own, len, usual, pass, seed)?;
        let usual = MemoryRequest { spec, fit: own.settings.fit.map(|bytes| bytes.0), program: None };
        let mut words = differing_words(&unusual_values(&request, &usual), &[]);
        if fit.is_none() && own.settings.len.as_ref().is_some_and(|list| !list.0.contains(&len)) {
            words.push(format!("length {len} (none of the suite's)"));
        }
        row.differs = (!words.is_empty()).then(|| words.join("; "));
    }
    let usual =
        ModelSpec { len: if fit.is_some() { MAX_LEN } else { len }, ..request.spec.default_spec(PRESET) };
    let usual = MemoryRequest { spec: usual, ..request.clone() };
    let work = row.flops.map_or(0.0, |flops| probe.step_flops(flops));
    let words = match fit {
        Some(bytes) => {
            row = Row { len: None, flops: None, flops_2x: None, core_macs: None, ..row };
            format!("{} b{batch} {pass} s{seed} fit {}B", request.spec.model, bytes.0)
        }
        None => request.spec.key(),
    };
    let cell = Cell::new(&words, row, &request, &usual);
    let cell = cell.with_seconds(threads, |threads| match fit {
        Some(_) => 20.0,
        None => seconds(work / (8e9 * threads as f64), threads),
    });
    let series = match fit {
        Some(_) => String::new(),
        None => {
            let shortest = MemoryRequest { spec: ModelSpec { len: 0, ..request.spec.clone() }, ..request };
            serde_json::to_string(&shortest).map_err(PlanError::new)?
        }
    };
    let timeout = pick.settings.timeout.map(|time| time.0);
    Ok(Cell { series, timeout, ..cell }.with_unsupported(reason))
}

/// Predicted seconds of a cell whose step takes `step`: workers are asked until their patience is over.
fn seconds(step: f64, threads: usize) -> f64 {
    let steps = |most: usize| (step * most as f64).min(PATIENCE.as_secs_f64()).max(step * STEPS.0 as f64);
    let worker = 0.3 + steps(if threads > 1 { STEADY + 4 } else { STEPS.0 });
    let workers = (4.0 * PATIENCE.as_secs_f64() / worker).ceil().min(WORKERS as f64);
    if threads > 1 { worker * workers } else { worker }
}

fn rows(row: &Row, peak: Peak) -> Vec<Row> {
    let row = Row { peak_bytes: Some(peak.peak_bytes), n: Some(peak.steps), ..row.clone() };
    let row = row.with_outcome(Outcome::Ok, None);
    let resident = Row { published: None, n: Some(1), ..row.clone() };
    let highest = Row {
        ci_low: Some(peak.least_bytes as f64),
        ci_high: Some(peak.peak_bytes as f64),
        ..row.with("peak_memory", "B", Some(peak.peak_bytes as f64))
    };
    vec![highest, resident.with("resident_memory", "B", Some(peak.resident_bytes as f64))]
}

/// The peak of a step. With several threads it depends on chance, in part once for a worker: several are asked where one
/// takes no time, and the least and the highest of all their steps are kept.
fn measure(
    runner: &CellRunner,
    index: usize,
    request: &MemoryRequest,
) -> Result<Result<Peak, CellFailure>, RunError> {
    let session = &runner.session;
    let place = (&session.launcher, (session.memory_limit, session.resident_limit), &session.stop);
    let start = Instant::now();
    let mut all: Option<Peak> = None;
    for _ in 0..if runner.plan.threads > 1 { WORKERS } else { 1 } {
        let now = match ask(place, runner.plan.cells[index].timeout, request)? {
            Ok(now) => now,
            ended => return Ok(ended),
        };
        let before = all.unwrap_or(now);
        all = Some(Peak {
            peak_bytes: before.peak_bytes.max(now.peak_bytes),
            least_bytes: before.least_bytes.min(now.least_bytes),
            steps: all.map_or(0, |all| all.steps) + now.steps,
            seconds: all.map_or(0.0, |all| all.seconds) + now.seconds,
            resident_bytes: before.resident_bytes.max(now.resident_bytes),
        });
        if start.elapsed() > 4 * PATIENCE {
            break;
        }
    }
    all.map(Ok).ok_or_else(|| RunError::Internal("no worker was asked".to_owned()))
}

/// The rows of a program: how much its resident size grew, by its own account, over steps of the same model on the same inputs.
fn measure_program(
    runner: &CellRunner,
    index: usize,
    word: &str,
    spec: &ModelSpec,
) -> Result<Result<Vec<Row>, CellFailure>, RunError> {
    let session = &runner.session;
    let request = SpeedRequest {
        spec: spec.clone(),
        warmup: STEPS.0 as u64,
        min_runs: 1,
        runs: 1,
        max_time: PATIENCE.as_secs_f64(),
        profile: false,
        program: Some(word.to_owned()),
    };
    let Cell { timeout, row, .. } = &runner.plan.cells[index];
    let cell = match ProgramCell::start(word, &request, *timeout, session.resident_limit, session)? {
        Ok(cell) => cell,
        Err(failure) => return Ok(Err(failure)),
    };
    let Finished { peak_bytes, version, .. } = cell.finish(session)?;
    let Some(bytes) = peak_bytes else {
        return Ok(Err(CellFailure::new(Outcome::Unsupported, "it does not say how much memory it took")));
    };
    let row = Row { version, n: Some(request.warmup), ..row.clone() }.with_outcome(Outcome::Ok, None);
    Ok(Ok(vec![row.with("resident_growth", "B", Some(bytes as f64))]))
}

/// How a worker is started, the live and resident bytes that it may reach, and what stops it.
type Start<'a> = (&'a Launcher, (u64, u64), &'a CancelToken);

/// Runs one worker for `request`, for `seconds` at most: its peak, or how it ended instead.
fn ask(
    (launcher, (limit, resident), stop): Start,
    seconds: Option<f64>,
    request: &MemoryRequest,
) -> Result<Result<Peak, CellFailure>, RunError> {
    let order = WorkerRequest::Cell {
        protocol: INFO.name.to_owned(),
        memory_limit: limit,
        request: serde_json::to_value(request).map_err(|error| RunError::Internal(error.to_string()))?,
        conditions: WorkerContext::default(),
    };
    let mut worker = Worker::start(launcher, &order)?;
    let timeout = seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    let deadline = timeout.and_then(|time| Instant::now().checked_add(time));
    Ok(match worker.receive::<MemoryReply>(deadline, resident, stop)? {
        Received::Message(MemoryReply::Peak(peak)) => {
            worker.finish();
            Ok(peak)
        }
        Received::Message(MemoryReply::Ended { outcome, reason }) => Err(CellFailure { outcome, reason }),
        Received::Ended(ending) => Err(ending),
    })
}

/// The peak of every step, `most` of them at most, and the seconds that they took.
fn peaks(spec: &ModelSpec, text: &[u8], most: usize) -> Result<(Vec<u64>, f64), CellFailure> {
    let mut step = MeasuredStep::open(spec, text)?;
    let (mut peaks, mut highest, start) = (Vec::new(), 0, Instant::now());
    loop {
        step.reset_peak();
        step.step()?;
        let uncounted =
            || CellFailure::new(Outcome::Unsupported, format!("memory is not counted on {}", spec.device));
        peaks.push(step.peak_bytes().ok_or_else(uncounted)?);
        if peaks[peaks.len() - 1] > peaks[highest] {
            highest = peaks.len() - 1;
        }
        let steady = peaks.len() - highest > STEADY || start.elapsed() > PATIENCE;
        if peaks.len() >= most || peaks.len() >= STEPS.0 && steady {
            return Ok((peaks, start.elapsed().as_secs_f64()));
        }
    }
}

/// What is said of a finished cell.
fn result_line(rows: &[Row]) -> String {
    rows.first().map_or_else(String::new, |row| match (row.metric.as_str(), row.value) {
        ("longest_length", Some(len)) => {
            let peak = row.peak_bytes.map_or_else(String::new, |peak| format!(" (peak {})", Bytes(peak)));
            format!("{len:.0} positions{peak}")
        }
        ("resident_growth", Some(bytes)) => format!("resident growth {}", Bytes(bytes as u64)),
        (_, Some(bytes)) => format!("peak {}", Bytes(bytes as u64)),
        _ => format!("{}: {}", row.outcome, row.error.clone().unwrap_or_default()),
    })
}
