//! Where the time of a step goes, from the rows of `speed --profile`.

use std::io;

use super::chart::{Chart, Stack, StackPanel, alike, stacks};
use super::place;
use super::table::Table;
use crate::Row;
use crate::text::plural;

const TITLE: &str = "Where the time of a step goes";

/// Operations of their own colour in the chart; the rest is one.
const SHOWN: usize = 6;
const REST: &str = "rest";
/// Metrics of a whole cell that stand below its table.
const ABOUT: [&str; 3] = ["product_rate", "copy_rate", "share_of_limit"];
const UPDATE: &str = "update";

/// An operation in a part of the step.
struct Line<'a> {
    operation: &'a str,
    part: &'a str,
    seconds: f64,
}

/// The rows about operations of one cell.
struct Cell<'a> {
    first: &'a Row,
    rows: Vec<&'a Row>,
}

impl<'a> Cell<'a> {
    /// Every cell that has such rows, in their order.
    fn all(rows: &'a [Row]) -> Vec<Self> {
        let mut cells: Vec<Self> = Vec::new();
        let about = |row: &&Row| row.operation.is_some() || ABOUT.contains(&&*row.metric);
        for row in rows.iter().filter(about) {
            let key = |row: &Row| {
                let Row { len, batch, pass, seed, .. } = row;
                (row.label(), *len, *batch, *pass, *seed)
            };
            let same = |cell: &Self| key(cell.first) == key(row) && cell.first.settings == row.settings;
            place(&mut cells, same, || Cell { first: row, rows: Vec::new() }).rows.push(row);
        }
        cells.retain(|cell| cell.rows.iter().any(|row| row.operation.is_some()));
        cells
    }

    fn value(&self, operation: Option<&str>, metric: &str) -> Option<f64> {
        let wanted = |row: &&&Row| row.operation.as_deref() == operation && row.metric == metric;
        self.rows.iter().find(wanted).and_then(|row| row.value)
    }

    /// The operations, the longest first.
    fn lines(&self) -> Vec<Line<'a>> {
        let times = self.rows.iter().filter(|row| row.metric == "operation_time");
        let line = |row: &&'a Row| {
            let (operation, part) = row.operation.as_deref()?.rsplit_once(' ')?;
            Some(Line { operation, part, seconds: row.value? })
        };
        let mut lines: Vec<Line> = times.filter_map(line).collect();
        lines.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
        lines
    }

    fn table(&self) -> Table {
        let lines = self.lines();
        let whole: f64 = lines.iter().map(|line| line.seconds).sum();
        let giga = |value: Option<f64>| value.map_or_else(String::new, |value| format!("{:.1}", value / 1e9));
        let row = |line: &Line| {
            let name = format!("{} {}", line.operation, line.part);
            vec![
                line.operation.to_owned(),
                line.part.to_owned(),
                format!("{:.2}", 1e3 * line.seconds),
                format!("{:.1}", 100.0 * line.seconds / whole),
                giga(self.value(Some(&name), "operation_products")),
                giga(self.value(Some(&name), "operation_traffic")),
            ]
        };
        let Row { len, batch, pass, dtype, threads, .. } = self.first;
        let pass = pass.map_or("", |pass| pass.word());
        let title = format!(
            "{TITLE}: {} · {pass} · length {} · batch {} · {dtype} · {:.1} ms",
            self.first.label(),
            len.unwrap_or(0),
            batch.unwrap_or(1),
            1e3 * whole
        );
        let reached = |metric: &str| giga(self.value(None, metric));
        let notes = vec![
            format!(
                "This machine: {} GFLOP/s in products of 1024 x 1024 in {dtype} on {}, {} GB/s in copies \
                 (bytes read and written).",
                reached("product_rate"),
                plural(threads.unwrap_or(1), "thread"),
                reached("copy_rate")
            ),
            "GFLOP/s: matrix products, a multiply-add is two. GB/s: the least that moves, every operand and result \
             once. other: between the operations."
                .to_owned(),
        ];
        let share = self.value(None, "share_of_limit");
        let share = share.map(|share| {
            format!(
                "The products alone would take {:.0} % of a step (share of the limit), at the rates of their shapes here.",
                100.0 * share
            )
        });
        let notes = notes.into_iter().chain(share).collect();
        Table {
            title,
            columns: ["operation", "part", "ms", "%", "GFLOP/s", "GB/s"].map(str::to_owned).to_vec(),
            numbers: 4,
            rows: lines.iter().map(row).collect(),
            notes,
            spare: vec![5],
            ..Table::default()
        }
    }
}

/// A table per cell that was profiled.
pub fn tables(rows: &[Row]) -> Vec<Table> {
    Cell::all(rows).iter().map(Cell::table).collect()
}

/// The chart `<prefix>-profile`: a bar per cell, cells of one length, batch and pass together.
pub fn chart(rows: &[Row], prefix: &str) -> io::Result<Option<Chart>> {
    let cells = Cell::all(rows);
    let mut sums: Vec<(&str, f64)> = Vec::new();
    for line in cells.iter().flat_map(Cell::lines) {
        place(&mut sums, |(known, _)| *known == line.operation, || (line.operation, 0.0)).1 += line.seconds;
    }
    if sums.is_empty() {
        return Ok(None);
    }
    sums.sort_by(|a, b| b.1.total_cmp(&a.1));
    let mut kinds: Vec<&str> = sums.iter().take(SHOWN).map(|(operation, _)| *operation).collect();
    let kind =
        |operation: &str| sums.iter().position(|known| known.0 == operation).unwrap_or(SHOWN).min(SHOWN);
    if sums.len() > SHOWN {
        kinds.push(REST);
    }
    let stack = |cell: &Cell| {
        let mut parts: Vec<(usize, bool, f64)> = Vec::new();
        for line in cell.lines() {
            // the update of weights is neither forward nor backward: it belongs to what follows the loss
            let (kind, pale) = (kind(line.operation), line.part != "forward");
            let part = place(&mut parts, |part| (part.0, part.1) == (kind, pale), || (kind, pale, 0.0));
            part.2 += 1e3 * line.seconds;
        }
        parts.sort_by_key(|part| (part.1, part.0));
        Stack { label: cell.first.label(), parts }
    };
    let firsts: Vec<&Row> = cells.iter().map(|cell| cell.first).collect();
    let mut panels: Vec<StackPanel> = Vec::new();
    for (title, group) in alike(&firsts) {
        for first in group {
            let Some(cell) = cells.iter().find(|cell| std::ptr::eq(cell.first, first)) else { continue };
            let len = first.len.unwrap_or(0);
            let title =
                if title.is_empty() { format!("Length {len}") } else { format!("{title} · length {len}") };
            let new = || StackPanel { title: title.clone(), stacks: Vec::new() };
            place(&mut panels, |panel| panel.title == title, new).stacks.push(stack(cell));
        }
    }
    let subtitle = format!("full colour: forward; pale: backward and {UPDATE}");
    let words = ["forward", "backward and update"];
    stacks(&format!("{prefix}-profile"), (TITLE, &subtitle), (&kinds, words, "ms"), &panels).map(Some)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Outcome, Pass};

    fn rows() -> Vec<Row> {
        let cell =
            Row { len: Some(1024), batch: Some(1), pass: Some(Pass::Train), ..Row::new("speed", "ls") };
        let cell = Row { threads: Some(2), dtype: "f32".into(), outcome: Outcome::Ok, ..cell };
        let of = |operation: &str, seconds: f64| {
            let row = Row { operation: Some(operation.to_owned()), ..cell.clone() };
            [
                row.with("operation_time", "s", Some(seconds)),
                row.with("operation_products", "1/s", Some(2e11)),
                row.with("operation_traffic", "B/s", None),
            ]
        };
        let parts = [("ffn forward", 0.01), ("ffn backward", 0.025), ("optimizer update", 0.005)];
        let mut rows: Vec<Row> = parts.iter().flat_map(|(name, seconds)| of(name, *seconds)).collect();
        rows.push(cell.with("product_rate", "1/s", Some(4e11)));
        rows.push(cell.with("copy_rate", "B/s", Some(2e10)));
        rows.push(cell.with("step_time", "s", Some(0.04)));
        rows.push(cell.with("share_of_limit", "share", Some(0.7)));
        rows
    }

    #[test]
    fn the_longest_operation_stands_first_beside_what_the_machine_reaches() {
        insta::assert_snapshot!(tables(&rows())[0].terminal(80), @r"
        Where the time of a step goes: ls · train · length 1024 · batch 1 · f32 · 40.0
        ms
         operation   part          ms      %   GFLOP/s   GB/s
        ──────────────────────────────────────────────────────
         ffn         backward   25.00   62.5     200.0
         ffn         forward    10.00   25.0     200.0
         optimizer   update      5.00   12.5     200.0
        This machine: 400.0 GFLOP/s in products of 1024 x 1024 in f32 on 2 threads, 20.0
        GB/s in copies (bytes read and written).
        GFLOP/s: matrix products, a multiply-add is two. GB/s: the least that moves,
        every operand and result once. other: between the operations.
        The products alone would take 70 % of a step (share of the limit), at the rates
        of their shapes here.
        ");
        assert!(tables(&[Row::new("speed", "ls").with("step_time", "s", Some(1.0))]).is_empty());
        assert!(tables(&[Row::new("speed", "ls").with("share_of_limit", "share", Some(0.5))]).is_empty());
    }

    #[test]
    fn forward_is_full_and_the_rest_is_pale() {
        let chart = chart(&rows(), "speed").unwrap().unwrap();
        assert_eq!(chart.name, "speed-profile");
        insta::assert_snapshot!(chart.csv, @r"
        panel,model,kind,part,ms
        Length 1024,ls,ffn,forward,10
        Length 1024,ls,ffn,backward and update,25
        Length 1024,ls,optimizer,backward and update,5
        ");
        assert!(super::chart(&[], "speed").unwrap().is_none());
    }
}
