//! The pre-norm encoder classifier (`docs/spec/SPEC-models.md` section 3).
//!
//! ```text
//! X = token_embedding[ids] + position_embedding[0..n]
//! every layer: X <- X + Attn(LN(X));  X <- X + FFN(LN(X))
//! u = pooled LN(X);  logits = fc2(relu(fc1(u)))
//! ```

use candle_core::{DType, Error, Result, Tensor, bail};

use super::layer::{Block, BlockConfig, ForwardArgs};
use super::{Backbone, ClassifierConfig, InitScheme, Pooling};
use crate::nn::dropout::{Dropout, DropoutRng};
use crate::nn::embedding::Embedding;
use crate::nn::head::Head;
use crate::nn::params::{Init, ParamBuilder, ParamGroup, ParamSpec};
use effattn_kernel::kept_rows::KeptRows;
use effattn_kernel::norm;
use effattn_kernel::tape;

/// Documents to pooled vectors.
pub struct Encoder {
    embedding: Embedding,
    layers: Vec<Block>,
    norm: ParamGroup,       // [norm.weight, norm.bias]
    cls: Option<Tensor>,    // [width]
    stream: Option<Tensor>, // [rows, width]: the second stream in front of the first layer
    pooling: Pooling,
    /// Whether the last layer computes rows that pooling does not read.
    whole: bool,
    class_id: u32,
}

impl Encoder {
    /// Parameters `token_embedding`, `position_embedding`, `cls`, `stream` (of mechanisms with a second stream), `layers.<i>.*`,
    /// `norm`.
    pub fn new(config: &ClassifierConfig, builder: &ParamBuilder) -> Result<Self> {
        config.validate().map_err(Error::wrap)?;
        let backbone = &config.backbone;
        let builder = &backbone.init.apply(builder);
        let sizes = (config.vocab, config.positions(config.max_len), backbone.width);
        let embedding = Embedding::new(builder, sizes, backbone.positions)?;
        let cls = match config.pooling {
            Pooling::ClsLastLayer | Pooling::ClsVector => {
                Some(builder.param("cls", &[backbone.width], Init::ZERO)?)
            }
            Pooling::Mean | Pooling::ClsFront | Pooling::First => None,
        };
        let stream = (config.entry.needs)(&config.knobs).stream.map(|rows| {
            let std = (backbone.width as f64).powf(-0.5);
            builder.param("stream", &[rows, backbone.width], Init::normal(std))
        });
        let layers = (0..backbone.layers)
            .map(|layer| Block::new(&config.block(layer), &builder.pp(format!("layers.{layer}"))))
            .collect::<Result<_>>()?;
        let norm = builder.group(&[
            ParamSpec::new("norm.weight", &[backbone.width], Init::ONE),
            ParamSpec::new("norm.bias", &[backbone.width], Init::ZERO),
        ])?;
        let class_id = (config.vocab - 1) as u32;
        let (stream, pooling, whole) = (stream.transpose()?, config.pooling, backbone.whole_last_layer);
        Ok(Self { embedding, layers, norm, cls, stream, pooling, whole, class_id })
    }

    /// `ids` [b, n] (u32) and `mask` [b, n] (1 keep, 0 padding; absent keeps all) to pooled vectors [b, width].
    /// Dropout applies to the embeddings, to what attention adds, and in the feed-forward halves.
    pub fn forward(&self, ids: &Tensor, mask: Option<&Tensor>, dropout: Dropout) -> Result<Tensor> {
        self.run(ids, mask, dropout, Want::Pooled, |_| ())
    }

    /// The whole sequence [b, n, width] behind the last norm, of which [`Self::forward`] gives the pooled vector.
    pub fn sequence(&self, ids: &Tensor, mask: Option<&Tensor>, dropout: Dropout) -> Result<Tensor> {
        self.run(ids, mask, dropout, Want::Sequence, |_| ())
    }

    /// [`Self::forward`] without dropout, and the input of every layer [b, n, width].
    pub fn trace(&self, ids: &Tensor, mask: Option<&Tensor>) -> Result<(Tensor, Vec<Tensor>)> {
        let mut hidden = Vec::new();
        let pooled = self.run(ids, mask, Dropout::NONE, Want::PooledAndHidden, |x| hidden.push(x.clone()))?;
        Ok((pooled, hidden))
    }

    fn run(
        &self,
        ids: &Tensor,
        mask: Option<&Tensor>,
        dropout: Dropout,
        want: Want,
        mut see: impl FnMut(&Tensor),
    ) -> Result<Tensor> {
        let (b, n) = ids.dims2()?;
        if let Some(mask) = mask
            && mask.dims() != [b, n]
        {
            bail!("a mask of shape {:?} does not fit ids of shape {:?}", mask.dims(), ids.dims());
        }
        let (mut x, mask) = self.embed(ids, mask)?;
        let mask = mask.as_ref();
        let first = if self.pooling.reads_first_row() { Some(KeptRows::first(b, x.dim(1)?)) } else { None };
        let kept = match mask {
            Some(mask) if want == Want::Pooled => KeptRows::of(mask)?,
            _ => None,
        };
        let kept = kept.filter(|kept| first.as_ref().is_none_or(|first| kept.holds(first)));
        let kept = kept.as_ref();
        let only = first.as_ref().filter(|_| want == Want::Pooled && !self.whole);
        if let Some(kept) = kept {
            x = kept.pack(&x)?;
        }
        x = dropout.of_rows(kept).apply(&x, 0)?;
        let call = |layer| {
            let dropout = dropout.branch(1 + layer as u64);
            ForwardArgs { mask, kept, dropout, ..ForwardArgs::default() }
        };
        let mut stream = self.stream.as_ref().map(|rows| rows.unsqueeze(0)?.repeat((b, 1, 1))).transpose()?;
        let Some((last, layers)) = self.layers.split_last() else { bail!("a model without layers") };
        for (number, layer) in layers.iter().enumerate() {
            see(&x);
            x = advance(layer, &x, &mut stream, &call(number))?;
        }
        see(&x);
        let call = &call(layers.len());
        let cls = self.cls.as_ref().filter(|_| self.pooling == Pooling::ClsLastLayer);
        match cls {
            Some(_) if want == Want::Sequence => bail!(
                "pooling {} computes no sequence in the last layer; choose mean, first, cls-front or cls-vector",
                self.pooling.name()
            ),
            Some(cls) => {
                let cls = cls.reshape((1, 1, cls.elem_count()))?.repeat((b, 1, 1))?;
                self.normalise(&last.forward_cls(&x, &cls, call)?)?.squeeze(1)
            }
            None => {
                let x = advance(last, &x, &mut stream, &ForwardArgs { only, ..*call })?;
                match want {
                    Want::Sequence => self.normalise(&x),
                    _ if only.is_some() => self.normalise(&x)?.squeeze(0),
                    _ => self.pool(x, mask, kept),
                }
            }
        }
    }

    /// The embedded positions [b, n, width] and their mask, with the class in front where pooling says so.
    fn embed(&self, ids: &Tensor, mask: Option<&Tensor>) -> Result<(Tensor, Option<Tensor>)> {
        let (b, n) = ids.dims2()?;
        let seen = |kept: usize| {
            let mask = mask.map(|mask| {
                let one = Tensor::ones((b, 1), mask.dtype(), mask.device())?;
                Tensor::cat(&[&one, &mask.narrow(1, 0, kept)?], 1)
            });
            mask.transpose()
        };
        match (self.pooling, &self.cls) {
            (Pooling::ClsFront, _) => {
                let class = Tensor::full(self.class_id, (b, 1), ids.device())?;
                let ids = Tensor::cat(&[&class, &ids.narrow(1, 0, n - 1)?], 1)?;
                Ok((self.embedding.forward(&ids)?, seen(n - 1)?))
            }
            (Pooling::ClsVector, Some(cls)) => Ok((self.embedding.behind(cls, ids)?, seen(n)?)),
            _ => Ok((self.embedding.forward(ids)?, mask.cloned())),
        }
    }

    fn pool(&self, x: Tensor, mask: Option<&Tensor>, kept: Option<&KeptRows>) -> Result<Tensor> {
        let unpack = |x: Tensor| kept.map_or(Ok(x.clone()), |kept| kept.unpack(&x));
        if self.pooling != Pooling::Mean {
            let x = unpack(x)?;
            // the gradient of a selection takes half of the memory that the one of a narrowed tensor takes in candle
            let first = Tensor::zeros(1, DType::U32, x.device())?;
            return self.normalise(&x.index_select(&first, 1)?)?.squeeze(1);
        }
        let x = unpack(self.normalise(&x)?)?;
        let (b, n, _) = x.dims3()?;
        // a product, because candle's sum over an inner dimension runs on one thread
        let weights = match mask {
            Some(mask) => (mask.to_dtype(DType::F32)? / n as f64)?.unsqueeze(1)?,
            None => Tensor::full(1.0 / n as f32, (b, 1, n), x.device())?,
        };
        weights.matmul(&x)?.squeeze(1)
    }

    fn normalise(&self, x: &Tensor) -> Result<Tensor> {
        norm::layer_norm(x, &self.norm.part(0)?, &self.norm.part(1)?, norm::EPS)
    }
}

/// What a forward pass is for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Want {
    Pooled,
    PooledAndHidden,
    Sequence,
}

/// One layer, on the second stream too where there is one.
fn advance(layer: &Block, x: &Tensor, stream: &mut Option<Tensor>, call: &ForwardArgs) -> Result<Tensor> {
    match stream {
        Some(rows) => {
            let (x, next) = layer.forward_with_stream(x, rows, call)?;
            *rows = next;
            Ok(x)
        }
        None => tape::with_bf16_activations(&[x], || layer.forward(x, call)),
    }
}

impl ClassifierConfig {
    /// What block `layer` is built for.
    pub fn block(&self, layer: usize) -> BlockConfig {
        BlockConfig {
            causal: false,
            ..self.backbone.block(self.entry, &self.knobs, layer, self.positions(self.max_len))
        }
    }
}

impl InitScheme {
    /// The builder whose parameters start this way.
    pub(super) fn apply(self, builder: &ParamBuilder) -> ParamBuilder {
        match self {
            Self::Torch => builder.clone(),
            Self::Flax => builder.with_init(flax),
        }
    }
}

/// The Long Range Arena's starts: Xavier for projections and the feed-forward half, LeCun normal for the
/// head, N(0, 1) for tokens, N(0, 1e-6^2) for biases of the feed-forward half, 0 for other biases.
fn flax(spec: &ParamSpec) -> Init {
    let name = spec.name.as_str();
    let fan = |shape: &[usize]| (shape.get(1).copied().unwrap_or(1), shape[0]);
    match (name, spec.shape.len()) {
        ("token_embedding.weight", _) => Init::normal(1.0),
        ("fc1.weight" | "fc2.weight", 2) => Init::normal(1.0 / (fan(&spec.shape).0 as f64).sqrt()),
        ("ffn.fc1.bias" | "ffn.fc2.bias", _) => Init::normal(1e-6),
        _ if name.starts_with("attn.") || name.starts_with("ffn.") => match spec.shape.as_slice() {
            [out, width] => Init::xavier(*width, *out),
            _ => Init::ZERO,
        },
        ("fc1.bias" | "fc2.bias", _) => Init::ZERO,
        _ => spec.init,
    }
}

/// Documents to logits.
pub struct Classifier {
    encoder: Encoder,
    head: Head,
    classes: usize,
    backbone: Backbone,
}

/// What a classifier computes on the way.
pub struct Trace {
    /// [b, classes].
    pub logits: Tensor,
    /// The pooled vectors [b, width].
    pub pooled: Tensor,
    /// The input of every layer [b, n, width].
    pub hidden: Vec<Tensor>,
}

impl Classifier {
    /// Parameters of the encoder and `head.*`.
    pub fn new(config: &ClassifierConfig, builder: &ParamBuilder) -> Result<Self> {
        if config.towers != 1 {
            bail!("a classifier reads one document per example, not {}", config.towers);
        }
        let encoder = Encoder::new(config, builder)?;
        let backbone = &config.backbone;
        let builder = backbone.init.apply(builder).pp("head");
        let head = Head::new(&builder, backbone.width, backbone.ffn, config.classes)?;
        Ok(Self { encoder, head, classes: config.classes, backbone: backbone.clone() })
    }

    /// `ids` [b, n] (u32) and `mask` [b, n] (1 keep, 0 padding; absent keeps all) to logits [b, classes].
    pub fn forward(&self, ids: &Tensor, mask: Option<&Tensor>) -> Result<Tensor> {
        self.forward_train(ids, mask, Dropout::NONE)
    }

    /// [`Self::forward`] with dropout.
    pub fn forward_train(&self, ids: &Tensor, mask: Option<&Tensor>, dropout: Dropout) -> Result<Tensor> {
        self.head.forward(&self.encoder.forward(ids, mask, dropout)?)
    }

    /// [`Self::forward_train`] of all rows in all layers.
    #[cfg(test)]
    pub(super) fn forward_whole(
        &self,
        ids: &Tensor,
        mask: Option<&Tensor>,
        dropout: Dropout,
    ) -> Result<Tensor> {
        self.head.forward(&self.encoder.run(ids, mask, dropout, Want::PooledAndHidden, |_| ())?)
    }

    /// [`Self::forward`], with what stands between.
    pub fn trace(&self, ids: &Tensor, mask: Option<&Tensor>) -> Result<Trace> {
        let (pooled, hidden) = self.encoder.trace(ids, mask)?;
        Ok(Trace { logits: self.head.forward(&pooled)?, pooled, hidden })
    }

    /// Number of classes.
    pub fn classes(&self) -> usize {
        self.classes
    }

    /// What a forward pass of training drops, drawn from `rng`.
    pub const fn drops(&self, rng: DropoutRng) -> Dropout<'static> {
        self.backbone.drops(rng)
    }
}
