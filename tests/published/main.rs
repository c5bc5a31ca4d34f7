//! Every published number of the suites against a table that was entered from the papers (`numbers.csv`): row, model
//! with its knobs, preset, metric and task. And every cell of every suite can be built.

use std::collections::BTreeSet;

use effattn::attention::choose::choose;
use effattn::config::settings::Settings;
use effattn::config::suite::{BUILTIN_SUITES, PublishedTable, Suite};
use effattn::protocol;
use effattn::protocol::grid::{Grid, GridFlags, resolve};
use effattn::protocol::trained_metrics;
use effattn::record::{Published, Row};
use effattn::report::paper::{PaperSource, paper};

/// A number: suite, model, preset, metric, key, value.
type Number = [String; 6];

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
        [suite, model, preset, metric, key, value]
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
                        row.has(task),
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

/// What the papers print.
fn entered() -> Vec<Number> {
    let mut reader = csv::Reader::from_reader(include_str!("numbers.csv").as_bytes());
    let read = |line: Result<csv::StringRecord, csv::Error>| {
        let line = line.expect("a line of seven fields");
        let text = |index: usize| line[index].to_owned();
        let model = if &line[2] == "-" { text(2) } else { model(&line[2]) };
        let value = line[6].parse::<f64>().map_or_else(|_| text(6), |value| value.to_string());
        [text(0), model, text(3), text(4), text(5), value]
    };
    reader.records().map(read).collect()
}

#[test]
fn every_published_number_stands_beside_its_model() {
    let count = |mut all: Vec<Number>| {
        all.sort();
        all
    };
    let (here, there) = (count(embedded()), count(entered()));
    let only = |a: &[Number], b: &[Number]| {
        let b: BTreeSet<&Number> = b.iter().collect();
        a.iter().filter(|number| !b.contains(number)).cloned().collect::<Vec<_>>()
    };
    assert!(only(&here, &there).is_empty(), "beside the wrong thing: {:#?}", only(&here, &there));
    assert!(only(&there, &here).is_empty(), "not in a suite: {:#?}", only(&there, &here));
    assert_eq!(here.len(), there.len(), "a number stands twice");
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
        let stands = |label: &str, value: &Published| {
            let value = match value {
                Published::Value(value) => {
                    let digits = value.to_string().split_once('.').map_or(0, |(_, digits)| digits.len());
                    format!("/ {value:.0$}", digits.max(2))
                }
                Published::Outcome(outcome) => format!("/ {outcome}"),
            };
            table
                .rows
                .iter()
                .any(|row| row[0].starts_with(label) && row.iter().any(|cell| cell.contains(&value)))
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
                            stands(label, value),
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
