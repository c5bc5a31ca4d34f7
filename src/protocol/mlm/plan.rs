//! From flags and suites to masked language models that are trained.

use std::path::Path;

use super::recipe::Recipe;
use super::request::{MlmData, MlmRequest, data_names, load, model};
use super::stored_input::stored_input;
use super::worker::train;
use super::{Mlm, NATS};
use crate::protocol::curve::CurveSpec;
use crate::protocol::definition::{DataDirs, Prepared, ProtocolInfo};
use crate::protocol::grid::{GridDefaults, GridFlags, PlanError};
use crate::protocol::model_spec::ModelSpec;
use crate::protocol::own_data::TOKENIZER;
use crate::protocol::pretrained_start::{self, StartEncoder, StartRequest, check_fit};
use crate::protocol::stored_input::{InputRequest, StoredInput};
use crate::protocol::training::worker::Job;
use crate::protocol::training::{
    PlannedRun, ProtocolDiff, RunPlace, TrainingProtocol, TrainingResult, flops, incomplete, micro_batches,
    most_steps, one_of_each, resolve,
};
use crate::run::outcome::CellFailure;
use crate::run::plan::Plan;
use crate::train::pretrained::Pretrained;
use effattn_data::running_text;
use effattn_record::config::lists::{Batches, Layers, Lengths, Words};
use effattn_record::config::settings::Settings;
use effattn_record::{Pass, departures};

/// Preset where nothing is said.
const PRESET: &str = "roberta-small";

impl TrainingProtocol for Mlm {
    type Request = MlmRequest;

    const INFO: ProtocolInfo = super::INFO;
    const COMPARED: &'static [&'static str] =
        &["steps", "batch", "len", "rate", "sizes", "dtype", "limit", "every", "tokenizer", "start"];
    const CURVE: CurveSpec = CurveSpec {
        column: "validation_bits",
        axis: "validation loss, bit",
        unit: "bit",
        value: |score| score.loss / std::f64::consts::LN_2,
        less: true,
        by_rate: false,
    };

    fn defaults(&self, flags: &GridFlags) -> GridDefaults {
        let said = flags.user_settings().preset;
        let recipe = Recipe::find(said.as_deref().unwrap_or(PRESET)).ok();
        let task = |name: &str| Some(Words(vec![name.to_owned()]));
        let preset = Some(PRESET.to_owned());
        let whole = Settings {
            preset: preset.clone(),
            task: task(recipe.map_or("imdb", |recipe| recipe.task)),
            ..Settings::NONE
        };
        let small = Settings {
            preset,
            task: task("sample"),
            layers: Some(Layers::Count(2)),
            width: Some(64),
            heads: Some(2),
            ffn: Some(128),
            len: Some(Lengths(vec![64])),
            batch: Some(Batches(vec![8])),
            steps: Some(300),
            rate: Some(3e-3),
            ..Settings::NONE
        };
        // an encoder brings its sizes
        let small = match flags.user_settings().from {
            Some(_) => Settings { layers: None, width: None, heads: None, ffn: None, ..small },
            None => small,
        };
        let (settings, models) =
            if flags.quick { (small, "cosformer") } else { (whole, "full,cosformer,relu-linear") };
        GridDefaults { settings, models }
    }

    fn check_task(&self, task: &str) -> Result<(), PlanError> {
        running_text::known(task).map(|_| ()).map_err(PlanError::new)
    }

    fn run(&self, place: &RunPlace, seed: u64) -> Result<PlannedRun<MlmRequest>, PlanError> {
        let RunPlace { entry, task, hashes, .. } = *place;
        let start = pretrained_start::of(entry, &mut hashes.borrow_mut())?;
        let settings = &entry.settings;
        let (preset, sizes) =
            pretrained_start::sizes(entry, start.as_ref().map(|start| &start.encoder), PRESET)?;
        let recipe = Recipe::find(&preset).map_err(PlanError)?;
        let (len, batch) = one_of_each(settings, "mlm")?;
        let (len, batch) = (len.unwrap_or(recipe.len), batch.unwrap_or(recipe.batch));
        if let (Some(_), Some(tokenizer)) = (&start, TOKENIZER.of(settings)) {
            return Err(PlanError(format!(
                "--from brings the encoder's tokenizer; leave --tokenizer {tokenizer} out"
            )));
        }
        let spec = ModelSpec { preset, sizes, ..ModelSpec::new(entry, len, batch, Pass::Train, seed)? };
        let begin = start.as_ref().map(StartRequest::from);
        let model = resolve(entry, |choice| model(&spec, begin.as_ref(), choice))?;
        let request = |spec: ModelSpec, start: Option<StartRequest>, settings: &Settings| {
            let steps = settings.steps.unwrap_or(recipe.steps).max(1);
            Ok(MlmRequest {
                task: task.to_owned(),
                start,
                tokenizer: TOKENIZER.of(settings),
                steps,
                rate: settings.rate.unwrap_or(recipe.rate),
                every: settings.every.unwrap_or_else(|| recipe.every_of(steps)),
                accumulate: micro_batches(settings, spec.batch, recipe.accumulate.min(spec.batch))?,
                limit: settings.limit,
                allow_partial: settings.allow_partial.unwrap_or(false),
                spec,
            })
        };
        let usual = ModelSpec { len: recipe.len, batch: recipe.batch, ..spec.default_spec(&spec.preset) };
        let usual = request(usual, begin.as_ref().map(StartRequest::elsewhere), &Settings::NONE)?;
        let request = request(spec, begin, settings)?;
        let work = 3.0 * flops(&model, len) * (batch * request.steps) as f64;
        let mut differs = differences(&request, recipe);
        let goes_on = |start: StartEncoder| format!("goes on from {}", start.encoder.attention.label());
        differs.settings.extend(start.map(goes_on));
        Ok(PlannedRun { metric: NATS, unit: "nat", request, usual, model, differs, work })
    }

    /// Checksums of texts and tokenizers belong to the run, and those of tokenizers to its rows.
    fn prepare(&self, plan: &mut Plan, dirs: &DataDirs) -> anyhow::Result<Prepared> {
        type Wanted = (String, Option<String>, Option<String>, bool);
        let mut seen: Vec<(Wanted, String)> = Vec::new();
        let mut remarks = Vec::new();
        for cell in &mut plan.cells {
            let Ok(request) = serde_json::from_value::<MlmRequest>(cell.request.clone()) else { continue };
            if let Some(start) = &request.start {
                let encoder = Pretrained::open(Path::new(&start.folder))?;
                let target = model(&request.spec, Some(start), &request.spec.choice()?)?;
                let (how, drawn) = check_fit(&encoder, &target, &start.kept)?;
                departures::add(&mut cell.row, drawn.as_deref().unwrap_or_default());
                remarks.push(format!("{} continues from {} ({how})", request.spec.model, start.folder));
            }
            let from = request.start.as_ref().map(|start| start.folder.clone());
            let wanted = (request.task.clone(), from, request.tokenizer.clone(), request.allow_partial);
            let known = seen.iter().find(|(known, _)| *known == wanted).map(|(_, hash)| hash.clone());
            let hash = match known {
                Some(hash) => hash,
                None => {
                    let MlmData { prose, tokenizer } = load(&request, &dirs.data)?;
                    if let Some(start) = &request.start {
                        let padding = Pretrained::open(Path::new(&start.folder))?.padding(&tokenizer);
                        remarks.extend(padding.filter(|padding| !remarks.contains(padding)));
                    }
                    if let Some(partial) = &prose.partial {
                        remarks.push(incomplete(&request.task, partial));
                    }
                    let [text, words] = data_names(&request);
                    plan.data.insert(text, prose.hash);
                    plan.data.insert(words, tokenizer.hash().to_owned());
                    seen.push((wanted, tokenizer.hash().to_owned()));
                    tokenizer.hash().to_owned()
                }
            };
            cell.row.words = Some(hash.chars().take(12).collect());
        }
        Ok(Prepared { remarks, text: None })
    }

    /// `25000 updates of 8 blocks of 128`.
    fn amount(&self, requests: &[MlmRequest], batch: &str, len: &str) -> String {
        format!("{} updates of {batch} blocks of {len}", most_steps(requests))
    }

    fn stored_input(&self, cell: &Path, input: &InputRequest) -> anyhow::Result<StoredInput> {
        stored_input(cell, input)
    }

    fn train(&self, job: &Job<MlmRequest>) -> Result<TrainingResult, CellFailure> {
        train(job)
    }
}

/// What `request` does otherwise than the protocol: everything that the protocol fixes is looked at.
fn differences(request: &MlmRequest, recipe: &Recipe) -> ProtocolDiff {
    let spec = &request.spec;
    let mut all = ProtocolDiff { settings: Vec::new(), steps: (request.steps, recipe.steps) };
    if !recipe.published {
        all.settings.push("small: a protocol of this program's own, no paper's".to_owned());
    }
    all.note("text", request.task.as_str(), recipe.task);
    all.note("batch", spec.batch, recipe.batch);
    all.note("length", spec.len, recipe.len);
    all.rate(request.rate, recipe.rate);
    all.model(spec);
    all.settings.extend(request.limit.map(|limit| format!("first {limit} blocks of every part")));
    all.note("updates between evaluations", request.every, recipe.every_of(request.steps));
    if request.tokenizer.is_some() && !recipe.given_tokenizer {
        all.settings.push("a given tokenizer (one trained on the text)".to_owned());
    }
    all
}
