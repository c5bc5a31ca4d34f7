//! Learning curves, drawn while a run goes on.

use std::path::PathBuf;

use super::grid::Place;
use crate::protocol::training::Curve;
use crate::report::chart::{Evaluation, Learning, learning};

/// What a command calls its curves.
pub struct Curves {
    /// Command: the charts' prefix.
    pub command: &'static str,
    /// Axis of what is shown of an evaluation.
    pub measure: &'static str,
    /// That number, from the evaluation.
    pub value: fn(&crate::train::session::Score) -> f64,
    /// Where charts are written; nowhere without.
    pub folder: Option<PathBuf>,
}

impl Curves {
    /// The folder that `place` names.
    pub fn folder(place: &Place) -> Option<PathBuf> {
        (!place.no_plot).then(|| place.plots_dir.clone())
    }

    /// Draws the curves of the group that is being trained. A chart that cannot be written does not end a run.
    pub fn draw(&self, all: &[Curve]) {
        if let Some(Err(error)) = self.folder.as_ref().map(|folder| self.write(all, folder)) {
            log::warn!("the learning curve was not drawn: {error}");
        }
    }

    fn write(&self, all: &[Curve], folder: &std::path::Path) -> std::io::Result<()> {
        let Some(group) = all.last().map(|curve| curve.group.as_str()) else { return Ok(()) };
        let here = all.iter().filter(|curve| curve.group == group);
        let points = |curve: &Curve| {
            let point = |point: &crate::train::session::Point| Evaluation {
                step: point.step as f64,
                train_loss: point.train_loss,
                loss: point.score.loss,
                value: (self.value)(&point.score),
            };
            curve.points.iter().map(point).collect()
        };
        let lines: Vec<Learning> =
            here.map(|curve| Learning { label: curve.label.clone(), points: points(curve) }).collect();
        let (name, title) = (format!("{}-{group}-curves", self.command), format!("Learning {group}"));
        if let Some(chart) = learning(&name, &title, self.measure, &lines)? {
            chart.write(folder)?;
        }
        Ok(())
    }
}
