//! Families of models, as a table.
//!
//! A family is one file here and its line in [`TABLE`]: its presets, what a request for one of them means
//! ([`Family::resolve`], once per cell), what the model costs, how it is built, fed and trained. What measures and
//! trains models knows these traits only.

pub mod attention;
pub mod causal;
pub mod character_lm;
pub mod classifier;
mod definition;
pub mod labeler;
pub mod llama;
pub mod masked_lm;
pub mod pair;
mod sizes;
pub mod vision;
pub mod word_lm;

pub use super::batch::DataShape;
pub use definition::{
    Architecture, CausalArchitecture, CausalModel, Family, Loss, Metric, Model, ModelRequest, Objective,
    PresetDefaults, PresetInfo, ResolveError, StageCost,
};
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
