//! A quality against a cost: lines over a logarithmic axis, such as accuracy against state bytes, time per token or length.

use std::io;

use super::linear::{Line, Panel, Plane, Ticks};
use super::scale::{Scale, Unit};
use super::style::{Dash, SeriesStyle, looks};
use super::{Chart, table};

/// One line.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Tradeoff {
    /// Name.
    pub label: String,
    /// Cost (above 0) and quality, in the order of the cost.
    pub points: Vec<(f64, f64)>,
    /// Whether it was published elsewhere: dashed, with open marks.
    pub published: bool,
}

/// A chart of `lines` over `unit` (`axes`: along, up), with horizontal lines at `floors` (name and value). Nothing without points.
pub fn tradeoffs(
    name: &str,
    (title, subtitle): (&str, &str),
    (unit, axes): (Unit, (&str, &str)),
    lines: &[Tradeoff],
    floors: &[(String, f64)],
) -> io::Result<Option<Chart>> {
    let costs: Vec<f64> = lines.iter().flat_map(|line| &line.points).map(|point| point.0).collect();
    if costs.is_empty() {
        return Ok(None);
    }
    let scale = Scale::covering(unit, &costs);
    let texts: Vec<(f64, String)> = scale.ticks.iter().map(|tick| (tick.log2(), unit.text(*tick))).collect();
    let names: Vec<&str> = lines.iter().map(|line| line.label.as_str()).collect();
    let drawn = lines.iter().zip(looks(&names)).map(|(line, look)| {
        let points = line.points.iter().map(|(cost, quality)| (cost.log2(), *quality)).collect();
        let solid = Line::solid(look, &line.label, points);
        let dash = if line.published { Dash::Dashed } else { solid.look.dash };
        Line { look: SeriesStyle { open: line.published, dash, ..solid.look }, markers: true, ..solid }
    });
    let ends = [scale.low.log2(), scale.high.log2()];
    let floor = |(label, value): &'_ (String, f64)| (label.clone(), ends.map(|end| (end, *value)).to_vec());
    let floors: Vec<(String, Vec<(f64, f64)>)> = floors.iter().map(floor).collect();
    let below = floors.iter().map(|(label, points)| {
        let look = SeriesStyle::default().faint();
        Line { markers: false, ..Line::solid(look, label, points.clone()) }
    });
    let ticks = Ticks::At(texts.iter().map(|(at, text)| (*at, text.as_str())).collect());
    let panel = Panel { title: axes.1, axis: axes.0, ticks, lines: drawn.chain(below).collect() };
    let svg = Plane { title, subtitle, panels: vec![panel] }.draw()?;
    let records = lines.iter().flat_map(|line| {
        let kind = if line.published { "published" } else { "measured" };
        let record = move |(cost, quality): &(f64, f64)| {
            vec![line.label.clone(), kind.to_owned(), cost.to_string(), quality.to_string()]
        };
        line.points.iter().map(record)
    });
    let rules = floors.iter().map(|(label, points)| {
        vec![label.clone(), "floor".to_owned(), String::new(), points[0].1.to_string()]
    });
    let csv = table(&["series", "kind", axes.0, axes.1], records.chain(rules).collect::<Vec<_>>())?;
    Ok(Some(Chart { name: name.to_owned(), svg, csv }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chart_names_its_lines_and_keeps_its_data() {
        let line = |label: &str, published| Tradeoff {
            label: label.to_owned(),
            points: vec![(4096.0, 40.0), (65_536.0, 95.5)],
            published,
        };
        let lines = [line("based", false), line("Based, printed", true)];
        let floors = [("floor: same order".to_owned(), 9.6)];
        let axes = (Unit::Bytes, ("state", "accuracy, %"));
        let chart = tradeoffs("x", ("Title", "conditions"), axes, &lines, &floors).unwrap().unwrap();
        for text in ["4 KiB", "64 KiB", "based", "Based, printed", "floor: same order", "accuracy, %"] {
            assert!(chart.svg.contains(text), "{text}");
        }
        assert!(
            chart.csv.contains("\nbased,measured,4096,40\n")
                && chart.csv.contains("\"Based, printed\",published,65536,95.5\n")
        );
        assert!(chart.csv.ends_with("floor: same order,floor,,9.6\n"));
        assert_eq!(tradeoffs("x", ("", ""), axes, &[], &floors).unwrap().map(|chart| chart.csv), None);
    }
}
