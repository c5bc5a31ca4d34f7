//! Shards and runs of several machines, joined to one run that is continued, shown and compared as any other.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io::Write;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::earlier::differences;
use super::folder::{self, hold};
use super::journal::{self, Entry, Journal, Samples};
use super::manifest::{Manifest, PartOf, State, now};
use super::plan::{digest, folder as cell_folder};
use super::planned::Planned;
use super::shard::{Shard, parent, shards, without_shard};
use super::{RunError, Stop, session};
use crate::record::{Outcome, Row, file};

/// Folders below a named one at which runs are looked for no more.
const DEEPEST: usize = 8;

/// Why runs cannot be joined.
#[derive(Debug, thiserror::Error)]
pub enum MergeError {
    /// A file or folder cannot be used.
    #[error(transparent)]
    Run(#[from] RunError),
    /// No run there.
    #[error("there is no run in {}; name the folder of a run or of its shards, such as results/lra/plan-0123456789ab", .0.display())]
    Nothing(PathBuf),
    /// Runs of different plans.
    #[error(
        "{} and {} are not of one plan: the second has {differ}; merge what belongs together, each by itself",
        first.display(),
        second.display()
    )]
    Different {
        /// One run.
        first: PathBuf,
        /// Another.
        second: PathBuf,
        /// What differs, in words.
        differ: String,
    },
    /// Two results of one training run.
    #[error(
        "{cell}: {} and {} claim to be one training run and differ ({what}); nothing was written. Move the one away that \
         you do not trust",
        first.display(),
        second.display()
    )]
    Conflict {
        /// The cell.
        cell: String,
        /// One run.
        first: PathBuf,
        /// Another.
        second: PathBuf,
        /// What differs.
        what: String,
    },
}

/// A run that was read.
pub struct Source {
    /// Its folder.
    pub folder: PathBuf,
    /// Where its rows come from.
    pub manifest: Manifest,
    /// Its finished cells.
    pub entries: Vec<Entry>,
    /// The line from which on its journal cannot be read.
    pub damaged: Option<usize>,
}

impl Source {
    fn read(folder: &Path) -> Result<Option<Self>, RunError> {
        let Some(manifest) = Manifest::read(folder)?.filter(|found| found.state != State::Abandoned) else {
            return Ok(None);
        };
        let path = folder.join("journal.jsonl");
        let (entries, damaged) = match journal::entries_and_damage(&path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Default::default(),
            result => result.map_err(RunError::file(path))?,
        };
        Ok(Some(Self { folder: folder.to_owned(), manifest, entries, damaged }))
    }

    fn shard(&self) -> Option<Shard> {
        self.manifest.shard.as_deref()?.parse().ok()
    }

    fn host(&self) -> String {
        self.manifest.machine["host"].as_str().unwrap_or("an unnamed machine").to_owned()
    }
}

/// A whole run: its plan, where that is known, and the runs that have its cells.
pub struct Whole {
    /// Folder of the run, or of its shards.
    pub folder: PathBuf,
    /// All its cells.
    pub planned: Option<Planned>,
    /// What was merged or run in the folder itself first, then shard by shard, the oldest first.
    pub sources: Vec<Source>,
}

impl Whole {
    /// Every whole run in `folder` or below it.
    ///
    /// # Errors
    /// Folders that cannot be read, and files that are damaged.
    pub fn below(folder: &Path) -> Result<Vec<Self>, RunError> {
        let mut found = Vec::new();
        let mut folders = vec![(folder.to_owned(), 0)];
        while let Some((folder, depth)) = folders.pop() {
            if let Some(whole) = Self::read(&folder)? {
                found.push(whole);
                continue;
            }
            if depth < DEEPEST {
                folders.extend(below(&folder)?.into_iter().map(|path| (path, depth + 1)));
            }
        }
        found.sort_by(|a, b| a.folder.cmp(&b.folder));
        Ok(found)
    }

    /// The whole run in `folder`; none if there is none.
    fn read(folder: &Path) -> Result<Option<Self>, RunError> {
        let mut planned = Planned::read(folder)?;
        let parts = if planned.is_some() { shards(folder) } else { Vec::new() };
        let own = Source::read(folder)?;
        if own.is_none() && parts.is_empty() {
            return Ok(None);
        }
        let above =
            folder.ancestors().nth(2).filter(|_| own.as_ref().is_some_and(|own| own.shard().is_some()));
        if let (None, Some(above)) = (&planned, above) {
            planned = Planned::read(above)?; // a shard that was named alone
        }
        let mut sources: Vec<Source> = own.into_iter().collect();
        for (_, base) in parts {
            let mut runs = Vec::new();
            for path in below(&base)? {
                runs.extend(Source::read(&path)?);
            }
            runs.sort_by_key(|run| run.manifest.order);
            sources.extend(runs);
        }
        Ok(Some(Self { folder: folder.to_owned(), planned, sources }))
    }

    /// Keys of its cells in the order of the rows; where no plan is there, those that have rows.
    pub fn cells(&self) -> Vec<&str> {
        match &self.planned {
            Some(planned) => planned.cells.iter().map(|cell| cell.cell.as_str()).collect(),
            None => {
                self.sources.iter().flat_map(|run| &run.entries).map(|entry| entry.cell.as_str()).collect()
            }
        }
    }

    /// How every finished cell ended, the best of several ends.
    pub fn outcomes(&self) -> HashMap<&str, Outcome> {
        let mut found: HashMap<&str, Outcome> = HashMap::new();
        for entry in self.sources.iter().flat_map(|run| &run.entries) {
            let Some(outcome) = entry.outcome() else { continue };
            let known = found.entry(&entry.cell).or_insert(outcome);
            if !known.is_final() || outcome == Outcome::Ok {
                *known = outcome;
            }
        }
        found
    }
}

/// The folders in `folder`; links are passed over.
fn below(folder: &Path) -> Result<Vec<PathBuf>, RunError> {
    let entries = std::fs::read_dir(folder).map_err(RunError::file(folder))?;
    let folders = entries.flatten().filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
    let mut folders: Vec<PathBuf> = folders.map(|entry| entry.path()).collect();
    folders.sort();
    Ok(folders)
}

/// The shard of every cell, where the cells were dealt: by the number of shards that most folders name.
pub fn owners<'a>(
    planned: &Planned,
    folders: impl Iterator<Item = &'a Shard>,
) -> Option<(usize, Vec<usize>)> {
    let mut counts: BTreeMap<usize, usize> = BTreeMap::new();
    folders.for_each(|shard| *counts.entry(shard.count).or_default() += 1);
    let (count, _) = counts.into_iter().max_by_key(|(_, folders)| *folders)?;
    Some((count, planned.deal(count)))
}

/// A run that was made of others.
pub struct Merged {
    /// Its folder.
    pub folder: PathBuf,
    /// Its manifest.
    pub manifest: Manifest,
    /// Cells of its plan.
    pub cells: usize,
    /// Cells that have rows.
    pub done: usize,
    /// Of these, cells that failed and run again.
    pub failed: usize,
    /// Keys of cells that are missing or failed, by shard where the cells were dealt.
    pub missing: BTreeMap<Option<Shard>, Vec<String>>,
    /// What is to be said.
    pub remarks: Vec<String>,
}

/// Joins the runs in `folders`. The shards of one run are joined in their own folder, others in a folder below `output`.
/// `keeps` says whether a command trains, so that the same cell twice is one result.
///
/// # Errors
/// See [`MergeError`]; nothing was written then, except where a disk is full.
pub fn merge(
    folders: &[PathBuf],
    output: Option<&Path>,
    keeps: fn(&str) -> bool,
    stop: &Stop,
) -> Result<Merged, MergeError> {
    let mut wholes = Vec::new();
    for folder in folders {
        let found = Whole::below(folder)?;
        if found.is_empty() {
            return Err(MergeError::Nothing(folder.clone()));
        }
        wholes.extend(found);
    }
    let first = wholes[0].sources.first().ok_or_else(|| MergeError::Nothing(wholes[0].folder.clone()))?;
    for source in wholes.iter().flat_map(|whole| &whole.sources) {
        same_plan(first, source)?;
    }
    let target = target(&wholes, output);
    let planned = wholes.iter().find_map(|whole| whole.planned.clone());
    let mut order: Vec<String> = Vec::new();
    let mut known = BTreeSet::new();
    for cell in wholes.iter().flat_map(Whole::cells) {
        if known.insert(cell) {
            order.push(cell.to_owned());
        }
    }
    drop(known);
    let sources: Vec<Source> = wholes.into_iter().flat_map(|whole| whole.sources).collect();
    let chosen = Chosen::of(&order, &sources, keeps(&sources[0].manifest.command))?;
    let mut merged = write(&target, &order, planned.as_ref(), &sources, chosen, stop)?;
    let damaged = sources.iter().filter_map(|source| Some((source, source.damaged?)));
    merged.remarks.extend(damaged.map(|(source, line)| {
        let path = source.folder.join("journal.jsonl");
        format!(
            "{}: line {line} is cut off or damaged; what was in it and after it is missing",
            path.display()
        )
    }));
    Ok(merged)
}

/// The folder of the merged run: that of the shards, where they lie in one.
fn target(wholes: &[Whole], output: Option<&Path>) -> PathBuf {
    match (wholes, output) {
        ([one], None) if !shards(&one.folder).is_empty() => one.folder.clone(),
        _ => {
            let one = &wholes[0];
            let manifest = one.sources.first().map(|run| &run.manifest);
            let above = one.folder.parent().and_then(Path::file_name);
            let name = match &one.planned {
                Some(planned) => file::plain_name(&planned.name),
                None => above.map_or_else(|| "merged".to_owned(), |name| name.to_string_lossy().into_owned()),
            };
            let plan = manifest.map(|manifest| match manifest.plan.as_str() {
                "" => file::plain_name(&manifest.identity),
                plan => file::plain_name(plan),
            });
            parent(&output.unwrap_or(Path::new("results")).join(name), &plan.unwrap_or_default())
        }
    }
}

/// Makes sure that two runs are of one plan: the same cells, made by the same build from the same data.
fn same_plan(first: &Source, second: &Source) -> Result<(), MergeError> {
    let (a, b) = (&first.manifest, &second.manifest);
    let mut differ = differences(a, b, false);
    if differ.is_empty() && !a.plan.is_empty() && !b.plan.is_empty() && a.plan != b.plan {
        differ.push("other cells".to_owned());
    }
    if differ.is_empty() {
        return Ok(());
    }
    let (first, second) = (first.folder.clone(), second.folder.clone());
    Err(MergeError::Different { first, second, differ: differ.join(", ") })
}

/// The entry of every cell, and the run that its files are taken from.
struct Chosen<'a> {
    entries: HashMap<String, (Cow<'a, Entry>, usize)>,
    /// Cells that were measured on several machines.
    several: usize,
}

impl<'a> Chosen<'a> {
    fn of(order: &[String], sources: &'a [Source], keeps: bool) -> Result<Self, MergeError> {
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
    sources: &[Source],
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
        let [a, b] = runs.map(|run| crate::record::file::read(&cell_folder(run, cell).join(name)).ok());
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
fn measured(pool: &[(usize, &Entry)], sources: &[Source]) -> (Entry, usize) {
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

fn write(
    target: &Path,
    order: &[String],
    planned: Option<&Planned>,
    sources: &[Source],
    chosen: Chosen,
    stop: &Stop,
) -> Result<Merged, MergeError> {
    std::fs::create_dir_all(target).map_err(RunError::file(target))?;
    let _lock = hold(target, stop)?;
    for cell in order {
        let Some((_, source)) = chosen.entries.get(cell) else { continue };
        let from = cell_folder(&sources[*source].folder, cell);
        let to = cell_folder(target, cell);
        if from != to {
            link(&from, &to).map_err(RunError::file(to))?;
        }
    }
    let entries: Vec<&Entry> = order.iter().filter_map(|cell| Some(&*chosen.entries.get(cell)?.0)).collect();
    session::write(target, entries.iter().flat_map(|entry| &entry.rows), entries.iter().copied())?;
    let path = target.join("journal.jsonl");
    if sources.iter().any(|source| source.folder == target && source.damaged.is_some()) {
        drop(Journal::open(&path, drop)?); // what cannot be read is put aside
    }
    let lines = |file: &mut std::fs::File| {
        let mut text = std::io::BufWriter::with_capacity(1 << 20, file);
        for entry in &entries {
            serde_json::to_writer(&mut text, entry)?;
            text.write_all(b"\n")?;
        }
        text.flush()
    };
    file::write_with(&path, lines).map_err(RunError::file(path))?;
    if let Some(planned) = planned {
        planned.write(target)?;
    }
    let done = entries.len();
    let manifest = manifest(target, sources, done == order.len())?;
    manifest.write(target)?;
    folder::name_latest(target, &manifest.id).map_err(RunError::file(target))?;
    let open = |cell: &String| chosen.entries.get(cell).is_none_or(|(entry, _)| is_failed(entry));
    let of_shards: Vec<Shard> = sources.iter().filter_map(Source::shard).collect();
    let owners = planned.and_then(|planned| owners(planned, of_shards.iter()));
    let mut missing: BTreeMap<Option<Shard>, Vec<String>> = BTreeMap::new();
    for (index, cell) in order.iter().enumerate().filter(|(_, cell)| open(cell)) {
        let shard = owners
            .as_ref()
            .and_then(|(count, owners)| Some(Shard { index: *owners.get(index)?, count: *count }));
        missing.entry(shard).or_default().push(cell.clone());
    }
    let failed = entries.iter().filter(|entry| is_failed(entry)).count();
    let mut remarks = Vec::new();
    if chosen.several > 0 {
        let count = chosen.several;
        remarks.push(format!(
            "{count} cells were measured on several machines; each is kept, and rows say which"
        ));
    }
    Ok(Merged { folder: target.to_owned(), manifest, cells: order.len(), done, failed, missing, remarks })
}

fn is_failed(entry: &Entry) -> bool {
    entry.outcome().is_none_or(|outcome| !outcome.is_final())
}

fn manifest(target: &Path, sources: &[Source], done: bool) -> Result<Manifest, RunError> {
    let (own, others): (Vec<&Source>, Vec<&Source>) =
        sources.iter().partition(|source| source.folder == target);
    let own = own.first().map(|source| &source.manifest);
    if others.is_empty() {
        let one = own.cloned();
        return one.ok_or_else(|| RunError::Internal(format!("no run below {}", target.display())));
    }
    let first = &others[0].manifest;
    let whole =
        |source: &&Source| source.manifest.whole.clone().unwrap_or_else(|| source.manifest.identity.clone());
    let wholes: BTreeSet<String> = others.iter().map(whole).collect();
    let identity = match wholes.first() {
        Some(one) if wholes.len() == 1 => one.clone(),
        _ => digest(&wholes.into_iter().collect::<Vec<_>>().join(" ")),
    };
    let parts = others.iter().map(|source| {
        let Manifest { shard, machine, threads, start, end, .. } = source.manifest.clone();
        let folder = source.folder.strip_prefix(target).unwrap_or(&source.folder).display().to_string();
        PartOf { folder, shard, machine, threads, start, end }
    });
    let mut data = BTreeMap::new();
    others.iter().for_each(|source| data.extend(source.manifest.data.clone()));
    let ends = || others.iter().map(|source| source.manifest.end.clone().unwrap_or_else(now)).max();
    let base = target.parent().unwrap_or(Path::new("."));
    Ok(Manifest {
        id: target.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default(),
        identity,
        shard: None,
        whole: None,
        parts: parts.collect(),
        state: if done { State::Done } else { State::Unfinished },
        argv: without_shard(&first.argv),
        machine: together(&others),
        data,
        order: match own {
            Some(own) => own.order,
            None => folder::newest(base)? + 1,
        },
        start: others.iter().map(|source| source.manifest.start.clone()).min().unwrap_or_else(now),
        continued: own.map_or_else(Vec::new, |own| own.continued.clone()),
        end: if done { ends() } else { None },
        ..first.clone()
    })
}

/// What the machines of `sources` have in common; what differs stands side by side, a host only where it is the only one.
fn together(sources: &[&Source]) -> Value {
    let machines = || sources.iter().map(|source| &source.manifest.machine);
    let mut joined = machines().next().cloned().unwrap_or(Value::Null);
    if let Value::Object(fields) = &mut joined {
        for (name, value) in fields {
            let values: BTreeSet<String> = machines()
                .map(|machine| {
                    machine[name.as_str()]
                        .as_str()
                        .map_or_else(|| machine[name.as_str()].to_string(), str::to_owned)
                })
                .collect();
            if values.len() > 1 {
                *value = if name == "host" {
                    Value::Null
                } else {
                    values.into_iter().collect::<Vec<_>>().join("; ").into()
                };
            }
        }
    }
    joined
}

/// Lets the files of `from` stand in `to` too: links, or copies where links are impossible.
fn link(from: &Path, to: &Path) -> std::io::Result<()> {
    if !from.is_dir() {
        return Ok(());
    }
    std::fs::create_dir_all(to)?;
    for entry in std::fs::read_dir(from)? {
        let entry = entry?;
        let (source, target) = (entry.path(), to.join(entry.file_name()));
        if !entry.file_type()?.is_file() || is_same(&source, &target) {
            continue;
        }
        let fresh = file::beside(&target)?.into_temp_path();
        std::fs::remove_file(&fresh)?;
        std::fs::hard_link(&source, &fresh).or_else(|_| std::fs::copy(&source, &fresh).map(drop))?;
        fresh.persist(&target).map_err(|error| error.error)?;
    }
    Ok(())
}

#[cfg(unix)]
fn is_same(a: &Path, b: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    let place = |path: &Path| std::fs::metadata(path).ok().map(|meta| (meta.dev(), meta.ino()));
    place(b).is_some_and(|there| Some(there) == place(a))
}

#[cfg(not(unix))]
fn is_same(_: &Path, _: &Path) -> bool {
    false
}
