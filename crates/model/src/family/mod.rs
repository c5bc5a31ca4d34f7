//! Families of models, as a table.
//!
//! A family is one file here and its line in [`TABLE`]: its presets, what a request for one of them means
//! ([`Family::resolve`], once per cell), what the model costs, how it is built, fed and trained. What measures and
//! trains models knows these traits only.

pub mod attention;
pub mod causal;
pub mod character_lm;
pub mod classifier;
pub mod labeler;
pub mod llama;
pub mod masked_lm;
pub mod pair;
mod sizes;
pub mod vision;
pub mod word_lm;

use candle_core::{Device, Result, Tensor};

use self::causal::CausalArchitecture;
use super::ConfigError;
pub use super::batch::DataShape;
use super::batch::{Batch, InputKind, SyntheticInput};
use crate::attention::choose::MechanismChoice;
use crate::nn::dropout::DropoutRng;
use crate::nn::params::ParamBuilder;
use effattn_record::config::registry::Registry;
use effattn_record::config::unknown;
pub use sizes::SizeOverrides;

/// Every family of the crate.
pub static TABLE: &[&Family] = &[
    &classifier::FAMILY,
    &pair::FAMILY,
    &character_lm::FAMILY,
    &word_lm::FAMILY,
    &llama::FAMILY,
    &masked_lm::FAMILY,
    &labeler::FAMILY,
    &vision::FAMILY,
    &attention::FAMILY,
];

static ALL: Registry<Family> = Registry::new(TABLE);

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
        self.causal().map_or(Ok(None), |causal| causal::decoder(causal.as_ref(), builder, batch))
    }

    /// The model as protocols of running text train it; nothing where it is no causal language model.
    fn causal(&self) -> Option<Box<dyn CausalArchitecture>> {
        None
    }

    /// Whether weight decay takes part in the update of the parameter called `name`.
    fn decays(&self, name: &str) -> bool {
        crate::attention::decays(name)
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

/// Refuses what the presets of a family without tasks and pooling do not have.
fn tasks_of(request: &ModelRequest, preset: &str) -> std::result::Result<(), ResolveError> {
    match (request.task, &request.sizes.pooling) {
        (Some(task), _) => Err(ResolveError::Invalid(format!(
            "preset {preset} is measured by speed and memory; no protocol trains it on {task} yet"
        ))),
        (None, Some(_)) => {
            Err(ResolveError::Invalid(format!("preset {preset} has no pooling: it predicts positions")))
        }
        (None, None) => Ok(()),
    }
}

/// Adds a family at run time (a library user's own, or a test's).
pub fn register(family: &'static Family) {
    ALL.add(family);
}

/// Every family: the table, then the registered ones.
pub fn families() -> Vec<&'static Family> {
    ALL.all()
}

/// The family called `name`.
pub fn find(name: &str) -> Option<&'static Family> {
    families().into_iter().find(|family| family.name == name)
}

/// What `preset` is measured with where nothing else is said.
pub fn usual(preset: &str) -> Option<PresetDefaults> {
    (serving(&families(), preset, None).ok()?.usual)(preset)
}

/// The presets of `families`, each once.
pub fn presets(families: &[&'static Family]) -> Vec<PresetInfo> {
    let mut all: Vec<PresetInfo> = Vec::new();
    for preset in families.iter().flat_map(|family| (family.presets)()) {
        if all.iter().all(|known| known.name != preset.name) {
            all.push(preset);
        }
    }
    all
}

/// Names of the presets of the families that `wanted` says.
pub fn names(wanted: impl Fn(&Family) -> bool) -> Vec<&'static str> {
    let families: Vec<_> = families().into_iter().filter(|family| wanted(family)).collect();
    presets(&families).iter().map(|preset| preset.name).collect()
}

/// Knobs that the preset called `name` sets to something else than the mechanism's default.
pub fn knobs_of(name: &str) -> Vec<&'static str> {
    let preset = presets(&families()).into_iter().find(|preset| preset.name == name);
    preset.map_or_else(Vec::new, |preset| preset.knobs)
}

/// The family of `families` that has the model of `preset` for `task`; where none has it, one that has the preset and
/// can say what it lacks.
pub fn serving(
    families: &[&'static Family],
    preset: &str,
    task: Option<&str>,
) -> std::result::Result<&'static Family, ResolveError> {
    let has = |family: &&&Family| (family.presets)().iter().any(|known| known.name == preset);
    let serves = |family: &&&Family| (family.serves)(preset, task);
    let found = families.iter().find(serves).or_else(|| families.iter().find(has));
    found.copied().ok_or_else(|| {
        ResolveError::Invalid(unknown("preset", preset, presets(families).iter().map(|preset| preset.name)))
    })
}

/// The model that is asked for, of one of `families` that reads the examples.
pub fn resolve(
    families: &[&'static Family],
    request: &ModelRequest,
) -> std::result::Result<Box<dyn Architecture>, ResolveError> {
    let ModelRequest { preset, task, examples, .. } = *request;
    let reads = |family: &&Family| examples.is_none_or(|examples| examples.input == family.input);
    let readers: Vec<&'static Family> = families.iter().copied().filter(reads).collect();
    let family = serving(&readers, preset, task).or_else(|_| {
        let family = serving(families, preset, task)?;
        let (task, reads) = (task.unwrap_or("the task"), family.input.words());
        let has = examples.map_or("others", |examples| examples.input.words());
        Err(ResolveError::Invalid(format!(
            "preset {preset} reads {reads}, {task} has {has}; choose another --preset"
        )))
    })?;
    let resolved = (family.resolve)(request)?;
    resolved.validate()?;
    Ok(resolved)
}
