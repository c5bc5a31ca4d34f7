//! Two towers: both documents through the same encoder, then [u, v, u*v, u-v] to the head
//! (`docs/spec/SPEC-models.md` section 3; Transformer-LS's and Nystromformer's retrieval models).

use candle_core::{Result, Tensor, bail};

use super::encoder::Encoder;
use super::{Backbone, ClassifierConfig};
use crate::nn::dropout::{Dropout, DropoutRng};
use crate::nn::head::Head;
use crate::nn::params::ParamBuilder;

/// Pairs of documents to logits.
pub struct Pair {
    encoder: Encoder,
    head: Head,
    backbone: Backbone,
}

/// One document of every example: ids [b, n] and mask [b, n] (absent keeps all).
#[derive(Clone, Copy)]
pub struct Document<'a> {
    /// Ids (u32).
    pub ids: &'a Tensor,
    /// 1 keep, 0 padding.
    pub mask: Option<&'a Tensor>,
}

/// What a pair of towers computes on the way; index 0 is the first document, 1 the second.
pub struct PairTrace {
    /// [b, classes].
    pub logits: Tensor,
    /// The pooled vectors [b, width].
    pub pooled: [Tensor; 2],
    /// The input of every layer [b, n, width].
    pub hidden: [Vec<Tensor>; 2],
}

impl Pair {
    /// Parameters of the encoder and `head.*`.
    pub fn new(config: &ClassifierConfig, builder: &ParamBuilder) -> Result<Self> {
        if config.towers != 2 {
            bail!("a pair model reads two documents per example, not {}", config.towers);
        }
        let encoder = Encoder::new(config, builder)?;
        let builder = config.backbone.init.apply(builder).pp("head");
        let head = Head::new(&builder, config.feature_width(), config.backbone.ffn, config.classes)?;
        Ok(Self { encoder, head, backbone: config.backbone.clone() })
    }

    /// Both documents to logits [b, classes].
    pub fn forward(&self, first: Document, second: Document) -> Result<Tensor> {
        self.forward_train(first, second, Dropout::NONE)
    }

    /// [`Self::forward`] with dropout, another one in each tower.
    pub fn forward_train(&self, first: Document, second: Document, dropout: Dropout) -> Result<Tensor> {
        let u = self.encoder.forward(first.ids, first.mask, dropout.branch(0))?;
        let v = self.encoder.forward(second.ids, second.mask, dropout.branch(1))?;
        self.decide(&u, &v)
    }

    /// [`Self::forward`] with what stands between.
    pub fn trace(&self, first: Document, second: Document) -> Result<PairTrace> {
        let (u, hidden_u) = self.encoder.trace(first.ids, first.mask)?;
        let (v, hidden_v) = self.encoder.trace(second.ids, second.mask)?;
        Ok(PairTrace { logits: self.decide(&u, &v)?, pooled: [u, v], hidden: [hidden_u, hidden_v] })
    }

    /// What a forward pass of training drops, drawn from `rng`.
    pub const fn drops(&self, rng: DropoutRng) -> Dropout<'static> {
        self.backbone.drops(rng)
    }

    fn decide(&self, u: &Tensor, v: &Tensor) -> Result<Tensor> {
        self.head.forward(&Tensor::cat(&[u, v, &(u * v)?, &(u - v)?], 1)?)
    }
}
