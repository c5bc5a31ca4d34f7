//! Pairs of documents to classes: two towers of the classifier's encoder, at the tasks of its presets that have pairs.

use candle_core::{Result, Tensor};

use super::classifier::{classification_loss, classification_scores, presets, resolve, towers};
use super::{Family, Loss, Metric, Model, Objective};
use crate::batch::{Batch, InputKind, Tokens};
use crate::nn::dropout::DropoutRng;
use crate::pair::{Document, Pair};

/// The table line.
pub static FAMILY: Family = Family {
    name: "pair",
    title: "pairs of documents to classes",
    input: InputKind::Pairs,
    objective: Objective::Class,
    sample: "text",
    presets,
    serves: |preset, task| towers(preset, task) == Some(2),
    usual_task: |_, _| None,
    usual: |_| None,
    resolve,
};

fn documents(batch: &Batch) -> Result<(Document<'_>, Document<'_>)> {
    fn document(Tokens { ids, mask }: &Tokens) -> Document<'_> {
        Document { ids, mask: mask.as_ref() }
    }
    let (first, second) = batch.pairs()?;
    Ok((document(first), document(second)))
}

impl Model for Pair {
    fn forward(&mut self, batch: &Batch) -> Result<Tensor> {
        let (first, second) = documents(batch)?;
        Self::forward(self, first, second)
    }

    fn loss(&mut self, batch: &Batch, rng: DropoutRng) -> Result<Loss> {
        let (first, second) = documents(batch)?;
        classification_loss(&self.forward_train(first, second, self.drops(rng))?, &batch.labels)
    }

    fn metrics(&mut self, batch: &Batch) -> Result<Vec<Metric>> {
        classification_scores(&Model::forward(self, batch)?, &batch.labels)
    }
}
