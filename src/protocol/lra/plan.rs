//! From flags and suites to training runs.

use serde::{Deserialize, Serialize};

use super::recipe::{self, Recipe};
use super::tasks::Reading;
use crate::attention::choose::Choice;
use crate::config::grid::{Batches, Lengths, Seeds, Words};
use crate::config::settings::{DtypeName, Settings};
use crate::data;
use crate::model::Pooling;
use crate::model::batch::InputKind;
use crate::model::family::{self, Asked, Examples, Resolved, SpecError, classifier, pair};
use crate::model::preset::Preset;
use crate::protocol::Task;
use crate::protocol::grid::{Beside, Defaults, Grid, Pick, PlanError, published_elsewhere};
use crate::protocol::model_spec::{ModelSpec, settle};
use crate::protocol::training::{Differences, Job, Place, Shown};
use crate::record::Pass;
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
        for pick in grid.picks.iter().filter(|pick| pick.has(task)) {
            let preset = pick.settings.preset.as_deref().unwrap_or("ls-lra");
            let recipe = recipe::find(preset, task, &pick.model).map_err(PlanError)?;
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
    if cells.is_empty() {
        return Err(PlanError(format!("no row of the suite has {}; see --dry-run", tasks.0.join(", "))));
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
    let beside = beside(grid, pick, ("accuracy", task), &spec);
    row.published = beside.as_ref().map(|beside| beside.published);
    let seconds = row.flops.map_or(0.0, |flops| work(&spec, flops, recipe, steps) / (RATE * threads as f64));
    let key = format!("{task} {} {} s{}", spec.model, spec.preset, spec.seed);
    let request = reason.is_none().then(|| Request {
        task: task.to_owned(),
        keep: recipe.keep.min(spec.len),
        steps,
        rate,
        limit: settings.limit,
        reading: Reading { keep_close: options.reading.keep_close || recipe.keep_close, ..options.reading },
        timeout: settings.timeout.map(|time| time.0),
        spec,
    });
    if let Some(request) = &request {
        let mut differences = differences(request, recipe);
        differences.settings.extend(beside.into_iter().flat_map(|beside| beside.foreign));
        (row.fraction, row.differs) = (differences.fraction(), differences.words());
    }
    row.error = reason;
    let json = serde_json::to_value(&request).map_err(PlanError::new)?;
    Ok((Cell { key, row, request: json, seconds }, request))
}

/// What the suite printed; for a plain command what Table 1 or Table 4 has for this mechanism.
fn beside(grid: &Grid, pick: &Pick, what: (&str, &str), spec: &ModelSpec) -> Option<Beside> {
    let elsewhere = || published_elsewhere(suite_of(&spec.preset), &spec.model, what, &spec.preset);
    grid.beside(pick, what, &spec.preset).or_else(elsewhere)
}

/// The suite whose numbers belong to `preset`.
pub fn suite_of(preset: &str) -> &'static str {
    if preset == "ls-lra" { "ls-table1" } else { "cos-table4" }
}

/// Multiply-adds of the whole run, `flops` per example: steps of three forwards, and one forward per evaluated example.
fn work(spec: &ModelSpec, flops: u64, recipe: &Recipe, steps: u64) -> f64 {
    let forward = flops as f64 * spec.batch as f64;
    let evaluations = steps.div_ceil(recipe.every_of(steps)) as f64 * recipe.batches.unwrap_or(62) as f64;
    steps as f64 * 3.0 * forward + evaluations * forward
}

/// Predicted seconds of `request`, `flops` per example, on a machine that was seen to make `rate` multiply-adds per second.
pub fn priced(request: &Request, flops: u64, rate: f64) -> Option<f64> {
    let recipe = request.recipe().ok()?;
    Some(work(&request.spec, flops, &recipe, request.steps) / rate)
}

/// What `request` does otherwise than the protocol: everything that the protocol fixes is looked at.
fn differences(request: &Request, recipe: &Recipe) -> Differences {
    let spec = &request.spec;
    let mut all = Differences { settings: Vec::new(), steps: (request.steps, recipe.steps) };
    if !recipe.published {
        all.settings.push("a data set that no source trains on".to_owned());
    }
    all.note("batch", spec.batch, recipe.batch);
    all.note("length", spec.len, recipe.len);
    if request.rate != recipe.rate {
        all.settings.push(format!("rate {:e} ({:e})", request.rate, recipe.rate));
    }
    all.settings.extend(spec.sizes.words());
    if spec.dtype != DtypeName::F32 {
        all.settings.push(format!("{} products", spec.dtype));
    }
    all.settings.extend(request.limit.map(limited));
    if request.reading.strict {
        all.settings.push("selected on held-out training examples".to_owned());
    }
    if request.reading.keep_close != recipe.keep_close {
        all.settings.push("closing brackets kept".to_owned());
    }
    all.settings.extend(recipe.gaps.iter().map(|gap| (*gap).to_owned()));
    let form = Preset::find(&spec.preset)
        .and_then(|preset| preset.form(Some(&request.task), request.mechanism()).ok());
    if spec.preset != "ls-lra" && form.is_some_and(|form| form.pooling == Some(Pooling::ClsFront)) {
        all.settings
            .push("a class id in the place of the last position (a class vector in front)".to_owned());
    }
    all
}

/// What `--limit` does, in words.
pub fn limited(limit: u64) -> String {
    format!("{limit} examples of each split")
}

impl Request {
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
