//! The real binary under kills, limits, locks and closed pipes.

use std::fs;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use effattn::record::{Outcome, Row, csv, json};

/// Small models that step in milliseconds.
const SMALL: &[&str] = &["--preset", "ls-lra", "--model", "full,linear", "--no-plot", "--threads", "1"];

fn effattn(folder: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_effattn"));
    command
        .args(args)
        .current_dir(folder)
        .env("XDG_CACHE_HOME", folder.join("cache"))
        .env_remove("EFFATTN_LOG");
    command
}

fn run(folder: &Path, args: &[&str]) -> Output {
    effattn(folder, args).output().unwrap()
}

fn speed<'a>(more: &[&'a str]) -> Vec<&'a str> {
    [&["speed"], SMALL, more].concat()
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// The newest run folder of `command`.
fn latest(folder: &Path, command: &str) -> PathBuf {
    folder.join("results").join(command).join("latest")
}

fn rows(folder: &Path, command: &str) -> Vec<Row> {
    csv::from_str(&fs::read_to_string(latest(folder, command).join("rows.csv")).unwrap()).unwrap()
}

/// What must not depend on kills: everything but times.
fn identity(rows: &[Row]) -> Vec<String> {
    let key = |row: &Row| {
        format!(
            "{} {:?} {:?} {:?} {} {:?} {:?}",
            row.label(),
            row.len,
            row.batch,
            row.pass,
            row.metric,
            row.outcome,
            row.flops
        )
    };
    rows.iter().map(key).collect()
}

fn wait_for(what: &str, mut there: impl FnMut() -> bool) {
    let start = Instant::now();
    while !there() {
        assert!(start.elapsed() < Duration::from_secs(120), "{what} did not happen");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Cells in the journal of the only run of `command`.
fn journaled(folder: &Path, command: &str) -> usize {
    let Ok(runs) = fs::read_dir(folder.join("results").join(command)) else { return 0 };
    let files = runs.flatten().map(|run| run.path().join("journal.jsonl"));
    files.filter_map(|file| fs::read_to_string(file).ok()).map(|text| text.lines().count()).sum()
}

fn signal(process: u32, name: &str) {
    assert!(Command::new("kill").args([name, &process.to_string()]).status().unwrap().success());
}

/// Processes whose parent is `process`.
pub fn children(process: u32) -> Vec<u32> {
    let output = Command::new("ps").args(["-o", "pid=", "--ppid", &process.to_string()]).output().unwrap();
    String::from_utf8_lossy(&output.stdout).split_whitespace().map(|pid| pid.parse().unwrap()).collect()
}

/// Kills `child`, and waits for its workers, which end a moment later and may be writing until then.
pub fn kill_with_workers(child: &mut Child) {
    let workers = children(child.id());
    child.kill().unwrap();
    child.wait().unwrap();
    let start = Instant::now();
    while workers.iter().any(|worker| is_alive(*worker)) {
        assert!(start.elapsed() < Duration::from_secs(60), "a worker outlives its parent");
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn is_alive(process: u32) -> bool {
    let state = fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    state.rsplit(") ").next().is_some_and(|state| !state.is_empty() && !state.starts_with('Z'))
}

fn spawn(folder: &Path, args: &[&str]) -> Child {
    effattn(folder, args).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
}

#[test]
fn a_profile_says_where_the_time_of_a_step_goes() {
    let folder = tempfile::tempdir().unwrap();
    let sizes = ["--set", "layers=3", "--set", "width=64", "--set", "heads=2", "--set", "ffn=96"];
    let asked =
        ["speed", "--model", "linear", "--preset", "ls-lra", "--len", "80", "--threads", "1", "--profile"];
    let output = run(folder.path(), &[&asked[..], &sizes, &["--max-time", "0.05s"]].concat());
    assert!(output.status.success(), "{}", stderr(&output));
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        text.contains("Where the time of a step goes: linear · train") && text.contains("GFLOP/s"),
        "{text}"
    );
    let rows = rows(folder.path(), "speed");
    for pass in ["infer", "train"] {
        let of = |metric: &str, operation: Option<&str>| {
            let wanted = |row: &&Row| {
                row.pass.is_some_and(|it| it.word() == pass)
                    && row.metric == metric
                    && row.operation.as_deref() == operation
            };
            rows.iter().find(wanted).and_then(|row| row.value)
        };
        // two products of 80 x 64 x 96 in three layers; backward two for each of them
        let ffn = |part: &str| {
            let name = format!("ffn {part}");
            let time = of("operation_time", Some(&name))?;
            Some((time * of("operation_products", Some(&name))?).round())
        };
        let once = 2.0 * 3.0 * 2.0 * f64::from(80 * 64 * 96);
        assert_eq!(ffn("forward"), Some(once), "{pass}");
        assert_eq!(ffn("backward"), (pass == "train").then_some(2.0 * once), "{pass}");
        let update = of("operation_time", Some("optimizer update"));
        assert_eq!(update.is_some(), pass == "train");
        assert!(of("product_rate", None).is_some() && of("copy_rate", None).is_some());
        let times = rows
            .iter()
            .filter(|row| row.metric == "operation_time" && row.pass.is_some_and(|it| it.word() == pass));
        assert!(times.map(|row| row.value.unwrap()).sum::<f64>() > 0.0);
    }
    let chart = fs::read_to_string(folder.path().join("plots/speed-profile.csv")).unwrap();
    assert!(chart.starts_with("panel,model,kind,part,ms\n") && chart.contains(",linear,ffn,"), "{chart}");
    let plain = run(folder.path(), &speed(&["--len", "80", "--max-time", "0.05s"]));
    assert!(!String::from_utf8_lossy(&plain.stdout).contains("Where the time"), "only where it is asked for");
}

#[test]
fn a_report_of_one_run_is_about_that_run_and_names_the_other_tables() {
    let folder = tempfile::tempdir().unwrap();
    let told = |command: &str| {
        run(folder.path(), &[&[command], SMALL, &["--len", "32"]].concat());
        let report = run(folder.path(), &["report", "results"]);
        String::from_utf8_lossy(&report.stdout).into_owned()
    };
    let one = told("speed");
    let dashes = |report: &str| report.matches("| - / ").count();
    assert!(dashes(&one) == 0 && one.contains("full table: effattn lra --suite ls-table1"), "{one}");
    let two = told("memory");
    assert!(dashes(&two) > 20 && !two.contains("full table: effattn lra --suite ls-table1"), "{two}");
}

#[test]
#[cfg(target_os = "linux")]
fn a_killed_run_leaves_no_worker_and_is_continued() {
    let undisturbed = tempfile::tempdir().unwrap();
    let args = speed(&["--len", "32,48,64", "--max-time", "60ms"]);
    assert!(run(undisturbed.path(), &args).status.success());
    let folder = tempfile::tempdir().unwrap();
    let mut before = 0;
    for kill in 0..3 {
        let mut child = spawn(folder.path(), &args);
        let mut workers = Vec::new();
        wait_for("a further finished cell and a worker", || {
            workers = children(child.id());
            journaled(folder.path(), "speed") > before && !workers.is_empty()
        });
        signal(child.id(), "-KILL");
        child.wait().unwrap();
        before = journaled(folder.path(), "speed");
        wait_for("the end of every worker", || !workers.iter().any(|worker| is_alive(*worker)));
        assert!(before < 12, "kill {kill} came too late");
    }
    let last = run(folder.path(), &args);
    assert!(last.status.success(), "{}", stderr(&last));
    assert!(stderr(&last).contains("of 12 cells are done"), "{}", stderr(&last));
    assert_eq!(identity(&rows(folder.path(), "speed")), identity(&rows(undisturbed.path(), "speed")));
    let runs = fs::read_dir(folder.path().join("results/speed")).unwrap().count();
    assert_eq!(runs, 2, "one run folder and its latest");
}

#[test]
#[cfg(unix)]
fn ctrl_c_keeps_what_is_finished_and_says_how_to_go_on() {
    for name in ["-INT", "-TERM"] {
        let folder = tempfile::tempdir().unwrap();
        let args = speed(&["--len", "32..64+16", "--max-time", "200ms"]);
        let mut child =
            effattn(folder.path(), &args).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        wait_for("a finished cell", || journaled(folder.path(), "speed") > 0);
        signal(child.id(), name);
        let mut said = String::new();
        child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
        assert_eq!(child.wait().unwrap().code(), Some(130), "{said}");
        assert!(
            said.contains("cells are finished and saved. Resume with: effattn speed --preset ls-lra"),
            "{said}"
        );
        let kept = rows(folder.path(), "speed");
        assert!(kept.iter().any(|row| row.outcome == Outcome::Ok));
        assert!(kept.iter().all(|row| matches!(row.outcome, Outcome::Ok | Outcome::Interrupted)));
        let again = run(folder.path(), &args);
        assert!(again.status.success() && stderr(&again).contains("continuing"), "{}", stderr(&again));
        assert!(rows(folder.path(), "speed").iter().all(|row| row.outcome == Outcome::Ok));
    }
}

#[test]
#[cfg(all(target_os = "linux", target_env = "gnu"))]
fn a_step_with_large_tensors_takes_the_pages_of_the_step_before() {
    let folder = tempfile::tempdir().unwrap();
    let model =
        ["speed", "--kernel-only", "--model", "linear", "--mode", "infer", "--no-plot", "--threads", "1"];
    let large = ["--len", "32768", "--batch", "3"]; // 96 MiB each, more than a heap of a thread holds
    let steps = ["--warmup", "2", "--min-runs", "2", "--runs", "2"];
    let output = effattn(folder.path(), &[&model[..], &large, &steps].concat())
        .env_remove("EFFATTN_KEEP_PAGES")
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    let samples = fs::read_to_string(latest(folder.path(), "speed").join("samples.jsonl")).unwrap();
    let cell: serde_json::Value = serde_json::from_str(samples.lines().next().unwrap()).unwrap();
    let faults = cell["turns"].as_array().unwrap().iter().filter_map(|turn| turn["page_faults"].as_u64());
    let least = faults.min().unwrap();
    assert!(least < 3000, "{least} page faults in a turn; a tensor has 24,576 pages");
}

#[test]
fn too_much_memory_is_a_row_and_longer_cells_are_implied() {
    let folder = tempfile::tempdir().unwrap();
    let args = ["memory", "--model", "full", "--kernel", "composed", "--mode", "train", "--no-plot"];
    let more = ["--len", "64,1024,2048", "--memory-limit", "120MiB"];
    let output = run(folder.path(), &[&args[..], &more].concat());
    assert!(output.status.success(), "{}", stderr(&output));
    let rows = rows(folder.path(), "memory");
    let of = |len| rows.iter().find(|row| row.len == Some(len) && row.metric == "peak_memory").unwrap();
    assert_eq!(of(64).outcome, Outcome::Ok);
    assert_eq!(of(1024).outcome, Outcome::Oom);
    let why = of(1024).error.as_deref().unwrap();
    assert!(why.starts_with("asked for ") && why.ends_with("the limit is 120 MiB"), "{why}");
    assert_eq!((of(2048).outcome, of(2048).error.as_deref()), (Outcome::Implied, Some("oom at length 1024")));
}

#[test]
fn the_longest_length_that_fits_really_fits_and_two_percent_more_does_not() {
    let folder = tempfile::tempdir().unwrap();
    let common = ["memory", "--preset", "ls-lra", "--no-plot", "--threads", "1"];
    let all = ["--model", "linear,ls", "--fit", "24MiB"];
    let output = run(folder.path(), &[&common[..], &all].concat());
    assert!(output.status.success(), "{}", stderr(&output));
    let peak = |model: &str, pass: &str, len: u64| {
        let folder = tempfile::tempdir().unwrap();
        let len = len.to_string();
        let one = ["--model", model, "--mode", pass, "--len", &len];
        assert!(run(folder.path(), &[&common[..], &one].concat()).status.success());
        self::rows(folder.path(), "memory")[0].value.unwrap() as u64
    };
    let rows = rows(folder.path(), "memory");
    let found: Vec<_> = rows.iter().filter(|row| row.metric == "longest_length").collect();
    assert_eq!(found.len(), 4);
    for row in found {
        let (pass, len) = (row.pass.unwrap().to_string(), row.value.unwrap() as u64);
        assert!(peak(&row.model, &pass, len) <= 24 << 20, "{} {pass} {len}", row.model);
        assert!(peak(&row.model, &pass, len * 51 / 50) > 24 << 20, "{} {pass} {len}", row.model);
    }
}

#[test]
fn an_export_on_stdout_is_data_only() {
    let folder = tempfile::tempdir().unwrap();
    let output = run(folder.path(), &speed(&["--len", "32", "--max-time", "20ms", "--export-json", "-"]));
    assert!(output.status.success(), "{}", stderr(&output));
    let export = json::from_str(&String::from_utf8(output.stdout).unwrap()).unwrap();
    assert_eq!(export.rows, rows(folder.path(), "speed"));
    assert_eq!(export.manifest["command"], "speed");
    assert_eq!(export.manifest["schema"], 1);
    let samples = fs::read_to_string(latest(folder.path(), "speed").join("samples.jsonl")).unwrap();
    let first: serde_json::Value = serde_json::from_str(samples.lines().next().unwrap()).unwrap();
    let cell = export.rows.iter().find(|row| row.metric == "step_time").unwrap();
    assert_eq!(first["values"].as_array().unwrap().len() as u64, cell.n.unwrap());
}

#[test]
fn another_programs_numbers_are_ratios_in_table_and_chart() {
    let folder = tempfile::tempdir().unwrap();
    let measure = ["speed", "--preset", "ls-lra", "--model", "full,linear", "--len", "32,64", "--batch", "2"];
    let given = ["--mode", "train", "--max-time", "20ms", "--reference", "peer.csv"];
    let args = [&measure[..], &given].concat();
    let write = |text: &str| fs::write(folder.path().join("peer.csv"), text).unwrap();
    write("model,len,batch,mode,ms\nfull,32,2,train,1e6\nlinear,64,2,train,1e6\nlinear,64,1,train,1\n");
    let output = run(folder.path(), &args);
    let table = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success() && table.contains("2 cells:"), "{table}{}", stderr(&output));
    let data = fs::read_to_string(folder.path().join("plots/speed-reference.csv")).unwrap();
    let drawn: Vec<String> = data.lines().skip(1).map(str::to_owned).collect();
    assert!(
        drawn[0].starts_with("Training,full,32,") && drawn[1].starts_with("Training,linear,64,"),
        "{data}"
    );
    assert_eq!(drawn.len(), 2);
    assert!(folder.path().join("plots/speed-reference.svg").is_file());

    fs::remove_dir_all(folder.path().join("plots")).unwrap();
    write("model,len,batch,mode,ms\nfull,33,2,train,1\n");
    let output = run(folder.path(), &args);
    assert!(
        output.status.success() && stderr(&output).contains("--reference has no cell"),
        "{}",
        stderr(&output)
    );
    assert!(!folder.path().join("plots/speed-reference.svg").exists());
}

#[test]
fn a_closed_stdout_ends_quietly() {
    let folder = tempfile::tempdir().unwrap();
    for args in [&["list", "mechanisms"][..], &["man"], &["completions", "bash"], &["--help"]] {
        let mut child =
            effattn(folder.path(), args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        drop(child.stdout.take());
        let output = child.wait_with_output().unwrap();
        assert_eq!((output.status.code(), stderr(&output).as_str()), (Some(0), ""), "{args:?}");
    }
}

#[test]
fn a_run_that_is_held_names_its_holder() {
    let folder = tempfile::tempdir().unwrap();
    let args = speed(&["--len", "64", "--max-time", "100s", "--runs", "1000000"]);
    let mut child = spawn(folder.path(), &args);
    wait_for("the run folder", || {
        let runs = fs::read_dir(folder.path().join("results/speed"));
        runs.is_ok_and(|runs| runs.flatten().any(|run| run.path().join("manifest.json").exists()))
    });
    let second = run(folder.path(), &args);
    assert_eq!(second.status.code(), Some(2));
    let holder = format!("is in use by process {}", child.id());
    assert!(stderr(&second).contains(&holder), "{}", stderr(&second));
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn results_of_a_newer_version_and_damaged_journals() {
    let folder = tempfile::tempdir().unwrap();
    let args = speed(&["--len", "32", "--max-time", "20ms"]);
    assert!(run(folder.path(), &args).status.success());
    let path = latest(folder.path(), "speed").join("manifest.json");
    let text = fs::read_to_string(&path).unwrap();
    fs::write(&path, text.replace("\"state\": \"done\"", "\"state\": \"unfinished\"")).unwrap();
    let journal = latest(folder.path(), "speed").join("journal.jsonl");
    let bytes = fs::read(&journal).unwrap();
    fs::File::create(&journal).unwrap().write_all(&bytes[..bytes.len() - 10]).unwrap();
    let output = run(folder.path(), &args);
    assert!(stderr(&output).contains("3 of 4 cells are done"), "{}", stderr(&output));
    fs::write(&path, text.replace("\"schema\": 1", "\"schema\": 99")).unwrap();
    let output = run(folder.path(), &args);
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("written by a newer effattn (schema 99"), "{}", stderr(&output));
}

#[test]
fn every_turn_has_its_calibrations_and_every_cell_its_share_of_the_limit() {
    let folder = tempfile::tempdir().unwrap();
    let output = run(folder.path(), &speed(&["--len", "64", "--max-time", "40ms"]));
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success() && said.contains("Share of the limit"), "{said}{}", stderr(&output));
    let rows = rows(folder.path(), "speed");
    let shares: Vec<f64> =
        rows.iter().filter(|row| row.metric == "share_of_limit").filter_map(|row| row.value).collect();
    assert!(shares.len() == 4 && shares.iter().all(|share| (0.001..1.5).contains(share)), "{shares:?}");
    let samples = fs::read_to_string(latest(folder.path(), "speed").join("samples.jsonl")).unwrap();
    for line in samples.lines() {
        let cell: serde_json::Value = serde_json::from_str(line).unwrap();
        let turns = cell["turns"].as_array().unwrap();
        assert!(turns.iter().all(|turn| turn["before"].as_f64() > Some(0.0)), "{line}");
        let steps: u64 = turns.iter().filter_map(|turn| turn["steps"].as_u64()).sum();
        let back: usize = turns.iter().filter_map(|turn| turn["put_back"].as_array()).map(Vec::len).sum();
        assert_eq!(steps as usize, cell["values"].as_array().unwrap().len() + back);
        assert!(turns.iter().all(|turn| turn["put_back"].is_null() || turn["disturbed"].is_string()));
    }
}

#[test]
fn compare_refuses_times_of_a_machine_in_another_state() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    assert!(run(folder, &speed(&["--len", "32", "--max-time", "20ms", "-o", "a"])).status.success());
    let a = folder.join("a/speed/latest").canonicalize().unwrap();
    let read = || -> serde_json::Value {
        serde_json::from_str(&fs::read_to_string(a.join("manifest.json")).unwrap()).unwrap()
    };
    let b = folder.join("b");
    fs::create_dir(&b).unwrap();
    fs::copy(a.join("rows.csv"), b.join("rows.csv")).unwrap();
    let compared = |change: &dyn Fn(&mut serde_json::Value), more: &[&str]| {
        let mut manifest = read();
        change(&mut manifest);
        fs::write(b.join("manifest.json"), manifest.to_string()).unwrap();
        let output = run(folder, &[&["compare", a.to_str().unwrap(), "b"], more].concat());
        (output.status.code(), String::from_utf8_lossy(&output.stdout).into_owned() + &stderr(&output))
    };
    // the run itself may have been disturbed
    let calm = |manifest: &mut serde_json::Value| manifest["steadiness"]["disturbed"] = 0.into();
    let mut manifest = read();
    calm(&mut manifest);
    fs::write(a.join("manifest.json"), manifest.to_string()).unwrap();
    let (code, text) = compared(&calm, &["--export-csv", "-", "--fail-if-regression", "5%"]);
    assert!(code == Some(0) && text.contains("cell,metric,verdict,before,now,ratio,low,high,p\n"), "{text}");
    assert!(text.contains(",step_time,no difference,"), "{text}");
    let slower = |manifest: &mut serde_json::Value| {
        let seconds = manifest["steadiness"]["seconds"].as_f64().unwrap();
        manifest["steadiness"]["seconds"] = (2.0 * seconds).into();
    };
    let (code, text) = compared(&slower, &[]);
    assert!(code == Some(0) && text.contains("calibrations took 2.00 times as long now"), "{text}");
    assert_eq!(compared(&slower, &["--fail-if-regression", "5%"]).0, Some(2));
    let loaded = |manifest: &mut serde_json::Value| {
        manifest["steadiness"] = serde_json::Value::Null;
        manifest["load_average"] = 3.65.into();
        manifest["machine"]["cores"] = 2.into();
    };
    let (_, text) = compared(&loaded, &["--export-json", "-"]);
    assert!(text.contains("not comparable: load 3.65 on 2 processors now"), "{text}");
}
