//! What a mechanism costs in a preset at a length, computed from its definition.

use serde::Serialize;

use effattn_model::attention::choose::MechanismChoice;
use effattn_model::family::{self, Architecture, ModelRequest, ResolveError, SizeOverrides};

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

/// The costs of `choice` in the model of `preset` for `task` at `len`, or at the longest length of its protocol.
/// Without `parameters` they are left out, which is much faster.
pub(super) fn costs(
    choice: &MechanismChoice,
    preset: &str,
    task: Option<&'static str>,
    len: Option<usize>,
    parameters: bool,
) -> Costs {
    let mut costs = Costs { task, len: len.unwrap_or_default(), ..Costs::default() };
    costs.problem = count((choice, preset), len, &mut costs, parameters).err().map(|error| error.to_string());
    costs
}

fn count(
    (choice, preset): (&MechanismChoice, &str),
    len: Option<usize>,
    costs: &mut Costs,
    parameters: bool,
) -> Result<(), ResolveError> {
    let sizes = SizeOverrides::default();
    let task = costs.task;
    let asked = ModelRequest { task, ..ModelRequest::new(preset, choice, &sizes) };
    let resolve = family::serving(&family::families(), preset, costs.task)?.resolve;
    let mut model: Box<dyn Architecture> = resolve(&asked)?;
    costs.len = len.unwrap_or(model.max_len());
    if costs.len > model.max_len() {
        model = resolve(&ModelRequest { len, ..asked })?;
    }
    if choice.entry.support.causal {
        costs.state_bytes = Some(model.state_bytes(costs.len)).filter(|bytes| *bytes > 0);
    }
    model.validate()?;
    costs.flops = Some(model.flops(costs.len));
    costs.core_macs = Some(model.core_macs(1, costs.len));
    if parameters {
        costs.parameters = Some(model.parameters().map_err(ResolveError::wrong)?);
    }
    Ok(())
}
