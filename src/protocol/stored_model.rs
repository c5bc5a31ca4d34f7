//! Where the models of a run are stored.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use super::definition::Protocol;
use super::robustness::Robustness;
use super::training::TrainingProtocol;
use crate::run::manifest::Manifest;

/// The names of the commands whose models can be looked at.
pub fn commands() -> Vec<&'static str> {
    super::protocols().into_iter().filter(|known| known.trains()).map(|known| known.name()).collect()
}

/// The protocol that trained the run in `folder`, and the folder of its first cell with a checkpoint; `folder` may be that of a cell.
pub fn find_cell(folder: &Path) -> Result<(&'static dyn Protocol, PathBuf)> {
    let below = |folder: &Path| -> Vec<PathBuf> {
        let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
        let mut all: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
        all.sort();
        all
    };
    let has_weights = |folder: &Path| {
        below(folder).iter().any(|file| file.extension().is_some_and(|end| end == "safetensors"))
    };
    let (run, cells) = match has_weights(folder) {
        true => (folder.join("../.."), vec![folder.to_owned()]),
        false => (folder.to_owned(), below(&folder.join("cells"))),
    };
    let known = commands().join(", ");
    let manifest = Manifest::read(&run).ok().flatten();
    let manifest =
        manifest.with_context(|| format!("is no folder of a run; name a run of {known}, or latest"))?;
    let trained = super::find(&manifest.command).filter(|protocol| protocol.trains());
    let protocol = trained.with_context(|| {
        format!("is a run of effattn {}, which trains nothing; name a run of {known}", manifest.command)
    })?;
    let cell = cells.into_iter().find(|cell| has_weights(cell));
    let cell = cell.with_context(|| match protocol.name() == Robustness::INFO.name {
        true => "has no cell with a checkpoint; it tests models that a run of lra trained before: name that run, such as results/lra/latest (effattn status lists runs)".to_owned(),
        false => format!("has no cell with a checkpoint; train a model with effattn {}", manifest.command),
    })?;
    Ok((protocol, cell))
}
