//! Imports go down only and never in a circle, and only `main`, `cli` and `term` talk to the terminal.
//!
//! Reads the sources as tokens: `use crate::...` with nested braces, `crate::` paths in expressions, and
//! `super::` chains that climb to the crate root. Comments, strings and doc links do not count.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// Every module of the crate and the modules it may import.
const ALLOWED: &[(&str, &str)] = &[
    ("pattern", ""),
    ("stats", ""),
    ("term", "record stats"),
    ("record", "stats"),
    ("config", "record stats"),
    ("device", "config record stats pattern"),
    ("kernel", "device config record stats pattern"),
    ("nn", "kernel device config record stats pattern"),
    ("attention", "nn kernel device config record stats pattern"),
    ("model", "attention nn kernel device config record stats pattern"),
    ("data", "attention nn kernel device config record stats pattern term"),
    ("run", "model data attention nn kernel device config record stats term"),
    ("train", "model data attention nn kernel device config record stats pattern"),
    ("protocol", "train run model data attention nn kernel device config record stats pattern term"),
    ("report", "config record stats pattern"),
    (
        "cli",
        "protocol report train run model data attention nn kernel device config record stats pattern term",
    ),
];

/// Modules that must not depend on candle, so that reports need no device.
const WITHOUT_CANDLE: &[&str] = &["config", "record", "stats", "pattern", "term", "report"];

/// Modules that may print or end the process.
const MAY_PRINT: &[&str] = &["main", "cli", "term"];

#[derive(Clone, Debug, PartialEq, Eq)]
enum Token {
    Word(String),
    Sign(char),
}

/// Tokens of Rust source without comments, strings, characters and lifetimes.
fn tokens(source: &str) -> Vec<Token> {
    let chars: Vec<char> = source.chars().collect();
    let mut found = Vec::new();
    let mut at = 0;
    while at < chars.len() {
        let rest = &chars[at..];
        at += match rest {
            ['/', '/', ..] => rest.iter().position(|c| *c == '\n').unwrap_or(rest.len()),
            ['/', '*', ..] => block_comment(rest),
            ['"', ..] => string(rest),
            ['r', ..] | ['b', 'r', ..] if raw_string(rest).is_some() => raw_string(rest).unwrap_or(1),
            ['\'', '\\', _, tail @ ..] => {
                3 + tail.iter().position(|c| *c == '\'').map_or(tail.len(), |end| end + 1)
            }
            ['\'', _, '\'', ..] => 3,
            [first, ..] if first.is_alphanumeric() || *first == '_' => {
                let len = rest.iter().take_while(|c| c.is_alphanumeric() || **c == '_').count();
                found.push(Token::Word(rest[..len].iter().collect()));
                len
            }
            [first, ..] => {
                if !first.is_whitespace() {
                    found.push(Token::Sign(*first));
                }
                1
            }
            [] => 1,
        };
    }
    found
}

fn block_comment(rest: &[char]) -> usize {
    let (mut depth, mut at) = (0, 0);
    while at < rest.len() {
        match rest[at..] {
            ['/', '*', ..] => (depth, at) = (depth + 1, at + 2),
            ['*', '/', ..] => (depth, at) = (depth - 1, at + 2),
            _ => at += 1,
        }
        if depth == 0 {
            break;
        }
    }
    at
}

fn string(rest: &[char]) -> usize {
    let mut at = 1;
    while at < rest.len() && rest[at] != '"' {
        at += if rest[at] == '\\' { 2 } else { 1 };
    }
    at + 1
}

/// Length of a raw string at the start of `rest`.
fn raw_string(rest: &[char]) -> Option<usize> {
    let start = rest.iter().position(|c| *c == 'r')? + 1;
    let hashes = rest[start..].iter().take_while(|c| **c == '#').count();
    (rest.get(start + hashes) == Some(&'"')).then_some(())?;
    let close: Vec<char> = std::iter::once('"').chain(std::iter::repeat_n('#', hashes)).collect();
    let body = start + hashes + 1;
    let end = rest[body..].windows(close.len()).position(|window| window == close)?;
    Some(body + end + close.len())
}

/// Top-level modules that `tokens` of the module at `depth` (1 for `src/stats.rs`) reach.
fn imports(tokens: &[Token], depth: usize) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    let (mut depth, mut braces, mut inline) = (depth, 0usize, Vec::new());
    let mut at = 0;
    while at < tokens.len() {
        match &tokens[at] {
            Token::Sign('{') => {
                braces += 1;
                if at >= 2 && tokens[at - 2] == Token::Word("mod".into()) {
                    inline.push(braces);
                    depth += 1;
                }
            }
            Token::Sign('}') => {
                if inline.last() == Some(&braces) {
                    inline.pop();
                    depth -= 1;
                }
                braces = braces.saturating_sub(1);
            }
            Token::Word(word) if word == "crate" => names_after(&tokens[at + 1..], &mut found),
            Token::Word(word) if word == "super" && !preceded_by_path(tokens, at) => {
                let mut climbs = 1;
                let mut next = at + 1;
                while is_path(&tokens[next..]) && tokens.get(next + 2) == Some(&Token::Word("super".into())) {
                    climbs += 1;
                    next += 3;
                }
                if climbs == depth {
                    names_after(&tokens[next..], &mut found);
                }
            }
            _ => {}
        }
        at += 1;
    }
    found
}

fn is_path(tokens: &[Token]) -> bool {
    tokens.starts_with(&[Token::Sign(':'), Token::Sign(':')])
}

fn preceded_by_path(tokens: &[Token], at: usize) -> bool {
    at >= 2 && is_path(&tokens[at - 2..])
}

/// First names after `::`: one word, or the first words of every branch of a brace group.
fn names_after(tokens: &[Token], found: &mut BTreeSet<String>) {
    if !is_path(tokens) {
        return;
    }
    match tokens.get(2) {
        Some(Token::Word(name)) => {
            found.insert(name.clone());
        }
        Some(Token::Sign('{')) => {
            let (mut depth, mut first) = (1, true);
            for token in &tokens[3..] {
                match token {
                    Token::Sign('{') => depth += 1,
                    Token::Sign('}') => depth -= 1,
                    Token::Sign(',') if depth == 1 => first = true,
                    Token::Word(name) if first => {
                        found.insert(name.clone());
                        first = false;
                    }
                    Token::Sign('*') if first => {
                        found.insert("*".into());
                    }
                    _ => {}
                }
                if depth == 0 {
                    break;
                }
            }
        }
        Some(Token::Sign(sign)) => {
            found.insert(sign.to_string());
        }
        None => {}
    }
}

/// Source files of the library with their top-level module and depth.
fn sources() -> Vec<(PathBuf, String, usize)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut folders = vec![root.clone()];
    let mut files = Vec::new();
    while let Some(folder) = folders.pop() {
        for item in fs::read_dir(&folder).unwrap() {
            let path = item.unwrap().path();
            if path.is_dir() {
                folders.push(path);
                continue;
            }
            let below = path.strip_prefix(&root).unwrap().with_extension("");
            let mut parts: Vec<String> =
                below.iter().map(|part| part.to_string_lossy().into_owned()).collect();
            if parts.last().is_some_and(|last| last == "mod") {
                parts.pop();
            }
            let module = parts[0].clone();
            if path.extension().is_some_and(|extension| extension == "rs") && module != "lib" {
                files.push((path, module, parts.len()));
            }
        }
    }
    files.sort();
    files
}

fn allowed(module: &str) -> Option<Vec<&'static str>> {
    ALLOWED.iter().find(|(name, _)| *name == module).map(|(_, allowed)| allowed.split(' ').collect())
}

#[test]
fn imports_go_down_only() {
    let modules: BTreeSet<String> = sources().into_iter().map(|(_, module, _)| module).collect();
    let mut wrong = Vec::new();
    for (path, module, depth) in sources() {
        if module == "main" {
            continue;
        }
        let Some(allowed) = allowed(&module) else {
            wrong.push(format!("{}: module {module:?} has no line in ALLOWED", path.display()));
            continue;
        };
        for import in imports(&tokens(&fs::read_to_string(&path).unwrap()), depth) {
            let is_module = modules.contains(&import) || import == "*";
            if is_module && import != module && !allowed.contains(&import.as_str()) {
                wrong.push(format!("{}: {module} must not import {import}", path.display()));
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

/// `tokens` without the modules of tests among them, which may import from anywhere.
fn without_tests(tokens: &[Token]) -> Vec<Token> {
    let opens = [Token::Word("mod".into()), Token::Word("tests".into()), Token::Sign('{')];
    let (mut kept, mut at) = (Vec::new(), 0);
    while at < tokens.len() {
        if !tokens[at..].starts_with(&opens) {
            kept.push(tokens[at].clone());
            at += 1;
            continue;
        }
        let mut depth = 0;
        at += 2;
        loop {
            match tokens.get(at) {
                Some(Token::Sign('{')) => depth += 1,
                Some(Token::Sign('}')) => depth -= 1,
                Some(_) => {}
                None => break,
            }
            at += 1;
            if depth == 0 {
                break;
            }
        }
    }
    kept
}

/// Paths from the crate's root that `tokens` of `module` name, by `crate::` or `super::`.
fn paths(tokens: &[Token], module: &[String]) -> Vec<Vec<String>> {
    let mut found = Vec::new();
    for (at, token) in tokens.iter().enumerate() {
        let Token::Word(word) = token else { continue };
        if !is_path(&tokens[at + 1..]) || preceded_by_path(tokens, at) {
            continue;
        }
        match word.as_str() {
            "crate" => branches(&tokens[at + 1..], Vec::new(), &mut found),
            "super" if !module.is_empty() => {
                branches(&tokens[at + 1..], module[..module.len() - 1].to_vec(), &mut found);
            }
            _ => {}
        }
    }
    found
}

/// Every path that goes on from `prefix` with `tokens`, which start with `::`.
fn branches(tokens: &[Token], prefix: Vec<String>, found: &mut Vec<Vec<String>>) {
    match tokens.get(2) {
        Some(Token::Word(word)) => {
            let mut path = prefix;
            if word == "super" {
                path.pop();
            } else {
                path.push(word.clone());
            }
            if is_path(&tokens[3..]) { branches(&tokens[3..], path, found) } else { found.push(path) }
        }
        Some(Token::Sign('{')) => {
            let (mut depth, mut first) = (1, true);
            for (at, token) in tokens.iter().enumerate().skip(3) {
                match token {
                    Token::Sign('{') => depth += 1,
                    Token::Sign('}') => depth -= 1,
                    Token::Sign(',') if depth == 1 => first = true,
                    Token::Word(_) if first => {
                        // as if the word stood behind `::`
                        branches(&tokens[at - 2..], prefix.clone(), found);
                        first = false;
                    }
                    _ => {}
                }
                if depth == 0 {
                    break;
                }
            }
        }
        _ => found.push(prefix),
    }
}

/// For every folder, which of its modules imports from which other.
fn siblings() -> BTreeMap<Vec<String>, BTreeMap<String, BTreeSet<String>>> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let module = |path: &Path| -> Vec<String> {
        let below = path.strip_prefix(&root).unwrap().with_extension("");
        let parts = below.iter().map(|part| part.to_string_lossy().into_owned());
        parts.filter(|part| part != "mod").collect()
    };
    let files: Vec<(PathBuf, Vec<String>)> =
        sources().into_iter().map(|(path, ..)| (path.clone(), module(&path))).collect();
    let modules: BTreeSet<&[String]> =
        files.iter().flat_map(|(_, module)| (1..=module.len()).map(|len| &module[..len])).collect();
    let mut edges: BTreeMap<Vec<String>, BTreeMap<String, BTreeSet<String>>> = BTreeMap::new();
    for (path, module) in files.iter().filter(|(_, module)| !module.contains(&"tests".to_owned())) {
        let source = without_tests(&tokens(&fs::read_to_string(path).unwrap()));
        for target in paths(&source, module) {
            let shared = module.iter().zip(&target).take_while(|(a, b)| a == b).count();
            if shared < module.len() && shared < target.len() && modules.contains(&target[..=shared]) {
                let from = edges.entry(module[..shared].to_vec()).or_default();
                from.entry(module[shared].clone()).or_default().insert(target[shared].clone());
            }
        }
    }
    edges
}

/// What is left of `imports` without the modules that import nothing of it and those that nothing of it imports:
/// nothing, or a circle.
fn circle(mut imports: BTreeMap<String, BTreeSet<String>>) -> BTreeMap<String, BTreeSet<String>> {
    loop {
        let before = imports.clone();
        let needed: BTreeSet<&String> = before.values().flatten().collect();
        imports.retain(|module, needs| {
            needs.retain(|need| before.contains_key(need));
            !needs.is_empty() && needed.contains(module)
        });
        if imports == before {
            return imports;
        }
    }
}

#[test]
fn modules_of_a_folder_do_not_import_each_other_in_a_circle() {
    let mut wrong = Vec::new();
    for (folder, imports) in siblings() {
        for (module, needs) in circle(imports) {
            wrong.push(format!("{}::{module} imports {needs:?}", folder.join("::")));
        }
    }
    assert!(wrong.is_empty(), "circles among:\n{}", wrong.join("\n"));
}

#[test]
fn the_reader_sees_circles() {
    let module: Vec<String> = ["kernel", "attend", "cpu"].map(String::from).into();
    let found = |source: &str| -> Vec<String> {
        paths(&without_tests(&tokens(source)), &module).iter().map(|path| path.join("::")).collect()
    };
    assert_eq!(
        found("use super::super::lsh::{self, a::b, c};").join(" "),
        "kernel::lsh::self kernel::lsh::a::b kernel::lsh::c"
    );
    assert_eq!(
        found("fn f() { super::op::go(crate::nn::x) } mod tests { use super::y; } use super::z;").join(" "),
        "kernel::attend::op::go nn::x kernel::attend::z"
    );
    let imports = |pairs: &[(&str, &str)]| {
        let mut map: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
        for (from, to) in pairs {
            map.entry((*from).into()).or_default().insert((*to).into());
        }
        map
    };
    assert!(circle(imports(&[("a", "b"), ("b", "c"), ("a", "c")])).is_empty());
    assert_eq!(circle(imports(&[("a", "b"), ("b", "c"), ("c", "b")])).len(), 2);
}

#[test]
fn leaves_and_reports_need_no_candle() {
    for (path, module, _) in sources() {
        let words = tokens(&fs::read_to_string(&path).unwrap());
        let candle = words
            .iter()
            .any(|token| matches!(token, Token::Word(word) if word == "candle_core" || word == "candle_nn"));
        let must_not = WITHOUT_CANDLE.contains(&module.as_str());
        assert!(!(candle && must_not), "{}: {module} must not use candle", path.display());
    }
}

#[test]
fn only_main_cli_and_term_print_or_exit() {
    for (path, module, _) in sources() {
        if MAY_PRINT.contains(&module.as_str()) {
            continue;
        }
        let found = tokens(&fs::read_to_string(&path).unwrap());
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
    const OTHERS: &[&str] =
        &["record/file.rs", "device/machine.rs", "run/claim.rs", "run/folder.rs", "train/checkpoint.rs"];
    let word = |word: &str| Token::Word(word.into());
    let calls = [("fs", "read"), ("fs", "read_to_string"), ("File", "open")]
        .map(|(of, call)| [word(of), Token::Sign(':'), Token::Sign(':'), word(call), Token::Sign('(')]);
    let mut seen = 0;
    for (path, ..) in sources() {
        let text = fs::read_to_string(&path).unwrap();
        let found = without_tests(&tokens(&text));
        let reads = calls.iter().any(|call| found.windows(call.len()).any(|window| window == call));
        let other = OTHERS.iter().any(|other| path.ends_with(other));
        let whole = path.file_name().is_some_and(|name| name == "tests.rs");
        assert!(!reads || other || whole, "{}: read files with record::file", path.display());
        seen += usize::from(reads);
    }
    assert!(seen >= OTHERS.len(), "{seen}");
}

#[test]
fn the_reader_sees_every_form_of_import() {
    let found =
        |source: &str, depth| imports(&tokens(source), depth).into_iter().collect::<Vec<_>>().join(" ");
    assert_eq!(found("use crate::cli::Args;", 2), "cli");
    assert_eq!(found("use crate::{\n  stats::{mean, x::{y}},\n  cli as c,\n};", 1), "cli stats");
    assert_eq!(found("pub use crate::{attention};", 1), "attention");
    assert_eq!(found("fn f() -> crate::model::Model { crate::run::go() }", 2), "model run");
    assert_eq!(found("use super::knobs; use super::super::cli::X;", 2), "cli");
    assert_eq!(found("use super::cli;", 1), "cli");
    assert_eq!(found("use super::cli;", 2), "");
    assert_eq!(found("mod tests { use super::super::cli::X; } use super::run;", 1), "cli run");
    assert_eq!(found("mod tests { use super::cli; }", 1), "");
    assert_eq!(found("use crate::*;", 1), "*");
}

#[test]
fn the_reader_skips_comments_strings_and_lifetimes() {
    let found = |source: &str| imports(&tokens(source), 1).into_iter().collect::<Vec<_>>().join(" ");
    assert_eq!(found("//! [`crate::cli`]\n/* crate::a /* crate::b */ crate::c */ use crate::d;"), "d");
    assert_eq!(found(r##"let s = "\" crate::a"; let r = r#"crate::b " "#; crate::c::f()"##), "c");
    assert_eq!(found("let q = '\"'; let e = '\\''; fn f<'a>(x: &'a str) { crate::z::g('x') }"), "z");
}
