//! A number behind every block of a model.

use std::io;

use super::linear::{Line, Panel, Plane, Ticks};
use super::style::looks;
use super::{Chart, table};

/// Lines by label.
type Lines = Vec<(String, Vec<(f64, f64)>)>;

/// One model.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Blocks {
    /// Name.
    pub label: String,
    /// Values behind block 1, 2, ...
    pub values: Vec<f64>,
}

/// A chart of panels, each with a title and a line per model.
pub fn blocks(
    name: &str,
    (title, subtitle): (&str, &str),
    panels: &[(&str, Vec<Blocks>)],
) -> io::Result<Chart> {
    let most =
        panels.iter().flat_map(|(_, models)| models).map(|model| model.values.len()).max().unwrap_or(0);
    let texts: Vec<String> = (1..=most).map(|block| block.to_string()).collect();
    let panel = |(title, models): &(&str, Vec<Blocks>)| -> (String, Lines) {
        let points = |model: &Blocks| model.values.iter().zip(1..).map(|(y, x)| (f64::from(x), *y)).collect();
        ((*title).to_owned(), models.iter().map(|model| (model.label.clone(), points(model))).collect())
    };
    let drawn: Vec<_> = panels.iter().map(panel).collect();
    let panels = drawn.iter().map(|(title, models)| {
        let labels: Vec<&str> = models.iter().map(|(label, _)| label.as_str()).collect();
        let lines = models.iter().zip(looks(&labels));
        let lines = lines.map(|((label, points), look)| Line::solid(look, label, points.clone())).collect();
        let ticks = texts.iter().zip(1..).map(|(text, block)| (f64::from(block), text.as_str())).collect();
        Panel { title, axis: "block", ticks: Ticks::At(ticks), lines }
    });
    let svg = Plane { title, subtitle, panels: panels.collect() }.draw()?;
    let records = drawn.iter().flat_map(|(panel, models)| {
        models.iter().flat_map(move |(label, points)| {
            points.iter().map(move |(x, y)| vec![panel.clone(), label.clone(), x.to_string(), y.to_string()])
        })
    });
    let csv = table(&["panel", "model", "block", "value"], records)?;
    Ok(Chart { name: name.to_owned(), svg, csv })
}
