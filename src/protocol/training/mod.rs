//! Training runs as cells: a worker trains, its parent draws curves and keeps rows. What is trained is the
//! business of [`TrainingRequest`]s: the Long Range Arena's tasks, character language models.

mod estimate;
pub mod experiment;
mod parent;
mod plan;
mod protocol;
pub mod worker;

use serde::{Deserialize, Serialize};

use crate::protocol::model_spec::ModelSpec;
use crate::train::training_loop::EvalPoint;
use effattn_data::LoadOptions;
use effattn_record::Outcome;

pub use estimate::{QUICK_SECONDS, RATE};
pub use parent::compute;
pub use plan::{ProtocolDiff, micro_batches, one_of_each};
pub use protocol::{
    DataRead, PlannedRun, RunPlace, TrainingProtocol, cells, flops, incomplete, most_steps, read_data,
    read_once, requests, resolve, summary,
};

/// What is asked of a worker that trains.
pub trait TrainingRequest: serde::de::DeserializeOwned {
    /// Its common fields.
    fn info(&self) -> RequestInfo<'_>;
    /// Names in [`Plan::data`](crate::run::plan::Plan::data) of everything that it reads: a finished cell is carried over only
    /// where all of it is the same.
    fn reads(&self) -> Vec<String> {
        vec![self.info().task.to_owned()]
    }
    /// Steps in all, each counted as so many of the first one as it costs.
    fn first_step_equivalents(&self) -> f64 {
        self.info().steps as f64
    }
    /// How many times the test of a training run is made.
    fn tests(&self) -> f64 {
        1.0
    }
    /// Folder of a finished training run that is used, where there is one.
    fn trained(
        &self,
        _results: &std::path::Path,
        _plan: &crate::run::plan::Plan,
    ) -> Option<std::path::PathBuf> {
        None
    }
}

/// What every request of a training run has.
#[derive(Clone, Copy)]
pub struct RequestInfo<'a> {
    /// The task.
    pub task: &'a str,
    /// How its data are read.
    pub reading: LoadOptions,
    /// Optimizer steps in all; 0 if nothing is trained.
    pub steps: u64,
    /// The model, its batch and its length.
    pub spec: &'a ModelSpec,
}

/// What the worker says.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "say", rename_all = "snake_case")]
pub enum TrainingMessage {
    /// It goes on behind `step` with this curve.
    Started {
        /// Steps made before.
        step: u64,
        /// Whether it goes on from a checkpoint; otherwise a phase begins.
        resumed: bool,
        /// Evaluations made before.
        curve: Vec<EvalPoint>,
    },
    /// A step was made.
    Step {
        /// Number of steps made.
        step: u64,
        /// Its loss.
        loss: f64,
        /// Seconds per step since the last message.
        seconds: f64,
    },
    /// An evaluation was made.
    Evaluated(EvalPoint),
    /// What it does when it does not train.
    Doing {
        /// In words.
        what: String,
    },
    /// Something that a person should know and that ends nothing.
    Warned {
        /// In words.
        what: String,
    },
    /// What a few steps said about the whole run.
    Rehearsed(TrialTiming),
    /// All is done.
    Done(TrainingResult),
    /// It ended otherwise.
    Ended {
        /// How.
        outcome: Outcome,
        /// Why.
        reason: String,
    },
}

/// What a few steps say about a whole run.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct TrialTiming {
    /// Seconds of a step.
    pub step: f64,
    /// Seconds of all steps that were made.
    pub made: f64,
    /// Steps between evaluations.
    pub every: u64,
    /// Cost of evaluations.
    pub forwards: EvalCost,
    /// Highest live bytes.
    pub peak_bytes: Option<u64>,
}

/// Cost of evaluations, in forward passes of a step's batch.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct EvalCost {
    /// Of an evaluation while training.
    pub per_eval: f64,
    /// Of the test at the end.
    pub final_test: f64,
}

/// The result of a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TrainingResult {
    /// What was measured; the first is what the papers print.
    pub measures: Vec<MetricValue>,
    /// Share of the protocol's training data that was there.
    pub data_share: f64,
    /// Where that is not all of them: in words.
    pub differs: Option<String>,
    /// Highest live bytes.
    pub peak_bytes: Option<u64>,
}

/// One number.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MetricValue {
    /// Metric, as in rows.
    pub metric: String,
    /// Unit.
    pub unit: String,
    /// Value.
    pub value: f64,
    /// Task, where it is not the cell's.
    pub task: Option<String>,
    /// Length, where it is not the cell's.
    #[serde(default)]
    pub len: Option<u64>,
    /// Deviation and number of repetitions behind the value.
    pub spread: Option<(f64, u64)>,
}

impl MetricValue {
    /// `value` of `metric`.
    pub fn new(metric: &str, unit: &str, value: f64) -> Self {
        Self { metric: metric.to_owned(), unit: unit.to_owned(), value, task: None, len: None, spread: None }
    }
}
