//! Line charts on logarithmic axes, labels at the line ends.

use std::io;

use super::canvas::{self, Align, Canvas, FONT, GRID, INK, Point, SOFT, folded};
use super::labels::spread;
use super::scale::{Scale, Unit};
use super::style::shown;
use super::{Figure, Panel, Series};

/// Pixels of a figure whose labels are not unusually long.
const WIDTH: f64 = 1200.0;
const HEADER: f64 = 110.0;
const LEFT: f64 = 160.0;
/// Least width of the area of a panel.
const AREA: f64 = 560.0;
/// Room between the area and the labels, for their markers.
const LEADER: f64 = 64.0;
const LINE: f64 = FONT * 1.16;
const MARKER: f64 = 9.0;

/// Sizes that all panels of a figure share.
struct Frame {
    width: f64,
    area: f64,
    height: f64,
    /// Left end of the label texts.
    labels: f64,
}

impl Frame {
    fn of(figure: &Figure) -> Self {
        let series = figure.panels.iter().flat_map(|panel| &panel.series);
        let longest = series.map(|series| canvas::text_width(&series.label, FONT)).fold(0.0, f64::max);
        let column = longest + canvas::text_width("  0.00", FONT);
        let area = (WIDTH - LEFT - LEADER - column - 12.0).max(AREA);
        let most = figure.panels.iter().map(|panel| panel.series.len()).max().unwrap_or(0);
        Self {
            width: LEFT + area + LEADER + column + 12.0,
            area,
            height: f64::max(500.0, most as f64 * LINE + 10.0),
            labels: LEFT + area + LEADER,
        }
    }

    fn panel_height(&self) -> f64 {
        self.height + 4.2 * LINE
    }
}

/// Draws `figure` as an SVG document.
pub(super) fn draw(figure: &Figure) -> io::Result<String> {
    let frame = Frame::of(figure);
    let series = figure.panels.iter().flat_map(|panel| &panel.series);
    let crossed = series.flat_map(|series| &series.missing).any(|missing| missing.cross);
    let note = if crossed { 1.2 * LINE } else { 0.0 };
    let subtitle = folded(&figure.subtitle, frame.width - 48.0);
    let header = HEADER + subtitle.len().saturating_sub(1) as f64 * LINE;
    let height = header + figure.panels.len() as f64 * frame.panel_height() + note;
    canvas::document((frame.width.ceil() as u32, height.ceil() as u32), |canvas| {
        canvas.bold(&figure.title, (24.0, 36.0), Align::Left, FONT * 1.1)?;
        for (index, line) in subtitle.iter().enumerate() {
            canvas.colored(line, (24.0, 80.0 + index as f64 * LINE), Align::Left, (FONT, SOFT))?;
        }
        for (index, panel) in figure.panels.iter().enumerate() {
            let top = header + index as f64 * frame.panel_height();
            Drawing::new(panel, figure.unit, &frame, top).draw(canvas)?;
        }
        if crossed {
            let at = (24.0, height - 0.7 * LINE);
            canvas.cross((at.0 + 12.0, at.1), 10.0, INK)?;
            let text = "out of memory or time (height extrapolated)";
            canvas.colored(text, (at.0 + 36.0, at.1), Align::Left, (FONT, SOFT))?;
        }
        Ok(())
    })
}

/// One panel with its axes.
struct Drawing<'a> {
    title: &'a str,
    /// The lines; of a crowd those that are not in front are grey.
    series: Vec<Series>,
    unit: Unit,
    frame: &'a Frame,
    /// Upper and lower edge of the area.
    top: f64,
    bottom: f64,
    x: Scale,
    y: Scale,
}

impl<'a> Drawing<'a> {
    fn new(panel: &'a Panel, unit: Unit, frame: &'a Frame, top: f64) -> Self {
        let (mut xs, mut ys) = (Vec::new(), Vec::new());
        for series in &panel.series {
            for point in &series.points {
                xs.push(point.x);
                ys.push(point.y);
                ys.extend(point.interval.iter().flat_map(|(low, high)| [*low, *high]).filter(|y| *y > 0.0));
            }
            xs.extend(series.missing.iter().filter(|missing| missing.cross).map(|missing| missing.x));
        }
        ys.extend(panel.series.iter().flat_map(crosses).filter_map(|(_, y)| y));
        let top = top + 1.7 * LINE;
        let (x, y) = (Scale::covering(Unit::Length, &xs), Scale::covering(unit, &ys));
        let labels: Vec<&str> = panel.series.iter().map(|series| series.label.as_str()).collect();
        let paint = |(series, shown): (&Series, bool)| {
            let look = if shown { series.look } else { series.look.faint() };
            Series { look, ..series.clone() }
        };
        let series = panel.series.iter().zip(shown(&labels)).map(paint).collect();
        Self { title: &panel.title, series, unit, frame, top, bottom: top + frame.height, x, y }
    }

    fn at(&self, x: f64, y: f64) -> Point {
        let height = self.bottom - self.top;
        (LEFT + self.x.position(x) * self.frame.area, self.bottom - self.y.position(y) * height)
    }

    fn draw(&self, canvas: &mut Canvas) -> io::Result<()> {
        canvas.bold(self.title, (24.0, self.top - LINE), Align::Left, FONT)?;
        self.axes(canvas)?;
        let (front, back): (Vec<&Series>, Vec<&Series>) =
            self.series.iter().partition(|series| !series.look.is_faint());
        back.into_iter().chain(front).try_for_each(|series| self.line(canvas, series))?;
        self.labels(canvas)
    }

    fn axes(&self, canvas: &mut Canvas) -> io::Result<()> {
        let (left, right) = (LEFT, LEFT + self.frame.area);
        for tick in &self.y.ticks {
            let (_, y) = self.at(self.x.low, *tick);
            canvas.line((left, y), (right, y), GRID, 2)?;
            canvas.text(&self.unit.text(*tick), (left - 12.0, y), Align::Right, FONT)?;
        }
        // From the right, so that the longest length always has its text.
        let mut free = f64::INFINITY;
        for tick in self.x.ticks.iter().rev() {
            let (x, _) = self.at(*tick, self.y.low);
            canvas.line((x, self.top), (x, self.bottom), GRID, 2)?;
            canvas.line((x, self.bottom), (x, self.bottom + 8.0), INK, 2)?;
            let text = Unit::Length.text(*tick);
            let half = canvas::text_width(&text, FONT) / 2.0;
            if x + half < free {
                canvas.text(&text, (x, self.bottom + 0.8 * LINE), Align::Center, FONT)?;
                free = x - half - 12.0;
            }
        }
        canvas.frame((left, self.top), (right, self.bottom), INK)?;
        let middle = f64::midpoint(left, right);
        canvas.text("length", (middle, self.bottom + 1.75 * LINE), Align::Center, FONT)
    }

    fn line(&self, canvas: &mut Canvas, series: &Series) -> io::Result<()> {
        let look = series.look;
        let points: Vec<Point> = series.points.iter().map(|point| self.at(point.x, point.y)).collect();
        canvas.path(&points, look, if look.is_faint() { 2 } else { 5 })?;
        let radius = if look.is_faint() { 0.6 * MARKER } else { MARKER };
        for point in &series.points {
            let Some((low, high)) = point.interval.filter(|(low, _)| *low > 0.0) else { continue };
            canvas.line(self.at(point.x, low), self.at(point.x, high), look.color, 3)?;
        }
        for point in &points {
            canvas.marker(*point, radius, look)?;
        }
        for (at, point) in points.iter().zip(&series.points) {
            let interval = point.interval.map_or_else(String::new, |(low, high)| {
                format!(", 95 % interval {} to {}", self.unit.text(low), self.unit.text(high))
            });
            let value = self.unit.text(point.y);
            canvas.tip(*at, &format!("{} at {}: {value}{interval}\n{}", series.label, point.x, self.title));
        }
        for cross in self.crosses(series) {
            if let Some(last) = points.last() {
                canvas.line(*last, cross, look.color, 2)?;
            }
            canvas.cross(cross, 1.3 * radius, look.color)?;
            canvas.tip(cross, &format!("{}: out of memory or time", series.label));
        }
        Ok(())
    }

    /// Where the crosses of `series` stand; at the upper edge where nothing tells the height.
    fn crosses(&self, series: &Series) -> Vec<Point> {
        crosses(series).into_iter().map(|(x, y)| self.at(x, y.unwrap_or(self.y.high))).collect()
    }

    fn labels(&self, canvas: &mut Canvas) -> io::Result<()> {
        let right = self.frame.width - 12.0;
        canvas.colored("slope", (right, self.top - LINE), Align::Right, (FONT, SOFT))?;
        let end = |series: &Series| {
            let last = series.points.last().map(|point| self.at(point.x, point.y));
            self.crosses(series).last().copied().or(last)
        };
        let shown: Vec<(&Series, Point)> =
            self.series.iter().filter_map(|series| Some((series, end(series)?))).collect();
        let wanted: Vec<f64> = shown.iter().map(|(_, end)| end.1).collect();
        let (low, high) = (self.top + 0.5 * LINE, self.bottom - 0.5 * LINE);
        for ((series, _), y) in shown.iter().zip(spread(&wanted, LINE, low, high)) {
            let ink = if series.look.is_faint() { SOFT } else { INK };
            canvas.marker((self.frame.labels - 24.0, y), MARKER, series.look)?;
            canvas.colored(&series.label, (self.frame.labels, y), Align::Left, (FONT, ink))?;
            if let Some(law) = series.law() {
                canvas.colored(&format!("{:.2}", law.slope), (right, y), Align::Right, (FONT, ink))?;
            }
        }
        Ok(())
    }
}

/// Length of every cross, and its value by the series' law; none where too few lengths were measured for one.
fn crosses(series: &Series) -> Vec<(f64, Option<f64>)> {
    let law = series.law();
    let height = |x: f64| law.map(|law| law.factor * x.powf(law.slope));
    let crosses = series.missing.iter().filter(|missing| missing.cross);
    crosses.map(|missing| (missing.x, height(missing.x))).collect()
}
