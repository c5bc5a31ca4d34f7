//! A line of the table of protocols: a [`Protocol`] says everything that a command, a report and a worker need to know.
//! [`Runner`] stands beside it, because each names the other; what it does is in [`super::runner`].
//!
//! To add a protocol: write `protocol/<name>.rs` with a `pub static PROTOCOL` and add its line to [`TABLE`](super::TABLE).

use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::curve::{CellCurve, CurveSpec};
use super::grid::{Grid, GridDefaults, GridFlags, PlanError};
use super::model_spec::ModelSpec;
use crate::run::outcome::CellFailure;
use crate::run::plan::{Cell, Plan};
use crate::run::session::Session;
use crate::run::worker::{Launcher, ParentLink};
use crate::run::{CancelToken, RunError};
use effattn_model::family;
use effattn_record::config::settings::{Setting, Settings};
use effattn_record::{Metric, Outcome, Row};

/// Predicts the seconds of a plan's cells by trying something for a moment.
pub type EstimateFn = fn(&mut Plan, &EstimateContext) -> Result<(), RunError>;

/// A way to measure or train models, and its command.
#[derive(Clone, Copy)]
pub struct Protocol {
    /// Name of the command, and of the protocol in suites and rows.
    pub name: &'static str,
    /// What it is for, in one line.
    pub about: &'static str,
    /// Examples, and what a reader of its numbers should know: the end of its `--help`.
    pub examples: &'static str,
    /// Keys of the settings that it takes, in groups; every other one is refused.
    pub settings: &'static [&'static [&'static str]],
    /// Help of settings that mean something special here; of the preset what follows the names.
    pub help: &'static [(&'static str, &'static str)],
    /// Names of the presets that it takes.
    pub presets: fn() -> Vec<&'static str>,
    /// Names of the tasks or corpora that it takes, where it takes any.
    pub tasks: Option<Tasks>,
    /// Data sets that it reads besides.
    pub reads: &'static [&'static str],
    /// `--quick`, where it has one.
    pub quick: Option<Quick>,
    /// What it does where nothing is said.
    pub defaults: fn(&GridFlags) -> GridDefaults,
    /// The cells of a grid, in the order of the rows, on a machine with so many threads.
    pub cells: fn(&Grid, usize) -> Result<Vec<Cell>, PlanError>,
    /// Reads what the cells need, notes its hashes in the plan, and gives what is to be said about it.
    pub prepare: fn(&mut Plan, &DataDirs) -> anyhow::Result<Prepared>,
    /// What is done in a few words, for the first line: `5000 steps · batch 32`.
    pub summary: fn(&Plan) -> String,
    /// Predicts the seconds of the cells better than the plan does, by trying something for a moment.
    pub estimate: Option<EstimateFn>,
    /// Whether two neighbours are computed together.
    pub same_group: fn(&Cell, &Cell) -> bool,
    /// Computes cells that stand together (by index) and hands their results to [`Runner::record_result`].
    pub compute: fn(&mut Runner, &[usize]) -> Result<(), RunError>,
    /// The rows of a cell that ended without a result.
    pub failure_rows: fn(&Row, &CellFailure) -> Vec<Row>,
    /// The worker's side of a cell.
    pub work: fn(&ParentLink, Value, &WorkerInput) -> anyhow::Result<()>,
    /// What its results are compared by.
    pub metrics: &'static [Metric],
    /// How its rows are shown.
    pub view: ResultView,
    /// What learning curves show, where it trains.
    pub curve: Option<CurveSpec>,
    /// Whether a finished run is kept, so that the same command does not make it again.
    pub reuses_finished: bool,
    /// Whether the golden files of a mechanism must be green before it is computed.
    pub needs_golden_check: bool,
    /// Protocols whose suites its command passes on to them.
    pub delegates_to: &'static [&'static str],
    /// Something else that its command can do, with flags of its own.
    pub alternative: Option<AltAction>,
}

/// A run of the cells of a plan.
pub struct Runner<'a> {
    /// The protocol.
    pub protocol: &'static Protocol,
    /// The plan.
    pub plan: &'a Plan,
    /// The run.
    pub session: &'a mut Session,
    /// What workers are given.
    pub conditions: WorkerContext,
    /// Called with the learning curves so far whenever one has grown.
    pub draw: &'a mut dyn FnMut(&[CellCurve]),
    /// Learning curves of this run.
    pub curves: Vec<CellCurve>,
}

/// `--quick`.
#[derive(Clone, Copy)]
pub struct Quick {
    /// Its help.
    pub help: &'static str,
    /// What it says when it is used.
    pub said: &'static str,
}

/// The data sets that a protocol takes.
#[derive(Clone, Copy)]
pub struct Tasks {
    /// What they are called in its help.
    pub called: &'static str,
    /// Their names.
    pub names: fn() -> Vec<&'static str>,
}

/// How rows are shown in tables and charts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ResultView {
    /// By length: what was measured, and how it grows.
    Growth,
    /// A line per trained model, with the published number.
    Trained,
    /// A line per cell with its metrics.
    Plain,
}

/// A flag of one command only.
pub struct Flag {
    /// Name without dashes.
    pub name: &'static str,
    /// Name of its value.
    pub value: &'static str,
    /// Its help.
    pub help: &'static str,
    /// Value where nothing is said.
    pub default: Option<&'static str>,
}

/// Something that a command does instead of running cells, when its first flag is given.
#[derive(Clone, Copy)]
pub struct AltAction {
    /// Heading of the flags.
    pub heading: &'static str,
    /// The flags.
    pub flags: &'static [Flag],
    /// Does it: the flags' values by name, and where to write.
    pub run: fn(&BTreeMap<&'static str, String>, &Settings, &mut dyn Write) -> anyhow::Result<()>,
}

/// Folders that a protocol reads.
pub struct DataDirs<'a> {
    /// Folder of data sets.
    pub data: PathBuf,
    /// Folder of results.
    pub results: &'a Path,
}

/// What was read before a run.
#[derive(Default)]
pub struct Prepared {
    /// What is to be said about it.
    pub remarks: Vec<String>,
    /// The text that workers cut their inputs from, where it is not the built-in one.
    pub text: Option<Vec<u8>>,
}

/// What cells are tried with before a run.
pub struct EstimateContext<'a> {
    /// How workers are started.
    pub launcher: Launcher,
    /// Live bytes that a worker may reach.
    pub memory_limit: u64,
    /// Set by Ctrl-C.
    pub stop: CancelToken,
    /// Folder of data sets.
    pub data: PathBuf,
    /// Folder of results.
    pub results: PathBuf,
    /// Whether a cell is finished: it has no price.
    pub done: &'a dyn Fn(&Cell) -> bool,
    /// Says what is tried.
    pub tell: &'a dyn Fn(&str),
    /// Times a step of a model on made-up input, where a cell's own data are not there.
    pub rate: Rate,
}

/// Multiply-adds per second of a model, and the bytes of its worker where they are known; nothing if it cannot run.
pub type Rate = fn(&ModelSpec, &EstimateContext) -> Result<Option<(f64, Option<u64>)>, RunError>;

/// What a worker is given besides its request.
pub struct WorkerInput<'a> {
    /// The text that inputs are cut from.
    pub text: &'a [u8],
    /// Conditions of the run.
    pub conditions: WorkerContext,
}

/// Where a run finds and keeps things, and how it is watched: nothing of what it computes.
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
    ///
    /// # Errors
    /// The cell ends: its data are others, or the plan knows nothing of them.
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

impl Protocol {
    /// The settings that it takes, in the order of its `--help`.
    pub fn settings(&self) -> impl Iterator<Item = &'static Setting> {
        let keys = self.settings.iter().flat_map(|group| group.iter());
        keys.filter_map(|key| Setting::find(key))
    }

    /// Whether it takes the setting called `key`.
    pub fn takes(&self, key: &str) -> bool {
        self.settings.iter().any(|group| group.contains(&key))
    }

    /// Help of `setting`.
    pub fn help(&self, setting: &'static Setting) -> String {
        let own = self.help.iter().find(|(key, _)| *key == setting.key);
        match (setting.key, self.tasks) {
            ("task", Some(Tasks { called, names })) => format!("{called}: {}", names().join(", ")),
            ("preset", _) if (self.presets)().len() < family::names(|_| true).len() => {
                let end = own.map_or("(effattn list presets)", |(_, help)| help);
                format!("Backbone: {} {end}", (self.presets)().join(", "))
            }
            _ => own.map_or(setting.help, |(_, help)| help).to_owned(),
        }
    }

    /// The group of every cell, those of one group beside each other: cells that are computed together, or whose times are
    /// compared with each other, belong to one machine.
    pub fn groups(&self, cells: &[Cell]) -> Vec<usize> {
        let place = |cell: &Cell| (cell.row.len, cell.row.batch, cell.row.pass);
        let joined =
            |a: &Cell, b: &Cell| (self.same_group)(a, b) || self.times_steps() && place(a) == place(b);
        let mut group = 0;
        let next = |index: usize| {
            if index > 0 && !joined(&cells[index - 1], &cells[index]) {
                group += 1;
            }
            group
        };
        (0..cells.len()).map(next).collect()
    }

    /// Whether it reads the data set called `name`.
    pub fn reads(&self, name: &str) -> bool {
        self.reads.contains(&name) || self.tasks.is_some_and(|tasks| (tasks.names)().contains(&name))
    }

    /// Whether steps are timed, so that another program's times can stand beside.
    pub fn times_steps(&self) -> bool {
        self.metrics.iter().any(|metric| metric.name == "step_time")
    }
}

#[cfg(test)]
mod tests;
