//! The pages and charts of the repository are those that the program makes of the committed rows, byte for byte.

use std::fs;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use super::kept::same;
use super::{effattn, root, stderr};

/// Runs `line` in the repository, and gives what is printed.
fn printed(line: &str) -> String {
    let output = effattn(root(), line).output().unwrap();
    assert!(output.status.success(), "{line}: {}", stderr(&output));
    String::from_utf8(output.stdout).unwrap()
}

/// The files below `folder`.
fn files(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    entries.flat_map(|path| if path.is_dir() { files(&path) } else { vec![path] }).collect()
}

#[test]
fn every_chart_is_made_of_the_committed_rows() {
    let made = tempfile::tempdir().unwrap();
    let to = |folder: &str| made.path().join(folder).display().to_string();
    printed(&format!("plot figures reproduction/results --plots-dir '{}'", to("")));
    for (run, folder) in
        [("", ""), ("growth/", "growth"), ("peer/f32/", "peer/f32"), ("peer/bf16/", "peer/bf16")]
    {
        printed(&format!("plot rows reproduction/results/{run}speed --plots-dir '{}'", to(folder)));
    }
    let committed = root().join("reproduction/plots");
    let mut names: Vec<PathBuf> =
        files(&committed).iter().map(|file| file.strip_prefix(&committed).unwrap().to_owned()).collect();
    names.retain(|name| !name.starts_with("norms.svg") && !name.starts_with("norms.csv")); // made of weights, not rows
    assert!(names.len() > 50, "{names:?}");
    for name in &names {
        let (then, now) = (fs::read(committed.join(name)).unwrap(), fs::read(made.path().join(name)));
        assert!(now.is_ok_and(|now| now == then), "{} is not what the program draws", name.display());
    }
    let more: Vec<PathBuf> = (files(made.path()).iter())
        .map(|file| file.strip_prefix(made.path()).unwrap().to_owned())
        .filter(|name| !names.contains(name))
        .collect();
    assert!(more.is_empty(), "drawn and not committed: {more:?}");
}

/// `text` without what the report writes into it: the tables between the markers, and the marked numbers.
fn emptied(text: &str) -> String {
    let (begin, end) = ("<!-- effattn report: begin", "<!-- effattn report: end -->");
    let mut text = text.to_owned();
    if let (Some(from), Some(to)) = (text.find(begin), text.find(end)) {
        let line = text[from..].find('\n').unwrap() + 1;
        text.replace_range(from + line..to, "");
    }
    let mut pieces = text.split("<!-- row ");
    let mut out = pieces.next().unwrap().to_owned();
    for piece in pieces {
        let (marker, rest) = piece.split_once("-->").unwrap();
        let (_, rest) = rest.split_once("<!-- /row").unwrap();
        out += &format!("<!-- row {marker}-->0<!-- /row{rest}");
    }
    out
}

#[test]
fn the_pages_are_those_that_the_report_writes() {
    let folder = tempfile::tempdir().unwrap();
    let pages = fs::read_dir(root().join("docs"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut results: Vec<String> =
        pages.filter(|name| name.starts_with("results")).map(|name| format!("docs/{name}")).collect();
    results.sort();
    assert!(results.len() > 4, "{results:?}");
    for page in results.iter().map(String::as_str).chain(["docs/recall.md", "docs/mixers.md", "README.md"]) {
        let then = fs::read_to_string(root().join(page)).unwrap();
        let empty = emptied(&then);
        assert!(empty.len() < then.len(), "{page} has nothing that the report writes");
        let file = folder.path().join("page.md");
        fs::write(&file, empty).unwrap();
        printed(&format!("report reproduction/results --brief --splice '{}'", file.display()));
        let now = fs::read_to_string(&file).unwrap();
        let differ = then.lines().zip(now.lines()).find(|(then, now)| then != now);
        assert!(then == now, "{page} is not what the report writes: {differ:?}");
    }
}

/// The report of everything is too long to be committed a second time.
#[test]
fn the_whole_report_has_the_same_digest() {
    let digest = |format: &str| {
        let text = printed(&format!("report reproduction/results --format {format}"));
        let digest: String =
            Sha256::digest(text.as_bytes()).iter().map(|byte| format!("{byte:02x}")).collect();
        format!("{format} {} bytes {digest}\n", text.len())
    };
    same("report.txt", &["markdown", "html"].map(digest).concat());
}
