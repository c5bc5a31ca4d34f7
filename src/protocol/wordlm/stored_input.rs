//! A stored word model and a block of words.

use std::path::Path;

use anyhow::{Result, ensure};

use super::recipe;
use super::request::{WordLmRequest, load};
use super::worker::Blocks;
use crate::protocol::stored_input::{Input, InputRequest, StoredInput, check_example, checkpoint, described};
use crate::protocol::training::experiment::WeightChoice;
use effattn_data as data;
use effattn_data::word_corpus::{END, UNKNOWN};
use effattn_kernel::embedding::PADDING;

/// See [`Protocol::stored_input`](crate::protocol::Protocol::stored_input).
pub fn stored_input(cell: &Path, asked: &InputRequest) -> Result<StoredInput> {
    let request: WordLmRequest = described(&checkpoint(cell, false)?.model["request"])?;
    let (set, _) = data::words(&request.corpus)?;
    let weights = checkpoint(cell, recipe::find(set.name).select == WeightChoice::Best)?;
    let corpus = load(&request.corpus, asked.data, request.allow_partial)?;
    let vocabulary = &corpus.vocabulary;
    // another text with as many words is not noticed
    ensure!(
        weights.model["vocabulary"].as_u64() == Some(vocabulary.len() as u64),
        "the vocabulary of {} has {} words now, and had {} when the model was trained; train it again",
        request.corpus,
        vocabulary.len(),
        weights.model["vocabulary"]
    );
    let (spec, len) = (&request.spec, request.spec.len as usize);
    let mut ids = match asked.input {
        Input::Text(text) => {
            let words = text.split_whitespace().map(|word| vocabulary.id(word));
            [END].into_iter().chain(words).collect()
        }
        Input::Example(index) => {
            let blocks = Blocks { stream: corpus.tested(), len };
            let what = format!("blocks of {len} words in the tested text of {}", request.corpus);
            check_example(index, blocks.count(), &what)?;
            let ([ids, _], _) = blocks.at(&[index]);
            ids
        }
    };
    ids.retain(|id| *id != PADDING);
    ids.truncate(asked.most.min(len));
    let name = |id: &u32| match *id {
        END => "end of line".to_owned(),
        UNKNOWN => "unknown word".to_owned(),
        id => vocabulary.word(id).unwrap_or_default().to_owned(),
    };
    let names = ids.iter().map(name).collect();
    let model = spec.resolve_causal(&spec.choice()?, vocabulary.len())?.resized(len, 0);
    StoredInput::of_tokens((spec, &request.corpus), (model, weights), (&ids, &[]), names)
}
