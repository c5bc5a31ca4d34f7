//! Shards of folders that cannot be written, and of thousands of cells.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use super::{LRA, done, rows, shard, spawn, stderr, whole, with_data};

/// Runs a command that sees `place` read-only; none where that cannot be arranged.
fn with_read_only(folder: &Path, place: &str, line: &str) -> Option<Output> {
    let mount = format!("mount --bind {place} {place} && mount -o remount,ro,bind {place}");
    let shell = |script: &str| {
        let mut command = Command::new("unshare");
        command
            .args(["-rm", "sh", "-c", script])
            .current_dir(folder)
            .env("XDG_CACHE_HOME", folder.join("cache"));
        command.output().ok()
    };
    shell(&mount).filter(|output| output.status.success())?;
    shell(&format!("{mount} && exec {} {line}", env!("CARGO_BIN_EXE_effattn")))
}

#[test]
fn a_read_only_folder_is_an_error_and_its_status_can_be_seen() {
    let folder = with_data();
    let folder = folder.path();
    let small = LRA.replace("ls:w=4,r=2,full,linear", "linear");
    done(folder, &format!("{small} --shard 1/2"));
    let Some(merge) = with_read_only(folder, "results", "merge results") else {
        eprintln!("skipped: nothing can be mounted here");
        return;
    };
    assert!(merge.status.code() == Some(2) && stderr(&merge).contains("--output-path"), "{}", stderr(&merge));
    let start = with_read_only(folder, "results", &format!("{small} --shard 2/2")).unwrap();
    let said = stderr(&start);
    assert!(
        start.status.code() == Some(2) && said.contains("--output-path results cannot be written"),
        "{said}"
    );
    let status = with_read_only(folder, "results", "status").unwrap();
    let text = String::from_utf8_lossy(&status.stdout).into_owned();
    assert!(status.status.success() && text.contains("1 of 2 cells done"), "{text}");
    assert!(
        with_read_only(folder, "results", "merge results -o elsewhere").unwrap().status.code() == Some(1)
    );
    assert!(folder.join("elsewhere/lra/latest/rows.csv").exists());
}

/// Runs `line` and gives its exit code, its seconds and its highest resident bytes.
fn measured(folder: &Path, line: &str) -> (Option<i32>, f64, u64) {
    let start = Instant::now();
    let mut child = spawn(folder, line);
    let mut most = 0;
    loop {
        let status = fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap_or_default();
        let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")?.trim().strip_suffix(" kB"));
        most = most.max(peak.and_then(|kilobytes| kilobytes.trim().parse::<u64>().ok()).unwrap_or(0) << 10);
        if let Some(code) = child.try_wait().unwrap() {
            return (code.code(), start.elapsed().as_secs_f64(), most);
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// `EFFATTN_CELLS=10000 cargo test --release --test binary thousands -- --nocapture` for the whole size.
#[test]
fn thousands_of_cells_of_many_shards_are_joined_and_shown_in_seconds() {
    let cells: u64 = std::env::var("EFFATTN_CELLS").ok().and_then(|count| count.parse().ok()).unwrap_or(1000);
    let count = cells / 20;
    let folder = with_data();
    let folder = folder.path();
    let one = LRA.replace("ls:w=4,r=2,full,linear", "linear").replace("1,2", "1");
    done(folder, &format!("{one} --shard 1/1"));
    let (plan, run_of) = (whole(folder, "lra"), shard(folder, "lra", "1-of-1"));
    let read = |path: PathBuf| -> serde_json::Value {
        serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap()
    };
    let (mut planned, manifest) = (read(plan.join("plan.json")), read(run_of.join("manifest.json")));
    let journal = read(run_of.join("journal.jsonl"));
    let curve = fs::read(
        fs::read_dir(run_of.join("cells")).unwrap().next().unwrap().unwrap().path().join("curve.csv"),
    )
    .unwrap();
    let key = |seed: u64| journal["cell"].as_str().unwrap().replace(" s1 ", &format!(" s{seed} "));
    let cell = |seed: u64| serde_json::json!({ "cell": key(seed), "seconds": 1.0, "group": seed - 1 });
    planned["cells"] = (1..=cells).map(cell).collect();
    fs::remove_dir_all(&plan).unwrap();
    for index in 0..count {
        let run = plan.join(format!("{}-of-{count}/run", index + 1));
        let mut manifest = manifest.clone();
        manifest["shard"] = format!("{}/{count}", index + 1).into();
        let mut lines = String::new();
        for seed in (1..=cells).filter(|seed| seed % count == index) {
            let mut entry = journal.clone();
            entry["cell"] = key(seed).into();
            entry["rows"].as_array_mut().unwrap().iter_mut().for_each(|row| row["seed"] = seed.into());
            lines.push_str(&format!("{entry}\n"));
            let name = key(seed).replace(' ', "_");
            fs::create_dir_all(run.join("cells").join(&name)).unwrap();
            fs::write(run.join("cells").join(&name).join("curve.csv"), &curve).unwrap();
        }
        fs::write(run.join("manifest.json"), manifest.to_string()).unwrap();
        fs::write(run.join("journal.jsonl"), lines).unwrap();
    }
    fs::write(plan.join("plan.json"), planned.to_string()).unwrap();
    for line in ["status results", "merge results", "status results", "report results -o report.html"] {
        let (code, seconds, bytes) = measured(folder, line);
        println!("{cells} cells, {count} shards: {line}: {seconds:.2} s, {} MiB", bytes >> 20);
        assert!(
            code == Some(0) && seconds < 10.0 && bytes < 1 << 30,
            "{line}: {code:?} {seconds} s {bytes} bytes"
        );
    }
    assert_eq!(rows(&plan).iter().filter(|row| row.metric == "accuracy").count() as u64, cells);
}
