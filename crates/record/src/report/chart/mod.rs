//! Charts as SVG, each with its data as CSV of the same name beside it.
//!
//! Made for print: 1200 pixels wide, so that letters are six points high at a width of 8 cm; colours that
//! the colour-blind can tell apart, with dashes and markers for black and white.

mod bars;
mod blocks;
mod bubbles;
mod canvas;
mod compact;
mod dots;
mod growth;
mod labels;
mod learning;
mod linear;
mod lines;
mod matrix;
mod matrix_cells;
mod norms;
mod png;
mod ratios;
mod scale;
mod slopes;
mod stacks;
mod strip;
mod style;
mod tradeoff;
mod weight_tips;

use std::io;
use std::path::{Path, PathBuf};

use crate::{Outcome, file};

pub use bars::{Bar, BarPanel, bars};
pub use blocks::{Blocks, blocks};
pub use bubbles::{Bubble, bubbles};
pub use dots::{Crossing, DotPanel, dots};
pub(super) use growth::grouped;
pub use growth::{Quantity, alike, figure, growth};
pub use learning::{Evaluation, TrainingCurve, learning};
pub use matrix::matrices;
pub use matrix_cells::Shade;
pub use norms::norms;
pub use png::png;
pub use ratios::{RatioPanel, ratios};
pub use scale::Unit;
pub use slopes::{Slope, slopes};
pub use stacks::{Stack, StackPanel, stacks};
pub use style::SeriesStyle;
pub use tradeoff::{Tradeoff, tradeoffs};

/// A finished chart.
#[derive(Clone, Debug)]
pub struct Chart {
    /// File name without extension, such as `speed-time`.
    pub name: String,
    /// The picture.
    pub svg: String,
    /// What it shows.
    pub csv: String,
}

impl Chart {
    /// Writes `<name>.svg` and `<name>.csv` into `folder` and returns the path of the picture.
    pub fn write(&self, folder: &Path) -> io::Result<PathBuf> {
        std::fs::create_dir_all(folder)?;
        let name = file::plain_name(&self.name); // it may stand in rows that somebody else wrote
        let put = |end: &str, text: &str| {
            let path = folder.join(format!("{name}.{end}"));
            let named =
                |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", path.display()));
            file::write(&path, text.as_bytes()).map_err(named)?;
            Ok(path)
        };
        put("csv", &self.csv)?;
        put("svg", &self.svg)
    }
}

/// A measured point.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Measured {
    /// Length.
    pub x: f64,
    /// Value.
    pub y: f64,
    /// 95 % interval.
    pub interval: Option<(f64, f64)>,
}

/// A cell without a value.
#[derive(Clone, Debug, PartialEq)]
pub struct Missing {
    /// Length.
    pub x: f64,
    /// How it ended.
    pub outcome: String,
    /// Whether a cross marks it: memory or time ran out here.
    pub cross: bool,
}

/// One line of a panel.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Series {
    /// Name.
    pub label: String,
    /// How it looks, the same in every panel.
    pub look: SeriesStyle,
    /// Points by length.
    pub points: Vec<Measured>,
    /// Cells without a value, by length.
    pub missing: Vec<Missing>,
}

impl Series {
    /// The power law through the points.
    pub fn law(&self) -> Option<crate::stats::PowerLaw> {
        let points: Vec<_> = self.points.iter().map(|point| (point.x, point.y)).collect();
        crate::stats::power_law(&points)
    }

    /// Whether there is more to tell than that the mechanism has no such form, which the reasons tell.
    pub fn can_run(&self) -> bool {
        let unsupported = Outcome::Unsupported.word();
        !self.points.is_empty() || self.missing.iter().any(|missing| missing.outcome != unsupported)
    }
}

/// Lines that share axes.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Panel {
    /// What is shown here.
    pub title: String,
    /// The lines.
    pub series: Vec<Series>,
}

/// Panels under each other.
#[derive(Clone, Debug, PartialEq)]
pub struct Figure {
    /// What is shown.
    pub title: String,
    /// Under which conditions.
    pub subtitle: String,
    /// What the vertical axes measure.
    pub unit: Unit,
    /// The panels.
    pub panels: Vec<Panel>,
}

impl Figure {
    /// Draws the figure.
    pub fn chart(&self, name: &str) -> io::Result<Chart> {
        Ok(Chart { name: name.to_owned(), svg: lines::draw(self)?, csv: self.csv()? })
    }

    /// Its data.
    pub(super) fn csv(&self) -> io::Result<String> {
        let unit = match self.unit {
            Unit::Length => "positions",
            Unit::Seconds => "s",
            Unit::Bytes => "B",
            Unit::Times => "times",
            Unit::Rate => "/s",
            Unit::Number | Unit::Share => "1",
        };
        let number = |value: Option<f64>| value.map_or_else(String::new, |value| value.to_string());
        let mut records = Vec::new();
        for (panel, series) in
            self.panels.iter().flat_map(|panel| panel.series.iter().map(move |x| (panel, x)))
        {
            let slope = series.law().map_or_else(String::new, |law| format!("{:.4}", law.slope));
            let mut add = |x: f64, value: Option<f64>, interval: Option<(f64, f64)>, outcome: &str| {
                let (low, high) = (interval.map(|ends| ends.0), interval.map(|ends| ends.1));
                let numbers = [Some(x), value].map(number);
                let texts = [panel.title.clone(), series.label.clone()].into_iter().chain(numbers);
                let rest = [unit.to_owned(), number(low), number(high), outcome.to_owned(), slope.clone()];
                records.push(texts.chain(rest).collect());
            };
            series.points.iter().for_each(|point| add(point.x, Some(point.y), point.interval, "ok"));
            series.missing.iter().for_each(|missing| add(missing.x, None, None, &missing.outcome));
        }
        let columns = ["panel", "series", "len", "value", "unit", "ci_low", "ci_high", "outcome", "slope"];
        table(&columns, records)
    }
}

/// Records as CSV.
fn table(columns: &[&str], records: impl IntoIterator<Item = Vec<String>>) -> io::Result<String> {
    let mut writer = ::csv::Writer::from_writer(Vec::new());
    writer.write_record(columns)?;
    records.into_iter().try_for_each(|record| writer.write_record(record))?;
    let bytes = writer.into_inner().map_err(|error| io::Error::other(error.to_string()))?;
    String::from_utf8(bytes).map_err(io::Error::other)
}
