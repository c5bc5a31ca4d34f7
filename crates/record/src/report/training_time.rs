//! How long models were trained, as a table.

use super::place;
use super::table::Table;
use super::trained;
use crate::stats::median;
use crate::{Pass, Row};

/// A line per task, mechanism, preset, shape, number of threads, machine and device: updates, the median time of one, and the hours of all of them,
/// over the seeds. Nothing where no row has both.
pub fn table(rows: &[Row]) -> Option<Table> {
    let trained = rows.iter().filter(|row| row.pass == Some(Pass::Train) && row.seed.is_some());
    let mut groups: Vec<(&Row, Vec<(f64, f64)>)> = Vec::new();
    for row in trained.filter(|row| row.metric == "step_time") {
        let same = |other: &Row| other.seed == row.seed && alike(other, row);
        let updates =
            rows.iter().find(|other| other.metric == "steps" && same(other)).and_then(|row| row.value);
        let (Some(seconds), Some(updates)) = (row.value, updates) else { continue };
        place(&mut groups, |(first, _)| alike(first, row), || (row, Vec::new())).1.push((seconds, updates));
    }
    let number = |value: Option<u64>| value.map_or_else(String::new, |value| value.to_string());
    let line = |(row, seeds): &(&Row, Vec<(f64, f64)>)| {
        let of =
            |f: fn(&(f64, f64)) -> f64| median(&seeds.iter().map(f).collect::<Vec<_>>()).unwrap_or(f64::NAN);
        vec![
            row.task.clone().unwrap_or_default(),
            row.label(),
            row.preset.clone().unwrap_or_default(),
            row.machine.clone().unwrap_or_default(),
            row.device.clone(),
            number(row.batch),
            number(row.len),
            number(row.threads),
            seeds.len().to_string(),
            format!("{:.0}", of(|(_, updates)| *updates)),
            format!("{:.3}", of(|(seconds, _)| *seconds)),
            format!("{:.2}", of(|(seconds, updates)| seconds * updates / 3600.0)),
        ]
    };
    let columns = [
        "task",
        "model",
        "preset",
        "machine",
        "device",
        "batch",
        "length",
        "threads",
        "seeds",
        "updates",
        "s per update",
        "hours per seed",
    ];
    let note = "The median time of an update times their number, and the median of that over the seeds; evaluations and tests come on top.";
    (!groups.is_empty()).then(|| Table {
        title: "Time of training".to_owned(),
        columns: columns.map(str::to_owned).to_vec(),
        numbers: 7,
        rows: groups.iter().map(line).collect(),
        notes: vec![note.to_owned()],
        ..Table::default()
    })
}

/// Whether two rows are of models that take the same time.
fn alike(a: &Row, b: &Row) -> bool {
    trained::alike(a, b)
        && (a.threads, &a.device, &a.machine, &a.commit) == (b.threads, &b.device, &b.machine, &b.commit)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hours_are_updates_times_their_time_over_seeds() {
        let row = |seed, metric: &str, value| Row {
            task: Some("listops".to_owned()),
            pass: Some(Pass::Train),
            seed: Some(seed),
            threads: Some(1),
            batch: Some(32),
            len: Some(64),
            ..Row::new("lra", "ls").with(metric, "", Some(value))
        };
        let rows = [
            row(1, "steps", 7200.0),
            row(1, "step_time", 0.5),
            row(2, "steps", 7200.0),
            row(2, "step_time", 1.5),
            row(3, "step_time", 9.0), // has not finished
        ];
        let table = table(&rows).unwrap();
        assert_eq!(
            table.rows,
            [["listops", "ls", "", "", "cpu", "32", "64", "1", "2", "7200", "1.000", "2.00"]]
        );
        assert!(super::table(&rows[..1]).is_none());
    }
}
