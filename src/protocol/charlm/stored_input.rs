//! A stored character model and a segment without a cache before it.

use std::path::Path;

use anyhow::Result;

use super::generate::{Description, checkpoint};
use super::request::load;
use crate::protocol::stored_input::{Input, InputRequest, StoredInput, check_example};
use crate::train::checkpoint::Checkpoint;
use effattn_data::byte_name;

/// See [`Protocol::stored_input`](crate::protocol::Protocol::stored_input).
pub fn stored_input(cell: &Path, asked: &InputRequest) -> Result<StoredInput> {
    let file = checkpoint(cell)?;
    let weights = Checkpoint::load(&file)?;
    let description = Description::read(&weights, &file)?;
    let (request, len) = (&description.request, description.phase()?.len as usize);
    let mut ids = match asked.input {
        Input::Text(text) => description.ids("--text", text)?,
        Input::Example(index) => {
            let corpus = load(&request.corpus, asked.data, request.allow_partial)?;
            description.check_corpus(&corpus)?;
            let text = &corpus.symbols[corpus.parts[2].clone()];
            let what = format!("segments of {len} symbols in the test part of {}", request.corpus);
            check_example(index, text.len().div_ceil(len), &what)?;
            text.iter().skip(index * len).take(len).map(|&symbol| u32::from(symbol)).collect()
        }
    };
    ids.truncate(asked.most.min(len));
    let name = |id: &u32| {
        let byte = description.alphabet.get(*id as usize);
        byte.map_or_else(|| "unknown byte".to_owned(), |byte| byte_name(*byte))
    };
    let names = ids.iter().map(name).collect();
    let model = description.model()?.resized(len, 0);
    StoredInput::of_tokens((&request.spec, &request.corpus), (model, weights), (&ids, &[]), names)
}
