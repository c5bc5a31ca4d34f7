//! Lines on linear axes, labels at the line ends: learning curves, norms by layer, accuracy by kind of text.

use std::io;

use super::canvas::{self, Align, Canvas, FONT, GRID, INK, Point};
use super::labels::spread;
use super::style::{Dash, SeriesStyle};

/// Pixels of a figure whose labels are not unusually long.
const WIDTH: f64 = 1200.0;
/// Least width of the area of a panel.
const AREA: f64 = 640.0;
const HEADER: f64 = 110.0;
const LEFT: f64 = 130.0;
const LEADER: f64 = 48.0;
const HEIGHT: f64 = 420.0;
const LINE: f64 = FONT * 1.16;
/// Gap between ticks in pixels, at least.
const TICK: f64 = 70.0;
const MARKER: f64 = 9.0;
/// Points up to which each has a marker; a single one would not be seen without.
const FEW: usize = 12;
/// Most points of a line with a text under the pointer.
const TIPS: usize = 24;
/// Lines of a panel up to which it grows so that every name has its place. More are a
/// cloud without dashes and markers, named where one points at it.
const NAMED: usize = 60;

/// Panels under each other.
pub(super) struct Plane<'a> {
    pub(super) title: &'a str,
    pub(super) subtitle: &'a str,
    pub(super) panels: Vec<Panel<'a>>,
}

/// The horizontal axis.
pub(super) enum Ticks<'a> {
    /// Round numbers from 0.
    FromZero,
    /// These numbers, each with a text.
    At(Vec<(f64, &'a str)>),
}

pub(super) struct Panel<'a> {
    pub(super) title: &'a str,
    /// What the horizontal axis counts.
    pub(super) axis: &'a str,
    pub(super) ticks: Ticks<'a>,
    pub(super) lines: Vec<Line<'a>>,
}

/// One line; without a label it has none at its end.
#[derive(Clone)]
pub(super) struct Line<'a> {
    pub(super) label: Option<&'a str>,
    pub(super) look: SeriesStyle,
    /// Whether points have markers.
    pub(super) markers: bool,
    /// Points in the order of x, with half the length of their error bars.
    pub(super) points: Vec<(f64, f64, f64)>,
}

impl<'a> Line<'a> {
    /// A line without error bars, drawn through; with markers where there are few points.
    pub(super) fn solid(look: SeriesStyle, label: &'a str, points: Vec<(f64, f64)>) -> Self {
        let points: Vec<_> = points.into_iter().map(|(x, y)| (x, y, 0.0)).collect();
        Self { label: Some(label), look: look.solid(), markers: points.len() <= FEW, points }
    }
}

impl Plane<'_> {
    /// The picture.
    pub(super) fn draw(&self) -> io::Result<String> {
        let lines = || self.panels.iter().flat_map(|panel| &panel.lines);
        let labels = lines().filter_map(|line| line.label);
        let longest = labels.map(|label| canvas::text_width(label, FONT)).fold(0.0, f64::max);
        let area = (WIDTH - LEFT - LEADER - longest - 24.0).max(AREA);
        let width = LEFT + area + LEADER + longest + 24.0;
        let most = self.panels.iter().map(|panel| panel.named()).max().unwrap_or(0);
        let tall = HEIGHT.max(most.min(NAMED) as f64 * LINE + 10.0);
        let many = format!("{most} lines, too many to name; only solid ones are drawn; {}", self.subtitle);
        let subtitle = if most > NAMED { &many } else { self.subtitle };
        let subtitle = canvas::folded(subtitle, (width - 48.0) / 0.75); // smaller letters before more lines
        let header = HEADER + subtitle.len().saturating_sub(1) as f64 * LINE;
        let panel = tall + 4.2 * LINE;
        let height = header + self.panels.len() as f64 * panel;
        canvas::document((width.ceil() as u32, height.ceil() as u32), |canvas| {
            canvas.bold(self.title, (24.0, 36.0), Align::Left, FONT * 1.1)?;
            for (index, line) in subtitle.iter().enumerate() {
                canvas.subtitle(line, 80.0 + index as f64 * LINE, width)?;
            }
            for (index, one) in self.panels.iter().enumerate() {
                let top = header + index as f64 * panel + 1.7 * LINE;
                Frame { panel: one, area, top, bottom: top + tall, x: one.span() }.draw(canvas)?;
            }
            Ok(())
        })
    }
}

impl Panel<'_> {
    /// Lines with a name.
    fn named(&self) -> usize {
        self.lines.iter().filter(|line| line.label.is_some()).count()
    }

    /// Ends of the horizontal axis.
    fn span(&self) -> (f64, f64) {
        let xs = self.lines.iter().flat_map(|line| &line.points).map(|point| point.0);
        match &self.ticks {
            Ticks::FromZero => (0.0, xs.fold(1.0, f64::max)),
            Ticks::At(ticks) => {
                let all = || ticks.iter().map(|tick| tick.0);
                let (low, high) = (all().fold(f64::MAX, f64::min), all().fold(f64::MIN, f64::max));
                let margin = 0.06 * (high - low).max(1e-9);
                (low - margin, high + margin)
            }
        }
    }
}

/// Axes of one panel.
struct Frame<'a> {
    panel: &'a Panel<'a>,
    area: f64,
    top: f64,
    bottom: f64,
    x: (f64, f64),
}

impl Frame<'_> {
    fn draw(&self, canvas: &mut Canvas) -> io::Result<()> {
        let panel = self.panel;
        canvas.bold(panel.title, (24.0, self.top - LINE), Align::Left, FONT)?;
        let points = || panel.lines.iter().flat_map(|line| &line.points).filter(|point| point.1.is_finite());
        let (low, high) = points()
            .flat_map(|&(_, y, half)| [y - half, y + half])
            .fold((f64::MAX, f64::MIN), |(low, high), value| (low.min(value), high.max(value)));
        let (low, high) = if low > high { (0.0, 1.0) } else { (low, high) };
        let ys = ticks(low, high, ((self.bottom - self.top) / TICK) as usize);
        self.axes(canvas, &ys)?;
        let (mut ends, crowd) = (Vec::new(), panel.named() > NAMED);
        for line in panel.lines.iter().filter(|line| !crowd || line.label.is_some()) {
            let points = line.points.iter().filter(|point| point.1.is_finite());
            let drawn: Vec<Point> = points.clone().map(|&(x, y, _)| self.at(x, y, &ys)).collect();
            let stroke = if line.look.dash == Dash::Solid { 5 } else { 3 };
            canvas.path(&drawn, line.look, stroke)?;
            for &(x, y, half) in points.filter(|point| point.2 > 0.0) {
                canvas.line(self.at(x, y - half, &ys), self.at(x, y + half, &ys), line.look.color, 3)?;
            }
            // a pointer cannot tell more of them apart
            let every = drawn.len().div_ceil(TIPS).max(1);
            let told = line.points.iter().filter(|point| point.1.is_finite()).zip(&drawn);
            for (point, at) in told.step_by(every) {
                let Some(label) = line.label else { break };
                let half = if point.2 > 0.0 { format!(" ±{:.3}", point.2) } else { String::new() };
                canvas.tip(
                    *at,
                    &format!("{label}, {} {}: {:.4}{half}\n{}", panel.axis, point.0, point.1, panel.title),
                );
            }
            let alike = |other: &&Line| other.label.is_some() && other.look.color == line.look.color;
            if line.markers && !crowd {
                drawn.iter().try_for_each(|point| canvas.marker(*point, MARKER, line.look))?;
            } else if line.label.is_some() && !crowd && panel.lines.iter().filter(alike).count() > 1 {
                // only markers tell lines of one colour apart: a few, at different places
                let every = (drawn.len() / FEW).max(1);
                let mut marked = drawn.iter().skip(ends.len() % every).step_by(every);
                marked.try_for_each(|point| canvas.marker(*point, MARKER, line.look))?;
            }
            if let (Some(label), Some(end)) = (line.label, drawn.last()) {
                ends.push((label, line.look, *end));
            }
        }
        if crowd { Ok(()) } else { self.labels(canvas, &ends) }
    }

    fn at(&self, x: f64, y: f64, ys: &[f64]) -> Point {
        let (low, high) = (ys[0], ys[ys.len() - 1]);
        let part = (y - low) / (high - low);
        let along = (x - self.x.0) / (self.x.1 - self.x.0);
        (LEFT + along * self.area, self.bottom - part * (self.bottom - self.top))
    }

    fn axes(&self, canvas: &mut Canvas, ys: &[f64]) -> io::Result<()> {
        for &tick in ys {
            let (_, y) = self.at(0.0, tick, ys);
            canvas.line((LEFT, y), (LEFT + self.area, y), GRID, 2)?;
            canvas.text(&number(tick, ys[1] - ys[0]), (LEFT - 12.0, y), Align::Right, FONT)?;
        }
        let round: Vec<(f64, String)> = match &self.panel.ticks {
            Ticks::FromZero => {
                let all = ticks(0.0, self.x.1, (self.area / 170.0) as usize).into_iter();
                // what is counted is whole
                all.filter(|x| *x <= self.x.1 && x.fract() == 0.0).map(|x| (x, number(x, 1.0))).collect()
            }
            Ticks::At(ticks) => ticks.iter().map(|(x, text)| (*x, (*text).to_owned())).collect(),
        };
        let mut free = f64::NEG_INFINITY;
        for (x, text) in round {
            let (x, _) = self.at(x, ys[0], ys);
            canvas.line((x, self.bottom), (x, self.bottom + 8.0), INK, 2)?;
            let half = canvas::text_width(&text, FONT) / 2.0;
            if x - half > free {
                canvas.text(&text, (x, self.bottom + 0.8 * LINE), Align::Center, FONT)?;
                free = x + half + 8.0;
            }
        }
        canvas.frame((LEFT, self.top), (LEFT + self.area, self.bottom), INK)?;
        let middle = LEFT + self.area / 2.0;
        canvas.text(self.panel.axis, (middle, self.bottom + 1.75 * LINE), Align::Center, FONT)
    }

    fn labels(&self, canvas: &mut Canvas, ends: &[(&str, SeriesStyle, Point)]) -> io::Result<()> {
        let wanted: Vec<f64> = ends.iter().map(|(_, _, end)| end.1).collect();
        let (low, high) = (self.top + 0.5 * LINE, self.bottom - 0.5 * LINE);
        let edge = LEFT + self.area;
        for ((label, look, _), y) in ends.iter().zip(spread(&wanted, LINE, low, high)) {
            canvas.marker((edge + LEADER - 22.0, y), MARKER, *look)?;
            canvas.text(label, (edge + LEADER, y), Align::Left, FONT)?;
        }
        Ok(())
    }
}

/// Round numbers from at most `low` to at least `high`, about `most` of them and at least two.
pub(super) fn ticks(low: f64, high: f64, most: usize) -> Vec<f64> {
    let span = (high - low).max(1e-9 * high.abs()).max(1e-12);
    let raw = span / most.max(2) as f64;
    let unit = 10f64.powf(raw.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].into_iter().map(|x| x * unit).find(|step| *step >= raw).unwrap_or(raw);
    let first = (low / step).floor();
    let last = (high / step).ceil().max(first + 1.0);
    (0..=(last - first) as usize).map(|index| (first + index as f64) * step).collect()
}

/// `value` with as many decimals as ticks of distance `step` need.
pub(super) fn number(value: f64, step: f64) -> String {
    let decimals = (-(step * 1.000_001).log10().floor()).clamp(0.0, 9.0) as usize;
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
        assert_eq!(number(0.3, 0.3 - 0.2), "0.3");
    }

    #[test]
    fn named_ticks_stand_where_they_are() {
        let line = Line::solid(SeriesStyle::default(), "a", vec![(0.0, 1.0), (2.0, 3.0)]);
        let plane = Plane {
            title: "T",
            subtitle: "",
            panels: vec![Panel {
                title: "P",
                axis: "texts",
                ticks: Ticks::At(vec![(0.0, "clean"), (2.0, "changed")]),
                lines: vec![Line { markers: true, ..line }],
            }],
        };
        let svg = plane.draw().unwrap();
        assert!(svg.contains("clean") && svg.contains("changed") && !svg.contains("NaN"), "{svg}");
    }
}
