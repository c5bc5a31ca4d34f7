//! A row is what was run: what is silent where it goes wrong, at the level of the program.

use std::fs;
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use effattn::record::{Outcome, Row, csv};
use effattn::run::journal::Entry;

use super::{
    LRA, SPEED, TWO_MODELS, VICTIMS, WAIT, children, effattn, fresh, latest, le, rows, run, runs, said,
    signal, soon, spawn, stderr, suite, unfinished, unsealed,
};

#[test]
fn rows_of_a_suite_that_differ_in_their_settings_are_cells_of_their_own() {
    let folder = fresh("speed");
    let rows = ["layers = 1", "layers = 8", "kernel = \"composed\"", "dtype = \"bf16\""];
    fs::write(folder.path().join("s.toml"), suite("\"t\"", &rows)).unwrap();
    said(folder.path(), "speed --suite s.toml --no-plot --threads 1");
    let timed: Vec<Row> =
        self::rows(folder.path(), "s").into_iter().filter(|row| row.metric == "step_time").collect();
    assert_eq!(timed.len(), 4);
    assert!(timed[0].params < timed[2].params && timed[2].params < timed[1].params, "{timed:?}");
    let told: std::collections::BTreeSet<_> = timed.iter().map(|row| row.settings.clone()).collect();
    assert_eq!(told.len(), 4, "{told:?}");
}

/// Reviews of which the good ones are labelled as such, or the other way round.
pub fn reviews(folder: &Path, swapped: bool) {
    for (split, label) in [("train", "pos"), ("train", "neg"), ("test", "pos"), ("test", "neg")] {
        let reviews = folder.join("aclImdb").join(split).join(label);
        fs::create_dir_all(&reviews).unwrap();
        let words = if (label == "pos") != swapped { "good fine great " } else { "bad awful poor " };
        let stars = if label == "pos" { 9 } else { 1 };
        for index in 0..20 {
            fs::write(reviews.join(format!("{index}_{stars}.txt")), format!("{}{index}", words.repeat(4)))
                .unwrap();
        }
    }
}

#[test]
fn weights_of_other_data_or_threads_are_not_taken() {
    let folder = fresh("robustness");
    let line = "robustness --task text --model ls:w=4,r=2 --len 32 --steps 30 --batch 8 --data-dir . --allow-partial --no-plot";
    let first = |swapped: bool, more: &str| {
        reviews(folder.path(), swapped);
        let said = said(folder.path(), &format!("{line} {more}"));
        let clean = rows(folder.path(), "robustness")
            .into_iter()
            .find(|row| row.task.as_deref() == Some("text") && row.metric == "accuracy");
        (
            said.contains("trained before"),
            said.contains("will be trained first"),
            clean.unwrap().value.unwrap(),
        )
    };
    let (before, trained, accuracy) = first(false, "--threads 1 --insertions 0,10");
    assert!(!before && trained && accuracy > 90.0, "{accuracy}");
    assert!(first(false, "--threads 1 --insertions 0,20").0, "the same data");
    let (before, trained, accuracy) = first(true, "--threads 1 --insertions 0,30");
    assert!(!before && trained && accuracy > 90.0, "labels were swapped: {accuracy}");
    let (before, trained, _) = first(false, "--threads 2 --insertions 0,40");
    assert!(!before && trained, "other threads");
}

#[test]
fn data_that_are_replaced_during_a_run_are_noticed() {
    let folder = fresh("lra");
    let mut child = spawn(folder.path(), TWO_MODELS);
    let start = Instant::now();
    while children(child.id()).is_empty() {
        assert!(start.elapsed() < WAIT, "no worker was started");
        std::thread::sleep(Duration::from_millis(2));
    }
    let cells = || {
        fs::read_dir(
            fs::read_dir(folder.path().join("results/lra")).ok()?.flatten().next()?.path().join("cells"),
        )
        .ok()
    };
    while cells().is_none_or(|cells| cells.count() == 0) {
        assert!(start.elapsed() < WAIT, "nothing was trained");
        std::thread::sleep(Duration::from_millis(2));
    }
    let file = folder.path().join("basic_train.tsv");
    let text = fs::read_to_string(&file).unwrap();
    fs::write(&file, text.replacen("\t0\n", "\t1\n", 1)).unwrap();
    child.wait().unwrap();
    let second = rows(folder.path(), "lra").into_iter().find(|row| row.model == "linear").unwrap();
    assert_eq!(second.outcome, Outcome::Failed, "{second:?}");
    assert!(
        second
            .error
            .as_deref()
            .is_some_and(|error| error.contains("listops") || error.contains("basic_train.tsv")),
        "{second:?}"
    );
    // the data are back: what failed runs, what is done stays
    fs::write(&file, text).unwrap();
    said(folder.path(), TWO_MODELS);
    assert!(rows(folder.path(), "lra").iter().all(|row| row.outcome == Outcome::Ok));
}

#[test]
fn an_outcome_of_a_tighter_limit_is_not_kept() {
    let folder = fresh("lra");
    run(folder.path(), &format!("{LRA} --memory-limit 1MiB"));
    assert_eq!(rows(folder.path(), "lra")[0].outcome, Outcome::Oom);
    said(folder.path(), &format!("{LRA} --memory-limit 4GiB"));
    assert!(rows(folder.path(), "lra").iter().all(|row| row.outcome == Outcome::Ok));
    let (folder, long) = (fresh("lra"), LRA.replace("--steps 20", "--steps 1500"));
    run(folder.path(), &format!("{long} --timeout 1ms"));
    assert_eq!(rows(folder.path(), "lra")[0].outcome, Outcome::Timeout);
    said(folder.path(), &format!("{long} --timeout 1h"));
    assert!(rows(folder.path(), "lra").iter().all(|row| row.outcome == Outcome::Ok));
}

#[test]
fn the_gate_fails_where_values_are_gone_and_passes_one_build_beside_itself() {
    let folder = fresh("memory");
    let memory = |output: &str, more: &str| {
        let line =
            format!("memory --preset ls-lra --model full,ls --len 64,512 --no-plot -o {output} {more}");
        run(folder.path(), &line)
    };
    let gate = |a: &str, b: &str| {
        let line = format!("compare {a}/memory/latest {b}/memory/latest --fail-if-regression 5%");
        run(folder.path(), &line).status.code()
    };
    for (output, more) in
        [("a", "--threads 2"), ("b", "--threads 2"), ("c", "--threads 2 --memory-limit 1MiB")]
    {
        memory(output, more);
    }
    assert_eq!(gate("a", "b"), Some(0), "one build beside itself");
    assert_eq!(gate("a", "c"), Some(1), "every cell of the second run is oom");
    let file = folder.path().join("c/memory/latest/rows.csv");
    let manifest = file.with_file_name("manifest.json");
    fs::write(&manifest, unsealed(&manifest)).unwrap();
    for value in [Some(f64::NAN), None] {
        let text = fs::read_to_string(folder.path().join("a/memory/latest/rows.csv")).unwrap();
        let rows: Vec<Row> = csv::from_str(&text).unwrap();
        let rows: Vec<Row> = match value {
            Some(_) => rows.into_iter().map(|row| Row { value, ..row }).collect(),
            None => rows.into_iter().filter(|row| row.len != Some(64)).collect(),
        };
        fs::write(&file, csv::to_string(&rows).unwrap()).unwrap();
        assert_eq!(gate("a", "c"), Some(1), "{value:?}");
    }
    fs::write(&file, csv::to_string(&[]).unwrap()).unwrap();
    assert_ne!(gate("a", "c"), Some(0), "no cell in common");
}

#[test]
fn another_suite_text_or_allocator_continues_no_run() {
    let folder = fresh("speed");
    let line = "speed --suite s.toml --no-plot --threads 1";
    let stopped = |title: &str, pages: &str| {
        let rows: Vec<String> =
            (1..9).map(|layers| format!("layers = {layers}, max_time = \"20s\"")).collect();
        let rows: Vec<&str> = rows.iter().map(String::as_str).collect();
        fs::write(folder.path().join("s.toml"), suite(title, &rows)).unwrap();
        let mut command = effattn(folder.path(), line);
        let mut child = command
            .env("EFFATTN_KEEP_PAGES", pages)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let start = Instant::now();
        while children(child.id()).is_empty() {
            assert!(start.elapsed() < WAIT, "no worker was started");
            std::thread::sleep(Duration::from_millis(2));
        }
        signal(child.id(), "-INT");
        child.wait().unwrap();
        runs(folder.path(), "s")
    };
    assert_eq!(stopped("\"t\"", "1"), 1);
    assert_eq!(stopped("\"t\"", "1"), 1, "the same is continued");
    assert_eq!(stopped("\"u\"", "1"), 2, "an edited suite");
    assert_eq!(stopped("\"u\"", "0"), 3, "another allocator setting");
}

#[test]
fn weights_that_are_not_finite_generate_nothing() {
    let folder = fresh("charlm");
    said(folder.path(), VICTIMS[2].line);
    let cells = latest(folder.path(), "charlm").join("cells");
    let cell = fs::read_dir(cells).unwrap().flatten().next().unwrap().path();
    let best = |file: &fs::DirEntry| file.file_name().to_string_lossy().ends_with("best.safetensors");
    let file = fs::read_dir(cell).unwrap().flatten().find(best).unwrap().path();
    let generate =
        |file: &Path| run(folder.path(), &format!("charlm --generate {} --symbols 20", file.display()));
    let output = generate(&file);
    assert!(output.status.success(), "{}", stderr(&output));
    let mut bytes = fs::read(&file).unwrap();
    let front = 8 + le(&bytes[..8]);
    let header: serde_json::Value = serde_json::from_slice(&bytes[8..front]).unwrap();
    for (name, tensor) in header.as_object().unwrap() {
        if name.starts_with("weight/") && tensor["dtype"] == "F32" {
            let at = |end: usize| front + tensor["data_offsets"][end].as_u64().unwrap() as usize;
            bytes[at(0)..at(1)]
                .chunks_exact_mut(4)
                .for_each(|number| number.copy_from_slice(&f32::NAN.to_le_bytes()));
        }
    }
    fs::write(&file, bytes).unwrap();
    let output = generate(&file);
    assert!(!output.status.success() && stderr(&output).contains("finite"), "{}", stderr(&output));
}

#[test]
fn a_line_of_the_journal_without_rows_of_its_cell_runs_again() {
    let folder = fresh("speed");
    said(folder.path(), SPEED);
    let file = unfinished(folder.path(), "speed").join("journal.jsonl");
    let text = fs::read_to_string(&file).unwrap();
    let mut entries: Vec<Entry> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let foreign = entries[0].rows.clone();
    entries[1].rows = foreign;
    entries[2].rows.clear();
    let lines: Vec<String> = entries.iter().map(|entry| serde_json::to_string(entry).unwrap()).collect();
    fs::write(&file, lines.join("\n") + "\n").unwrap();
    let output = run(folder.path(), &SPEED.replace(" --quiet", ""));
    assert!(
        stderr(&output).contains("2 lines of the journal have no rows of their cell"),
        "{}",
        stderr(&output)
    );
    let rows = rows(folder.path(), "speed");
    let labels: std::collections::BTreeSet<_> =
        rows.iter().map(|row| (row.model.clone(), row.len, row.pass)).collect();
    assert_eq!((rows.len(), labels.len()), (8 * rows.len() / labels.len(), 8));
}

#[test]
fn more_seeds_train_the_new_ones_only() {
    let folder = fresh("lra");
    said(folder.path(), &format!("{LRA} --seeds 0"));
    let first = rows(folder.path(), "lra");
    let told = said(folder.path(), &format!("{LRA} --seeds 0,1"));
    assert!(told.contains("1 run was finished before and is taken from"), "{told}");
    let second = rows(folder.path(), "lra");
    assert_eq!(first[..], second[..first.len()], "what was finished is not measured again");
    assert_eq!(second.iter().filter(|row| row.metric == "accuracy").count(), 2);
}

#[test]
fn a_finished_run_whose_failed_cell_runs_again_says_when() {
    let folder = fresh("lra");
    said(folder.path(), LRA);
    let path = latest(folder.path(), "lra");
    let journal = path.join("journal.jsonl");
    let mut entry: Entry = serde_json::from_str(&fs::read_to_string(&journal).unwrap()).unwrap();
    entry.rows.truncate(1);
    (entry.rows[0].outcome, entry.rows[0].value) = (Outcome::Failed, None);
    fs::write(&journal, serde_json::to_string(&entry).unwrap() + "\n").unwrap();
    let manifest = || -> serde_json::Value {
        serde_json::from_str(&fs::read_to_string(path.join("manifest.json")).unwrap()).unwrap()
    };
    let first = manifest();
    std::thread::sleep(Duration::from_secs(1)); // the manifest counts seconds
    said(folder.path(), LRA);
    let second = manifest();
    let ends = [&first, &second].map(|manifest| manifest["end"].as_str().unwrap().to_owned());
    assert!(ends[0] < ends[1], "{ends:?}");
    assert_eq!(
        (first["continued"].as_array().unwrap().len(), second["continued"].as_array().unwrap().len()),
        (0, 1)
    );
    assert!(rows(folder.path(), "lra").iter().all(|row| row.outcome == Outcome::Ok));
    said(folder.path(), LRA);
    assert_eq!(manifest(), second, "nothing was left to do");
}

#[test]
fn an_interval_that_is_no_number_is_not_printed() {
    let folder = fresh("speed");
    said(folder.path(), SPEED);
    let file = latest(folder.path(), "speed").join("rows.csv");
    let manifest = file.with_file_name("manifest.json");
    fs::write(&manifest, unsealed(&manifest)).unwrap();
    let nan = Some(f64::NAN);
    let rows: Vec<Row> = (rows(folder.path(), "speed").into_iter())
        .map(|row| Row { std: nan, ci_low: nan, ci_high: nan, ..row })
        .collect();
    fs::write(&file, csv::to_string(&rows).unwrap()).unwrap();
    for line in [
        "report -o r.md",
        "report -o r.html",
        "compare results/speed/latest results/speed/latest",
        "plot rows results/speed",
    ] {
        let output = run(folder.path(), line);
        assert!(output.status.success(), "{line}: {}", stderr(&output));
        assert!(!String::from_utf8_lossy(&output.stdout).contains("NaN"), "{line}");
    }
    for name in ["r.md", "r.html"] {
        let text = fs::read_to_string(folder.path().join(name)).unwrap();
        let shown = ["NaN %", "NaN\u{a0}%", "NaN s", "NaN ms", ">NaN<", "±NaN", "NaN to", "NaN B"];
        let found = shown.iter().find_map(|shown| Some(text.find(shown)?.saturating_sub(80)));
        assert_eq!(found.and_then(|at| text.get(at..at + 200)), None, "{name}");
    }
}

#[test]
fn a_fresh_run_is_the_newest_whatever_the_clock_says() {
    let folder = fresh("lra");
    said(folder.path(), LRA);
    let file = latest(folder.path(), "lra").join("manifest.json");
    let mut manifest: serde_json::Value = serde_json::from_str(&fs::read_to_string(&file).unwrap()).unwrap();
    manifest["start"] = "2999-01-01T00:00:00Z".into();
    fs::write(&file, manifest.to_string()).unwrap();
    let first = latest(folder.path(), "lra").canonicalize().unwrap();
    said(folder.path(), &format!("{LRA} --fresh"));
    let second = latest(folder.path(), "lra").canonicalize().unwrap();
    assert_ne!(first, second);
    let told = said(folder.path(), LRA);
    let newest = second.file_name().unwrap().to_string_lossy().into_owned();
    assert_eq!(latest(folder.path(), "lra").canonicalize().unwrap(), second, "{told}");
    assert_eq!(runs(folder.path(), "lra"), 2, "{newest} is there: nothing is trained again");
}

#[test]
fn a_second_process_stays_outside_also_where_the_lock_was_deleted() {
    let folder = fresh("speed");
    let line = SPEED.replace("30ms", "30s --runs 10000000");
    let mut child = spawn(folder.path(), &line);
    let start = Instant::now();
    let locks = || {
        let runs = fs::read_dir(folder.path().join("results/speed")).into_iter().flatten().flatten();
        runs.map(|run| run.path().join("lock")).filter(|lock| lock.exists()).collect::<Vec<_>>()
    };
    while children(child.id()).is_empty() || locks().is_empty() {
        assert!(start.elapsed() < WAIT, "no run was started");
        std::thread::sleep(Duration::from_millis(2));
    }
    locks().into_iter().for_each(|lock| fs::remove_file(lock).unwrap());
    let output = soon(folder.path(), &line);
    let _ = child.kill();
    child.wait().unwrap();
    assert!(!output.status.success() && stderr(&output).contains("in use by"), "{}", stderr(&output));
}
