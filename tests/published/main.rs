//! Every published number of the suites against a table that was entered from the papers (`numbers.csv`): row, model
//! with its knobs, preset, metric, task, and where it was read, if not in the table's own paper. And every cell of every
//! suite can be built.

mod differs;

use std::collections::{BTreeMap, BTreeSet};

use effattn::attention::choose::choose;
use effattn::config::settings::Settings;
use effattn::config::suite::{BUILTIN_SUITES, PublishedTable, Suite};
use effattn::protocol;
use effattn::protocol::grid::{Grid, GridFlags};
use effattn::protocol::resolve;
use effattn::protocol::trained_metrics;
use effattn::record::{Published, Row};
use effattn::report::paper::{PaperSource, paper};

/// A number: suite, model, preset, metric, key, value, and where it was read, if not in the suite's source.
pub type Number = [String; 7];

/// Mechanism and knobs in the order of the table, defaults left out.
fn model(text: &str) -> String {
    let mut choices = choose(&text.parse().expect(text)).unwrap_or_else(|error| panic!("{text}: {error}"));
    assert_eq!(choices.len(), 1, "{text}");
    choices.remove(0).label()
}

fn numbers(suite: &Suite, table: &PublishedTable, model: &str, preset: &str) -> Vec<Number> {
    let lens = suite.base.len.as_ref().map_or_else(Vec::new, |len| len.0.clone());
    let of = |key: &String, index: usize, value: &Published| {
        // `infer-384` has its length in its name
        let own = key.rsplit_once('-').filter(|(_, len)| lens.iter().any(|known| known.to_string() == *len));
        let key = match (own, lens.get(index)) {
            (Some((key, len)), _) => format!("{key}@{len}"),
            (None, Some(len)) => format!("{key}@{len}"),
            (None, None) => key.clone(),
        };
        let value = match value {
            Published::Value(value) => value.to_string(),
            Published::Outcome(outcome) => outcome.to_string(),
        };
        let [suite, model, preset, metric] = [&suite.name, model, preset, &table.metric].map(str::to_owned);
        [suite, model, preset, metric, key, value, table.source.clone().unwrap_or_default()]
    };
    let values = table.values.iter();
    values
        .flat_map(|(key, values)| values.iter().enumerate().map(move |(i, value)| of(key, i, value)))
        .collect()
}

/// What the suites have.
fn embedded() -> Vec<Number> {
    let mut all = Vec::new();
    for (name, _) in BUILTIN_SUITES {
        let suite = Suite::load(name).expect(name);
        let base = suite.base.preset.clone().unwrap_or_default();
        for row in &suite.rows {
            let preset = row.set.preset.clone().or_else(|| suite.numbers_of.clone()).unwrap_or(base.clone());
            for table in &row.published {
                for key in table.values.keys().filter(|_| row.set.task.is_some()) {
                    let task = key.split('-').next().unwrap_or(key);
                    assert!(
                        row.has(task) || row.has(key),
                        "{name}: {} has a number for {key}, which it does not run",
                        row.label
                    );
                }
                all.extend(numbers(&suite, table, &model(&row.model.to_string()), &preset));
            }
        }
        for line in &suite.printed {
            all.extend(line.published.iter().flat_map(|table| numbers(&suite, table, "-", "-")));
        }
    }
    all
}

/// The table of a page, which no suite has: its protocols are not the program's.
const PAGE: &str = "docs/mixers.md";

/// What the papers print, in suites and on [`PAGE`].
fn entered(numbers: &str) -> Vec<Number> {
    let mut reader = csv::Reader::from_reader(numbers.as_bytes());
    let read = |line: Result<csv::StringRecord, csv::Error>| {
        let line = line.expect("a line of eight fields");
        let text = |index: usize| line[index].to_owned();
        let model = if &line[2] == "-" { text(2) } else { model(&line[2]) };
        let value = line[6].parse::<f64>().map_or_else(|_| text(6), |value| value.to_string());
        [text(0), model, text(3), text(4), text(5), value, text(7)]
    };
    reader.records().map(read).collect()
}

/// The texts of every number of `suites` by its metric and value.
fn as_printed(suites: &[&str]) -> BTreeMap<(String, String), BTreeSet<String>> {
    let mut reader = csv::Reader::from_reader(include_str!("numbers.csv").as_bytes());
    let mut texts: BTreeMap<(String, String), BTreeSet<String>> = BTreeMap::new();
    for line in reader.records().map(|line| line.expect("a line of eight fields")) {
        if let Some(value) = line[6].parse::<f64>().ok().filter(|_| suites.contains(&&line[0])) {
            texts.entry((line[4].to_owned(), value.to_string())).or_default().insert(line[6].to_owned());
        }
    }
    texts
}

#[test]
fn every_published_number_stands_beside_its_model() {
    let found = differences(include_str!("numbers.csv"));
    assert!(found.is_empty(), "beside the wrong thing, or in no suite: {found:#?}");
}

/// Numbers that only the suites have or only `numbers`, the text of the table.
pub fn differences(numbers: &str) -> Vec<Number> {
    let sorted = |mut all: Vec<Number>| {
        all.sort();
        all
    };
    let there = entered(numbers).into_iter().filter(|number| number[0] != PAGE).collect();
    let (here, there) = (sorted(embedded()), sorted(there));
    let only = |a: &[Number], b: &[Number]| {
        let b: BTreeSet<&Number> = b.iter().collect();
        a.iter().filter(|number| !b.contains(number)).cloned().collect::<Vec<_>>()
    };
    let found = [only(&here, &there), only(&there, &here)].concat();
    assert!(!found.is_empty() || here.len() == there.len(), "a number stands twice");
    found
}

#[test]
fn the_published_table_of_the_page_is_what_was_entered() {
    let page = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/docs/mixers.md")).unwrap();
    let (_, table) = page.split_once("## Published on the Long Range Arena").unwrap();
    let tasks = ["listops", "text", "retrieval", "image", "pathfinder32", "pathfinder128"];
    let mut printed = Vec::new();
    for line in table.lines().filter(|line| line.starts_with("| ") && !line.starts_with("| row")) {
        let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
        assert!(cells.len() == 9 && !cells[8].is_empty(), "every row says its protocol: {line}");
        for (task, cell) in tasks.iter().zip(&cells[2..8]).filter(|(_, cell)| **cell != "-") {
            let value = cell.parse::<f64>().map_or_else(|_| (*cell).to_owned(), |value| value.to_string());
            let model = model(cells[1].trim_matches('`'));
            printed
                .push([PAGE, model.as_str(), "-", "accuracy", *task, value.as_str(), ""].map(str::to_owned));
        }
    }
    let entered: Vec<Number> =
        entered(include_str!("numbers.csv")).into_iter().filter(|number| number[0] == PAGE).collect();
    assert_eq!(printed, entered);
    assert!(printed.len() > 30);
}

/// The rows of the cells of `suite`, run with `preset`; none where it is drawn and not run.
fn planned(suite: &Suite, preset: Option<&str>) -> Vec<Row> {
    let Some(protocol) = protocol::find(&suite.protocol) else {
        assert_eq!(suite.protocol, "plot attention", "{}", suite.name);
        return Vec::new();
    };
    let settings = Settings { preset: preset.map(str::to_owned), ..Settings::NONE };
    let flags = GridFlags { suite: Some(suite.name.clone()), settings, ..GridFlags::default() };
    let cells = protocol.cells(&resolve(&flags, protocol).expect(&suite.name), 2).expect(&suite.name);
    cells.into_iter().map(|cell| cell.row).collect()
}

#[test]
fn every_cell_can_be_built_or_carries_no_number() {
    for (name, _) in BUILTIN_SUITES {
        let suite = Suite::load(name).expect(name);
        let others = suite.numbers_of.iter().map(|preset| Some(preset.as_str()));
        for preset in std::iter::once(None).chain(others) {
            for row in planned(&suite, preset) {
                let place = format!("{name} {preset:?}: {} {:?}", row.label(), row.task);
                assert!(row.error.is_none() || row.published.is_none(), "{place}: {:?}", row.error);
                assert!(row.error.is_none(), "{place} is unsupported and not said so: {:?}", row.error);
            }
        }
    }
}

#[test]
fn printed_flops_are_ours_to_the_last_digit_or_named() {
    let suite = Suite::load("ls-table1").expect("a suite");
    let rows = planned(&suite, None);
    let mut others = BTreeSet::new();
    for row in &suite.rows {
        let Some(table) = row.table("gflops") else { continue };
        let label = model(&row.model.to_string());
        for (task, values) in &table.values {
            let cell = rows.iter().find(|cell| cell.task.as_deref() == Some(task) && cell.label() == label);
            let flops = cell.and_then(|cell| cell.flops).expect("FLOPs") as f64 / 1e9;
            let Some(printed) = values[0].value() else { continue };
            if format!("{flops:.2}") != format!("{printed:.2}") {
                others.insert(format!("{label} {task}: {flops:.2} for {printed:.2}"));
            }
        }
    }
    assert_eq!(others.into_iter().collect::<Vec<_>>(), ["dp:dual_ln=true text: 0.68 for 0.69"]);
}

/// The cells of every row of `suite`.
fn by_row(suite: &Suite) -> Vec<Vec<Row>> {
    let protocol = protocol::find(&suite.protocol).expect(&suite.name);
    let flags = GridFlags { suite: Some(suite.name.clone()), ..GridFlags::default() };
    let grid = resolve(&flags, protocol).expect(&suite.name);
    let rows = grid.entries.into_iter().map(|pick| {
        let one = Grid { suite: grid.suite.clone(), settings: grid.settings.clone(), entries: vec![pick] };
        protocol.cells(&one, 2).expect(&suite.name).into_iter().map(|cell| cell.row).collect()
    });
    rows.collect()
}

#[test]
fn a_table_in_the_papers_layout_has_every_number_of_its_columns() {
    let metrics = trained_metrics();
    let mut seen = 0;
    for suite in BUILTIN_SUITES.iter().map(|(name, _)| Suite::load(name).expect(name)) {
        let parts: Vec<Suite> = suite.runs().map(|name| Suite::load(name).expect(name)).collect();
        let planned: Vec<Vec<Vec<Row>>> = parts
            .iter()
            .filter(|part| !part.columns.is_empty() || part.name != suite.name)
            .map(by_row)
            .collect();
        let mut sources: Vec<PaperSource> = (parts.iter().zip(&planned))
            .map(|(suite, planned)| PaperSource { suite, planned, rows: &[], metrics: &metrics, others: &[] })
            .collect();
        if suite.columns.is_empty() {
            continue;
        }
        let own = sources.remove(0);
        let table = paper(&PaperSource { others: &sources, ..own }).expect("a table").table;
        let digits = as_printed(&parts.iter().map(|part| part.name.as_str()).collect::<Vec<_>>());
        let stands = |label: &str, (metric, value): (&str, &Published)| {
            // a whole number has no point; zeros at the end of others are those of their column
            let whole = |value: f64| {
                digits[&(metric.to_owned(), value.to_string())].iter().all(|text| !text.contains('.'))
            };
            let stands = |cell: &String| {
                let printed =
                    cell.split_once("/ ").map_or("", |(_, rest)| rest).split([' ', '↓', '≈']).next();
                let printed = printed.unwrap_or_default();
                match value {
                    Published::Value(value) => {
                        printed.parse() == Ok(*value) && (!whole(*value) || !printed.contains('.'))
                    }
                    Published::Outcome(outcome) => printed == outcome.word(),
                }
            };
            table.rows.iter().any(|row| row[0].starts_with(label) && row.iter().any(stands))
        };
        for part in &parts {
            let rows = part.rows.iter().map(|row| (row.printed_as(), &row.published));
            let printed = part.printed.iter().map(|line| (line.label.as_str(), &line.published));
            for (label, table) in
                rows.chain(printed).flat_map(|(label, all)| all.iter().map(move |table| (label, table)))
            {
                let wanted = |key: &str| {
                    suite.columns.iter().any(|column| {
                        let own = column.suite.as_deref().is_none_or(|name| name == part.name);
                        let key = key == column.key
                            || key.strip_prefix(&column.key).is_some_and(|len| len.starts_with('-'));
                        own && key && column.metrics.contains(&table.metric)
                    })
                };
                for (key, values) in table.values.iter().filter(|(key, _)| wanted(key)) {
                    for value in values {
                        assert!(
                            stands(label, (&table.metric, value)),
                            "{}: {label} {} {key} {value:?}",
                            suite.name,
                            table.metric
                        );
                        seen += 1;
                    }
                }
            }
        }
    }
    assert!(seen > 300, "{seen} numbers");
}
