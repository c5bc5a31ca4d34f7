//! From flags and suites to training runs and evaluations of images.

use std::collections::BTreeMap;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::recipe::{self, Recipe};
use crate::protocol::definition::{DataDirs, Prepared};
use crate::protocol::grid::tasks as tasks_of;
use crate::protocol::grid::{Grid, GridDefaults, GridEntry, GridFlags, PlanError, published_elsewhere};
use crate::protocol::model_spec::{ModelSpec, resolve_or_unsupported};
use crate::protocol::training::{ProtocolDiff, RATE, TrainingRequest, incomplete};
use crate::run::plan::{Cell, Plan};
use effattn_data::content_hash::file_hash;
use effattn_data::images;
use effattn_data::images::test_only::{challenge, challenges};
use effattn_model::batch::InputKind;
use effattn_model::family::vision::{ImageClassifier, classifier};
use effattn_model::family::{self, Architecture, DataShape, ModelRequest, ResolveError};
use effattn_record::config::lists::{Batches, Lengths, Seeds, Words};
use effattn_record::config::settings::Settings;
use effattn_record::config::unknown;
use effattn_record::{Pass, Published};

/// What the worker of a cell is asked.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct VisionRequest {
    /// The images.
    pub task: String,
    /// The model; its length is the side of the images, its batch the images of an update.
    pub spec: ModelSpec,
    /// Updates; none where stored weights are evaluated.
    pub steps: u64,
    /// Highest rate.
    pub rate: f64,
    /// Updates between evaluations.
    pub every: u64,
    /// Parts that an update's batch is cut into.
    pub accumulate: u64,
    /// So many images of each split; absent: all.
    pub limit: Option<u64>,
    /// File of the weights that are evaluated instead of trained ones.
    pub weights: Option<String>,
    /// SHA-256 of that file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weights_sha256: Option<String>,
    /// Images that the weights are tested on besides, by name.
    #[serde(default)]
    pub also: Vec<String>,
    /// Images whose patches are compared (Figure 6).
    pub similarity: u64,
    /// Whether incomplete data and broken images are taken as they are.
    pub allow_partial: bool,
}

const PRESET: &str = "cvt-small";
/// Updates of `--quick`, and their images.
const QUICK: (u64, u64) = (120, 32);
/// Updates where nobody says how many images there are.
const STEPS: u64 = 10_000;

/// What `vision` does where nothing is said.
pub fn defaults(flags: &GridFlags) -> GridDefaults {
    let quick = flags.quick;
    let said = flags.user_settings().preset;
    let preset = said.as_deref().unwrap_or(PRESET);
    let task = if quick { "generated" } else { "cifar10" };
    let settings = Settings {
        task: Some(Words(vec![task.to_owned()])),
        preset: Some(preset.to_owned()),
        steps: quick.then_some(QUICK.0),
        batch: quick.then(|| Batches(vec![QUICK.1])),
        ..Settings::NONE
    };
    GridDefaults { settings, models: family::usual(preset).map_or("full", |usual| usual.models) }
}

/// Classes of the images called `task`, where they are known before they are read.
fn examples(classes: usize, len: usize) -> DataShape {
    DataShape { input: InputKind::Pixels, vocab: 0, classes, len }
}

/// The model of `spec` for images of `classes`.
///
/// # Errors
/// Unknown names, sizes that no model has.
pub fn model(
    spec: &ModelSpec,
    choice: &effattn_model::attention::choose::MechanismChoice,
    classes: Option<usize>,
) -> Result<ImageClassifier, ResolveError> {
    let examples = classes.map(|classes| examples(classes, spec.len as usize));
    let resolved = classifier(&ModelRequest { examples, ..spec.model_request(choice) })?;
    resolved.validate()?;
    Ok(resolved)
}

/// Classes of the models for `task`, where that is known before its images are read.
pub fn classes(task: &str) -> Option<usize> {
    let trained_on = challenge(task).map_or(task, |challenge| challenge.of);
    images::source(trained_on).ok()?.classes
}

/// The runs of `grid`, by images, mechanism and seed.
///
/// # Errors
/// Settings that nobody can run.
pub fn cells(grid: &Grid, threads: usize) -> Result<Vec<Cell>, PlanError> {
    let (mut cells, mut hashes) = (Vec::new(), BTreeMap::new());
    for task in tasks_of(grid) {
        known(&task)?;
        for pick in grid.entries.iter().filter(|pick| pick.runs(&task)) {
            let weights = weights_hash(&pick.settings, &mut hashes)?;
            let seeds = pick.settings.seeds.clone().unwrap_or(Seeds(vec![0]));
            for seed in seeds.0 {
                cells.push(cell(grid, pick, (&task, weights.as_deref()), seed, threads)?);
            }
        }
    }
    if cells.is_empty() {
        return Err(PlanError(format!(
            "no row of the suite has {}; see --dry-run",
            tasks_of(grid).join(", ")
        )));
    }
    Ok(cells)
}

/// SHA-256 of the file of `--weights`: another model under the same name is another cell. `hashes` has those of files that were
/// read before.
fn weights_hash(
    settings: &Settings,
    hashes: &mut BTreeMap<String, String>,
) -> Result<Option<String>, PlanError> {
    let Some(path) = &settings.weights else { return Ok(None) };
    if !hashes.contains_key(path) {
        let hash = file_hash(Path::new(path))
            .map_err(|error| PlanError(format!("--weights {path} cannot be read ({error})")))?;
        hashes.insert(path.clone(), hash);
    }
    Ok(hashes.get(path).cloned())
}

/// Images that are trained on, then those that weights are only tested on.
pub fn names() -> Vec<&'static str> {
    let tested = challenges().into_iter().map(|challenge| challenge.name);
    images::sources().iter().map(|source| source.name).chain(tested).collect()
}

/// Makes sure that there are images called `task`.
fn known(task: &str) -> Result<(), PlanError> {
    let names = names();
    match names.contains(&task) {
        true => Ok(()),
        false => Err(PlanError(unknown("task", task, names))),
    }
}

/// The sets that `pick` is tested on besides `task`.
fn also(settings: &Settings, task: &str) -> Result<Vec<String>, PlanError> {
    let names = settings.also.clone().map_or_else(Vec::new, |Words(names)| names);
    if challenge(task).is_some() && settings.weights.is_none() {
        let of = challenge(task).map_or(task, |challenge| challenge.of);
        return Err(PlanError(format!(
            "{task} is only tested on: give --weights FILE, or train with --task {of} --also {task}"
        )));
    }
    let trained = challenge(task).map_or(task, |challenge| challenge.of);
    for name in &names {
        let all = challenges();
        let Some(challenge) = challenge(name) else {
            return Err(PlanError(unknown("set of --also", name, all.iter().map(|known| known.name))));
        };
        if challenge.of != trained {
            let fitting = all.iter().filter(|other| other.of == trained).map(|other| other.name);
            let fitting = fitting.collect::<Vec<_>>().join(", ");
            let fitting = if fitting.is_empty() { "none".to_owned() } else { fitting };
            return Err(PlanError(format!(
                "--also {name} has the classes of {}, not of {trained}; for {trained} there is: {fitting}",
                challenge.of
            )));
        }
    }
    Ok(names)
}

fn one(list: Option<&Vec<u64>>, default: u64) -> Result<u64, PlanError> {
    match list.map(Vec::as_slice) {
        None => Ok(default),
        Some([value]) => Ok(*value),
        Some(_) => {
            Err(PlanError("vision trains at one image size and one batch size; give one of each".to_owned()))
        }
    }
}

fn cell(
    grid: &Grid,
    pick: &GridEntry,
    (task, weights): (&str, Option<&str>),
    seed: u64,
    threads: usize,
) -> Result<Cell, PlanError> {
    let settings = &pick.settings;
    let preset = settings.preset.clone().unwrap_or_else(|| PRESET.to_owned());
    let usual = family::usual(&preset).map_or(32, |usual| usual.len as u64);
    let recipe = recipe::find(&preset).map_err(PlanError)?;
    let len = one(settings.len.as_ref().map(|Lengths(list)| list), usual)?;
    let batch = one(settings.batch.as_ref().map(|Batches(list)| list), recipe.batch)?;
    let spec = ModelSpec::new(pick, len, batch, Pass::Train, seed)?;
    let (resolved, reason) = resolve_or_unsupported(pick, |choice| model(&spec, choice, classes(task)))?;
    let resolved: Option<Box<dyn Architecture>> =
        resolved.map(|model| Box::new(model) as Box<dyn Architecture>);
    let mut row = spec.row("vision", threads, resolved.as_deref());
    (row.metric, row.unit) = ("accuracy".to_owned(), "%".to_owned());
    row.task = Some(task.to_owned());
    row.suite = grid.suite.as_ref().map(|suite| suite.name.clone());
    let beside = grid.beside(pick, ("accuracy", task), &spec.preset);
    row.published = beside.as_ref().map(|beside| beside.published);
    let usual = usual_request(task, &spec, &recipe);
    let steps = settings.steps.unwrap_or(usual.steps).max(1);
    let evaluates = settings.weights.is_some();
    let request = VisionRequest {
        steps: if evaluates { 0 } else { steps },
        rate: settings.rate.unwrap_or(recipe.rate),
        every: settings.every.unwrap_or((steps / recipe.epochs).max(steps / 50)).max(1),
        accumulate: settings.accumulate.unwrap_or(1),
        limit: settings.limit,
        weights: settings.weights.clone(),
        weights_sha256: weights.map(str::to_owned),
        also: also(settings, task)?,
        similarity: settings.similarity.unwrap_or(0),
        allow_partial: settings.allow_partial.unwrap_or(false),
        spec,
        ..usual.clone()
    };
    if !request.spec.batch.is_multiple_of(request.accumulate) {
        let (batch, parts) = (request.spec.batch, request.accumulate);
        return Err(PlanError(format!("--accumulate {parts} does not divide the batch of {batch}")));
    }
    if reason.is_none() && !evaluates {
        let mut differences = differences(&request, &usual, &recipe);
        differences.settings.extend(beside.into_iter().flat_map(|beside| beside.foreign));
        (row.fraction, row.differs) = (differences.fraction(), differences.words());
    }
    let flops = row.flops.unwrap_or(0) as f64;
    let forward = 3.0 * flops * request.spec.batch as f64 * request.steps as f64;
    let words = format!("{task} {} {} s{}", request.spec.model, request.spec.preset, request.spec.seed);
    let cell = Cell::new(&words, row, &request, &usual);
    let cell = cell.with_seconds(threads, |threads| forward / (RATE * threads as f64));
    let cell = Cell { timeout: settings.timeout.map(|time| time.0), ..cell };
    Ok(cell.with_unsupported(reason))
}

/// What is asked where nothing is said.
fn usual_request(task: &str, spec: &ModelSpec, recipe: &Recipe) -> VisionRequest {
    let usual = family::usual(&spec.preset).map_or(spec.len, |usual| usual.len as u64);
    let images = images::source(task).ok().and_then(|source| source.published);
    let steps = images.map_or(STEPS, |images| recipe.steps(images as u64, recipe.batch));
    VisionRequest {
        task: task.to_owned(),
        spec: ModelSpec { len: usual, batch: recipe.batch, ..spec.default_spec(&spec.preset) },
        steps,
        rate: recipe.rate,
        every: (steps / recipe.epochs).max(steps / 50).max(1),
        accumulate: 1,
        limit: None,
        weights: None,
        weights_sha256: None,
        also: Vec::new(),
        similarity: 0,
        allow_partial: false,
    }
}

/// What `request` does otherwise than the recipe.
fn differences(request: &VisionRequest, usual: &VisionRequest, recipe: &Recipe) -> ProtocolDiff {
    let mut all = ProtocolDiff { settings: Vec::new(), steps: (request.steps, usual.steps) };
    all.settings.extend(recipe.gaps.iter().map(|gap| (*gap).to_owned()));
    all.note("image size", request.spec.len, usual.spec.len);
    all.note("batch", request.spec.batch, usual.spec.batch);
    all.note("rate", request.rate, usual.rate);
    if let Some(limit) = request.limit {
        all.settings.push(format!("{limit} images of each split"));
    }
    all
}

/// Reads every set of images once: their checksums belong to the run.
///
/// # Errors
/// Images that are missing, damaged, or incomplete without permission.
pub fn prepare(plan: &mut Plan, dirs: &DataDirs) -> anyhow::Result<Prepared> {
    let mut remarks = Vec::new();
    for cell in &mut plan.cells {
        let request: Option<VisionRequest> = serde_json::from_value(cell.request.clone()).ok();
        let Some(request) = request else { continue };
        cell.reads = [&request.task].into_iter().chain(&request.also).cloned().collect();
        if let Some((file, hash)) = request.weights.as_ref().zip(request.weights_sha256.as_ref()) {
            plan.data.insert(format!("weights {file}"), hash.clone());
        }
        let mut classes = None;
        for name in [&request.task].into_iter().chain(&request.also) {
            let known = plan.data.contains_key(name);
            let partial = if let Some(challenge) = challenge(name).filter(|_| !known) {
                let found = challenge.scan(&dirs.data, classes.as_deref(), request.allow_partial)?;
                plan.data.insert(name.clone(), found.hash);
                found.partial
            } else if !known || !request.also.is_empty() && challenge(name).is_none() {
                let set = (images::source(name)?.load)(&dirs.data, request.allow_partial)?;
                plan.data.insert(name.clone(), set.hash().to_owned());
                classes = Some(set.classes().to_vec());
                set.partial().map(str::to_owned).filter(|_| !known)
            } else {
                None
            };
            remarks.extend(partial.map(|partial| incomplete(name, &partial)));
        }
    }
    Ok(Prepared { remarks, text: None })
}

impl TrainingRequest for VisionRequest {
    fn steps(&self) -> u64 {
        self.steps
    }

    fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    fn published(&self, metric: &str, task: &str) -> Option<Published> {
        let what = (metric, task);
        Some(published_elsewhere("vision", &self.spec.model, what, &self.spec.preset)?.published)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::grid::resolve;
    use crate::protocol::vision::Vision;

    #[test]
    fn weights_are_in_the_key_by_their_content() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("w.safetensors");
        let planned = || {
            let weights = Some(file.display().to_string());
            let settings = Settings { weights, task: Some(Words(vec!["cifar10".into()])), ..Settings::NONE };
            let flags = GridFlags { settings, ..GridFlags::default() };
            let grid = resolve(&flags, &Vision).map_err(|error| error.to_string())?;
            cells(&grid, 1).map_err(|error| error.to_string())
        };
        let keys = || planned().unwrap().into_iter().map(|cell| cell.key).collect::<Vec<_>>();
        assert!(planned().err().unwrap().contains("w.safetensors cannot be read"));
        std::fs::write(&file, "one").unwrap();
        let first = keys();
        assert_eq!(keys(), first);
        std::fs::write(&file, "two").unwrap();
        assert_ne!(keys(), first, "another model under the same name and of the same size");
        let flags = GridFlags { settings: Settings::NONE, ..GridFlags::default() };
        let trained = cells(&resolve(&flags, &Vision).unwrap(), 1).unwrap().remove(0);
        let names = trained.request.as_object().unwrap().keys().cloned().collect::<Vec<_>>();
        assert!(!names.contains(&"weights_sha256".to_owned()), "requests without weights stay as they were");
    }
}
