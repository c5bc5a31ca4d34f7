//! Every reader of foreign bytes, fed with broken ones: no panic, no unbounded memory, no endless loop.
//!
//! Each target starts from valid inputs and breaks them (bits, cuts, copies, extreme numbers, words of the format).
//! `EFFATTN_FUZZ=1000000 cargo test --release --test fuzz -- --nocapture` runs overnight; the default takes seconds.
//! What once broke stays in `tests/fuzz/found/<target>/` and is read first.

mod configs;
mod files;
mod images;
mod mutate;
mod texts;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

use effattn::device::alloc;
use effattn::device::rng::RngStream;
use mutate::mutated;

#[global_allocator]
static ALLOCATOR: alloc::CountingAllocator = alloc::CountingAllocator;

/// Executions of a target where nothing else is said.
const EXECUTIONS: u64 = 3000;
/// Most live bytes above what was there before, for inputs of a few kilobytes.
const MEMORY: usize = 512 << 20;
/// Most bytes that all executions of a target together may leave behind: tables that are made once.
const LEFT: usize = 64 << 20;
/// Longest time of one execution.
const TIME: Duration = Duration::from_secs(20);

/// Most live bytes that an execution of the present target has needed.
static NEEDED: AtomicUsize = AtomicUsize::new(0);

/// One reader.
pub struct Target {
    name: &'static str,
    /// Executions relative to the others: readers that go through files are slower.
    weight: f64,
    /// Valid inputs.
    seeds: fn() -> Vec<Vec<u8>>,
    /// Words of the format, for insertion.
    words: &'static [&'static str],
    /// Reads; errors are fine. The folder is the target's own.
    read: fn(&[u8], &Path),
}

fn executions(target: &Target) -> u64 {
    let asked = std::env::var("EFFATTN_FUZZ").ok().and_then(|text| text.parse().ok());
    asked.unwrap_or((EXECUTIONS as f64 * target.weight) as u64)
}

/// Inputs that broke something once.
fn found(target: &Target) -> Vec<Vec<u8>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fuzz/found").join(target.name);
    let Ok(entries) = std::fs::read_dir(folder) else { return Vec::new() };
    let mut paths: Vec<PathBuf> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
    paths.sort();
    paths.iter().map(|path| std::fs::read(path).unwrap()).collect()
}

/// Why `input` may not pass.
fn problem(target: &Target, input: &[u8], folder: &Path) -> Option<String> {
    let before = alloc::live();
    alloc::reset_peak();
    let start = Instant::now();
    let read = catch_unwind(AssertUnwindSafe(|| (target.read)(input, folder)));
    let (peak, time) = (alloc::peak().saturating_sub(before), start.elapsed());
    NEEDED.fetch_max(peak, Relaxed);
    match read {
        Err(_) => Some("a panic".to_owned()),
        Ok(()) if peak > MEMORY => Some(format!("{peak} bytes")),
        Ok(()) if time > TIME => Some(format!("{time:?}")),
        Ok(()) => None,
    }
}

fn fuzz(target: &Target) {
    let folder = tempfile::Builder::new().prefix("effattn-fuzz").tempdir_in(fast_folder()).unwrap();
    let fail = |input: &[u8], why: &str| {
        let kept = std::env::temp_dir().join(format!("effattn-fuzz-{}.bin", target.name));
        std::fs::write(&kept, input).unwrap();
        panic!("{}: {why}; the input is {}", target.name, kept.display());
    };
    let (seeds, known) = ((target.seeds)(), found(target));
    for input in seeds.iter().chain(&known) {
        if let Some(why) = problem(target, input, folder.path()) {
            fail(input, &why);
        }
    }
    let seed = std::env::var("EFFATTN_FUZZ_SEED").ok().and_then(|text| text.parse().ok()).unwrap_or(0);
    let mut random = RngStream::new(seed, target.name);
    let (count, before) = (executions(target), alloc::live());
    NEEDED.store(0, Relaxed);
    for _ in 0..count {
        let input = mutated(&seeds, target.words, &mut random);
        if let Some(why) = problem(target, &input, folder.path()) {
            fail(&input, &why);
        }
    }
    let left = alloc::live().saturating_sub(before);
    assert!(left <= LEFT, "{}: {count} inputs left {left} bytes behind", target.name);
    let needed = NEEDED.load(Relaxed);
    println!(
        "{:<14} {count:>8} inputs, {} known, no panic, at most {needed} bytes at once, {left} left",
        target.name,
        known.len()
    );
}

/// A folder in memory where there is one.
fn fast_folder() -> PathBuf {
    let shared = PathBuf::from("/dev/shm");
    if shared.is_dir() { shared } else { std::env::temp_dir() }
}

/// All in one test: they share the counter of live bytes.
#[test]
fn no_input_breaks_a_reader() {
    std::panic::set_hook(Box::new(|info| eprintln!("{info}")));
    a_panic_and_a_hoard_are_noticed();
    let only = std::env::var("EFFATTN_FUZZ_TARGET").ok();
    for target in texts::TARGETS.iter().chain(files::TARGETS).chain(images::TARGETS).chain(configs::TARGETS) {
        if only.as_deref().is_none_or(|only| only == target.name) {
            fuzz(target);
        }
    }
}

/// The harness itself can fail.
fn a_panic_and_a_hoard_are_noticed() {
    let target = |read| Target { name: "self", weight: 1.0, seeds: Vec::new, words: &[], read };
    let folder = Path::new(".");
    assert!(problem(&target(|_, _| ()), b"", folder).is_none());
    assert!(problem(&target(|_, _| panic!("on purpose")), b"", folder).is_some());
    let hoard = |_: &[u8], _: &Path| drop(std::hint::black_box(vec![0u8; MEMORY + 1]));
    assert!(problem(&target(hoard), b"", folder).is_some());
}
