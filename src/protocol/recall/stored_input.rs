//! A stored model of labelled positions, at the rate that did best, and a sequence.

use std::path::Path;

use anyhow::{Context, Result, ensure};

use super::recipe::Recipe;
use super::request::{RecallRequest, model};
use super::{HELD_OUT_SEED, selection};
use crate::protocol::stored_input::{Input, InputRequest, StoredInput, check_example, described};
use crate::train::checkpoint::Checkpoint;
use crate::train::training_loop::TrainingState;
use effattn_data::Split;
use effattn_data::position_labels::{self, PositionExample};

/// See [`Protocol::stored_input`](crate::protocol::Protocol::stored_input).
pub fn stored_input(cell: &Path, asked: &InputRequest) -> Result<StoredInput> {
    let (request, recipe, weights) = tested(cell)?;
    let (_, task) = position_labels::task(&request.task)?;
    let PositionExample { mut tokens, mut labels } = match asked.input {
        Input::Text(text) => PositionExample { tokens: ids(text, &request)?, labels: Vec::new() },
        Input::Example(index) => {
            let segment = request.test.first().context("the run has no test")?;
            let count = request.limit.map_or(recipe.counts[1], |limit| limit.min(recipe.counts[1]));
            check_example(index, count as usize, &format!("tested sequences of {} {segment}", request.task))?;
            task.example((segment, request.alphabet), (HELD_OUT_SEED, Split::Test), index as u64)
        }
    };
    tokens.truncate(asked.most.min(request.spec.len as usize));
    labels.retain(|(position, _)| *position < tokens.len());
    if labels.is_empty() && !tokens.is_empty() {
        labels.push((tokens.len() - 1, 0)); // the model says something about one position at least
    }
    let names = tokens.iter().map(u32::to_string).collect();
    let (spec, layers) = (&request.spec, request.layers.as_deref());
    let model = model(spec, &spec.choice()?, (layers, request.alphabet, task))?;
    StoredInput::of_tokens((spec, &request.task), (Box::new(model), weights), (&tokens, &labels), names)
}

/// The request of a cell, how it is trained, and the weights that it tests.
fn tested(cell: &Path) -> Result<(RecallRequest, Recipe, Checkpoint)> {
    let mut entries = std::fs::read_dir(cell)?.flatten().map(|entry| entry.path());
    let any = entries.find(|file| file.extension().is_some_and(|end| end == "safetensors"));
    let any = Checkpoint::load(&any.context("has no checkpoint")?)?;
    let request: RecallRequest = described(&any.model["request"])?;
    let recipe = Recipe::find(&request.spec.preset, &request.task).map_err(anyhow::Error::msg)?;
    let mut tried = Vec::new();
    for rate in &request.rates {
        let files = selection::files(cell, *rate);
        if !files.last.exists() {
            continue;
        }
        let last = Checkpoint::load(&files.last)?;
        let state = TrainingState::read(&last, &files.last)?;
        // training that diverged keeps what it had before
        if last.updates >= request.steps || state.reached(recipe.enough) {
            tried.extend(state.best_point().map(|point| (files, *point)));
        }
    }
    let best = selection::best(tried.into_iter());
    let (files, _) = best.context(
        "no rate was trained to its end: training diverged, or was stopped; the command that began it resumes it",
    )?;
    let weights = Checkpoint::load(&files.best)?;
    Ok((request, recipe, weights))
}

/// Token ids, divided by blanks.
fn ids(text: &str, request: &RecallRequest) -> Result<Vec<u32>> {
    let most = request.alphabet.vocabulary;
    let id = |word: &str| word.parse::<u32>().ok().filter(|id| (*id as usize) < most);
    let ids: Option<Vec<u32>> = text.split_whitespace().map(id).collect();
    let ids = ids.with_context(|| {
        format!(
            "--text {text:?}: {} has the tokens 0 to {}, divided by blanks: --text '3 17 3'",
            request.task,
            most - 1
        )
    })?;
    ensure!(!ids.is_empty(), "--text has no token; give some, divided by blanks");
    Ok(ids)
}
