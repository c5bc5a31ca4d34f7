//! Drawing in pixels on an SVG document.

use std::io;

use plotters::prelude::{Color, DrawingBackend, IntoFont, RGBColor, SVGBackend, ShapeStyle, TextStyle};
use plotters::style::FontStyle;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use super::compact::compact;
use super::style::{Dash, Marker, SeriesStyle};
use crate::text::visible;

/// Height of letters in pixels. A chart is 1200 pixels wide: at 8 cm in print letters are 6 points high.
pub(super) const FONT: f64 = 33.0;

/// Black, and the greys of frames and helper lines.
pub(super) const INK: RGBColor = RGBColor(0x1a, 0x1a, 0x1a);
pub(super) const SOFT: RGBColor = RGBColor(0x55, 0x55, 0x55);
pub(super) const GRID: RGBColor = RGBColor(0xdd, 0xdd, 0xdd);

/// Where a text stands relative to its point.
#[derive(Clone, Copy)]
pub(super) enum Align {
    /// The point is at its left end.
    Left,
    /// The point is in its middle.
    Center,
    /// The point is at its right end.
    Right,
}

/// Two colours of the series (style.rs).
pub(super) const BLUE: RGBColor = RGBColor(0x00, 0x72, 0xb2);
pub(super) const ORANGE: RGBColor = RGBColor(0xd5, 0x5e, 0x00);

/// A point in pixels, y downwards.
pub(super) type Point = (f64, f64);

/// An SVG document under construction.
pub(super) struct Canvas<'a> {
    backend: SVGBackend<'a>,
    /// Invisible marks with what a pointer over them is told.
    tips: String,
    /// Marks below all others.
    ground: String,
    /// What is told where the pointer is within a mark.
    script: Option<&'static str>,
}

/// Draws a document of `size` pixels with `draw` and returns its text.
pub(super) fn document(
    size: (u32, u32),
    draw: impl FnOnce(&mut Canvas) -> io::Result<()>,
) -> io::Result<String> {
    let mut text = String::new();
    let backend = SVGBackend::with_string(&mut text, size);
    let mut canvas = Canvas { backend, tips: String::new(), ground: String::new(), script: None };
    canvas.rect((0.0, 0.0), (f64::from(size.0), f64::from(size.1)), RGBColor(0xff, 0xff, 0xff))?;
    draw(&mut canvas)?;
    canvas.backend.present().map_err(io::Error::other)?;
    let (tips, ground) = (std::mem::take(&mut canvas.tips), std::mem::take(&mut canvas.ground));
    let script = canvas.script;
    drop(canvas);
    let mut text = compact(&text);
    if let (Some(end), false) = (text.rfind("</svg>"), tips.is_empty()) {
        let script = script.map_or_else(String::new, |script| format!("<script>\n{script}</script>\n"));
        text.insert_str(end, &format!("<g class=\"tips\" fill-opacity=\"0\">\n{tips}</g>\n{script}"));
    }
    if let Some(paper) = text.find("/>\n").filter(|_| !ground.is_empty()) {
        text.insert_str(paper + 3, &ground);
    }
    Ok(text)
}

/// Text that cannot start markup, nor end an attribute.
pub(super) fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

fn pixel(point: Point) -> (i32, i32) {
    (point.0.round() as i32, point.1.round() as i32)
}

/// Estimated width of `text` in pixels at letter height `font`: the mean of a wide sans-serif.
pub(super) fn text_width(text: &str, font: f64) -> f64 {
    text.chars().count() as f64 * font * 0.57
}

/// `text` in lines of at most `room` pixels, broken behind semicolons and commas.
pub(super) fn folded(text: &str, room: f64) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for piece in text.split_inclusive("; ").flat_map(|piece| piece.split_inclusive(", ")) {
        match lines.last_mut() {
            Some(line) if text_width(&format!("{line}{}", piece.trim_end()), FONT) <= room => {
                line.push_str(piece)
            }
            _ => lines.push(piece.to_owned()),
        }
    }
    lines.iter().map(|line| line.trim_end().to_owned()).collect()
}

impl Canvas<'_> {
    /// A straight line.
    pub(super) fn line(&mut self, from: Point, to: Point, color: RGBColor, width: u32) -> io::Result<()> {
        let style = ShapeStyle { color: color.to_rgba(), filled: false, stroke_width: width };
        if pixel(from) == pixel(to) {
            return Ok(());
        }
        self.backend.draw_line(pixel(from), pixel(to), &style).map_err(io::Error::other)
    }

    /// A filled rectangle.
    pub(super) fn rect(&mut self, corner: Point, opposite: Point, color: RGBColor) -> io::Result<()> {
        let (corner, opposite) = (pixel(corner), pixel(opposite));
        self.backend.draw_rect(corner, opposite, &color, true).map_err(io::Error::other)
    }

    /// The outline of a rectangle (a path, because the library's rectangles have lines of one pixel).
    pub(super) fn frame(&mut self, corner: Point, opposite: Point, color: RGBColor) -> io::Result<()> {
        let style = ShapeStyle { color: color.to_rgba(), filled: false, stroke_width: 3 };
        let corners = [corner, (opposite.0, corner.1), opposite, (corner.0, opposite.1), corner];
        self.backend.draw_path(corners.map(pixel), &style).map_err(io::Error::other)
    }

    /// A line through `points` in the dash of a series.
    pub(super) fn path(&mut self, points: &[Point], look: SeriesStyle, width: u32) -> io::Result<()> {
        let style = ShapeStyle { color: look.color.to_rgba(), filled: false, stroke_width: width };
        for stroke in dashes(points, look.dash.lengths()) {
            let stroke: Vec<_> = stroke.into_iter().map(pixel).collect();
            self.backend.draw_path(stroke, &style).map_err(io::Error::other)?;
        }
        Ok(())
    }

    /// The marker of a series, about `2 * radius` across.
    pub(super) fn marker(&mut self, center: Point, radius: f64, style: SeriesStyle) -> io::Result<()> {
        let thin = ShapeStyle { color: style.color.to_rgba(), filled: false, stroke_width: 4 };
        let white = RGBColor(0xff, 0xff, 0xff);
        if style.marker == Marker::Circle {
            let fill = if style.open { white } else { style.color };
            let radius = radius.round() as u32;
            self.backend.draw_circle(pixel(center), radius, &fill, true).map_err(io::Error::other)?;
            return self.backend.draw_circle(pixel(center), radius, &thin, false).map_err(io::Error::other);
        }
        let corners = style.marker.corners().iter();
        let mut corners: Vec<_> =
            corners.map(|(x, y)| pixel((center.0 + x * radius, center.1 + y * radius))).collect();
        let fill = if style.open { white } else { style.color };
        self.backend.fill_polygon(corners.clone(), &fill).map_err(io::Error::other)?;
        corners.push(corners[0]);
        self.backend.draw_path(corners, &thin).map_err(io::Error::other)
    }

    /// A bar of a series: filled, or by its stroke an outline, a pale one, or one with a line through.
    pub(super) fn bar(&mut self, corner: Point, opposite: Point, style: SeriesStyle) -> io::Result<()> {
        match style.dash {
            Dash::Solid => return self.rect(corner, opposite, style.color),
            Dash::Dashed => (),
            Dash::Dotted => {
                let (low, high) = (pixel(corner), pixel(opposite));
                self.backend.draw_rect(low, high, &style.color.mix(0.4), true).map_err(io::Error::other)?;
            }
            Dash::Mixed => {
                let middle = f64::midpoint(corner.0, opposite.0);
                self.line((middle, corner.1), (middle, opposite.1), style.color, 3)?;
            }
        }
        self.frame(corner, opposite, style.color)
    }

    /// A translucent disc, or its outline.
    pub(super) fn bubble(
        &mut self,
        center: Point,
        radius: f64,
        color: RGBColor,
        open: bool,
    ) -> io::Result<()> {
        let radius = radius.round() as u32;
        let edge =
            ShapeStyle { color: color.to_rgba(), filled: false, stroke_width: if open { 2 } else { 4 } };
        if !open {
            let fill = color.mix(0.45);
            self.backend.draw_circle(pixel(center), radius, &fill, true).map_err(io::Error::other)?;
        }
        self.backend.draw_circle(pixel(center), radius, &edge, false).map_err(io::Error::other)
    }

    /// What a pointer over the place is told.
    pub(super) fn tip(&mut self, (x, y): Point, text: &str) {
        let text = escape(text);
        self.tips.push_str(&format!(
            "<circle cx=\"{x:.0}\" cy=\"{y:.0}\" r=\"16\"><title>{text}</title></circle>\n"
        ));
    }

    /// Rectangles of one colour, with one corner and its opposite each, below all other marks: as many as cells of a matrix, in one element.
    pub(super) fn rects(&mut self, rects: &[(Point, Point)], color: RGBColor) {
        let RGBColor(red, green, blue) = color;
        self.ground.push_str(&format!("<path fill=\"#{red:02X}{green:02X}{blue:02X}\" d=\""));
        for (corner, opposite) in rects {
            let ((left, top), (right, bottom)) = (pixel(*corner), pixel(*opposite));
            let width = right - left;
            self.ground.push_str(&format!("M{left} {top}h{width}v{}h-{width}z", bottom - top));
        }
        self.ground.push_str("\"/>\n");
    }

    /// An area with `attributes`, and what a pointer over it is told where no script runs; `script` tells more.
    pub(super) fn told_area(
        &mut self,
        (corner, opposite): (Point, Point),
        (attributes, text): (&str, &str),
        script: &'static str,
    ) {
        let ((left, top), (right, bottom)) = (pixel(corner), pixel(opposite));
        self.tips.push_str(&format!(
            "<rect x=\"{left}\" y=\"{top}\" width=\"{}\" height=\"{}\" {attributes}><title>{}</title></rect>\n",
            right - left,
            bottom - top,
            escape(text)
        ));
        self.script = Some(script);
    }

    /// A cross: something ran out here.
    pub(super) fn cross(&mut self, center: Point, radius: f64, color: RGBColor) -> io::Result<()> {
        let (x, y) = center;
        self.line((x - radius, y - radius), (x + radius, y + radius), color, 6)?;
        self.line((x - radius, y + radius), (x + radius, y - radius), color, 6)
    }

    /// Text of letter height `font`, vertically centred on `at`.
    pub(super) fn text(&mut self, text: &str, at: Point, align: Align, font: f64) -> io::Result<()> {
        self.styled(text, at, align, (font, FontStyle::Normal, INK))
    }

    /// Bold text.
    pub(super) fn bold(&mut self, text: &str, at: Point, align: Align, font: f64) -> io::Result<()> {
        self.styled(text, at, align, (font, FontStyle::Bold, INK))
    }

    /// Bold text in letters small enough for `room` pixels.
    pub(super) fn heading(&mut self, text: &str, at: Point, room: f64) -> io::Result<()> {
        let font = (FONT * room / text_width(text, FONT * 1.12)).min(FONT);
        self.bold(text, at, Align::Left, font)
    }

    /// A line under the title at height `y`, in letters as small as a chart `width` pixels wide needs.
    pub(super) fn subtitle(&mut self, text: &str, y: f64, width: f64) -> io::Result<()> {
        let fits = (width - 48.0) / text_width(text, 1.0).max(1.0);
        self.colored(text, (24.0, y), Align::Left, (fits.clamp(0.6 * FONT, 0.9 * FONT), SOFT))
    }

    /// Text in a colour.
    pub(super) fn colored(
        &mut self,
        text: &str,
        at: Point,
        align: Align,
        (font, color): (f64, RGBColor),
    ) -> io::Result<()> {
        self.styled(text, at, align, (font, FontStyle::Normal, color))
    }

    fn styled(
        &mut self,
        text: &str,
        at: Point,
        align: Align,
        (font, style, color): (f64, FontStyle, RGBColor),
    ) -> io::Result<()> {
        let horizontal = match align {
            Align::Left => HPos::Left,
            Align::Center => HPos::Center,
            Align::Right => HPos::Right,
        };
        // The backend writes the size divided by 1.24.
        let font = ("sans-serif", font * 1.24).into_font().style(style);
        let style = TextStyle::from(font).color(&color).pos(Pos::new(horizontal, VPos::Center));
        self.backend.draw_text(&visible(text), &style, pixel(at)).map_err(io::Error::other)
    }
}

/// Cuts the line through `points` into strokes of `(on, off)` pixels; none means one stroke.
fn dashes(points: &[Point], lengths: Option<(f64, f64)>) -> Vec<Vec<Point>> {
    let Some((on, off)) = lengths else { return vec![points.to_vec()] };
    let mut strokes: Vec<Vec<Point>> = Vec::new();
    let (mut drawing, mut left) = (false, 0.0);
    for pair in points.windows(2) {
        let (from, to) = (pair[0], pair[1]);
        let length = (to.0 - from.0).hypot(to.1 - from.1);
        let at = |done: f64| {
            let part = done / length;
            (from.0 + part * (to.0 - from.0), from.1 + part * (to.1 - from.1))
        };
        let mut done = 0.0;
        while done < length {
            if left <= 0.0 {
                drawing = !drawing;
                left = if drawing { on } else { off };
                if drawing {
                    strokes.push(vec![at(done)]);
                }
            }
            let step = f64::min(left, length - done);
            (done, left) = (done + step, left - step);
            if let (true, Some(stroke)) = (drawing, strokes.last_mut()) {
                stroke.push(at(done));
            }
        }
    }
    strokes
}

impl Dash {
    /// Pixels on and off; none for a solid line.
    fn lengths(self) -> Option<(f64, f64)> {
        match self {
            Self::Solid => None,
            Self::Dashed => Some((20.0, 12.0)),
            Self::Dotted => Some((5.0, 10.0)),
            Self::Mixed => Some((32.0, 8.0)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dashes_go_on_around_corners() {
        let points = [(0.0, 0.0), (15.0, 0.0), (15.0, 20.0)];
        let strokes = dashes(&points, Some((10.0, 10.0)));
        assert_eq!(strokes, [vec![(0.0, 0.0), (10.0, 0.0)], vec![(15.0, 5.0), (15.0, 15.0)]]);
        assert_eq!(dashes(&points, None), [points.to_vec()]);
        assert!(dashes(&[(1.0, 1.0), (1.0, 1.0)], Some((10.0, 10.0))).is_empty());
    }

    #[test]
    fn what_a_pointer_is_told_lies_above_everything() {
        let svg = document((10, 10), |canvas| {
            canvas.tip((1.0, 2.0), "a<b");
            canvas.text("c", (1.0, 1.0), Align::Left, 10.0)
        });
        let svg = svg.unwrap();
        assert!(svg.ends_with("r=\"16\"><title>a&lt;b</title></circle>\n</g>\n</svg>\n"), "{svg}");
    }

    #[test]
    fn text_is_escaped() {
        let svg = document((10, 10), |canvas| canvas.text("a<b&c", (1.0, 1.0), Align::Left, 10.0)).unwrap();
        assert!(svg.contains("a&lt;b&amp;c") && svg.ends_with("</svg>\n"), "{svg}");
    }
}
