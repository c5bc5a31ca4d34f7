//! The runs that are joined, as they lie in their folders.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

use crate::run::RunError;
use crate::run::journal::{self, Entry};
use crate::run::manifest::{Manifest, State};
use crate::run::plan_file::PlanFile;
use crate::run::shard::{Shard, shards};
use effattn_record::Outcome;

/// Folders below a named one at which runs are looked for no more.
const DEEPEST: usize = 8;

/// A run that was read.
pub struct MergeInput {
    /// Its folder.
    pub folder: PathBuf,
    /// Where its rows come from.
    pub manifest: Manifest,
    /// Its finished cells.
    pub entries: Vec<Entry>,
    /// The line from which on its journal cannot be read.
    pub damaged: Option<usize>,
    /// Whether it has rows or is finished, and its journal is gone.
    pub lost: bool,
}

impl MergeInput {
    fn read(folder: &Path) -> Result<Option<Self>, RunError> {
        let Some(manifest) = Manifest::read(folder)?.filter(|found| found.state != State::Abandoned) else {
            return Ok(None);
        };
        let path = folder.join("journal.jsonl");
        let (mut lost, ended) = (false, manifest.state == State::Done || folder.join("rows.csv").is_file());
        let (entries, damaged) = match journal::entries_and_damage(&path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                lost = ended; // one that was killed at once has neither
                Default::default()
            }
            result => result.map_err(RunError::reading(path))?,
        };
        Ok(Some(Self { folder: folder.to_owned(), manifest, entries, damaged, lost }))
    }

    /// In words, where its journal ends too early.
    pub fn damage(&self) -> Option<String> {
        let (line, path) = (self.damaged?, self.folder.join("journal.jsonl"));
        Some(format!(
            "{}: line {line} is cut off or damaged; what was in it and after it is missing",
            path.display()
        ))
    }

    /// The suite that it is of, as far as its rows say it.
    pub(super) fn suite(&self) -> Option<String> {
        let mut rows = self.entries.iter().flat_map(|entry| &entry.rows);
        rows.find_map(|row| row.suite.clone())
    }

    pub(super) fn shard(&self) -> Option<Shard> {
        self.manifest.shard.as_deref()?.parse().ok()
    }

    pub(super) fn host(&self) -> String {
        self.manifest.machine["host"].as_str().unwrap_or("an unnamed machine").to_owned()
    }
}

/// A whole run: its plan, where that is known, and the runs that have its cells.
pub struct ShardedRun {
    /// Folder of the run, or of its shards.
    pub folder: PathBuf,
    /// All its cells.
    pub planned: Option<PlanFile>,
    /// What was merged or run in the folder itself first, then shard by shard, the oldest first.
    pub sources: Vec<MergeInput>,
}

impl ShardedRun {
    /// Every whole run in `folder` or below it. What cannot be read below it is named and left out.
    pub fn below(folder: &Path) -> Result<Vec<Self>, RunError> {
        let mut found = Vec::new();
        let mut folders = vec![(folder.to_owned(), 0)];
        while let Some((folder, depth)) = folders.pop() {
            match Self::read(&folder) {
                Ok(None) => {}
                Ok(Some(whole)) => {
                    found.push(whole);
                    continue;
                }
                Err(error) if depth > 0 => {
                    log::warn!("{} is left out: {error}", folder.display());
                    continue;
                }
                Err(error) => return Err(error), // what was asked for by name is not passed over
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
        let mut planned = PlanFile::read(folder)?;
        let parts = if planned.is_some() { shards(folder) } else { Vec::new() };
        let own = MergeInput::read(folder)?;
        if own.is_none() && parts.is_empty() {
            warn_of_rows_without_manifest(folder);
            return Ok(None);
        }
        let above =
            folder.ancestors().nth(2).filter(|_| own.as_ref().is_some_and(|own| own.shard().is_some()));
        if let (None, Some(above)) = (&planned, above) {
            planned = PlanFile::read(above)?; // a shard that was named alone
        }
        let mut sources: Vec<MergeInput> = own.into_iter().collect();
        for (_, base) in parts {
            let mut runs = Vec::new();
            for path in below(&base)? {
                match MergeInput::read(&path) {
                    Ok(None) => warn_of_rows_without_manifest(&path),
                    // a damaged one hides no other shard: its cells are missing
                    Err(error @ RunError::Damaged { .. }) => {
                        log::warn!("{} is left out: {error}", path.display());
                    }
                    read => runs.extend(read?),
                }
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

/// Says of a folder that has what a run writes that it is no run folder.
pub fn warn_of_rows_without_manifest(folder: &Path) {
    if let Some(name) = rows_without_manifest(folder) {
        log::warn!(
            "{} has {name} and no manifest.json, and is left out; copy the whole folder of its run",
            folder.display()
        );
    }
}

fn rows_without_manifest(folder: &Path) -> Option<&'static str> {
    let has = |name: &&str| folder.join(name).is_file();
    ["rows.csv", "journal.jsonl"].into_iter().find(has).filter(|_| !has(&"manifest.json"))
}

/// The folders in `folder`; links are passed over.
fn below(folder: &Path) -> Result<Vec<PathBuf>, RunError> {
    let entries = std::fs::read_dir(folder).map_err(RunError::reading(folder))?;
    let folders = entries.flatten().filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
    let mut folders: Vec<PathBuf> = folders.map(|entry| entry.path()).collect();
    folders.sort();
    Ok(folders)
}

/// The shard of every cell, where the cells were dealt: by the number of shards that most folders name.
pub fn owners<'a>(
    planned: &PlanFile,
    folders: impl Iterator<Item = &'a Shard>,
) -> Option<(usize, Vec<usize>)> {
    let mut counts: BTreeMap<usize, usize> = BTreeMap::new();
    folders.for_each(|shard| *counts.entry(shard.count).or_default() += 1);
    let (count, _) = counts.into_iter().max_by_key(|(_, folders)| *folders)?;
    Some((count, planned.assign_shards(count)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::plan::Plan;

    fn put(folder: &Path) {
        std::fs::create_dir_all(folder).unwrap();
        Manifest::new(&Plan::default(), "id").write(folder).unwrap();
    }

    #[test]
    fn a_damaged_run_does_not_hide_the_others() {
        let root = tempfile::tempdir().unwrap();
        let [one, two] = ["one", "two"].map(|name| root.path().join("speed").join(name));
        put(&two);
        let damages: [(&str, &[u8]); 3] =
            [("manifest.json", b"{"), ("manifest.json", b"{}\xff"), ("plan.json", b"{")];
        for (name, damage) in damages {
            put(&one);
            std::fs::write(one.join(name), damage).unwrap();
            let found = ShardedRun::below(root.path()).unwrap();
            let found: Vec<&Path> = found.iter().map(|whole| whole.folder.as_path()).collect();
            assert_eq!(found, [two.as_path()], "{name}");
            let named = ShardedRun::below(&one);
            assert!(matches!(named, Err(RunError::Damaged { .. })), "what is named is not passed over");
        }
    }

    #[test]
    fn rows_without_a_manifest_are_named() {
        let root = tempfile::tempdir().unwrap();
        let run = root.path();
        assert_eq!(rows_without_manifest(run), None);
        std::fs::write(run.join("journal.jsonl"), "").unwrap();
        assert_eq!(rows_without_manifest(run), Some("journal.jsonl"));
        std::fs::write(run.join("rows.csv"), "").unwrap();
        assert_eq!(rows_without_manifest(run), Some("rows.csv"));
        put(run);
        assert_eq!(rows_without_manifest(run), None);
    }

    #[test]
    fn a_damaged_shard_hides_no_other() {
        let root = tempfile::tempdir().unwrap();
        let whole = root.path().join("lra/plan-0");
        ["1-of-2/run", "2-of-2/run"].iter().for_each(|run| put(&whole.join(run)));
        PlanFile::of(&Plan::default()).write(&whole).unwrap();
        std::fs::write(whole.join("1-of-2/run/manifest.json"), "{").unwrap();
        let found = ShardedRun::below(root.path()).unwrap();
        assert_eq!((found.len(), found[0].sources.len()), (1, 1));
    }
}
