//! Names the commit that the binary is built from; absent outside a checkout.

use std::process::Command;

fn git(arguments: &[&str]) -> Option<String> {
    let output =
        Command::new("git").args(arguments).output().ok().filter(|output| output.status.success())?;
    Some(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

fn main() {
    for path in ["src", "suites", "build.rs", "Cargo.toml"] {
        println!("cargo::rerun-if-changed={path}");
    }
    let Some(commit) = git(&["rev-parse", "--short=12", "HEAD"]) else { return };
    if let Some(log) = git(&["rev-parse", "--git-path", "logs/HEAD"]) {
        println!("cargo::rerun-if-changed={log}");
    }
    let changed =
        git(&["status", "--porcelain", "--untracked-files=no", "--", "src", "suites", "Cargo.toml"]);
    let dirty = if changed.is_some_and(|files| !files.is_empty()) { "-dirty" } else { "" };
    println!("cargo::rustc-env=EFFATTN_COMMIT={commit}{dirty}");
}
