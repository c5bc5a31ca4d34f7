//! What the commands print: help pages, dry runs, bad input. `tests/cli/*.trycmd` hold commands with their
//! output; `[..]` stands for anything.

#[test]
fn commands_print_what_is_written_down() {
    // help wraps to COLUMNS, where a shell exports it
    trycmd::TestCases::new().case("tests/cli/*.trycmd").env("EFFATTN_LOG", "error").env("COLUMNS", "100");
}

/// A terminal of script(1) has as many columns as it is told, and no rows.
#[cfg(target_os = "linux")]
#[test]
fn tables_fit_a_terminal_that_tells_only_its_columns() {
    let line = format!("stty cols 80; '{}' list mechanisms", env!("CARGO_BIN_EXE_effattn"));
    let mut script = std::process::Command::new("script");
    let Ok(output) = script.args(["-qec", &line, "/dev/null"]).stdin(std::process::Stdio::null()).output()
    else {
        eprintln!("skipped: there is no script(1) here");
        return;
    };
    let text = String::from_utf8_lossy(&output.stdout);
    let widest = text.lines().map(|line| line.trim_end().chars().count()).max();
    assert!(
        output.status.success() && widest.is_some_and(|widest| (60..=80).contains(&widest)),
        "{widest:?}: {text}"
    );
}

/// Lines of code blocks, and pieces between backquotes, that call `effattn`.
fn documented(text: &str) -> Vec<String> {
    let mut fenced = false;
    let mut found = Vec::new();
    for line in text.lines() {
        fenced ^= line.trim_start().starts_with("```");
        let called = line.trim_start().strip_prefix("./target/release/").unwrap_or(line.trim_start());
        if (fenced || line.starts_with("    ")) && called.starts_with("effattn ") {
            // what stands behind two spaces explains
            let command = called.split("  ").next().unwrap_or_default();
            found.push(command.split(" #").next().unwrap_or_default().to_owned());
        } else if !fenced {
            let code = line.split('`').skip(1).step_by(2);
            found.extend(code.filter(|code| code.starts_with("effattn ")).map(str::to_owned));
        }
    }
    found
}

/// The program says of every command in README and docs that it knows its words: `--help` behind them ends well only then.
#[test]
fn every_documented_command_is_one() {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
    let docs = std::fs::read_dir(root.join("docs")).unwrap().map(|entry| entry.unwrap().path());
    let pages = docs.filter(|path| path.extension().is_some_and(|end| end == "md"));
    let (mut count, mut wrong) = (0, Vec::new());
    for page in pages.chain([root.join("README.md")]) {
        for line in documented(&std::fs::read_to_string(&page).unwrap()) {
            let placeholder = |word: &str| {
                word == "..." || word.chars().all(|letter| letter.is_ascii_uppercase() || letter == '/')
            };
            // help is asked for in front of the first word that stands for something
            let words: Vec<&str> =
                line.split_whitespace().skip(1).take_while(|word| !placeholder(word)).collect();
            let last = words.last().is_some_and(|word| word.starts_with("--"));
            let words = &words
                [..words.len() - usize::from(last && line.split_whitespace().count() > words.len() + 1)];
            let known = std::process::Command::new(env!("CARGO_BIN_EXE_effattn"))
                .args(words.iter().map(|word| word.trim_matches('\'')))
                .arg("--help")
                .output()
                .unwrap();
            count += 1;
            if !known.status.success() {
                wrong.push(format!("{}: {line}: {}", page.display(), String::from_utf8_lossy(&known.stderr)));
            }
        }
    }
    assert!(count > 40, "only {count} commands were found");
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
