//! Learning curves: loss and accuracy against steps, on linear axes.

use std::io;

use super::Chart;
use super::canvas::{self, Align, Canvas, FONT, GRID, INK, Point, SOFT};
use super::labels::spread;
use super::style::{Dash, Look, look};

const WIDTH: f64 = 1200.0;
const HEADER: f64 = 110.0;
const LEFT: f64 = 130.0;
const LEADER: f64 = 48.0;
const HEIGHT: f64 = 420.0;
const LINE: f64 = FONT * 1.16;
/// Gap between ticks in pixels, at least.
const TICK: f64 = 70.0;

/// One model under training.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Learning {
    /// Name.
    pub label: String,
    /// Evaluations in the order of steps.
    pub points: Vec<Evaluation>,
}

/// What is known behind a step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Evaluation {
    /// Steps made.
    pub step: f64,
    /// Mean training loss since the evaluation before.
    pub train_loss: f64,
    /// Validation loss.
    pub loss: f64,
    /// What weights are selected by.
    pub value: f64,
}

/// A chart of `lines`: validation loss (solid) and training loss (dashed) above, `measure` (such as "validation
/// accuracy, %") below. Nothing without points.
///
/// # Errors
/// The drawing library failed.
pub fn learning(name: &str, title: &str, measure: &str, lines: &[Learning]) -> io::Result<Option<Chart>> {
    if lines.iter().all(|line| line.points.is_empty()) {
        return Ok(None);
    }
    let svg = draw(title, measure, lines)?;
    let mut writer = ::csv::Writer::from_writer(Vec::new());
    writer.write_record(["series", "step", "train_loss", "validation_loss", measure])?;
    for line in lines {
        for point in &line.points {
            let numbers = [point.step, point.train_loss, point.loss, point.value].map(|x| x.to_string());
            writer.write_record(std::iter::once(&line.label).chain(&numbers))?;
        }
    }
    let bytes = writer.into_inner().map_err(|error| io::Error::other(error.to_string()))?;
    let csv = String::from_utf8(bytes).map_err(io::Error::other)?;
    Ok(Some(Chart { name: name.to_owned(), svg, csv }))
}

fn draw(title: &str, measure: &str, lines: &[Learning]) -> io::Result<String> {
    let longest = lines.iter().map(|line| canvas::text_width(&line.label, FONT)).fold(0.0, f64::max);
    let area = (WIDTH - LEFT - LEADER - longest - 24.0).max(480.0);
    let width = LEFT + area + LEADER + longest + 24.0;
    let panel = HEIGHT + 4.0 * LINE;
    let height = HEADER + 2.0 * panel;
    let last = lines.iter().flat_map(|line| &line.points).map(|point| point.step).fold(1.0, f64::max);
    canvas::document((width.ceil() as u32, height.ceil() as u32), |canvas| {
        canvas.bold(title, (24.0, 36.0), Align::Left, FONT * 1.1)?;
        let how = "solid: validation, dashed: training (mean since the evaluation before)";
        canvas.colored(how, (24.0, 80.0), Align::Left, (FONT * 0.85, SOFT))?;
        let frame = |index: usize| {
            let top = HEADER + index as f64 * panel + 1.5 * LINE;
            Frame { area, top, bottom: top + HEIGHT, last }
        };
        let loss: Vec<Line> =
            lines.iter().enumerate().flat_map(|(index, line)| losses(index, line)).collect();
        frame(0).draw(canvas, "loss, nat", &loss)?;
        let value: Vec<Line> = lines
            .iter()
            .enumerate()
            .map(|(index, line)| Line {
                label: Some(&line.label),
                look: Look { dash: Dash::Solid, ..look(index) },
                points: line.points.iter().map(|point| (point.step, point.value)).collect(),
            })
            .collect();
        frame(1).draw(canvas, measure, &value)
    })
}

fn losses(index: usize, line: &Learning) -> [Line<'_>; 2] {
    let of = |pick: fn(&Evaluation) -> f64, dash: Dash, label| Line {
        label,
        look: Look { dash, ..look(index) },
        points: line.points.iter().map(|point| (point.step, pick(point))).collect(),
    };
    [
        of(|point| point.train_loss, Dash::Dashed, None),
        of(|point| point.loss, Dash::Solid, Some(line.label.as_str())),
    ]
}

/// One line; without a label it has none at its end.
struct Line<'a> {
    label: Option<&'a str>,
    look: Look,
    points: Vec<(f64, f64)>,
}

/// Axes of one panel.
struct Frame {
    area: f64,
    top: f64,
    bottom: f64,
    last: f64,
}

impl Frame {
    fn draw(&self, canvas: &mut Canvas, title: &str, lines: &[Line]) -> io::Result<()> {
        canvas.bold(title, (24.0, self.top - 0.8 * LINE), Align::Left, FONT)?;
        let values = || lines.iter().flat_map(|line| &line.points).map(|point| point.1);
        let (low, high) = values()
            .filter(|value| value.is_finite())
            .fold((f64::MAX, f64::MIN), |(low, high), value| (low.min(value), high.max(value)));
        let (low, high) = if low > high { (0.0, 1.0) } else { (low, high) };
        let ys = ticks(low, high, ((self.bottom - self.top) / TICK) as usize);
        let (low, high) = (ys[0], ys[ys.len() - 1]);
        let at = |step: f64, value: f64| -> Point {
            let part = (value - low) / (high - low);
            (LEFT + step / self.last * self.area, self.bottom - part * (self.bottom - self.top))
        };
        for &tick in &ys {
            let (_, y) = at(0.0, tick);
            canvas.line((LEFT, y), (LEFT + self.area, y), GRID, 2)?;
            canvas.text(&number(tick, ys[1] - ys[0]), (LEFT - 12.0, y), Align::Right, FONT)?;
        }
        for tick in
            ticks(0.0, self.last, (self.area / 170.0) as usize).into_iter().filter(|x| *x <= self.last)
        {
            let (x, _) = at(tick, low);
            canvas.line((x, self.bottom), (x, self.bottom + 8.0), INK, 2)?;
            canvas.text(&number(tick, 1.0), (x, self.bottom + 0.8 * LINE), Align::Center, FONT)?;
        }
        canvas.frame((LEFT, self.top), (LEFT + self.area, self.bottom), INK)?;
        let middle = LEFT + self.area / 2.0;
        canvas.text("training steps", (middle, self.bottom + 1.75 * LINE), Align::Center, FONT)?;
        let mut ends = Vec::new();
        for line in lines {
            let points: Vec<Point> = line
                .points
                .iter()
                .filter(|point| point.1.is_finite())
                .map(|&(step, value)| at(step, value))
                .collect();
            let stroke = if line.look.dash == Dash::Solid { 5 } else { 3 };
            canvas.path(&points, line.look, stroke)?;
            if let (Some(label), Some(end)) = (line.label, points.last()) {
                ends.push((label, line.look, *end));
            }
        }
        self.labels(canvas, &ends)
    }

    fn labels(&self, canvas: &mut Canvas, ends: &[(&str, Look, Point)]) -> io::Result<()> {
        let wanted: Vec<f64> = ends.iter().map(|(_, _, end)| end.1).collect();
        let (low, high) = (self.top + 0.5 * LINE, self.bottom - 0.5 * LINE);
        let edge = LEFT + self.area;
        for ((label, look, end), y) in ends.iter().zip(spread(&wanted, LINE, low, high)) {
            canvas.line(*end, (edge, end.1), GRID, 2)?;
            canvas.line((edge, end.1), (edge + LEADER - 10.0, y), look.color, 2)?;
            canvas.text(label, (edge + LEADER, y), Align::Left, FONT)?;
        }
        Ok(())
    }
}

/// Round numbers from at most `low` to at least `high`, about `most` of them and at least two.
fn ticks(low: f64, high: f64, most: usize) -> Vec<f64> {
    let span = (high - low).max(1e-9 * high.abs()).max(1e-12);
    let raw = span / most.max(2) as f64;
    let unit = 10f64.powf(raw.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].into_iter().map(|x| x * unit).find(|step| *step >= raw).unwrap_or(raw);
    let first = (low / step).floor();
    let last = (high / step).ceil().max(first + 1.0);
    (0..=(last - first) as usize).map(|index| (first + index as f64) * step).collect()
}

/// `value` with as many decimals as ticks of distance `step` need.
fn number(value: f64, step: f64) -> String {
    let decimals = (-step.log10().floor()).clamp(0.0, 9.0) as usize;
    format!("{value:.decimals$}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_and_cover_the_values() {
        assert_eq!(ticks(0.0, 5000.0, 5), [0.0, 1000.0, 2000.0, 3000.0, 4000.0, 5000.0]);
        for (low, high) in [(1.71, 2.43), (0.0, 1.0), (-3.2, 17.0), (5.0, 5.0), (0.0, 0.0), (1e-9, 3e-9)] {
            let ticks = ticks(low, high, 5);
            assert!(ticks.len() >= 2 && ticks.len() <= 8, "{ticks:?}");
            assert!(ticks[0] <= low && ticks[ticks.len() - 1] >= high, "{low} {high} {ticks:?}");
        }
        assert_eq!((number(0.25, 0.05), number(2000.0, 1000.0)), ("0.25".to_owned(), "2000".to_owned()));
    }

    #[test]
    fn a_chart_names_its_lines_and_keeps_its_data() {
        let point = |step: f64| Evaluation { step, train_loss: 2.0, loss: f64::NAN, value: step / 10.0 };
        let line = Learning { label: "ls <a>".to_owned(), points: vec![point(50.0), point(100.0)] };
        let chart = learning("x", "Title", "validation accuracy, %", &[line]).unwrap().unwrap();
        assert!(chart.svg.contains("ls &lt;a&gt;") && chart.svg.contains("training steps"));
        assert_eq!(chart.csv.lines().count(), 3);
        assert!(learning("x", "", "", &[Learning::default()]).unwrap().is_none());
    }
}
