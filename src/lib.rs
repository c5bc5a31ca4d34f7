//! Benchmarks and reproduces efficient-attention transformers.
//!
//! Imports go down only (`tests/layers/main.rs` enforces it):
//!
//! ```text
//! cli -> protocol -> train -> model -> attention -> nn -> kernel -> device
//!        run (plan, worker, journal)   data beside model   report -> record, stats, pattern
//! leaves: config record stats term pattern
//! ```
//!
//! | module | holds |
//! |---|---|
//! | [`attention`] | one file per mechanism, one line each in [`attention::TABLE`] |
//! | [`data`] | one file per data set, one line each in [`data::TABLE`] |
//! | [`train`] | schedules, optimizer, training step |
//! | [`model`] | transformers around any mechanism: classifier, two towers, language model |
//! | [`kernel`] | the fused operations and the plain composed twin that defines each |
//! | [`pattern`] | who sees whom, as pure data |
//! | [`nn`] | named parameters and their initialisation, positions |
//! | [`stats`] | summaries of samples, comparisons, growth laws |
//! | [`config`] | grammars of flags, settings, suites |
//! | [`record`] | rows, and how they become files |
//! | [`report`] | tables and charts from rows |
//! | [`device`] | home of `cfg(feature)` (with the CUDA kernels): backends, counted memory, random streams |

pub mod attention;
pub mod cli;
pub mod config;
pub mod data;
pub mod device;
pub mod kernel;
pub mod model;
pub mod nn;
pub mod pattern;
pub mod protocol;
pub mod record;
pub mod report;
pub mod run;
pub mod stats;
pub mod term;
pub mod train;
