//! Which models make one token after another: `--mode decode`.

use crate::protocol::grid::{Grid, PlanError};
use crate::protocol::model_spec::ModelSpec;
use effattn_model::attention::choose::MechanismChoice;
use effattn_model::attention::entries;
use effattn_model::family::{self, Architecture};
use effattn_model::nn::params::ParamBuilder;

/// Why the model of `spec` with `choice` does not make one token after another; none if it does. Where no line of `grid` has
/// one that does, it is a mistake.
pub fn unsupported(
    grid: &Grid,
    spec: &ModelSpec,
    choice: &MechanismChoice,
) -> Result<Option<String>, PlanError> {
    if decodes(spec, choice) {
        return Ok(None);
    }
    let mut others = grid.entries.iter().filter_map(|other| other.choice.as_ref().ok());
    if !others.any(|other| decodes(spec, other)) {
        return Err(no_decoder(spec));
    }
    Ok(Some("cannot generate one token at a time".to_owned()))
}

/// Whether the model of `spec` makes one token after another: asked of a short one, whose state is small.
fn decodes(spec: &ModelSpec, choice: &MechanismChoice) -> bool {
    let short = ModelSpec { len: spec.len.min(16), ..spec.clone() };
    let built = |model: Box<dyn Architecture>| model.build_decoder(&ParamBuilder::counting(), 1);
    short.resolve_measured(choice).is_ok_and(|model| built(model).is_ok_and(|net| net.is_some()))
}

/// What to do where the model of `spec` cannot be decoded with.
fn no_decoder(spec: &ModelSpec) -> PlanError {
    let able = |preset: &str, choice: &MechanismChoice| {
        decodes(&ModelSpec { preset: preset.to_owned(), ..spec.clone() }, choice)
    };
    let all: Vec<MechanismChoice> = entries().into_iter().map(MechanismChoice::default_of).collect();
    let can: Vec<&str> =
        all.iter().filter(|choice| able(&spec.preset, choice)).map(|choice| choice.entry.name).collect();
    if can.is_empty() {
        let presets = family::presets(&family::families());
        let able = |name: &str| all.iter().any(|choice| able(name, choice));
        let presets: Vec<&str> = presets.iter().map(|preset| preset.name).filter(|name| able(name)).collect();
        return PlanError(format!(
            "the model of preset {} cannot generate one token at a time; --mode decode takes --preset {}",
            spec.preset,
            presets.join(", ")
        ));
    }
    PlanError(format!(
        "{} cannot generate one token at a time; --mode decode takes {}",
        spec.model,
        can.join(", ")
    ))
}
