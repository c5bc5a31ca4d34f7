//! Logarithmic axes: ranges, ticks and their texts.

/// What an axis measures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// Positions.
    Length,
    /// Seconds.
    Seconds,
    /// Bytes.
    Bytes,
    /// A ratio.
    Times,
    /// So many per second.
    Rate,
    /// A small number without a unit, such as a learning rate.
    Number,
    /// A share of a whole.
    Share,
}

impl Unit {
    /// A tick's text with its unit.
    pub fn text(self, value: f64) -> String {
        match self {
            Self::Length => format!("{value}"),
            Self::Times => format!("{}×", short(value)),
            Self::Rate => format!("{} /s", short(value)),
            Self::Number => format!("{value:.1e}").replace(".0e", "e"),
            Self::Share => format!("{} %", short(100.0 * value)),
            Self::Seconds if value < 0.999e-3 => format!("{} µs", short(value * 1e6)),
            Self::Seconds if value < 0.999 => format!("{} ms", short(value * 1e3)),
            Self::Seconds => format!("{} s", short(value)),
            Self::Bytes => {
                let units = ["B", "KiB", "MiB", "GiB", "TiB"];
                let step = ((value.max(1.0).log2() + 1e-9) / 10.0).floor().min(4.0);
                format!("{} {}", short(value / 1024f64.powf(step)), units[step as usize])
            }
        }
    }
}

/// At most three significant digits, without trailing zeros.
fn short(value: f64) -> String {
    let digits = (2 - value.abs().max(1e-9).log10().floor() as i32).clamp(0, 9) as usize;
    let text = format!("{value:.digits$}");
    if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.').to_owned() } else { text }
}

/// A logarithmic range and its ticks.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Scale {
    pub(super) low: f64,
    pub(super) high: f64,
    pub(super) ticks: Vec<f64>,
}

/// Most ticks on an axis.
const MOST: usize = 7;

impl Scale {
    /// Covers `values` (all positive): ends on ticks at powers of two for bytes, at 1, 2 and 5 times powers
    /// of ten for seconds, finer for ratios; lengths are their own ticks.
    pub(super) fn covering(unit: Unit, values: &[f64]) -> Self {
        let low = values.iter().copied().fold(f64::INFINITY, f64::min);
        let high = values.iter().copied().fold(0.0, f64::max);
        let (low, high) = if low.is_finite() && high > 0.0 { (low, high) } else { (1.0, 2.0) };
        match unit {
            Unit::Length => Self::at(values, low, high),
            Unit::Seconds | Unit::Rate | Unit::Number | Unit::Share => {
                Self::snapped(&ONE_TWO_FIVE, low, high)
            }
            Unit::Bytes => Self::snapped(&POWERS_OF_TWO, low, high),
            Unit::Times => Self::snapped(&RATIOS, low, high),
        }
    }

    /// Ticks at the values themselves, with room at both ends.
    fn at(values: &[f64], low: f64, high: f64) -> Self {
        let mut ticks = values.to_vec();
        ticks.sort_by(f64::total_cmp);
        ticks.dedup();
        let margin = if high > low { (high / low).powf(0.05) } else { 1.5 };
        Self { low: low / margin, high: high * margin, ticks }
    }

    fn snapped(steps: &[fn(i32) -> f64], low: f64, high: f64) -> Self {
        for step in steps {
            let mut ticks = Vec::new();
            let first = (-400..400).rev().find(|i| step(*i) <= low * (1.0 + 1e-9)).unwrap_or(0);
            for i in first..first + 1 + MOST as i32 {
                ticks.push(step(i));
                if step(i) >= high * (1.0 - 1e-9) && i > first {
                    break;
                }
            }
            let covers = ticks.last().is_some_and(|last| *last >= high * (1.0 - 1e-9));
            if covers && ticks.len() <= MOST {
                return Self { low: ticks[0], high: ticks[ticks.len() - 1], ticks };
            }
        }
        Self::at(&[low, high], low, high)
    }

    /// Position of `value` between 0 (low) and 1 (high).
    pub(super) fn position(&self, value: f64) -> f64 {
        (value / self.low).ln() / (self.high / self.low).ln()
    }
}

const ONE_TWO_FIVE: [fn(i32) -> f64; 4] = [
    |i| [1.0, 2.0, 5.0][i.rem_euclid(3) as usize] * 10f64.powi(i.div_euclid(3)),
    |i| 10f64.powi(i),
    |i| 100f64.powi(i),
    |i| 10_000f64.powi(i),
];

const RATIOS: [fn(i32) -> f64; 4] = [
    |i| {
        [1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0][i.rem_euclid(10) as usize]
            * 10f64.powi(i.div_euclid(10))
    },
    ONE_TWO_FIVE[0],
    ONE_TWO_FIVE[1],
    ONE_TWO_FIVE[2],
];

const POWERS_OF_TWO: [fn(i32) -> f64; 5] =
    [|i| 2f64.powi(i), |i| 4f64.powi(i), |i| 16f64.powi(i), |i| 64f64.powi(i), |i| 1024f64.powi(i)];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_carry_their_unit() {
        let texts: Vec<String> =
            [2e-5, 0.001, 0.05, 0.5, 1.0, 20.0, 1234.0].iter().map(|v| Unit::Seconds.text(*v)).collect();
        assert_eq!(texts, ["20 µs", "1 ms", "50 ms", "500 ms", "1 s", "20 s", "1234 s"]);
        let texts: Vec<String> = [512.0, 1024.0, 1048576.0, 3.5 * 1048576.0, 1073741824.0]
            .iter()
            .map(|v| Unit::Bytes.text(*v))
            .collect();
        assert_eq!([1e-3, 2e-3, 2.5e-2].map(|v| Unit::Number.text(v)), ["1e-3", "2e-3", "2.5e-2"]);
        assert_eq!(texts, ["512 B", "1 KiB", "1 MiB", "3.5 MiB", "1 GiB"]);
    }

    #[test]
    fn every_scale_covers_its_values_with_few_ticks() {
        for (low, high) in [(0.003, 0.0031), (0.01, 0.09), (1e-5, 3.0), (1e-6, 1e6), (5.0, 5.0), (0.1, 0.1)] {
            for unit in [Unit::Seconds, Unit::Bytes, Unit::Times, Unit::Number] {
                let scale = Scale::covering(unit, &[low, high]);
                assert!(scale.low <= low * 1.001 && scale.high >= high * 0.999, "{unit:?} {scale:?}");
                assert!((2..=MOST).contains(&scale.ticks.len()), "{unit:?} {scale:?}");
                assert!(scale.position(low) > -1e-3 && scale.position(high) < 1.001, "{unit:?} {scale:?}");
            }
        }
    }

    #[test]
    fn no_values_give_some_scale() {
        for unit in [Unit::Length, Unit::Seconds, Unit::Bytes, Unit::Times] {
            let scale = Scale::covering(unit, &[]);
            assert!(scale.position(scale.low).is_finite(), "{scale:?}");
        }
        assert_eq!(Scale::covering(Unit::Length, &[64.0, 32.0, 64.0]).ticks, [32.0, 64.0]);
    }
}
