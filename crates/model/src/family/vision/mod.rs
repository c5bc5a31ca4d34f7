//! Images to classes: the models of [`crate::vision`] (Transformer-LS Tables 5 and 6, Figure 6).
//!
//! A preset is a backbone. Where it has two forms, the mechanism chooses: `cvt-13` with `full` is CvT-13, with `ls2d`
//! CvT*-LS-13. The length is the side of the images.

mod net;
mod presets;
mod resolve;
#[cfg(test)]
mod tests;

use super::{Family, Objective, PresetDefaults};
use crate::batch::InputKind;
pub use net::{ImageModel, rank};
use presets::{PRESETS, find};
pub use resolve::{ImageClassifier, classifier};

/// The table line.
pub static FAMILY: Family = Family {
    name: "vision",
    title: "images to classes",
    input: InputKind::Pixels,
    objective: Objective::Class,
    sample: "images",
    presets: || PRESETS.iter().map(|preset| preset.about.clone()).collect(),
    serves: |preset, _| find(preset).is_some(),
    usual_task: |_, _| None,
    usual: |preset| find(preset).map(|preset| PresetDefaults { models: preset.models[0], len: preset.size }),
    resolve: |asked| Ok(Box::new(classifier(asked)?)),
};
