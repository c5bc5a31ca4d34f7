//! From flags and suites to training runs and evaluations of images.

use std::path::Path;

use super::recipe::{self, Recipe};
use super::request::{VisionRequest, classes, model};
use super::stored_input::stored_input;
use super::worker::VisionExperiment;
use super::{Vision, WEIGHTS};
use crate::protocol::curve::CurveSpec;
use crate::protocol::definition::{DataDirs, Prepared, ProtocolInfo};
use crate::protocol::grid::{GridDefaults, GridFlags, PlanError};
use crate::protocol::model_spec::ModelSpec;
use crate::protocol::stored_input::{InputRequest, StoredInput};
use crate::protocol::training::worker::Job;
use crate::protocol::training::{
    PlannedRun, ProtocolDiff, RunPlace, TrainingProtocol, TrainingResult, flops, incomplete, micro_batches,
    requests, resolve,
};
use crate::run::outcome::CellFailure;
use crate::run::plan::Plan;
use effattn_data::content_hash::file_hash;
use effattn_data::images;
use effattn_data::images::test_only::{challenge, challenges};
use effattn_model::family;
use effattn_record::Pass;
use effattn_record::config::lists::{Batches, Lengths, Words};
use effattn_record::config::settings::Settings;
use effattn_record::config::unknown;

const PRESET: &str = "cvt-small";
/// `--quick`: updates, and their images; updates between evaluations, each of which costs as much as some updates.
const QUICK: (u64, u64, u64) = (160, 32, 40);
/// Side of the images of `--quick`, where the preset has small ones: a quarter of the patches.
const QUICK_LEN: u64 = 16;
/// Updates where nobody says how many images there are.
const STEPS: u64 = 10_000;

impl TrainingProtocol for Vision {
    type Request = VisionRequest;

    const INFO: ProtocolInfo = super::INFO;
    const COMPARED: &'static [&'static str] =
        &["steps", "batch", "len", "rate", "sizes", "dtype", "limit", "every"];
    const CURVE: CurveSpec = CurveSpec::ACCURACY;
    const OTHERS_PUBLISHED_BY: Option<&'static str> = Some(super::INFO.name);

    fn defaults(&self, flags: &GridFlags) -> GridDefaults {
        let quick = flags.quick;
        let said = flags.user_settings().preset;
        let preset = said.as_deref().unwrap_or(PRESET);
        let task = if quick { "generated" } else { "cifar10" };
        let small = family::usual(preset).is_some_and(|usual| usual.len as u64 == 2 * QUICK_LEN);
        let settings = Settings {
            task: Some(Words(vec![task.to_owned()])),
            preset: Some(preset.to_owned()),
            steps: quick.then_some(QUICK.0),
            batch: quick.then(|| Batches(vec![QUICK.1])),
            every: quick.then_some(QUICK.2),
            len: (quick && small).then(|| Lengths(vec![QUICK_LEN])),
            ..Settings::NONE
        };
        GridDefaults { settings, models: family::usual(preset).map_or("full", |usual| usual.models) }
    }

    fn check_task(&self, task: &str) -> Result<(), PlanError> {
        known(task)
    }

    fn seed(&self, _: &RunPlace) -> Result<u64, PlanError> {
        Ok(0)
    }

    fn run(&self, place: &RunPlace, seed: u64) -> Result<PlannedRun<VisionRequest>, PlanError> {
        let RunPlace { entry, task, .. } = *place;
        let settings = &entry.settings;
        let preset = settings.preset.clone().unwrap_or_else(|| PRESET.to_owned());
        let usual = family::usual(&preset).map_or(32, |usual| usual.len as u64);
        let recipe = recipe::find(&preset).map_err(PlanError)?;
        let len = one(settings.len.as_ref().map(|Lengths(list)| list), usual)?;
        let batch = one(settings.batch.as_ref().map(|Batches(list)| list), recipe.batch)?;
        let spec = ModelSpec::new(entry, len, batch, Pass::Train, seed)?;
        let model = resolve(entry, |choice| model(&spec, choice, classes(task)))?;
        let evaluates = WEIGHTS.of(settings).is_some();
        let images = images::source(task).ok().and_then(|source| source.published);
        let steps = images.map_or(STEPS, |images| recipe.steps(images as u64, recipe.batch));
        let request = |spec: ModelSpec, settings: &Settings| -> Result<VisionRequest, PlanError> {
            let steps = settings.steps.unwrap_or(steps).max(1);
            Ok(VisionRequest {
                task: task.to_owned(),
                steps: if evaluates { 0 } else { steps },
                rate: settings.rate.unwrap_or(recipe.rate),
                every: settings.every.unwrap_or_else(|| recipe.every_of(steps)),
                accumulate: micro_batches(settings, spec.batch, 1)?,
                limit: settings.limit,
                weights: WEIGHTS.of(settings),
                weights_sha256: WEIGHTS.of(settings).as_deref().map(weights_hash).transpose()?,
                also: settings.also.clone().map_or_else(Vec::new, |Words(names)| names),
                similarity: settings.similarity.unwrap_or(0),
                allow_partial: settings.allow_partial.unwrap_or(false),
                spec,
            })
        };
        // weights are tested as a suite's row asks; what is trained starts at the preset's size
        let tested =
            entry.of_suite().filter(|_| evaluates).and_then(|own| own.settings.len?.0.first().copied());
        let size = tested.unwrap_or(usual);
        let usual = ModelSpec { len: usual, batch: recipe.batch, ..spec.default_spec(&spec.preset) };
        let (usual, request) = (request(usual, &Settings::NONE)?, request(spec, settings)?);
        check_also(&request)?;
        let differs = differences(&request, (&usual, size), &recipe);
        let work = 3.0 * flops(&model, len) * batch as f64 * request.steps as f64;
        Ok(PlannedRun { metric: "accuracy", unit: "%", request, usual, model, differs, work })
    }

    /// Every set of images is read once: their checksums belong to the run.
    fn prepare(&self, plan: &mut Plan, dirs: &DataDirs) -> anyhow::Result<Prepared> {
        let mut remarks = Vec::new();
        for request in requests::<VisionRequest>(plan) {
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

    fn stored_input(&self, cell: &Path, input: &InputRequest) -> anyhow::Result<StoredInput> {
        stored_input(cell, input)
    }

    fn train(&self, job: &Job<VisionRequest>) -> Result<TrainingResult, CellFailure> {
        let run = VisionExperiment::open(job)?;
        match &job.request.weights {
            Some(file) => run.stored(Path::new(file)),
            None => run.trained(),
        }
    }
}

/// SHA-256 of the file of `--weights`: another model under the same name is another cell.
fn weights_hash(path: &str) -> Result<String, PlanError> {
    let hash = file_hash(Path::new(path));
    hash.map_err(|error| PlanError(format!("--weights {path} cannot be read ({error})")))
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

/// Makes sure that the weights of `request` can be tested on its images.
fn check_also(request: &VisionRequest) -> Result<(), PlanError> {
    let VisionRequest { task, also, .. } = request;
    if challenge(task).is_some() && request.weights.is_none() {
        let of = challenge(task).map_or(task.as_str(), |challenge| challenge.of);
        return Err(PlanError(format!(
            "{task} is only tested on: give --weights FILE, or train with --task {of} --also {task}"
        )));
    }
    let trained = challenge(task).map_or(task.as_str(), |challenge| challenge.of);
    for name in also {
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
    Ok(())
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

/// What `request` does otherwise than the recipe, whose images have `size` pixels to a side; of weights that are only tested, what
/// concerns the model and its images.
fn differences(
    request: &VisionRequest,
    (usual, size): (&VisionRequest, u64),
    recipe: &Recipe,
) -> ProtocolDiff {
    let mut all = ProtocolDiff { settings: Vec::new(), steps: (request.steps, usual.steps) };
    let trains = request.weights.is_none();
    if trains {
        all.settings.extend(recipe.gaps.iter().map(|gap| (*gap).to_owned()));
    }
    all.note("image size", request.spec.len, size);
    if trains {
        all.note("batch", request.spec.batch, usual.spec.batch);
        all.note("rate", request.rate, usual.rate);
    }
    all.model(&request.spec);
    all.settings.extend(request.limit.map(|limit| format!("{limit} images of each split")));
    if trains {
        all.note("updates between evaluations", request.every, recipe.every_of(request.steps));
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::Protocol;
    use crate::protocol::resolve;
    use effattn_record::config::settings::DtypeName;

    #[test]
    fn weights_are_in_the_key_by_their_content() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("w.safetensors");
        let planned = |said: Settings| {
            let task = Some(Words(vec!["cifar10".into()]));
            let weights = WEIGHTS.settings(&file.display().to_string());
            let settings = said.over(Settings { task, ..weights });
            let flags = GridFlags { settings, ..GridFlags::default() };
            let grid = resolve(&flags, &Vision).map_err(|error| error.to_string())?;
            Protocol::cells(&Vision, &grid, 1).map_err(|error| error.to_string())
        };
        let keys = || planned(Settings::NONE).unwrap().into_iter().map(|cell| cell.key).collect::<Vec<_>>();
        assert!(planned(Settings::NONE).err().unwrap().contains("w.safetensors cannot be read"));
        std::fs::write(&file, "one").unwrap();
        let first = keys();
        assert_eq!(keys(), first);
        std::fs::write(&file, "two").unwrap();
        assert_ne!(keys(), first, "another model under the same name and of the same size");
        let row = |said: Settings| planned(said).unwrap().remove(0).row;
        let plain = row(Settings { batch: Some(Batches(vec![7])), rate: Some(0.5), ..Settings::NONE });
        assert_eq!((plain.differs, plain.fraction), (None, None), "nothing is trained");
        let other = Settings { len: Some(Lengths(vec![64])), dtype: Some(DtypeName::Bf16), ..Settings::NONE };
        assert_eq!(row(other).differs.as_deref(), Some("image size 64 (32); bf16 products"));
        let flags = GridFlags { settings: Settings::NONE, ..GridFlags::default() };
        let trained = Protocol::cells(&Vision, &resolve(&flags, &Vision).unwrap(), 1).unwrap().remove(0);
        let names = trained.request.as_object().unwrap().keys().cloned().collect::<Vec<_>>();
        assert!(!names.contains(&"weights_sha256".to_owned()), "requests without weights stay as they were");
    }
}
