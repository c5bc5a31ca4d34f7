//! What a worker of `vision` is asked, and how both sides find its model.

use serde::{Deserialize, Serialize};

use crate::protocol::model_spec::ModelSpec;
use crate::protocol::training::{RequestInfo, TrainingRequest};
use effattn_data::images::test_only::challenge;
use effattn_data::{LoadOptions, images};
use effattn_model::attention::choose::MechanismChoice;
use effattn_model::batch::InputKind;
use effattn_model::family::vision::{ImageClassifier, classifier};
use effattn_model::family::{Architecture, DataShape, ModelRequest, ResolveError};

/// What the worker of a cell is asked.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct VisionRequest {
    /// The images.
    pub task: String,
    /// The model; its length is the side of the images, its batch the images of an update.
    pub spec: ModelSpec,
    /// Updates; none where stored weights are evaluated.
    pub steps: u64,
    /// Highest rate.
    pub rate: f64,
    /// Updates between evaluations.
    pub every: u64,
    /// Parts that an update's batch is cut into.
    pub accumulate: u64,
    /// So many images of each split; absent: all.
    pub limit: Option<u64>,
    /// File of the weights that are evaluated instead of trained ones.
    pub weights: Option<String>,
    /// SHA-256 of that file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weights_sha256: Option<String>,
    /// Images that the weights are tested on besides, by name.
    #[serde(default)]
    pub also: Vec<String>,
    /// Images whose patches are compared (Figure 6).
    pub similarity: u64,
    /// Whether incomplete data and broken images are taken as they are.
    pub allow_partial: bool,
}

/// Classes of the images called `task`, where they are known before they are read.
fn examples(classes: usize, len: usize) -> DataShape {
    DataShape { input: InputKind::Pixels, vocab: 0, classes, len }
}

/// The model of `spec` for images of `classes`.
pub fn model(
    spec: &ModelSpec,
    choice: &MechanismChoice,
    classes: Option<usize>,
) -> Result<ImageClassifier, ResolveError> {
    let examples = classes.map(|classes| examples(classes, spec.len as usize));
    let resolved = classifier(&ModelRequest { examples, ..spec.model_request(choice) })?;
    resolved.validate()?;
    Ok(resolved)
}

/// Classes of the models for `task`, where that is known before its images are read.
pub fn classes(task: &str) -> Option<usize> {
    let trained_on = challenge(task).map_or(task, |challenge| challenge.of);
    images::source(trained_on).ok()?.classes
}

impl TrainingRequest for VisionRequest {
    fn reads(&self) -> Vec<String> {
        [&self.task].into_iter().chain(&self.also).cloned().collect()
    }

    fn info(&self) -> RequestInfo<'_> {
        let reading = LoadOptions::partial(self.allow_partial);
        RequestInfo { task: &self.task, reading, steps: self.steps, spec: &self.spec }
    }
}
