//! What a worker that trains a character language model is asked, and how both sides find its corpus and its model.

use std::path::Path;

use serde::{Deserialize, Serialize};

use super::eval::Evaluation;
use super::recipe::Phase;
use crate::protocol::model_spec::ModelSpec;
use crate::protocol::training::{RequestInfo, TrainingRequest};
use effattn_data as data;
use effattn_data::corpus::CharCorpus;
use effattn_data::{DataError, LoadOptions};
use effattn_model::attention::choose::MechanismChoice;
use effattn_model::family::causal::{self, CausalArchitecture};
use effattn_model::family::{ModelRequest, ResolveError};

/// What the worker of a cell is asked.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CharLmRequest {
    pub corpus: String,
    /// The model; length and batch are those of the first phase.
    pub spec: ModelSpec,
    /// The phases, one after another.
    pub phases: Vec<Phase>,
    /// Micro-batches per update.
    pub accumulate: u64,
    /// Updates between evaluations.
    pub every: u64,
    /// First symbols of the validation and the test part that are predicted; absent: all.
    pub limit: Option<u64>,
    /// How the test part is evaluated.
    pub evaluation: Evaluation,
    /// Whether an incomplete corpus may be used.
    pub allow_partial: bool,
}

impl CharLmRequest {
    /// Its model, for segments of the first phase.
    pub fn model(&self, vocab: usize) -> Result<Box<dyn CausalArchitecture>, ResolveError> {
        model(&self.spec, &self.spec.choice()?, vocab, &self.phases)
    }
}

/// The model that predicts the next of `vocab` symbols in every one of `phases`, for segments of the first.
pub fn model(
    spec: &ModelSpec,
    choice: &MechanismChoice,
    vocab: usize,
    phases: &[Phase],
) -> Result<Box<dyn CausalArchitecture>, ResolveError> {
    let lens: Vec<usize> = phases.iter().map(|phase| phase.len as usize).collect();
    causal::resolve_for(&ModelRequest { vocab: Some(vocab), ..spec.model_request(choice) }, &lens)
}

/// The corpus called `name` in `dir`.
pub fn load(name: &str, dir: &Path, allow_partial: bool) -> Result<CharCorpus, DataError> {
    let (_, symbols) = data::corpus(name)?;
    (symbols.load)(dir, LoadOptions::partial(allow_partial))
}

/// Names of the corpora, for help.
pub fn names() -> Vec<&'static str> {
    data::corpora().iter().map(|(set, _)| set.name).collect()
}

impl TrainingRequest for CharLmRequest {
    fn info(&self) -> RequestInfo<'_> {
        let reading = LoadOptions::partial(self.allow_partial);
        RequestInfo {
            task: &self.corpus,
            reading,
            steps: self.phases.iter().map(|phase| phase.steps).sum(),
            spec: &self.spec,
        }
    }

    /// Later phases have more symbols in a step.
    fn first_step_equivalents(&self) -> f64 {
        let symbols = |phase: &Phase| (phase.len * phase.batch) as f64;
        let first = self.phases.first().map_or(1.0, symbols);
        self.phases.iter().map(|phase| phase.steps as f64 * symbols(phase) / first).sum()
    }
}
