//! A table of a paper in its own layout: rows and columns as printed, each cell measured / published.

mod cell;

use std::collections::BTreeMap;

use super::table::Table;
use super::trained::Index;
use crate::config::suite::{Column, Suite, SuiteRow};
use crate::{Metric, Published, Row};

/// Signs of a verdict.
pub(super) const SAME: &str = "=";
pub(super) const BETTER: &str = "▲";
pub(super) const WORSE: &str = "▼";
pub(super) const OPEN: &str = "○";
/// Behind a number that does not exceed its floor.
const UNDER: &str = "↓";

/// What a suite's table is made from.
pub struct PaperSource<'a> {
    /// The suite.
    pub suite: &'a Suite,
    /// By row of the suite, the rows of its cells as they are planned: mechanism, preset, FLOPs, parameters.
    pub planned: &'a [Vec<Row>],
    /// What was run.
    pub rows: &'a [Row],
    /// What the suite's models are compared by.
    pub metrics: &'a [Metric],
    /// The suites that columns name.
    pub others: &'a [Self],
}

/// A line of the table: all lengths together, or one of them where the suite has a line for each.
#[derive(Clone, Debug, PartialEq)]
struct Line {
    name: String,
    len: Option<u64>,
}

/// A table, and what it holds of the rows.
pub struct Paper {
    /// The table.
    pub table: Table,
    /// The rows behind its cells.
    pub used: Vec<Row>,
}

/// A cell before it is text.
#[derive(Default)]
struct Cell {
    measured: Option<String>,
    published: Option<Published>,
    sign: Option<&'static str>,
    seeds: Option<String>,
    /// Words whose letters stand behind the cell.
    notes: Vec<String>,
    /// Whether a run would fill it.
    open: bool,
    /// Whether the published number does not exceed the floor.
    under: bool,
}

/// `source` in the form that the paper has; nothing for a figure.
pub fn paper(source: &PaperSource) -> Option<Paper> {
    let index = Index::of(source.rows);
    (!source.suite.columns.is_empty()).then(|| Writer::new(source, &index).paper())
}

struct Writer<'a> {
    source: &'a PaperSource<'a>,
    index: &'a Index<'a>,
    letters: BTreeMap<String, usize>,
    used: Vec<Row>,
}

impl<'a> Writer<'a> {
    fn new(source: &'a PaperSource<'a>, index: &'a Index<'a>) -> Self {
        Self { source, index, letters: BTreeMap::new(), used: Vec::new() }
    }

    fn paper(mut self) -> Paper {
        let suite = self.source.suite;
        let printed = self.lines();
        let is_published = printed.iter().any(|line| self.is_published(line));
        let mut lines: Vec<Vec<String>> = printed.iter().map(|line| self.line(line)).collect();
        let floors = self.floors();
        if floors.iter().skip(1).any(|cell| !cell.is_empty()) {
            lines.push(floors);
        }
        let titles = suite.columns.iter().map(|column| column.title.clone());
        let columns: Vec<String> =
            std::iter::once("model".to_owned()).chain(titles).chain(["to run".to_owned()]).collect();
        let mut table = Table {
            title: format!(
                "{}: {} ({})",
                suite.title,
                if is_published { "measured / published" } else { "measured; nothing is published" },
                suite.source
            ),
            columns,
            rows: lines,
            ..Table::default()
        };
        // the last column is filled where something is missing only
        if table.rows.iter().all(|row| row.last().is_none_or(String::is_empty)) {
            table.columns.pop();
            table.rows.iter_mut().for_each(|row| drop(row.pop()));
        }
        let mut letters: Vec<(&String, &usize)> = self.letters.iter().collect();
        letters.sort_by_key(|(_, index)| **index);
        let marks: Vec<String> =
            letters.into_iter().map(|(words, index)| format!("{}: {words}.", letter(*index))).collect();
        table.notes.extend(marks);
        table.notes.extend(suite.analysis.as_ref().map(|analysis| analysis.trim().to_owned()));
        Paper { table, used: self.used }
    }

    /// Whether the paper has a number in the line.
    fn is_published(&self, line: &Line) -> bool {
        self.source.suite.columns.iter().any(|column| self.published(line, column).is_some())
    }

    /// The lines in the order of the table; what the paper has no number for stands below.
    fn lines(&self) -> Vec<Line> {
        let suite = self.source.suite;
        let rows = suite.rows.iter().map(SuiteRow::printed_as);
        let mut names: Vec<&str> = Vec::new();
        for name in rows.chain(suite.printed.iter().map(|line| line.label.as_str())) {
            if !names.contains(&name) {
                names.push(name);
            }
        }
        let mut lines: Vec<(bool, Line)> = Vec::new();
        for name in names {
            for len in self.lens(name) {
                let line = Line { name: name.to_owned(), len };
                let has = self.is_published(&line);
                if has || !self.entries(&line).is_empty() {
                    lines.push((has, line));
                }
            }
        }
        lines.sort_by_key(|(has, line)| (!has, line.len));
        lines.into_iter().map(|(_, line)| line).collect()
    }

    /// The lengths of the lines called `name`.
    fn lens(&self, name: &str) -> Vec<Option<u64>> {
        let suite = self.source.suite;
        if !suite.by_len {
            return vec![None];
        }
        let rows = suite.rows.iter().zip(self.source.planned).filter(|(row, _)| row.printed_as() == name);
        let planned = rows.flat_map(|(_, planned)| planned.iter().filter_map(|row| row.len));
        let mut lens: Vec<u64> = planned.chain(suite.base.len.iter().flat_map(|len| len.0.clone())).collect();
        lens.sort_unstable();
        lens.dedup();
        lens.into_iter().map(Some).collect()
    }

    /// The rows of the suite that make `line`, with their place.
    fn entries(&self, line: &Line) -> Vec<(usize, &'a SuiteRow)> {
        let rows = self.source.suite.rows.iter().enumerate();
        let runs =
            |index: usize| line.len.is_none() || self.planned(index).iter().any(|row| row.len == line.len);
        rows.filter(|(index, row)| row.printed_as() == line.name && runs(*index)).collect()
    }

    fn planned(&self, index: usize) -> &'a [Row] {
        self.source.planned.get(index).map_or(&[], Vec::as_slice)
    }

    /// The suite that runs `column`.
    fn source_of(&self, column: &Column) -> &'a PaperSource<'a> {
        let other = |name: &String| self.source.others.iter().find(|other| other.suite.name == *name);
        column.suite.as_ref().and_then(other).unwrap_or(self.source)
    }

    fn line(&mut self, line: &Line) -> Vec<String> {
        let why = self.entries(line).into_iter().find_map(|(_, row)| row.not_comparable.clone());
        let mut label = line.name.clone();
        label.push_str(&line.len.map_or_else(String::new, |len| format!(", {len}")));
        label.push_str(&why.map_or_else(String::new, |why| format!(" {}", self.mark(why))));
        let (mut texts, mut commands) = (vec![label], Vec::new());
        for column in &self.source.suite.columns {
            let cell = self.cell(line, column);
            if cell.open {
                let command = self.command(line, column);
                if !commands.contains(&command) {
                    commands.push(command);
                }
            }
            texts.push(self.text(cell));
        }
        texts.push(commands.join("; "));
        texts
    }

    /// The command that fills `column` of `line`.
    fn command(&self, line: &Line, column: &Column) -> String {
        let writer = Writer::new(self.source_of(column), self.index);
        let suite = writer.source.suite;
        let mut models: Vec<String> = Vec::new();
        for row in writer.entries(line).iter().flat_map(|(index, _)| writer.planned(*index)) {
            if !models.contains(&row.label()) {
                models.push(row.label());
            }
        }
        let preset = suite.numbers_of.as_ref().map_or_else(String::new, |of| format!(" --preset {of}"));
        let also = suite.also.as_ref().map_or_else(String::new, |also| format!(" {also}"));
        format!(
            "effattn {} --suite {} --model {}{preset}{also}",
            suite.protocol,
            suite.name,
            models.join(",")
        )
    }

    /// What simple rules reach, by column.
    fn floors(&mut self) -> Vec<String> {
        let columns = &self.source.suite.columns;
        let mut line = vec!["floor: the best simple rule".to_owned()];
        for column in columns {
            let text = self.floor(column).map_or_else(String::new, |(value, rule, words)| {
                let marks = words.map_or_else(String::new, |words| format!(" {}", self.mark(words)));
                format!("{value:.2} {rule}{marks}")
            });
            line.push(text);
        }
        line.push(String::new());
        line
    }

    fn text(&mut self, cell: Cell) -> String {
        let published = match cell.published {
            None => None,
            Some(Published::Outcome(outcome)) => Some(outcome.to_string()),
            Some(Published::Value(value)) => Some(printed(value)),
        };
        let mut text = match (&cell.measured, &published) {
            (None, None) if cell.open => "-".to_owned(),
            (None, None) => String::new(),
            (None, Some(published)) => format!("- / {published}"),
            (Some(measured), None) => measured.clone(),
            (Some(measured), Some(published)) => format!("{measured} / {published}"),
        };
        if cell.under {
            text.push_str(UNDER);
        }
        for part in [cell.sign.map(str::to_owned), cell.seeds].into_iter().flatten() {
            text.push_str(&format!(" {part}"));
        }
        for words in cell.notes {
            let mark = self.mark(words);
            text.push_str(&format!(" {mark}"));
        }
        text
    }

    /// `(a)`, the letter of a note.
    fn mark(&mut self, words: String) -> String {
        let next = self.letters.len();
        format!("({})", letter(*self.letters.entry(words).or_insert(next)))
    }
}

/// A published number with all its digits, and two behind the point at least.
fn printed(value: f64) -> String {
    format!("{value:.0$}", digits(value).max(2))
}

/// Digits behind the point.
fn digits(value: f64) -> usize {
    value.to_string().split_once('.').map_or(0, |(_, digits)| digits.len())
}

/// a to z, then aa, ab, ...
fn letter(index: usize) -> String {
    let last = char::from(b'a' + (index % 26) as u8);
    let before = if index >= 26 { letter(index / 26 - 1) } else { String::new() };
    format!("{before}{last}")
}

#[cfg(test)]
mod tests;
