//! Workers that die, hang, compute nonsense, or lose their program.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use effattn::record::{Outcome, Row};

use crate::run::kill_with_workers;

use super::{TWO_MODELS, children, fresh, le, rows, run, signal, spawn, stderr, words};

#[test]
fn a_binary_that_is_replaced_during_a_run_changes_nothing() {
    let folder = fresh("lra");
    let program = folder.path().join("effattn");
    // a copy of our own would be open for writing in what other tests start at this moment, and could not be run
    let copied = Command::new("cp").arg(env!("CARGO_BIN_EXE_effattn")).arg(&program).status().unwrap();
    assert!(copied.success());
    let mut child = Command::new(&program)
        .args(words(TWO_MODELS))
        .current_dir(folder.path())
        .stderr(Stdio::null())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let start = Instant::now();
    while children(child.id()).is_empty() {
        assert!(start.elapsed() < Duration::from_secs(60), "no worker was started");
        std::thread::sleep(Duration::from_millis(2));
    }
    fs::remove_file(&program).unwrap();
    fs::write(&program, "#!/bin/sh\necho another program >&2\nexit 3\n").unwrap();
    fs::set_permissions(&program, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    child.wait().unwrap();
    let rows = rows(folder.path(), "lra");
    assert!(rows.iter().any(|row| row.model == "linear"), "{rows:?}");
    assert!(rows.iter().all(|row| row.outcome == Outcome::Ok), "{rows:?}");
}

#[test]
fn a_worker_of_another_build_refuses() {
    let output = run(Path::new("."), "worker --build 0123456789abcdef");
    assert!(
        !output.status.success() && stderr(&output).contains("its run was started by build 0123456789abcdef")
    );
}

/// Sends `name` to the first worker, and gives the rows of the run behind it.
fn with_worker(line: &str, name: &str) -> Vec<Row> {
    let folder = fresh("lra");
    let mut child = spawn(folder.path(), line);
    let start = Instant::now();
    loop {
        assert!(start.elapsed() < Duration::from_secs(60), "no worker was started");
        // before the cell has written anything, workers only try what it will take
        let runs = fs::read_dir(folder.path().join("results/lra")).into_iter().flatten().flatten();
        let begun = runs
            .into_iter()
            .any(|run| fs::read_dir(run.path().join("cells")).is_ok_and(|cells| cells.count() > 0));
        if let Some(worker) = children(child.id()).first().filter(|_| begun) {
            std::thread::sleep(Duration::from_millis(60));
            if signal(*worker, name) {
                break;
            }
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    child.wait().unwrap();
    rows(folder.path(), "lra")
}

#[test]
fn a_worker_that_is_killed_is_a_row_and_the_suite_goes_on() {
    let rows = with_worker(TWO_MODELS, "-KILL");
    let first = &rows[0];
    assert!(matches!(first.outcome, Outcome::Failed | Outcome::Oom), "{first:?}");
    assert!(
        first.error.as_deref().is_some_and(|error| error.contains("signal 9") || error.contains("killed")),
        "{first:?}"
    );
    assert!(rows.iter().any(|row| row.model == "linear" && row.outcome == Outcome::Ok), "{rows:?}");
}

#[test]
fn a_worker_that_hangs_is_a_timeout_and_the_suite_goes_on() {
    // the other model has to make its steps within the same limit
    let line = TWO_MODELS.replace("--steps 1500", "--steps 600");
    assert_ne!(line, TWO_MODELS);
    let rows = with_worker(&format!("{line} --timeout 15s"), "-STOP");
    assert_eq!(rows[0].outcome, Outcome::Timeout, "{:?}", rows[0]);
    assert!(rows.iter().any(|row| row.model == "linear" && row.outcome == Outcome::Ok), "{rows:?}");
}

#[test]
fn a_nan_is_a_row_that_names_its_layer_and_the_suite_goes_on() {
    let folder = fresh("lra");
    let mut child = spawn(folder.path(), &format!("{TWO_MODELS} --save-every 1ms"));
    let cell = || {
        fs::read_dir(
            fs::read_dir(folder.path().join("results/lra")).ok()?.flatten().next()?.path().join("cells"),
        )
        .ok()?
        .flatten()
        .next()
    };
    let saved = || cell().map(|cell| cell.path().join("last.safetensors")).filter(|file| file.exists());
    let start = Instant::now();
    while saved().is_none() {
        assert!(start.elapsed() < Duration::from_secs(60), "no checkpoint was written");
        std::thread::sleep(Duration::from_millis(2));
    }
    kill_with_workers(&mut child);
    let file = saved().unwrap();
    let mut bytes = fs::read(&file).unwrap();
    let front = 8 + le(&bytes[..8]);
    let header: serde_json::Value = serde_json::from_slice(&bytes[8..front]).unwrap();
    let at = front + header["weight/layers.1.attn.q.weight"]["data_offsets"][0].as_u64().unwrap() as usize;
    bytes[at..at + 4].copy_from_slice(&f32::NAN.to_le_bytes());
    fs::write(&file, bytes).unwrap();
    let output = run(folder.path(), &format!("{TWO_MODELS} --save-every 1ms --detect-anomaly"));
    let rows = rows(folder.path(), "lra");
    let said = rows[0].error.clone().unwrap_or_default();
    assert_eq!(rows[0].outcome, Outcome::Diverged, "{said} {}", stderr(&output));
    assert!(said.contains(": layer 2 (ls), attention"), "{said}");
    assert!(rows.iter().any(|row| row.model == "linear" && row.outcome == Outcome::Ok), "{rows:?}");
}

#[test]
fn ctrl_c_keeps_the_last_step() {
    let folder = fresh("lra");
    let line = format!("{TWO_MODELS} --save-every 1h").replace("1500", "100000");
    let mut child = spawn(folder.path(), &line);
    let started = || {
        let run = fs::read_dir(folder.path().join("results/lra")).ok()?.flatten().next()?.path();
        let cell = fs::read_dir(run.join("cells")).ok()?.flatten().next()?.path();
        cell.join("curve.csv").exists().then_some(cell)
    };
    let start = Instant::now();
    while started().is_none() {
        assert!(start.elapsed() < Duration::from_secs(60), "nothing was evaluated");
        std::thread::sleep(Duration::from_millis(5));
    }
    assert!(signal(child.id(), "-INT"));
    child.wait().unwrap();
    assert!(started().unwrap().join("last.safetensors").exists(), "no checkpoint behind Ctrl-C");
}
