//! Finding and reading run folders.

mod latest;

use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, bail};

use super::command_line::command_line;
use super::words;
use crate::protocol;
use crate::run::manifest::{Manifest, State};
use crate::run::merge::warn_of_rows_without_manifest;
use crate::run::plan::sha256;
use crate::run::plan_file::PLAN;
use crate::run::shard::shards;
use effattn_record::report::document::Source;
use effattn_record::text::plural;
use effattn_record::{Outcome, Row, csv, departures, file};
use latest::by_age;

pub use latest::{latest_measured, latest_rows, mixed_builds, newest_trained, trained_key};

/// A run folder that was read.
pub struct StoredRun {
    /// Where it is.
    pub folder: PathBuf,
    /// Where its rows come from.
    pub manifest: Manifest,
    pub rows: Vec<Row>,
}

/// Folders below the results at which runs are looked for no more.
pub const DEEPEST: usize = 8;

impl StoredRun {
    /// Reads `folder`; nothing if it is no run folder.
    pub fn read(folder: &Path) -> Result<Option<Self>> {
        let run = Self::without_rows(folder)?;
        run.map(Self::with_rows).transpose()
    }

    /// The run in `folder`, its rows left out; nothing where there are none.
    fn without_rows(folder: &Path) -> Result<Option<Self>> {
        let Some(manifest) = Manifest::read(folder)? else { return Ok(None) };
        let (path, state) = (folder.join("rows.csv"), manifest.state);
        let run = Self { folder: folder.to_owned(), manifest, rows: Vec::new() };
        if path.is_file() {
            return Ok(Some(run));
        }
        // none where it was killed before its first cell
        if run.manifest.rows_sha256.is_some() && state != State::Abandoned {
            bail!("{} is gone, and its run is finished; {}", path.display(), run.remedy());
        }
        Ok(None)
    }

    /// What brings back the rows of a finished run: its own command would compute anew, at least where the folder was moved.
    fn remedy(&self) -> String {
        if !self.folder.join("journal.jsonl").is_file() {
            let command = command_line(self.manifest.argv.iter().cloned());
            return format!("its journal.jsonl is gone, too; run again: {command}");
        }
        let folder = self.folder.to_string_lossy();
        let command = command_line(["merge", &*folder, "-o", "restored"].map(str::to_owned).into_iter());
        format!("write its rows again from its journal: {command}")
    }

    fn with_rows(self) -> Result<Self> {
        let path = self.folder.join("rows.csv");
        let text = file::read_to_string(&path).with_context(|| path.display().to_string())?;
        if self.manifest.rows_sha256.as_ref().is_some_and(|written| *written != sha256(&text)) {
            bail!(
                "{} is not what its run wrote (it was edited, cut off or replaced); {}",
                path.display(),
                self.remedy()
            );
        }
        let mut rows = csv::from_str(&text).with_context(|| path.display().to_string())?;
        departures::complete(&mut rows, &self.manifest.data);
        Ok(Self { rows, ..self })
    }

    /// Makes sure that every cell that is ok has a number: an earlier version wrote no digest of its rows.
    pub fn finite(self) -> Result<Self> {
        let wrong =
            |row: &Row| row.outcome == Outcome::Ok && row.value.is_some_and(|value| !value.is_finite());
        match self.rows.iter().position(wrong) {
            Some(at) => {
                let (path, row) = (self.folder.join("rows.csv"), &self.rows[at]);
                let (label, metric) = (row.label(), &row.metric);
                bail!(
                    "{}: row {} ({label}) is ok, but its {metric} is no finite number",
                    path.display(),
                    at + 1
                )
            }
            None => Ok(self),
        }
    }

    /// Every run below `root` (or `root` itself) that counts, the oldest first: what was given up is left out, and
    /// measurements that a newer run of their folder replaces are not read.
    pub fn find_all(root: &Path) -> Result<Vec<Self>> {
        let mut runs = Vec::new();
        let mut folders = vec![(root.to_owned(), 0)];
        while let Some((folder, depth)) = folders.pop() {
            let found = match Self::without_rows(&folder) {
                Err(error) if depth > 0 => {
                    log::warn!("{} is left out: {}", folder.display(), words(&error));
                    continue;
                }
                found => found?,
            };
            if let Some(run) = found {
                if run.manifest.state != State::Abandoned {
                    runs.push(run);
                }
                continue;
            }
            warn_of_rows_without_manifest(&folder);
            if depth == DEEPEST {
                continue;
            }
            if folder.join(PLAN).exists() && !shards(&folder).is_empty() {
                // each shard is a run, but none is the run that was asked for
                log::warn!(
                    "{} has shards that are not joined; join them: effattn merge {0}",
                    folder.display()
                );
                continue;
            }
            let entries = std::fs::read_dir(&folder)
                .with_context(|| format!("{} cannot be read; name a folder of results", folder.display()))?;
            for entry in entries {
                let entry = entry?;
                if entry.file_type()?.is_dir() {
                    folders.push((entry.path(), depth + 1)); // `latest` is a link and passed over
                }
            }
        }
        let mut runs = by_age(runs);
        let measured: BTreeSet<PathBuf> =
            latest_measured(&runs).into_iter().map(|run| run.folder.clone()).collect();
        runs.retain(|run| run.trained() || measured.contains(&run.folder));
        let alone = runs.len() == 1;
        let read = |run: Self| {
            let folder = run.folder.clone();
            match run.with_rows().and_then(Self::finite) {
                Err(error) if !alone => {
                    log::warn!("{} is left out: {}", folder.display(), words(&error));
                    None
                }
                read => Some(read),
            }
        };
        runs.into_iter().filter_map(read).collect()
    }

    /// Where the rows of this run come from and stand, below the folder of results `root`.
    pub fn source(&self, root: &Path) -> Source {
        let folder = self.folder.strip_prefix(root).unwrap_or(&self.folder);
        let command = command_line(self.manifest.argv.iter().cloned());
        Source { line: self.provenance(), command, rows: folder.join("rows.csv").display().to_string() }
    }

    /// The words that were typed, without the command, the flags in `without`, and those that say how often, how long, where and into
    /// which folder or file, and nothing of what is measured.
    pub fn typed(&self, without: &[&str]) -> String {
        const WITH_VALUE: [&str; 18] = [
            "-o",
            "--output-path",
            "--plots-dir",
            "--export-json",
            "--export-csv",
            "--export-markdown",
            "--color",
            "--data-dir",
            "--max-time",
            "--min-runs",
            "--runs",
            "--warmup",
            "--timeout",
            "--threads",
            "--save-every",
            "--reference",
            "--program",
            "--device",
        ];
        const ALONE: [&str; 7] =
            ["--no-plot", "-q", "-v", "--quiet", "--verbose", "--allow-partial", "--fresh"];
        let command = self.manifest.command.split(' ').count();
        let mut words = self.manifest.argv.iter().skip(command);
        let mut kept: Vec<&str> = Vec::new();
        while let Some(word) = words.next() {
            let name = word.split('=').next().unwrap_or(word);
            if WITH_VALUE.contains(&name) || without.contains(&name) {
                if !word.contains('=') {
                    words.next();
                }
            } else if !ALONE.contains(&name) {
                kept.push(word);
            }
        }
        kept.join(" ")
    }

    /// `measured with effattn 0.1.0 (e0b18a0) on AMD EPYC, 2 threads, cpu, 2026-11-21; data imdb 0123abcd`.
    pub fn provenance(&self) -> String {
        let Manifest { id, version, commit, machine, threads, device, start, data, state, .. } =
            &self.manifest;
        let commit = commit.as_deref().map_or_else(String::new, |commit| format!(" ({commit})"));
        let machine = machine["cpu"].as_str().unwrap_or("unknown processor");
        let data: Vec<String> =
            data.iter().map(|(name, hash)| format!("{name} {}", hash.get(..12).unwrap_or(hash))).collect();
        let data =
            if data.is_empty() { String::new() } else { format!("; data (SHA-256) {}", data.join(", ")) };
        let threads = plural(*threads, "thread");
        let state = if *state == State::Done { "" } else { "; unfinished" };
        let day = start.get(..10).unwrap_or(start);
        format!("{id}: effattn {version}{commit}, {machine}, {threads}, {device}, {day}{data}{state}")
    }

    /// Whether it trained models.
    pub fn trained(&self) -> bool {
        protocol::find(&self.manifest.command).is_some_and(|protocol| protocol.trains())
    }

    /// What it measures, however often and however long: its settings, and the mechanisms and programs that were asked for.
    fn measures(&self) -> String {
        const CHOSEN: [&str; 3] = ["--model", "--exclude", "--program"];
        const HOW_OFTEN: [&str; 5] = ["warmup", "runs", "min_runs", "max_time", "timeout"];
        let Manifest { settings, argv, device, .. } = &self.manifest;
        let mut settings = settings.clone();
        if let Some(settings) = settings.as_object_mut() {
            settings.retain(|key, _| !HOW_OFTEN.contains(&key.as_str()));
        }
        let chosen = |flag: &&str| {
            let value = |at: usize| match argv[at].strip_prefix(flag)? {
                "" => argv.get(at + 1).cloned(),
                given => given.strip_prefix('=').map(str::to_owned),
            };
            (0..argv.len()).filter_map(value).collect::<Vec<_>>()
        };
        format!("{device} {settings} {:?}", CHOSEN.iter().map(chosen).collect::<Vec<_>>())
    }

    /// Whether it was a first look: its rows enter no table and no figure of a paper.
    pub fn quick(&self) -> bool {
        self.manifest.argv.iter().any(|word| word == "--quick")
    }
}

/// The seconds of every measured step of a run, by cell; none where the run kept no samples.
pub fn step_samples(folder: &Path) -> Result<Vec<(String, Vec<f64>)>> {
    #[derive(serde::Deserialize)]
    struct Line {
        cell: String,
        metric: String,
        values: Vec<f64>,
        machine: Option<String>,
    }
    let path = folder.join("samples.jsonl");
    let text = match file::read_to_string(&path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        read => read.with_context(|| path.display().to_string())?,
    };
    let mut cells = Vec::new();
    for (index, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        // serde_json counts from the line that it is given
        let wrong = |error: serde_json::Error| {
            let (number, column) = (index + 1, error.column());
            let said = error.to_string();
            let reason = said.split(" at line ").next().unwrap_or_default();
            anyhow!("{}: line {number}, column {column}: {reason}", path.display())
        };
        let line: Line = serde_json::from_str(line).map_err(wrong)?;
        if line.metric == "step_time" {
            let cell = match line.machine {
                Some(machine) => format!("{} on {machine}", line.cell),
                None => line.cell,
            };
            cells.push((cell, line.values));
        }
    }
    Ok(cells)
}

/// What was read of a file beside the rows; where it is damaged, that is said, and `what` a report has of it is left out.
pub fn or_left_out<T: Default>(read: Result<T>, what: &str) -> T {
    read.unwrap_or_else(|error| {
        log::warn!("{}; left out: {what}", words(&error));
        T::default()
    })
}

#[cfg(test)]
mod tests;
