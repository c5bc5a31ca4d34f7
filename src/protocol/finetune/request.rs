//! What a worker that fine-tunes is asked, and how both sides find its model and its tokenizer.

use serde::{Deserialize, Serialize};

use crate::protocol::model_spec::ModelSpec;
use crate::protocol::pretrained_start;
use crate::protocol::training::{RequestInfo, TrainingRequest};
use crate::train::pretrained::Pretrained;
use effattn_data as data;
use effattn_data::tokenizer::Tokenizer;
use effattn_data::{LabelledTexts, LoadOptions, Split};
use effattn_model::attention::choose::MechanismChoice;
use effattn_model::family::{ModelRequest, ResolveError, masked_lm};
use effattn_model::roberta::{RobertaConfig, Top};

/// What the worker of a cell is asked.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FinetuneRequest {
    pub task: String,
    /// The model; its length is the most ids of an input.
    pub spec: ModelSpec,
    /// Folder of the pretrained encoder; absent: from nothing.
    pub from: Option<String>,
    /// SHA-256 of its files.
    pub encoder: Option<String>,
    /// The setting that the encoder's weights keep.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub kept: String,
    /// Number of ids.
    pub vocab: u64,
    /// Positions of the model.
    pub positions: u64,
    /// Epsilon of LayerNorm.
    pub eps: f64,
    /// Updates.
    pub steps: u64,
    /// Highest rate.
    pub rate: f64,
    /// Parts of an update that are computed one after another.
    pub accumulate: u64,
    /// Updates between evaluations; absent: an epoch.
    pub every: Option<u64>,
    /// So many examples of each split; absent: all.
    pub limit: Option<u64>,
    /// How data are read.
    pub reading: LoadOptions,
}

/// The model of `request`.
pub fn model(request: &FinetuneRequest, choice: &MechanismChoice) -> Result<RobertaConfig, ResolveError> {
    let classes = data::text_task(&request.task).map_err(ResolveError::wrong)?.1.classes.len();
    let choice = pretrained_start::keeping(choice, &request.kept)?;
    let asked = ModelRequest {
        len: Some(request.positions as usize),
        vocab: Some(request.vocab as usize),
        ..request.spec.model_request(&choice)
    };
    let config = masked_lm::config(&asked)?;
    let config = RobertaConfig { eps: request.eps, top: Top::Classes(classes), ..config };
    config.validate()?;
    Ok(config)
}

/// The tokenizer of `request`: that of its encoder, or one of the training texts.
pub fn tokenizer(
    request: &FinetuneRequest,
    start: Option<&Pretrained>,
    set: &LabelledTexts,
) -> anyhow::Result<Tokenizer> {
    if let Some(start) = start {
        return Ok(start.tokenizer()?);
    }
    let texts = set.side(Split::Train).iter();
    let texts = texts.flat_map(|text| [Some(text.first.as_str()), text.second.as_deref()]).flatten();
    Tokenizer::train(texts, request.vocab as usize).map_err(anyhow::Error::msg)
}

/// Name under which the checksum of the tokenizer stands in a plan.
pub fn words_name(request: &FinetuneRequest) -> String {
    match &request.encoder {
        Some(hash) => pretrained_start::tokenizer_name(hash),
        None => format!("tokenizer of {}, {} words", request.task, request.vocab),
    }
}

impl TrainingRequest for FinetuneRequest {
    fn reads(&self) -> Vec<String> {
        vec![self.task.clone(), words_name(self)]
    }

    fn info(&self) -> RequestInfo<'_> {
        RequestInfo { task: &self.task, reading: self.reading, steps: self.steps, spec: &self.spec }
    }
}
