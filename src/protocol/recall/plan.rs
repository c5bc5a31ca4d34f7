//! From flags and suites to grids of small training runs.

use std::path::Path;

use super::recipe::{self, Recipe, TrainPart, examples, recipe_of};
use super::request::{RecallRequest, model};
use super::stored_input::stored_input;
use super::worker::train;
use super::{ACCURACY, MACRO_ACCURACY, Recall, VOCABULARY, floor};
use crate::protocol::cell_runner::CellRunner;
use crate::protocol::curve::CurveSpec;
use crate::protocol::definition::{DataDirs, Prepared, ProtocolInfo};
use crate::protocol::grid::{Grid, GridDefaults, GridFlags, PlanError, listed};
use crate::protocol::model_spec::ModelSpec;
use crate::protocol::stored_input::{InputRequest, StoredInput};
use crate::protocol::training::worker::Job;
use crate::protocol::training::{
    self, DataRead, PlannedRun, ProtocolDiff, RunPlace, TrainingProtocol, TrainingResult, flops, most_steps,
    one_of_each, read_once, requests, resolve,
};
use crate::run::RunError;
use crate::run::outcome::CellFailure;
use crate::run::plan::{Cell, Plan};
use effattn_data::LoadOptions;
use effattn_data::position_labels::{self, Segment};
use effattn_model::labeler::LayerForm;
use effattn_record::Pass;
use effattn_record::config::lists::{Batches, Layers, Rates, Segments, Words};
use effattn_record::config::settings::Settings;

/// Mechanisms where nothing is said.
const MODELS: &str = "full,window,ls,cosformer,linear,based,retention,gla,mamba2,deltanet,gated-deltanet";

/// The mechanism that a list of layers names, where it names one and no `mixer`.
fn named_in(layers: &Layers) -> Option<String> {
    let Layers::Each(kinds) = layers else { return None };
    let own = |kind: &&String| *kind != LayerForm::SHORT_CONV;
    kinds.iter().rfind(own).filter(|kind| *kind != LayerForm::MIXER).cloned()
}

impl TrainingProtocol for Recall {
    type Request = RecallRequest;

    const INFO: ProtocolInfo = super::INFO;
    const COMPARED: &'static [&'static str] = &[
        "steps", "batch", "len", "rates", "train", "test", "alphabet", "sizes", "layers", "dtype", "limit",
        "every",
    ];
    const CURVE: CurveSpec = CurveSpec { by_rate: true, ..CurveSpec::ACCURACY };

    fn defaults(&self, flags: &GridFlags) -> GridDefaults {
        let task = Some(Words(vec!["mqar".to_owned()]));
        let part = |text: &str| text.parse::<Segment>().map(|segment| Segments(vec![segment])).ok();
        let quick = Settings {
            task: task.clone(),
            segments: part("32:4"),
            test_segments: part("32:4"),
            batch: Some(Batches(vec![64])),
            steps: Some(600),
            every: Some(100),
            rates: Some(Rates(vec![3e-3, 1e-2])),
            ..VOCABULARY.settings(&64)
        };
        let whole = Settings { task, ..Settings::NONE };
        let (settings, models) = if flags.quick { (quick, "full,linear") } else { (whole, MODELS) };
        // a list of layers that names a mechanism is about that one
        let named = flags.user_settings().layers.as_ref().and_then(named_in);
        let known = named.and_then(|name| effattn_model::attention::find(&name)).map(|entry| entry.name);
        GridDefaults { settings, models: known.unwrap_or(models) }
    }

    fn check_flags(&self, flags: &GridFlags) -> Result<(), PlanError> {
        floor::check_flags(flags)
    }

    fn check_task(&self, task: &str) -> Result<(), PlanError> {
        position_labels::task(task).map(|_| ()).map_err(PlanError::new)
    }

    fn run(&self, place: &RunPlace, seed: u64) -> Result<PlannedRun<RecallRequest>, PlanError> {
        let RunPlace { entry, task, .. } = *place;
        let (settings, recipe) = (&entry.settings, recipe_of(&entry.settings, task)?);
        let (_, batch) = one_of_each(settings, "recall")?;
        let listed = match &settings.layers {
            Some(Layers::Each(kinds)) => Some(kinds.clone()),
            Some(Layers::Count(_)) | None => None,
        };
        let (train, test, alphabet) = examples(settings, &recipe, task)?;
        let rates = rates(settings, &recipe)?;
        // a list of layers is the request's own
        let mut sized = entry.clone();
        sized.settings.layers = settings.layers.clone().filter(|layers| matches!(layers, Layers::Count(_)));
        let (len, batch) = (longest(&train, &test), batch.unwrap_or(recipe.batch));
        let preset = settings.preset.clone().unwrap_or_else(|| recipe::preset(task).to_owned());
        let spec = ModelSpec { preset, ..ModelSpec::new(&sized, len, batch, Pass::Train, seed)? };
        let (_, set) = position_labels::task(task).map_err(PlanError::new)?;
        let model = resolve(entry, |choice| model(&spec, choice, (listed.as_deref(), alphabet, set)))?;
        let steps = settings.steps.unwrap_or(recipe.steps);
        let usual = RecallRequest {
            task: task.to_owned(),
            layers: None,
            alphabet: recipe.alphabet,
            train: recipe.train.clone(),
            test: recipe.test.clone(),
            steps: recipe.steps,
            every: recipe.every,
            rates: recipe.rates.clone(),
            limit: None,
            spec: ModelSpec {
                len: longest(&recipe.train, &recipe.test),
                batch: recipe.batch,
                ..spec.default_spec(&spec.preset)
            },
        };
        let every = settings.every.unwrap_or_else(|| recipe.epoch(steps));
        let limit = settings.limit;
        let request = RecallRequest {
            task: task.to_owned(),
            layers: listed,
            alphabet,
            train,
            test,
            steps,
            every,
            rates,
            limit,
            spec,
        };
        let trained = request.train.iter().map(|part| part.segment.longest as u64).max().unwrap_or(len);
        let work = 3.0 * flops(&model, trained) * (batch * steps) as f64 * request.rates.len() as f64;
        let differs = differences(&request, &usual, &recipe);
        let metric = if recipe.macro_batch.is_some() { MACRO_ACCURACY.name } else { ACCURACY.name };
        Ok(PlannedRun { metric, unit: "%", request, usual, model, differs, work })
    }

    /// Training runs, or with `--floor` the rules for the tasks.
    fn cells(&self, grid: &Grid, threads: usize) -> Result<Vec<Cell>, PlanError> {
        match grid.settings.floor {
            Some(true) => floor::cells(grid),
            _ => training::cells(self, grid, threads),
        }
    }

    /// Examples are drawn, not read: the checksum is that of what the generator draws.
    fn prepare(&self, plan: &mut Plan, _: &DataDirs) -> anyhow::Result<Prepared> {
        let trained = requests::<RecallRequest>(plan).into_iter().map(|request| request.task);
        let ruled = floor::requests(plan).into_iter().map(|request| request.task);
        let tasks: Vec<String> = trained.chain(ruled).collect();
        let wanted = tasks.iter().map(|task| (task.as_str(), LoadOptions::default(), task));
        read_once(plan, wanted, |task| {
            let (_, set) = position_labels::task(task)?;
            Ok(DataRead { hash: set.fingerprint()?, partial: None, remark: None })
        })
    }

    fn amount(&self, requests: &[RecallRequest], batch: &str, len: &str) -> String {
        let rates = requests.iter().map(|request| request.rates.len()).max().unwrap_or(0);
        format!(
            "up to {} steps at {rates} rates · batch {batch} · length {len}",
            most_steps(requests) / rates.max(1) as u64
        )
    }

    fn summary(&self, plan: &Plan) -> String {
        match floor::requests(plan).is_empty() {
            true => training::summary(self, plan),
            false => format!("{} · simple rules", listed(plan, |row| row.task.clone())),
        }
    }

    fn compute(&self, runner: &mut CellRunner, open: &[usize]) -> Result<(), RunError> {
        match floor::requests(runner.plan).is_empty() {
            true => training::compute::<RecallRequest>(runner, open, Self::CURVE),
            false => floor::compute(runner, open),
        }
    }

    fn stored_input(&self, cell: &Path, input: &InputRequest) -> anyhow::Result<StoredInput> {
        stored_input(cell, input)
    }

    fn train(&self, job: &Job<RecallRequest>) -> Result<TrainingResult, CellFailure> {
        train(job)
    }
}

fn rates(settings: &Settings, recipe: &Recipe) -> Result<Vec<f64>, PlanError> {
    let rates = settings.rates.as_ref().map_or_else(|| recipe.rates.clone(), |Rates(rates)| rates.clone());
    match rates.as_slice() {
        [] | [_] => Err(PlanError(format!(
            "--rates {} is one rate: nothing is chosen, and a mechanism that needs another one looks incapable; give at least two, or leave --rates out for {} of them",
            Rates(rates),
            recipe.rates.len()
        ))),
        _ => Ok(rates),
    }
}

fn longest(train: &[TrainPart], test: &[Segment]) -> u64 {
    let all = train.iter().map(|part| part.segment.longest).chain(test.iter().map(|segment| segment.longest));
    all.max().unwrap_or(1) as u64
}

/// What `request` does otherwise than the protocol: everything that the protocol fixes is looked at.
fn differences(request: &RecallRequest, usual: &RecallRequest, recipe: &Recipe) -> ProtocolDiff {
    let mut all = ProtocolDiff { settings: recipe.gaps.clone(), steps: (request.steps, usual.steps) };
    let segments = |request: &RecallRequest| {
        Segments(request.train.iter().map(|part| part.segment).collect()).to_string()
    };
    let tests = |request: &RecallRequest| Segments(request.test.clone()).to_string();
    all.note("trained on", segments(request), segments(usual));
    all.note("tested on", tests(request), tests(usual));
    all.note("vocabulary", request.alphabet.vocabulary, usual.alphabet.vocabulary);
    all.note("noise", request.alphabet.noise, usual.alphabet.noise);
    all.note("batch", request.spec.batch, usual.spec.batch);
    all.note("rates", Rates(request.rates.clone()).to_string(), Rates(usual.rates.clone()).to_string());
    all.model(&request.spec);
    all.settings.extend(request.layers.as_ref().map(|layers| format!("layers {}", layers.join(","))));
    all.settings.extend(request.limit.map(|limit| format!("at most {limit} examples of a segment")));
    all.note("updates between evaluations", request.every, recipe.epoch(request.steps));
    all
}
