//! What a worker of `recall` is asked, and how both sides find its model.

use serde::{Deserialize, Serialize};

use super::recipe::TrainPart;
use crate::protocol::model_spec::ModelSpec;
use crate::protocol::training::{RequestInfo, TrainingRequest};
use effattn_data::LoadOptions;
use effattn_data::position_labels::{Alphabet, PositionTask, Reading, Segment};
use effattn_model::attention::choose::MechanismChoice;
use effattn_model::family::labeler;
use effattn_model::family::{ModelRequest, ResolveError};
use effattn_model::labeler::LabelerConfig;

/// What the worker of a cell is asked.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RecallRequest {
    pub task: String,
    /// The model; its length is the longest that is trained or tested on.
    pub spec: ModelSpec,
    /// What its layers are; absent: the preset's.
    pub layers: Option<Vec<String>>,
    /// Number of ids, noise.
    pub alphabet: Alphabet,
    /// What is trained on.
    pub train: Vec<TrainPart>,
    /// What is validated and tested on.
    pub test: Vec<Segment>,
    /// Most updates at each rate.
    pub steps: u64,
    /// Updates between evaluations.
    pub every: u64,
    /// Rates to choose from.
    pub rates: Vec<f64>,
    /// Most examples per segment that are validated or tested on; absent: the protocol's numbers.
    pub limit: Option<u64>,
}

/// The model of `spec`.
pub fn model(
    spec: &ModelSpec,
    choice: &MechanismChoice,
    (layers, alphabet, task): (Option<&[String]>, Alphabet, &PositionTask),
) -> Result<LabelerConfig, ResolveError> {
    let vocab = Some(alphabet.vocabulary);
    let config = labeler::config(&ModelRequest { vocab, ..spec.model_request(choice) }, layers)?;
    let config = LabelerConfig { read_at_end: task.reading == Reading::AtTheEnd, ..config };
    config.validate()?;
    Ok(config)
}

impl TrainingRequest for RecallRequest {
    fn info(&self) -> RequestInfo<'_> {
        let steps = self.steps * self.rates.len() as u64;
        RequestInfo { task: &self.task, reading: LoadOptions::default(), steps, spec: &self.spec }
    }
}
