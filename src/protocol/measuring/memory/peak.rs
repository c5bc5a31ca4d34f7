//! The peak of a step: what a worker counts, and how often it is asked.

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::{INFO, MemoryRequest};
use crate::protocol::measuring::step::MeasuredStep;
use crate::protocol::measuring::worker::{Answer, Bounds, time_limit};
use crate::protocol::model_spec::ModelSpec;
use crate::run::outcome::CellFailure;
use effattn_kernel::device::alloc;
use effattn_kernel::device::machine::Resident;
use effattn_record::Outcome;

/// Minimum and maximum number of measured steps: the second one finds every cache filled. With several threads it is chance
/// whether they hold their working memory at the same moment, and which of them has what it keeps for the next kernel, so
/// that more steps are made, until [`STEADY`] of them bring no new peak or [`PATIENCE`] is over.
pub const STEPS: (usize, usize) = (2, 40);
const STEADY: usize = 8;
pub const PATIENCE: Duration = Duration::from_secs(1);
/// Workers that are asked where several threads compute and four times that patience is not over.
const WORKERS: usize = 4;

/// What the worker answers.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Peak {
    /// Highest live bytes above the empty process.
    pub peak_bytes: u64,
    /// The same of the step that had the least of all behind the first.
    pub least_bytes: u64,
    /// Steps that were made.
    pub steps: u64,
    /// Seconds that they took.
    pub seconds: f64,
    /// Growth of the highest resident size, counted by the system.
    pub resident_bytes: u64,
}

impl Peak {
    /// Both together.
    fn and(self, other: Self) -> Self {
        Self {
            peak_bytes: self.peak_bytes.max(other.peak_bytes),
            least_bytes: self.least_bytes.min(other.least_bytes),
            steps: self.steps + other.steps,
            seconds: self.seconds + other.seconds,
            resident_bytes: self.resident_bytes.max(other.resident_bytes),
        }
    }
}

/// Predicted seconds of a cell whose step takes `step`: workers are asked until their patience is over.
pub fn seconds(step: f64, threads: usize) -> f64 {
    let steps = |most: usize| (step * most as f64).min(PATIENCE.as_secs_f64()).max(step * STEPS.0 as f64);
    let worker = 0.3 + steps(if threads > 1 { STEADY + 4 } else { STEPS.0 });
    let workers = (4.0 * PATIENCE.as_secs_f64() / worker).ceil().min(WORKERS as f64);
    if threads > 1 { worker * workers } else { worker }
}

/// The peak of a step. With several threads it depends on chance, in part once for a worker: several are asked where one
/// takes no time, and the least and the highest of all their steps are kept.
pub fn measure(
    bounds: Bounds,
    threads: usize,
    timeout: Option<f64>,
    request: &MemoryRequest,
) -> Answer<Peak> {
    let start = Instant::now();
    let mut all = ask(bounds, timeout, request)?;
    for _ in 1..if threads > 1 { WORKERS } else { 1 } {
        let Ok(before) = all else { break };
        if start.elapsed() > 4 * PATIENCE {
            break;
        }
        all = ask(bounds, timeout, request)?.map(|now| before.and(now));
    }
    Ok(all)
}

/// Runs one worker for `request`, for `seconds` at most: its peak, or how it ended instead.
pub fn ask(bounds: Bounds, seconds: Option<f64>, request: &MemoryRequest) -> Answer<Peak> {
    let mut worker = bounds.start(INFO.name, request)?;
    let deadline = time_limit(seconds).and_then(|time| Instant::now().checked_add(time));
    let peak = bounds.hear(&mut worker, deadline)?;
    if peak.is_ok() {
        worker.finish();
    }
    Ok(peak)
}

/// The worker's side: builds, steps, tells the peak.
pub fn work(request: &MemoryRequest, text: &[u8]) -> Result<Peak, CellFailure> {
    alloc::return_pages();
    let mut resident = Resident::default();
    let before = resident.own();
    let searches = request.measure.fit.is_some();
    let most = if searches || rayon::current_num_threads() == 1 { STEPS.0 } else { STEPS.1 };
    let (peaks, seconds) = peaks(&request.spec, text, most)?;
    Ok(Peak {
        seconds,
        peak_bytes: peaks.iter().copied().max().unwrap_or(0),
        least_bytes: peaks.iter().skip(1).copied().min().unwrap_or(0),
        steps: peaks.len() as u64,
        resident_bytes: resident.own_peak().saturating_sub(before),
    })
}

/// The peak of every step, `most` of them at most, and the seconds that they took.
fn peaks(spec: &ModelSpec, text: &[u8], most: usize) -> Result<(Vec<u64>, f64), CellFailure> {
    let mut step = MeasuredStep::open(spec, text)?;
    let (mut peaks, mut highest, start) = (Vec::new(), 0, Instant::now());
    loop {
        step.reset_peak();
        step.step()?;
        let uncounted =
            || CellFailure::new(Outcome::Unsupported, format!("memory is not counted on {}", spec.device));
        peaks.push(step.peak_bytes().ok_or_else(uncounted)?);
        if peaks[peaks.len() - 1] > peaks[highest] {
            highest = peaks.len() - 1;
        }
        let steady = peaks.len() - highest > STEADY || start.elapsed() > PATIENCE;
        if peaks.len() >= most || peaks.len() >= STEPS.0 && steady {
            return Ok((peaks, start.elapsed().as_secs_f64()));
        }
    }
}
