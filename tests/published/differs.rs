//! `differs` of a row is the set of settings that differ: every setting of every protocol, changed alone and in pairs.

use std::collections::BTreeSet;

use effattn::config::settings::{Setting, Settings};
use effattn::protocol::grid::GridFlags;
use effattn::protocol::resolve;
use effattn::protocol::{self, Protocol};
use serde_json::Value;

/// A value of each setting that no protocol has, where it is about what is trained, measured or tested. Settings that choose
/// what is run (tasks, seeds, modes), where, or what is read besides are none of these.
const OTHERS: &[(&str, &str)] = &[
    ("len", "192"),
    ("batch", "6"),
    ("layers", "3"),
    ("width", "96"),
    ("heads", "3"),
    ("ffn", "72"),
    ("dropout", "0.35"),
    ("attention_dropout", "0.45"),
    ("dtype", "bf16"),
    ("warmup", "7"),
    ("runs", "77"),
    ("min_runs", "17"),
    ("max_time", "7s"),
    ("steps", "123"),
    ("rate", "0.0123"),
    ("limit", "48"),
    ("every", "11"),
    ("strict", "true"),
    ("keep_close", "true"),
    ("characters", "ab"),
    ("perturbation_seeds", "9"),
    ("segments", "48:4"),
    ("test_segments", "48:4"),
    ("vocabulary", "320"),
    ("noise", "0.5"),
    ("rates", "1e-3,2e-3"),
    ("tokenizer", "words.json"),
];

/// Where a protocol takes none of the settings or another one says it: of `overlap` and `insertions` the metric or the task.
const SAID_ELSEWHERE: &[&str] = &[
    "task",
    "data",
    "eval",
    "seeds",
    "mode",
    "preset",
    "pooling",
    "fit",
    "device",
    "threads",
    "jobs",
    "kernel",
    "memory_limit",
    "timeout",
    "profile",
    "from",
    "phases",
    "accumulate",
    "weights",
    "also",
    "similarity",
    "overlap",
    "insertions",
    "floor",
    "allow_partial",
];

/// Words of `differs` and the request of the first cell that `said` gives; why there is none.
fn first(
    protocol: &dyn Protocol,
    suite: Option<&str>,
    said: &Settings,
) -> Result<(BTreeSet<String>, Value), String> {
    // one cell is enough; a suite's lists are overridden by --set
    let one = Settings::set("seeds=0").unwrap();
    let set = said.clone().over(one);
    let flags = GridFlags { set, suite: suite.map(str::to_owned), ..GridFlags::default() };
    let grid = resolve(&flags, protocol).map_err(|error| error.to_string())?;
    let cells = protocol.cells(&grid, 2).map_err(|error| error.to_string())?;
    let cell = cells.into_iter().find(|cell| !cell.request.is_null()).ok_or("no cell that runs")?;
    let words = cell.row.differs.as_deref().unwrap_or_default().split("; ").filter(|word| !word.is_empty());
    Ok((words.map(str::to_owned).collect(), cell.request))
}

/// The protocols, each with a suite where it has none of its own.
const PROTOCOLS: &[(&str, Option<&str>)] = &[
    ("lra", None),
    ("robustness", None),
    ("charlm", None),
    ("mlm", None),
    ("wordlm", None),
    ("finetune", None),
    ("vision", None),
    ("recall", None),
    ("speed", Some("ls-figure3")),
];

/// What a word is about: its text in front of the first number or parenthesis.
fn about(word: &str) -> &str {
    word.split(|c: char| c.is_ascii_digit() || c == '(').next().unwrap_or_default()
}

#[test]
fn every_setting_is_compared_or_said_elsewhere() {
    protocol::declare_settings();
    for key in Setting::all().into_iter().map(|setting| setting.key) {
        let compared = OTHERS.iter().any(|(known, _)| *known == key);
        assert!(
            compared != SAID_ELSEWHERE.contains(&key),
            "{key}: give it a value here, or say where its departure stands"
        );
    }
    let tested: BTreeSet<&str> = PROTOCOLS.iter().map(|(name, _)| *name).collect();
    for protocol in protocol::protocols().into_iter().filter(|protocol| protocol.trains()) {
        assert!(tested.contains(protocol.name()), "{} is not in the list", protocol.name());
    }
}

#[test]
fn every_setting_that_differs_is_in_differs_alone_and_in_pairs() {
    protocol::declare_settings();
    let mut compared = 0;
    for (name, suite) in PROTOCOLS {
        let protocol = protocol::find(name).expect(name);
        let (base, request) = first(protocol, *suite, &Settings::NONE).expect(name);
        let takes = OTHERS.iter().filter(|(key, _)| protocol.info().takes(key));
        let mut alone: Vec<(&str, Settings, BTreeSet<String>)> = Vec::new();
        for (key, value) in takes {
            let set = (Setting::find(key).expect(key).read)(value).expect(key);
            let Ok((words, asked)) = first(protocol, *suite, &set) else { continue };
            assert_ne!(asked, request, "{name} --{key} {value} changes nothing");
            let new: BTreeSet<String> = words.difference(&base).cloned().collect();
            assert!(
                !new.is_empty(),
                "{name} --{key} {value}: a departure that differs does not say: {words:?}"
            );
            alone.push((key, set, new));
        }
        assert!(alone.len() >= 7, "{name}: only {} settings were changed", alone.len());
        for (at, (key, set, new)) in alone.iter().enumerate() {
            for (other, also, more) in &alone[at + 1..] {
                let Ok((words, _)) = first(protocol, *suite, &set.clone().over(also.clone())) else {
                    continue;
                };
                for expected in new.union(more) {
                    let said = words.iter().any(|word| about(word) == about(expected));
                    assert!(said, "{name} --{key} with --{other}: {expected:?} is lost: {words:?}");
                }
                compared += 1;
            }
        }
    }
    assert!(compared > 300, "{compared} pairs");
}
