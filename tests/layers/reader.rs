//! Reads the sources as tokens: `use crate::...` with nested braces, `crate::` paths in expressions, and
//! `super::` chains that climb to the crate root. Comments, strings and doc links do not count.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Token {
    Word(String),
    Sign(char),
}

/// Tokens of Rust source without comments, strings, characters and lifetimes.
pub(super) fn tokens(source: &str) -> Vec<Token> {
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

/// Layers that `tokens` of a module of `krate` at `depth` (1 for `crates/record/src/stats.rs`) reach.
pub(super) fn imports(tokens: &[Token], krate: &str, depth: usize) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    let mut reach = |tokens: &[Token], krate: &str| {
        let mut names = BTreeSet::new();
        names_after(tokens, &mut names);
        found.extend(names.iter().map(|name| layer(krate, name)));
    };
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
            Token::Word(word) if word == "crate" => reach(&tokens[at + 1..], krate),
            Token::Word(word) if word.starts_with("effattn_") => {
                reach(&tokens[at + 1..], &word["effattn_".len()..]);
            }
            Token::Word(word) if word == "super" && !preceded_by_path(tokens, at) => {
                let mut climbs = 1;
                let mut next = at + 1;
                while is_path(&tokens[next..]) && tokens.get(next + 2) == Some(&Token::Word("super".into())) {
                    climbs += 1;
                    next += 3;
                }
                if climbs == depth {
                    reach(&tokens[next..], krate);
                }
            }
            _ => {}
        }
        at += 1;
    }
    found
}

pub(super) fn is_path(tokens: &[Token]) -> bool {
    tokens.starts_with(&[Token::Sign(':'), Token::Sign(':')])
}

pub(super) fn preceded_by_path(tokens: &[Token], at: usize) -> bool {
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

/// A source file of the workspace.
pub(super) struct Source {
    pub path: PathBuf,
    /// Crate, without `effattn-`; the root package is `effattn`.
    pub krate: String,
    /// Path of the module from the crate's root.
    pub module: Vec<String>,
}

impl Source {
    /// The layer that the file belongs to.
    pub(super) fn layer(&self) -> String {
        layer(&self.krate, &self.module[0])
    }
}

/// Modules that are layers of their own; the other modules of a crate are the layer with the crate's name.
const LAYERS: &[&str] = &[
    "stats",
    "pattern",
    "config",
    "report",
    "device",
    "nn",
    "attention",
    "program",
    "run",
    "train",
    "protocol",
    "cli",
    "term",
    "main",
];

/// The layer of the top-level `module` of `krate`.
pub(super) fn layer(krate: &str, module: &str) -> String {
    if LAYERS.contains(&module) { module } else { krate }.to_owned()
}

/// The crates of the workspace and their sources: the root package and everything in `crates/`.
pub(super) fn crates() -> Vec<(String, PathBuf)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut found = vec![("effattn".to_owned(), root.join("src"))];
    for item in fs::read_dir(root.join("crates")).unwrap() {
        let folder = item.unwrap().path();
        found.push((folder.file_name().unwrap().to_string_lossy().into_owned(), folder.join("src")));
    }
    found
}

/// Source files of the workspace, without the roots of libraries.
pub(super) fn sources() -> Vec<Source> {
    let mut files = Vec::new();
    for (krate, root) in crates() {
        let mut folders = vec![root.clone()];
        while let Some(folder) = folders.pop() {
            for item in fs::read_dir(&folder).unwrap() {
                let path = item.unwrap().path();
                if path.is_dir() {
                    folders.push(path);
                    continue;
                }
                let below = path.strip_prefix(&root).unwrap().with_extension("");
                let mut module: Vec<String> =
                    below.iter().map(|part| part.to_string_lossy().into_owned()).collect();
                if module.last().is_some_and(|last| last == "mod") {
                    module.pop();
                }
                if path.extension().is_some_and(|extension| extension == "rs") && module != ["lib"] {
                    files.push(Source { path, krate: krate.clone(), module });
                }
            }
        }
    }
    files.sort_by(|a, b| a.path.cmp(&b.path));
    files
}

/// `tokens` without the modules of tests among them, which may import from anywhere.
pub(super) fn without_tests(tokens: &[Token]) -> Vec<Token> {
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

#[test]
fn the_reader_sees_every_form_of_import() {
    let found = |source: &str, depth| {
        imports(&tokens(source), "model", depth).into_iter().collect::<Vec<_>>().join(" ")
    };
    assert_eq!(found("use crate::cli::Args;", 2), "cli");
    assert_eq!(found("use crate::{\n  stats::{mean, x::{y}},\n  cli as c,\n};", 1), "cli stats");
    assert_eq!(found("pub use crate::{attention};", 1), "attention");
    assert_eq!(found("fn f() -> effattn_kernel::op::Op { crate::run::go() }", 2), "kernel run");
    assert_eq!(found("use super::knobs; use super::super::cli::X;", 2), "cli");
    assert_eq!(found("use super::cli;", 1), "cli");
    assert_eq!(found("use super::cli;", 2), "");
    assert_eq!(found("mod tests { use super::super::cli::X; } use super::run;", 1), "cli run");
    assert_eq!(found("mod tests { use super::cli; }", 1), "");
    assert_eq!(found("use crate::*; use effattn_record::report::x;", 1), "model report");
}

#[test]
fn the_reader_skips_comments_strings_and_lifetimes() {
    let found = |source: &str| imports(&tokens(source), "model", 1).into_iter().collect::<Vec<_>>().join(" ");
    assert_eq!(found("//! [`crate::cli`]\n/* crate::a /* crate::b */ crate::c */ use crate::run;"), "run");
    assert_eq!(found(r##"let s = "\" crate::a"; let r = r#"crate::b " "#; crate::cli::f()"##), "cli");
    assert_eq!(found("let q = '\"'; let e = '\\''; fn f<'a>(x: &'a str) { crate::nn::g('x') }"), "nn");
}
