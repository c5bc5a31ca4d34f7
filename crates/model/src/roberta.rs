//! RoBERTa's encoder around any bidirectional mechanism, with the head of a masked language model or of a classifier
//! (`SPEC-text.md` section 5), under the parameter names of the public checkpoints.
//!
//! ```text
//! x = LN(word[id] + position[pid] + type[0]),  pid = 1 + number of words so far that are not padding; padding: 1
//! layer: x <- LN(x + dense(attention(x)));  x <- LN(x + dense(GELU(dense(x))))
//! masked: LN(GELU(dense(x))) word^T + bias at the chosen positions
//! class:  out_proj(tanh(dense(x at position 0)))
//! ```

use candle_core::{Error, Result, Tensor, bail};

use super::layer::ForwardArgs;
use super::layer::linear_specs;
use super::{Backbone, ConfigError, positive};
use crate::attention::knobs::Knobs;
use crate::attention::{self, AttentionInput, Mechanism, MechanismEntry, Needs};
use crate::nn::dropout::Dropout;
use crate::nn::params::{Init, ParamBuilder, ParamGroup, ParamSpec};
use effattn_kernel::activation::gelu;
use effattn_kernel::block::{self, Projection};
use effattn_kernel::embedding::PADDING;
use effattn_kernel::embedding::embedding;
use effattn_kernel::heads::{PackedLayout, Qkv};
use effattn_kernel::kept_rows::KeptRows;
use effattn_kernel::linear::linear;
use effattn_kernel::norm::layer_norm;

/// What stands on the encoder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Top {
    /// Words at masked positions.
    Masked,
    /// So many classes of whole inputs.
    Classes(usize),
}

/// An encoder around one variant of a mechanism.
#[derive(Clone)]
pub struct RobertaConfig {
    /// The mechanism.
    pub entry: &'static MechanismEntry,
    /// Its settings.
    pub knobs: Knobs,
    /// Sizes and dropout.
    pub backbone: Backbone,
    /// Number of ids.
    pub vocab: usize,
    /// Most words of an input.
    pub positions: usize,
    /// Epsilon of every LayerNorm outside the mechanism.
    pub eps: f64,
    /// The head.
    pub top: Top,
}

impl RobertaConfig {
    /// # Errors
    /// Sizes that no model has, and what the mechanism cannot do.
    pub fn validate(&self) -> std::result::Result<(), ConfigError> {
        self.backbone.validate()?;
        let classes = match self.top {
            Top::Masked => 1,
            Top::Classes(classes) => classes,
        };
        let vocab = self.vocab.saturating_sub(PADDING as usize + 1);
        positive(&[
            ("the vocabulary", vocab),
            ("the length", self.positions),
            ("the number of classes", classes),
        ])?;
        self.backbone.countable(self.positions, &self.knobs)?;
        let mechanism = self.entry.name;
        if !self.entry.support.bidirectional {
            let (what, instead) = ("bidirectional form", "it only serves language models");
            return Err(ConfigError::Unsupported { mechanism, what, instead });
        }
        let needs = (self.entry.needs)(&self.knobs);
        if let Some(what) = needs.beyond_plain(self.backbone.heads, self.backbone.head_dim()) {
            return Err(ConfigError::Unsupported {
                mechanism,
                what,
                instead: "choose a classifier's preset",
            });
        }
        let shape = self.backbone.shape(1, self.positions, false);
        (self.entry.validate)(&self.knobs, &shape).map_err(|reason| ConfigError::Knobs { mechanism, reason })
    }
}

/// Every weight N(0, 0.02^2), biases 0, gains 1, the row of padding 0 (Hugging Face's start).
fn init(spec: &ParamSpec) -> Init {
    let norm =
        spec.name.contains("LayerNorm") || spec.name.contains("layer_norm") || spec.name.contains("ln_");
    match (spec.name.ends_with(".weight"), spec.shape.len()) {
        (true, 1) if norm => Init::ONE,
        (true, 2) if spec.name.contains("word_embeddings") || spec.name.contains("position_embeddings") => {
            Init::NormalZeroRow { std: 0.02, row: PADDING as usize }
        }
        (true, 2) => Init::normal(0.02),
        _ if spec.name.ends_with("bias") => Init::ZERO,
        _ => spec.init,
    }
}

/// A LayerNorm.
struct Norm {
    weight: Tensor,
    bias: Tensor,
    eps: f64,
}

impl Norm {
    fn new(builder: &ParamBuilder, name: &str, width: usize, eps: f64) -> Result<Self> {
        let param = |part: &str, init| builder.param(&format!("{name}.{part}"), &[width], init);
        Ok(Self { weight: param("weight", Init::ONE)?, bias: param("bias", Init::ZERO)?, eps })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        layer_norm(x, &self.weight, &self.bias, self.eps)
    }
}

/// A linear layer with bias.
struct Dense(ParamGroup);

impl Dense {
    fn new(builder: &ParamBuilder, name: &str, out: usize, width: usize) -> Result<Self> {
        Ok(Self(builder.group(&linear_specs(&[name], out, width, true))?))
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        linear(x, &self.0.part(0)?, Some(&self.0.part(1)?))
    }

    /// x + dropout(dense(y)).
    fn onto(&self, y: &Tensor, x: &Tensor, dropout: Dropout) -> Result<Tensor> {
        if dropout.is_none() {
            block::output(y, x, &self.0, None)
        } else {
            x + dropout.apply(&self.forward(y)?, 0)?
        }
    }
}

/// One post-norm layer.
struct Layer {
    mechanism: Box<dyn Mechanism>,
    needs: Needs,
    heads: usize,
    projection: ParamGroup,
    global: Option<ParamGroup>,
    attention: Dense,
    attention_norm: Norm,
    inner: Dense,
    outer: Dense,
    norm: Norm,
}

/// The public name of one of our projections.
fn public_name(name: &str) -> String {
    let (part, global) = name.trim_start_matches("attn.").split_at(1);
    let word = match part {
        "q" => "query",
        "k" => "key",
        _ => "value",
    };
    format!("attention.self.{word}{global}")
}

impl Layer {
    fn new(config: &RobertaConfig, layer: usize, builder: &ParamBuilder) -> Result<Self> {
        let Backbone { width, heads, inner, ffn, .. } = config.backbone;
        let needs = (config.entry.needs)(&config.knobs);
        let projections = |names: &[&str]| {
            let names: Vec<String> = names.iter().map(|name| public_name(name)).collect();
            let names: Vec<&str> = names.iter().map(String::as_str).collect();
            builder.group(&linear_specs(&names, inner, width, true))
        };
        let read: Vec<String> = needs.projections.read().map(|(name, _)| format!("attn.{name}")).collect();
        let projection = projections(&read.iter().map(String::as_str).collect::<Vec<_>>())?;
        let global = needs
            .global
            .then(|| projections(&["attn.q_global", "attn.k_global", "attn.v_global"]))
            .transpose()?;
        let mechanism = attention::observe::build(
            config.entry,
            &attention::MechanismConfig {
                knobs: config.knobs.clone(),
                heads,
                head_dim: config.backbone.head_dim(),
                width,
                max_len: config.positions,
                causal: false,
                layer,
            },
            &builder.pp(format!("attention.self.{}", config.entry.name)),
        )?;
        Ok(Self {
            mechanism,
            needs,
            heads,
            projection,
            global,
            attention: Dense::new(builder, "attention.output.dense", width, inner)?,
            attention_norm: Norm::new(builder, "attention.output.LayerNorm", width, config.eps)?,
            inner: Dense::new(builder, "intermediate.dense", ffn, width)?,
            outer: Dense::new(builder, "output.dense", width, ffn)?,
            norm: Norm::new(builder, "output.LayerNorm", width, config.eps)?,
        })
    }

    fn project(
        &self,
        x: &Tensor,
        group: &ParamGroup,
        parts: PackedLayout,
        call: &ForwardArgs,
    ) -> Result<Qkv> {
        let spec = Projection { norm: false, outputs: parts.count, bias: true };
        let rows = call.unpack(block::project(x, group, spec, false)?)?;
        Ok(Qkv::Packed { rows, heads: self.heads, parts })
    }

    fn forward(&self, x: &Tensor, call: &ForwardArgs) -> Result<Tensor> {
        let qkv = self.project(x, &self.projection, self.needs.projections.layout(), call)?;
        let global = self.global.as_ref().map(|group| self.project(x, group, PackedLayout::QKV, call));
        let global = global.transpose()?;
        let wide = if self.needs.x { Some(call.unpack(x.clone())?) } else { None };
        let input = AttentionInput {
            x: wide.as_ref(),
            mask: call.mask,
            global: global.as_ref(),
            dropout: call.dropout.branch(0).weights(1)?,
            ..AttentionInput::new(&qkv)
        };
        let attended = call.behind(self.mechanism.forward(&input)?.out.merged()?)?;
        let (x, dropout) = (call.residual_behind(x.clone())?, call.dropout_behind());
        let x = self.attention_norm.forward(&self.attention.onto(&attended, &x, dropout.branch(0))?)?;
        let hidden = gelu(&self.inner.forward(&x)?)?;
        self.norm.forward(&self.outer.onto(&hidden, &x, dropout.branch(1))?)
    }
}

/// The head of a masked language model, or of a classifier.
enum Head {
    Masked { dense: Dense, norm: Norm, bias: Tensor },
    Classes { dense: Dense, out: Dense },
}

/// Ids to logits of masked words or of classes.
pub struct Roberta {
    words: Tensor,     // [vocab, width]
    positions: Tensor, // [positions + 2, width]
    kind: Tensor,      // [1, width]
    norm: Norm,
    layers: Vec<Layer>,
    head: Head,
    config: RobertaConfig,
}

impl Roberta {
    /// Parameters under the names of the public checkpoints.
    pub fn new(config: &RobertaConfig, builder: &ParamBuilder) -> Result<Self> {
        config.validate().map_err(Error::wrap)?;
        let builder = builder.with_init(init);
        let (width, vocab) = (config.backbone.width, config.vocab);
        let below = builder.pp("roberta.embeddings");
        let table =
            |name: &str, rows| below.param(&format!("{name}.weight"), &[rows, width], Init::normal(0.02));
        let words = table("word_embeddings", vocab)?;
        let positions = table("position_embeddings", config.positions + 2)?;
        let kind = table("token_type_embeddings", 1)?;
        let norm = Norm::new(&below, "LayerNorm", width, config.eps)?;
        let layer = |layer| Layer::new(config, layer, &builder.pp(format!("roberta.encoder.layer.{layer}")));
        let layers = (0..config.backbone.layers).map(layer).collect::<Result<_>>()?;
        let head = match config.top {
            Top::Masked => Head::Masked {
                dense: Dense::new(&builder, "lm_head.dense", width, width)?,
                norm: Norm::new(&builder, "lm_head.layer_norm", width, config.eps)?,
                bias: builder.param("lm_head.bias", &[vocab], Init::ZERO)?,
            },
            Top::Classes(classes) => Head::Classes {
                dense: Dense::new(&builder, "classifier.dense", width, width)?,
                out: Dense::new(&builder, "classifier.out_proj", classes, width)?,
            },
        };
        Ok(Self { words, positions, kind, norm, layers, head, config: config.clone() })
    }

    /// What it was built for.
    pub fn config(&self) -> &RobertaConfig {
        &self.config
    }

    /// `ids` [b, n] (u32) to the last layer's output [b, n, width]; padding is not seen.
    pub fn encode(&self, ids: &Tensor, dropout: Dropout) -> Result<Tensor> {
        self.run(ids, dropout, None, |_| ())
    }

    /// Some `rows` of [`Self::encode`]: [rows, width]. Others are not computed behind the last attention, nor is padding.
    pub fn encode_at(&self, ids: &Tensor, rows: &KeptRows, dropout: Dropout) -> Result<Tensor> {
        if rows.rows().is_empty() || self.config.backbone.whole_last_layer {
            let hidden = self.encode(ids, dropout)?.flatten_to(1)?;
            return embedding(&Tensor::new(rows.rows(), ids.device())?, &hidden);
        }
        self.run(ids, dropout, Some(rows), |_| ())?.squeeze(0)
    }

    /// [`Self::encode`] without dropout: the input of every layer, then the output of the last.
    pub fn trace(&self, ids: &Tensor) -> Result<Vec<Tensor>> {
        super::traced(|see| self.run(ids, Dropout::NONE, None, see))
    }

    /// All rows [b, n, width], or of `only` [1, rows, width].
    fn run(
        &self,
        ids: &Tensor,
        dropout: Dropout,
        only: Option<&KeptRows>,
        mut see: impl FnMut(&Tensor),
    ) -> Result<Tensor> {
        let (b, n) = ids.dims2()?;
        if n > self.config.positions {
            bail!(
                "{n} words do not fit {} positions; build the model for that length",
                self.config.positions
            );
        }
        let rows = ids.to_vec2::<u32>()?;
        let keep = |id: &u32| *id != PADDING;
        let places: Vec<u32> = rows.iter().flat_map(|row| position_ids(row)).collect();
        let places = Tensor::from_vec(places, (b, n), ids.device())?;
        let mask = if rows.iter().flatten().all(keep) {
            None
        } else {
            let mask: Vec<f32> = rows.iter().flatten().map(|id| f32::from(u8::from(keep(id)))).collect();
            Some(Tensor::from_vec(mask, (b, n), ids.device())?)
        };
        let sum = (embedding(ids, &self.words)? + embedding(&places, &self.positions)?)?;
        let kept = match (&mask, only) {
            (Some(mask), Some(only)) => KeptRows::of(mask)?.filter(|kept| kept.holds(only)),
            _ => None,
        };
        let kept = kept.as_ref();
        let sum = kept.map_or(Ok(sum.clone()), |kept| kept.pack(&sum))?;
        let x = self.norm.forward(&sum.broadcast_add(&self.kind)?)?;
        let mut x = dropout.of_rows(kept).apply(&x, 0)?;
        for (number, layer) in self.layers.iter().enumerate() {
            see(&x);
            let only = only.filter(|_| number + 1 == self.layers.len());
            let dropout = dropout.branch(2 + number as u64);
            x = layer.forward(
                &x,
                &ForwardArgs { mask: mask.as_ref(), kept, only, dropout, ..ForwardArgs::default() },
            )?;
        }
        Ok(x)
    }

    /// Logits of the words at some places from the encoder's `rows` there, [places, width] to [places, vocab].
    pub fn masked_logits(&self, rows: &Tensor) -> Result<Tensor> {
        let Head::Masked { dense, norm, bias } = &self.head else {
            bail!("this model has the head of a classifier, not of a masked language model");
        };
        linear(&norm.forward(&gelu(&dense.forward(rows)?)?)?, &self.words, Some(bias))
    }

    /// Logits of the classes [b, classes] from the encoder's first rows [b, width].
    pub fn class_logits(&self, first: &Tensor, dropout: Dropout) -> Result<Tensor> {
        let Head::Classes { dense, out } = &self.head else {
            bail!("this model has the head of a masked language model, not of a classifier");
        };
        let pooled = dense.forward(&dropout.apply(first, 0)?)?.tanh()?;
        out.forward(&dropout.apply(&pooled, 1)?)
    }
}

/// 1 + the number of words up to and with each that are not padding; padding is at 1.
fn position_ids(row: &[u32]) -> impl Iterator<Item = u32> + '_ {
    row.iter().scan(1, |last, &id| {
        *last += u32::from(id != PADDING);
        Some(if id == PADDING { 1 } else { *last })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn positions_skip_padding() {
        let ids: Vec<u32> = position_ids(&[0, 5, 1, 7, 1]).collect();
        assert_eq!(ids, [2, 3, 1, 4, 1]);
    }

    #[test]
    fn public_names() {
        assert_eq!(public_name("attn.q"), "attention.self.query");
        assert_eq!(public_name("attn.v_global"), "attention.self.value_global");
    }

    #[test]
    fn rows_that_are_read_have_the_values_and_gradients_of_all_rows() {
        let rows = [[0, 5, 6, 7, 8, 2, 1, 1, 1], [0, 9, 2, 1, 1, 1, 1, 1, 1]];
        let ids =
            Tensor::new(&rows, &candle_core::Device::Cpu).unwrap().to_dtype(candle_core::DType::U32).unwrap();
        for name in ["full", "cosformer", "ls", "longformer", "local"] {
            let entry = attention::find(name).unwrap();
            let config = RobertaConfig {
                entry,
                knobs: Knobs::defaults(entry.knobs),
                backbone: Backbone::new(2, 16, 2, 32),
                vocab: 12,
                positions: 9,
                eps: 1e-5,
                top: Top::Masked,
            };
            let builder = ParamBuilder::seeded(4, &candle_core::Device::Cpu, true);
            let model = Roberta::new(&config, &builder).unwrap();
            let params = builder.finish();
            for (dropout, places) in [(Dropout::NONE, &[1, 4, 10][..]), (Dropout::new(0.3, 2), &[0, 9])] {
                let some = model.encode_at(&ids, &KeptRows::at(2, 9, places.to_vec()), dropout).unwrap();
                let whole = model.encode(&ids, dropout).unwrap().flatten_to(1).unwrap();
                let whole =
                    embedding(&Tensor::new(places, &candle_core::Device::Cpu).unwrap(), &whole).unwrap();
                let numbers = |x: &Tensor| x.flatten_all().unwrap().to_vec1::<f32>().unwrap();
                let close = |a: &Tensor, b: &Tensor, what: &str| {
                    for (a, b) in numbers(a).iter().zip(numbers(b)) {
                        assert!((a - b).abs() < 1e-4 * b.abs().max(1.0), "{name} {what}: {a} {b}");
                    }
                };
                close(&some, &whole, "rows");
                let grads =
                    [&some, &whole].map(|x| x.powf(3.0).unwrap().sum_all().unwrap().backward().unwrap());
                let mut compared = 0;
                for name in params.names() {
                    if let [Ok(some), Ok(whole)] =
                        [&grads[0], &grads[1]].map(|grads| params.grad(grads, name))
                    {
                        close(&some, &whole, name);
                        compared += 1;
                    }
                }
                assert!(compared > 20, "{compared}");
            }
        }
    }

    #[test]
    fn roberta_base_has_the_published_number_of_parameters() {
        let entry = attention::find("full").unwrap();
        let config = RobertaConfig {
            entry,
            knobs: Knobs::defaults(entry.knobs),
            backbone: Backbone::new(12, 768, 12, 3072),
            vocab: 50_265,
            positions: 512,
            eps: 1e-5,
            top: Top::Masked,
        };
        let counting = ParamBuilder::counting();
        Roberta::new(&config, &counting).unwrap();
        assert_eq!(counting.finish().count(), 124_697_433);
    }
}
