//! What simple rules reach, and how a number stands to it.
//!
//! A floor belongs to a data set, a split, a subset and, where words are predicted, a tokenizer: it stands only beside rows
//! of the same.

use crate::Row;
use crate::departures;

/// What the best simple rule reaches.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Floor {
    pub rule: String,
    pub value: f64,
    /// Examples that it was tested on, of an accuracy.
    pub tested: Option<f64>,
    /// The subset of the data set, in the words of `differs`; empty: all of it.
    pub data: Vec<String>,
}

/// How a number stands to a floor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AgainstFloor {
    /// Better by more than the error of both.
    Better,
    /// The same within the error of both, or the same printed digits.
    Same,
    /// Worse by more than the error of both.
    Worse,
}

/// Standard errors within which two accuracies are the same: 95 %.
const ERRORS: f64 = 1.96;
/// Half of the last digit that is printed.
const ROUNDING: f64 = 0.005;

impl Floor {
    /// How `value` stands to it. An accuracy has the standard error of the split it was tested on, as the floor has.
    pub fn against(&self, value: f64, lower_is_better: bool) -> AgainstFloor {
        let variance =
            |percent: f64, tested: f64| percent.clamp(0.0, 100.0) * (100.0 - percent).max(0.0) / tested;
        let tested = self.tested.filter(|tested| *tested >= 1.0);
        let error =
            tested.map_or(0.0, |tested| (variance(value, tested) + variance(self.value, tested)).sqrt());
        let ahead = if lower_is_better { self.value - value } else { value - self.value };
        match ahead {
            _ if ahead.abs() <= (ERRORS * error).max(ROUNDING) => AgainstFloor::Same,
            _ if ahead > 0.0 => AgainstFloor::Better,
            _ => AgainstFloor::Worse,
        }
    }
}

impl AgainstFloor {
    /// The mark behind a number; none where it is better.
    pub const fn mark(self) -> &'static str {
        match self {
            Self::Better => "",
            Self::Same => "≈",
            Self::Worse => "↓",
        }
    }
}

/// The subset of its data set that `row` is about. How many of a part of a test split filled whole batches is not told apart:
/// errors say how large it is.
pub(super) fn subset(row: &Row) -> Vec<String> {
    let plain = |word: &str| match word.strip_prefix("tested on ").and_then(|rest| rest.split_once('(')) {
        Some((_, whole)) => format!("tested on a part ({whole}"),
        None => word.to_owned(),
    };
    departures::data_words(row).into_iter().map(plain).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_and_rounding_are_respected() {
        let floor = |value, tested| Floor { rule: String::new(), value, tested, data: Vec::new() };
        let listops = floor(37.55, Some(2000.0));
        let stands = [36.0, 37.5, 40.0, 41.0, 33.0].map(|value| listops.against(value, false));
        assert_eq!(
            stands,
            [
                AgainstFloor::Same,
                AgainstFloor::Same,
                AgainstFloor::Same,
                AgainstFloor::Better,
                AgainstFloor::Worse
            ]
        );
        assert_eq!(floor(50.917, Some(872.0)).against(50.91, false), AgainstFloor::Same);
        let bits = floor(2.1, None);
        assert_eq!(
            [2.097, 2.0, 2.2].map(|value| bits.against(value, true)),
            [AgainstFloor::Same, AgainstFloor::Better, AgainstFloor::Worse]
        );
    }

    #[test]
    fn a_subset_is_told_by_its_words() {
        let row = |words: &str| Row { differs: Some(words.to_owned()), ..Row::new("lra", "ls") };
        assert!(subset(&row("rate 2e-3 (1e-4); f32 (mixed precision)")).is_empty());
        assert_eq!(subset(&row("steps 1 (2); 4000 examples of each split")), ["4000 examples of each split"]);
        assert_eq!(subset(&row("tested on 576 pairs (17437)")), subset(&row("tested on 600 pairs (17437)")));
        assert_ne!(subset(&row("4000000 symbols of the corpus (100000000)")), subset(&row("")));
    }
}
