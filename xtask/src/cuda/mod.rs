//! `cargo xtask cuda`: the program with CUDA, built without a GPU and without CUDA on this machine. It starts anywhere: the driver,
//! cuBLAS, cuRAND and NVRTC are looked for when they are first called.

mod shims;

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

/// The compiler and what it compiles against. A newer compiler writes kernels that the driver of this version cannot load.
const WHEELS: &str = "cuda-toolkit[nvcc,cudart,cccl,crt,nvvm]==13.0.*";
/// What compiles kernels for a device while the program runs; only tests need it where the program is built.
const NVRTC: &str = "nvidia-cuda-nvrtc==13.0.*";

/// What to build.
#[derive(clap::Args)]
pub struct Args {
    /// Lowest compute capability that the program is for: 80 (A100 and newer). Newer devices compile from the same PTX
    #[arg(long, value_name = "N", default_value = "80", value_parser = clap::value_parser!(u32).range(80..=121))]
    architecture: u32,
    /// Also fetch NVRTC (90 MB), with which tests compile the kernels
    #[arg(long)]
    nvrtc: bool,
    /// Only prepare the compiler and the libraries; print the variables that a cargo command needs
    #[arg(long)]
    prepare: bool,
}

/// Builds `target/cuda/release/effattn`.
pub fn run(root: &Path, args: &Args) -> Result<()> {
    ensure!(
        cfg!(all(target_os = "linux", target_arch = "x86_64")),
        "cargo xtask cuda runs on Linux on x86-64; elsewhere install a CUDA toolkit: docs/building-for-gpus.md"
    );
    let folder = root.join("target/cuda");
    let toolkit = toolkit(&folder.join("toolkit"), args.nvrtc)?;
    let libraries = folder.join("libraries");
    fs::create_dir_all(&libraries).with_context(|| libraries.display().to_string())?;
    shims::build(&cudarc(root)?, &libraries)?;
    fs::copy(toolkit.join("lib/libcudart_static.a"), libraries.join("libcudart.a"))
        .with_context(|| format!("{} has no lib/libcudart_static.a", toolkit.display()))?;
    let variables = variables(&toolkit, &libraries, args.architecture)?;
    if args.prepare {
        for (name, value) in &variables {
            println!("export {name}='{}'", value.to_string_lossy());
        }
        return Ok(());
    }
    let words = ["build", "--release", "--locked", "--features", "cuda", "--target-dir", "target/cuda"];
    println!("$ cargo {}", words.join(" "));
    let status = Command::new("cargo").args(words).envs(variables).current_dir(root).status()?;
    ensure!(status.success(), "cargo {} failed", words.join(" "));
    shown(&folder.join("release/effattn"))
}

/// The folder of the compiler, which is brought into `folder` where it is not there yet.
fn toolkit(folder: &Path, nvrtc: bool) -> Result<PathBuf> {
    let python = std::env::var("EFFATTN_PYTHON").unwrap_or_else(|_| "python3".to_owned());
    let missing =
        |found: &Option<PathBuf>| found.as_ref().is_none_or(|found| !has(found, "lib", "libnvrtc.so."));
    let found = compiler(folder);
    if found.is_none() {
        done(Command::new(&python).args(["-m", "venv"]).arg(folder), "a Python with venv is needed")?;
    }
    let mut wanted: Vec<&str> = found.is_none().then_some(WHEELS).into_iter().collect();
    wanted.extend(Some(NVRTC).filter(|_| nvrtc && missing(&found)));
    if !wanted.is_empty() {
        println!("bringing {} into {}", wanted.join(" "), folder.display());
        let pip = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check"];
        let mut install = Command::new(folder.join("bin/python"));
        done(install.args(pip).args(wanted), "the compiler comes from PyPI: try again with a network")?;
    }
    compiler(folder)
        .with_context(|| format!("{} has no nvcc; remove the folder and try again", folder.display()))
}

/// Where nvcc lies below `folder`.
fn compiler(folder: &Path) -> Option<PathBuf> {
    let lib = fs::read_dir(folder.join("lib")).ok()?;
    let found = lib.flatten().map(|python| python.path().join("site-packages/nvidia/cu13"));
    found
        .filter(|toolkit| toolkit.join("bin/nvcc").is_file())
        .find(|toolkit| has(toolkit, "lib", "libcudart_static.a"))
}

/// Whether a file in `folder/of` begins with `name`.
fn has(folder: &Path, of: &str, name: &str) -> bool {
    let entries = fs::read_dir(folder.join(of)).into_iter().flatten().flatten();
    entries.into_iter().any(|entry| entry.file_name().to_string_lossy().starts_with(name))
}

fn done(command: &mut Command, hint: &str) -> Result<()> {
    let status = command.status().with_context(|| format!("{command:?} cannot be started; {hint}"))?;
    ensure!(status.success(), "{command:?} ended with {status}; {hint}");
    Ok(())
}

/// The sources of cudarc, which say the names of all functions of CUDA's libraries.
fn cudarc(root: &Path) -> Result<PathBuf> {
    let words = ["metadata", "--format-version", "1", "--locked", "--features", "cuda"];
    let output = Command::new("cargo").args(words).current_dir(root).output()?;
    ensure!(output.status.success(), "cargo metadata: {}", String::from_utf8_lossy(&output.stderr).trim());
    let metadata: Value = serde_json::from_slice(&output.stdout)?;
    let mut packages = metadata["packages"].as_array().into_iter().flatten();
    let found = packages.find(|package| package["name"] == "cudarc");
    let manifest = found.and_then(|package| package["manifest_path"].as_str()).map(Path::new);
    match manifest.and_then(Path::parent) {
        Some(folder) => Ok(folder.to_owned()),
        None => bail!("cargo metadata names no cudarc; candle's CUDA stands on it"),
    }
}

/// What cargo and the build scripts below it read.
fn variables(toolkit: &Path, libraries: &Path, architecture: u32) -> Result<Vec<(&'static str, OsString)>> {
    let before = |first: PathBuf, name: &str| {
        let rest = std::env::var_os(name).unwrap_or_default();
        let rest = std::env::split_paths(&rest).filter(|path| !path.as_os_str().is_empty());
        std::env::join_paths(std::iter::once(first).chain(rest)).context("a path with a colon")
    };
    Ok(vec![
        ("PATH", before(toolkit.join("bin"), "PATH")?),
        ("NVCC", toolkit.join("bin/nvcc").into()),
        ("CUDA_HOME", toolkit.into()),
        ("CUDA_COMPUTE_CAP", architecture.to_string().into()),
        // half the size, for a moment when the program starts to use a device
        ("NVCC_APPEND_FLAGS", "--compress-mode=size".into()),
        ("LIBRARY_PATH", before(libraries.to_owned(), "LIBRARY_PATH")?),
        // the program then says which of the libraries are missing
        ("EFFATTN_LAZY_CUDA", "1".into()),
    ])
}

/// Says what was built, and makes sure that it starts on a machine without CUDA.
fn shown(program: &Path) -> Result<()> {
    let needs = Command::new("ldd").arg(program).output().context("ldd cannot be started")?;
    let needs = String::from_utf8_lossy(&needs.stdout).into_owned();
    let cuda = needs.lines().find(|line| ["libcu", "libnv"].iter().any(|name| line.trim().starts_with(name)));
    if let Some(line) = cuda {
        bail!(
            "{} would not start without {}; remove target/cuda/release and try again",
            program.display(),
            line.trim()
        );
    }
    let bytes = fs::metadata(program)?.len();
    println!("{} ({} MB)", program.display(), bytes / 1_000_000);
    done(Command::new(program).args(["list", "devices"]), "it does not start")
}
