//! Accuracy against speed with memory as the area of a bubble (cosFormer, Figure 1).

use std::io;

use super::canvas::{self, Align, Canvas, FONT, GRID, INK, Point, SOFT};
use super::linear::{number, ticks};
use super::style::{SeriesStyle, looks};
use super::{Chart, table};

const WIDTH: f64 = 1200.0;
const HEADER: f64 = 70.0;
const LEFT: f64 = 130.0;
/// Widths of a marker in the table beside the area, and of a number.
const MARK: f64 = 56.0;
const NUMBER: f64 = 150.0;
const HEIGHT: f64 = 620.0;
const LINE: f64 = FONT * 1.16;
/// Heights around a plane: its title above, and all together.
const ABOVE: f64 = 1.6 * LINE;
const FRAME: f64 = ABOVE + 2.6 * LINE;
/// Radius of the largest bubble.
const LARGEST: f64 = 46.0;
const SMALLEST: f64 = 7.0;

/// One model.
#[derive(Clone, Debug, PartialEq)]
pub struct Bubble {
    /// Name; the published and the measured bubble of a model share it.
    pub label: String,
    /// Along.
    pub x: f64,
    /// Up.
    pub y: f64,
    /// Area, relative to the largest of its kind.
    pub area: f64,
    /// Published elsewhere: an outline.
    pub ghost: bool,
}

/// A chart of `bubbles` over `axes` (along, up): those that were measured above those that were published, on the same axis
/// upwards, so that differences as small as noise look small. Nothing without bubbles.
pub fn bubbles(
    name: &str,
    (title, subtitles): (&str, &[String]),
    axes: (&str, &str),
    bubbles: &[Bubble],
) -> io::Result<Option<Chart>> {
    if bubbles.is_empty() {
        return Ok(None);
    }
    let mut names: Vec<&str> = Vec::new();
    for bubble in bubbles {
        if !names.contains(&bubble.label.as_str()) {
            names.push(&bubble.label);
        }
    }
    let longest = names.iter().map(|name| canvas::text_width(name, FONT)).fold(0.0, f64::max);
    let column = MARK + longest + 2.0 * NUMBER + 24.0;
    let area = (WIDTH - LEFT - column).max(480.0);
    let width = LEFT + area + column;
    let looks = looks(&names);
    let header = HEADER + 38.0 * subtitles.len() as f64;
    // other models and other machines: a plane of its own for what is published
    let parts: Vec<(&str, Vec<&Bubble>)> = [("Measured", false), ("Published", true)]
        .map(|(kind, ghost)| {
            (kind, bubbles.iter().filter(|bubble| bubble.ghost == ghost).collect::<Vec<_>>())
        })
        .into_iter()
        .filter(|(_, own)| !own.is_empty())
        .collect();
    let heights = range(bubbles.iter().map(|bubble| bubble.y));
    let tall = |own: &[&Bubble]| HEIGHT.max((own.len() + 1) as f64 * LINE);
    let height = header + parts.iter().map(|(_, own)| tall(own) + FRAME).sum::<f64>();
    let svg = canvas::document((width.ceil() as u32, height.ceil() as u32), |canvas| {
        canvas.bold(title, (24.0, 36.0), Align::Left, FONT * 1.1)?;
        for (row, subtitle) in subtitles.iter().enumerate() {
            let y = 80.0 + 38.0 * row as f64;
            canvas.colored(subtitle, (24.0, y), Align::Left, (FONT * 0.8, SOFT))?;
        }
        let mut top = header + ABOVE;
        for (kind, own) in &parts {
            let plane = Plane::new(own, heights, (LEFT, area), (top, top + tall(own)));
            plane.axes(canvas, (axes.0, &format!("{kind}: {}", axes.1)))?;
            plane.draw(canvas, (&names, &looks), (axes, own))?;
            plane.list(canvas, (&names, &looks), own)?;
            top += tall(own) + FRAME;
        }
        Ok(())
    })?;
    let records = bubbles.iter().map(|bubble| {
        let kind = if bubble.ghost { "published" } else { "measured" };
        let numbers = [bubble.x, bubble.y, bubble.area].map(|value| value.to_string());
        [bubble.label.clone(), kind.to_owned()].into_iter().chain(numbers).collect()
    });
    let csv = table(&["model", "kind", axes.0, axes.1, "relative_memory"], records)?;
    Ok(Some(Chart { name: name.to_owned(), svg, csv }))
}

/// From the least to the most of `values`, with a margin.
fn range(values: impl Iterator<Item = f64> + Clone) -> (f64, f64) {
    let (low, high) = (values.clone().fold(f64::MAX, f64::min), values.fold(f64::MIN, f64::max));
    let margin = 0.08 * (high - low).max(1e-9);
    (low - margin, high + margin)
}

struct Plane {
    xs: Vec<f64>,
    ys: Vec<f64>,
    left: f64,
    area: f64,
    top: f64,
    bottom: f64,
}

impl Plane {
    fn new(bubbles: &[&Bubble], y: (f64, f64), (left, area): (f64, f64), (top, bottom): (f64, f64)) -> Self {
        let x = range(bubbles.iter().map(|bubble| bubble.x));
        let ys = ticks(y.0, y.1, ((bottom - top) / 80.0) as usize);
        Self { xs: ticks(x.0.max(0.0), x.1, 5), ys, left, area, top, bottom }
    }

    fn place(&self, x: f64, y: f64) -> Point {
        let part = |ticks: &[f64], value: f64| (value - ticks[0]) / (ticks[ticks.len() - 1] - ticks[0]);
        let up = part(&self.ys, y) * (self.bottom - self.top);
        (self.left + part(&self.xs, x) * self.area, self.bottom - up)
    }

    fn at(&self, bubble: &Bubble) -> Point {
        self.place(bubble.x, bubble.y)
    }

    fn axes(&self, canvas: &mut Canvas, (along, up): (&str, &str)) -> io::Result<()> {
        let right = self.left + self.area;
        for &tick in &self.ys {
            let (_, y) = self.place(self.xs[0], tick);
            canvas.line((self.left, y), (right, y), GRID, 2)?;
            canvas.text(&number(tick, self.ys[1] - self.ys[0]), (self.left - 12.0, y), Align::Right, FONT)?;
        }
        for &tick in &self.xs {
            let (x, _) = self.place(tick, self.ys[0]);
            canvas.line((x, self.top), (x, self.bottom), GRID, 2)?;
            let text = number(tick, self.xs[1] - self.xs[0]);
            canvas.text(&text, (x, self.bottom + 0.8 * LINE), Align::Center, FONT)?;
        }
        canvas.frame((self.left, self.top), (right, self.bottom), INK)?;
        canvas.bold(up, (24.0, self.top - 0.8 * LINE), Align::Left, FONT)?;
        let middle = f64::midpoint(self.left, right);
        // a title wider than the plane starts at the chart's edge
        let middle = middle.max(24.0 + canvas::text_width(along, FONT) / 2.0);
        canvas.text(along, (middle, self.bottom + 1.75 * LINE), Align::Center, FONT)
    }

    /// The bubbles, the largest behind.
    fn draw(
        &self,
        canvas: &mut Canvas,
        (names, looks): (&[&str], &[SeriesStyle]),
        (axes, bubbles): ((&str, &str), &[&Bubble]),
    ) -> io::Result<()> {
        let mut sorted = bubbles.to_vec();
        sorted.sort_by(|a, b| b.area.total_cmp(&a.area));
        for bubble in sorted {
            let index = names.iter().position(|name| *name == bubble.label).unwrap_or(0);
            let radius = (LARGEST * bubble.area.max(0.0).sqrt()).max(SMALLEST);
            let at = self.at(bubble);
            canvas.bubble(at, radius, looks[index].color, bubble.ghost)?;
            let look = SeriesStyle { open: bubble.ghost, ..looks[index] };
            canvas.marker(at, if bubble.ghost { 5.0 } else { 7.0 }, look)?;
            let kind = if bubble.ghost { "published" } else { "measured" };
            canvas.tip(
                at,
                &format!("{}, {kind}: {} {:.2}, {} {:.2}", bubble.label, axes.0, bubble.x, axes.1, bubble.y),
            );
        }
        Ok(())
    }

    /// A line per model beside the area, the best first: marker, name, and its place.
    fn list(
        &self,
        canvas: &mut Canvas,
        (names, looks): (&[&str], &[SeriesStyle]),
        bubbles: &[&Bubble],
    ) -> io::Result<()> {
        let look = |bubble: &Bubble| {
            names
                .iter()
                .position(|name| *name == bubble.label)
                .map_or_else(SeriesStyle::default, |at| looks[at])
        };
        let mut lines: Vec<(SeriesStyle, &Bubble)> =
            bubbles.iter().map(|bubble| (look(bubble), *bubble)).collect();
        lines.sort_by(|a, b| b.1.y.total_cmp(&a.1.y));
        let left = self.left + self.area + MARK;
        let right = left + names.iter().map(|name| canvas::text_width(name, FONT)).fold(0.0, f64::max);
        let columns = [right + NUMBER, right + 2.0 * NUMBER];
        let mut y = self.top + 0.5 * LINE;
        for (text, x) in ["speed", "accuracy"].into_iter().zip(columns) {
            canvas.colored(text, (x, y), Align::Right, (FONT * 0.85, SOFT))?;
        }
        for (look, bubble) in lines {
            y += LINE;
            canvas.marker((left - 22.0, y), 9.0, SeriesStyle { open: bubble.ghost, ..look })?;
            canvas.text(&bubble.label, (left, y), Align::Left, FONT)?;
            let texts = [format!("{:.2}", bubble.x), format!("{:.1}", bubble.y)];
            for (text, x) in texts.iter().zip(columns) {
                canvas.text(text, (x, y), Align::Right, FONT)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn published_models_are_outlines_in_a_plane_of_their_own() {
        let bubble =
            |label: &str, x, ghost| Bubble { label: label.to_owned(), x, y: 50.0 + x, area: 1.0, ghost };
        let all = [bubble("full", 1.0, true), bubble("full", 1.0, false), bubble("ls", 2.0, false)];
        let chart = bubbles("b", ("T", &[]), ("speed", "accuracy, %"), &all).unwrap().unwrap();
        assert!(chart.csv.contains("full,published,1,51,1\n"), "{}", chart.csv);
        assert_eq!(chart.svg.matches(">\nfull").count(), 2, "once in each plane");
        assert!(chart.svg.contains("Measured: accuracy") && chart.svg.contains("Published: accuracy"));
        assert_eq!(chart.svg.matches(">\n51.6\n").count(), 2, "one axis upwards for both");
        assert!(bubbles("b", ("T", &[]), ("x", "y"), &[]).unwrap().is_none());
    }
}
