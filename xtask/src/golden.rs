//! `cargo xtask golden`: the built-in set is a folder; `build.rs` of the program finds what is in it.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

/// Most bytes of the whole set: it is part of every binary.
const LIMIT: u64 = 7_000_000;

/// Copies the golden files of `from` into `set`; refuses what would make it too large.
pub fn install(from: &Path, set: &Path) -> Result<()> {
    let files = safetensors(from)?;
    ensure!(!files.is_empty(), "{} has no .safetensors file", from.display());
    let size =
        |paths: &[PathBuf]| -> Result<u64> { paths.iter().map(|path| Ok(fs::metadata(path)?.len())).sum() };
    let total = size(&safetensors(set)?)? + size(&files)?;
    ensure!(
        total <= LIMIT,
        "the built-in set would have {total} bytes, more than {LIMIT}; choose fewer files, or prove the folder with: \
         effattn check --golden {}",
        from.display()
    );
    for file in &files {
        let name = file.file_name().context("a file without a name")?;
        fs::copy(file, set.join(name)).with_context(|| format!("copying {}", file.display()))?;
        println!("tests/golden/{}", name.to_string_lossy());
    }
    println!("next: cargo run --release -- check");
    Ok(())
}

/// The .safetensors files at or below `path`, sorted.
fn safetensors(path: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    let mut waiting = vec![path.to_owned()];
    while let Some(path) = waiting.pop() {
        if path.is_dir() {
            let items = fs::read_dir(&path).with_context(|| format!("reading {}", path.display()))?;
            for item in items {
                waiting.push(item?.path());
            }
        } else if path.extension().is_some_and(|extension| extension == "safetensors") {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_copied_and_a_set_that_grows_too_large_is_refused() {
        let (from, set) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        assert!(install(from.path(), set.path()).unwrap_err().to_string().contains("no .safetensors file"));
        fs::write(from.path().join("a-01.safetensors"), b"a").unwrap();
        fs::write(from.path().join("notes.md"), b"b").unwrap();
        install(from.path(), set.path()).unwrap();
        assert_eq!(safetensors(set.path()).unwrap(), [set.path().join("a-01.safetensors")]);
        fs::write(from.path().join("b-01.safetensors"), vec![0; LIMIT as usize]).unwrap();
        assert!(install(from.path(), set.path()).unwrap_err().to_string().contains("more than 7000000"));
        assert!(!set.path().join("b-01.safetensors").exists());
    }
}
