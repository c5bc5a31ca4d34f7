//! The command line.

pub mod list;

use std::process::ExitCode;

/// Parses the command line, runs the command, and returns its exit code.
pub fn main() -> ExitCode {
    ExitCode::SUCCESS
}
