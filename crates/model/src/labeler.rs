//! Causal models of labels at some positions: recall and state tracking (the models of Zoology, Arora et al. 2023, and of Grazzi et
//! al. 2024).
//!
//! ```text
//! x = token_embedding[ids]
//! mixer:     x <- x + mixer(LN(x)), and with a feed-forward half x <- x + FFN(LN(x))
//! shortconv: u = LN(x);  x <- x + conv(u) * (W u + b) + u, conv causal over 3 positions, every channel alone
//! echo:      behind either, x <- x + LN(x) (Zoology's code adds its identity in the place of a feed-forward half)
//! logits = LN(x) token_embedding^T, or LN(x) out^T, at the labelled positions only; with a reader x is decoded from the last
//!          position's vector there
//! ```

use std::cell::RefCell;

use candle_core::{Error, Result, Tensor};

use crate::attention::MechanismEntry;
use crate::attention::decode::DecodeState;
use crate::attention::knobs::Knobs;
use crate::layer::{Block, BlockConfig, BlockStyle, ForwardArgs, RotaryForm};
use crate::nn::dropout::Dropout;
use crate::nn::norm::{Norm, NormForm, RmsNorm};
use crate::nn::params::{Init, ParamBuilder, ParamSpec};
use crate::nn::position_reader::PositionReader;
use crate::nn::short_conv::{ConvForm, ConvPast, ShortConv};
use crate::{Backbone, ConfigError, positive};
use effattn_kernel::embedding::embedding;
use effattn_kernel::linear::linear;
use effattn_kernel::norm::EPS;

/// Taps of the short convolution.
pub const TAPS: usize = 3;

/// What one layer does.
#[derive(Clone)]
pub enum LayerForm {
    /// A gated convolution over the last positions (BaseConv).
    ShortConv,
    /// A mechanism with its settings.
    Mixer(&'static MechanismEntry, Knobs),
}

/// How weights start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Drawn {
    /// Zoology's small normal weights.
    Zoology,
    /// PyTorch's defaults.
    Torch,
}

/// A model of labels at positions.
#[derive(Clone)]
pub struct LabelerConfig {
    /// Its layers, from the first.
    pub layers: Vec<LayerForm>,
    /// Sizes and dropout. An `ffn` of 0: there are no feed-forward halves.
    pub backbone: Backbone,
    /// Number of token ids, which labels are too.
    pub vocab: usize,
    /// Longest sequence.
    pub max_len: usize,
    /// Whether x + LN(x) follows every layer.
    pub echo: bool,
    /// Whether the embedding is the output layer too.
    pub tied: bool,
    /// Whether only the embedded tokens are dropped, and nothing later.
    pub embedding_dropout_only: bool,
    /// Start of the weights.
    pub drawn: Drawn,
    /// Norm of the blocks and in front of the head; short convolutions have LayerNorm.
    pub norm: NormForm,
    /// Rotation of queries and keys, for mechanisms that leave it to the block.
    pub rotary: Option<RotaryForm>,
    /// Whether the labels of all positions are read from the last position's vector.
    pub read_at_end: bool,
}

impl LayerForm {
    /// The name of a short convolution in lists of layers.
    pub const SHORT_CONV: &'static str = "shortconv";
    /// The name of the mechanism that a model is about in lists of layers.
    pub const MIXER: &'static str = "mixer";
}

impl LabelerConfig {
    /// What the block of layer `number` is built for; nothing for a short convolution.
    pub fn block(&self, number: usize) -> Option<BlockConfig> {
        let LayerForm::Mixer(entry, knobs) = &self.layers[number] else { return None };
        Some(BlockConfig {
            style: BlockStyle { norm: self.norm, rotary: self.rotary, ..BlockStyle::default() },
            ..self.backbone.block(entry, knobs, number, self.max_len)
        })
    }

    /// # Errors
    /// Sizes that no model has, and what a mechanism cannot do.
    pub fn validate(&self) -> std::result::Result<(), ConfigError> {
        let ffn = self.backbone.ffn.max(1); // 0: there are none
        Backbone { ffn, ..self.backbone.clone() }.validate()?;
        positive(&[("the vocabulary", self.vocab), ("the length", self.max_len)])?;
        for form in &self.layers {
            let LayerForm::Mixer(entry, knobs) = form else { continue };
            self.backbone.countable(self.max_len, knobs)?;
            let mechanism = entry.name;
            if !entry.support.causal {
                let (what, instead) = ("causal form", "choose a causal mechanism");
                return Err(ConfigError::Unsupported { mechanism, what, instead });
            }
            let shape = self.backbone.shape(1, self.max_len, true);
            entry.admits(knobs, &shape).map_err(|reason| ConfigError::Knobs { mechanism, reason })?;
        }
        Ok(())
    }
}

/// conv(u) * (W u + b) + u, u = LN(x), with its residual (BaseConv).
struct BaseConv {
    norm: Norm,
    conv: ShortConv,
    weight: Tensor, // [width, width]
    bias: Tensor,   // [width]
}

impl BaseConv {
    /// Parameters `norm1.*`, `conv.*`, `gate.*` below `builder`.
    fn new(builder: &ParamBuilder, width: usize) -> Result<Self> {
        let form = ConvForm { taps: TAPS, bias: true, silu: false };
        Ok(Self {
            norm: Norm::new(builder, "norm1", width, EPS)?,
            conv: ShortConv::new(&[("conv".to_owned(), width)], form, builder)?,
            weight: builder.param("gate.weight", &[width, width], Init::fan_in(width))?,
            bias: builder.param("gate.bias", &[width], Init::fan_in(width))?,
        })
    }

    /// `x` [b, n, width] to the same shape; `past` where one token comes after another.
    fn forward(&self, x: &Tensor, past: Option<&RefCell<ConvPast>>) -> Result<Tensor> {
        let u = self.norm.forward(x)?;
        let convolved = match past {
            Some(past) => self.conv.step(&u, 0..1, &mut past.borrow_mut())?,
            None => self.conv.forward(&u, 0..1, None)?,
        };
        let gated = (convolved * linear(&u, &self.weight, Some(&self.bias))?)?;
        (x + gated)? + u
    }
}

enum Mixing {
    Conv(BaseConv),
    Block(Box<Block>),
}

struct Layer {
    mixing: Mixing,
    echo: Option<Norm>,
}

impl Layer {
    fn new(config: &LabelerConfig, number: usize, builder: &ParamBuilder) -> Result<Self> {
        let width = config.backbone.width;
        let mixing = match config.block(number) {
            Some(block) => Mixing::Block(Box::new(Block::new(&block, builder)?)),
            None => Mixing::Conv(BaseConv::new(builder, width)?),
        };
        let echo = config.echo.then(|| Norm::new(builder, "norm2", width, EPS)).transpose()?;
        Ok(Self { mixing, echo })
    }

    fn finish(&self, x: Tensor) -> Result<Tensor> {
        match &self.echo {
            Some(norm) => &x + norm.forward(&x)?,
            None => Ok(x),
        }
    }

    fn forward(&self, x: &Tensor, dropout: Dropout) -> Result<Tensor> {
        let x = match &self.mixing {
            Mixing::Conv(conv) => conv.forward(x, None)?,
            Mixing::Block(block) => block.forward(x, &ForwardArgs { dropout, ..ForwardArgs::default() })?,
        };
        self.finish(x)
    }
}

/// What a layer carries from token to token.
pub enum LayerState {
    /// The last inputs of the short convolution.
    Conv(RefCell<ConvPast>),
    /// The mechanism's state.
    Mixer(Box<dyn DecodeState>),
}

/// The norm in front of the head.
enum LastNorm {
    Layer(Norm),
    Rms(RmsNorm),
}

impl LastNorm {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        match self {
            Self::Layer(norm) => norm.forward(x),
            Self::Rms(norm) => norm.forward(x),
        }
    }
}

/// Tokens to logits at labelled positions.
pub struct Labeler {
    tokens: Tensor, // [vocab, width]
    layers: Vec<Layer>,
    norm: LastNorm,
    /// [vocab, width], where it is not the embedding.
    out: Option<Tensor>,
    /// Reads all positions from the last one.
    reader: Option<PositionReader>,
    config: LabelerConfig,
}

/// Linear weights of projections and embeddings N(0, 0.02^2), output projections N(0, 0.01^2), biases 0; what a mechanism adds as it
/// says (Zoology).
fn zoology_init(spec: &ParamSpec) -> Init {
    match spec.name.as_str() {
        "attn.q.weight" | "attn.k.weight" | "attn.v.weight" | "gate.weight" => Init::normal(0.02),
        "attn.o.weight" => Init::normal(0.01),
        "gate.bias" => Init::ZERO,
        _ => spec.init,
    }
}

impl Labeler {
    /// Parameters `token_embedding.weight`, `layers.<i>.*`, `norm.*`, where the head is not tied `out.weight`, and those of the
    /// [`PositionReader`] where there is one.
    pub fn new(config: &LabelerConfig, builder: &ParamBuilder) -> Result<Self> {
        config.validate().map_err(Error::wrap)?;
        let builder = match config.drawn {
            Drawn::Zoology => builder.with_init(zoology_init),
            Drawn::Torch => builder.clone(),
        };
        let (vocab, width) = (config.vocab, config.backbone.width);
        let table = |name: &str| builder.param(name, &[vocab, width], Init::normal(0.02));
        let tokens = table("token_embedding.weight")?;
        let layer = |number| Layer::new(config, number, &builder.pp(format!("layers.{number}")));
        let layers = (0..config.layers.len()).map(layer).collect::<Result<_>>()?;
        let norm = match config.norm {
            NormForm::Layer => LastNorm::Layer(Norm::new(&builder, "norm", width, EPS)?),
            NormForm::Rms { eps } => LastNorm::Rms(RmsNorm::new(&builder, "norm", width, eps)?),
        };
        let out = (!config.tied).then(|| table("out.weight")).transpose()?;
        let reader = config.read_at_end.then(|| PositionReader::new(&builder, config.max_len, width));
        Ok(Self { tokens, layers, norm, out, reader: reader.transpose()?, config: config.clone() })
    }

    /// What it was built for.
    pub fn config(&self) -> &LabelerConfig {
        &self.config
    }

    /// `ids` [b, n] (u32) to the last layer's output [b, n, width].
    pub fn hidden(&self, ids: &Tensor, dropout: Dropout) -> Result<Tensor> {
        let mut x = dropout.apply(&embedding(ids, &self.tokens)?, 0)?;
        let within = if self.config.embedding_dropout_only { Dropout::NONE } else { dropout };
        for (number, layer) in self.layers.iter().enumerate() {
            x = layer.forward(&x, within.branch(1 + number as u64))?;
        }
        Ok(x)
    }

    /// Logits [chosen, vocab] at the places `chosen` of `hidden` [b, n, width], counted row by row.
    pub fn logits(&self, hidden: &Tensor, chosen: &[u32]) -> Result<Tensor> {
        let (b, n, width) = hidden.dims3()?;
        let take = |places: &[u32]| {
            embedding(&Tensor::new(places, hidden.device())?, &hidden.reshape((b * n, width))?)
        };
        let rows = match &self.reader {
            Some(reader) => {
                let n = n as u32;
                let last: Vec<u32> = chosen.iter().map(|place| place / n * n + n - 1).collect();
                let at: Vec<u32> = chosen.iter().map(|place| place % n).collect();
                reader.forward(&take(&last)?, &at)?
            }
            None => take(chosen)?,
        };
        linear(&self.norm.forward(&rows)?, self.out.as_ref().unwrap_or(&self.tokens), None)
    }

    /// What every layer carries in front of the first of up to `room` tokens of `batch` sequences; nothing where a mechanism has
    /// no form that goes on token by token.
    pub fn start_decoding(&self, batch: usize, room: usize) -> Result<Option<Vec<LayerState>>> {
        let device = self.tokens.device();
        let state = |layer: &Layer| match &layer.mixing {
            Mixing::Conv(conv) => Ok(Some(LayerState::Conv(RefCell::new(conv.conv.start(batch, device)?)))),
            Mixing::Block(block) => Ok(block.init_decode(batch, room, device)?.map(LayerState::Mixer)),
        };
        self.layers.iter().map(|layer| state(layer).transpose()).collect::<Option<_>>().transpose()
    }

    /// The next token `ids` [b, 1] (u32) of sequences behind `states` to logits [b, vocab].
    pub fn decode(&self, ids: &Tensor, states: &mut [LayerState]) -> Result<Tensor> {
        let mut x = embedding(ids, &self.tokens)?;
        for (layer, state) in self.layers.iter().zip(states) {
            let mixed = match (&layer.mixing, state) {
                (Mixing::Conv(conv), LayerState::Conv(past)) => conv.forward(&x, Some(past))?,
                (Mixing::Block(block), LayerState::Mixer(state)) => block.decode_step(&x, state.as_mut())?,
                _ => candle_core::bail!("these states belong to another model"),
            };
            x = layer.finish(mixed)?;
        }
        let places: Vec<u32> = (0..x.dim(0)? as u32).collect();
        self.logits(&x, &places)
    }
}

impl LayerState {
    /// Moves to `position`, as if as many tokens had been read.
    pub fn set_position(&mut self, position: usize) {
        match self {
            Self::Conv(_) => {}
            Self::Mixer(state) => state.set_position(position),
        }
    }

    /// Bytes that it holds.
    pub fn bytes(&self) -> usize {
        match self {
            Self::Conv(past) => past.borrow().bytes(),
            Self::Mixer(state) => state.bytes(),
        }
    }
}
