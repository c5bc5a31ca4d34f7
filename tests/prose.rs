//! No number in the prose of README and docs that no row carries: a number stands in a marker that names its row (`report
//! --splice` writes it), in a table that the report generates, in code, or is part of a name.

use std::path::Path;

use effattn::report::document::{BEGIN, END};
use effattn::report::fill::without;

/// Words in front of a number that make it a name, such as a figure's.
const NAMES: &[&str] = &[
    "table", "tables", "figure", "figures", "section", "sections", "rust", "and", "eq.", "seed", "seeds",
    "phase", "license", "pytorch", "version", "or",
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

#[test]
fn numbers_in_prose_come_from_rows() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let readme = std::fs::read_to_string(root.join("README.md")).unwrap();
    let found = numbers(&readme);
    assert!(found.is_empty(), "README.md has numbers that no row carries: {found:#?}");
}

#[test]
fn names_code_tables_and_marked_numbers_are_no_claims() {
    let text = "See Table 5 and `x 3`, [a 4](b5) f32.\n| 7 |\n```\n8\n```\nIt takes <!-- row a .1 -->0.3<!-- /row --> s.\n";
    assert_eq!(numbers(text), ["a 4"]);
    assert_eq!(numbers("about 3 times, 1.8 here; 76 %"), ["about 3", "times, 1.8", "here; 76"]);
}
