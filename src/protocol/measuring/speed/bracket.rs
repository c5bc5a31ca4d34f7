//! Calibrations and counters around the turns of a measurement.
//!
//! The parent takes them between turns, while every worker waits: what it needs is in no cell's memory, and cells of other
//! programs have the same ones.

use std::time::{Duration, Instant};

use crate::run::turn::{Bracket, Judge, Steadiness};
use effattn_kernel::cpu::rates::Calibration;
use effattn_kernel::device::counters::{Counters, settle};
use effattn_kernel::device::threads;

/// Calibrations before the first turn: what is fast is known from the beginning of a run.
const FIRST: usize = 5;
/// So long after a turn its calibration is that of the next turn, too.
const RECENT: Duration = Duration::from_millis(5);

/// What takes calibrations.
pub struct Brackets {
    calibration: Calibration,
    threads: usize,
    cores: usize,
    /// Whether the system tells how long threads waited: calibrations then tell only of the machine's speed.
    by_thread: bool,
    /// Seconds of the first calibrations, and of the slower one of every turn so far.
    slower: Vec<f64>,
    /// Seconds of a fast one before a continued run was stopped.
    known: Option<f64>,
    last: Option<(Instant, f64)>,
}

impl Brackets {
    /// For steps on `threads` threads of a run that was as steady as `known` so far.
    pub fn new(threads: usize, known: Option<&Steadiness>) -> Self {
        let (cores, by_thread) =
            (threads::available(), Counters::read(&[]).is_some_and(|it| it.tells_waiting()));
        let known = known.filter(|known| known.by_thread == by_thread).map(|known| known.fast);
        let calibration = Calibration::new();
        let mut new = Self { calibration, threads, cores, by_thread, slower: Vec::new(), known, last: None };
        new.slower = (0..FIRST).map(|_| new.take()).collect();
        new
    }

    /// Seconds of a calibration now.
    fn take(&mut self) -> f64 {
        let time = self.calibration.take();
        let seconds = if self.by_thread { time.fastest } else { time.mean };
        self.last = Some((Instant::now(), seconds));
        seconds
    }

    /// Runs a turn of the processes `processes` with a calibration on either side.
    pub fn around<T>(&mut self, processes: &[u32], turn: impl FnOnce() -> T) -> (T, Bracket) {
        let recent = self.last.filter(|(at, _)| at.elapsed() < RECENT).map(|(_, seconds)| seconds);
        let before = recent.unwrap_or_else(|| self.take());
        let counters = Counters::read(processes);
        let result = turn();
        let interference =
            counters.and_then(|before| Counters::read(processes).map(|after| after.since(&before)));
        let taken = interference.map_or(0.0, |it| it.taken(self.threads, self.cores));
        settle(processes);
        let bracket = Bracket { before, after: self.take(), by_thread: self.by_thread, interference, taken };
        self.slower.push(bracket.slower());
        (result, bracket)
    }

    /// What decides about turns now.
    pub fn judge(&self) -> Judge {
        let judge = Judge::of(&self.slower, self.threads);
        Judge { fast: self.known.map_or(judge.fast, |known| known.min(judge.fast)), ..judge }
    }
}
