//! Documents to classes: the pre-norm encoder of [`crate::encoder`] with a head.

use candle_core::{D, DType, Device, Result, Tensor};

use super::{
    Architecture, Family, Loss, Metric, Model, ModelRequest, Objective, PresetInfo, ResolveError, StageCost,
};
use crate::batch::{Batch, InputKind, ModelInput, SyntheticInput, Tokens};
use crate::nn::dropout::DropoutRng;
use crate::nn::params::ParamBuilder;
use crate::pair::Pair;
use crate::preset::{ClassifierPreset, TABLE};
use crate::{Classifier, ClassifierConfig, Pooling};
use effattn_kernel::loss::cross_entropy;
use effattn_record::config::unknown;

/// The table line.
pub static FAMILY: Family = Family {
    name: "classifier",
    title: "documents to classes",
    input: InputKind::Tokens,
    objective: Objective::Class,
    sample: "text",
    presets,
    serves: |preset, task| towers(preset, task) == Some(1),
    usual_task: |preset, len| ClassifierPreset::find(preset)?.task_of_len(len?),
    usual: |_| None,
    resolve,
};

/// The presets of the Long Range Arena, of which a pair's tasks belong to [`super::pair`].
pub(super) fn presets() -> Vec<PresetInfo> {
    let about = |preset: &ClassifierPreset| {
        let ClassifierPreset { name, title, description, source, .. } = *preset;
        PresetInfo { name, title, description, source, tasks: preset.tasks().collect(), knobs: Vec::new() }
    };
    TABLE.iter().map(|preset| about(preset)).collect()
}

/// Documents per example of this model, where there is one.
pub(super) fn towers(preset: &str, task: Option<&str>) -> Option<usize> {
    ClassifierPreset::find(preset)?.form(task, "").ok().map(|form| form.towers)
}

/// Classifiers and pairs.
pub(super) fn resolve(request: &ModelRequest) -> std::result::Result<Box<dyn Architecture>, ResolveError> {
    let names = TABLE.iter().map(|preset| preset.name);
    let preset = ClassifierPreset::find(request.preset);
    let preset = preset.ok_or_else(|| ResolveError::Invalid(unknown("preset", request.preset, names)))?;
    let entry = request.choice.entry;
    let mut form = match (preset.form(request.task, entry.name), request.examples) {
        (Ok(form), _) => form,
        // the sizes without a task, the ids and classes of the data
        (Err(_), Some(examples)) => preset.form_for(&examples),
        (Err(error), None) => return Err(ResolveError::wrong(error)),
    };
    request.sizes.apply(&mut form.backbone);
    if let Some(name) = &request.sizes.pooling {
        let pooling = Pooling::find(name);
        let names = Pooling::ALL.iter().map(|pooling| pooling.name());
        form.pooling = Some(pooling.ok_or_else(|| ResolveError::Invalid(unknown("pooling", name, names)))?);
    }
    let len = request.len.unwrap_or(form.max_len);
    // what is measured is all of every layer, as others measure it
    form.backbone.whole_last_layer = request.task.is_none();
    Ok(Box::new(form.model(entry, request.choice.knobs.clone(), len)))
}

impl Architecture for ClassifierConfig {
    fn max_len(&self) -> usize {
        self.max_len
    }

    fn validate(&self) -> std::result::Result<(), ResolveError> {
        Ok(Self::validate(self)?)
    }

    fn stages(&self, batch: usize, len: usize) -> Vec<StageCost> {
        self.layer_costs(batch, len)
    }

    fn class_in_front(&self) -> bool {
        matches!(self.pooling, Pooling::ClsFront | Pooling::ClsVector)
    }

    fn state_bytes(&self, len: usize) -> u64 {
        let layer = (self.entry.cost)(&self.knobs, &self.backbone.shape(1, len, true));
        layer.state_bytes * self.backbone.layers as u64
    }

    fn build(&self, builder: &ParamBuilder) -> Result<Box<dyn Model>> {
        Ok(match self.towers {
            2 => Box::new(Pair::new(self, builder)?),
            _ => Box::new(Classifier::new(self, builder)?),
        })
    }

    fn synthetic_batches(&self, wanted: &SyntheticInput, device: &Device) -> Result<Vec<Batch>> {
        let bytes = &mut wanted.bytes();
        let mut document = || -> Result<Tokens> {
            let ids = wanted.ids(bytes, |byte| 1 + u32::from(byte), device)?; // 0 is padding
            Ok(Tokens { ids, mask: None })
        };
        let batches = (0..SyntheticInput::BATCHES).map(|_| {
            let input = match self.towers {
                2 => ModelInput::Pairs(document()?, document()?),
                _ => ModelInput::Tokens(document()?),
            };
            Ok(Batch { input, labels: wanted.classes(self.classes, device)? })
        });
        batches.collect()
    }
}

impl Model for Classifier {
    fn forward(&mut self, batch: &Batch) -> Result<Tensor> {
        let Tokens { ids, mask } = batch.tokens()?;
        Self::forward(self, ids, mask.as_ref())
    }

    fn loss(&mut self, batch: &Batch, rng: DropoutRng) -> Result<Loss> {
        let Tokens { ids, mask } = batch.tokens()?;
        classification_loss(&self.forward_train(ids, mask.as_ref(), self.drops(rng))?, &batch.labels)
    }

    fn metrics(&mut self, batch: &Batch) -> Result<Vec<Metric>> {
        classification_scores(&Model::forward(self, batch)?, &batch.labels)
    }
}

/// Mean cross entropy of `logits` [b, classes] with `labels` `[b]` (u32); training batches of a run have one size, and each
/// counts once.
pub fn classification_loss(logits: &Tensor, labels: &Tensor) -> Result<Loss> {
    Ok(Loss::mean(cross_entropy(logits, labels)?.mean_all()?))
}

/// Loss and right decisions of a batch, in which every example counts once.
pub fn classification_scores(logits: &Tensor, labels: &Tensor) -> Result<Vec<Metric>> {
    let logits = logits.detach();
    let right = logits.argmax(D::Minus1)?.eq(labels)?.to_dtype(DType::F32)?.sum_all()?;
    let loss = cross_entropy(&logits, labels)?.sum_all()?;
    let metric = |name, sum: Tensor| -> Result<Metric> {
        Ok(Metric { name, sum: f64::from(sum.to_scalar::<f32>()?), count: labels.elem_count() as f64 })
    };
    Ok(vec![metric("loss", loss)?, metric("accuracy", right)?])
}
