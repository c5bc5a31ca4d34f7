//! The real binary under faults: kills at random moments, workers that die or hang, disks that are full, clocks that go
//! backwards. The tests are in the modules; what they share is here.
//!
//! `EFFATTN_KILLS=150 cargo test --release --test binary faults:: -- --nocapture` for a night; the default takes a minute.
#![cfg(target_os = "linux")]

mod bounds;
mod contents;
mod identity;
mod kills;
mod surroundings;
mod workers;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use crate::run::children;
use effattn::record::{Row, csv};

fn words(line: &str) -> Vec<&str> {
    line.split_whitespace().collect()
}

/// A command that is killed: small, single-threaded, saved after every step.
struct Victim {
    name: &'static str,
    line: &'static str,
}

const VICTIMS: [Victim; 7] = [
    Victim {
        name: "speed",
        line: "speed --preset ls-lra --model full,linear --len 32,64,128 --max-time 40ms --no-plot --threads 1",
    },
    Victim {
        name: "lra",
        line: "lra --task listops --model ls:w=4,r=2 --len 16 --batch 8 --rate 1e-3 --steps 120 --data-dir . --no-plot \
               --threads 1 --save-every 1ms",
    },
    Victim {
        name: "charlm",
        line: "charlm --quick --model ls:w=16 --steps 60 --every 10 --len 64 --batch 4 --accumulate 2 --limit 300 \
               --set layers=1 --set dropout=0.1 --no-plot --threads 1 --save-every 1ms",
    },
    Victim {
        name: "wordlm",
        line: "wordlm --quick --model cosformer --steps 60 --every 10 --len 32 --batch 4 --accumulate 2 --limit 300 \
               --set layers=1 --set width=64 --no-plot --threads 1 --save-every 1ms",
    },
    Victim {
        name: "recall",
        line: "recall --model linear --segments 16:2 --test-segments 16:2,32:4 --batch 8 --rates 1e-3,1e-2 --steps 60 --every 10 --limit 40 \
               --set dropout=0.1 --no-plot --threads 1 --save-every 1ms",
    },
    Victim {
        name: "vision",
        line: "vision --quick --preset cvt-small --model full --steps 24 --every 6 --batch 4 --accumulate 2 --limit 24 \
               --no-plot --threads 1 --save-every 1ms",
    },
    Victim {
        name: "lra",
        line: "lra --task listops --model ls:w=4,r=2 --len 16 --batch 8 --rate 1e-3 --steps 60 --dtype bf16 --data-dir . --no-plot \
               --threads 1 --save-every 1ms",
    },
];

fn effattn(folder: &Path, line: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_effattn"));
    command
        .args(words(line))
        .current_dir(folder)
        .env("XDG_CACHE_HOME", folder.join("cache"))
        .env_remove("EFFATTN_LOG");
    command
}

fn run(folder: &Path, line: &str) -> Output {
    effattn(folder, line).output().unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn spawn(folder: &Path, line: &str) -> Child {
    effattn(folder, line).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
}

fn latest(folder: &Path, command: &str) -> PathBuf {
    folder.join("results").join(command).join("latest")
}

fn rows(folder: &Path, command: &str) -> Vec<Row> {
    csv::from_str(&fs::read_to_string(latest(folder, command).join("rows.csv")).unwrap()).unwrap()
}

/// LRA's three files with few expressions.
fn expressions(folder: &Path) {
    let line = |index: usize| {
        let (a, b) = (index % 10, index / 10 % 10);
        format!("( ( ( [MAX {a} ) {b} ) ] )\t{}\n", a.max(b))
    };
    for (name, range) in [("train", 0..80), ("val", 80..100), ("test", 90..100)] {
        let text: String = range.map(line).collect();
        fs::write(folder.join(format!("basic_{name}.tsv")), format!("Source\tTarget\n{text}")).unwrap();
    }
}

/// Everything that kills must not change: rows without times and memory, curves, weights.
fn result(folder: &Path, command: &str) -> (Vec<String>, Vec<(String, Vec<u8>)>) {
    let timed = ["s", "1/s", "B", "share"];
    let told = rows(folder, command).into_iter().map(|row| {
        let value = row.value.filter(|_| !timed.contains(&row.unit.as_str()));
        let place = (row.label(), row.task.clone(), row.len, row.batch, row.pass, row.seed);
        format!("{place:?} {} {:?} {value:?}", row.metric, row.outcome)
    });
    let told = told.collect();
    let mut files = Vec::new();
    let Ok(cells) = fs::read_dir(latest(folder, command).join("cells")) else { return (told, files) };
    for file in cells.flatten().flat_map(|cell| fs::read_dir(cell.path()).unwrap().flatten()) {
        let name = file.file_name().to_string_lossy().into_owned();
        if name == "curve.csv" || name.ends_with("best.safetensors") {
            let bytes = fs::read(file.path()).unwrap();
            // the words in front of the tensors stand in any order
            let front = if name.ends_with("safetensors") { 8 + le(&bytes[..8]) } else { 0 };
            files.push((name, bytes[front..].to_vec()));
        }
    }
    files.sort();
    (told, files)
}

fn le(bytes: &[u8]) -> usize {
    bytes.iter().rev().fold(0, |number, byte| number << 8 | usize::from(*byte))
}

fn fresh(command: &str) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    if command == "lra" {
        expressions(folder.path());
    }
    folder
}

fn signal(process: u32, name: &str) -> bool {
    Command::new("kill").args([name, &process.to_string()]).stderr(Stdio::null()).status().unwrap().success()
}

const TWO_MODELS: &str = "lra --task listops --model ls:w=4,r=2,linear --len 16 --batch 8 --rate 1e-3 --steps 1500 --data-dir . \
                          --no-plot --threads 1";

/// `VICTIMS[0]` without a place for its results.
const SPEED: &str =
    "speed --preset ls-lra --model full,linear --len 32,64 --max-time 30ms --no-plot --threads 1 --quiet";

const LRA: &str = "lra --task listops --model ls:w=4,r=2 --len 16 --batch 8 --rate 1e-3 --steps 20 --data-dir . --no-plot \
                   --threads 1";

/// Seconds after which a command that should not wait is taken for one that does.
const WAIT: Duration = Duration::from_secs(60);

/// Runs `line` to its end, which must come soon.
fn soon(folder: &Path, line: &str) -> Output {
    let child = effattn(folder, line).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let (id, start) = (child.id(), Instant::now());
    let watch = std::thread::spawn(move || child.wait_with_output().unwrap());
    while !watch.is_finished() {
        if start.elapsed() > WAIT {
            signal(id, "-KILL");
            panic!("{line} waits");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    watch.join().unwrap()
}

/// Runs `line`, which must succeed, and gives what it said.
fn said(folder: &Path, line: &str) -> String {
    let output = run(folder, line);
    assert!(output.status.success(), "{line}: {}", stderr(&output));
    stderr(&output)
}

/// Number of run folders of `command`.
fn runs(folder: &Path, command: &str) -> usize {
    let entries = fs::read_dir(folder.join("results").join(command)).unwrap().flatten();
    entries.filter(|entry| entry.file_type().unwrap().is_dir()).count()
}

/// A suite of `rows` of full attention, the settings of each given.
fn suite(title: &str, rows: &[&str]) -> String {
    let rows = rows
        .iter()
        .enumerate()
        .map(|(index, set)| format!("[[row]]\nlabel = \"r{index}\"\nmodel = \"full\"\nset = {{ {set} }}\n"));
    format!(
        "title = {title}\nprotocol = \"speed\"\nsource = \"s\"\n[base]\npreset = \"ls-lra\"\nlen = [32]\nmode = \"infer\"\n\
         max_time = \"30ms\"\n{}",
        rows.collect::<String>()
    )
}

/// `manifest` as an earlier version wrote it, without the digest of its rows: a test writes others.
fn unsealed(manifest: &Path) -> String {
    let mut json: serde_json::Value = serde_json::from_str(&fs::read_to_string(manifest).unwrap()).unwrap();
    assert!(json.as_object_mut().unwrap().remove("rows_sha256").is_some(), "{}", manifest.display());
    serde_json::to_string_pretty(&json).unwrap()
}

/// Says that the newest run of `command` is not finished.
fn unfinished(folder: &Path, command: &str) -> PathBuf {
    let folder = latest(folder, command).canonicalize().unwrap();
    let file = folder.join("manifest.json");
    let text = fs::read_to_string(&file).unwrap();
    assert!(text.contains("\"done\""));
    fs::write(&file, text.replace("\"done\"", "\"unfinished\"")).unwrap();
    folder
}
