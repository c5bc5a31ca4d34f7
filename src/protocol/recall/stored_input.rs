//! A stored model of labelled positions, at the rate that did best, and a sequence.

use std::path::Path;

use anyhow::{Context, Result, ensure};

use super::HELD_OUT_SEED;
use super::request::{RecallRequest, model};
use crate::protocol::stored_input::{Input, InputRequest, StoredInput, described};
use crate::train::checkpoint::Checkpoint;
use crate::train::training_loop::TrainingState;
use effattn_data::Split;
use effattn_data::position_labels::{self, PositionExample};

/// See [`Protocol::stored_input`](crate::protocol::Protocol::stored_input).
pub fn stored_input(cell: &Path, asked: &InputRequest) -> Result<StoredInput> {
    let weights = best(cell)?;
    let request: RecallRequest = described(&weights.model["request"])?;
    let (_, task) = position_labels::task(&request.task)?;
    let PositionExample { mut tokens, mut labels } = match asked.input {
        Input::Text(text) => PositionExample { tokens: ids(text, &request)?, labels: Vec::new() },
        Input::Example(index) => {
            let segment = request.test.first().context("the run has no test")?;
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

/// The weights of the best evaluation at any rate, the first among equals.
fn best(cell: &Path) -> Result<Checkpoint> {
    let mut best: Option<(f64, Checkpoint)> = None;
    let entries = std::fs::read_dir(cell)?.flatten().map(|entry| entry.path());
    let mut files: Vec<_> =
        entries.filter(|file| file.to_string_lossy().ends_with("-best.safetensors")).collect();
    files.sort();
    for file in files {
        let weights = Checkpoint::load(&file)?;
        let value = TrainingState::read(&weights, &file)?.best_point().map(|point| point.score.value);
        if let Some(value) = value.filter(|value| best.as_ref().is_none_or(|(known, _)| value > known)) {
            best = Some((value, weights));
        }
    }
    Ok(best.context("no rate has weights; training diverged, or has not begun")?.1)
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
