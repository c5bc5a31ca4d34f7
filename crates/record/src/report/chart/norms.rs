//! Ratios of norms by layer (Transformer-LS, Figure 2).

use std::io;

use super::linear::{Line, Panel, Plane, Ticks};
use super::style::looks;
use super::{Chart, table};
use crate::norms::Norm;

/// A chart of the ratio of window to slot norms by layer, keys above and values below, a line per model.
pub fn norms(subtitle: &str, norms: &[Norm]) -> io::Result<Chart> {
    let mut models: Vec<&str> = norms.iter().map(|norm| norm.model.as_str()).collect();
    models.dedup();
    let looks = looks(&models);
    let layers = norms.iter().map(|norm| norm.layer).max().unwrap_or(0);
    let texts: Vec<String> = (1..=layers).map(|layer| layer.to_string()).collect();
    let panel = |kind: &'static str, title| {
        let lines = models.iter().zip(&looks).map(|(model, look)| {
            let here =
                norms.iter().filter(|norm| norm.model == *model && norm.kind == kind && norm.head == 0);
            let points = here.map(|norm| (norm.layer as f64, norm.ratio)).collect();
            Line { markers: true, ..Line::solid(*look, model, points) }
        });
        let ticks = texts.iter().zip(1..).map(|(text, layer)| (f64::from(layer), text.as_str())).collect();
        Panel { title, axis: "layer", ticks: Ticks::At(ticks), lines: lines.collect() }
    };
    let plane = Plane {
        title: "Norm of the window's vectors over that of the slots",
        subtitle,
        panels: vec![panel("key", "keys, ratio"), panel("value", "values, ratio")],
    };
    let records = norms.iter().map(|norm| {
        let Norm { model, layer, kind, head, window, slots, ratio } = norm;
        let numbers = [window, slots, ratio].map(f64::to_string);
        [model.clone(), layer.to_string(), kind.clone(), head.to_string()]
            .into_iter()
            .chain(numbers)
            .collect()
    });
    let csv = table(&["model", "layer", "kind", "head", "window", "slots", "ratio"], records)?;
    Ok(Chart { name: "norms".to_owned(), svg: plane.draw()?, csv })
}
