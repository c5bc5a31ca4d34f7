//! Benchmarks and reproduces efficient-attention transformers.
//!
//! The program is this package: [`cli`] on top of [`protocol`]s, which [`run`] cells of measuring and [`train`]ing. What it
//! stands on are crates of their own, whose arrows Cargo keeps; a library user finds them under these names:
//!
//! | module | crate | holds |
//! |---|---|---|
//! | [`attention`] | `effattn-model` | one file per mechanism, one line each in [`attention::TABLE`] |
//! | [`model`], [`nn`] | `effattn-model` | transformers around any mechanism, families of models; named parameters, positions |
//! | [`data`] | `effattn-data` | one file per data set, one line each in [`data::TABLE`] |
//! | [`kernel`], [`device`] | `effattn-kernel` | the fused operations with their composed definitions; backends, counted memory, random streams |
//! | [`record`], [`report`], [`config`], [`pattern`], [`stats`] | `effattn-record` | rows, tables and charts, settings and suites, attention patterns as data, statistics |

pub mod cli;
pub mod program;
pub mod protocol;
pub mod run;
pub mod term;
pub mod train;

pub use effattn_data as data;
pub use effattn_kernel::{self as kernel, device};
pub use effattn_model::{self as model, attention, nn};
pub use effattn_record::{self as record, config, own_setting, pattern, report, stats};
