//! One run of a plan: which cells are done, and every file that says so.

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::claim::Claim;
use super::folder::RunFolder;
use super::journal::{Entry, Journal, Limits, Samples};
use super::manifest::{Manifest, State, now};
use super::plan::{Cell, Plan, sha256};
use super::plan_file::PlanFile;
use super::reuse::{self, entry_matches_cell};
use super::turn::Steadiness;
use super::worker::Launcher;
use super::{CancelToken, RunError};
use crate::term::{Term, Warning};
use effattn_kernel::device::machine;
use effattn_record::{Outcome, Row, csv, departures, file};

/// How often `rows.csv` and `samples.jsonl` are renewed while cells finish; the journal is written always.
const RENEW: Duration = Duration::from_secs(2);

/// What a run leaves behind.
#[derive(Clone, Debug)]
pub struct FinishedRun {
    /// The rows, in the order of the plan.
    pub rows: Vec<Row>,
    /// The manifest.
    pub manifest: Manifest,
    /// The run folder.
    pub folder: PathBuf,
}

/// A run in progress.
pub struct Session {
    claim: Option<Claim>,
    folder: RunFolder,
    results: PathBuf,
    host: String,
    recorded: Instant,
    journal: Journal,
    done: HashMap<String, Entry>,
    passing: HashMap<String, Vec<Row>>,
    order: Vec<String>,
    renewed: Instant,
    /// How workers are started.
    pub launcher: Launcher,
    /// Set by Ctrl-C.
    pub stop: CancelToken,
    /// Live bytes that all workers together may reach.
    pub memory_limit: u64,
    /// Resident bytes that all workers together may reach: what the machine has.
    pub resident_limit: u64,
    /// What is said while it runs.
    pub term: Term,
    /// The text of the models, where it is not the built-in one: workers read it while this is here.
    _text: Option<tempfile::NamedTempFile>,
}

/// What a session needs besides the plan.
pub struct SessionOptions<'a> {
    /// Results folder.
    pub output: &'a Path,
    /// The whole plan, which is written beside its runs.
    pub planned: &'a PlanFile,
    /// Start over even if an unfinished run is there.
    pub fresh: bool,
    /// How workers are started.
    pub launcher: Launcher,
    /// A file that workers read; it goes with the session.
    pub text: Option<tempfile::NamedTempFile>,
    /// Set by Ctrl-C.
    pub stop: CancelToken,
    /// Live bytes that all workers together may reach.
    pub memory_limit: u64,
    /// Resident bytes that all workers together may reach.
    pub resident_limit: u64,
    /// What is said while it runs.
    pub term: Term,
}

/// The cells that run again: failed, ended under tighter limits than now, or implied by such a one.
fn cells_to_rerun(plan: &Plan, done: &HashMap<String, Entry>, memory: u64) -> HashSet<String> {
    // what is free differs a little from one moment to the next; a limit that was said counts to the byte
    let slack = if plan.settings["memory_limit"].is_null() { memory / 16 } else { 0 };
    let outcome = |key: &String| done.get(key)?.rows.first().map(|row| row.outcome);
    let ran_out = |cell: &&Cell| {
        let Some((entry, outcome)) = done.get(&cell.key).zip(outcome(&cell.key)) else { return false };
        let now = Limits { memory: memory - slack, seconds: cell.timeout };
        let unknown = matches!(outcome, Outcome::Oom | Outcome::Timeout);
        outcome == Outcome::Failed || entry.limits.map_or(unknown, |limits| limits.allow_retry(outcome, &now))
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
    pub fn open(plan: &Plan, around: SessionOptions) -> Result<Self, RunError> {
        let base = plan.base(around.output);
        let claim = plan.part.shard.map(|_| Claim::acquire(&base, &around.stop)).transpose()?;
        let mut folder = RunFolder::open(around.output, plan, around.fresh, &around.stop)?;
        match base.parent().filter(|_| claim.is_some()) {
            Some(whole) => around.planned.write(whole)?,
            None => around.planned.write(&folder.path)?,
        }
        let planned: HashSet<&str> = plan.cells.iter().map(|cell| cell.key.as_str()).collect();
        let mut done: HashMap<String, Entry> = HashMap::new();
        let mut journal = Journal::open(&folder.path.join("journal.jsonl"), |entry| {
            if planned.contains(entry.cell.as_str()) {
                done.insert(entry.cell.clone(), entry); // of two lines of a cell the later counts
            }
        })?;
        let known = done.len();
        for cell in &plan.cells {
            if done.get(&cell.key).is_some_and(|entry| !entry_matches_cell(entry, cell)) {
                done.remove(&cell.key);
            }
        }
        let strange = known - done.len();
        let memory = around.memory_limit.min(around.resident_limit);
        let again = cells_to_rerun(plan, &done, memory);
        done.retain(|key, _| !again.contains(key));
        let host = machine::host();
        if claim.is_some() && !plan.keeps {
            let elsewhere = cells_from_other_machines(plan, &done, &host);
            done.retain(|key, _| !elsewhere.contains(key));
        }
        let taken = if plan.keeps && !around.fresh {
            reuse::reuse_finished_cells(plan, &folder.path, &mut journal, &mut done)?
        } else {
            Vec::new()
        };
        if folder.manifest.state == State::Done && done.len() < plan.cells.len() {
            folder.manifest.continued.push(now());
            folder.manifest.end = None;
            folder.manifest.rows_sha256 = None;
            folder.manifest.write(&folder.path)?;
        }
        let order: Vec<String> = plan.cells.iter().map(|cell| cell.key.clone()).collect();
        let session = Self {
            claim,
            folder,
            results: around.output.to_owned(),
            host,
            recorded: Instant::now(),
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
            let reason = format!(
                "{strange} lines of the journal have no rows of their cell; those cells will run again"
            );
            session.term.warn(&Warning::Other(reason));
        }
        if session.folder.continued {
            let kept = session.order.iter().filter(|key| session.done.contains_key(*key)).count();
            let (cells, path) = (session.order.len(), session.folder.path.display());
            let again = match again.len() {
                0 => String::new(),
                count => format!(", {count} failed or had tighter limits and will run again"),
            };
            session.term.info(&format!("continuing {path}: {kept} of {cells} cells are done{again}"));
        } else if let Some(remark) = reuse::explain_new_run(plan, &session.folder.path) {
            session.term.info(&remark);
        }
        taken.iter().for_each(|remark| session.term.info(remark));
        Ok(session)
    }

    /// The folder of results that the run folder lies in.
    pub fn results(&self) -> &Path {
        &self.results
    }

    /// The run folder.
    pub fn path(&self) -> &Path {
        &self.folder.path
    }

    /// The hash of the data called `name` in the plan.
    pub fn data(&self, name: &str) -> Option<&str> {
        self.folder.manifest.data.get(name).map(String::as_str)
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

    /// Makes sure that no other start of the same shard has taken over.
    fn own(&self) -> Result<(), RunError> {
        match &self.claim {
            Some(claim) if !claim.is_held() => {
                let path = self.folder.path.parent().unwrap_or(&self.folder.path).to_owned();
                let holder = Claim::holder(&path);
                let holder = holder.map_or_else(|| "another start".to_owned(), |holder| holder.to_string());
                Err(RunError::TakenOver { path, holder })
            }
            _ => Ok(()),
        }
    }

    /// Keeps the rows of a finished cell.
    pub fn record(&mut self, cell: &Cell, mut rows: Vec<Row>, samples: Vec<Samples>) -> Result<(), RunError> {
        self.own()?;
        let memory = self.memory_limit.min(self.resident_limit);
        let limits = Some(Limits { memory, seconds: cell.timeout });
        rows.iter_mut().for_each(|row| row.machine = Some(self.host.clone()));
        departures::complete(&mut rows, &self.folder.manifest.data);
        let seconds = Some(self.recorded.elapsed().as_secs_f64());
        self.recorded = Instant::now();
        let entry = Entry { cell: cell.key.clone(), rows, samples, limits, seconds };
        let path = self.folder.path.join("journal.jsonl");
        self.journal.append(&entry).map_err(RunError::file(path))?;
        self.done.insert(entry.cell.clone(), entry);
        if self.renewed.elapsed() >= RENEW { self.flush_rows().map(drop) } else { Ok(()) }
    }

    /// Rows of a cell that is not finished and will run again (`interrupted`).
    pub fn add_interrupted(&mut self, cell: &Cell, rows: Vec<Row>) {
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

    /// Writes `rows.csv` and `samples.jsonl` anew, and gives the SHA-256 of the first.
    pub fn flush_rows(&mut self) -> Result<String, RunError> {
        let done = self.order.iter().filter_map(|key| self.done.get(key));
        let digest = write(&self.folder.path, &self.rows(), done)?;
        self.renewed = Instant::now();
        Ok(digest)
    }

    /// How steady the machine was while the finished cells were measured; none where nothing was calibrated.
    pub fn steadiness(&self) -> Option<Steadiness> {
        let entries = self.order.iter().filter_map(|key| self.done.get(key));
        Steadiness::of(entries.flat_map(|entry| &entry.samples).flat_map(|samples| &samples.turns))
    }

    /// Ends the run: files renewed, manifest closed if every cell is done, `latest` set.
    pub fn finish(mut self) -> Result<(FinishedRun, Term), RunError> {
        self.term.finish_progress();
        self.own()?;
        let digest = self.flush_rows()?;
        self.folder.manifest.steadiness = self.steadiness();
        if self.folder.manifest.end.is_none() && self.finished() == self.order.len() {
            self.folder.manifest.state = State::Done;
            self.folder.manifest.end = Some(now());
            self.folder.manifest.rows_sha256 = Some(digest);
            self.folder.manifest.write(&self.folder.path)?;
        } else if self.folder.manifest.rows_sha256.as_ref().is_some_and(|before| *before != digest) {
            self.folder.manifest.rows_sha256 = Some(digest); // as the journal has them
            self.folder.manifest.write(&self.folder.path)?;
        } else if self.folder.manifest.end.is_none() && self.folder.manifest.steadiness.is_some() {
            self.folder.manifest.write(&self.folder.path)?;
        }
        if let Err(error) = self.folder.name_latest() {
            self.term.warn(&Warning::Latest { reason: error.to_string() });
        }
        let (rows, manifest, folder) = (self.rows(), self.folder.manifest.clone(), self.folder.path.clone());
        Ok((FinishedRun { rows, manifest, folder }, self.term))
    }
}

/// Writes `rows.csv` with `rows` and `samples.jsonl` with those of `entries` into `folder`; the SHA-256 of the first.
pub fn write<'a>(
    folder: &Path,
    rows: impl IntoIterator<Item = &'a Row>,
    entries: impl Iterator<Item = &'a Entry>,
) -> Result<String, RunError> {
    #[derive(serde::Serialize)]
    struct Line<'a> {
        cell: &'a str,
        #[serde(flatten)]
        samples: &'a Samples,
    }
    let rows = csv::to_string(rows).map_err(|error| RunError::Internal(error.to_string()))?;
    let path = folder.join("rows.csv");
    file::write(&path, rows.as_bytes()).map_err(RunError::file(path))?;
    let mut lines = String::new();
    for entry in entries {
        for samples in &entry.samples {
            let line = serde_json::to_string(&Line { cell: &entry.cell, samples });
            lines.push_str(&line.map_err(|error| RunError::Internal(error.to_string()))?);
            lines.push('\n');
        }
    }
    let path = folder.join("samples.jsonl");
    file::write(&path, lines.as_bytes()).map_err(RunError::file(path))?;
    Ok(sha256(&rows))
}

/// The finished cells of `plan` that were measured elsewhere, where others of their group are still to be measured: those
/// that are compared with each other stay on one machine.
fn cells_from_other_machines(plan: &Plan, done: &HashMap<String, Entry>, host: &str) -> HashSet<String> {
    let group = |index: usize| plan.groups.get(index).copied().unwrap_or(index);
    let cells = || plan.cells.iter().enumerate();
    let open: HashSet<usize> =
        cells().filter(|(_, cell)| !done.contains_key(&cell.key)).map(|(index, _)| group(index)).collect();
    let foreign = |entry: &Entry| {
        entry.rows.first().and_then(|row| row.machine.as_deref()).is_some_and(|name| name != host)
    };
    let cells = cells().filter(|(index, _)| open.contains(&group(*index)));
    let cells = cells.filter(|(_, cell)| done.get(&cell.key).is_some_and(foreign));
    cells.map(|(_, cell)| cell.key.clone()).collect()
}
