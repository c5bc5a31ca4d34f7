//! From flags and suites to fine-tuning runs.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use super::Finetune;
use super::recipe::{self, Recipe};
use super::request::{FinetuneRequest, model, tokenizer, words_name};
use super::stored_input::stored_input;
use super::worker::FinetuneExperiment;
use crate::protocol::curve::CurveSpec;
use crate::protocol::definition::{DataDirs, Prepared, ProtocolInfo};
use crate::protocol::grid::{GridDefaults, GridFlags, PlanError};
use crate::protocol::model_spec::ModelSpec;
use crate::protocol::pretrained_start::{self, check_fit, other_encoder};
use crate::protocol::stored_input::{InputRequest, StoredInput};
use crate::protocol::training::worker::Job;
use crate::protocol::training::{
    PlannedRun, ProtocolDiff, RunPlace, TrainingProtocol, TrainingResult, flops, incomplete, micro_batches,
    one_of_each, requests, resolve,
};
use crate::run::outcome::CellFailure;
use crate::run::plan::Plan;
use crate::train::pretrained::Pretrained;
use effattn_data as data;
use effattn_data::LoadOptions;
use effattn_model::attention::choose::MechanismChoice;
use effattn_model::family::masked_lm;
use effattn_record::config::lists::{Layers, Lengths, Words};
use effattn_record::config::settings::Settings;
use effattn_record::{Pass, departures};

/// Preset where nothing is said and nothing is started from.
const PRESET: &str = "roberta-base";

/// Ids of the longest of 32 texts, to which they are padded; other texts are about as long as is allowed. Guesses where the data
/// are not there are made of them.
const PADDED: &[(&str, u64)] = &[("sst-2", 40), ("qqp", 75), ("mnli", 113)];

impl TrainingProtocol for Finetune {
    type Request = FinetuneRequest;

    const INFO: ProtocolInfo = super::INFO;
    const COMPARED: &'static [&'static str] =
        &["steps", "batch", "len", "rate", "sizes", "dtype", "limit", "every", "strict"];
    const CURVE: CurveSpec = CurveSpec::ACCURACY;

    fn defaults(&self, flags: &GridFlags) -> GridDefaults {
        let task = |name: &str| Some(Words(vec![name.to_owned()]));
        let whole = Settings { task: task("sst-2"), ..Settings::NONE };
        let quick = Settings {
            task: task("sentences"),
            preset: Some("roberta-small".to_owned()),
            layers: Some(Layers::Count(2)),
            width: Some(64),
            heads: Some(2),
            ffn: Some(128),
            len: Some(Lengths(vec![32])),
            steps: Some(300),
            rate: Some(1e-3),
            ..Settings::NONE
        };
        // an encoder brings its sizes
        let sized = flags.quick && flags.user_settings().from.is_none();
        let quick = if sized {
            quick
        } else {
            Settings { preset: None, layers: None, width: None, heads: None, ffn: None, ..quick }
        };
        GridDefaults { settings: if flags.quick { quick } else { whole }, models: "full" }
    }

    fn check_task(&self, task: &str) -> Result<(), PlanError> {
        data::text_task(task).map(|_| ()).map_err(PlanError::new)
    }

    fn run(&self, place: &RunPlace, seed: u64) -> Result<PlannedRun<FinetuneRequest>, PlanError> {
        let RunPlace { entry, task, hashes, .. } = *place;
        let start = pretrained_start::of(entry, &mut hashes.borrow_mut())?;
        let encoder = start.as_ref().map(|start| start.hash.clone());
        let kept = start.as_ref().map_or_else(String::new, |start| start.kept.clone());
        let start = start.as_ref().map(|start| &start.encoder);
        let settings = &entry.settings;
        let (len, batch) = one_of_each(settings, "finetune")?;
        let (preset, sizes) = pretrained_start::sizes(entry, start, PRESET)?;
        let recipe = recipe::find(&preset, task, len).map_err(PlanError::new)?;
        let (len, batch) = (len.unwrap_or(recipe.len), batch.unwrap_or(recipe.batch));
        let (vocab, positions) = match (start, masked_lm::preset(&preset)) {
            (Some(start), _) => (start.vocab, start.positions),
            (None, Some((_, vocab, positions))) => (vocab, positions),
            (None, None) => (0, 0), // the model says that there is no such preset
        };
        let spec = ModelSpec { preset, sizes, ..ModelSpec::new(entry, len, batch, Pass::Train, seed)? };
        let request = |spec: ModelSpec, encoder: Option<String>, settings: &Settings| {
            Ok(FinetuneRequest {
                task: task.to_owned(),
                from: start.map(|start| start.folder.display().to_string()),
                encoder,
                kept: kept.clone(),
                vocab: vocab as u64,
                positions: len.max(positions as u64),
                eps: start.map_or(1e-5, |start| start.eps),
                steps: settings.steps.unwrap_or(recipe.steps),
                rate: settings.rate.unwrap_or(recipe.rate),
                accumulate: micro_batches(settings, spec.batch, 1)?,
                every: settings.every,
                limit: settings.limit,
                reading: LoadOptions {
                    strict: settings.strict.unwrap_or(false),
                    ..LoadOptions::partial(settings.allow_partial.unwrap_or(false))
                },
                spec,
            })
        };
        let usual = ModelSpec { len: recipe.len, batch: recipe.batch, ..spec.default_spec(&spec.preset) };
        let usual = request(usual, None, &Settings::NONE)?; // where the encoder lies does not matter
        let request = request(spec, encoder, settings)?;
        let model = resolve(entry, |choice| model(&request, choice))?;
        let padded = PADDED.iter().find(|(padded, _)| *padded == task).map_or(len, |(_, len)| *len);
        let work = 3.0 * flops(&model, padded.min(len)) * (batch * request.steps) as f64;
        let differs = differences(&request, &recipe, start.zip(entry.choice.as_ref().ok()));
        Ok(PlannedRun { metric: "accuracy", unit: "%", request, usual, model, differs, work })
    }

    /// Hashes of the tasks' data belong to the run; every encoder must fit its models.
    fn prepare(&self, plan: &mut Plan, dirs: &DataDirs) -> anyhow::Result<Prepared> {
        let requests = requests::<FinetuneRequest>(plan);
        let mut remarks = Vec::new();
        let mut sets: Vec<(&str, LoadOptions)> = Vec::new();
        let mut drawn_anew: BTreeMap<(&str, &str, u64), Option<String>> = BTreeMap::new();
        for request in &requests {
            let start =
                request.from.as_deref().map(|folder| Pretrained::open(Path::new(folder))).transpose()?;
            let (name, reading) = (request.task.as_str(), request.reading);
            if !sets.contains(&(name, reading)) || !plan.data.contains_key(&words_name(request)) {
                let set = (data::text_task(name)?.1.load)(&dirs.data, reading)?;
                let words = tokenizer(request, start.as_ref(), &set)?;
                let padding = start.as_ref().and_then(|start| start.padding(&words));
                remarks.extend(padding.filter(|padding| !remarks.contains(padding)));
                plan.data.insert(words_name(request), words.hash().to_owned());
                if !sets.contains(&(name, reading)) {
                    remarks.extend(set.partial().map(|partial| incomplete(name, partial)));
                    remarks.extend(set.remarks().iter().cloned());
                }
                plan.data.insert(name.to_owned(), set.hash().to_owned());
                sets.push((name, reading));
            }
            let Some((start, folder)) = start.zip(request.from.as_deref()) else { continue };
            let key = (folder, request.spec.model.as_str(), request.positions);
            if let Entry::Vacant(place) = drawn_anew.entry(key) {
                let (how, drawn) =
                    check_fit(&start, &model(request, &request.spec.choice()?)?, &request.kept)?;
                remarks.push(format!("{} starts from {folder} ({how})", request.spec.model));
                place.insert(drawn);
            }
        }
        for (cell, request) in plan.cells.iter_mut().filter(|cell| !cell.request.is_null()).zip(&requests) {
            let words = plan.data.get(&words_name(request));
            cell.row.words = words.map(|hash| hash.chars().take(12).collect());
            let key =
                (request.from.as_deref().unwrap_or_default(), request.spec.model.as_str(), request.positions);
            let drawn = drawn_anew.get(&key).and_then(Option::as_deref);
            departures::add(&mut cell.row, drawn.unwrap_or_default());
        }
        Ok(Prepared { remarks, text: None })
    }

    /// `20935 updates · batch 32 · length 512`.
    fn amount(&self, requests: &[FinetuneRequest], batch: &str, len: &str) -> String {
        let steps: BTreeSet<u64> = requests.iter().map(|request| request.steps).collect();
        let steps = steps.iter().map(u64::to_string).collect::<Vec<_>>().join(",");
        format!("{steps} updates · batch {batch} · length {len}")
    }

    fn stored_input(&self, cell: &Path, input: &InputRequest) -> anyhow::Result<StoredInput> {
        stored_input(cell, input)
    }

    fn train(&self, job: &Job<FinetuneRequest>) -> Result<TrainingResult, CellFailure> {
        FinetuneExperiment::open(job)?.train()
    }
}

/// What `request` does otherwise than the protocol: everything that the protocol fixes is looked at.
fn differences(
    request: &FinetuneRequest,
    recipe: &Recipe,
    start: Option<(&Pretrained, &MechanismChoice)>,
) -> ProtocolDiff {
    let spec = &request.spec;
    let mut all = ProtocolDiff { settings: Vec::new(), steps: (request.steps, recipe.steps) };
    if !recipe.published {
        let small = spec.preset == recipe::SMALL_PRESET;
        let why =
            if small { "small: a stand-in of this program" } else { "a task that no source fine-tunes on" };
        all.settings.push(format!("{why}, no protocol of a paper"));
    }
    match start {
        None => all.settings.push("not pretrained".to_owned()),
        Some((start, choice)) if start.attention.entry.name != choice.entry.name => {
            all.settings
                .push(format!("converted from {} without further masked updates", start.attention.label()));
        }
        Some((start, choice)) => all.settings.extend(other_encoder(start, choice)),
    }
    all.note("batch", spec.batch, recipe.batch);
    all.note("length", spec.len, recipe.len);
    all.rate(request.rate, recipe.rate);
    all.model(spec);
    all.settings.extend(request.limit.map(|limit| format!("{limit} examples of each split")));
    if request.reading.strict {
        all.settings.push("selected on held-out training examples".to_owned());
    }
    all.settings.extend(request.every.map(|every| format!("updates between evaluations {every} (an epoch)")));
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::cell_runner::request;
    use crate::run::plan::Cell;
    use effattn_model::roberta::Top;

    fn planned(models: &str, said: Settings) -> Result<Vec<Cell>, String> {
        let flags =
            GridFlags { settings: said, model: Some(models.parse().unwrap()), ..GridFlags::default() };
        let grid = crate::protocol::resolve(&flags, &Finetune).map_err(|error| error.to_string())?;
        Finetune.cells(&grid, 1).map_err(|error| error.to_string())
    }

    #[test]
    fn an_encoder_brings_its_sizes_and_serves_what_it_can() {
        let [folder, elsewhere] = [(); 2].map(|()| tempfile::tempdir().unwrap());
        let at = |folder: &tempfile::TempDir| {
            crate::train::pretrained::tests::small(folder.path());
            Some(Words(vec![folder.path().display().to_string()]))
        };
        let from = || at(&folder);
        let cells = planned("full,ls:w=4,r=2", Settings { from: from(), ..Settings::NONE }).unwrap();
        let asked: Vec<FinetuneRequest> = cells.iter().map(|cell| request(cell).unwrap()).collect();
        for request in &asked {
            assert_eq!((request.positions, request.vocab, request.spec.sizes.layers), (512, 270, Some(2)));
            assert_eq!(request.encoder.as_ref().map(String::len), Some(64));
        }
        let moved = Settings { from: at(&elsewhere), ..Settings::NONE };
        let moved = planned("full,ls:w=4,r=2", moved).unwrap();
        let keys = |cells: &[Cell]| cells.iter().map(|cell| cell.key.clone()).collect::<Vec<_>>();
        assert_eq!(keys(&moved), keys(&cells), "where an encoder lies is not what is trained");
        let converted = |cell: &Cell| cell.row.differs.as_ref().unwrap().contains("converted from full");
        assert_eq!([converted(&cells[0]), converted(&cells[1])], [false, true]);
        let error = planned("cosformer", Settings { from: from(), ..Settings::NONE }).err().unwrap();
        assert!(error.contains("needs weights trained with it"), "{error}");
        let sized = Settings { from: from(), layers: Some(Layers::Count(3)), ..Settings::NONE };
        let error = planned("full", sized).err().unwrap();
        assert_eq!(error, "--from brings the encoder's sizes; leave layers 3 out");
    }

    #[test]
    fn a_longer_model_keeps_the_buckets_of_its_weights() {
        let folder = tempfile::tempdir().unwrap();
        let (model, _) = crate::train::pretrained::tests::small(folder.path());
        crate::train::pretrained::tests::reformer(folder.path(), &model);
        let from = Some(Words(vec![folder.path().display().to_string()]));
        let said = Settings { from, len: Some(Lengths(vec![80])), ..Settings::NONE };
        let buckets = |models: &str| {
            let asked: FinetuneRequest = request(&planned(models, said.clone()).unwrap().remove(0)).unwrap();
            let model = super::model(&asked, &asked.spec.choice().unwrap()).unwrap();
            assert_eq!((asked.spec.model.as_str(), model.positions), (models, 80));
            (asked.kept, format!("{:?}", model.knobs.to_json()["num_buckets"]))
        };
        let eight = "Number(8)".to_owned();
        assert_eq!(buckets("reformer:chunk=4"), ("num_buckets=8".to_owned(), eight.clone()));
        assert_eq!(buckets("reformer:chunk=4,num_buckets=8"), (String::new(), eight));
        let differs = |models: &str| planned(models, said.clone()).unwrap().remove(0).row.differs.unwrap();
        for same in ["reformer:chunk=4", "reformer:chunk=4,num_buckets=8"] {
            assert!(!differs(same).contains("encoder of"), "{}", differs(same));
        }
        let auto = "reformer:chunk=4,num_buckets=auto";
        assert!(differs(auto).contains("encoder of reformer:chunk=4"), "{}", differs(auto));
        assert!(differs("reformer").contains("encoder of reformer:chunk=4"), "{}", differs("reformer"));
        let asked: FinetuneRequest = request(&planned("reformer", said.clone()).unwrap().remove(0)).unwrap();
        assert_eq!(asked.kept, "num_buckets=8", "a name without settings");
        let asked: FinetuneRequest =
            request(&planned("reformer:num_buckets=auto", said.clone()).unwrap().remove(0)).unwrap();
        assert_eq!(asked.kept, "", "named");
        let set = "reformer:chunk=4,num_buckets=16";
        crate::train::pretrained::tests::encoder(folder.path(), &model, set);
        let differs = |models: &str| planned(models, said.clone()).unwrap().remove(0).row.differs.unwrap();
        let other = format!("encoder of {set}");
        assert!(differs("reformer:chunk=4").contains(&other), "{}", differs("reformer:chunk=4"));
        assert!(!differs(set).contains("encoder of"), "{}", differs(set));
    }

    #[test]
    fn rows_say_what_a_longer_model_draws_anew() {
        let folder = tempfile::tempdir().unwrap();
        let (model, _) = crate::train::pretrained::tests::small(folder.path());
        crate::train::pretrained::tests::encoder(folder.path(), &model, "bigbird:block=2");
        let from = Some(Words(vec![folder.path().display().to_string()]));
        let task = Some(Words(vec!["sentences".to_owned()]));
        let said = Settings { from, task, len: Some(Lengths(vec![40])), ..Settings::NONE };
        let cells = planned("bigbird:block=2", said).unwrap();
        let mut plan = Plan { cells, ..Plan::default() };
        let dirs = DataDirs { data: folder.path().to_owned(), results: folder.path() };
        Finetune.prepare(&mut plan, &dirs).unwrap();
        let differs = plan.cells[0].row.differs.clone().unwrap();
        assert!(differs.ends_with("; rand_blocks drawn anew"), "{differs}");
    }

    #[test]
    fn from_nothing_the_preset_says_what_is_trained() {
        let small = Settings { preset: Some("roberta-small".to_owned()), ..Settings::NONE };
        let cell = planned("cosformer", small).unwrap().remove(0);
        let asked: FinetuneRequest = request(&cell).unwrap();
        assert_eq!((asked.positions, asked.vocab, asked.steps, asked.from), (128, 8192, 4208, None));
        let config =
            model(&FinetuneRequest { from: None, ..request(&cell).unwrap() }, &asked.spec.choice().unwrap())
                .unwrap();
        assert_eq!((format!("{:?}", config.knobs).contains("Int(128)"), config.top), (true, Top::Classes(2)));
        assert!(cell.row.differs.unwrap().starts_with("small: a stand-in"), "no share of a paper's protocol");
        assert_eq!(cell.row.fraction, None);
    }
}
