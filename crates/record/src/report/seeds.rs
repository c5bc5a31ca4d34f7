//! The seeds of a measured cell as one row: rankings, figures and crossings compare cells, and not one cell's seed with another
//! seed of another cell.

use std::collections::{HashMap, HashSet};
use std::hash::Hash;

use crate::stats::{median, std_dev};
use crate::{Outcome, Row, rounded};

/// `rows` with those that differ by their seed alone as one row, where the first of them stands. Rows of a single seed stay as
/// they are.
pub(super) fn over_seeds<'a>(rows: impl Iterator<Item = &'a Row>) -> Vec<Row> {
    let rows: Vec<&Row> = rows.collect();
    if !several(&rows) {
        return rows.into_iter().cloned().collect();
    }
    let mut cells: Vec<Vec<&Row>> = Vec::new();
    let mut places = HashMap::new();
    for row in rows {
        let index = *places.entry(cell(row)).or_insert_with(|| {
            cells.push(Vec::new());
            cells.len() - 1
        });
        cells[index].push(row);
    }
    let merged = |rows: Vec<&Row>| match several(&rows) {
        true => vec![one(&rows)],
        false => rows.into_iter().cloned().collect(),
    };
    cells.into_iter().flat_map(merged).collect()
}

/// The most seeds that a cell of `rows` has.
pub(super) fn count(rows: &[Row]) -> usize {
    let mut cells: HashMap<_, HashSet<Option<u64>>> = HashMap::new();
    for row in rows {
        cells.entry(cell(row)).or_default().insert(row.seed);
    }
    cells.values().map(HashSet::len).max().unwrap_or(0)
}

/// Whether `rows` are of more than one seed.
fn several(rows: &[&Row]) -> bool {
    rows.windows(2).any(|pair| pair[0].seed != pair[1].seed)
}

/// What a row is about, whatever its seed.
fn cell(row: &Row) -> impl Eq + Hash {
    let what = (&row.protocol, &row.task, row.label(), &row.preset, &row.metric, &row.operation);
    let how = (&row.device, &row.dtype, &row.kernel, row.threads, row.batch, row.len, row.pass);
    (what, how, row.defining_settings(), &row.differs)
}

/// One row of a cell's several seeds: of those that came to an end the median, the hull of the intervals, and the [`spread`].
/// Where at most one did, that one or the first.
fn one(rows: &[&Row]) -> Row {
    let done: Vec<&Row> = rows.iter().copied().filter(|row| row.outcome == Outcome::Ok).collect();
    let first = done.first().copied().unwrap_or(rows[0]).clone();
    if done.len() < 2 {
        return first;
    }
    let middle = |number: fn(&Row) -> Option<f64>| {
        median(&done.iter().filter_map(|row| number(row)).collect::<Vec<_>>())
    };
    let ends: Option<Vec<(f64, f64)>> = done.iter().map(|row| row.interval()).collect();
    let hull = ends.map(|ends| {
        let none = (f64::INFINITY, f64::NEG_INFINITY);
        ends.iter().fold(none, |(low, high), end| (low.min(end.0), high.max(end.1)))
    });
    let (std, n) = spread(&done).unzip();
    Row {
        value: middle(|row| row.value).and_then(rounded),
        peak_bytes: middle(|row| row.peak_bytes.map(|bytes| bytes as f64)).map(|bytes| bytes.round() as u64),
        std,
        n,
        ci_low: hull.map(|(low, _)| low),
        ci_high: hull.map(|(_, high)| high),
        ..first
    }
}

/// Standard deviation and number of the seeds, for the steps of one seed say nothing of the next one. Seeds that happen to be more
/// alike than the steps of all of them allow differ as much as those do.
fn spread(rows: &[&Row]) -> Option<(f64, u64)> {
    let values: Vec<f64> = rows.iter().filter_map(|row| row.value).collect();
    let seeds = values.len() as f64;
    let least = steps(rows).map_or(0.0, |(std, n)| std * (seeds / n as f64).sqrt());
    std_dev(&values).map(|std| (std.max(least), values.len() as u64))
}

/// Standard deviation and number of the steps of all `rows`.
fn steps(rows: &[&Row]) -> Option<(f64, u64)> {
    let side = |row: &&Row| Some((row.value?, row.std?, row.n.filter(|n| *n > 0)?));
    let sides: Vec<(f64, f64, u64)> = rows.iter().map(side).collect::<Option<_>>()?;
    let n: u64 = sides.iter().map(|(_, _, n)| n).sum();
    let center = sides.iter().map(|(value, _, n)| value * *n as f64).sum::<f64>() / n as f64;
    let squares: f64 = sides
        .iter()
        .map(|(value, std, n)| (n - 1) as f64 * std.powi(2) + *n as f64 * (value - center).powi(2))
        .sum();
    (n > 1).then(|| ((squares / (n - 1) as f64).sqrt(), n))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::chart::{Quantity, figure};
    use crate::report::{crossing, ranking, table};
    use crate::{Pass, Published};

    fn row(model: &str, seed: u64, len: u64, seconds: f64) -> Row {
        let row = Row {
            len: Some(len),
            pass: Some(Pass::Train),
            seed: Some(seed),
            std: Some(seconds / 50.0),
            n: Some(20),
            ci_low: Some(seconds * 0.98),
            ci_high: Some(seconds * 1.04),
            peak_bytes: Some((seconds * 1e6) as u64),
            ..Row::new("speed", model)
        };
        row.with("step_time", "s", Some(seconds)).with_outcome(Outcome::Ok, None)
    }

    /// Two lengths of `full`, and `linear` in half of the time; the second seed takes four times as long.
    fn rows() -> Vec<Row> {
        rows_of([1.0, 4.0])
    }

    /// The same for two seeds that take `seconds`.
    fn rows_of(seconds: [f64; 2]) -> Vec<Row> {
        let of = |(seed, seconds): (u64, f64)| {
            [1024_u64, 2048].into_iter().flat_map(move |len| {
                let seconds = seconds * (len / 1024) as f64;
                [row("full", seed, len, seconds), row("linear", seed, len, seconds / 2.0)]
            })
        };
        (0..).zip(seconds).flat_map(of).collect()
    }

    #[test]
    fn a_ratio_is_of_all_seeds() {
        let tables = ranking::rankings(&rows_of([1.0, 1.1]), None);
        let said = "linear is 2.0 ±0.7 times as fast as full at 2048";
        assert!(tables[0].rows.len() == 1 && tables[0].notes[0].starts_with(said), "{tables:?}");
        // steps of 2 % spread, 20 of each of two seeds
        let tables = ranking::rankings(&rows_of([1.0, 1.0]), None);
        assert!(tables[0].notes[0].starts_with("linear is 2.00 ±0.04 times"), "{tables:?}");
        // two seeds so far apart decide nothing
        let tables = ranking::rankings(&rows(), None);
        let note = &tables[0].notes[1];
        assert!(
            note.starts_with("not resolved") && note.ends_with("--mode train --seeds 0..9"),
            "{tables:?}"
        );
        let apart = [row("full", 0, 8, 1.0), row("ls", 1, 8, 1.0)];
        assert_eq!((count(&rows()), count(&apart)), (2, 1), "other seeds of other cells are not several");
        assert_eq!(tables[1].rows[0][1], "0.50", "of the memory");
        let crossing = crossing::table(&rows_of([1.0, 1.1])).unwrap();
        assert_eq!(crossing.rows[0][2], "≤ 1024");
    }

    #[test]
    fn a_figure_has_a_point_for_all_seeds() {
        let figure = figure(&rows(), Quantity::Time).unwrap();
        let full = &figure.panels[0].series[0];
        let points: Vec<_> = full.points.iter().map(|point| (point.x, point.y, point.interval)).collect();
        assert_eq!(points, [(1024.0, 2.5, Some((0.98, 4.16))), (2048.0, 5.0, Some((1.96, 8.32)))]);
        assert!(table::growth(&figure)[0].rows[0][1].starts_with("2.5"));
    }

    #[test]
    fn the_published_ratio_still_stands_beside_it() {
        let printed = |row: &Row| {
            let rate = row.with("steps_per_second", "1/s", row.value.map(f64::recip));
            let number = if row.model == "full" { 10.0 } else { 23.0 };
            Row { published: Some(Published::Value(number)), ..rate }
        };
        let rows: Vec<Row> = rows().iter().flat_map(|row| [row.clone(), printed(row)]).collect();
        assert!(ranking::rankings(&rows, None)[0].rows[0][1].ends_with("2.30"));
    }

    #[test]
    fn one_seed_changes_nothing_and_one_that_failed_counts_not() {
        let same: Vec<Row> = rows().into_iter().filter(|row| row.seed == Some(1)).collect();
        let twice = [same.clone(), same].concat();
        assert_eq!(over_seeds(twice.iter()), twice);
        let gone = row("full", 0, 1024, 1.0).with("step_time", "s", None).with_outcome(Outcome::Oom, None);
        let last = row("full", 1, 1024, 4.0);
        let deep = Row { settings: Some("layers=2".to_owned()), ..row("full", 2, 1024, 9.0) };
        assert_eq!(over_seeds([&gone, &last, &deep].into_iter()), [last, deep]);
    }
}
