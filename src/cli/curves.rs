//! Learning curves of the commands that train, drawn while they do.

use std::path::Path;

use crate::protocol::Protocol;
use crate::protocol::training::Curve;
use crate::report::chart::{Evaluation, Learning, learning};
use crate::train::session::Point;

/// Draws the curves of the group that is being trained. A chart that cannot be written does not end a run.
pub fn draw(protocol: &Protocol, all: &[Curve], folder: Option<&Path>) {
    if let Some(Err(error)) = folder.map(|folder| write(protocol, all, folder)) {
        log::warn!("the learning curve was not drawn: {error}");
    }
}

fn write(protocol: &Protocol, all: &[Curve], folder: &Path) -> std::io::Result<()> {
    let (Some(group), Some(shown)) = (all.last().map(|curve| curve.group.as_str()), &protocol.curve) else {
        return Ok(());
    };
    let here = all.iter().filter(|curve| curve.group == group);
    let points = |curve: &Curve| {
        let point = |point: &Point| Evaluation {
            step: point.step as f64,
            train_loss: point.train_loss,
            loss: point.score.loss,
            value: (shown.value)(&point.score),
        };
        curve.points.iter().map(point).collect()
    };
    let lines: Vec<Learning> =
        here.map(|curve| Learning { label: curve.label.clone(), points: points(curve) }).collect();
    let (name, title) = (format!("{}-{group}-curves", protocol.name), format!("Learning {group}"));
    if let Some(chart) = learning(&name, &title, shown.axis, &lines)? {
        chart.write(folder)?;
    }
    Ok(())
}
