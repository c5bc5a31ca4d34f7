//! Whether the machine was in the same state in the runs that are compared, as far as they tell.

use crate::Row;
use crate::stats::mean;

/// Calibrations that differ by more than this factor are of machines in different states.
const STATES: f64 = 1.25;
/// A load average above this share of the processors before a run that has no calibrations: the run itself leaves one of up to
/// all processors behind, for the next.
const LOADED: f64 = 1.5;
/// A run whose turns were disturbed and count all the same by more than this share says nothing about times.
const DISTURBED: f64 = 0.5;

/// What a run says of its calibrations.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RunCalibration {
    /// Seconds of one, in the median.
    pub seconds: f64,
    /// Whether they are the fastest rounds of threads, and not means: one kind says nothing about the other.
    pub by_thread: bool,
    /// Their spread, as a share.
    pub spread: f64,
    /// Share of its turns that others disturbed and that count all the same.
    pub disturbed: f64,
}

/// What a run says of its machine.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RunMachine {
    /// Its calibrations; none in runs of earlier versions and in exported rows.
    pub calibration: Option<RunCalibration>,
    /// Load average before it began.
    pub load: Option<f64>,
    /// Processors.
    pub cores: Option<f64>,
}

/// A run that is compared.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ComparedRun {
    /// Its rows.
    pub rows: Vec<Row>,
    /// Its machine.
    pub machine: RunMachine,
}

/// The machines of both sides.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Machines {
    /// Logarithm of the calibrations of the second side over those of the first, where every run has some of one kind.
    ratio: Option<f64>,
    refusal: Option<String>,
    uncalibrated: bool,
}

impl Machines {
    pub(super) fn of(before: &[ComparedRun], after: &[ComparedRun]) -> Self {
        let first = before.iter().chain(after).find_map(|run| run.machine.calibration);
        let alike = |known: &RunCalibration| first.is_some_and(|first| first.by_thread == known.by_thread);
        let side = |runs: &[ComparedRun]| {
            let seconds = |run: &ComparedRun| Some(run.machine.calibration.filter(alike)?.seconds.ln());
            let logs: Option<Vec<f64>> = runs.iter().map(seconds).collect();
            logs.and_then(|logs| mean(&logs)).filter(|log| log.is_finite())
        };
        let ratio = side(before).zip(side(after)).map(|(before, after)| after - before);
        let named = [("before", before), ("now", after)];
        let runs = || named.iter().flat_map(|(name, runs)| runs.iter().map(move |run| (*name, &run.machine)));
        let apart = ratio.filter(|log| log.abs() > STATES.ln()).map(|log| {
            let (times, word) = (log.abs().exp(), if log > 0.0 { "now" } else { "before" });
            format!("calibrations took {times:.2} times as long {word}")
        });
        let refusal = runs().find_map(|(name, machine)| disturbed(name, machine)).or(apart);
        let uncalibrated = runs().any(|(_, machine)| machine.calibration.filter(alike).is_none());
        Self { ratio, refusal, uncalibrated }
    }

    /// Whether times are not compared.
    pub(super) fn refuse(&self) -> bool {
        self.refusal.is_some()
    }

    /// Why times are not compared.
    pub(super) fn refusal(&self) -> Option<String> {
        self.refusal.as_ref().map(|why| {
            format!("not comparable: {why}; measure both again on an idle machine (effattn doctor shows whether it is)")
        })
    }

    /// By how much the states differ, as a logarithm: intervals of ratios of times are wider by as much.
    pub(super) fn apart(&self) -> f64 {
        self.ratio.unwrap_or(0.0)
    }

    pub(super) fn remarks(&self) -> Vec<String> {
        if self.refusal.is_some() {
            return Vec::new();
        }
        let apart = self.ratio.filter(|log| log.abs() > 0.01).map(|log| {
            format!("Calibrations took {:+.1} % as long as before: intervals are wider by that.", 100.0 * log)
        });
        let unknown = self.uncalibrated.then(|| {
            "A side has no calibrations (rows of a file, or of an earlier version): 3 % between runs are taken for noise."
                .to_owned()
        });
        apart.into_iter().chain(unknown).collect()
    }
}

/// Why the times of a run say nothing.
fn disturbed(name: &str, machine: &RunMachine) -> Option<String> {
    match machine.calibration {
        Some(known) if known.disturbed > DISTURBED => {
            let share = 100.0 * known.disturbed;
            Some(format!("others disturbed {share:.0} % of the turns that count {name}"))
        }
        Some(_) => None,
        None => {
            let (load, cores) = machine.load.zip(machine.cores)?;
            (load > LOADED * cores).then(|| format!("load {load:.2} on {cores:.0} processors {name}"))
        }
    }
}
