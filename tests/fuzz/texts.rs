//! Readers of text: flags, suites, expressions, rows, journals, manifests.

use std::path::Path;
use std::time::SystemTime;

use effattn::attention::choose::choose;
use effattn::config::lists::{Batches, Counts, Lengths, Models, Modes, Seeds, Words};
use effattn::config::settings::Settings;
use effattn::config::suite::{BUILTIN_SUITES, Suite};
use effattn::config::units::{Bytes, Seconds};
use effattn::data::listops;
use effattn::record::{Outcome, Row, csv, json, matrix, norms};
use effattn::report::{document, reference};
use effattn::run::claim::Claim;
use effattn::run::journal::{Entry, Journal, Samples};
use effattn::run::manifest::Manifest;
use effattn::run::plan::Plan;
use effattn::run::plan_file::{PLAN, PlanFile, PlannedCell};

use super::Target;

fn texts(all: &[&str]) -> Vec<Vec<u8>> {
    all.iter().map(|text| text.as_bytes().to_vec()).collect()
}

fn rows() -> Vec<Row> {
    let row = Row {
        len: Some(1024),
        batch: Some(2),
        variant: Some("w=4,r=2".to_owned()),
        ..Row::new("speed", "ls")
    };
    let timed = row.with("step_time", "s", Some(0.25)).with_outcome(Outcome::Ok, None);
    let gone = row
        .with("step_time", "s", None)
        .with_outcome(Outcome::Oom, Some("asked, \"more\"\nthan it is".to_owned()));
    vec![timed, gone]
}

fn journal() -> Vec<u8> {
    let samples = Samples::new("step_time", "s", vec![0.25, 0.26]);
    let entries = [
        Entry { rows: rows(), samples: vec![samples], ..Entry::new("a") },
        Entry { rows: rows(), ..Entry::new("b") },
    ];
    entries.iter().flat_map(|entry| [serde_json::to_vec(entry).unwrap(), b"\n".to_vec()].concat()).collect()
}

/// Writes `bytes` as `name` and reads the folder.
fn in_file(bytes: &[u8], folder: &Path, name: &str) {
    std::fs::write(folder.join(name), bytes).unwrap();
}

pub const TARGETS: &[Target] = &[
    Target {
        name: "grammar",
        weight: 4.0,
        seeds: || {
            texts(&[
                "1024,2048",
                "512..8192",
                "1024..4096+1024",
                "0..3",
                "full,ls:w=16,r=2",
                "all",
                "ls*,cosformer:m=512",
                "longformer:global=0+3",
                "infer,train",
                "8GiB",
                "1.5h",
                "30s",
                "heads=8",
                "len=512",
                "steps=10",
                "10,20,40",
            ])
        },
        words: &[
            "..",
            ":w=",
            "r=",
            "GiB",
            "KiB",
            "ms",
            "min",
            "all",
            "ls",
            "dual_ln=false",
            "compat=code",
            "+",
            "*",
        ],
        read: |bytes, _| {
            let Ok(text) = std::str::from_utf8(bytes) else { return };
            let _ = (
                text.parse::<Lengths>(),
                text.parse::<Batches>(),
                text.parse::<Seeds>(),
                text.parse::<Modes>(),
            );
            let _ = (
                text.parse::<Words>(),
                text.parse::<Counts>(),
                text.parse::<Bytes>(),
                text.parse::<Seconds>(),
            );
            let _ = Settings::set(text);
            if let Ok(models) = text.parse::<Models>() {
                let _ = choose(&models);
            }
        },
    },
    Target {
        name: "suite",
        weight: 1.0,
        seeds: || BUILTIN_SUITES.iter().map(|(_, text)| text.as_bytes().to_vec()).collect(),
        words: &[
            "[[row]]\n",
            "[base]\n",
            "model = ",
            "published = { metric = \"m\", infer = [1] }",
            "len = [1, 2]",
            "\"oom\"",
        ],
        read: |bytes, _| {
            let Ok(text) = std::str::from_utf8(bytes) else { return };
            if let Ok(suite) = Suite::parse("x.toml", text) {
                for row in &suite.rows {
                    let _ = choose(&Models(vec![row.model.clone()]));
                }
            }
        },
    },
    Target {
        name: "listops",
        weight: 4.0,
        seeds: || {
            let made = listops::generate(7, 6);
            (0..made.len()).map(|index| listops::to_text(made.tokens(index)).into_bytes()).collect()
        },
        words: &["( ", ") ", "[MAX", "[MIN", "[MED", "[SM", "]", " 9 ", "["],
        read: |bytes, _| {
            if let Ok(text) = std::str::from_utf8(bytes) {
                let _ = listops::parse(text);
            }
        },
    },
    Target {
        name: "rows",
        weight: 1.0,
        seeds: || {
            let export = json::Export { manifest: serde_json::Value::Null, rows: rows() };
            vec![
                csv::to_string(&rows()).unwrap().into_bytes(),
                json::to_string(&export).unwrap().into_bytes(),
            ]
        },
        words: &["oom", "ok", "train", "\"rows\":", "\"published\":"],
        read: |bytes, folder| {
            in_file(bytes, folder, norms::FILE);
            let _ = norms::read(folder);
            if let Ok(text) = std::str::from_utf8(bytes) {
                let _ = (csv::from_str(text), json::from_str(text));
            }
        },
    },
    Target {
        name: "journal",
        weight: 1.0,
        seeds: || vec![journal(), Vec::new()],
        words: &["{\"cell\":", "\n", "\"rows\":[", "\"samples\":[]"],
        read: |bytes, folder| {
            in_file(bytes, folder, "journal.jsonl");
            let path = folder.join("journal.jsonl");
            let _ = std::fs::remove_file(folder.join("journal.damaged"));
            let mut entries = Vec::new();
            let Ok(mut journal) = Journal::open(&path, |entry| entries.push(entry)) else { return };
            // what was read stays, whatever stood behind it, and the journal goes on
            journal.append(&Entry::new("new")).unwrap();
            let mut again = Vec::new();
            Journal::open(&path, |entry| again.push(entry)).unwrap();
            assert_eq!(again.len(), entries.len() + 1);
            assert_eq!(again[..entries.len()], entries[..]);
        },
    },
    Target {
        name: "manifest",
        weight: 1.0,
        seeds: || {
            let plan = Plan { name: "speed".into(), command: "speed".into(), ..Plan::default() };
            vec![serde_json::to_vec_pretty(&Manifest::new(&plan, "id")).unwrap()]
        },
        words: &["\"schema\": 2", "\"state\": \"done\"", "null"],
        read: |bytes, folder| {
            in_file(bytes, folder, "manifest.json");
            let _ = Manifest::read(folder);
        },
    },
    Target {
        name: "plan",
        weight: 0.2,
        seeds: || {
            let plan = PlanFile {
                schema: 1,
                plan: "0123456789ab".into(),
                name: "lra".into(),
                argv: vec!["lra".into(), "--quick".into()],
                cells: (0..3)
                    .map(|group| PlannedCell { cell: format!("cell {group}"), seconds: 1.5, group })
                    .collect(),
            };
            vec![
                serde_json::to_vec(&plan).unwrap(),
                br#"{"host":"node1","place":"boot space","process":12,"ticks":345,"job":"7","since":"2026-01-01 00:00:00"}"#
                    .to_vec(),
            ]
        },
        words: &["seconds", "group", "1e308", "-1", "18446744073709551615", "NaN", "process", "schema"],
        read: |bytes, folder| {
            in_file(bytes, folder, PLAN);
            in_file(bytes, folder, "claim-4294967295");
            if let Ok(Some(plan)) = PlanFile::read(folder) {
                for count in [1, 7] {
                    let owners = plan.assign_shards(count);
                    assert!(owners.len() == plan.cells.len());
                    assert!(owners.iter().all(|&shard| (1..=count).contains(&shard)));
                }
            }
            let _ = (Claim::holder(folder), Claim::is_running(folder, SystemTime::now()));
        },
    },
    Target {
        name: "reference",
        weight: 1.0,
        seeds: || {
            let row = "{\"model\": \"ls\", \"len\": 1024, \"batch\": 1, \"mode\": \"train\", \"ms\": 12.5, \"peak_mib\": 300.0}\n";
            let export = json::Export { manifest: serde_json::Value::Null, rows: rows() };
            vec![
                row.repeat(3).into_bytes(),
                json::to_string(&export).unwrap().into_bytes(),
                csv::to_string(&rows()).unwrap().into_bytes(),
            ]
        },
        words: &["\"ms\":", "\"model\":", "model,len,ms\n"],
        read: |bytes, _| {
            if let Ok(text) = std::str::from_utf8(bytes) {
                let _ = reference::parse(text);
            }
        },
    },
    Target {
        name: "matrix",
        weight: 0.5,
        seeds: || {
            texts(&[
                "query,k0,k1,s0\n0,0.5,0.25,1\n1,0,1,0\n",
                "[{\"file\": \"m.csv\", \"label\": \"a\", \"note\": \"\"}]",
            ])
        },
        words: &["k2", "s1", "query", "../"],
        read: |bytes, folder| {
            in_file(bytes, folder, "m.csv");
            in_file(b"[{\"file\": \"m.csv\", \"label\": \"a\", \"note\": \"\"}]", folder, "matrices.json");
            let _ = matrix::read(folder);
            in_file(bytes, folder, "matrices.json");
            let _ = matrix::read(folder);
        },
    },
    Target {
        name: "markers",
        weight: 1.0,
        seeds: || vec![format!("a\n{}\nold\n{}\nb", document::BEGIN, document::END).into_bytes()],
        words: &[document::BEGIN, document::END],
        read: |bytes, _| {
            if let Ok(text) = std::str::from_utf8(bytes) {
                let _ = document::Document::default().splice(text);
            }
        },
    },
];
