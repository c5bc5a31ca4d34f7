//! How the steps of a cell spread, and how sure an accuracy is.

use super::chart::Unit;
use super::compare;
use super::table::Table;
use super::wrap::TIED;
use crate::Row;
use crate::stats::quantile;

/// A percentile: its name, its part, and the fewest steps of which one is expected to lie beyond it.
const PARTS: [(&str, f64, usize); 6] = [
    ("5 %", 0.05, 20),
    ("25 %", 0.25, 4),
    ("median", 0.5, 1),
    ("75 %", 0.75, 4),
    ("95 %", 0.95, 20),
    ("99 %", 0.99, 100),
];

/// How the steps of each cell spread: (cell, seconds of its steps) to a line of percentiles. A percentile that a cell has too few
/// steps for is not given, and one that no cell has steps for has no column.
pub fn percentiles(cells: &[(String, Vec<f64>)]) -> Option<Table> {
    let most = cells.iter().map(|(_, values)| values.len()).max()?;
    let parts = || PARTS.iter().filter(move |(.., fewest)| *fewest <= most);
    let text = |seconds: f64| Unit::Seconds.text(seconds).replace(' ', &TIED.to_string());
    let line = |(cell, values): &(String, Vec<f64>)| {
        let parts = parts().map(|&(_, part, fewest)| {
            let value = quantile(values, part).filter(|_| values.len() >= fewest);
            value.map_or("-".to_owned(), text)
        });
        [cell.clone(), values.len().to_string()].into_iter().chain(parts).collect()
    };
    let columns = ["cell", "steps"].into_iter().chain(parts().map(|(name, ..)| *name));
    let short = cells.iter().any(|(_, values)| values.len() < 100);
    Some(Table {
        title: "Percentiles of the time per step".to_owned(),
        columns: columns.map(str::to_owned).collect(),
        numbers: 1 + parts().count(),
        rows: cells.iter().map(line).collect(),
        notes: short
            .then(|| "A percentile p needs at least 1 / (1 - p) steps: 20 for 95 %, 100 for 99 %.".to_owned())
            .into_iter()
            .collect(),
        ..Table::default()
    })
}

/// Standard error of an accuracy in percent that comes from the size of the split it was tested on, where the rows of
/// the same cell say how many examples that were: sqrt(p (1 - p) / n).
pub fn split_error<'a>(row: &Row, rows: impl IntoIterator<Item = &'a Row>) -> Option<f64> {
    let tested =
        rows.into_iter().find(|other| other.metric == "tested" && compare::same_cell(row, other))?.value?;
    let part = row.value? / 100.0;
    (matches!(row.metric.as_str(), "accuracy" | "top5") && tested >= 1.0 && (0.0..=1.0).contains(&part))
        .then(|| 100.0 * (part * (1.0 - part) / tested).sqrt())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Outcome;

    #[test]
    fn percentiles_are_those_of_the_samples() {
        let values: Vec<f64> = (1..=101).map(f64::from).collect();
        let table = percentiles(&[("full n1024".to_owned(), values)]).unwrap();
        assert_eq!(table.rows[0][1..5], ["101", "6\u{a0}s", "26\u{a0}s", "51\u{a0}s"]);
        assert!(percentiles(&[]).is_none() && table.notes.is_empty());
    }

    #[test]
    fn few_steps_have_no_tail() {
        let of = |n: u32| ("cell".to_owned(), (1..=n).map(f64::from).collect::<Vec<_>>());
        let six = percentiles(&[of(6)]).unwrap();
        assert_eq!(six.columns, ["cell", "steps", "25 %", "median", "75 %"]);
        assert_eq!(six.numbers, 4);
        let both = percentiles(&[of(6), of(40)]).unwrap();
        assert_eq!(both.columns, ["cell", "steps", "5 %", "25 %", "median", "75 %", "95 %"]);
        assert_eq!((both.rows[0][2].as_str(), both.rows[0][6].as_str()), ("-", "-"));
        assert!(both.rows[1].iter().all(|cell| cell != "-") && !both.notes.is_empty());
    }

    #[test]
    fn one_seed_is_as_sure_as_its_split() {
        let done = |row: Row| row.with_outcome(Outcome::Ok, None);
        let row = |metric: &str, value| {
            done(Row { seed: Some(1), ..Row::new("lra", "ls") }.with(metric, "%", Some(value)))
        };
        let accuracy = row("accuracy", 36.0);
        let error = split_error(&accuracy, &[row("tested", 2000.0)]).unwrap();
        assert!((error - 100.0 * (0.36f64 * 0.64 / 2000.0).sqrt()).abs() < 1e-12, "{error}");
        assert_eq!(split_error(&accuracy, &[Row { seed: Some(2), ..row("tested", 2000.0) }]), None);
        assert_eq!(split_error(&row("loss", 1.0), &[row("tested", 2000.0)]), None);
    }
}
