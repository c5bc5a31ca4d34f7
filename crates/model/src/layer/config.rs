//! What a block is built for.

use crate::Backbone;
use crate::attention::MechanismEntry;
use crate::attention::knobs::Knobs;
use crate::nn::ffn::FfnConfig;
use crate::nn::norm::NormForm;
use effattn_kernel::rotary::Pairing;

/// What a block is built for.
#[derive(Clone)]
pub struct BlockConfig {
    /// The mechanism.
    pub entry: &'static MechanismEntry,
    /// Its settings in this layer.
    pub knobs: Knobs,
    /// Width of the layer's input and output.
    pub width: usize,
    /// Heads.
    pub heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Hidden width of the feed-forward half; 0: there is none.
    pub ffn: usize,
    /// Whether the projections have biases.
    pub bias: bool,
    /// Longest sequence, cached positions included.
    pub max_len: usize,
    /// Whether the causal form runs.
    pub causal: bool,
    /// Number of the layer.
    pub layer: usize,
    /// What the skip path carries, and the form of the feed-forward half.
    pub form: FfnConfig,
    /// Norms, positions and shared heads.
    pub style: BlockStyle,
}

impl Backbone {
    /// What block `layer` of a causal model around `entry` is built for, sequences of up to `max_len` positions.
    pub fn block(
        &self,
        entry: &'static MechanismEntry,
        knobs: &Knobs,
        layer: usize,
        max_len: usize,
    ) -> BlockConfig {
        BlockConfig {
            entry,
            knobs: knobs.clone(),
            width: self.width,
            heads: self.heads,
            head_dim: self.head_dim(),
            ffn: self.ffn,
            bias: self.bias,
            max_len,
            causal: true,
            layer,
            form: FfnConfig { activation: self.activation, ..FfnConfig::default() },
            style: BlockStyle::default(),
        }
    }
}

/// In what a block differs from the LayerNorm block of Transformer-LS.
#[derive(Clone, Copy)]
pub struct BlockStyle {
    /// Norm in front of both halves.
    pub norm: NormForm,
    /// Rotation of queries and keys by their positions, for mechanisms that leave it to the block ([`rotary`](crate::attention::InModels::rotary)).
    pub rotary: Option<RotaryForm>,
    /// Heads of keys and values, a divisor of the heads; `None`: as many.
    pub kv_heads: Option<usize>,
    /// Whether the output projection has a bias; `None`: as the other projections.
    pub output_bias: Option<bool>,
    /// What a parameter is called whose name here is given: `norm1`, `attn.q`, `attn`, `ffn.up`, ...
    pub name: fn(&str) -> String,
}

/// A rotation of queries and keys.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RotaryForm {
    /// Which channels turn together.
    pub pairing: Pairing,
    /// Base of the angles.
    pub base: f64,
}

impl Default for BlockStyle {
    fn default() -> Self {
        Self { norm: NormForm::Layer, rotary: None, kv_heads: None, output_bias: None, name: str::to_owned }
    }
}
