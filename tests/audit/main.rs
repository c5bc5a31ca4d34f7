//! The audit: published numbers against the suites, every number of the pages against a row, verdicts and marks recomputed,
//! runs sealed and not stale. Each check is run on what is committed, and on ten seeded faults, each of which it has to find.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use effattn::config::suite::Suite;
use effattn::record::Published;
use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::{prose, published};

/// Commits that change the kernels after which what was measured before is stale.
const STALE_AFTER: u32 = 25;
/// The pages that the report writes.
const PAGES: [&str; 5] = [
    "docs/results.md",
    "docs/results-cosformer.md",
    "docs/results-transformer-ls.md",
    "docs/results-mixers.md",
    "docs/results-trained.md",
];

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn read(path: &str) -> String {
    std::fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// What the suites have and `numbers` has not, or the other way round.
fn numbers(numbers: &str) -> Vec<String> {
    published::differences(numbers).into_iter().map(|number| number.join(",")).collect()
}

/// The lines of a page with `text` that are not what the report writes from the committed rows: digits, marks, floors,
/// verdicts, remarks.
fn page(text: &str) -> Vec<String> {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("page.md");
    std::fs::write(&file, text).unwrap();
    let arguments = ["report", "reproduction/results", "--brief", "-q", "--splice"];
    let mut command = Command::new(env!("CARGO_BIN_EXE_effattn"));
    let output = command.args(arguments).arg(&file).current_dir(root()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let now = std::fs::read_to_string(&file).unwrap();
    let (then, now): (Vec<&str>, Vec<&str>) = (text.lines().collect(), now.lines().collect());
    let lost = then.iter().filter(|line| !now.contains(line)).map(|line| format!("no row says: {line}"));
    let new = now.iter().filter(|line| !then.contains(line)).map(|line| format!("rows say: {line}"));
    lost.chain(new).collect()
}

/// Sections of a page whose tables are of several commits and do not say so.
fn mixed(text: &str) -> Vec<String> {
    let commits = |section: &str| -> BTreeSet<String> {
        let provenance = section.lines().filter(|line| line.starts_with("<sub>"));
        let commit = |line: &str| Some(line.split_once(" (")?.1.split_once(')')?.0.to_owned());
        provenance.filter_map(commit).collect()
    };
    let sections = text.split("\n### ").skip(1).filter(|section| section.contains("\n| "));
    let unsaid =
        sections.filter(|section| commits(section).len() > 1 && !section.contains("The rows are of "));
    unsaid.map(|section| section.lines().next().unwrap_or_default().to_owned()).collect()
}

/// Ratios of a suite that are not those of its published numbers.
fn ratios(suite: &Suite) -> Vec<String> {
    let value = |label: &str, metric: &str, key: &str, len: u64| {
        let index =
            suite.base.len.as_ref().map_or(Some(0), |lens| lens.0.iter().position(|known| *known == len))?;
        let row = suite.rows.iter().find(|row| row.label == label)?;
        row.table(metric)?.at(key, index).and_then(Published::value)
    };
    let wrong = |ratio: &&effattn::config::suite::SuiteRatio| {
        let of = |label: &str| value(label, &ratio.metric, &ratio.key, ratio.len);
        let printed =
            of(&ratio.over).zip(of(&ratio.under)).map(|(over, under)| format!("{:.2}", over / under));
        printed != Some(format!("{:.2}", ratio.published))
    };
    suite.ratios.iter().filter(wrong).map(|ratio| format!("{} / {}", ratio.over, ratio.under)).collect()
}

/// Folders of the committed runs.
fn runs() -> Vec<PathBuf> {
    let mut folders = vec![root().join("reproduction/results")];
    let mut found = Vec::new();
    while let Some(folder) = folders.pop() {
        if folder.join("manifest.json").is_file() && folder.join("rows.csv").is_file() {
            found.push(folder);
            continue;
        }
        for entry in std::fs::read_dir(&folder).unwrap().flatten() {
            if entry.file_type().unwrap().is_dir() {
                folders.push(entry.path());
            }
        }
    }
    found.sort();
    found
}

fn manifest(run: &Path) -> Value {
    serde_json::from_str(&std::fs::read_to_string(run.join("manifest.json")).unwrap()).unwrap()
}

/// Whether `rows` are not those that the run of `manifest` wrote, where it noted their digest.
fn unsealed(manifest: &Value, rows: &str) -> bool {
    let digest: String = Sha256::digest(rows.as_bytes()).iter().map(|byte| format!("{byte:02x}")).collect();
    manifest["rows_sha256"].as_str().is_some_and(|written| written != digest)
}

/// Commits since `commit` that change the kernels of the CPU, where the committed tables were measured, and not only their tests; none
/// where the history does not have `commit`.
fn kernel_commits(commit: &str) -> Option<u32> {
    let range = format!("{commit}..HEAD");
    const PATHS: [&str; 6] = [
        "crates/kernel/src",
        "src/kernel",
        ":(exclude,glob)crates/kernel/src/**/cuda/**",
        ":(exclude,glob)crates/kernel/src/**/tests/**",
        ":(exclude,glob)crates/kernel/src/**/tests.rs",
        ":(exclude)crates/kernel/src/testing.rs",
    ];
    let arguments = ["rev-list", "--count", &range, "--"].into_iter().chain(PATHS);
    let output = Command::new("git").args(arguments).current_dir(root()).output().ok()?;
    String::from_utf8_lossy(&output.stdout).trim().parse().ok()
}

/// Whether the history goes back to the first commit: not in an archive of the sources or a shallow clone.
fn has_whole_history() -> bool {
    let output =
        Command::new("git").args(["rev-parse", "--is-shallow-repository"]).current_dir(root()).output();
    output.is_ok_and(|output| output.stdout == b"false\n")
}

/// Why the measurement of `manifest` is stale.
fn stale(manifest: &Value) -> Option<String> {
    let text = |key: &str| manifest[key].as_str().unwrap_or_default();
    let id = text("id");
    let measured = matches!(text("command"), "speed" | "memory");
    let fresh = text("kernels") == env!("EFFATTN_KERNELS");
    if !measured || fresh {
        return None;
    }
    let commit = text("commit").split('-').next().unwrap_or_default();
    let Some(since) = kernel_commits(commit) else {
        return has_whole_history().then(|| format!("{id}: its commit {commit} is not in the history"));
    };
    (since > STALE_AFTER).then(|| format!("{id}: {since} commits changed the kernels since it was measured"))
}

#[test]
fn what_is_committed_passes() {
    assert!(numbers(include_str!("../published/numbers.csv")).is_empty());
    for name in PAGES.into_iter().chain(["README.md"]) {
        let text = read(name);
        let found = page(&text);
        assert!(found.is_empty(), "{name}: {:#?}", &found[..found.len().min(6)]);
        assert!(mixed(&text).is_empty(), "{name}: {:?}", mixed(&text));
    }
    for (name, _) in effattn::config::suite::BUILTIN_SUITES {
        let suite = Suite::load(name).unwrap();
        assert!(ratios(&suite).is_empty(), "{name}: {:?}", ratios(&suite));
    }
    let mut stale_runs = Vec::new();
    for run in runs() {
        let (manifest, rows) = (manifest(&run), std::fs::read_to_string(run.join("rows.csv")).unwrap());
        assert!(!unsealed(&manifest, &rows), "{} is not what its run wrote", run.display());
        stale_runs.extend(stale(&manifest));
    }
    assert!(stale_runs.is_empty(), "measure again: {stale_runs:#?}");
}

/// `text` with `old` replaced, which it has.
fn with(text: &str, old: &str, new: &str) -> String {
    assert!(text.contains(old), "nothing to seed a fault in: {old}");
    text.replacen(old, new, 1)
}

#[test]
fn ten_seeded_faults_are_found() {
    let csv = include_str!("../published/numbers.csv");
    let [claims, results, trained, readme] = [PAGES[0], PAGES[2], PAGES[4], "README.md"].map(read);
    let line_of =
        |words: &str| results.lines().find(|line| line.contains(words)).unwrap_or_default().to_owned();
    let floor = line_of("| floor: the best simple rule | 37.");
    let suite = read("suites/ls-table5.toml");
    let sealed =
        runs().into_iter().find(|run| manifest(run)["rows_sha256"].is_string()).expect("a sealed run");
    let rows = std::fs::read_to_string(sealed.join("rows.csv")).unwrap();
    let old =
        serde_json::json!({ "id": "new", "command": "speed", "kernels": "0", "commit": "e0b18a09e5b9" });
    let unknown =
        serde_json::json!({ "id": "new", "command": "speed", "kernels": "0", "commit": "000000000000" });
    let faults: [(&str, bool); 15] = [
        ("a wrong digit of a paper", !numbers(&with(csv, ",37.13", ",37.31")).is_empty()),
        (
            "a published number that no suite has",
            !numbers(&format!("{csv}ls-table1,Other,full,ls-lra,accuracy,text,99.9,\n")).is_empty(),
        ),
        (
            "a number under the name of another paper",
            !numbers(&with(csv, "\"DeiT (Touvron et al., ICML 2021), Table 5\"", "")).is_empty(),
        ),
        (
            "a wrong digit of a row",
            !page(&with(&results, "| Full Attention | 36.", "| Full Attention | 63.")).is_empty(),
        ),
        ("a turned mark", !page(&with(&results, "▼ n=4", "▲ n=4")).is_empty()),
        ("another verdict", !page(&with(&trained, "worse by 1.21", "within spread")).is_empty()),
        (
            "a claim that rows contradict",
            !page(&with(&claims, "| contradicted |", "| reproduced |")).is_empty(),
        ),
        (
            "a floor of another tokenizer",
            !page(&results.replace(&floor, &floor.replace("| 37.", "| 8.06 counts; 37."))).is_empty(),
        ),
        (
            "a subset that is not named",
            !page(&results.replace("; tested on 9000 images (10000)", "")).is_empty(),
        ),
        ("a wrong digit in a sentence", !page(&with(&readme, ".2 -->36.", ".2 -->63.")).is_empty()),
        ("a number that no row carries", !prose::numbers("It is 1.76 times as fast as PyTorch.").is_empty()),
        ("commits that are mixed and not said", !mixed(&results.replace("The rows are of ", "")).is_empty()),
        ("a commit that is not in the history", !has_whole_history() || stale(&unknown).is_some()),
        ("an old kernel", kernel_commits("e0b18a09e5b9").is_none() || stale(&old).is_some()),
        (
            "a ratio that the printed numbers do not give",
            !ratios(&Suite::parse("x.toml", &with(&suite, "published = 0.68", "published = 0.86")).unwrap())
                .is_empty(),
        ),
    ];
    let missed: Vec<&str> = faults.iter().filter(|(_, found)| !found).map(|(name, _)| *name).collect();
    assert!(missed.is_empty(), "faults that the audit does not find: {missed:?}");
    let edited = with(&rows, "1", "2");
    assert!(unsealed(&manifest(&sealed), &edited), "an edited row is not found");
}
