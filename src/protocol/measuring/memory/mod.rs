//! `memory`: exact peak bytes of one step over lengths and batch sizes (Transformer-LS Figure 3, right
//! half), one worker at a time; and with `--fit` the longest length that stays below a budget.

mod fit;
mod peak;

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::input_text;
use super::plan::{self, Draft, Measure, PRESET, RATE, StepRequest};
use super::program::{Finished, ProgramCell, WarmUp};
use super::worker::Bounds;
use crate::protocol::cell_runner::{CellResult, CellRunner, request};
use crate::protocol::definition::{
    DataDirs, EstimateContext, Prepared, Protocol, ProtocolInfo, ResultView, WorkerInput,
};
use crate::protocol::grid::{Grid, GridDefaults, GridEntry, GridFlags, PlanError, Point, cells_by_place};
use crate::protocol::model_spec::{ModelSpec, resolve_or_unsupported};
use crate::run::RunError;
use crate::run::outcome::CellFailure;
use crate::run::plan::{Cell, Plan};
use crate::run::worker::ParentLink;
use effattn_model::family;
use effattn_record::config::lists::MAX_LEN;
use effattn_record::config::settings::Settings;
use effattn_record::config::settings::groups::{MACHINE, MODEL, POINTS};
use effattn_record::config::units::Bytes;
use effattn_record::{Metric, Outcome, Pass, Row};

/// The metric whose published numbers stand beside the measured ones.
const PUBLISHED: &str = "peak_memory";

/// What is looked for besides the peak.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
struct LengthSearch {
    /// Bytes that a step may reach, where the longest length is looked for.
    fit: Option<u64>,
}

/// What the worker of a cell is asked.
type MemoryRequest = StepRequest<LengthSearch>;

impl Measure for LengthSearch {
    fn of(settings: &Settings) -> Self {
        Self { fit: settings.fit.map(|bytes| bytes.0) }
    }

    fn searches(&self) -> bool {
        self.fit.is_some()
    }
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

pub struct Memory;

/// Time that all searches together are priced in.
const PRICING: Duration = Duration::from_secs(3);
/// Predicted seconds of a search before any length was tried.
const SEARCH: f64 = 20.0;

impl Protocol for Memory {
    fn info(&self) -> &'static ProtocolInfo {
        &INFO
    }

    fn defaults(&self, flags: &GridFlags) -> GridDefaults {
        let fit = flags.user_settings().fit.is_some();
        let usual = flags.user_settings().preset.as_deref().and_then(family::usual);
        let len = match (fit, &usual) {
            (true, _) => vec![MAX_LEN],
            (false, Some(usual)) => vec![usual.len as u64],
            (false, None) => vec![1024, 2048, 4096, 8192],
        };
        let models = usual.map_or("full,linear,cosformer,ls", |usual| usual.models);
        GridDefaults { settings: plan::defaults(len), models }
    }

    /// The cells of `grid`. With `fit`, lengths are bounds of the search.
    fn cells(&self, grid: &Grid, threads: usize) -> Result<Vec<Cell>, PlanError> {
        plan::check_metrics(grid, &[PUBLISHED])?;
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
        plan::summary(plan)
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
            let Some(bytes) = asked.measure.fit else { continue };
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
            let measured = match (asked.measure.fit, &asked.program) {
                (_, Some(word)) => measure_program(runner, index, word, &asked.spec)?,
                (Some(bytes), None) => Ok(fit::fit(runner, index, &asked, bytes)?),
                (None, None) => {
                    let bounds = Bounds::of(runner.session);
                    let peak = peak::measure(bounds, runner.plan.threads, cell.timeout, &asked)?;
                    peak.map(|peak| rows(&cell.row, peak))
                }
            };
            match measured {
                Ok(rows) => {
                    let (summary, samples) = (result_line(&rows), Vec::new());
                    let result = CellResult { rows, samples, summary, progress_seconds: 0.0 };
                    runner.record_result(index, result)?;
                }
                Err(failure) => runner.record_failure(index, &failure, 0.0)?,
            }
        }
        Ok(())
    }

    fn failure_rows(&self, row: &Row, failure: &CellFailure) -> Vec<Row> {
        let metric = if row.other_program().is_some() { "resident_growth" } else { "peak_memory" };
        vec![row.with(metric, "B", None).with_outcome(failure.outcome, Some(failure.reason.clone()))]
    }

    fn work(&self, link: &ParentLink, request: Value, input: &WorkerInput) -> anyhow::Result<()> {
        Ok(link.send(&peak::work(&serde_json::from_value(request)?, input.text))?)
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
    let search = LengthSearch::of(&pick.settings);
    let request = StepRequest::new(ModelSpec::new(pick, len, batch, pass, seed)?, search);
    // a search begins with short lengths
    let probe = request.with_len(if search.searches() { fit::FIRST.min(len) } else { len }).spec;
    let (resolved, unsupported) = resolve_or_unsupported(pick, |choice| probe.resolve_measured(choice))?;
    let published = pick.published(PUBLISHED, pass, len);
    let row = Row { published, ..probe.row(INFO.name, threads, resolved.as_deref()) };
    let work = row.flops.map_or(0.0, |flops| probe.step_flops(flops));
    let mut usual = StepRequest::new(request.spec.default_spec(PRESET), search);
    let (words, row) = match search.fit {
        Some(bytes) => {
            usual.spec.len = MAX_LEN;
            let row = Row { len: None, flops: None, flops_2x: None, core_macs: None, ..row };
            (format!("{} b{batch} {pass} s{seed} fit {bytes}B", request.spec.model), row)
        }
        None => (request.spec.key(), row),
    };
    let seconds = |threads: usize| match search.fit {
        Some(_) => SEARCH,
        None => peak::seconds(work / (RATE * threads as f64), threads),
    };
    Draft { words, row, request, usual, unsupported }.cell(grid, pick, threads, seconds)
}

fn rows(row: &Row, peak: peak::Peak) -> Vec<Row> {
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

/// The rows of a program: how much its resident size grew, by its own account, over steps of the same model on the same inputs.
fn measure_program(
    runner: &CellRunner,
    index: usize,
    word: &str,
    spec: &ModelSpec,
) -> Result<Result<Vec<Row>, CellFailure>, RunError> {
    let session = &runner.session;
    let Cell { timeout, row, .. } = &runner.plan.cells[index];
    let steps = peak::STEPS.0 as u64;
    // however long they take: the second one finds every cache filled, and moments beside activations
    let warmup = WarmUp { steps, seconds: f64::INFINITY };
    let cell = match ProgramCell::start(word, spec, warmup, *timeout, Bounds::of(session), session)? {
        Ok(cell) => cell,
        Err(failure) => return Ok(Err(failure)),
    };
    let Finished { peak_bytes, version, .. } = cell.end(session)?;
    let Some(bytes) = peak_bytes else {
        return Ok(Err(CellFailure::new(Outcome::Unsupported, "it does not say how much memory it took")));
    };
    let row = Row { version, n: Some(steps), ..row.clone() }.with_outcome(Outcome::Ok, None);
    Ok(Ok(vec![row.with("resident_growth", "B", Some(bytes as f64))]))
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
