//! One run of a plan: which cells are done, and every file that says so.

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::earlier;
use super::folder::RunFolder;
use super::journal::{Entry, Journal, Limits, Samples};
use super::manifest::{Manifest, State, now};
use super::plan::{Cell, Plan};
use super::worker::Launcher;
use super::{RunError, Stop};
use crate::record::{Outcome, Row, csv, file};
use crate::term::{Term, Warning};

/// How often `rows.csv` and `samples.jsonl` are renewed while cells finish; the journal is written always.
const RENEW: Duration = Duration::from_secs(2);

/// What a run leaves behind.
#[derive(Clone, Debug)]
pub struct Finished {
    /// The rows, in the order of the plan.
    pub rows: Vec<Row>,
    /// The manifest.
    pub manifest: Manifest,
    /// The run folder.
    pub folder: PathBuf,
}

/// A run in progress.
pub struct Session {
    folder: RunFolder,
    journal: Journal,
    done: HashMap<String, Entry>,
    passing: HashMap<String, Vec<Row>>,
    order: Vec<String>,
    renewed: Instant,
    /// How workers are started.
    pub launcher: Launcher,
    /// Set by Ctrl-C.
    pub stop: Stop,
    /// Live bytes that all workers together may reach.
    pub memory_limit: u64,
    /// Resident bytes that all workers together may reach: what the machine has.
    pub resident_limit: u64,
    /// Talk.
    pub term: Term,
    _text: Option<tempfile::NamedTempFile>,
}

/// What a session needs besides the plan.
pub struct Surroundings<'a> {
    /// Results folder.
    pub output: &'a Path,
    /// Start over even if an unfinished run is there.
    pub fresh: bool,
    /// How workers are started.
    pub launcher: Launcher,
    /// A file that workers read; it goes with the session.
    pub text: Option<tempfile::NamedTempFile>,
    /// Set by Ctrl-C.
    pub stop: Stop,
    /// Live bytes that all workers together may reach.
    pub memory_limit: u64,
    /// Resident bytes that all workers together may reach.
    pub resident_limit: u64,
    /// Talk.
    pub term: Term,
}

/// The cells that run again: failed, ended under tighter limits than now, or implied by such a one.
fn again(plan: &Plan, done: &HashMap<String, Entry>, memory: u64) -> HashSet<String> {
    // what is free differs a little from one moment to the next; a limit that was said counts to the byte
    let slack = if plan.settings["memory_limit"].is_null() { memory / 16 } else { 0 };
    let outcome = |key: &String| done.get(key)?.rows.first().map(|row| row.outcome);
    let ran_out = |cell: &&Cell| {
        let Some((entry, outcome)) = done.get(&cell.key).zip(outcome(&cell.key)) else { return false };
        let now = Limits { memory: memory - slack, seconds: cell.timeout };
        let unknown = matches!(outcome, Outcome::Oom | Outcome::Timeout);
        outcome == Outcome::Failed || entry.limits.map_or(unknown, |limits| limits.matter(outcome, &now))
    };
    let first: Vec<&Cell> = plan.cells.iter().filter(ran_out).collect();
    let implied = plan.cells.iter().filter(|cell| {
        outcome(&cell.key) == Some(Outcome::Implied) && first.iter().any(|other| other.series == cell.series)
    });
    first.iter().copied().chain(implied).map(|cell| cell.key.clone()).collect()
}

impl Session {
    /// Continues the unfinished run of `plan`, or starts one. Cells that failed (a full disk, a worker that was killed) run
    /// again; those that ran out of memory or time do if there is more of it now; those that diverged would do so again.
    ///
    /// # Errors
    /// A results folder that cannot be used, is held by another process, or is of a newer version.
    pub fn open(plan: &Plan, around: Surroundings) -> Result<Self, RunError> {
        let folder = RunFolder::open(around.output, plan, around.fresh, &around.stop)?;
        let (mut journal, entries) = Journal::open(&folder.path.join("journal.jsonl"))?;
        let mut done: HashMap<String, Entry> =
            entries.into_iter().map(|entry| (entry.cell.clone(), entry)).collect();
        let known = done.len();
        for cell in &plan.cells {
            if done.get(&cell.key).is_some_and(|entry| !belongs(entry, cell)) {
                done.remove(&cell.key);
            }
        }
        let strange = known - done.len();
        let memory = around.memory_limit.min(around.resident_limit);
        let again = again(plan, &done, memory);
        done.retain(|key, _| !again.contains(key));
        let taken = if plan.keeps && !around.fresh {
            earlier::take(plan, &folder.path, &mut journal, &mut done)?
        } else {
            Vec::new()
        };
        let order: Vec<String> = plan.cells.iter().map(|cell| cell.key.clone()).collect();
        let session = Self {
            folder,
            journal,
            done,
            passing: HashMap::new(),
            order,
            renewed: Instant::now(),
            launcher: around.launcher,
            stop: around.stop,
            memory_limit: around.memory_limit,
            resident_limit: around.resident_limit,
            term: around.term,
            _text: around.text,
        };
        if strange > 0 {
            let reason =
                format!("{strange} lines of the journal have no rows of their cell; those cells run again");
            session.term.warn(&Warning::Other(reason));
        }
        if session.folder.continued {
            let kept = session.order.iter().filter(|key| session.done.contains_key(*key)).count();
            let (cells, path) = (session.order.len(), session.folder.path.display());
            let again = match again.len() {
                0 => String::new(),
                count => format!(", {count} failed or had tighter limits and run again"),
            };
            session.term.say(&format!("continuing {path}: {kept} of {cells} cells are done{again}"));
        } else if let Some(remark) = earlier::unlike(plan, &session.folder.path) {
            session.term.say(&remark);
        }
        taken.iter().for_each(|remark| session.term.say(remark));
        Ok(session)
    }

    /// The folder of results that the run folder lies in.
    pub fn results(&self) -> Option<&Path> {
        self.folder.path.parent()?.parent()
    }

    /// The run folder.
    pub fn path(&self) -> &Path {
        &self.folder.path
    }

    /// Whether `cell` has its rows.
    pub fn is_done(&self, cell: &Cell) -> bool {
        self.done.contains_key(&cell.key)
    }

    /// How the finished cell called `key` ended, by its first row.
    pub fn outcome(&self, key: &str) -> Option<Outcome> {
        self.done.get(key)?.rows.first().map(|row| row.outcome)
    }

    /// Raw samples of the finished cell called `key`.
    pub fn samples(&self, key: &str) -> &[Samples] {
        self.done.get(key).map_or(&[], |entry| &entry.samples)
    }

    /// Number of finished cells of the plan.
    pub fn finished(&self) -> usize {
        self.order.iter().filter(|key| self.done.contains_key(*key)).count()
    }

    /// Finished cells, and all of them.
    pub fn progress(&self) -> (usize, usize) {
        (self.finished(), self.order.len())
    }

    /// Keeps the rows of a finished cell.
    ///
    /// # Errors
    /// Disk full, for example; what was kept before stays.
    pub fn record(&mut self, cell: &Cell, rows: Vec<Row>, samples: Vec<Samples>) -> Result<(), RunError> {
        let memory = self.memory_limit.min(self.resident_limit);
        let limits = Some(Limits { memory, seconds: cell.timeout });
        let entry = Entry { cell: cell.key.clone(), rows, samples, limits };
        let path = self.folder.path.join("journal.jsonl");
        self.journal.append(&entry).map_err(RunError::file(path))?;
        self.done.insert(entry.cell.clone(), entry);
        if self.renewed.elapsed() >= RENEW { self.renew() } else { Ok(()) }
    }

    /// Rows of a cell that is not finished and will run again (`interrupted`).
    pub fn pass_over(&mut self, cell: &Cell, rows: Vec<Row>) {
        self.passing.insert(cell.key.clone(), rows);
    }

    /// All rows so far, in the order of the plan.
    pub fn rows(&self) -> Vec<Row> {
        let rows = self
            .order
            .iter()
            .filter_map(|key| self.done.get(key).map(|entry| &entry.rows).or_else(|| self.passing.get(key)));
        rows.flatten().cloned().collect()
    }

    /// Writes `rows.csv` and `samples.jsonl` anew.
    ///
    /// # Errors
    /// Disk full, for example.
    pub fn renew(&mut self) -> Result<(), RunError> {
        let rows = csv::to_string(&self.rows()).map_err(|error| RunError::Internal(error.to_string()))?;
        let path = self.folder.path.join("rows.csv");
        file::write(&path, rows.as_bytes()).map_err(RunError::file(path))?;
        let mut lines = String::new();
        for entry in self.order.iter().filter_map(|key| self.done.get(key)) {
            for samples in &entry.samples {
                let (cell, samples) = (&entry.cell, serde_json::json!(samples));
                let line = serde_json::json!({
                    "cell": cell,
                    "metric": samples["metric"],
                    "unit": samples["unit"],
                    "values": samples["values"],
                });
                lines.push_str(&line.to_string());
                lines.push('\n');
            }
        }
        let path = self.folder.path.join("samples.jsonl");
        file::write(&path, lines.as_bytes()).map_err(RunError::file(path))?;
        self.renewed = Instant::now();
        Ok(())
    }

    /// Ends the run: files renewed, manifest closed if every cell is done, `latest` set.
    ///
    /// # Errors
    /// Disk full, for example.
    pub fn finish(mut self) -> Result<(Finished, Term), RunError> {
        self.term.end();
        self.renew()?;
        let open = self.folder.manifest.state != State::Done;
        if open && self.finished() == self.order.len() {
            self.folder.manifest.state = State::Done;
            self.folder.manifest.end = Some(now());
            self.folder.manifest.write(&self.folder.path)?;
        }
        if let Err(error) = self.folder.name_latest() {
            self.term.warn(&Warning::Latest { reason: error.to_string() });
        }
        let (rows, manifest, folder) = (self.rows(), self.folder.manifest.clone(), self.folder.path.clone());
        Ok((Finished { rows, manifest, folder }, self.term))
    }
}

/// Whether the rows of `entry` can be those of `cell`: some, and each says of itself what the plan says of the cell.
/// (What a search finds, such as a length, the plan leaves open.)
fn belongs(entry: &Entry, cell: &Cell) -> bool {
    let plan = &cell.row;
    let open = |planned: Option<u64>, found: Option<u64>| planned.is_none() || planned == found;
    let same = |row: &Row| {
        (&row.suite, &row.protocol, &row.model, &row.variant)
            == (&plan.suite, &plan.protocol, &plan.model, &plan.variant)
            && (&row.preset, &row.device, &row.dtype, &row.kernel)
                == (&plan.preset, &plan.device, &plan.dtype, &plan.kernel)
            && (row.threads, row.batch, row.pass, row.seed)
                == (plan.threads, plan.batch, plan.pass, plan.seed)
            && open(plan.len, row.len)
    };
    !entry.rows.is_empty() && entry.rows.iter().all(same)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_rows_of_their_own_cell_make_it_done() {
        let row = Row { len: Some(64), seed: Some(1), ..Row::new("speed", "ls") };
        let cell = Cell { key: "a".into(), row: row.clone(), ..Cell::default() };
        let entry = |rows| Entry { cell: "a".into(), rows, samples: Vec::new(), limits: None };
        let measured = row.with("step_time", "s", Some(1.0));
        assert!(belongs(&entry(vec![measured.clone()]), &cell));
        assert!(!belongs(&entry(Vec::new()), &cell));
        let changes: [fn(Row) -> Row; 8] = [
            |row| Row { len: Some(128), ..row },
            |row| Row { model: "full".into(), ..row },
            |row| Row { variant: Some("w=4".into()), ..row },
            |row| Row { seed: Some(2), ..row },
            |row| Row { kernel: "composed".into(), ..row },
            |row| Row { preset: Some("ls-lra".into()), ..row },
            |row| Row { protocol: "memory".into(), ..row },
            |row| Row { threads: Some(7), ..row },
        ];
        for (index, change) in changes.into_iter().enumerate() {
            assert!(!belongs(&entry(vec![measured.clone(), change(measured.clone())]), &cell), "{index}");
        }
        let found = Cell { row: Row { len: None, ..row }, ..cell };
        assert!(belongs(&entry(vec![measured]), &found), "a length that was looked for");
    }
}
