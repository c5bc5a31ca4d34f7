use super::*;
use crate::run::journal::Entry;
use crate::run::manifest::Manifest;
use crate::run::plan::Plan;
use effattn_record::{Outcome, Row};

/// A finished run of `speed` in `folder`, of `suite` where there is one, without a plan.
fn put(folder: &Path, suite: Option<&str>) {
    std::fs::create_dir_all(folder).unwrap();
    let plan = Plan {
        name: suite.unwrap_or("speed").to_owned(),
        command: "speed".to_owned(),
        suite: suite.map(|_| "title = 't'".to_owned()),
        ..Plan::default()
    };
    let manifest = Manifest { state: State::Done, ..Manifest::new(&plan, "id") };
    manifest.write(folder).unwrap();
    let row =
        Row { suite: suite.map(str::to_owned), ..Row::new("speed", "ls").with("step_time", "s", Some(1.0)) };
    let entry = Entry { rows: vec![row.with_outcome(Outcome::Ok, None)], ..Entry::new("a cell") };
    let line = serde_json::to_string(&entry).unwrap() + "\n";
    std::fs::write(folder.join("journal.jsonl"), line).unwrap();
    std::fs::write(folder.join("rows.csv"), "").unwrap();
}

fn joined(folder: &Path, output: &Path) -> Result<Merged, MergeError> {
    merge(&[folder.to_owned()], Some(output), |_| false, &CancelToken::default())
}

#[test]
fn a_finished_run_without_its_journal_is_refused() {
    let root = tempfile::tempdir().unwrap();
    let (run, output) = (root.path().join("st/a"), root.path().join("joined"));
    put(&run, None);
    std::fs::remove_file(run.join("journal.jsonl")).unwrap();
    let error = joined(&run, &output).err().unwrap().to_string();
    assert!(error.contains("has no journal.jsonl") && error.contains("effattn report "), "{error}");
    std::fs::write(run.join("journal.jsonl"), "").unwrap();
    let error = joined(&run, &output).err().unwrap().to_string();
    assert!(error.contains("has no plan.json and no cell in its journal.jsonl"), "{error}");
    assert!(!output.exists(), "nothing was written");
}

#[test]
fn without_a_plan_it_stands_where_its_command_looks_for_it() {
    let root = tempfile::tempdir().unwrap();
    for (suite, name) in [(None, "speed"), (Some("ls-table1"), "ls-table1")] {
        let (run, output) = (root.path().join("st").join(name), root.path().join("joined"));
        put(&run, suite);
        let merged = joined(&run, &output).unwrap();
        assert_eq!(merged.folder.parent().unwrap(), output.join(name));
        assert_eq!((merged.done, merged.cells), (1, 1));
        assert!(merged.remarks.is_empty(), "it is finished");
        let manifest = Manifest::read(&run).unwrap().unwrap();
        Manifest { state: State::Unfinished, ..manifest }.write(&run).unwrap();
        let said = joined(&run, &root.path().join("again")).unwrap().remarks.concat();
        assert!(said.contains("there is no plan.json"), "{said}");
    }
}
