//! A table of a paper in its own layout: rows and columns as printed, each cell measured / published.

use std::collections::BTreeMap;

use super::table::Table;
use super::trained::{COUNTS, Group, Index, Standing, data, groups};
use crate::config::suite::{Column, PublishedTable, Suite, SuiteRow};
use crate::record::{FLOOR, Metric, Outcome, Published, Row};

/// Signs of a verdict.
pub(super) const SAME: &str = "=";
pub(super) const BETTER: &str = "▲";
pub(super) const WORSE: &str = "▼";
pub(super) const OPEN: &str = "○";
/// Behind a number that does not exceed its floor.
const UNDER: &str = "↓";

/// What `report` calls the mean over the tasks.
const AVERAGE: &str = "average";

/// What a suite's table is made from.
pub struct Source<'a> {
    /// The suite.
    pub suite: &'a Suite,
    /// By row of the suite, the rows of its cells as they are planned: mechanism, preset, FLOPs, parameters.
    pub planned: &'a [Vec<Row>],
    /// What was run.
    pub rows: &'a [Row],
    /// What the suite's models are compared by.
    pub metrics: &'a [Metric],
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
pub fn paper(source: &Source) -> Option<Paper> {
    let index = Index::of(source.rows);
    (!source.suite.columns.is_empty()).then(|| Writer::new(source, &index).paper())
}

struct Writer<'a> {
    source: &'a Source<'a>,
    index: &'a Index<'a>,
    letters: BTreeMap<String, usize>,
    used: Vec<Row>,
}

impl<'a> Writer<'a> {
    fn new(source: &'a Source<'a>, index: &'a Index<'a>) -> Self {
        Self { source, index, letters: BTreeMap::new(), used: Vec::new() }
    }

    fn paper(mut self) -> Paper {
        let suite = self.source.suite;
        let mut lines: Vec<Vec<String>> = self.lines().iter().map(|name| self.line(name)).collect();
        let floors = self.floors();
        if floors.iter().skip(1).any(|cell| !cell.is_empty()) {
            lines.push(floors);
        }
        let titles = suite.columns.iter().map(|column| column.title.clone());
        let columns: Vec<String> =
            std::iter::once("model".to_owned()).chain(titles).chain(["to run".to_owned()]).collect();
        let mut table = Table {
            title: format!("{}: measured / published ({})", suite.title, suite.source),
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

    /// Names of the lines in the order of the table; what the paper has no number for stands below.
    fn lines(&self) -> Vec<String> {
        let suite = self.source.suite;
        let rows = suite.rows.iter().map(|row| (row.printed_as(), !row.published.is_empty()));
        let printed = suite.printed.iter().map(|line| (line.label.as_str(), true));
        let mut names: Vec<(String, bool)> = Vec::new();
        for (name, number) in rows.chain(printed) {
            match names.iter_mut().find(|(known, _)| known == name) {
                Some((_, known)) => *known |= number,
                None => names.push((name.to_owned(), number)),
            }
        }
        names.sort_by_key(|(_, number)| !number);
        names.into_iter().map(|(name, _)| name).collect()
    }

    /// The rows of the suite that make the line `name`, with their place.
    fn entries(&self, name: &str) -> Vec<(usize, &'a SuiteRow)> {
        let rows = self.source.suite.rows.iter().enumerate();
        rows.filter(|(_, row)| row.printed_as() == name).collect()
    }

    /// What the paper has in `column` of the line `name`.
    fn published(&self, name: &str, column: &Column) -> Option<Published> {
        let suite = self.source.suite;
        let lens = suite.base.len.as_ref();
        let index = column.len.and_then(|len| lens?.0.iter().position(|known| *known == len)).unwrap_or(0);
        let entries = self.entries(name);
        let own = entries.iter().flat_map(|(_, row)| &row.published);
        let printed = suite.printed.iter().filter(|line| line.label == name);
        let tables: Vec<&PublishedTable> = own.chain(printed.flat_map(|line| &line.published)).collect();
        let of = |metric: &String| {
            tables
                .iter()
                .filter(|table| table.metric == *metric)
                .find_map(|table| table.at(&column.key, index))
        };
        column.metrics.iter().find_map(of)
    }

    fn line(&mut self, name: &str) -> Vec<String> {
        let entries = self.entries(name);
        let why: Vec<String> = entries.iter().filter_map(|(_, row)| row.not_comparable.clone()).collect();
        let mut label = name.to_owned();
        why.into_iter().take(1).for_each(|why| label.push_str(&format!(" {}", self.mark(why))));
        let columns = &self.source.suite.columns;
        let cells: Vec<Cell> = columns.iter().map(|column| self.cell(name, column)).collect();
        let missing = cells.iter().any(|cell| cell.open);
        let mut line = vec![label];
        for cell in cells {
            let text = self.text(cell);
            line.push(text);
        }
        line.push(if missing { self.command(&entries) } else { String::new() });
        line
    }

    fn cell(&mut self, name: &str, column: &Column) -> Cell {
        let published = self.published(name, column);
        let metric = column.metrics[0].as_str();
        let cell = match (metric, column.key.as_str(), column.len) {
            ("gflops", ..) => self.counted(name, column, |row| row.flops.map(|count| count as f64 / 1e9)),
            ("parameters_millions", ..) => {
                self.counted(name, column, |row| row.params.map(|count| count as f64 / 1e6))
            }
            (_, AVERAGE, _) => self.average(name, column, published),
            (_, _, Some(len)) => self.step(name, column, len),
            _ => self.trained(name, column, published),
        };
        let floor = self.floor(column).filter(|(_, _, words)| words.is_none());
        let beats =
            |value: f64, (floor, ..): (f64, String, Option<String>)| self.is_better(column, value, floor);
        let under = published
            .and_then(Published::value)
            .zip(floor)
            .is_some_and(|(value, floor)| !beats(value, floor));
        let mut cell = Cell { published, under, ..cell };
        if let (true, Some(Published::Value(printed)), Some(measured)) =
            (matches!(metric, "gflops" | "parameters_millions"), cell.published, &cell.measured)
        {
            let digits = if metric == "gflops" { 2 } else { 0 };
            let same = measured
                .parse::<f64>()
                .is_ok_and(|own| format!("{own:.digits$}") == format!("{printed:.digits$}"));
            cell.sign = Some(if same { SAME } else { "≠" });
        }
        cell
    }

    /// What is counted and not run.
    fn counted(&self, name: &str, column: &Column, of: fn(&Row) -> Option<f64>) -> Cell {
        let has = |row: &&Row| row.task.as_deref() == Some(&column.key);
        let rows = self.entries(name).into_iter().flat_map(|(index, _)| self.planned(index));
        let value = rows.filter(has).find_map(of);
        Cell { measured: value.map(|value| format!("{value:.2}")), ..Cell::default() }
    }

    fn planned(&self, index: usize) -> &'a [Row] {
        self.source.planned.get(index).map_or(&[], Vec::as_slice)
    }

    /// The models that fill `key` of the line: their planned rows.
    fn models(&self, name: &str, key: &str) -> Vec<&'a Row> {
        // robustness names changed texts behind the task: text-insertion
        let of = |task: &str| task == key || key.strip_prefix(task).is_some_and(|rest| rest.starts_with('-'));
        let rows = self.entries(name).into_iter().flat_map(|(index, _)| self.planned(index));
        let mut models: Vec<&Row> = Vec::new();
        for row in rows.filter(|row| row.task.as_deref().is_some_and(of)) {
            if !models.iter().any(|known| known.label() == row.label() && known.preset == row.preset) {
                models.push(row);
            }
        }
        models
    }

    /// Seeds trained for `key` of the line: those nearest to the protocol.
    fn group(&self, name: &str, column: &Column, key: &str) -> Option<Group<'a>> {
        let Source { suite, rows, metrics, .. } = *self.source;
        let metric = metrics.iter().find(|metric| metric.name == column.metrics[0])?;
        let models = self.models(name, key);
        let wanted = |row: &Row| {
            let preset = |model: &&Row| row.preset == model.preset || row.preset == suite.numbers_of;
            let model = |model: &&Row| row.model == model.model && row.variant == model.variant;
            row.protocol == suite.protocol
                && row.task.as_deref() == Some(key)
                && models.iter().any(|one| model(one) && preset(one))
        };
        let all = groups((rows, self.index), metric, wanted);
        let near = |group: &Group| (group.part().map_or(-1.0, |part| part), group.values().0.len());
        let mut best: Option<Group> = None;
        for group in all {
            // of those equally near the last, which is the newest
            if best.as_ref().is_none_or(|best| near(&group) >= near(best)) {
                best = Some(group);
            }
        }
        best
    }

    fn trained(&mut self, name: &str, column: &Column, published: Option<Published>) -> Cell {
        let runnable = !self.models(name, &column.key).is_empty() && self.is_measured(column);
        let Some(group) = self.group(name, column, &column.key) else {
            return Cell { open: runnable, ..Cell::default() };
        };
        let mut group = group;
        group.published = published;
        let (values, failed) = group.values();
        let floor = group.floor().map(|(_, floor)| floor);
        let under = |value: f64| floor.is_some_and(|floor| !self.is_better(column, value, floor));
        let number = |value: f64| format!("{value:.2}{}", if under(value) { UNDER } else { "" });
        let all: Vec<f64> = group.rows.iter().filter_map(|row| row.value).collect();
        let measured = match (mean(&values), mean(&all)) {
            (Some(value), _) => number(value),
            (None, Some(value)) => format!("{value:.2} failed"),
            (None, None) => group.rows[0].outcome.to_string(),
        };
        self.used.extend(group.rows.iter().map(|row| (*row).clone()));
        let seeds = match failed {
            0 => format!("n={}", values.len()),
            failed => format!("n={}, {failed} failed", values.len()),
        };
        let differs = group.rows[0].differs.clone().filter(|_| group.part() != Some(1.0));
        let sign = match group.standing(&values) {
            Standing::Unpublished => None,
            Standing::Open(_) => Some(OPEN),
            Standing::Within => Some(SAME),
            Standing::Better(_) => Some(BETTER),
            Standing::Worse(_) => Some(WORSE),
        };
        let notes = differs.into_iter().collect();
        Cell { measured: Some(measured), sign, seeds: Some(seeds), notes, ..Cell::default() }
    }

    /// Whether rows have the metric of `column`, so that a run would fill it.
    fn is_measured(&self, column: &Column) -> bool {
        self.source.metrics.iter().any(|metric| metric.name == column.metrics[0])
    }

    fn is_better(&self, column: &Column, value: f64, than: f64) -> bool {
        let less = self.source.metrics.iter().any(|metric| metric.name == column.metrics[0] && metric.less);
        if less { value < than } else { value > than }
    }

    /// The mean over the tasks of the suite, of the seeds that all of them have.
    fn average(&mut self, name: &str, column: &Column, published: Option<Published>) -> Cell {
        let suite = self.source.suite;
        let tasks = suite.base.task.as_ref().map_or(&[][..], |tasks| tasks.0.as_slice());
        let open = Cell { open: !self.entries(name).is_empty(), ..Cell::default() };
        let parts: Option<Vec<Group>> = tasks.iter().map(|task| self.group(name, column, task)).collect();
        let Some(parts) = parts.filter(|parts| !parts.is_empty()) else { return open };
        let value = |group: &Group, seed: Option<u64>| {
            group.rows.iter().find(|row| row.seed == seed).and_then(|row| row.value)
        };
        let seeds = parts[0].rows.iter().map(|row| row.seed);
        let averages: Vec<f64> = seeds
            .filter_map(|seed| {
                mean(&parts.iter().map(|part| value(part, seed)).collect::<Option<Vec<f64>>>()?)
            })
            .collect();
        let means: Option<Vec<f64>> = parts.iter().map(|part| mean(&part.values().0)).collect();
        let Some(measured) = mean(&averages).or_else(|| mean(&means?)) else { return open };
        let whole = parts.iter().all(|part| part.part() == Some(1.0) && part.values().1 == 0);
        let runs = suite.source_seeds.unwrap_or(1);
        let sign = published.and_then(Published::value).map(|published| {
            match Standing::of(&averages, (published, runs), false) {
                Standing::Within if whole => SAME,
                Standing::Better(_) if whole => BETTER,
                Standing::Worse(_) if whole => WORSE,
                _ => OPEN,
            }
        });
        let notes = if whole { Vec::new() } else { vec!["the settings of its parts".to_owned()] };
        let seeds = Some(format!("n={}", averages.len()));
        Cell { measured: Some(format!("{measured:.2}")), sign, seeds, notes, ..Cell::default() }
    }

    /// A measured speed: no verdict, machines differ.
    fn step(&mut self, name: &str, column: &Column, len: u64) -> Cell {
        let Source { suite, rows, .. } = *self.source;
        let entries = self.entries(name);
        let models: Vec<&Row> = entries.iter().flat_map(|(index, _)| self.planned(*index)).collect();
        let Some(planned) = models.first() else { return Cell::default() };
        let fits = |row: &&Row| {
            row.protocol == suite.protocol
                && row.metric == column.metrics[0]
                && (&row.model, &row.variant, &row.preset)
                    == (&planned.model, &planned.variant, &planned.preset)
                && row.pass.is_some_and(|pass| pass.word() == column.key)
                && row.len == Some(len)
                && !matches!(row.outcome, Outcome::Planned | Outcome::Interrupted | Outcome::Failed)
        };
        let near = |row: &&Row| {
            let own = row.suite.as_deref() == Some(suite.name.as_str());
            (own, row.batch == planned.batch, row.dtype == planned.dtype, row.kernel == planned.kernel)
        };
        let Some(row) = rows.iter().filter(fits).max_by_key(near) else {
            return Cell { open: true, ..Cell::default() };
        };
        self.used.push(row.clone());
        let mut notes = Vec::new();
        if row.batch != planned.batch {
            let batch = |row: &Row| row.batch.unwrap_or(1);
            notes.push(format!("batch {} ({})", batch(row), batch(planned)));
        }
        for (own, usual, what) in
            [(&row.dtype, &planned.dtype, "products"), (&row.kernel, &planned.kernel, "kernels")]
        {
            if own != usual {
                notes.push(format!("{own} {what}"));
            }
        }
        let measured = row.value.map_or_else(|| row.outcome.to_string(), |value| format!("{value:.2}"));
        Cell { measured: Some(measured), notes, ..Cell::default() }
    }

    /// The command that fills the line.
    fn command(&self, entries: &[(usize, &SuiteRow)]) -> String {
        let suite = self.source.suite;
        let mut models: Vec<String> = Vec::new();
        for row in entries.iter().flat_map(|(index, _)| self.planned(*index)) {
            if !models.contains(&row.label()) {
                models.push(row.label());
            }
        }
        let preset = suite.numbers_of.as_ref().map_or_else(String::new, |of| format!(" --preset {of}"));
        format!("effattn {} --suite {} --model {}{preset}", suite.protocol, suite.name, models.join(","))
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

    /// Value, rule, and what differs in its data.
    fn floor(&self, column: &Column) -> Option<(f64, String, Option<String>)> {
        let rows = self.source.rows;
        let of_task = |row: &&Row| row.task.as_deref() == Some(column.key.as_str());
        let kind = column.metrics[0].split('_').next().unwrap_or_default();
        let counts = COUNTS.iter().find(|(rule, _)| rule.ends_with(kind));
        let rule = |row: &&Row| match counts {
            Some((rule, _)) => row.metric == *rule,
            None => row.model == FLOOR && row.metric == column.metrics[0],
        };
        let rules: Vec<&Row> = rows.iter().filter(rule).filter(of_task).collect();
        // the whole split where there is one
        let whole = rules.iter().any(|row| row.differs.is_none());
        let rules = rules.into_iter().filter(|row| !whole || row.differs.is_none());
        let better = |a: &&Row, b: &&Row| {
            let (a, b) = (a.value.unwrap_or(f64::NAN), b.value.unwrap_or(f64::NAN));
            if self.is_better(column, a, b) { std::cmp::Ordering::Greater } else { std::cmp::Ordering::Less }
        };
        let best = rules.filter(|row| row.value.is_some()).max_by(better)?;
        let rule = match counts {
            Some((_, name)) => (*name).to_owned(),
            None => best.variant.clone().unwrap_or_default(),
        };
        let words = best.differs.as_ref().map(|_| data(best).join("; "));
        Some((best.value?, rule, words.filter(|words| !words.is_empty())))
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
    let digits = value.to_string().split_once('.').map_or(0, |(_, digits)| digits.len());
    format!("{value:.0$}", digits.max(2))
}

/// a to z, then aa, ab, ...
fn letter(index: usize) -> String {
    let last = char::from(b'a' + (index % 26) as u8);
    let before = if index >= 26 { letter(index / 26 - 1) } else { String::new() };
    format!("{before}{last}")
}

fn mean(values: &[f64]) -> Option<f64> {
    crate::stats::mean(values)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ACCURACY: Metric = Metric { name: "accuracy", title: "", unit: "%", less: false };

    const SUITE: &str = r#"
title = "T"
protocol = "lra"
source = "Paper, Table 9"
source_seeds = 4
columns = [
    { title = "ListOps", metrics = ["accuracy"], key = "listops" },
    { title = "FLOPs", metrics = ["gflops"], key = "listops" },
    { title = "Text", metrics = ["accuracy"], key = "text" },
    { title = "Average", metrics = ["accuracy"], key = "average" },
]
[base]
preset = "ls-lra"
task = ["listops", "text"]
[[row]]
label = "DP by definition"
model = "linformer"
[[row]]
label = "DP (listops)"
part_of = "DP"
model = "dp"
set = { task = ["listops"] }
published = [{ metric = "accuracy", listops = 37.0 }, { metric = "gflops", listops = 0.15 }]
[[row]]
label = "DP (text)"
part_of = "DP"
model = "ls"
set = { task = ["text"] }
published = { metric = "accuracy", text = 66.0 }
[[printed]]
label = "DP"
why = "the mean"
published = { metric = "accuracy", average = 51.5 }
[[printed]]
label = "Other"
why = "another paper's"
published = { metric = "accuracy", listops = 40.0 }
"#;

    fn planned(model: &str, tasks: &[&str]) -> Vec<Row> {
        let row = |task: &&str| Row {
            task: Some((*task).to_owned()),
            preset: Some("ls-lra".to_owned()),
            flops: Some(146_325_056),
            ..Row::new("lra", model)
        };
        tasks.iter().map(row).collect()
    }

    fn run(model: &str, task: &str, seed: u64, value: f64) -> Row {
        let row = planned(model, &[task]).remove(0);
        let row = Row { seed: Some(seed), fraction: Some(1.0), ..row };
        row.with("accuracy", "%", Some(value)).ended(Outcome::Ok, None)
    }

    fn made(rows: &[Row]) -> Paper {
        let suite = Suite::parse("x.toml", SUITE).unwrap();
        let planned = [
            planned("linformer", &["listops", "text"]),
            planned("dp", &["listops"]),
            planned("ls", &["text"]),
        ];
        paper(&Source { suite: &suite, planned: &planned, rows, metrics: &[ACCURACY] }).unwrap()
    }

    #[test]
    fn published_numbers_keep_their_digits() {
        assert_eq!([1.915, 82.3, 44.0].map(printed), ["1.915", "82.30", "44.00"]);
    }

    #[test]
    fn without_runs_every_cell_has_what_is_printed_and_the_line_says_what_runs_it() {
        let table = made(&[]).table;
        assert_eq!(table.columns, ["model", "ListOps", "FLOPs", "Text", "Average", "to run"]);
        let command = "effattn lra --suite x --model dp,ls";
        assert_eq!(table.rows[0], ["DP", "- / 37.00", "0.15 / 0.15 =", "- / 66.00", "- / 51.50", command]);
        assert_eq!(table.rows[1], ["Other", "- / 40.00", "", "", "", ""]);
        let own = ["DP by definition", "-", "0.15", "-", "-", "effattn lra --suite x --model linformer"];
        assert_eq!(table.rows[2], own, "what the paper has no number for stands below");
    }

    #[test]
    fn cells_have_value_seeds_and_sign_and_the_mean_those_of_all_tasks() {
        let rows = [
            run("dp", "listops", 1, 37.2),
            run("dp", "listops", 2, 36.9),
            run("ls", "text", 1, 60.0),
            run("ls", "text", 2, 60.1),
        ];
        let made = made(&rows);
        let line = &made.table.rows[0];
        assert_eq!(line[1], "37.05 / 37.00 = n=2");
        assert_eq!(line[3], "60.05 / 66.00 ▼ n=2");
        assert_eq!(line[4], "48.55 / 51.50 ▼ n=2");
        assert_eq!(line[5], "", "nothing is missing");
        assert_eq!(made.used.len(), 4);
        let one = self::made(&rows[..1]);
        assert_eq!(one.table.rows[0][1], "37.20 / 37.00 ○ n=1", "one seed says nothing");
        assert_eq!(one.table.rows[0][4], "- / 51.50", "a mean of one task is none");
    }

    #[test]
    fn other_settings_are_marked_and_never_shown_before_the_protocol() {
        let differs = Some("steps 40 (5000)".to_owned());
        let short = Row { fraction: None, differs, ..run("dp", "listops", 1, 39.0) };
        let table = made(std::slice::from_ref(&short)).table;
        assert_eq!(table.rows[0][1], "39.00 / 37.00 ○ n=1 (a)");
        assert!(table.notes.iter().any(|note| note == "a: steps 40 (5000)."), "{:?}", table.notes);
        let table = made(&[run("dp", "listops", 1, 37.2), short]).table;
        assert_eq!(table.rows[0][1], "37.20 / 37.00 ○ n=1", "the protocol's run stands there");
        let other = Row { preset: Some("lra-repo".to_owned()), ..run("dp", "listops", 1, 37.2) };
        assert_eq!(made(&[other]).table.rows[0][1], "- / 37.00", "another model");
    }

    #[test]
    fn what_does_not_exceed_the_floor_is_marked() {
        let rule = Row {
            variant: Some("root-operator".to_owned()),
            preset: None,
            fraction: None,
            flops: None,
            ..run(FLOOR, "listops", 0, 37.1)
        };
        let table = made(&[rule.clone(), run("dp", "listops", 1, 36.0)]).table;
        assert_eq!(table.rows[0][1], "36.00↓ / 37.00↓ ○ n=1");
        assert_eq!(table.rows[1][1], "- / 40.00");
        let last = table.rows.last().unwrap();
        assert_eq!(
            (last[0].as_str(), last[1].as_str()),
            ("floor: the best simple rule", "37.10 root-operator")
        );
        let part = Row { differs: Some("40 examples of each split".to_owned()), ..rule };
        let table = made(&[part]).table;
        assert_eq!(
            table.rows[0][1], "- / 37.00",
            "a floor of other data says nothing of the published number"
        );
        assert_eq!(table.rows.last().unwrap()[1], "37.10 root-operator (a)");
    }
}
