//! `memory`: exact peak bytes of one step over lengths and batch sizes (Transformer-LS Figure 3, right
//! half), one worker at a time; and with `--fit` the longest length that stays below a budget.

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::Task;
use super::grid::{Defaults, Grid, PlanError};
use super::measured_step::MeasuredStep;
use super::model_spec::{ModelSpec, settle};
use super::speed::plan::points;
use crate::config::grid::{Batches, Lengths, MAX_LEN, Modes, Seeds};
use crate::config::settings::Settings;
use crate::config::units::{Bytes, Seconds};
use crate::device::alloc;
use crate::device::machine::Resident;
use crate::record::{Outcome, Pass, Row};
use crate::run::RunError;
use crate::run::outcome::Ending;
use crate::run::plan::{Cell, Plan};
use crate::run::session::Session;
use crate::run::worker::{Heard, Link, Worker};

/// Steps that are looked at: the second one finds every cache filled.
const STEPS: usize = 2;
/// Lengths found by `--fit` are multiples of this.
const GRAIN: u64 = 64;
/// First length that `--fit` tries.
const FIRST: u64 = 512;

/// What the worker of a cell is asked.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Request {
    /// The model and its step.
    pub spec: ModelSpec,
    /// The cell ends as `timeout` after so many seconds.
    pub timeout: f64,
    /// Bytes that a step may reach, where the longest length is looked for.
    pub fit: Option<u64>,
}

/// What the worker answers.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
struct Peak {
    /// Highest live bytes above the empty process.
    peak_bytes: u64,
    /// Growth of the highest resident size, counted by the system.
    resident_bytes: u64,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "say", rename_all = "snake_case")]
enum Answer {
    Peak(Peak),
    Ended { outcome: Outcome, reason: String },
}

/// What `memory` does where nothing is said.
pub fn defaults(fit: bool) -> Defaults {
    let settings = Settings {
        len: Some(Lengths(if fit { vec![MAX_LEN] } else { vec![1024, 2048, 4096, 8192] })),
        batch: Some(Batches(vec![1])),
        seeds: Some(Seeds(vec![0])),
        mode: Some(Modes(vec![Pass::Infer, Pass::Train])),
        preset: Some("lra-repo".to_owned()),
        timeout: Some(Seconds(if fit { 60.0 } else { 600.0 })),
        ..Settings::NONE
    };
    Defaults { protocol: "memory", settings, models: "full,linear,cosformer,ls" }
}

/// The cells of `grid`. With `fit`, lengths are bounds of the search.
///
/// # Errors
/// Settings that nobody can run.
pub fn cells(
    grid: &Grid,
    fit: Option<Bytes>,
    threads: usize,
) -> Result<Vec<(Cell, Option<Request>)>, PlanError> {
    let mut cells = Vec::new();
    for pick in &grid.picks {
        let points = points(&pick.settings);
        let longest = points.iter().map(|point| point.0).max();
        for (len, batch, pass, seed) in points {
            if fit.is_some() && Some(len) != longest {
                continue; // with a budget, the longest length only bounds the search
            }
            let spec = ModelSpec::new(pick, len, batch, pass, seed)?;
            let probe = ModelSpec { len: if fit.is_some() { FIRST.min(len) } else { len }, ..spec.clone() };
            let (resolved, reason) = settle(pick, |choice| probe.measured(choice))?;
            let mut row = probe.row("memory", threads, resolved.as_deref());
            row.suite = grid.suite.as_ref().map(|suite| suite.name.clone());
            row.published = pick.published("peak_memory", pass, len);
            let key = match fit {
                Some(bytes) => {
                    row = Row { len: None, flops: None, flops_2x: None, core_macs: None, ..row };
                    format!("{} b{batch} {pass} s{seed} fit {bytes}", spec.model)
                }
                None => spec.key(),
            };
            let step = row.flops.map_or(0.0, |flops| probe.step_flops(flops) / (8e9 * threads as f64));
            let seconds = if fit.is_some() { 20.0 } else { 0.3 + STEPS as f64 * step };
            let timeout = pick.settings.timeout.map_or(600.0, |time| time.0);
            let request = Request { spec, timeout, fit: fit.map(|bytes| bytes.0) };
            let (request, seconds) = if reason.is_none() { (Some(request), seconds) } else { (None, 0.0) };
            row.error = reason;
            let json = serde_json::to_value(&request).map_err(PlanError::new)?;
            cells.push(((len, batch, pass, seed), (Cell { key, row, request: json, seconds }, request)));
        }
    }
    cells.sort_by_key(|(place, _)| *place);
    Ok(cells.into_iter().map(|(_, cell)| cell).collect())
}

/// Runs every cell of `plan` that has no rows yet, one at a time.
///
/// # Errors
/// Ctrl-C, a full disk: what is finished stays.
pub fn conduct(plan: &Plan, requests: &[Option<Request>], session: &mut Session) -> Result<(), RunError> {
    for (cell, request) in plan.cells.iter().zip(requests) {
        if session.is_done(cell) {
            session.term.advance(cell.seconds, &format!("{}: done before", cell.key));
            continue;
        }
        session.term.at(&cell.key);
        let rows = match request {
            None => {
                let reason = cell.row.error.clone().unwrap_or_default();
                ended(&cell.row, &Ending::new(Outcome::Unsupported, reason))
            }
            Some(request) => {
                let measured = match request.fit {
                    Some(bytes) => fit(cell, request, bytes, session),
                    None => one(plan, cell, request, session),
                };
                match measured {
                    Ok(rows) => rows,
                    Err(error) => {
                        let ending = Ending::new(Outcome::Interrupted, "stopped before it was finished");
                        session.pass_over(cell, ended(&cell.row, &ending));
                        return Err(error);
                    }
                }
            }
        };
        let line = tell(cell, &rows, (session.finished() + 1, plan.cells.len()));
        session.record(cell, rows, Vec::new())?;
        session.term.advance(cell.seconds, &line);
    }
    Ok(())
}

fn ended(row: &Row, ending: &Ending) -> Vec<Row> {
    vec![row.with("peak_memory", "B", None).ended(ending.outcome, Some(ending.reason.clone()))]
}

fn one(plan: &Plan, cell: &Cell, request: &Request, session: &mut Session) -> Result<Vec<Row>, RunError> {
    let same = |row: &Row| {
        (row.model.clone(), row.variant.clone(), row.batch, row.pass, row.seed)
            == (
                cell.row.model.clone(),
                cell.row.variant.clone(),
                cell.row.batch,
                cell.row.pass,
                cell.row.seed,
            )
    };
    let shorter = plan.cells.iter().filter(|other| same(&other.row) && other.row.len < cell.row.len);
    for other in shorter {
        let outcome = session.outcome(&other.key);
        if let Some(outcome @ (Outcome::Oom | Outcome::Timeout)) = outcome {
            let reason = format!("{outcome} at length {}", other.row.len.unwrap_or(0));
            return Ok(ended(&cell.row, &Ending::new(Outcome::Implied, reason)));
        }
    }
    Ok(match probe(request, session.memory_limit, session)? {
        Ok(peak) => rows(&cell.row, peak),
        Err(ending) => ended(&cell.row, &ending),
    })
}

fn rows(row: &Row, peak: Peak) -> Vec<Row> {
    let row = Row { peak_bytes: Some(peak.peak_bytes), n: Some(STEPS as u64), ..row.clone() };
    let row = row.ended(Outcome::Ok, None);
    let resident = Row { published: None, ..row.clone() };
    vec![
        row.with("peak_memory", "B", Some(peak.peak_bytes as f64)),
        resident.with("resident_memory", "B", Some(peak.resident_bytes as f64)),
    ]
}

/// Runs one worker: its peak, or how it ended instead.
fn probe(request: &Request, limit: u64, session: &Session) -> Result<Result<Peak, Ending>, RunError> {
    let task = Task::Memory { memory_limit: limit, request: request.clone() };
    let mut worker = Worker::start(&session.launcher, &task)?;
    let timeout = Duration::try_from_secs_f64(request.timeout).unwrap_or(Duration::MAX);
    let deadline = Instant::now().checked_add(timeout);
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
///
/// # Errors
/// The parent is gone.
pub fn work(link: &Link, request: &Request, text: &[u8]) -> anyhow::Result<()> {
    alloc::return_pages();
    let mut resident = Resident::default();
    let before = resident.own();
    let measure = || -> Result<MeasuredStep, Ending> {
        let mut step = MeasuredStep::open(&request.spec, text)?;
        step.reset_peak();
        for _ in 0..STEPS {
            step.step()?;
        }
        Ok(step)
    };
    let answer = match measure() {
        Ok(step) => match step.peak_bytes() {
            Some(peak_bytes) => {
                let resident_bytes = resident.own_peak().saturating_sub(before);
                Answer::Peak(Peak { peak_bytes, resident_bytes })
            }
            None => Answer::Ended {
                outcome: Outcome::Unsupported,
                reason: format!("memory is not counted on {}", request.spec.device),
            },
        },
        Err(ending) => Answer::Ended { outcome: ending.outcome, reason: ending.reason },
    };
    Ok(link.send(&answer)?)
}

/// Looks for the longest length whose step stays below `bytes`.
fn fit(cell: &Cell, request: &Request, bytes: u64, session: &mut Session) -> Result<Vec<Row>, RunError> {
    let bytes = bytes.min(session.memory_limit);
    let longest = request.spec.len;
    let search = |len: u64| -> Result<Tried, RunError> {
        let request = Request { spec: ModelSpec { len, ..request.spec.clone() }, ..request.clone() };
        // The limit counts the empty process too, which the peak does not: a little more is allowed here.
        Ok(match probe(&request, bytes.saturating_add(32 << 20), session)? {
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

/// A line per finished cell.
fn tell(cell: &Cell, rows: &[Row], (number, of): (usize, usize)) -> String {
    let what = rows.first().map_or_else(String::new, |row| match (row.metric.as_str(), row.value) {
        ("longest_length", Some(len)) => {
            let peak = row.peak_bytes.map_or_else(String::new, |peak| format!(" (peak {})", Bytes(peak)));
            let least = if row.outcome == Outcome::Ok { "" } else { "at least " };
            format!("{least}{len:.0} positions{peak}")
        }
        (_, Some(bytes)) => format!("peak {}", Bytes(bytes as u64)),
        _ => format!("{}: {}", row.outcome, row.error.clone().unwrap_or_default()),
    });
    format!("[{number}/{of}] {}: {what}", cell.key)
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
