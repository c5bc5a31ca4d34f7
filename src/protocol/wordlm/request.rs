//! What a worker that trains a word language model is asked, and how both sides find its texts and its model.

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::protocol::model_spec::ModelSpec;
use crate::protocol::training::{RequestInfo, TrainingRequest};
use effattn_data as data;
use effattn_data::word_corpus::WordCorpus;
use effattn_data::{DataError, LoadOptions};

/// What the worker of a cell is asked.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct WordLmRequest {
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

/// What is added to a corpus's name for its validation text, where the paper has numbers of both.
pub const VALIDATION: &str = "-valid";

/// The texts called `name` in `dir`.
pub fn load(name: &str, dir: &Path, allow_partial: bool) -> Result<WordCorpus, DataError> {
    let (_, words) = data::words(name)?;
    (words.load)(dir, LoadOptions::partial(allow_partial))
}

/// Names of the corpora, for help.
pub fn names() -> Vec<&'static str> {
    data::word_corpora().iter().map(|(set, _)| set.name).collect()
}

impl TrainingRequest for WordLmRequest {
    fn info(&self) -> RequestInfo<'_> {
        let reading = LoadOptions::partial(self.allow_partial);
        RequestInfo { task: &self.corpus, reading, steps: self.steps, spec: &self.spec }
    }
}
