//! What developers of effattn type: `cargo xtask --help`.

mod add;
mod golden;
mod quick;

use std::path::{Path, PathBuf};

use clap::Parser;

#[derive(Parser)]
#[command(name = "cargo xtask", about = "Commands for developers of effattn", disable_help_subcommand = true)]
enum Task {
    /// Write the file of a new entry and its line in the registry
    New {
        /// What to add
        kind: add::Kind,
        /// Its name on the command line, such as my-mixer
        name: String,
    },
    /// Copy golden files into the set that is built into the program
    Golden {
        /// A .safetensors file, or a folder of them
        from: PathBuf,
    },
    /// Check format, lints and tests of the crates that differ from a commit
    Quick {
        /// The commit
        #[arg(long, default_value = "HEAD", value_name = "COMMIT")]
        since: String,
    },
}

fn main() -> anyhow::Result<()> {
    match Task::parse() {
        Task::New { kind, name } => add::add(root(), kind, &name),
        Task::Golden { from } => golden::install(&from, &root().join("tests/golden")),
        Task::Quick { since } => quick::run(root(), &since),
    }
}

/// The root of the workspace.
fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap_or(Path::new("."))
}
