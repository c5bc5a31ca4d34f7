//! cosFormer, Table 5 as grouped bars: how many times as fast as full attention, measured here above what was printed. Steps per second
//! of different machines say nothing beside each other, ratios do.

use std::io;

use super::{conditions, in_order};
use crate::report::chart::{Bar, BarPanel, Chart, bars};
use crate::report::ratio::Ratio;
use crate::{Outcome, Pass, Published, Row};

/// What the others are compared with.
const BASELINE: &str = "full";

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
        if here.iter().any(|row| row.model == BASELINE) {
            panels.push(panel(&here, format!("{word}, measured"), measured));
            panels.push(panel(&here, format!("{word}, published"), |row| row.published));
        }
    }
    if panels.is_empty() {
        return Ok(Vec::new());
    }
    let subtitle = format!("measured: {}; published: batch 32 on one A6000", conditions(first));
    let title = ("Speed relative to full attention (cosFormer, Table 5)", subtitle.as_str());
    Ok(vec![bars("cos-table5", title, ("length", "ratio"), &panels)?])
}

/// The measured value as a source would print it; nothing where nothing was tried.
fn measured(row: &Row) -> Option<Published> {
    match (row.value, row.outcome) {
        (Some(value), Outcome::Ok) => Some(Published::Value(value)),
        (_, Outcome::Ok | Outcome::Unsupported | Outcome::Interrupted | Outcome::Planned) => None,
        (_, outcome) => Some(Published::Outcome(outcome)),
    }
}

fn panel(rows: &[&Row], title: String, number: fn(&Row) -> Option<Published>) -> BarPanel {
    let mut lens: Vec<u64> = rows.iter().filter_map(|row| row.len).collect();
    lens.sort_unstable();
    lens.dedup();
    let at = |label: &str, len: u64| {
        let row = rows.iter().find(|row| row.label() == label && row.len == Some(len))?;
        number(row)
    };
    let bar = |label: &str, len: u64| match (at(label, len), at(BASELINE, len)) {
        (Some(Published::Value(own)), Some(Published::Value(base))) => {
            Ratio::exact(own, base).map_or(Bar::Empty, |ratio| Bar::Value(ratio.value))
        }
        (Some(Published::Outcome(outcome)), _) => Bar::Cross(outcome.word().to_owned()),
        _ => Bar::Empty,
    };
    let gone = lens.iter().filter(|len| matches!(at(BASELINE, **len), Some(Published::Outcome(_))));
    let gone: Vec<String> = gone.map(u64::to_string).collect();
    let title = if gone.is_empty() { title } else { format!("{title} (full: oom at {})", gone.join(", ")) };
    let labels: Vec<String> = rows.iter().map(|row| row.label()).collect();
    let others = labels.iter().map(String::as_str).filter(|label| *label != BASELINE);
    let series = in_order(others).into_iter().map(|label| {
        let bars = lens.iter().map(|len| bar(&label, *len)).collect();
        (label, bars)
    });
    BarPanel { title, series: series.collect(), groups: lens.iter().map(u64::to_string).collect() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ratios_are_measured_above_published() {
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
            row("linear", 1024, Some(4.0), Published::Value(63.425)),
        ];
        let smaller = Row { batch: Some(1), ..row("full", 1024, Some(16.0), Published::Value(25.37)) };
        // first, where it would be taken
        let rows: Vec<Row> =
            std::iter::once(smaller).chain(rows.map(|row| Row { batch: Some(32), ..row })).collect();
        let rows: Vec<&Row> = rows.iter().collect();
        let charts = draw(&rows).unwrap();
        let csv = &charts[0].csv;
        assert!(!csv.contains(",0.25,"), "another batch size: {csv}");
        for line in [
            "\"Inference, measured (full: oom at 3072)\",linear,1024,2,ok",
            "\"Inference, published (full: oom at 3072)\",linear,1024,2.5,ok",
            "\"Inference, published (full: oom at 3072)\",linear,3072,,\n",
        ] {
            assert!(csv.contains(line), "{line} in {csv}");
        }
    }
}
