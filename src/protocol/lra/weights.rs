//! Stored weights as a request names them, and what a cell keeps so that others can test its weights.

use serde::{Deserialize, Serialize};

use crate::protocol::training::worker::failed;
use crate::protocol::worker_context::WorkerContext;
use crate::run::outcome::CellFailure;
use effattn_data::Dataset;
use effattn_data::own::Reading;
use effattn_record::file;

/// File in the folder of a cell that says how its texts became ids.
pub const READING: &str = "reading.json";

/// Stored weights that are tested.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StoredWeights {
    /// The checkpoint.
    pub file: String,
    /// SHA-256 of it.
    pub sha256: String,
    /// Name of the run that trained them.
    pub run: String,
    /// What they were trained on.
    pub trained_on: String,
    /// How its texts became ids.
    pub texts: Reading,
}

impl StoredWeights {
    /// Name under which their checksum stands in a plan.
    pub fn data_name(&self) -> String {
        format!("weights {}", self.file)
    }
}

/// Keeps beside the checkpoints how the texts of `data` became ids, where they are a person's own.
pub fn keep_reading(context: &WorkerContext, data: &dyn Dataset) -> Result<(), CellFailure> {
    let Some(reading) = data.reading().filter(|_| !context.trial) else { return Ok(()) };
    let path = context.folder.join(READING);
    let text = serde_json::to_string(reading)? + "\n";
    file::write(&path, text.as_bytes()).map_err(|error| failed(&format!("{}: {error}", path.display())))
}
