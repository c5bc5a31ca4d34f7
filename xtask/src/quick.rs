//! `cargo xtask quick`: what to run before every commit; `.ci/run` is what to run before a merge.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};

/// Checks the crates with files that differ from `commit`, untracked ones included.
pub fn run(root: &Path, commit: &str) -> Result<()> {
    let mut files = output(root, &["diff", "--name-only", commit, "--"])?;
    files.push_str(&output(root, &["ls-files", "--others", "--exclude-standard"])?);
    let packages = packages(files.lines());
    if packages.is_empty() {
        println!("no crate differs from {commit}");
        return Ok(());
    }
    println!("{}", packages.join(", "));
    cargo(root, &["fmt", "--all", "--check"])?;
    let chosen: Vec<&str> = packages.iter().flat_map(|package| ["-p", package]).collect();
    cargo(
        root,
        &[&["clippy", "--release", "--all-targets"], &chosen[..], &["--", "-D", "warnings"]].concat(),
    )?;
    // the program's own tests start it many times: they belong to the gate
    let library: Vec<&str> = chosen.iter().copied().chain(["--lib", "--bins"]).collect();
    cargo(root, &[&["test", "--release", "--quiet"], &library[..]].concat())
}

/// The packages that `files`, paths from the root, belong to.
fn packages<'a>(files: impl Iterator<Item = &'a str>) -> Vec<String> {
    let package = |file: &str| match file.split('/').collect::<Vec<_>>()[..] {
        ["crates", name, _, ..] => Some(format!("effattn-{name}")),
        ["xtask", _, ..] => Some("xtask".to_owned()),
        ["suites", ..] => Some("effattn-record".to_owned()),
        ["src" | "tests" | "campaigns" | "programs" | "benches" | "examples", _, ..] | ["build.rs"] => {
            Some("effattn".to_owned())
        }
        _ => None,
    };
    let mut found: Vec<String> = files.filter_map(package).collect();
    found.sort();
    found.dedup();
    found
}

fn output(root: &Path, arguments: &[&str]) -> Result<String> {
    let output =
        Command::new("git").args(arguments).current_dir(root).output().context("git cannot be started")?;
    let error = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "git {}: {}", arguments.join(" "), error.trim());
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

fn cargo(root: &Path, arguments: &[&str]) -> Result<()> {
    println!("$ cargo {}", arguments.join(" "));
    let status = Command::new("cargo")
        .args(arguments)
        .current_dir(root)
        .status()
        .context("cargo cannot be started")?;
    ensure!(status.success(), "cargo {} failed", arguments[0]);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_belong_to_packages() {
        let files = [
            "crates/kernel/src/lib.rs",
            "src/main.rs",
            "suites/a.toml",
            "docs/a.md",
            "crates/kernel/Cargo.toml",
        ];
        assert_eq!(packages(files.into_iter()), ["effattn", "effattn-kernel", "effattn-record"]);
    }
}
