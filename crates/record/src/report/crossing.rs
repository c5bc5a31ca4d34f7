//! From which length on a mechanism needs less time or memory than full attention, by measurement.

use std::io;

use crate::Row;
use crate::report::chart::{Chart, Crossing, DotPanel, Panel, Quantity, Series, dots, figure};
use crate::report::place;
use crate::report::table::Table;

/// Full attention in classifiers and in language models.
const FULL: [&str; 2] = ["full", "transformer-xl"];

/// The crossing of `series` below `full`: both need the lengths that are compared.
fn crossing(series: &Series, full: &Series) -> Option<Crossing> {
    let shared: Vec<(f64, f64)> = (series.points.iter())
        .filter_map(|point| {
            let other = full.points.iter().find(|other| other.x == point.x)?;
            Some((point.x, (point.y / other.y).ln()))
        })
        .collect();
    // where full attention ran out and the mechanism did not, the mechanism is below it
    let survived =
        series.points.iter().any(|point| full.missing.iter().any(|gone| gone.cross && gone.x <= point.x));
    let (first, last) = (shared.first()?, shared.last()?);
    let above = shared.iter().rposition(|(_, ratio)| *ratio >= 0.0);
    match above {
        None => Some(Crossing::Always(first.0)),
        Some(index) if index + 1 < shared.len() => {
            let ((x0, r0), (x1, r1)) = (shared[index], shared[index + 1]);
            let part = r0 / (r0 - r1);
            Some(Crossing::From((x0.ln() + part * (x1.ln() - x0.ln())).exp()))
        }
        Some(_) if survived => Some(Crossing::From(last.0)),
        Some(_) => Some(Crossing::Never(last.0)),
    }
}

/// The crossings in each panel that has full attention and at least two lengths.
fn panels(rows: &[Row]) -> Vec<DotPanel> {
    let [time, memory] = Quantity::CHARTS.map(|quantity| figure(rows, quantity));
    let mut all: Vec<DotPanel> = Vec::new();
    for (figure, is_time) in [(time, true), (memory, false)] {
        let Some(figure) = figure else { continue };
        for panel in &figure.panels {
            let Some(full) = panel.series.iter().find(|series| FULL.contains(&series.label.as_str())) else {
                continue;
            };
            if full.points.len() < 2 {
                continue;
            }
            let title = if panel.title.is_empty() { figure.subtitle.clone() } else { panel.title.clone() };
            let new = || DotPanel { title: title.clone(), rows: Vec::new() };
            add(place(&mut all, |known| known.title == title, new), panel, full, is_time);
        }
    }
    all.retain(|panel| !panel.rows.is_empty());
    all
}

fn add(dots: &mut DotPanel, panel: &Panel, full: &Series, is_time: bool) {
    for series in panel.series.iter().filter(|series| series.label != full.label) {
        let Some(found) = crossing(series, full) else { continue };
        let row = place(&mut dots.rows, |row| row.0 == series.label, || (series.label.clone(), None, None));
        if is_time { row.1 = Some(found) } else { row.2 = Some(found) }
    }
}

const TITLE: &str = "Crossover length against full attention";

/// The chart `<prefix>-crossing` of the rows of one run; nothing without full attention at two lengths.
pub fn chart(rows: &[Row], prefix: &str) -> io::Result<Option<Chart>> {
    let panels = panels(rows);
    if panels.is_empty() {
        return Ok(None);
    }
    let subtitle = "between measured lengths along straight lines on logarithmic axes";
    dots(&format!("{prefix}-crossing"), (TITLE, subtitle), &panels).map(Some)
}

/// The crossings as a table; nothing without full attention at two lengths.
pub fn table(rows: &[Row]) -> Option<Table> {
    let panels = panels(rows);
    let text = |crossing: Option<Crossing>| crossing.map_or_else(String::new, Crossing::text);
    let lines = panels.iter().flat_map(|panel| {
        panel
            .rows
            .iter()
            .map(|(label, time, memory)| vec![label.clone(), panel.title.clone(), text(*time), text(*memory)])
    });
    let lines: Vec<Vec<String>> = lines.collect();
    (!lines.is_empty()).then(|| Table {
        title: TITLE.to_owned(),
        columns: ["model", "measured", "time", "memory"].map(str::to_owned).to_vec(),
        numbers: 2,
        rows: lines,
        notes: vec![
            "≤: cheaper already at the shortest measured length; >: not cheaper up to the longest."
                .to_owned(),
        ],
        ..Table::default()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::chart::{Measured, Missing};

    fn series(values: &[(f64, f64)], gone: Option<f64>) -> Series {
        let missing = gone.map(|x| Missing { x, outcome: "oom".to_owned(), cross: true });
        Series {
            points: values.iter().map(|&(x, y)| Measured { x, y, interval: None }).collect(),
            missing: missing.into_iter().collect(),
            ..Series::default()
        }
    }

    #[test]
    fn crossings_are_found_between_lengths() {
        let full = series(&[(512.0, 1.0), (1024.0, 4.0), (2048.0, 16.0)], None);
        let steady = series(&[(512.0, 2.0), (1024.0, 2.0), (2048.0, 2.0)], None);
        let Some(Crossing::From(len)) = crossing(&steady, &full) else { panic!("no crossing") };
        assert!((len - 512.0 * 2f64.sqrt()).abs() < 1e-9, "{len}");
        let fast = series(&[(512.0, 0.5), (1024.0, 0.5)], None);
        assert_eq!(crossing(&fast, &full), Some(Crossing::Always(512.0)));
        let slow = series(&[(512.0, 3.0), (1024.0, 9.0), (2048.0, 20.0)], None);
        assert_eq!(crossing(&slow, &full), Some(Crossing::Never(2048.0)));
        let stopped = series(&[(512.0, 1.0), (1024.0, 4.0)], Some(2048.0));
        assert_eq!(crossing(&slow, &stopped), Some(Crossing::From(1024.0)));
        assert_eq!(crossing(&slow, &series(&[], None)), None);
    }
}
