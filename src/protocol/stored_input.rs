//! A stored model and one input of its kind: what a protocol that trains declares, so that its models can be looked at.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use candle_core::{Device, Tensor};
use serde::de::DeserializeOwned;
use serde_json::Value as Json;

use super::model_spec::ModelSpec;
use crate::train::checkpoint::Checkpoint;
use crate::train::training_loop::CheckpointFiles;
use effattn_model::attention::observe::{MechanismCall, observed};
use effattn_model::batch::{Batch, IGNORED, ModelInput, Tokens};
use effattn_model::family::Architecture;
use effattn_record::text::plural;

/// What a stored model reads.
#[derive(Clone, Copy, Debug)]
pub enum Input<'a> {
    /// A text, read as the training texts were.
    Text(&'a str),
    /// An example of those that the model is tested on, from 0.
    Example(usize),
}

/// A request for an input.
#[derive(Clone, Copy, Debug)]
pub struct InputRequest<'a> {
    /// Which.
    pub input: Input<'a>,
    /// Folder of data sets.
    pub data: &'a Path,
    /// Most tokens; longer inputs are cut.
    pub most: usize,
}

/// What the positions of an input stand for.
#[derive(Clone, Debug)]
pub enum Positions {
    /// Tokens in order; nothing where they have no names.
    Tokens(Vec<String>),
    /// Patches of a square image, row by row, behind a class token where there is one.
    Patches,
}

/// A stored model and an input.
pub struct StoredInput {
    /// The model.
    pub model: Box<dyn Architecture>,
    /// Its weights.
    pub weights: Checkpoint,
    /// The input, alone in a batch.
    pub batch: Batch,
    /// What its positions stand for.
    pub positions: Positions,
    /// The model and what it was trained on, in words.
    pub source: String,
}

impl StoredInput {
    /// The model of `spec` on the tokens `ids`, of which `labels` are asked for.
    pub fn of_tokens(
        (spec, task): (&ModelSpec, &str),
        (model, weights): (Box<dyn Architecture>, Checkpoint),
        (ids, labels): (&[u32], &[(usize, u32)]),
        names: Vec<String>,
    ) -> Result<Self> {
        ensure!(!ids.is_empty(), "the input is empty; give --text with at least one character");
        let shape = (1, ids.len());
        let mut all = vec![IGNORED; ids.len()];
        labels.iter().for_each(|(position, label)| all[*position] = *label);
        let ids = Tensor::from_vec(ids.to_vec(), shape, &Device::Cpu)?;
        let labels = Tensor::from_vec(all, shape, &Device::Cpu)?;
        let batch = Batch { input: ModelInput::Tokens(Tokens { ids, mask: None }), labels };
        let source = source(spec, task, &weights);
        Ok(Self { model, weights, batch, positions: Positions::Tokens(names), source })
    }

    /// The calls of the model's mechanisms in a forward pass, layer by layer.
    pub fn calls(&self) -> Result<Vec<MechanismCall>> {
        let builder = self.weights.builder(&Device::Cpu, false)?;
        let (_, calls) = observed(|| self.model.build(&builder)?.forward(&self.batch))?;
        Ok(calls)
    }

    /// What the positions of a layer with `count` of them stand for; nothing where they have no names.
    pub fn names(&self, count: usize) -> Vec<String> {
        let class = || "class token".to_owned();
        match &self.positions {
            Positions::Tokens(names) if names.is_empty() => Vec::new(),
            Positions::Tokens(names) => {
                let front = self.model.class_in_front().then(class);
                front.into_iter().chain(names.iter().cloned()).take(count).collect()
            }
            Positions::Patches => {
                let side = count.isqrt();
                let front = count - side * side;
                let patches = (0..side * side)
                    .map(|at| format!("patch of row {}, column {}", at / side + 1, at % side + 1));
                (0..front).map(|_| class()).chain(patches).collect()
            }
        }
    }
}

/// `full of charlm-small, trained on sample for 200 steps`.
pub fn source(spec: &ModelSpec, task: &str, weights: &Checkpoint) -> String {
    let steps = plural(weights.updates, "step");
    format!("{} of {}, trained on {task} for {steps}", spec.model, spec.preset)
}

/// The checkpoint of the best evaluation in the folder of a cell, or the last one.
pub fn checkpoint(cell: &Path, best: bool) -> Result<Checkpoint> {
    let files = CheckpointFiles::in_folder(cell);
    Ok(Checkpoint::load(if best { &files.best } else { &files.last })?)
}

/// A request as the checkpoint of a cell describes it.
pub fn described<R: DeserializeOwned>(description: &Json) -> Result<R> {
    serde_json::from_value(description.clone())
        .context("its checkpoint was written by another version of effattn; train the model again")
}

/// Makes sure that `index` is one of the `count` inputs that are called `what`.
pub fn check_example(index: usize, count: usize, what: &str) -> Result<()> {
    ensure!(index < count, "--example {index}: there are {count} {what}, from 0");
    Ok(())
}
