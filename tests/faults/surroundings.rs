//! What surrounds the program: names, files, disks, clocks and readers.

use std::fs;
use std::io::Read;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use effattn::record::{Row, csv};

use super::{SPEED, VICTIMS, effattn, fresh, latest, result, run, said, stderr, suite, words};

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
    // a suite that is a path, in rows that somebody else wrote, with a manifest that has no digest of them
    let run_folder = latest(folder.path(), "speed");
    let (file, manifest) = (run_folder.join("rows.csv"), run_folder.join("manifest.json"));
    let mut words: serde_json::Value = serde_json::from_str(&fs::read_to_string(&manifest).unwrap()).unwrap();
    words["rows_sha256"] = serde_json::Value::Null;
    fs::write(&manifest, words.to_string()).unwrap();
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

/// Runs `line` where no file may grow beyond `blocks` of 512 bytes, as on a disk that fills up.
fn on_full_disk(folder: &Path, line: &str, blocks: u64) -> Output {
    let script = format!("ulimit -f {blocks}; exec \"$0\" \"$@\"");
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
        // every disk has what was written on the smaller one before
        let folder = fresh(victim.name);
        for blocks in [0, 8, 40, 100] {
            let output = on_full_disk(folder.path(), victim.line, blocks);
            let said = stderr(&output);
            assert!(!said.contains("panicked"), "{said}");
            tried += 1;
            if output.status.success() {
                break;
            }
            assert!(said.contains("File too large"), "{} with {blocks} blocks: {said}", victim.name);
            full += 1;
        }
        let again = run(folder.path(), victim.line);
        assert!(again.status.success(), "{}", stderr(&again));
        let (found, expected) = (result(folder.path(), victim.name), result(undisturbed.path(), victim.name));
        assert!(found == expected, "{} behind full disks", victim.name);
    }
    assert!(full >= 2 * VICTIMS.len(), "only {full} of {tried} disks were too small");
    println!("full disks: {full} of {tried} were too small; all of them were named, and every run went on");
}

#[test]
fn a_limit_of_the_address_space_is_refused_with_what_is_needed_or_held() {
    let folder = fresh("speed");
    let line = "speed --preset ls-lra --model full --len 32 --max-time 30ms --no-plot";
    let limited = |kilobytes: u64, line: &str| {
        // a process that hangs is killed, and has no code
        let script = format!("ulimit -v {kilobytes}; exec timeout -s KILL 60 \"$0\" \"$@\"");
        let mut command = Command::new("sh");
        command.args(["-c", &script, env!("CARGO_BIN_EXE_effattn")]).args(words(line));
        let output = command.current_dir(folder.path()).env("RUST_BACKTRACE", "1").output().unwrap();
        (output.status.code(), stderr(&output))
    };
    for threads in [1, 4] {
        let line = format!("{line} --threads {threads}");
        for kilobytes in [60_000, 100_000, 120_000, 200_000] {
            let (code, told) = limited(kilobytes, &line);
            assert_eq!(code, Some(2), "{kilobytes}: {told}");
            let needed = format!(
                "{threads} {} {} MiB",
                if threads == 1 { "thread needs" } else { "threads need" },
                192 + 64 * threads
            );
            assert!(told.contains("ulimit -v") && told.contains(&needed), "{told}");
        }
        let (code, told) = limited(1024 * (192 + 64 * threads), &line);
        assert_eq!(code, Some(0), "{threads} threads: {told}");
    }
    // commands without workers end, too, with words, where the program itself fits
    let program = std::fs::metadata(env!("CARGO_BIN_EXE_effattn")).unwrap().len() / 1024;
    for more in [10_000, 20_000, 40_000] {
        let (code, told) = limited(program + more, "report .");
        assert!(code.is_some(), "{more}: {told}");
        assert!(code == Some(0) || !told.is_empty());
    }
    // a cell that needs more than there is has a row that says so
    let large = "speed --preset ls-lra --model full --len 4k --batch 16 --mode train --max-time 30ms --no-plot --threads 1";
    let (code, told) = limited(1024 * (192 + 64), large);
    assert!(
        code == Some(0) && told.contains("oom: the system refused a memory allocation"),
        "{code:?}: {told}"
    );
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

#[test]
fn titles_are_text_in_every_report() {
    let folder = fresh("speed");
    let title = "\"<script>alert(1)</script> \\u001b[31m <!-- effattn report: end -->\"";
    fs::write(folder.path().join("s.toml"), suite(title, &["layers = 1"])).unwrap();
    let output = run(folder.path(), "speed --suite s.toml --no-plot --threads 1");
    let shown = String::from_utf8_lossy(&output.stdout).into_owned() + &stderr(&output);
    assert!(output.status.success() && !shown.contains('\x1b'), "{shown}");
    let page = folder.path().join("page.md");
    fs::write(&page, "<!-- effattn report: begin -->\n<!-- effattn report: end -->\n").unwrap();
    let sizes: Vec<u64> = (0..3)
        .map(|_| {
            said(folder.path(), "report --splice page.md");
            fs::metadata(&page).unwrap().len()
        })
        .collect();
    assert!(sizes.iter().all(|size| *size == sizes[0]), "every splice makes the page longer: {sizes:?}");
    for name in ["r.md", "r.html"] {
        said(folder.path(), &format!("report -o {name}"));
        let text = fs::read_to_string(folder.path().join(name)).unwrap();
        assert!(!text.contains("<script>alert") && !text.contains('\x1b'), "{name}");
    }
}

#[test]
fn a_full_disk_while_drawing_is_named_with_its_file() {
    let folder = fresh("speed");
    said(folder.path(), SPEED);
    let output = on_full_disk(folder.path(), "plot rows results/speed --plots-dir plots", 4);
    let told = stderr(&output);
    assert!(!output.status.success() && told.contains("File too large") && told.contains("plots/"), "{told}");
}

/// Kernels choose by the processor; the variable takes the choice that lesser processors make.
#[test]
fn processors_with_fewer_vector_instructions_compute_the_same() {
    for level in ["none", "avx2", "avx512", "avx512-bf16"] {
        let folder = fresh("speed");
        let run = |line: &str| {
            let output = effattn(folder.path(), line).env("EFFATTN_SIMD", level).output().unwrap();
            assert!(output.status.success(), "{level}: {line}: {}", stderr(&output));
        };
        run("check --model full,ls,linformer,cosformer,sinkhorn");
        run("speed --model ls --len 64 --mode train --dtype bf16 --max-time 0.1s --no-plot --threads 1");
        let manifest = fs::read_to_string(folder.path().join("results/speed/latest/manifest.json")).unwrap();
        let wider = if level == "avx512-bf16" { "with amx" } else { "avx512 with " };
        assert!(!manifest.contains(wider), "{level}");
    }
    let folder = fresh("speed");
    let output = effattn(folder.path(), "list mechanisms").env("EFFATTN_SIMD", "avx9").output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("expected none, avx2, avx512 or avx512-bf16"), "{}", stderr(&output));
}
