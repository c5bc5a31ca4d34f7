//! The ratio of two mechanisms on an idle machine and beside a neighbour, which burns one core at random half of the time:
//! `cargo bench --bench neighbour`. Rounds of both take turns; of the steps beside the neighbour the ratio is taken as `speed`
//! says it, with disturbed turns put back, and as the first turns alone would say it. The chart `neighbour.svg` goes to
//! `docs`.
//!
//! `EFFATTN_ROUNDS` (default 6) is the number of rounds; one takes about a minute. It needs an otherwise idle machine with Linux.

#![allow(missing_docs)] // a program

use std::path::Path;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use effattn::report::chart::{RatioPanel, ratios};
use effattn::run::turn::TurnRecord;
use effattn::stats::median;

/// The argument with which this program is the neighbour.
const BURN: &str = "--burn";
/// Mean seconds of the neighbour's work and of its pauses.
const BURST: f64 = 0.5;
/// Turns in which a cell spends its time where none is repeated.
const TURNS: usize = 4;
const MODELS: [&str; 2] = ["full", "linear"];

/// SplitMix64.
fn uniform(state: &mut u64) -> f64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
}

/// Burns one core at random half of the time until its parent ends it.
fn burn(seed: u64) -> ! {
    let mut state = seed;
    loop {
        for works in [true, false] {
            let span = Duration::from_secs_f64(-BURST * (1.0 - uniform(&mut state)).ln());
            let start = Instant::now();
            while works && start.elapsed() < span {
                std::hint::black_box(uniform(&mut state));
            }
            if !works {
                std::thread::sleep(span);
            }
        }
    }
}

/// The neighbour; dropping it ends it.
struct Neighbour(Child);

impl Neighbour {
    fn start(seed: u64) -> std::io::Result<Self> {
        Command::new(std::env::current_exe()?).args([BURN, &seed.to_string()]).spawn().map(Self)
    }
}

impl Drop for Neighbour {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// How many times as long a step of the first mechanism takes: as `speed` says it, and by all steps of the first turns.
struct Ratio {
    judged: f64,
    naive: f64,
    repeated: usize,
    turns: usize,
}

/// Seconds of a step in one cell of `samples.jsonl`: of the turns that count, and of the first turns whatever disturbed them.
fn seconds(line: &str) -> Option<(String, f64, f64, Vec<TurnRecord>)> {
    let cell: serde_json::Value = serde_json::from_str(line).ok()?;
    let values: Vec<f64> = serde_json::from_value(cell["values"].clone()).ok()?;
    let turns: Vec<TurnRecord> = serde_json::from_value(cell["turns"].clone()).ok()?;
    let (mut kept, mut first) = (values.iter().copied(), Vec::new());
    for turn in turns.iter().take(TURNS) {
        match turn.put_back.is_empty() {
            true => first.extend(kept.by_ref().take(turn.steps)),
            false => first.extend(&turn.put_back),
        }
    }
    Some((cell["cell"].as_str()?.to_owned(), median(&values)?, median(&first)?, turns))
}

fn measure(folder: &Path) -> Option<Ratio> {
    let line = "speed --len 1024 --mode infer --max-time 5s --no-plot --quiet --model";
    let status = Command::new(env!("CARGO_BIN_EXE_effattn"))
        .args(line.split(' '))
        .arg(MODELS.join(","))
        .current_dir(folder)
        .stdout(std::process::Stdio::null())
        .status();
    assert!(status.ok()?.success(), "effattn {line} failed");
    let text = std::fs::read_to_string(folder.join("results/speed/latest/samples.jsonl")).ok()?;
    let cells: Vec<_> = text.lines().filter_map(seconds).collect();
    let of = |name: &str| cells.iter().find(|cell| cell.0.split(' ').next() == Some(name));
    let (first, second) = (of(MODELS[0])?, of(MODELS[1])?);
    let turns = || cells.iter().flat_map(|cell| &cell.3);
    Some(Ratio {
        judged: first.1 / second.1,
        naive: first.2 / second.2,
        repeated: turns().filter(|turn| !turn.put_back.is_empty()).count(),
        turns: turns().count(),
    })
}

fn main() {
    let mut words = std::env::args().skip(1);
    if words.next().as_deref() == Some(BURN) {
        burn(words.next().and_then(|seed| seed.parse().ok()).unwrap_or(1));
    }
    let rounds = std::env::var("EFFATTN_ROUNDS").ok().and_then(|text| text.parse().ok()).unwrap_or(6);
    let folder = std::env::temp_dir().join(format!("effattn-neighbour-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("the folder for temporary files can be written");
    let (mut idle, mut beside) = (Vec::new(), Vec::new());
    for round in 1..=rounds {
        let quiet = measure(&folder).expect("a ratio of the idle machine");
        let neighbour = Neighbour::start(round).expect("the neighbour starts");
        let loud = measure(&folder).expect("a ratio beside the neighbour");
        drop(neighbour);
        println!(
            "round {round}: idle {:.3}; neighbour {:.3} ({} of {} turns repeated), first turns alone {:.3}",
            quiet.judged, loud.judged, loud.repeated, loud.turns, loud.naive
        );
        idle.push((round, quiet.judged));
        beside.push((round, loud));
    }
    drop(std::fs::remove_dir_all(&folder));
    let middle = median(&idle.iter().map(|(_, ratio)| *ratio).collect::<Vec<_>>()).expect("rounds");
    let scaled = |values: Vec<(u64, f64)>| -> Vec<(u64, f64)> {
        values.into_iter().map(|(round, ratio)| (round, ratio / middle)).collect()
    };
    let worst = |values: &[(u64, f64)]| values.iter().map(|(_, it)| (it - 1.0).abs()).fold(0.0, f64::max);
    let rows = [
        ("idle", scaled(idle)),
        ("neighbour", scaled(beside.iter().map(|(round, it)| (*round, it.judged)).collect())),
        ("first turns alone", scaled(beside.iter().map(|(round, it)| (*round, it.naive)).collect())),
    ];
    for (name, values) in &rows {
        println!("{name}: at most {:.1} % from the idle machine's median ratio", 100.0 * worst(values));
    }
    let title = "Ratio of two mechanisms beside a neighbour";
    let subtitle = "full over linear at 1024, over the idle machine's median; a process burns one core half of the time; colour: round";
    let panel = RatioPanel {
        title: "Seconds of a step".to_owned(),
        rows: rows.into_iter().map(|(name, values)| (name.to_owned(), values)).collect(),
    };
    let chart = ratios("neighbour", (title, subtitle), "over the idle machine's ratio", &[panel]);
    let plots = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs");
    let path = chart.and_then(|chart| chart.write(&plots)).expect("the chart can be written");
    println!("chart: {}", path.display());
}
