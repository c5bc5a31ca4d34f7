//! Transformer-LS, Table 2 as slopes from clean to changed texts, and accuracy against the number of insertions.

use std::collections::BTreeMap;
use std::io;

use super::{conditions, in_order};
use crate::report::chart::{Chart, Slope, slopes};
use crate::report::floor::subset;
use crate::{Outcome, Row};

pub fn draw(rows: &[&Row]) -> io::Result<Vec<Chart>> {
    let tested = |row: &&&Row| {
        row.protocol == "robustness"
            && row.metric == "accuracy"
            && row.outcome == Outcome::Ok
            && row.value.is_some()
    };
    let all = rows;
    let rows: Vec<&Row> = all.iter().filter(tested).copied().collect();
    let base =
        |row: &Row| row.task.as_deref().and_then(|task| task.split('-').next()).unwrap_or("").to_owned();
    let tasks: Vec<String> = rows.iter().map(|row| base(row)).collect();
    let mut charts = Vec::new();
    for task in in_order(tasks.iter().map(String::as_str)) {
        let here: Vec<&Row> = rows.iter().filter(|row| base(row) == task).copied().collect();
        charts.extend(chart(&task, &here, all)?);
    }
    Ok(charts)
}

/// The chart of `task` from its `rows`; `all` say how many texts a part of the test split has.
fn chart(task: &str, rows: &[&Row], all: &[&Row]) -> io::Result<Option<Chart>> {
    let labels: Vec<String> = rows.iter().map(|row| label(row, rows)).collect();
    let kinds =
        [String::new(), "-insertion".to_owned(), "-deletion".to_owned()].map(|end| format!("{task}{end}"));
    let mut by_kind = Vec::new();
    let mut by_count = Vec::new();
    for name in in_order(labels.iter().map(String::as_str)) {
        let own: Vec<&&Row> = rows.iter().filter(|row| label(row, rows) == name).collect();
        let base = task;
        let of = |task: &str| {
            let row = own.iter().rev().find(|row| row.task.as_deref() == Some(task))?;
            Some((row.value?, error(row, base, all)))
        };
        let points =
            kinds.iter().zip(0..).filter_map(|(kind, x)| of(kind).map(|(y, std)| (f64::from(x), y, std)));
        by_kind.push(Slope { label: name.clone(), points: points.collect() });
        let counts: BTreeMap<u64, (f64, f64)> = (own.iter())
            .filter_map(|row| {
                let count = insertions(row.task.as_deref()?, task)?;
                Some((count, (row.value?, error(row, task, all))))
            })
            .collect();
        let points = counts.into_iter().map(|(count, (y, std))| (count as f64, y, std)).collect();
        by_count.push(Slope { label: name, points });
    }
    let Some(first) = rows.first() else { return Ok(None) };
    let same = rows.iter().all(|row| row.differs == first.differs);
    let share =
        first.differs.as_ref().filter(|_| same).map_or_else(String::new, |words| format!("; {words}"));
    let subtitle = format!("bars: standard error; {}, {}{share}", task, conditions(first));
    let title = "Accuracy on changed texts (Transformer-LS, Table 2)";
    slopes(&format!("ls-table2-{task}"), (title, &subtitle), (&by_kind, &by_count)).map(Some)
}

/// Standard error of an accuracy in percent: that of the draws of insertions, and that of the test split of `task`, of which
/// a row of the same part and batch size says how many texts it has.
fn error(row: &Row, task: &str, all: &[&Row]) -> f64 {
    let draws = row.std.unwrap_or(0.0) / (row.n.unwrap_or(1).max(1) as f64).sqrt();
    let same = |other: &&&Row| {
        other.metric == "tested"
            && other.task.as_deref() == Some(task)
            && other.batch == row.batch
            && subset(other) == subset(row)
    };
    let tested = all.iter().find(same).and_then(|tested| tested.value).filter(|tested| *tested >= 1.0);
    let part = row.value.unwrap_or(0.0).clamp(0.0, 100.0) / 100.0;
    let split = tested.map_or(0.0, |tested| 100.0 * (part * (1.0 - part) / tested).sqrt());
    draws.hypot(split)
}

/// The mechanism; where different runs stand in one chart, with the first thing that differs from the protocol.
fn label(row: &Row, all: &[&Row]) -> String {
    if all.iter().all(|other| other.differs == row.differs) {
        return row.label();
    }
    let words = row.differs.as_deref().unwrap_or("the protocol");
    format!("{}, {}", row.label(), words.split("; ").next().unwrap_or(words))
}

/// Insertions in the texts of `task`: 0 for clean ones, 10 for the paper's.
fn insertions(task: &str, base: &str) -> Option<u64> {
    match task.strip_prefix(base)? {
        "" => Some(0),
        "-insertion" => Some(10),
        rest => rest.strip_prefix("-insertion-")?.parse().ok(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_and_counts_are_told_from_the_task() {
        assert_eq!(insertions("text", "text"), Some(0));
        assert_eq!(insertions("text-insertion", "text"), Some(10));
        assert_eq!(insertions("text-insertion-40", "text"), Some(40));
        assert_eq!(insertions("text-deletion", "text"), None);
        let row = |task: &str, value: f64| Row {
            task: Some(task.to_owned()),
            ..Row::new("robustness", "dp").with("accuracy", "%", Some(value)).with_outcome(Outcome::Ok, None)
        };
        let rows = [
            row("text", 61.0),
            row("text-insertion", 60.0),
            row("text-insertion-40", 58.0),
            row("text-deletion", 55.0),
        ];
        let tested = Row {
            task: Some("text".to_owned()),
            ..Row::new("lra", "ls").with("tested", "1", Some(2500.0)).with_outcome(Outcome::Ok, None)
        };
        let mut rows: Vec<&Row> = rows.iter().collect();
        let charts = draw(&rows).unwrap();
        assert_eq!(charts[0].name, "ls-table2-text");
        assert!(charts[0].csv.contains("kind of text,dp,deletion,55,0\n"), "{}", charts[0].csv);
        assert!(charts[0].csv.contains("insertions,dp,40,58,0\n"), "{}", charts[0].csv);
        rows.push(&tested);
        let charts = draw(&rows).unwrap();
        let line = charts[0].csv.lines().find(|line| line.starts_with("insertions,dp,40,58,")).unwrap();
        let error: f64 = line.rsplit(',').next().unwrap().parse().unwrap();
        assert!((error - 100.0 * (0.58f64 * 0.42 / 2500.0).sqrt()).abs() < 1e-9, "{line}");
        assert!(charts[0].svg.contains(">\n40\n<"), "a tick at every number of insertions");
    }
}
