//! What developers of effattn type: `cargo xtask --help`.

mod add;
mod cuda;
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
    /// Hold what is published and printed against suites and rows, and the check itself against seeded faults
    Audit,
    /// Build the program with CUDA, without a GPU: one binary that starts on any Linux machine
    Cuda(cuda::Args),
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
        Task::Audit => audit(),
        Task::Cuda(args) => cuda::run(root(), &args),
        Task::Quick { since } => quick::run(root(), &since),
    }
}

/// The tests of `tests/audit`.
fn audit() -> anyhow::Result<()> {
    let arguments = ["test", "--release", "--test", "library", "--", "audit"];
    let status = std::process::Command::new("cargo").args(arguments).current_dir(root()).status()?;
    anyhow::ensure!(status.success(), "the audit found something; it stands above");
    Ok(())
}

/// The root of the workspace.
fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap_or(Path::new("."))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::process::Command;

    use super::*;

    /// Every dependency of `chosen` with its features.
    fn dependencies(chosen: &[&str]) -> BTreeSet<String> {
        let arguments =
            ["tree", "--offline", "-e", "normal,build,dev", "--format", "{p} {f}", "--prefix", "none"];
        let output = Command::new("cargo").args(arguments).args(chosen).current_dir(root()).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let text = String::from_utf8(output.stdout).unwrap();
        text.lines().map(|line| line.trim_end_matches(" (*)").trim_end().to_owned()).collect()
    }

    /// Otherwise `cargo test -p` compiles candle once more.
    #[test]
    fn one_crate_alone_compiles_the_dependencies_of_the_whole() {
        let whole = dependencies(&["--workspace", "--exclude", "xtask"]);
        for package in ["effattn-kernel", "effattn-record", "effattn-data", "effattn-model", "effattn"] {
            let alone = dependencies(&["-p", package]);
            let others: Vec<_> = alone.difference(&whole).collect();
            assert!(
                others.is_empty(),
                "{package} alone needs other features; name them in crates/features: {others:#?}"
            );
        }
    }
}
