//! Norms of keys and values as a file: what `plot norms` draws (Transformer-LS, Figure 2).

use std::io;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::file;

/// Mean l2 norms in one layer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Norm {
    /// Mechanism and settings.
    pub model: String,
    /// Number of the layer, from 1.
    pub layer: u64,
    /// `key` or `value`.
    pub kind: String,
    /// Number of the head from 1; 0 for all heads side by side.
    pub head: u64,
    /// Mean norm of the window's vectors.
    pub window: f64,
    /// Mean norm of the slots.
    pub slots: f64,
    /// `window / slots`.
    pub ratio: f64,
}

/// The file in a run folder.
pub const FILE: &str = "norms.csv";

/// Writes `norms` into `folder`.
pub fn write(folder: &Path, norms: &[Norm]) -> io::Result<()> {
    let mut writer = ::csv::Writer::from_writer(Vec::new());
    norms.iter().try_for_each(|norm| writer.serialize(norm))?;
    let bytes = writer.into_inner().map_err(|error| io::Error::other(error.to_string()))?;
    file::write(&folder.join(FILE), &bytes)
}

/// Reads what [`write()`] wrote.
pub fn read(folder: &Path) -> io::Result<Vec<Norm>> {
    let text = file::read(&folder.join(FILE))?;
    let norms: Result<_, ::csv::Error> = ::csv::Reader::from_reader(text.as_slice()).deserialize().collect();
    norms.map_err(|error| io::Error::new(io::ErrorKind::InvalidData, format!("{FILE}: {error}")))
}
