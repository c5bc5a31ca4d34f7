//! What a worker of `lra` is asked, and how both sides find its recipe and its model.

use serde::{Deserialize, Serialize};

use super::documents;
use super::recipe::{self, Recipe};
use super::tasks::LoadOptions;
use super::weights::StoredWeights;
use crate::protocol::model_spec::ModelSpec;
use crate::protocol::training::{RequestInfo, TrainingRequest};
use effattn_data as data;
use effattn_model::attention::choose::MechanismChoice;
use effattn_model::batch::InputKind;
use effattn_model::family::{self, Architecture, DataShape, ModelRequest, ResolveError};

/// What the worker of a cell is asked.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LraRequest {
    pub task: String,
    /// The model; its length is the number of positions.
    pub spec: ModelSpec,
    /// Tokens of a document that are kept.
    pub keep: u64,
    /// Optimizer steps.
    pub steps: u64,
    /// Peak or base rate.
    pub rate: f64,
    /// So many examples of each split; absent: all.
    pub limit: Option<u64>,
    /// How data are read.
    pub reading: LoadOptions,
    /// The weights that are tested; absent: they are trained.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stored: Option<StoredWeights>,
}

/// The model of `spec` for `task`.
pub fn model(
    spec: &ModelSpec,
    choice: &MechanismChoice,
    task: &str,
) -> Result<Box<dyn Architecture>, ResolveError> {
    let examples = data::task(task).ok().map(|(set, examples)| DataShape {
        input: if set.kind.documents() == 2 { InputKind::Pairs } else { InputKind::Tokens },
        vocab: examples.vocabulary,
        classes: examples.classes,
        len: examples.len,
    });
    model_for(spec, choice, task, examples)
}

/// The model of `spec` for `examples` of `task`.
pub fn model_for(
    spec: &ModelSpec,
    choice: &MechanismChoice,
    task: &str,
    examples: Option<DataShape>,
) -> Result<Box<dyn Architecture>, ResolveError> {
    let families: Vec<_> = family::families().into_iter().filter(|family| documents(family)).collect();
    family::resolve(&families, &ModelRequest { task: Some(task), examples, ..spec.model_request(choice) })
}

impl LraRequest {
    fn mechanism(&self) -> &str {
        self.spec.model.split(':').next().unwrap_or_default()
    }

    /// How its task is trained.
    pub fn recipe(&self) -> Result<Recipe, String> {
        recipe::find(&self.spec.preset, &self.task, self.mechanism())
    }
}

impl TrainingRequest for LraRequest {
    fn reads(&self) -> Vec<String> {
        let weights = self.stored.as_ref().map(StoredWeights::data_name);
        [self.task.clone()].into_iter().chain(weights).collect()
    }

    fn info(&self) -> RequestInfo<'_> {
        let steps = if self.stored.is_some() { 0 } else { self.steps };
        RequestInfo { task: &self.task, reading: self.reading, steps, spec: &self.spec }
    }
}
