//! What a mechanism costs in a preset at a length, computed from its definition.

use serde::Serialize;

use crate::attention::choose::Choice;
use crate::attention::knobs::Knobs;
use crate::data;
use crate::model::ModelConfig;
use crate::model::language_preset::{self, LanguagePreset};
use crate::model::lm::LmConfig;
use crate::model::preset::{self, Preset};

/// The corpora that language models are counted for, and their symbols, the code's four special ones included.
fn corpora() -> Vec<(&'static str, usize)> {
    let published = data::corpora().into_iter().filter(|(_, symbols)| symbols.complete.is_some());
    published.map(|(set, symbols)| (set.name, symbols.vocabulary)).collect()
}

/// Costs of a whole model. Absent: this mechanism cannot serve this model ([`Costs::problem`] says why).
#[derive(Clone, Debug, Default, Serialize)]
pub(super) struct Costs {
    /// Task or corpus whose model it is; none for the one that `speed` and `memory` measure.
    pub(super) task: Option<&'static str>,
    /// Length.
    pub(super) len: usize,
    /// Trained numbers.
    pub(super) parameters: Option<usize>,
    /// FLOPs of one forward of one example; a multiply-add is 1, LayerNorm 5 per element.
    pub(super) flops: Option<u64>,
    /// Multiply-adds of the attention cores.
    pub(super) core_macs: Option<u64>,
    /// Bytes a causal decoder keeps per sequence; none without a causal form.
    pub(super) state_bytes: Option<u64>,
    /// Why there are no costs.
    pub(super) problem: Option<String>,
}

/// A preset of either kind.
#[derive(Clone, Copy)]
pub(super) enum Backbone {
    Classifier(&'static Preset),
    Language(&'static LanguagePreset),
}

impl Backbone {
    /// All presets.
    pub(super) fn all() -> Vec<Self> {
        let classifiers = preset::TABLE.iter().map(|preset| Self::Classifier(preset));
        classifiers.chain(language_preset::TABLE.iter().map(Self::Language)).collect()
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Classifier(preset) => preset.name,
            Self::Language(preset) => preset.name,
        }
    }

    /// Name, title, description and source.
    pub(super) fn texts(self) -> [&'static str; 4] {
        match self {
            Self::Classifier(preset) => [preset.name, preset.title, preset.description, preset.source],
            Self::Language(preset) => [preset.name, preset.title, preset.description, preset.source],
        }
    }

    /// The tasks or corpora it has a model for.
    pub(super) fn tasks(self) -> Vec<&'static str> {
        match self {
            Self::Classifier(preset) => preset.tasks().collect(),
            Self::Language(_) => corpora().iter().map(|(name, _)| *name).collect(),
        }
    }

    /// The task that is counted where none is named: for language models the first corpus, for classifiers the
    /// only task with `len` as its protocol length and the sizes of the model that `speed` measures, else that
    /// one. Tasks differ in their number of classes, which the exact count of FLOPs shows.
    pub(super) fn task_of(self, len: Option<usize>) -> Option<&'static str> {
        let (preset, len) = match (self, len) {
            (Self::Language(_), _) => return corpora().first().map(|(name, _)| *name),
            (Self::Classifier(_), None) => return None,
            (Self::Classifier(preset), Some(len)) => (preset, len),
        };
        let bare = preset.form(None, "").ok()?;
        let same = |task: &&'static str| {
            let form = preset.form(Some(task), "");
            form.is_ok_and(|form| form.max_len == len && form.backbone == bare.backbone && form.towers == 1)
        };
        let mut tasks = preset.tasks().filter(same);
        let first = tasks.next()?;
        tasks.next().is_none().then_some(first)
    }

    /// The costs of `choice` in the model of `task` at `len`, or at the longest length of its protocol.
    /// Without `count` the parameters are left out, which is much faster.
    pub(super) fn costs(
        self,
        choice: &Choice,
        task: Option<&'static str>,
        len: Option<usize>,
        count: bool,
    ) -> Costs {
        let mut costs = Costs { task, len: len.unwrap_or_default(), ..Costs::default() };
        let counted = match self {
            Self::Classifier(preset) => classifier(choice, preset, len, &mut costs, count),
            Self::Language(preset) => language(choice, preset, len, &mut costs, count),
        };
        costs.problem = counted.err();
        costs
    }
}

fn classifier(
    choice: &Choice,
    preset: &Preset,
    len: Option<usize>,
    costs: &mut Costs,
    count: bool,
) -> Result<(), String> {
    let form = preset.form(costs.task, choice.entry.name).map_err(|error| error.to_string())?;
    costs.len = len.unwrap_or(form.max_len);
    let model: ModelConfig = form.model(choice.entry, choice.knobs.clone(), form.max_len.max(costs.len));
    if choice.entry.support.causal {
        let layer = (choice.entry.cost)(&choice.knobs, &model.backbone.shape(1, costs.len, true));
        let state = layer.state_bytes * model.backbone.layers as u64;
        costs.state_bytes = Some(state).filter(|bytes| *bytes > 0);
    }
    model.validate().map_err(|error| error.to_string())?;
    costs.flops = Some(model.flops(costs.len));
    costs.core_macs = Some(model.core_macs(1, costs.len));
    if count {
        costs.parameters = Some(model.parameters().map_err(|error| error.to_string())?);
    }
    Ok(())
}

fn language(
    choice: &Choice,
    preset: &LanguagePreset,
    len: Option<usize>,
    costs: &mut Costs,
    count: bool,
) -> Result<(), String> {
    let vocab = corpora().iter().find(|(name, _)| Some(*name) == costs.task).map_or(0, |(_, vocab)| *vocab);
    let changed = given(choice);
    let changed = changed.iter().map(|(name, value)| (*name, value.as_str()));
    let mut model: LmConfig =
        preset.model(choice.entry, changed, vocab).map_err(|error| error.to_string())?;
    costs.len = len.unwrap_or(model.block);
    model.block = costs.len;
    model.mem = model.mem.min(costs.len);
    model.validate().map_err(|error| error.to_string())?;
    costs.flops = Some(model.flops(costs.len, model.mem));
    costs.core_macs =
        Some(model.attention_cost(1, costs.len, model.mem).core_macs * model.backbone.layers as u64);
    costs.state_bytes = Some(model.state_bytes(costs.len)).filter(|bytes| *bytes > 0);
    if count {
        costs.parameters = Some(model.parameters().map_err(|error| error.to_string())?);
    }
    Ok(())
}

/// The settings that were named, as text.
fn given(choice: &Choice) -> Vec<(&'static str, String)> {
    let defaults = Knobs::defaults(choice.entry.knobs);
    let settings = choice.knobs.iter().zip(defaults.iter());
    settings
        .filter(|(now, before)| now != before)
        .map(|((name, value), _)| (name, value.to_string()))
        .collect()
}
