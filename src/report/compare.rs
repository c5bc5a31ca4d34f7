//! Two sets of rows side by side: ratios with intervals, and what got worse.

use super::table::Table;
use crate::record::Row;
use crate::stats::{Interval, Side, ratio_interval};

/// Metrics of which less is better; of all others more is, and those without a direction are left out.
const LESS: &[&str] = &["step_time", "peak_memory", "resident_memory", "loss", "bpc_stream", "bpc_overlap"];
const MORE: &[&str] = &["steps_per_second", "accuracy", "longest_length"];

/// One cell in both sets.
#[derive(Clone, Debug, PartialEq)]
pub struct Pair {
    /// Mechanism, task, pass, length, batch.
    pub cell: String,
    /// Metric.
    pub metric: String,
    /// First value.
    pub before: f64,
    /// Second value.
    pub after: f64,
    /// Interval of second / first, where both say how much they spread.
    pub interval: Option<Interval>,
    /// How much worse the second is, as a share: 0.1 is 10 %; below 0 it is better.
    pub worse: f64,
}

/// What both sets have, and the cells that only one has.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Comparison {
    /// Cells in both.
    pub pairs: Vec<Pair>,
    /// Cells of one set only, with what happened.
    pub lonely: Vec<String>,
}

/// Matches rows by everything that defines a cell: rows of another device, number format or kernel are never compared.
pub fn compare(before: &[Row], after: &[Row]) -> Comparison {
    let mut comparison = Comparison::default();
    for row in before.iter().filter(|row| direction(row).is_some()) {
        let other = after.iter().find(|other| key(row) == key(other));
        match other {
            None => comparison.lonely.push(format!("only in the first: {}", name(row))),
            Some(other) => match (row.value, other.value) {
                (Some(a), Some(b)) => comparison.pairs.push(pair(row, other, a, b)),
                (a, b) => {
                    let text = |row: &Row, value: Option<f64>| {
                        value.map_or_else(|| row.outcome.to_string(), |value| format!("{value:.4}"))
                    };
                    let line = format!("{}: {} before, {} now", name(row), text(row, a), text(other, b));
                    comparison.lonely.push(line);
                }
            },
        }
    }
    for row in after.iter().filter(|row| direction(row).is_some()) {
        if !before.iter().any(|other| key(row) == key(other)) {
            comparison.lonely.push(format!("only in the second: {}", name(row)));
        }
    }
    comparison
}

impl Comparison {
    /// The pairs that are worse by more than `share`, certainly so where intervals are known.
    pub fn regressions(&self, share: f64) -> Vec<&Pair> {
        let sure = |pair: &&Pair| pair.interval.is_none_or(|interval| !interval.contains(1.0));
        self.pairs.iter().filter(|pair| pair.worse > share).filter(sure).collect()
    }

    /// As a table.
    pub fn table(&self) -> Table {
        let columns = ["cell", "metric", "first", "second", "second / first", "95 % interval"];
        let rows = self.pairs.iter().map(|pair| {
            let interval =
                pair.interval.map_or_else(String::new, |i| format!("{:.3} to {:.3}", i.low, i.high));
            let ratio = format!("{:.3}", pair.after / pair.before);
            vec![
                pair.cell.clone(),
                pair.metric.clone(),
                number(pair.before),
                number(pair.after),
                ratio,
                interval,
            ]
        });
        Table {
            title: "Second beside first".to_owned(),
            columns: columns.map(str::to_owned).to_vec(),
            numbers: 4,
            rows: rows.collect(),
            notes: self.lonely.clone(),
        }
    }
}

fn number(value: f64) -> String {
    match value.abs() {
        v if v >= 1e6 => format!("{value:.3e}"),
        v if v >= 1.0 => format!("{value:.3}"),
        _ => format!("{value:.5}"),
    }
}

/// Whether less is better.
fn direction(row: &Row) -> Option<bool> {
    let known = |list: &[&str]| list.contains(&row.metric.as_str());
    if known(LESS) { Some(true) } else { known(MORE).then_some(false) }
}

fn pair(row: &Row, other: &Row, before: f64, after: f64) -> Pair {
    let side = |row: &Row, mean: f64| Some(Side { mean, std: row.std?, n: row.n? as usize });
    let sides = side(other, after).zip(side(row, before));
    let interval = sides.and_then(|(after, before)| ratio_interval(before, after));
    let less = direction(row) == Some(true);
    let worse = if less { after / before - 1.0 } else { before / after - 1.0 };
    Pair { cell: name(row), metric: row.metric.clone(), before, after, interval, worse }
}

type Key<'a> = (
    (&'a str, Option<&'a str>, &'a str, Option<&'a str>, Option<&'a str>, &'a str),
    (&'a str, &'a str, &'a str, Option<u64>, Option<u64>, Option<u64>),
    (Option<&'a str>, Option<u64>, Option<u64>),
);

fn key(row: &Row) -> Key<'_> {
    (
        (
            &row.protocol,
            row.task.as_deref(),
            &row.model,
            row.variant.as_deref(),
            row.preset.as_deref(),
            &row.metric,
        ),
        (&row.device, &row.dtype, &row.kernel, row.threads, row.batch, row.len),
        (row.pass.map(|pass| pass.word()), row.seed, row.fraction.map(f64::to_bits)),
    )
}

fn name(row: &Row) -> String {
    let number = |name: &str, value: Option<u64>| value.map(|value| format!("{name}{value}"));
    let pass = row.pass.map(|pass| pass.word().to_owned());
    let parts = [
        Some(row.label()),
        row.task.clone(),
        number("n", row.len),
        number("b", row.batch),
        pass,
        number("s", row.seed),
    ];
    parts.into_iter().flatten().collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::Outcome;

    fn row(metric: &str, value: f64) -> Row {
        Row { std: Some(0.01), n: Some(20), ..Row::new("speed", "ls").with(metric, "x", Some(value)) }
    }

    #[test]
    fn worse_depends_on_the_metric() {
        let of = |metric: &str, a, b| compare(&[row(metric, a)], &[row(metric, b)]);
        let slower = of("step_time", 1.0, 1.2);
        assert!((slower.pairs[0].worse - 0.2).abs() < 1e-12);
        assert_eq!(slower.regressions(0.05).len(), 1);
        assert!(slower.regressions(0.3).is_empty() && of("step_time", 1.2, 1.0).regressions(0.0).is_empty());
        assert_eq!(of("accuracy", 60.0, 50.0).regressions(0.05).len(), 1);
        assert!(of("params", 1.0, 2.0).pairs.is_empty());
    }

    #[test]
    fn noise_is_no_regression() {
        let noisy = |value| Row { std: Some(1.0), n: Some(4), ..row("step_time", value) };
        assert!(compare(&[noisy(1.0)], &[noisy(1.2)]).regressions(0.05).is_empty());
    }

    #[test]
    fn what_cannot_be_compared_is_named() {
        let metal = Row { device: "metal".to_owned(), ..row("step_time", 1.0) };
        let both = compare(&[row("step_time", 1.0)], &[metal]);
        assert!(both.pairs.is_empty() && both.lonely.len() == 2, "{both:?}");
        let gone = row("step_time", 1.0).with("step_time", "s", None).ended(Outcome::Oom, None);
        let lost = compare(&[row("step_time", 1.0)], &[gone]);
        assert!(lost.lonely[0].ends_with("1.0000 before, oom now"), "{lost:?}");
    }
}
