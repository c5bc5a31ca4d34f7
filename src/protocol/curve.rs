//! Learning curves: what they show, and their points.

use crate::train::training_loop::{EvalPoint, EvalScore};

/// What a learning curve shows of an evaluation.
#[derive(Clone, Copy)]
pub struct CurveSpec {
    /// Column in `curve.csv`.
    pub column: &'static str,
    /// Axis of the chart.
    pub axis: &'static str,
    /// Unit in messages.
    pub unit: &'static str,
    /// The number.
    pub value: fn(&EvalScore) -> f64,
    /// Whether less is better.
    pub less: bool,
    /// Whether a cell trains at several learning rates, each with a line of its own.
    pub by_rate: bool,
}

impl CurveSpec {
    /// Accuracy on the validation split.
    pub const ACCURACY: Self = Self {
        column: "validation_accuracy",
        axis: "validation accuracy, %",
        unit: "%",
        value: |score| score.value,
        less: false,
        by_rate: false,
    };

    /// The best of `points`.
    pub fn best(&self, points: &[EvalPoint]) -> Option<f64> {
        let values = points.iter().map(|point| (self.value)(&point.score));
        if self.less { values.reduce(f64::min) } else { values.reduce(f64::max) }
    }
}

/// The learning curve of one cell.
#[derive(Clone, Debug)]
pub struct CellCurve {
    /// The chart it belongs in.
    pub group: String,
    /// Mechanism, and the seed where there are several.
    pub label: String,
    /// The evaluations.
    pub points: Vec<EvalPoint>,
}
