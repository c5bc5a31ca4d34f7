//! Names what the binary is built from: the commit (absent outside a checkout), and a hash over sources, toolchain and
//! flags, by which two builds of one commit differ, and
//! one over the kernels alone. Lists the golden files that are built in.

use std::path::{Path, PathBuf};
use std::process::Command;

/// Everything that is compiled in.
const SOURCES: &[&str] = &[
    "src",
    "crates",
    "suites",
    "campaigns",
    "programs",
    "tests/golden",
    "build.rs",
    "Cargo.toml",
    "Cargo.lock",
];

/// What every measured time and every rounding comes from, but for [`is_test`].
const KERNELS: &str = "crates/kernel/src";

/// Whether `path` is of tests alone.
fn is_test(path: &Path) -> bool {
    ["tests", "tests.rs", "testing.rs"].iter().any(|name| path.ends_with(name))
}

fn said(program: &str, arguments: &[&str]) -> Option<String> {
    let output =
        Command::new(program).args(arguments).output().ok().filter(|output| output.status.success())?;
    Some(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// FNV-1a.
struct Hash(u64);

impl Hash {
    fn feed(&mut self, bytes: &[u8]) {
        for byte in (bytes.len() as u64).to_le_bytes().iter().chain(bytes) {
            self.0 = (self.0 ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }

    /// A file, or every file below a folder in the order of their names, but for what is `left_out`.
    fn file(&mut self, path: &Path, left_out: fn(&Path) -> bool) {
        if left_out(path) {
            return;
        }
        self.feed(path.to_string_lossy().as_bytes());
        if let Ok(bytes) = std::fs::read(path) {
            return self.feed(&bytes);
        }
        let entries = std::fs::read_dir(path).into_iter().flatten().flatten();
        let mut paths: Vec<_> = entries.map(|entry| entry.path()).collect();
        paths.sort();
        paths.iter().for_each(|path| self.file(path, left_out));
    }
}

/// The .safetensors files at or below `folder`.
fn golden_files(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut found = Vec::new();
    for path in entries.map(|entry| entry.path()) {
        if path.is_dir() {
            found.extend(golden_files(&path));
        } else if path.extension().is_some_and(|extension| extension == "safetensors") {
            found.push(path);
        }
    }
    found.sort();
    found
}

/// Writes the list of built-in golden files: the path below `tests/golden` and the bytes of each.
fn list_golden_files() {
    let folder = Path::new(&std::env::var("CARGO_MANIFEST_DIR").unwrap_or_default()).join("tests/golden");
    let line = |path: &PathBuf| {
        let name = path.strip_prefix(&folder).unwrap_or(path).to_string_lossy().replace('\\', "/");
        format!("({name:?}, include_bytes!({:?})),\n", path.to_string_lossy())
    };
    let list: String = golden_files(&folder).iter().map(line).collect();
    let out = Path::new(&std::env::var("OUT_DIR").unwrap_or_default()).join("golden.rs");
    std::fs::write(out, format!("&[\n{list}]")).expect("the build folder can be written");
}

fn build() -> u64 {
    let mut hash = Hash(0xcbf2_9ce4_8422_2325);
    SOURCES.iter().for_each(|path| hash.file(Path::new(path), |_| false));
    let rustc = std::env::var("RUSTC").unwrap_or_else(|_| "rustc".to_owned());
    hash.feed(said(&rustc, &["-vV"]).unwrap_or_default().as_bytes());
    let flags = ["CARGO_ENCODED_RUSTFLAGS", "CARGO_CFG_TARGET_FEATURE", "TARGET", "PROFILE", "OPT_LEVEL"];
    let mut settings: Vec<_> = std::env::vars()
        .filter(|(name, _)| flags.contains(&name.as_str()) || name.starts_with("CARGO_FEATURE_"))
        .collect();
    settings.sort();
    settings.iter().for_each(|(name, value)| hash.feed(format!("{name}={value}").as_bytes()));
    hash.0
}

fn main() {
    list_golden_files();
    for path in SOURCES {
        println!("cargo::rerun-if-changed={path}");
    }
    let build = format!("{:016x}", build());
    println!("cargo::rustc-env=EFFATTN_BUILD={build}");
    let mut kernels = Hash(0xcbf2_9ce4_8422_2325);
    kernels.file(Path::new(KERNELS), is_test);
    println!("cargo::rustc-env=EFFATTN_KERNELS={:016x}", kernels.0);
    let git = |arguments: &[&str]| said("git", arguments);
    let Some(commit) = git(&["rev-parse", "--short=12", "HEAD"]) else { return };
    if let Some(log) = git(&["rev-parse", "--git-path", "logs/HEAD"]) {
        println!("cargo::rerun-if-changed={log}");
    }
    let status = ["status", "--porcelain", "--"];
    let changed = git(&[&status[..], SOURCES].concat());
    let dirty = changed.is_some_and(|files| !files.is_empty());
    let dirty = if dirty { format!("-dirty-{}", &build[..8]) } else { String::new() };
    println!("cargo::rustc-env=EFFATTN_COMMIT={commit}{dirty}");
}
