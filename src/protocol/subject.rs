//! The model that a [`Spec`] names: a classifier, or a language model behind a full cache.

use std::sync::Arc;

use candle_core::{DType, Device, Tensor};

use super::stage::{Spec, SpecError};
use crate::attention::choose::choose;
use crate::config::grid::Models;
use crate::config::unknown;
use crate::model::language_preset::{self, LanguagePreset};
use crate::model::lm::{Cache, LanguageModel, LmConfig, next_symbol_loss, released_loss};
use crate::model::{Classifier, ConfigError, ModelConfig};
use crate::nn::dropout::Dropout;
use crate::nn::params::Builder;
use crate::train::step::classification_loss;

/// Symbols of a language model that is only measured: enwik8's.
pub const SYMBOLS: usize = 208;

/// Most different batches that are made beforehand.
const BATCHES: usize = 4;

/// What is built and measured.
#[derive(Clone)]
pub enum Subject {
    /// Documents to classes.
    Classifier(Box<ModelConfig>),
    /// Segments behind a cache to next symbols.
    Language(Box<LmConfig>),
}

impl Subject {
    /// FLOPs of one forward of one sample at length `len`.
    pub fn flops(&self, len: usize) -> u64 {
        match self {
            Self::Classifier(config) => config.flops(len),
            Self::Language(config) => config.flops(len, config.mem),
        }
    }

    /// Multiply-adds of the attention cores of one forward of `batch` samples.
    pub fn core_macs(&self, batch: usize, len: usize) -> u64 {
        match self {
            Self::Classifier(config) => config.core_macs(batch, len),
            Self::Language(config) => {
                config.backbone.layers as u64 * config.attention_cost(batch, len, config.mem).core_macs
            }
        }
    }

    /// Bytes a causal decoder would keep per sequence behind `len` positions.
    pub fn state_bytes(&self, len: usize) -> u64 {
        match self {
            Self::Classifier(config) => {
                let layers = 0..config.backbone.layers;
                let state = layers.map(|layer| config.attention_cost(1, len, layer).state_bytes);
                state.sum()
            }
            Self::Language(config) => config.state_bytes(len),
        }
    }

    /// Number of trained numbers; none for a configuration that cannot be built.
    pub fn parameters(&self) -> Option<u64> {
        let count = match self {
            Self::Classifier(config) => config.parameters(),
            Self::Language(config) => config.parameters(),
        };
        count.ok().map(|count| count as u64)
    }
}

impl Spec {
    /// The model that is measured.
    ///
    /// # Errors
    /// Unknown names, impossible sizes, a mechanism that cannot do this.
    pub fn subject(&self) -> Result<Subject, SpecError> {
        if LanguagePreset::find(&self.preset).is_some() {
            let config = self.language(SYMBOLS, (self.len, self.len))?;
            return Ok(Subject::Language(Box::new(config)));
        }
        Ok(Subject::Classifier(Box::new(self.config_for(None)?)))
    }

    /// The language model over `vocab` symbols for segments of `block` behind `mem` cached positions, of which a
    /// mechanism without cache has none.
    ///
    /// # Errors
    /// Unknown names, impossible sizes, a mechanism that cannot do this.
    pub fn language(&self, vocab: usize, (block, mem): (u64, u64)) -> Result<LmConfig, SpecError> {
        let wrong = |error: &dyn ToString| SpecError::Wrong(error.to_string());
        let models = self.model.parse::<Models>().map_err(|error| wrong(&error))?;
        let preset = LanguagePreset::find(&self.preset);
        let names = language_preset::TABLE.iter().map(|preset| preset.name);
        let preset = preset.ok_or_else(|| SpecError::Wrong(unknown("preset", &self.preset, names)))?;
        let choices = choose(&models).map_err(|error| wrong(&error))?;
        let ([variant], [choice]) = (models.0.as_slice(), choices.as_slice()) else {
            return Err(wrong(&"one mechanism is built at a time"));
        };
        let given = variant.knobs.iter().map(|(name, value)| (name.as_str(), value.as_str()));
        let mut config = preset.model(choice.entry, given, vocab).map_err(|error| wrong(&error))?;
        self.sizes.apply(&mut config.backbone);
        config.block = block as usize;
        config.mem = if choice.entry.support.memory { mem as usize } else { 0 };
        match config.validate() {
            Ok(()) => Ok(config),
            Err(error @ (ConfigError::Unsupported { .. } | ConfigError::Knobs { .. })) => {
                Err(SpecError::Unsupported(error.to_string()))
            }
            Err(error) => Err(wrong(&error)),
        }
    }
}

/// A classifier, or a language model with the cache in front of its next segment.
pub(super) enum Net {
    Classifier(Classifier, usize),
    Language { model: LanguageModel, cache: Cache, dropout: Dropout },
}

impl Net {
    /// The model of `subject`, in front of its first batch.
    pub(super) fn new(subject: &Subject, builder: &Builder, spec: &Spec) -> candle_core::Result<Self> {
        Ok(match subject {
            Subject::Classifier(config) => {
                Self::Classifier(Classifier::new(config, builder)?, config.classes)
            }
            Subject::Language(config) => {
                let model = LanguageModel::new(config, builder)?;
                // a full cache from the first step on: every step costs the same
                let shape = (spec.batch as usize, config.mem, config.backbone.width);
                let rows = |_| match config.mem {
                    0 => Ok(None),
                    _ => Tensor::ones(shape, DType::F32, &builder.device()).map(Some),
                };
                let cache =
                    Cache::of((0..config.backbone.layers).map(rows).collect::<candle_core::Result<_>>()?);
                let rate = config.backbone.dropout;
                let dropout = if rate == 0.0 { Dropout::NONE } else { Dropout::new(rate, spec.seed) };
                Self::Language { model, cache, dropout }
            }
        })
    }

    /// Number of labels, or of symbols.
    pub(super) fn labels(&self) -> Labels {
        match self {
            Self::Classifier(_, classes) => Labels::Classes(*classes),
            Self::Language { .. } => Labels::Symbols(SYMBOLS),
        }
    }

    /// Logits of `ids`.
    pub(super) fn logits(&mut self, ids: &Tensor) -> candle_core::Result<Tensor> {
        match self {
            Self::Classifier(model, _) => model.forward(ids, None),
            Self::Language { model, cache, .. } => {
                let (logits, next) = model.forward(ids, cache)?;
                *cache = next;
                Ok(logits)
            }
        }
    }

    /// The loss of a training step; labels of a language model are the next symbols.
    pub(super) fn loss(&mut self, ids: &Tensor, labels: &Tensor, step: u64) -> candle_core::Result<Tensor> {
        match self {
            Self::Classifier(model, _) => classification_loss(&model.forward(ids, None)?, labels),
            Self::Language { model, cache, dropout } => {
                let dropout = if dropout.is_none() { *dropout } else { dropout.branch(step) };
                let (logits, next) = model.forward_train(ids, cache, dropout)?;
                *cache = next;
                released_loss(&next_symbol_loss(&logits, labels)?)
            }
        }
    }
}

/// What the labels of a batch are.
#[derive(Clone, Copy)]
pub(super) enum Labels {
    /// One class per sample.
    Classes(usize),
    /// One symbol per position.
    Symbols(usize),
}

/// Batches of full length cut from `text` (which is repeated where it is too short), each at a place of its
/// own; labels alternate.
pub(super) fn inputs(
    spec: &Spec,
    labels: Labels,
    text: &[u8],
    device: &Device,
) -> candle_core::Result<Vec<(Tensor, Tensor)>> {
    let (batch, len) = (spec.batch as usize, spec.len as usize);
    let text: Arc<[u8]> = if text.is_empty() { Arc::from(*b" ") } else { Arc::from(text) };
    let mut at = (spec.seed as usize).wrapping_mul(7919) % text.len();
    let mut all = Vec::new();
    for _ in 0..BATCHES {
        let mut ids = Vec::with_capacity(batch * len);
        for _ in 0..batch * len {
            ids.push(match labels {
                Labels::Classes(_) => 1 + u32::from(text[at]), // 0 is padding
                Labels::Symbols(count) => u32::from(text[at]) % count as u32,
            });
            at = (at + 1) % text.len();
        }
        let ids = Tensor::from_vec(ids, (batch, len), device)?;
        let labels = match labels {
            Labels::Classes(classes) => {
                Tensor::from_vec((0..batch).map(|row| (row % classes) as u32).collect(), batch, device)?
            }
            Labels::Symbols(_) => {
                let first = ids.narrow(1, 0, 1)?;
                Tensor::cat(&[ids.narrow(1, 1, len - 1)?, first], 1)?.contiguous()?
            }
        };
        all.push((ids, labels));
    }
    Ok(all)
}
