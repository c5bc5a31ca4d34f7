//! Llama and its relatives (`docs/spec/SPEC-llama.md`): RMSNorm, rotary positions, heads of keys and values that neighbouring
//! heads share, SwiGLU, around any causal mechanism, under the parameter names of Hugging Face.
//!
//! ```text
//! x = embed_tokens[ids]
//! layer: x <- x + o_proj(Attn(RMS(x)));  x <- x + down_proj(SiLU(gate_proj(RMS(x))) * up_proj(RMS(x)))
//! logits = RMS(x) lm_head^T, or embed_tokens^T where tied
//! ```
//!
//! Qwen2 has biases on q, k and v; Mistral's sliding window is the mechanism `window`.

use candle_core::{Device, Error, Result, Tensor};

use super::causal::{Cache, CausalArchitecture, CausalModel};
use super::word_lm::reaching;
use super::{
    Architecture, Family, Loss, Metric, Model, ModelRequest, Objective, PresetDefaults, PresetInfo,
    ResolveError, StageCost, tasks_of,
};
use crate::attention::decode::DecodeState;
use crate::attention::knobs::Knobs;
use crate::attention::{MechanismEntry, Needs};
use crate::batch::{Batch, IGNORED, InputKind, ModelInput, SyntheticInput, Tokens};
use crate::layer::{Block, BlockConfig, BlockStyle, ForwardArgs, RotaryForm};
use crate::nn::dropout::{Dropout, DropoutRng};
use crate::nn::ffn::FfnActivation;
use crate::nn::norm::{NormForm, RmsNorm};
use crate::nn::params::{Init, ParamBuilder, ParamSpec};
use crate::{Backbone, ConfigError, positive, traced};
use effattn_kernel::embedding::embedding;
use effattn_kernel::linear::linear;
use effattn_kernel::loss::cross_entropy;
use effattn_kernel::rotary::Pairing;
use effattn_record::config::unknown;

/// The table line.
pub static FAMILY: Family = Family {
    name: "llama",
    title: "tokens to next tokens: RMSNorm, rotary positions, shared heads of keys and values, SwiGLU",
    input: InputKind::Tokens,
    objective: Objective::NextToken,
    sample: "charlm",
    presets: || PRESETS.iter().map(|preset| preset.about.clone()).collect(),
    serves: |preset, _| find(preset).is_some(),
    usual_task: |_, _| None,
    usual: |preset| find(preset).map(|_| PresetDefaults { models: "full,window", len: 1024 }),
    resolve: |request| Ok(Box::new(config(request)?)),
};

/// A causal language model of Llama's form around one variant of a mechanism.
#[derive(Clone)]
pub struct LlamaConfig {
    /// The mechanism.
    pub entry: &'static MechanismEntry,
    /// Its settings.
    pub knobs: Knobs,
    /// Sizes and dropout; `bias` is that of q, k and v, `inner` the width of all heads of queries.
    pub backbone: Backbone,
    /// Heads of keys and values, a divisor of the heads.
    pub kv_heads: usize,
    /// Number of tokens.
    pub vocab: usize,
    /// Most tokens of an input.
    pub block: usize,
    /// Base of the rotary positions.
    pub theta: f64,
    /// Epsilon of every RMSNorm.
    pub eps: f64,
    /// Whether the embedding is the output layer too.
    pub tied: bool,
}

struct LlamaPreset {
    about: PresetInfo,
    backbone: Backbone,
    kv_heads: usize,
    vocab: usize,
}

/// Llama's sizes where no other are said: no dropout, no biases, SwiGLU.
const fn backbone(layers: usize, width: usize, heads: usize, ffn: usize) -> Backbone {
    Backbone { bias: false, activation: FfnActivation::SwiGlu, ..Backbone::new(layers, width, heads, ffn) }
}

const PRESETS: &[LlamaPreset] = &[
    LlamaPreset {
        about: PresetInfo {
            name: "llama-small",
            title: "8 layers, d 512, 8 heads, 2 of keys and values, FFN 1376, bytes",
            description: "Llama's blocks at a size that a laptop trains; tied, theta 10000",
            source: "this program",
            tasks: Vec::new(),
            knobs: Vec::new(),
        },
        backbone: backbone(8, 512, 8, 1376),
        kv_heads: 2,
        vocab: 256,
    },
    LlamaPreset {
        about: PresetInfo {
            name: "smollm-135m",
            title: "SmolLM-135M: 30 layers, d 576, 9 heads, 3 of keys and values, FFN 1536, 49,152 tokens",
            description: "134,515,008 parameters; tied, theta 10000",
            source: "docs/spec/SPEC-llama.md, section 4",
            tasks: Vec::new(),
            knobs: Vec::new(),
        },
        backbone: backbone(30, 576, 9, 1536),
        kv_heads: 3,
        vocab: 49_152,
    },
];

fn find(name: &str) -> Option<&'static LlamaPreset> {
    PRESETS.iter().find(|preset| preset.about.name == name)
}

fn config(request: &ModelRequest) -> std::result::Result<LlamaConfig, ResolveError> {
    let names = PRESETS.iter().map(|preset| preset.about.name);
    let preset = find(request.preset)
        .ok_or_else(|| ResolveError::Invalid(unknown("preset", request.preset, names)))?;
    tasks_of(&ModelRequest { task: None, ..*request }, preset.about.name)?;
    let mut backbone = preset.backbone.clone();
    request.sizes.apply(&mut backbone);
    let block = request.len.unwrap_or(1024);
    Ok(LlamaConfig {
        entry: request.choice.entry,
        knobs: reaching(request, block)?,
        backbone,
        kv_heads: preset.kv_heads,
        vocab: request.vocab.unwrap_or(preset.vocab),
        block,
        theta: 10_000.0,
        eps: 1e-5,
        tied: true,
    })
}

/// What Hugging Face calls a parameter of a block.
fn public_name(name: &str) -> String {
    match name.split_once('.') {
        None if name == "norm1" => "input_layernorm".to_owned(),
        None if name == "norm2" => "post_attention_layernorm".to_owned(),
        None if name == "attn" => "self_attn".to_owned(),
        Some(("attn", part)) => format!("self_attn.{part}_proj"),
        Some(("ffn", part)) => format!("mlp.{part}_proj"),
        _ => name.to_owned(),
    }
}

/// Linear layers and the embedding N(0, 0.02^2), biases 0; norms and the mechanism's own parameters as they say.
fn init(spec: &ParamSpec) -> Init {
    match spec.name.strip_suffix(".weight") {
        Some(name) if name.ends_with("_proj") || ["model.embed_tokens", "lm_head"].contains(&name) => {
            Init::normal(0.02)
        }
        _ if spec.name.ends_with("_proj.bias") => Init::ZERO,
        _ => spec.init,
    }
}

impl LlamaConfig {
    /// Refuses sizes that no model has and what the mechanism cannot do.
    pub fn validate(&self) -> std::result::Result<(), ConfigError> {
        self.backbone.validate()?;
        positive(&[
            ("the vocabulary", self.vocab),
            ("the length", self.block),
            ("the number of heads of keys", self.kv_heads),
        ])?;
        self.backbone.countable(self.block, &self.knobs)?;
        let (heads, mechanism) = (self.backbone.heads, self.entry.name);
        if !heads.is_multiple_of(self.kv_heads) || !self.backbone.head_dim().is_multiple_of(2) {
            let (kv_heads, head_dim) = (self.kv_heads, self.backbone.head_dim());
            return Err(ConfigError::SharedHeads { heads, kv_heads, head_dim });
        }
        let unsupported = |what, instead| Err(ConfigError::Unsupported { mechanism, what, instead });
        if !self.entry.support.causal {
            return unsupported("causal form", "choose a causal mechanism for a language model");
        }
        if self.needs().stream.is_some() {
            return unsupported("form without a second stream", "choose a classifier's preset");
        }
        let shape = self.backbone.shape(1, self.block, true);
        self.entry.admits(&self.knobs, &shape).map_err(|reason| ConfigError::Knobs { mechanism, reason })
    }

    /// What the mechanism asks for, with the shared heads of keys and values.
    fn needs(&self) -> Needs {
        let needs = (self.entry.needs)(&self.knobs);
        Needs { projections: needs.projections.sharing(self.kv_heads), ..needs }
    }

    /// What block `layer` is built for.
    pub fn block(&self, layer: usize) -> BlockConfig {
        BlockConfig {
            style: BlockStyle {
                norm: NormForm::Rms { eps: self.eps },
                rotary: Some(RotaryForm { pairing: Pairing::Half, base: self.theta }),
                kv_heads: Some(self.kv_heads),
                output_bias: Some(false),
                name: public_name,
            },
            ..self.backbone.block(self.entry, &self.knobs, layer, self.block)
        }
    }
}

/// The model.
pub struct Llama {
    tokens: Tensor,       // [vocab, width]
    head: Option<Tensor>, // [vocab, width]; absent: tied
    layers: Vec<Block>,
    norm: RmsNorm,
    config: LlamaConfig,
    device: Device,
}

impl Llama {
    /// Parameters `model.embed_tokens.weight`, `model.layers.<i>.*`, `model.norm.weight` and, where not tied, `lm_head.weight`.
    pub fn new(config: &LlamaConfig, builder: &ParamBuilder) -> Result<Self> {
        config.validate().map_err(Error::wrap)?;
        let builder = builder.with_init(init);
        let (vocab, width) = (config.vocab, config.backbone.width);
        let tokens = builder.param("model.embed_tokens.weight", &[vocab, width], Init::normal(0.02))?;
        let layers = (0..config.backbone.layers)
            .map(|layer| Block::new(&config.block(layer), &builder.pp(format!("model.layers.{layer}"))))
            .collect::<Result<_>>()?;
        let norm = RmsNorm::new(&builder, "model.norm", width, config.eps)?;
        let head = match config.tied {
            true => None,
            false => Some(builder.param("lm_head.weight", &[vocab, width], Init::normal(0.02))?),
        };
        Ok(Self { tokens, head, layers, norm, config: config.clone(), device: builder.device() })
    }

    /// `ids` [b, n] (u32) to logits [b, n, vocab]. Padding stands on the right, so that no token sees it.
    pub fn forward(&self, ids: &Tensor, dropout: Dropout) -> Result<Tensor> {
        self.logits(&self.run(ids, dropout, |_| ())?)
    }

    /// The input of every layer and of the last norm [b, n, width].
    pub fn trace(&self, ids: &Tensor) -> Result<Vec<Tensor>> {
        traced(|see| self.run(ids, Dropout::NONE, see))
    }

    /// The logits of what [`Self::trace`] gives last.
    pub fn logits(&self, x: &Tensor) -> Result<Tensor> {
        linear(&self.norm.forward(x)?, self.head.as_ref().unwrap_or(&self.tokens), None)
    }

    fn run(&self, ids: &Tensor, dropout: Dropout, mut see: impl FnMut(&Tensor)) -> Result<Tensor> {
        let mut x = dropout.apply(&embedding(ids, &self.tokens)?, 0)?;
        for (number, layer) in self.layers.iter().enumerate() {
            see(&x);
            let dropout = dropout.branch(1 + number as u64);
            x = layer.forward(&x, &ForwardArgs { dropout, ..ForwardArgs::default() })?;
        }
        Ok(x)
    }

    /// Sum of the cross entropies of the positions whose label is not [`IGNORED`], and their number.
    fn scored(&self, batch: &Batch, dropout: Dropout) -> Result<Loss> {
        let logits = self.forward(&batch.tokens()?.ids, dropout)?.flatten_to(1)?;
        let labels = batch.labels.flatten_all()?.to_vec1::<u32>()?;
        let scored = labels.iter().enumerate().filter(|(_, label)| **label != IGNORED);
        let (places, wanted): (Vec<u32>, Vec<u32>) = scored.map(|(at, label)| (at as u32, *label)).unzip();
        let logits = match places.len() == labels.len() {
            true => logits,
            false => logits.index_select(&Tensor::new(places.as_slice(), &self.device)?, 0)?,
        };
        let wanted = Tensor::new(wanted.as_slice(), &self.device)?;
        Ok(Loss { sum: cross_entropy(&logits, &wanted)?.sum_all()?, count: wanted.elem_count() as f64 })
    }
}

impl Architecture for LlamaConfig {
    fn max_len(&self) -> usize {
        self.block
    }

    fn validate(&self) -> std::result::Result<(), ResolveError> {
        Ok(Self::validate(self)?)
    }

    /// An RMSNorm costs 4 per element.
    fn stages(&self, batch: usize, len: usize) -> Vec<StageCost> {
        let (needs, Backbone { width, heads, ffn, .. }) = (self.needs(), &self.backbone);
        let cost = (self.entry.cost)(&self.knobs, &self.backbone.shape(batch, len, true));
        let one = (self.entry.cost)(&self.knobs, &self.backbone.shape(1, len, true));
        let taps = needs.conv.map_or(0, |conv| conv.taps);
        let convolved = taps * needs.projections.width(*heads, self.backbone.head_dim());
        let block = len
            * (width * (needs.linear_width(*width, *heads, self.backbone.head_dim()) + 3 * ffn + 8)
                + convolved);
        let shared = needs.decodes_groups && needs.projections.k.is_some();
        let share = if shared { (self.kv_heads, *heads) } else { (1, 1) };
        let layer = |layer| StageCost {
            name: format!("layer {layer}"),
            flops: block as u64 + one.flops,
            core_macs: cost.core_macs,
            state_bytes: one.state_bytes * share.0 as u64 / share.1 as u64,
        };
        let flops = (len * width * (4 + self.vocab)) as u64;
        let logits = StageCost { name: "logits".to_owned(), flops, ..StageCost::default() };
        (0..self.backbone.layers).map(layer).chain([logits]).collect()
    }

    fn build(&self, builder: &ParamBuilder) -> Result<Box<dyn Model>> {
        Ok(Box::new(Llama::new(self, builder)?))
    }

    fn causal(&self) -> Option<Box<dyn CausalArchitecture>> {
        Some(Box::new(self.clone()))
    }

    fn synthetic_batches(&self, wanted: &SyntheticInput, device: &Device) -> Result<Vec<Batch>> {
        let bytes = &mut wanted.bytes();
        let batches = (0..SyntheticInput::BATCHES).map(|_| {
            let ids = wanted.ids(bytes, |byte| u32::from(byte) % self.vocab as u32, device)?;
            let labels = Tensor::cat(&[ids.narrow(1, 1, wanted.len - 1)?, ids.narrow(1, 0, 1)?], 1)?;
            let labels = labels.contiguous()?;
            Ok(Batch { input: ModelInput::Tokens(Tokens { ids, mask: None }), labels })
        });
        batches.collect()
    }
}

impl Model for Llama {
    fn forward(&mut self, batch: &Batch) -> Result<Tensor> {
        Self::forward(self, &batch.tokens()?.ids, Dropout::NONE)
    }

    fn loss(&mut self, batch: &Batch, rng: DropoutRng) -> Result<Loss> {
        self.scored(batch, self.config.backbone.drops(rng))
    }

    fn metrics(&mut self, batch: &Batch) -> Result<Vec<Metric>> {
        let Loss { sum, count } = self.scored(batch, Dropout::NONE)?;
        Ok(vec![Metric { name: "loss", sum: f64::from(sum.to_scalar::<f32>()?), count }])
    }
}

/// Segments are read on their own: positions start again, nothing is cached.
impl CausalArchitecture for LlamaConfig {
    fn cached(&self) -> usize {
        0
    }

    fn resized(&self, block: usize, _cached: usize) -> Box<dyn CausalArchitecture> {
        Box::new(Self { block, ..self.clone() })
    }

    fn build_causal(&self, builder: &ParamBuilder) -> Result<Box<dyn CausalModel>> {
        Ok(Box::new(Llama::new(self, builder)?))
    }
}

impl CausalModel for Llama {
    fn start(&self, _batch: usize) -> Result<Cache> {
        Ok(Cache::default())
    }

    fn segment(&self, ids: &Tensor, _cache: &Cache, rng: Option<DropoutRng>) -> Result<(Tensor, Cache)> {
        let dropout = rng.map_or(Dropout::NONE, |rng| self.config.backbone.drops(rng));
        Ok((self.forward(ids, dropout)?, Cache::default()))
    }

    fn segment_loss(&self, nll: &Tensor) -> Result<Loss> {
        let (b, n) = nll.dims2()?;
        // a segment of one token scores none: its loss is 0
        Ok(Loss { sum: nll.narrow(1, 0, n - 1)?.sum_all()?, count: (b * (n - 1)).max(1) as f64 })
    }

    fn start_decoding(&self, batch: usize, room: usize) -> Result<Option<Vec<Box<dyn DecodeState>>>> {
        let start = |layer: &Block| layer.init_decode(batch, room, &self.device).transpose();
        self.layers.iter().map(start).collect::<Option<_>>().transpose()
    }

    fn decode(&self, ids: &Tensor, states: &mut [Box<dyn DecodeState>]) -> Result<Tensor> {
        let mut x = embedding(ids, &self.tokens)?;
        for (layer, state) in self.layers.iter().zip(states) {
            x = layer.decode_step(&x, state.as_mut())?;
        }
        self.logits(&x)
    }

    fn layers(&self) -> usize {
        0
    }

    fn device(&self) -> &Device {
        &self.device
    }
}

#[cfg(test)]
mod tests;
