//! `docs/files.md` names every column of the rows and every key of samples, manifests and suites, and no other.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use effattn::config::settings::Setting;
use effattn::config::suite::Suite;
use effattn::record::COLUMNS;
use effattn::run::manifest::Manifest;
use effattn::run::plan::Plan;

/// The names that the tables under `heading` explain.
fn explained(heading: &str) -> BTreeSet<String> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/files.md");
    let text = fs::read_to_string(path).unwrap();
    let (_, below) = text.split_once(heading).unwrap_or_else(|| panic!("no {heading:?}"));
    let section = below.split("\n## ").next().unwrap();
    let names = section.lines().filter_map(|line| line.strip_prefix("| `")?.split_once('`'));
    names.map(|(name, _)| name.to_owned()).collect()
}

fn set<'a>(names: impl IntoIterator<Item = &'a str>) -> BTreeSet<String> {
    names.into_iter().map(str::to_owned).collect()
}

/// The keys that the reader of suites takes at the place of `unknown` in `text`.
fn allowed(text: &str) -> BTreeSet<String> {
    let error = Suite::parse("a.toml", text).unwrap_err().to_string();
    match error.split_once("allowed: ") {
        Some((_, keys)) => set(keys.lines().next().unwrap_or_default().split(", ").map(str::trim)),
        None => {
            let (_, keys) = error.split_once("expected ").unwrap_or_else(|| panic!("{error}"));
            set(keys.split('`').skip(1).step_by(2))
        }
    }
}

#[test]
fn every_column_of_the_rows_is_explained() {
    assert_eq!(explained("## rows.csv"), set(COLUMNS));
}

#[test]
fn every_key_of_the_manifest_is_explained() {
    let manifest = serde_json::to_value(Manifest::new(&Plan::default(), "one")).unwrap();
    assert_eq!(explained("## manifest.json"), set(manifest.as_object().unwrap().keys().map(String::as_str)));
}

#[test]
fn every_key_of_the_samples_is_explained() {
    let results = Path::new(env!("CARGO_MANIFEST_DIR")).join("reproduction/results/table5/cos-table5");
    let run =
        fs::read_dir(results).unwrap().map(|item| item.unwrap().path()).find(|path| path.is_dir()).unwrap();
    let text = fs::read_to_string(run.join("samples.jsonl")).unwrap();
    let first: serde_json::Value = serde_json::from_str(text.lines().next().unwrap()).unwrap();
    let keys = first.as_object().unwrap().keys().map(String::as_str).chain(["machine", "turns"]); // of merged runs; of calibrated ones
    assert_eq!(explained("## samples.jsonl"), set(keys));
}

#[test]
fn every_key_of_a_suite_is_explained() {
    let mut keys = allowed("unknown = 1");
    keys.extend(allowed("title = 'a'\nprotocol = 'speed'\nsource = 'b'\n[[row]]\nunknown = 1"));
    let row = "title = 'a'\nprotocol = 'speed'\nsource = 'b'\n[[row]]\nlabel = 'c'\nmodel = 'full'\n";
    keys.extend(allowed(&format!("{row}[[printed]]\nunknown = 1")));
    assert!(keys.contains("not_comparable") && keys.contains("base"), "{keys:?}");
    effattn::protocol::declare_settings();
    keys.extend(set(Setting::all().into_iter().map(|setting| setting.key)));
    assert_eq!(explained("## Suites"), keys);
}

#[test]
fn every_path_in_the_documents_exists() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let documents = fs::read_dir(root.join("docs")).unwrap().map(|item| item.unwrap().path());
    let documents = documents.chain([root.join("CONTRIBUTING.md"), root.join("README.md")]);
    let mut count = 0;
    for document in documents.filter(|path| path.extension().is_some_and(|end| end == "md")) {
        let text = fs::read_to_string(&document).unwrap();
        for word in text.split('`').skip(1).step_by(2) {
            let ours = ["src/", "crates/", "tests/", "docs/", "benches/", "suites/"]
                .iter()
                .any(|start| word.starts_with(start));
            if ours && !word.contains(['<', '*', ' ', ':']) {
                assert!(root.join(word).exists(), "{}: there is no {word}", document.display());
                count += 1;
            }
        }
    }
    assert!(count > 30, "only {count} paths were found");
}

#[test]
fn committed_manifests_name_no_folder_of_a_machine() {
    let (mut left, mut seen) = (vec![Path::new(env!("CARGO_MANIFEST_DIR")).join("reproduction/results")], 0);
    while let Some(folder) = left.pop() {
        for path in fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
            if path.is_dir() && !path.is_symlink() {
                left.push(path);
            } else if path.ends_with("manifest.json") {
                let text = fs::read_to_string(&path).unwrap();
                assert!(!text.contains("\"/"), "{} has an absolute path", path.display());
                seen += 1;
            }
        }
    }
    assert!(seen > 50, "only {seen} manifests");
}
