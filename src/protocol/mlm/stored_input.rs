//! A stored masked language model and a text, or a held-out block with the words that are hidden in it.

use std::path::Path;

use anyhow::{Context, Result, ensure};

use super::recipe::Recipe;
use super::request::{MlmData, MlmRequest, load, model};
use crate::protocol::stored_input::{Input, InputRequest, StoredInput, check_example, checkpoint, described};
use effattn_data::masked::{Blocks, VALIDATION_SEED};

/// See [`Protocol::stored_input`](crate::protocol::Protocol::stored_input).
pub fn stored_input(cell: &Path, asked: &InputRequest) -> Result<StoredInput> {
    let weights = checkpoint(cell, false)?;
    let request: MlmRequest = described(&weights.model["request"])?;
    let MlmData { prose, tokenizer } = load(&request, asked.data)?;
    ensure!(
        weights.model["tokenizer"] == tokenizer.hash(),
        "{} has another tokenizer now than when the model was trained; train it again",
        request.task
    );
    let len = request.spec.len as usize;
    let most = asked.most.min(len);
    let (mut ids, mut labels) = match asked.input {
        Input::Text(text) => (tokenizer.encoder().single(text, most), Vec::new()),
        Input::Example(index) => {
            let cut = Recipe::find(&request.spec.preset).map_err(anyhow::Error::msg)?.cut;
            let held_out = prose.held_out.first();
            let held_out = held_out.with_context(|| format!("nothing of {} is held out", request.task))?;
            let texts = held_out.texts.iter().map(String::as_str);
            let blocks = Blocks::new(&tokenizer, texts, len, cut);
            check_example(
                index,
                blocks.len(),
                &format!("held-out blocks of {len} words in {}", request.task),
            )?;
            let block = blocks.hidden(index, VALIDATION_SEED, 0);
            (block.ids, block.chosen)
        }
    };
    ids.truncate(most);
    labels.retain(|(position, _)| *position < ids.len());
    if labels.is_empty() {
        labels.push((0, ids[0])); // the model says something about one position at least
    }
    let names = tokenizer.tokens(&ids);
    let model = model(&request.spec, request.start.as_ref(), &request.spec.choice()?)?;
    StoredInput::of_tokens((&request.spec, &request.task), (Box::new(model), weights), (&ids, &labels), names)
}
