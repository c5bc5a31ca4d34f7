use super::*;
use crate::Outcome;

fn row(metric: &str, value: f64) -> Row {
    Row { std: Some(0.01), n: Some(20), ..Row::new("speed", "ls").with(metric, "x", Some(value)) }
}

#[test]
fn worse_depends_on_the_metric() {
    let of = |metric: &str, a, b| compare(&[row(metric, a)], &[row(metric, b)]);
    let slower = of("step_time", 1.0, 1.2);
    assert!((slower.pairs[0].worse - 0.2).abs() < 1e-12);
    assert_eq!(slower.regressions(0.05).len(), 1);
    assert!(slower.regressions(0.3).is_empty() && of("step_time", 1.2, 1.0).regressions(0.0).is_empty());
    assert_eq!(of("accuracy", 60.0, 50.0).regressions(0.05).len(), 1);
    assert!(of("params", 1.0, 2.0).pairs.is_empty());
}

#[test]
fn a_change_that_is_not_printed_is_none_and_a_step_counts_once() {
    let exact = |value: f64| Row { std: None, ..row("peak_memory", value) };
    let one = compare(&[exact(20e6)], &[exact(20e6 + 32.0)]);
    assert_eq!(one.pairs[0].verdict(), "no difference");
    assert_eq!(compare(&[exact(20e6)], &[exact(21e6)]).pairs[0].verdict(), "more memory");
    let both = [row("step_time", 1.0), row("steps_per_second", 1.0)];
    assert_eq!(compare(&both, &both).pairs.len(), 1);
    assert_eq!(compare(&both[1..], &both[1..]).pairs.len(), 1);
}

#[test]
fn noise_is_no_regression() {
    let noisy = |value| Row { std: Some(1.0), n: Some(4), ..row("step_time", value) };
    assert!(compare(&[noisy(1.0)], &[noisy(1.2)]).regressions(0.05).is_empty());
}

#[test]
fn peaks_that_were_seen_in_both_are_no_regression() {
    let seen = |low, high| {
        let row = row("peak_memory", high);
        Row { std: None, ci_low: Some(low), ci_high: Some(high), ..row }
    };
    assert!(compare(&[seen(1.0, 1.2)], &[seen(1.1, 1.4)]).regressions(0.05).is_empty());
    assert_eq!(compare(&[seen(1.0, 1.2)], &[seen(1.3, 1.4)]).regressions(0.05).len(), 1);
    assert_eq!(compare(&[seen(1.0, 1.0)], &[seen(1.4, 1.4)]).regressions(0.05).len(), 1);
}

#[test]
fn what_cannot_be_compared_is_named() {
    let metal = Row { device: "metal".to_owned(), ..row("step_time", 1.0) };
    let both = compare(&[row("step_time", 1.0)], &[metal]);
    assert!(both.pairs.is_empty() && (both.absent.len(), both.lonely.len()) == (1, 1), "{both:?}");
    let gone = row("step_time", 1.0).with("step_time", "s", None).with_outcome(Outcome::Oom, None);
    let lost = compare(&[row("step_time", 1.0)], &[gone]);
    assert!(lost.lost[0].ends_with("1 s before, oom now"), "{lost:?}");
    let nan = Row { value: Some(f64::NAN), ..row("step_time", 1.0).with_outcome(Outcome::Ok, None) };
    assert_eq!(compare(&[row("step_time", 1.0)], &[nan]).lost.len(), 1, "NaN is no value");
}

#[test]
fn many_rows_and_many_samples_take_no_time() {
    let many: Vec<Row> =
        (0..50_000).map(|len| Row { len: Some(len), n: Some(10_000_000), ..row("step_time", 1.0) }).collect();
    let start = std::time::Instant::now();
    assert_eq!(compare(&many, &many).pairs.len(), many.len());
    assert!(start.elapsed().as_secs() < 5, "{:?}", start.elapsed());
}

#[test]
fn verdicts_carry_units_and_words() {
    let of = |metric: &str, a, b| compare(&[row(metric, a)], &[row(metric, b)]);
    for (metric, a, b, verdict) in [
        ("step_time", 1.0, 1.2, "slower"),
        ("step_time", 1.2, 1.0, "faster"),
        ("steps_per_second", 1.0, 1.2, "faster"),
        ("peak_memory", 1.0, 1.2, "more memory"),
        ("accuracy", 60.0, 50.0, "worse"),
        ("step_time", 1.0, 1.0, "no difference"),
    ] {
        assert_eq!(of(metric, a, b).pairs[0].verdict(), verdict, "{metric} {a} {b}");
    }
    let slower = of("step_time", 0.020, 0.024);
    let cells = &slower.table().rows[0];
    assert_eq!(cells[3..6], ["20\u{a0}ms", "24\u{a0}ms", "+20.0\u{a0}%"]);
    assert_eq!(
        of("step_time", 1.0, 1.25).summary(),
        "1 value compared: 1 slower; steps are 0.80 times as fast as before in geometric mean."
    );
}

#[test]
fn sets_without_a_common_condition_say_which() {
    let metal = Row { device: "metal".to_owned(), threads: Some(8), ..row("step_time", 1.0) };
    let said = differences(&[row("step_time", 1.0)], &[metal]);
    assert!(said.iter().any(|line| line.starts_with("device: ") && line.ends_with("metal now")), "{said:?}");
    assert!(said.iter().any(|line| line == "threads: none before, 8 now"), "{said:?}");
    assert!(differences(&[row("loss", 1.0)], &[row("loss", 2.0)]).is_empty());
}

#[test]
fn cells_of_other_settings_are_not_compared() {
    let sized =
        |settings: &str, value: f64| Row { settings: Some(settings.to_owned()), ..row("step_time", value) };
    let (small, large) = ([sized("layers=1 width=16", 1.0)], [sized("layers=4 width=64", 9.0)]);
    let both = compare(&small, &large);
    assert!(both.pairs.is_empty(), "{both:?}");
    assert_eq!(both.absent, ["only before: ls layers=1 width=16"]);
    assert_eq!(both.lonely, ["only now: ls layers=4 width=64"]);
    let said = "settings: layers=1 width=16 before, layers=4 width=64 now";
    assert_eq!(differences(&small, &large), [said]);
    assert_eq!(
        differences(&small, &[row("step_time", 1.0)]),
        ["settings: layers=1 width=16 before, none now"]
    );
    let suite = [row("step_time", 1.0), sized("layers=2", 2.0)];
    let cells: Vec<String> = compare(&suite, &suite).pairs.into_iter().map(|pair| pair.cell).collect();
    assert_eq!(cells, ["ls", "ls layers=2"]);
    let again = compare(&small, &[sized("runs=50 width=16 layers=1 max_time=9.0 profile=true", 1.0)]);
    assert_eq!(again.pairs[0].cell, "ls", "however often it is measured");
}

fn calibrated(seconds: f64) -> RunMachine {
    let calibration = Some(RunCalibration { by_thread: true, seconds, spread: 0.02, disturbed: 0.0 });
    RunMachine { calibration, load: Some(3.65), cores: Some(2.0) }
}

fn run(value: f64, machine: RunMachine) -> ComparedRun {
    let rows = vec![Row { std: Some(0.01 * value), ..row("step_time", value) }, row("accuracy", 50.0)];
    ComparedRun { rows, machine }
}

#[test]
fn machines_in_different_states_widen_or_refuse() {
    let of = |a: RunMachine, b: RunMachine| compare_runs(&[run(1.0, a)], &[run(1.2, b)]);
    let same = of(calibrated(0.003), calibrated(0.003));
    assert_eq!((same.refused.as_deref(), same.pairs[0].verdict()), (None, "slower"));
    let slower = of(calibrated(0.003), calibrated(0.0036));
    assert_eq!((slower.refused.as_deref(), slower.pairs[0].verdict()), (None, "no difference"));
    assert!(slower.pairs[0].interval.unwrap().contains(1.0) && slower.remarks[0].contains("+18.2 %"));
    let other = of(calibrated(0.003), calibrated(0.0045));
    assert!(other.refused.as_ref().unwrap().contains("calibrations took 1.50 times as long now"));
    assert_eq!((other.pairs[0].verdict(), other.pairs[1].verdict()), ("not comparable", "no difference"));
    assert!(other.regressions(0.0).is_empty());
}

#[test]
fn a_busy_machine_refuses_by_its_load_where_nothing_better_is_known() {
    let busy = RunMachine { load: Some(3.65), cores: Some(2.0), calibration: None };
    let both = compare_runs(&[run(1.0, RunMachine::default())], &[run(1.2, busy)]);
    assert!(both.refused.unwrap().starts_with("not comparable: load 3.65 on 2 processors now; "));
    let memory = || vec![ComparedRun { rows: vec![row("peak_memory", 1.0)], machine: busy }];
    assert_eq!(compare_runs(&memory(), &memory()).refused, None, "bytes do not depend on it");
    let after_itself = RunMachine { load: Some(2.4), ..busy };
    assert_eq!(compare_runs(&[run(1.0, after_itself)], &[run(1.2, after_itself)]).refused, None);
    let calibration = Some(RunCalibration { by_thread: true, seconds: 1.0, spread: 0.1, disturbed: 0.8 });
    let disturbed = RunMachine { calibration, ..busy };
    let said = compare_runs(&[run(1.0, disturbed)], &[run(1.0, disturbed)]).refused.unwrap();
    assert!(said.contains("others disturbed 80 % of the turns that count before"), "{said}");
}

#[test]
fn several_runs_a_side_are_one_value_and_their_scatter_counts() {
    let side = |values: &[f64]| -> Vec<ComparedRun> {
        values.iter().map(|value| run(*value, calibrated(0.003))).collect()
    };
    let clear = compare_runs(&side(&[1.0, 1.01, 0.99]), &side(&[1.1, 1.11, 1.09]));
    assert_eq!((clear.pairs.len(), clear.pairs[0].verdict()), (2, "slower"));
    assert!((clear.pairs[0].after - 1.1).abs() < 1e-3);
    let scattered = compare_runs(&side(&[1.0, 1.3, 0.8]), &side(&[1.1, 1.4, 0.9]));
    assert_eq!(scattered.pairs[0].verdict(), "no difference", "{scattered:?}");
}

#[test]
fn pairs_are_exported() {
    let both = compare(&[row("step_time", 1.0)], &[row("step_time", 1.2)]);
    let text = both.csv().unwrap();
    assert!(text.lines().nth(1).unwrap().starts_with("ls,step_time,slower,1,1.2,1.2,1.1"), "{text}");
    let json = both.json();
    assert_eq!(
        (&json["pairs"][0]["verdict"], &json["refused"]),
        (&"slower".into(), &serde_json::Value::Null)
    );
}

/// Numbers in [0, 1): SplitMix64.
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

    fn of<'a>(&mut self, values: &'a [f64]) -> &'a f64 {
        &values[(self.uniform() * values.len() as f64) as usize]
    }
}

/// Seconds of the steps of every cell of a committed run with at least ten.
fn recorded() -> Vec<Vec<f64>> {
    let root =
        std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../reproduction/results/growth/speed");
    let run = std::fs::read_dir(root).unwrap().map(|entry| entry.unwrap().path());
    let text =
        run.filter_map(|path| std::fs::read_to_string(path.join("samples.jsonl")).ok()).next().unwrap();
    let cells = text.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
    let cells = cells.filter(|cell| cell["metric"] == "step_time");
    let cells = cells.map(|cell| serde_json::from_value::<Vec<f64>>(cell["values"].clone()).unwrap());
    let cells: Vec<Vec<f64>> = cells.filter(|values| values.len() >= 10).take(28).collect();
    assert_eq!(cells.len(), 28);
    cells
}

/// A run of the recorded cells, resampled: the first `faster` cells' steps take `factor` times as long, all of them as much longer
/// as the machine is slower, each cell's as its process lies in memory. Calibrations tell the machine's part but for 1 %.
fn resampled(draw: &mut Draw, cells: &[Vec<f64>], changed: usize, factor: f64, drift: f64) -> ComparedRun {
    let machine = (drift * draw.normal()).exp();
    let rows = cells.iter().enumerate().map(|(index, values)| {
        let factor = if index < changed { factor } else { 1.0 } * machine * (0.01 * draw.normal()).exp();
        let drawn: Vec<f64> = values.iter().map(|_| factor * draw.of(values)).collect();
        let summary = crate::stats::Summary::of(&drawn).unwrap();
        let ends = summary.median_interval.unwrap();
        Row {
            len: Some(index as u64),
            std: summary.std,
            n: Some(summary.n as u64),
            ci_low: Some(ends.low),
            ci_high: Some(ends.high),
            ..Row::new("speed", "ls").with("step_time", "s", Some(summary.median))
        }
    });
    let rows = rows.collect();
    let seconds = 0.003 * machine * (0.01 * draw.normal()).exp();
    ComparedRun {
        rows,
        machine: RunMachine {
            calibration: Some(RunCalibration { by_thread: true, seconds, spread: 0.02, disturbed: 0.0 }),
            ..RunMachine::default()
        },
    }
}

#[test]
fn identical_runs_differ_in_at_most_one_comparison_of_twenty() {
    const COMPARISONS: usize = 400;
    let (cells, mut draw) = (recorded(), Draw(44));
    for (drift, runs) in [(0.0, 1), (0.05, 1), (0.02, 2)] {
        let mut side = || (0..runs).map(|_| resampled(&mut draw, &cells, 0, 1.0, drift)).collect::<Vec<_>>();
        let different = (0..COMPARISONS)
            .filter(|_| {
                let both = compare_runs(&side(), &side());
                both.pairs.iter().any(|pair| pair.verdict() != "no difference" && !pair.refused)
            })
            .count();
        let share = different as f64 / COMPARISONS as f64;
        assert!(share <= 0.05, "drift {drift}, {runs} runs a side: {share} of comparisons find a difference");
    }
}

#[test]
fn a_change_of_fifteen_percent_is_found() {
    let (cells, mut draw) = (recorded(), Draw(4));
    let mut found = 0;
    for _ in 0..50 {
        let before = resampled(&mut draw, &cells, 0, 1.0, 0.0);
        let after = resampled(&mut draw, &cells, 4, 1.15, 0.0);
        let both = compare_runs(&[before], &[after]);
        found += both.pairs[..4].iter().filter(|pair| pair.verdict() == "slower").count();
    }
    assert!(found >= 160, "{found} of 200");
}
