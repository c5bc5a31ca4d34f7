//! What stood around a turn of measuring, and which turns are put back because others disturbed them.
//!
//! A turn is judged by what is measured around it, never by its own times: leaving out turns then narrows no interval.

use serde::{Deserialize, Serialize};

use effattn_kernel::device::counters::Interference;
use effattn_record::stats::{median, quantile};

/// Share of the turns of a run whose calibration is faster than a fast one. The fastest of thousands is a stroke of luck: in a minute of them
/// on an idle machine it was 15 % below the median, and 99 of 100 were slow beside it.
pub const FAST: f64 = 0.05;
/// By how much the calibration of a turn may be slower than a fast one: so many times as much as the median one is, ...
const USUAL: f64 = 4.0;
/// ... within these shares, as a steady machine shows smaller disturbances; and as much as the median one in any case. Where the host is
/// slow most of the time (products between 200 and 330 us from one moment to the next), about half of the turns count and not one in ten.
const SLOWER: [f64; 2] = [0.04, 0.10];
/// A turn is disturbed where others took more than this share of its threads' time.
pub const TAKEN: f64 = 0.05;

/// What was measured around a turn.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Bracket {
    /// Seconds of the calibration before it.
    pub before: f64,
    /// Seconds of the calibration behind it.
    pub after: f64,
    /// Whether a calibration is the fastest round of the slowest thread. Where the system does not tell how long threads waited,
    /// and in runs of earlier versions, it is the mean of rounds of all threads, which is longer.
    #[serde(default)]
    pub by_thread: bool,
    /// What others took during it; none where the system has no such counters.
    #[serde(flatten)]
    pub interference: Option<Interference>,
    /// Processors that others took from its threads.
    #[serde(default)]
    pub taken: f64,
}

impl Bracket {
    /// Seconds of the slower calibration, by which the turn is judged.
    pub fn slower(&self) -> f64 {
        self.before.max(self.after)
    }

    /// The larger of both disturbances over what is allowed: above 1 the turn is put back.
    fn disturbance(&self, judge: &Judge) -> f64 {
        let slower = (self.slower() / judge.fast - 1.0) / judge.allowed();
        slower.max(self.taken / (TAKEN * judge.threads as f64))
    }

    /// Why the turn is put back, if it is.
    pub fn reason(&self, judge: &Judge) -> Option<String> {
        if self.taken > TAKEN * judge.threads as f64 {
            let host = self.interference.is_some_and(|it| it.steal > it.waited.unwrap_or(it.others));
            let who = if host { "the host" } else { "other programs" };
            return Some(format!("{who} took {:.2} processors", self.taken));
        }
        let times = self.slower() / judge.fast;
        judge
            .is_slow(self.slower())
            .then(|| format!("a calibration took {times:.2} times as long as a fast one"))
    }
}

/// A turn of a cell.
#[derive(Clone, Debug, PartialEq)]
pub struct Turn {
    /// Seconds of its steps.
    pub seconds: Vec<f64>,
    /// What was measured around it; none on devices other than the processor.
    pub bracket: Option<Bracket>,
}

/// What decides about turns: the slower calibrations of the run's turns so far, and the threads of a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Judge {
    /// Seconds of a fast calibration.
    pub fast: f64,
    /// Seconds of the median calibration.
    pub usual: f64,
    /// Threads of a step.
    pub threads: usize,
}

impl Judge {
    /// By the seconds of the slower calibration of every turn so far.
    pub fn of(calibrations: &[f64], threads: usize) -> Self {
        let [fast, usual] = [FAST, 0.5].map(|part| quantile(calibrations, part).unwrap_or(f64::INFINITY));
        Self { fast, usual, threads }
    }

    /// By which share a calibration may be slower than a fast one.
    fn allowed(&self) -> f64 {
        let ([least, most], usual) = (SLOWER, self.usual / self.fast - 1.0);
        (USUAL * usual).clamp(least, most).max(usual)
    }

    /// Whether a calibration of so many seconds says that the machine is slow.
    fn is_slow(&self, calibration: f64) -> bool {
        calibration > self.fast * (1.0 + self.allowed())
    }

    /// Why `turn` is put back, if it is.
    pub fn reason(&self, turn: &Turn) -> Option<String> {
        turn.bracket?.reason(self)
    }

    /// Which of `turns` count: those that nobody disturbed; where these have fewer than `least` steps, the least disturbed of
    /// the others, too, until there are as many. Where all are disturbed, half of them count, so that they stand for the others.
    pub fn kept(&self, turns: &[Turn], least: usize) -> Vec<bool> {
        let disturbance = |turn: &Turn| turn.bracket.map_or(0.0, |it| it.disturbance(self));
        let mut kept: Vec<bool> = turns.iter().map(|turn| self.reason(turn).is_none()).collect();
        let steps = |kept: &[bool]| -> usize {
            turns.iter().zip(kept).filter(|(_, kept)| **kept).map(|(turn, _)| turn.seconds.len()).sum()
        };
        let mut others: Vec<usize> = (0..turns.len()).filter(|&index| !kept[index]).collect();
        let all: usize = turns.iter().map(|turn| turn.seconds.len()).sum();
        let least = if steps(&kept) == 0 { least.max(all / 2) } else { least };
        others.sort_by(|a, b| disturbance(&turns[*a]).total_cmp(&disturbance(&turns[*b])));
        for index in others {
            if steps(&kept) >= least {
                break;
            }
            kept[index] = true;
        }
        kept
    }
}

/// A turn in `samples.jsonl`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TurnRecord {
    /// Number of its steps.
    pub steps: usize,
    /// What was measured around it.
    #[serde(flatten)]
    pub bracket: Bracket,
    /// Why it is disturbed, where it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disturbed: Option<String>,
    /// The measurements that were put back; empty where they stand among the values.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub put_back: Vec<f64>,
}

/// How steady the machine was during a run, by its calibrations.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Steadiness {
    /// Seconds of a calibration beside the turns that count, in the median.
    pub seconds: f64,
    /// Seconds of a fast one: beside a twentieth of all turns both are faster. Of the fastest one in runs of earlier versions.
    #[serde(alias = "best")]
    pub fast: f64,
    /// Half of the range of the middle 68 % of those beside the turns that count, as a share of the median.
    pub spread: f64,
    /// Processors that other programs kept busy on average, where the system tells.
    pub others: Option<f64>,
    /// Number of turns.
    pub turns: u64,
    /// Those that were put back and repeated.
    pub repeated: u64,
    /// Those that count although they were disturbed, because nothing better was to be had.
    pub disturbed: u64,
    /// Whether all calibrations are the fastest round of the slowest thread ([`Bracket::by_thread`]).
    #[serde(default)]
    pub by_thread: bool,
}

impl Steadiness {
    /// What `turns` say; none where there are none.
    pub fn of<'a>(turns: impl Iterator<Item = &'a TurnRecord>) -> Option<Self> {
        let turns: Vec<&TurnRecord> = turns.collect();
        let beside = |turn: &&TurnRecord| [turn.bracket.before, turn.bracket.after];
        let counts = |turn: &&&TurnRecord| turn.put_back.is_empty();
        let kept: Vec<f64> = turns.iter().filter(counts).flat_map(beside).collect();
        let all: Vec<f64> = turns.iter().map(|turn| turn.bracket.slower()).collect();
        let (seconds, fast) = (median(&kept)?, quantile(&all, FAST)?);
        let [low, high] = [0.16, 0.84].map(|part| quantile(&kept, part).unwrap_or(seconds));
        let others: Vec<f64> =
            turns.iter().filter_map(|turn| Some(turn.bracket.interference?.others)).collect();
        let repeated = turns.iter().filter(|turn| !turn.put_back.is_empty()).count();
        let disturbed = turns.iter().filter(|turn| turn.disturbed.is_some()).count();
        Some(Self {
            seconds,
            fast,
            spread: (high - low) / 2.0 / seconds,
            others: effattn_record::stats::mean(&others),
            turns: turns.len() as u64,
            repeated: repeated as u64,
            disturbed: (disturbed - repeated) as u64,
            by_thread: turns.iter().all(|turn| turn.bracket.by_thread),
        })
    }

    /// `disturbed: 14 of 40 turns repeated, 2 more counted as they were`; none where none was.
    pub fn note(&self) -> Option<String> {
        let Self { turns, repeated, disturbed, .. } = self;
        let more = match disturbed {
            0 => String::new(),
            count => format!("; {count} more could not be repeated within the budget and count"),
        };
        (repeated + disturbed > 0).then(|| format!("disturbed: {repeated} of {turns} turns repeated{more}."))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn turn(seconds: &[f64], before: f64, after: f64, taken: f64) -> Turn {
        Turn {
            seconds: seconds.to_vec(),
            bracket: Some(Bracket { before, after, by_thread: true, interference: None, taken }),
        }
    }

    #[test]
    fn a_turn_is_judged_by_what_stands_around_it() {
        let judge = Judge { fast: 0.003, usual: 0.0032, threads: 2 };
        let reason = |before, after, taken| judge.reason(&turn(&[9.0], before, after, taken));
        assert_eq!(reason(0.003, 0.0032, 0.05), None);
        let steady = Judge { usual: 0.00301, ..judge };
        let slower = steady.reason(&turn(&[9.0], 0.003, 0.0032, 0.05));
        assert_eq!(slower.unwrap(), "a calibration took 1.07 times as long as a fast one");
        assert_eq!(
            reason(0.003, 0.0045, 0.0).unwrap(),
            "a calibration took 1.50 times as long as a fast one"
        );
        assert_eq!(reason(0.003, 0.003, 0.4).unwrap(), "other programs took 0.40 processors");
        assert_eq!(judge.reason(&Turn { seconds: vec![1.0], bracket: None }), None);
    }

    #[test]
    fn what_is_allowed_follows_from_the_calibrations_of_the_run() {
        let allowed = |calibrations: &[f64]| (1e3 * Judge::of(calibrations, 1).allowed()).round();
        assert_eq!(allowed(&[1.0, 1.0, 1.0]), 40.0);
        assert_eq!(allowed(&[1.0, 1.0, 1.02, 1.02, 1.5]), 80.0);
        assert_eq!(allowed(&[1.0, 1.09, 1.5]), 100.0);
        let mut many = vec![1.0; 100];
        many.push(0.8);
        assert!(!Judge::of(&many, 1).is_slow(1.02), "one that was lucky makes no other one slow");
        let restless: Vec<f64> = (0..101).map(|index| 1.0 + f64::from(index) / 200.0).collect();
        let judge = Judge::of(&restless, 1);
        let slow = restless.iter().filter(|&&calibration| judge.is_slow(calibration)).count();
        assert_eq!(slow, 50, "what half of the turns have is no disturbance");
    }

    #[test]
    fn the_least_disturbed_turns_count_where_nothing_better_is_to_be_had() {
        let judge = Judge { fast: 1.0, usual: 1.0, threads: 1 };
        let turns = [turn(&[1.0], 1.0, 1.9, 0.0), turn(&[1.0], 1.0, 1.0, 0.0), turn(&[1.0], 1.0, 1.3, 0.0)];
        assert_eq!(judge.kept(&turns, 1), [false, true, false]);
        assert_eq!(judge.kept(&turns, 2), [false, true, true]);
        assert_eq!(judge.kept(&turns, 9), [true, true, true]);
        let all = [1.9, 1.4, 1.3, 1.8].map(|after| turn(&[1.0], 1.0, after, 0.0));
        assert_eq!(judge.kept(&all, 1), [false, true, true, false], "half of them where all are disturbed");
    }
}
