//! The trained numbers of models, as bars: what rows of `weigh` have.

use std::io;

use effattn::record::Row;
use effattn::report::chart::{Bar, BarPanel, Chart, bars};
use effattn::report::figures::PaperFigure;

/// The table line.
pub static FIGURE: PaperFigure =
    PaperFigure { name: "weights", about: "trained numbers by mechanism and length", draw };

/// One chart; nothing without rows of this kind.
fn draw(rows: &[&Row]) -> io::Result<Vec<Chart>> {
    let rows: Vec<&Row> = rows.iter().filter(|row| row.metric == "parameters").copied().collect();
    let mut lens: Vec<u64> = rows.iter().filter_map(|row| row.len).collect();
    lens.sort_unstable();
    lens.dedup();
    if lens.is_empty() {
        return Ok(Vec::new());
    }
    let mut labels: Vec<String> = rows.iter().map(|row| row.label()).collect();
    labels.sort();
    labels.dedup();
    let series = labels.into_iter().map(|label| {
        let at = |len: &u64| rows.iter().find(|row| row.label() == label && row.len == Some(*len));
        let bar = |len| at(len).and_then(|row| row.value).map_or(Bar::Empty, Bar::Value);
        let bars = lens.iter().map(bar).collect();
        (label, bars)
    });
    let panel = BarPanel {
        title: "Weights of positions count".to_owned(),
        series: series.collect(),
        groups: lens.iter().map(u64::to_string).collect(),
    };
    let title = ("Trained numbers of a model", "batch 1");
    Ok(vec![bars("weights", title, ("length", "trained numbers"), &[panel])?])
}
