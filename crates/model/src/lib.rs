//! Attention mechanisms, the layers around them, and the families of models that are built from both.
//!
//! Imports the kernels and the records, and knows nothing of training, data sets or protocols. The types to know are
//! [`attention::MechanismEntry`] (one mechanism, as data), [`nn::params::ParamBuilder`] (named parameters) and [`Family`] (the models of one
//! kind: presets, costs, inputs for measuring, loss).

pub mod attention;
pub mod batch;
pub mod char_lm;
pub mod char_lm_preset;
pub mod cost;
pub mod encoder;
pub mod evaluate;
pub mod family;
pub mod labeler;
pub mod layer;
pub mod nn;
pub mod pair;
pub mod preset;
pub mod roberta;
#[cfg(test)]
mod tests;
pub mod vision;
pub mod word_lm;

use candle_core::Tensor;

use crate::attention::knobs::Knobs;
use crate::attention::{MechanismEntry, Shape};
use crate::nn::dropout::{Dropout, DropoutRng};
use crate::nn::embedding::Positions;
use crate::nn::ffn::FfnActivation;
pub use encoder::Classifier;
pub use family::{Family, TABLE, families, find, register};

/// What a candle error says: candle gives a backtrace with the message where RUST_BACKTRACE is set.
pub fn message(error: &candle_core::Error) -> String {
    let text = error.to_string();
    text.split("\n   0: ").next().unwrap_or_default().trim_end().to_owned()
}

/// What `run` shows on its way, the input of every layer, and then its result.
fn traced(
    run: impl FnOnce(&mut dyn FnMut(&Tensor)) -> candle_core::Result<Tensor>,
) -> candle_core::Result<Vec<Tensor>> {
    let mut seen = Vec::new();
    let last = run(&mut |x| seen.push(x.clone()))?;
    seen.push(last);
    Ok(seen)
}

/// Where the vector that stands for a document comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pooling {
    /// Mean over all positions of mask * LN(x); the divisor counts padding too.
    Mean,
    /// The last id of the vocabulary is put in front (the last position is dropped) and its output is used.
    ClsFront,
    /// A trained vector, 0 at the start, is put in front of the embedded tokens, as one position more, and its output is
    /// used (Long Range Arena).
    ClsVector,
    /// A trained vector joins the last layer only (Transformer-LS; needs [`crate::attention::Support::cls`]).
    ClsLastLayer,
    /// The output of the first position.
    First,
}

impl Pooling {
    /// All of them.
    pub const ALL: &[Self] = &[Self::Mean, Self::ClsFront, Self::ClsVector, Self::ClsLastLayer, Self::First];

    /// Its name in golden files, suites and on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Mean => "mean",
            Self::ClsFront => "cls-front",
            Self::ClsVector => "cls-vector",
            Self::ClsLastLayer => "cls-last-layer",
            Self::First => "first",
        }
    }

    /// Whether the last layer's output is read at the first position alone.
    pub const fn reads_first_row(self) -> bool {
        matches!(self, Self::ClsFront | Self::ClsVector | Self::First)
    }

    /// The pooling called `name`.
    pub fn find(name: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|pooling| pooling.name() == name)
    }
}

/// How weights start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum InitScheme {
    /// PyTorch's defaults, embeddings N(0, 0.02^2) (Transformer-LS's LRA code).
    #[default]
    Torch,
    /// Xavier uniform projections, MLP biases N(0, 1e-6^2), token embedding N(0, 1) (Long Range Arena).
    Flax,
}

/// Sizes and options of an encoder.
#[derive(Clone, Debug, PartialEq)]
pub struct Backbone {
    /// Number of blocks.
    pub layers: usize,
    /// Width of the residual stream, d.
    pub width: usize,
    /// Heads.
    pub heads: usize,
    /// Width of all heads together; the same as `width` almost everywhere.
    pub inner: usize,
    /// Hidden width of the feed-forward half and of the head, F.
    pub ffn: usize,
    /// Whether the attention projections have biases.
    pub bias: bool,
    /// Position embedding.
    pub positions: Positions,
    /// Start of the weights.
    pub init: InitScheme,
    /// What stands between the linear layers of the feed-forward halves of an encoder.
    pub activation: FfnActivation,
    /// Dropout of hidden activations while training.
    pub dropout: f64,
    /// Dropout of attention weights while training, where a mechanism has such.
    pub attention_dropout: f64,
    /// Whether the last layer computes rows that nothing reads, too, as other programs do; results are the same.
    pub whole_last_layer: bool,
}

/// A classifier around one variant of a mechanism.
#[derive(Clone)]
pub struct ClassifierConfig {
    /// The mechanism.
    pub entry: &'static MechanismEntry,
    /// Its settings.
    pub knobs: Knobs,
    /// Sizes and options.
    pub backbone: Backbone,
    /// Number of ids.
    pub vocab: usize,
    /// Longest document.
    pub max_len: usize,
    /// Number of classes.
    pub classes: usize,
    /// Where the document's vector comes from.
    pub pooling: Pooling,
    /// Documents per example: 1, or 2 for pairs.
    pub towers: usize,
}

/// A configuration that no model can be built from.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// Heads of unequal width.
    #[error("{heads} heads do not divide a width of {inner}; choose a number of heads that does")]
    Heads {
        /// Heads.
        heads: usize,
        /// Width of all heads together.
        inner: usize,
    },
    /// Heads that cannot share those of keys, or cannot be rotated.
    #[error(
        "{heads} heads of width {head_dim} cannot share {kv_heads} heads of keys and values; choose a multiple of {kv_heads} heads, \
         and an even width of a head"
    )]
    SharedHeads {
        /// Heads of queries.
        heads: usize,
        /// Heads of keys and values.
        kv_heads: usize,
        /// Width of a head.
        head_dim: usize,
    },
    /// A size that must be positive is 0.
    #[error("{what} is 0; it must be at least 1")]
    Zero {
        /// The size.
        what: &'static str,
    },
    /// A mechanism that cannot do what the model asks of it.
    #[error("{mechanism} has no {what}; {instead}")]
    Unsupported {
        /// The mechanism.
        mechanism: &'static str,
        /// What is asked.
        what: &'static str,
        /// What to choose.
        instead: &'static str,
    },
    /// More than can be counted in 64 bits.
    #[error(
        "{layers} layers of width {width} at length {len} are more than can be counted; choose smaller sizes"
    )]
    TooLarge {
        /// Blocks.
        layers: usize,
        /// Width.
        width: usize,
        /// Length.
        len: usize,
    },
    /// Neither one nor two towers.
    #[error("a model has 1 or 2 towers, not {0}")]
    Towers(usize),
    /// A probability of dropping everything, or of less than nothing.
    #[error("a dropout of {0} is not allowed; it must be at least 0 and below 1")]
    Dropout(String),
    /// Knobs that do not fit the shape.
    #[error("{mechanism}: {reason}")]
    Knobs {
        /// The mechanism.
        mechanism: &'static str,
        /// What the mechanism says.
        reason: String,
    },
}

impl Backbone {
    /// The form of the golden models: biases, learned positions, PyTorch's start, no dropout.
    pub const fn new(layers: usize, width: usize, heads: usize, ffn: usize) -> Self {
        Self {
            layers,
            width,
            heads,
            inner: width,
            ffn,
            bias: true,
            positions: Positions::Learned,
            init: InitScheme::Torch,
            activation: FfnActivation::Gelu,
            dropout: 0.0,
            attention_dropout: 0.0,
            whole_last_layer: false,
        }
    }

    /// Width of a head.
    pub const fn head_dim(&self) -> usize {
        self.inner / self.heads
    }

    /// # Errors
    /// Sizes that no model has.
    pub fn validate(&self) -> Result<(), ConfigError> {
        positive(&[
            ("the number of layers", self.layers),
            ("the width", self.width),
            ("the number of heads", self.heads),
            ("the width of the attention", self.inner),
            ("the hidden width", self.ffn),
        ])?;
        if !self.inner.is_multiple_of(self.heads) {
            return Err(ConfigError::Heads { heads: self.heads, inner: self.inner });
        }
        match [self.dropout, self.attention_dropout].iter().find(|rate| !(0.0..1.0).contains(*rate)) {
            Some(rate) => Err(ConfigError::Dropout(rate.to_string())),
            None => Ok(()),
        }
    }

    /// What a forward pass of training drops, drawn from `rng`.
    pub const fn drops(&self, rng: DropoutRng) -> Dropout<'static> {
        rng.at(self.dropout).with_attention(self.attention_dropout)
    }

    /// Refuses what cannot be counted at length `len` with these `knobs`: the bound is the largest product that a cost
    /// takes, with room for its factors.
    pub fn countable(&self, len: usize, knobs: &Knobs) -> Result<(), ConfigError> {
        let knob = knobs.largest();
        let beside = [len, knob, 4 * self.inner, 2 * self.ffn].iter().map(|size| *size as f64).sum::<f64>();
        let width = self.width.max(self.inner);
        let product = self.layers as f64 * len.max(knob) as f64 * width as f64 * beside;
        if product < 2f64.powi(58) {
            return Ok(());
        }
        Err(ConfigError::TooLarge { layers: self.layers, width, len })
    }

    /// Shape of one attention call at length `len`.
    pub fn shape(&self, batch: usize, len: usize, causal: bool) -> Shape {
        Shape {
            batch,
            heads: self.heads,
            head_dim: self.head_dim(),
            width: self.width,
            queries: len,
            keys: len,
            causal,
            cls: false,
            grid: None,
        }
    }
}

fn positive(sizes: &[(&'static str, usize)]) -> Result<(), ConfigError> {
    match sizes.iter().find(|(_, size)| *size == 0) {
        Some((what, _)) => Err(ConfigError::Zero { what }),
        None => Ok(()),
    }
}

impl ClassifierConfig {
    /// Positions that the layers see of a document of length `len`.
    pub const fn positions(&self, len: usize) -> usize {
        if matches!(self.pooling, Pooling::ClsVector) { len + 1 } else { len }
    }

    /// # Errors
    /// Sizes that no model has, and what the mechanism cannot do.
    pub fn validate(&self) -> Result<(), ConfigError> {
        self.backbone.validate()?;
        positive(&[
            ("the vocabulary", self.vocab),
            ("the length", self.max_len),
            ("the number of classes", self.classes),
        ])?;
        if !(1..=2).contains(&self.towers) {
            return Err(ConfigError::Towers(self.towers));
        }
        self.backbone.countable(self.max_len, &self.knobs)?;
        let mechanism = self.entry.name;
        if !self.entry.support.bidirectional {
            let (what, instead) = ("bidirectional form", "it only serves language models");
            return Err(ConfigError::Unsupported { mechanism, what, instead });
        }
        if self.pooling == Pooling::ClsLastLayer && !self.entry.support.cls {
            let (what, instead) = ("class token in the last layer", "choose cls-front or mean pooling");
            return Err(ConfigError::Unsupported { mechanism, what, instead });
        }
        let mut shape = self.backbone.shape(1, self.positions(self.max_len), false);
        shape.cls = self.pooling == Pooling::ClsLastLayer;
        self.entry.admits(&self.knobs, &shape).map_err(|reason| ConfigError::Knobs { mechanism, reason })
    }
}
