//! Who computes when: cells of one length, batch and pass take turns (A B B A), so that what disturbs the
//! machine disturbs all of them alike.
//!
//! As many cells are alive at once as fit the memory limit together. A cell that finds too little room
//! beside others is tried again in a later wave, alone at first; only then its `oom` counts.
//!
//! A turn that others disturbed ([`Judge`]) is put back and repeated: for as much time again as the cell may spend, and for
//! [`PATIENCE`] times as much where others pause now and then.

use crate::run::RunError;
use crate::run::outcome::CellFailure;
use crate::run::turn::{Judge, Turn};

/// Turns in which a cell spends its time budget.
const TURNS: f64 = 4.0;
/// Share of a turn's length once one of a cell was disturbed: shorter ones fit into the pauses of others.
const SHORTER: f64 = 0.25;
/// How many times a cell's time budget goes to turns that are put back once one was not disturbed: a neighbour that works half of
/// the time leaves about a third of the shorter turns alone.
const PATIENCE: f64 = 4.0;
/// Most workers alive at once.
const ALIVE: usize = 16;

/// What a cell may spend.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Budget {
    /// Measuring time in seconds.
    pub seconds: f64,
    /// Fewest samples, even if the time is over.
    pub min_runs: usize,
    /// Most samples.
    pub runs: usize,
    /// Most seconds of turns that are put back and repeated, where that is less than what the others may take.
    pub repeats: f64,
}

/// How a start went.
#[derive(Debug)]
pub enum Started {
    /// Warm, and holding so many bytes.
    Ready {
        /// Bytes it may reach again.
        held: u64,
    },
    /// Ended before its first sample. `Outcome::Oom` counts only with the whole memory limit.
    Ended(CellFailure),
}

/// How a turn went.
#[derive(Debug)]
pub enum TurnResult {
    /// Its steps, and the bytes the cell holds now.
    Steps(Turn, u64),
    /// Ended.
    Ended(CellFailure),
}

/// The cells' workers; replaced by a fake in tests.
pub trait CellWorkers {
    /// Starts cell `cell`, which may reach `limit` bytes, and warms it up.
    fn start(&mut self, cell: usize, limit: u64) -> Result<Started, RunError>;
    /// Lets `cell` step for `seconds`, at least once and at most `runs` times. Its limit stays.
    fn turn(&mut self, cell: usize, seconds: f64, runs: usize) -> Result<TurnResult, RunError>;
    /// What decides about turns now; none where nothing is calibrated.
    fn judge(&self) -> Option<Judge>;
    /// Ends `cell`, whose samples are complete or which ended by itself.
    fn done(
        &mut self,
        cell: usize,
        samples: CellSamples,
        ending: Option<CellFailure>,
    ) -> Result<(), RunError>;
    /// Takes `cell` back without a result: it will be started again.
    fn requeue(&mut self, cell: usize);
}

/// The turns of a cell, and which of them count.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CellSamples {
    /// All turns in order.
    pub turns: Vec<Turn>,
    /// Whether each counts.
    pub kept: Vec<bool>,
}

impl CellSamples {
    fn of(turns: Vec<Turn>, judge: Option<Judge>, least: usize) -> Self {
        let kept = judge.map_or_else(|| vec![true; turns.len()], |judge| judge.kept(&turns, least));
        Self { turns, kept }
    }

    /// Seconds of the steps that count.
    pub fn values(&self) -> Vec<f64> {
        let kept = self.turns.iter().zip(&self.kept).filter(|(_, kept)| **kept);
        kept.flat_map(|(turn, _)| &turn.seconds).copied().collect()
    }
}

struct ActiveCell {
    cell: usize,
    reserved_bytes: u64,
    turns: Vec<Turn>,
}

impl ActiveCell {
    /// Whether the cell has what `budget` asks for, or has repeated for as long as it may.
    fn is_complete(&self, budget: &Budget, judge: Option<Judge>) -> bool {
        let calm = |turn: &&Turn| judge.is_none_or(|judge| judge.reason(turn).is_none());
        let sum = |turns: &[&Turn]| {
            let times = turns.iter().flat_map(|turn| &turn.seconds);
            times.fold((0, 0.0), |(count, sum), time| (count + 1, sum + time))
        };
        let all: Vec<&Turn> = self.turns.iter().collect();
        let ((n, spent), (calm, calmly)) =
            (sum(&all), sum(&all.into_iter().filter(calm).collect::<Vec<_>>()));
        let enough =
            |n: usize, spent: f64| n >= budget.runs || (n >= budget.min_runs && spent >= budget.seconds);
        let step = spent / n.max(1) as f64;
        let usual = budget.seconds.max(budget.min_runs as f64 * step).min(budget.runs as f64 * step);
        let patience = if calm > 0 { PATIENCE } else { 1.0 };
        enough(calm, calmly) || (enough(n, spent) && spent - calmly >= (patience * usual).min(budget.repeats))
    }
}

/// Runs `cells` within `limit` bytes.
pub fn run(
    cells: &[usize],
    budget: impl Fn(usize) -> Budget,
    limit: u64,
    bench: &mut impl CellWorkers,
) -> Result<(), RunError> {
    let mut waiting = cells.to_vec();
    while !waiting.is_empty() {
        let (mut alive, later) = admit(&waiting, limit, bench)?;
        waiting = later;
        let mut forward = true;
        while !alive.is_empty() {
            let mut order: Vec<usize> = alive.iter().map(|alive| alive.cell).collect();
            if !forward {
                order.reverse();
            }
            forward = !forward;
            for cell in order {
                step(cell, &mut alive, &budget, bench, &mut waiting)?;
            }
        }
    }
    Ok(())
}

/// Starts what fits together; the rest waits.
fn admit(
    waiting: &[usize],
    limit: u64,
    bench: &mut impl CellWorkers,
) -> Result<(Vec<ActiveCell>, Vec<usize>), RunError> {
    let (mut alive, mut later) = (Vec::<ActiveCell>::new(), Vec::new());
    for &cell in waiting {
        let used: u64 = alive.iter().map(|alive| alive.reserved_bytes).sum();
        let free = limit.saturating_sub(used);
        if alive.len() >= ALIVE || (!alive.is_empty() && free < limit / 16) {
            later.push(cell);
            continue;
        }
        match bench.start(cell, free)? {
            Started::Ready { held } => {
                alive.push(ActiveCell { cell, reserved_bytes: held, turns: Vec::new() })
            }
            Started::Ended(ending) if is_oom(&ending) && !alive.is_empty() => {
                bench.requeue(cell);
                later.push(cell);
            }
            Started::Ended(ending) => bench.done(cell, CellSamples::default(), Some(ending))?,
        }
    }
    Ok((alive, later))
}

/// One turn of `cell`.
fn step(
    cell: usize,
    alive: &mut Vec<ActiveCell>,
    budget: &impl Fn(usize) -> Budget,
    bench: &mut impl CellWorkers,
    waiting: &mut Vec<usize>,
) -> Result<(), RunError> {
    let others: u64 = alive.iter().filter(|alive| alive.cell != cell).map(|alive| alive.reserved_bytes).sum();
    let Some(at) = alive.iter().position(|alive| alive.cell == cell) else { return Ok(()) };
    let budget = budget(cell);
    let judge = bench.judge();
    let calm = |turn: &&Turn| judge.is_none_or(|judge| judge.reason(turn).is_none());
    let taken: usize = alive[at].turns.iter().filter(calm).map(|turn| turn.seconds.len()).sum();
    let left = budget.runs.saturating_sub(taken).max(1);
    let disturbed = alive[at].turns.iter().any(|turn| !calm(&turn));
    let length = if disturbed { SHORTER } else { 1.0 } * budget.seconds / TURNS;
    match bench.turn(cell, length, left)? {
        TurnResult::Steps(turn, held) => {
            let alive_cell = &mut alive[at];
            alive_cell.turns.push(turn);
            alive_cell.reserved_bytes = held;
            let judge = bench.judge();
            if alive_cell.is_complete(&budget, judge) {
                let turns = alive.remove(at).turns;
                bench.done(cell, CellSamples::of(turns, judge, budget.min_runs), None)?;
            }
        }
        TurnResult::Ended(ending) if is_oom(&ending) && others > 0 => {
            alive.remove(at);
            bench.requeue(cell);
            waiting.push(cell);
        }
        TurnResult::Ended(ending) => {
            let turns = alive.remove(at).turns;
            bench.done(cell, CellSamples::of(turns, bench.judge(), budget.min_runs), Some(ending))?;
        }
    }
    Ok(())
}

fn is_oom(failure: &CellFailure) -> bool {
    failure.outcome == effattn_record::Outcome::Oom
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::turn::Bracket;
    use effattn_record::Outcome;

    /// Cells that need `needs` bytes and whose steps take one second; some turns of the run are disturbed.
    #[derive(Default)]
    struct Fake {
        needs: Vec<u64>,
        log: Vec<String>,
        breaks_at: Option<(usize, usize)>,
        disturbed: Vec<usize>,
        turns: usize,
    }

    fn name(cell: usize) -> char {
        (b'A' + cell as u8) as char
    }

    impl CellWorkers for Fake {
        fn start(&mut self, cell: usize, limit: u64) -> Result<Started, RunError> {
            self.log.push(format!("+{}", name(cell)));
            let held = self.needs[cell];
            Ok(if held > limit {
                Started::Ended(CellFailure::new(Outcome::Oom, "too big"))
            } else {
                Started::Ready { held }
            })
        }

        fn turn(&mut self, cell: usize, seconds: f64, runs: usize) -> Result<TurnResult, RunError> {
            self.log.push(name(cell).to_string());
            if let Some((breaking, left)) = &mut self.breaks_at
                && *breaking == cell
            {
                if *left == 0 {
                    return Ok(TurnResult::Ended(CellFailure::new(Outcome::Failed, "broke")));
                }
                *left -= 1;
            }
            let count = (seconds.ceil() as usize).clamp(1, runs);
            self.turns += 1;
            let taken = if self.disturbed.contains(&self.turns) { 0.5 } else { 0.0 };
            let bracket =
                Some(Bracket { before: 1.0, after: 1.0, by_thread: true, interference: None, taken });
            Ok(TurnResult::Steps(Turn { seconds: vec![1.0; count], bracket }, self.needs[cell]))
        }

        fn judge(&self) -> Option<Judge> {
            Some(Judge { fast: 1.0, usual: 1.0, threads: 1 })
        }

        fn done(
            &mut self,
            cell: usize,
            samples: CellSamples,
            ending: Option<CellFailure>,
        ) -> Result<(), RunError> {
            let samples = samples.values();
            let how = ending.map_or("ok", |ending| ending.outcome.word());
            self.log.push(format!("{}:{how}:{}", name(cell), samples.len()));
            Ok(())
        }

        fn requeue(&mut self, cell: usize) {
            self.log.push(format!("-{}", name(cell)));
        }
    }

    fn log(needs: &[u64], budget: Budget, breaks_at: Option<(usize, usize)>) -> String {
        let mut fake = Fake { needs: needs.to_vec(), breaks_at, ..Fake::default() };
        let cells: Vec<usize> = (0..needs.len()).collect();
        run(&cells, |_| budget, 100, &mut fake).unwrap();
        fake.log.join(" ")
    }

    const FOUR: Budget = Budget { seconds: 4.0, min_runs: 3, runs: 100, repeats: 4.0 };

    #[test]
    fn turns_go_forth_and_back() {
        assert_eq!(log(&[10, 10], FOUR, None), "+A +B A B B A A B B B:ok:4 A A:ok:4");
    }

    #[test]
    fn what_does_not_fit_beside_others_waits_for_its_own_wave() {
        let short = Budget { seconds: 1.0, min_runs: 1, runs: 1, repeats: 0.0 };
        assert_eq!(log(&[60, 60, 20], short, None), "+A +B -B +C A A:ok:1 C C:ok:1 +B B B:ok:1");
        assert_eq!(log(&[101, 10], short, None), "+A A:oom:0 +B B B:ok:1");
        assert_eq!(log(&[10, 101], short, None), "+A +B -B A A:ok:1 +B B:oom:0");
        assert_eq!(log(&[99, 1], short, None), "+A A A:ok:1 +B B B:ok:1");
    }

    #[test]
    fn the_minimum_of_runs_outlasts_the_time_and_the_maximum_ends_it() {
        let slow = Budget { seconds: 0.5, min_runs: 3, runs: 100, repeats: 0.0 };
        assert_eq!(log(&[1], slow, None), "+A A A A A:ok:3");
        let few = Budget { seconds: 100.0, min_runs: 1, runs: 5, repeats: 0.0 };
        assert_eq!(log(&[1], few, None), "+A A A:ok:5");
    }

    #[test]
    fn a_cell_that_breaks_leaves_the_others_alone() {
        let broken = log(&[1, 1], FOUR, Some((0, 1)));
        assert_eq!(broken, "+A +B A B B A A:failed:1 B B B:ok:4");
    }

    fn disturbed(turns: &[usize], budget: Budget) -> String {
        let mut fake = Fake { needs: vec![1], disturbed: turns.to_vec(), ..Fake::default() };
        run(&[0], |_| budget, 100, &mut fake).unwrap();
        fake.log.join(" ")
    }

    #[test]
    fn a_disturbed_turn_is_repeated_within_the_budget() {
        assert_eq!(disturbed(&[2], FOUR), "+A A A A A A A:ok:4");
        let all: Vec<usize> = (1..100).collect();
        assert_eq!(disturbed(&all, FOUR), "+A A A A A A:ok:3", "nothing better is to be had");
        assert_eq!(disturbed(&[1, 2, 3], FOUR), "+A A A A A A A A A:ok:4");
        let none = Budget { repeats: 0.0, ..FOUR };
        assert_eq!(disturbed(&[2], none), "+A A A A A A:ok:3", "no repeats");
    }
}
