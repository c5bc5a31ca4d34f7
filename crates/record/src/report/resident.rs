//! How much the resident size of programs grows in a step, beside ours: `memory --program`.

use super::chart::Unit;
use super::place;
use super::table::Table;
use crate::{Pass, Row};

type Cell = (String, Option<Pass>, Option<u64>, Option<u64>);

/// Growth of the resident size: a row per cell, a column per program, and ours over theirs. None where no program says it.
pub fn table(rows: &[Row]) -> Option<Table> {
    let theirs = rows.iter().filter(|row| row.metric == "resident_growth" && row.value.is_some());
    let mut programs: Vec<&str> = Vec::new();
    let mut lines: Vec<(Cell, Vec<(&str, f64)>)> = Vec::new();
    for row in theirs {
        let (Some(program), Some(value)) = (row.other_program(), row.value) else { continue };
        if !programs.contains(&program) {
            programs.push(program);
        }
        let cell = cell(row);
        place(&mut lines, |(other, _)| *other == cell, || (cell.clone(), Vec::new()))
            .1
            .push((program, value));
    }
    let ours = |cell: &Cell| {
        let own = rows.iter().filter(|row| row.metric == "resident_memory" && row.other_program().is_none());
        own.filter(|row| self::cell(row) == *cell).find_map(|row| row.value)
    };
    lines.retain(|(cell, _)| ours(cell).is_some());
    let line = |(cell, theirs): &(Cell, Vec<(&str, f64)>)| {
        let (label, pass, batch, len) = cell;
        let number = |value: Option<u64>| value.map_or_else(|| "-".to_owned(), |value| value.to_string());
        let own = ours(cell).unwrap_or(f64::NAN);
        let mut cells = vec![label.clone(), pass.map_or_else(String::new, |pass| pass.word().to_owned())];
        cells.extend([number(*batch), number(*len), Unit::Bytes.text(own)]);
        for program in &programs {
            let theirs = theirs.iter().find(|(name, _)| name == program);
            cells.push(theirs.map_or_else(
                || "-".to_owned(),
                |(_, theirs)| format!("{} ({:.2})", Unit::Bytes.text(*theirs), own / theirs),
            ));
        }
        cells
    };
    let columns = ["model", "pass", "batch", "length", "ours"].into_iter().chain(programs.iter().copied());
    let columns: Vec<String> = columns.map(str::to_owned).collect();
    (!lines.is_empty()).then(|| Table {
        title: "Growth of the resident size over a step".to_owned(),
        numbers: columns.len() - 2,
        columns,
        rows: lines.iter().map(line).collect(),
        notes: vec![
            "In brackets ours / theirs. It is counted by the system from before the model is there, in pages that libraries \
             may keep: no peak of live bytes."
                .to_owned(),
        ],
        ..Table::default()
    })
}

fn cell(row: &Row) -> Cell {
    (row.choice(), row.pass, row.batch, row.len)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ours_stands_beside_each_program_that_says_it() {
        let row = |program: &str, metric: &str, value: Option<f64>| Row {
            program: Some(program.to_owned()),
            pass: Some(Pass::Train),
            len: Some(1024),
            batch: Some(1),
            ..Row::new("memory", "full").with(metric, "B", value)
        };
        let mib = f64::from(1 << 20);
        let rows = [
            row("effattn", "resident_memory", Some(50.0 * mib)),
            row("torch", "resident_growth", Some(100.0 * mib)),
            row("mine", "resident_growth", Some(25.0 * mib)),
            row("silent", "resident_growth", None),
        ];
        let table = table(&rows).unwrap();
        assert_eq!(table.columns[4..], ["ours", "torch", "mine"]);
        assert_eq!(table.rows[0][4..], ["50 MiB", "100 MiB (0.50)", "25 MiB (2.00)"]);
        assert!(super::table(&rows[..1]).is_none());
    }
}
