//! Who computes a shard: files that tell, on a shared file system whose locks may hold on one machine only.
//!
//! A start makes the file `claim-N` with the next number, which only one of several can, and touches it every few seconds.
//! A later start looks whether that goes on, by the clock of the file system, and takes over what stands still; the
//! earlier one, should it wake, finds its file gone and writes nothing more.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime};

use serde::{Deserialize, Serialize};

use super::manifest::now;
use super::{CancelToken, RunError};
use effattn_kernel::device::machine;
use effattn_record::file;

/// Time between two touches.
const BEAT: Duration = Duration::from_secs(5);
/// Who has not touched its file for so long is gone.
const STALE: Duration = Duration::from_secs(30);
/// Front of the files' names.
const NAME: &str = "claim-";

/// What a claim says of its holder.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Holder {
    /// Host name.
    pub host: String,
    /// Where process numbers are counted: boot and name space; empty where the system does not say.
    place: String,
    /// Process.
    pub process: u32,
    /// When the process started, by the machine's clock since its boot: numbers are used again.
    ticks: u64,
    /// Job of a scheduler that never runs one twice at once (Slurm).
    job: String,
    /// When it started (UTC by its clock).
    pub since: String,
}

impl Holder {
    fn this() -> Self {
        let process = std::process::id();
        let (host, place) = (machine::host(), place());
        let job = std::env::var("SLURM_JOB_ID").unwrap_or_default();
        Self { host, place, process, ticks: ticks(process).unwrap_or(0), job, since: now() }
    }

    /// Whether it still runs; none where it cannot be seen from here.
    fn is_alive(&self, from: &Self) -> Option<bool> {
        if self.place.is_empty() || self.place != from.place {
            let same_job = !self.job.is_empty() && self.job == from.job;
            return same_job.then_some(false); // Slurm has started this job again
        }
        Some(ticks(self.process) == Some(self.ticks))
    }
}

impl std::fmt::Display for Holder {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        write!(f, "process {} on {} (since {})", self.process, self.host, self.since)
    }
}

/// Boot and name space that process numbers belong to.
fn place() -> String {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let space = std::fs::read_link("/proc/self/ns/pid").unwrap_or_default();
    if boot.is_empty() { String::new() } else { format!("{} {}", boot.trim(), space.display()) }
}

/// When `process` started, where it runs and the system tells.
fn ticks(process: u32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    let mut fields = stat.rsplit_once(") ")?.1.split(' ');
    let state = fields.next()?;
    (state != "Z" && state != "X").then(|| fields.nth(18)?.parse().ok())?
}

/// A shard that this process computes. It ends with this value; a process that is killed leaves its file.
pub struct Claim {
    path: PathBuf,
    text: String,
    end: Option<Sender<()>>,
    beat: Option<JoinHandle<()>>,
}

impl Claim {
    /// Claims `folder`, which is made where it is missing. `stop` is set when another start takes it over.
    pub fn acquire(folder: &Path, stop: &CancelToken) -> Result<Self, RunError> {
        std::fs::create_dir_all(folder).map_err(RunError::file(folder))?;
        let own = Holder::this();
        let text = serde_json::to_string(&own).unwrap_or_default() + "\n";
        loop {
            let last = last(folder);
            if let Some((_, path)) = &last
                && let Some(holder) = watch(path, &own, stop)?
            {
                return Err(RunError::Locked { path: folder.to_owned(), holder });
            }
            let number = last.as_ref().map_or(0, |(number, _)| *number) + 1;
            let path = folder.join(format!("{NAME}{number:06}"));
            match create(&path, &text) {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => continue,
                Err(source) => return Err(RunError::File { path, source }),
            }
            for (earlier, path) in all(folder) {
                if earlier < number {
                    let _ = std::fs::remove_file(path);
                }
            }
            return Ok(Self::hold(path, text, stop.clone()));
        }
    }

    fn hold(path: PathBuf, text: String, stop: CancelToken) -> Self {
        let (end, ended) = mpsc::channel::<()>();
        let (own, said) = (path.clone(), text.clone());
        let beat = std::thread::spawn(move || {
            while ended.recv_timeout(BEAT) == Err(RecvTimeoutError::Timeout) {
                if !holds(&own, &said) {
                    stop.cancel();
                    return;
                }
                touch(&own, &said);
            }
        });
        Self { path, text, end: Some(end), beat: Some(beat) }
    }

    /// Whether no other start has taken over.
    pub fn is_held(&self) -> bool {
        holds(&self.path, &self.text)
    }

    /// Who holds `folder` now.
    pub fn holder(folder: &Path) -> Option<Holder> {
        let (_, path) = last(folder)?;
        serde_json::from_str(&std::fs::read_to_string(path).ok()?).ok()
    }

    /// Whether a start is at `folder`, without waiting: by its process where that can be seen, else by `now`, the time of
    /// the file system.
    pub fn is_running(folder: &Path, now: SystemTime) -> bool {
        let Some((_, path)) = last(folder) else { return false };
        let holder: Option<Holder> =
            std::fs::read_to_string(&path).ok().and_then(|text| serde_json::from_str(&text).ok());
        let seen =
            holder.and_then(|holder| holder.is_alive(&Holder { job: String::new(), ..Holder::this() }));
        seen.unwrap_or_else(|| age(&path, now).is_some_and(|age| age < STALE))
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.end = None;
        if let Some(beat) = self.beat.take() {
            let _ = beat.join();
        }
        if self.is_held() {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// Makes the file at `path` with all its text, where there is none.
fn create(path: &Path, text: &str) -> io::Result<()> {
    let mut file = file::beside(path)?;
    file.write_all(text.as_bytes())?;
    file.persist_noclobber(path).map(drop).map_err(|error| error.error)
}

/// Whether the file at `path` is still ours: opening asks the server.
fn holds(path: &Path, text: &str) -> bool {
    match std::fs::read_to_string(path) {
        Ok(found) => found == text,
        // a server that is away for a moment takes nothing over
        Err(error) => error.kind() != io::ErrorKind::NotFound,
    }
}

/// Renews the time of the file at `path`: the same bytes again, never a new file.
fn touch(path: &Path, text: &str) {
    let file = OpenOptions::new().write(true).open(path);
    let _ = file.and_then(|mut file| file.write_all(text.as_bytes()).and_then(|()| file.sync_all()));
}

/// All claims of `folder`, by number.
fn all(folder: &Path) -> Vec<(u64, PathBuf)> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    // 32 bits leave room for the next number
    let number =
        |path: &Path| path.file_name()?.to_str()?.strip_prefix(NAME)?.parse::<u32>().ok().map(u64::from);
    let mut found: Vec<_> =
        entries.filter_map(|entry| Some((number(&entry.path())?, entry.path()))).collect();
    found.sort();
    found
}

fn last(folder: &Path) -> Option<(u64, PathBuf)> {
    all(folder).pop()
}

/// The time of the file system that `folder` lies on; the machine's where nothing can be written there. Clocks of machines
/// may be hours apart.
pub fn server_time(folder: &Path) -> SystemTime {
    let probe = file::beside(&folder.join("time")).and_then(|file| file.as_file().metadata()?.modified());
    probe.unwrap_or_else(|_| SystemTime::now())
}

fn age(path: &Path, now: SystemTime) -> Option<Duration> {
    let touched = File::open(path).and_then(|file| file.metadata()?.modified()).ok()?;
    Some(now.duration_since(touched).unwrap_or_default())
}

/// Waits until it is plain whether the holder of the claim at `path` still runs: gives its name, or nothing if it is gone.
fn watch(path: &Path, own: &Holder, stop: &CancelToken) -> Result<Option<String>, RunError> {
    let Ok(text) = std::fs::read_to_string(path) else { return Ok(None) };
    let holder: Holder = serde_json::from_str(&text).unwrap_or_default();
    if let Some(alive) = holder.is_alive(own) {
        return Ok(alive.then(|| holder.to_string()));
    }
    let folder = path.parent().unwrap_or(Path::new("."));
    let touched = |path: &Path| File::open(path).and_then(|file| file.metadata()?.modified()).ok();
    let first = touched(path);
    let start = Instant::now();
    if age(path, server_time(folder)).is_some_and(|age| age < STALE) {
        log::warn!("{} was started by {holder}; looking whether that still runs", folder.display());
    }
    while age(path, server_time(folder)).is_some_and(|age| age < STALE) && start.elapsed() < 2 * STALE {
        if touched(path) != first {
            return Ok(Some(holder.to_string()));
        }
        if stop.is_cancelled() {
            return Err(RunError::Stopped);
        }
        std::thread::sleep(Duration::from_millis(500));
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn take(folder: &Path) -> Result<Claim, RunError> {
        Claim::acquire(folder, &CancelToken::default())
    }

    /// A claim as a holder elsewhere leaves it, touched `ago`.
    fn foreign(folder: &Path, ago: Duration) -> PathBuf {
        let holder =
            Holder { host: "far".into(), place: "another boot".into(), process: 7, ..Holder::default() };
        let path = folder.join(format!("{NAME}000004"));
        std::fs::write(&path, serde_json::to_string(&holder).unwrap()).unwrap();
        let file = OpenOptions::new().write(true).open(&path).unwrap();
        file.set_modified(SystemTime::now() - ago).unwrap();
        path
    }

    #[test]
    fn a_second_start_is_refused_by_name_until_the_first_ends() {
        let folder = tempfile::tempdir().unwrap();
        let held = take(folder.path()).unwrap();
        let error = take(folder.path()).err().unwrap().to_string();
        assert!(error.contains(&format!("in use by process {} on", std::process::id())), "{error}");
        assert!(Claim::is_running(folder.path(), SystemTime::now()));
        drop(held);
        assert!(!Claim::is_running(folder.path(), SystemTime::now()));
        assert!(take(folder.path()).is_ok());
        assert_eq!(all(folder.path()), []);
    }

    #[test]
    fn of_many_starts_at_once_one_has_it() {
        let folder = tempfile::tempdir().unwrap();
        let won: Vec<Claim> = std::thread::scope(|scope| {
            let starts: Vec<_> = (0..16).map(|_| scope.spawn(|| take(folder.path()).ok())).collect();
            starts.into_iter().filter_map(|start| start.join().unwrap()).collect()
        });
        assert_eq!(won.len(), 1);
        assert!(won[0].is_held());
    }

    #[test]
    fn who_stands_still_is_taken_over_and_notices() {
        let folder = tempfile::tempdir().unwrap();
        let path = foreign(folder.path(), 2 * STALE);
        let claim = take(folder.path()).unwrap();
        assert!(claim.is_held() && !path.exists());
        std::fs::remove_file(&claim.path).unwrap(); // as a later start does
        assert!(!claim.is_held());
        drop(claim);
        assert_eq!(all(folder.path()), [], "nothing comes back");
    }

    #[test]
    fn who_is_seen_to_touch_its_file_is_alive_whatever_the_clocks_say() {
        for ahead in [false, true] {
            let folder = tempfile::tempdir().unwrap();
            let path = foreign(folder.path(), Duration::ZERO);
            let holder = std::thread::spawn(move || {
                let file = OpenOptions::new().write(true).open(&path).unwrap();
                for beat in 1..=4u64 {
                    std::thread::sleep(Duration::from_millis(300));
                    let by = Duration::from_secs(if ahead { 7200 + beat } else { 0 });
                    let _ = file.set_modified(SystemTime::now() + by);
                }
            });
            let error = take(folder.path()).err().unwrap().to_string();
            assert!(error.contains("process 7 on far"), "{error}");
            holder.join().unwrap();
        }
    }

    #[test]
    fn a_job_that_slurm_started_again_is_not_waited_for() {
        let first = Holder { place: "a".into(), job: "12".into(), ..Holder::default() };
        let second = Holder { place: "b".into(), ..first.clone() };
        assert_eq!(first.is_alive(&second), Some(false));
        assert_eq!(first.is_alive(&Holder { job: "13".into(), ..second }), None);
    }
}
