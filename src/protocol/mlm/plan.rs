//! From flags and suites to masked language models that are trained.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::bail;
use serde::{Deserialize, Serialize};

use super::NATS;
use super::recipe::{Recipe, SEED};
use crate::protocol::definition::{DataDirs, Prepared};
use crate::protocol::grid::{Grid, GridDefaults, GridEntry, GridFlags, PlanError, listed, tasks};
use crate::protocol::model_spec::{ModelSpec, resolve_or_unsupported};
use crate::protocol::pretrained_start::{self, StartEncoder, StartRequest};
use crate::protocol::training::{
    ProtocolDiff, RATE, TrainingRequest, incomplete, micro_batches, one_of_each,
};
use crate::run::plan::{Cell, Plan, key_word};
use crate::train::pretrained::Pretrained;
use effattn_data::running_text::{self, RunningText};
use effattn_data::tokenizer::Tokenizer;
use effattn_model::attention::choose::MechanismChoice;
use effattn_model::family::{Architecture, ModelRequest, ResolveError, masked_lm};
use effattn_model::roberta::RobertaConfig;
use effattn_record::Pass;
use effattn_record::config::lists::{Batches, Lengths, Seeds, Words};
use effattn_record::config::settings::Settings;

/// What the worker of a cell is asked.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MlmRequest {
    /// The text.
    pub task: String,
    /// The model.
    pub spec: ModelSpec,
    /// The encoder that it goes on from; absent: from nothing.
    pub start: Option<StartRequest>,
    /// File or folder of a tokenizer; absent: that of the encoder, or it is trained on the text.
    pub tokenizer: Option<String>,
    /// Updates.
    pub steps: u64,
    /// Highest rate.
    pub rate: f64,
    /// Updates between evaluations.
    pub every: u64,
    /// Micro-batches per update.
    pub accumulate: u64,
    /// First blocks of every part that are used; absent: all.
    pub limit: Option<u64>,
    /// Whether an incomplete text may be used.
    pub allow_partial: bool,
}

/// Preset where nothing is said.
const PRESET: &str = "roberta-small";

/// What `mlm` does where nothing is said.
pub fn defaults(flags: &GridFlags) -> GridDefaults {
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
        layers: Some(2),
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

/// The model of `spec`, for inputs as long as those of the encoder that it goes on from, or longer.
///
/// # Errors
/// Unknown names, impossible sizes, a mechanism that cannot do this.
pub fn model(
    spec: &ModelSpec,
    start: Option<&StartRequest>,
    choice: &MechanismChoice,
) -> Result<RobertaConfig, ResolveError> {
    let config = match start {
        None => masked_lm::config(&spec.model_request(choice))?,
        Some(start) => {
            let (len, vocab) = (Some(spec.len.max(start.positions) as usize), Some(start.vocab as usize));
            let config = masked_lm::config(&ModelRequest { len, vocab, ..spec.model_request(choice) })?;
            RobertaConfig { eps: start.eps, ..config }
        }
    };
    Architecture::validate(&config)?;
    Ok(config)
}

/// The training runs of `grid`, by text, mechanism and seed.
///
/// # Errors
/// Settings that nobody can run.
pub fn cells(grid: &Grid, threads: usize) -> Result<Vec<Cell>, PlanError> {
    let (mut cells, mut hashes) = (Vec::new(), BTreeMap::new());
    for task in tasks(grid) {
        running_text::known(&task).map_err(PlanError::new)?;
        for pick in grid.entries.iter().filter(|pick| pick.runs(&task)) {
            let start = pretrained_start::of(pick, &mut hashes)?;
            let seeds = pick.settings.seeds.clone().unwrap_or(Seeds(vec![SEED]));
            for seed in seeds.0 {
                cells.push(cell(grid, pick, (&task, start.as_ref()), (seed, threads))?);
            }
        }
    }
    Ok(cells)
}

fn cell(
    grid: &Grid,
    pick: &GridEntry,
    (task, start): (&str, Option<&StartEncoder>),
    (seed, threads): (u64, usize),
) -> Result<Cell, PlanError> {
    let settings = &pick.settings;
    let (preset, sizes) = pretrained_start::sizes(pick, start.map(|start| &start.encoder), PRESET)?;
    let recipe = Recipe::find(&preset).map_err(PlanError)?;
    let (len, batch) = one_of_each(settings, "mlm")?;
    let (len, batch) = (len.unwrap_or(recipe.len), batch.unwrap_or(recipe.batch));
    let accumulate = micro_batches(settings, batch, recipe.accumulate.min(batch))?;
    if let (Some(_), Some(tokenizer)) = (start, &settings.tokenizer) {
        return Err(PlanError(format!(
            "--from brings the encoder's tokenizer; leave --tokenizer {tokenizer} out"
        )));
    }
    let spec = ModelSpec { preset, sizes, ..ModelSpec::new(pick, len, batch, Pass::Train, seed)? };
    let begin = start.map(StartRequest::from);
    let (config, reason) = resolve_or_unsupported(pick, |choice| model(&spec, begin.as_ref(), choice))?;
    let resolved = config.as_ref().map(|config| config as &dyn Architecture);
    let mut row = spec.row("mlm", threads, resolved);
    row.task = Some(task.to_owned());
    row.suite = grid.suite.as_ref().map(|suite| suite.name.clone());
    let beside = grid.beside(pick, (NATS, task), &spec.preset);
    row.published = beside.as_ref().map(|beside| beside.published);
    (row.metric, row.unit) = (NATS.to_owned(), "nat".to_owned());
    let usual = MlmRequest {
        task: task.to_owned(),
        spec: ModelSpec { len: recipe.len, batch: recipe.batch, ..spec.default_spec(&spec.preset) },
        start: begin.as_ref().map(StartRequest::elsewhere),
        tokenizer: None,
        steps: recipe.steps,
        rate: recipe.rate,
        every: recipe.every_of(recipe.steps),
        accumulate: recipe.accumulate,
        limit: None,
        allow_partial: false,
    };
    let steps = settings.steps.unwrap_or(recipe.steps).max(1);
    let flops = resolved.map_or(0, |model| model.flops(len as usize)) as f64;
    let work = 3.0 * flops * (batch * steps) as f64;
    let words = format!("{} {} {} s{seed}", key_word(task), spec.model, spec.preset);
    let request = MlmRequest {
        task: task.to_owned(),
        spec,
        start: begin,
        tokenizer: settings.tokenizer.clone(),
        steps,
        rate: settings.rate.unwrap_or(recipe.rate),
        every: settings.every.unwrap_or_else(|| recipe.every_of(steps)),
        accumulate,
        limit: settings.limit,
        allow_partial: settings.allow_partial.unwrap_or(false),
    };
    if reason.is_none() {
        let mut differences = differences(&request, recipe);
        let goes_on = |start: &StartEncoder| format!("goes on from {}", start.encoder.attention.label());
        differences.settings.extend(start.map(goes_on));
        differences.write_to(beside, &mut row);
    }
    let cell = Cell::new(&words, row, &request, &usual);
    let timeout = settings.timeout.map(|time| time.0);
    let cell = cell.with_seconds(threads, |threads| work / (RATE * threads as f64));
    Ok(Cell { timeout, ..cell }.with_unsupported(reason))
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
    all
}

/// A text and the tokenizer that belongs to it.
pub struct MlmData {
    /// The text.
    pub prose: RunningText,
    /// The tokenizer.
    pub tokenizer: Tokenizer,
}

/// Names under which the checksums of text and tokenizer stand in a plan.
pub fn data_names(request: &MlmRequest) -> [String; 2] {
    let tokenizer = match &request.start {
        Some(start) => pretrained_start::tokenizer_name(&start.encoder),
        None => format!("tokenizer of {}", request.tokenizer.as_deref().unwrap_or(&request.task)),
    };
    [request.task.clone(), tokenizer]
}

/// Reads what `request` is trained on; the tokenizer is read, or trained on the text.
///
/// # Errors
/// Data that are missing, damaged, no text, or incomplete without permission; a tokenizer that cannot be read or does not
/// fit the model.
pub fn load(request: &MlmRequest, data: &Path) -> anyhow::Result<MlmData> {
    let preset = &request.spec.preset;
    let recipe = Recipe::find(preset).map_err(anyhow::Error::msg)?;
    let given = match &request.start {
        Some(start) => Some(Pretrained::open(Path::new(&start.folder))?.tokenizer()?),
        None => request.tokenizer.as_deref().map(|path| Tokenizer::load(Path::new(path))).transpose()?,
    };
    if given.is_none() && recipe.given_tokenizer {
        bail!(
            "preset {preset} has RoBERTa's 50,265 words; give the folder of its vocab.json and merges.txt with --tokenizer"
        );
    }
    let prose = running_text::load(&request.task, data, request.allow_partial)?;
    let tokenizer = match given {
        Some(tokenizer) => tokenizer,
        None => {
            let texts = prose.train.iter().chain(&prose.besides);
            let trained = Tokenizer::train(texts.map(String::as_str), Recipe::vocabulary(&request.task));
            trained.map_err(anyhow::Error::msg)?
        }
    };
    let choice = request.spec.choice()?;
    let room = model(&request.spec, request.start.as_ref(), &choice)?.vocab;
    if tokenizer.len() > room {
        let (len, given) = (tokenizer.len(), request.tokenizer.as_deref().unwrap_or("the tokenizer"));
        bail!(
            "{given} has {len} words, preset {preset} has room for {room}; choose another --preset or --tokenizer"
        );
    }
    Ok(MlmData { prose, tokenizer })
}

/// Reads every text once: checksums of texts and tokenizers belong to the run, and those of tokenizers to its rows.
///
/// # Errors
/// As [`load`].
pub fn prepare(plan: &mut Plan, dirs: &DataDirs) -> anyhow::Result<Prepared> {
    type Wanted = (String, Option<String>, Option<String>, bool);
    let mut seen: Vec<(Wanted, String)> = Vec::new();
    let mut remarks = Vec::new();
    for cell in &mut plan.cells {
        let Ok(request) = serde_json::from_value::<MlmRequest>(cell.request.clone()) else { continue };
        if let Some(start) = &request.start {
            let encoder = Pretrained::open(Path::new(&start.folder))?;
            encoder.weights()?.fit(&model(&request.spec, Some(start), &request.spec.choice()?)?)?;
            let (model, folder, label) = (&request.spec.model, &start.folder, encoder.attention.label());
            remarks.push(format!("{model} continues from {folder} ({label})"));
        }
        let from = request.start.as_ref().map(|start| start.folder.clone());
        let wanted = (request.task.clone(), from, request.tokenizer.clone(), request.allow_partial);
        let known = seen.iter().find(|(known, _)| *known == wanted).map(|(_, hash)| hash.clone());
        let hash = match known {
            Some(hash) => hash,
            None => {
                let MlmData { prose, tokenizer } = load(&request, &dirs.data)?;
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
        cell.reads = data_names(&request).into();
    }
    Ok(Prepared { remarks, text: None })
}

/// `imdb · roberta-small · 25000 updates of 8 blocks of 128`.
pub fn amount(plan: &Plan) -> String {
    let steps = plan.cells.iter().filter_map(|cell| cell.request["steps"].as_u64()).max().unwrap_or(0);
    let (task, preset) = (listed(plan, |row| row.task.clone()), listed(plan, |row| row.preset.clone()));
    let (batch, len) = (listed(plan, |row| row.batch), listed(plan, |row| row.len));
    format!("{task} · {preset} · {steps} updates of {batch} blocks of {len}")
}

impl TrainingRequest for MlmRequest {
    fn steps(&self) -> u64 {
        self.steps
    }

    fn spec(&self) -> &ModelSpec {
        &self.spec
    }
}
