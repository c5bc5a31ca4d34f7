//! Programs: anybody's code behind a pipe, checked and timed like a mechanism (`docs/programs.md`).
//!
//! [`wire`] is how messages look, [`description`] how a program is started, [`Program`] one that runs.

pub mod abilities;
pub mod candle_flash;
pub mod description;
mod process;
pub mod wire;

pub use process::{Answer, Conditions, Program};
