//! Numbers at their bounds: in the configs of golden files, in the grids of suites, in knobs and settings.

use std::path::PathBuf;
use std::sync::OnceLock;

use candle_core::Device;
use effattn::attention::choose::choose;
use effattn::config::lists::Models;
use effattn::config::settings::{Setting, Settings};
use effattn::config::suite::Suite;
use effattn::protocol::check::check_bytes;
use effattn::record::text::visible;
use effattn::report::document::{BEGIN, Document, END, Headline, Section, Source};
use effattn::report::table::Table;
use serde_json::Value;

use super::Target;

/// Numbers that sizes are replaced by.
const SIZES: &[&str] = &[
    "0",
    "1",
    "2",
    "3",
    "7",
    "64",
    "65",
    "1023",
    "65536",
    "1048576",
    "1048577",
    "16777216",
    "16777217",
    "2147483647",
    "2147483648",
    "4294967295",
    "4294967296",
    "9223372036854775807",
    "9223372036854775808",
    "18446744073709551615",
    "-1",
    "0.5",
    "1e308",
    "null",
    "true",
    "[]",
    "[0]",
    "[3, 18446744073709551615]",
    "\"auto\"",
    "\"\"",
];

/// Header and tensors of the shipped golden files below 200 kB.
fn files() -> &'static [(String, Value, Vec<u8>)] {
    static FILES: OnceLock<Vec<(String, Value, Vec<u8>)>> = OnceLock::new();
    FILES.get_or_init(|| {
        let root = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
        let mut paths: Vec<PathBuf> = [root.clone(), root.join("models")]
            .iter()
            .flat_map(|folder| std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()))
            .filter(|path| path.is_file() && path.metadata().unwrap().len() < 200_000)
            .collect();
        paths.sort();
        let read = |path: &PathBuf| {
            let bytes = std::fs::read(path).unwrap();
            let front = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
            let header = serde_json::from_slice(&bytes[8..front]).unwrap();
            (path.file_name().unwrap().to_string_lossy().into_owned(), header, bytes[front..].to_vec())
        };
        paths.iter().map(read).collect()
    })
}

/// Two bytes of `input` as a number.
fn number(input: &[u8], at: usize) -> usize {
    let byte = |at: usize| usize::from(input.get(at).copied().unwrap_or(0));
    byte(at) << 8 | byte(at + 1)
}

/// A golden file whose config has one or two other numbers.
fn golden(input: &[u8]) -> (String, Vec<u8>) {
    let (name, header, tensors) = &files()[number(input, 0) % files().len()];
    let mut header = header.clone();
    let mut config: Value = serde_json::from_str(header["__metadata__"]["config"].as_str().unwrap()).unwrap();
    for change in 0..1 + number(input, 2) % 2 {
        let numbers: Vec<String> = (config.as_object().unwrap().iter())
            .filter(|(_, value)| value.is_number() || value.is_boolean() || value.is_array())
            .map(|(key, _)| key.clone())
            .collect();
        if numbers.is_empty() {
            continue;
        }
        let key = &numbers[number(input, 4 + 4 * change) % numbers.len()];
        let size = SIZES[number(input, 6 + 4 * change) % SIZES.len()];
        config[key] = serde_json::from_str(size).unwrap();
    }
    header["__metadata__"]["config"] = Value::String(config.to_string());
    let header = header.to_string().into_bytes();
    (name.clone(), [&(header.len() as u64).to_le_bytes()[..], &header, tensors].concat())
}

fn random_seeds() -> Vec<Vec<u8>> {
    (0..64u16)
        .map(|index| (0..12).flat_map(|at| (index.wrapping_mul(2741) ^ (at * 977)).to_be_bytes()).collect())
        .collect()
}

pub const TARGETS: &[Target] = &[
    Target {
        name: "golden-config",
        weight: 0.3,
        seeds: random_seeds,
        words: &[],
        read: |bytes, _| {
            let (name, bytes) = golden(bytes);
            let _ = check_bytes(&name, &bytes, &Device::Cpu);
        },
    },
    Target {
        name: "bounds",
        weight: 1.0,
        seeds: random_seeds,
        words: &[],
        read: |bytes, _| {
            let size = SIZES[number(bytes, 0) % SIZES.len()];
            let keys = Setting::all();
            let key = keys[number(bytes, 2) % keys.len()].key;
            if let Ok(settings) = Settings::set(&format!("{key}={size}")) {
                assert!(settings.check().is_ok());
            }
            let entries = effattn::attention::TABLE;
            let entry = entries[number(bytes, 4) % entries.len()];
            let Some(knob) = entry.knobs.get(number(bytes, 6) % entry.knobs.len().max(1)) else { return };
            let text = format!("{}:{}={size}", entry.name, knob.name);
            let Ok(choices) =
                text.parse::<Models>().map_err(drop).and_then(|models| choose(&models).map_err(drop))
            else {
                return;
            };
            let shape = effattn::attention::Shape {
                batch: 1,
                heads: 2,
                head_dim: 8,
                width: 16,
                queries: 1 << (number(bytes, 8) % 23),
                keys: 1 << (number(bytes, 8) % 23),
                causal: number(bytes, 10).is_multiple_of(2),
                cls: false,
                grid: None,
            };
            if (entry.validate)(&choices[0].knobs, &shape).is_ok() {
                let _ = (entry.cost)(&choices[0].knobs, &shape);
            }
        },
    },
    Target {
        name: "titles",
        weight: 1.0,
        seeds: || {
            [BEGIN, END, "<script>alert(1)</script>", "a | b", "\x1b[31m", "\0", "\u{202e}"]
                .map(|text| text.as_bytes().to_vec())
                .to_vec()
        },
        words: &["<", ">", "&", "\n", "|", "\x1b", "\0", "-->", "<!--", "]]>", END, BEGIN],
        read: |bytes, _| {
            let text = String::from_utf8_lossy(bytes).into_owned();
            let toml = format!(
                "title = {0}\nprotocol = \"speed\"\nsource = {0}\n[[row]]\nlabel = {0}\nmodel = \"ls\"\n",
                toml::Value::String(text)
            );
            let Ok(suite) = Suite::parse("../../x.toml", &toml) else { return };
            assert!(!suite.name.contains(['/', '\\']) && !suite.name.starts_with('.'), "{:?}", suite.name);
            let cell = suite.rows[0].label.clone();
            let table = Table {
                title: suite.title.clone(),
                columns: vec![cell.clone(), "n".into()],
                numbers: 1,
                rows: vec![vec![cell.clone(), "1".into()]],
                notes: vec![suite.source.clone()],
                ..Table::default()
            };
            assert_eq!(table.terminal(80), visible(&table.terminal(80)), "a terminal is given commands");
            let section = Section {
                title: suite.title,
                tables: vec![table],
                sources: vec![Source { line: cell.clone(), command: cell.clone(), rows: cell.clone() }],
                ..Section::default()
            };
            let document = Document {
                title: suite.source,
                overview: vec![(cell.clone(), cell.clone())],
                headlines: vec![Headline { text: cell, section: Some(0) }],
                sections: vec![section],
            };
            let page = format!("a\n{BEGIN}\n{END}\nb\n");
            let once = document.splice(&page).unwrap().unwrap();
            assert_eq!(document.splice(&once), Ok(Some(once.clone())), "a second splice changes the page");
            let (html, empty) = (document.html(), Document::default().html());
            let scripts = |page: &str| page.to_lowercase().matches("<script").count();
            assert!(
                !once.contains("<script") && scripts(&html) == scripts(&empty),
                "markup reaches the report"
            );
            assert!(
                !once.contains(['\x1b', '\0']) && !html.contains(['\x1b', '\0']),
                "commands reach the report"
            );
        },
    },
];
