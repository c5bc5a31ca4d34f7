//! A stored fine-tuned encoder and a text.

use std::path::Path;

use anyhow::{Result, ensure};

use super::recipe;
use super::request::{FinetuneRequest, model, tokenizer};
use crate::protocol::pretrained_start::unchanged;
use crate::protocol::stored_input::{Input, InputRequest, StoredInput, check_example, checkpoint, described};
use crate::protocol::training::experiment::WeightChoice;
use effattn_data as data;
use effattn_data::Split;

/// See [`Protocol::stored_input`](crate::protocol::Protocol::stored_input).
pub fn stored_input(cell: &Path, asked: &InputRequest) -> Result<StoredInput> {
    let request: FinetuneRequest = described(&checkpoint(cell, false)?.model)?;
    let recipe = recipe::find(&request.spec.preset, &request.task, Some(request.spec.len));
    let best = recipe.map_err(|error| anyhow::anyhow!(error.to_string()))?.select == WeightChoice::Best;
    let weights = checkpoint(cell, best)?;
    let (_, texts) = data::text_task(&request.task)?;
    let set = (texts.load)(asked.data, request.reading)?;
    let start = request.from.as_deref().zip(request.encoder.as_deref());
    let start =
        start.map(|(folder, hash)| unchanged(folder, hash)).transpose().map_err(anyhow::Error::msg)?;
    let tokenizer = tokenizer(&request, start.as_ref(), &set)?;
    let most = asked.most.min(request.spec.len as usize);
    let (tests, mut encoder) = (set.side(Split::Test), tokenizer.encoder());
    let ids = match asked.input {
        Input::Text(text) => {
            ensure!(
                tests.iter().all(|test| test.second.is_none()),
                "{} has pairs of texts, and --text is one; give --example",
                request.task
            );
            encoder.single(text, most)
        }
        Input::Example(index) => {
            check_example(index, tests.len(), &format!("texts in the test split of {}", request.task))?;
            match &tests[index].second {
                Some(second) => encoder.pair(&tests[index].first, second, most),
                None => encoder.single(&tests[index].first, most),
            }
        }
    };
    let names = tokenizer.tokens(&ids);
    let model = model(&request, &request.spec.choice()?)?;
    StoredInput::of_tokens((&request.spec, &request.task), (Box::new(model), weights), (&ids, &[]), names)
}
