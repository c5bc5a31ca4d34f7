//! An image classifier with its parameters: its answers, its loss and what it is scored by.

use candle_core::{D, DType, Result, Tensor};

use crate::batch::Batch;
use crate::family::{Loss, Metric, Model};
use crate::nn::dropout::DropoutRng;
use crate::vision::cvt::Cvt;
use crate::vision::resnet::ResNet;
use crate::vision::vil::Vil;
use crate::vision::vit::Vit;
use crate::vision::{ClassifierOutput, ForwardOptions};
use effattn_kernel::loss::cross_entropy;

/// A backbone with its parameters.
pub(super) enum Built {
    Vil(Vil),
    Cvt(Cvt),
    Vit(Vit),
    ResNet(ResNet),
}

/// An image classifier with its parameters.
pub struct ImageModel {
    pub(super) model: Built,
    pub(super) path: f64,
}

impl ImageModel {
    /// Logits, and block outputs where `run` keeps them, of `images` [b, 3, s, s].
    pub fn classify(&self, images: &Tensor, run: &ForwardOptions) -> Result<ClassifierOutput> {
        match &self.model {
            Built::Vil(model) => model.forward(images, run),
            Built::Cvt(model) => model.forward(images, run),
            Built::Vit(model) => model.forward(images, run),
            Built::ResNet(model) => model.forward(images, run),
        }
    }
}

/// Cross entropy of every row of `logits` [b, classes] with `labels`: classes `[b]` (u32), or shares of classes
/// [b, classes].
pub(super) fn losses(logits: &Tensor, labels: &Tensor) -> Result<Tensor> {
    if labels.dtype() == DType::U32 {
        return cross_entropy(logits, labels);
    }
    let shifted = logits.broadcast_sub(&logits.max_keepdim(D::Minus1)?.detach())?;
    let log_sum = shifted.exp()?.sum_keepdim(D::Minus1)?.log()?;
    (labels * log_sum.broadcast_sub(&shifted)?)?.sum(D::Minus1)
}

impl Model for ImageModel {
    fn forward(&mut self, batch: &Batch) -> Result<Tensor> {
        Ok(self.classify(batch.pixels()?, &ForwardOptions::INFER)?.logits)
    }

    fn loss(&mut self, batch: &Batch, rng: DropoutRng) -> Result<Loss> {
        let run = ForwardOptions { train: true, keep: false, path: Some((rng, self.path)) };
        let losses = losses(&self.classify(batch.pixels()?, &run)?.logits, &batch.labels)?;
        Ok(Loss { sum: losses.sum_all()?, count: losses.elem_count() as f64 })
    }

    fn metrics(&mut self, batch: &Batch) -> Result<Vec<Metric>> {
        let logits = self.forward(batch)?.detach();
        let rows = logits.to_vec2::<f32>()?;
        let labels = batch.labels.to_vec1::<u32>()?;
        let count = rows.len() as f64;
        let loss = f64::from(cross_entropy(&logits, &batch.labels)?.sum_all()?.to_scalar::<f32>()?);
        let within = |best: usize| {
            let right = rows.iter().zip(&labels).filter(|(row, label)| rank(row, **label as usize) < best);
            right.count() as f64
        };
        Ok(vec![
            Metric { name: "loss", sum: loss, count },
            Metric { name: "accuracy", sum: within(1), count },
            Metric { name: "top5", sum: within(5), count },
        ])
    }
}

/// How many classes stand before `label`: those with a larger logit, and among equals those with a smaller number.
pub fn rank(logits: &[f32], label: usize) -> usize {
    let own = logits.get(label).copied().unwrap_or(f32::NEG_INFINITY);
    let before = |(class, logit): (usize, &f32)| *logit > own || (*logit == own && class < label);
    logits.iter().enumerate().filter(|&(class, logit)| before((class, logit))).count()
}
