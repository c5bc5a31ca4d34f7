//! What is to be run: cells, and the identity by which an unfinished run is found again.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde_json::Value;
use sha2::{Digest, Sha256};

use super::shard::{PlanPart, Shard};
use super::{BUILD, RunError};
use effattn_record::{Published, Row};

/// A published number, and what speaks against comparing it.
#[derive(Clone, Debug, PartialEq)]
pub struct PublishedMatch {
    /// The number.
    pub published: Published,
    /// In words, as far as the suite says it.
    pub foreign: Vec<String>,
}

/// A published number for a task of one row of a suite.
#[derive(Clone, Debug, PartialEq)]
pub struct TaskNumber {
    /// What it is about.
    pub metric: String,
    /// The task that it belongs to.
    pub task: String,
    /// The number.
    pub number: PublishedMatch,
}

/// One thing to measure.
#[derive(Clone, Debug)]
pub struct Cell {
    /// Name, unique in the plan and the same in every run of it: everything that was resolved.
    pub key: String,
    /// The short words that the key begins with.
    pub words: String,
    /// The row with everything that is known beforehand; what is measured is filled in.
    pub row: Row,
    /// What the worker is asked to do; null for a cell that cannot be run, whose row says why.
    pub request: Value,
    /// Predicted seconds, for the time left.
    pub seconds: f64,
    /// Seconds of these that its training steps take, where it trains and some were tried: fewer steps take as much less.
    pub training: Option<f64>,
    /// Seconds that it takes by its multiply-adds, on any machine with one thread: what shards are dealt by.
    pub weight: f64,
    /// Predicted bytes of its worker, where a step was tried.
    pub memory: Option<u64>,
    /// Most seconds that it may take. Not part of the key: an outcome carries the limit that it ran under.
    pub timeout: Option<f64>,
    /// Names in [`Plan::data`] of what it reads, set when the data are; empty: all of them.
    pub reads: Vec<String>,
    /// What its suite, or a shipped one, has beside rows of other tasks that it gives.
    pub published: Vec<TaskNumber>,
    /// The same for cells that differ in their length only; empty where running out of memory says nothing about others.
    pub series: String,
}

impl Default for Cell {
    fn default() -> Self {
        let (key, words, series) = Default::default();
        let row = Row::new("", "");
        Self {
            key,
            words,
            row,
            request: Value::Null,
            seconds: 0.0,
            training: None,
            weight: 0.0,
            memory: None,
            timeout: None,
            reads: Vec::new(),
            published: Vec::new(),
            series,
        }
    }
}

impl Cell {
    /// The cell of `request`. Its key is `words` and every value of the request that is not `usual`'s: what `words` say
    /// must be alike in both.
    pub fn new(words: &str, row: Row, request: &impl Serialize, usual: &impl Serialize) -> Self {
        let json = |value: &dyn Fn() -> serde_json::Result<Value>| value().unwrap_or_default();
        let request = json(&|| serde_json::to_value(request));
        let usual = json(&|| serde_json::to_value(usual));
        let settings = setting_words(&unusual(&request, &usual));
        let key = if settings.is_empty() { words.to_owned() } else { format!("{words} {settings}") };
        let row = Row { settings: Some(settings).filter(|settings| !settings.is_empty()), ..row };
        Self { key, words: words.to_owned(), row, request, ..Self::default() }
    }

    /// The number for `metric` of `task` among [`Self::published`].
    pub fn published(&self, metric: &str, task: &str) -> Option<&PublishedMatch> {
        let known = self.published.iter().find(|known| known.metric == metric && known.task == task);
        known.map(|known| &known.number)
    }

    /// The same cell, predicted to take `seconds` with so many threads.
    #[must_use]
    pub fn with_seconds(self, threads: usize, seconds: impl Fn(usize) -> f64) -> Self {
        Self { seconds: seconds(threads), weight: seconds(1), ..self }
    }

    /// The same cell where `reason` says why it cannot be run.
    #[must_use]
    pub fn with_unsupported(mut self, reason: Option<String>) -> Self {
        if reason.is_some() {
            (self.request, self.seconds, self.weight) = (Value::Null, 0.0, 0.0);
            self.row.error = reason;
        }
        self
    }
}

/// SHA-256 of `text` in hex digits.
pub fn sha256(text: &str) -> String {
    format!("{:x}", Sha256::digest(text))
}

/// Twelve hex digits of `text`.
pub fn digest(text: &str) -> String {
    sha256(text)[..12].to_owned()
}

/// Longest name of a folder that is made of a key; longer ones end in a digest.
const LONGEST: usize = 120;

/// Whether a name with `c` ends in a digest of its key: the others are what keys are made of, and are the same in every key
/// with that name.
fn odd(c: char) -> bool {
    !c.is_ascii_alphanumeric() && !"-.=+_ :,".contains(c)
}

/// Whether `word` of a key is a setting whose value has what separates a mechanism and its knobs: `characters=:` and
/// `characters=_` would be one folder. (A device is no underscore.)
fn separated(word: &str) -> bool {
    let value = word.split_once('=').filter(|(name, _)| !name.contains([':', ',']) && *name != "device");
    value.is_some_and(|(_, value)| value.contains([':', ',']))
}

/// A name from outside as the first word of a key. Quoted where it has what separates words and is changed in a folder's name:
/// `a b.txt` and `a_b.txt` are two folders.
pub fn key_word(name: &str) -> Cow<'_, str> {
    let split = name.starts_with('"') || name.contains([' ', ':', ',']) && !name.contains(odd);
    if split { Cow::Owned(format!("{name:?}")) } else { Cow::Borrowed(name) }
}

/// The folder of the cell called `key` in the folder of its run.
pub fn folder(run: &Path, key: &str) -> PathBuf {
    let plain = |c: char| if c.is_ascii_alphanumeric() || "-.=+".contains(c) { c } else { '_' };
    let mut name: String = key.chars().map(plain).collect();
    if name.len() > LONGEST || key.contains(odd) || key.split(' ').any(separated) {
        name.truncate(LONGEST);
        name = format!("{name}-{}", digest(key));
    }
    run.join("cells").join(name)
}

/// A value of a request that is not the usual one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnusualValue {
    /// Where it stands: `spec.sizes.layers`.
    pub path: String,
    /// The shortest name that is unique in the request.
    pub name: String,
    /// What is asked; none where only the usual request has a value.
    pub here: Option<String>,
    /// The usual value, where there is one.
    pub usual: Option<String>,
}

/// Every value of `request` that is not that of `usual`.
pub fn unusual_values(request: &impl Serialize, usual: &impl Serialize) -> Vec<UnusualValue> {
    let json = |value: serde_json::Result<Value>| value.unwrap_or_default();
    unusual(&json(serde_json::to_value(request)), &json(serde_json::to_value(usual)))
}

fn unusual(request: &Value, usual: &Value) -> Vec<UnusualValue> {
    let (request, usual) = (leaves(request), leaves(usual));
    let mut paths: Vec<&String> = request.keys().chain(usual.keys()).collect();
    paths.sort_unstable();
    paths.dedup();
    let last = |path: &str| path.rsplit('.').next().unwrap_or_default().to_owned();
    let differ = paths.iter().filter(|path| request.get(**path) != usual.get(**path));
    let value = differ.map(|path| {
        let own = last(path);
        let unique = paths.iter().filter(|other| last(other) == own).count() == 1;
        let name = if unique { own } else { (*path).clone() };
        let (here, usual) = (request.get(*path).cloned(), usual.get(*path).cloned());
        UnusualValue { path: (*path).clone(), name, here, usual }
    });
    value.collect()
}

/// `layers=8 kernel=composed`: `values` as words of a key.
fn setting_words(values: &[UnusualValue]) -> String {
    let said = values.iter().filter_map(|UnusualValue { path, name, here, .. }| match here {
        Some(value) => Some(format!("{name}={value}")),
        // items that a shorter list lacks: its length is said
        None if path.split('.').any(|part| part.parse::<usize>().is_ok()) => None,
        None => Some(format!("{name}=-")),
    });
    said.collect::<Vec<_>>().join(" ")
}

/// The values of `json` as text, by their path; nulls are as good as absent.
fn leaves(json: &Value) -> BTreeMap<String, String> {
    fn walk(path: &str, json: &Value, found: &mut BTreeMap<String, String>) {
        let below = |name: &str| if path.is_empty() { name.to_owned() } else { format!("{path}.{name}") };
        match json {
            Value::Null => {}
            Value::Object(fields) => fields.iter().for_each(|(name, value)| walk(&below(name), value, found)),
            Value::Array(items) if items.iter().any(Value::is_object) => {
                found.insert(path.to_owned(), items.len().to_string());
                items.iter().enumerate().for_each(|(at, item)| walk(&below(&at.to_string()), item, found));
            }
            Value::String(text)
                if text.chars().all(|c| c.is_ascii_alphanumeric() || "_-+.:,".contains(c)) =>
            {
                found.insert(path.to_owned(), text.clone());
            }
            other => drop(found.insert(path.to_owned(), other.to_string())),
        }
    }
    let mut found = BTreeMap::new();
    walk("", json, &mut found);
    found
}

/// All cells of one command, in the order of the rows.
#[derive(Clone, Debug, Default)]
pub struct Plan {
    /// Suite or command: the folder below the results.
    pub name: String,
    /// Command.
    pub command: String,
    /// The suite's text, where there is one.
    pub suite: Option<String>,
    /// The words that were typed, without the program.
    pub argv: Vec<String>,
    /// Resolved settings.
    pub settings: Value,
    /// The cells.
    pub cells: Vec<Cell>,
    /// The machine and how memory is allocated: another one does not continue the run.
    pub machine: String,
    /// What the device calls itself, where it is not the processor: two cards of one machine may differ.
    pub accelerator: Option<String>,
    /// Hashes of the data, by name.
    pub data: BTreeMap<String, String>,
    /// CPU threads.
    pub threads: usize,
    /// Device.
    pub device: String,
    /// Seeds.
    pub seeds: Vec<u64>,
    /// Whether a finished run of it is kept: a training run is not made twice, a measurement is.
    pub keeps: bool,
    /// What of a larger plan this is.
    pub part: PlanPart,
    /// The group of every cell: those of one group stay on one machine. Empty: each has its own.
    pub groups: Vec<usize>,
}

impl Plan {
    /// Twelve hex digits over cells, suite, data, build, machine and threads; where results are written does not count.
    pub fn identity(&self) -> String {
        let mut hash = Sha256::new();
        let mut feed = |text: &str| {
            hash.update(text.len().to_le_bytes());
            hash.update(text);
        };
        feed(&self.command);
        feed(&self.name);
        feed(env!("CARGO_PKG_VERSION"));
        feed(option_env!("EFFATTN_COMMIT").unwrap_or(""));
        feed(BUILD);
        feed(&self.machine);
        feed(self.accelerator.as_deref().unwrap_or(""));
        feed(self.suite.as_deref().unwrap_or(""));
        feed(&self.threads.to_string());
        feed(&self.device);
        for (name, digest) in &self.data {
            feed(name);
            feed(digest);
        }
        for cell in &self.cells {
            feed(&cell.key);
            feed(&cell.request.to_string());
        }
        hash.finalize()[..6].iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// Twelve hex digits over what is computed, by which build from which data, on whatever machine.
    pub fn digest(&self) -> String {
        let (machine, threads, part) = (String::new(), 0, PlanPart::default());
        Self { machine, accelerator: None, threads, part, ..self.clone() }.identity()
    }

    /// Keeps the cells of `shard`, whose owners are given for every cell.
    pub fn keep_shard(&mut self, shard: Shard, owners: &[usize]) {
        self.part = PlanPart { shard: Some(shard), digest: self.digest(), identity: self.identity() };
        let own = |index: usize| owners.get(index) == Some(&shard.index);
        let mut index = 0..;
        self.cells.retain(|_| index.next().is_some_and(own));
        let mut index = 0..;
        self.groups.retain(|_| index.next().is_some_and(own));
    }

    /// The folder of its runs below the results.
    pub fn base(&self, results: &Path) -> PathBuf {
        let base = results.join(&self.name);
        match self.part.shard {
            Some(shard) => super::shard::parent(&base, &self.part.digest).join(shard.folder()),
            None => base,
        }
    }

    /// What cell `index` is called in messages: its short words, where no other cell has the same.
    pub fn name(&self, index: usize) -> &str {
        let cell = &self.cells[index];
        let same = self.cells.iter().filter(|other| other.words == cell.words).count();
        if cell.words.is_empty() || same > 1 { &cell.key } else { &cell.words }
    }

    /// Runs once what is asked for more than once, such as by two rows of a suite; gives how many were left out.
    pub fn remove_duplicates(&mut self) -> Result<usize, RunError> {
        let mut seen: HashMap<String, Value> = HashMap::new();
        let before = self.cells.len();
        let mut clash = None;
        self.cells.retain(|cell| match seen.get(&cell.key) {
            None => {
                seen.insert(cell.key.clone(), cell.request.clone());
                true
            }
            Some(request) => {
                if *request != cell.request {
                    clash = Some(cell.key.clone());
                }
                false
            }
        });
        match clash {
            Some(key) => Err(RunError::Internal(format!("two different cells are called {key:?}"))),
            None => Ok(before - self.cells.len()),
        }
    }

    /// Predicted seconds of all cells.
    pub fn seconds(&self) -> f64 {
        self.cells.iter().map(|cell| cell.seconds).sum()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn the_identity_depends_on_what_is_computed_only() {
        let cell = |key: &str| Cell {
            key: key.to_owned(),
            row: Row::new("speed", "ls"),
            seconds: 1.0,
            ..Cell::default()
        };
        let plan = Plan { cells: vec![cell("a")], threads: 2, ..Plan::default() };
        let elsewhere = Plan { argv: vec!["-o".to_owned(), "x".to_owned()], ..plan.clone() };
        assert_eq!(plan.identity(), elsewhere.identity());
        assert_ne!(plan.identity(), Plan { threads: 1, ..plan.clone() }.identity());
        assert_ne!(plan.identity(), Plan { machine: "another".to_owned(), ..plan.clone() }.identity());
        let [a, b] = ["A100", "H100"].map(|name| Plan { accelerator: Some(name.to_owned()), ..plan.clone() });
        assert!(plan.identity() != a.identity() && a.identity() != b.identity());
        assert_ne!(plan.identity(), Plan { device: "cuda:1".to_owned(), ..plan.clone() }.identity());
        assert_ne!(plan.identity(), Plan { suite: Some("edited".to_owned()), ..plan.clone() }.identity());
        assert_ne!(plan.identity(), Plan { cells: vec![cell("b")], ..plan.clone() }.identity());
    }

    /// Every field of a plan and of its cells: a new one has to be put into the identity, or here with a reason.
    #[test]
    fn every_field_of_a_plan_is_in_the_identity_or_says_why_not() {
        let plan = Plan { cells: vec![Cell::default()], ..Plan::default() };
        let same = |other: Plan| plan.identity() == other.identity();
        let Plan {
            name,
            command,
            suite,
            argv,
            settings,
            cells,
            machine,
            accelerator,
            data,
            threads,
            device,
            seeds,
            keeps,
            part: _,   // the cells that are left say it
            groups: _, // made from the cells
        } = plan.clone();
        let text = |text: String| format!("{text}x");
        for (what, other) in [
            ("name", Plan { name: text(name), ..plan.clone() }),
            ("command", Plan { command: text(command), ..plan.clone() }),
            ("suite", Plan { suite: Some(text(suite.unwrap_or_default())), ..plan.clone() }),
            ("machine", Plan { machine: text(machine), ..plan.clone() }),
            (
                "accelerator",
                Plan { accelerator: Some(text(accelerator.unwrap_or_default())), ..plan.clone() },
            ),
            (
                "data",
                Plan {
                    data: data.into_iter().chain([("imdb".into(), "1".into())]).collect(),
                    ..plan.clone()
                },
            ),
            ("threads", Plan { threads: threads + 1, ..plan.clone() }),
            ("device", Plan { device: text(device), ..plan.clone() }),
        ] {
            assert!(!same(other), "{what}");
        }
        for (why, other) in [
            (
                "where results are written and how much is said",
                Plan { argv: vec![text(argv.concat())], ..plan.clone() },
            ),
            (
                "the requests of the cells hold what it settles",
                Plan { settings: Value::Bool(settings.is_null()), ..plan.clone() },
            ),
            ("the cells hold them", Plan { seeds: seeds.into_iter().chain([1]).collect(), ..plan.clone() }),
            ("the command says it", Plan { keeps: !keeps, ..plan.clone() }),
        ] {
            assert!(same(other), "{why}");
        }
        let Cell {
            key,
            words,
            row,
            request,
            seconds,
            weight,
            timeout,
            reads,
            series,
            published,
            memory: _,
            training: _,
        } = cells[0].clone();
        let with = |cell: Cell| same(Plan { cells: vec![cell], ..plan.clone() });
        let cell = || cells[0].clone();
        assert!(
            !with(Cell { key: text(key), ..cell() })
                && !with(Cell { request: Value::Bool(request.is_null()), ..cell() })
        );
        let number = TaskNumber {
            metric: "accuracy".into(),
            task: "text-deletion".into(),
            number: PublishedMatch { published: Published::Value(1.0), foreign: Vec::new() },
        };
        for (why, other) in [
            ("the key begins with them", Cell { words: text(words), ..cell() }),
            ("made from the request", Cell { row: Row { params: Some(1), ..row }, ..cell() }),
            ("a guess", Cell { seconds: seconds + 1.0, weight: weight + 1.0, ..cell() }),
            (
                "an outcome carries the limit that it ran under",
                Cell { timeout: Some(timeout.unwrap_or(1.0)), ..cell() },
            ),
            ("made from the request", Cell { series: text(series), ..cell() }),
            ("the plan has the suite", Cell { published: [published, vec![number]].concat(), ..cell() }),
            ("the plan has the checksums", Cell { reads: [reads, vec!["imdb".into()]].concat(), ..cell() }),
        ] {
            assert!(with(other), "{why}");
        }
    }

    #[test]
    fn a_key_holds_everything_that_is_unusual() {
        let usual = serde_json::json!({ "spec": { "layers": null, "len": 4 }, "phases": [{ "len": 1 }, { "len": 2 }] });
        let key = |request: Value| Cell::new("ls s0", Row::new("speed", "ls"), &request, &usual).key;
        assert_eq!(key(usual.clone()), "ls s0");
        let mut other = usual.clone();
        other["spec"]["layers"] = 8.into();
        assert_eq!(key(other), "ls s0 layers=8");
        let mut other = usual.clone();
        other["phases"] = serde_json::json!([{ "len": 1 }]);
        assert_eq!(key(other), "ls s0 phases=1");
        let mut other = usual.clone();
        other["phases"][1]["len"] = 3.into();
        assert_eq!(key(other), "ls s0 phases.1.len=3");
    }

    #[test]
    fn what_is_asked_twice_runs_once_and_a_clash_is_an_error() {
        let cell = |request: u64| Cell { key: "a".to_owned(), request: request.into(), ..Cell::default() };
        let mut plan = Plan { cells: vec![cell(1), cell(1)], ..Plan::default() };
        assert_eq!((plan.remove_duplicates().unwrap(), plan.cells.len()), (1, 1));
        assert!(Plan { cells: vec![cell(1), cell(2)], ..Plan::default() }.remove_duplicates().is_err());
    }

    #[test]
    fn folders_of_different_keys_differ() {
        let folder = |key: &str| folder(Path::new(""), key);
        assert_eq!(folder("listops ls:w=4 s0"), Path::new("cells/listops_ls_w=4_s0"));
        assert_ne!(folder("a characters=\"!\""), folder("a characters=\"?\""));
        assert_eq!(folder("ls:w=4,r=2 s0 device=cuda:1"), Path::new("cells/ls_w=4_r=2_s0_device=cuda_1"));
        let names = ["a b.txt", "a_b.txt", "a:b.txt", "a,b.txt", "a b_txt", "\"a b.txt\""];
        let folders: BTreeSet<_> = names.map(|name| folder(&format!("{} full s1", key_word(name)))).into();
        assert_eq!(folders.len(), names.len(), "texts of a person's own: {folders:?}");
        let values = ["_", ":", ",", "__", "::", "_:"];
        let folders: BTreeSet<_> = values.map(|value| folder(&format!("text s0 characters={value}"))).into();
        assert_eq!(folders.len(), values.len(), "{folders:?}");
        let long = "x".repeat(300);
        assert_ne!(folder(&long), folder(&format!("{long}y")));
        assert!(folder(&long).file_name().unwrap().len() < 200);
    }
}
