use super::*;
use crate::run::plan::Plan;

/// A folder with copies of a committed run at `places`.
fn copies(places: &[&str]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let results = Path::new(env!("CARGO_MANIFEST_DIR")).join("reproduction/results");
    let run = StoredRun::find_all(&results).unwrap().swap_remove(0).folder;
    for place in places {
        let to = folder.path().join(place);
        std::fs::create_dir_all(&to).unwrap();
        for name in ["manifest.json", "rows.csv"] {
            std::fs::copy(run.join(name), to.join(name)).unwrap();
        }
    }
    folder
}

/// A committed run as if it lay at `results/speed/NAME` and `words` had been typed.
fn typed(name: &str, words: &[&str]) -> StoredRun {
    let committed = Path::new(env!("CARGO_MANIFEST_DIR")).join("reproduction/results/speed");
    let mut run = StoredRun::find_all(&committed).unwrap().swap_remove(0);
    run.folder = Path::new("results/speed").join(name);
    run.manifest.argv = words.iter().map(|word| String::from(*word)).collect();
    run
}

#[test]
fn a_run_is_called_by_what_it_measures() {
    let words =
        ["speed", "--model", "full,ls", "-o", "results", "--max-time=2s", "-q", "--len", "1024", "--no-plot"];
    let run = typed("1", &words);
    assert_eq!(run.typed(&[]), "--model full,ls --len 1024");
    assert_eq!(run.typed(&["--model"]), "--len 1024");
    let source = run.source(Path::new("results"));
    assert_eq!(source.rows, "speed/1/rows.csv");
    assert!(source.command.starts_with("effattn speed --model full,ls"), "{}", source.command);
    let words =
        ["speed", "--export-csv", "c.csv", "--export-json=-", "--color", "always", "--verbose", "--len=16"];
    assert_eq!(typed("2", &words).typed(&[]), "--len=16", "where output goes is no measurement");
}

#[test]
fn a_run_is_found_however_deep_it_lies() {
    let folder = copies(&["speed/one", "peer/f32/speed/one", "a/b/c/d/e/one"]);
    assert_eq!(StoredRun::find_all(folder.path()).unwrap().len(), 3);
}

#[test]
fn a_quick_run_displaces_nothing_and_enters_no_figure() {
    let (whole, quick) = (typed("1", &["speed"]), typed("2", &["speed", "--quick"]));
    let runs = [whole, quick];
    let names = |runs: &[StoredRun]| -> Vec<PathBuf> {
        latest_measured(runs).iter().map(|run| run.folder.clone()).collect()
    };
    assert_eq!(names(&runs), [Path::new("results/speed/1")]);
    assert_eq!(latest_rows(&runs).len(), runs[0].rows.len());
    assert_eq!(names(&runs[1..]), [Path::new("results/speed/2")]);
    assert!(latest_rows(&runs[1..]).is_empty());
}

#[test]
fn runs_of_different_things_stand_side_by_side_and_a_cell_counts_once() {
    let run = |name: &str, words: &[&str], value: f64| {
        let mut run = typed(name, words);
        run.rows.truncate(1);
        run.rows[0].value = Some(value);
        run
    };
    let all = ["speed", "--model", "all"];
    let runs = [run("1", &all, 1.0), run("2", &["speed", "--model=ls"], 2.0), run("3", &all, 3.0)];
    let kept: Vec<&Path> = latest_measured(&runs).iter().map(|run| run.folder.as_path()).collect();
    assert_eq!(kept, [Path::new("results/speed/3"), Path::new("results/speed/2")], "the repeated one counts");
    let values: Vec<Option<f64>> = latest_rows(&runs).iter().map(|row| row.value).collect();
    assert_eq!(values, [Some(3.0)], "the newest of a cell");
}

#[test]
fn a_run_without_a_program_does_not_replace_one_that_measured_it_too() {
    let beside = typed("1", &["speed", "--model", "ls", "--program", "torch"]);
    let plain = typed("2", &["speed", "--model", "ls"]);
    assert_eq!(latest_measured(&[beside, plain]).len(), 2);
    let run = |name: &str, program: &str| {
        let mut run = typed(name, &["speed", "--program", program]);
        run.rows.truncate(1);
        run.rows[0].program = Some(program.to_owned());
        run
    };
    assert_eq!(latest_rows(&[run("1", "torch"), run("2", "jax")]).len(), 2, "a cell of two programs");
}

#[test]
fn a_damaged_run_does_not_hide_the_others() {
    let folder = copies(&["a/whole", "b/half", "c/rows"]);
    std::fs::write(folder.path().join("b/half/manifest.json"), "{").unwrap();
    std::fs::write(folder.path().join("c/rows/rows.csv"), "no columns").unwrap();
    assert_eq!(StoredRun::find_all(folder.path()).unwrap().len(), 1);
    assert!(
        StoredRun::find_all(&folder.path().join("b/half")).is_err(),
        "what was asked for by name is not passed over"
    );
    assert!(StoredRun::find_all(&folder.path().join("c")).is_err());
}

#[test]
fn a_finished_run_whose_rows_are_gone_is_named_with_what_brings_them_back() {
    let folder = copies(&["a/whole", "b/gone"]);
    let gone = folder.path().join("b/gone");
    let mut manifest = Manifest::read(&gone).unwrap().unwrap();
    let words = |manifest: &Manifest| {
        manifest.write(&gone).unwrap();
        StoredRun::read(&gone).map(|run| run.is_some()).map_err(|error| format!("{error:#}"))
    };
    std::fs::remove_file(gone.join("rows.csv")).unwrap();
    manifest.rows_sha256 = None;
    assert_eq!(words(&manifest), Ok(false), "killed before its first cell");
    manifest.rows_sha256 = Some("0".to_owned());
    manifest.argv = ["lra", "--task", "text"].map(str::to_owned).to_vec();
    let refused = words(&manifest).unwrap_err();
    assert!(refused.contains("rows.csv is gone") && refused.contains("run again: effattn lra"), "{refused}");
    std::fs::write(gone.join("journal.jsonl"), "").unwrap();
    for command in ["lra", "speed"] {
        manifest.command = command.to_owned();
        let refused = words(&manifest).unwrap_err();
        assert!(refused.contains("from its journal: effattn merge ") && refused.ends_with(" -o restored"));
    }
    assert_eq!(StoredRun::find_all(folder.path()).unwrap().len(), 1, "the other is shown");
    assert!(StoredRun::find_all(&gone).is_err());
}

#[test]
fn a_damaged_line_of_samples_is_named_by_its_number() {
    let folder = tempfile::tempdir().unwrap();
    let good = "{\"cell\": \"a\", \"metric\": \"step_time\", \"values\": [1.0], \"machine\": null}\n";
    std::fs::write(folder.path().join("samples.jsonl"), good.repeat(10) + "garbage\n").unwrap();
    let error = format!("{:#}", step_samples(folder.path()).unwrap_err());
    assert!(error.contains("samples.jsonl: line 11, column 1: ") && !error.contains("line 1 "), "{error}");
}

#[test]
fn steps_that_cannot_be_read_are_no_steps_that_were_not_kept() {
    let folder = tempfile::tempdir().unwrap();
    assert!(step_samples(folder.path()).unwrap().is_empty());
    for damage in [b"{\n".as_slice(), b"\xff".as_slice()] {
        std::fs::write(folder.path().join("samples.jsonl"), damage).unwrap();
        let read = step_samples(folder.path());
        assert!(read.as_ref().is_err_and(|error| format!("{error:#}").contains("samples.jsonl")));
        assert!(or_left_out(read, "percentiles").is_empty());
    }
}

/// A run of `command` in `base` whose only row has `value`.
fn run(
    base: &str,
    command: &str,
    (order, start): (u64, &str),
    state: State,
    value: Option<f64>,
) -> StoredRun {
    let plan = Plan { name: base.to_owned(), command: command.to_owned(), ..Plan::default() };
    let mut manifest = Manifest::new(&plan, "id");
    (manifest.order, manifest.start, manifest.state) = (order, start.to_owned(), state);
    let row = Row::new(command, "ls").with("accuracy", "%", value);
    let outcome = if value.is_some() { Outcome::Ok } else { Outcome::Interrupted };
    let folder = Path::new(base).join(format!("{order}-{start}"));
    StoredRun { folder, manifest, rows: vec![row.with_outcome(outcome, None)] }
}

fn values(runs: Vec<StoredRun>) -> Vec<Option<f64>> {
    latest_rows(&by_age(runs)).iter().map(|row| row.value).collect()
}

#[test]
fn the_newest_run_counts_and_not_the_last_path() {
    let old = run("z", "lra", (1, "2026-01-01"), State::Done, Some(1.0));
    let new = run("a", "lra", (1, "2026-01-02"), State::Done, Some(2.0));
    assert_eq!(values(vec![new, old]), [Some(2.0)]);
    let before = run("a", "speed", (1, "2999-01-01"), State::Done, Some(1.0));
    let after = run("a", "speed", (2, "2026-01-02"), State::Done, Some(2.0));
    assert_eq!(values(vec![after, before]), [Some(2.0)], "the clock went back");
}

#[test]
fn an_interrupted_run_replaces_nothing_that_is_finished() {
    for command in ["speed", "lra"] {
        let done = run("a", command, (1, "2026-01-01"), State::Done, Some(1.0));
        let stopped = run("a", command, (2, "2026-01-02"), State::Unfinished, None);
        assert_eq!(values(vec![done, stopped]), [Some(1.0)], "{command}");
    }
}
