//! From flags and suites to training runs.

use serde::{Deserialize, Serialize};

use super::recipe::{self, Recipe};
use super::tasks::Reading;
use crate::attention::choose::Choice;
use crate::config::grid::{Batches, Lengths, Seeds, Words};
use crate::config::settings::Settings;
use crate::data;
use crate::model::batch::InputKind;
use crate::model::family::{self, Asked, Examples, Resolved, Sizes, SpecError, classifier, pair};
use crate::protocol::Task;
use crate::protocol::grid::{Defaults, Grid, Pick, PlanError};
use crate::protocol::model_spec::{ModelSpec, settle};
use crate::protocol::training::{Job, Place, Shown};
use crate::record::{Pass, Published};
use crate::run::plan::Cell;

/// What the worker of a cell is asked.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Request {
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
    pub reading: Reading,
    /// The cell ends as `timeout` after so many seconds.
    pub timeout: Option<f64>,
}

/// What the command line says besides the grid.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options {
    /// Short documents and a high rate, so that something is learned in minutes.
    pub quick: bool,
    /// Rate instead of the protocol's.
    pub rate: Option<f64>,
    /// How data are read.
    pub reading: Reading,
}

/// Steps, length and rate of `--quick`: the operator that decides most is an expression's first token, and among few
/// tokens it is found soon.
pub const QUICK: (u64, u64, f64) = (1500, 64, 1e-3);

/// Multiply-adds per second and thread where nothing was probed.
const RATE: f64 = 2e10;

/// What `lra` does where nothing is said.
pub fn defaults(quick: bool) -> Defaults {
    let settings = Settings {
        task: Some(Words(vec!["listops".to_owned()])),
        preset: Some("ls-lra".to_owned()),
        steps: quick.then_some(QUICK.0),
        len: quick.then(|| Lengths(vec![QUICK.1])),
        ..Settings::NONE
    };
    Defaults { protocol: "lra", settings, models: "ls" }
}

/// The model of `spec` for `task`.
///
/// # Errors
/// Unknown names, impossible sizes, a mechanism that cannot do this, a preset without this task.
pub fn model(spec: &ModelSpec, choice: &Choice, task: &str) -> Result<Box<dyn Resolved>, SpecError> {
    let families = [&classifier::FAMILY, &pair::FAMILY];
    let examples = data::task(task).ok().map(|(set, examples)| Examples {
        input: if set.kind.documents() == 2 { InputKind::Pairs } else { InputKind::Tokens },
        vocab: examples.vocabulary,
        classes: examples.classes,
        len: examples.len,
    });
    family::resolve(&families, &Asked { task: Some(task), examples, ..spec.asked(choice) })
}

/// The training runs of `grid`, by task, mechanism and seed.
///
/// # Errors
/// Settings that nobody can run.
pub fn cells(
    grid: &Grid,
    options: Options,
    threads: usize,
) -> Result<Vec<(Cell, Option<Request>)>, PlanError> {
    let mut cells = Vec::new();
    let tasks = grid.settings.task.clone().unwrap_or(Words(Vec::new()));
    for task in &tasks.0 {
        data::task(task).map_err(PlanError::new)?;
        for pick in &grid.picks {
            let preset = pick.settings.preset.as_deref().unwrap_or("ls-lra");
            let recipe = recipe::find(preset, task).map_err(PlanError)?;
            let one = |list: Option<&Vec<u64>>, default: u64| match list.map(Vec::as_slice) {
                None => Ok(default),
                Some([value]) => Ok(*value),
                Some(_) => {
                    Err(PlanError("lra trains at one length and one batch size; give one of each".to_owned()))
                }
            };
            let len = one(pick.settings.len.as_ref().map(|Lengths(list)| list), recipe.len)?;
            let batch = one(pick.settings.batch.as_ref().map(|Batches(list)| list), recipe.batch)?;
            let seeds = pick.settings.seeds.clone().unwrap_or(Seeds(vec![recipe.seed]));
            for seed in seeds.0 {
                let spec = ModelSpec::new(pick, len, batch, Pass::Train, seed)?;
                cells.push(cell(grid, pick, (task, &recipe), spec, options, threads)?);
            }
        }
    }
    Ok(cells)
}

fn cell(
    grid: &Grid,
    pick: &Pick,
    (task, recipe): (&str, &Recipe),
    spec: ModelSpec,
    options: Options,
    threads: usize,
) -> Result<(Cell, Option<Request>), PlanError> {
    let (resolved, reason) = settle(pick, |choice| model(&spec, choice, task))?;
    let settings = &pick.settings;
    let steps = settings.steps.unwrap_or(recipe.steps).max(1);
    let rate = options.rate.unwrap_or(if options.quick { QUICK.2 } else { recipe.rate });
    let mut row = spec.row("lra", threads, resolved.as_deref());
    (row.metric, row.unit) = ("accuracy".to_owned(), "%".to_owned());
    row.task = Some(task.to_owned());
    row.suite = grid.suite.as_ref().map(|suite| suite.name.clone());
    row.published = published(pick, task, &spec);
    let seconds = row.flops.map_or(0.0, |flops| work(&spec, flops, recipe, steps) / (RATE * threads as f64));
    let key = format!("{task} {} {} s{}", spec.model, spec.preset, spec.seed);
    let request = reason.is_none().then(|| Request {
        task: task.to_owned(),
        keep: recipe.keep.min(spec.len),
        steps,
        rate,
        limit: settings.limit,
        reading: options.reading,
        timeout: settings.timeout.map(|time| time.0),
        spec,
    });
    row.error = reason;
    let json = serde_json::to_value(&request).map_err(PlanError::new)?;
    Ok((Cell { key, row, request: json, seconds }, request))
}

/// What the suite printed; for a plain command what Table 1 or Table 4 has for this mechanism.
fn published(pick: &Pick, task: &str, spec: &ModelSpec) -> Option<Published> {
    if let Some(value) = pick.published_for("accuracy", task) {
        return Some(value);
    }
    let suite = if spec.preset == "ls-lra" { "ls-table1" } else { "cos-table4" };
    crate::protocol::grid::published_elsewhere(suite, &spec.model, task)
}

/// Multiply-adds of the whole run, `flops` per example: steps of three forwards, and one forward per evaluated example.
fn work(spec: &ModelSpec, flops: u64, recipe: &Recipe, steps: u64) -> f64 {
    let forward = flops as f64 * spec.batch as f64;
    let evaluations = steps.div_ceil(recipe.every_of(steps)) as f64 * recipe.batches.unwrap_or(62) as f64;
    steps as f64 * 3.0 * forward + evaluations * forward
}

/// Predicted seconds of `request`, `flops` per example, on a machine that was seen to make `rate` multiply-adds per second.
pub fn priced(request: &Request, flops: u64, rate: f64) -> Option<f64> {
    let recipe = recipe::find(&request.spec.preset, &request.task).ok()?;
    Some(work(&request.spec, flops, &recipe, request.steps) / rate)
}

/// Share of the protocol that `request` runs: steps times batch, length and data, each at most whole. None where another
/// rate, other sizes, or another reading of the data make it another protocol.
pub fn fraction(request: &Request, share_of_data: f64) -> Option<f64> {
    let recipe = recipe::find(&request.spec.preset, &request.task).ok()?;
    let reading = Reading { allow_partial: request.reading.allow_partial, ..Reading::default() };
    if !recipe.published
        || request.rate != recipe.rate
        || request.spec.sizes != Sizes::default()
        || request.reading != reading
    {
        return None;
    }
    let part = |done: u64, of: u64| (done as f64 / of as f64).min(1.0);
    let whole = part(request.steps * request.spec.batch, recipe.steps * recipe.batch);
    Some(whole * part(request.spec.len, recipe.len) * share_of_data)
}

impl Job for Request {
    fn task(&self, memory_limit: u64, place: Place) -> Task {
        Task::Lra { memory_limit, request: self.clone(), place }
    }

    fn group(&self) -> &str {
        &self.task
    }

    fn steps(&self) -> u64 {
        self.steps
    }

    fn seed(&self) -> u64 {
        self.spec.seed
    }

    fn timeout(&self) -> Option<f64> {
        self.timeout
    }

    fn shown(&self) -> Shown {
        Shown { name: "validation_accuracy", unit: "%", value: |score| score.value, less: false }
    }
}
