//! Every golden file is reproduced by the fused kernels and by their composed twins.
//!
//! `EFFATTN_GOLDEN=DIR` checks a folder (and its subfolders) of golden files; `EFFATTN_MODEL=a,b` narrows it to
//! some mechanisms.

use std::path::{Path, PathBuf};

use candle_core::Device;
use effattn::kernel::{Mode, with_mode};
use effattn::protocol::check::{CheckError, check_bytes};

fn files(dir: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(dir).expect("the golden folder is readable") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            files(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "safetensors") {
            found.push(path);
        }
    }
}

#[test]
fn golden_files_are_reproduced() {
    let Some(dir) = std::env::var_os("EFFATTN_GOLDEN") else { return };
    let models = std::env::var("EFFATTN_MODEL").unwrap_or_default();
    let wanted: Vec<&str> = models.split(',').filter(|name| !name.is_empty()).collect();
    let mut paths = Vec::new();
    files(Path::new(&dir), &mut paths);
    paths.sort();
    let (mut green, mut red, mut absent) = (0, Vec::new(), 0);
    for path in paths {
        let bytes = std::fs::read(&path).expect("a golden file is readable");
        let name = path.display().to_string();
        for mode in [Mode::Fused, Mode::Composed] {
            match with_mode(mode, || check_bytes(&name, &bytes, &Device::Cpu)) {
                Ok(verdict) if !wanted.is_empty() && !wanted.contains(&verdict.mechanism.as_str()) => {}
                Ok(verdict) if verdict.green() => green += 1,
                Ok(verdict) => red.push(format!("{mode:?} {verdict:?}")),
                Err(CheckError::UnknownMechanism { .. }) => absent += 1,
                Err(error) if wanted.is_empty() || wanted.iter().any(|w| error.to_string().contains(w)) => {
                    red.push(format!("{mode:?} {error}"));
                }
                Err(_) => {}
            }
        }
    }
    println!("{green} green, {} red, {absent} of mechanisms not built", red.len());
    assert!(red.is_empty(), "{}", red.join("\n"));
}
