//! Tables of text: for the terminal, and as Markdown by [`super::markdown`].

use comfy_table::{Cell, CellAlignment, ContentArrangement, TableComponent, presets};

use super::chart::{Figure, Panel, Series, Unit};
use crate::record::Row;

/// A table: columns of text, then columns of numbers with their units.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Table {
    /// What it shows and under which conditions.
    pub title: String,
    /// Names of the columns.
    pub columns: Vec<String>,
    /// How many of them, at the end, hold numbers.
    pub numbers: usize,
    /// Cells; every row has one per column.
    pub rows: Vec<Vec<String>>,
    /// Remarks below.
    pub notes: Vec<String>,
}

impl Table {
    /// Text of at most `width` columns where that is possible without cutting words.
    pub fn terminal(&self, width: u16) -> String {
        let mut table = comfy_table::Table::new();
        table.load_preset(presets::NOTHING).set_width(width);
        table.set_style(TableComponent::HeaderLines, '─');
        table.set_style(TableComponent::MiddleHeaderIntersections, '─');
        table.set_content_arrangement(ContentArrangement::Dynamic);
        table.set_header(self.cells(&self.columns));
        for row in &self.rows {
            table.add_row(self.cells(row));
        }
        let mut text = format!("{}\n{table}\n", self.title);
        for note in &self.notes {
            text.push_str(note);
            text.push('\n');
        }
        // Cells are padded to the width of their column, the last one too.
        text.lines().map(|line| format!("{}\n", line.trim_end())).collect()
    }

    /// Whether column `index` holds numbers.
    pub(super) fn is_number(&self, index: usize) -> bool {
        index + self.numbers >= self.columns.len()
    }

    fn cells(&self, texts: &[String]) -> Vec<Cell> {
        let align = |index| if self.is_number(index) { CellAlignment::Right } else { CellAlignment::Left };
        texts.iter().enumerate().map(|(index, text)| Cell::new(text).set_alignment(align(index))).collect()
    }
}

/// The data of a growth chart as tables: a row per mechanism and variant, a column per length, then the
/// slope; one table per panel.
pub fn growth(figure: &Figure) -> Vec<Table> {
    figure.panels.iter().map(|panel| panel_table(figure, panel)).collect()
}

fn panel_table(figure: &Figure, panel: &Panel) -> Table {
    let of = |series: &Series| {
        let points = series.points.iter().map(|point| point.x);
        points.chain(series.missing.iter().map(|missing| missing.x)).collect::<Vec<_>>()
    };
    let mut lens: Vec<f64> = panel.series.iter().flat_map(of).collect();
    lens.sort_by(f64::total_cmp);
    lens.dedup();
    let conditions: Vec<&str> = [figure.title.as_str(), &panel.title, &figure.subtitle]
        .into_iter()
        .filter(|text| !text.is_empty())
        .collect();
    let mut columns = vec!["model".to_owned()];
    columns.extend(lens.iter().map(|len| Unit::Length.text(*len)));
    columns.push("slope".to_owned());
    let row = |series: &Series| {
        let mut cells = vec![series.label.clone()];
        cells.extend(lens.iter().map(|len| cell(series, *len, figure.unit)));
        cells.push(series.law().map_or_else(String::new, |law| format!("{:.2}", law.slope)));
        cells
    };
    Table {
        title: conditions.join(" · "),
        numbers: columns.len() - 1,
        columns,
        rows: panel.series.iter().map(row).collect(),
        notes: Vec::new(),
    }
}

/// `12.3 ms ±4 %`, the word for what happened instead, or `-` where nothing was asked.
fn cell(series: &Series, len: f64, unit: Unit) -> String {
    if let Some(point) = series.points.iter().find(|point| point.x == len) {
        let value = unit.text(point.y);
        return match point.interval {
            Some((low, high)) => {
                let half = (point.y - low).max(high - point.y) / point.y * 100.0;
                let digits = usize::from(half < 0.95);
                format!("{value} ±{half:.digits$} %")
            }
            None => value,
        };
    }
    let missing = series.missing.iter().find(|missing| missing.x == len);
    missing.map_or_else(|| "-".to_owned(), |missing| missing.outcome.clone())
}

/// Parameters, FLOPs and state of every mechanism and variant at the longest length that has them; `None`
/// where no row counts FLOPs.
pub fn costs(rows: &[Row]) -> Option<Table> {
    let len = rows.iter().filter(|row| row.flops.is_some()).filter_map(|row| row.len).max()?;
    let mut table = Table {
        title: format!("Costs by definition at length {len}, one sample, one forward"),
        columns: ["model", "parameters", "GFLOPs", "state"].map(str::to_owned).to_vec(),
        numbers: 3,
        rows: Vec::new(),
        notes: vec!["A multiply-add counts as one; LayerNorm as 5 per element.".to_owned()],
    };
    for row in rows.iter().filter(|row| row.len == Some(len)) {
        let Some(flops) = row.flops else { continue };
        let label = row.label();
        if table.rows.iter().any(|cells| cells[0] == label) {
            continue;
        }
        let state = row.state_bytes.filter(|bytes| *bytes > 0);
        table.rows.push(vec![
            label,
            row.params.map_or_else(|| "-".to_owned(), |params| params.to_string()),
            format!("{:.4}", flops as f64 / 1e9),
            state.map_or_else(|| "-".to_owned(), |bytes| Unit::Bytes.text(bytes as f64)),
        ]);
    }
    Some(table)
}

#[cfg(test)]
mod tests {
    use super::super::chart::{Measured, Missing};
    use super::*;

    fn figure() -> Figure {
        let point = |x, y| Measured { x, y, interval: Some((y * 0.98, y * 1.01)) };
        let series = vec![
            Series {
                label: "full".into(),
                points: vec![point(1024.0, 0.02)],
                missing: vec![Missing { x: 2048.0, outcome: "oom".into(), cross: true }],
                ..Series::default()
            },
            Series {
                label: "ls:w=16".into(),
                points: vec![point(1024.0, 0.011), point(2048.0, 0.022)],
                ..Series::default()
            },
        ];
        Figure {
            title: "Time per step".into(),
            subtitle: "cpu".into(),
            unit: Unit::Seconds,
            panels: vec![Panel { title: "Training".into(), series }],
        }
    }

    #[test]
    fn a_growth_table_has_a_column_per_length() {
        let tables = growth(&figure());
        insta::assert_snapshot!(tables[0].terminal(80), @r"
        Time per step · Training · cpu
         model           1024         2048   slope
        ───────────────────────────────────────────
         full      20 ms ±2 %          oom
         ls:w=16   11 ms ±2 %   22 ms ±2 %    1.00
        ");
    }

    #[test]
    fn costs_are_listed_once_at_the_longest_length() {
        let mut row = Row::new("speed", "ls").with("step_time", "s", None);
        (row.len, row.flops, row.params) = (Some(2048), Some(198_789_696), Some(203_850));
        let mut short = row.clone();
        (short.len, short.flops) = (Some(1024), Some(1));
        let table = costs(&[short, row.clone(), row]).unwrap();
        assert_eq!(table.rows, [["ls", "203850", "0.1988", "-"]]);
        assert_eq!(costs(&[Row::new("speed", "ls")]), None);
    }
}
