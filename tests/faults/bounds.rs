//! Bounds of memory and time, and input that is refused at once.

use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use effattn::record::{Outcome, Row, csv};

use super::{SPEED, children, fresh, latest, rows, said, soon, spawn, stderr, suite, unfinished};

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

#[test]
fn a_fifo_is_no_file_wherever_one_is_named() {
    let folder = fresh("speed");
    for name in ["s.toml", "rows.csv", "rows.json", "w.safetensors", "journal.jsonl", "manifest.json"] {
        assert!(Command::new("mkfifo").arg(folder.path().join(name)).status().unwrap().success());
    }
    fs::create_dir(folder.path().join("golden")).unwrap();
    assert!(
        Command::new("mkfifo").arg(folder.path().join("golden/a.safetensors")).status().unwrap().success()
    );
    fs::create_dir(folder.path().join("data")).unwrap();
    assert!(Command::new("mkfifo").arg(folder.path().join("data/enwik8")).status().unwrap().success());
    for (line, name) in [
        ("speed --suite s.toml --dry-run", "s.toml"),
        ("speed --model full --len 32 --reference rows.json", "rows.json"),
        ("compare rows.csv rows.json", "rows.csv"),
        ("plot attention --model ls --weights w.safetensors", "w.safetensors"),
        ("plot rows .", "rows in ."),
        ("report .", "manifest.json"),
        ("fetch imdb --from w.safetensors --data-dir .", "w.safetensors"),
        ("charlm --generate w.safetensors", "w.safetensors"),
        ("check --golden golden", "a.safetensors"),
        ("charlm --task enwik8 --model ls --data-dir data --steps 1", "enwik8"),
    ] {
        let output = soon(folder.path(), line);
        let all = stderr(&output) + &String::from_utf8_lossy(&output.stdout);
        assert!(!output.status.success(), "{line}");
        assert!(all.contains(name), "{line}: {all}");
    }
}

#[test]
fn numbers_out_of_bounds_are_refused_at_once() {
    let folder = fresh("speed");
    for words in [
        "--model full --set layers=10000000",
        "--model full --set ffn=18446744073709551615",
        "--model ls:w=9223372036854775807",
        "--model full --len 4194305",
        "--model full --batch 65537",
        "--model full --threads 100000",
        "--model full --set width=65536 --set heads=65535",
    ] {
        let output = soon(folder.path(), &format!("speed --dry-run {words}"));
        assert_eq!(output.status.code(), Some(2), "{words}: {}", stderr(&output));
    }
    // what can be asked for one by one, and not be counted together
    let output = soon(
        folder.path(),
        "speed --dry-run --model full --len 4194304 --batch 65536 --set layers=4096 --export-csv -",
    );
    let rows: Vec<Row> = csv::from_str(&String::from_utf8_lossy(&output.stdout)).unwrap();
    assert!(rows.iter().all(|row| row.flops.is_none()), "{rows:?}");
    assert!(
        rows.iter().any(|row| row.error.as_deref().is_some_and(|error| error.contains("can be counted"))),
        "{rows:?}"
    );
}

/// Highest resident size of `line` itself in MiB, and its seconds.
fn own_highest(folder: &Path, line: &str) -> (u64, f64) {
    let (mut child, start) = (spawn(folder, line), Instant::now());
    let mut highest = 0;
    while child.try_wait().unwrap().is_none() {
        let status = fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap_or_default();
        let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        highest =
            highest.max(peak.and_then(|peak| peak.split_whitespace().next()?.parse().ok()).unwrap_or(0));
        std::thread::sleep(Duration::from_millis(1));
    }
    let seconds = start.elapsed().as_secs_f64();
    assert!(child.wait().unwrap().success(), "{line}");
    println!("{line}: {} MiB, {seconds:.1} s", highest / 1024);
    (highest / 1024, seconds)
}

/// `EFFATTN_RUNS=10000 cargo test --release --test binary many_runs -- --nocapture` for the whole size: as many runs of 160
/// rows, two runs of as many cells, and a journal of 200 MB; here a twentieth.
#[test]
fn many_runs_and_a_long_journal_are_not_held_in_memory() {
    let runs: usize = std::env::var("EFFATTN_RUNS").ok().and_then(|count| count.parse().ok()).unwrap_or(500);
    let (most, longest) = if runs > 500 { (512, 10.0) } else { (64, f64::INFINITY) };
    let small = |folder: &Path, line: &str| {
        let (highest, seconds) = own_highest(folder, line);
        assert!(highest <= most && seconds <= longest, "{line}: {highest} MiB, {seconds} s");
    };
    let folder = fresh("speed");
    said(folder.path(), SPEED);
    let first = latest(folder.path(), "speed").canonicalize().unwrap();
    let manifest = super::unsealed(&first.join("manifest.json"));
    // times of a machine that was busy would not be compared
    let mut calm: serde_json::Value = serde_json::from_str(&manifest).unwrap();
    (calm["steadiness"], calm["load_average"]) = Default::default();
    let manifest = serde_json::to_string_pretty(&calm).unwrap();
    let rows: Vec<Row> = csv::from_str(&fs::read_to_string(first.join("rows.csv")).unwrap()).unwrap();
    for name in ["before", "now"] {
        let run = folder.path().join(name);
        fs::create_dir(&run).unwrap();
        let cell =
            |seed: usize| rows.iter().take(3).map(move |row| Row { seed: Some(seed as u64), ..row.clone() });
        let all: Vec<Row> = (0..runs).flat_map(cell).collect();
        fs::write(run.join("manifest.json"), &manifest).unwrap();
        fs::write(run.join("rows.csv"), csv::to_string(&all).unwrap()).unwrap();
    }
    small(folder.path(), "compare before now --fail-if-regression 5%");
    let many: Vec<Row> = rows.iter().cycle().take(160).cloned().collect();
    let (text, id) =
        (csv::to_string(&many).unwrap(), first.file_name().unwrap().to_string_lossy().into_owned());
    for index in 0..runs {
        let name = format!("20990101-{index:06}-aaaaaa");
        let run = first.with_file_name(&name);
        fs::create_dir(&run).unwrap();
        let order = format!("\"order\": {}", index + 2);
        fs::write(run.join("manifest.json"), manifest.replace(&id, &name).replace("\"order\": 1", &order))
            .unwrap();
        fs::write(run.join("rows.csv"), &text).unwrap();
    }
    small(folder.path(), "report -o r.md");
    let last = format!("20990101-{:06}-aaaaaa", runs - 1);
    assert!(fs::read_to_string(folder.path().join("r.md")).unwrap().contains(&last));

    let folder = fresh("speed");
    said(folder.path(), SPEED);
    let file = unfinished(folder.path(), "speed").join("journal.jsonl");
    let lines = fs::read_to_string(&file).unwrap();
    let mut journal = fs::OpenOptions::new().append(true).open(&file).unwrap();
    for index in 0..(runs * 20_000) / lines.len() {
        let lines = if index % 2 == 0 {
            lines.clone()
        } else {
            lines.replace("{\"cell\":\"", &format!("{{\"cell\":\"{index} "))
        };
        journal.write_all(lines.as_bytes()).unwrap();
    }
    small(folder.path(), SPEED);
}

#[test]
fn a_large_suite_is_planned_at_once() {
    let folder = fresh("speed");
    let rows: Vec<String> = (1..5001).map(|ffn| format!("ffn = {ffn}")).collect();
    let rows: Vec<&str> = rows.iter().map(String::as_str).collect();
    fs::write(folder.path().join("s.toml"), suite("\"t\"", &rows)).unwrap();
    let start = Instant::now();
    let output = soon(folder.path(), "speed --suite s.toml --dry-run");
    assert!(output.status.success(), "{}", stderr(&output));
    println!("a suite of 5,000 rows is planned in {:.1} s", start.elapsed().as_secs_f64());
}

/// The values of the rows of `metric` of the newest run; every other row must say that its mechanism does not do this.
fn values(folder: &Path, command: &str, metric: &str) -> Vec<f64> {
    let rows = rows(folder, command);
    let odd = |row: &&Row| !matches!(row.outcome, Outcome::Ok | Outcome::Unsupported);
    assert!(rows.iter().find(odd).is_none(), "{:?}", rows.iter().find(odd));
    let values = rows.iter().filter(|row| row.metric == metric && row.outcome == Outcome::Ok);
    values.map(|row| row.value.unwrap()).collect()
}

#[test]
fn the_smallest_inputs_give_finite_numbers_in_every_mechanism() {
    let folder = fresh("speed");
    let at = |name: String| folder.path().join(name);
    let (small, place) = ("--steps 2 --no-plot --threads 1 --data-dir .", folder.path());
    said(
        place,
        "speed --preset ls-lra --model all --len 1,2,3 --max-time 1ms --runs 1 --warmup 0 --no-plot --threads 1",
    );
    let times = values(place, "speed", "step_time").len();
    // documents without a byte: every batch is padding only
    for (split, label) in
        [("train", "pos/0_9"), ("train", "neg/0_1"), ("test", "pos/0_9"), ("test", "neg/0_1")]
    {
        let file = at(format!("aclImdb/{split}/{label}.txt"));
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(file, "").unwrap();
    }
    said(place, &format!("lra --task text --model all --len 16 --batch 2 --allow-partial {small}"));
    let losses = values(place, "lra", "loss");
    assert!(losses.iter().all(|loss| loss.is_finite()), "{losses:?}");
    // one and two symbols, one and two words
    let mut few = Vec::new();
    for text in ["a", "ab"] {
        fs::write(at("enwik8".to_owned()), text.repeat(6000 / text.len())).unwrap();
        let words = text.chars().flat_map(|letter| [letter, ' ']).collect::<String>();
        for (part, lines) in [("train", 300), ("valid", 40), ("test", 40)] {
            let text = format!("{}\n", words.repeat(3)).repeat(lines);
            fs::write(at(format!("wiki.{part}.tokens")), text).unwrap();
        }
        let sizes = "--every 2 --len 16 --batch 2 --set layers=1 --set width=32 --allow-partial --fresh";
        said(place, &format!("charlm --task enwik8 --model ls:w=4,r=1,linear {sizes} {small}"));
        few.extend(values(place, "charlm", "bpc_stream"));
        said(place, &format!("wordlm --task wikitext103 --model full,linear {sizes} {small}"));
        few.extend(values(place, "wordlm", "ppl_context"));
    }
    assert!(few.len() >= 8 && few.iter().all(|value| value.is_finite()), "{few:?}");
    println!(
        "lengths of 1 to 3: {times} cells; padding only: {} mechanisms; one and two symbols and words: {} values",
        losses.len(),
        few.len()
    );
    assert!(times >= 200 && losses.len() >= 30, "{times}, {}", losses.len());
}
