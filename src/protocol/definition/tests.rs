//! Settings are held by the keys of cells, and what a protocol does not take is refused by name.

use std::collections::{BTreeSet, HashMap};

use super::*;
use crate::protocol::resolve;
use crate::protocol::{TABLE, declare_settings, find, lra};
use effattn_kernel::device::rng::RngStream;
use effattn_record::config::lists::Models;
use effattn_record::config::settings::SETTINGS;
use effattn_record::config::suite::{BUILTIN_SUITES, Suite};

/// Settings that may differ between two runs of one cell, and why.
const FREE: &[(&str, &str)] = &[
    ("timeout", "an outcome carries the limit that it ran under"),
    ("memory_limit", "an outcome carries the limit that it ran under"),
    ("threads", "the identity of the whole run has them"),
    ("jobs", "every cell is computed as it would be alone"),
    ("data", "it is the task of its cells; tests of contents hold its files"),
    ("eval", "its cells are those of stored weights, whose checksum they have"),
];

/// Another value than the usual one of every setting that a key holds.
const OTHER: &[(&str, &str)] = &[
    ("len", "384"),
    ("batch", "64"),
    ("seeds", "9"),
    ("mode", "infer"),
    ("layers", "3"),
    ("width", "128"),
    ("heads", "1"),
    ("ffn", "77"),
    ("pooling", "mean"),
    ("dropout", "0.3"),
    ("attention_dropout", "0.2"),
    ("fit", "1GiB"),
    ("device", "cuda"),
    ("dtype", "bf16"),
    ("kernel", "composed"),
    ("warmup", "7"),
    ("runs", "77"),
    ("min_runs", "5"),
    ("max_time", "3s"),
    ("steps", "77"),
    ("rate", "0.0123"),
    ("phases", "2"),
    ("limit", "99"),
    ("every", "7"),
    ("accumulate", "2"),
    ("similarity", "7"),
    ("also", "cifar10-c"),
    ("overlap", "true"),
    ("profile", "true"),
    ("insertions", "5"),
    ("characters", "!"),
    ("perturbation_seeds", "5"),
    ("strict", "true"),
    ("keep_close", "true"),
    ("floor", "true"),
    ("allow_partial", "true"),
    ("tokenizer", "words.json"),
    ("rates", "1e-3,1e-2"),
    ("segments", "32:4"),
    ("test_segments", "32:4"),
    ("vocabulary", "512"),
    ("noise", "0.5"),
];

fn other(protocol: &dyn Protocol, key: &str) -> String {
    let pick = |values: [&str; 2]| values[usize::from(protocol.name() == "charlm")].to_owned();
    match (protocol.name(), key) {
        ("wordlm", "task") => return "sample-words".to_owned(),
        ("wordlm", "preset") => return "wikitext103-small".to_owned(),
        ("mlm", "task") => return "sample".to_owned(),
        ("mlm", "preset") => return "roberta-base".to_owned(),
        ("recall", "task") => return "parity".to_owned(),
        ("recall", "preset") => return "recall-based".to_owned(),
        ("recall", "batch") => return "32".to_owned(),
        ("finetune", "task") => return "qqp".to_owned(),
        ("finetune", "preset") => return "roberta-small".to_owned(),
        ("finetune", "len") => return "256".to_owned(),
        ("finetune", "width") => return "144".to_owned(), // 12 heads
        (_, "from") => return pretrained(),
        (_, "weights") => return format!("{}/model.safetensors", pretrained()),
        _ => {}
    }
    match key {
        "task" if protocol.name() == "vision" => "generated".to_owned(),
        "preset" if protocol.name() == "vision" => "vil-ls-small".to_owned(),
        "task" => pick([if protocol.name() == "lra" { "text" } else { "retrieval" }, "text8"]),
        "preset" => pick([
            if matches!(protocol.view(), ResultView::Growth) { "ls-lra" } else { "lra-repo" },
            "charlm-large",
        ]),
        _ => OTHER.iter().find(|(known, _)| *known == key).map(|(_, value)| (*value).to_owned()).unwrap(),
    }
}

/// The folder of a small encoder.
fn pretrained() -> String {
    static FOLDER: std::sync::OnceLock<tempfile::TempDir> = std::sync::OnceLock::new();
    let folder = FOLDER.get_or_init(|| {
        let folder = tempfile::tempdir().unwrap();
        crate::train::pretrained::tests::small(folder.path());
        folder
    });
    folder.path().display().to_string()
}

fn keys(protocol: &dyn Protocol, said: &[String]) -> BTreeSet<String> {
    declare_settings();
    let settings = said.iter().map(|text| Settings::set(text).unwrap());
    let settings = settings.fold(Settings::NONE, |all, one| one.over(all));
    // the encoder that another one starts from has full attention
    let model = (protocol.info().takes("from")).then(|| "full".parse().unwrap());
    let flags = GridFlags { settings, model, ..GridFlags::default() };
    let grid =
        resolve(&flags, protocol).unwrap_or_else(|error| panic!("{} {said:?}: {error}", protocol.name()));
    protocol.cells(&grid, 1).unwrap().into_iter().map(|cell| cell.key).collect()
}

#[test]
fn every_setting_changes_every_key_or_says_why_not() {
    for &protocol in TABLE {
        let base: Vec<String> =
            if protocol.info().takes("mode") { vec!["mode=train".to_owned()] } else { Vec::new() };
        let usual = keys(protocol, &base);
        for setting in protocol.info().settings() {
            let key = setting.key;
            let refused =
                matches!((protocol.name(), key), ("charlm" | "mlm", "pooling") | ("lra", "tokenizer")); // positions are predicted; of --data
            if refused || FREE.iter().any(|(free, _)| *free == key) {
                continue;
            }
            let one = format!("{key}={}", other(protocol, key));
            let said: Vec<String> =
                if key == "mode" { vec![one] } else { base.iter().cloned().chain([one]).collect() };
            let changed = keys(protocol, &said);
            assert!(!changed.is_empty());
            assert!(changed.is_disjoint(&usual), "{} {said:?}: {changed:?}", protocol.name());
        }
    }
}

/// `text` with another digit behind it, now and then.
fn varied(text: String, random: &mut RngStream) -> String {
    let digit = if text.ends_with(|c: char| c.is_ascii_digit()) { random.below(4) } else { 3 };
    if digit == 3 { text } else { format!("{text}{digit}") }
}

#[test]
fn no_two_different_cells_share_a_key_whatever_is_set() {
    declare_settings();
    for &protocol in TABLE {
        let mut random = RngStream::new(18, protocol.name());
        let mut seen: HashMap<String, Value> = HashMap::new();
        let (mut plans, mut cells) = (0, 0);
        for _ in 0..150 {
            let mut settings = Settings::NONE;
            for setting in protocol.info().settings() {
                if random.below(4) == 0 && setting.key != "device" {
                    let value = match FREE.iter().any(|(free, _)| *free == setting.key) {
                        true => continue,
                        false => varied(other(protocol, setting.key), &mut random),
                    };
                    if let Ok(one) = Settings::set(&format!("{}={value}", setting.key)) {
                        settings = one.over(settings);
                    }
                }
            }
            let model: Option<Models> =
                ["ls,full", "ls:w=16,linear", "cosformer"][random.below(3)].parse().ok();
            let flags = GridFlags { settings, model, ..GridFlags::default() };
            let Ok(grid) = resolve(&flags, protocol) else { continue };
            let Ok(made) = protocol.cells(&grid, 1) else { continue };
            plans += 1;
            for cell in made {
                cells += 1;
                let request = seen.entry(cell.key.clone()).or_insert_with(|| cell.request.clone());
                assert_eq!(*request, cell.request, "{} {}", protocol.name(), cell.key);
            }
        }
        assert!(plans >= 20 && seen.len() >= 40, "{}: {plans} plans, {cells} cells", protocol.name());
    }
}

/// Paths of the leaves of `json`, as JSON pointers.
fn leaves(json: &Value, path: &str, found: &mut Vec<String>) {
    match json {
        Value::Object(fields) => {
            fields.iter().for_each(|(name, value)| leaves(value, &format!("{path}/{name}"), found));
        }
        Value::Array(items) if !items.is_empty() => {
            items.iter().enumerate().for_each(|(at, item)| leaves(item, &format!("{path}/{at}"), found));
        }
        _ => found.push(path.to_owned()),
    }
}

fn changed(leaf: &Value) -> Value {
    match leaf {
        Value::Bool(on) => (!on).into(),
        Value::Number(number) => (number.as_f64().unwrap_or(0.0) + 1.0).into(),
        Value::String(text) => format!("{text}x").into(),
        Value::Null => 7.into(),
        _ => Value::Array(vec![1.into()]),
    }
}

#[test]
fn every_leaf_of_a_request_is_in_the_key() {
    for &protocol in TABLE {
        let cells = protocol.cells(&resolve(&GridFlags::default(), protocol).unwrap(), 1).unwrap();
        let cell = cells.iter().find(|cell| !cell.request.is_null()).unwrap();
        let mut paths = Vec::new();
        leaves(&cell.request, "", &mut paths);
        assert!(paths.len() >= 8, "{}: {paths:?}", protocol.name());
        let named = |request: &Value| Cell::new(&cell.words, cell.row.clone(), request, &cell.request).key;
        assert_eq!(named(&cell.request), cell.words);
        for path in paths {
            let mut other = cell.request.clone();
            let leaf = other.pointer_mut(&path).unwrap();
            *leaf = changed(leaf);
            assert_ne!(named(&other), cell.words, "{} {path}", protocol.name());
        }
    }
}

#[test]
fn no_two_different_cells_of_a_suite_share_a_key() {
    for (name, text) in BUILTIN_SUITES {
        let suite = Suite::parse(&format!("{name}.toml"), text).unwrap();
        let Some(protocol) = find(&suite.protocol) else { continue };
        let flags = GridFlags { suite: Some((*name).to_owned()), ..GridFlags::default() };
        let cells = protocol.cells(&resolve(&flags, protocol).unwrap(), 1).unwrap();
        let mut plan = Plan { cells, ..Plan::default() };
        assert!(plan.remove_duplicates().is_ok(), "{name}");
        let folders: BTreeSet<PathBuf> =
            plan.cells.iter().map(|cell| crate::run::plan::folder(Path::new(""), &cell.key)).collect();
        assert_eq!(folders.len(), plan.cells.len(), "{name}: a folder for two cells");
    }
}

#[test]
fn what_a_protocol_does_not_take_names_those_that_do() {
    let settings = Settings::set("mode=infer").unwrap();
    let flags = GridFlags { settings, ..GridFlags::default() };
    let error = resolve(&flags, &lra::Lra).err().unwrap().to_string();
    assert_eq!(error, "lra does not take --mode; speed and memory do");
    let every =
        SETTINGS.iter().all(|setting| TABLE.iter().any(|protocol| protocol.info().takes(setting.key)));
    assert!(every, "a setting that no protocol takes");
    for &protocol in TABLE {
        for key in protocol.info().settings.iter().flat_map(|group| group.iter()) {
            let known = protocol.info().settings().any(|setting| setting.key == *key);
            assert!(known, "{} takes {key}, which is no setting", protocol.name());
        }
    }
}
