//! Kills at random moments.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use effattn::device::rng::RngStream;

use super::{VICTIMS, fresh, result, rows, run, spawn, stderr};

/// Kills in all where nothing else is said.
const KILLS: usize = 15;

/// Kills of a command that fetches.
const FETCHES: usize = 20;

/// Kills before a run is let to its end.
const TOGETHER: usize = 4;

#[test]
fn kills_at_random_moments_change_nothing() {
    let wanted = std::env::var("EFFATTN_KILLS").ok().and_then(|text| text.parse().ok()).unwrap_or(KILLS);
    let seed = std::env::var("EFFATTN_FUZZ_SEED").ok().and_then(|text| text.parse().ok()).unwrap_or(0);
    let mut random = RngStream::new(seed, "kills");
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
                let name = ["-KILL", "-TERM", "-HUP"][tried % 3];
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

#[test]
fn a_fetch_that_is_killed_is_completed_by_the_next_one() {
    let images = || {
        let folder = fresh("vision");
        for (index, class) in ["a", "b"].iter().enumerate() {
            let path = folder.path().join(format!("val/{class}/{index}.png"));
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            let pixel = |x: u32, y: u32| image::Rgb([(7 * x) as u8, (5 * y) as u8, 40 * index as u8]);
            image::RgbImage::from_fn(40, 40, pixel).save(path).unwrap();
        }
        folder
    };
    let line = "fetch folder-c --data-dir .";
    let undisturbed = images();
    let start = Instant::now();
    let output = run(undisturbed.path(), line);
    assert!(output.status.success(), "{}", stderr(&output));
    let whole = start.elapsed().as_secs_f64();
    let expected = tree(&undisturbed.path().join("folder-c"));
    let mut random = RngStream::new(0, "kills of fetch");
    let (mut hits, mut folders) = (0, 0);
    while hits < FETCHES {
        let folder = images();
        folders += 1;
        for _ in 0..TOGETHER {
            let mut child = spawn(folder.path(), line);
            std::thread::sleep(Duration::from_secs_f64(random.uniform(0.0, 0.8 * whole)));
            child.kill().unwrap();
            hits += usize::from(!child.wait().unwrap().success());
        }
        let output = run(folder.path(), line);
        assert!(output.status.success(), "{}", stderr(&output));
        assert!(tree(&folder.path().join("folder-c")) == expected, "{hits} kills changed what is fetched");
        assert!(folders < 10 * FETCHES, "only {hits} kills hit");
    }
    println!("fetch   {hits} kills survived of {hits}, {} files identical", expected.len());
}

/// Every file below `folder` with its bytes.
fn tree(folder: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let (mut files, mut left) = (BTreeMap::new(), vec![folder.to_owned()]);
    while let Some(next) = left.pop() {
        for path in fs::read_dir(next).unwrap().map(|entry| entry.unwrap().path()) {
            match path.is_dir() {
                true => left.push(path),
                false => {
                    drop(files.insert(path.strip_prefix(folder).unwrap().to_owned(), fs::read(path).unwrap()))
                }
            }
        }
    }
    files
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
