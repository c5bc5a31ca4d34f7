//! Accuracy by kind of text and by number of insertions (Transformer-LS, Table 2).

use std::collections::BTreeSet;
use std::io;

use super::linear::{Line, Panel, Plane, Ticks};
use super::style::looks;
use super::{Chart, table};

/// One model: (place or number, accuracy, standard error).
#[derive(Clone, Debug, PartialEq)]
pub struct Slope {
    /// Name.
    pub label: String,
    /// Points in order.
    pub points: Vec<(f64, f64, f64)>,
}

/// Kinds of text: the places 0, 1, 2 of the first panel.
const KINDS: [&str; 3] = ["clean", "insertion", "deletion"];

/// Accuracy in percent by kind of text (above) and by number of insertions (below).
pub fn slopes(
    name: &str,
    (title, subtitle): (&str, &str),
    (by_kind, by_count): (&[Slope], &[Slope]),
) -> io::Result<Chart> {
    let counts: BTreeSet<u64> =
        by_count.iter().flat_map(|slope| &slope.points).map(|point| point.0 as u64).collect();
    let counts: Vec<(f64, String)> =
        counts.into_iter().map(|count| (count as f64, count.to_string())).collect();
    let counts = counts.iter().map(|(count, text)| (*count, text.as_str())).collect();
    let kinds = KINDS.iter().zip(0..).map(|(kind, x)| (f64::from(x), *kind)).collect();
    let panels = vec![
        Panel { title: "accuracy, %", axis: "kind of text", ticks: Ticks::At(kinds), lines: lines(by_kind) },
        Panel { title: "accuracy, %", axis: "insertions", ticks: Ticks::At(counts), lines: lines(by_count) },
    ];
    let records =
        [("kind of text", by_kind), ("insertions", by_count)].into_iter().flat_map(|(panel, slopes)| {
            slopes.iter().flat_map(move |slope| {
                slope.points.iter().map(move |&(x, y, std)| {
                    let kind = KINDS.get(x as usize).filter(|_| panel == "kind of text");
                    let at = kind.map_or_else(|| x.to_string(), |kind| (*kind).to_owned());
                    vec![panel.to_owned(), slope.label.clone(), at, y.to_string(), std.to_string()]
                })
            })
        });
    let csv = table(&["panel", "model", "at", "accuracy", "error"], records)?;
    Ok(Chart { name: name.to_owned(), svg: Plane { title, subtitle, panels }.draw()?, csv })
}

fn lines(slopes: &[Slope]) -> Vec<Line<'_>> {
    let labels: Vec<&str> = slopes.iter().map(|slope| slope.label.as_str()).collect();
    let mut lines = Vec::new();
    for (slope, look) in slopes.iter().zip(looks(&labels)) {
        let line = Line::solid(look, &slope.label, Vec::new());
        lines.push(Line { look, markers: true, points: slope.points.clone(), ..line });
    }
    lines
}
