//! Imports go down only and never in a circle, and only `main`, `cli` and `term` talk to the terminal.

mod circles;
mod house;
mod reader;
mod walk;

use std::fs;

use reader::{Token, crates, imports, preceded_by_path, sources, tokens, without_tests};

/// The crates and the crates of the workspace that each may depend on. Cargo keeps these arrows; this says that no manifest
/// draws another.
const CRATES: &[(&str, &str)] = &[
    ("features", ""),
    ("record", "features"),
    ("kernel", "record"),
    ("data", "kernel record"),
    ("model", "kernel record"),
    ("effattn", "data kernel model record"),
];

/// The layers inside the crates and the layers that each may import.
const ALLOWED: &[(&str, &str)] = &[
    ("pattern", ""),
    ("stats", ""),
    ("record", "stats"),
    ("config", "record stats"),
    ("report", "config record stats pattern"),
    ("device", "config record stats pattern"),
    ("kernel", "device config record stats pattern"),
    ("nn", "kernel device config record stats pattern"),
    ("attention", "nn kernel device config record stats pattern"),
    ("model", "attention nn kernel device config record stats pattern"),
    ("data", "kernel device config record stats pattern"),
    ("term", "record stats"),
    ("run", "model data attention nn kernel device config record stats term"),
    ("program", "run kernel device config record stats"),
    ("train", "model data attention nn kernel device config record stats pattern"),
    ("protocol", "program train run model data attention nn kernel device config record stats pattern term"),
    (
        "cli",
        "protocol program report train run model data attention nn kernel device config record stats pattern term",
    ),
];

/// Modules that must not depend on candle, so that reports need no device.
const WITHOUT_CANDLE: &[&str] = &["config", "record", "stats", "pattern", "term", "report"];

/// Modules that may print or end the process.
const MAY_PRINT: &[&str] = &["main", "cli", "term"];

fn allowed(layer: &str) -> Option<Vec<&'static str>> {
    ALLOWED.iter().find(|(name, _)| *name == layer).map(|(_, allowed)| allowed.split(' ').collect())
}

#[test]
fn manifests_draw_no_other_arrow() {
    for (krate, src) in crates() {
        let manifest = fs::read_to_string(src.with_file_name("Cargo.toml")).unwrap();
        let manifest: toml::Table = manifest.parse().unwrap();
        let needs = manifest["dependencies"].as_table().unwrap().keys();
        let mut needs: Vec<&str> = needs.filter_map(|name| name.strip_prefix("effattn-")).collect();
        needs.sort_unstable();
        let allowed = CRATES.iter().find(|(name, _)| *name == krate).expect("a line in CRATES").1;
        assert_eq!(needs.join(" "), allowed, "{krate}");
    }
}

#[test]
fn imports_go_down_only() {
    let mut wrong = Vec::new();
    for source in sources() {
        let layer = source.layer();
        if layer == "main" {
            continue;
        }
        let path = source.path.display();
        let Some(allowed) = allowed(&layer) else {
            wrong.push(format!("{path}: layer {layer:?} has no line in ALLOWED"));
            continue;
        };
        let found = tokens(&fs::read_to_string(&source.path).unwrap());
        for import in imports(&found, &source.krate, source.module.len()) {
            let known = import == "effattn" || ALLOWED.iter().any(|(name, _)| *name == import);
            if known && import != layer && !allowed.contains(&import.as_str()) {
                wrong.push(format!("{path}: {layer} must not import {import}"));
            }
        }
    }
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}

#[test]
fn the_allowed_imports_have_no_cycle() {
    let mut order: Vec<&str> = Vec::new();
    while order.len() < ALLOWED.len() {
        let next = ALLOWED.iter().find(|(name, needs)| {
            !order.contains(name) && needs.split_whitespace().all(|need| order.contains(&need))
        });
        order.push(next.expect("the remaining modules import each other").0);
    }
}

#[test]
fn leaves_and_reports_need_no_candle() {
    for source in sources() {
        let (path, module) = (&source.path, source.layer());
        let words = tokens(&fs::read_to_string(path).unwrap());
        let candle = words
            .iter()
            .any(|token| matches!(token, Token::Word(word) if word == "candle_core" || word == "candle_nn"));
        let must_not = WITHOUT_CANDLE.contains(&module.as_str());
        assert!(!(candle && must_not), "{}: {module} must not use candle", path.display());
    }
}

#[test]
fn only_main_cli_and_term_print_or_exit() {
    for source in sources() {
        let (path, module) = (&source.path, source.layer());
        if MAY_PRINT.contains(&module.as_str()) {
            continue;
        }
        let found = tokens(&fs::read_to_string(path).unwrap());
        for (at, token) in found.iter().enumerate() {
            let Token::Word(word) = token else { continue };
            let is_macro = found.get(at + 1) == Some(&Token::Sign('!'));
            let prints =
                is_macro && ["print", "println", "eprint", "eprintln", "dbg"].contains(&word.as_str());
            let exits = word == "exit" && preceded_by_path(&found, at);
            assert!(!prints && !exits, "{}: {module} must not print or exit ({word})", path.display());
        }
    }
}

/// A FIFO or a device in the place of a file is waited for by everything but `record::file::open`.
#[test]
fn files_are_read_in_one_place() {
    // what the system offers, locks and claims, a file just made
    const OTHERS: &[&str] = &[
        "record/src/file.rs",
        "device/counters.rs",
        "device/machine.rs",
        "run/claim.rs",
        "run/folder.rs",
        "train/checkpoint.rs",
    ];
    let word = |word: &str| Token::Word(word.into());
    let calls = [("fs", "read"), ("fs", "read_to_string"), ("File", "open")]
        .map(|(of, call)| [word(of), Token::Sign(':'), Token::Sign(':'), word(call), Token::Sign('(')]);
    let mut seen = 0;
    for source in sources() {
        let path = &source.path;
        let text = fs::read_to_string(path).unwrap();
        let found = without_tests(&tokens(&text));
        let reads = calls.iter().any(|call| found.windows(call.len()).any(|window| window == call));
        let other = OTHERS.iter().any(|other| path.ends_with(other));
        let whole = path.file_name().is_some_and(|name| name == "tests.rs");
        assert!(!reads || other || whole, "{}: read files with record::file", path.display());
        seen += usize::from(reads);
    }
    assert!(seen >= OTHERS.len(), "{seen}");
}
