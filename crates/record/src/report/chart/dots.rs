//! From which length on something holds: a dot per mechanism and quantity.

use std::io;

use super::canvas::{self, Align, Canvas, FONT, GRID, Point, SOFT};
use super::scale::{Scale, Unit};
use super::strip::{LINE, Strip, WIDTH};
use super::style::{Dash, Marker, SeriesStyle};
use super::{Chart, table};

const HEADER: f64 = 150.0;
const MARKER: f64 = 10.0;

/// From which length on one mechanism is below another.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Crossing {
    /// Already at the shortest measured length, which is this.
    Always(f64),
    /// From here on, between measured lengths.
    From(f64),
    /// The same at every length, of which the longest is this.
    Same(f64),
    /// At shorter lengths, but not at the longest, which is this.
    Partly(f64),
    /// Not up to the longest measured length, which is this.
    Never(f64),
}

impl Crossing {
    /// In words.
    pub fn text(self) -> String {
        match self {
            Self::Always(len) => format!("≤ {len}"),
            Self::From(len) => format!("{len:.0}"),
            Self::Same(len) => format!("the same up to {len}"),
            Self::Partly(len) => format!("below {len} only"),
            Self::Never(len) => format!("no crossing up to {len}"),
        }
    }

    fn len(self) -> f64 {
        match self {
            Self::Always(len) | Self::From(len) | Self::Same(len) | Self::Partly(len) | Self::Never(len) => {
                len
            }
        }
    }
}

/// Dots that share axes: a line per mechanism with its crossing in time and in memory.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct DotPanel {
    /// What is shown here.
    pub title: String,
    /// Mechanism, time, memory.
    pub rows: Vec<(String, Option<Crossing>, Option<Crossing>)>,
}

/// A chart of `panels` under each other.
pub fn dots(name: &str, (title, subtitle): (&str, &str), panels: &[DotPanel]) -> io::Result<Chart> {
    let rows = || panels.iter().flat_map(|panel| &panel.rows);
    let left = Strip::left(rows().map(|row| row.0.as_str()));
    let lens: Vec<f64> = rows().flat_map(|row| [row.1, row.2]).flatten().map(Crossing::len).collect();
    let ends = [lens.iter().copied().fold(f64::MAX, f64::min), lens.iter().copied().fold(1.0, f64::max)];
    let mut powers: Vec<f64> =
        (0..40).map(|i| 2f64.powi(i)).filter(|x| *x >= ends[0] && *x <= ends[1]).collect();
    powers.extend(ends);
    let scale = Scale::covering(Unit::Length, &powers);
    let tall = |panel: &DotPanel| Strip::height(panel.rows.len(), LINE);
    let height = HEADER + panels.iter().map(tall).sum::<f64>();
    let svg = canvas::document((WIDTH as u32, height.ceil() as u32), |canvas| {
        canvas.bold(title, (24.0, 36.0), Align::Left, FONT * 1.1)?;
        canvas.subtitle(subtitle, 80.0, WIDTH)?;
        let mut x = 36.0;
        for (text, look) in [("time", TIME), ("memory", MEMORY)] {
            canvas.marker((x, 124.0), MARKER, look)?;
            canvas.text(text, (x + 22.0, 124.0), Align::Left, FONT)?;
            x += canvas::text_width(text, FONT) + 66.0;
        }
        canvas.colored(
            "◂ at every length, ▸ not up to the longest, = the same",
            (x, 124.0),
            Align::Left,
            (FONT * 0.85, SOFT),
        )?;
        let mut top = HEADER;
        for panel in panels {
            let (unit, area) = (Unit::Length, Strip::area(top));
            draw(canvas, &Strip { left, top: area, row: LINE, scale: &scale, unit }, panel)?;
            top += tall(panel);
        }
        Ok(())
    })?;
    let text = |crossing: &Option<Crossing>| crossing.map_or_else(String::new, Crossing::text);
    let records = panels.iter().flat_map(|panel| {
        panel.rows.iter().map(move |(label, time, memory)| {
            vec![panel.title.clone(), label.clone(), text(time), text(memory)]
        })
    });
    let csv = table(&["panel", "model", "time", "memory"], records)?;
    Ok(Chart { name: name.to_owned(), svg, csv })
}

const TIME: SeriesStyle = SeriesStyle { marker: Marker::Circle, ..PLAIN };
const MEMORY: SeriesStyle = SeriesStyle { marker: Marker::Square, color: canvas::ORANGE, ..PLAIN };
const PLAIN: SeriesStyle =
    SeriesStyle { color: canvas::BLUE, dash: Dash::Solid, marker: Marker::Circle, open: false };

fn draw(canvas: &mut Canvas, strip: &Strip, panel: &DotPanel) -> io::Result<()> {
    let labels: Vec<&str> = panel.rows.iter().map(|row| row.0.as_str()).collect();
    strip.draw(canvas, (&panel.title, "length"), &labels)?;
    for (index, (label, time, memory)) in panel.rows.iter().enumerate() {
        let y = strip.y(index);
        if let (Some(time), Some(memory)) = (time, memory) {
            canvas.line((strip.x(time.len()), y), (strip.x(memory.len()), y), GRID, 2)?;
        }
        for (crossing, look, shift) in [(time, TIME, -7.0), (memory, MEMORY, 7.0)] {
            let what = if shift < 0.0 { "time" } else { "memory" };
            if let Some(crossing) = crossing {
                let at = (strip.x(crossing.len()), y + shift);
                dot(canvas, *crossing, (look, at))?;
                canvas.tip(at, &format!("{label}, {what}: length {}\n{}", crossing.text(), panel.title));
            }
        }
    }
    Ok(())
}

fn dot(canvas: &mut Canvas, crossing: Crossing, (look, at): (SeriesStyle, Point)) -> io::Result<()> {
    let arrow = match crossing {
        Crossing::From(_) => return canvas.marker(at, MARKER, look),
        Crossing::Same(_) => {
            canvas.line((at.0 - 10.0, at.1 - 4.0), (at.0 + 10.0, at.1 - 4.0), look.color, 4)?;
            return canvas.line((at.0 - 10.0, at.1 + 4.0), (at.0 + 10.0, at.1 + 4.0), look.color, 4);
        }
        Crossing::Always(_) => -1.0,
        Crossing::Partly(_) | Crossing::Never(_) => 1.0,
    };
    let tip = (at.0 + arrow * 18.0, at.1);
    canvas.line(at, tip, look.color, 4)?;
    canvas.line(tip, (tip.0 - arrow * 9.0, at.1 - 7.0), look.color, 4)?;
    canvas.line(tip, (tip.0 - arrow * 9.0, at.1 + 7.0), look.color, 4)?;
    canvas.marker(at, 5.0, SeriesStyle { open: arrow > 0.0, ..look })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn crossings_in_words() {
        let panel = DotPanel {
            title: "Training".to_owned(),
            rows: vec![("ls".to_owned(), Some(Crossing::From(812.3)), Some(Crossing::Always(256.0)))],
        };
        let chart = dots("x", ("T", "S"), &[panel]).unwrap();
        assert!(chart.csv.ends_with("Training,ls,812,≤ 256\n"), "{}", chart.csv);
        assert!(!chart.svg.contains("NaN"));
    }
}
