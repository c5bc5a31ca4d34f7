//! What stands in a cell: measured, averaged, counted, and the floor under its column.

use std::cmp::Ordering;

use super::{BETTER, Cell, Line, OPEN, PaperSource, PrintedNumber, SAME, WORSE, Writer};
use crate::config::suite::{Column, PublishedTable};
use crate::departures::sizes_of;
use crate::report::floor::{Floor, subset};
use crate::report::published::few_repetitions;
use crate::report::trained::{COUNTS, LARGEST, PublishedVerdict, SeedGroup, UNIGRAM, groups};
use crate::stats::mean;
use crate::{FLOOR, Outcome, Row};

/// What `report` calls the mean over the tasks.
const AVERAGE: &str = "average";
/// What is counted and not run: the metric of its published numbers, where it stands in a row, and its unit.
type Counted = (&'static str, fn(&Row) -> Option<u64>, f64);
const COUNTED: [Counted; 2] =
    [("gflops", |row| row.flops, 1e9), ("parameters_millions", |row| row.params, 1e6)];

impl<'a> Writer<'a> {
    /// What the paper has in `column` of `line`.
    pub(super) fn published(&self, line: &Line, column: &Column) -> Option<PrintedNumber> {
        self.printed(line, column).map(|(number, _)| number)
    }

    /// What the paper has in `column` of `line`, and the table of the suite that has it.
    fn printed(&self, line: &Line, column: &Column) -> Option<(PrintedNumber, &'a PublishedTable)> {
        let other = self.source_of(column);
        let here = || self.number(line, column);
        if std::ptr::eq(other, self.source) {
            return here();
        }
        Writer::new(other, self.index).number(line, column).or_else(here)
    }

    /// What this suite has in `column` of `line`.
    fn number(&self, line: &Line, column: &Column) -> Option<(PrintedNumber, &'a PublishedTable)> {
        let suite = self.source.suite;
        let index = match (line.len.or(column.len), &suite.base.len) {
            (Some(len), Some(lens)) => lens.0.iter().position(|known| *known == len)?,
            _ => 0,
        };
        let entries = self.entries(line);
        let own = entries.iter().flat_map(|(_, row)| &row.published);
        let printed = suite.printed.iter().filter(|printed| printed.label == line.name);
        let tables: Vec<&'a PublishedTable> = own.chain(printed.flat_map(|line| &line.published)).collect();
        let of = |metric: &String| {
            let tables = || tables.iter().copied().filter(|table| table.metric == *metric);
            let at =
                |table: &'a PublishedTable, key: &str, index: usize| {
                    let (number, own) = (table.at(key, index)?, table.digits_at(key, index));
                    // zeros at the end are no digits of a TOML number: the column has as many as its longest number
                    let digits = own.map_or(0, |own| {
                        if own == 0 { 0 } else { own.max(self.most_digits(metric, &column.key)) }
                    });
                    Some((PrintedNumber { number, digits }, table))
                };
            let of_len = |table: &'a PublishedTable| at(table, &format!("{}-{}", column.key, line.len?), 0);
            tables().find_map(|table| at(table, &column.key, index)).or_else(|| tables().find_map(of_len))
        };
        column.metrics.iter().find_map(of)
    }

    /// Most digits behind the point of a number of `metric` under `key`, or under it and a length.
    fn most_digits(&self, metric: &str, key: &str) -> usize {
        let suite = self.source.suite;
        let rows = suite.rows.iter().flat_map(|row| &row.published);
        let tables = rows.chain(suite.printed.iter().flat_map(|line| &line.published));
        let of_key =
            |name: &str| name == key || name.strip_prefix(key).is_some_and(|rest| rest.starts_with('-'));
        let tables = tables.filter(|table| table.metric == metric);
        let digits = tables.flat_map(|table| table.digits.iter().filter(|(name, _)| of_key(name)));
        digits.flat_map(|(_, digits)| digits.iter().flatten().copied()).max().unwrap_or(0)
    }

    pub(super) fn cell(&mut self, line: &Line, column: &Column) -> Cell {
        let printed = self.printed(line, column);
        let (published, read) =
            (printed.map(|(number, _)| number), printed.and_then(|(_, table)| table.source.as_ref()));
        let own = self.source;
        self.source = self.source_of(column);
        let mut cell = self.measured(line, column, published);
        if !std::ptr::eq(own, self.source) {
            cell.notes.extend(self.entries(line).into_iter().find_map(|(_, row)| row.not_comparable.clone()));
        }
        let floor = self.floor(column, &[]);
        let value = published.and_then(|printed| printed.number.value());
        let less = self.lower_is_better(column);
        let under = value.zip(floor).map_or("", |(value, floor)| floor.against(value, less).mark());
        self.source = own;
        cell.notes.extend(read.map(|source| format!("the published number was read in {source}")));
        Cell { published, under, ..cell }
    }

    fn measured(&mut self, line: &Line, column: &Column, published: Option<PrintedNumber>) -> Cell {
        let metric = column.metrics[0].as_str();
        let counted = COUNTED.iter().find(|(name, ..)| *name == metric);
        match (counted, column.key.as_str(), column.len.or(line.len)) {
            (Some((_, of, unit)), ..) => {
                let value = self.planned_for(line, column).find_map(of);
                Self::counted(value.map(|value| value as f64 / unit), published)
            }
            (_, AVERAGE, _) => self.average(line, column, published),
            (_, _, Some(len)) if !self.is_trained(column) => self.step(line, column, len, published),
            _ => self.trained(line, column, published),
        }
    }

    /// What is counted and not run, and whether it has the digits that are printed.
    fn counted(value: Option<f64>, published: Option<PrintedNumber>) -> Cell {
        let sign = |(value, PrintedNumber { number, digits }): (f64, PrintedNumber)| {
            let printed = number.value()?;
            Some(if format!("{value:.digits$}") == format!("{printed:.digits$}") { SAME } else { "≠" })
        };
        let measured = value.map(|value| format!("{value:.2}"));
        Cell { measured, sign: value.zip(published).and_then(sign), ..Cell::default() }
    }

    /// The planned rows of `line` that `column` is about.
    fn planned_for(&self, line: &Line, column: &Column) -> impl Iterator<Item = &'a Row> {
        let (key, len) = (column.key.clone(), column.len.or(line.len));
        let rows: Vec<&'a Row> =
            self.entries(line).into_iter().flat_map(|(index, _)| self.planned(index)).collect();
        rows.into_iter().filter(move |row| {
            let named = row.task.as_ref() == Some(&key) || row.pass.is_some_and(|pass| pass.word() == key);
            named && len.is_none_or(|len| row.len == Some(len))
        })
    }

    /// The models that fill `key` of the line: their planned rows, and whether their length is the line's own.
    fn models(&self, line: &Line, key: &str) -> Vec<(&'a Row, bool)> {
        // some protocols name what they test behind the task: text-insertion, wikitext103-valid
        let of = |task: &str| task == key || key.strip_prefix(task).is_some_and(|rest| rest.starts_with('-'));
        let mut models: Vec<(&Row, bool)> = Vec::new();
        for (index, entry) in self.entries(line) {
            let fixed = line.len.is_some() || entry.set.len.is_some();
            let rows = self.planned(index).iter().filter(|row| row.task.as_deref().is_some_and(of));
            for row in rows.filter(|row| line.len.is_none_or(|len| row.len == Some(len))) {
                let same = |known: &Row| known.label() == row.label() && known.preset == row.preset;
                if !models.iter().any(|(known, _)| same(known)) {
                    models.push((row, fixed));
                }
            }
        }
        models
    }

    /// Seeds trained for `key` of the line: those nearest to the protocol.
    fn group(&self, line: &Line, column: &Column, key: &str) -> Option<SeedGroup<'a>> {
        let PaperSource { suite, rows, metrics, .. } = *self.source;
        let metric = metrics.iter().find(|metric| metric.name == column.metrics[0])?;
        let models = self.models(line, key);
        let wanted = |row: &Row| {
            let preset = |model: &&Row| row.preset == model.preset || row.preset == suite.numbers_of;
            let model = |model: &&Row| row.model == model.model && row.variant == model.variant;
            let len = |model: &&Row, fixed: bool| !fixed || row.len == model.len;
            row.protocol == suite.protocol
                && row.task.as_deref() == Some(key)
                && models.iter().any(|(one, fixed)| model(one) && preset(one) && len(one, *fixed))
        };
        let all = groups((rows, self.index), metric, wanted);
        let near = |group: &SeedGroup| (group.part().map_or(-1.0, |part| part), group.values().0.len());
        let mut best: Option<SeedGroup> = None;
        for group in all {
            // of those equally near the last, which is the newest
            if best.as_ref().is_none_or(|best| near(&group) >= near(best)) {
                best = Some(group);
            }
        }
        best
    }

    fn trained(&mut self, line: &Line, column: &Column, published: Option<PrintedNumber>) -> Cell {
        let runnable = !self.models(line, &column.key).is_empty() && self.is_trained(column);
        let Some(group) = self.group(line, column, &column.key) else {
            return Cell { open: runnable, ..Cell::default() };
        };
        let mut group = group;
        group.published = published.map(|printed| printed.number);
        let (values, _) = group.values();
        let (floor, less) = (group.floor(), self.lower_is_better(column));
        let mark = |value: f64| floor.as_ref().map_or("", |floor| floor.against(value, less).mark());
        let number = |value: f64| format!("{value:.2}{}", mark(value));
        let all: Vec<f64> = group.rows.iter().filter_map(|row| row.value).collect();
        let measured = mean(&values).or_else(|| mean(&all));
        let measured = measured.map_or_else(|| group.rows[0].outcome.to_string(), number);
        self.used.extend(group.rows.iter().map(|row| (*row).clone()));
        let seeds = match group.left_out().words() {
            None => format!("n={}", values.len()),
            Some(words) => format!("n={}, {words}", values.len()),
        };
        let sizes = self.foreign_sizes(&group);
        let differs =
            [group.rows[0].differs.clone(), sizes.clone()].into_iter().flatten().collect::<Vec<_>>();
        let sign = match group.standing(&values) {
            PublishedVerdict::Unpublished => None,
            _ if sizes.is_some() => Some(OPEN),
            PublishedVerdict::Open(_) => Some(OPEN),
            PublishedVerdict::Within => Some(SAME),
            PublishedVerdict::Better(_) => Some(BETTER),
            PublishedVerdict::Worse(_) => Some(WORSE),
        };
        let notes = if differs.is_empty() { Vec::new() } else { vec![differs.join("; ")] };
        Cell { measured: Some(measured), sign, seeds: Some(seeds), notes, ..Cell::default() }
    }

    /// In words, where the suite's numbers belong to other sizes than those of `group` and its rows do not say so.
    fn foreign_sizes(&self, group: &SeedGroup) -> Option<String> {
        let of = self.source.suite.numbers_of.as_deref()?;
        let preset = group.rows[0].preset.as_deref().filter(|preset| *preset != of)?;
        let words = sizes_of(preset, of);
        let said = group.rows[0].differs.as_deref().is_some_and(|differs| differs.contains(&words));
        (!said && group.published.is_some()).then_some(words)
    }

    /// Whether rows of trained models have the metric of `column`, so that a run would fill it.
    fn is_trained(&self, column: &Column) -> bool {
        self.source.metrics.iter().any(|metric| metric.name == column.metrics[0])
    }

    fn lower_is_better(&self, column: &Column) -> bool {
        let metrics = self.source.metrics.iter();
        metrics.clone().any(|metric| metric.name == column.metrics[0] && metric.lower_is_better)
    }

    /// The mean over the tasks of the suite, of the seeds that all of them have.
    fn average(&mut self, line: &Line, column: &Column, published: Option<PrintedNumber>) -> Cell {
        let suite = self.source.suite;
        let tasks = suite.base.task.as_ref().map_or(&[][..], |tasks| tasks.0.as_slice());
        let open = Cell { open: !self.entries(line).is_empty(), ..Cell::default() };
        let parts: Option<Vec<SeedGroup>> = tasks.iter().map(|task| self.group(line, column, task)).collect();
        let Some(mut parts) = parts.filter(|parts| !parts.is_empty()) else { return open };
        parts.iter_mut().for_each(|part| part.published = published.map(|printed| printed.number));
        let value = |group: &SeedGroup, seed: Option<u64>| {
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
        let sizes = parts.iter().find_map(|part| self.foreign_sizes(part));
        let whole =
            parts.iter().all(|part| part.part() == Some(1.0) && part.values().1 == 0) && sizes.is_none();
        let used = parts.iter().flat_map(|part| part.rows.iter().map(|row| (*row).clone()));
        let used: Vec<Row> = used.filter(|row| !self.used.contains(row)).collect();
        self.used.extend(used);
        let runs = suite.source_seeds.unwrap_or(1);
        let sign =
            published.and_then(|printed| printed.number.value()).map(|published| match PublishedVerdict::of(
                &averages,
                (published, runs),
                false,
            ) {
                PublishedVerdict::Within if whole => SAME,
                PublishedVerdict::Better(_) if whole => BETTER,
                PublishedVerdict::Worse(_) if whole => WORSE,
                _ => OPEN,
            });
        let notes = match (whole, sizes) {
            (true, _) => Vec::new(),
            (false, Some(sizes)) => vec![sizes],
            (false, None) => vec!["the settings of its parts".to_owned()],
        };
        let seeds = Some(format!("n={}", averages.len()));
        Cell { measured: Some(format!("{measured:.2}")), sign, seeds, notes, ..Cell::default() }
    }

    /// A measured speed: no verdict, machines differ.
    fn step(&mut self, line: &Line, column: &Column, len: u64, published: Option<PrintedNumber>) -> Cell {
        let Some((planned, row)) = self.step_row(line, column, len) else {
            let open = self.planned_for(line, column).any(|row| row.len == Some(len));
            return Cell { open, ..Cell::default() };
        };
        self.used.push(row.clone());
        let entry = self.entries(line).into_iter().next().map(|(_, entry)| entry);
        let wanted = entry.and_then(|entry| entry.set.min_runs).or(self.source.suite.base.min_runs);
        self.repetitions.extend(row.n.zip(wanted).filter(|_| row.value.is_some()));
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
        let digits = published.map_or(2, |printed| printed.digits).max(2);
        let text = |value: f64| format!("{value:.*}", if value < 0.1 { digits.max(3) } else { digits });
        let measured = row.value.map_or_else(|| row.outcome.to_string(), text);
        Cell { measured: Some(measured), notes, ..Cell::default() }
    }

    /// The planned row of a speed, and the measured one nearest to it.
    pub(super) fn step_row(&self, line: &Line, column: &Column, len: u64) -> Option<(&'a Row, &'a Row)> {
        let (planned, rows) = self.step_rows(line, column, len)?;
        let own_suite = self.source.suite.name.as_str();
        let near = |row: &&Row| {
            let own = row.suite.as_deref() == Some(own_suite);
            (own, row.batch == planned.batch, row.dtype == planned.dtype, row.kernel == planned.kernel)
        };
        Some((planned, rows.into_iter().max_by_key(near)?))
    }

    /// The planned row of a speed, and every measured one of its model, pass and length.
    pub(super) fn step_rows(
        &self,
        line: &Line,
        column: &Column,
        len: u64,
    ) -> Option<(&'a Row, Vec<&'a Row>)> {
        let PaperSource { suite, rows, .. } = *self.source;
        let planned = self.planned_for(line, column).find(|row| row.len == Some(len))?;
        let fits = |row: &&Row| {
            row.protocol == suite.protocol
                && row.metric == column.metrics[0]
                && (&row.model, &row.variant, &row.preset)
                    == (&planned.model, &planned.variant, &planned.preset)
                && row.pass.is_some_and(|pass| pass.word() == column.key)
                && row.len == Some(len)
                && !matches!(row.outcome, Outcome::Planned | Outcome::Interrupted | Outcome::Failed)
        };
        Some((planned, rows.iter().filter(fits).collect()))
    }

    /// How many of the measured speeds are medians of fewer steps than the suite asks for.
    pub(super) fn few_repetitions(&self) -> Option<String> {
        few_repetitions(&self.repetitions)
    }

    /// The floors of `column`: of the whole data set where a number is published, and of the subsets of measured cells.
    pub(super) fn floors_of(&self, column: &Column) -> Vec<Floor> {
        let lines = self.lines();
        let mut subsets: Vec<Vec<String>> = Vec::new();
        if lines.iter().any(|line| self.published(line, column).is_some()) {
            subsets.push(Vec::new());
        }
        let own = Writer::new(self.source_of(column), self.index);
        for group in lines.iter().filter_map(|line| own.group(line, column, &column.key)) {
            let data = subset(group.rows[0]);
            if !subsets.contains(&data) {
                subsets.push(data);
            }
        }
        subsets.iter().filter_map(|subset| own.floor(column, subset)).collect()
    }

    /// The best simple rule of `column` on `data`, a subset of its data set.
    fn floor(&self, column: &Column, data: &[String]) -> Option<Floor> {
        let own = self.source_of(column);
        let protocol = own.suite.protocol.as_str();
        let metric = column.metrics[0].as_str();
        let kind = metric.split('_').next().unwrap_or_default();
        // what the rule is called in the row of a model, where rules are no rows of their own
        let counts = COUNTS.iter().find(|(rule, _)| rule.ends_with(kind)).copied();
        let counts = counts.or_else(|| (metric == "masked_loss").then_some((UNIGRAM, "counts")));
        let of_task = |row: &&Row| row.task.as_deref() == Some(column.key.as_str()) && subset(row) == data;
        let is_rule = |row: &Row| row.model == FLOOR && row.metric == metric;
        let scored = own.rows.iter().filter(of_task).any(is_rule);
        let is_word_rule = counts.is_some();
        let counts = counts.or_else(|| (kind == "accuracy" && !scored).then_some((LARGEST, "largest class")));
        // the tokenizer is the preset's
        let presets = || {
            let planned = own.planned.iter().flatten().map(|row| row.preset.as_deref());
            planned.chain([own.suite.numbers_of.as_deref()])
        };
        let same_words = |row: &Row| {
            !is_word_rule || presets().any(|preset| preset.is_some() && preset == row.preset.as_deref())
        };
        let rule = |row: &&Row| match counts {
            Some((rule, _)) => row.metric == rule && row.protocol == protocol && same_words(row),
            None => is_rule(row),
        };
        let less = self.lower_is_better(column);
        let better = |a: &&Row, b: &&Row| {
            let (a, b) = (a.value.unwrap_or(f64::NAN), b.value.unwrap_or(f64::NAN));
            if (a < b) == less { Ordering::Greater } else { Ordering::Less }
        };
        let rules = own.rows.iter().filter(rule).filter(of_task);
        let best = rules.filter(|row| row.value.is_some()).max_by(better)?;
        let rule =
            counts.map_or_else(|| best.variant.clone().unwrap_or_default(), |(_, name)| name.to_owned());
        let same_cell = |row: &&Row| {
            row.metric == "tested"
                && (&row.model, &row.variant, row.seed, &row.settings)
                    == (&best.model, &best.variant, best.seed, &best.settings)
        };
        let tested = own.rows.iter().filter(of_task).find(same_cell).and_then(|row| row.value);
        Some(Floor { rule, value: best.value?, tested, data: data.to_vec() })
    }
}
