//! A table of a paper in its own layout: rows and columns as printed, each cell measured / published.

mod cell;
mod ratio;

use std::collections::BTreeMap;

use super::floor::Floor;
use super::table::Table;
use super::trained::Index;
use crate::config::lists::Models;
use crate::config::suite::{Column, Suite, SuiteRow};
use crate::text::letter;
use crate::{Metric, Published, Row};

/// Signs of a verdict.
pub(super) const SAME: &str = "=";
pub(super) const BETTER: &str = "▲";
pub(super) const WORSE: &str = "▼";
pub(super) const OPEN: &str = "○";

/// How many cells of tables have which sign.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct VerdictCounts {
    same: usize,
    better: usize,
    worse: usize,
    open: usize,
    /// Published, and not run.
    missing: usize,
}

/// The signs in the cells of `tables`.
pub(super) fn verdicts(tables: &[Table]) -> VerdictCounts {
    let mut counts = VerdictCounts::default();
    for cell in tables.iter().flat_map(|table| &table.rows).flatten().filter(|cell| cell.contains(" / ")) {
        let has = |sign: &str| cell.split(' ').any(|word| word == sign);
        counts.same += usize::from(has(SAME));
        counts.better += usize::from(has(BETTER));
        counts.worse += usize::from(has(WORSE));
        counts.open += usize::from(has(OPEN));
        counts.missing += usize::from(cell.starts_with("- / "));
    }
    counts
}

impl VerdictCounts {
    /// In words; nothing where no cell has a sign.
    pub(super) fn words(self) -> Option<String> {
        let Self { same, better, worse, open, missing } = self;
        let all = [
            (same, "the same as published"),
            (better, "better"),
            (worse, "worse"),
            (open, "without a conclusion"),
            (missing, "not run"),
        ];
        let parts: Vec<String> = all
            .into_iter()
            .filter(|(count, _)| *count > 0)
            .map(|(count, what)| format!("{count} {what}"))
            .collect();
        (same + better + worse + open > 0).then(|| format!("Cells: {}.", parts.join(", ")))
    }
}

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
    /// Speeds as multiples of the table's baseline, where it has speeds and one.
    pub ratios: Option<Table>,
    /// The table.
    pub table: Table,
    /// The rows behind its cells.
    pub used: Vec<Row>,
}

/// A cell before it is text.
#[derive(Default)]
struct Cell {
    measured: Option<String>,
    published: Option<PrintedNumber>,
    sign: Option<&'static str>,
    seeds: Option<String>,
    /// Words whose letters stand behind the cell.
    notes: Vec<String>,
    /// Whether a run would fill it.
    open: bool,
    /// How the published number stands to the floor, as a mark.
    under: &'static str,
}

/// What a paper printed, and how.
#[derive(Clone, Copy, Debug, PartialEq)]
struct PrintedNumber {
    number: Published,
    /// Digits behind the point.
    digits: usize,
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
    /// The rows behind each cell, line by line.
    behind: Vec<Vec<Vec<Row>>>,
    /// Measured steps of every cell that is a speed, and the fewest that the suite asks for there.
    repetitions: Vec<(u64, u64)>,
}

impl<'a> Writer<'a> {
    fn new(source: &'a PaperSource<'a>, index: &'a Index<'a>) -> Self {
        Self {
            source,
            index,
            letters: BTreeMap::new(),
            used: Vec::new(),
            behind: Vec::new(),
            repetitions: Vec::new(),
        }
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
            behind: std::mem::take(&mut self.behind),
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
        table.notes.extend(self.few_repetitions());
        table.notes.extend(self.ratios());
        table.notes.extend(suite.analysis.as_ref().map(|analysis| analysis.trim().to_owned()));
        let ratios = self.relative().and_then(|relative| self.ratio_table(&relative));
        Paper { ratios, table, used: self.used }
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
        let why = why.or_else(|| self.why_not_run(line));
        let mut label = line.name.clone();
        label.push_str(&line.len.map_or_else(String::new, |len| format!(", {len}")));
        label.push_str(&why.map_or_else(String::new, |why| format!(" {}", self.mark(why))));
        let (mut texts, mut commands, mut behind) = (vec![label], Vec::new(), vec![Vec::new()]);
        for column in &self.source.suite.columns {
            let before = self.used.len();
            let cell = self.cell(line, column);
            behind.push(self.used[before..].to_vec());
            if cell.open {
                let command = self.command(line, column);
                if !commands.contains(&command) {
                    commands.push(command);
                }
            }
            texts.push(self.text(cell));
        }
        texts.push(commands.join("; "));
        self.behind.push(behind);
        texts
    }

    /// Why a line that only the paper has is not run.
    fn why_not_run(&self, line: &Line) -> Option<String> {
        let is_run = self.source.suite.rows.iter().any(|row| row.printed_as() == line.name);
        let printed = self.source.suite.printed.iter().find(|printed| printed.label == line.name);
        printed.filter(|_| !is_run).map(|printed| printed.why.clone())
    }

    /// The command that fills `column` of `line`.
    fn command(&self, line: &Line, column: &Column) -> String {
        let writer = Writer::new(self.source_of(column), self.index);
        let suite = writer.source.suite;
        let mut models: Vec<String> = Vec::new();
        for (index, of_suite) in writer.entries(line) {
            // a mechanism's name chooses its variants, too: the label does not, where it can be typed
            let is_variant =
                |other: &SuiteRow| other.model.name == of_suite.model.name && !other.model.knobs.is_empty();
            let can_be_typed = |label: &str| {
                let read = label.parse::<Models>();
                read.is_ok_and(|Models(read)| matches!(&read[..], [one] if one.name == label))
            };
            let label = Some(&of_suite.label)
                .filter(|label| suite.rows.iter().any(is_variant) && can_be_typed(label))
                .map(|label| format!("\"{label}\""));
            for row in writer.planned(index) {
                let typed = label.clone().filter(|_| row.variant.is_none()).unwrap_or_else(|| row.label());
                if !models.contains(&typed) {
                    models.push(typed);
                }
            }
        }
        let preset = suite.numbers_of.as_ref().map_or_else(String::new, |of| format!(" --preset {of}"));
        let also = suite.also.as_ref().map_or_else(String::new, |also| format!(" {also}"));
        format!(
            "effattn {} --suite {} --model {}{preset}{also}",
            suite.protocol,
            suite.argument(),
            models.join(",")
        )
    }

    /// What simple rules reach, by column: on the whole data set where a number is published, and on the parts of it that
    /// measured cells are about.
    fn floors(&mut self) -> Vec<String> {
        let columns = &self.source.suite.columns;
        let mut line = vec!["floor: the best simple rule".to_owned()];
        for column in columns {
            let floors: Vec<String> = (self.floors_of(column).into_iter())
                .map(|Floor { value, rule, data, .. }| {
                    let words = data.join("; ");
                    let mark = if data.is_empty() { String::new() } else { format!(" {}", self.mark(words)) };
                    format!("{value:.2} {rule}{mark}")
                })
                .collect();
            line.push(floors.join("; "));
        }
        line.push(String::new());
        line
    }

    fn text(&mut self, cell: Cell) -> String {
        let published = match cell.published {
            None => None,
            Some(PrintedNumber { number: Published::Outcome(outcome), .. }) => Some(outcome.to_string()),
            Some(PrintedNumber { number: Published::Value(value), digits }) => {
                Some(format!("{value:.digits$}"))
            }
        };
        let mut text = match (&cell.measured, &published) {
            (None, None) if cell.open => "-".to_owned(),
            (None, None) => String::new(),
            (None, Some(published)) => format!("- / {published}"),
            (Some(measured), None) => measured.clone(),
            (Some(measured), Some(published)) => format!("{measured} / {published}"),
        };
        text.push_str(cell.under);
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

#[cfg(test)]
mod tests;
