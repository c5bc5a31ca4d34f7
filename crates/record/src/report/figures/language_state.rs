//! Language models: validation loss against the bytes that decoding keeps.

use std::collections::BTreeMap;
use std::io;

use super::{conditions, in_order};
use crate::report::chart::{Chart, Tradeoff, Unit, tradeoffs};
use crate::{Outcome, Row};

/// Validation losses of language models and what they are called.
const LOSSES: &[(&str, &str)] = &[
    ("validation_bpc", "validation loss, bits per character (less is better)"),
    ("validation_loss", "validation loss, nat per token (less is better)"),
];

/// Fewest mechanisms that a chart is drawn for.
const LEAST: usize = 3;

/// A chart for each loss, task and group of runs with the same settings, a point per model (the mean of its seeds). Models that
/// do not decode hold no state and are left out.
pub fn draw(rows: &[&Row]) -> io::Result<Vec<Chart>> {
    let mut charts = Vec::new();
    for (metric, axis) in LOSSES {
        let rows = rows.iter().copied().filter(|row| {
            let decodes = row.state_bytes.is_some_and(|bytes| bytes > 0);
            row.metric == *metric && row.outcome == Outcome::Ok && decodes && is_language(row)
        });
        let rows: Vec<&Row> = rows.collect();
        let groups: Vec<String> = rows.iter().map(|row| group(row)).collect();
        for group in in_order(groups.iter().map(String::as_str)) {
            let here: Vec<&Row> = rows.iter().copied().filter(|row| self::group(row) == group).collect();
            let points = points(&here);
            if points.len() < LEAST {
                continue;
            }
            let task = here[0].task.as_deref().unwrap_or_default();
            let subtitle = format!("{task} · length {} · {}", here[0].len.unwrap_or(0), conditions(here[0]));
            charts.extend(tradeoffs(
                &format!("state-{}", group.replace(' ', "-")),
                ("Loss of language models against state", &subtitle),
                (Unit::Bytes, ("bytes that decoding keeps per sequence, all layers", axis)),
                &points,
                &[],
            )?);
        }
    }
    Ok(charts)
}

fn is_language(row: &Row) -> bool {
    matches!(row.protocol.as_str(), "charlm" | "wordlm")
}

/// What models of one chart have in common.
fn group(row: &Row) -> String {
    let preset = row.preset.as_deref().unwrap_or_default();
    format!("{} {}", row.suite.as_deref().unwrap_or(preset), row.task.as_deref().unwrap_or_default())
}

/// A point per model: its state and the mean of its losses.
fn points(rows: &[&Row]) -> Vec<Tradeoff> {
    let mut models: BTreeMap<String, (f64, Vec<f64>)> = BTreeMap::new();
    for row in rows {
        let (Some(bytes), Some(value)) = (row.state_bytes, row.value) else { continue };
        models.entry(row.label()).or_insert((bytes as f64, Vec::new())).1.push(value);
    }
    let labels: Vec<String> = rows.iter().map(|row| row.label()).collect();
    let point = |label: String| {
        let (bytes, values) = models.get(&label)?;
        let mean = values.iter().sum::<f64>() / values.len() as f64;
        Some(Tradeoff { label, points: vec![(*bytes, mean)], published: false })
    };
    in_order(labels.iter().map(String::as_str)).into_iter().filter_map(point).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(model: &str, seed: u64, bytes: Option<u64>, value: f64) -> Row {
        let row = Row {
            task: Some("sample".to_owned()),
            preset: Some("charlm-small".to_owned()),
            seed: Some(seed),
            len: Some(256),
            state_bytes: bytes,
            ..Row::new("charlm", model)
        };
        row.with("validation_bpc", "bit", Some(value)).with_outcome(Outcome::Ok, None)
    }

    #[test]
    fn a_model_is_a_point_at_its_state_and_its_mean_loss() {
        let mut rows = vec![row("full", 1, Some(524_288), 3.0), row("full", 2, Some(524_288), 3.5)];
        rows.extend([row("linear", 1, Some(32_768), 2.5), row("bigbird", 1, None, 1.0)]);
        let drawn = |rows: &[Row]| draw(&rows.iter().collect::<Vec<_>>()).unwrap();
        assert!(drawn(&rows).is_empty(), "two models are no chart");
        rows.push(row("lru", 1, Some(2048), 2.0));
        let charts = drawn(&rows);
        assert_eq!(charts.len(), 1);
        assert_eq!(charts[0].name, "state-charlm-small-sample");
        assert!(charts[0].csv.contains("\nfull,measured,524288,3.25\n"), "{}", charts[0].csv);
        assert!(charts[0].csv.contains("\nlru,measured,2048,2\n") && !charts[0].csv.contains("bigbird"));
    }
}
