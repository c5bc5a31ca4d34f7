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

/// Top-level modules that `tokens` of the module at `depth` (1 for `src/stats.rs`) reach.
pub(super) fn imports(tokens: &[Token], depth: usize) -> BTreeSet<String> {
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

/// Source files of the library with their top-level module and depth.
pub(super) fn sources() -> Vec<(PathBuf, String, usize)> {
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
