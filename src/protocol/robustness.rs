//! `robustness`: models trained on clean text, tested with punctuation inserted or deleted (Transformer-LS Table 2).

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::cell_runner::request;
use super::curve::CurveSpec;
use super::definition::{DataDirs, Prepared, ProtocolInfo, Tasks};
use super::grid::{GridDefaults, GridFlags, PlanError};
use super::lra::worker::{LraExperiment, Tested};
use super::lra::{self, ACCURACY, Lra};
use super::stored_input::{InputRequest, StoredInput};
use super::training::worker::Job;
use super::training::{
    MetricValue, PlannedRun, RequestInfo, RunPlace, TrainingProtocol, TrainingRequest, TrainingResult,
    read_data,
};
use crate::run::manifest::Manifest;
use crate::run::outcome::CellFailure;
use crate::run::plan::Plan;
use crate::train::checkpoint::Checkpoint;
use crate::train::training_loop::CheckpointFiles;
use effattn_data as data;
use effattn_data::subset::{Change, PUNCTUATION};
use effattn_model::family;
use effattn_record::config::lists::{Counts, Words};
use effattn_record::config::settings::groups::{MACHINE, MODEL, TRAINING};
use effattn_record::config::settings::{Settings, within, word};
use effattn_record::own_setting;
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
pub struct RobustnessRequest {
    /// The model and how it is trained.
    pub train: lra::request::LraRequest,
    /// What is done to its test texts.
    pub perturbation: Perturbation,
}

own_setting! {
    /// Numbers of characters inserted per document; 10 is compared with the paper, all are plotted [default: 10,20,40,80]
    INSERTIONS: Counts = "insertions", "Texts", "LIST", str::parse;
}

own_setting! {
    /// The characters that are inserted and deleted [default: the 32 punctuation characters of ASCII]
    CHARACTERS: String = "characters", "Texts", "TEXT", word;
}

own_setting! {
    /// Number of random seeds for the insertions [default: 3]
    PERTURBATION_SEEDS: u64 = "perturbation_seeds", "Texts", "N", |text| within(text, 1, 1000);
}

const INFO: ProtocolInfo = ProtocolInfo {
    examples: EXAMPLES,
    own: &[&INSERTIONS.setting, &CHARACTERS.setting, &PERTURBATION_SEEDS.setting],
    settings: &[
        TRAINING,
        MODEL,
        MACHINE,
        &[
            "timeout",
            "steps",
            "rate",
            "limit",
            "insertions",
            "characters",
            "perturbation_seeds",
            "strict",
            "allow_partial",
        ],
    ],
    help: HELP,
    presets: || family::names(lra::documents),
    tasks: Some(Tasks { called: "Tasks", names: texts }),
    metrics: &[ACCURACY],
    ..ProtocolInfo::new("robustness", "Test trained models on changed texts (Transformer-LS, Table 2)")
};

pub struct Robustness;

const HELP: &[(&str, &str)] = &[
    ("len", "Number of tokens, instead of the protocol's"),
    ("batch", "Batch size: examples per step, instead of the protocol's"),
];

const EXAMPLES: &str = "\
Examples:
  # What the paper's table would take on this machine
  effattn robustness --suite ls-table2 --dry-run
  # Two mechanisms, trained for fewer steps
  effattn robustness --model linformer,dp --len 1024 --steps 800 \\
      --rate 1e-3 --data-dir ~/data

Models are trained on clean texts (lra's task text or retrieval; a finished run of effattn lra under --output-path is reused if it has the same settings, data, threads and build) and tested on clean and on changed texts, which are the same for every model.";

/// Names of the tasks whose examples are texts.
fn texts() -> Vec<&'static str> {
    data::tasks().iter().filter(|(_, examples)| examples.text).map(|(set, _)| set.name).collect()
}

/// What `grid` says to do to test texts, and what is done without any setting.
fn perturbations(settings: &Settings) -> Result<[Perturbation; 2], PlanError> {
    let characters = CHARACTERS.of(settings).unwrap_or_else(|| PUNCTUATION.to_owned());
    if characters.is_empty() || !characters.is_ascii() {
        return Err(PlanError(
            "--characters takes at least one ASCII character; without the flag, all 32 punctuation characters are used".to_owned(),
        ));
    }
    let usual =
        Perturbation { insertions: vec![10, 20, 40, 80], characters: PUNCTUATION.to_owned(), seeds: 3 };
    let insertions = INSERTIONS.of(settings).map_or_else(|| usual.insertions.clone(), |counts| counts.0);
    let seeds = PERTURBATION_SEEDS.of(settings).unwrap_or(usual.seeds);
    Ok([Perturbation { insertions, characters, seeds }, usual])
}

impl TrainingProtocol for Robustness {
    type Request = RobustnessRequest;

    const INFO: ProtocolInfo = INFO;
    const COMPARED: &'static [&'static str] = &[
        "steps",
        "batch",
        "len",
        "keep",
        "rate",
        "sizes",
        "dtype",
        "limit",
        "strict",
        "keep_close",
        "characters",
        "seeds",
    ];
    const CURVE: CurveSpec = CurveSpec::ACCURACY;
    const PUBLISHED_BY: Option<&'static str> = Lra::PUBLISHED_BY;
    const OTHERS_PUBLISHED_BY: Option<&'static str> = Some(INFO.name);

    fn defaults(&self, _: &GridFlags) -> GridDefaults {
        let settings = Settings {
            task: Some(Words(vec!["text".to_owned()])),
            preset: Some("ls-lra".to_owned()),
            ..Settings::NONE
        };
        GridDefaults { settings, models: "linformer,dp:r=128,linformer-window,ls:w=1,r=1" }
    }

    fn check_task(&self, task: &str) -> Result<(), PlanError> {
        let known = texts();
        if known.contains(&task) {
            return Ok(());
        }
        Err(PlanError(format!("robustness changes texts; {task} has none (tasks: {})", known.join(", "))))
    }

    fn seed(&self, place: &RunPlace) -> Result<u64, PlanError> {
        Lra.seed(place)
    }

    /// A training run of `lra`, and what is done to its test texts.
    fn run(&self, place: &RunPlace, seed: u64) -> Result<PlannedRun<RobustnessRequest>, PlanError> {
        let [perturbation, usual] = perturbations(&place.grid.settings)?;
        let PlannedRun { metric, unit, request, usual: by_recipe, model, mut differs, work } =
            Lra.run(place, seed)?;
        if perturbation.characters != usual.characters {
            let (here, there) = (perturbation.characters.len(), usual.characters.len());
            let words = format!("{here} characters inserted and deleted (the {there} of punctuation)");
            differs.settings.push(words);
        }
        differs.note("seeds of insertions", perturbation.seeds, usual.seeds);
        let request = RobustnessRequest { train: request, perturbation };
        let usual = RobustnessRequest { train: by_recipe, perturbation: usual };
        Ok(PlannedRun { metric, unit, request, usual, model, differs, work })
    }

    /// Reads the data, and says which models are trained already.
    fn prepare(&self, plan: &mut Plan, dirs: &DataDirs) -> anyhow::Result<Prepared> {
        let read = |request: &RobustnessRequest| {
            lra::plan::read(&request.train.task, &dirs.data, request.train.reading)
        };
        let mut prepared = read_data(plan, read)?;
        for cell in plan.cells.iter().filter(|cell| !cell.request.is_null()) {
            let name = &cell.words;
            let wanted: RobustnessRequest = request(cell)?;
            prepared.remarks.push(match find(dirs.results, &wanted.train, plan) {
                Some(folder) => format!("{name}: trained before, in {}", folder.display()),
                None => format!("{name}: will be trained first"),
            });
        }
        Ok(prepared)
    }

    /// It is one of `lra`.
    fn stored_input(&self, cell: &Path, input: &InputRequest) -> anyhow::Result<StoredInput> {
        Lra.stored_input(cell, input)
    }

    /// Trains where nothing was found, then tests clean and changed texts.
    fn train(&self, job: &Job<RobustnessRequest>) -> Result<TrainingResult, CellFailure> {
        let Job { link, ref request, context } = *job;
        let own = Job { link, request: request.train.clone(), context };
        let experiment = LraExperiment::open(&own)?;
        let mut trained = match &context.trained {
            Some(folder) => experiment.load(&CheckpointFiles::in_folder(folder))?,
            None => experiment.train()?,
        };
        let (data_share, differs) = experiment.data_share();
        let measures = measures(job, &experiment, &mut trained)?;
        Ok(TrainingResult { measures, data_share, differs, peak_bytes: None })
    }
}

/// The folder of a finished training run of exactly `request`, in any run under `results` that was made by this build with
/// the same data, device and number of threads.
fn find(results: &Path, request: &lra::request::LraRequest, plan: &Plan) -> Option<PathBuf> {
    let model = serde_json::to_value(request).ok()?;
    let folders = |path: &Path| -> Vec<PathBuf> {
        let entries = std::fs::read_dir(path).ok().into_iter().flatten();
        let mut all: Vec<PathBuf> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
        all.retain(|path| path.is_dir() && !path.is_symlink());
        all.sort();
        all
    };
    let runs = folders(results).into_iter().flat_map(|command| folders(&command));
    let now = Manifest::new(plan, "");
    let same = |run: &PathBuf| {
        let manifest = Manifest::read(run).ok().flatten();
        manifest.is_some_and(|manifest| manifest.computes_as(&now, std::slice::from_ref(&request.task)))
    };
    runs.filter(same).flat_map(|run| folders(&run.join("cells"))).find(|cell| {
        let files = CheckpointFiles::in_folder(cell);
        let last = files.last.exists().then(|| Checkpoint::load(&files.last).ok()).flatten();
        last.is_some_and(|last| last.updates >= request.steps && last.expect_model(&model).is_ok())
    })
}

impl TrainingRequest for RobustnessRequest {
    fn info(&self) -> RequestInfo<'_> {
        self.train.info()
    }

    /// Clean texts, texts without punctuation, and every insertion with every seed; training counts two tests.
    fn tests(&self) -> f64 {
        let Perturbation { insertions, seeds, .. } = &self.perturbation;
        (2.0 + (insertions.len() as u64 * seeds) as f64) / 2.0
    }

    fn trained(&self, results: &Path, plan: &Plan) -> Option<PathBuf> {
        find(results, &self.train, plan)
    }
}

fn measures(
    job: &Job<RobustnessRequest>,
    experiment: &LraExperiment,
    trained: &mut Tested,
) -> Result<Vec<MetricValue>, CellFailure> {
    let request = &job.request;
    let Perturbation { insertions, characters, seeds } = &request.perturbation;
    let task = &request.train.task;
    let mut tested = 0;
    let mut accuracy = |change: Option<Change>| -> Result<f64, CellFailure> {
        let change = change.map(|change| (change, characters.as_bytes()));
        let (score, texts) = experiment.test(trained, change)?;
        tested = texts;
        Ok(score.value)
    };
    job.tell("tests clean texts")?;
    let named = |task: String, value: f64| MetricValue {
        task: Some(task),
        ..MetricValue::new("accuracy", "%", value)
    };
    let mut measures = vec![named(task.clone(), accuracy(None)?)];
    job.tell("tests texts without punctuation")?;
    measures.push(named(format!("{task}-deletion"), accuracy(Some(Change::Deletion))?));
    for &count in insertions {
        let mut values = Vec::new();
        for seed in 0..*seeds {
            job.tell(format!("tests {count} insertions, seed {seed}"))?;
            let change = Change::Insertion { count: count as usize, seed };
            values.push(accuracy(Some(change))?);
        }
        let mean = values.iter().sum::<f64>() / values.len().max(1) as f64;
        let squares = values.iter().map(|value| (value - mean).powi(2)).sum::<f64>();
        let std = (squares / (values.len().max(2) - 1) as f64).sqrt();
        let task =
            if count == PAPER { format!("{task}-insertion") } else { format!("{task}-insertion-{count}") };
        measures.push(MetricValue { spread: Some((std, values.len() as u64)), ..named(task, mean) });
    }
    let tested = |accuracy: &MetricValue| MetricValue {
        task: accuracy.task.clone(),
        ..MetricValue::new("tested", "1", tested as f64)
    };
    measures.extend(measures.iter().map(tested).collect::<Vec<_>>());
    measures.push(MetricValue::new("selected_step", "1", trained.selected.step as f64));
    measures.push(MetricValue::new("steps", "1", request.train.steps as f64));
    Ok(measures)
}
