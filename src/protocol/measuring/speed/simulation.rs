//! Intervals under a seeded neighbour: recorded steps are drawn again, a neighbour burns a processor at random half of the time,
//! and turns are taken, judged and repeated as in a run.

use super::interleave::{self, Budget, CellSamples, CellWorkers, Started, TurnResult};
use crate::run::RunError;
use crate::run::outcome::CellFailure;
use crate::run::turn::{Bracket, Judge, Turn};
use effattn_kernel::device::counters::Interference;
use effattn_record::file;
use effattn_record::stats::{Summary, median};

/// SplitMix64.
struct Draw(u64);

impl Draw {
    fn uniform(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    }

    fn normal(&mut self) -> f64 {
        (-2.0 * (1.0 - self.uniform()).ln()).sqrt() * (std::f64::consts::TAU * self.uniform()).cos()
    }
}

/// Seconds of the steps of the cells of a committed run with at least twenty of them.
fn recorded() -> Vec<Vec<f64>> {
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/reproduction/results/growth/speed");
    let runs = std::fs::read_dir(root).unwrap().map(|entry| entry.unwrap().path());
    let text = runs.filter_map(|run| file::read_to_string(&run.join("samples.jsonl")).ok()).next().unwrap();
    let cells = text.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
    let cells = cells.map(|cell| serde_json::from_value::<Vec<f64>>(cell["values"].clone()).unwrap());
    let cells: Vec<Vec<f64>> = cells.filter(|values| values.len() >= 20).collect();
    assert!(cells.len() >= 20);
    cells
}

/// Seconds of a calibration on the idle machine, and its relative deviation.
const CALIBRATION: f64 = 0.003;
const NOISE: f64 = 0.02;
/// How many times as long a step on two threads takes beside the neighbour, as measured: who loses its processor is waited for.
const SLOWED: f64 = 2.0;
/// Mean seconds of the neighbour's work and pauses.
const BURST: f64 = 0.5;

/// A machine of two processors with a clock of its own, on which one cell steps.
struct Machine<'a> {
    draw: Draw,
    steps: &'a [f64],
    neighbour: bool,
    judged: bool,
    now: f64,
    /// The neighbour works until then, or pauses.
    until: f64,
    works: bool,
    slower: Vec<f64>,
    samples: Vec<f64>,
    turns: [usize; 2],
}

impl Machine<'_> {
    /// Lets `seconds` of work pass; seconds that it takes, and those of the neighbour's work meanwhile.
    fn pass(&mut self, seconds: f64) -> (f64, f64) {
        let (start, mut left, mut beside) = (self.now, seconds, 0.0);
        while left > 0.0 {
            if self.now >= self.until {
                self.works = self.neighbour && !self.works;
                self.until = self.now - BURST * (1.0 - self.draw.uniform()).ln();
            }
            let pace = if self.works { SLOWED } else { 1.0 };
            let span = (left * pace).min(self.until - self.now);
            self.now += span;
            left -= span / pace;
            beside += if self.works { span } else { 0.0 };
            if left < 1e-12 {
                break;
            }
        }
        (self.now - start, beside)
    }

    fn calibration(&mut self) -> f64 {
        // the fastest round of a thread feels the neighbour only where it is slowed, too
        let seconds = CALIBRATION * (NOISE * self.draw.normal()).exp();
        self.pass(seconds);
        seconds
    }
}

impl CellWorkers for Machine<'_> {
    fn start(&mut self, _: usize, _: u64) -> Result<Started, RunError> {
        self.slower = (0..5).map(|_| self.calibration()).collect();
        Ok(Started::Ready { held: 1 })
    }

    fn turn(&mut self, _: usize, seconds: f64, runs: usize) -> Result<TurnResult, RunError> {
        // other cells have their turns meanwhile
        let others = 3.0 * self.draw.uniform();
        self.pass(others);
        let before = self.calibration();
        let (start, mut beside, mut times) = (self.now, 0.0, Vec::new());
        while times.is_empty() || (self.now - start < seconds && times.len() < runs) {
            let step = self.steps[(self.draw.uniform() * self.steps.len() as f64) as usize];
            let (took, works) = self.pass(step);
            times.push(took);
            beside += works;
        }
        let spent = self.now - start;
        let others = beside / spent;
        let interference =
            Interference { seconds: spent, others, waited: Some(others), ..Interference::default() };
        let (after, taken) = (self.calibration(), interference.taken(2, 2));
        let bracket = Bracket { before, after, by_thread: true, interference: Some(interference), taken };
        self.slower.push(bracket.slower());
        Ok(TurnResult::Steps(Turn { seconds: times, bracket: Some(bracket) }, 1))
    }

    fn judge(&self) -> Option<Judge> {
        self.judged.then(|| Judge::of(&self.slower, 2))
    }

    fn done(&mut self, _: usize, samples: CellSamples, _: Option<CellFailure>) -> Result<(), RunError> {
        self.turns[0] += samples.turns.len();
        self.turns[1] += samples.kept.iter().filter(|kept| !**kept).count();
        self.samples = samples.values();
        Ok(())
    }

    fn requeue(&mut self, _: usize) {}
}

/// What many measured cells say.
struct Told {
    /// Share of the intervals that hold the median of the recorded steps.
    coverage: f64,
    /// Largest deviation of a measured median from it, of nineteen in twenty cells.
    off: f64,
    /// Share of the turns that were repeated.
    repeated: f64,
}

fn told(neighbour: bool, judged: bool) -> Told {
    const CELLS: usize = 1500;
    let cells = recorded();
    let budget = Budget { seconds: 2.0, min_runs: 3, runs: 1000, repeats: f64::INFINITY };
    let (mut held, mut off, mut turns) = (0, Vec::new(), [0, 0]);
    for index in 0..CELLS {
        let steps = &cells[index % cells.len()];
        let mut machine = Machine {
            draw: Draw(index as u64),
            steps,
            neighbour,
            judged,
            now: 0.0,
            until: 0.0,
            works: false,
            slower: Vec::new(),
            samples: Vec::new(),
            turns: [0, 0],
        };
        interleave::run(&[0], |_| budget, 2, &mut machine).unwrap();
        let summary = Summary::of(&machine.samples).unwrap();
        let real = median(steps).unwrap();
        held += usize::from(summary.median_interval.unwrap().contains(real));
        off.push((summary.median / real - 1.0).abs());
        turns = [turns[0] + machine.turns[0], turns[1] + machine.turns[1]];
    }
    off.sort_by(f64::total_cmp);
    let share = |part: usize, of: usize| part as f64 / of as f64;
    Told { coverage: share(held, CELLS), off: off[CELLS * 19 / 20], repeated: share(turns[1], turns[0]) }
}

#[test]
fn intervals_hold_beside_a_neighbour_as_they_do_on_an_idle_machine() {
    let (idle, beside, naive) = (told(false, true), told(true, true), told(true, false));
    let text = |told: &Told| {
        format!("coverage {:.3}, off {:.3}, repeated {:.3}", told.coverage, told.off, told.repeated)
    };
    let all = format!("idle: {}; neighbour: {}; not judged: {}", text(&idle), text(&beside), text(&naive));
    // of 1500 intervals a share of 0.95 is known to 0.006
    assert!(idle.coverage >= 0.94 && idle.repeated < 0.05, "{all}");
    assert!(beside.coverage >= 0.94 && beside.repeated > 0.2, "{all}");
    assert!(naive.coverage < 0.6 && naive.off > 2.0 * beside.off, "{all}");
}
