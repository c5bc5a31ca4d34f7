//! The folder of one run: found again or made, locked while in use, named by `latest`.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use time::OffsetDateTime;
use time::macros::format_description;

use super::manifest::{Manifest, State, now};
use super::plan::Plan;
use super::{CancelToken, RunError};
use effattn_record::file;

/// How long to wait for another process.
const PATIENCE: Duration = Duration::from_secs(5);

/// A locked run folder. The lock ends with this value, or with the process.
pub struct RunFolder {
    /// The folder.
    pub path: PathBuf,
    /// Its manifest.
    pub manifest: Manifest,
    /// Whether an unfinished run is continued.
    pub continued: bool,
    _lock: Vec<File>,
}

impl RunFolder {
    /// The newest unfinished run of `plan` below `root/<name>` (or finished one, if the plan keeps those), or a new one;
    /// with `fresh` always a new one.
    pub fn open(root: &Path, plan: &Plan, fresh: bool, stop: &CancelToken) -> Result<Self, RunError> {
        let base = plan.base(root);
        std::fs::create_dir_all(&base).map_err(RunError::file(&base))?;
        let identity = plan.identity();
        let kept = |state| state == State::Unfinished || state == State::Done && plan.keeps && !fresh;
        for path in known(&base, &identity)? {
            let lock = lock(&path, plan.part.shard.is_some(), stop)?;
            file::sweep(&path);
            // The process that we waited for may have finished the run.
            let Some(mut manifest) = Manifest::read(&path)?.filter(|found| kept(found.state)) else {
                continue;
            };
            if manifest.state == State::Done {
                return Ok(Self { path, manifest, continued: true, _lock: lock });
            }
            if fresh {
                manifest.state = State::Abandoned;
                manifest.end = Some(now());
                manifest.write(&path)?;
                continue;
            }
            manifest.continued.push(now());
            manifest.write(&path)?;
            return Ok(Self { path, manifest, continued: true, _lock: lock });
        }
        Self::create(&base, plan, &identity, stop)
    }

    fn create(base: &Path, plan: &Plan, identity: &str, stop: &CancelToken) -> Result<Self, RunError> {
        let stamp = OffsetDateTime::now_utc()
            .format(format_description!("[year][month][day]-[hour][minute][second]"))
            .unwrap_or_default();
        for attempt in 1..1000 {
            let suffix = if attempt == 1 { String::new() } else { format!("-{attempt}") };
            let id = format!("{stamp}-{}{suffix}", &identity[..6]);
            let path = base.join(&id);
            match std::fs::create_dir(&path) {
                Ok(()) => {}
                Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => continue,
                Err(source) => return Err(RunError::File { path, source }),
            }
            let lock = lock(&path, plan.part.shard.is_some(), stop)?;
            let manifest = Manifest { order: newest(base)? + 1, ..Manifest::new(plan, &id) };
            manifest.write(&path)?;
            return Ok(Self { path, manifest, continued: false, _lock: lock });
        }
        Err(RunError::Internal(format!("no free run folder below {}", base.display())))
    }

    /// Lets `latest` beside the run folders name this one: a link, or a file where links are impossible.
    pub fn name_latest(&self) -> std::io::Result<()> {
        name_latest(&self.path, &self.manifest.id)
    }
}

/// Lets `latest` beside the run folder `path` name it by its `id`: a link, or a file where links are impossible.
pub fn name_latest(path: &Path, id: &str) -> std::io::Result<()> {
    let Some(base) = path.parent() else { return Ok(()) };
    let latest = base.join("latest");
    link(id, base, &latest).or_else(|_| {
        let is_link = latest.symlink_metadata().is_ok_and(|meta| meta.is_symlink());
        if is_link {
            std::fs::remove_file(&latest)?;
        }
        file::write(&latest, format!("{id}\n").as_bytes())
    })
}

/// Locks the run folder at `path` while the value lives, as far as its file system can.
pub fn lock_run(path: &Path, stop: &CancelToken) -> Result<Vec<File>, RunError> {
    lock(path, true, stop)
}

/// The run folder that `latest` in `base` names.
pub fn latest(base: &Path) -> Option<PathBuf> {
    let latest = base.join("latest");
    if latest.is_dir() {
        return Some(latest);
    }
    let id = file::read_to_string(&latest).ok()?;
    let folder = base.join(id.trim());
    folder.is_dir().then_some(folder)
}

#[cfg(unix)]
fn link(id: &str, base: &Path, latest: &Path) -> std::io::Result<()> {
    let fresh = base.join(format!(".latest-{}", std::process::id()));
    let _ = std::fs::remove_file(&fresh);
    std::os::unix::fs::symlink(id, &fresh)?;
    std::fs::rename(&fresh, latest).inspect_err(|_| drop(std::fs::remove_file(&fresh)))
}

#[cfg(not(unix))]
fn link(_: &str, _: &Path, _: &Path) -> std::io::Result<()> {
    Err(std::io::ErrorKind::Unsupported.into())
}

/// Unfinished runs of `identity` below `base`, the newest first. Folders that are no runs are passed over.
fn known(base: &Path, identity: &str) -> Result<Vec<PathBuf>, RunError> {
    let mut found = Vec::new();
    for item in std::fs::read_dir(base).map_err(RunError::file(base))? {
        let path = item.map_err(RunError::file(base))?.path();
        if path.is_symlink() || !path.is_dir() {
            continue;
        }
        match Manifest::read(&path) {
            Ok(Some(manifest)) if manifest.identity == identity && manifest.state != State::Abandoned => {
                found.push((manifest.order, manifest.start, path));
            }
            Ok(None) => sweep_unborn(&path),
            Ok(_) | Err(RunError::Damaged { .. }) => {}
            Err(error) => return Err(error),
        }
    }
    found.sort();
    Ok(found.into_iter().rev().map(|(_, _, path)| path).collect())
}

/// Removes what a process left in `path` that was killed before the run had its manifest; one that is at it holds the lock.
fn sweep_unborn(path: &Path) {
    if let Ok(lock) = File::open(path.join("lock"))
        && lock.try_lock().is_ok()
    {
        file::sweep_here(path);
    }
}

/// Whether a process is at the run in `path`, as far as its file system can tell.
pub fn is_locked(path: &Path) -> bool {
    let held = |path: PathBuf| {
        File::open(path).is_ok_and(|file| matches!(file.try_lock(), Err(TryLockError::WouldBlock)))
    };
    held(path.to_owned()) || held(path.join("lock"))
}

/// The highest order of a run below `base`. Clocks go backwards, this does not.
pub fn newest(base: &Path) -> Result<u64, RunError> {
    let entries = std::fs::read_dir(base).map_err(RunError::file(base))?;
    let folders = entries.flatten().map(|entry| entry.path()).filter(|path| !path.is_symlink());
    let orders = folders.filter_map(|path| Some(Manifest::read(&path).ok()??.order));
    Ok(orders.max().unwrap_or(0))
}

/// Locks `folder` and the file `lock` in it, which says who holds it: the folder cannot be deleted under a run, the
/// file is what earlier versions look at, and all there is where folders cannot be locked. A shard is claimed in another way
/// (see `claim`) and goes without locks where the file system has none: `lenient`.
fn lock(folder: &Path, lenient: bool, stop: &CancelToken) -> Result<Vec<File>, RunError> {
    let path = folder.join("lock");
    let mut file =
        OpenOptions::new().read(true).append(true).create(true).open(&path).map_err(RunError::file(&path))?;
    let mut held = Vec::new();
    if let Some(whole) = File::open(folder).ok().filter(|_| cfg!(unix)) {
        match acquire(&whole, folder, stop) {
            Ok(()) => held.push(whole),
            Err(RunError::File { .. }) => {}
            Err(error) => return Err(error),
        }
    }
    match acquire(&file, folder, stop) {
        Err(RunError::File { .. }) if lenient => {}
        result => result?,
    }
    let told =
        file.set_len(0).and_then(|()| writeln!(file, "process {} (since {})", std::process::id(), now()));
    told.map_err(RunError::file(&path))?;
    held.push(file);
    Ok(held)
}

/// Locks `file`, waiting a while for whoever holds it.
fn acquire(file: &File, folder: &Path, stop: &CancelToken) -> Result<(), RunError> {
    let path = folder.join("lock");
    let start = Instant::now();
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(()),
            Err(TryLockError::WouldBlock) if start.elapsed() < PATIENCE && !stop.is_cancelled() => {
                std::thread::sleep(Duration::from_millis(100));
            }
            Err(TryLockError::WouldBlock) => {
                let holder = file::read_to_string(&path).unwrap_or_default();
                let holder = match holder.trim() {
                    "" => "another process".to_owned(),
                    holder => holder.to_owned(),
                };
                return Err(RunError::Locked { path: folder.to_owned(), holder });
            }
            Err(TryLockError::Error(source)) => return Err(RunError::File { path, source }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan() -> Plan {
        Plan { name: "speed".to_owned(), command: "speed".to_owned(), threads: 2, ..Plan::default() }
    }

    fn open(root: &Path, plan: &Plan, fresh: bool) -> Result<RunFolder, RunError> {
        RunFolder::open(root, plan, fresh, &CancelToken::default())
    }

    #[test]
    fn only_an_unfinished_run_of_the_same_plan_is_continued() {
        let root = tempfile::tempdir().unwrap();
        let first = open(root.path(), &plan(), false).unwrap();
        assert!(!first.continued);
        let (path, mut manifest) = (first.path.clone(), first.manifest.clone());
        drop(first);
        let other = Plan { threads: 1, ..plan() };
        assert!(!open(root.path(), &other, false).unwrap().continued);
        let again = open(root.path(), &plan(), false).unwrap();
        assert!(again.continued && again.path == path);
        drop(again);
        manifest.state = State::Done;
        manifest.write(&path).unwrap();
        assert!(!open(root.path(), &plan(), false).unwrap().continued);
    }

    #[test]
    fn a_finished_training_run_is_not_made_again() {
        let root = tempfile::tempdir().unwrap();
        let plan = Plan { keeps: true, ..plan() };
        let first = open(root.path(), &plan, false).unwrap();
        let manifest = Manifest { state: State::Done, end: Some(now()), ..first.manifest.clone() };
        manifest.write(&first.path).unwrap();
        let path = first.path.clone();
        drop(first);
        let again = open(root.path(), &plan, false).unwrap();
        assert!(again.continued && again.path == path && again.manifest == manifest);
        drop(again);
        let fresh = open(root.path(), &plan, true).unwrap();
        assert!(!fresh.continued && fresh.path != path);
        assert_eq!(Manifest::read(&path).unwrap().unwrap(), manifest, "what is finished is not given up");
    }

    #[test]
    fn fresh_gives_up_the_unfinished_run() {
        let root = tempfile::tempdir().unwrap();
        let first = open(root.path(), &plan(), false).unwrap().path;
        let second = open(root.path(), &plan(), true).unwrap();
        assert!(!second.continued && second.path != first);
        drop(second);
        assert_eq!(Manifest::read(&first).unwrap().unwrap().state, State::Abandoned);
    }

    #[test]
    fn a_damaged_run_beside_it_stops_no_other() {
        let root = tempfile::tempdir().unwrap();
        let path = open(root.path(), &plan(), false).unwrap().path;
        for damage in [b"{".as_slice(), b"{}\xff".as_slice()] {
            std::fs::write(path.join("manifest.json"), damage).unwrap();
            assert_ne!(open(root.path(), &plan(), false).unwrap().path, path, "{damage:?}");
        }
    }

    #[test]
    fn a_held_run_names_its_holder() {
        let root = tempfile::tempdir().unwrap();
        let held = open(root.path(), &plan(), false).unwrap();
        let stop = CancelToken::default();
        stop.cancel(); // do not wait
        let error = RunFolder::open(root.path(), &plan(), false, &stop).err().unwrap().to_string();
        assert!(error.contains(&format!("in use by process {}", std::process::id())), "{error}");
        // who deletes the file lets nobody in
        std::fs::remove_file(held.path.join("lock")).unwrap();
        assert!(RunFolder::open(root.path(), &plan(), false, &stop).is_err() || cfg!(not(unix)));
        drop(held);
        assert!(RunFolder::open(root.path(), &plan(), false, &stop).is_ok());
    }

    #[test]
    fn the_newest_run_is_the_one_made_last_whatever_the_clock_says() {
        let root = tempfile::tempdir().unwrap();
        let plan = Plan { command: "lra".to_owned(), ..plan() };
        let mut first = open(root.path(), &plan, false).unwrap();
        (first.manifest.state, first.manifest.start) = (State::Done, "2999-01-01T00:00:00Z".to_owned());
        first.manifest.write(&first.path).unwrap();
        drop(first);
        let fresh = open(root.path(), &plan, true).unwrap();
        let path = fresh.path.clone();
        drop(fresh);
        assert_eq!(open(root.path(), &plan, false).unwrap().path, path, "not the one before --fresh");
    }

    #[test]
    fn temporary_files_of_a_killed_run_are_gone_when_it_goes_on() {
        let root = tempfile::tempdir().unwrap();
        let path = open(root.path(), &plan(), false).unwrap().path;
        let left = path.join("cells/a/.effattn-x.part");
        std::fs::create_dir_all(left.parent().unwrap()).unwrap();
        std::fs::write(&left, b"half a checkpoint").unwrap();
        assert!(open(root.path(), &plan(), false).unwrap().continued && !left.exists());
    }

    #[test]
    fn a_run_that_was_killed_before_its_manifest_leaves_no_temporary_file() {
        let root = tempfile::tempdir().unwrap();
        let path = plan().base(root.path()).join("20260101-000000-abcdef");
        let left = path.join(".effattn-x.part");
        std::fs::create_dir_all(&path).unwrap();
        std::fs::write(&left, b"half a manifest").unwrap();
        let held = lock(&path, false, &CancelToken::default()).unwrap();
        open(root.path(), &plan(), false).unwrap();
        assert!(left.exists(), "another process is writing it");
        drop(held);
        open(root.path(), &plan(), false).unwrap();
        assert!(!left.exists());
    }

    #[test]
    fn results_of_a_newer_version_are_refused() {
        let root = tempfile::tempdir().unwrap();
        let path = open(root.path(), &plan(), false).unwrap().path;
        let text = std::fs::read_to_string(path.join("manifest.json")).unwrap();
        let newer = text.replace("\"schema\": 1", "\"schema\": 2");
        std::fs::write(path.join("manifest.json"), newer).unwrap();
        let error = open(root.path(), &plan(), false).err().unwrap().to_string();
        assert!(error.contains("newer effattn (schema 2, this one knows 1)"), "{error}");
    }

    #[test]
    fn latest_names_the_run_again_and_again() {
        let root = tempfile::tempdir().unwrap();
        for _ in 0..2 {
            let run = open(root.path(), &plan(), true).unwrap();
            run.name_latest().unwrap();
            let base = root.path().join("speed");
            let named = latest(&base).unwrap().canonicalize().unwrap();
            assert_eq!(named, run.path.canonicalize().unwrap());
        }
    }
}
