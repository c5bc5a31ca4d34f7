//! Causal language models as protocols of running text see them: segments of a stream, one after another.

pub use super::{CausalArchitecture, CausalModel};
use super::{ModelRequest, Objective, ResolveError, families, names, resolve as find};
pub use crate::char_lm::Cache;

/// The causal language model that `request` asks for, validated.
pub fn resolve(request: &ModelRequest) -> Result<Box<dyn CausalArchitecture>, ResolveError> {
    let model = find(&families(), request)?;
    model.validate()?;
    model.causal().ok_or_else(|| {
        let presets = presets().join(", ");
        let preset = request.preset;
        ResolveError::Invalid(format!("preset {preset} is no causal language model; choose one of {presets}"))
    })
}

/// Presets of causal language models.
pub fn presets() -> Vec<&'static str> {
    names(|family| family.objective == Objective::NextToken)
}
