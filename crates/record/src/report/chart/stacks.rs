//! Stacked bars: what a whole consists of, a bar per model.

use std::io;

use super::canvas::{self, Align, Canvas, FONT, GRID, INK};
use super::linear::{number, ticks};
use super::strip::{LINE, WIDTH};
use super::style::SeriesStyle;
use super::{Chart, table};

const HEADER: f64 = 110.0;
const RIGHT: f64 = WIDTH - 40.0;
const ROW: f64 = 62.0;

/// One bar.
#[derive(Clone, Debug, PartialEq)]
pub struct Stack {
    /// Name.
    pub label: String,
    /// Parts from the left: which kind (an index), whether it is drawn pale, and how much.
    pub parts: Vec<(usize, bool, f64)>,
}

/// Bars that share an axis.
#[derive(Clone, Debug, PartialEq)]
pub struct StackPanel {
    /// What is shown here.
    pub title: String,
    /// The bars.
    pub stacks: Vec<Stack>,
}

/// A chart of `panels`; `kinds` are the names of the parts, `words` say what a full and a pale part is, `axis` what is
/// measured.
pub fn stacks(
    name: &str,
    (title, subtitle): (&str, &str),
    (kinds, words, axis): (&[&str], [&str; 2], &str),
    panels: &[StackPanel],
) -> io::Result<Chart> {
    let labels = panels.iter().flat_map(|panel| &panel.stacks).map(|stack| stack.label.as_str());
    let left = labels.map(|label| canvas::text_width(label, FONT)).fold(0.0, f64::max) + 48.0;
    let longest = kinds.iter().map(|kind| canvas::text_width(kind, FONT)).fold(0.0, f64::max);
    let column = longest + 80.0;
    let columns = ((WIDTH - 48.0) / column).floor().max(1.0);
    let legend = (kinds.len() as f64 / columns).ceil() * LINE;
    let height_of = |panel: &StackPanel| panel.stacks.len() as f64 * ROW + 4.2 * LINE;
    let top = HEADER + legend + 0.5 * LINE;
    let height = top + panels.iter().map(height_of).sum::<f64>();
    let svg = canvas::document((WIDTH as u32, height.ceil() as u32), |canvas| {
        canvas.bold(title, (24.0, 36.0), Align::Left, FONT * 1.1)?;
        canvas.subtitle(subtitle, 80.0, WIDTH)?;
        for (index, kind) in kinds.iter().enumerate() {
            let (row, place) = ((index as f64 / columns).floor(), index as f64 % columns);
            let (x, y) = (24.0 + place * column, HEADER + 0.5 * LINE + row * LINE);
            canvas.bar((x, y - 11.0), (x + 24.0, y + 11.0), SeriesStyle::of_part(index, false))?;
            canvas.bar((x + 26.0, y - 11.0), (x + 50.0, y + 11.0), SeriesStyle::of_part(index, true))?;
            canvas.text(kind, (x + 60.0, y), Align::Left, FONT)?;
        }
        let mut at = top;
        for panel in panels {
            draw(canvas, panel, (kinds, words, axis), (left, at + 1.7 * LINE))?;
            at += height_of(panel);
        }
        Ok(())
    })?;
    let records = panels.iter().flat_map(|panel| {
        panel.stacks.iter().flat_map(move |stack| {
            stack.parts.iter().map(move |(kind, pale, value)| {
                let texts = [&*panel.title, &*stack.label, kinds[*kind], words[usize::from(*pale)]];
                texts.map(str::to_owned).into_iter().chain([value.to_string()]).collect()
            })
        })
    });
    let csv = table(&["panel", "model", "kind", "part", axis], records)?;
    Ok(Chart { name: name.to_owned(), svg, csv })
}

fn draw(
    canvas: &mut Canvas,
    panel: &StackPanel,
    (kinds, words, axis): (&[&str], [&str; 2], &str),
    (left, top): (f64, f64),
) -> io::Result<()> {
    let whole = |stack: &Stack| stack.parts.iter().map(|part| part.2).sum::<f64>();
    let longest = panel.stacks.iter().map(whole).fold(0.0, f64::max);
    let xs = ticks(0.0, longest, 5);
    let high = xs[xs.len() - 1];
    let x = |value: f64| left + value / high * (RIGHT - left);
    let bottom = top + panel.stacks.len() as f64 * ROW;
    canvas.heading(&panel.title, (24.0, top - LINE), WIDTH - 48.0)?;
    for &tick in &xs {
        canvas.line((x(tick), top), (x(tick), bottom), GRID, 2)?;
        let text = number(tick, xs[1] - xs[0]);
        let middle = x(tick).min(WIDTH - canvas::text_width(&text, FONT) / 2.0 - 8.0);
        canvas.text(&text, (middle, bottom + 0.8 * LINE), Align::Center, FONT)?;
    }
    for (index, stack) in panel.stacks.iter().enumerate() {
        let middle = top + (index as f64 + 0.5) * ROW;
        canvas.text(&stack.label, (left - 14.0, middle), Align::Right, FONT)?;
        let mut done = 0.0;
        for &(kind, pale, value) in &stack.parts {
            let (from, to) = (x(done), x(done + value));
            done += value;
            canvas.bar((from, middle - 22.0), (to, middle + 22.0), SeriesStyle::of_part(kind, pale))?;
            let share = 100.0 * value / whole(stack);
            let told = format!(
                "{}, {} {}: {value:.3} {axis} ({share:.1} %)",
                stack.label,
                kinds[kind],
                words[usize::from(pale)]
            );
            canvas.tip((f64::midpoint(from, to), middle), &told);
        }
    }
    canvas.frame((left, top), (RIGHT, bottom), INK)?;
    canvas.text(axis, (f64::midpoint(left, RIGHT), bottom + 1.75 * LINE), Align::Center, FONT)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_stand_one_behind_another() {
        let stack =
            |label: &str, parts: &[(usize, bool, f64)]| Stack { label: label.into(), parts: parts.into() };
        let stacks =
            vec![stack("ls", &[(0, false, 2.0), (0, true, 3.0), (1, false, 5.0)]), stack("none", &[])];
        let panel = StackPanel { title: "Training".to_owned(), stacks };
        let words = ["forward", "backward"];
        let chart = super::stacks("x", ("T", "S"), (&["ffn", "other"], words, "ms"), &[panel]).unwrap();
        assert!(chart.csv.contains("Training,ls,ffn,backward,3\n"), "{}", chart.csv);
        assert!(chart.svg.contains("ls, other forward: 5.000 ms (50.0 %)") && !chart.svg.contains("NaN"));
    }
}
