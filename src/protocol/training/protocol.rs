//! A [`TrainingProtocol`]: what one protocol that trains does otherwise than the others. Plans, the parent's and the worker's
//! side are the same for all.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde_json::Value;

use super::estimate::{RATE, estimate};
use super::parent::compute;
use super::worker::{Job, report};
use super::{ProtocolDiff, TrainingRequest, TrainingResult};
use crate::protocol::cell_runner::{CellRunner, request};
use crate::protocol::curve::CurveSpec;
use crate::protocol::definition::{
    DataDirs, EstimateContext, Prepared, Protocol, ProtocolInfo, ResultView, WorkerInput,
};
use crate::protocol::differing::differing_words;
use crate::protocol::grid::{
    Grid, GridDefaults, GridEntry, GridFlags, PlanError, listed, numbers_elsewhere, published_elsewhere,
    tasks,
};
use crate::protocol::model_spec::resolve_or_unsupported;
use crate::protocol::stored_input::{InputRequest, StoredInput};
use crate::run::RunError;
use crate::run::outcome::CellFailure;
use crate::run::plan::{Cell, Plan, key_word, unusual_values};
use crate::run::worker::ParentLink;
use effattn_data::{LoadOptions, own};
use effattn_model::attention::choose::MechanismChoice;
use effattn_model::family::{Architecture, ResolveError};
use effattn_record::config::lists::Seeds;
use effattn_record::departures;

/// A protocol whose cells are training runs: one for every task, mechanism and seed.
pub trait TrainingProtocol: Sync {
    /// Request of a cell's worker.
    type Request: TrainingRequest + Serialize;

    /// Its command.
    const INFO: ProtocolInfo;
    /// Learning curves.
    const CURVE: CurveSpec;
    /// Values of the request that `differs` compares in words of its own; every other one that is not the usual request's is
    /// said by its name.
    const COMPARED: &'static [&'static str];
    /// Protocol in whose suites a number is looked up if the run's own suite has none.
    const PUBLISHED_BY: Option<&'static str> = None;
    /// The same for numbers of other tasks than the cell's.
    const OTHERS_PUBLISHED_BY: Option<&'static str> = None;

    /// Settings and mechanisms without flags.
    fn defaults(&self, flags: &GridFlags) -> GridDefaults;

    /// Refuses flags that contradict each other.
    fn check_flags(&self, _flags: &GridFlags) -> Result<(), PlanError> {
        Ok(())
    }

    /// Refuses a `task` that it does not have.
    fn check_task(&self, task: &str) -> Result<(), PlanError>;

    /// Seed without `--seeds`.
    fn seed(&self, _place: &RunPlace) -> Result<u64, PlanError> {
        Ok(1)
    }

    /// The training run of `place` with `seed`.
    fn run(&self, place: &RunPlace, seed: u64) -> Result<PlannedRun<Self::Request>, PlanError>;

    /// The cells of `grid`.
    fn cells(&self, grid: &Grid, threads: usize) -> Result<Vec<Cell>, PlanError> {
        cells(self, grid, threads)
    }

    /// See [`Protocol::prepare`].
    fn prepare(&self, plan: &mut Plan, dirs: &DataDirs) -> anyhow::Result<Prepared>;

    /// Steps, batch and length in words, for the first line.
    fn amount(&self, requests: &[Self::Request], batch: &str, len: &str) -> String {
        format!("{} steps · batch {batch} · length {len}", most_steps(requests))
    }

    /// The plan in a few words: `listops · ls-lra · 5000 steps · batch 32 · length 2048`.
    fn summary(&self, plan: &Plan) -> String {
        summary(self, plan)
    }

    /// See [`Protocol::same_group`].
    fn same_group(&self, _: &Cell, _: &Cell) -> bool {
        false
    }

    /// See [`Protocol::compute`].
    fn compute(&self, runner: &mut CellRunner, open: &[usize]) -> Result<(), RunError> {
        compute::<Self::Request>(runner, open, Self::CURVE)
    }

    /// See [`Protocol::stored_input`].
    fn stored_input(&self, cell: &Path, input: &InputRequest) -> anyhow::Result<StoredInput>;

    /// The worker's side: trains until the last step or until the parent is gone, and tests.
    fn train(&self, job: &Job<Self::Request>) -> Result<TrainingResult, CellFailure>;
}

/// Where in a grid a training run stands.
pub struct RunPlace<'a> {
    /// The grid.
    pub grid: &'a Grid,
    /// Its line.
    pub entry: &'a GridEntry,
    /// The task.
    pub task: &'a str,
    /// Hashes of files that were read for other runs, by path.
    pub hashes: &'a RefCell<BTreeMap<PathBuf, String>>,
}

/// A model, or why this version cannot run it.
pub type ModelOrReason = Result<Box<dyn Architecture>, String>;

/// A training run of a plan.
pub struct PlannedRun<R> {
    /// Metric that is compared with the papers.
    pub metric: &'static str,
    /// Its unit in rows.
    pub unit: &'static str,
    /// Request of its worker.
    pub request: R,
    /// The request under the same words without any setting: the key of the cell has what differs.
    pub usual: R,
    /// The model.
    pub model: ModelOrReason,
    /// Differences from the protocol.
    pub differs: ProtocolDiff,
    /// Multiply-adds of the whole run.
    pub work: f64,
}

/// The model that `find` gives for the mechanism of `entry`.
pub fn resolve<M: Architecture + 'static>(
    entry: &GridEntry,
    find: impl FnOnce(&MechanismChoice) -> Result<M, ResolveError>,
) -> Result<ModelOrReason, PlanError> {
    let (model, unsupported) = resolve_or_unsupported(entry, find)?;
    Ok(model.map(|model| Box::new(model) as _).ok_or_else(|| unsupported.unwrap_or_default()))
}

/// Multiply-adds of one example of length `len`; 0 if the model cannot be run.
pub fn flops(model: &ModelOrReason, len: u64) -> f64 {
    model.as_ref().map_or(0.0, |model| model.flops(len as usize) as f64)
}

/// The training runs of `grid`.
pub fn cells<T: TrainingProtocol + ?Sized>(
    protocol: &T,
    grid: &Grid,
    threads: usize,
) -> Result<Vec<Cell>, PlanError> {
    let (mut cells, hashes) = (Vec::new(), RefCell::default());
    for task in &tasks(grid) {
        protocol.check_task(task)?;
        for entry in grid.entries.iter().filter(|entry| entry.runs(task)) {
            let place = RunPlace { grid, entry, task, hashes: &hashes };
            let seeds = match &entry.settings.seeds {
                Some(Seeds(seeds)) => seeds.clone(),
                None => vec![protocol.seed(&place)?],
            };
            for seed in seeds {
                cells.push(cell::<T>(&place, protocol.run(&place, seed)?, threads));
            }
        }
    }
    if cells.is_empty() {
        let tasks = tasks(grid).join(", ");
        return Err(PlanError(format!("no row of the suite has {tasks}; see --dry-run")));
    }
    Ok(cells)
}

/// `plan` in a few words, by [`TrainingProtocol::amount`].
pub fn summary<T: TrainingProtocol + ?Sized>(protocol: &T, plan: &Plan) -> String {
    let (task, preset) = (listed(plan, |row| row.task.clone()), listed(plan, |row| row.preset.clone()));
    let (batch, len) = (listed(plan, |row| row.batch), listed(plan, |row| row.len));
    format!("{task} · {preset} · {}", protocol.amount(&requests(plan), &batch, &len))
}

fn cell<T: TrainingProtocol + ?Sized>(place: &RunPlace, run: PlannedRun<T::Request>, threads: usize) -> Cell {
    let RunPlace { grid, entry, task, .. } = *place;
    let PlannedRun { metric, unit, request, usual, model, mut differs, work } = run;
    let (spec, unsupported) = (request.info().spec, model.as_ref().err().cloned());
    let mut row = spec.row(T::INFO.name, threads, model.as_deref().ok());
    row.task = Some(task.to_owned());
    row.suite = grid.suite.as_ref().map(|suite| suite.name.clone());
    (row.metric, row.unit) = (metric.to_owned(), unit.to_owned());
    let what = (metric, task);
    let elsewhere = || published_elsewhere(T::PUBLISHED_BY?, &spec.model, what, &spec.preset);
    let beside = grid.beside(entry, what, &spec.preset).or_else(elsewhere);
    row.published = beside.as_ref().map(|beside| beside.published);
    if unsupported.is_none() {
        differs.settings.extend(differing_words(&unusual_values(&request, &usual), T::COMPARED));
        differs.write_to(beside, &mut row);
    }
    let elsewhere = T::OTHERS_PUBLISHED_BY.map(|name| numbers_elsewhere(name, &spec.model, &spec.preset));
    let published = [grid.numbers(entry, &spec.preset), elsewhere.unwrap_or_default()].concat();
    let words = format!("{} {} {} s{}", key_word(task), spec.model, spec.preset, spec.seed);
    let cell = Cell::new(&words, row, &request, &usual);
    let cell = cell.with_seconds(threads, |threads| work / (RATE * threads as f64));
    let timeout = entry.settings.timeout.map(|time| time.0);
    Cell { timeout, published, ..cell }.with_unsupported(unsupported)
}

/// The requests of the cells of `plan` that can be run; those of another form are left out.
pub fn requests<R: TrainingRequest>(plan: &Plan) -> Vec<R> {
    plan.cells.iter().filter_map(|cell| request(cell).ok()).collect()
}

/// The most steps of one of `requests`.
pub fn most_steps<R: TrainingRequest>(requests: &[R]) -> u64 {
    requests.iter().map(|request| request.info().steps).max().unwrap_or(0)
}

/// Data that were read before a run.
pub struct DataRead {
    /// Checksum.
    pub hash: String,
    /// What is missing, in words; `None` if they are complete.
    pub partial: Option<String>,
    /// What else is to be said about them.
    pub remark: Option<String>,
}

/// Reads once what several cells want: the name of the data, how they are read, and what `read` needs.
pub fn read_once<'a, R>(
    plan: &mut Plan,
    wanted: impl Iterator<Item = (&'a str, LoadOptions, R)>,
    read: impl Fn(R) -> anyhow::Result<DataRead>,
) -> anyhow::Result<Prepared> {
    let (mut seen, mut remarks) = (Vec::new(), Vec::new());
    for (name, options, request) in wanted {
        if seen.contains(&(name, options)) {
            continue;
        }
        seen.push((name, options));
        let DataRead { hash, partial, remark } = read(request)?;
        remarks.extend(partial.map(|partial| incomplete(name, &partial)).into_iter().chain(remark));
        plan.data.insert(name.to_owned(), hash);
    }
    Ok(Prepared { remarks, text: None })
}

/// Reads the data of every request of `plan` once.
pub fn read_data<R: TrainingRequest>(
    plan: &mut Plan,
    read: impl Fn(&R) -> anyhow::Result<DataRead>,
) -> anyhow::Result<Prepared> {
    let requests = requests::<R>(plan);
    let wanted = requests.iter().map(|request| (request.info().task, request.info().reading, request));
    read_once(plan, wanted, read)
}

/// Remark on data that are not complete.
pub fn incomplete(task: &str, remark: &str) -> String {
    format!("{task}: incomplete data ({remark}); rows say which share of the protocol it is")
}

impl<T: TrainingProtocol> Protocol for T {
    fn info(&self) -> &'static ProtocolInfo {
        const { &T::INFO }
    }

    fn defaults(&self, flags: &GridFlags) -> GridDefaults {
        TrainingProtocol::defaults(self, flags)
    }

    fn check_flags(&self, flags: &GridFlags) -> Result<(), PlanError> {
        TrainingProtocol::check_flags(self, flags)
    }

    fn cells(&self, grid: &Grid, threads: usize) -> Result<Vec<Cell>, PlanError> {
        TrainingProtocol::cells(self, grid, threads)
    }

    fn prepare(&self, plan: &mut Plan, dirs: &DataDirs) -> anyhow::Result<Prepared> {
        let prepared = TrainingProtocol::prepare(self, plan, dirs)?;
        for cell in &mut plan.cells {
            if let Ok(request) = serde_json::from_value::<T::Request>(cell.request.clone()) {
                cell.reads = request.reads();
                let task = request.info().task;
                if let (Some(records), Some(hash)) = (own::records(task), plan.data.get(task)) {
                    let content: String = hash.chars().take(12).collect();
                    departures::add(&mut cell.row, &format!("own files: {records}, content {content}"));
                }
            }
        }
        Ok(prepared)
    }

    fn summary(&self, plan: &Plan) -> String {
        TrainingProtocol::summary(self, plan)
    }

    fn estimate(&self, plan: &mut Plan, context: &EstimateContext) -> Result<(), RunError> {
        estimate::<T::Request>(plan, context)
    }

    fn same_group(&self, a: &Cell, b: &Cell) -> bool {
        TrainingProtocol::same_group(self, a, b)
    }

    fn compute(&self, runner: &mut CellRunner, open: &[usize]) -> Result<(), RunError> {
        TrainingProtocol::compute(self, runner, open)
    }

    fn work(&self, link: &ParentLink, request: Value, input: &WorkerInput) -> anyhow::Result<()> {
        let job = Job { link, request: serde_json::from_value(request)?, context: &input.conditions };
        report(link, self.train(&job))
    }

    fn stored_input(&self, cell: &Path, input: &InputRequest) -> anyhow::Result<StoredInput> {
        TrainingProtocol::stored_input(self, cell, input)
    }

    fn view(&self) -> ResultView {
        ResultView::Trained
    }

    fn curve(&self) -> Option<CurveSpec> {
        Some(T::CURVE)
    }
}
