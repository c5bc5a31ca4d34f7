//! The ratio of two measured values with its interval, and whether it tells them apart: what rankings, crossings, tables of
//! papers and charts all decide by.

use super::wrap::TIED;
use crate::Row;
use crate::stats::{Interval, SampleStats, ratio_interval};

/// Differences of at most this part are none: another build or another day changes as much.
pub const NEGLIGIBLE: f64 = 0.02;

/// An interval that reaches so many times the ratio from it says nothing in digits.
const WIDE: f64 = 10.0;
/// What stands in the place of a ratio that says nothing.
pub(super) const UNRESOLVED: &str = "not resolved";
/// An interval that contains 1 and is no wider says that both are the same.
const EQUAL: f64 = 0.1;

/// One value divided by another.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Ratio {
    /// The ratio.
    pub value: f64,
    /// Its 95 % interval; `None` where both values are exact, or a side has no spread.
    pub interval: Option<Interval>,
}

/// How a ratio stands to 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// Below 1 by more than [`NEGLIGIBLE`], and so is its whole interval below 1.
    Less,
    /// Not told apart from 1, or no further from it than [`NEGLIGIBLE`].
    Same,
    /// Above 1 by more than [`NEGLIGIBLE`], and so is its whole interval above 1.
    More,
}

impl Ratio {
    /// The ratio of two values without spread, such as bytes; `None` unless both are positive and finite.
    pub fn exact(over: f64, under: f64) -> Option<Self> {
        let positive = |value: f64| value > 0.0 && value.is_finite();
        (positive(over) && positive(under)).then(|| Self { value: over / under, interval: None })
    }

    /// The ratio of the values of two rows.
    pub fn of(over: &Row, under: &Row) -> Option<Self> {
        let exact = Self::exact(over.value?, under.value?)?;
        let side = |row: &Row| Some(SampleStats { mean: row.value?, std: row.std?, n: row.n? as usize });
        let interval = side(under).zip(side(over)).and_then(|(under, over)| ratio_interval(under, over));
        Some(Self { interval, ..exact })
    }

    /// How it stands to 1.
    pub fn standing(self) -> Standing {
        match (self.upper() < 1.0, self.lower() > 1.0) {
            (true, _) => Standing::Less,
            (_, true) => Standing::More,
            _ => Standing::Same,
        }
    }

    /// Below 1 exactly where the ratio is [`Standing::Less`].
    pub(super) fn upper(self) -> f64 {
        let high = self.interval.map_or(self.value, |interval| interval.high);
        high.max(self.value * (1.0 + NEGLIGIBLE))
    }

    /// Above 1 exactly where the ratio is [`Standing::More`].
    pub(super) fn lower(self) -> f64 {
        let low = self.interval.map_or(self.value, |interval| interval.low);
        low.min(self.value / (1.0 + NEGLIGIBLE))
    }

    /// Whether it says which is larger and by how much, or that both are the same: an interval around 1 has to be narrow, and
    /// no interval may be wider than the ratio.
    pub(super) fn is_resolved(self) -> bool {
        self.interval.is_none_or(|interval| {
            let width = interval.high - interval.low;
            width <= self.value && (!interval.contains(1.0) || width <= EQUAL)
        })
    }

    /// `1.82 ±0.1`, or that it is not resolved.
    pub(super) fn text(self) -> String {
        match self.is_resolved() {
            true => ratio_text(self.value, self.interval),
            false => UNRESOLVED.replace(' ', &TIED.to_string()),
        }
    }
}

/// `1.82 ±0.1`.
pub(super) fn ratio_text(times: f64, interval: Option<Interval>) -> String {
    let Some(Interval { low, high }) = interval else { return format!("{times:.2}") };
    let half = (high - times).max(times - low);
    if half > WIDE * times {
        return format!("{times:.2} ±wide");
    }
    let digits = match half {
        _ if half < 0.0095 => 3,
        _ if half < 0.095 => 2,
        _ if half < 0.95 => 1,
        _ => 0,
    };
    format!("{times:.digits$} ±{half:.digits$}")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn two_percent_and_the_interval_decide() {
        let of = |value, interval: Option<(f64, f64)>| {
            let interval = interval.map(|(low, high)| Interval { low, high });
            Ratio { value, interval }.standing()
        };
        assert_eq!(of(0.97, None), Standing::Less);
        assert_eq!(of(0.99, None), Standing::Same, "544 bytes of 18.8 million are none");
        assert_eq!(of(0.99, Some((0.985, 0.995))), Standing::Same, "sure, and no difference");
        assert_eq!(of(0.8, Some((0.6, 1.01))), Standing::Same, "a difference, and not sure");
        assert_eq!(of(0.8, Some((0.7, 0.9))), Standing::Less);
        assert_eq!(of(1.3, Some((1.1, 1.5))), Standing::More);
    }

    proptest! {
        /// Swapping both sides swaps the answer, and a wider interval never decides what a narrower one left open.
        #[test]
        fn standings_are_antisymmetric_and_cautious(value in 0.05f64..20.0, half in 0.0f64..1.0, more in 0.0f64..1.0) {
            let at = |half: f64| Ratio {
                value,
                interval: Some(Interval { low: value / (1.0 + half), high: value * (1.0 + half) }),
            };
            let turned = Ratio {
                value: 1.0 / value,
                interval: Some(Interval { low: 1.0 / (value * (1.0 + half)), high: (1.0 + half) / value }),
            };
            let swapped = match at(half).standing() {
                Standing::Less => Standing::More,
                Standing::Same => Standing::Same,
                Standing::More => Standing::Less,
            };
            prop_assert_eq!(turned.standing(), swapped);
            let wider = at(half + more).standing();
            prop_assert!(wider == Standing::Same || wider == at(half).standing());
        }
    }
}
