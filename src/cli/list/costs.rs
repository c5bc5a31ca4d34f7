//! What a mechanism costs in a preset at a length, computed from its definition.

use serde::Serialize;

use crate::attention::choose::Choice;
use crate::model::ModelConfig;
use crate::model::preset::Preset;

/// Costs of a whole model. Absent: this mechanism cannot serve this model ([`Costs::problem`] says why).
#[derive(Clone, Debug, Serialize)]
pub(super) struct Costs {
    /// Task whose model it is; none for the one that `speed` and `memory` measure.
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

/// The costs of `choice` in the model of `task` (or the one to measure) at `len`, or at the longest length
/// of its protocol.
pub(super) fn costs(
    choice: &Choice,
    preset: &Preset,
    task: Option<&'static str>,
    len: Option<usize>,
) -> Costs {
    let mut costs = Costs {
        task,
        len: len.unwrap_or_default(),
        parameters: None,
        flops: None,
        core_macs: None,
        state_bytes: None,
        problem: None,
    };
    let form = match preset.form(task, choice.entry.name) {
        Ok(form) => form,
        Err(error) => return Costs { problem: Some(error.to_string()), ..costs },
    };
    costs.len = len.unwrap_or(form.max_len);
    let model = form.model(choice.entry, choice.knobs.clone(), form.max_len.max(costs.len));
    let backbone = &model.backbone;
    if choice.entry.support.causal {
        let layer = (choice.entry.cost)(&choice.knobs, &backbone.shape(1, costs.len, true));
        costs.state_bytes = Some(layer.state_bytes * backbone.layers as u64).filter(|bytes| *bytes > 0);
    }
    match measure(&model, &mut costs) {
        Ok(()) => costs,
        Err(problem) => Costs { problem: Some(problem), ..costs },
    }
}

fn measure(model: &ModelConfig, costs: &mut Costs) -> Result<(), String> {
    model.validate().map_err(|error| error.to_string())?;
    costs.parameters = Some(model.parameters().map_err(|error| error.to_string())?);
    costs.flops = Some(model.flops(costs.len));
    costs.core_macs = Some(model.core_macs(1, costs.len));
    Ok(())
}

/// The task that `len` belongs to: the only one of the preset with that protocol length and the sizes of the
/// model to measure. Tasks differ in their number of classes, which the exact count of FLOPs shows.
pub(super) fn task_of(preset: &Preset, len: usize) -> Option<&'static str> {
    let bare = preset.form(None, "").ok()?;
    let same = |task: &&'static str| {
        let form = preset.form(Some(task), "");
        form.is_ok_and(|form| form.max_len == len && form.backbone == bare.backbone && form.towers == 1)
    };
    let mut tasks = preset.tasks().filter(same);
    let first = tasks.next()?;
    tasks.next().is_none().then_some(first)
}
