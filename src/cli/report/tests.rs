use super::*;
use crate::run::manifest::Manifest;
use crate::run::plan::Plan;
use effattn_record::config::suite::BUILTIN_SUITES;
use effattn_record::report::reference;

/// A run of `command` in `folder` with one row.
fn run(folder: &Path, command: &str, row: Row) -> StoredRun {
    let plan = Plan { command: command.to_owned(), ..Plan::default() };
    StoredRun { folder: folder.to_owned(), manifest: Manifest::new(&plan, "id"), rows: vec![row] }
}

#[test]
fn a_suite_is_known_by_its_rows_and_by_its_file() {
    protocol::declare_settings();
    let folder = tempfile::tempdir().unwrap();
    let row = Row { suite: Some("mine".to_owned()), ..Row::new("lra", "ls") };
    let runs = [run(folder.path(), "lra", row)];
    let known = suite_in_rows("mine", &runs).unwrap();
    assert_eq!(known, ("mine".to_owned(), "lra --suite mine".to_owned()));
    let file = folder.path().join("mine.toml").display().to_string();
    std::fs::write(&file, BUILTIN_SUITES[0].1).unwrap();
    let (name, command) = suite_in_rows(&file, &runs).unwrap();
    assert!(name == "mine" && command.ends_with(&format!(" --suite {file}")), "{name}: {command}");
    assert!(suite_in_rows("other", &runs).is_err());
}

#[test]
fn damaged_files_beside_the_rows_are_left_out() {
    let folder = tempfile::tempdir().unwrap();
    let row = Row { len: Some(64), ..Row::new("speed", "ls") }.with("step_time", "s", Some(1.0));
    let run = run(folder.path(), "speed", row);
    for name in [reference::FILE, "samples.jsonl"] {
        std::fs::write(folder.path().join(name), "{\n").unwrap();
    }
    let section = measured::section((&run, folder.path()), &run.rows, false, false).unwrap();
    assert_eq!((section.part, section.title.as_str()), (Part::Other, "speed"));
    // a suite of one's own that this version cannot read
    let mut run = run;
    run.manifest.suite = Some("title = [".to_owned());
    run.rows[0].suite = Some("mine".to_owned());
    assert!(measured::section((&run, folder.path()), &run.rows, false, false).is_ok());
}

#[test]
fn a_report_takes_the_place_of_no_result() {
    let folder = tempfile::tempdir().unwrap();
    let rows = folder.path().join("rows.csv");
    std::fs::write(&rows, "x").unwrap();
    let runs = [run(folder.path(), "speed", Row::new("speed", "ls"))];
    let refused = ensure_no_result(&rows, &runs).unwrap_err().to_string();
    assert!(refused.contains("rows.csv is a file of the results"), "{refused}");
    std::fs::write(folder.path().join("report.md"), "x").unwrap();
    for name in ["report.md", "new.md", "manifest.json"] {
        assert!(ensure_no_result(&folder.path().join(name), &runs).is_ok(), "{name}");
    }
}

#[test]
fn few_steps_are_a_first_look() {
    let row = |words: Option<&str>| Row { differs: words.map(str::to_owned), ..Row::new("lra", "ls") };
    assert!(is_first_look(&row(Some("steps 40 (62400); rate 1e-3 (1e-4)"))));
    assert!(!is_first_look(&row(Some("steps 800 (20000)"))) && !is_first_look(&row(None)));
}

#[test]
fn the_name_of_the_file_says_the_form() {
    for (name, format) in [("r.html", Format::Html), ("r.HTM", Format::Html), ("r.md", Format::Markdown)] {
        assert_eq!(Format::of(Some(Path::new(name))), format, "{name}");
    }
    assert_eq!(Format::of(None), Format::Markdown);
}
