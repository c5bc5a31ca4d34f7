//! No number in the prose of README and docs that no row carries: a number stands in a marker that names its row (`report
//! --splice` writes it), in a table that the report generates or a test recomputes, in code, is part of a name, or is one of
//! the constants below.

use std::path::{Path, PathBuf};

use effattn::attention::knobs::Knobs;
use effattn::attention::{Growth, MechanismEntry, Shape, TABLE, find};
use effattn::record::{Row, csv};
use effattn::report::document::{BEGIN_WORDS, END};
use effattn::report::marked_numbers::without;
use effattn::report::reference;
use effattn::report::table::Table;

/// Numbers of prose that are no measurement: the file, the number with the word in front, and what it is.
const CONSTANTS: &[(&str, &str, &str)] = &[
    ("CHANGELOG.md", "exits 2", "an exit code"),
    ("CONTRIBUTING.md", "near 400", "a rule for files"),
    ("CONTRIBUTING.md", "near 60.", "a rule for functions"),
    ("CHANGELOG.md", "than 16,384", "a limit of the program, in bytes"),
    ("docs/adding-a-data-set.md", "Id 0", "an id"),
    ("docs/adding-a-data-set.md", "from 1", "an id"),
    ("docs/adding-a-mechanism.md", "mask 0)", "the value of a mask"),
    ("docs/adding-a-mechanism.md", "gives 0,", "what is computed"),
    ("docs/building-for-gpus.md", "code (13.0", "a version of the toolkit"),
    ("docs/building-for-gpus.md", "driver 580;", "a version of the driver"),
    ("docs/building-for-gpus.md", "GPU (13.0,", "a version of the toolkit"),
    ("docs/building-for-gpus.md", "architecture 80),", "a GPU architecture"),
    ("docs/building-for-gpus.md", "downloads 271", "the size of the wheels, in MB"),
    ("docs/clusters.md", "--shards 12", "a flag of an example"),
    ("docs/clusters.md", "--gpus 1", "a flag of an example"),
    ("docs/clusters.md", "code 1", "an exit code"),
    ("docs/images.md", "than 89,478,485", "a limit of the program, in pixels"),
    ("docs/files.md", "between 0", "the range of a column"),
    ("docs/files.md", "never 0.", "the value of a column"),
    ("docs/programs.md", "with 1", "an exit code"),
    ("docs/programs.md", "over 5", "a limit of the program"),
    ("docs/recall.md", "of 128", "a value of the protocol"),
    ("docs/programs.md", "contains 1.", "a ratio of equals"),
    ("docs/programs.md", "of 20", "the step of an example, in ms"),
    (
        "docs/programs.md",
        "was 0.06",
        "three runs, in %, of the command beside it, with examples/c/full.c made to step",
    ),
    ("docs/programs.md", "to 0.83", "the largest of these"),
    ("docs/programs.md", "near 0", "the value of a sum"),
    ("docs/reliability.md", "every 10", "the default of --save-every, in seconds"),
    ("docs/words.md", "eps 1e-6,", "a value of the protocol"),
    ("docs/words.md", "decay 0.1", "a value of the protocol"),
    ("docs/words.md", "to 0,", "a value of the protocol"),
    ("docs/words.md", "dropout 0.1,", "a value of the protocol"),
    ("docs/words.md", "weights (0.1", "a value of the protocol"),
    ("docs/words.md", "is 50.9,", "the largest class of the published split"),
    ("docs/words.md", "MNLI 35.4,", "the largest class of the published split"),
    ("docs/words.md", "QQP 63.2,", "the largest class of the published split"),
    ("docs/words.md", "IMDb 50.0:", "the largest class of the published split"),
    ("docs/words.md", "--dry-run 246,933,504", "what the dry run prints, held by a test of the model"),
    ("docs/words.md", "the 8,123", "a size of the small vocabulary's definition"),
    ("docs/words.md", "of 0.1,", "a value of the protocol"),
    ("docs/words.md", "momentum 0.99;", "a value of the protocol"),
    ("docs/words.md", "of 512", "a value of the protocol"),
    ("docs/words.md", "which 400", "a value of the protocol"),
    ("docs/words.md", "scored (256", "a value of the small protocol"),
    ("docs/words.md", "of 2,048", "a value of the small protocol"),
    ("docs/words.md", "rows 0", "an index"),
    ("docs/words.md", "row 2", "an index"),
    ("docs/words.md", "over 64", "a value of the protocol"),
    ("docs/words.md", "Adam (0.9,", "a value of the protocol"),
    ("docs/words.md", "0.9, 0.98),", "a value of the protocol"),
];

/// Words in front of a number that make it a name, such as a figure's.
const NAMES: &[&str] = &[
    "table", "tables", "figure", "figures", "section", "sections", "rust", "and", "eq.", "seed", "seeds",
    "phase", "license", "pytorch", "version", "or", "iclr", "neurips",
];

/// What is left of `text` without code, links, comments, tables and what the report writes.
fn prose(text: &str) -> String {
    let mut text = without(text);
    while let (Some(start), Some(end)) = (text.find(BEGIN_WORDS), text.find(END)) {
        text.replace_range(start..(end + END.len()).max(start), "");
    }
    let (mut out, mut fenced) = (String::new(), false);
    for line in text.lines() {
        if line.trim_start().starts_with("```") {
            fenced = !fenced;
        } else if !fenced && !line.starts_with('|') {
            // the number of an item of a list is none of the text
            let item = line.trim_start().split_once(". ");
            let item = item.filter(|(number, _)| number.parse::<u32>().is_ok());
            let line = item.map_or(line, |(_, text)| text);
            // every second piece between backquotes is code; what stands in parentheses behind ] is an address
            let plain: String = line.split('`').step_by(2).collect::<Vec<_>>().join("code");
            let pieces = plain.split("](").enumerate();
            let pieces = pieces.map(|(index, piece)| match (index, piece.split_once(')')) {
                (0, _) | (_, None) => piece,
                (_, Some((_, rest))) => rest,
            });
            out.push_str(&pieces.collect::<Vec<_>>().join(" "));
            out.push('\n');
        }
    }
    out
}

/// Numbers of `text` that stand for themselves, each with the word in front.
pub fn numbers(text: &str) -> Vec<String> {
    let prose = prose(text);
    let words: Vec<&str> = prose.split_whitespace().collect();
    let mut found = Vec::new();
    for (index, word) in words.iter().enumerate() {
        let bare = word.trim_matches(|c: char| !c.is_alphanumeric());
        let number =
            bare.starts_with(|c: char| c.is_ascii_digit()) && bare.replace(',', "").parse::<f64>().is_ok();
        let before = index.checked_sub(1).map_or("", |before| words[before]);
        let name = NAMES.contains(&before.to_lowercase().trim_matches(|c: char| "(*,:".contains(c)));
        if number && !name {
            found.push(format!("{} {word}", before.trim_start_matches(['[', '('])));
        }
    }
    found
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The texts that a reader of the repository meets: those beside README and those in docs.
fn pages() -> Vec<(String, String)> {
    let mut all = Vec::new();
    for folder in ["", "docs"] {
        let entries = std::fs::read_dir(root().join(folder)).unwrap();
        let mut paths: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
        paths.retain(|path| path.extension().is_some_and(|ending| ending == "md"));
        paths.sort();
        for path in paths {
            let name = path.strip_prefix(root()).unwrap().display().to_string();
            all.push((name, std::fs::read_to_string(&path).unwrap()));
        }
    }
    all
}

#[test]
fn numbers_in_prose_come_from_rows() {
    let pages = pages();
    assert!(pages.iter().any(|(name, _)| name == "README.md") && pages.len() > 8);
    let known =
        |name: &str, number: &str| CONSTANTS.iter().any(|(page, it, _)| *page == name && *it == number);
    let found = pages.iter().flat_map(|(name, text)| {
        numbers(text).into_iter().filter(|number| !known(name, number)).map(move |number| (name, number))
    });
    let found: Vec<_> = found.collect();
    assert!(found.is_empty(), "numbers that no row carries: {found:#?}");
}

/// Of the newest committed run of `dtype` beside other programs in `folder`: how they sum up, and how they stand cell by cell.
fn beside_programs(folder: &str, dtype: &str) -> [Table; 2] {
    let run = root().join("reproduction/results").join(folder).join(dtype).join("speed/latest");
    let rows = csv::from_str(&std::fs::read_to_string(run.join("rows.csv")).unwrap()).unwrap();
    let references = reference::with_programs(&rows, &reference::read(&run).unwrap());
    let tables = reference::tables(&rows, &references);
    tables.try_into().unwrap_or_else(|_| panic!("{}: there are several programs", run.display()))
}

/// Column of eager PyTorch in a table of `dtype`.
fn eager(dtype: &str, cells: &Table) -> usize {
    let names = [format!("PyTorch {dtype}"), format!("torch {dtype}"), format!("torch-autocast {dtype}")];
    let column = cells.columns.iter().position(|column| names.contains(column));
    column.unwrap_or_else(|| panic!("{:?} has none of {names:?}", cells.columns))
}

/// A line per mechanism: how many times as fast effattn is as eager PyTorch, f32 / bf16, in a column per pass and length.
fn eager_table(f32: &Table, bf16: &Table) -> Vec<String> {
    let lookup = |table: &Table, dtype: &str, cell: &[String]| {
        let column = eager(dtype, table);
        let row = table.rows.iter().find(|row| row[..4] == *cell);
        row.map_or_else(|| "-".to_owned(), |row| row[column].clone())
    };
    let (mut models, mut places) = (Vec::new(), Vec::new());
    for row in &f32.rows {
        let place = (row[1].clone(), row[2].clone(), row[3].parse::<u64>().unwrap());
        if !models.contains(&row[0]) {
            models.push(row[0].clone());
        }
        if !places.contains(&place) {
            places.push(place);
        }
    }
    places.sort();
    let head = places.iter().map(|(pass, _, len)| format!(" {pass} {len} |")).collect::<String>();
    let mut lines = vec![format!("| |{head}"), format!("|---|{}", "---:|".repeat(places.len()))];
    for model in &models {
        let cells = places.iter().map(|(pass, batch, len)| {
            let cell = [model.clone(), pass.clone(), batch.clone(), len.to_string()];
            format!(" {} / {} |", lookup(f32, "f32", &cell), lookup(bf16, "bf16", &cell))
        });
        lines.push(format!("| {model} |{}", cells.collect::<String>()));
    }
    lines
}

/// Replaces the first lines in a row of `text` that `ours` picks.
fn with_lines(text: &str, ours: impl Fn(&str) -> bool, lines: &[String]) -> String {
    let old: Vec<&str> = text.lines().collect();
    let from = old.iter().position(|line| ours(line)).expect("the page has such a line");
    let count = old[from..].iter().take_while(|line| ours(line)).count();
    let new = old[..from].iter().copied().chain(lines.iter().map(String::as_str));
    new.chain(old[from + count..].iter().copied()).map(|line| format!("{line}\n")).collect()
}

/// The runs of both formats in `folder`, and `line` of every program there.
fn summed(folder: &str, line: impl Fn(&str, &[String]) -> String) -> ([Table; 2], Vec<String>) {
    let [f32, bf16] = ["f32", "bf16"].map(|dtype| (dtype, beside_programs(folder, dtype)));
    let of = |(dtype, [sums, _]): &(&str, [Table; 2])| {
        sums.rows.iter().map(|row| line(dtype, row)).collect::<Vec<_>>()
    };
    let lines = [&f32, &bf16].into_iter().flat_map(of).collect();
    let ((_, [_, f32]), (_, [_, bf16])) = (f32, bf16);
    ([f32, bf16], lines)
}

/// Tables of pages about other programs are made of the newest committed runs; EFFATTN_BLESS=1 writes them.
#[test]
fn the_programs_side_by_side_are_those_of_the_committed_runs() {
    let ([f32, bf16], all) =
        summed("peer", |dtype, row| format!("| effattn {dtype} | {} |", row.join(" | ")));
    let (_, short) = summed("peer", |dtype, row| {
        format!("| encoder, {dtype}, vs {} | {} | {} | {} |", row[0], row[2], row[3], row[4])
    });
    let (_, full_width) = summed("peer/full-width", |dtype, row| {
        format!("| full width, effattn {dtype} | {} |", row.join(" | "))
    });
    assert!(all.len() >= 4 && full_width.len() >= 4, "several programs in both formats: {all:?}");
    let eager = eager_table(&f32, &bf16);
    let read = |page: &str| std::fs::read_to_string(root().join(page)).unwrap();
    let mut performance = read("docs/performance.md");
    for (start, lines) in [("| effattn", &all), ("| full width, effattn", &full_width)] {
        let ours = |line: &str| ["f32", "bf16"].iter().any(|it| line.starts_with(&format!("{start} {it} |")));
        performance = with_lines(&performance, ours, lines);
    }
    let (begin, end) = performance.split_once("\n| | infer ").expect("the page has a table of eager PyTorch");
    let end = with_lines(&format!("| | infer {end}"), |line| line.starts_with('|'), &eager);
    let readme = with_lines(&read("README.md"), |line| line.starts_with("| encoder, "), &short);
    for (page, renewed) in [("docs/performance.md", format!("{begin}\n{end}")), ("README.md", readme)] {
        if std::env::var_os("EFFATTN_BLESS").is_some() {
            std::fs::write(root().join(page), &renewed).unwrap();
        }
        assert!(
            read(page) == renewed,
            "{page} is not what the rows say; EFFATTN_BLESS=1 renews it: {renewed}"
        );
    }
}

#[test]
fn the_memory_of_both_formats_is_that_of_the_committed_runs() {
    let text = std::fs::read_to_string(root().join("docs/performance.md")).unwrap();
    let peaks = ["f32", "bf16"].map(|dtype| {
        let run = root().join("reproduction/results/formats").join(dtype).join("memory/latest/rows.csv");
        csv::from_str(&std::fs::read_to_string(run).unwrap()).unwrap()
    });
    let mut models = 0;
    for line in text.lines().filter(|line| line.starts_with("| ") && line.contains(" → ")) {
        let mut cells = line.trim_matches('|').split('|').map(str::trim);
        let model = cells.next().unwrap();
        for (cell, len) in cells.zip([1024, 4096]) {
            let [f32, bf16] = peaks.each_ref().map(|rows: &Vec<Row>| {
                let is =
                    |row: &&Row| row.metric == "peak_memory" && row.label() == model && row.len == Some(len);
                rows.iter().find(is).and_then(|row| row.value).unwrap_or(f64::NAN)
            });
            let mib = f64::from(1 << 20);
            assert_eq!(
                cell,
                format!("{:.0} → {:.0} ({:.2})", f32 / mib, bf16 / mib, bf16 / f32),
                "{model} {len}"
            );
        }
        models += 1;
    }
    assert!(models >= 14, "{models}");
}

/// Rows of the committed runs of a suite of `recall`.
fn recalled(suite: &str) -> Vec<Row> {
    let folder = root().join("reproduction/results/recall").join(suite);
    let runs = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap());
    let runs = runs.filter(|entry| entry.file_type().unwrap().is_dir()); // `latest` is a link
    let text = |run: std::fs::DirEntry| std::fs::read_to_string(run.path().join("rows.csv")).unwrap();
    runs.flat_map(|run| csv::from_str(&text(run)).unwrap()).collect()
}

/// Cells of a line about `model`: bytes of state, means over seeds on `segments`, the mean of every seed, and the validation accuracy
/// of the worst and the best rate.
fn recall_line(rows: &[Row], model: &str, segments: [&str; 4]) -> Vec<String> {
    let rows: Vec<&Row> = rows.iter().filter(|row| row.label() == model).collect();
    let by_seed = |metric: &str, part: &str| -> std::collections::BTreeMap<u64, f64> {
        let is = |row: &&&Row| {
            let here = row.task.as_deref().and_then(|task| task.split_once(' ')).map_or("", |(_, part)| part);
            row.metric == metric && here == part
        };
        rows.iter().filter(is).filter_map(|row| Some((row.seed?, row.value?))).collect()
    };
    let mean =
        |values: std::collections::BTreeMap<u64, f64>| values.values().sum::<f64>() / values.len() as f64;
    let state = rows.iter().find_map(|row| row.state_bytes);
    let mut cells = vec![state.unwrap_or(0).to_string()];
    cells.extend(segments.map(|part| format!("{:.1}", mean(by_seed("segment_accuracy", part)))));
    let seeds = by_seed("accuracy", "").into_values().map(|value| format!("{value:.1}"));
    cells.push(seeds.collect::<Vec<_>>().join(", "));
    let rates = ["1e-3", "3e-3", "1e-2"]
        .map(|rate| mean(by_seed("rate_validation_accuracy", &format!("rate={rate}"))));
    let (worst, best) = (rates.into_iter().fold(f64::MAX, f64::min), rates.into_iter().fold(0.0, f64::max));
    cells.push(format!("{worst:.0} to {best:.0}"));
    cells
}

#[test]
fn the_tables_of_recall_are_those_of_the_committed_runs() {
    let text = std::fs::read_to_string(root().join("docs/recall.md")).unwrap();
    for (title, suite, segments, least) in [
        ("| MQAR |", "mqar-small", ["64:4", "64:8", "64:16", "128:32"], 13),
        ("| parity |", "state-tracking-small", ["3..40", "64", "128", "256"], 13),
    ] {
        let rows = recalled(suite);
        let table = text.lines().skip_while(|line| !line.starts_with(title)).skip(2);
        let table: Vec<&str> = table.take_while(|line| line.starts_with("| ")).collect();
        assert_eq!(table.len(), least, "{title}");
        for line in table {
            let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
            let model = cells[0].trim_matches('`');
            assert_eq!(cells[1..], recall_line(&rows, model, segments), "{suite} {model}");
        }
    }
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

#[test]
fn names_code_tables_and_marked_numbers_are_no_claims() {
    let text = "See Table 5 and `x 3`, [a 4](b5) f32.\n| 7 |\n```\n8\n```\nIt takes <!-- row a .1 -->0.3<!-- /row --> s.\n";
    assert_eq!(numbers(text), ["a 4"]);
    assert_eq!(numbers("about 3 times, 1.8 here; 76 %"), ["about 3", "times, 1.8", "here; 76"]);
}
