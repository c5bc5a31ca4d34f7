//! The zoo: one file per attention mechanism, one line each in [`TABLE`].
//!
//! An [`MechanismEntry`] is data; everything that iterates the zoo (help, `list`, `check`, property tests, benches,
//! reports) iterates [`entries`]. To add a mechanism: write `attention/<name>.rs` with a `pub static ENTRY`
//! and add its line to `TABLE`.

pub mod aft_local;
pub mod aft_simple;
pub mod based;
pub mod bigbird;
pub mod choose;
pub mod cosformer;
pub mod decode;
mod definition;
pub mod delta;
pub mod dp;
mod feature;
pub mod fnet;
pub mod full;
pub mod gla;
pub mod gqa;
mod hippo;
pub mod knobs;
pub mod linear;
pub mod linear_features;
pub mod linformer;
pub mod linformer_window;
pub mod local;
pub mod long_short;
pub mod longformer;
pub mod lru;
pub mod ls;
pub mod ls2d;
pub mod luna;
pub mod mamba2;
pub mod mega;
pub mod mega_ema;
mod mixer;
mod needs;
pub mod nystrom;
pub mod observe;
mod output_stage;
pub mod performer;
pub mod reformer;
pub mod retention;
pub mod rfa;
pub mod rope;
mod rotary_softmax;
pub mod s5;
pub mod sinkhorn;
pub mod sparse;
mod state_space;
pub mod streaming;
pub mod synthesizer;
pub mod transformer_xl;
pub mod window;

#[cfg(test)]
mod tests;

pub use crate::nn::short_conv::ConvForm;
pub use definition::{
    AttentionInput, AttentionOutput, Cost, Exception, Growth, Idle, InModels, KeptSetting, Mechanism,
    MechanismConfig, MechanismEntry, Paper, Property, Shape, Support,
};
use effattn_record::config::registry::Registry;
pub use needs::{HeadShape, Needs, OutputForm, Projections};

/// Every mechanism of the crate.
pub static TABLE: &[&MechanismEntry] = &[
    &full::ENTRY,
    &window::ENTRY,
    &local::ENTRY,
    &longformer::ENTRY,
    &bigbird::ENTRY,
    &sparse::ENTRY,
    &cosformer::ENTRY,
    &dp::ENTRY,
    &linear_features::IDENTITY,
    &linear_features::LEAKY_RELU,
    &linear::ENTRY,
    &linformer::ENTRY,
    &linformer_window::ENTRY,
    &ls::ENTRY,
    &ls2d::ENTRY,
    &nystrom::ENTRY,
    &performer::ENTRY,
    &reformer::ENTRY,
    &linear_features::RELU,
    &rfa::ENTRY,
    &sinkhorn::ENTRY,
    &synthesizer::ENTRY,
    &transformer_xl::ENTRY,
    &rope::ENTRY,
    &gqa::ENTRY,
    &streaming::ENTRY,
    &luna::ENTRY,
    &retention::ENTRY,
    &gla::ENTRY,
    &mamba2::ENTRY,
    &delta::DELTANET,
    &delta::GATED_DELTANET,
    &based::ENTRY,
    &s5::ENTRY,
    &lru::ENTRY,
    &mega::ENTRY,
    &mega_ema::ENTRY,
    &aft_simple::ENTRY,
    &aft_local::ENTRY,
    &fnet::ENTRY,
];

static ALL: Registry<MechanismEntry> = Registry::new(TABLE);

/// Adds a mechanism at run time (a library user's own, or a test's).
pub fn register(entry: &'static MechanismEntry) {
    ALL.add(entry);
}

/// Every mechanism: the table, then the registered ones.
pub fn entries() -> Vec<&'static MechanismEntry> {
    ALL.all()
}

/// Whether weight decay takes part in the update of a model's parameter called `name`: not for what steers a recurrence.
pub fn decays(name: &str) -> bool {
    let last = name.rsplit('.').next().unwrap_or(name);
    entries().iter().all(|entry| !entry.in_models.without_decay.contains(&last))
}

/// The mechanism called `name`.
pub fn find(name: &str) -> Option<&'static MechanismEntry> {
    entries().into_iter().find(|entry| entry.name == name)
}
