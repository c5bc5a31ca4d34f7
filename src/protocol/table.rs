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

use super::curve::{Curve, LearningCurve};
use super::grid::{Defaults, Flags, Grid, PlanError};
use super::model_spec::ModelSpec;
use crate::config::settings::{Setting, Settings};
use crate::record::{Metric, Outcome, Row};
use crate::run::outcome::Ending;
use crate::run::plan::{Cell, Plan};
use crate::run::session::Session;
use crate::run::worker::{Launcher, Link};
use crate::run::{RunError, Stop};

/// Predicts the seconds of a plan's cells by trying something for a moment.
pub type Price = fn(&mut Plan, &Prober) -> Result<(), RunError>;

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
    /// Help of settings that mean something special here.
    pub help: &'static [(&'static str, &'static str)],
    /// Names of the tasks or corpora that it takes, where it takes any.
    pub tasks: Option<Tasks>,
    /// Data sets that it reads besides.
    pub reads: &'static [&'static str],
    /// `--quick`, where it has one.
    pub quick: Option<Quick>,
    /// What it does where nothing is said.
    pub defaults: fn(&Flags) -> Defaults,
    /// The cells of a grid, in the order of the rows, on a machine with so many threads.
    pub cells: fn(&Grid, usize) -> Result<Vec<Cell>, PlanError>,
    /// Reads what the cells need, notes its hashes in the plan, and gives what is to be said about it.
    pub prepare: fn(&mut Plan, &Folders) -> anyhow::Result<Prepared>,
    /// What is done in a few words, for the first line: `5000 steps · batch 32`.
    pub amount: fn(&Plan) -> String,
    /// Predicts the seconds of the cells better than the plan does, by trying something for a moment.
    pub price: Option<Price>,
    /// Whether two neighbours are computed together.
    pub together: fn(&Cell, &Cell) -> bool,
    /// Computes cells that stand together (by index) and hands their results to [`Runner::finish`].
    pub compute: fn(&mut Runner, &[usize]) -> Result<(), RunError>,
    /// The rows of a cell that ended without a result.
    pub ended: fn(&Row, &Ending) -> Vec<Row>,
    /// The worker's side of a cell.
    pub work: fn(&Link, Value, &Given) -> anyhow::Result<()>,
    /// What its results are compared by.
    pub metrics: &'static [Metric],
    /// How its rows are shown.
    pub shown: Shown,
    /// What learning curves show, where it trains.
    pub curve: Option<LearningCurve>,
    /// Whether a finished run is kept, so that the same command does not make it again.
    pub keeps: bool,
    /// Whether the golden files of a mechanism must be green before it is computed.
    pub checks: bool,
    /// Protocols whose suites its command passes on to them.
    pub passes_on: &'static [&'static str],
    /// Something else that its command can do, with flags of its own.
    pub instead: Option<Instead>,
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
    pub conditions: Conditions,
    /// Called with the learning curves so far whenever one has grown.
    pub draw: &'a mut dyn FnMut(&[Curve]),
    /// Learning curves of this run.
    pub curves: Vec<Curve>,
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
pub enum Shown {
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
pub struct Instead {
    /// Heading of the flags.
    pub heading: &'static str,
    /// The flags.
    pub flags: &'static [Flag],
    /// Does it: the flags' values by name, and where to write.
    pub run: fn(&BTreeMap<&'static str, String>, &Settings, &mut dyn Write) -> anyhow::Result<()>,
}

/// Folders that a protocol reads.
pub struct Folders<'a> {
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
pub struct Prober<'a> {
    /// How workers are started.
    pub launcher: Launcher,
    /// Live bytes that a worker may reach.
    pub memory_limit: u64,
    /// Set by Ctrl-C.
    pub stop: Stop,
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
pub type Rate = fn(&ModelSpec, &Prober) -> Result<Option<(f64, Option<u64>)>, RunError>;

/// What a worker is given besides its request.
pub struct Given<'a> {
    /// The text that inputs are cut from.
    pub text: &'a [u8],
    /// Conditions of the run.
    pub conditions: Conditions,
}

/// Where a run finds and keeps things, and how it is watched: nothing of what it computes.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Conditions {
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
    pub rehearse: bool,
    /// Whether the first operation whose result is not finite is looked for in every step.
    pub detect_anomaly: bool,
    /// Folder of a finished training run that the cell goes on from.
    pub trained: Option<PathBuf>,
}

impl Conditions {
    /// Makes sure that the data which were read are those of the plan: the rows say that they are.
    ///
    /// # Errors
    /// The cell ends: its data are others, or the plan knows nothing of them.
    pub fn same(&self, name: &str, read: &str) -> Result<(), Ending> {
        if self.rehearse || self.planned.get(name).is_some_and(|planned| planned == read) {
            return Ok(());
        }
        let dir = self.data.display();
        let reason =
            format!("{name}: the data in {dir} changed since the plan was made; run the command again");
        Err(Ending::new(Outcome::Failed, reason))
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
        match self.tasks.filter(|_| setting.key == "task") {
            Some(Tasks { called, names }) => format!("{called}: {}", names().join(", ")),
            None => own.map_or(setting.help, |(_, help)| help).to_owned(),
        }
    }

    /// The group of every cell, those of one group beside each other: cells that are computed together, or whose times are
    /// compared with each other, belong to one machine.
    pub fn groups(&self, cells: &[Cell]) -> Vec<usize> {
        let place = |cell: &Cell| (cell.row.len, cell.row.batch, cell.row.pass);
        let joined = |a: &Cell, b: &Cell| (self.together)(a, b) || self.times_steps() && place(a) == place(b);
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
mod tests {
    use std::collections::{BTreeSet, HashMap};

    use super::*;
    use crate::config::grid::Models;
    use crate::config::settings::SETTINGS;
    use crate::config::suite::{SHIPPED, Suite};
    use crate::device::rng::Stream;
    use crate::protocol::grid::resolve;
    use crate::protocol::{TABLE, find, lra};

    /// Settings that may differ between two runs of one cell, and why.
    const FREE: &[(&str, &str)] = &[
        ("timeout", "an outcome carries the limit that it ran under"),
        ("memory_limit", "an outcome carries the limit that it ran under"),
        ("threads", "the identity of the whole run has them"),
    ];

    /// Another value than the usual one of every setting that a key holds.
    const OTHER: &[(&str, &str)] = &[
        ("len", "384"),
        ("batch", "64"),
        ("seeds", "9"),
        ("mode", "infer"),
        ("layers", "3"),
        ("width", "128"),
        ("heads", "1"),
        ("ffn", "77"),
        ("pooling", "mean"),
        ("dropout", "0.3"),
        ("fit", "1GiB"),
        ("device", "cuda"),
        ("dtype", "bf16"),
        ("kernel", "composed"),
        ("warmup", "7"),
        ("runs", "77"),
        ("min_runs", "5"),
        ("max_time", "3s"),
        ("steps", "77"),
        ("rate", "0.0123"),
        ("phases", "2"),
        ("limit", "99"),
        ("every", "7"),
        ("accumulate", "2"),
        ("weights", "other.safetensors"),
        ("similarity", "7"),
        ("also", "cifar10-c"),
        ("overlap", "true"),
        ("profile", "true"),
        ("insertions", "5"),
        ("characters", "!"),
        ("perturbation_seeds", "5"),
        ("strict", "true"),
        ("keep_close", "true"),
        ("floor", "true"),
        ("allow_partial", "true"),
        ("tokenizer", "words.json"),
    ];

    fn other(protocol: &Protocol, key: &str) -> String {
        let pick = |values: [&str; 2]| values[usize::from(protocol.name == "charlm")].to_owned();
        match (protocol.name, key) {
            ("wordlm", "task") => return "sample-words".to_owned(),
            ("wordlm", "preset") => return "wikitext103-small".to_owned(),
            ("mlm", "task") => return "sample".to_owned(),
            ("mlm", "preset") => return "roberta-base".to_owned(),
            ("finetune", "task") => return "qqp".to_owned(),
            ("finetune", "preset") => return "roberta-small".to_owned(),
            ("finetune", "len") => return "256".to_owned(),
            ("finetune", "width") => return "144".to_owned(), // 12 heads
            (_, "from") => return pretrained(),
            _ => {}
        }
        match key {
            "task" if protocol.name == "vision" => "generated".to_owned(),
            "preset" if protocol.name == "vision" => "vil-ls-small".to_owned(),
            "task" => pick([if protocol.name == "lra" { "text" } else { "retrieval" }, "text8"]),
            "preset" => pick([
                if matches!(protocol.shown, Shown::Growth) { "ls-lra" } else { "lra-repo" },
                "charlm-large",
            ]),
            _ => OTHER.iter().find(|(known, _)| *known == key).map(|(_, value)| (*value).to_owned()).unwrap(),
        }
    }

    /// The folder of a small encoder.
    fn pretrained() -> String {
        static FOLDER: std::sync::OnceLock<tempfile::TempDir> = std::sync::OnceLock::new();
        let folder = FOLDER.get_or_init(|| {
            let folder = tempfile::tempdir().unwrap();
            crate::train::pretrained::tests::small(folder.path());
            folder
        });
        folder.path().display().to_string()
    }

    fn keys(protocol: &Protocol, said: &[String]) -> BTreeSet<String> {
        let settings = said.iter().map(|text| Settings::set(text).unwrap());
        let settings = settings.fold(Settings::NONE, |all, one| one.over(all));
        // the encoder that another one starts from has full attention
        let model = (protocol.takes("from")).then(|| "full".parse().unwrap());
        let flags = Flags { settings, model, ..Flags::default() };
        let grid =
            resolve(&flags, protocol).unwrap_or_else(|error| panic!("{} {said:?}: {error}", protocol.name));
        (protocol.cells)(&grid, 1).unwrap().into_iter().map(|cell| cell.key).collect()
    }

    #[test]
    fn every_setting_changes_every_key_or_says_why_not() {
        for protocol in TABLE {
            let base: Vec<String> =
                if protocol.takes("mode") { vec!["mode=train".to_owned()] } else { Vec::new() };
            let usual = keys(protocol, &base);
            for setting in protocol.settings() {
                let key = setting.key;
                let refused = matches!((protocol.name, key), ("charlm" | "mlm", "pooling")); // positions are predicted
                if refused || FREE.iter().any(|(free, _)| *free == key) {
                    continue;
                }
                let one = format!("{key}={}", other(protocol, key));
                let said: Vec<String> =
                    if key == "mode" { vec![one] } else { base.iter().cloned().chain([one]).collect() };
                let changed = keys(protocol, &said);
                assert!(!changed.is_empty());
                assert!(changed.is_disjoint(&usual), "{} {said:?}: {changed:?}", protocol.name);
            }
        }
    }

    /// `text` with another digit behind it, now and then.
    fn varied(text: String, random: &mut Stream) -> String {
        let digit = if text.ends_with(|c: char| c.is_ascii_digit()) { random.below(4) } else { 3 };
        if digit == 3 { text } else { format!("{text}{digit}") }
    }

    #[test]
    fn no_two_different_cells_share_a_key_whatever_is_set() {
        for protocol in TABLE {
            let mut random = Stream::new(18, protocol.name);
            let mut seen: HashMap<String, Value> = HashMap::new();
            let (mut plans, mut cells) = (0, 0);
            for _ in 0..150 {
                let mut settings = Settings::NONE;
                for setting in protocol.settings() {
                    if random.below(4) == 0 && setting.key != "device" {
                        let value = match FREE.iter().any(|(free, _)| *free == setting.key) {
                            true => continue,
                            false => varied(other(protocol, setting.key), &mut random),
                        };
                        if let Ok(one) = Settings::set(&format!("{}={value}", setting.key)) {
                            settings = one.over(settings);
                        }
                    }
                }
                let model: Option<Models> =
                    ["ls,full", "ls:w=16,linear", "cosformer"][random.below(3)].parse().ok();
                let flags = Flags { settings, model, ..Flags::default() };
                let Ok(grid) = resolve(&flags, protocol) else { continue };
                let Ok(made) = (protocol.cells)(&grid, 1) else { continue };
                plans += 1;
                for cell in made {
                    cells += 1;
                    let request = seen.entry(cell.key.clone()).or_insert_with(|| cell.request.clone());
                    assert_eq!(*request, cell.request, "{} {}", protocol.name, cell.key);
                }
            }
            assert!(plans >= 20 && seen.len() >= 40, "{}: {plans} plans, {cells} cells", protocol.name);
        }
    }

    /// Paths of the leaves of `json`, as JSON pointers.
    fn leaves(json: &Value, path: &str, found: &mut Vec<String>) {
        match json {
            Value::Object(fields) => {
                fields.iter().for_each(|(name, value)| leaves(value, &format!("{path}/{name}"), found));
            }
            Value::Array(items) if !items.is_empty() => {
                items.iter().enumerate().for_each(|(at, item)| leaves(item, &format!("{path}/{at}"), found));
            }
            _ => found.push(path.to_owned()),
        }
    }

    fn changed(leaf: &Value) -> Value {
        match leaf {
            Value::Bool(on) => (!on).into(),
            Value::Number(number) => (number.as_f64().unwrap_or(0.0) + 1.0).into(),
            Value::String(text) => format!("{text}x").into(),
            Value::Null => 7.into(),
            _ => Value::Array(vec![1.into()]),
        }
    }

    #[test]
    fn every_leaf_of_a_request_is_in_the_key() {
        for protocol in TABLE {
            let cells = (protocol.cells)(&resolve(&Flags::default(), protocol).unwrap(), 1).unwrap();
            let cell = cells.iter().find(|cell| !cell.request.is_null()).unwrap();
            let mut paths = Vec::new();
            leaves(&cell.request, "", &mut paths);
            assert!(paths.len() >= 8, "{}: {paths:?}", protocol.name);
            let named =
                |request: &Value| Cell::new(&cell.words, cell.row.clone(), request, &cell.request).key;
            assert_eq!(named(&cell.request), cell.words);
            for path in paths {
                let mut other = cell.request.clone();
                let leaf = other.pointer_mut(&path).unwrap();
                *leaf = changed(leaf);
                assert_ne!(named(&other), cell.words, "{} {path}", protocol.name);
            }
        }
    }

    #[test]
    fn no_two_different_cells_of_a_suite_share_a_key() {
        for (name, text) in SHIPPED {
            let suite = Suite::parse(&format!("{name}.toml"), text).unwrap();
            let Some(protocol) = find(&suite.protocol) else { continue };
            let flags = Flags { suite: Some((*name).to_owned()), ..Flags::default() };
            let cells = (protocol.cells)(&resolve(&flags, protocol).unwrap(), 1).unwrap();
            let mut plan = Plan { cells, ..Plan::default() };
            assert!(plan.merge().is_ok(), "{name}");
            let folders: BTreeSet<PathBuf> =
                plan.cells.iter().map(|cell| crate::run::plan::folder(Path::new(""), &cell.key)).collect();
            assert_eq!(folders.len(), plan.cells.len(), "{name}: a folder for two cells");
        }
    }

    #[test]
    fn what_a_protocol_does_not_take_names_those_that_do() {
        let settings = Settings::set("mode=infer").unwrap();
        let flags = Flags { settings, ..Flags::default() };
        let error = resolve(&flags, &lra::PROTOCOL).err().unwrap().to_string();
        assert_eq!(error, "lra does not take --mode; speed and memory do");
        let every = SETTINGS.iter().all(|setting| TABLE.iter().any(|protocol| protocol.takes(setting.key)));
        assert!(every, "a setting that no protocol takes");
        for protocol in TABLE {
            for key in protocol.settings.iter().flat_map(|group| group.iter()) {
                assert!(Setting::find(key).is_some(), "{} takes {key}, which is no setting", protocol.name);
            }
        }
    }
}
