//! A stored classifier and a document.

use std::path::Path;

use anyhow::{Context, Result, ensure};

use super::request::{LraRequest, model};
use super::stored::{StoredCell, model_of_texts};
use super::tasks;
use crate::protocol::stored_input::{Input, InputRequest, StoredInput, check_example};
use crate::train::checkpoint::Checkpoint;
use effattn_data::own::is_own;
use effattn_data::{Split, listops};

/// See [`Protocol::stored_input`](crate::protocol::Protocol::stored_input).
pub fn stored_input(cell: &Path, asked: &InputRequest) -> Result<StoredInput> {
    let cell = StoredCell::open(cell.to_owned()).map_err(anyhow::Error::msg)?;
    let cell = cell.context("the cell has no checkpoint of effattn lra")?;
    let LraRequest { task, spec, keep, .. } = &cell.request;
    let most = asked.most.min(*keep.min(&spec.len) as usize);
    let mut ids = ids(&cell, asked)?;
    ids.truncate(most);
    let model = match is_own(task) {
        true => {
            let reading = cell.reading().map_err(anyhow::Error::msg)?;
            model_of_texts(&reading, task, &cell.request).map_err(|error| anyhow::anyhow!(error.reason))?
        }
        false => model(spec, &spec.choice()?, task)?,
    };
    let names = names(&cell, &ids);
    let weights = Checkpoint::load(&cell.file)?;
    StoredInput::of_tokens((spec, task), (model, weights), (&ids, &[]), names)
}

const PAIRS: &str = "the model reads two texts at a time, and models of one are drawn; name a run of one, as effattn lra --quick trains it";

fn ids(cell: &StoredCell, asked: &InputRequest) -> Result<Vec<u32>> {
    match asked.input {
        Input::Text(text) => {
            let reading = cell.reading().map_err(anyhow::Error::msg);
            let reading = reading.context("--text cannot be read; give --example instead")?;
            ensure!(!reading.pairs, "{PAIRS}");
            Ok(reading.document(text)?)
        }
        Input::Example(index) => {
            let LraRequest { task, reading, keep, .. } = &cell.request;
            let set = tasks::load(task, asked.data, *reading)?;
            check_example(index, set.len(Split::Test), &format!("examples in the test split of {task}"))?;
            let example = set.example(Split::Test, index, *keep as usize);
            ensure!(example.second.is_none(), "{PAIRS}");
            Ok(example.tokens)
        }
    }
}

/// What `ids` stand for; nothing where they are no text.
fn names(cell: &StoredCell, ids: &[u32]) -> Vec<String> {
    if cell.request.task == listops::SET.name {
        return ids.iter().map(|id| listops::token_text(*id)).collect();
    }
    cell.reading().map_or_else(|_| Vec::new(), |reading| reading.tokens(ids))
}
