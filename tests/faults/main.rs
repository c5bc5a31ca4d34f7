//! The real binary under faults: kills at random moments, workers that die or hang, disks that are full, clocks that go
//! backwards.
//!
//! `EFFATTN_KILLS=150 cargo test --release --test binary faults:: -- --nocapture` for a night; the default takes a minute.
#![cfg(target_os = "linux")]

mod identity;

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use effattn::device::rng::Stream;
use effattn::record::{Outcome, Row, csv};

/// Kills in all where nothing else is said.
const KILLS: usize = 15;
/// Kills before a run is let to its end.
const TOGETHER: usize = 4;

fn words(line: &str) -> Vec<&str> {
    line.split_whitespace().collect()
}

/// A command that is killed: small, single-threaded, saved after every step.
struct Victim {
    name: &'static str,
    line: &'static str,
}

const VICTIMS: [Victim; 5] = [
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
        name: "vision",
        line: "vision --quick --preset cvt-small --model full --steps 24 --every 6 --batch 4 --accumulate 2 --limit 24 \
               --no-plot --threads 1 --save-every 1ms",
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
    let timed = ["s", "1/s", "B"];
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

#[test]
fn kills_at_random_moments_change_nothing() {
    let wanted = std::env::var("EFFATTN_KILLS").ok().and_then(|text| text.parse().ok()).unwrap_or(KILLS);
    let seed = std::env::var("EFFATTN_FUZZ_SEED").ok().and_then(|text| text.parse().ok()).unwrap_or(0);
    let mut random = Stream::new(seed, "kills");
    for (index, victim) in VICTIMS.iter().enumerate() {
        let wanted = (wanted + index) / VICTIMS.len();
        let undisturbed = fresh(victim.name);
        let start = Instant::now();
        let output = run(undisturbed.path(), victim.line);
        assert!(output.status.success(), "{}", stderr(&output));
        let whole = start.elapsed().as_secs_f64();
        let expected = result(undisturbed.path(), victim.name);
        let (mut survived, mut tried) = (0, 0);
        while survived < wanted && tried < 20 * wanted {
            let folder = fresh(victim.name);
            let mut hits = 0;
            for _ in 0..TOGETHER.min(wanted - survived) {
                tried += 1;
                let mut child = spawn(folder.path(), victim.line);
                std::thread::sleep(Duration::from_secs_f64(random.uniform(0.0, 0.8 * whole)));
                let name = if tried % 2 == 0 { "-KILL" } else { "-TERM" };
                let _ =
                    Command::new("kill").args([name, &child.id().to_string()]).stderr(Stdio::null()).status();
                let ended = child.wait().unwrap();
                if ended.success() {
                    break; // it was faster
                }
                hits += 1;
            }
            let output = run(folder.path(), victim.line);
            assert!(output.status.success(), "{}", stderr(&output));
            let found = result(folder.path(), victim.name);
            let left = temporary(&folder.path().join("results"));
            assert!(left.is_empty(), "{}: {hits} kills left {left:?}", victim.name);
            let mut times =
                rows(folder.path(), victim.name).into_iter().filter(|row| row.metric == "step_time");
            assert!(times.all(|row| row.value.is_some()), "{}: {hits} kills cost a step_time", victim.name);
            assert_eq!(found.0, expected.0, "{}: {hits} kills changed the rows", victim.name);
            assert!(found.1 == expected.1, "{}: {hits} kills changed curves or weights", victim.name);
            survived += hits;
        }
        println!("{:<7} {survived} kills survived of {survived}, results identical", victim.name);
        assert!(survived >= wanted, "{}: only {survived} of {wanted} kills hit", victim.name);
    }
}

/// Temporary files below `folder`.
fn temporary(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for path in fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if path.is_dir() && !path.is_symlink() {
            found.extend(temporary(&path));
        } else if name.starts_with(".effattn-") || name.starts_with(".checkpoint-") {
            found.push(path);
        }
    }
    found
}

#[test]
fn a_binary_that_is_replaced_during_a_run_changes_nothing() {
    let folder = fresh("lra");
    let program = folder.path().join("effattn");
    fs::copy(env!("CARGO_BIN_EXE_effattn"), &program).unwrap();
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

#[test]
fn names_that_are_not_unicode_neither_panic_nor_hang() {
    use std::os::unix::ffi::OsStrExt;
    let odd = std::ffi::OsStr::from_bytes(b"caf\xe9");
    let folder = fresh("lra");
    let home = folder.path().join(odd);
    fs::create_dir(&home).unwrap();
    let start = Instant::now();
    let mut command =
        effattn(folder.path(), "lra --task listops --model ls --steps 2 --limit 10 --no-plot --threads 1");
    let output = command.env("XDG_CACHE_HOME", &home).output().unwrap();
    let said = stderr(&output);
    assert!(
        start.elapsed() < Duration::from_secs(60) && output.status.code().is_some_and(|code| code < 100),
        "{said}"
    );
    let mut command = effattn(folder.path(), VICTIMS[0].line);
    let output = command.arg("-o").arg(odd).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(folder.path().join(odd).join("speed/latest/rows.csv").exists());
}

#[test]
fn what_a_person_names_is_written_through_and_what_a_file_names_is_no_path() {
    use std::os::unix::fs::{FileTypeExt, PermissionsExt, symlink};
    let folder = fresh("speed");
    let at = |name: &str| folder.path().join(name);
    assert!(run(folder.path(), VICTIMS[0].line).status.success());
    fs::write(at("real.md"), "<!-- effattn report: begin -->\n<!-- effattn report: end -->\n").unwrap();
    fs::set_permissions(at("real.md"), fs::Permissions::from_mode(0o600)).unwrap();
    symlink("real.md", at("page.md")).unwrap();
    symlink("/dev/null", at("nothing")).unwrap();
    for line in ["report -o nothing", "report --splice page.md", "report --splice page.md"] {
        assert!(run(folder.path(), line).status.success(), "{line}");
    }
    assert!(at("page.md").is_symlink() && at("nothing").is_symlink());
    assert!(fs::metadata("/dev/null").unwrap().file_type().is_char_device());
    assert_eq!(fs::metadata(at("real.md")).unwrap().permissions().mode() & 0o777, 0o600);
    let text = fs::read_to_string(at("real.md")).unwrap();
    assert!(text.contains("Measured by effattn") && text.matches("report: end").count() == 1, "{text}");
    // a suite that is a path, in rows that somebody else wrote
    let file = latest(folder.path(), "speed").join("rows.csv");
    let rows: Vec<Row> = csv::from_str(&fs::read_to_string(&file).unwrap()).unwrap();
    let outside = at("outside").display().to_string();
    for suite in ["../../outside", &outside] {
        let rows: Vec<Row> =
            rows.iter().map(|row| Row { suite: Some(suite.to_owned()), ..row.clone() }).collect();
        fs::write(&file, csv::to_string(&rows).unwrap()).unwrap();
        let output = run(folder.path(), "plot rows results/speed --plots-dir a/b/plots");
        assert!(output.status.success(), "{}", stderr(&output));
    }
    let strays = fs::read_dir(folder.path()).unwrap().chain(fs::read_dir(at("a")).unwrap());
    let strays =
        strays.filter(|entry| entry.as_ref().unwrap().file_name().to_string_lossy().contains("outside"));
    assert_eq!(strays.count(), 0, "a name from a file became a path");
    assert!(fs::read_dir(at("a/b/plots")).unwrap().count() >= 2);
}

/// Processes whose parent is `process`.
fn children(process: u32) -> Vec<u32> {
    let output = Command::new("ps").args(["-o", "pid=", "--ppid", &process.to_string()]).output().unwrap();
    String::from_utf8_lossy(&output.stdout).split_whitespace().map(|pid| pid.parse().unwrap()).collect()
}

fn signal(process: u32, name: &str) -> bool {
    Command::new("kill").args([name, &process.to_string()]).stderr(Stdio::null()).status().unwrap().success()
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

const TWO_MODELS: &str = "lra --task listops --model ls:w=4,r=2,linear --len 16 --batch 8 --rate 1e-3 --steps 1500 --data-dir . \
                          --no-plot --threads 1";

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
    let rows = with_worker(&format!("{TWO_MODELS} --timeout 15s"), "-STOP");
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
    child.kill().unwrap();
    child.wait().unwrap();
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

/// Runs `line` where no file may grow beyond `blocks` of 512 bytes, as on a disk that fills up.
fn on_full_disk(folder: &Path, line: &str, blocks: u64) -> Output {
    let script = format!("trap '' XFSZ; ulimit -f {blocks}; exec \"$0\" \"$@\"");
    Command::new("sh")
        .args(["-c", &script, env!("CARGO_BIN_EXE_effattn")])
        .args(words(line))
        .current_dir(folder)
        .env("XDG_CACHE_HOME", folder.join("cache"))
        .env_remove("EFFATTN_LOG")
        .output()
        .unwrap()
}

#[test]
fn a_full_disk_ends_a_run_with_its_file_named_and_it_can_be_continued() {
    let (mut full, mut tried) = (0, 0);
    for victim in VICTIMS {
        let undisturbed = fresh(victim.name);
        assert!(run(undisturbed.path(), victim.line).status.success());
        for blocks in [0, 8, 40, 100] {
            let folder = fresh(victim.name);
            let output = on_full_disk(folder.path(), victim.line, blocks);
            let said = stderr(&output);
            assert!(!said.contains("panicked"), "{said}");
            tried += 1;
            if !output.status.success() {
                assert!(said.contains("File too large"), "{} with {blocks} blocks: {said}", victim.name);
                full += 1;
            }
            let again = run(folder.path(), victim.line);
            assert!(again.status.success(), "{}", stderr(&again));
            let (found, expected) =
                (result(folder.path(), victim.name), result(undisturbed.path(), victim.name));
            assert!(found == expected, "{} behind a full disk of {blocks} blocks", victim.name);
        }
    }
    assert!(full >= 2 * VICTIMS.len(), "only {full} of {tried} disks were too small");
    println!("full disks: {full} of {tried} were too small; all of them were named, and every run went on");
}

#[test]
fn a_clock_that_goes_backwards_changes_nothing() {
    let folder = fresh("speed");
    let line = VICTIMS[0].line;
    assert!(run(folder.path(), line).status.success());
    let base = folder.path().join("results/speed");
    let first = base.join("latest").canonicalize().unwrap();
    let future = base.join("29991231-235959-abcdef");
    fs::rename(&first, &future).unwrap();
    fs::remove_file(base.join("latest")).unwrap();
    assert!(run(folder.path(), line).status.success());
    let second = base.join("latest").canonicalize().unwrap();
    assert!(second != future.canonicalize().unwrap(), "the run behind it is the latest");
    let report = run(folder.path(), "report");
    let text = String::from_utf8_lossy(&report.stdout).into_owned();
    assert!(text.contains(&*second.file_name().unwrap().to_string_lossy()), "{text}");
}

#[test]
fn a_reader_that_goes_away_is_no_error() {
    let folder = fresh("speed");
    let mut child = effattn(folder.path(), "list mechanisms --json")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let mut said = String::new();
    child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    child.wait().unwrap();
    assert!(!said.contains("panicked"), "{said}");
}

/// Highest resident size in KiB that the workers of `process` are seen with until it ends.
fn highest(process: &mut Child) -> u64 {
    let mut highest = 0;
    while process.try_wait().unwrap().is_none() {
        for worker in children(process.id()) {
            let status = fs::read_to_string(format!("/proc/{worker}/status")).unwrap_or_default();
            let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
            let size = line.and_then(|line| line.split_whitespace().next()?.parse().ok()).unwrap_or(0);
            highest = highest.max(size);
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    highest
}

#[test]
fn the_memory_limit_holds_for_every_command_and_mechanism() {
    const LIMIT: u64 = 192;
    let grown = "--memory-limit 192MiB --threads 1 --no-plot";
    let lines = [
        ("memory", format!("memory --model all --preset lra-repo --len 16384 --mode train {grown}")),
        (
            "speed",
            format!(
                "speed --model full,ls --preset lra-repo --len 16384 --batch 4 --mode infer,train {grown}"
            ),
        ),
        ("lra", format!("lra --task listops --model ls --batch 512 --steps 2 --data-dir . {grown}")),
        ("charlm", format!("charlm --quick --model ls:w=16 --len 1024 --batch 32 --steps 2 {grown}")),
    ];
    let mut cells = 0;
    for (command, line) in &lines {
        let folder = fresh(command);
        let mut child = spawn(folder.path(), line);
        let highest = highest(&mut child) / 1024;
        let rows = rows(folder.path(), command);
        for row in &rows {
            let over = matches!(row.outcome, Outcome::Oom | Outcome::Implied | Outcome::Unsupported);
            let under = row.peak_bytes.is_some_and(|bytes| bytes <= LIMIT << 20);
            assert!(over || under, "{command}: {row:?}");
            cells += usize::from(row.outcome == Outcome::Oom);
        }
        assert!(rows.iter().any(|row| row.outcome == Outcome::Oom), "{command}: {rows:?}");
        assert!(highest <= LIMIT + 64, "{command}: a worker had {highest} MiB, the limit is {LIMIT} MiB");
        println!("{command:<7} workers stayed at {highest} MiB with a limit of {LIMIT} MiB");
    }
    println!("memory limit: {cells} cells ended as oom");
}

/// The tests of the command line hold every wrong input with its message; here they are counted.
#[test]
fn bad_inputs_have_messages() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/cli");
    let mut count = 0;
    for file in fs::read_dir(folder).unwrap().flatten() {
        let text = fs::read_to_string(file.path()).unwrap();
        for block in text.split("\n$ effattn ").skip(1).filter(|block| block.contains("\n? 2\n")) {
            let message = block.split("\n? 2\n").nth(1).unwrap();
            assert!(message.starts_with("error: ") && message.lines().next().unwrap().len() > 20, "{block}");
            count += 1;
        }
    }
    println!("bad inputs with clear errors: {count} of {count}");
    assert!(count >= 60, "{count}");
}
