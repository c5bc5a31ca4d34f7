//! What docs/mixers.md says of every mechanism: how it grows, what it keeps, and what the committed runs measured.

use effattn::attention::knobs::Knobs;
use effattn::attention::{Growth, MechanismEntry, Shape, TABLE, find};
use effattn::record::{Pass, Row};
use effattn::stats::power_law;

use super::prose::root;
use super::tables::{beside_one_program, newest, ratio_of, renew, with_rows_below};

/// The exponent with which `metric` of `model` grows with the length, less what it is without any: between the two shortest and the two
/// longest lengths.
fn growth_beyond_the_fixed_part(points: &[(f64, f64)]) -> f64 {
    let step = |from: usize| (points[from + 1].1 - points[from].1) / (points[from + 1].0 - points[from].0);
    let last = points.len() - 2;
    let growth = 1.0 + (step(last) / step(0)).ln() / (points[last].0 / points[0].0).ln();
    assert!(growth.is_finite(), "it does not grow everywhere: {points:?}");
    growth
}

/// A line per linear mechanism of the committed run: the exponents of time and memory, of both passes.
fn growth_lines() -> Vec<String> {
    let (rows, _) = newest("growth/mixers");
    let points = |model: &str, metric: &str, pass: Pass| {
        let is = |row: &&Row| row.label() == model && row.metric == metric && row.pass == Some(pass);
        let mut points: Vec<(f64, f64)> =
            rows.iter().filter(is).map(|row| (row.len.unwrap() as f64, row.value.unwrap())).collect();
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
        assert!(points.len() >= 4, "{model} {metric}: {points:?}");
        points
    };
    let mut models: Vec<String> = Vec::new();
    for row in &rows {
        if !models.contains(&row.label()) {
            models.push(row.label());
        }
    }
    let line = |model: &String| {
        let [infer, train] = [Pass::Infer, Pass::Train]
            .map(|pass| power_law(&points(model, "step_time", pass)).unwrap().slope);
        let [infer_memory, memory] = [Pass::Infer, Pass::Train]
            .map(|pass| growth_beyond_the_fixed_part(&points(model, "peak_memory", pass)));
        format!("| `{model}` | {infer:.2} | {train:.2} | {infer_memory:.2} | {memory:.2} |")
    };
    models.iter().map(line).collect()
}

/// A line per mechanism of the committed run that decodes: bytes of state, milliseconds of a token behind the shortest and the longest
/// context, and their ratio.
fn decoding_lines() -> Vec<String> {
    let (rows, _) = newest("growth/decode");
    let steps: Vec<&Row> =
        rows.iter().filter(|row| row.metric == "step_time" && row.value.is_some()).collect();
    let ends = [steps.iter().filter_map(|row| row.len).min(), steps.iter().filter_map(|row| row.len).max()];
    let short = steps.iter().filter(|row| row.len == ends[0]);
    let line = |first: &&Row| {
        let last = steps.iter().find(|row| row.label() == first.label() && row.len == ends[1])?;
        let [before, behind] = [first.value? * 1e3, last.value? * 1e3];
        let (label, state) = (first.label(), last.state_bytes?);
        Some(format!("| `{label}` | {state} | {before:.2} | {behind:.2} | {:.2} |", behind / before))
    };
    short.filter_map(line).collect()
}

/// A line per mechanism: how many times as fast effattn is as PyTorch on both processors, in a column per pass and length; at last
/// how each run sums up.
fn lines_beside_pytorch() -> Vec<String> {
    let (avx512, avx512_said) = beside_one_program("peer/mixers");
    let (avx2, avx2_said) = beside_one_program("peer/mixers-avx2");
    let mut models: Vec<&String> = Vec::new();
    for (cell, _) in &avx2 {
        if !models.contains(&&cell[0]) {
            models.push(&cell[0]);
        }
    }
    let line = |model: &&String| {
        let places = [("infer", "1024"), ("infer", "4096"), ("train", "1024"), ("train", "4096")];
        let cells = places.map(|(pass, len)| {
            let cell = [model.as_str(), pass, "1", len];
            format!(" {} / {} |", ratio_of(&avx512, cell), ratio_of(&avx2, cell))
        });
        format!("| `{model}` |{}", cells.concat())
    };
    let mut lines: Vec<String> = models.iter().map(line).collect();
    lines.push(format!("| all | Xeon: {avx512_said} | | EPYC, AVX2: {avx2_said} | |"));
    lines
}

/// EFFATTN_BLESS=1 writes them.
#[test]
fn the_tables_of_the_mixers_are_those_of_the_committed_runs() {
    let (growth, decoding, beside) = (growth_lines(), decoding_lines(), lines_beside_pytorch());
    let counts = [growth.len(), decoding.len(), beside.len()];
    assert!(counts[0] >= 19 && counts[1] >= 15 && counts[2] >= 15, "{counts:?}");
    renew("docs/mixers.md", |page| {
        let page = with_rows_below(page, "| growth with the length |", &growth);
        let page = with_rows_below(&page, "| next token |", &decoding);
        with_rows_below(&page, "| times as fast as PyTorch |", &beside)
    });
}

/// Numbers per head that a causal decoder of `entry` keeps at length `len`: four heads of 64.
fn state(entry: &MechanismEntry, len: usize) -> u64 {
    let shape = Shape {
        batch: 1,
        heads: 4,
        head_dim: 64,
        width: 256,
        queries: len,
        keys: len,
        causal: true,
        ..Shape::default()
    };
    if !entry.support.causal {
        return 0;
    }
    (entry.cost)(&Knobs::defaults(entry.knobs), &shape).state_bytes / 4 / shape.heads as u64
}

/// The state of `entry` against `said` of docs/mixers.md; formulas are those of the page.
fn has_state(entry: &MechanismEntry, said: &str) -> bool {
    let knob = |name: &str| {
        let knobs = Knobs::defaults(entry.knobs);
        let value = knobs.iter().find(|(known, _)| *known == name).map(|(_, value)| value.to_string());
        value.unwrap_or_else(|| panic!("{}: no knob {name}", entry.name)).parse::<u64>().unwrap()
    };
    let (d, e, [short, long]) = (64, 256, [1024, 4096].map(|len| state(entry, len)));
    let features = |f: u64| f * (d + 1);
    let exact = match said {
        "d" => features(d),
        "2 d" if entry.name.starts_with("aft") => 2 * d,
        "2 d" => features(2 * d),
        "m" => features(knob("m")) + 1, // and the largest exponent so far
        "2 m" => features(2 * knob("proj_dim")),
        "1 + r + r (r + 1) / 2" => features(1 + knob("Dk") + knob("Dk") * (knob("Dk") + 1) / 2),
        "d^2" => d * d,
        "2 d window" => 2 * d * knob("window"),
        "2 P" => e / 4, // P is half the width where nothing is said; per head
        "e ndim" | "e ndim, with `chunk` also its keys and values" => e * knob("ndim") / 4,
        said if said.starts_with("grows with n") => return long > short && short > 0,
        said if said.starts_with("constant") => return long == short && short > 0,
        said if said.starts_with("none") => return long == 0,
        said => panic!("{}: the page has a state of {said:?}, which this test does not know", entry.name),
    };
    (long, short) == (exact, exact)
}

#[test]
fn the_map_of_the_mixers_has_the_growth_and_state_of_every_mechanism() {
    let text = std::fs::read_to_string(root().join("docs/mixers.md")).unwrap();
    let (map, _) = text.split_once("## In a block of today").unwrap();
    let mut seen = Vec::new();
    for family in map.split("\n## ").skip(1) {
        let (title, _) = family.split_once('\n').unwrap();
        let mut columns: Vec<&str> = Vec::new();
        for line in family.lines().filter(|line| line.starts_with('|') && !line.starts_with("|-")) {
            let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
            if columns.is_empty() {
                columns = cells;
                continue;
            }
            let cell = |names: &[&str]| {
                columns.iter().position(|column| names.contains(column)).map(|index| cells[index])
            };
            // where a family has no such column its introduction says it for all
            let all = |said: &'static str, state: &'static str| {
                let intro = family.to_lowercase();
                assert!(intro.contains("time n") && intro.contains(said), "{title}: {said}");
                state
            };
            let state =
                cell(&["state", "f", "state of a layer"]).unwrap_or_else(|| all("state `d^2`", "d^2"));
            for name in cells[0].split(", ").map(|name| name.trim_matches('`')) {
                let entry = find(name).unwrap_or_else(|| panic!("{title}: no mechanism {name}"));
                let time = match cell(&["time"]) {
                    Some(time) => time.split(" (").next().unwrap_or_default(),
                    None if name == "mega" => all("`mega` without `chunk`: n^2", "n^2"),
                    None => "n",
                };
                let growth = match time {
                    "n" | "n window" => Growth::Linear,
                    "n log n" => Growth::Linearithmic,
                    "n^2" => Growth::Quadratic,
                    other => panic!("{name}: {other}"),
                };
                assert_eq!(growth, entry.time, "{name}: the page says {time}");
                assert!(has_state(entry, state), "{name}: {state}, not {}", self::state(entry, 4096));
                seen.push(name);
            }
        }
    }
    // those of the table: other tests of this program register some of their own
    let mut all: Vec<&str> = TABLE.iter().map(|entry| entry.name).collect();
    all.sort_unstable();
    seen.sort_unstable();
    assert_eq!(seen, all, "every mechanism stands on the page once");
}
