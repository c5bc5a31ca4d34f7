//! Tables of text: for the terminal, and as Markdown by [`super::markdown`].

use super::chart::{Figure, Panel, Series, Unit};
use super::wrap::{self, TIED, columns, wrap};
use crate::text::{letter, visible};
use crate::{Metric, Row};

/// Where a cell's number stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Link {
    /// Index of the section's source.
    pub source: usize,
    /// Line in its rows, from 1; the header is the first.
    pub line: usize,
}

/// A table: columns of text, then columns of numbers with their units.
#[derive(Clone, Debug, Default, PartialEq)]
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
    /// Columns that a narrow terminal may leave out, the first first.
    pub spare: Vec<usize>,
    /// Whether it ranks mechanisms, and its first note says who is first.
    pub ranks: bool,
    /// By line, the rows behind each cell, where they are known: a line with a single entry has the same rows behind all cells.
    pub behind: Vec<Vec<Vec<Row>>>,
    /// Where they stand, in the same order.
    pub links: Vec<Vec<Option<Link>>>,
}

impl Table {
    /// Text of at most `width` columns where that is possible without breaking a word. Of a table that is
    /// too wide, columns that say the same in every row become a line, and cells are folded at spaces; where that is
    /// not enough the columns that may be spared go, and at last each row becomes a paragraph.
    pub fn terminal(&self, width: usize) -> String {
        let mut text = wrap(&self.title, width);
        let (shown, remarks) = self.fitted(width);
        match shown.widths(width) {
            Some((widths, gap)) => text.push_str(&shown.grid(&widths, gap)),
            None => text.push_str(&self.paragraphs(width)),
        }
        let remarks = if shown.widths(width).is_some() { remarks } else { Vec::new() };
        remarks.iter().chain(&self.notes).for_each(|note| text.push_str(&wrap(note, width)));
        visible(&text.replace(TIED, " "))
    }

    /// The table with as many of its columns as fit, and what is to be said about the others.
    fn fitted(&self, width: usize) -> (Self, Vec<String>) {
        let mut shown = self.clone();
        let mut remarks = Vec::new();
        if shown.widths(width).is_some() && shown.natural() <= width {
            return (shown, remarks);
        }
        let same = |table: &Self, index: usize| {
            table.rows.len() > 1 && table.rows.iter().all(|row| row[index] == table.rows[0][index])
        };
        let constant: Vec<usize> = (1..self.columns.len()).filter(|index| same(self, *index)).collect();
        let filled = constant.iter().filter(|index| !self.rows[0][**index].is_empty());
        let said = filled.map(|index| format!("{} {}", self.columns[*index], self.rows[0][*index]));
        let said: Vec<String> = said.collect();
        constant.iter().rev().for_each(|index| shown.remove(*index));
        if !said.is_empty() {
            remarks.push(format!("In every row: {}.", said.join(", ")));
        }
        if self.columns.len() >= MANY && shown.natural() > width {
            remarks.extend(shown.lettered());
        }
        let mut left_out: Vec<&str> = Vec::new();
        for spare in &self.spare {
            let name = &self.columns[*spare];
            let Some(index) = shown.columns.iter().position(|column| column == name) else { continue };
            if shown.widths(width).is_some() {
                break;
            }
            shown.remove(index);
            left_out.push(name);
        }
        if !left_out.is_empty() {
            remarks.push(format!("Left out in a terminal of {width} columns: {}.", left_out.join(", ")));
        }
        (shown, remarks)
    }

    /// Puts letters in the place of sentences, which would be folded at a few columns a line, and gives the lines that say what they
    /// stand for: one per different sentence.
    fn lettered(&mut self) -> Vec<String> {
        let mut remarks = Vec::new();
        for index in 1..self.columns.len() {
            if self.is_number(index) || self.rows.iter().all(|row| columns(&row[index]) <= SENTENCE) {
                continue;
            }
            let mut known: Vec<String> = Vec::new();
            for row in self.rows.iter_mut().filter(|row| !row[index].is_empty()) {
                let text = std::mem::take(&mut row[index]);
                let place = known.iter().position(|other| *other == text).unwrap_or_else(|| {
                    known.push(text);
                    known.len() - 1
                });
                row[index] = format!("({})", letter(place));
            }
            let name = &self.columns[index];
            let lines =
                known.iter().enumerate().map(|(place, text)| format!("{name}: ({}) {text}", letter(place)));
            remarks.extend(lines);
        }
        remarks
    }

    fn remove(&mut self, index: usize) {
        self.numbers -= usize::from(self.is_number(index));
        self.columns.remove(index);
        self.rows.iter_mut().for_each(|row| drop(row.remove(index)));
    }

    /// Every text of column `index`.
    fn texts(&self, index: usize) -> impl Iterator<Item = &str> {
        std::iter::once(&self.columns[index])
            .chain(self.rows.iter().map(move |row| &row[index]))
            .map(String::as_str)
    }

    /// Columns that the unfolded table takes.
    fn natural(&self) -> usize {
        let each = (0..self.columns.len()).map(|index| self.texts(index).map(columns).max().unwrap_or(0));
        each.map(|width| width + GAP).sum::<usize>()
    }

    /// Widths of the columns and of the gaps between them so that a line takes at most `width`, if there are such.
    fn widths(&self, width: usize) -> Option<(Vec<usize>, usize)> {
        let widest = |of: fn(&str) -> usize| -> Vec<usize> {
            (0..self.columns.len()).map(|index| self.texts(index).map(of).max().unwrap_or(0)).collect()
        };
        let mut widths = widest(columns);
        if self.natural() <= width {
            return Some((widths, GAP));
        }
        let room = width.checked_sub(NARROW * widths.len())?;
        let least = widest(wrap::longest_piece);
        // the widest column that can give gives first
        while widths.iter().sum::<usize>() > room {
            let can = (0..widths.len()).filter(|index| widths[*index] > least[*index]);
            let index = can.max_by_key(|index| widths[*index])?;
            widths[index] -= 1;
        }
        Some((widths, NARROW))
    }

    /// The table in columns of `widths`.
    fn grid(&self, widths: &[usize], gap: usize) -> String {
        let mut text = self.line(&self.columns, widths, gap);
        let rule = widths.iter().map(|width| width + gap).sum::<usize>() + 2 - gap;
        text.push_str(&"─".repeat(rule));
        text.push('\n');
        self.rows.iter().for_each(|row| text.push_str(&self.line(row, widths, gap)));
        text
    }

    fn line(&self, cells: &[String], widths: &[usize], gap: usize) -> String {
        let cells: Vec<Vec<String>> =
            cells.iter().zip(widths).map(|(cell, width)| wrap::cell(cell, *width)).collect();
        let height = cells.iter().map(Vec::len).max().unwrap_or(1);
        let mut text = String::new();
        for line in 0..height {
            let mut written = String::from(" ");
            for (index, (cell, &width)) in cells.iter().zip(widths).enumerate() {
                let part = cell.get(line).map_or("", String::as_str);
                let between = if index == 0 { 0 } else { gap };
                written.push_str(&" ".repeat(between));
                match self.is_number(index) {
                    true => written.push_str(&format!("{part:>width$}")),
                    false => written.push_str(&format!("{part:<width$}")),
                }
            }
            text.push_str(written.trim_end());
            text.push('\n');
        }
        text
    }

    /// Each row as `first cell: column value, column value`, folded; a single row as a list.
    fn paragraphs(&self, width: usize) -> String {
        if let [row] = &self.rows[..]
            && let Some(text) = self.listed(row, width)
        {
            return text;
        }
        let mut text = String::new();
        for row in &self.rows {
            let pairs = self.columns.iter().zip(row).skip(1).filter(|(_, cell)| !cell.is_empty());
            let tied =
                |pair: String| if columns(&pair) > 24 { pair } else { pair.replace(' ', &TIED.to_string()) };
            let pairs = pairs.map(|(column, cell)| tied(format!("{column} {cell}")));
            let first = row.first().map_or("", String::as_str);
            text.push_str(&wrap(&format!("- {first}: {}", pairs.collect::<Vec<_>>().join(", ")), width));
        }
        text
    }

    /// One row as a list: a line per column, its name first; none where a word would not fit.
    fn listed(&self, row: &[String], width: usize) -> Option<String> {
        let pairs = || self.columns.iter().zip(row).filter(|(_, cell)| !cell.is_empty());
        let names = pairs().map(|(column, _)| columns(column)).max()? + NARROW;
        let free = width.saturating_sub(names + 1);
        if pairs().any(|(_, cell)| wrap::longest_piece(cell) > free) {
            return None;
        }
        let mut text = String::new();
        for (column, cell) in pairs() {
            for (at, line) in wrap::cell(cell, free).iter().enumerate() {
                let name = if at == 0 { column.as_str() } else { "" };
                text.push_str(&format!(" {name:names$}{line}\n"));
            }
        }
        Some(text)
    }

    /// Whether column `index` holds numbers.
    pub(super) fn is_number(&self, index: usize) -> bool {
        index + self.numbers >= self.columns.len()
    }
}

/// Columns from which a table has no room for sentences, and the longest text that is none.
const MANY: usize = 6;
const SENTENCE: usize = 32;
/// Columns between two columns of a table, and of one that is short of room.
const GAP: usize = 3;
const NARROW: usize = 2;

/// The data of a growth chart as tables: a row per mechanism and variant, a column per length, then the
/// slope; one table per panel.
pub fn growth(figure: &Figure) -> Vec<Table> {
    let mut tables: Vec<Table> = figure.panels.iter().map(|panel| panel_table(figure, panel)).collect();
    let sloped = |table: &&mut Table| table.columns.last().is_some_and(|column| column == "slope");
    if let Some(table) = tables.iter_mut().find(sloped) {
        table.notes.push(SLOPE.to_owned());
    }
    if let Some(table) = tables.last_mut().filter(|_| figure.unit == Unit::Share) {
        table.notes.push(LIMIT.to_owned());
    }
    tables
}

/// What a share of the limit is, below the last table of shares.
const LIMIT: &str = "Share of the limit: the time that the matrix products of a step would take alone, each at the rate of its \
                     shape on this machine, over the time of the step.";

/// What the column `slope` is, below the first table that has it.
const SLOPE: &str = "slope: exponent of the growth; twice the length takes 2^slope times as much.";

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
    let grows = !matches!(figure.unit, Unit::Rate | Unit::Share);
    let slopes = grows && panel.series.iter().any(|series| series.law().is_some());
    if slopes {
        columns.push("slope".to_owned());
    }
    let row = |series: &Series| {
        let mut cells = vec![series.label.clone()];
        cells.extend(lens.iter().map(|len| cell(series, *len, figure.unit)));
        if slopes {
            cells.push(series.law().map_or_else(String::new, |law| format!("{:.2}", law.slope)));
        }
        cells
    };
    Table {
        title: conditions.join(" · "),
        numbers: columns.len() - 1,
        columns,
        rows: panel.series.iter().filter(|series| series.can_run()).map(row).collect(),
        ..Table::default()
    }
}

/// `12.3 ms ±4 %`, the word for what happened instead, or `-` where nothing was asked.
fn cell(series: &Series, len: f64, unit: Unit) -> String {
    if let Some(point) = series.points.iter().find(|point| point.x == len) {
        let value = unit.text(point.y).replace(' ', &TIED.to_string());
        return match point.interval {
            Some((low, high)) if point.y > 0.0 && (high - low).is_finite() => {
                let half = (point.y - low).max(high - point.y) / point.y * 100.0;
                let digits = usize::from(half < 0.95);
                format!("{value} ±{half:.digits$}{TIED}%")
            }
            _ => value,
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
        title: format!("Analytic costs at length {len}, one sample, one forward pass"),
        columns: ["model", "parameters", "GFLOPs", "state"].map(str::to_owned).to_vec(),
        numbers: 3,
        notes: vec![
            "A multiply-add counts as one, LayerNorm as 5 per element. state: what a causal decoder keeps of the past, per sequence."
                .to_owned(),
        ],
        ..Table::default()
    };
    for row in rows.iter().filter(|row| row.len == Some(len) && row.other_program().is_none()) {
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

/// One line per cell with its metrics: for results that neither grow with a length nor have a published number.
pub fn plain(title: &str, rows: &[Row], metrics: &[Metric]) -> Table {
    let mut table = Table { title: title.to_owned(), numbers: metrics.len(), ..Table::default() };
    table.columns = ["model", "task", "settings"].map(str::to_owned).to_vec();
    table.columns.extend(metrics.iter().map(|metric| format!("{}, {}", metric.title, metric.unit)));
    let mut cells: Vec<&Row> = Vec::new();
    let same = |a: &Row, b: &Row| {
        let key = |row: &Row| {
            (row.label(), row.task.clone(), row.settings.clone(), row.len, row.batch, row.pass, row.seed)
        };
        key(a) == key(b)
    };
    for row in rows {
        if !cells.iter().any(|cell| same(cell, row)) {
            cells.push(row);
        }
    }
    for cell in cells {
        let mut line = vec![
            cell.label(),
            cell.task.clone().unwrap_or_default(),
            cell.settings.clone().unwrap_or_default(),
        ];
        line.extend(metrics.iter().map(|metric| {
            let row = rows.iter().find(|row| same(cell, row) && row.metric == metric.name);
            row.map_or_else(
                || "-".to_owned(),
                |row| row.value.map_or_else(|| row.outcome.to_string(), |value| value.to_string()),
            )
        }));
        table.rows.push(line);
    }
    table
}

#[cfg(test)]
mod tests;
