//! The folder of the merged run: what was chosen, and where it comes from.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::choose::Chosen;
use super::error::MergeError;
use super::source::{MergeInput, owners};
use crate::run::folder::{self, lock_run};
use crate::run::journal::{Entry, Journal};
use crate::run::manifest::{Manifest, MergedPart, State, now};
use crate::run::plan::{digest, folder as cell_folder};
use crate::run::plan_file::PlanFile;
use crate::run::shard::{Shard, without_shard};
use crate::run::{CancelToken, RunError, session};
use effattn_record::file;

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

/// Writes the run in `target`: files of cells, rows, journal, plan and manifest.
pub(super) fn write(
    target: &Path,
    order: &[String],
    planned: Option<&PlanFile>,
    sources: &[MergeInput],
    chosen: Chosen,
    stop: &CancelToken,
) -> Result<Merged, MergeError> {
    std::fs::create_dir_all(target).map_err(RunError::file(target))?;
    let _lock = lock_run(target, stop)?;
    // what a merge that was killed left: the shards below may be at work
    file::sweep_here(target);
    for cell in order {
        let Some((_, source)) = chosen.entries.get(cell) else { continue };
        let from = cell_folder(&sources[*source].folder, cell);
        let to = cell_folder(target, cell);
        if from != to {
            link(&from, &to).map_err(RunError::file(to))?;
        }
    }
    let entries: Vec<&Entry> = order.iter().filter_map(|cell| Some(&*chosen.entries.get(cell)?.0)).collect();
    let rows = session::write(target, entries.iter().flat_map(|entry| &entry.rows), entries.iter().copied())?;
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
    let rows_sha256 = (manifest.state == State::Done).then_some(rows);
    let manifest = Manifest { rows_sha256, ..manifest };
    manifest.write(target)?;
    folder::name_latest(target, &manifest.id).map_err(RunError::file(target))?;
    let open = |cell: &String| chosen.entries.get(cell).is_none_or(|(entry, _)| is_failed(entry));
    let of_shards: Vec<Shard> = sources.iter().filter_map(MergeInput::shard).collect();
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

fn manifest(target: &Path, sources: &[MergeInput], done: bool) -> Result<Manifest, RunError> {
    let (own, others): (Vec<&MergeInput>, Vec<&MergeInput>) =
        sources.iter().partition(|source| source.folder == target);
    let own = own.first().map(|source| &source.manifest);
    if others.is_empty() {
        let one = own.cloned();
        return one.ok_or_else(|| RunError::Internal(format!("no run below {}", target.display())));
    }
    let first = &others[0].manifest;
    let whole = |source: &&MergeInput| {
        source.manifest.whole.clone().unwrap_or_else(|| source.manifest.identity.clone())
    };
    let wholes: BTreeSet<String> = others.iter().map(whole).collect();
    let identity = match wholes.first() {
        Some(one) if wholes.len() == 1 => one.clone(),
        _ => digest(&wholes.into_iter().collect::<Vec<_>>().join(" ")),
    };
    let parts = others.iter().map(|source| {
        let Manifest { shard, machine, threads, start, end, .. } = source.manifest.clone();
        let folder = source.folder.strip_prefix(target).unwrap_or(&source.folder).display().to_string();
        MergedPart { folder, shard, machine, threads, start, end }
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
fn together(sources: &[&MergeInput]) -> Value {
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
    file::sweep_here(to);
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
