//! Which of several results of a cell counts: of a training run the first, of measurements one of every machine.

use std::borrow::Cow;
use std::collections::HashMap;
use std::path::PathBuf;

use super::error::MergeError;
use super::source::MergeInput;
use crate::run::journal::{Entry, Samples};
use crate::run::plan::folder as cell_folder;
use effattn_record::{Outcome, Row};

/// The entry of every cell, and the run that its files are taken from.
pub(super) struct Chosen<'a> {
    pub(super) entries: HashMap<String, (Cow<'a, Entry>, usize)>,
    /// Cells that were measured on several machines.
    pub(super) several: usize,
}

impl<'a> Chosen<'a> {
    pub(super) fn of(order: &[String], sources: &'a [MergeInput], keeps: bool) -> Result<Self, MergeError> {
        let mut found: HashMap<&str, Vec<(usize, &Entry)>> = HashMap::new();
        for (index, source) in sources.iter().enumerate() {
            // of a cell that ran again the last line of its journal counts
            let mut last: HashMap<&str, &Entry> = HashMap::new();
            let entries = source.entries.iter().filter(|entry| !entry.rows.is_empty());
            last.extend(entries.map(|entry| (entry.cell.as_str(), entry)));
            for (cell, entry) in last {
                found.entry(cell).or_default().push((index, entry));
            }
        }
        let mut chosen = Self { entries: HashMap::new(), several: 0 };
        for cell in order {
            let Some(all) = found.remove(cell.as_str()) else { continue };
            let is_final = |(_, entry): &&(usize, &Entry)| entry.outcome().is_some_and(Outcome::is_final);
            let finals: Vec<(usize, &Entry)> = all.iter().filter(is_final).copied().collect();
            let pool = if finals.is_empty() { &all[all.len() - 1..] } else { &finals[..] };
            let (entry, source) = if keeps {
                let (source, entry) = trained(cell, pool, sources)?;
                (Cow::Borrowed(entry), source)
            } else {
                let (entry, machines) = measured(pool, sources);
                chosen.several += usize::from(machines > 1);
                (Cow::Owned(entry), pool[pool.len() - 1].0)
            };
            chosen.entries.insert(cell.clone(), (entry, source));
        }
        Ok(chosen)
    }
}

/// Of the results of one training run the first that came to its end; all of those must be the same.
fn trained<'a>(
    cell: &str,
    pool: &[(usize, &'a Entry)],
    sources: &[MergeInput],
) -> Result<(usize, &'a Entry), MergeError> {
    let ended =
        |(_, entry): &&(usize, &Entry)| matches!(entry.outcome(), Some(Outcome::Ok | Outcome::Diverged));
    let first = *pool.iter().find(ended).unwrap_or(&pool[0]);
    for other in pool.iter().filter(ended).filter(|other| other.0 != first.0) {
        let folders = [first.0, other.0].map(|index| &sources[index].folder);
        if let Some(what) = unlike(first.1, other.1).or_else(|| unlike_files(cell, folders)) {
            let [first, second] = folders.map(Clone::clone);
            return Err(MergeError::Conflict { cell: cell.to_owned(), first, second, what });
        }
    }
    Ok(first)
}

/// What two results of one training run have otherwise, times and memory apart.
fn unlike(a: &Entry, b: &Entry) -> Option<String> {
    let told = |entry: &Entry| -> Vec<(String, String, Option<u64>, Outcome)> {
        let rows = entry.rows.iter().filter(|row| !matches!(row.unit.as_str(), "s" | "1/s" | "B"));
        let task = |row: &Row| row.task.clone().unwrap_or_default();
        rows.map(|row| (task(row), row.metric.clone(), row.value.map(f64::to_bits), row.outcome)).collect()
    };
    let (first, second) = (told(a), told(b));
    if first.len() != second.len() {
        return Some(format!("{} rows and {} rows", first.len(), second.len()));
    }
    let (a, b) = first.iter().zip(&second).find(|(a, b)| a != b)?;
    let text = |value: &(String, String, Option<u64>, Outcome)| match value.2 {
        Some(bits) => f64::from_bits(bits).to_string(),
        None => value.3.to_string(),
    };
    Some(format!("{} {} and {}", a.1, text(a), text(b)))
}

/// Which file of a cell differs between two runs: its curve or its best weights.
fn unlike_files(cell: &str, runs: [&PathBuf; 2]) -> Option<String> {
    for name in ["curve.csv", "best.safetensors"] {
        let [a, b] = runs.map(|run| effattn_record::file::read(&cell_folder(run, cell).join(name)).ok());
        let (Some(a), Some(b)) = (a, b) else { continue };
        let differ = if name == "curve.csv" { a != b } else { tensors(&a) != tensors(&b) };
        if differ {
            return Some(format!("{name} is another"));
        }
    }
    None
}

/// What stands behind the header of a file of weights, whose words may stand in any order.
fn tensors(bytes: &[u8]) -> &[u8] {
    let header =
        bytes.get(..8).map_or(0, |front| front.iter().rev().fold(0usize, |n, byte| n << 8 | *byte as usize));
    bytes.get(header.saturating_add(8)..).unwrap_or(bytes)
}

/// The measurements of one cell: of every machine the newest. Gives how many machines they are of.
fn measured(pool: &[(usize, &Entry)], sources: &[MergeInput]) -> (Entry, usize) {
    let mut machines: Vec<(String, Vec<Row>, Vec<Samples>)> = Vec::new();
    for (source, entry) in pool {
        let host = sources[*source].host();
        let machine = |row: &Row| row.machine.clone().unwrap_or_else(|| host.clone());
        let mut names: Vec<String> = entry.rows.iter().map(machine).collect();
        names.dedup();
        let alone = names.len() == 1;
        for name in names {
            let rows = entry.rows.iter().filter(|row| machine(row) == name);
            let rows = rows.map(|row| Row { machine: Some(name.clone()), ..row.clone() }).collect();
            let own =
                |samples: &&Samples| samples.machine.as_deref().map_or(alone, |machine| machine == name);
            let samples = entry.samples.iter().filter(own).cloned().collect();
            machines.retain(|(known, ..)| *known != name);
            machines.push((name, rows, samples));
        }
    }
    let count = machines.len();
    let last = pool[pool.len() - 1].1;
    let mut joined = Entry { limits: last.limits, seconds: last.seconds, ..Entry::new(&last.cell) };
    for (name, rows, samples) in machines {
        joined.rows.extend(rows);
        let named = |samples: Samples| Samples { machine: (count > 1).then(|| name.clone()), ..samples };
        joined.samples.extend(samples.into_iter().map(named));
    }
    (joined, count)
}
