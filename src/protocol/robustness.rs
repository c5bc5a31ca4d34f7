//! `robustness`: models trained on clean text, tested with punctuation inserted or deleted (Transformer-LS Table 2).

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::grid::{Defaults, Grid, PlanError, published_elsewhere};
use super::lra;
use super::lra::work::{Experiment, Trained};
use super::training::work::{failed, report};
use super::training::{Answer, Done, Job, Measure, Place, Shown, folder};
use super::{Task, lra::plan::Options};
use crate::config::grid::Words;
use crate::config::settings::Settings;
use crate::data::{self, select::Change};
use crate::record::Published;
use crate::run::outcome::Ending;
use crate::run::plan::Cell;
use crate::run::worker::Link;
use crate::train::checkpoint::Checkpoint;
use crate::train::session::Files;

/// The suite with the published numbers.
const SUITE: &str = "ls-table2";
/// Insertions per text in the paper.
const PAPER: u64 = 10;

/// What is done to the test texts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Perturbation {
    /// Characters inserted per document: 10 is the published number, all make the curve.
    pub insertions: Vec<u64>,
    /// The characters that are inserted, and deleted.
    pub characters: String,
    /// Seeds that insertions are repeated with.
    pub seeds: u64,
}

/// What the worker of a cell is asked.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Request {
    /// The model and how it is trained.
    pub train: lra::plan::Request,
    /// What is done to its test texts.
    pub perturbation: Perturbation,
}

/// A cell, with the folder of a finished training run where there is one.
#[derive(Clone, Debug)]
pub struct Trial {
    request: Request,
    found: Option<PathBuf>,
}

/// What `robustness` does where nothing is said.
pub fn defaults() -> Defaults {
    let settings = Settings {
        task: Some(Words(vec!["text".to_owned()])),
        preset: Some("ls-lra".to_owned()),
        ..Settings::NONE
    };
    Defaults { protocol: "robustness", settings, models: "linformer,dp:r=128,linformer-window,ls:w=1,r=1" }
}

/// Names of the tasks whose examples are texts.
pub fn tasks() -> Vec<&'static str> {
    data::tasks().iter().filter(|(_, examples)| examples.text).map(|(set, _)| set.name).collect()
}

/// The trials of `grid`. Trained models are looked for in the runs under `results`.
///
/// # Errors
/// Settings that nobody can run, a task without texts.
pub fn cells(
    grid: &Grid,
    (options, perturbation): (Options, &Perturbation),
    threads: usize,
    results: &Path,
) -> Result<Vec<(Cell, Option<Trial>)>, PlanError> {
    let tasks = grid.settings.task.clone().unwrap_or(Words(Vec::new()));
    let texts = self::tasks();
    if let Some(task) = tasks.0.iter().find(|task| !texts.contains(&task.as_str())) {
        let known = texts.join(", ");
        return Err(PlanError(format!("robustness changes texts; {task} has none (tasks: {known})")));
    }
    let trained = lra::plan::cells(grid, options, threads)?;
    let trials = trained.into_iter().map(|(mut cell, request)| {
        cell.row.protocol = "robustness".to_owned();
        let trial = request.map(|train| {
            let found = find(results, &cell.key, &train);
            Trial { request: Request { train, perturbation: perturbation.clone() }, found }
        });
        if trial.as_ref().is_some_and(|trial| trial.found.is_some()) {
            cell.seconds *= 0.05;
        }
        let request = trial.as_ref().map(|trial| &trial.request);
        cell.request = serde_json::to_value(request).map_err(PlanError::new)?;
        Ok((cell, trial))
    });
    trials.collect()
}

impl Trial {
    /// The finished training run that is used; trains where there is none.
    pub fn found(&self) -> Option<&Path> {
        self.found.as_deref()
    }
}

/// The folder of a finished training run of exactly `request`, in any run under `results`.
fn find(results: &Path, key: &str, request: &lra::plan::Request) -> Option<PathBuf> {
    let model = serde_json::to_value(request).ok()?;
    let folders = |path: &Path| -> Vec<PathBuf> {
        let entries = std::fs::read_dir(path).ok().into_iter().flatten();
        let mut all: Vec<PathBuf> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
        all.sort();
        all
    };
    let runs = folders(results).into_iter().flat_map(|command| folders(&command));
    runs.map(|run| folder(&run, key)).find(|cell| {
        let files = Files::in_folder(cell);
        let last = files.last.exists().then(|| Checkpoint::load(&files.last).ok()).flatten();
        last.is_some_and(|last| last.updates >= request.steps && last.expect_model(&model).is_ok())
    })
}

impl Job for Trial {
    fn task(&self, memory_limit: u64, place: Place) -> Task {
        Task::Robustness { memory_limit, request: self.request.clone(), place, found: self.found.clone() }
    }

    fn group(&self) -> &str {
        &self.request.train.task
    }

    fn steps(&self) -> u64 {
        self.request.train.steps
    }

    fn seed(&self) -> u64 {
        self.request.train.spec.seed
    }

    fn timeout(&self) -> Option<f64> {
        self.request.train.timeout
    }

    fn shown(&self) -> Shown {
        self.request.train.shown()
    }

    fn published(&self, task: &str) -> Option<Published> {
        let spec = &self.request.train.spec;
        Some(published_elsewhere(SUITE, &spec.model, ("accuracy", task), &spec.preset)?.published)
    }
}

/// Trains where nothing was found, then tests clean and changed texts.
///
/// # Errors
/// The parent is gone.
pub fn work(link: &Link, request: &Request, place: &Place, found: Option<&Path>) -> anyhow::Result<()> {
    report(link, trial(link, request, place, found))
}

fn trial(link: &Link, request: &Request, place: &Place, found: Option<&Path>) -> Result<Done, Ending> {
    let experiment = Experiment::open(&request.train, place)?;
    let mut trained = match found {
        Some(folder) => experiment.load(&Files::in_folder(folder))?,
        None => experiment.train(link, place)?,
    };
    let (data_share, differs) = experiment.data_share();
    let measures = measures(link, request, &experiment, &mut trained)?;
    Ok(Done { measures, data_share, differs, peak_bytes: None })
}

fn measures(
    link: &Link,
    request: &Request,
    experiment: &Experiment,
    trained: &mut Trained,
) -> Result<Vec<Measure>, Ending> {
    let Perturbation { insertions, characters, seeds } = &request.perturbation;
    let task = &request.train.task;
    let doing = |what: String| link.send(&Answer::Doing { what }).map_err(|error| failed(&error));
    let mut accuracy = |change: Option<Change>| -> Result<f64, Ending> {
        let change = change.map(|change| (change, characters.as_bytes()));
        Ok(experiment.test(trained, change)?.0.value)
    };
    doing("tests clean texts".to_owned())?;
    let named =
        |task: String, value: f64| Measure { task: Some(task), ..Measure::new("accuracy", "%", value) };
    let mut measures = vec![named(task.clone(), accuracy(None)?)];
    doing("tests texts without punctuation".to_owned())?;
    measures.push(named(format!("{task}-deletion"), accuracy(Some(Change::Deletion))?));
    for &count in insertions {
        let mut values = Vec::new();
        for seed in 0..*seeds {
            doing(format!("tests {count} insertions, seed {seed}"))?;
            let change = Change::Insertion { count: count as usize, seed };
            values.push(accuracy(Some(change))?);
        }
        let mean = values.iter().sum::<f64>() / values.len().max(1) as f64;
        let squares = values.iter().map(|value| (value - mean).powi(2)).sum::<f64>();
        let std = (squares / (values.len().max(2) - 1) as f64).sqrt();
        let task =
            if count == PAPER { format!("{task}-insertion") } else { format!("{task}-insertion-{count}") };
        measures.push(Measure { spread: Some((std, values.len() as u64)), ..named(task, mean) });
    }
    measures.push(Measure::new("selected_step", "1", trained.selected.step as f64));
    measures.push(Measure::new("steps", "1", request.train.steps as f64));
    Ok(measures)
}
