//! What a family of models says of itself, what resolves a request, and what is built.

use candle_core::{Device, Result, Tensor, bail};

use super::sizes::SizeOverrides;
use crate::ConfigError;
use crate::attention::choose::MechanismChoice;
use crate::attention::decode::DecodeState;
use crate::batch::{Batch, DataShape, InputKind, SyntheticInput};
use crate::char_lm::{Cache, next_symbol_loss};
use crate::nn::dropout::DropoutRng;
use crate::nn::params::ParamBuilder;
use effattn_kernel::embedding::PADDING;

/// One family of models, as data.
pub struct Family {
    /// Name.
    pub name: &'static str,
    /// What it is, in a line.
    pub title: &'static str,
    /// What it reads.
    pub input: InputKind,
    /// What it learns: protocols train any family whose objective is theirs.
    pub objective: Objective,
    /// What rows call the made-up samples that it is measured on.
    pub sample: &'static str,
    /// Its presets. Families may share one, each with tasks of its own.
    pub presets: fn() -> Vec<PresetInfo>,
    /// Whether it has a model for this preset and task (without task: the one that `speed` and `memory` measure).
    pub serves: fn(preset: &str, task: Option<&str>) -> bool,
    /// The task whose model `list` counts where only a preset, and perhaps a length, is named.
    pub usual_task: fn(preset: &str, len: Option<usize>) -> Option<&'static str>,
    /// What a preset is measured with where nothing else is said; nothing: what is usual for the command.
    pub usual: fn(preset: &str) -> Option<PresetDefaults>,
    /// What a request means.
    pub resolve: fn(&ModelRequest) -> std::result::Result<Box<dyn Architecture>, ResolveError>,
}

impl Family {
    /// Names of its presets.
    pub fn names(&self) -> Vec<&'static str> {
        (self.presets)().iter().map(|preset| preset.name).collect()
    }
}

/// What a family of models learns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Objective {
    /// A class for every sample: [`Model::metrics`] gives `loss` and `accuracy`.
    Class,
    /// The next token at every position of a stream: [`Architecture::causal`] gives the model.
    NextToken,
    /// Something that only protocols of its own train.
    Other,
}

/// What a preset is measured with where nothing else is said.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PresetDefaults {
    /// Mechanisms, as on the command line.
    pub models: &'static str,
    /// Length.
    pub len: usize,
}

/// A preset, as lists show it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PresetInfo {
    /// Name on the command line and in suites.
    pub name: &'static str,
    /// What it is, in a line.
    pub title: &'static str,
    /// What it takes from its source and what it does not.
    pub description: &'static str,
    /// Where its values come from.
    pub source: &'static str,
    /// The tasks or corpora it has a model for.
    pub tasks: Vec<&'static str>,
    /// Knobs that it sets to something else than the mechanism's default.
    pub knobs: Vec<&'static str>,
}

/// A request for a model.
#[derive(Clone, Copy)]
pub struct ModelRequest<'a> {
    /// Preset.
    pub preset: &'a str,
    /// Task; absent: the model that is measured.
    pub task: Option<&'a str>,
    /// The mechanism.
    pub choice: &'a MechanismChoice,
    /// Sizes in the place of the preset's.
    pub sizes: &'a SizeOverrides,
    /// Longest input; absent: that of the preset's protocol.
    pub len: Option<usize>,
    /// Cached positions in front of it, of which a mechanism without cache has none; absent: the preset's.
    pub cached: Option<usize>,
    /// Number of symbols, where the data say it; absent: the preset's or the task's.
    pub vocab: Option<usize>,
    /// What the task's examples are, for a task that the preset's source does not have.
    pub examples: Option<DataShape>,
}

impl<'a> ModelRequest<'a> {
    /// The model that is measured, as long as its preset's protocol has it.
    pub fn new(preset: &'a str, choice: &'a MechanismChoice, sizes: &'a SizeOverrides) -> Self {
        Self { preset, task: None, choice, sizes, len: None, cached: None, vocab: None, examples: None }
    }
}

/// Why there is no model for a request.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ResolveError {
    /// The user asked for something that nobody has: a usage error.
    #[error("{0}")]
    Invalid(String),
    /// This mechanism cannot do it: a row that says `unsupported`.
    #[error("{0}")]
    Unsupported(String),
}

impl ResolveError {
    /// A mistake of the user.
    pub fn wrong(error: impl ToString) -> Self {
        Self::Invalid(error.to_string())
    }
}

impl From<ConfigError> for ResolveError {
    fn from(error: ConfigError) -> Self {
        match error {
            ConfigError::Unsupported { .. } | ConfigError::Knobs { .. } | ConfigError::TooLarge { .. } => {
                Self::Unsupported(error.to_string())
            }
            ConfigError::Heads { .. }
            | ConfigError::SharedHeads { .. }
            | ConfigError::Zero { .. }
            | ConfigError::Towers(_)
            | ConfigError::Dropout(_) => Self::Invalid(error.to_string()),
        }
    }
}

/// What a layer or stage costs, by definition.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StageCost {
    /// Its name.
    pub name: String,
    /// FLOPs of one forward of one sample.
    pub flops: u64,
    /// Multiply-adds of the attention core for the whole batch.
    pub core_macs: u64,
    /// Bytes kept per sequence by the form that runs, were it a decoder.
    pub state_bytes: u64,
}

/// A resolved architecture: sizes and costs are known, parameters do not exist.
pub trait Architecture: Send + Sync {
    /// The longest input.
    fn max_len(&self) -> usize;

    /// # Errors
    /// Sizes that no model has, what the mechanism cannot do.
    fn validate(&self) -> std::result::Result<(), ResolveError>;

    /// Costs of its layers or stages for `batch` samples of length `len`, in order.
    fn stages(&self, batch: usize, len: usize) -> Vec<StageCost>;

    /// The model with its parameters.
    fn build(&self, builder: &ParamBuilder) -> Result<Box<dyn Model>>;

    /// The model as it is measured, on batches of `batch` samples: every step costs the same.
    fn build_measured(&self, builder: &ParamBuilder, _batch: usize) -> Result<Box<dyn Model>> {
        self.build(builder)
    }

    /// The model as it makes one token after another, behind as many tokens as its longest input has: every forward pass is
    /// the next token of `batch` sequences. Nothing where it has no form that does so.
    fn build_decoder(&self, builder: &ParamBuilder, batch: usize) -> Result<Option<Box<dyn Model>>> {
        self.causal().map_or(Ok(None), |causal| decoder(causal.as_ref(), builder, batch))
    }

    /// The model as protocols of running text train it; nothing where it is no causal language model.
    fn causal(&self) -> Option<Box<dyn CausalArchitecture>> {
        None
    }

    /// Whether weight decay takes part in the update of the parameter called `name`.
    fn decays(&self, name: &str) -> bool {
        crate::attention::decays(name)
    }

    /// Whether its first position is a class token, which it puts in front of the input.
    fn class_in_front(&self) -> bool {
        false
    }

    /// What the tensor `name` of a file in the public format is called here; nothing where the model has no use for it.
    fn map_tensor_name(&self, name: &str) -> Option<String> {
        Some(name.to_owned())
    }

    /// Batches to measure it on.
    fn synthetic_batches(&self, wanted: &SyntheticInput, device: &Device) -> Result<Vec<Batch>>;

    /// FLOPs of one forward of one sample of length `len`.
    fn flops(&self, len: usize) -> u64 {
        self.stages(1, len).iter().map(|stage| stage.flops).sum()
    }

    /// Multiply-adds of the attention cores of one forward of `batch` samples.
    fn core_macs(&self, batch: usize, len: usize) -> u64 {
        self.stages(batch, len).iter().map(|stage| stage.core_macs).sum()
    }

    /// Bytes a causal decoder of this form would keep per sequence behind `len` positions, whether or not the model is one.
    fn state_bytes(&self, len: usize) -> u64 {
        self.stages(1, len).iter().map(|stage| stage.state_bytes).sum()
    }

    /// Number of trained numbers.
    fn parameters(&self) -> Result<usize> {
        let builder = ParamBuilder::counting();
        self.build(&builder)?;
        Ok(builder.finish().count())
    }
}

/// A built model, and whatever it carries from batch to batch.
pub trait Model {
    /// Its outputs, without dropout.
    fn forward(&mut self, batch: &Batch) -> Result<Tensor>;

    /// What training makes small, differentiable; `rng` says what is dropped.
    fn loss(&mut self, batch: &Batch, rng: DropoutRng) -> Result<Loss>;

    /// Its scores on a batch, `loss` first, without dropout.
    fn metrics(&mut self, batch: &Batch) -> Result<Vec<Metric>>;
}

/// A loss as a sum and what it is divided by. Sums and counts of micro-batches and devices add up, so that the
/// quotient does not depend on how a batch is cut.
///
/// A family that counts every micro-batch once, whatever its size, gives its mean and a count of 1.
pub struct Loss {
    /// The sum.
    pub sum: Tensor,
    /// How many there are in it.
    pub count: f64,
}

impl Loss {
    /// The mean of a micro-batch that counts once.
    pub const fn mean(mean: Tensor) -> Self {
        Self { sum: mean, count: 1.0 }
    }
}

/// A score as a sum and a count.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Metric {
    /// Its name: `loss`, `accuracy`.
    pub name: &'static str,
    /// The sum.
    pub sum: f64,
    /// What it is divided by.
    pub count: f64,
}

/// The architecture of a causal language model, which [`Architecture::causal`] gives.
pub trait CausalArchitecture: Architecture {
    /// Cached positions in front of a segment; 0: segments are read on their own.
    fn cached(&self) -> usize;

    /// The same model for segments of `block` behind `cached` positions, of which a model without cache has none.
    fn resized(&self, block: usize, cached: usize) -> Box<dyn CausalArchitecture>;

    /// FLOPs of one forward of a segment behind a full cache.
    fn segment_flops(&self) -> u64 {
        self.flops(self.max_len())
    }

    /// The model with its parameters.
    fn build_causal(&self, builder: &ParamBuilder) -> Result<Box<dyn CausalModel>>;
}

/// A built causal language model: segments of a stream to logits of the next symbols.
pub trait CausalModel {
    /// The cache in front of a stream of `batch` sequences.
    fn start(&self, batch: usize) -> Result<Cache>;

    /// One segment: `ids` [b, n] (u32) behind `cache` to logits [b, n, vocab] and the next segment's cache. `rng` says what is
    /// dropped; `None`: nothing.
    fn segment(&self, ids: &Tensor, cache: &Cache, rng: Option<DropoutRng>) -> Result<(Tensor, Cache)>;

    /// What training makes small, from the cross entropies [b, n] of a segment, of which the last position's target is another
    /// segment's and must not count.
    fn segment_loss(&self, nll: &Tensor) -> Result<Loss>;

    /// What every layer carries in front of the first of up to `room` tokens of `batch` sequences; nothing where the mechanism
    /// has no form that goes on token by token.
    fn start_decoding(&self, batch: usize, room: usize) -> Result<Option<Vec<Box<dyn DecodeState>>>>;

    /// The next token `ids` [b, 1] (u32) of sequences behind `states` to logits [b, 1, vocab].
    fn decode(&self, ids: &Tensor, states: &mut [Box<dyn DecodeState>]) -> Result<Tensor>;

    /// -log p of every target [b, n] (u32) behind `ids` [b, n], in nats; 0 where the target is [`PADDING`]. Nothing stands in
    /// front of the first.
    fn nll(&self, ids: &Tensor, targets: &Tensor, rng: Option<DropoutRng>) -> Result<Tensor> {
        let (logits, _) = self.segment(ids, &self.start(ids.dim(0)?)?, rng)?;
        let nll = next_symbol_loss(&logits, targets)?;
        let keep = targets.ne(PADDING)?.to_dtype(nll.dtype())?;
        nll * keep
    }

    /// Number of layers that [`Cache`] has rows of.
    fn layers(&self) -> usize;

    /// The device of the parameters.
    fn device(&self) -> &Device;
}

/// `architecture` as it makes one token after another behind as many tokens as its longest input has, for `batch` sequences;
/// nothing where its mechanism has no form that does so.
fn decoder(
    architecture: &dyn CausalArchitecture,
    builder: &ParamBuilder,
    batch: usize,
) -> Result<Option<Box<dyn Model>>> {
    let room = architecture.max_len();
    let model = architecture.resized(room, 0).build_causal(builder)?;
    let Some(mut states) = model.start_decoding(batch, room)? else { return Ok(None) };
    states.iter_mut().for_each(|state| state.set_position(room - 1));
    Ok(Some(Box::new(NextToken(move |ids: &Tensor| {
        let logits = model.decode(ids, &mut states)?;
        states.iter_mut().for_each(|state| state.set_position(room - 1));
        Ok(logits)
    }))))
}

/// A model that makes the next token of sequences, always the same one: what it costs does not depend on what was before.
/// It holds the step: logits of one token of every sequence, after which the model is where it was.
pub(super) struct NextToken<F>(pub F);

impl<F: FnMut(&Tensor) -> Result<Tensor>> Model for NextToken<F> {
    fn forward(&mut self, batch: &Batch) -> Result<Tensor> {
        self.0(&batch.tokens()?.ids.narrow(1, 0, 1)?.contiguous()?)
    }

    fn loss(&mut self, _: &Batch, _: DropoutRng) -> Result<Loss> {
        bail!("tokens that are made one after another are not trained on")
    }

    fn metrics(&mut self, _: &Batch) -> Result<Vec<Metric>> {
        bail!("tokens that are made one after another have no score")
    }
}
