//! No number in the prose of README and docs that no row carries: a number stands in a marker that names its row (`report
//! --splice` writes it), in a table that the report generates or a test recomputes, in code, is part of a name, or is one of
//! the constants below.

use std::path::{Path, PathBuf};

use effattn::record::{Pass, Row, csv};
use effattn::report::document::{BEGIN, END};
use effattn::report::marked_numbers::without;
use effattn::report::reference::{self, Reference};
use effattn::stats::median;

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
    ("docs/building-for-gpus.md", "architecture 90);", "a GPU architecture"),
    ("docs/building-for-gpus.md", "architectures 80", "a GPU architecture"),
    ("docs/clusters.md", "--shards 12", "a flag of an example"),
    ("docs/clusters.md", "--gpus 1", "a flag of an example"),
    ("docs/clusters.md", "code 1", "an exit code"),
    ("docs/images.md", "than 89,478,485", "a limit of the program, in pixels"),
    ("docs/files.md", "between 0", "the range of a column"),
    ("docs/files.md", "never 0.", "the value of a column"),
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
    while let (Some(start), Some(end)) = (text.find(BEGIN), text.find(END)) {
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
fn numbers(text: &str) -> Vec<String> {
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

/// Rows of the committed run of `dtype` beside other programs, and what these measured.
fn peers(dtype: &str) -> (Vec<Row>, Vec<Reference>) {
    let runs = root().join("reproduction/results/peer").join(dtype).join("speed");
    let runs = std::fs::read_dir(runs).unwrap().map(|run| run.unwrap().path());
    let run = runs.filter(|run| !run.is_symlink()).max().unwrap();
    let rows = csv::from_str(&std::fs::read_to_string(run.join("rows.csv")).unwrap()).unwrap();
    (rows, reference::read(&run).unwrap())
}

/// Times per step of PyTorch, eager, over ours in the committed run of `dtype`.
fn beside(dtype: &str, model: &str, pass: Pass, len: u64) -> Option<f64> {
    let (rows, there) = peers(dtype);
    let own = rows.iter().find(|row| {
        row.metric == "step_time" && row.label() == model && row.pass == Some(pass) && row.len == Some(len)
    });
    let eager = format!("PyTorch {dtype}");
    let there = there
        .iter()
        .filter(|one| one.program.as_deref() == Some(&eager))
        .filter(|one| one.model.trim_end_matches("-own") == model && one.mode == pass && one.len == len);
    let times: Vec<f64> = there.filter_map(|one| one.ms).collect();
    Some(median(&times)? / 1000.0 / own?.value?)
}

#[test]
fn the_programs_side_by_side_are_those_of_the_committed_runs() {
    let text = std::fs::read_to_string(root().join("docs/performance.md")).unwrap();
    for dtype in ["f32", "bf16"] {
        let (rows, references) = peers(dtype);
        let [sums, _] = &reference::tables(&rows, &references)[..] else { panic!("several programs") };
        assert!(sums.rows.len() >= 3);
        for row in &sums.rows {
            let line = format!("| effattn {dtype} | {} |", row.join(" | "));
            assert!(text.contains(&line), "docs/performance.md lacks: {line}");
        }
    }
}

#[test]
fn the_table_beside_pytorch_is_that_of_the_committed_runs() {
    let text = std::fs::read_to_string(root().join("docs/performance.md")).unwrap();
    let places = [Pass::Infer, Pass::Train].map(|pass| [1024, 2048, 4096].map(|len| (pass, len)));
    let mut cells = 0;
    for line in text.lines().filter(|line| line.starts_with("| ") && line.contains(" / ")) {
        let mut parts = line.trim_matches('|').split('|').map(str::trim);
        let model = parts.next().unwrap();
        for (cell, (pass, len)) in parts.zip(places.iter().flatten()) {
            let ratio = |dtype| format!("{:.2}", beside(dtype, model, *pass, *len).unwrap_or(f64::NAN));
            assert_eq!(cell, format!("{} / {}", ratio("f32"), ratio("bf16")), "{model} {pass} {len}");
            cells += 1;
        }
    }
    assert!(cells >= 60, "{cells}");
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

#[test]
fn names_code_tables_and_marked_numbers_are_no_claims() {
    let text = "See Table 5 and `x 3`, [a 4](b5) f32.\n| 7 |\n```\n8\n```\nIt takes <!-- row a .1 -->0.3<!-- /row --> s.\n";
    assert_eq!(numbers(text), ["a 4"]);
    assert_eq!(numbers("about 3 times, 1.8 here; 76 %"), ["about 3", "times, 1.8", "here; 76"]);
}
