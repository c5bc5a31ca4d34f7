//! How exactly a value is known.

use super::CellRows;
use crate::Row;
use crate::stats::{Interval, mean, t_quantile, two_sided};

/// Relative standard deviation between the medians of two runs of one program on a machine in one state: the placement of a
/// process in memory, which no sample of it tells.
const PROCESS: f64 = 0.01;
/// The same where a run says nothing of the machine: it has no calibrations.
const UNKNOWN: f64 = 0.03;

/// The value of a cell on one side, and how exactly it is known.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Estimate {
    /// Mean of the runs, of times the geometric one.
    pub(super) value: f64,
    /// Variance of its logarithm and its degrees of freedom, where the rows say how much they spread.
    error: Option<Variance>,
    /// The least and the most that was seen, where no deviation is known.
    seen: Option<(f64, f64)>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
struct Variance {
    value: f64,
    freedom: f64,
}

/// Whether a metric is a time, or its inverse.
pub(super) fn is_time(metric: &str) -> bool {
    matches!(metric, "step_time" | "steps_per_second")
}

/// The row's value, if it is one: files that others wrote may say NaN.
fn finite(row: &Row) -> Option<f64> {
    row.value.filter(|value| value.is_finite())
}

/// Variance of the logarithm of the row's value, by its own samples.
fn sampled(row: &Row, value: f64) -> Option<Variance> {
    let n = row.n.filter(|n| *n > 1)? as f64;
    let mean_error = (row.std? / value).powi(2) / n;
    if !is_time(&row.metric) {
        return (mean_error > 0.0).then_some(Variance { value: mean_error, freedom: n - 1.0 });
    }
    // a median's own interval holds whatever the distribution; without one it is known less exactly than a mean
    let own = row.interval().filter(|(low, high)| n >= 6.0 && *low > 0.0 && high > low);
    let value = match own {
        Some((low, high)) => ((high / low).ln() / 2.0 / 1.96).powi(2),
        None => std::f64::consts::FRAC_PI_2 * mean_error,
    };
    Some(Variance { value, freedom: n - 1.0 })
}

/// [`sampled`], and for times what two runs differ by even where nothing changed.
fn expected((row, machine): &(&Row, &super::RunMachine)) -> Option<Variance> {
    let value = finite(row).filter(|value| *value > 0.0)?;
    if !is_time(&row.metric) {
        return sampled(row, value);
    }
    // a time of one step is known as little as the machine
    let sampled = sampled(row, value).unwrap_or(Variance { value: UNKNOWN.powi(2), freedom: 2.0 });
    // half of the spread of calibrations: a cell has about four turns
    let between = machine.calibration.map_or(UNKNOWN, |known| PROCESS.hypot(known.spread / 2.0));
    let whole = sampled.value + between.powi(2);
    let freedom = sampled.freedom * (whole / sampled.value.max(f64::MIN_POSITIVE)).powi(2);
    Some(Variance { value: whole, freedom: freedom.min(1e9) })
}

/// By how much times vary more between the runs of a side than they are expected to (Birge's ratio), at least 1; with its degrees
/// of freedom, none where no cell was measured twice on a side.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Scatter {
    factor: f64,
    freedom: f64,
}

pub(super) fn scatter<'a>(cells: impl Iterator<Item = &'a CellRows<'a>>) -> Scatter {
    let (mut squares, mut freedom) = (0.0, 0.0);
    for cell in cells.filter(|cell| cell.len() > 1 && is_time(&cell[0].0.metric)) {
        let known: Vec<(f64, f64)> = cell
            .iter()
            .filter_map(|one| Some((finite(one.0).filter(|value| *value > 0.0)?.ln(), expected(one)?.value)))
            .collect();
        let Some(center) = mean(&known.iter().map(|(log, _)| *log).collect::<Vec<_>>()) else { continue };
        squares += known.iter().map(|(log, variance)| (log - center).powi(2) / variance).sum::<f64>();
        freedom += known.len() as f64 - 1.0;
    }
    let factor = if freedom > 0.0 { (squares / freedom).max(1.0) } else { 1.0 };
    Scatter { factor, freedom }
}

impl Estimate {
    /// Of the runs of a cell that have a value; none where none has.
    pub(super) fn of(cell: &CellRows, scatter: Scatter) -> Option<Self> {
        let cell: CellRows = cell.iter().copied().filter(|(row, _)| finite(row).is_some()).collect();
        let values: Vec<f64> = cell.iter().filter_map(|(row, _)| finite(row)).collect();
        let count = values.len() as f64;
        let timed = is_time(&cell.first()?.0.metric) && values.iter().all(|value| *value > 0.0);
        let value = if timed {
            mean(&values.iter().map(|value| value.ln()).collect::<Vec<_>>())?.exp()
        } else {
            mean(&values)?
        };
        let errors: Option<Vec<Variance>> = cell.iter().map(expected).collect();
        let error = errors.map(|errors| {
            let sum: f64 = errors.iter().map(|error| error.value).sum();
            let pooled: f64 = errors.iter().map(|error| error.value.powi(2) / error.freedom).sum();
            let (factor, extra) = if timed { (scatter.factor, scatter.freedom) } else { (1.0, 0.0) };
            let freedom = sum.powi(2) / pooled.max(f64::MIN_POSITIVE);
            let freedom = if factor > 1.0 { freedom.min(extra) } else { freedom };
            Variance { value: factor * sum / count.powi(2), freedom }
        });
        let seen =
            cell.iter().map(|(row, _)| row.interval().filter(|(low, _)| row.std.is_none() && *low > 0.0));
        let seen: Option<Vec<(f64, f64)>> = seen.collect();
        let seen = seen.map(|seen| {
            let low = seen.iter().map(|(low, _)| *low).fold(f64::INFINITY, f64::min);
            (low, seen.iter().map(|(_, high)| *high).fold(0.0, f64::max))
        });
        Some(Self { value, error, seen })
    }

    /// The 95 % interval of this over `before` and the chance of such a ratio where nothing changed; `apart` is the difference
    /// of the machine's states, as a logarithm.
    pub(super) fn over(&self, before: &Self, apart: f64) -> (Option<Interval>, Option<f64>) {
        let log = (self.value / before.value).ln();
        let known = self.error.zip(before.error).filter(|_| log.is_finite());
        let known = known.and_then(|(a, b)| {
            let sum = a.value + b.value;
            let freedom = sum.powi(2) / (a.value.powi(2) / a.freedom + b.value.powi(2) / b.freedom);
            let error = (sum + apart.powi(2)).sqrt();
            let half = t_quantile(freedom)? * error;
            let interval = Interval { low: (log - half).exp(), high: (log + half).exp() };
            Some((interval, two_sided(log / error, freedom)?))
        });
        if let Some((interval, p)) = known {
            return (Some(interval), Some(p));
        }
        let ends = self.seen.zip(before.seen);
        (ends.map(|(now, then)| Interval { low: now.0 / then.1, high: now.1 / then.0 }), None)
    }
}
