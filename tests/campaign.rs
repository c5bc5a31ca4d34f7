//! `effattn campaign`: parts that end well, fail, run out of time or are killed, and what is done when the same command is given
//! again.
#![cfg(unix)]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use effattn::record::{Row, csv};
use serde_json::Value;

const HEAD: &str = "title = 'Tiny'\ndevice = 'cpu'\nminutes = 2\n";
const CHECK: &str = "[[part]]\nname = 'check'\nabout = ''\nminutes = 1\ncommand = ['check', '--model', 'linear', '--threads', '1']\n";

/// A part of six cells, of which each is measured for this long.
fn speed(time: &str) -> String {
    format!(
        "[[part]]\nname = 'steps'\nabout = ''\nminutes = 1\ncommand = ['speed', '--preset', 'ls-lra', '--model', 'linear', '--len', \
         '32,64,128', '--max-time', '{time}', '--warmup', '1', '--min-runs', '3', '--runs', '1000000', '--threads', '1']\n"
    )
}

/// A folder with `mine.toml` of these parts.
fn folder(parts: &[&str]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("mine.toml"), format!("{HEAD}{}", parts.concat())).unwrap();
    folder
}

fn effattn(folder: &Path, words: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_effattn"));
    command.args(words.split_whitespace()).current_dir(folder).env("XDG_CACHE_HOME", folder.join("cache"));
    command.env_remove("EFFATTN_LOG");
    command
}

fn run(folder: &Path, more: &str) -> Output {
    effattn(folder, &format!("campaign ./mine.toml -o out {more}")).output().unwrap()
}

fn texts(output: &Output) -> (String, String) {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (text(&output.stdout), text(&output.stderr))
}

/// State, exit code and number of starts of every part.
fn states(folder: &Path) -> Vec<(String, String, Option<i64>, usize)> {
    let text = fs::read_to_string(folder.join("out/campaign.json")).unwrap();
    let record: Value = serde_json::from_str(&text).unwrap();
    let parts = record["parts"].as_array().unwrap().iter();
    let word = |part: &Value, key: &str| part[key].as_str().unwrap().to_owned();
    let starts = |part: &Value| part["starts"].as_array().unwrap().len();
    parts.map(|part| (word(part, "name"), word(part, "state"), part["exit"].as_i64(), starts(part))).collect()
}

fn part(name: &str, state: &str, exit: Option<i64>, starts: usize) -> (String, String, Option<i64>, usize) {
    (name.to_owned(), state.to_owned(), exit, starts)
}

/// The runs of the part `steps`.
fn runs(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder.join("out/steps/speed")).into_iter().flatten().flatten();
    let folders = entries.filter(|entry| entry.file_type().unwrap().is_dir()).map(|entry| entry.path());
    folders.filter(|path| path.join("manifest.json").exists()).collect()
}

fn rows(run: &Path) -> Vec<Row> {
    csv::from_str(&fs::read_to_string(run.join("rows.csv")).unwrap()).unwrap()
}

/// Waits until the part `steps` has a finished cell.
fn until_a_cell(folder: &Path, child: &mut Child) {
    let start = Instant::now();
    let begun = || {
        runs(folder)
            .iter()
            .any(|run| fs::metadata(run.join("journal.jsonl")).is_ok_and(|file| file.len() > 0))
    };
    while !begun() {
        assert!(start.elapsed() < Duration::from_secs(60), "no cell within a minute");
        assert!(child.try_wait().unwrap().is_none(), "it ended before");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn signal(name: &str, child: &Child) {
    assert!(Command::new("kill").args([name, &child.id().to_string()]).status().unwrap().success());
}

#[test]
fn a_part_that_fails_is_a_line_and_the_others_are_kept() {
    let absent = "[[part]]\nname = 'data'\nabout = ''\nminutes = 1\ncommand = ['lra', '--task', 'text', '--model', 'linear']\n";
    let folder = folder(&[CHECK, absent, &speed("40ms")]);
    let at = folder.path();
    let first = run(at, "");
    let (table, said) = texts(&first);
    assert_eq!(first.status.code(), Some(1), "{table}{said}");
    let want = [
        part("check", "done", Some(0), 1),
        part("data", "refused", Some(2), 1),
        part("steps", "done", Some(0), 1),
    ];
    assert_eq!(states(at), want, "{said}");
    assert!(
        table.contains("2 of 3 parts are finished") && said.contains("data: refused after"),
        "{table}{said}"
    );
    assert_eq!(runs(at).len(), 1);
    assert!(fs::read_to_string(at.join("out/check/output.txt")).unwrap().contains("golden"));
    assert!(fs::metadata(at.join("out/check/check.json")).unwrap().len() > 100);
    // what is finished stays as it is, what was refused is tried again
    let before = fs::read(runs(at)[0].join("rows.csv")).unwrap();
    let again = run(at, "");
    assert_eq!(again.status.code(), Some(1));
    let want = [
        part("check", "done", Some(0), 1),
        part("data", "refused", Some(2), 2),
        part("steps", "done", Some(0), 1),
    ];
    assert_eq!(states(at), want);
    assert!(runs(at).len() == 1 && fs::read(runs(at)[0].join("rows.csv")).unwrap() == before);
    // one part alone, and a report of everything
    let only = run(at, "--only check");
    assert_eq!(only.status.code(), Some(0), "{}", texts(&only).1);
    let fresh = run(at, "--only check --fresh");
    assert_eq!(fresh.status.code(), Some(0), "{}", texts(&fresh).1);
    assert_eq!(states(at), want, "the other parts are as they were");
    let report = effattn(at, "report out").output().unwrap();
    assert!(report.status.success() && texts(&report).0.contains("linear"), "{}", texts(&report).1);
}

#[test]
fn a_campaign_that_is_killed_goes_on_where_it_was() {
    let folder = folder(&[CHECK, &speed("600ms")]);
    let at = folder.path();
    for (turn, name) in ["-KILL", "-TERM"].into_iter().enumerate() {
        let mut child = effattn(at, "campaign ./mine.toml -o out");
        let mut child = child.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        until_a_cell(at, &mut child);
        while states(at).pop().unwrap().3 <= turn {
            std::thread::sleep(Duration::from_millis(20));
        }
        std::thread::sleep(Duration::from_millis(200));
        signal(name, &child);
        let ended = child.wait().unwrap();
        assert_eq!(ended.code(), (turn == 1).then_some(130), "{name}: {ended}");
        let (_, state, ..) = states(at).pop().unwrap();
        assert_eq!(state, ["running", "stopped"][turn]);
    }
    let last = run(at, "");
    assert_eq!(last.status.code(), Some(0), "{}", texts(&last).1);
    assert_eq!(states(at), [part("check", "done", Some(0), 1), part("steps", "done", Some(0), 3)]);
    // the same run was continued, and every cell is there once
    assert_eq!(runs(at).len(), 1);
    let measured = rows(&runs(at)[0]);
    let mut cells: Vec<_> =
        measured.iter().filter(|row| row.metric == "step_time").map(|row| (row.len, row.pass)).collect();
    assert_eq!(cells.len(), 6, "{cells:?}");
    cells.dedup();
    assert_eq!(cells.len(), 6, "{cells:?}");
}

#[test]
fn a_part_that_runs_out_of_time_is_no_failure_and_goes_on() {
    let folder = folder(&[&speed("1s")]);
    let at = folder.path();
    let first = run(at, "--minutes 0.03");
    let (table, said) = texts(&first);
    assert_eq!(first.status.code(), Some(0), "{table}{said}");
    assert_eq!(states(at), [part("steps", "timeout", None, 1)], "{said}");
    assert!(said.contains("its time was over") && table.contains("The same command"), "{table}{said}");
    let second = run(at, "");
    assert_eq!(second.status.code(), Some(0), "{}", texts(&second).1);
    assert_eq!((states(at), runs(at).len()), (vec![part("steps", "done", Some(0), 2)], 1));
}

#[test]
fn another_campaign_and_a_damaged_record_are_refused() {
    let folder = folder(&[CHECK]);
    let at = folder.path();
    assert!(run(at, "").status.success());
    let refused = |more: &str, says: &str| {
        let output = run(at, more);
        let (table, said) = texts(&output);
        assert!(output.status.code() == Some(2) && said.contains(says), "{more}: {table}{said}");
    };
    refused("--quick", "holds a campaign without --quick; choose another folder");
    fs::write(at.join("mine.toml"), format!("{HEAD}{}", CHECK.replace("linear", "full"))).unwrap();
    refused("", "holds other parts under the same name");
    assert!(run(at, "--fresh").status.success());
    fs::write(at.join("out/campaign.json"), "{").unwrap();
    refused("", "is damaged");
    assert!(run(at, "--fresh").status.success());
    fs::write(at.join("mine.toml"), format!("{HEAD}speed = 1\n{CHECK}")).unwrap();
    refused("", "mine.toml:4: unknown field `speed`");
}

#[test]
fn a_dry_run_has_a_line_for_every_part_and_leaves_nothing() {
    let folder = folder(&[CHECK, &speed("40ms")]);
    let output = run(folder.path(), "--dry-run");
    let (table, said) = texts(&output);
    assert!(output.status.success(), "{said}");
    let line = table.lines().find(|line| line.trim_start().starts_with("steps ")).unwrap_or_default();
    assert!(line.contains(" 6 ") && line.contains("waiting"), "{table}");
    assert!(!folder.path().join("out").exists());
}
