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

/// The model that `request` asks for, for segments of every one of `lens`, the longest of which fixes what a mechanism keeps for a whole
/// run; it is handed over for segments of the first.
pub fn resolve_for(
    request: &ModelRequest,
    lens: &[usize],
) -> Result<Box<dyn CausalArchitecture>, ResolveError> {
    let longest = lens.iter().copied().max().or(request.len);
    let model = resolve(&ModelRequest { len: longest, cached: longest, ..*request })?;
    for &len in lens {
        model.resized(len, len).validate()?;
    }
    Ok(match lens.first() {
        Some(&first) => model.resized(first, first),
        None => model,
    })
}

/// Positions of a segment, at most `most` where that is possible, whose cache `model` can go on from: some mechanisms compress whole
/// segments.
pub fn block_within(model: &dyn CausalArchitecture, most: usize) -> usize {
    let longest = model.max_len();
    let fits = |block: &usize| model.resized(*block, *block).validate().is_ok();
    (1..=most.min(longest)).rev().find(fits).unwrap_or(longest)
}

/// Presets of causal language models.
pub fn presets() -> Vec<&'static str> {
    names(|family| family.objective == Objective::NextToken)
}
