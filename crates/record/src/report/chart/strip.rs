//! A panel with a line per mechanism and a logarithmic horizontal axis: what charts of dots share.

use std::io;

use super::canvas::{self, Align, Canvas, FONT, GRID, INK};
use super::scale::{Scale, Unit};

/// Pixels of a chart.
pub(super) const WIDTH: f64 = 1200.0;
pub(super) const LINE: f64 = FONT * 1.16;
/// Right edge of the area.
const RIGHT: f64 = WIDTH - 40.0;

/// Where a panel stands and what its axis measures.
pub(super) struct Strip<'a> {
    /// Left edge of the area.
    pub(super) left: f64,
    /// Upper edge of the area.
    pub(super) top: f64,
    /// Height of one mechanism's line.
    pub(super) row: f64,
    pub(super) scale: &'a Scale,
    pub(super) unit: Unit,
}

impl Strip<'_> {
    /// Left edge of an area that has room for `labels`.
    pub(super) fn left<'a>(labels: impl Iterator<Item = &'a str>) -> f64 {
        // names may have more wide letters than a text has on average
        labels.map(|label| 1.2 * canvas::text_width(label, FONT)).fold(0.0, f64::max) + 40.0
    }

    /// Height of a panel of `rows` lines with its title and its axis.
    pub(super) fn height(rows: usize, row: f64) -> f64 {
        rows as f64 * row + 4.2 * LINE
    }

    /// Upper edge of the area of a panel that begins at `top`.
    pub(super) fn area(top: f64) -> f64 {
        top + 1.7 * LINE
    }

    pub(super) fn x(&self, value: f64) -> f64 {
        self.left + self.scale.position(value) * (RIGHT - 16.0 - self.left)
    }

    /// Middle of line number `index`.
    pub(super) fn y(&self, index: usize) -> f64 {
        self.top + (index as f64 + 0.5) * self.row
    }

    /// Title, grid, frame and texts; `axis` says what is measured.
    pub(super) fn draw(
        &self,
        canvas: &mut Canvas,
        (title, axis): (&str, &str),
        labels: &[&str],
    ) -> io::Result<()> {
        canvas.heading(title, (24.0, self.top - LINE), WIDTH - 48.0)?;
        let bottom = self.top + labels.len() as f64 * self.row;
        // From the right, so that the last tick always has its text.
        let mut free = f64::INFINITY;
        for tick in self.scale.ticks.iter().rev() {
            let x = self.x(*tick);
            let text = self.unit.text(*tick);
            let half = canvas::text_width(&text, FONT) / 2.0;
            canvas.line((x, self.top), (x, bottom), GRID, 2)?;
            if x + half < free {
                let middle = x.min(WIDTH - half - 12.0);
                canvas.text(&text, (middle, bottom + 0.8 * LINE), Align::Center, FONT)?;
                free = x - half - 12.0;
            }
        }
        canvas.frame((self.left, self.top), (RIGHT, bottom), INK)?;
        let middle = f64::midpoint(self.left, RIGHT);
        canvas.text(axis, (middle, bottom + 1.75 * LINE), Align::Center, FONT)?;
        for (index, label) in labels.iter().enumerate() {
            canvas.text(label, (self.left - 14.0, self.y(index)), Align::Right, FONT)?;
        }
        Ok(())
    }
}
