//! cosFormer, Table 5 as grouped bars: steps per second by length, measured here above what was printed.

use std::io;

use super::{conditions, in_order};
use crate::report::chart::{Bar, BarPanel, Chart, bars};
use crate::{Outcome, Pass, Published, Row};

pub fn draw(rows: &[&Row]) -> io::Result<Vec<Chart>> {
    let wanted = |row: &&&Row| row.suite.as_deref() == Some("cos-table5") && row.metric == "steps_per_second";
    let mut rows: Vec<&Row> = rows.iter().filter(wanted).copied().collect();
    // bars of one batch size only: the largest, which is nearest to the paper's
    let batch = rows.iter().filter(|row| row.outcome == Outcome::Ok).filter_map(|row| row.batch).max();
    rows.retain(|row| row.batch == batch);
    let Some(first) = rows.first() else { return Ok(Vec::new()) };
    let mut panels = Vec::new();
    for (pass, word) in [(Pass::Infer, "Inference"), (Pass::Train, "Training")] {
        let here: Vec<&Row> = rows.iter().filter(|row| row.pass == Some(pass)).copied().collect();
        if here.is_empty() {
            continue;
        }
        panels.push(panel(&here, format!("{word}, measured"), |row| match (row.value, row.outcome) {
            (Some(value), Outcome::Ok) => Bar::Value(value),
            (_, Outcome::Ok | Outcome::Unsupported | Outcome::Interrupted | Outcome::Planned) => Bar::Empty,
            (_, outcome) => Bar::Cross(outcome.word().to_owned()),
        }));
        panels.push(panel(&here, format!("{word}, published"), |row| match row.published {
            Some(Published::Value(value)) => Bar::Value(value),
            Some(Published::Outcome(outcome)) => Bar::Cross(outcome.word().to_owned()),
            None => Bar::Empty,
        }));
    }
    let subtitle = format!("measured: {}; published: batch 32 on one A6000", conditions(first));
    let title = ("Speed on byte-level text (cosFormer, Table 5)", subtitle.as_str());
    Ok(vec![bars("cos-table5", title, ("length", "steps per second"), &panels)?])
}

fn panel(rows: &[&Row], title: String, bar: fn(&Row) -> Bar) -> BarPanel {
    let mut lens: Vec<u64> = rows.iter().filter_map(|row| row.len).collect();
    lens.sort_unstable();
    lens.dedup();
    let labels: Vec<String> = rows.iter().map(|row| row.label()).collect();
    let series = in_order(labels.iter().map(String::as_str)).into_iter().map(|label| {
        let at = |len: &u64| rows.iter().find(|row| row.label() == label && row.len == Some(*len));
        let bars = lens.iter().map(|len| at(len).map_or(Bar::Empty, |row| bar(row))).collect();
        (label, bars)
    });
    BarPanel { title, series: series.collect(), groups: lens.iter().map(u64::to_string).collect() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn measured_stands_above_published() {
        let row = |model: &str, len: u64, value: Option<f64>, published| Row {
            suite: Some("cos-table5".to_owned()),
            pass: Some(Pass::Infer),
            len: Some(len),
            published: Some(published),
            ..Row::new("speed", model)
                .with("steps_per_second", "1/s", value)
                .with_outcome(if value.is_some() { Outcome::Ok } else { Outcome::Oom }, None)
        };
        let rows = [
            row("full", 1024, Some(2.0), Published::Value(25.37)),
            row("full", 3072, None, Published::Outcome(Outcome::Oom)),
            row("linear", 1024, Some(4.0), Published::Value(68.1)),
        ];
        let smaller = Row { batch: Some(1), ..row("full", 1024, Some(16.0), Published::Value(25.37)) };
        // first, where it would be taken
        let rows: Vec<Row> =
            std::iter::once(smaller).chain(rows.map(|row| Row { batch: Some(32), ..row })).collect();
        let rows: Vec<&Row> = rows.iter().collect();
        let charts = draw(&rows).unwrap();
        let csv = &charts[0].csv;
        assert!(!csv.contains(",16,"), "another batch size: {csv}");
        for line in [
            "\"Inference, measured\",full,3072,,oom",
            "\"Inference, published\",full,1024,25.37,ok",
            "\"Inference, measured\",linear,3072,,\n",
        ] {
            assert!(csv.contains(line), "{line} in {csv}");
        }
    }
}
