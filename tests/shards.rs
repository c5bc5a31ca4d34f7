//! Shards of the real binary: dealt, killed, joined, refused.

#[cfg(target_os = "linux")]
mod bounds;
mod submit;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use effattn::record::{Row, csv};

/// Six training runs of a moment each.
const LRA: &str = "lra --task listops --model ls:w=4,r=2,full,linear --len 16 --batch 8 --rate 1e-3 --steps 30 --seeds 1,2 \
                   --data-dir . --no-plot --threads 1 --save-every 1ms";
/// Four cells in two groups.
const SPEED: &str = "speed --preset ls-lra --model full,linear --len 32,64 --mode infer --max-time 20ms --no-plot --threads 1";

fn effattn(folder: &Path, line: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_effattn"));
    command.args(line.split_whitespace()).current_dir(folder).env("XDG_CACHE_HOME", folder.join("cache"));
    for name in ["EFFATTN_LOG", "SLURMD_NODENAME", "SLURM_ARRAY_TASK_ID", "JOB_COMPLETION_INDEX"] {
        command.env_remove(name);
    }
    command
}

fn run(folder: &Path, line: &str) -> Output {
    effattn(folder, line).output().unwrap()
}

fn done(folder: &Path, line: &str) -> String {
    let output = run(folder, line);
    assert!(output.status.success(), "{line}: {}", stderr(&output));
    stderr(&output)
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// What a command says that must end with exit code 2 and at most two lines.
fn refused(mut command: Command) -> String {
    let output = command.output().unwrap();
    let said = stderr(&output);
    assert_eq!(output.status.code(), Some(2), "{said}");
    let lines = said.lines().skip_while(|line| !line.starts_with("error")).count();
    assert!(output.stdout.is_empty() && (1..=2).contains(&lines), "{said}");
    said
}

/// LRA's three files with few expressions.
fn expressions(folder: &Path) {
    let line = |index: usize| {
        let (a, b) = (index % 10, index / 10 % 10);
        format!("( ( ( [MAX {a} ) {b} ) ] )\t{}\n", a.max(b))
    };
    for (name, range) in [("train", 0..80), ("val", 80..100), ("test", 90..110)] {
        let text: String = range.map(line).collect();
        fs::write(folder.join(format!("basic_{name}.tsv")), format!("Source\tTarget\n{text}")).unwrap();
    }
}

fn with_data() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    expressions(folder.path());
    folder
}

/// What there is so far in a folder that a running process may not have made yet.
fn entries(folder: PathBuf) -> impl Iterator<Item = fs::DirEntry> {
    fs::read_dir(folder).into_iter().flatten().flatten()
}

/// The folders of the shards of the plans of `command` that there are so far.
fn plans(folder: &Path, command: &str) -> Vec<PathBuf> {
    let runs = entries(folder.join("results").join(command));
    runs.filter(|run| run.file_name().to_string_lossy().starts_with("plan-")).map(|run| run.path()).collect()
}

/// The folder of the shards of the only plan of `command`.
fn whole(folder: &Path, command: &str) -> PathBuf {
    let plans = plans(folder, command);
    assert_eq!(plans.len(), 1, "one plan: {plans:?}");
    plans[0].clone()
}

/// The run of shard `name` of the only plan of `command`.
fn shard(folder: &Path, command: &str, name: &str) -> PathBuf {
    whole(folder, command).join(name).join("latest").canonicalize().unwrap()
}

fn rows(run: &Path) -> Vec<Row> {
    csv::from_str(&fs::read_to_string(run.join("rows.csv")).unwrap()).unwrap()
}

/// Everything that the way in which a run was made must not change: rows without times, memory and machine; curves, weights.
fn result(run: &Path) -> (Vec<String>, Vec<(String, Vec<u8>)>) {
    let told = rows(run).into_iter().map(|row| {
        let value = row.value.filter(|_| !["s", "1/s", "B", "share"].contains(&row.unit.as_str()));
        format!("{} {:?} {:?} {} {:?} {value:?}", row.label(), row.task, row.seed, row.metric, row.outcome)
    });
    let mut files = Vec::new();
    for cell in entries(run.join("cells")) {
        for name in ["curve.csv", "best.safetensors"] {
            let bytes = fs::read(cell.path().join(name)).unwrap();
            // the words in front of the tensors stand in any order
            let front = if name == "curve.csv" { 0 } else { 8 + bytes[0] as usize + 256 * bytes[1] as usize };
            files.push((format!("{} {name}", cell.file_name().to_string_lossy()), bytes[front..].to_vec()));
        }
    }
    files.sort();
    (told.collect(), files)
}

fn spawn(folder: &Path, line: &str) -> Child {
    effattn(folder, line).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
}

fn wait_for(what: &str, mut there: impl FnMut() -> bool) {
    let start = Instant::now();
    while !there() {
        assert!(start.elapsed() < Duration::from_secs(120), "{what} did not happen");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn edit(path: &Path, change: impl Fn(&str) -> String) {
    let text = fs::read_to_string(path).unwrap();
    let changed = change(&text);
    assert_ne!(text, changed, "{}", path.display());
    fs::write(path, changed).unwrap();
}

#[test]
fn shards_that_were_killed_and_joined_are_one_undisturbed_run() {
    let folder = with_data();
    let folder = folder.path();
    done(folder, &format!("{LRA} -o one"));
    for index in 1..=3 {
        let line = format!("{LRA} --shard {index}/4");
        let mut child = spawn(folder, &line);
        std::thread::sleep(Duration::from_millis(150 * index));
        child.kill().unwrap();
        child.wait().unwrap();
        done(folder, &line);
    }
    let first = run(folder, "merge results");
    assert_eq!(first.status.code(), Some(1), "{}", stderr(&first));
    assert!(
        stderr(&first).contains("--threads 1 --save-every 1ms --shard 4/4    # listops"),
        "{}",
        stderr(&first)
    );
    let status = run(folder, "status");
    let text = String::from_utf8_lossy(&status.stdout).into_owned();
    assert!(text.contains(" 4/4     waiting") && !text.contains(" 3/4 "), "{text}");
    done(folder, &format!("{LRA} --shard 4/4"));
    let said = done(folder, "merge results");
    assert!(said.contains("6 of 6 cells to"), "{said}");
    let merged = whole(folder, "lra");
    assert_eq!(result(&merged), result(&folder.join("one/lra/latest")));
    assert!(rows(&merged).iter().all(|row| row.machine.is_some()), "rows say which machine");
    assert_eq!(folder.join("results/lra/latest").canonicalize().unwrap(), merged.canonicalize().unwrap());
    // what comes out is a run: the whole command has nothing left, a report and compare read it
    let again = done(folder, LRA);
    assert!(again.contains("6 of 6 cells are done"), "{again}");
    let report = run(folder, "report");
    assert!(
        report.status.success() && String::from_utf8_lossy(&report.stdout).contains("| listops | full |")
    );
    done(folder, "compare one/lra/latest results/lra/latest");
    let before = result(&merged);
    done(folder, "merge results");
    assert_eq!(result(&merged), before, "joined once more");
}

#[test]
fn a_merge_that_was_killed_leaves_nothing_behind_that_the_next_one_does_not_mend() {
    let folder = with_data();
    let folder = folder.path();
    (1..=2).for_each(|index| drop(done(folder, &format!("{LRA} --shard {index}/2"))));
    done(folder, "merge results -o expected");
    let expected =
        result(&fs::read_dir(folder.join("expected/lra")).unwrap().next().unwrap().unwrap().path());
    let merged = whole(folder, "lra");
    let mut killed = 0;
    for pause in 0..12 {
        let mut child = spawn(folder, "merge results");
        std::thread::sleep(Duration::from_millis(3 * pause));
        child.kill().unwrap();
        killed += usize::from(!child.wait().unwrap().success());
    }
    // as it is left by a kill between two steps
    fs::write(merged.join(".effattn-1.part"), "half").unwrap();
    done(folder, "merge results");
    assert_eq!(result(&merged), expected);
    let parts = |path: &Path| {
        let names = fs::read_dir(path).unwrap().map(|entry| entry.unwrap().file_name());
        names.filter(|name| name.to_string_lossy().ends_with(".part")).count()
    };
    let cells = fs::read_dir(merged.join("cells")).unwrap().map(|cell| parts(&cell.unwrap().path()));
    assert_eq!((parts(&merged), cells.sum::<usize>()), (0, 0));
    println!("merge: killed {killed} times, the same rows, curves and weights");
}

#[test]
fn two_starts_of_one_shard_do_not_mix() {
    let folder = with_data();
    let folder = folder.path();
    let line = format!("{} --shard 1/6", LRA.replace("--steps 30", "--steps 20000"));
    let mut child = spawn(folder, &line);
    wait_for("a checkpoint", || {
        let runs = plans(folder, "lra").into_iter().flat_map(|plan| entries(plan.join("1-of-6")));
        let mut cells = runs.flat_map(|run| entries(run.path().join("cells")));
        cells.any(|cell| cell.path().join("last.safetensors").exists())
    });
    let said = refused(effattn(folder, &line));
    assert!(said.contains("1-of-6 is in use by process"), "{said}");
    let status = String::from_utf8_lossy(&run(folder, "status").stdout).into_owned();
    assert!(status.contains(" 1/6     running"), "{status}");
    // a claim that is gone was taken over: the first start ends and writes nothing more
    let base = whole(folder, "lra").join("1-of-6");
    let claim = fs::read_dir(&base).unwrap().map(|entry| entry.unwrap().path());
    let claim = claim.into_iter().find(|path| path.to_string_lossy().contains("claim-")).unwrap();
    fs::rename(&claim, base.join("claim-000009")).unwrap();
    wait_for("the end of the first start", || child.try_wait().unwrap().is_some());
    assert!(!child.wait().unwrap().success());
}

#[test]
fn a_cell_of_two_machines_is_kept_twice_and_never_mixed() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    for node in ["node1", "node2"] {
        let line = format!("{SPEED} -o {node}");
        let output = effattn(folder, &line).env("SLURMD_NODENAME", node).output().unwrap();
        assert!(output.status.success(), "{}", stderr(&output));
    }
    let said = done(folder, "merge node1 node2 -o all");
    assert!(said.contains("4 cells were measured on several machines"), "{said}");
    let merged = folder.join("all/speed/latest");
    let of = |node: &str| rows(&merged).iter().filter(|row| row.machine.as_deref() == Some(node)).count();
    assert_eq!((of("node1"), of("node2")), (20, 20));
    let samples = fs::read_to_string(merged.join("samples.jsonl")).unwrap();
    assert_eq!(samples.lines().filter(|line| line.contains("\"machine\":\"node2\"")).count(), 4);
    let report = String::from_utf8_lossy(&run(folder, "report all").stdout).into_owned();
    assert!(report.contains(" on node1\n") && report.contains(" on node2\n"), "{report}");
    let said = done(folder, "merge node1 node2 -o all");
    assert!(said.contains("4 of 4 cells"), "{said}");
}

#[test]
fn cells_that_are_compared_stay_on_one_machine() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    for index in 1..=2 {
        let line = format!("{SPEED} --shard {index}/2");
        let output = effattn(folder, &line).env("SLURMD_NODENAME", format!("node{index}")).output().unwrap();
        assert!(output.status.success(), "{}", stderr(&output));
    }
    let lens = |name: &str| -> Vec<Option<u64>> {
        let mut lens: Vec<_> = rows(&shard(folder, "speed", name)).iter().map(|row| row.len).collect();
        lens.dedup();
        lens
    };
    let (first, second) = (lens("1-of-2"), lens("2-of-2"));
    assert!(first.len() == 1 && second.len() == 1 && first != second, "{first:?} {second:?}");
    assert!(done(folder, "merge results").contains("4 of 4 cells"));
}

#[test]
fn no_shard_is_an_error_that_says_which_there_are() {
    let folder = tempfile::tempdir().unwrap();
    let line = |more: &str| effattn(folder.path(), &format!("{SPEED} {more}"));
    for (shard, words) in
        [("0/4", "1/4 to 4/4"), ("5/4", "1/4 to 4/4"), ("1/0", "1 to"), ("two", "expected I/N")]
    {
        let said = refused(line(&format!("--shard {shard}")));
        assert!(said.contains(words), "{said}");
    }
    assert!(refused(line("--shard auto")).contains("none of them is set"));
    let mut job = line("--shard auto");
    job.env("JOB_COMPLETION_INDEX", "1");
    assert!(refused(job).contains("COMPLETIONS is not set"));
    let mut gaps = line("--shard auto");
    for (name, value) in [("ID", "2"), ("MIN", "2"), ("MAX", "5"), ("COUNT", "2")] {
        gaps.env(format!("SLURM_ARRAY_TASK_{name}"), value);
    }
    assert!(refused(gaps).contains("has gaps"));
    assert!(
        refused(effattn(folder.path(), "list mechanisms --shard 1/2"))
            .contains("unexpected argument '--shard'")
    );
    assert!(refused(effattn(folder.path(), "merge .")).contains("there is no run in"));
    assert!(refused(effattn(folder.path(), "status nowhere")).contains("nowhere"));
}

#[test]
fn runs_of_two_plans_are_refused_by_name() {
    let folder = with_data();
    let folder = folder.path();
    let small = LRA.replace("ls:w=4,r=2,full,linear", "linear").replace("1,2", "1");
    done(folder, &format!("{small} --shard 1/1"));
    done(folder, &format!("{} --shard 1/1", small.replace("--steps 30", "--steps 31")));
    let said = refused(effattn(folder, "merge results"));
    assert!(said.contains("belong to different plans") && said.contains("steps 3"), "{said}");
    edit(&folder.join("basic_test.tsv"), |text| text.replacen("[MAX 0 ) 9", "[MAX 1 ) 9", 1));
    done(folder, &format!("{small} --shard 1/1 -o other"));
    let first = fs::read_dir(folder.join("results/lra")).unwrap().map(|run| run.unwrap().path());
    for one in first.filter(|path| path.is_dir()) {
        let said = refused(effattn(folder, &format!("merge {} other", one.display())));
        assert!(said.contains("other data of listops"), "{said}");
    }
}

#[test]
fn two_results_of_one_training_run_must_be_the_same() {
    let folder = with_data();
    let folder = folder.path();
    let small = LRA.replace("ls:w=4,r=2,full,linear", "linear").replace("1,2", "1");
    done(folder, &format!("{small} -o a"));
    done(folder, &format!("{small} -o b"));
    assert!(done(folder, "merge a b -o all").contains("1 of 1 cells"));
    let journal = folder.join("b/lra/latest/journal.jsonl");
    edit(&journal, |text| {
        let mut entry: serde_json::Value = serde_json::from_str(text.trim()).unwrap();
        entry["rows"][0]["value"] = 1.25.into();
        format!("{entry}\n")
    });
    let said = refused(effattn(folder, "merge a b -o both"));
    assert!(
        said.contains("claim to be one training run and differ (accuracy") && said.contains("1.25"),
        "{said}"
    );
    assert!(!folder.join("both").exists());
}

#[test]
fn a_shard_that_was_cut_off_in_a_row_loses_that_cell_only() {
    let folder = with_data();
    let folder = folder.path();
    done(folder, &format!("{LRA} -o one"));
    (1..=2).for_each(|index| drop(done(folder, &format!("{LRA} --shard {index}/2"))));
    let run_of = shard(folder, "lra", "1-of-2");
    let journal = run_of.join("journal.jsonl");
    let text = fs::read_to_string(&journal).unwrap();
    fs::write(&journal, &text[..text.len() - 40]).unwrap();
    let output = run(folder, "merge results");
    let said = stderr(&output);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("5 of 6 cells") && said.contains("is cut off or damaged"), "{said}");
    assert!(said.contains("--shard 1/2"), "{said}");
    // clocks that are hours apart, in manifests and in files, change nothing
    edit(&run_of.join("manifest.json"), |text| text.replace("\"start\": \"20", "\"start\": \"30"));
    done(folder, &format!("{LRA} --shard 1/2"));
    assert!(done(folder, "merge results").contains("6 of 6 cells"));
    assert_eq!(result(&whole(folder, "lra")), result(&folder.join("one/lra/latest")));
}
