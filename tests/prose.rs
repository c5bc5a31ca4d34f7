//! No number in the prose of README and docs that no row carries: a number stands in a marker that names its row (`report
//! --splice` writes it), in a table that the report generates or a test recomputes, in code, is part of a name, or is one of
//! the constants below.

use std::path::{Path, PathBuf};

use effattn::report::document::{BEGIN_WORDS, END};
use effattn::report::marked_numbers::without;

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

pub fn root() -> &'static Path {
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

#[test]
fn names_code_tables_and_marked_numbers_are_no_claims() {
    let text = "See Table 5 and `x 3`, [a 4](b5) f32.\n| 7 |\n```\n8\n```\nIt takes <!-- row a .1 -->0.3<!-- /row --> s.\n";
    assert_eq!(numbers(text), ["a 4"]);
    assert_eq!(numbers("about 3 times, 1.8 here; 76 %"), ["about 3", "times, 1.8", "here; 76"]);
}
