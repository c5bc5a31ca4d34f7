//! What a mechanism says of itself, and what it computes.

use candle_core::{Device, Result, Tensor};

use super::decode::DecodeState;
use super::knobs::{Knob, KnobSpec, Knobs, Value};
use super::needs::Needs;
use crate::nn::params::ParamBuilder;
use effattn_kernel::attend::Attend;
use effattn_kernel::dropout::AttentionDropout;
use effattn_kernel::heads::{Heads, Qkv};
use effattn_record::pattern::{Grid2d, Pattern};

/// A publication.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Paper {
    /// Authors, such as `Zhu et al.`.
    pub authors: &'static str,
    /// Title.
    pub title: &'static str,
    /// Year of publication.
    pub year: u16,
    /// arXiv number or other locator.
    pub locator: &'static str,
}

/// What a mechanism can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Support {
    /// Every position may see every other.
    pub bidirectional: bool,
    /// A form in which no position sees its future.
    pub causal: bool,
    /// Queries and keys of different lengths.
    pub cross: bool,
    /// Cached positions in front of the keys.
    pub memory: bool,
    /// The class token of the last layer as an input of its own (Transformer-LS).
    pub cls: bool,
    /// Weights of a softmax that are dropped while training.
    pub dropout: bool,
}

impl Support {
    /// Nothing: a mechanism names what it has.
    pub const NONE: Self =
        Self { bidirectional: false, causal: false, cross: false, memory: false, cls: false, dropout: false };
}

/// Shape of one attention call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Shape {
    /// Samples.
    pub batch: usize,
    /// Heads.
    pub heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Width of the layer input x.
    pub width: usize,
    /// Queries.
    pub queries: usize,
    /// Keys, cached ones included.
    pub keys: usize,
    /// Whether the causal form runs.
    pub causal: bool,
    /// Whether a class token comes as an input of its own.
    pub cls: bool,
    /// The grid that the positions stand on; absent: a line.
    pub grid: Option<Grid2d>,
}

/// What one attention call costs, computed from its shape.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cost {
    /// Multiply-adds of the core's matrix products for the whole batch: the golden files' `macs`.
    pub core_macs: u64,
    /// FLOPs of everything between the q, k, v and the output projection, for one sample, in the convention
    /// of Transformer-LS Table 1: a multiply-add is 1, LayerNorm is 5 per element.
    pub flops: u64,
    /// Bytes a causal decoder keeps per sequence and layer at this length (f32); 0 if there is no causal form.
    pub state_bytes: u64,
}

/// How time or memory grows with length, by definition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Growth {
    /// Linear in n (all knobs fixed).
    Linear,
    /// n log n.
    Linearithmic,
    /// n^1.5.
    ThreeHalves,
    /// Quadratic.
    Quadratic,
}

/// A general property that the property tests prove for every mechanism.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Property {
    /// Causal outputs ignore the future exactly.
    IgnoresFuture,
    /// What stands at padded positions changes nothing.
    PaddingInert,
    /// Samples of a batch do not influence each other.
    BatchIndependent,
    /// No head reads the queries, keys or values of another, and permuting heads (with their parameters)
    /// permutes outputs.
    HeadsIndependent,
    /// Any length works.
    AnyLength,
    /// Outputs and gradients are finite at extreme inputs.
    Finite,
}

/// A variant that breaks a general property by definition.
#[derive(Clone, Copy, Debug)]
pub struct Exception {
    /// The property.
    pub property: Property,
    /// The variants, as a condition on knobs in words and code.
    pub applies: fn(&Knobs, causal: bool) -> bool,
    /// The line of the specification that says so.
    pub reason: &'static str,
}

/// A knob that changes nothing under a condition.
#[derive(Clone, Copy, Debug)]
pub struct Idle {
    /// The knob.
    pub knob: &'static str,
    /// The condition.
    pub when: fn(&Knobs, &Shape) -> bool,
    /// The condition in words.
    pub why: &'static str,
}

/// What models around a mechanism want to know; [`InModels::PLAIN`] unless a mechanism says otherwise.
#[derive(Clone, Copy)]
pub struct InModels {
    /// Settings in the character language models of Transformer-LS, as on the command line; the user's come after them.
    pub language: &'static [(&'static str, &'static str)],
    /// The knob that is set where a variant belongs to a released language model, whose block differs from the paper's.
    pub released_block: Option<Knob<bool>>,
    /// The knob whose `auto` is the length of the sequence; models that see several lengths fix it.
    pub follows_length: Option<Knob<Option<usize>>>,
    /// The setting whose `auto` belongs to the weights, as it is in a model of so many positions: those weights serve longer
    /// inputs with the same one. Without it a longer model draws the mechanism's own constants anew where their shape follows the length.
    pub kept_by_weights: Option<KeptSetting>,
    /// Whether weights that were trained with full attention serve it.
    pub fits_full_weights: bool,
    /// The knob that is set where keys and values pass through `ln_local` and `ln_global` (DualLN).
    pub dual_norm: Option<Knob<bool>>,
    /// Whether a block with rotary positions turns its queries and keys: softmax attention over keys at places of their own.
    pub rotary: bool,
    /// Last names of parameters that weight decay leaves alone.
    pub without_decay: &'static [&'static str],
    /// Settings under which the result of a head is one matrix times its values, as on the command line: without norms, gates and
    /// activations of values.
    pub linear_form: &'static [(&'static str, &'static str)],
}

impl InModels {
    /// No settings of its own, weights of its own.
    pub const PLAIN: Self = Self {
        language: &[],
        released_block: None,
        follows_length: None,
        kept_by_weights: None,
        fits_full_weights: false,
        dual_norm: None,
        rotary: false,
        without_decay: &[],
        linear_form: &[],
    };
}

/// Name and value of a setting of `Knobs` in a model of so many positions; nothing where such a model makes no use of it.
pub type KeptSetting = fn(&Knobs, usize) -> Option<(&'static str, Value)>;

/// One attention mechanism, as data.
pub struct MechanismEntry {
    /// Name in CLI, TOML and CSV.
    pub name: &'static str,
    /// Name in prose.
    pub title: &'static str,
    /// Where it was published.
    pub paper: Paper,
    /// What it can do.
    pub support: Support,
    /// Its knobs.
    pub knobs: &'static [KnobSpec],
    /// Complexity in words.
    pub complexity: &'static str,
    /// Growth of time with length.
    pub time: Growth,
    /// Growth of memory with length.
    pub memory: Growth,
    /// Equations in plain text, for `list mechanisms --model NAME`.
    pub equations: &'static str,
    /// Known deviations of papers and reference codes, and which side is taken.
    pub deviations: &'static [&'static str],
    /// General properties that the definition breaks.
    pub exceptions: &'static [Exception],
    /// Knobs that change nothing under a condition: setting one then is refused.
    pub idle: &'static [Idle],
    /// What models around it want to know.
    pub in_models: InModels,
    /// Checks knobs against each other and the shape (rank above length, heads, ...).
    pub validate: fn(&Knobs, &Shape) -> std::result::Result<(), String>,
    /// What the layer must provide.
    pub needs: fn(&Knobs) -> Needs,
    /// Cost of one call.
    pub cost: fn(&Knobs, &Shape) -> Cost,
    /// Who sees whom, for mechanisms that are a pattern (`None` where every pair may interact).
    pub pattern: fn(&Knobs, &Shape) -> Option<Pattern>,
    /// Builds the mechanism with its parameters and constants.
    pub build: fn(&MechanismConfig, &ParamBuilder) -> Result<Box<dyn Mechanism>>,
}

impl MechanismEntry {
    /// What speaks against `knobs` at `shape`: values that do not fit, and ones that are set without effect.
    pub fn admits(&self, knobs: &Knobs, shape: &Shape) -> std::result::Result<(), String> {
        (self.validate)(knobs, shape)?;
        let set = |idle: &&Idle| knobs.is_set(self.knobs, idle.knob);
        match self.without_effect(knobs, shape).find(set) {
            Some(Idle { knob, why, .. }) => {
                let changed = knobs.changes_and(self.knobs, &[knob]);
                Err(format!("{}:{changed}: {knob} has no effect {why}; leave it out", self.name))
            }
            None => Ok(()),
        }
    }

    /// The knobs that change nothing beside the other `knobs` at `shape`, whatever their values.
    pub fn without_effect(&self, knobs: &Knobs, shape: &Shape) -> impl Iterator<Item = &'static Idle> {
        self.idle.iter().filter(move |idle| (idle.when)(knobs, shape))
    }
}

/// What a mechanism is built for.
#[derive(Clone, Debug)]
pub struct MechanismConfig {
    /// Settings.
    pub knobs: Knobs,
    /// Heads.
    pub heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Width of the layer input x.
    pub width: usize,
    /// Longest sequence it will see (position-indexed parameters have this size).
    pub max_len: usize,
    /// Whether the causal form runs.
    pub causal: bool,
    /// Number of the layer, for constants that differ by layer.
    pub layer: usize,
}

/// Inputs of one call.
pub struct AttentionInput<'a> {
    /// Projected queries, keys, values.
    pub qkv: &'a Qkv,
    /// Layer input [b, t, e], after any pre-norm; where [`Needs::x`].
    pub x: Option<&'a Tensor>,
    /// [b, t]: 1 keep, 0 padding; absent keeps all.
    pub mask: Option<&'a Tensor>,
    /// Projections of the class token, one position.
    pub cls: Option<&'a Qkv>,
    /// Projections for global positions, where [`Needs::global`].
    pub global: Option<&'a Qkv>,
    /// What the layer's skip path carries [b, n, e], where [`Needs::residual`].
    pub residual: Option<&'a Tensor>,
    /// The second stream [b, rows, e], after any pre-norm, where [`Needs::stream`].
    pub stream: Option<&'a Tensor>,
    /// Cached positions in front of keys, values and x.
    pub memory: usize,
    /// Dropout of the attention weights, for mechanisms with [`Support::dropout`].
    pub dropout: Option<AttentionDropout>,
    /// Whether only the first position of the result is read, so that it may be all that there is of it.
    pub first_row: bool,
}

impl<'a> AttentionInput<'a> {
    /// Inputs without mask, class token or memory.
    pub fn new(qkv: &'a Qkv) -> Self {
        Self {
            qkv,
            x: None,
            mask: None,
            cls: None,
            global: None,
            residual: None,
            stream: None,
            memory: 0,
            dropout: None,
            first_row: false,
        }
    }

    /// The layer input [b, t, e].
    pub fn layer_input(&self) -> Result<&'a Tensor> {
        self.x.ok_or_else(|| candle_core::Error::msg("this mechanism was given no layer input x"))
    }

    /// Softmax attention over the pairs of `pattern` with this mask and dropout, logits q.k / sqrt(`head_dim`).
    pub fn over(&self, pattern: &'a Pattern, head_dim: usize) -> Attend<'a> {
        Attend { dropout: self.dropout, ..Attend::plain(pattern, self.mask, head_dim) }
    }

    /// Number of queries and of keys.
    pub fn lengths(&self) -> Result<(usize, usize)> {
        Ok((self.qkv.q()?.dim(2)?, self.qkv.value_dims()?.2))
    }
}

/// Results of one call.
pub struct AttentionOutput {
    /// The attended values.
    pub out: Heads,
    /// The class token's, where [`AttentionInput::cls`] was given.
    pub cls: Option<Heads>,
    /// What is added to the second stream [b, rows, e], where [`Needs::stream`].
    pub stream: Option<Tensor>,
}

impl AttentionOutput {
    /// The result [b, n, e] of a mixer, which has no heads.
    pub const fn rows(rows: Tensor) -> Self {
        Self { out: Heads::rows(rows), cls: None, stream: None }
    }
}

impl From<Heads> for AttentionOutput {
    fn from(out: Heads) -> Self {
        Self { out, cls: None, stream: None }
    }
}

/// A built mechanism.
pub trait Mechanism: Send + Sync {
    /// Attends.
    fn forward(&self, input: &AttentionInput) -> Result<AttentionOutput>;

    /// Keys and values side by side as the softmax meets them: those of positions [b, t, 2 e] and those of slots
    /// [b, s, 2 e]. Nothing where a mechanism does not mix the two.
    fn softmax_inputs(&self, _input: &AttentionInput) -> Result<Option<(Tensor, Tensor)>> {
        Ok(None)
    }

    /// The state in front of the first of up to `room` tokens of `batch` sequences. Nothing where a mechanism is not causal or
    /// has no form here that goes on token by token.
    fn init_decode(
        &self,
        _batch: usize,
        _room: usize,
        _device: &Device,
    ) -> Result<Option<Box<dyn DecodeState>>> {
        Ok(None)
    }

    /// Attends the next token of a sequence, which [`AttentionInput`] has alone: [`Self::forward`] at its position.
    fn decode_step(&self, _input: &AttentionInput, _state: &mut dyn DecodeState) -> Result<AttentionOutput> {
        candle_core::bail!("this mechanism has no form that decodes token by token")
    }
}
