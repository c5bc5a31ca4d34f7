//! `effattn doctor`: what this machine is, what effattn finds on it, and how steady numbers made here now will be.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::Result;
use serde_json::{Value, json};

use super::export::Exports;
use super::finish::print_tables;
use super::list;
use crate::run::turn::{FAST, TAKEN};
use crate::term::{self, Term};
use effattn_kernel::cpu::bf16;
use effattn_kernel::cpu::rates::{Calibration, rates};
use effattn_kernel::device::counters::Counters;
use effattn_kernel::device::machine::{self, Machine};
use effattn_kernel::device::{features, simd, threads};
use effattn_record::config::units::{Bytes, Seconds};
use effattn_record::report::table::Table;
use effattn_record::stats::{median, quantile, std_dev};
use effattn_record::text::plural;

const EXAMPLES: &str = "\
Examples:
  # Before measuring: is the machine quiet enough?
  effattn doctor
  # A longer look, as data
  effattn doctor --seconds 20s --json | jq .steadiness

Steadiness is that of repeated calibrations (products and copies of fixed size on all threads): times that differ by less than it may differ by chance.";

#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Time to repeat calibrations for
    #[arg(long, value_name = "TIME", default_value = "4s")]
    seconds: Seconds,
    /// CPU threads [default: all cores]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1024))]
    threads: Option<u64>,
    /// Folder with data sets [default: effattn's folder in the user's cache]
    #[arg(long, value_name = "DIR")]
    data_dir: Option<PathBuf>,
    #[command(flatten)]
    exports: Exports,
}

/// Length of the parts of the time whose medians are compared: about a turn of a measurement.
const PART: f64 = 0.25;
/// Fewest parts.
const PARTS: usize = 4;
/// Steady enough to tell what differs by some percent; unsteady.
const STEADY: f64 = 0.03;
const UNSTEADY: f64 = 0.10;
/// Variation beyond which nothing can be told.
const MOST: f64 = 0.5;

/// A line: what was looked at, what was found, what to do where something is missing.
struct Line {
    what: String,
    found: String,
    next: String,
}

/// What was found, for people and for programs.
#[derive(Default)]
struct Findings {
    lines: Vec<Line>,
    json: serde_json::Map<String, Value>,
    verdict: String,
}

impl Findings {
    fn add(&mut self, what: &str, found: impl Into<String>, next: impl Into<String>) {
        self.lines.push(Line { what: what.to_owned(), found: found.into(), next: next.into() });
    }

    fn table(&self) -> Table {
        let row = |line: &Line| vec![line.what.clone(), line.found.clone(), line.next.clone()];
        Table {
            title: "effattn on this machine".to_owned(),
            columns: ["what", "found", "to do"].map(str::to_owned).to_vec(),
            rows: self.lines.iter().map(row).collect(),
            notes: vec![self.verdict.clone()],
            ..Table::default()
        }
    }

    fn csv(&self) -> Result<String> {
        let mut writer = csv::Writer::from_writer(Vec::new());
        writer.write_record(["what", "found", "to do"])?;
        for Line { what, found, next } in &self.lines {
            writer.write_record([what, found, next])?;
        }
        let bytes = writer.into_inner().map_err(|error| error.into_error())?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }
}

pub fn run(args: &Args, term: &Term) -> Result<u8> {
    args.exports.check(&[])?;
    let count = args.threads.map_or_else(threads::available, |count| count as usize);
    threads::set(count, threads::PlainOperations::OnCaller);
    let mut found = Findings::default();
    program(&mut found);
    processor(&mut found, count);
    devices(&mut found);
    data(&mut found, args.data_dir.clone());
    term.info("asking programs, which may import for seconds");
    programs(&mut found)?;
    term.info(&format!("calibrating for {}", args.seconds));
    steadiness(&mut found, count, args.seconds.0);
    let json = || Ok(serde_json::to_string_pretty(&found.json)? + "\n");
    let table = found.table();
    if args.json {
        term::data(&json()?)?;
    } else {
        print_tables(std::slice::from_ref(&table), &args.exports, term)?;
    }
    args.exports.write_texts(json, || found.csv(), &[table])?;
    Ok(0)
}

/// The build.
fn program(found: &mut Findings) {
    let (version, commit) = (env!("CARGO_PKG_VERSION"), option_env!("EFFATTN_COMMIT"));
    let with = match features().as_slice() {
        [] => String::new(),
        features => format!(", with {}", features.join(", ")),
    };
    let build = commit.map_or_else(String::new, |commit| format!(" ({commit})"));
    found.add("effattn", format!("{version}{build}{with}"), "");
    found.json.insert("version".into(), version.into());
    found.json.insert("commit".into(), commit.into());
    found.json.insert("features".into(), features().into());
}

/// Processor, vectors, memory, cores, rates.
fn processor(found: &mut Findings, count: usize) {
    let Machine { cpu, cores, memory_bytes, os, arch, simd, .. } = Machine::this();
    found.add("processor", format!("{cpu}, {arch}, {os}"), "");
    let limit = simd::asked().filter(|value| !value.is_empty());
    let set = match &limit {
        Some(value) => format!("{} is {value}", simd::VARIABLE),
        None => format!("{} is not set", simd::VARIABLE),
    };
    let products =
        if bf16::is_native() { "bf16 products" } else { "no bf16 products: --dtype bf16 is emulated" };
    let next =
        if limit.is_some() { format!("unset {} for full speed", simd::VARIABLE) } else { String::new() };
    found.add("vectors", format!("{simd} ({set}), {products}"), next);
    let free = machine::free_memory();
    found.add("memory", format!("{} free of {}", Bytes(free), Bytes(memory_bytes)), "");
    let (busy, all) = machine::busy_cores();
    let one = rayon::ThreadPoolBuilder::new().num_threads(1).build();
    let (single, rates) = (one.ok().map(|one| one.install(rates)), rates());
    let reached = single.map(|single| rates.products / single.products);
    let scaling = reached.map_or_else(String::new, |times| {
        format!("; products on {} are {times:.2} times as fast as on one", plural(count as u64, "thread"))
    });
    let next = if busy > 0.25 * all as f64 { "close other programs before measuring" } else { "" };
    let cores_text = plural(cores as u64, "core");
    found.add("cores", format!("{cores_text} usable, others keep {busy:.1} of {all} busy{scaling}"), next);
    found.add(
        "products",
        format!("{:.1} GFLOP/s in f32 (1024 x 1024, all threads)", rates.products / 1e9),
        "",
    );
    found.add("copies", format!("{:.1} GB/s read and written", rates.copies / 1e9), "");
    for (key, value) in [
        ("processor", json!(cpu)),
        ("architecture", json!(arch)),
        ("system", json!(os)),
        ("vectors", json!(simd)),
        ("vector_limit", json!(limit)),
        ("bf16_products", json!(bf16::is_native())),
        ("memory_bytes", json!(memory_bytes)),
        ("free_bytes", json!(free)),
        ("cores", json!(cores)),
        ("busy_cores", json!(busy)),
        ("load_average", json!(machine::load())),
        ("threads", json!(count)),
        ("thread_speedup", json!(reached)),
        ("product_rate", json!(rates.products)),
        ("copy_rate", json!(rates.copies)),
    ] {
        found.json.insert(key.into(), value);
    }
}

/// Backends, and the driver of the one that needs a library.
fn devices(found: &mut Findings) {
    let driver = cuda_driver();
    let library = if cfg!(windows) { "nvcuda.dll" } else { "libcuda.so.1" };
    let devices = list::devices();
    for device in &devices.json {
        let name = device["name"].as_str().unwrap_or_default();
        if name == "cpu" {
            continue;
        }
        let (usable, what) = (device["usable"] == true, device["what"].as_str().unwrap_or_default());
        let missing = !usable && name.starts_with("cuda") && driver.is_none();
        let (said, next) = match what.split_once("; ").filter(|_| !usable) {
            Some((said, next)) => (said.trim_start_matches(&format!("--device {name}: ")), next),
            None => (what, ""),
        };
        let said = if missing { format!("{said}; {library} not found") } else { said.to_owned() };
        let next =
            if missing { format!("install the driver of the card, then {next}") } else { next.to_owned() };
        found.add(&format!("device {name}"), if usable { said } else { format!("no: {said}") }, next);
    }
    found.json.insert("devices".into(), devices.json.into());
    found.json.insert("cuda_driver".into(), json!(driver));
}

/// The library of NVIDIA's driver, where one of the usual folders has it.
fn cuda_driver() -> Option<PathBuf> {
    if cfg!(windows) {
        let root = std::env::var_os("SystemRoot")?;
        return Some(Path::new(&root).join("System32").join("nvcuda.dll")).filter(|path| path.exists());
    }
    let own = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    let folders: Vec<PathBuf> = std::env::split_paths(&own).collect();
    let usual = [
        "/usr/lib/x86_64-linux-gnu",
        "/usr/lib/aarch64-linux-gnu",
        "/usr/lib64",
        "/usr/lib",
        "/usr/lib/wsl/lib",
        "/run/opengl-driver/lib",
    ];
    let all = folders.into_iter().chain(usual.map(PathBuf::from));
    all.map(|folder| folder.join("libcuda.so.1")).find(|path| path.exists())
}

/// Data sets that are there.
fn data(found: &mut Findings, dir: Option<PathBuf>) {
    let sets = list::data_sets(dir);
    let (mut there, mut missing, mut problems) = (Vec::new(), Vec::new(), Vec::new());
    for set in &sets {
        let name = set["name"].as_str().unwrap_or_default().to_owned();
        match (&set["path"], &set["problem"]) {
            (_, problem) if !problem.is_null() => problems.push(name),
            (path, _) if !path.is_null() => there.push(name),
            _ if set["next"].as_str().is_some_and(|next| !next.is_empty()) && set["generated"] == false => {
                missing.push(name);
            }
            _ => {}
        }
    }
    let listed = |names: &[String]| if names.is_empty() { "none".to_owned() } else { names.join(", ") };
    let next = if missing.is_empty() { "" } else { "effattn fetch NAME; effattn list tasks shows how" };
    let missing = format!("; not here: {}", listed(&missing));
    found.add("data", format!("{}{missing}; generated sets need no files", listed(&there)), next);
    if !problems.is_empty() {
        found.add("data", format!("incomplete: {}", problems.join(", ")), "effattn list tasks says why");
    }
    found.json.insert("data".into(), sets.into());
}

/// Programs for `--program`.
fn programs(found: &mut Findings) -> Result<()> {
    let programs = list::programs::list()?.json;
    for program in &programs {
        let text = |key: &str| program[key].as_str().unwrap_or_default();
        let what = format!("program {}", text("name"));
        match program["runs"] == true {
            true => found.add(&what, text("version"), ""),
            false => found.add(&what, format!("no: {}", text("missing")), text("install")),
        }
    }
    found.json.insert("programs".into(), programs.into());
    Ok(())
}

/// Repeats calibrations for `seconds` and says how steady they were.
fn steadiness(found: &mut Findings, count: usize, seconds: f64) {
    let calibration = Calibration::new();
    let before = Counters::read(&[]);
    let parts = ((seconds / PART) as usize).max(PARTS);
    let (mut medians, mut all) = (Vec::new(), Vec::new());
    for _ in 0..parts {
        let (start, length) = (Instant::now(), Duration::from_secs_f64(PART.min(seconds / PARTS as f64)));
        let mut times = vec![calibration.take().mean];
        while start.elapsed() < length {
            times.push(calibration.take().mean);
        }
        medians.extend(median(&times));
        all.extend(times);
    }
    let interference = before.zip(Counters::read(&[])).map(|(before, after)| after.since(&before));
    let taken = interference.map_or(0.0, |it| it.taken(count, threads::available()));
    let middle = median(&all).unwrap_or(f64::NAN);
    let fast = quantile(&all, FAST).unwrap_or(f64::NAN);
    let share = 2.0 * std_dev(&medians).unwrap_or(0.0) / middle;
    let counters = match interference {
        Some(it) => format!("others took {:.2} processors, the host {:.2}", it.others, it.steal),
        None => "this system has no counters: only calibrations find disturbed turns".to_owned(),
    };
    let times = middle / fast;
    let took = format!("{} calibrations, the median {times:.2} times a fast one; {counters}", all.len());
    found.add("steadiness", took, "");
    let percent = percent(share);
    let (word, sentence) = verdict(share, taken, count);
    found.verdict = sentence;
    found.json.insert(
        "steadiness".into(),
        json!({
            "percent": percent,
            "verdict": word,
            "calibrations": all.len(),
            "threads": count,
            "median_seconds": middle,
            "fast_seconds": fast,
            "interference": interference,
        }),
    );
}

/// A variation in whole percent, rounded up.
fn percent(share: f64) -> f64 {
    (100.0 * share).ceil().max(1.0)
}

/// A word and a sentence for times that vary by `share`, while others take `taken` processors from `threads` threads. What is
/// disturbed all the time may be steady, and is too slow.
fn verdict(share: f64, taken: f64, threads: usize) -> (&'static str, String) {
    const CLOSE: &str = "; close other programs, or measure on another machine";
    const REPEATED: &str = "; speed repeats the turns that others disturb, a longer --max-time helps";
    let percent = percent(share);
    if share > MOST {
        let sentence = format!("Numbers made here now mean nothing: they vary by {percent:.0} %{CLOSE}.");
        return ("unsteady", sentence);
    }
    let (mut word, mut advice) = match share {
        share if share <= STEADY => ("steady", String::new()),
        share if share <= UNSTEADY => ("fair", REPEATED.to_owned()),
        _ => ("unsteady", CLOSE.to_owned()),
    };
    if taken > TAKEN * threads as f64 {
        let threads = plural(threads as u64, "thread");
        word = "disturbed";
        advice = format!(" and too slow: others take {taken:.2} processors from {threads}{CLOSE}");
    }
    (word, format!("Numbers made here now will be steady to about {percent:.0} %{advice}."))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_that_is_disturbed_all_the_time_is_not_called_steady() {
        assert_eq!(
            verdict(0.02, 0.09, 2),
            ("steady", "Numbers made here now will be steady to about 2 %.".to_owned())
        );
        let (word, sentence) = verdict(0.02, 0.99, 2);
        assert_eq!(word, "disturbed");
        assert!(sentence.contains("too slow: others take 0.99 processors from 2 threads"), "{sentence}");
        assert_eq!(["fair", "unsteady"], [0.05, 0.2].map(|share| verdict(share, 0.0, 2).0));
        assert!(verdict(0.6, 0.99, 2).1.contains("mean nothing"));
    }

    #[test]
    fn repeated_calibrations_give_a_verdict() {
        let mut found = Findings::default();
        steadiness(&mut found, rayon::current_num_threads(), 0.1);
        let steadiness = &found.json["steadiness"];
        let percent = steadiness["percent"].as_f64().unwrap();
        assert!(percent >= 1.0 && steadiness["calibrations"].as_u64() >= Some(4), "{steadiness}");
        assert!(found.verdict.contains(&format!(" {percent} %")), "{}", found.verdict);
        assert!(found.csv().unwrap().starts_with("what,found,to do\nsteadiness,"));
    }

    #[test]
    fn a_device_that_is_not_built_says_what_to_do() {
        let mut found = Findings::default();
        devices(&mut found);
        if let Some(line) = found.lines.iter().find(|line| line.what == "device cuda:0")
            && !cfg!(feature = "cuda")
        {
            assert!(line.found.starts_with("no: this build has no cuda"), "{}", line.found);
            assert!(
                line.next.ends_with("build it with: cargo build --release --features cuda"),
                "{}",
                line.next
            );
        }
    }
}
