//! Weights of a cell that trains at several rates: where they lie, and which of them are tested.

use std::path::Path;

use crate::train::training_loop::{CheckpointFiles, EvalPoint};

/// Where training at `rate` keeps its weights in the folder of a cell.
pub fn files(cell: &Path, rate: f64) -> CheckpointFiles {
    let name = |what: &str| cell.join(format!("rate-{rate:e}-{what}.safetensors"));
    CheckpointFiles { last: name("last"), best: name("best") }
}

/// Of trainings in the order of their rates, with their best evaluations, the one that is tested: that of the highest accuracy, among
/// equals that of the lowest loss, then the first.
pub fn best<T>(tried: impl Iterator<Item = (T, EvalPoint)>) -> Option<(T, EvalPoint)> {
    let key = |point: &EvalPoint| (point.score.value, -point.score.loss);
    tried.reduce(|a, b| if key(&b.1) > key(&a.1) { b } else { a })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::train::training_loop::EvalScore;

    #[test]
    fn accuracy_decides_then_loss_then_the_order() {
        let point = |(value, loss)| EvalPoint {
            step: 1,
            train_loss: 0.0,
            score: EvalScore { loss, value },
            rate: None,
        };
        let chosen = |scores: &[(f64, f64)]| best(scores.iter().map(|score| point(*score)).enumerate());
        let number = |scores: &[(f64, f64)]| chosen(scores).map(|(number, _)| number);
        assert_eq!(number(&[(50.0, 0.1), (60.0, 0.9), (40.0, 0.0)]), Some(1));
        assert_eq!(number(&[(100.0, 0.3), (100.0, 0.2), (100.0, 0.2)]), Some(1));
        assert_eq!(number(&[]), None);
    }
}
