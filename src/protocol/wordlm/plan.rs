//! From flags and suites to word language models that are trained.

use std::path::Path;

use super::recipe::{self, Recipe};
use super::request::{WordLmRequest, load};
use super::stored_input::stored_input;
use super::worker::train;
use super::{CONTEXT, WordLm};
use crate::protocol::curve::CurveSpec;
use crate::protocol::definition::{DataDirs, Prepared, ProtocolInfo};
use crate::protocol::grid::{GridDefaults, GridFlags, PlanError};
use crate::protocol::model_spec::{ModelSpec, resolve_or_unsupported};
use crate::protocol::stored_input::{InputRequest, StoredInput};
use crate::protocol::training::worker::Job;
use crate::protocol::training::{
    DataRead, PlannedRun, ProtocolDiff, RunPlace, TrainingProtocol, TrainingResult, flops, micro_batches,
    most_steps, one_of_each, read_data,
};
use crate::run::outcome::CellFailure;
use crate::run::plan::Plan;
use effattn_data as data;
use effattn_record::Pass;
use effattn_record::config::lists::{Layers, Words};
use effattn_record::config::settings::Settings;
use effattn_record::departures::sizes_of;

impl TrainingProtocol for WordLm {
    type Request = WordLmRequest;

    const INFO: ProtocolInfo = super::INFO;
    const COMPARED: &'static [&'static str] =
        &["steps", "batch", "len", "rate", "preset", "sizes", "dtype", "limit", "every"];
    const CURVE: CurveSpec = CurveSpec {
        column: "validation_ppl_block",
        axis: "validation, perplexity in blocks",
        unit: "ppl",
        value: |score| score.loss.exp(),
        less: true,
        by_rate: false,
    };

    fn defaults(&self, flags: &GridFlags) -> GridDefaults {
        let task = |name: &str| Some(Words(vec![name.to_owned()]));
        let small = Settings {
            task: task("sample-words"),
            layers: Some(Layers::Count(2)),
            width: Some(128),
            heads: Some(4),
            ffn: Some(256),
            steps: Some(300),
            ..Settings::NONE
        };
        let whole = Settings { task: task("wikitext103"), ..Settings::NONE };
        GridDefaults { settings: if flags.quick { small } else { whole }, models: "cosformer,full" }
    }

    fn check_task(&self, task: &str) -> Result<(), PlanError> {
        data::words(task).map(|_| ()).map_err(PlanError::new)
    }

    fn run(&self, place: &RunPlace, seed: u64) -> Result<PlannedRun<WordLmRequest>, PlanError> {
        let (set, words) = data::words(place.task).map_err(PlanError::new)?;
        let recipe = &recipe::find(set.name);
        let mut entry = place.entry.clone();
        entry.settings.preset.get_or_insert_with(|| recipe.preset.to_owned());
        let settings = &entry.settings;
        let (len, batch) = one_of_each(settings, "wordlm")?;
        let (len, batch) = (len.unwrap_or(recipe.len), batch.unwrap_or(recipe.batch));
        let spec = ModelSpec::new(&entry, len, batch, Pass::Train, seed)?;
        let (model, unsupported) =
            resolve_or_unsupported(&entry, |choice| spec.resolve_causal(choice, words.vocabulary))?;
        let model = model.map(|model| model as _).ok_or_else(|| unsupported.unwrap_or_default());
        let request = |spec: ModelSpec, settings: &Settings| -> Result<WordLmRequest, PlanError> {
            let usual = if spec.batch.is_multiple_of(recipe.accumulate) { recipe.accumulate } else { 1 };
            let steps = settings.steps.unwrap_or(recipe.steps);
            Ok(WordLmRequest {
                corpus: recipe.corpus.to_owned(),
                steps,
                rate: settings.rate.unwrap_or(recipe.rate),
                accumulate: micro_batches(settings, spec.batch, usual)?,
                every: settings.every.unwrap_or_else(|| recipe.every_of(steps)),
                limit: settings.limit,
                allow_partial: settings.allow_partial.unwrap_or(false),
                spec,
            })
        };
        let usual = ModelSpec { len: recipe.len, batch: recipe.batch, ..spec.default_spec(recipe.preset) };
        let (request, usual) = (request(spec, settings)?, request(usual, &Settings::NONE)?);
        let (differs, work) = (differences(&request, recipe), work(&request, flops(&model, len)));
        Ok(PlannedRun { metric: CONTEXT.name, unit: CONTEXT.unit, request, usual, model, differs, work })
    }

    fn prepare(&self, plan: &mut Plan, dirs: &DataDirs) -> anyhow::Result<Prepared> {
        read_data(plan, |request: &WordLmRequest| {
            let corpus = load(&request.corpus, &dirs.data, request.allow_partial)?;
            let remark = data::own::order(&request.corpus);
            Ok(DataRead { hash: corpus.hash, partial: corpus.partial, remark })
        })
    }

    /// `150000 updates · 144 blocks of 512 words`.
    fn amount(&self, requests: &[WordLmRequest], batch: &str, len: &str) -> String {
        format!("{} updates · {batch} blocks of {len} words", most_steps(requests))
    }

    fn stored_input(&self, cell: &Path, input: &InputRequest) -> anyhow::Result<StoredInput> {
        stored_input(cell, input)
    }

    fn train(&self, job: &Job<WordLmRequest>) -> Result<TrainingResult, CellFailure> {
        train(job)
    }
}

/// Words of the texts that are evaluated, roughly.
const EVALUATED: f64 = 2.2e5;

/// Multiply-adds of the whole run, `flops` per block: updates of three forwards, evaluations in blocks, and at the end one
/// whose windows score little more than a fifth of their words.
fn work(request: &WordLmRequest, flops: f64) -> f64 {
    let WordLmRequest { spec, steps, every, .. } = request;
    let words = request.limit.map_or(EVALUATED, |limit| limit as f64);
    let words = if request.corpus == "sample-words" { words.min(2e3) } else { words };
    let evaluations = steps.div_ceil((*every).max(1)) as f64 + 1.0 + 512.0 / 112.0;
    flops * (3.0 * (spec.batch * steps) as f64 + evaluations * words / spec.len as f64)
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
        all.settings.push(sizes_of(&spec.preset, recipe.preset));
    }
    all.model(spec);
    all.settings.extend(request.limit.map(|limit| format!("first {limit} words of validation and test")));
    all.note("updates between evaluations", request.every, recipe.every_of(request.steps));
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use effattn_model::attention::choose::choose;
    use effattn_model::family::{ModelRequest, ResolveError, character_lm, word_lm};

    /// Models stand below data sets in the layers, so both state the sizes of published vocabularies.
    #[test]
    fn models_and_data_sets_count_the_same_symbols() {
        let choice = choose(&"cosformer".parse().unwrap()).unwrap().remove(0);
        let (sizes, len) = (Default::default(), Some(64));
        let asked = |preset, task| ModelRequest { task, len, ..ModelRequest::new(preset, &choice, &sizes) };
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
        let of = |name: &str, vocab| {
            let (spec, choice) = (spec(name), spec(name).choice().unwrap());
            spec.resolve_causal(&choice, vocab)?;
            word_lm::config(&ModelRequest { vocab: Some(vocab), ..spec.model_request(&choice) })
        };
        assert_eq!(of("full", 8125).unwrap().adaptive.cutoffs, [2000, 5000]);
        assert_eq!(of("full", 440).unwrap().adaptive.cutoffs, [108, 270]);
        assert_eq!(of("full", 3).unwrap().adaptive.cutoffs, [1, 2], "two words and the end of a line");
        assert!(matches!(of("full", 2), Err(ResolveError::Unsupported(_))), "too few words for three bands");
        assert!(matches!(of("bigbird", 8125), Err(ResolveError::Unsupported(_))), "it has no causal form");
    }
}
