//! What a worker is asked, and what the worker of a cell is given besides its request.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::protocol::model_spec::ModelSpec;
use crate::run::outcome::CellFailure;
use effattn_record::Outcome;
use effattn_record::config::settings::{DeviceName, KernelName};

/// What a worker is asked to do: the first line on its stdin.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "order", rename_all = "snake_case")]
pub enum WorkerRequest {
    /// A cell of a protocol.
    Cell {
        /// The protocol.
        protocol: String,
        /// Live bytes it may reach.
        memory_limit: u64,
        /// The cell's request.
        request: Value,
        /// Where it finds and keeps things.
        conditions: WorkerContext,
    },
    /// The first step of a model that a program gets, too.
    FirstStep {
        /// Live bytes it may reach.
        memory_limit: u64,
        /// The model.
        request: FirstStepRequest,
    },
    /// The shipped golden files of some mechanisms.
    Gate {
        /// What to check.
        request: GateRequest,
    },
}

/// Mechanisms to compare with their golden files.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct GateRequest {
    /// Mechanisms.
    pub models: Vec<String>,
    /// Fused kernels or plain operations.
    pub kernel: KernelName,
    /// Where.
    pub device: DeviceName,
}

/// A model whose first step is made.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct FirstStepRequest {
    /// The model.
    pub spec: ModelSpec,
    /// Where the step is written to.
    pub file: PathBuf,
}

/// Inputs of a worker besides its request.
pub struct WorkerInput<'a> {
    /// The text that inputs are cut from.
    pub text: &'a [u8],
    /// Conditions of the run.
    pub conditions: WorkerContext,
}

/// Paths and run options of a worker; none of them changes a result.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct WorkerContext {
    /// Folder of the cell: checkpoints.
    pub folder: PathBuf,
    /// Folder of data sets.
    pub data: PathBuf,
    /// What the plan was made with: the checksum of every data set, by name.
    pub planned: BTreeMap<String, String>,
    /// Seconds between checkpoints.
    pub save: f64,
    /// Whether a few steps are made to see how long they take, and nothing is kept.
    #[serde(default)]
    pub trial: bool,
    /// Whether the first operation whose result is not finite is looked for in every step.
    pub detect_anomaly: bool,
    /// Folder of a finished training run that the cell goes on from.
    pub trained: Option<PathBuf>,
}

impl WorkerContext {
    /// Makes sure that the data which were read are those of the plan: the rows say that they are.
    pub fn same(&self, name: &str, read: &str) -> Result<(), CellFailure> {
        if self.trial || self.planned.get(name).is_some_and(|planned| planned == read) {
            return Ok(());
        }
        let dir = self.data.display();
        let reason =
            format!("{name}: the data in {dir} changed since the plan was made; run the command again");
        Err(CellFailure::new(Outcome::Failed, reason))
    }

    /// Time between checkpoints.
    pub fn save(&self) -> Duration {
        Duration::try_from_secs_f64(self.save).unwrap_or(Duration::MAX)
    }
}
