//! Recall and state tracking: accuracy against state bytes, against the time of a decoded token, against length; and how much the
//! learning rate matters.

use std::collections::BTreeMap;
use std::io;

use super::{conditions, in_order};
use crate::config::suite::Suite;
use crate::report::chart::{Chart, Tradeoff, Unit, tradeoffs};
use crate::{FLOOR, Outcome, Row};

/// Charts of every task and suite that rows of `recall` are about.
pub fn draw(rows: &[&Row]) -> io::Result<Vec<Chart>> {
    let rows: Vec<&Row> =
        rows.iter().filter(|row| row.protocol == "recall" && row.outcome == Outcome::Ok).copied().collect();
    let mut charts = Vec::new();
    for group in in_order(
        rows.iter()
            .filter(|row| row.model != FLOOR)
            .map(|row| group(row))
            .collect::<Vec<_>>()
            .iter()
            .map(String::as_str),
    ) {
        let here: Vec<&Row> =
            rows.iter().filter(|row| self::group(row) == group && row.model != FLOOR).copied().collect();
        let task = task(here[0]);
        let floors: Vec<&Row> =
            rows.iter().filter(|row| row.model == FLOOR && self::task(row) == task).copied().collect();
        let subtitle = format!("{task} · {}", conditions(here[0]));
        let up = "accuracy on the test split, %";
        let at = |what: &str| format!("recall-{}-{what}", group.replace(' ', "-"));
        let floor = floor(&floors);
        let states = lines(&here, |row| row.state_bytes.map(|bytes| bytes as f64));
        let states: Vec<Tradeoff> = states.into_iter().chain(published(&here)).collect();
        charts.extend(tradeoffs(
            &at("state"),
            ("Accuracy against state", &subtitle),
            (Unit::Bytes, ("bytes that decoding keeps per sequence, all layers", up)),
            &states,
            &floor,
        )?);
        let times: BTreeMap<String, f64> = here
            .iter()
            .filter(|row| row.metric == "decode_time")
            .filter_map(|row| Some((cell(row), row.value?)))
            .collect();
        let context =
            here.iter().find(|row| row.metric == "decode_time").and_then(|row| row.len).unwrap_or(0);
        charts.extend(tradeoffs(
            &at("time"),
            ("Accuracy against the time of a decoded token", &subtitle),
            (Unit::Seconds, (&format!("median time of a token behind {context} others, one sequence"), up)),
            &lines(&here, |row| times.get(&cell(row)).copied()),
            &floor,
        )?);
        charts.extend(tradeoffs(
            &at("length"),
            (
                "Accuracy against length",
                &format!("{subtitle}; mean over the segments of a length and over seeds"),
            ),
            (Unit::Length, ("length, tokens", "accuracy on a test segment, %")),
            &by(&here, "segment_accuracy", |row| row.len.map(|len| len as f64)),
            &[],
        )?);
        charts.extend(tradeoffs(
            &at("rate"),
            ("Accuracy against the learning rate", &format!("{subtitle}; validation split, mean over seeds")),
            (Unit::Number, ("learning rate", "accuracy on the validation split, %")),
            &by(&here, "rate_validation_accuracy", |row| {
                row.task.as_deref()?.split_once("rate=")?.1.parse().ok()
            }),
            &[],
        )?);
    }
    Ok(charts)
}

/// The task of a row: what is behind a blank names a part of it.
fn task(row: &Row) -> &str {
    row.task.as_deref().unwrap_or_default().split(' ').next().unwrap_or_default()
}

fn group(row: &Row) -> String {
    let preset = row.preset.as_deref().unwrap_or_default();
    format!("{} {}", row.suite.as_deref().unwrap_or(preset), task(row))
}

/// What tells trained models apart, seeds included.
fn cell(row: &Row) -> String {
    format!("{} {:?} {:?}", row.label(), row.settings, row.seed)
}

/// A line per mechanism: its variants and sizes by `cost`, the mean over seeds of each.
fn lines(rows: &[&Row], cost: impl Fn(&Row) -> Option<f64>) -> Vec<Tradeoff> {
    let rows: Vec<&&Row> = rows.iter().filter(|row| row.metric == "accuracy").collect();
    let line = |model: String| {
        let mut configurations: BTreeMap<String, Vec<(f64, f64)>> = BTreeMap::new();
        for row in rows.iter().filter(|row| row.model == model) {
            let (Some(cost), Some(value)) = (cost(row).filter(|cost| *cost > 0.0), row.value) else {
                continue;
            };
            configurations
                .entry(format!("{} {:?}", row.label(), row.settings))
                .or_default()
                .push((cost, value));
        }
        Tradeoff { label: model, points: sorted(configurations.into_values()), published: false }
    };
    in_order(rows.iter().map(|row| row.model.as_str()))
        .into_iter()
        .map(line)
        .filter(|line| !line.points.is_empty())
        .collect()
}

/// A line per variant over what `place` says, the mean of the rows of a place.
fn by(rows: &[&Row], metric: &str, place: impl Fn(&Row) -> Option<f64>) -> Vec<Tradeoff> {
    let rows: Vec<&&Row> = rows.iter().filter(|row| row.metric == metric).collect();
    let line = |label: String| {
        let mut places: BTreeMap<u64, Vec<(f64, f64)>> = BTreeMap::new();
        for row in rows.iter().filter(|row| row.label() == label) {
            let (Some(x), Some(value)) = (place(row).filter(|x| *x > 0.0), row.value) else { continue };
            places.entry(x.to_bits()).or_default().push((x, value));
        }
        Tradeoff { label, points: sorted(places.into_values()), published: false }
    };
    let labels: Vec<String> = rows.iter().map(|row| row.label()).collect();
    in_order(labels.iter().map(String::as_str))
        .into_iter()
        .map(line)
        .filter(|line| !line.points.is_empty())
        .collect()
}

/// The means of `groups` in the order of x.
fn sorted(groups: impl Iterator<Item = Vec<(f64, f64)>>) -> Vec<(f64, f64)> {
    let mean = |group: Vec<(f64, f64)>| {
        let count = group.len() as f64;
        let sum = group.iter().fold((0.0, 0.0), |sum, point| (sum.0 + point.0, sum.1 + point.1));
        (sum.0 / count, sum.1 / count)
    };
    let mut points: Vec<(f64, f64)> = groups.map(mean).collect();
    points.sort_by(|a, b| a.0.total_cmp(&b.0));
    points
}

/// What the suite of `rows` prints of its configurations: the bytes that the source counts, and its accuracies.
fn published(rows: &[&Row]) -> Vec<Tradeoff> {
    let suite = rows.iter().find_map(|row| row.suite.as_deref()).and_then(|name| Suite::load(name).ok());
    let Some(suite) = suite else { return Vec::new() };
    let task = task(rows[0]);
    let value = |row: &crate::config::suite::SuiteRow, metric| row.table(metric)?.at(task, 0)?.value();
    let mut all: BTreeMap<&str, Vec<(f64, f64)>> = BTreeMap::new();
    for row in &suite.rows {
        if let (Some(bytes), Some(accuracy)) = (value(row, "state_bytes"), value(row, "accuracy")) {
            all.entry(&row.model.name).or_default().push((bytes, accuracy));
        }
    }
    let line = |(model, mut points): (&str, Vec<(f64, f64)>)| {
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
        Tradeoff { label: format!("{model}, published"), points, published: true }
    };
    all.into_iter().map(line).collect()
}

/// The best of the rules that do not solve the task.
fn floor(rows: &[&Row]) -> Vec<(String, f64)> {
    let values = rows.iter().filter(|row| row.metric == "accuracy").filter_map(|row| {
        let value = row.value.filter(|value| *value < 100.0)?;
        Some((format!("floor: {}", row.variant.as_deref().unwrap_or_default()), value))
    });
    values.max_by(|a, b| a.1.total_cmp(&b.1)).into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(model: &str, task: &str, metric: &str, value: f64, seed: u64) -> Row {
        let row = Row {
            task: Some(task.to_owned()),
            preset: Some("recall-small".to_owned()),
            seed: Some(seed),
            len: Some(128),
            state_bytes: Some(if model == "full" { 65_536 } else { 4096 }),
            ..Row::new("recall", model)
        };
        row.with(metric, "%", Some(value)).with_outcome(Outcome::Ok, None)
    }

    #[test]
    fn accuracy_stands_against_state_time_length_and_rate() {
        let mut rows = Vec::new();
        for (model, accuracy) in [("full", 99.5), ("linear", 60.0)] {
            for seed in 0..2 {
                rows.push(row(model, "mqar", "accuracy", accuracy + seed as f64 * 0.2, seed));
                rows.push(Row { unit: "s".to_owned(), ..row(model, "mqar", "decode_time", 1e-5, seed) });
                for (len, segment) in [(64, "mqar 64:4"), (128, "mqar 128:32")] {
                    rows.push(Row {
                        len: Some(len),
                        ..row(model, segment, "segment_accuracy", accuracy - len as f64 / 64.0, seed)
                    });
                }
                rows.push(row(model, "mqar rate=1e-3", "rate_validation_accuracy", 50.0, seed));
            }
        }
        let rule = |name: &str, value| Row {
            variant: Some(name.to_owned()),
            ..row(FLOOR, "mqar", "accuracy", value, 0)
        };
        rows.extend([rule("look-up", 100.0), rule("same-order", 9.6), rule("window-16", 14.0)]);
        let rows: Vec<&Row> = rows.iter().collect();
        let charts = draw(&rows).unwrap();
        let names: Vec<&str> = charts.iter().map(|chart| chart.name.as_str()).collect();
        let expected =
            ["state", "time", "length", "rate"].map(|what| format!("recall-recall-small-mqar-{what}"));
        assert_eq!(names, expected);
        assert!(charts[0].csv.contains("\nfull,measured,65536,99.6\n"), "{}", charts[0].csv);
        assert!(charts[0].csv.ends_with("floor: window-16,floor,,14\n"), "the best that does not solve it");
        assert!(charts[1].csv.contains("\nlinear,measured,0.00001,60.1\n"), "{}", charts[1].csv);
        assert!(
            charts[2].csv.contains("\nfull,measured,64,98.5\nfull,measured,128,97.5\n"),
            "{}",
            charts[2].csv
        );
        assert!(charts[3].csv.contains("\nlinear,measured,0.001,50\n"), "{}", charts[3].csv);
        assert!(draw(&[]).unwrap().is_empty());
    }
}
