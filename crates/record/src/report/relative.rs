//! Time and memory as multiples of those of full attention, by mechanism and length: a line for every mechanism, where curves
//! would lie on one another.

use std::io;

use super::chart::{Chart, Figure, Quantity, RatioPanel, figure, growth, ratios};
use super::ranking::panels;
use crate::Row;

/// Dots of a panel up to which every length is drawn; beyond, the shortest and the longest.
const DOTS: usize = 64;

/// The chart `<prefix>-ratio`: how many times as fast as full attention every mechanism is. Nothing without full attention.
pub fn speed(rows: &[Row], prefix: &str) -> io::Result<Option<Chart>> {
    let Some((figure, panels)) = both(rows, Quantity::Time) else { return Ok(None) };
    let title = ("Speed relative to full attention", figure.subtitle.as_str());
    ratios(&format!("{prefix}-ratio"), title, "times as fast", &panels).map(Some)
}

/// The chart `<prefix>-memory`: peak memory as a multiple of that of full attention, its bytes as data beside it; against length
/// where there is no full attention to compare with.
pub fn memory(rows: &[Row], prefix: &str) -> io::Result<Option<Chart>> {
    let Some((figure, panels)) = both(rows, Quantity::Memory) else {
        return growth(rows, Quantity::Memory, prefix);
    };
    let title = ("Peak memory of a step relative to full attention", figure.subtitle.as_str());
    let chart = ratios(&format!("{prefix}-memory"), title, "times the memory", &panels)?;
    Ok(Some(Chart { csv: figure.csv()?, ..chart }))
}

/// The figure of `quantity` against length, and its panels as ratios; nothing where no panel has any.
fn both(rows: &[Row], quantity: Quantity) -> Option<(Figure, Vec<RatioPanel>)> {
    let figure = figure(rows, quantity)?;
    let mut panels = panels(rows, quantity);
    panels.iter_mut().for_each(thin);
    (!panels.is_empty()).then_some((figure, panels))
}

/// Keeps of a crowd the shortest and the longest length only.
fn thin(panel: &mut RatioPanel) {
    let lens = || panel.rows.iter().flat_map(|(_, points)| points).map(|(len, _)| *len);
    let (Some(first), Some(last)) = (lens().min(), lens().max()) else { return };
    if panel.rows.iter().map(|(_, points)| points.len()).sum::<usize>() > DOTS {
        panel.rows.iter_mut().for_each(|(_, points)| points.retain(|(len, _)| [first, last].contains(len)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Outcome, Pass};

    fn row(model: &str, len: u64, seconds: f64, bytes: u64) -> Row {
        let row = Row {
            len: Some(len),
            pass: Some(Pass::Train),
            peak_bytes: Some(bytes),
            ..Row::new("speed", model)
        };
        row.with("step_time", "s", Some(seconds)).with_outcome(Outcome::Ok, None)
    }

    #[test]
    fn ratios_stand_in_the_chart_and_bytes_beside_it() {
        let rows = [row("full", 512, 1.0, 1 << 20), row("ls", 512, 0.5, 3 << 19)];
        let chart = memory(&rows, "speed").unwrap().unwrap();
        assert_eq!(chart.name, "speed-memory");
        assert!(
            chart.svg.contains("1.50 times the memory") && chart.svg.contains("full: 1 MiB"),
            "{}",
            chart.svg
        );
        assert!(chart.csv.contains(",ls,512,1572864,B,"), "{}", chart.csv);
        let chart = speed(&rows, "speed").unwrap().unwrap();
        assert!(chart.csv.contains(",ls,512,2\n"), "{}", chart.csv);
        assert!(speed(&rows[1..], "speed").unwrap().is_none());
        let alone = memory(&rows[1..], "speed").unwrap().unwrap();
        assert!(alone.svg.contains("against length"), "{}", alone.svg);
    }

    #[test]
    fn a_crowd_shows_the_shortest_and_the_longest_length() {
        let points = |n: u64| (1..=n).map(|len| (len * 1024, 1.0)).collect::<Vec<_>>();
        let mut panel = RatioPanel { title: String::new(), rows: vec![("a".to_owned(), points(5)); 20] };
        thin(&mut panel);
        assert!(panel.rows.iter().all(|(_, points)| *points == [(1024, 1.0), (5120, 1.0)]));
    }
}
