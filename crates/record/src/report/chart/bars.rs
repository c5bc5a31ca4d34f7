//! Grouped bars: several series at a few places, crosses where memory or time ran out.

use std::io;

use super::canvas::{self, Align, Canvas, FONT, GRID, INK, SOFT};
use super::linear::{number, ticks};
use super::style::{SeriesStyle, looks};
use super::{Chart, table};

const WIDTH: f64 = 1200.0;
const HEADER: f64 = 110.0;
const LEFT: f64 = 130.0;
const HEIGHT: f64 = 300.0;
const LINE: f64 = FONT * 1.16;

/// Height of one bar.
#[derive(Clone, Debug, PartialEq)]
pub enum Bar {
    /// A value.
    Value(f64),
    /// Memory or time ran out: the word of the outcome.
    Cross(String),
    /// Nothing is known.
    Empty,
}

/// Groups of bars that share axes.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct BarPanel {
    /// What is shown here.
    pub title: String,
    /// Name of each group.
    pub groups: Vec<String>,
    /// Name of each series, and its bar in each group.
    pub series: Vec<(String, Vec<Bar>)>,
}

/// A chart of `panels` under each other; `axis` says what the groups are, `measure` what the bars. Series of the same
/// name look alike.
pub fn bars(
    name: &str,
    (title, subtitle): (&str, &str),
    (axis, measure): (&str, &str),
    panels: &[BarPanel],
) -> io::Result<Chart> {
    let mut names: Vec<&str> = Vec::new();
    for (label, _) in panels.iter().flat_map(|panel| &panel.series) {
        if !names.contains(&label.as_str()) {
            names.push(label);
        }
    }
    let looks = looks(&names);
    let longest = names.iter().map(|name| canvas::text_width(name, FONT)).fold(0.0, f64::max);
    let column = longest + 70.0;
    let columns = ((WIDTH - 48.0) / column).floor().max(1.0);
    let legend = (names.len() as f64 / columns).ceil() * LINE;
    let panel_height = HEIGHT + 4.0 * LINE;
    let top = HEADER + legend + 0.5 * LINE;
    let height = top + panels.len() as f64 * panel_height + LINE;
    let svg = canvas::document((WIDTH as u32, height.ceil() as u32), |canvas| {
        canvas.bold(title, (24.0, 36.0), Align::Left, FONT * 1.1)?;
        canvas.subtitle(subtitle, 80.0, WIDTH)?;
        for (index, name) in names.iter().enumerate() {
            let (row, place) = ((index as f64 / columns).floor(), index as f64 % columns);
            let (x, y) = (24.0 + place * column, HEADER + 0.5 * LINE + row * LINE);
            canvas.bar((x, y - 11.0), (x + 34.0, y + 11.0), looks[index])?;
            canvas.text(name, (x + 46.0, y), Align::Left, FONT)?;
        }
        for (index, panel) in panels.iter().enumerate() {
            let top = top + index as f64 * panel_height + 1.5 * LINE;
            draw(canvas, panel, (&names, &looks), (top, axis, measure))?;
        }
        let at = (24.0, height - 0.7 * LINE);
        canvas.cross((at.0 + 12.0, at.1), 10.0, INK)?;
        canvas.colored("out of memory or time", (at.0 + 36.0, at.1), Align::Left, (FONT, SOFT))
    })?;
    let records = panels.iter().flat_map(|panel| {
        panel.series.iter().flat_map(move |(label, bars)| {
            panel.groups.iter().zip(bars).map(move |(group, bar)| {
                let (value, outcome) = match bar {
                    Bar::Value(value) => (value.to_string(), "ok"),
                    Bar::Cross(word) => (String::new(), word.as_str()),
                    Bar::Empty => (String::new(), ""),
                };
                vec![panel.title.clone(), label.clone(), group.clone(), value, outcome.to_owned()]
            })
        })
    });
    let csv = table(&["panel", "series", axis, measure, "outcome"], records)?;
    Ok(Chart { name: name.to_owned(), svg, csv })
}

fn draw(
    canvas: &mut Canvas,
    panel: &BarPanel,
    (names, looks): (&[&str], &[SeriesStyle]),
    (top, axis, measure): (f64, &str, &str),
) -> io::Result<()> {
    let (bottom, right) = (top + HEIGHT, WIDTH - 24.0);
    let title = format!("{}, {measure}", panel.title);
    canvas.bold(&title, (24.0, top - 0.8 * LINE), Align::Left, FONT)?;
    let values = panel.series.iter().flat_map(|(_, bars)| bars).filter_map(|bar| match bar {
        Bar::Value(value) if value.is_finite() => Some(*value),
        _ => None,
    });
    let ys = ticks(0.0, values.fold(0.0, f64::max), 4);
    let high = ys[ys.len() - 1];
    for &tick in &ys {
        let y = bottom - tick / high * HEIGHT;
        canvas.line((LEFT, y), (right, y), GRID, 2)?;
        canvas.text(&number(tick, ys[1] - ys[0]), (LEFT - 12.0, y), Align::Right, FONT)?;
    }
    let group = (right - LEFT) / panel.groups.len().max(1) as f64;
    let width = group * 0.88 / panel.series.len().max(1) as f64;
    for (index, text) in panel.groups.iter().enumerate() {
        let left = LEFT + index as f64 * group + 0.06 * group;
        for (place, (label, bars)) in panel.series.iter().enumerate() {
            let x = left + place as f64 * width;
            let style = looks[names.iter().position(|name| name == label).unwrap_or(0)];
            match bars.get(index) {
                Some(Bar::Value(value)) => {
                    let y = bottom - value / high * HEIGHT;
                    canvas.bar((x + 1.0, y), (x + width - 1.0, bottom), style)?;
                    canvas.tip(
                        (x + width / 2.0, y),
                        &format!("{label} at {text}: {value:.3} {measure}\n{}", panel.title),
                    );
                }
                Some(Bar::Cross(_)) => {
                    canvas.cross((x + width / 2.0, bottom - width), (0.4 * width).min(10.0), style.color)?;
                }
                Some(Bar::Empty) | None => (),
            }
        }
        let middle = LEFT + (index as f64 + 0.5) * group;
        canvas.text(text, (middle, bottom + 0.8 * LINE), Align::Center, FONT)?;
    }
    canvas.frame((LEFT, top), (right, bottom), INK)?;
    canvas.text(axis, (f64::midpoint(LEFT, right), bottom + 1.75 * LINE), Align::Center, FONT)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bars_crosses_and_gaps() {
        let panel = BarPanel {
            title: "Training".to_owned(),
            groups: vec!["1024".to_owned(), "2048".to_owned()],
            series: vec![
                ("full".to_owned(), vec![Bar::Value(2.5), Bar::Cross("oom".to_owned())]),
                ("ls".to_owned(), vec![Bar::Empty, Bar::Value(4.0)]),
            ],
        };
        let chart = bars("x", ("T", "S"), ("length", "steps/s"), &[panel]).unwrap();
        assert!(
            chart.csv.contains("Training,full,2048,,oom\n") && chart.csv.contains("Training,ls,1024,,\n")
        );
        assert!(chart.svg.contains("2048") && !chart.svg.contains("NaN"));
    }
}
