//! Summaries of samples, comparisons of two of them, and growth laws. Pure functions.
//!
//! What cannot be estimated is `None`, never 0 or NaN: an interval of one sample, a slope through one length.

use serde::{Deserialize, Serialize};
use statrs::distribution::{Binomial, ContinuousCDF, DiscreteCDF, StudentsT};

/// Two-sided coverage of every interval of this crate.
pub const COVERAGE: f64 = 0.95;

/// Samples whose modified z-score exceeds this are outliers (Iglewicz and Hoaglin 1993, "How to detect and
/// handle outliers").
pub const OUTLIER_SCORE: f64 = 3.5;

/// A closed interval.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Interval {
    /// Lower end.
    pub low: f64,
    /// Upper end.
    pub high: f64,
}

impl Interval {
    /// Whether `value` lies inside, ends included.
    pub fn contains(&self, value: f64) -> bool {
        (self.low..=self.high).contains(&value)
    }

    fn around(center: f64, half: f64) -> Self {
        Self { low: center - half, high: center + half }
    }
}

/// What a set of samples says.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Summary {
    /// Number of samples, at least 1.
    pub n: usize,
    /// Arithmetic mean.
    pub mean: f64,
    /// Median; the mean of the middle two for an even number.
    pub median: f64,
    /// Sample standard deviation (divisor n - 1).
    pub std: Option<f64>,
    /// Smallest sample.
    pub min: f64,
    /// Largest sample.
    pub max: f64,
    /// 95 % interval of the mean by Student's t.
    pub mean_interval: Option<Interval>,
    /// 95 % interval of the median; see [`median_interval`].
    pub median_interval: Option<Interval>,
    /// Number of samples whose modified z-score exceeds [`OUTLIER_SCORE`].
    pub outliers: usize,
}

impl Summary {
    /// Summarises `samples`; `None` where there are none or one is not finite.
    pub fn of(samples: &[f64]) -> Option<Self> {
        let sorted = sorted(samples)?;
        let mean = mean(samples)?;
        let std = std_dev(samples);
        Some(Self {
            n: samples.len(),
            mean,
            median: middle(&sorted),
            std,
            min: sorted[0],
            max: sorted[sorted.len() - 1],
            mean_interval: std.and_then(|std| mean_interval(mean, std, samples.len())),
            median_interval: median_interval(samples),
            outliers: outliers(samples).len(),
        })
    }
}

fn sorted(samples: &[f64]) -> Option<Vec<f64>> {
    if samples.is_empty() || samples.iter().any(|sample| !sample.is_finite()) {
        return None;
    }
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    Some(sorted)
}

fn middle(sorted: &[f64]) -> f64 {
    let half = sorted.len() / 2;
    if sorted.len() % 2 == 1 { sorted[half] } else { sorted[half - 1].midpoint(sorted[half]) }
}

/// Arithmetic mean; `None` without samples.
pub fn mean(samples: &[f64]) -> Option<f64> {
    (!samples.is_empty()).then(|| samples.iter().sum::<f64>() / samples.len() as f64)
}

/// Median; `None` without samples or where one is not finite.
pub fn median(samples: &[f64]) -> Option<f64> {
    sorted(samples).map(|sorted| middle(&sorted))
}

/// The value below which `part` of the samples lie, by linear interpolation between order statistics (Hyndman and Fan
/// 1996, type 7); `None` without samples or where one is not finite.
pub fn quantile(samples: &[f64], part: f64) -> Option<f64> {
    let sorted = sorted(samples)?;
    let place = part.clamp(0.0, 1.0) * (sorted.len() - 1) as f64;
    let (low, high) = (sorted[place.floor() as usize], sorted[place.ceil() as usize]);
    Some(low + place.fract() * (high - low))
}

/// Sample standard deviation (divisor n - 1); `None` for fewer than two samples.
pub fn std_dev(samples: &[f64]) -> Option<f64> {
    let mean = mean(samples)?;
    let squares: f64 = samples.iter().map(|sample| (sample - mean).powi(2)).sum();
    (samples.len() > 1).then(|| (squares / (samples.len() - 1) as f64).sqrt())
}

/// 95 % interval of a mean of `n` samples by Student's t with n - 1 degrees of freedom.
pub fn mean_interval(mean: f64, std: f64, n: usize) -> Option<Interval> {
    let t = t_quantile(n.checked_sub(1)? as f64)?;
    Some(Interval::around(mean, t * std / (n as f64).sqrt()))
}

/// 95 % interval in which the mean of `m` further samples of the same normal distribution lies, by Student's t:
/// mean ± t(n - 1) s sqrt(1/n + 1/m). `None` for fewer than two samples.
pub fn prediction_interval(samples: &[f64], m: u64) -> Option<Interval> {
    let (mean, std, n) = (mean(samples)?, std_dev(samples)?, samples.len() as f64);
    let t = t_quantile(n - 1.0)?;
    Some(Interval::around(mean, t * std * (1.0 / n + 1.0 / m.max(1) as f64).sqrt()))
}

/// Distribution-free 95 % interval of the median: the narrowest symmetric pair of order statistics that
/// covers it (binomial; Conover, "Practical Nonparametric Statistics", 3rd ed., section 3.2). Fewer than
/// six samples cannot reach 95 %: then it is [`mean_interval`]'s Student t interval, which assumes a normal
/// distribution.
pub fn median_interval(samples: &[f64]) -> Option<Interval> {
    let sorted = sorted(samples)?;
    let n = sorted.len();
    if n < 6 {
        return mean_interval(mean(samples)?, std_dev(samples)?, n);
    }
    let binomial = Binomial::new(0.5, n as u64).ok()?;
    let tail = (1.0 - COVERAGE) / 2.0;
    // The largest rank whose lower tail still fits; rank 0 always does for n >= 6.
    let rank = (0..n / 2).rev().find(|&rank| binomial.cdf(rank as u64) <= tail)?;
    Some(Interval { low: sorted[rank], high: sorted[n - 1 - rank] })
}

/// Indices of the outliers: modified z-score 0.6745 (x - median) / MAD beyond [`OUTLIER_SCORE`]. Where more
/// than half of the samples are equal, MAD is 0 and the mean absolute deviation stands in for it, scaled
/// by 1.2533 (Iglewicz and Hoaglin's rule; the factors make both estimate a normal's deviation).
pub fn outliers(samples: &[f64]) -> Vec<usize> {
    let Some(center) = median(samples) else { return Vec::new() };
    let distances: Vec<f64> = samples.iter().map(|sample| (sample - center).abs()).collect();
    let mad = median(&distances).unwrap_or(0.0) / 0.6745;
    let deviation = if mad > 0.0 { mad } else { mean(&distances).unwrap_or(0.0) * 1.2533 };
    let beyond = |index: &usize| distances[*index] > OUTLIER_SCORE * deviation;
    (0..samples.len()).filter(beyond).collect()
}

/// Two-sided p-value of a value `t` standard errors from 0, by Student's t with `freedom` degrees of freedom.
pub fn two_sided(t: f64, freedom: f64) -> Option<f64> {
    if freedom > 1e4 {
        // a normal distribution to four digits, which takes no time
        return Some(statrs::function::erf::erfc(t.abs() / std::f64::consts::SQRT_2));
    }
    let distribution = StudentsT::new(0.0, 1.0, freedom).ok()?;
    Some((2.0 * distribution.cdf(-t.abs())).min(1.0))
}

/// The p-values adjusted for being so many (Holm 1979, "A simple sequentially rejective multiple test procedure"): the chance
/// that any adjusted one falls below 5 % is at most 5 % where nothing differs, however they depend on each other.
pub fn holm(p: &[f64]) -> Vec<f64> {
    let mut order: Vec<usize> = (0..p.len()).collect();
    order.sort_by(|a, b| p[*a].total_cmp(&p[*b]));
    let (mut adjusted, mut highest) = (vec![0.0; p.len()], 0.0f64);
    for (rank, index) in order.into_iter().enumerate() {
        highest = highest.max((p.len() - rank) as f64 * p[index]).min(1.0);
        adjusted[index] = highest;
    }
    adjusted
}

/// Quantile of Student's t for a two-sided 95 % interval; `None` without degrees of freedom.
pub(crate) fn t_quantile(freedom: f64) -> Option<f64> {
    if freedom > 1e4 {
        // Cornish and Fisher's expansion, exact to seven digits here: inverting the distribution takes seconds.
        const Z: f64 = 1.959_963_984_540_054;
        return Some(Z + (Z.powi(3) + Z) / (4.0 * freedom));
    }
    let t = StudentsT::new(0.0, 1.0, freedom).ok()?;
    Some(t.inverse_cdf(0.5 + COVERAGE / 2.0))
}

/// Mean, deviation and size of one side of a comparison.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SampleStats {
    /// Mean.
    pub mean: f64,
    /// Sample standard deviation.
    pub std: f64,
    /// Number of samples.
    pub n: usize,
}

/// A comparison of two means with unequal variances (Welch 1947, Biometrika 34).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Welch {
    /// Second mean minus first.
    pub difference: f64,
    /// Its 95 % interval.
    pub interval: Interval,
    /// Degrees of freedom by Welch and Satterthwaite.
    pub freedom: f64,
    /// Two-sided p-value of equal means.
    pub p: f64,
}

/// Compares `second` with `first`; `None` with fewer than two samples on a side, or no spread at all.
pub fn welch(first: SampleStats, second: SampleStats) -> Option<Welch> {
    let difference = second.mean - first.mean;
    let (half, freedom, error) =
        welch_interval((first.std.powi(2), first.n), (second.std.powi(2), second.n))?;
    let t = StudentsT::new(0.0, 1.0, freedom).ok()?;
    let p = 2.0 * t.cdf(-(difference / error).abs());
    Some(Welch { difference, interval: Interval::around(difference, half), freedom, p })
}

/// 95 % interval of `second.mean / first.mean`: Welch's interval of the logarithms, their variances by the
/// delta method (std / mean)^2. `None` as for [`welch`], or unless both means are positive.
pub fn ratio_interval(first: SampleStats, second: SampleStats) -> Option<Interval> {
    if first.mean <= 0.0 || second.mean <= 0.0 {
        return None;
    }
    let relative = |side: SampleStats| ((side.std / side.mean).powi(2), side.n);
    let (half, _, _) = welch_interval(relative(first), relative(second))?;
    let log = (second.mean / first.mean).ln();
    Some(Interval { low: (log - half).exp(), high: (log + half).exp() })
}

/// Half width, degrees of freedom and standard error from two (variance, n).
fn welch_interval(first: (f64, usize), second: (f64, usize)) -> Option<(f64, f64, f64)> {
    if first.1 < 2 || second.1 < 2 {
        return None;
    }
    let (a, b) = (first.0 / first.1 as f64, second.0 / second.1 as f64);
    let freedom = (a + b).powi(2) / (a.powi(2) / (first.1 - 1) as f64 + b.powi(2) / (second.1 - 1) as f64);
    let error = (a + b).sqrt();
    (error > 0.0 && freedom.is_finite()).then_some(())?;
    Some((t_quantile(freedom)? * error, freedom, error))
}

/// A power law y = c x^slope fitted by least squares on logarithms.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PowerLaw {
    /// The exponent: 1 is linear growth, 2 quadratic.
    pub slope: f64,
    /// The factor c.
    pub factor: f64,
    /// Number of points.
    pub n: usize,
}

/// Fits a [`PowerLaw`] through positive points; `None` with fewer than two different x or a point that is
/// not positive and finite.
pub fn power_law(points: &[(f64, f64)]) -> Option<PowerLaw> {
    let usable = |&(x, y): &(f64, f64)| x > 0.0 && y > 0.0 && x.is_finite() && y.is_finite();
    if points.is_empty() || !points.iter().all(usable) {
        return None;
    }
    let n = points.len() as f64;
    let logs: Vec<(f64, f64)> = points.iter().map(|(x, y)| (x.ln(), y.ln())).collect();
    let center = logs.iter().fold((0.0, 0.0), |sum, log| (sum.0 + log.0 / n, sum.1 + log.1 / n));
    let spread: f64 = logs.iter().map(|log| (log.0 - center.0).powi(2)).sum();
    let joint: f64 = logs.iter().map(|log| (log.0 - center.0) * (log.1 - center.1)).sum();
    // Equal x differ from their mean by rounding only.
    (spread > 1e-12).then(|| {
        let slope = joint / spread;
        PowerLaw { slope, factor: (center.1 - slope * center.0).exp(), n: points.len() }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn close(a: f64, b: f64, tolerance: f64) {
        assert!((a - b).abs() <= tolerance, "{a} is not within {tolerance} of {b}");
    }

    #[test]
    fn one_sample_has_no_spread() {
        let one = Summary::of(&[3.0]).unwrap();
        assert_eq!((one.n, one.mean, one.median, one.std), (1, 3.0, 3.0, None));
        assert_eq!((one.mean_interval, one.median_interval, one.outliers), (None, None, 0));
        assert_eq!(Summary::of(&[]), None);
        assert_eq!(Summary::of(&[1.0, f64::NAN]), None);
        assert_eq!(Summary::of(&[1.0, f64::INFINITY]), None);
    }

    #[test]
    fn mean_median_and_deviation() {
        let four = Summary::of(&[4.0, 1.0, 3.0, 2.0]).unwrap();
        assert_eq!((four.mean, four.median, four.min, four.max), (2.5, 2.5, 1.0, 4.0));
        close(four.std.unwrap(), (5.0f64 / 3.0).sqrt(), 1e-15);
        // t(0.975; 3) = 3.182446
        close(four.mean_interval.unwrap().high, 2.5 + 3.182446 * (5.0f64 / 3.0).sqrt() / 2.0, 1e-6);
        assert_eq!(four.mean_interval, four.median_interval);
    }

    /// Standard normal numbers: SplitMix64 through Box and Muller.
    fn normals(mut state: u64) -> impl FnMut() -> f64 {
        let mut uniform = move || {
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut z = state;
            z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
        };
        move || (-2.0 * (1.0 - uniform()).ln()).sqrt() * (std::f64::consts::TAU * uniform()).cos()
    }

    #[test]
    fn an_exact_reproduction_is_called_so_in_95_percent() {
        const TRIALS: usize = 40_000;
        for (n, m) in [(2, 4), (3, 4), (4, 4), (2, 1), (4, 1)] {
            let mut draw = normals(n * 10 + m);
            let mut within = 0;
            for _ in 0..TRIALS {
                let published = (0..m).map(|_| draw()).sum::<f64>() / m as f64;
                let ours: Vec<f64> = (0..n).map(|_| draw()).collect();
                within += usize::from(prediction_interval(&ours, m).unwrap().contains(published));
            }
            let share = 100.0 * within as f64 / TRIALS as f64;
            assert!((share - 95.0).abs() <= 1.0, "{n} runs against a mean of {m}: {share} %");
        }
        assert_eq!(prediction_interval(&[1.0], 4), None);
    }

    #[test]
    fn intervals_of_millions_of_samples_take_no_time_and_join_those_of_few() {
        let half = |n| mean_interval(0.0, (n as f64).sqrt(), n).unwrap().high;
        close(half(10_000_000), 1.959_964, 1e-6);
        close(half(10_001), half(10_003), 1e-7);
        let start = std::time::Instant::now();
        (0..100_000).for_each(|more| assert!(half(10_000_000 + more) > 1.9));
        assert!(start.elapsed().as_secs() < 2);
    }

    #[test]
    fn the_median_interval_takes_the_tabulated_order_statistics() {
        // Lower rank r (1-based) of the 95 % interval: n = 6: 1, 9: 2, 10: 2, 20: 6, 50: 18.
        for (n, rank) in [(6, 1), (8, 1), (9, 2), (10, 2), (20, 6), (50, 18)] {
            let samples: Vec<f64> = (1..=n).rev().map(f64::from).collect();
            let expected = Interval { low: f64::from(rank), high: f64::from(n + 1 - rank) };
            assert_eq!(median_interval(&samples), Some(expected), "n = {n}");
        }
    }

    #[test]
    fn quantiles_interpolate() {
        let four = [4.0, 1.0, 3.0, 2.0];
        assert_eq!([0.0, 0.5, 1.0].map(|part| quantile(&four, part)), [Some(1.0), Some(2.5), Some(4.0)]);
        assert_eq!(quantile(&four, 0.25), Some(1.75));
        assert_eq!((quantile(&[], 0.5), quantile(&[f64::NAN], 0.5)), (None, None));
    }

    #[test]
    fn outliers_are_found_even_where_most_samples_are_equal() {
        assert_eq!(outliers(&[1.0, 1.1, 0.9, 1.05, 0.95, 9.0]), [5]);
        assert_eq!(outliers(&[1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 5.0]), [9]);
        assert!(outliers(&[1.0, 1.1, 0.9, 1.05, 0.95]).is_empty());
        assert!(outliers(&[2.0; 8]).is_empty());
        assert!(outliers(&[]).is_empty());
    }

    #[test]
    fn welch_matches_a_worked_example() {
        // Standard error 1, freedom 1 / (0.16/9 + 0.36/14); quantile and tail by numerical integration.
        let (first, second) =
            (SampleStats { mean: 15.0, std: 2.0, n: 10 }, SampleStats { mean: 20.0, std: 3.0, n: 15 });
        let welch = welch(first, second).unwrap();
        close(welch.freedom, 22.992_700_73, 1e-8);
        close(welch.difference, 5.0, 1e-12);
        close((welch.interval.high - welch.interval.low) / 2.0, 2.068_694, 1e-6);
        close(welch.p, 4.668_366e-5, 1e-10);
    }

    #[test]
    fn many_p_values_are_adjusted_step_by_step() {
        let adjusted = holm(&[0.01, 0.04, 0.03, 0.005]);
        for (got, want) in adjusted.iter().zip([0.03, 0.06, 0.06, 0.02]) {
            close(*got, want, 1e-12);
        }
        assert_eq!(holm(&[0.7, 0.9]), [1.0, 1.0]);
        close(two_sided(1.959_963_985, 1e9).unwrap(), 0.05, 1e-4);
        close(two_sided(-2.228_138_85, 10.0).unwrap(), 0.05, 1e-8);
    }

    #[test]
    fn a_comparison_needs_two_samples_and_some_spread() {
        let still = SampleStats { mean: 1.0, std: 0.0, n: 5 };
        let single = SampleStats { mean: 1.0, std: 1.0, n: 1 };
        let moving = SampleStats { mean: 2.0, std: 0.1, n: 5 };
        assert_eq!(welch(still, still), None);
        assert_eq!(welch(single, moving), None);
        assert!(welch(still, moving).is_some());
        assert_eq!(ratio_interval(SampleStats { mean: 0.0, ..moving }, moving), None);
    }

    #[test]
    fn a_ratio_interval_is_symmetric_in_logarithms() {
        let (slow, fast) =
            (SampleStats { mean: 4.0, std: 0.2, n: 20 }, SampleStats { mean: 2.0, std: 0.1, n: 20 });
        let there = ratio_interval(slow, fast).unwrap();
        let back = ratio_interval(fast, slow).unwrap();
        assert!(there.contains(0.5) && !there.contains(0.55) && !there.contains(0.45));
        close(there.low * back.high, 1.0, 1e-12);
    }

    #[test]
    fn power_laws_are_recovered() {
        let square: Vec<(f64, f64)> = (0..5).map(|i| (2f64.powi(i), 3.0 * 4f64.powi(i))).collect();
        let law = power_law(&square).unwrap();
        close(law.slope, 2.0, 1e-12);
        close(law.factor, 3.0, 1e-12);
        assert_eq!(power_law(&[(1.0, 1.0)]), None);
        assert_eq!(power_law(&[(2.0, 1.0), (2.0, 5.0)]), None);
        assert_eq!(power_law(&[(1.0, 1.0), (2.0, 0.0)]), None);
        assert_eq!(power_law(&[]), None);
    }
}
