//! From flags and suites to word language models that are trained.

use std::path::Path;

use serde::{Deserialize, Serialize};

use super::CONTEXT;
use super::recipe::{self, Recipe};
use crate::protocol::cell_runner::request;
use crate::protocol::definition::{DataDirs, Prepared};
use crate::protocol::grid::{
    Grid, GridDefaults, GridEntry, GridFlags, PlanError, listed, published_elsewhere, tasks as tasks_of,
};
use crate::protocol::model_spec::{ModelSpec, resolve_or_unsupported};
use crate::protocol::training::{
    ProtocolDiff, RATE, TrainingRequest, incomplete, micro_batches, one_of_each,
};
use crate::run::plan::{Cell, Plan};
use effattn_data as data;
use effattn_data::word_corpus::WordCorpus;
use effattn_data::{DataError, LoadOptions};
use effattn_model::attention::choose::MechanismChoice;
use effattn_model::family::{Architecture, ModelRequest, ResolveError, word_lm};
use effattn_model::word_lm::WordLmConfig;
use effattn_record::config::lists::{Seeds, Words};
use effattn_record::config::settings::Settings;
use effattn_record::{Pass, Published};

/// What the worker of a cell is asked.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct WordLmRequest {
    /// Corpus.
    pub corpus: String,
    /// The model; its length is that of a block, its batch the blocks of an update.
    pub spec: ModelSpec,
    /// Updates.
    pub steps: u64,
    /// Highest rate.
    pub rate: f64,
    /// Parts that an update is computed in.
    pub accumulate: u64,
    /// Updates between evaluations.
    pub every: u64,
    /// First words of the validation and the test text that are predicted; absent: all.
    pub limit: Option<u64>,
    /// Whether incomplete data may be used.
    pub allow_partial: bool,
}

/// The suite with the published numbers.
const SUITE: &str = "cos-table2";
/// What is added to a corpus's name for its validation text, where the paper has numbers of both.
pub const VALIDATION: &str = "-valid";

/// What `wordlm` does where nothing is said.
pub fn defaults(flags: &GridFlags) -> GridDefaults {
    let task = |name: &str| Some(Words(vec![name.to_owned()]));
    let small = Settings {
        task: task("sample-words"),
        layers: Some(2),
        width: Some(128),
        heads: Some(4),
        ffn: Some(256),
        ..Settings::NONE
    };
    let whole = Settings { task: task("wikitext103"), ..Settings::NONE };
    GridDefaults { settings: if flags.quick { small } else { whole }, models: "cosformer,full" }
}

/// The texts called `name` in `dir`.
///
/// # Errors
/// A name that no texts have; data that are missing, damaged, or incomplete without permission.
pub fn load(name: &str, dir: &Path, allow_partial: bool) -> Result<WordCorpus, DataError> {
    let (_, words) = data::words(name)?;
    (words.load)(dir, LoadOptions { allow_partial, ..LoadOptions::default() })
}

/// Names of the corpora, for help.
pub fn names() -> Vec<&'static str> {
    data::word_corpora().iter().map(|(set, _)| set.name).collect()
}

/// The model of `spec` over `vocab` words.
///
/// # Errors
/// Unknown names, impossible sizes, a mechanism that cannot do this.
pub fn model(spec: &ModelSpec, choice: &MechanismChoice, vocab: usize) -> Result<WordLmConfig, ResolveError> {
    let config = word_lm::config(&ModelRequest { vocab: Some(vocab), ..spec.model_request(choice) })?;
    Architecture::validate(&config)?;
    Ok(config)
}

/// The training runs of `grid`, by corpus, mechanism and seed.
///
/// # Errors
/// Settings that nobody can run.
pub fn cells(grid: &Grid, threads: usize) -> Result<Vec<Cell>, PlanError> {
    let mut cells = Vec::new();
    for corpus in tasks_of(grid) {
        let (set, words) = data::words(&corpus).map_err(PlanError::new)?;
        let recipe = recipe::find(set.name);
        for pick in grid.entries.iter().filter(|pick| pick.runs(&corpus)) {
            let seeds = pick.settings.seeds.clone().unwrap_or(Seeds(vec![1]));
            for seed in seeds.0 {
                cells.push(cell(grid, pick, (&recipe, words), (seed, threads))?);
            }
        }
    }
    Ok(cells)
}

fn cell(
    grid: &Grid,
    pick: &GridEntry,
    (recipe, words): (&Recipe, &data::WordTask),
    (seed, threads): (u64, usize),
) -> Result<Cell, PlanError> {
    let mut pick = pick.clone();
    pick.settings.preset.get_or_insert_with(|| recipe.preset.to_owned());
    let (pick, settings, corpus) = (&pick, &pick.settings, recipe.corpus);
    let (len, batch) = one_of_each(settings, "wordlm")?;
    let (len, batch) = (len.unwrap_or(recipe.len), batch.unwrap_or(recipe.batch));
    let spec = ModelSpec::new(pick, len, batch, Pass::Train, seed)?;
    let (config, reason) = resolve_or_unsupported(pick, |choice| model(&spec, choice, words.vocabulary))?;
    let usual = if batch % recipe.accumulate == 0 { recipe.accumulate } else { 1 };
    let accumulate = micro_batches(settings, batch, usual)?;
    let resolved = config.as_ref().map(|config| config as &dyn Architecture);
    let mut row = spec.row("wordlm", threads, resolved);
    row.task = Some(corpus.to_owned());
    row.suite = grid.suite.as_ref().map(|suite| suite.name.clone());
    (row.metric, row.unit) = (CONTEXT.name.to_owned(), CONTEXT.unit.to_owned());
    let what = (CONTEXT.name, corpus);
    let elsewhere = || published_elsewhere(SUITE, &spec.model, what, &spec.preset);
    let beside = grid.beside(pick, what, &spec.preset).or_else(elsewhere);
    row.published = beside.as_ref().map(|beside| beside.published);
    let usual = WordLmRequest {
        corpus: corpus.to_owned(),
        spec: ModelSpec { len: recipe.len, batch: recipe.batch, ..spec.default_spec(recipe.preset) },
        steps: recipe.steps,
        rate: recipe.rate,
        accumulate: recipe.accumulate,
        every: recipe.every,
        limit: None,
        allow_partial: false,
    };
    let steps = settings.steps.unwrap_or(recipe.steps);
    let request = WordLmRequest {
        steps,
        rate: settings.rate.unwrap_or(recipe.rate),
        accumulate,
        every: settings.every.unwrap_or_else(|| recipe.every_of(steps)),
        limit: settings.limit,
        allow_partial: settings.allow_partial.unwrap_or(false),
        spec,
        ..usual.clone()
    };
    if reason.is_none() {
        let differences = differences(&request, recipe);
        differences.write_to(beside, &mut row);
    }
    let words = format!("{corpus} {} {} s{seed}", request.spec.model, request.spec.preset);
    let work = row.flops.map_or(0.0, |flops| work(&request, flops));
    let cell = Cell::new(&words, row, &request, &usual);
    let timeout = settings.timeout.map(|time| time.0);
    let cell = cell.with_seconds(threads, |threads| work / (RATE * threads as f64));
    Ok(Cell { timeout, ..cell }.with_unsupported(reason))
}

/// Words of the texts that are evaluated, roughly.
const EVALUATED: f64 = 2.2e5;

/// Multiply-adds of the whole run, `flops` per block: updates of three forwards, evaluations in blocks, and at the end one
/// whose windows score little more than a fifth of their words.
fn work(request: &WordLmRequest, flops: u64) -> f64 {
    let WordLmRequest { spec, steps, every, .. } = request;
    let words = request.limit.map_or(EVALUATED, |limit| limit as f64);
    let words = if request.corpus == "sample-words" { words.min(2e3) } else { words };
    let evaluations = steps.div_ceil((*every).max(1)) as f64 + 1.0 + 512.0 / 112.0;
    flops as f64 * (3.0 * (spec.batch * steps) as f64 + evaluations * words / spec.len as f64)
}

/// Reads every corpus once: their hashes belong to the run.
///
/// # Errors
/// Data that are missing, damaged, or incomplete without permission.
pub fn prepare(plan: &mut Plan, dirs: &DataDirs) -> anyhow::Result<Prepared> {
    let mut remarks = Vec::new();
    for cell in plan.cells.iter_mut().filter(|cell| !cell.request.is_null()) {
        let request: WordLmRequest = request(cell)?;
        cell.reads = vec![request.corpus.clone()];
        if plan.data.contains_key(&request.corpus) {
            continue;
        }
        let corpus = load(&request.corpus, &dirs.data, request.allow_partial)?;
        if let Some(partial) = corpus.partial {
            remarks.push(incomplete(&request.corpus, &partial));
        }
        plan.data.insert(request.corpus, corpus.hash);
    }
    Ok(Prepared { remarks, text: None })
}

/// `wikitext103 · wikitext103 · 150000 updates · 144 blocks of 512 words`.
pub fn amount(plan: &Plan) -> String {
    let steps = plan.cells.iter().filter_map(|cell| cell.request["steps"].as_u64()).max().unwrap_or(0);
    let (task, preset) = (listed(plan, |row| row.task.clone()), listed(plan, |row| row.preset.clone()));
    let (batch, len) = (listed(plan, |row| row.batch), listed(plan, |row| row.len));
    format!("{task} · {preset} · {steps} updates · {batch} blocks of {len} words")
}

/// What `request` does otherwise than the protocol: everything that the protocol fixes is looked at.
fn differences(request: &WordLmRequest, recipe: &Recipe) -> ProtocolDiff {
    let spec = &request.spec;
    let mut all = ProtocolDiff { settings: Vec::new(), steps: (request.steps, recipe.steps) };
    if !recipe.note.is_empty() {
        all.settings.push(recipe.note.to_owned());
    }
    all.note("blocks per update", spec.batch, recipe.batch);
    all.note("length", spec.len, recipe.len);
    all.rate(request.rate, recipe.rate);
    if spec.preset != recipe.preset {
        all.settings.push(format!("sizes of {} ({})", spec.preset, recipe.preset));
    }
    all.model(spec);
    all.settings.extend(request.limit.map(|limit| format!("first {limit} words of validation and test")));
    all
}

impl TrainingRequest for WordLmRequest {
    fn steps(&self) -> u64 {
        self.steps
    }

    fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    fn published(&self, _: &str, task: &str) -> Option<Published> {
        let what = (CONTEXT.name, task);
        Some(published_elsewhere(SUITE, &self.spec.model, what, &self.spec.preset)?.published)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use effattn_model::attention::choose::choose;
    use effattn_model::family::character_lm;

    /// Models stand below data sets in the layers, so both state the sizes of published vocabularies.
    #[test]
    fn models_and_data_sets_count_the_same_symbols() {
        let choice = choose(&"cosformer".parse().unwrap()).unwrap().remove(0);
        let (sizes, len) = (Default::default(), Some(64));
        let asked = |preset, task| ModelRequest {
            preset,
            task,
            choice: &choice,
            sizes: &sizes,
            len,
            cached: None,
            vocab: None,
            examples: None,
        };
        for corpus in ["wikitext103", "wikitext103-small"] {
            let words = data::words(corpus).unwrap().1.vocabulary;
            assert_eq!(word_lm::config(&asked(corpus, None)).unwrap().adaptive.vocab, words);
        }
        for corpus in ["enwik8", "text8"] {
            let symbols = data::corpus(corpus).unwrap().1.vocabulary;
            assert_eq!(character_lm::config(&asked("charlm-small", Some(corpus))).unwrap().vocab, symbols);
        }
    }

    #[test]
    fn a_smaller_vocabulary_keeps_the_shares_of_its_bands() {
        let spec = |model: &str| ModelSpec {
            model: model.to_owned(),
            preset: "wikitext103-small".to_owned(),
            sizes: Default::default(),
            batch: 1,
            len: 16,
            pass: Pass::Train,
            seed: 1,
            device: Default::default(),
            dtype: Default::default(),
            kernel: Default::default(),
        };
        let of = |name: &str, vocab| model(&spec(name), &spec(name).choice().unwrap(), vocab);
        assert_eq!(of("full", 8125).unwrap().adaptive.cutoffs, [2000, 5000]);
        assert_eq!(of("full", 440).unwrap().adaptive.cutoffs, [108, 270]);
        assert!(matches!(of("full", 3), Err(ResolveError::Unsupported(_))), "too few words for three bands");
        assert!(matches!(of("bigbird", 8125), Err(ResolveError::Unsupported(_))), "it has no causal form");
    }
}
