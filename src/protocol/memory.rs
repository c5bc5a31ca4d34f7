//! `memory`: exact peak bytes of one step over lengths and batch sizes (Transformer-LS Figure 3, right
//! half), one worker at a time; and with `--fit` the longest length that stays below a budget.

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::Order;
use super::grid::{Defaults, Flags, Grid, Pick, PlanError, points};
use super::measured_step::MeasuredStep;
use super::model_spec::{ModelSpec, settle};
use super::runner::{Finished, Runner, request};
use super::speed::plan::PRESET;
use super::table::{Conditions, Given, Protocol, Shown};
use super::text;
use crate::config::grid::{Batches, Lengths, MAX_LEN, Modes, Seeds};
use crate::config::settings::Settings;
use crate::config::settings::groups::{MACHINE, MODEL, POINTS};
use crate::config::units::{Bytes, Seconds};
use crate::device::alloc;
use crate::device::machine::Resident;
use crate::model::family;
use crate::record::{Metric, Outcome, Pass, Row};
use crate::run::RunError;
use crate::run::outcome::Ending;
use crate::run::plan::Cell;
use crate::run::worker::{Heard, Link, Worker};

/// Fewest and most steps that are looked at: the second one finds every cache filled. With several threads it is chance
/// whether they hold their working memory at the same moment, and which of them has what it keeps for the next kernel, so
/// that more steps are made, until [`STEADY`] of them bring no new peak or [`PATIENCE`] is over.
const STEPS: (usize, usize) = (2, 40);
const STEADY: usize = 8;
const PATIENCE: Duration = Duration::from_secs(1);
/// Workers that are asked where several threads compute and four times that patience is not over.
const WORKERS: usize = 4;
/// Lengths found by `--fit` are multiples of this.
const GRAIN: u64 = 64;
/// First length that `--fit` tries.
const FIRST: u64 = 512;

/// What the worker of a cell is asked.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Request {
    /// The model and its step.
    pub spec: ModelSpec,
    /// Bytes that a step may reach, where the longest length is looked for.
    pub fit: Option<u64>,
}

/// What the worker answers.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
struct Peak {
    /// Highest live bytes above the empty process.
    peak_bytes: u64,
    /// The same of the step that had the least of all behind the first.
    least_bytes: u64,
    /// Steps that were made.
    steps: u64,
    /// Growth of the highest resident size, counted by the system.
    resident_bytes: u64,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "say", rename_all = "snake_case")]
enum Answer {
    Peak(Peak),
    Ended { outcome: Outcome, reason: String },
}

/// The table line.
pub static PROTOCOL: Protocol = Protocol {
    name: "memory",
    about: "Peak memory of a step against length, or the longest length that fits (Transformer-LS, Figure 3)",
    examples: EXAMPLES,
    settings: &[POINTS, MODEL, &["fit"], MACHINE, &["timeout"]],
    help: &[],
    tasks: None,
    reads: &[text::SET],
    quick: None,
    defaults,
    cells,
    prepare: text::prepare,
    amount: super::grid::steps_amount,
    price: None,
    together: |_, _| false,
    compute,
    ended,
    work,
    metrics: &[
        Metric { name: "peak_memory", title: "Peak memory", unit: "B", less: true },
        Metric { name: "longest_length", title: "Longest length", unit: "positions", less: false },
    ],
    shown: Shown::Growth,
    curve: None,
    keeps: false,
    checks: false,
    passes_on: &[],
    instead: None,
};

const EXAMPLES: &str = "\
Examples:
  # Peak memory against length, for two batch sizes
  effattn memory --len 1024..16384 --model full,ls --batch 1,4
  # The longest length that fits, per mechanism
  effattn memory --model all --mode train --fit 2GiB
  # What the papers' own operations would need
  effattn memory --kernel composed --model full

Bytes are live bytes counted by the allocator: parameters, moments, activations, inputs. One worker runs at a time.";

/// What `memory` does where nothing is said.
fn defaults(flags: &Flags) -> Defaults {
    let fit = flags.said().fit.is_some();
    let usual = flags.said().preset.as_deref().and_then(family::usual);
    let len = usual.filter(|_| !fit).map(|usual| vec![usual.len as u64]);
    let settings = Settings {
        len: Some(Lengths(len.unwrap_or_else(|| match fit {
            true => vec![MAX_LEN],
            false => vec![1024, 2048, 4096, 8192],
        }))),
        batch: Some(Batches(vec![1])),
        seeds: Some(Seeds(vec![0])),
        mode: Some(Modes(vec![Pass::Infer, Pass::Train])),
        preset: Some(PRESET.to_owned()),
        timeout: Some(Seconds(if fit { 60.0 } else { 600.0 })),
        ..Settings::NONE
    };
    Defaults { settings, models: usual.map_or("full,linear,cosformer,ls", |usual| usual.models) }
}

/// The cells of `grid`. With `fit`, lengths are bounds of the search.
fn cells(grid: &Grid, threads: usize) -> Result<Vec<Cell>, PlanError> {
    let mut cells = Vec::new();
    for pick in &grid.picks {
        let points = points(&pick.settings);
        let longest = points.iter().map(|point| point.0).max();
        for (len, batch, pass, seed) in points {
            if pick.settings.fit.is_some() && Some(len) != longest {
                continue; // with a budget, the longest length only bounds the search
            }
            let place = (len, batch, pass, seed);
            cells.push((place, cell(grid, pick, place, threads)?));
        }
    }
    cells.sort_by_key(|(place, _)| *place);
    Ok(cells.into_iter().map(|(_, cell)| cell).collect())
}

fn cell(
    grid: &Grid,
    pick: &Pick,
    (len, batch, pass, seed): (u64, u64, Pass, u64),
    threads: usize,
) -> Result<Cell, PlanError> {
    let fit = pick.settings.fit;
    let spec = ModelSpec::new(pick, len, batch, pass, seed)?;
    let probe = ModelSpec { len: if fit.is_some() { FIRST.min(len) } else { len }, ..spec.clone() };
    let (resolved, reason) = settle(pick, |choice| probe.measured(choice))?;
    let mut row = probe.row("memory", threads, resolved.as_deref());
    row.suite = grid.suite.as_ref().map(|suite| suite.name.clone());
    row.published = pick.published("peak_memory", pass, len);
    let request = Request { spec, fit: fit.map(|bytes| bytes.0) };
    let usual = ModelSpec { len: if fit.is_some() { MAX_LEN } else { len }, ..request.spec.usual(PRESET) };
    let usual = Request { spec: usual, fit: request.fit };
    let step = row.flops.map_or(0.0, |flops| probe.step_flops(flops) / (8e9 * threads as f64));
    let words = match fit {
        Some(bytes) => {
            row = Row { len: None, flops: None, flops_2x: None, core_macs: None, ..row };
            format!("{} b{batch} {pass} s{seed} fit {}B", request.spec.model, bytes.0)
        }
        None => request.spec.key(),
    };
    let cell = Cell::new(&words, row, &request, &usual);
    let seconds = if fit.is_some() { 20.0 } else { 0.3 + STEPS.0 as f64 * step };
    let series = match fit {
        Some(_) => String::new(),
        None => {
            let shortest = Request { spec: ModelSpec { len: 0, ..request.spec.clone() }, ..request };
            serde_json::to_string(&shortest).map_err(PlanError::new)?
        }
    };
    let timeout = pick.settings.timeout.map(|time| time.0);
    Ok(Cell { seconds, series, timeout, ..cell }.refused(reason))
}

/// Measures the cells `open`, one at a time.
fn compute(runner: &mut Runner, open: &[usize]) -> Result<(), RunError> {
    for &index in open {
        let cell = &runner.plan.cells[index];
        runner.session.term.at(runner.plan.name(index));
        let asked: Request = request(cell)?;
        let measured = match asked.fit {
            Some(bytes) => Ok(fit(runner, index, &asked, bytes)?),
            None => measure(runner, index, &asked)?.map(|peak| rows(&cell.row, peak)),
        };
        match measured {
            Ok(rows) => {
                let said = tell(&rows);
                runner.finish(index, Finished { rows, samples: Vec::new(), said, moved: 0.0 })?;
            }
            Err(ending) => runner.end(index, &ending, 0.0)?,
        }
    }
    Ok(())
}

fn ended(row: &Row, ending: &Ending) -> Vec<Row> {
    vec![row.with("peak_memory", "B", None).ended(ending.outcome, Some(ending.reason.clone()))]
}

fn rows(row: &Row, peak: Peak) -> Vec<Row> {
    let row = Row { peak_bytes: Some(peak.peak_bytes), n: Some(peak.steps), ..row.clone() };
    let row = row.ended(Outcome::Ok, None);
    let resident = Row { published: None, n: Some(1), ..row.clone() };
    let highest = Row {
        ci_low: Some(peak.least_bytes as f64),
        ci_high: Some(peak.peak_bytes as f64),
        ..row.with("peak_memory", "B", Some(peak.peak_bytes as f64))
    };
    vec![highest, resident.with("resident_memory", "B", Some(peak.resident_bytes as f64))]
}

/// The peak of a step. With several threads it depends on chance, in part once for a worker: several are asked where one
/// takes no time, and the least and the highest of all their steps are kept.
fn measure(runner: &Runner, index: usize, asked: &Request) -> Result<Result<Peak, Ending>, RunError> {
    let (limit, start) = (runner.session.memory_limit, Instant::now());
    let mut all: Option<Peak> = None;
    for _ in 0..if runner.plan.threads > 1 { WORKERS } else { 1 } {
        let now = match probe(runner, index, asked, limit)? {
            Ok(now) => now,
            ended => return Ok(ended),
        };
        let before = all.unwrap_or(now);
        all = Some(Peak {
            peak_bytes: before.peak_bytes.max(now.peak_bytes),
            least_bytes: before.least_bytes.min(now.least_bytes),
            steps: all.map_or(0, |all| all.steps) + now.steps,
            resident_bytes: before.resident_bytes.max(now.resident_bytes),
        });
        if start.elapsed() > 4 * PATIENCE {
            break;
        }
    }
    all.map(Ok).ok_or_else(|| RunError::Internal("no worker was asked".to_owned()))
}

/// Runs one worker for `request` within `limit` bytes: its peak, or how it ended instead.
fn probe(
    runner: &Runner,
    index: usize,
    request: &Request,
    limit: u64,
) -> Result<Result<Peak, Ending>, RunError> {
    let session = &runner.session;
    let order = Order::Cell {
        protocol: PROTOCOL.name.to_owned(),
        memory_limit: limit,
        request: serde_json::to_value(request).map_err(|error| RunError::Internal(error.to_string()))?,
        conditions: Conditions::default(),
    };
    let mut worker = Worker::start(&session.launcher, &order)?;
    let timeout = runner.plan.cells[index].timeout.and_then(|time| Duration::try_from_secs_f64(time).ok());
    let deadline = timeout.and_then(|time| Instant::now().checked_add(time));
    let heard = worker.hear::<Answer>(deadline, session.resident_limit, &session.stop)?;
    Ok(match heard {
        Heard::Message(Answer::Peak(peak)) => {
            worker.finish();
            Ok(peak)
        }
        Heard::Message(Answer::Ended { outcome, reason }) => Err(Ending { outcome, reason }),
        Heard::Ended(ending) => Err(ending),
    })
}

/// The worker's side: builds, steps, tells the peak.
fn work(link: &Link, request: Value, given: &Given) -> anyhow::Result<()> {
    let request: Request = serde_json::from_value(request)?;
    alloc::return_pages();
    let mut resident = Resident::default();
    let before = resident.own();
    let most = if request.fit.is_some() || rayon::current_num_threads() == 1 { STEPS.0 } else { STEPS.1 };
    let answer = match peaks(&request.spec, given.text, most) {
        Ok(peaks) => Answer::Peak(Peak {
            peak_bytes: peaks.iter().copied().max().unwrap_or(0),
            least_bytes: peaks.iter().skip(1).copied().min().unwrap_or(0),
            steps: peaks.len() as u64,
            resident_bytes: resident.own_peak().saturating_sub(before),
        }),
        Err(ending) => Answer::Ended { outcome: ending.outcome, reason: ending.reason },
    };
    Ok(link.send(&answer)?)
}

/// The peak of every step, `most` of them at most.
fn peaks(spec: &ModelSpec, text: &[u8], most: usize) -> Result<Vec<u64>, Ending> {
    let mut step = MeasuredStep::open(spec, text)?;
    let (mut peaks, mut highest, start) = (Vec::new(), 0, Instant::now());
    loop {
        step.reset_peak();
        step.step()?;
        let uncounted =
            || Ending::new(Outcome::Unsupported, format!("memory is not counted on {}", spec.device));
        peaks.push(step.peak_bytes().ok_or_else(uncounted)?);
        if peaks[peaks.len() - 1] > peaks[highest] {
            highest = peaks.len() - 1;
        }
        let steady = peaks.len() - highest > STEADY || start.elapsed() > PATIENCE;
        if peaks.len() >= most || peaks.len() >= STEPS.0 && steady {
            return Ok(peaks);
        }
    }
}

/// Looks for the longest length whose step stays below `bytes`.
fn fit(runner: &Runner, index: usize, request: &Request, bytes: u64) -> Result<Vec<Row>, RunError> {
    let cell = &runner.plan.cells[index];
    let longest = request.spec.len;
    let search = |len: u64| -> Result<Tried, RunError> {
        let request = Request { spec: ModelSpec { len, ..request.spec.clone() }, ..request.clone() };
        // The limit counts the empty process too, which the peak does not: a little more is allowed here.
        Ok(match probe(runner, index, &request, bytes.saturating_add(32 << 20))? {
            Ok(peak) if peak.peak_bytes <= bytes => Tried::Fits(peak.peak_bytes),
            Ok(_) => Tried::TooBig,
            Err(ending) if ending.outcome == Outcome::Oom => Tried::TooBig,
            Err(ending) => Tried::Ended(ending),
        })
    };
    let found = bisect(longest, bytes, search)?;
    let row = Row { n: Some(found.tried), ..cell.row.clone() };
    let (outcome, remark) = match (&found.ending, found.len) {
        (Some(ending), _) => (ending.outcome, Some(ending.reason.clone())),
        (None, 0) => (Outcome::Oom, Some(format!("not even length 1 fits {}", Bytes(bytes)))),
        (None, len) if len == longest => (Outcome::Ok, Some("the longest that was tried".to_owned())),
        (None, _) => (Outcome::Ok, None),
    };
    let length = Some(found.len).filter(|len| *len > 0);
    let mut row = row.ended(outcome, remark);
    row.len = length;
    row.peak_bytes = length.map(|_| found.peak);
    Ok(vec![row.with("longest_length", "positions", length.map(|len| len as f64))])
}

/// What one length gave.
enum Tried {
    Fits(u64),
    TooBig,
    Ended(Ending),
}

/// The longest length found.
#[derive(Debug, PartialEq)]
struct Found {
    len: u64,
    peak: u64,
    tried: u64,
    /// What ended the search early; `len` is then only a lower bound.
    ending: Option<Ending>,
}

/// Doubles until it does not fit, then cuts the interval where a straight line through the last two peaks
/// meets the budget (or in the middle), down to [`GRAIN`] or 1 % of the length.
fn bisect(
    longest: u64,
    bytes: u64,
    mut search: impl FnMut(u64) -> Result<Tried, RunError>,
) -> Result<Found, RunError> {
    let mut found = Found { len: 0, peak: 0, tried: 0, ending: None };
    let mut before = (0, 0); // the fitting length before the last one, and its peak
    let mut above = None;
    let mut len = FIRST.min(longest);
    loop {
        found.tried += 1;
        match search(len)? {
            Tried::Fits(peak) => {
                before = (found.len, found.peak);
                (found.len, found.peak) = (len, peak);
            }
            Tried::TooBig => above = Some(len),
            Tried::Ended(ending) => {
                found.ending = Some(ending);
                return Ok(found);
            }
        }
        let Some(high) = above else {
            if found.len >= longest {
                return Ok(found);
            }
            len = (found.len * 2).min(longest);
            continue;
        };
        let gap = high - found.len;
        if gap <= 1 || (found.len > GRAIN && gap <= GRAIN.max(found.len / 100)) {
            return Ok(found);
        }
        len = guess(found.len, found.peak, before, high, bytes);
        // mechanisms with segments and blocks take round lengths only
        if found.len > GRAIN {
            len = (len / GRAIN * GRAIN).max(found.len / GRAIN * GRAIN + GRAIN);
        }
    }
}

/// The next length to try, strictly between `low` and `high`.
fn guess(low: u64, peak: u64, before: (u64, u64), high: u64, bytes: u64) -> u64 {
    let middle = low + (high - low) / 2;
    let slope = (peak.saturating_sub(before.1)) as f64 / (low.saturating_sub(before.0)).max(1) as f64;
    let straight = low as f64 + bytes.saturating_sub(peak) as f64 / slope.max(1.0);
    // Growth may be steeper than the line; staying a little below keeps the lower bound moving.
    let wanted = if before.0 > 0 && straight < high as f64 { (0.98 * straight) as u64 } else { middle };
    let even = if low >= 2 * GRAIN { wanted / GRAIN * GRAIN } else { wanted };
    let quarter = ((high - low) / 8).max(1);
    even.clamp(low + quarter, high - quarter.min(high - low - 1))
}

/// What is said of a finished cell.
fn tell(rows: &[Row]) -> String {
    rows.first().map_or_else(String::new, |row| match (row.metric.as_str(), row.value) {
        ("longest_length", Some(len)) => {
            let peak = row.peak_bytes.map_or_else(String::new, |peak| format!(" (peak {})", Bytes(peak)));
            let least = if row.outcome == Outcome::Ok { "" } else { "at least " };
            format!("{least}{len:.0} positions{peak}")
        }
        (_, Some(bytes)) => format!("peak {}", Bytes(bytes as u64)),
        _ => format!("{}: {}", row.outcome, row.error.clone().unwrap_or_default()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn find(longest: u64, bytes: u64, peak: impl Fn(u64) -> u64) -> Found {
        bisect(longest, bytes, |len| {
            Ok(if peak(len) <= bytes { Tried::Fits(peak(len)) } else { Tried::TooBig })
        })
        .unwrap()
    }

    #[test]
    fn linear_and_quadratic_growth_are_found_within_a_few_tries() {
        for (name, peak) in [
            ("linear", (|n| 1000 + 700 * n) as fn(u64) -> u64),
            ("quadratic", |n| 5000 + n * n / 3),
            ("mixed", |n| 1_000_000 + 400 * n + n * n / 50),
        ] {
            for bytes in [2_000_000, 50_000_000, 1_000_000_000] {
                let found = find(MAX_LEN, bytes, peak);
                let step = GRAIN.max(found.len / 100) + 1;
                assert!(
                    peak(found.len) <= bytes && peak(found.len + step) > bytes,
                    "{name} {bytes} {found:?}"
                );
                assert!(found.tried <= 24, "{name} {bytes} {found:?}");
            }
        }
    }

    #[test]
    fn bounds_of_the_search_are_kept() {
        assert_eq!(find(3000, 1 << 40, |n| n).len, 3000);
        assert_eq!(find(MAX_LEN, 10, |n| 100 * n).len, 0);
        let found = find(MAX_LEN, 1000, |n| 100 * n);
        assert_eq!(found.len, 10, "short lengths are found exactly");
    }

    #[test]
    fn what_ends_a_try_leaves_a_lower_bound() {
        let found = bisect(MAX_LEN, 1 << 40, |len| {
            let late = Ending::new(Outcome::Timeout, "ran past its time limit");
            Ok(if len > 4096 { Tried::Ended(late) } else { Tried::Fits(len) })
        });
        let found = found.unwrap();
        assert_eq!((found.len, found.ending.map(|ending| ending.outcome)), (4096, Some(Outcome::Timeout)));
    }
}
