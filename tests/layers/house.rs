//! The table of crates in `docs/architecture.md`: lines of code, of tests and of comments. `EFFATTN_BLESS=1` writes it anew.

use std::fs;
use std::path::{Path, PathBuf};

/// Lines of source that are not blank.
#[derive(Clone, Copy, Default)]
struct Lines {
    code: usize,
    tests: usize,
    comments: usize,
}

/// Every file with `ends` below `folder`.
fn files(folder: &Path, ends: &[&str]) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for item in fs::read_dir(folder).unwrap() {
        let path = item.unwrap().path();
        if path.is_dir() {
            found.extend(files(&path, ends));
        } else if path.extension().is_some_and(|end| ends.iter().any(|known| end == *known)) {
            found.push(path);
        }
    }
    found
}

/// The lines of the files below `folders`: a module `tests`, a file of that name and the folders `tests` and `benches` are tests.
fn count(root: &Path, folders: &[&str]) -> Lines {
    let mut all = Lines::default();
    let folders = folders.iter().map(|folder| root.join(folder)).filter(|folder| folder.is_dir());
    for file in folders.flat_map(|folder| files(&folder, &["rs", "cu"])) {
        let below = file.strip_prefix(root).unwrap();
        let whole = below.iter().any(|part| part == "tests" || part == "tests.rs" || part == "benches");
        let mut inside = false;
        for line in fs::read_to_string(&file).unwrap().lines() {
            inside |= line.ends_with("mod tests {");
            match line.trim_start() {
                "" => {}
                comment if comment.starts_with("//") => all.comments += 1,
                _ if whole || inside => all.tests += 1,
                _ => all.code += 1,
            }
            inside &= line != "}";
        }
    }
    all
}

/// The rows of the table as the sources are.
fn rows(root: &Path) -> Vec<(String, Lines)> {
    let mut folders: Vec<(String, Vec<String>)> = ["record", "kernel", "data", "model"]
        .map(|name| (format!("crates/{name}"), vec![format!("crates/{name}")]))
        .into();
    let program = ["src", "tests", "benches", "examples"].map(str::to_owned);
    folders.push(("the program: `src`, `tests`, `benches`, `examples`".to_owned(), program.into()));
    folders.push(("xtask".to_owned(), vec!["xtask".to_owned()]));
    let mut rows: Vec<(String, Lines)> = folders
        .into_iter()
        .map(|(name, folders)| {
            let folders: Vec<&str> = folders.iter().map(String::as_str).collect();
            (name.clone(), count(root, &folders))
        })
        .collect();
    let sum = |of: fn(&Lines) -> usize| rows.iter().map(|(_, lines)| of(lines)).sum();
    let all = Lines { code: sum(|l| l.code), tests: sum(|l| l.tests), comments: sum(|l| l.comments) };
    rows.push(("all".to_owned(), all));
    rows
}

/// Counts are rounded to hundreds, and a tenth off is near enough: the table says how large what is.
#[test]
fn the_table_of_crates_counts_their_lines() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let page = root.join("docs/architecture.md");
    let text = fs::read_to_string(&page).unwrap();
    let head = "| lines of | code | tests | comments |\n|---|---|---|---|\n";
    let (before, rest) = text.split_once(head).expect("the table of crates");
    let (table, after) = rest.split_once("\n\n").expect("its end");
    let round = |lines: usize| (lines + 50) / 100 * 100;
    let counted = rows(root);
    let written: Vec<String> = counted
        .iter()
        .map(|(name, lines)| {
            format!("| {name} | {} | {} | {} |", round(lines.code), round(lines.tests), round(lines.comments))
        })
        .collect();
    if std::env::var_os("EFFATTN_BLESS").is_some() {
        fs::write(&page, format!("{before}{head}{}\n\n{after}", written.join("\n"))).unwrap();
        return;
    }
    assert_eq!(table.lines().count(), written.len(), "{table}");
    let numbers =
        |line: &str| -> Vec<f64> { line.split('|').filter_map(|cell| cell.trim().parse().ok()).collect() };
    for (said, now) in table.lines().zip(&written) {
        assert_eq!(said.split('|').nth(1), now.split('|').nth(1));
        let near = |(said, now): (&f64, &f64)| (said - now).abs() <= 100.0 + now / 10.0;
        let all = numbers(said).iter().zip(&numbers(now)).all(near);
        assert!(
            all,
            "{said} is now {now}; EFFATTN_BLESS=1 cargo test --release --test library house writes it"
        );
    }
}
