//! `lra --eval RUN --data FILE`: the weights of a finished run on texts that it was not trained on. Nothing is trained.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use anyhow::anyhow;

use super::request::{LraRequest, model_for};
use super::weights::{READING, StoredWeights};
use super::worker::{Reader, test_batches};
use super::{ACCURACY, EVAL};
use crate::protocol::definition::Prepared;
use crate::protocol::grid::{Grid, GridFlags, PlanError, tasks};
use crate::protocol::training::experiment::TrainingDevice;
use crate::protocol::training::worker::{Job, failed};
use crate::protocol::training::{MetricValue, RATE, TrainingMessage, TrainingResult};
use crate::run::journal;
use crate::run::manifest::Manifest;
use crate::run::outcome::CellFailure;
use crate::run::plan::{Cell, Plan, folder as cell_folder, key_word};
use crate::train::checkpoint::{Checkpoint, CheckpointError};
use crate::train::training_loop::CheckpointFiles;
use effattn_data as data;
use effattn_data::content_hash::file_hash;
use effattn_data::own::{OwnDocuments, OwnFiles, Reading};
use effattn_data::subset::LimitedDataset;
use effattn_data::{Dataset, LoadOptions, Split};
use effattn_model::batch::InputKind;
use effattn_model::family::{Architecture, DataShape};
use effattn_record::config::settings::Settings;
use effattn_record::{Outcome, file};

/// `--eval`: the cells, the data and the worker of a test of stored weights.
pub struct StoredRuns;

impl StoredRuns {
    /// Refuses what `--eval` does not take: the model is that of the run.
    pub fn check_flags(flags: &GridFlags) -> Result<(), PlanError> {
        let said = flags.user_settings();
        let Some(run) = EVAL.of(&said) else { return Ok(()) };
        let allowed =
            ["eval", "data", "limit", "device", "dtype", "threads", "kernel", "memory_limit", "timeout"];
        let mut other: Vec<String> = said
            .set_keys()
            .into_iter()
            .filter(|key| !allowed.contains(key))
            .map(|key| key.replace('_', "-"))
            .collect();
        other.extend(flags.model.is_some().then(|| "model".to_owned()));
        other.extend(flags.exclude.is_some().then(|| "exclude".to_owned()));
        other.extend(flags.quick.then(|| "quick".to_owned()));
        if let Some(other) = other.first() {
            return Err(PlanError(format!(
                "--eval {run} tests the weights of that run as they were trained; leave --{other} out"
            )));
        }
        Ok(())
    }

    /// A cell for every finished cell of `run`: its weights on the one file of `--data`.
    pub fn cells(grid: &Grid, run: &str, threads: usize) -> Result<Vec<Cell>, PlanError> {
        let task = tasks(grid).pop().unwrap_or_default();
        let files = OwnFiles::of(&task).map_err(PlanError::new)?;
        let Some(OwnFiles { files, .. }) = files else {
            return Err(PlanError(format!("--eval {run} needs the texts to test on: --data new.csv")));
        };
        let [file] = &files[..] else {
            return Err(PlanError(format!(
                "--eval tests every row of one file, and --data names {}; give one",
                files.len()
            )));
        };
        let folder = Path::new(run);
        let wrong = |reason: String| PlanError(format!("--eval {run}: {reason}"));
        let name = name_of(folder);
        let mut cells = Vec::new();
        for stored in finished(folder).map_err(wrong)? {
            let weights = stored.weights(&name).map_err(wrong)?;
            let documents = weights.texts.test(file).map_err(PlanError::new)?;
            cells.push(cell(&task, &grid.settings, stored.request, weights, (&documents, threads))?);
        }
        Ok(cells)
    }

    /// Notes the checksums of texts and weights.
    pub fn prepare(plan: &mut Plan) -> anyhow::Result<Prepared> {
        let mut remarks = Vec::new();
        for cell in &mut plan.cells {
            let Ok(request) = serde_json::from_value::<LraRequest>(cell.request.clone()) else { continue };
            let Some(weights) = &request.stored else { continue };
            let file = only_file(&request.task).map_err(|error| anyhow!(error.reason))?;
            let documents = weights.texts.test(&file)?;
            plan.data.insert(request.task.clone(), documents.hash().to_owned());
            plan.data.insert(weights.data_name(), weights.sha256.clone());
            let (rows, content) = (documents.len(Split::Test), &documents.hash()[..12]);
            let words = format!("own file: {rows} rows, content {content}");
            cell.row.differs = Some(match cell.row.differs.take() {
                Some(differs) => format!("{differs}; {words}"),
                None => words,
            });
            remarks.push(format!("{}: weights of run {} on {rows} rows", request.spec.model, weights.run));
        }
        Ok(Prepared { remarks, text: None })
    }

    /// Tests `stored` on every row.
    pub fn test(job: &Job<LraRequest>, stored: &StoredWeights) -> Result<TrainingResult, CellFailure> {
        let Job { request, context, .. } = job;
        if context.trial {
            return Err(CellFailure::new(Outcome::Interrupted, "there is nothing to try"));
        }
        job.link.send(&TrainingMessage::Started { step: 0, resumed: false, curve: Vec::new() })?;
        let path = Path::new(&stored.file);
        let read = file_hash(path).map_err(|error| failed(&format!("{}: {error}", path.display())))?;
        context.same(&stored.data_name(), &read)?;
        let documents = stored.texts.test(&only_file(&request.task)?)?;
        context.same(&request.task, documents.hash())?;
        let laboratory = TrainingDevice::open(&request.spec, context)?;
        let weights = Checkpoint::load(path)?;
        let mut net = model(stored, request)?.build(&weights.builder(laboratory.device(), false)?)?;
        drop(weights);
        let limited =
            LimitedDataset::new(&documents, request.limit.map_or(usize::MAX, |limit| limit as usize));
        let count = limited.len(Split::Test);
        let batches = test_batches(count, request.spec.batch as usize, true);
        let reader = Reader {
            keep: request.keep as usize,
            len: request.spec.len as usize,
            device: laboratory.device(),
        };
        job.tell("tests its weights")?;
        let (score, tested) = reader.score((net.as_mut(), &limited, Split::Test), batches)?;
        let mut classes = vec![0u64; stored.texts.classes.len()];
        (0..count).for_each(|index| classes[limited.example(Split::Test, index, 1).label as usize] += 1);
        let most = classes.into_iter().max().unwrap_or(0);
        let measures = vec![
            MetricValue::new(ACCURACY.name, "%", score.value),
            MetricValue::new("loss", "nat", score.loss),
            MetricValue::new("largest_class", "%", 100.0 * most as f64 / count.max(1) as f64),
            MetricValue::new("tested", "1", tested as f64),
        ];
        let peak_bytes = laboratory.peak();
        Ok(TrainingResult { measures, data_share: 1.0, differs: None, peak_bytes })
    }
}

/// The model of `weights` as `request` runs it.
fn model(weights: &StoredWeights, request: &LraRequest) -> Result<Box<dyn Architecture>, CellFailure> {
    model_of_texts(&weights.texts, &weights.trained_on, request)
}

/// The model that `request` trained on `task`, whose texts are read as `texts` says.
pub(super) fn model_of_texts(
    texts: &Reading,
    task: &str,
    request: &LraRequest,
) -> Result<Box<dyn Architecture>, CellFailure> {
    let shape = DataShape {
        input: if texts.pairs { InputKind::Pairs } else { InputKind::Tokens },
        vocab: texts.vocabulary()?,
        classes: texts.classes.len(),
        len: request.spec.len as usize,
    };
    Ok(model_for(&request.spec, &request.spec.choice()?, task, Some(shape))?)
}

fn cell(
    task: &str,
    settings: &Settings,
    trained: LraRequest,
    weights: StoredWeights,
    (documents, threads): (&OwnDocuments, usize),
) -> Result<Cell, PlanError> {
    let mut spec = trained.spec.clone();
    spec.device = settings.device.unwrap_or(spec.device);
    spec.dtype = settings.dtype.unwrap_or(spec.dtype);
    spec.kernel = settings.kernel.unwrap_or(spec.kernel);
    let request = LraRequest {
        task: task.to_owned(),
        spec,
        limit: settings.limit,
        reading: LoadOptions::default(),
        stored: Some(weights.clone()),
        ..trained
    };
    let model = model(&weights, &request).map_err(|error| PlanError(error.reason))?;
    let spec = &request.spec;
    let mut row = spec.row("lra", threads, Some(model.as_ref()));
    row.task = Some(task.to_owned());
    (row.metric, row.unit) = (ACCURACY.name.to_owned(), "%".to_owned());
    let content: String = weights.sha256.chars().take(12).collect();
    row.differs = Some(format!("not trained: weights of run {}, content {content}", weights.run));
    let words = format!(
        "{} {} {} s{} of {}",
        key_word(task),
        spec.model,
        spec.preset,
        spec.seed,
        key_word(&weights.run)
    );
    let nothing = StoredWeights { sha256: String::new(), ..weights };
    let usual = LraRequest { limit: None, stored: Some(nothing), ..request.clone() };
    let count = request.limit.map_or(usize::MAX, |limit| limit as usize).min(documents.len(Split::Test));
    let work = model.flops(spec.len as usize) as f64 * count as f64;
    let cell = Cell::new(&words, row, &request, &usual);
    let cell = cell.with_seconds(threads, |threads| work / (RATE * threads as f64));
    Ok(Cell { timeout: settings.timeout.map(|time| time.0), ..cell })
}

/// A finished cell of a run.
pub struct StoredCell {
    pub folder: PathBuf,
    /// How it was trained.
    pub request: LraRequest,
    /// File of the weights that it is tested with.
    pub file: PathBuf,
}

/// The finished cells of the run in `folder`.
pub fn finished(folder: &Path) -> Result<Vec<StoredCell>, String> {
    let entries = std::fs::read_dir(folder.join("cells")).map_err(|_| {
        "is no folder of a run that trained something; name one of effattn lra, or latest".to_owned()
    })?;
    let mut folders: Vec<PathBuf> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
    folders.sort();
    let mut found = Vec::new();
    for cell in folders {
        found.extend(StoredCell::open(cell)?);
    }
    if found.is_empty() {
        return Err("has no finished cell with a checkpoint; train one with effattn lra".to_owned());
    }
    Ok(found)
}

impl StoredCell {
    /// The cell in `folder`; nothing where it has no checkpoint.
    pub fn open(folder: PathBuf) -> Result<Option<Self>, String> {
        let files = CheckpointFiles::in_folder(&folder);
        if !files.last.is_file() && !files.best.is_file() {
            return Ok(None);
        }
        let lost = |reason: String| format!("{reason}; {}", train_again(&folder));
        let (known, damage) = match load(&files.last) {
            Ok(last) => (last, None),
            // the best weights say by themselves how they were trained
            Err(reason) => match load(&files.best) {
                Ok(best) => (best, Some(reason)),
                Err(_) => return Err(lost(reason)),
            },
        };
        let request: LraRequest = serde_json::from_value(known.model.clone())
            .map_err(|_| format!("{} is no checkpoint of effattn lra", folder.display()))?;
        let best = data::own::is_own(&request.task) || request.recipe()?.select;
        let all = known.updates >= request.steps;
        match damage {
            Some(reason) if !best || !(all || ended(&folder)) => return Err(lost(reason)),
            Some(reason) => {
                log::warn!("{reason}; what is tested is {}, which is whole", files.best.display())
            }
            None if !all => {
                return Err(format!(
                    "{} has made {} of {} steps; give the command of that run again to finish it",
                    folder.display(),
                    known.updates,
                    request.steps
                ));
            }
            None if best => drop(load(&files.best).map_err(lost)?),
            None => {}
        }
        Ok(Some(Self { folder, request, file: if best { files.best } else { files.last } }))
    }

    /// How its texts became ids.
    pub fn reading(&self) -> Result<Reading, String> {
        let task = &self.request.task;
        if data::own::is_own(task) {
            let path = self.folder.join(READING);
            let text = file::read_to_string(&path);
            let text = text.map_err(|error| format!("{} cannot be read ({error})", path.display()))?;
            return serde_json::from_str(&text).map_err(|error| format!("{}: {error}", path.display()));
        }
        let (set, examples) = data::task(task).map_err(|error| error.to_string())?;
        if !examples.text {
            return Err(format!(
                "was trained on {task}, whose examples are no texts; runs of lra --data, and of tasks that are texts, read others"
            ));
        }
        Ok(Reading::bytes(examples.classes, set.kind.documents() == 2))
    }

    /// Its weights, with where they come from.
    fn weights(&self, run: &str) -> Result<StoredWeights, String> {
        let sha256 = file_hash(&self.file);
        let sha256 = sha256.map_err(|error| format!("{} cannot be read ({error})", self.file.display()))?;
        let (file, texts) = (self.file.display().to_string(), self.reading()?);
        Ok(StoredWeights { file, sha256, run: run.to_owned(), trained_on: self.request.task.clone(), texts })
    }
}

/// The checkpoint at `path`, or what is wrong with it, without advice: that is another where nothing is trained.
fn load(path: &Path) -> Result<Checkpoint, String> {
    Checkpoint::load(path).map_err(|error| match error {
        CheckpointError::Damaged { path, reason } => {
            format!("{} is not a complete checkpoint: {reason}", path.display())
        }
        CheckpointError::Io { path, source } if source.kind() == ErrorKind::NotFound => {
            format!("{} is missing", path.display())
        }
        error => error.to_string(),
    })
}

/// Whether the journal of its run says that the cell in `folder` came to its end.
fn ended(folder: &Path) -> bool {
    let whole = folder.canonicalize().unwrap_or_else(|_| folder.to_owned());
    let Some(run) = whole.ancestors().nth(2) else { return false };
    let mut ended = false;
    let read = journal::entries(&run.join("journal.jsonl"), |entry| {
        if cell_folder(run, &entry.cell) == whole {
            ended = entry.outcome() == Some(Outcome::Ok); // of two lines of a cell the later counts
        }
    });
    read.is_ok() && ended
}

/// The command that trains the cell in `folder` anew.
fn train_again(folder: &Path) -> String {
    let plain = |letter: char| letter.is_ascii_alphanumeric() || "-_./,:=+@%".contains(letter);
    let quoted = |word: &String| match word.chars().all(plain) {
        true => word.clone(),
        false => format!("'{}'", word.replace('\'', "'\\''")),
    };
    match Manifest::read(&folder.join("../..")) {
        Ok(Some(manifest)) => {
            let words: Vec<String> =
                manifest.argv.iter().filter(|word| *word != "--fresh").map(quoted).collect();
            format!("train again: effattn {} --fresh", words.join(" "))
        }
        _ => "train again with effattn lra ... --fresh".to_owned(),
    }
}

/// Name of the run in `folder`.
fn name_of(folder: &Path) -> String {
    let whole = folder.canonicalize();
    let name = whole.as_deref().unwrap_or(folder).file_name();
    name.map_or_else(String::new, |name| name.to_string_lossy().into_owned())
}

fn only_file(task: &str) -> Result<PathBuf, CellFailure> {
    let files = OwnFiles::of(task)?;
    let file = files.and_then(|files| files.files.into_iter().next());
    file.ok_or_else(|| failed(&format!("{task} is no file")))
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use safetensors::{Dtype, tensor::TensorView};

    use super::super::Lra;
    use super::*;
    use crate::protocol::{Protocol, declare_settings, resolve};
    use crate::run::journal::Entry;

    /// Writes a checkpoint of `request` after so many `updates`.
    fn put(path: &Path, request: &serde_json::Value, updates: u64) {
        let (updates, model) = (updates.to_string(), request.to_string());
        let words = [
            ("format", "effattn checkpoint"),
            ("schema", "1"),
            ("version", "0"),
            ("updates", &updates),
            ("model", &model),
            ("state", "null"),
        ];
        let words: HashMap<String, String> = words.map(|(key, word)| (key.into(), word.into())).into();
        let tensor = TensorView::new(Dtype::F32, vec![1], &[0; 4]).unwrap();
        safetensors::serialize_to_file([("weight/a", tensor)], Some(words), path).unwrap();
    }

    #[test]
    fn the_best_weights_are_enough_where_they_are_what_is_tested() {
        declare_settings();
        let settings = ["task=text", "steps=4"].map(|one| Settings::set(one).unwrap());
        let settings = settings.into_iter().fold(Settings::NONE, |all, one| one.over(all));
        let flags = GridFlags { settings, model: "full".parse().ok(), ..GridFlags::default() };
        let cell = Lra.cells(&resolve(&flags, &Lra).unwrap(), 1).unwrap().remove(0);
        let run = tempfile::tempdir().unwrap();
        let folder = cell_folder(run.path(), &cell.key);
        std::fs::create_dir_all(&folder).unwrap();
        let argv = ["lra", "--model", "ls*"].map(str::to_owned).to_vec();
        let manifest = Manifest::new(&Plan { argv, ..Plan::default() }, "id");
        manifest.write(run.path()).unwrap();
        let files = CheckpointFiles::in_folder(&folder);
        let opened = || StoredCell::open(folder.clone()).map(|cell| cell.map(|cell| cell.file));
        let refused = |name: &str| {
            let error = opened().unwrap_err();
            let advice = "; train again: effattn lra --model 'ls*' --fresh";
            assert!(error.contains(name) && error.ends_with(advice), "{error}");
        };
        assert_eq!(opened(), Ok(None));
        put(&files.last, &cell.request, 4);
        put(&files.best, &cell.request, 2);
        assert_eq!(opened(), Ok(Some(files.best.clone())));
        std::fs::write(&files.last, "cut off").unwrap();
        refused("last.safetensors is not a complete checkpoint"); // nothing says that it was finished
        let rows = vec![cell.row.clone().with_outcome(Outcome::Ok, None)];
        let line = serde_json::to_string(&Entry { rows, ..Entry::new(&cell.key) }).unwrap() + "\n";
        std::fs::write(run.path().join("journal.jsonl"), line).unwrap();
        assert_eq!(opened(), Ok(Some(files.best.clone())));
        std::fs::remove_file(&files.last).unwrap();
        assert_eq!(opened(), Ok(Some(files.best.clone())));
        std::fs::write(&files.best, "cut off").unwrap();
        refused("last.safetensors is missing");
        put(&files.last, &cell.request, 4);
        refused("best.safetensors is not a complete checkpoint");
    }
}
