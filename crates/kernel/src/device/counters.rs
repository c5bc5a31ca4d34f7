//! Counters of the system around a stretch of time: what other programs and the host took of the processors meanwhile.
//!
//! Linux only: elsewhere nothing is known, and [`Counters::read`] gives nothing.

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

/// Seconds of a tick in `/proc`: the kernel tells user programs hundredths on every architecture.
const TICK: f64 = 0.01;

/// The counters at one moment.
#[derive(Clone, Copy, Debug)]
pub struct Counters {
    at: Instant,
    /// Processor seconds of all programs and of the kernel.
    busy: f64,
    /// Processor seconds that the host gave to others.
    steal: f64,
    /// Processor seconds of the processes that measure.
    own: f64,
    /// Seconds that threads which measure were ready and waited for a processor; none where the system does not tell.
    waited: Option<f64>,
    switches: u64,
    page_faults: u64,
}

/// How often one looks whether processes are at rest, and for how long at most.
const LOOK: Duration = Duration::from_millis(2);
const PATIENCE: Duration = Duration::from_millis(500);

/// Waits until no thread of `processes` computes, half a second at most: the threads of many programs spin for a while before they
/// sleep (OpenMP's for up to 200 ms), which whatever is measured next would feel. Returns at once where the system does not tell.
pub fn settle(processes: &[u32]) {
    let start = Instant::now();
    while processes.iter().any(|id| computes(*id)) && start.elapsed() < PATIENCE {
        std::thread::sleep(LOOK);
    }
}

/// Whether a thread of process `id` runs, or would if there were a processor for it.
fn computes(id: u32) -> bool {
    let threads = std::fs::read_dir(format!("/proc/{id}/task")).into_iter().flatten().flatten();
    let state = |folder: std::path::PathBuf| {
        let text = std::fs::read_to_string(folder.join("stat")).ok()?;
        text.rsplit_once(')')?.1.trim_start().chars().next()
    };
    threads.into_iter().any(|thread| state(thread.path()) == Some('R'))
}

/// What others took between two moments.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Interference {
    /// Seconds between them.
    pub seconds: f64,
    /// Processors that other programs kept busy.
    pub others: f64,
    /// Processors that the host of a virtual machine gave to others.
    pub steal: f64,
    /// Processors that threads which measure waited for; none where the system does not tell.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waited: Option<f64>,
    /// How often the system took a processor from a thread that measures.
    pub switches: u64,
    /// How often processes that measure touched a page of memory that was not theirs yet.
    #[serde(default)]
    pub page_faults: u64,
    /// Mean frequency of the processors at the end, where it can be read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub megahertz: Option<f64>,
}

impl Counters {
    /// Reads them; `processes` measure, and so does this one. None where the system has no such counters.
    pub fn read(processes: &[u32]) -> Option<Self> {
        let at = Instant::now();
        let (busy, steal) = processors(&std::fs::read_to_string("/proc/stat").ok()?)?;
        let ids = processes.iter().map(u32::to_string).chain(["self".to_owned()]);
        let (mut own, mut waited, mut switches, mut page_faults) = (0.0, Some(0.0), 0, 0);
        for id in ids {
            let (spent, faults) = spent(&std::fs::read_to_string(format!("/proc/{id}/stat")).ok()?)?;
            own += spent;
            page_faults += faults;
            waited = waited.zip(waited_by(&id)).map(|(all, own)| all + own);
            switches += taken_from(&id);
        }
        Some(Self { at, busy, steal, own, waited, switches, page_faults })
    }

    /// Whether the system tells how long threads waited for a processor.
    pub fn tells_waiting(&self) -> bool {
        self.waited.is_some()
    }

    /// What others took since `before`, whose processes were the same.
    pub fn since(&self, before: &Self) -> Interference {
        let seconds = (self.at - before.at).as_secs_f64().max(1e-9);
        let others = (self.busy - before.busy) - (self.own - before.own);
        Interference {
            seconds,
            others: (others / seconds).max(0.0),
            steal: ((self.steal - before.steal) / seconds).max(0.0),
            waited: self.waited.zip(before.waited).map(|(now, before)| ((now - before) / seconds).max(0.0)),
            switches: self.switches.saturating_sub(before.switches),
            page_faults: self.page_faults.saturating_sub(before.page_faults),
            megahertz: megahertz(),
        }
    }
}

impl Interference {
    /// Processors that were taken from `threads` threads on a machine with `cores`: those that they waited for, and what the host
    /// took. Where the system does not tell of waiting, what others used beyond the processors that the threads leave free; less
    /// than three ticks are none then: the counters cannot tell.
    pub fn taken(&self, threads: usize, cores: usize) -> f64 {
        let told = |taken: f64| if taken * self.seconds < 3.0 * TICK { 0.0 } else { taken };
        if let Some(waited) = self.waited {
            // what is above the others' part, threads waited for each other
            return waited.min(self.others + TICK / self.seconds) + told(self.steal);
        }
        let beyond = (self.others + threads as f64 - cores as f64).clamp(0.0, self.others);
        told(beyond + self.steal)
    }
}

/// Busy and stolen seconds of all processors in the text of `/proc/stat`.
fn processors(text: &str) -> Option<(f64, f64)> {
    let line = text.lines().next()?.strip_prefix("cpu ")?;
    let ticks: Vec<f64> = line.split_whitespace().map_while(|word| word.parse().ok()).collect();
    let [user, nice, system, _idle, _wait, irq, softirq, steal, ..] = ticks[..] else { return None };
    Some((TICK * (user + nice + system + irq + softirq), TICK * steal))
}

/// Seconds that a process computed and the page faults that needed no disk, in the text of `/proc/PID/stat`. Its name, in
/// parentheses, may hold anything.
fn spent(text: &str) -> Option<(f64, u64)> {
    let fields: Vec<&str> = text.rsplit_once(')')?.1.split_whitespace().collect();
    let count = |index: usize| fields.get(index)?.parse::<u64>().ok();
    Some((TICK * (count(11)? + count(12)?) as f64, count(7)?))
}

/// Seconds that the threads of process `id` were ready and waited for a processor. None where the system does not count: then
/// no thread has computed either.
fn waited_by(id: &str) -> Option<f64> {
    let threads = std::fs::read_dir(format!("/proc/{id}/task")).ok()?.flatten();
    let of = |folder: std::path::PathBuf| {
        let text = std::fs::read_to_string(folder.join("schedstat")).ok()?;
        let mut counts = text.split_whitespace().map_while(|count| count.parse::<f64>().ok());
        Some((counts.next()?, counts.next()?))
    };
    let add = |all: (f64, f64), one: (f64, f64)| (all.0 + one.0, all.1 + one.1);
    let (computed, waited) = threads.filter_map(|thread| of(thread.path())).reduce(add)?;
    (computed > 0.0).then_some(1e-9 * waited)
}

/// Involuntary switches of all threads of process `id`.
fn taken_from(id: &str) -> u64 {
    let threads = std::fs::read_dir(format!("/proc/{id}/task")).into_iter().flatten().flatten();
    let of = |folder: std::path::PathBuf| {
        let text = std::fs::read_to_string(folder.join("status")).ok()?;
        let line = text.lines().find_map(|line| line.strip_prefix("nonvoluntary_ctxt_switches:"))?;
        line.trim().parse::<u64>().ok()
    };
    threads.filter_map(|thread| of(thread.path())).sum()
}

/// Mean frequency of the processors just now.
fn megahertz() -> Option<f64> {
    let mut all = Vec::new();
    for index in 0.. {
        let path = format!("/sys/devices/system/cpu/cpu{index}/cpufreq/scaling_cur_freq");
        let Ok(text) = std::fs::read_to_string(path) else { break };
        all.extend(text.trim().parse::<f64>().ok());
    }
    (!all.is_empty()).then(|| all.iter().sum::<f64>() / all.len() as f64 / 1e3)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_files_of_the_system_are_read_by_their_fields() {
        let stat = "cpu  100 50 25 1000 7 0 5 20 0 0\ncpu0 1 2 3 4 5 6 7 8 0 0\n";
        assert_eq!(processors(stat), Some((1.8, 0.2)));
        assert_eq!(processors("intr 5"), None);
        let process = "77 (a) b (c)) R 1 2 3 0 -1 4194304 97 0 0 0 250 50 0 0 20 0 1 0 39 31 34";
        assert_eq!(spent(process), Some((3.0, 97)));
    }

    #[test]
    fn only_what_the_threads_miss_is_taken() {
        let of = |others, steal, seconds| Interference { seconds, others, steal, ..Interference::default() };
        assert_eq!(of(1.0, 0.0, 0.5).taken(2, 2), 1.0);
        assert_eq!(of(1.0, 0.0, 0.5).taken(2, 8), 0.0, "six processors are free");
        assert_eq!(of(1.5, 0.25, 0.5).taken(2, 3), 0.75);
        assert_eq!(of(0.05, 0.0, 0.2).taken(2, 2), 0.0, "one tick is none");
        assert_eq!(of(0.5, 0.0, 0.5).taken(4, 2), 0.5, "more threads than processors take from themselves");
        let told = Interference { waited: Some(0.25), ..of(1.0, 0.125, 0.5) };
        assert_eq!(told.taken(2, 8), 0.375, "where the system tells of waiting, only that counts");
        let crowded = Interference { waited: Some(2.0), ..of(0.0, 0.0, 0.5) };
        assert_eq!(crowded.taken(4, 2), 0.02, "more threads than processors wait for themselves");
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_process_that_spins_is_waited_for() {
        use std::io::Read;
        let program = "echo; i=0; while [ $i -lt 1500000 ]; do i=$((i+1)); done; read end";
        let mut spinning = std::process::Command::new("sh")
            .args(["-c", program])
            .stdin(std::process::Stdio::piped())
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        spinning.stdout.take().unwrap().read_exact(&mut [0]).unwrap(); // it is in its loop
        let begins = computes(spinning.id());
        let start = Instant::now();
        settle(&[spinning.id()]);
        let waited = !computes(spinning.id()) || start.elapsed() >= PATIENCE;
        // a machine at its limit may give it no processor for longer than one waits
        while computes(spinning.id()) && start.elapsed().as_secs() < 20 {
            settle(&[spinning.id()]);
        }
        let rests = !computes(spinning.id());
        spinning.kill().unwrap();
        spinning.wait().unwrap();
        assert!(begins && waited && rests, "{begins} {waited} {rests}");
        settle(&[u32::MAX]);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn threads_that_wait_for_a_processor_are_seen() {
        let Some(before) = waited_by("self") else { return }; // a system that does not tell
        let start = Instant::now();
        let ended = std::sync::atomic::AtomicBool::new(false);
        let waited = std::thread::scope(|scope| {
            for _ in 0..2 * crate::device::threads::available() {
                scope.spawn(|| {
                    while !ended.load(std::sync::atomic::Ordering::Relaxed) {
                        std::hint::spin_loop();
                    }
                });
            }
            let mut waited = 0.0;
            // another test's threads take their counters with them when they end
            while waited <= 0.05 && start.elapsed().as_secs() < 20 {
                std::thread::sleep(LOOK);
                waited = waited_by("self").unwrap() - before;
            }
            ended.store(true, std::sync::atomic::Ordering::Relaxed);
            waited
        });
        assert!(waited > 0.05, "{waited}");
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn what_this_process_computes_is_its_own() {
        let before = Counters::read(&[]).unwrap();
        // others may use the processors, too
        let computed = |after: &Counters| after.own - before.own >= 0.1;
        let mut after = before;
        while !computed(&after) && before.at.elapsed().as_secs() < 20 {
            (0..1_000_000).for_each(|_| std::hint::spin_loop());
            after = Counters::read(&[]).unwrap();
        }
        assert!(computed(&after), "{before:?} {after:?}");
        assert!(after.since(&before).seconds > 0.0);
    }
}
