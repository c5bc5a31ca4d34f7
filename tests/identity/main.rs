//! What a run is, held by fixtures: keys of cells, resolved rows, rows of runs, descriptions and tensors of checkpoints, and
//! the pages and charts that are made of the committed rows.
//!
//! The tests see the program as its users do: they run commands and read the files of run folders. `EFFATTN_BLESS=1` writes
//! the fixtures instead of comparing with them; `EFFATTN_PROGRAM=PATH` runs another build than the one under test.

mod kept;
mod measuring;
mod pages;
mod plans;
mod training;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;

fn program() -> PathBuf {
    std::env::var_os("EFFATTN_PROGRAM").map_or_else(|| env!("CARGO_BIN_EXE_effattn").into(), PathBuf::from)
}

fn blesses() -> bool {
    std::env::var_os("EFFATTN_BLESS").is_some()
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The words of `line`; what stands between `'` is one.
fn words(line: &str) -> Vec<String> {
    let (mut words, mut quoted) = (vec![String::new()], false);
    for letter in line.chars() {
        match letter {
            '\'' => quoted = !quoted,
            ' ' if !quoted => words.push(String::new()),
            letter => words.last_mut().unwrap().push(letter),
        }
    }
    words.retain(|word| !word.is_empty());
    words
}

fn effattn(folder: &Path, line: &str) -> Command {
    let mut command = Command::new(program());
    command
        .args(words(line))
        .current_dir(folder)
        .env("XDG_CACHE_HOME", folder.join("cache"))
        .env_remove("EFFATTN_LOG");
    command
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Runs `line`, which must succeed, and gives what it said on stderr.
fn said(folder: &Path, line: &str) -> String {
    let output = effattn(folder, line).output().unwrap();
    assert!(output.status.success(), "{line}: {}", stderr(&output));
    stderr(&output)
}

/// A folder with the few expressions, reviews and sentences that the commands read.
fn data() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let expression = |index: usize| {
        let (a, b) = (index % 10, index / 10 % 10);
        format!("( ( ( [MAX {a} ) {b} ) ] )\t{}\n", a.max(b))
    };
    for (name, range) in [("train", 0..80), ("val", 80..100), ("test", 90..100)] {
        let text: String = range.map(expression).collect();
        fs::write(folder.path().join(format!("basic_{name}.tsv")), format!("Source\tTarget\n{text}"))
            .unwrap();
    }
    let sentence = |index: usize| {
        let of = |words: &[&'static str], step: usize| words[index / step % words.len()];
        let (who, what) = (of(&["the cat", "a dog", "the old man"], 1), of(&["saw", "heard", "left"], 3));
        format!("{who} {what} the {} .\n\n", of(&["house", "street", "river", "garden", "boat"], 2))
    };
    fs::write(folder.path().join("words.txt"), (0..400).map(sentence).collect::<String>()).unwrap();
    for (split, label) in [("train", "pos"), ("train", "neg"), ("test", "pos"), ("test", "neg")] {
        let reviews = folder.path().join("aclImdb").join(split).join(label);
        fs::create_dir_all(&reviews).unwrap();
        let (words, stars) = if label == "pos" { ("good fine great ", 9) } else { ("bad awful poor ", 1) };
        for index in 0..20 {
            let text = format!("{}{index}", words.repeat(4));
            fs::write(reviews.join(format!("{index}_{stars}.txt")), text).unwrap();
        }
    }
    folder
}

/// The folder of the newest run of `name`.
fn latest(folder: &Path, name: &str) -> PathBuf {
    folder.join("results").join(name).join("latest").canonicalize().unwrap()
}

fn json(path: &Path) -> Value {
    serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap()
}

/// `value` in one line: keys sorted, nulls left out, because a reader takes an absent one for it.
fn plain(value: &Value) -> String {
    match value {
        Value::Object(fields) => {
            let mut fields: Vec<_> = fields.iter().filter(|(_, value)| !value.is_null()).collect();
            fields.sort_by_key(|(key, _)| *key);
            let fields = fields.into_iter().map(|(key, value)| format!("{key:?}:{}", plain(value)));
            format!("{{{}}}", fields.collect::<Vec<_>>().join(","))
        }
        Value::Array(items) => format!("[{}]", items.iter().map(plain).collect::<Vec<_>>().join(",")),
        other => other.to_string(),
    }
}

/// `plan.json` in `folder`: a line for every cell, its group and its key.
fn keys(folder: &Path) -> String {
    let plan = json(&folder.join("plan.json"));
    let cells = plan["cells"].as_array().unwrap().iter();
    cells.map(|cell| format!("{} {}\n", cell["group"], cell["cell"].as_str().unwrap())).collect()
}

/// The processor on which the run in `folder` computed.
fn processor(folder: &Path) -> String {
    let machine = &json(&folder.join("manifest.json"))["machine"];
    format!("{}, {}", machine["cpu"].as_str().unwrap(), machine["simd"].as_str().unwrap())
}

/// What the run in `folder` was: its settings and data, its cells, its rows; and the digits of these.
fn told(folder: &Path) -> (String, String) {
    let manifest = json(&folder.join("manifest.json"));
    let of = |key: &str| format!("{key} {}\n", plain(&manifest[key]));
    let settings: String = ["command", "settings", "seeds", "data", "device", "state"].map(of).concat();
    let journal = fs::read_to_string(folder.join("journal.jsonl")).unwrap();
    let finished = journal.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let mut finished: Vec<String> =
        finished.map(|entry| entry["cell"].as_str().unwrap().to_owned()).collect();
    let cells = keys(folder);
    let mut planned: Vec<&str> = cells.lines().map(|line| line.split_once(' ').unwrap().1).collect();
    finished.sort();
    planned.sort_unstable();
    assert_eq!(finished, planned, "the journal has the cells of the plan");
    let rows = fs::read_to_string(folder.join("rows.csv")).unwrap();
    let build = ["version", "commit"].map(|key| manifest[key].as_str().unwrap_or_default());
    for column in ["version", "commit"].iter().zip(build) {
        kept::every(&rows, column);
    }
    let (rows, digits) = kept::rows(&rows);
    (format!("## manifest.json\n{settings}## cells\n{cells}## rows.csv\n{rows}"), digits)
}
