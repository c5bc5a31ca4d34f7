//! Programs (`docs/programs.md`) against the real binary: `examples/c/full.c` as it is, and with one fault at a time.
#![cfg(unix)]

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

/// In front of `attention`, so that a fault concerns the bidirectional file only and the other one shows that the run goes on.
const ENTRY: &str = "    long s[4], t[4], m[4];\n";

/// Compiles the example with `changes` into `folder`, beside its description.
fn program(folder: &Path, changes: &[(&str, &str)]) {
    let examples = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/c");
    let mut source = fs::read_to_string(examples.join("full.c")).unwrap();
    for (from, to) in changes {
        assert!(source.contains(from), "{from:?} is not in full.c");
        source = source.replace(from, to);
    }
    fs::write(folder.join("full.c"), format!("#include <time.h>\n#include <unistd.h>\n{source}")).unwrap();
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".to_owned());
    let built = Command::new(compiler)
        .args(["-O1", "-w", "-o", "full", "full.c", "-lm"])
        .current_dir(folder)
        .status();
    assert!(built.unwrap().success());
    let text = fs::read_to_string(examples.join("full.toml")).unwrap();
    fs::write(folder.join("full.toml"), text.replace("20s", "3s")).unwrap();
}

fn effattn(folder: &Path, line: &str) -> Output {
    let words = line.split_whitespace();
    Command::new(env!("CARGO_BIN_EXE_effattn")).args(words).current_dir(folder).output().unwrap()
}

/// Exit code and, by golden file, outcome and error.
fn check(changes: &[(&str, &str)]) -> (i32, Vec<(String, String, String)>) {
    let folder = tempfile::tempdir().unwrap();
    program(folder.path(), changes);
    let output = effattn(folder.path(), "check --program ./full.toml --threads 1 --export-json -");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    let all: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{said}"));
    let text = |row: &Value, key: &str| row[key].as_str().unwrap_or_default().to_owned();
    let rows = all["rows"].as_array().unwrap();
    assert!(rows.iter().all(|row| row["program"] == "full" && row["model"] == "full"), "{rows:?}");
    let rows = rows.iter().map(|row| (text(row, "variant"), text(row, "outcome"), text(row, "error")));
    (output.status.code().unwrap(), rows.collect())
}

/// The program with `changes` is red at the bidirectional file, for a reason that contains all of `said`; the next file is green.
fn found(changes: &[(&str, &str)], outcome: &str, said: &[&str]) {
    let (code, rows) = check(changes);
    let [(first, ended, error), (second, after, _)] = rows.as_slice() else { panic!("{rows:?}") };
    assert_eq!((first.as_str(), second.as_str()), ("full-02", "full-causal-01"));
    assert_eq!((code, ended.as_str(), after.as_str()), (1, outcome, "ok"), "{rows:?}");
    assert!(said.iter().all(|said| error.contains(said)), "{error:?} does not say {said:?}");
}

/// The same fault in the bidirectional file only.
fn at_entry(fault: &str) -> (&'static str, String) {
    (ENTRY, format!("    if (!causal) {{ {fault} }}\n{ENTRY}"))
}

#[test]
fn the_example_is_green() {
    let (code, rows) = check(&[]);
    assert!(code == 0 && rows.iter().all(|(_, outcome, _)| outcome == "ok"), "{rows:?}");
}

#[test]
fn a_wrong_sign_in_a_gradient_is_found_with_its_tensor_and_element() {
    let (code, rows) = check(&[("gk[first + j * D + d] +=", "gk[first + j * D + d] -=")]);
    assert_eq!(code, 1);
    for (file, outcome, error) in rows {
        assert_eq!(outcome, "failed", "{file}");
        assert!(error.starts_with("grad_k is off by ") && error.contains(" at ["), "{error}");
        let values = error.split("]: ").nth(1).unwrap().split(" in the place of ");
        let [got, want] = values.map(|value| value.parse::<f64>().unwrap()).collect::<Vec<_>>()[..] else {
            panic!()
        };
        assert!((got + want).abs() < 1e-3 * want.abs(), "{got} in the place of {want}");
    }
}

#[test]
fn a_dropped_mask_is_found() {
    let mask = "(!mask || mask[bh / H * T + j] != 0)";
    found(&[(mask, &mask.replace("!mask ||", "!causal || !mask ||"))], "failed", &["is off by"]);
}

#[test]
fn answers_in_float16_are_refused() {
    let (code, rows) = check(&[("= \"F32\"", "= \"F16\""), ("4 * count", "2 * count")]);
    assert_eq!(code, 1);
    assert!(rows.iter().all(|(_, _, error)| error == "grad_k is f16; answers are f32"), "{rows:?}");
}

#[test]
fn a_program_that_sleeps_is_a_timeout() {
    let (from, to) = at_entry("fprintf(stderr, \"waiting for a lock\\n\"); sleep(600);");
    found(&[(from, &to)], "timeout", &["no answer to \"evaluate\" within 3.0 s", "waiting for a lock"]);
}

#[test]
fn text_on_its_standard_output_is_named() {
    let (from, to) = at_entry("printf(\"loss 0.25\\n\");");
    found(
        &[(from, &to)],
        "failed",
        &["its standard output begins with \"loss 0.2\"", "print to standard error"],
    );
}

#[test]
fn a_program_that_dies_is_told_with_its_last_words() {
    let (from, to) = at_entry("fprintf(stderr, \"cannot allocate 5 GiB\\n\"); exit(3);");
    found(&[(from, &to)], "failed", &["the program ended with code 3: cannot allocate 5 GiB"]);
    let half = "long l[2] = {2, 999}; fwrite(\"effattn1\", 8, 1, stdout); fwrite(l, 8, 2, stdout); printf(\"{}half\"); exit(0);";
    let (from, to) = at_entry(half);
    found(&[(from, &to)], "failed", &["the body of its answer ended after 4 of 999 bytes"]);
}

#[test]
fn a_refusal_is_no_success() {
    let refusal =
        |outcome: &str| format!(r#"send("{{\"error\":\"odd\",\"outcome\":\"{outcome}\"}}", "", 0);"#);
    for outcome in ["ok", "implied"] {
        let (from, to) = at_entry(&format!("{} return;", refusal(outcome)));
        let said = format!("odd (its refusal has the outcome \"{outcome}\", which is none of unsupported");
        found(&[(from, &to)], "failed", &[&said]);
    }
}

#[test]
fn passes_that_are_new_to_us_are_passed_over() {
    let (code, rows) = check(&[(r#"[\"infer\",\"train\"]"#, r#"[\"infer\",\"generate\",\"train\"]"#)]);
    assert!(code == 0 && rows.iter().all(|(_, outcome, _)| outcome == "ok"), "{rows:?}");
}

/// A script that does not `exec` what it starts, as those of package managers do.
#[test]
fn what_a_program_started_ends_with_it() {
    let folder = tempfile::tempdir().unwrap();
    let (from, to) = at_entry("sleep(600);");
    program(folder.path(), &[(from, &to)]);
    let text = fs::read_to_string(folder.path().join("full.toml")).unwrap();
    let command = text.lines().find(|line| line.starts_with("command")).unwrap();
    let wrapped = text.replace(command, "command = [\"sh\", \"-c\", \"./full; true\"]");
    fs::write(folder.path().join("full.toml"), wrapped).unwrap();
    effattn(folder.path(), "check --program ./full.toml --threads 1");
    let place = folder.path().canonicalize().unwrap();
    let left = || {
        let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
        let there = |path: std::path::PathBuf| fs::read_link(path.join("cwd")).is_ok_and(|cwd| cwd == place);
        processes.filter(|process| there(process.path())).count()
    };
    assert_eq!(left(), 0, "a program outlived the command");
}

#[test]
fn what_cannot_be_started_is_a_usage_error_and_what_is_unknown_too() {
    let folder = tempfile::tempdir().unwrap();
    let text = "about = 'x'\ncommand = ['./absent']\ninstall = 'make absent'\n";
    fs::write(folder.path().join("absent.toml"), text).unwrap();
    for (word, says) in [
        ("./absent.toml", "program absent cannot run: "),
        ("./absent.toml", "make absent"),
        ("torhc", "did you mean torch?"),
        ("./none.toml", "--program ./none.toml"),
    ] {
        let output = effattn(folder.path(), &format!("check --program {word} --model full"));
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(2) && said.contains(says), "{word}: {said}");
    }
}

/// Program, outcome and error of the cells of ours and of the program with `changes`, by `speed`; and its standard error.
fn speed(changes: &[(&str, &str)]) -> (Vec<(String, String, String)>, String) {
    let folder = tempfile::tempdir().unwrap();
    program(folder.path(), changes);
    let line = "speed --program ./full.toml --model full --preset ls-lra --set pooling=mean --len 32 --mode infer \
                --max-time 200ms --runs 8 --threads 1 --no-plot -v --export-json -";
    let output = effattn(folder.path(), line);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    let all: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{said}"));
    let text = |row: &Value, key: &str| row[key].as_str().unwrap_or_default().to_owned();
    let times = all["rows"].as_array().unwrap().iter().filter(|row| row["metric"] == "step_time");
    let rows = times.map(|row| (text(row, "program"), text(row, "outcome"), text(row, "error"))).collect();
    (rows, said)
}

/// Our cell is measured whatever the other program does, and its cell says `outcome` and `said`.
fn beside_ours(changes: &[(&str, &str)], outcome: &str, said: &str) {
    let (rows, _) = speed(changes);
    let [(ours, ok, _), (theirs, ended, error)] = rows.as_slice() else { panic!("{rows:?}") };
    assert_eq!((ours.as_str(), ok.as_str(), theirs.as_str()), ("effattn", "ok", "full"));
    assert!(ended == outcome && error.contains(said), "{ended}: {error:?} does not say {said:?}");
}

#[test]
fn a_program_that_only_evaluates_is_not_timed() {
    beside_ours(&[], "unsupported", "full.c evaluates only");
}

#[test]
fn a_program_whose_check_is_red_is_not_timed() {
    beside_ours(
        &[("gq[row + d] +=", "gq[row + d] -=")],
        "failed",
        "its check is red: full-02.safetensors: grad_q is off by",
    );
}

/// In front of the refusal of what the example does not do: a cell whose steps take 200 ms, of which it tells `share`, with
/// `result`.
fn steps(result: &str, share: f64) -> (&'static str, String) {
    let refusal = "            send(\"{\\\"error\\\":";
    let steps = format!(
        r#"            if (strstr(header, "\"request\":\"prepare\"")) send("{{}}", "", 0); else
            if (strstr(header, "\"request\":\"steps\"")) {{
                struct timespec a, b;
                clock_gettime(CLOCK_MONOTONIC, &a), usleep(200000), clock_gettime(CLOCK_MONOTONIC, &b);
                char text[100];
                double seconds = b.tv_sec - a.tv_sec + 1e-9 * (b.tv_nsec - a.tv_nsec);
                sprintf(text, "{{\"seconds\":[%.9f],\"result\":[{result}]}}", {share} * seconds), send(text, "", 0);
            }} else
"#
    );
    (refusal, steps + refusal)
}

/// The first logit of our model, as the refusal of a program with another one says it.
fn first_logit() -> String {
    let (from, to) = steps("9", 1.0);
    let (rows, _) = speed(&[(from, &to)]);
    let [(_, ok, _), (_, ended, error)] = rows.as_slice() else { panic!("{rows:?}") };
    assert_eq!((ok.as_str(), ended.as_str()), ("ok", "failed"), "{error}");
    let said = "its model is not ours: the first step gives 9.000000, ours ";
    error.strip_prefix(said).unwrap_or_else(|| panic!("{error}")).to_owned()
}

/// What is said of the clocks of a program that tells `share` of the time of its steps, and the percentage in it.
fn clocks(logit: &str, share: f64) -> (String, f64) {
    let (from, to) = steps(logit, share);
    let (rows, said) = speed(&[(from, &to)]);
    assert!(rows.iter().all(|(_, outcome, _)| outcome == "ok"), "{rows:?}");
    let line =
        said.lines().find(|line| line.contains("by its own clock: ")).unwrap_or_else(|| panic!("{said}"));
    let apart = line.split("by its own clock: ").nth(1).unwrap().split(' ').next().unwrap();
    (line.to_owned(), apart.parse().unwrap())
}

#[test]
fn a_program_with_another_model_is_not_timed_and_one_that_lies_about_its_time_is_named() {
    let logit = first_logit();
    let (line, apart) = clocks(&logit, 0.5);
    assert!(line.contains("warning") && apart > 99.0, "{line}");
    // the machine may be taken away between the two clocks of an honest program, but not every time
    let honest = (0..5).map(|_| clocks(&logit, 1.0)).find(|(_, apart)| (0.0..5.0).contains(apart));
    let (line, _) = honest.expect("an honest program's clock agrees with ours at least once");
    assert!(!line.contains("warning"), "{line}");
}

#[test]
fn more_than_was_asked_for_is_no_answer() {
    let (from, to) = steps(&first_logit(), 1.0);
    let send = r#"send(text, "", 0)"#;
    let twice = to.replace(send, &format!("{send}, {send}"));
    assert_ne!(twice, to);
    beside_ours(&[(from, &twice)], "failed", "it answered a request twice");
    let two = to.replace("\\\"seconds\\\":[", "\\\"seconds\\\":[0.02,");
    assert_ne!(two, to);
    beside_ours(&[(from, &two)], "failed", "it gave times of 2 steps and was asked for 1");
}

#[test]
fn our_own_first_step_has_the_limits_of_the_programs_cell() {
    let folder = tempfile::tempdir().unwrap();
    let cell = "speed --program candle-flash --model full --preset ls-lra --set pooling=mean --len 16384 --mode infer";
    let ends = [
        ("--timeout 50ms", "timeout", "ran past its time limit"),
        ("--memory-limit 16MiB", "oom", "the limit is 16.0 MiB"),
    ];
    for (limit, outcome, why) in ends {
        let output = effattn(folder.path(), &format!("{cell} {limit} --threads 1 --no-plot --export-json -"));
        let all: Value = serde_json::from_slice(&output.stdout).unwrap();
        let theirs: Vec<&Value> =
            all["rows"].as_array().unwrap().iter().filter(|row| row["program"] == "candle-flash").collect();
        assert!(!theirs.is_empty(), "{all}");
        for row in theirs {
            let error = row["error"].as_str().unwrap_or_default();
            let ours = error.starts_with("effattn's own first step");
            assert!(row["outcome"] == outcome && ours && error.contains(why), "{row}");
        }
    }
}

/// Program, metric, outcome and value of the rows that `line` exports.
fn rows(folder: &Path, line: &str) -> Vec<(String, String, String, Option<f64>)> {
    let output = effattn(folder, &format!("{line} --threads 1 --export-json -"));
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    let all: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{said}"));
    let text = |row: &Value, key: &str| row[key].as_str().unwrap_or_default().to_owned();
    let rows = all["rows"].as_array().unwrap().iter();
    rows.map(|row| (text(row, "program"), text(row, "metric"), text(row, "outcome"), row["value"].as_f64()))
        .collect()
}

#[test]
fn candles_fused_attention_is_green_timed_and_says_its_memory() {
    let folder = tempfile::tempdir().unwrap();
    let checked = rows(folder.path(), "check --program candle-flash");
    assert_eq!(checked.len(), 2);
    assert!(
        checked.iter().all(|(_, _, outcome, value)| outcome == "ok" && value.unwrap() < 1.0),
        "{checked:?}"
    );
    let cells = "--program candle-flash --model full --preset ls-lra --set pooling=mean --len 32 --no-plot";
    let timed = rows(folder.path(), &format!("speed {cells} --mode infer,train --max-time 50ms"));
    let times =
        timed.iter().filter(|(program, metric, ..)| program == "candle-flash" && metric == "step_time");
    let ended: Vec<(&str, bool)> =
        times.map(|(_, _, outcome, value)| (outcome.as_str(), value.is_some())).collect();
    assert_eq!(ended, [("ok", true), ("unsupported", false)], "it has no backward pass");
    let held = rows(folder.path(), &format!("memory {cells} --mode infer"));
    let grown = held.iter().filter(|(_, metric, ..)| metric == "resident_growth");
    let [(program, _, outcome, Some(_))] = grown.collect::<Vec<_>>()[..] else { panic!("{held:?}") };
    assert_eq!((program.as_str(), outcome.as_str()), ("candle-flash", "ok"));
}

#[test]
fn a_golden_file_of_our_own_is_read_by_check_and_by_programs_and_says_whose_it_is() {
    let folder = tempfile::tempdir().unwrap();
    let output = effattn(
        folder.path(),
        "golden --model full --case causal,mask --len 33 --heads 3 -o cases/full.safetensors",
    );
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success() && said.contains("computed in f64"), "{said}");
    let bytes = fs::read(folder.path().join("cases/full.safetensors")).unwrap();
    let header = String::from_utf8_lossy(&bytes[8..2000]).into_owned();
    assert!(header.contains("not independent of effattn"), "{header}");
    for who in ["", "--program candle-flash"] {
        let output = effattn(folder.path(), &format!("check --golden cases {who}"));
        let table = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success() && table.contains("not that effattn is right"), "{who}: {table}");
    }
    for (line, says) in [
        ("--model full,linear", "--model names 2 mechanisms"),
        ("--model full --len 0", "--len 0 is not allowed"),
        ("--model full --len 10000", "choose a smaller --len"),
        ("--model fnet --case causal", "fnet has no causal form"),
    ] {
        let output = effattn(folder.path(), &format!("golden {line} -o x.safetensors"));
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(2) && said.contains(says), "{line}: {said}");
    }
}
