//! A [`Protocol`]: everything that a command, a report and a worker need to know about a way to measure or train models.
//!
//! To add a protocol: write `protocol/<name>.rs` with a type that implements [`Protocol`] and add its line to [`TABLE`](super::TABLE).

use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::cell_runner::CellRunner;
use super::curve::CurveSpec;
use super::grid::{Grid, GridDefaults, GridFlags, PlanError};
use super::stored_input::{InputRequest, StoredInput};
pub use super::worker_context::{WorkerContext, WorkerInput};
use crate::run::outcome::CellFailure;
use crate::run::plan::{Cell, Plan};
use crate::run::worker::{Launcher, ParentLink};
use crate::run::{CancelToken, RunError};
use effattn_model::family;
use effattn_record::config::settings::{Setting, Settings};
use effattn_record::{Metric, Row};

/// The command of a protocol: its name, its settings and its help.
#[derive(Clone, Copy)]
pub struct ProtocolInfo {
    /// Name of the command, and of the protocol in suites and rows.
    pub name: &'static str,
    /// Purpose, in one line.
    pub about: &'static str,
    /// Examples and notes on the numbers: the end of `--help`.
    pub examples: &'static str,
    /// Keys of the settings that it takes, in groups; every other one is refused.
    pub settings: &'static [&'static [&'static str]],
    /// Those of them that it declares itself.
    pub own: &'static [&'static Setting],
    /// Help of settings that mean something special here; of the preset what follows the names.
    pub help: &'static [(&'static str, &'static str)],
    /// Names of the presets that it takes.
    pub presets: fn() -> Vec<&'static str>,
    /// Tasks or corpora that it takes; `None` if it has none.
    pub tasks: Option<Tasks>,
    /// Data sets that it reads besides its tasks.
    pub reads: &'static [&'static str],
    /// `--quick`; `None` if there is no such flag.
    pub quick: Option<Quick>,
    /// Metrics that results are compared by.
    pub metrics: &'static [Metric],
    /// Whether mechanisms that fail their golden files are not computed.
    pub needs_golden_check: bool,
    /// Whether cells of other programs stand beside its own (`--program`).
    pub takes_programs: bool,
    /// Protocols whose suites its command passes on to them.
    pub delegates_to: &'static [&'static str],
    /// Alternative action of the command, with flags of its own.
    pub alternative: Option<AltAction>,
}

impl ProtocolInfo {
    /// The command `name` that takes every preset and no setting.
    pub const fn new(name: &'static str, about: &'static str) -> Self {
        Self {
            name,
            about,
            examples: "",
            settings: &[],
            own: &[],
            help: &[],
            presets: || family::names(|_| true),
            tasks: None,
            reads: &[],
            quick: None,
            metrics: &[],
            needs_golden_check: false,
            takes_programs: false,
            delegates_to: &[],
            alternative: None,
        }
    }

    /// The settings that it takes, in the order of its `--help`.
    pub fn settings(&self) -> impl Iterator<Item = &'static Setting> {
        let keys = self.settings.iter().flat_map(|group| group.iter());
        let own = |key: &str| self.own.iter().copied().find(|setting| setting.key == key);
        keys.filter_map(move |key| own(key).or_else(|| Setting::find(key)))
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
                format!("Model preset: {} {end}", (self.presets)().join(", "))
            }
            _ => own.map_or(setting.help, |(_, help)| help).to_owned(),
        }
    }

    /// Whether it reads the data set called `name`.
    pub fn reads(&self, name: &str) -> bool {
        self.reads.contains(&name) || self.tasks.is_some_and(|tasks| (tasks.names)().contains(&name))
    }

    /// Whether steps are timed, so that another program's times can stand next to them.
    pub fn times_steps(&self) -> bool {
        self.metrics.iter().any(|metric| metric.name == "step_time")
    }
}

/// A way to measure or train models.
pub trait Protocol: Sync {
    /// Its command.
    fn info(&self) -> &'static ProtocolInfo;

    /// Settings and mechanisms without flags.
    fn defaults(&self, flags: &GridFlags) -> GridDefaults;

    /// Refuses flags that contradict each other.
    fn check_flags(&self, _flags: &GridFlags) -> Result<(), PlanError> {
        Ok(())
    }

    /// The cells of a grid, in the order of the rows, on a machine with so many threads.
    fn cells(&self, grid: &Grid, threads: usize) -> Result<Vec<Cell>, PlanError>;

    /// Reads the data of the cells, notes their hashes in the plan, and gives remarks about them.
    fn prepare(&self, _plan: &mut Plan, _dirs: &DataDirs) -> anyhow::Result<Prepared> {
        Ok(Prepared::default())
    }

    /// The plan in a few words, for the first line: `5000 steps · batch 32`.
    fn summary(&self, plan: &Plan) -> String;

    /// Estimates cell times from a few trial steps.
    fn estimate(&self, _plan: &mut Plan, _context: &EstimateContext) -> Result<(), RunError> {
        Ok(())
    }

    /// Whether two neighbours are computed together.
    fn same_group(&self, _: &Cell, _: &Cell) -> bool {
        false
    }

    /// Computes the cells `open` (by index), which belong together, and records their results.
    fn compute(&self, runner: &mut CellRunner, open: &[usize]) -> Result<(), RunError>;

    /// The rows of a cell that ended without a result.
    fn failure_rows(&self, row: &Row, failure: &CellFailure) -> Vec<Row> {
        vec![row.with_outcome(failure.outcome, Some(failure.reason.clone()))]
    }

    /// The worker's side of a cell.
    fn work(&self, link: &ParentLink, request: Value, input: &WorkerInput) -> anyhow::Result<()>;

    /// The model that a cell left in the folder `cell`, and an input that it reads: `plot attention --weights`.
    fn stored_input(&self, _cell: &Path, _input: &InputRequest) -> anyhow::Result<StoredInput> {
        anyhow::bail!("effattn {} keeps no model to look at", self.info().name)
    }

    /// Layout of its tables and charts.
    fn view(&self) -> ResultView {
        ResultView::Plain
    }

    /// Learning curves; `None` if it does not train.
    fn curve(&self) -> Option<CurveSpec> {
        None
    }
}

impl dyn Protocol + '_ {
    /// Name of the command, and of the protocol in suites and rows.
    pub fn name(&self) -> &'static str {
        self.info().name
    }

    /// Whether it trains: a finished run is kept then, and the same command does not make it again.
    pub fn trains(&self) -> bool {
        self.curve().is_some()
    }

    /// The group of every cell, those of one group next to each other: cells that are computed together, or whose times are
    /// compared with each other, belong to one machine.
    pub fn groups(&self, cells: &[Cell]) -> Vec<usize> {
        let place = |cell: &Cell| (cell.row.len, cell.row.batch, cell.row.pass);
        let timed = self.info().times_steps();
        let joined = |a: &Cell, b: &Cell| self.same_group(a, b) || timed && place(a) == place(b);
        let mut group = 0;
        let next = |index: usize| {
            if index > 0 && !joined(&cells[index - 1], &cells[index]) {
                group += 1;
            }
            group
        };
        (0..cells.len()).map(next).collect()
    }
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

/// Alternative action of a command, selected by its first flag.
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
}

#[cfg(test)]
mod tests;
