//! The causal language model with cache (`docs/spec/SPEC-models.md` section 5; Transformer-LS section 4.2).
//!
//! ```text
//! X = token_embedding[ids] sqrt(d)
//! layer i: Z = [C_i ; X];  next C_i = last min(mem, M + n) rows of Z, detached;  h = LN(Z), h' = its last n rows
//!          A = Linear_o(causal attention: q from h', k, v, x from h)
//!          raw:    X <- X + A;  X <- X + FFN(LN(X))
//!          normed: Y = LN(h' + A);  X <- Y + FFN(Y)
//! logits = X token_embedding^T + bias
//! ```
//!
//! There is no LayerNorm behind the last block and no absolute position.

use candle_core::{Device, Error, Result, Tensor, bail};

use super::layer::{Block, BlockConfig, ForwardArgs};
use super::{Backbone, ConfigError, positive};
use crate::attention::decode::DecodeState;
use crate::attention::knobs::{KnobError, Knobs};
use crate::attention::{MechanismEntry, Shape};
use crate::nn::dropout::Dropout;
use crate::nn::ffn::FfnConfig;
use crate::nn::params::{Init, ParamBuilder, ParamSpec};
use effattn_kernel::block::Residual;
use effattn_kernel::cpu::few;
use effattn_kernel::embedding::embedding;
use effattn_kernel::linear::linear;
use effattn_kernel::loss::cross_entropy;

/// What stands in front of a stream's first segment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Start {
    /// Nothing; the cache grows up to its size.
    #[default]
    Absent,
    /// A full cache of zeros, attended like any other (the released code).
    Zeros,
}

/// Which block is computed where the paper and its released code differ.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LmVariant {
    /// What the skip path carries.
    pub residual: Residual,
    /// Start of a stream.
    pub start: Start,
}

impl LmVariant {
    /// The paper's form: pre-norm, nothing in front of a stream.
    pub const PAPER: Self = Self { residual: Residual::Raw, start: Start::Absent };
    /// The released code's form: the skip path carries normalised activations, the first cache is zeros.
    pub const CODE: Self = Self { residual: Residual::Normed, start: Start::Zeros };

    /// The form that belongs to a variant of `entry`.
    pub fn of(entry: &MechanismEntry, knobs: &Knobs) -> Self {
        let released = entry.in_models.released_block.is_some_and(|knob| knobs.get(&knob));
        if released { Self::CODE } else { Self::PAPER }
    }
}

/// A language model around one variant of a causal mechanism.
#[derive(Clone)]
pub struct CharLmConfig {
    /// The mechanism.
    pub entry: &'static MechanismEntry,
    /// Its settings ([`language_knobs`]).
    pub knobs: Knobs,
    /// Sizes; the projections have no bias and there are no absolute positions, whatever it says.
    pub backbone: Backbone,
    /// Number of symbols.
    pub vocab: usize,
    /// Most inputs per segment.
    pub block: usize,
    /// Cached positions per layer.
    pub mem: usize,
    /// Paper's form or released code's.
    pub form: LmVariant,
}

/// Settings of `entry` in a language model: [`InModels::language`](crate::attention::InModels::language) as far as they have
/// an effect, then `given` (text as on the command line).
pub fn language_knobs<'a>(
    entry: &'static MechanismEntry,
    given: impl IntoIterator<Item = (&'a str, &'a str)>,
) -> std::result::Result<Knobs, KnobError> {
    let given: Vec<_> = given.into_iter().collect();
    let mut quiet: Vec<_> = entry.in_models.language.to_vec();
    let parse = |quiet: &[(&'a str, &'a str)]| {
        Knobs::parse(entry.name, entry.knobs, quiet.iter().chain(&given).copied())
    };
    // what is given may leave a setting of ours without effect
    let (all, shape) = (parse(&quiet)?, Shape { causal: true, ..Shape::default() });
    quiet.retain(|(name, _)| !entry.idle.iter().any(|idle| idle.knob == *name && (idle.when)(&all, &shape)));
    Ok(parse(&quiet)?.naming(given.iter().map(|(name, _)| *name)))
}

impl CharLmConfig {
    /// # Errors
    /// Sizes that no model has, and what the mechanism cannot do.
    pub fn validate(&self) -> std::result::Result<(), ConfigError> {
        self.backbone.validate()?;
        positive(&[("the vocabulary", self.vocab), ("the block", self.block)])?;
        self.backbone.countable(self.block + self.mem, &self.knobs)?;
        let mechanism = self.entry.name;
        let unsupported = |what, instead| Err(ConfigError::Unsupported { mechanism, what, instead });
        if !self.entry.support.causal {
            return unsupported("causal form", "choose a causal mechanism for a language model");
        }
        if self.mem > 0 && !self.entry.support.memory {
            return unsupported("form with cached positions", "set the cache to 0");
        }
        let needs = (self.entry.needs)(&self.knobs);
        if self.mem > 0 && needs.beyond_plain(self.backbone.heads, self.backbone.head_dim()).is_some() {
            return unsupported("form with cached positions", "set the cache to 0");
        }
        let mut shape = self.backbone.shape(1, self.block, true);
        shape.keys += self.mem;
        self.entry.admits(&self.knobs, &shape).map_err(|reason| ConfigError::Knobs { mechanism, reason })
    }

    /// The same model for segments of `block` behind `mem` cached positions, of which a mechanism without cache has none.
    #[must_use]
    pub fn at(&self, block: usize, mem: usize) -> Self {
        Self { block, mem: if self.entry.support.memory { mem } else { 0 }, ..self.clone() }
    }

    /// What block `layer` is built for.
    pub fn layer(&self, layer: usize) -> BlockConfig {
        BlockConfig {
            bias: false,
            form: FfnConfig { residual: self.form.residual, ..FfnConfig::default() },
            ..self.backbone.block(self.entry, &self.knobs, layer, self.block + self.mem)
        }
    }
}

/// Every linear weight and the embedding N(0, 0.02^2), biases 0, LayerNorm gains N(1, 0.02^2), as released.
fn released_init(spec: &ParamSpec) -> Init {
    let (weight, bias) = (spec.name.ends_with(".weight"), spec.name.ends_with(".bias"));
    match spec.shape.len() {
        1 if weight => Init::Normal { mean: 1.0, std: 0.02 },
        1 if bias => Init::ZERO,
        _ if weight => Init::normal(0.02),
        _ => spec.init,
    }
}

/// Cached block inputs of every layer, [b, m, width] each; nothing where m is 0.
#[derive(Clone, Debug, Default)]
pub struct Cache(Vec<Option<Tensor>>);

impl Cache {
    /// Number of cached positions.
    pub fn len(&self) -> usize {
        self.0.first().and_then(Option::as_ref).and_then(|rows| rows.dim(1).ok()).unwrap_or(0)
    }

    /// Whether nothing is cached.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// A cache of given rows, layer by layer.
    pub fn of(layers: Vec<Option<Tensor>>) -> Self {
        Self(layers)
    }

    /// The rows, layer by layer.
    pub fn layers(&self) -> &[Option<Tensor>] {
        &self.0
    }

    fn layer(&self, layer: usize) -> Option<&Tensor> {
        self.0.get(layer).and_then(Option::as_ref)
    }
}

/// Symbols to logits of the next symbol.
pub struct CharLm {
    tokens: Tensor, // [vocab, width]
    bias: Tensor,   // [vocab]
    layers: Vec<Block>,
    config: CharLmConfig,
    device: Device,
}

impl CharLm {
    /// Parameters `token_embedding.weight`, `layers.<i>.*`, `out.bias`.
    pub fn new(config: &CharLmConfig, builder: &ParamBuilder) -> Result<Self> {
        config.validate().map_err(Error::wrap)?;
        let builder = builder.with_init(released_init);
        let (vocab, width) = (config.vocab, config.backbone.width);
        let tokens = builder.param("token_embedding.weight", &[vocab, width], Init::normal(0.02))?;
        let layers = (0..config.backbone.layers)
            .map(|layer| Block::new(&config.layer(layer), &builder.pp(format!("layers.{layer}"))))
            .collect::<Result<_>>()?;
        let bias = builder.param("out.bias", &[vocab], Init::ZERO)?;
        Ok(Self { tokens, bias, layers, config: config.clone(), device: builder.device() })
    }

    /// The cache in front of a stream of `batch` sequences.
    pub fn start(&self, batch: usize) -> Result<Cache> {
        let (mem, width) = (self.config.mem, self.config.backbone.width);
        if self.config.form.start == Start::Absent || mem == 0 {
            return Ok(Cache::default());
        }
        let zeros = Tensor::zeros((batch, mem, width), self.tokens.dtype(), &self.device)?;
        Ok(Cache(vec![Some(zeros); self.layers.len()]))
    }

    /// One segment: `ids` [b, n] (u32) behind `cache` to logits [b, n, vocab] and the next segment's cache.
    pub fn forward(&self, ids: &Tensor, cache: &Cache) -> Result<(Tensor, Cache)> {
        self.run(ids, cache, Dropout::NONE, |_| ())
    }

    /// [`Self::forward`] with dropout of the embeddings, of what attention adds, in the feed-forward halves and
    /// in front of the logits. The sinusoids of the relative positions are not dropped.
    pub fn forward_train(&self, ids: &Tensor, cache: &Cache, dropout: Dropout) -> Result<(Tensor, Cache)> {
        self.run(ids, cache, dropout, |_| ())
    }

    /// [`Self::forward`], and the input of every layer and the last layer's output [b, n, width].
    pub fn trace(&self, ids: &Tensor, cache: &Cache) -> Result<(Tensor, Cache, Vec<Tensor>)> {
        let mut hidden = Vec::new();
        let (logits, cache) = self.run(ids, cache, Dropout::NONE, |x| hidden.push(x.clone()))?;
        Ok((logits, cache, hidden))
    }

    /// Keys and values of positions and of slots in every layer ([`crate::attention::Mechanism::softmax_inputs`]), or
    /// nothing for a mechanism that does not mix them.
    pub fn softmax_inputs(&self, ids: &Tensor, cache: &Cache) -> Result<Option<Vec<(Tensor, Tensor)>>> {
        let (_, _, inputs) = self.trace(ids, cache)?;
        let layer = |(number, (block, x)): (usize, (&Block, &Tensor))| {
            block
                .softmax_inputs(x, &ForwardArgs { memory: cache.layer(number), ..ForwardArgs::default() })
                .transpose()
        };
        self.layers.iter().zip(&inputs).enumerate().map(layer).collect::<Option<Result<_>>>().transpose()
    }

    fn run(
        &self,
        ids: &Tensor,
        cache: &Cache,
        dropout: Dropout,
        mut see: impl FnMut(&Tensor),
    ) -> Result<(Tensor, Cache)> {
        let n = ids.dim(1)?;
        if n == 0 {
            bail!("an empty segment has no next symbol");
        }
        let mut x = (embedding(ids, &self.tokens)? * (self.config.backbone.width as f64).sqrt())?;
        x = dropout.apply(&x, 0)?;
        let mut next = Vec::with_capacity(self.layers.len());
        for (number, layer) in self.layers.iter().enumerate() {
            see(&x);
            let memory = cache.layer(number);
            next.push(self.keep(memory, &x)?);
            let dropout = dropout.branch(2 + number as u64);
            x = layer.forward(&x, &ForwardArgs { memory, dropout, ..ForwardArgs::default() })?;
        }
        see(&x);
        x = dropout.apply(&x, 1)?;
        Ok((linear(&x, &self.tokens, Some(&self.bias))?, Cache(next)))
    }

    /// What every layer carries in front of the first of up to `room` tokens of `batch` sequences; nothing where the mechanism
    /// has no form that goes on token by token.
    pub fn start_decoding(&self, batch: usize, room: usize) -> Result<Option<Vec<Box<dyn DecodeState>>>> {
        self.layers
            .iter()
            .map(|layer| layer.init_decode(batch, room, &self.device).transpose())
            .collect::<Option<_>>()
            .transpose()
    }

    /// The next token `ids` [b, 1] (u32) of sequences behind `states` to logits [b, 1, vocab]: [`Self::forward`] without a
    /// cache, at its position.
    pub fn decode(&self, ids: &Tensor, states: &mut [Box<dyn DecodeState>]) -> Result<Tensor> {
        let mut x = (embedding(ids, &self.tokens)? * (self.config.backbone.width as f64).sqrt())?;
        for (layer, state) in self.layers.iter().zip(states) {
            x = layer.decode_step(&x, state.as_mut())?;
        }
        few::of_tokens(|| linear(&x, &self.tokens, Some(&self.bias)))
    }

    /// The last `mem` rows of [memory ; x], without their history.
    fn keep(&self, memory: Option<&Tensor>, x: &Tensor) -> Result<Option<Tensor>> {
        let (mem, n) = (self.config.mem, x.dim(1)?);
        if mem == 0 {
            return Ok(None);
        }
        let last = |x: &Tensor, rows: usize| x.narrow(1, x.dim(1)? - rows, rows)?.detach().force_contiguous();
        let own = last(x, n.min(mem))?;
        let Some(memory) = memory else { return Ok(Some(own)) };
        let old = memory.dim(1)?.min(mem - n.min(mem));
        if old == 0 { Ok(Some(own)) } else { Ok(Some(Tensor::cat(&[last(memory, old)?, own], 1)?)) }
    }

    /// What it was built for.
    pub fn config(&self) -> &CharLmConfig {
        &self.config
    }

    /// The device of the parameters.
    pub fn device(&self) -> &Device {
        &self.device
    }
}

/// Cross entropy of every position: `logits` [b, n, vocab], `targets` [b, n] (u32) to [b, n].
pub fn next_symbol_loss(logits: &Tensor, targets: &Tensor) -> Result<Tensor> {
    let (b, n, vocab) = logits.dims3()?;
    cross_entropy(&logits.reshape((b * n, vocab))?, &targets.flatten_all()?)?.reshape((b, n))
}

/// The released code's training loss of `nll` [b, n]: the last position of a segment has no target but is
/// counted, sum over the other n - 1 positions / (b n).
pub fn released_loss(nll: &Tensor) -> Result<Tensor> {
    let (b, n) = nll.dims2()?;
    nll.narrow(1, 0, n - 1)?.sum_all()? / (b * n) as f64
}
