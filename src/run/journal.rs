//! The journal: one line per finished cell, synced, so that whatever happens is kept up to the last line.

use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::RunError;
use super::turn::TurnRecord;
use effattn_record::{Outcome, Row, file};

/// Raw samples of one metric.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Samples {
    /// Metric.
    pub metric: String,
    /// Unit.
    pub unit: String,
    /// Values in the order they were taken, without those that were put back.
    pub values: Vec<f64>,
    /// The machine, where the cell was measured on several.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub machine: Option<String>,
    /// The turns in which they were taken, with those that were put back.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub turns: Vec<TurnRecord>,
}

impl Samples {
    /// Measurements of one machine.
    pub fn new(metric: &str, unit: &str, values: Vec<f64>) -> Self {
        Self { metric: metric.to_owned(), unit: unit.to_owned(), values, machine: None, turns: Vec::new() }
    }
}

/// A finished cell.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Entry {
    /// Key of the cell.
    pub cell: String,
    /// Its rows.
    pub rows: Vec<Row>,
    /// Its raw samples.
    #[serde(default)]
    pub samples: Vec<Samples>,
    /// What it ran under.
    #[serde(default)]
    pub limits: Option<Limits>,
    /// Seconds that it took, as far as they were spent in the process that finished it.
    #[serde(default)]
    pub seconds: Option<f64>,
}

impl Entry {
    /// The cell called `cell`, with no rows yet.
    pub fn new(cell: &str) -> Self {
        Self { cell: cell.to_owned(), rows: Vec::new(), samples: Vec::new(), limits: None, seconds: None }
    }

    /// How it ended, by its first row.
    pub fn outcome(&self) -> Option<Outcome> {
        self.rows.first().map(|row| row.outcome)
    }
}

/// Limits a cell ran under; `oom` and `timeout` hold for these only.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Limits {
    /// Bytes.
    pub memory: u64,
    /// Seconds; absent: any number.
    pub seconds: Option<f64>,
}

impl Limits {
    /// Whether a cell that ended as `outcome` under these limits may end otherwise under `now`.
    pub fn allow_retry(&self, outcome: Outcome, now: &Self) -> bool {
        match outcome {
            Outcome::Oom => now.memory > self.memory,
            Outcome::Timeout => self.seconds.is_some_and(|then| now.seconds.is_none_or(|now| now > then)),
            _ => false,
        }
    }
}

/// Gives the entries of the journal at `path`, which is left as it is, to `keep`, one after the other.
pub fn entries(path: &Path, keep: impl FnMut(Entry)) -> std::io::Result<()> {
    read(BufReader::new(file::open(path)?), keep).map(drop)
}

/// The entries of the journal at `path`, and the line from which on it cannot be read, where there is one.
pub fn entries_and_damage(path: &Path) -> std::io::Result<(Vec<Entry>, Option<usize>)> {
    let file = file::open(path)?;
    let length = file.metadata()?.len();
    let mut entries = Vec::new();
    let whole = read(BufReader::with_capacity(1 << 20, file), |entry| entries.push(entry))?;
    let damaged = (whole < length).then_some(entries.len() + 1);
    Ok((entries, damaged))
}

/// An open journal.
pub struct Journal(File);

impl Journal {
    /// Opens or creates the journal at `path` and gives what is in it to `keep`, one entry after the other: a journal may
    /// be far larger than what is wanted of it. A last line that was cut off is removed; its cell runs again. From a damaged line on everything is put aside as `journal.damaged`.
    pub fn open(path: &Path, keep: impl FnMut(Entry)) -> Result<Self, RunError> {
        if path.exists() {
            file::open(path).map_err(RunError::file(path))?; // what is no regular file might never end
        }
        let mut options = OpenOptions::new();
        options.read(true).append(true).create(true);
        let mut file = options.open(path).map_err(RunError::file(path))?;
        let whole = read(BufReader::with_capacity(1 << 20, &file), keep).map_err(RunError::file(path))?;
        if whole < file.metadata().map_err(RunError::file(path))?.len() {
            keep_aside(path, &mut file, whole)?;
            file.set_len(whole).map_err(RunError::file(path))?;
            file.seek(SeekFrom::End(0)).map_err(RunError::file(path))?;
        }
        Ok(Self(file))
    }

    /// Appends `entry` and waits until it is on the disk.
    pub fn append(&mut self, entry: &Entry) -> std::io::Result<()> {
        let mut line = serde_json::to_vec(entry).map_err(std::io::Error::other)?;
        line.push(b'\n');
        self.0.write_all(&line)?;
        self.0.sync_data()
    }
}

/// Keeps what stands behind `whole` bytes of the journal at `path` in a file beside it, where it is more than a line
/// that was cut off, behind what was put there before.
fn keep_aside(path: &Path, file: &mut File, whole: u64) -> Result<(), RunError> {
    let mut removed = Vec::new();
    let read = file.seek(SeekFrom::Start(whole)).and_then(|_| file.read_to_end(&mut removed));
    read.map_err(RunError::file(path))?;
    if !removed.contains(&b'\n') {
        return Ok(());
    }
    let aside = path.with_extension("damaged");
    log::warn!("{} has a damaged line; it and what follows is now in {}", path.display(), aside.display());
    let kept = OpenOptions::new().append(true).create(true).open(&aside);
    let kept = kept.and_then(|mut kept| kept.write_all(&removed).and_then(|()| kept.sync_data()));
    kept.map_err(RunError::file(&aside))
}

/// Gives the entries of the lines that are whole to `keep`, and says how many bytes those take. Reading ends at the
/// first line that is none.
fn read(mut lines: impl BufRead, mut keep: impl FnMut(Entry)) -> std::io::Result<u64> {
    let (mut at, mut line) = (0, Vec::new());
    while lines.read_until(b'\n', &mut line)? > 0 && line.ends_with(b"\n") {
        match serde_json::from_slice::<Entry>(&line) {
            Ok(entry) => keep(entry),
            Err(_) => break,
        }
        at += line.len() as u64;
        line.clear();
    }
    Ok(at)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn opened(path: &Path) -> (Journal, Vec<Entry>) {
        let mut entries = Vec::new();
        let journal = Journal::open(path, |entry| entries.push(entry)).unwrap();
        (journal, entries)
    }

    fn entry(index: usize) -> Entry {
        let row = Row::new("speed", "ls").with("step_time", "s", Some(index as f64));
        let samples = vec![Samples::new("step_time", "s", vec![0.5; index])];
        Entry { rows: vec![row], samples, ..Entry::new(&format!("cell {index}")) }
    }

    #[test]
    fn a_journal_cut_at_any_byte_goes_on_after_its_last_whole_line() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("journal.jsonl");
        let (mut journal, before) = opened(&path);
        assert!(before.is_empty());
        (0..3).for_each(|index| journal.append(&entry(index)).unwrap());
        let bytes = std::fs::read(&path).unwrap();
        for cut in 0..=bytes.len() {
            let mut kept = Vec::new();
            let whole = read(&bytes[..cut], |entry| kept.push(entry)).unwrap();
            assert_eq!(
                whole,
                bytes[..cut].iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at as u64 + 1)
            );
            assert_eq!(kept, (0..kept.len()).map(entry).collect::<Vec<_>>());
        }
        for cut in (0..=bytes.len()).step_by(101) {
            std::fs::write(&path, &bytes[..cut]).unwrap();
            let (mut journal, kept) = opened(&path);
            for index in kept.len()..3 {
                journal.append(&entry(index)).unwrap();
            }
            assert_eq!(std::fs::read(&path).unwrap(), bytes, "cut at {cut}");
        }
    }

    #[test]
    fn a_second_damage_does_not_overwrite_what_was_put_aside_at_the_first() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("journal.jsonl");
        for damage in ["one\n", "two\n"] {
            std::fs::write(&path, damage).unwrap();
            assert!(opened(&path).1.is_empty());
        }
        let aside = std::fs::read_to_string(folder.path().join("journal.damaged")).unwrap();
        assert_eq!(aside, "one\ntwo\n");
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_journal(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            let whole = read(&bytes[..], drop).unwrap();
            prop_assert!(whole <= bytes.len() as u64);
        }
    }

    #[test]
    fn an_outcome_says_nothing_about_wider_limits() {
        let under = |memory, seconds| Limits { memory, seconds };
        let small = under(1 << 20, Some(5.0));
        assert!(small.allow_retry(Outcome::Oom, &under(8 << 30, Some(5.0))));
        assert!(!small.allow_retry(Outcome::Oom, &under(1 << 19, Some(50.0))));
        assert!(
            small.allow_retry(Outcome::Timeout, &under(0, Some(6.0)))
                && small.allow_retry(Outcome::Timeout, &under(0, None))
        );
        assert!(
            !small.allow_retry(Outcome::Timeout, &small)
                && !small.allow_retry(Outcome::Diverged, &under(8 << 30, None))
        );
    }
}
