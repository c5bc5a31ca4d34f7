//! The word language model (`SPEC-text.md` section 2; cosFormer Table 2): fairseq's `transformer_lm_wiki103` around any
//! causal mechanism.
//!
//! ```text
//! x = adaptive_input(ids) sqrt(d) + sinusoid
//! layer: x <- x + Linear_o(attention(LN(x)));  x <- x + fc2(relu(fc1(LN(x))))
//! adaptive softmax of x, without a norm behind the last layer unless `final_norm`
//! ```

use candle_core::{Device, Error, Result, Tensor};

use super::layer::{Block, BlockConfig, ForwardArgs};
use super::{Backbone, ConfigError};
use crate::attention::MechanismEntry;
use crate::attention::decode::DecodeState;
use crate::attention::knobs::Knobs;
use crate::nn::adaptive::{AdaptiveConfig, AdaptiveSoftmax};
use crate::nn::dropout::Dropout;
use crate::nn::ffn::{FfnActivation, FfnConfig};
use crate::nn::params::{Init, ParamBuilder, ParamSpec};
use effattn_kernel::cpu::few;
use effattn_kernel::embedding::PADDING;
use effattn_kernel::norm::{EPS, layer_norm};

/// A word language model around one variant of a causal mechanism.
#[derive(Clone)]
pub struct WordLmConfig {
    /// The mechanism.
    pub entry: &'static MechanismEntry,
    /// Its settings.
    pub knobs: Knobs,
    /// Sizes; its dropout is that of embeddings and residual branches.
    pub backbone: Backbone,
    /// Words in and out.
    pub adaptive: AdaptiveConfig,
    /// Most words per block.
    pub block: usize,
    /// Whether a norm follows the last layer.
    pub final_norm: bool,
    /// Dropout behind the ReLU.
    pub activation_dropout: f64,
    /// Dropout in front of the adaptive softmax and of its tails.
    pub softmax_dropout: f64,
}

impl WordLmConfig {
    /// # Errors
    /// Sizes that no model has, and what the mechanism cannot do.
    pub fn validate(&self) -> std::result::Result<(), ConfigError> {
        self.backbone.validate()?;
        super::positive(&[("the block", self.block)])?;
        self.backbone.countable(self.block, &self.knobs)?;
        let mechanism = self.entry.name;
        if !self.entry.support.causal {
            let (what, instead) = ("causal form", "choose a causal mechanism for a language model");
            return Err(ConfigError::Unsupported { mechanism, what, instead });
        }
        self.adaptive
            .validate()
            .map_err(|reason| ConfigError::Knobs { mechanism: "adaptive input", reason })?;
        let shape = self.backbone.shape(1, self.block, true);
        (self.entry.validate)(&self.knobs, &shape).map_err(|reason| ConfigError::Knobs { mechanism, reason })
    }

    fn layer(&self, layer: usize) -> BlockConfig {
        BlockConfig {
            bias: true,
            form: FfnConfig {
                activation: FfnActivation::Relu,
                hidden_dropout: Some(self.activation_dropout),
                ..FfnConfig::default()
            },
            ..self.backbone.block(self.entry, &self.knobs, layer, self.block)
        }
    }
}

/// fairseq's start: queries, keys and values Xavier uniform with gain 1/sqrt(2), the output Xavier uniform without bias.
fn fairseq_init(spec: &ParamSpec) -> Init {
    let bound = |gain: f64| match spec.shape[..] {
        [out, inp] => Init::Uniform { bound: gain * (6.0 / (inp + out) as f64).sqrt() },
        _ => spec.init,
    };
    match spec.name.as_str() {
        "attn.q.weight" | "attn.k.weight" | "attn.v.weight" => bound(std::f64::consts::FRAC_1_SQRT_2),
        "attn.o.weight" => bound(1.0),
        "attn.o.bias" => Init::ZERO,
        _ => spec.init,
    }
}

/// fairseq's sinusoids of positions 0..n [n, d]: sines of (t + 2) f_i, then their cosines, f_i = 10000^(-i / (d/2 - 1)).
pub fn sinusoids(n: usize, d: usize, device: &Device) -> Result<Tensor> {
    let half = d / 2;
    let step = 10_000f64.ln() / (half.max(2) - 1) as f64;
    let wave = |t: usize, channel: usize| {
        let angle = (t + 2) as f64 * (-step * (channel % half.max(1)) as f64).exp();
        match channel / half.max(1) {
            0 => angle.sin() as f32,
            1 => angle.cos() as f32,
            _ => 0.0, // an odd width has one channel left
        }
    };
    let data = (0..n * d).map(|at| wave(at / d, at % d)).collect::<Vec<_>>();
    Tensor::from_vec(data, (n, d), device)
}

/// Words to a distribution over the next one.
pub struct WordLm {
    adaptive: AdaptiveSoftmax,
    layers: Vec<Block>,
    norm: Option<(Tensor, Tensor)>,
    positions: Tensor, // [block, width]
    config: WordLmConfig,
}

impl WordLm {
    /// Parameters `embed.*`, `softmax.*`, `layers.<i>.*`, and `norm.*` with a final norm.
    pub fn new(config: &WordLmConfig, builder: &ParamBuilder) -> Result<Self> {
        config.validate().map_err(Error::wrap)?;
        let builder = builder.with_init(fairseq_init);
        let width = config.backbone.width;
        let adaptive = AdaptiveSoftmax::new(&config.adaptive, &builder)?;
        let layers = (0..config.backbone.layers)
            .map(|layer| Block::new(&config.layer(layer), &builder.pp(format!("layers.{layer}"))))
            .collect::<Result<_>>()?;
        let norm = if config.final_norm {
            let param = |name, init| builder.param(name, &[width], init);
            Some((param("norm.weight", Init::ONE)?, param("norm.bias", Init::ZERO)?))
        } else {
            None
        };
        let positions = sinusoids(config.block, width, &builder.device())?;
        Ok(Self { adaptive, layers, norm, positions, config: config.clone() })
    }

    /// What it was built for.
    pub fn config(&self) -> &WordLmConfig {
        &self.config
    }

    /// The device of the parameters.
    pub fn device(&self) -> &Device {
        self.positions.device()
    }

    /// The adaptive input and softmax.
    pub fn adaptive(&self) -> &AdaptiveSoftmax {
        &self.adaptive
    }

    /// `ids` [b, n] (u32) to the last layer's output [b, n, width]. Padding stands on the right: no earlier word sees it.
    pub fn hidden(&self, ids: &Tensor, dropout: Dropout) -> Result<Tensor> {
        self.run(ids, dropout, |_| ())
    }

    /// [`Self::hidden`] without dropout: the input of every layer, then the final output.
    pub fn trace(&self, ids: &Tensor) -> Result<Vec<Tensor>> {
        super::traced(|see| self.run(ids, Dropout::NONE, see))
    }

    /// Embedded words [b, n, width], the first at position `first`.
    fn embed(&self, ids: &Tensor, first: usize) -> Result<Tensor> {
        let (n, rows) = (ids.dim(1)?, self.positions.dim(0)?);
        if first + n > rows {
            let words = first + n;
            candle_core::bail!("{words} words do not fit a block of {rows}; build the model for that length");
        }
        let scale = (self.config.backbone.width as f64).sqrt();
        (self.adaptive.embed(ids)? * scale)?.broadcast_add(&self.positions.narrow(0, first, n)?)
    }

    fn run(&self, ids: &Tensor, dropout: Dropout, mut see: impl FnMut(&Tensor)) -> Result<Tensor> {
        let mut x = dropout.apply(&self.embed(ids, 0)?, 0)?;
        for (number, layer) in self.layers.iter().enumerate() {
            see(&x);
            let dropout = dropout.branch(2 + number as u64);
            x = layer.forward(&x, &ForwardArgs { dropout, ..ForwardArgs::default() })?;
        }
        self.normed(x)
    }

    fn normed(&self, x: Tensor) -> Result<Tensor> {
        match &self.norm {
            Some((weight, bias)) => layer_norm(&x, weight, bias, EPS),
            None => Ok(x),
        }
    }

    /// Log-probabilities of all words [b, n, vocab] behind hidden rows [b, n, width].
    pub fn log_probabilities(&self, hidden: &Tensor) -> Result<Tensor> {
        let (b, n, width) = hidden.dims3()?;
        self.adaptive.log_probabilities(&hidden.reshape((b * n, width))?)?.reshape((b, n, ()))
    }

    /// What every layer carries in front of the first of up to `room` words of `batch` sequences; nothing where the mechanism has
    /// no form that goes on word by word.
    pub fn start_decoding(&self, batch: usize, room: usize) -> Result<Option<Vec<Box<dyn DecodeState>>>> {
        let start = |layer: &Block| layer.init_decode(batch, room, self.device()).transpose();
        self.layers.iter().map(start).collect::<Option<_>>().transpose()
    }

    /// The next word `ids` [b, 1] (u32) of sequences behind `states` to log-probabilities [b, 1, vocab].
    pub fn decode(&self, ids: &Tensor, states: &mut [Box<dyn DecodeState>]) -> Result<Tensor> {
        let mut x = self.embed(ids, states.first().map_or(0, |state| state.position()))?;
        for (layer, state) in self.layers.iter().zip(states) {
            x = layer.decode_step(&x, state.as_mut())?;
        }
        few::of_tokens(|| self.log_probabilities(&self.normed(x)?))
    }

    /// -log p of every target [b, n] (u32): [b, n], in nats; 0 where the target is padding.
    pub fn nll(&self, ids: &Tensor, targets: &Tensor, dropout: Dropout) -> Result<Tensor> {
        let hidden = self.hidden(ids, dropout)?;
        self.nll_of(&hidden, targets, dropout)
    }

    /// [`Self::nll`] of hidden rows that are there already.
    pub fn nll_of(&self, hidden: &Tensor, targets: &Tensor, dropout: Dropout) -> Result<Tensor> {
        let (b, n, width) = hidden.dims3()?;
        let flat = targets.flatten_all()?.to_vec1::<u32>()?;
        let dropout = dropout.with_rate(self.config.softmax_dropout).branch(1);
        let nll = self.adaptive.nll(&hidden.reshape((b * n, width))?, &flat, dropout)?;
        let nll = if flat.contains(&PADDING) {
            let keep: Vec<f32> = flat.iter().map(|&id| f32::from(u8::from(id != PADDING))).collect();
            (nll * Tensor::from_vec(keep, b * n, hidden.device())?)?
        } else {
            nll
        };
        nll.reshape((b, n))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sinusoids_start_at_position_two_with_all_sines_first() {
        let rows = sinusoids(2, 8, &Device::Cpu).unwrap().to_vec2::<f32>().unwrap();
        assert!((f64::from(rows[0][0]) - 2f64.sin()).abs() < 1e-6);
        assert!((f64::from(rows[1][4]) - 3f64.cos()).abs() < 1e-6);
        assert!((f64::from(rows[0][3]) - 2e-4f64.sin()).abs() < 1e-7); // i = d/2 - 1: frequency 1/10000
    }
}
