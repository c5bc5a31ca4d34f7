//! How many times as fast as something else: a dot per mechanism and length, with a stem from "as fast".

use std::io;

use super::canvas::{self, Align, Canvas, FONT, INK};
use super::scale::{Scale, Unit};
use super::strip::{LINE, Strip, WIDTH};
use super::style::SeriesStyle;
use super::{Chart, table};

const HEADER: f64 = 110.0;
const MARKER: f64 = 8.0;
/// Height of one dot's place in a mechanism's line.
const SLOT: f64 = 19.0;

/// Ratios that share axes.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RatioPanel {
    /// What is shown here.
    pub title: String,
    /// Mechanism, and its ratio at each length.
    pub rows: Vec<(String, Vec<(u64, f64)>)>,
}

/// A chart of `panels` under each other.
pub fn ratios(
    name: &str,
    (title, subtitle): (&str, &str),
    axis: &str,
    panels: &[RatioPanel],
) -> io::Result<Chart> {
    let rows = || panels.iter().flat_map(|panel| &panel.rows);
    let points = || rows().flat_map(|row| &row.1);
    let mut lens: Vec<u64> = points().map(|point| point.0).collect();
    lens.sort_unstable();
    lens.dedup();
    let mut values: Vec<f64> = points().map(|point| point.1).collect();
    values.push(1.0);
    let scale = Scale::covering(Unit::Times, &values);
    let left = Strip::left(rows().map(|row| row.0.as_str()));
    let row = (lens.len() as f64 * SLOT + 8.0).max(LINE);
    let (places, legend) = legend(&lens);
    let first = HEADER + legend + 0.3 * LINE;
    let height = first + panels.iter().map(|panel| Strip::height(panel.rows.len(), row)).sum::<f64>();
    let svg = canvas::document((WIDTH as u32, height.ceil() as u32), |canvas| {
        canvas.bold(title, (24.0, 36.0), Align::Left, FONT * 1.1)?;
        canvas.subtitle(subtitle, 80.0, WIDTH)?;
        for (index, (len, (x, y))) in lens.iter().zip(&places).enumerate() {
            canvas.marker((x + 12.0, *y), MARKER, SeriesStyle::ordinal(index, lens.len()))?;
            canvas.text(&len.to_string(), (x + 32.0, *y), Align::Left, FONT)?;
        }
        let mut top = first;
        for panel in panels {
            let strip = Strip { left, top: Strip::area(top), row, scale: &scale, unit: Unit::Times };
            draw(canvas, &strip, (panel, axis), &lens)?;
            top += Strip::height(panel.rows.len(), row);
        }
        Ok(())
    })?;
    let records = panels.iter().flat_map(|panel| {
        panel.rows.iter().flat_map(move |(label, points)| {
            let head = [panel.title.clone(), label.clone()];
            points.iter().map(move |(len, ratio)| {
                head.iter().cloned().chain([len.to_string(), ratio.to_string()]).collect()
            })
        })
    });
    let csv = table(&["panel", "model", "len", "ratio"], records)?;
    Ok(Chart { name: name.to_owned(), svg, csv })
}

/// Left end and height of each length in the legend, which wraps, and the height of the whole.
fn legend(lens: &[u64]) -> (Vec<(f64, f64)>, f64) {
    let (mut x, mut y) = (24.0, HEADER + 0.5 * LINE);
    let mut places = Vec::new();
    for len in lens {
        let width = canvas::text_width(&len.to_string(), FONT) + 68.0;
        if x + width > WIDTH && x > 24.0 {
            (x, y) = (24.0, y + LINE);
        }
        places.push((x, y));
        x += width;
    }
    (places, y + 0.5 * LINE - HEADER)
}

fn draw(
    canvas: &mut Canvas,
    strip: &Strip,
    (panel, axis): (&RatioPanel, &str),
    lens: &[u64],
) -> io::Result<()> {
    let labels: Vec<&str> = panel.rows.iter().map(|row| row.0.as_str()).collect();
    strip.draw(canvas, (&panel.title, axis), &labels)?;
    let one = strip.x(1.0);
    let bottom = strip.top + labels.len() as f64 * strip.row;
    canvas.line((one, strip.top), (one, bottom), INK, 4)?;
    for (index, (label, points)) in panel.rows.iter().enumerate() {
        for (len, ratio) in points {
            let Ok(place) = lens.binary_search(len) else { continue };
            let y = strip.y(index) + (place as f64 - (lens.len() - 1) as f64 / 2.0) * SLOT;
            let look = SeriesStyle::ordinal(place, lens.len());
            canvas.line((one, y), (strip.x(*ratio), y), look.color, 4)?;
            canvas.marker((strip.x(*ratio), y), MARKER, look)?;
            canvas
                .tip((strip.x(*ratio), y), &format!("{label} at {len}: {ratio:.2} {axis}\n{}", panel.title));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_ratio_has_a_dot_and_a_line_of_data() {
        let lens = [256u64, 512, 1024, 2048, 4096, 8192, 16384, 32768];
        let slow = ("full".to_owned(), lens.map(|len| (len, 0.5)).to_vec());
        let panel =
            RatioPanel { title: "Training".into(), rows: vec![slow, ("ls".into(), vec![(512, 1.75)])] };
        let chart = ratios("x", ("T", "S"), "times", &[panel]).unwrap();
        assert!(chart.csv.ends_with("Training,full,32768,0.5\nTraining,ls,512,1.75\n"), "{}", chart.csv);
        let thick =
            |line: &&str| line.starts_with("<path fill=\"none\"") && line.contains("stroke-width=\"4\"");
        let stems: usize = chart.svg.lines().filter(thick).map(|line| line.matches('M').count()).sum();
        assert_eq!(stems, 9 + 1, "a stem each, and what they start from");
        assert!(chart.svg.contains("0.5×") && !chart.svg.contains("NaN"), "{}", chart.svg);
    }

    #[test]
    fn a_long_legend_wraps() {
        let (places, height) = legend(&[65536; 12]);
        assert!(height > 1.5 * LINE && places.iter().all(|place| place.0 < WIDTH - 130.0), "{places:?}");
        assert!((legend(&[64]).1 - LINE).abs() < 1e-9);
    }
}
