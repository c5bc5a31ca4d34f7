//! `--fit`: the longest length whose step stays below a budget.
//!
//! A few short lengths say by which law the peak and the time of a step grow. A step is measured where the law meets the
//! budget, the law is corrected, and so on, until a length that was measured fits and a hundredth more would not.

use std::time::Instant;

use super::MemoryRequest;
use super::peak::{Peak, ask};
use crate::protocol::cell_runner::CellRunner;
use crate::protocol::definition::EstimateContext;
use crate::protocol::measuring::worker::{Answer, Bounds};
use crate::protocol::model_spec::ModelSpec;
use crate::run::RunError;
use crate::run::outcome::CellFailure;
use crate::run::plan::Cell;
use crate::term::clock;
use effattn_model::family::Architecture;
use effattn_record::config::units::Bytes;
use effattn_record::{Outcome, Row};

/// First length that is tried; three doublings of it give the law.
pub(super) const FIRST: u64 = 256;
const SHORT: usize = 3;
/// How many times the longest length that was measured the law is trusted.
const FAR: u64 = 8;
/// Most lengths that are chosen by the law; behind them the interval is halved.
const BY_LAW: usize = 9;
/// The law aims so far below the budget, and a length is found where this much more would not fit.
const AIM: f64 = 0.996;
const NEAR: f64 = 1.01;
/// Seconds that it takes to start a worker and build its model.
const START: f64 = 0.4;

/// What one length gave.
pub(super) enum Tried {
    /// Its peak, and the seconds that its steps took.
    Measured { peak: u64, seconds: f64 },
    /// It is above what a try may reach.
    TooBig,
    /// Neither.
    Ended(CellFailure),
}

/// A length that was measured.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Point {
    len: u64,
    peak: u64,
    seconds: f64,
}

/// The longest length found.
#[derive(Debug, PartialEq)]
pub(super) struct Found {
    /// The length, 0 where none fits.
    pub len: u64,
    pub peak: u64,
    /// Lengths that were tried.
    pub tried: u64,
    /// What ended the search early: there is no length then.
    pub ending: Option<CellFailure>,
}

/// Peak bytes as `a + b n + c n^2`.
#[derive(Clone, Copy, Debug)]
struct PeakModel {
    a: f64,
    b: f64,
    c: f64,
}

impl PeakModel {
    /// The law through the point nearest to `bytes` and those below it, none of them close to another: their differences
    /// would be chance.
    fn of(points: &[Point], bytes: u64) -> Option<Self> {
        let far = |point: &&Point| ((point.peak.max(1) as f64) / bytes.max(1) as f64).ln().abs();
        let base = points.iter().min_by(|a, b| far(a).total_cmp(&far(b)))?;
        let mut sorted: Vec<&Point> = points.iter().filter(|point| point.len <= base.len).collect();
        sorted.sort_by_key(|point| std::cmp::Reverse(point.len));
        let mut chosen: Vec<(f64, f64)> = Vec::new();
        for point in sorted {
            if chosen.last().is_none_or(|last| point.len as f64 <= 0.8 * last.0) {
                chosen.push((point.len as f64, point.peak as f64));
            }
        }
        let slope = |p: (f64, f64), q: (f64, f64)| (p.1 - q.1) / (p.0 - q.0);
        let (first, second) = (chosen.first()?, chosen.get(1)?);
        let steep = slope(*first, *second);
        let c = chosen.get(2).map_or(0.0, |third| (steep - slope(*second, *third)) / (first.0 - third.0));
        let c = c.max(0.0);
        let b = steep - c * (first.0 + second.0);
        let (b, c) = if b > 0.0 { (b, c) } else { (0.0, steep.max(0.0) / (first.0 + second.0)) };
        Some(Self { a: first.1 - b * first.0 - c * first.0 * first.0, b, c })
    }

    fn at(&self, len: f64) -> f64 {
        self.a + self.b * len + self.c * len * len
    }

    /// The length at which the law reaches `bytes`.
    fn meets(&self, bytes: f64) -> f64 {
        let left = bytes - self.a;
        match (self.b, self.c) {
            _ if left <= 0.0 => 0.0,
            (b, c) if c > 0.0 => 2.0 * left / (b + (b * b + 4.0 * c * left).sqrt()),
            (b, _) if b > 0.0 => left / b,
            _ => f64::INFINITY,
        }
    }
}

/// Lengths are multiples of this: mechanisms with segments and blocks take round lengths, and a hundredth is fine enough.
fn grain(len: u64) -> u64 {
    let hundredth = (len / 100).max(1);
    (1 << hundredth.ilog2()).min(64)
}

/// What is known on the way.
struct Search {
    longest: u64,
    bytes: u64,
    points: Vec<Point>,
    /// Longest that fits, and its peak.
    low: (u64, u64),
    /// Shortest that does not.
    high: Option<u64>,
}

impl Search {
    /// The next length to try; nothing where the longest is found.
    fn next(&self, tried: usize) -> Option<u64> {
        let (low, above) = (self.low.0, self.high.unwrap_or(self.longest.saturating_add(1)));
        let grain = grain(low);
        if above - low <= 1 || low > 0 && self.high.is_some() && above - low <= grain {
            return None;
        }
        if self.high.is_none() && self.points.len() < SHORT {
            return Some((low * 2).clamp(low + 1, self.longest));
        }
        let law = PeakModel::of(&self.points, self.bytes);
        if low > 0 && law.is_some_and(|law| law.at(low as f64 * NEAR) > self.bytes as f64) {
            return None;
        }
        let middle = low + (above - low) / 2;
        let by_law = law.filter(|_| tried < BY_LAW).map(|law| law.meets(self.bytes as f64 * AIM) as u64);
        let wanted = match self.high {
            // a length far above what the law said makes the law doubtful
            Some(high) => {
                let measured = self.points.iter().any(|point| point.len == high);
                by_law.filter(|len| measured || *len < high - (high - low) / 8).unwrap_or(middle)
            }
            None => by_law.unwrap_or(u64::MAX).min(low.saturating_mul(FAR)),
        };
        let even = wanted / grain * grain;
        let (least, most) = (low + grain.min(above - low - 1), above - 1);
        Some(even.clamp(least.min(most), most))
    }

    /// The `possible` length that is open still and nearest to `len`, rather below it than above.
    fn nearest(&self, len: u64, possible: impl Fn(u64) -> bool) -> Option<u64> {
        let above = self.high.unwrap_or(self.longest.saturating_add(1));
        let below = (self.low.0 + 1..=len).rev().find(|len| possible(*len));
        below.or_else(|| (len + 1..above.min(len.saturating_mul(2))).find(|len| possible(*len)))
    }
}

/// Looks for the longest length up to `longest` whose step stays below `bytes`, among those that are `possible`: mechanisms with
/// blocks take no others. `late` says why a length may not be tried, from the longest one that was measured and its seconds.
pub(super) fn search(
    (longest, bytes): (u64, u64),
    possible: impl Fn(u64) -> bool,
    late: impl Fn(u64, (u64, f64), Option<u64>) -> Option<CellFailure>,
    mut attempt: impl FnMut(u64) -> Result<Tried, RunError>,
) -> Result<Found, RunError> {
    let mut search = Search { longest, bytes, points: Vec::new(), low: (0, 0), high: None };
    let mut tried = 0;
    let mut next = Some(FIRST.min(longest));
    while let Some(len) = next {
        let last = search.points.iter().max_by_key(|point| point.len);
        let law =
            PeakModel::of(&search.points, bytes).map(|law| (law.meets(bytes as f64) as u64).min(longest));
        if let Some(ending) = last.and_then(|last| late(len, (last.len, last.seconds), law)) {
            return Ok(Found { len: 0, peak: 0, tried, ending: Some(ending) });
        }
        tried += 1;
        match attempt(len)? {
            Tried::Measured { peak, seconds } => {
                search.points.push(Point { len, peak, seconds });
                if peak <= bytes {
                    search.low = search.low.max((len, peak));
                } else {
                    search.high = Some(search.high.map_or(len, |high| high.min(len)));
                }
            }
            Tried::TooBig => search.high = Some(search.high.map_or(len, |high| high.min(len))),
            Tried::Ended(ending) => return Ok(Found { len: 0, peak: 0, tried, ending: Some(ending) }),
        }
        next = search.next(tried as usize).and_then(|len| search.nearest(len, &possible));
    }
    Ok(Found { len: search.low.0, peak: search.low.1, tried, ending: None })
}

/// What a length costs: the seconds of a try, from those of the steps of one that was measured, by the multiply-adds of both.
fn seconds(flops: &dyn Fn(u64) -> f64, len: u64, (known, took): (u64, f64)) -> f64 {
    START + took * flops(len) / flops(known).max(1.0)
}

/// Multiply-adds of a step of `request` by length; infinite where the mechanism takes no such length.
fn flops_of(request: &MemoryRequest) -> Result<impl Fn(u64) -> f64 + use<>, RunError> {
    let wrong = |error: effattn_model::family::ResolveError| RunError::Internal(error.to_string());
    let spec = request.spec.clone();
    let choice = spec.choice().map_err(wrong)?;
    request.with_len(FIRST.min(spec.len)).spec.resolve_measured(&choice).map_err(wrong)?;
    Ok(move |len: u64| {
        let spec = ModelSpec { len, ..spec.clone() };
        let flops = |resolved: Box<dyn Architecture>| spec.step_flops(resolved.flops(len as usize));
        spec.resolve_measured(&choice).map_or(f64::INFINITY, flops)
    })
}

/// Why a length is not tried.
fn too_late(timeout: f64, needed: f64, law: Option<u64>) -> CellFailure {
    let law = law.map_or_else(String::new, |law| format!("by its growth about {law} positions; "));
    let reason = format!(
        "{law}not confirmed, because the next try takes about {}: raise --timeout ({})",
        clock(needed),
        clock(timeout)
    );
    CellFailure::new(Outcome::Timeout, reason)
}

/// The longest length of cell `index`, as its row.
pub(super) fn fit(
    runner: &CellRunner,
    index: usize,
    asked: &MemoryRequest,
    bytes: u64,
) -> Result<Vec<Row>, RunError> {
    let cell = &runner.plan.cells[index];
    let (session, longest) = (&runner.session, asked.spec.len);
    let flops = flops_of(asked)?;
    let (start, timeout) = (Instant::now(), cell.timeout.unwrap_or(f64::INFINITY));
    let late = |len: u64, known: (u64, f64), law: Option<u64>| {
        let needed = seconds(&flops, len, known);
        let over = start.elapsed().as_secs_f64() + needed > timeout;
        over.then(|| too_late(timeout, needed, law))
    };
    let bounds = Bounds { memory_limit: room(bytes, session.memory_limit), ..Bounds::of(session) };
    let possible = |len: u64| flops(len).is_finite();
    let found = search((longest, bytes), possible, late, |len| {
        session.term.at(&format!("{} tries {len} positions", runner.plan.name(index)));
        let left = (timeout - start.elapsed().as_secs_f64()).max(0.0);
        attempt(ask(bounds, Some(left), &asked.with_len(len)))
    })?;
    let row = Row { n: Some(found.tried), ..cell.row.clone() };
    let (outcome, remark) = match (&found.ending, found.len) {
        (Some(ending), _) => (ending.outcome, Some(ending.reason.clone())),
        (None, 0) => (Outcome::Oom, Some(format!("not even length 1 fits {}", Bytes(bytes)))),
        (None, len) if !(len + 1..=longest).any(possible) => (Outcome::Ok, Some(BOUND.to_owned())),
        (None, _) => (Outcome::Ok, None),
    };
    let length = Some(found.len).filter(|len| *len > 0);
    let mut row = row.with_outcome(outcome, remark);
    row.len = length;
    row.peak_bytes = length.map(|_| found.peak);
    Ok(vec![row.with("longest_length", "positions", length.map(|len| len as f64))])
}

/// Remark of a row whose length is only the longest that was allowed.
const BOUND: &str = "the longest length that --len allows";

/// Bytes that a try may reach: a little more than the budget, so that a length just above it is measured, too.
fn room(bytes: u64, memory_limit: u64) -> u64 {
    (bytes / 4 * 5).saturating_add(32 << 20).min(memory_limit)
}

/// What the `answer` about a length says.
fn attempt(answer: Answer<Peak>) -> Result<Tried, RunError> {
    Ok(match answer? {
        Ok(peak) => Tried::Measured { peak: peak.peak_bytes, seconds: peak.seconds },
        Err(failure) if failure.outcome == Outcome::Oom => Tried::TooBig,
        Err(failure) => Tried::Ended(failure),
    })
}

/// Predicted seconds of a search: lengths whose step takes no time are tried (at long ones a multiply-add takes longer than
/// at short ones, because nothing stays in a cache), and the rest of the search is gone through with what their law says.
pub(super) fn price(
    cell: &Cell,
    asked: &MemoryRequest,
    bytes: u64,
    context: &EstimateContext,
) -> Result<f64, RunError> {
    let flops = flops_of(asked)?;
    let timeout = cell.timeout.unwrap_or(f64::INFINITY);
    let EstimateContext { launcher, memory_limit: limit, stop, .. } = context;
    let memory_limit = room(bytes, *limit);
    let bounds = Bounds { launcher, memory_limit, resident_limit: *limit, stop };
    let mut known: Vec<Point> = Vec::new();
    let mut total = 0.0;
    let late = |len: u64, known: (u64, f64), _: Option<u64>| {
        let over = seconds(&flops, len, known) > timeout;
        over.then(|| CellFailure::new(Outcome::Timeout, ""))
    };
    let possible = |len: u64| flops(len).is_finite();
    search((asked.spec.len, bytes), possible, late, |len| {
        let last = known.iter().max_by_key(|point| point.len).copied();
        let took = last.map(|last| seconds(&flops, len, (last.len, last.seconds)) - START);
        let (tried, real) = match (took, PeakModel::of(&known, bytes)) {
            (Some(took), Some(law)) if known.len() >= SHORT && took > AT_ONCE => {
                (Tried::Measured { peak: law.at(len as f64) as u64, seconds: took }, false)
            }
            _ => (attempt(ask(bounds, Some(PRICED), &asked.with_len(len)))?, true),
        };
        if let Tried::Measured { peak, seconds } = tried {
            if real {
                known.push(Point { len, peak, seconds });
            }
            total += START + seconds;
        }
        Ok(tried)
    })?;
    Ok(total)
}

/// Predicted seconds up to which a length is tried before the run.
const AT_ONCE: f64 = 0.2;

/// Most seconds of a try before the run.
const PRICED: f64 = 3.0;

#[cfg(test)]
mod tests {
    use super::*;
    use effattn_record::config::lists::MAX_LEN;

    fn any(_: u64) -> bool {
        true
    }

    fn find(longest: u64, bytes: u64, peak: impl Fn(u64) -> u64) -> Found {
        let late = |_: u64, _: (u64, f64), _: Option<u64>| None;
        search((longest, bytes), any, late, |len| {
            Ok(match peak(len) {
                peak if peak <= bytes / 4 * 5 => Tried::Measured { peak, seconds: 0.1 },
                _ => Tried::TooBig,
            })
        })
        .unwrap()
    }

    #[test]
    fn lengths_are_found_to_two_percent_within_a_few_tries() {
        for (name, peak) in [
            ("linear", (|n| 1_000 + 700 * n) as fn(u64) -> u64),
            ("quadratic", |n| 5_000 + n * n / 3),
            ("mixed", |n| 1_000_000 + 400 * n + n * n / 50),
            ("three halves", |n| 2_000 + (n as f64).powf(1.5) as u64),
            ("blocks of 64", |n| 100_000 + 900 * n.div_ceil(64) * 64),
            ("a step", |n| 50_000 + 300 * n + if n > 5000 { 3_000_000 } else { 0 }),
        ] {
            for bytes in [2_000_000, 50_000_000, 1_000_000_000] {
                let found = find(MAX_LEN, bytes, peak);
                let more = found.len + (found.len / 50).max(64);
                assert!(peak(found.len) <= bytes && peak(more) > bytes, "{name} {bytes} {found:?}");
                assert_eq!(found.peak, peak(found.len));
                assert!(found.tried <= 18, "{name} {bytes} {found:?}");
            }
        }
    }

    #[test]
    fn a_law_that_holds_needs_one_long_try() {
        let mut long = Vec::new();
        let late = |_: u64, _: (u64, f64), _: Option<u64>| None;
        let found = search((MAX_LEN, 1 << 30), any, late, |len| {
            long.push(len);
            Ok(Tried::Measured { peak: 3_000_000 + 5_000 * len, seconds: 0.1 })
        });
        let found = found.unwrap();
        long.retain(|len| *len > found.len / 2);
        assert_eq!((long.len(), found.ending), (1, None), "{long:?}");
    }

    #[test]
    fn bounds_of_the_search_are_kept() {
        assert_eq!(find(3000, 1 << 40, |n| n).len, 3000);
        assert_eq!(find(MAX_LEN, 10, |n| 100 * n).len, 0);
        let found = find(MAX_LEN, 1000, |n| 100 * n);
        assert_eq!(found.len, 10, "short lengths are found exactly");
    }

    #[test]
    fn only_lengths_that_the_mechanism_takes_are_tried() {
        for (block, longest, expected) in [(64, MAX_LEN, 1088), (256, MAX_LEN, 1024), (64, 1050, 1024)] {
            let mut tried = Vec::new();
            let possible = |len| len % block == 0;
            let late = |_: u64, _: (u64, f64), _: Option<u64>| None;
            let found = search((longest, 1_100_000), possible, late, |len| {
                tried.push(len);
                Ok(Tried::Measured { peak: 1000 * len, seconds: 0.1 })
            });
            assert_eq!(found.unwrap().len, expected);
            assert!(tried.iter().all(|len| len % block == 0) && tried.len() < 8, "{tried:?}");
        }
    }

    #[test]
    fn what_ends_the_search_leaves_no_length() {
        let never = |_: u64, _: (u64, f64), _: Option<u64>| None;
        let found = search((MAX_LEN, 1 << 40), any, never, |len| {
            let late = CellFailure::new(Outcome::Timeout, "ran past its time limit");
            Ok(if len > 4096 { Tried::Ended(late) } else { Tried::Measured { peak: len, seconds: 0.1 } })
        });
        let found = found.unwrap();
        assert_eq!((found.len, found.ending.map(|ending| ending.outcome)), (0, Some(Outcome::Timeout)));
    }

    #[test]
    fn a_length_that_takes_too_long_is_not_tried() {
        let mut tried = Vec::new();
        let late = |len: u64, (known, took): (u64, f64), law: Option<u64>| {
            let needed = took * (len as f64 / known as f64).powi(2);
            (needed > 60.0).then(|| CellFailure::new(Outcome::Timeout, format!("{law:?}")))
        };
        let found = search((MAX_LEN, 1 << 30), any, late, |len| {
            tried.push(len);
            Ok(Tried::Measured { peak: 10_000 * len, seconds: (len as f64 / 1000.0).powi(2) })
        });
        let ending = found.unwrap().ending.unwrap();
        assert_eq!(
            ending.reason,
            format!("Some({})", (1 << 30) / 10_000),
            "the law says what was not confirmed"
        );
        assert!(tried.iter().all(|len| *len <= 8192), "{tried:?}");
    }
}
