//! From flags and suites to training runs.

use serde::{Deserialize, Serialize};

use super::documents;
use super::recipe::{self, Recipe};
use super::tasks::{self, LoadOptions};
use crate::protocol::definition::{DataDirs, Prepared};
use crate::protocol::grid::tasks as tasks_of;
use crate::protocol::grid::{
    Grid, GridDefaults, GridEntry, GridFlags, PlanError, PublishedMatch, listed, published_elsewhere,
};
use crate::protocol::model_spec::{ModelSpec, resolve_or_unsupported};
use crate::protocol::training::{ProtocolDiff, RATE, TrainingRequest, incomplete, one_of_each};
use crate::run::plan::{Cell, Plan};
use effattn_data as data;
use effattn_model::attention::choose::MechanismChoice;
use effattn_model::batch::InputKind;
use effattn_model::family::{self, Architecture, DataShape, ModelRequest, ResolveError};
use effattn_record::Pass;
use effattn_record::config::lists::{Lengths, Seeds, Words};
use effattn_record::config::settings::Settings;

/// What the worker of a cell is asked.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LraRequest {
    /// Task.
    pub task: String,
    /// The model; its length is the number of positions.
    pub spec: ModelSpec,
    /// Tokens of a document that are kept.
    pub keep: u64,
    /// Optimizer steps.
    pub steps: u64,
    /// Peak or base rate.
    pub rate: f64,
    /// So many examples of each split; absent: all.
    pub limit: Option<u64>,
    /// How data are read.
    pub reading: LoadOptions,
}

/// Steps, length and rate of `--quick`: the operator that decides most is an expression's first token, and among few
/// tokens it is found soon.
pub const QUICK: (u64, u64, f64) = (1500, 64, 1e-3);

/// Preset where nothing is said.
const PRESET: &str = "ls-lra";

/// What `lra` does where nothing is said.
pub fn defaults(flags: &GridFlags) -> GridDefaults {
    let quick = flags.quick;
    let settings = Settings {
        task: Some(Words(vec!["listops".to_owned()])),
        preset: Some(PRESET.to_owned()),
        steps: quick.then_some(QUICK.0),
        len: quick.then(|| Lengths(vec![QUICK.1])),
        rate: quick.then_some(QUICK.2),
        ..Settings::NONE
    };
    GridDefaults { settings, models: "ls" }
}

/// The model of `spec` for `task`.
///
/// # Errors
/// Unknown names, impossible sizes, a mechanism that cannot do this, a preset without this task.
pub fn model(
    spec: &ModelSpec,
    choice: &MechanismChoice,
    task: &str,
) -> Result<Box<dyn Architecture>, ResolveError> {
    let families: Vec<_> = family::families().into_iter().filter(|family| documents(family)).collect();
    let examples = data::task(task).ok().map(|(set, examples)| DataShape {
        input: if set.kind.documents() == 2 { InputKind::Pairs } else { InputKind::Tokens },
        vocab: examples.vocabulary,
        classes: examples.classes,
        len: examples.len,
    });
    family::resolve(&families, &ModelRequest { task: Some(task), examples, ..spec.model_request(choice) })
}

/// The training runs of `grid`, by task, mechanism and seed.
///
/// # Errors
/// Settings that nobody can run.
pub fn cells(grid: &Grid, threads: usize) -> Result<Vec<Cell>, PlanError> {
    if grid.settings.floor == Some(true) {
        return super::floor::cells(grid);
    }
    let planned = planned(grid, threads)?;
    Ok(planned.into_iter().map(|(cell, _)| cell).collect())
}

/// A training run with what it is asked, and what it would usually be asked under the same words.
type Planned = (Cell, (LraRequest, LraRequest));

/// The training runs of `grid`, each with what it is asked, and what it would usually be asked under the same words.
///
/// # Errors
/// Settings that nobody can run.
pub fn planned(grid: &Grid, threads: usize) -> Result<Vec<Planned>, PlanError> {
    let mut cells = Vec::new();
    for task in tasks_of(grid) {
        data::task(&task).map_err(PlanError::new)?;
        for pick in grid.entries.iter().filter(|pick| pick.runs(&task)) {
            let preset = pick.settings.preset.as_deref().unwrap_or(PRESET);
            let recipe = recipe::find(preset, &task, &pick.model).map_err(PlanError)?;
            let (len, batch) = one_of_each(&pick.settings, "lra")?;
            let (len, batch) = (len.unwrap_or(recipe.len), batch.unwrap_or(recipe.batch));
            let seeds = pick.settings.seeds.clone().unwrap_or(Seeds(vec![recipe.seed]));
            for seed in seeds.0 {
                let spec = ModelSpec::new(pick, len, batch, Pass::Train, seed)?;
                cells.push(cell(grid, pick, (&task, &recipe), spec, threads)?);
            }
        }
    }
    if cells.is_empty() {
        let tasks = tasks_of(grid).join(", ");
        return Err(PlanError(format!("no row of the suite has {tasks}; see --dry-run")));
    }
    Ok(cells)
}

fn cell(
    grid: &Grid,
    pick: &GridEntry,
    (task, recipe): (&str, &Recipe),
    spec: ModelSpec,
    threads: usize,
) -> Result<(Cell, (LraRequest, LraRequest)), PlanError> {
    let (resolved, reason) = resolve_or_unsupported(pick, |choice| model(&spec, choice, task))?;
    let settings = &pick.settings;
    let mut row = spec.row("lra", threads, resolved.as_deref());
    (row.metric, row.unit) = ("accuracy".to_owned(), "%".to_owned());
    row.task = Some(task.to_owned());
    row.suite = grid.suite.as_ref().map(|suite| suite.name.clone());
    let beside = beside(grid, pick, ("accuracy", task), &spec);
    row.published = beside.as_ref().map(|beside| beside.published);
    let usual = LraRequest {
        task: task.to_owned(),
        spec: ModelSpec { len: recipe.len, batch: recipe.batch, ..spec.default_spec(&spec.preset) },
        keep: recipe.keep.min(recipe.len),
        steps: recipe.steps,
        rate: recipe.rate,
        limit: None,
        reading: LoadOptions { keep_close: recipe.keep_close, ..LoadOptions::default() },
    };
    let request = LraRequest {
        keep: recipe.keep.min(spec.len),
        steps: settings.steps.unwrap_or(recipe.steps).max(1),
        rate: settings.rate.unwrap_or(recipe.rate),
        limit: settings.limit,
        reading: LoadOptions {
            strict: settings.strict.unwrap_or(false),
            allow_partial: settings.allow_partial.unwrap_or(false),
            keep_close: settings.keep_close.unwrap_or(false) || recipe.keep_close,
        },
        spec,
        ..usual.clone()
    };
    if reason.is_none() {
        let differences = differences(&request, recipe);
        differences.write_to(beside, &mut row);
    }
    let spec = &request.spec;
    let words = format!("{task} {} {} s{}", spec.model, spec.preset, spec.seed);
    let work = row.flops.map_or(0.0, |flops| work(spec, flops, recipe, request.steps));
    let cell = Cell::new(&words, row, &request, &usual);
    let cell = cell.with_seconds(threads, |threads| work / (RATE * threads as f64));
    let cell = Cell { timeout: settings.timeout.map(|time| time.0), ..cell };
    Ok((cell.with_unsupported(reason), (request, usual)))
}

/// Reads every task's data once: their hashes belong to the run.
///
/// # Errors
/// Data that are missing, damaged, or incomplete without permission.
pub fn prepare(plan: &mut Plan, dirs: &DataDirs) -> anyhow::Result<Prepared> {
    let mut wanted: Vec<(String, LoadOptions)> = Vec::new();
    for cell in &plan.cells {
        let reading = cell.request.pointer("/reading").or_else(|| cell.request.pointer("/train/reading"));
        let reading = reading.and_then(|reading| serde_json::from_value(reading.clone()).ok());
        let Some((task, reading)) = cell.row.task.clone().zip(reading) else { continue };
        if !wanted.contains(&(task.clone(), reading)) {
            wanted.push((task, reading));
        }
    }
    let mut remarks = Vec::new();
    for (task, reading) in wanted {
        let data = tasks::load(&task, &dirs.data, reading)?;
        if let Some(partial) = data.partial() {
            remarks.push(incomplete(&task, partial));
        }
        plan.data.insert(task, data.hash().to_owned());
    }
    plan.cells.iter_mut().for_each(|cell| cell.reads = cell.row.task.iter().cloned().collect());
    Ok(Prepared { remarks, text: None })
}

/// `listops · ls-lra · 5000 steps · batch 32 · length 2048`.
pub fn amount(plan: &Plan) -> String {
    let steps = |cell: &Cell| {
        let steps = cell.request.get("steps").or_else(|| cell.request.pointer("/train/steps"));
        steps.and_then(serde_json::Value::as_u64)
    };
    let task = listed(plan, |row| row.task.clone());
    let Some(steps) = plan.cells.iter().filter_map(steps).max() else {
        return format!("{task} · simple rules"); // nothing is trained
    };
    let preset = listed(plan, |row| row.preset.clone());
    let (batch, len) = (listed(plan, |row| row.batch), listed(plan, |row| row.len));
    format!("{task} · {preset} · {steps} steps · batch {batch} · length {len}")
}

/// What the suite printed; for a plain command what a suite of these sizes has for this mechanism.
fn beside(grid: &Grid, pick: &GridEntry, what: (&str, &str), spec: &ModelSpec) -> Option<PublishedMatch> {
    let elsewhere = || published_elsewhere(super::INFO.name, &spec.model, what, &spec.preset);
    grid.beside(pick, what, &spec.preset).or_else(elsewhere)
}

/// Multiply-adds of the whole run, `flops` per example: steps of three forwards, and one forward per evaluated example.
fn work(spec: &ModelSpec, flops: u64, recipe: &Recipe, steps: u64) -> f64 {
    let forward = flops as f64 * spec.batch as f64;
    let evaluations = steps.div_ceil(recipe.every_of(steps)) as f64 * recipe.batches.unwrap_or(62) as f64;
    steps as f64 * 3.0 * forward + evaluations * forward
}

/// What `request` does otherwise than the protocol: everything that the protocol fixes is looked at.
fn differences(request: &LraRequest, recipe: &Recipe) -> ProtocolDiff {
    let spec = &request.spec;
    let mut all = ProtocolDiff { settings: Vec::new(), steps: (request.steps, recipe.steps) };
    all.settings.extend(recipe.ours.map(str::to_owned));
    all.note("batch", spec.batch, recipe.batch);
    all.note("length", spec.len, recipe.len);
    all.rate(request.rate, recipe.rate);
    all.model(spec);
    all.settings.extend(request.limit.map(tasks::limited));
    if request.reading.strict {
        all.settings.push("selected on held-out training examples".to_owned());
    }
    if request.reading.keep_close != recipe.keep_close {
        all.settings.push("closing brackets kept".to_owned());
    }
    all.settings.extend(recipe.gaps.iter().map(|gap| (*gap).to_owned()));
    all
}

impl LraRequest {
    fn mechanism(&self) -> &str {
        self.spec.model.split(':').next().unwrap_or_default()
    }

    /// How its task is trained.
    ///
    /// # Errors
    /// A preset without this task.
    pub fn recipe(&self) -> Result<Recipe, String> {
        recipe::find(&self.spec.preset, &self.task, self.mechanism())
    }
}

impl TrainingRequest for LraRequest {
    fn steps(&self) -> u64 {
        self.steps
    }

    fn spec(&self) -> &ModelSpec {
        &self.spec
    }
}
