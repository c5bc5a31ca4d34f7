//! What a worker that trains a masked language model is asked, and how both sides find its text, tokenizer and model.

use std::path::Path;

use anyhow::bail;
use serde::{Deserialize, Serialize};

use super::recipe::Recipe;
use crate::protocol::model_spec::ModelSpec;
use crate::protocol::pretrained_start::{self, StartRequest};
use crate::protocol::training::{RequestInfo, TrainingRequest};
use crate::train::pretrained::Pretrained;
use effattn_data::LoadOptions;
use effattn_data::running_text::{self, RunningText};
use effattn_data::tokenizer::Tokenizer;
use effattn_model::attention::choose::MechanismChoice;
use effattn_model::family::{Architecture, ModelRequest, ResolveError, masked_lm};
use effattn_model::roberta::RobertaConfig;

/// What the worker of a cell is asked.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MlmRequest {
    /// The text.
    pub task: String,
    pub spec: ModelSpec,
    /// The encoder that it goes on from; absent: from nothing.
    pub start: Option<StartRequest>,
    /// File or folder of a tokenizer; absent: that of the encoder, or it is trained on the text.
    pub tokenizer: Option<String>,
    /// Updates.
    pub steps: u64,
    /// Highest rate.
    pub rate: f64,
    /// Updates between evaluations.
    pub every: u64,
    /// Micro-batches per update.
    pub accumulate: u64,
    /// First blocks of every part that are used; absent: all.
    pub limit: Option<u64>,
    /// Whether an incomplete text may be used.
    pub allow_partial: bool,
}

/// The model of `spec`, for inputs as long as those of the encoder that it goes on from, or longer.
pub fn model(
    spec: &ModelSpec,
    start: Option<&StartRequest>,
    choice: &MechanismChoice,
) -> Result<RobertaConfig, ResolveError> {
    let config = match start {
        None => masked_lm::config(&spec.model_request(choice))?,
        Some(start) => {
            let (len, vocab) = (Some(spec.len.max(start.positions) as usize), Some(start.vocab as usize));
            let choice = pretrained_start::keeping(choice, &start.kept)?;
            let config = masked_lm::config(&ModelRequest { len, vocab, ..spec.model_request(&choice) })?;
            RobertaConfig { eps: start.eps, ..config }
        }
    };
    Architecture::validate(&config)?;
    Ok(config)
}

/// A text and the tokenizer that belongs to it.
pub struct MlmData {
    pub prose: RunningText,
    pub tokenizer: Tokenizer,
}

/// Names under which the checksums of text and tokenizer stand in a plan.
pub fn data_names(request: &MlmRequest) -> [String; 2] {
    let tokenizer = match &request.start {
        Some(start) => pretrained_start::tokenizer_name(&start.encoder),
        None => format!("tokenizer of {}", request.tokenizer.as_deref().unwrap_or(&request.task)),
    };
    [request.task.clone(), tokenizer]
}

/// Reads what `request` is trained on; the tokenizer is read, or trained on the text.
pub fn load(request: &MlmRequest, data: &Path) -> anyhow::Result<MlmData> {
    let preset = &request.spec.preset;
    let recipe = Recipe::find(preset).map_err(anyhow::Error::msg)?;
    let given = match &request.start {
        Some(start) => Some(Pretrained::open(Path::new(&start.folder))?.tokenizer()?),
        None => request.tokenizer.as_deref().map(|path| Tokenizer::load(Path::new(path))).transpose()?,
    };
    if given.is_none() && recipe.given_tokenizer {
        bail!(
            "preset {preset} has RoBERTa's 50,265 words; give the folder of its vocab.json and merges.txt with --tokenizer"
        );
    }
    let prose = running_text::load(&request.task, data, request.allow_partial)?;
    let tokenizer = match given {
        Some(tokenizer) => tokenizer,
        None => {
            let texts = prose.train.iter().chain(&prose.besides);
            let trained = Tokenizer::train(texts.map(String::as_str), Recipe::vocabulary(&request.task));
            trained.map_err(anyhow::Error::msg)?
        }
    };
    let choice = request.spec.choice()?;
    let room = model(&request.spec, request.start.as_ref(), &choice)?.vocab;
    if tokenizer.len() > room {
        let (len, given) = (tokenizer.len(), request.tokenizer.as_deref().unwrap_or("the tokenizer"));
        bail!(
            "{given} has {len} words, preset {preset} has room for {room}; choose another --preset or --tokenizer"
        );
    }
    Ok(MlmData { prose, tokenizer })
}

impl TrainingRequest for MlmRequest {
    fn reads(&self) -> Vec<String> {
        data_names(self).into()
    }

    fn info(&self) -> RequestInfo<'_> {
        let reading = LoadOptions::partial(self.allow_partial);
        RequestInfo { task: &self.task, reading, steps: self.steps, spec: &self.spec }
    }
}
