//! Every citation of the specification, in sources, tests, suites and documents, names a section of `docs/spec/` that exists.
//!
//! The forms: `SPEC-ls 5`, `SPEC-cos 3.2`, `SPEC-models section 3`, `SPEC-ls.md sections 3 to 7`. Behind a point stands a
//! subsection, or a line of a numbered list: `SPEC-ls 9.3` is step 3 of section 9.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// Where citations are looked for.
const PLACES: &[&str] = &["src", "crates", "tests", "benches", "examples", "suites", "docs", "README.md"];

/// Text files in `PLACES`.
fn texts() -> Vec<(PathBuf, String)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut waiting: Vec<PathBuf> = PLACES.iter().map(|place| root.join(place)).collect();
    let mut found = Vec::new();
    while let Some(path) = waiting.pop() {
        if path.is_dir() {
            waiting.extend(fs::read_dir(&path).unwrap().map(|item| item.unwrap().path()));
            continue;
        }
        let kinds = ["rs", "md", "toml", "cu", "cuh"];
        let known = path.extension().is_some_and(|end| kinds.iter().any(|kind| end == *kind));
        // this file cites what does not exist
        if known && path.is_file() && !path.ends_with("tests/citations.rs") {
            let name = path.strip_prefix(root).unwrap().to_owned();
            found.push((name, fs::read_to_string(&path).unwrap()));
        }
    }
    found
}

/// The citations in `text`: the file's name and, where one is given, the section.
fn citations(text: &str) -> Vec<(String, Option<String>)> {
    let mut found = Vec::new();
    for after in text.split("SPEC-").skip(1) {
        let name: String = after.chars().take_while(char::is_ascii_lowercase).collect();
        if name.is_empty() {
            continue; // `SPEC-*.md`: all of them
        }
        let rest = after[name.len()..].trim_start_matches(".md").trim_start_matches('`');
        let sections = if rest.starts_with(char::is_whitespace) { sections(rest) } else { Vec::new() };
        if sections.is_empty() {
            found.push((name, None));
        } else {
            found.extend(sections.into_iter().map(|section| (name.clone(), Some(section))));
        }
    }
    found
}

/// The numbers that `text` begins with: `5`, `3.2`, `section 5`, `1, 2 and 4`, `3 to 7`.
fn sections(text: &str) -> Vec<String> {
    let marks = ["//", "//!", "///", "\\", "section", "sections", "sec."];
    let mut words = text.split_whitespace().skip_while(|word| marks.contains(word));
    let mut found = Vec::new();
    while let Some(word) = words.next() {
        let digits = word.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(word.len());
        let section = word[..digits].trim_end_matches('.');
        if section.is_empty() {
            break;
        }
        found.push(section.to_owned());
        let goes_on = match &word[digits..] {
            "," => true,
            "" => matches!(words.next(), Some("and" | "to")),
            _ => false,
        };
        if !goes_on {
            break;
        }
    }
    found
}

/// The sections of a specification: its numbered headings, and under each the lines of numbered lists.
fn headings(text: &str) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    let mut section = String::new();
    for line in text.lines() {
        let heading = line.trim_start_matches('#');
        let (number, _) = heading.trim_start().split_once(' ').unwrap_or((heading.trim(), ""));
        let number = number.trim_end_matches('.');
        if number.is_empty() || !number.chars().all(|c| c.is_ascii_digit() || c == '.') {
            continue;
        }
        if heading.len() < line.len() {
            number.clone_into(&mut section);
            found.insert(section.clone());
        } else if line.starts_with(&format!("{number}. ")) && !section.is_empty() {
            found.insert(format!("{section}.{number}"));
        }
    }
    found
}

fn specification(name: &str) -> Option<BTreeSet<String>> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("docs/spec/SPEC-{name}.md"));
    fs::read_to_string(path).ok().map(|text| headings(&text))
}

/// What is wrong with the citations in `text`.
fn unresolved(text: &str) -> Vec<String> {
    let mut wrong = Vec::new();
    for (name, section) in citations(text) {
        match (specification(&name), section) {
            (None, _) => wrong.push(format!("there is no docs/spec/SPEC-{name}.md")),
            (Some(known), Some(section)) if !known.contains(&section) => {
                wrong.push(format!("SPEC-{name} has no section {section}"));
            }
            _ => {}
        }
    }
    wrong
}

#[test]
fn every_citation_names_a_section_that_exists() {
    let (mut count, mut wrong) = (0, Vec::new());
    for (path, text) in texts() {
        count += citations(&text).len();
        wrong.extend(unresolved(&text).into_iter().map(|what| format!("{}: {what}", path.display())));
    }
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
    assert!(count > 50, "only {count} citations were found: does the reader still see them?");
}

#[test]
fn every_form_of_citation_is_read() {
    let found = |text: &str| -> String {
        let found = citations(text).into_iter();
        let words =
            found.map(|(name, section)| section.map_or(name.clone(), |section| format!("{name} {section}")));
        words.collect::<Vec<_>>().join(", ")
    };
    assert_eq!(found("(SPEC-cos 3.2)"), "cos 3.2");
    assert_eq!(found("`docs/spec/SPEC-models.md` section 5; and"), "models 5");
    assert_eq!(found("SPEC-ls sections 3 to 7 (multiply-adds)"), "ls 3, ls 7");
    assert_eq!(found("SPEC-cos 1, 2 and SPEC-ls 8, pair by pair"), "cos 1, cos 2, ls 8");
    assert_eq!(found("(`SPEC-models.md` sections 4 and 5): a"), "models 4, models 5");
    assert_eq!(found("SPEC-ls 10.3: positions"), "ls 10.3");
    assert_eq!(found("as SPEC-vision\n//! 2 says"), "vision 2");
    assert_eq!(found("(`SPEC-ls.md`, `SPEC-*.md`)"), "ls");
}

#[test]
fn a_section_that_does_not_exist_is_noticed() {
    assert!(unresolved("SPEC-ls 5, SPEC-ls 9.3, SPEC-cos 3.4, SPEC-models.md section 6").is_empty());
    assert_eq!(unresolved("SPEC-ls 99"), ["SPEC-ls has no section 99"]);
    assert_eq!(unresolved("SPEC-ls 9.7"), ["SPEC-ls has no section 9.7"]);
    assert_eq!(unresolved("SPEC-sound 1"), ["there is no docs/spec/SPEC-sound.md"]);
}
