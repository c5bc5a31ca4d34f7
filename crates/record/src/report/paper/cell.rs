//! What stands in a cell: measured, averaged, counted, and the floor under its column.

use std::cmp::Ordering;

use super::{BETTER, Cell, Line, OPEN, PaperSource, SAME, UNDER, WORSE, Writer, digits};
use crate::config::suite::{Column, PublishedTable};
use crate::report::trained::{COUNTS, LARGEST, PublishedVerdict, SeedGroup, UNIGRAM, data, groups};
use crate::stats::mean;
use crate::{FLOOR, Outcome, Published, Row};

/// What `report` calls the mean over the tasks.
const AVERAGE: &str = "average";
/// What is counted and not run: the metric of its published numbers, where it stands in a row, and its unit.
type Counted = (&'static str, fn(&Row) -> Option<u64>, f64);
const COUNTED: [Counted; 2] =
    [("gflops", |row| row.flops, 1e9), ("parameters_millions", |row| row.params, 1e6)];

impl<'a> Writer<'a> {
    /// What the paper has in `column` of `line`.
    pub(super) fn published(&self, line: &Line, column: &Column) -> Option<Published> {
        let other = self.source_of(column);
        let here = || self.number(line, column);
        if std::ptr::eq(other, self.source) {
            return here();
        }
        Writer::new(other, self.index).number(line, column).or_else(here)
    }

    /// What this suite has in `column` of `line`.
    fn number(&self, line: &Line, column: &Column) -> Option<Published> {
        let suite = self.source.suite;
        let index = match (line.len.or(column.len), &suite.base.len) {
            (Some(len), Some(lens)) => lens.0.iter().position(|known| *known == len)?,
            _ => 0,
        };
        let entries = self.entries(line);
        let own = entries.iter().flat_map(|(_, row)| &row.published);
        let printed = suite.printed.iter().filter(|printed| printed.label == line.name);
        let tables: Vec<&PublishedTable> = own.chain(printed.flat_map(|line| &line.published)).collect();
        let of = |metric: &String| {
            let tables = || tables.iter().copied().filter(|table| table.metric == *metric);
            let of_len = |table: &PublishedTable| table.at(&format!("{}-{}", column.key, line.len?), 0);
            tables().find_map(|table| table.at(&column.key, index)).or_else(|| tables().find_map(of_len))
        };
        column.metrics.iter().find_map(of)
    }

    pub(super) fn cell(&mut self, line: &Line, column: &Column) -> Cell {
        let published = self.published(line, column);
        let own = self.source;
        self.source = self.source_of(column);
        let mut cell = self.measured(line, column, published);
        if !std::ptr::eq(own, self.source) {
            cell.notes.extend(self.entries(line).into_iter().find_map(|(_, row)| row.not_comparable.clone()));
        }
        let floor = self.floor(column).filter(|(_, _, words)| words.is_none());
        let under = published
            .and_then(Published::value)
            .zip(floor)
            .is_some_and(|(value, (floor, ..))| !self.is_better(column, value, floor));
        self.source = own;
        Cell { published, under, ..cell }
    }

    fn measured(&mut self, line: &Line, column: &Column, published: Option<Published>) -> Cell {
        let metric = column.metrics[0].as_str();
        let counted = COUNTED.iter().find(|(name, ..)| *name == metric);
        match (counted, column.key.as_str(), column.len.or(line.len)) {
            (Some((_, of, unit)), ..) => {
                let published = published.and_then(Published::value);
                let value = self.planned_for(line, column).find_map(of);
                Self::counted(value.map(|value| value as f64 / unit), published, self.digits(column))
            }
            (_, AVERAGE, _) => self.average(line, column, published),
            (_, _, Some(len)) if !self.is_trained(column) => self.step(line, column, len, published),
            _ => self.trained(line, column, published),
        }
    }

    /// What is counted and not run, and whether it has the digits that are printed.
    fn counted(value: Option<f64>, published: Option<f64>, digits: Option<usize>) -> Cell {
        let sign = |(value, printed): (f64, f64)| {
            let digits = digits.unwrap_or_else(|| super::digits(printed));
            if format!("{value:.digits$}") == format!("{printed:.digits$}") { SAME } else { "≠" }
        };
        let measured = value.map(|value| format!("{value:.2}"));
        Cell { measured, sign: value.zip(published).map(sign), ..Cell::default() }
    }

    /// Digits behind the point in a column of FLOPs, which the source rounds alike; parameters have those of each number.
    fn digits(&self, column: &Column) -> Option<usize> {
        let suite = self.source.suite;
        let metric = column.metrics[0].as_str();
        let rows = suite.rows.iter().flat_map(|row| &row.published);
        let tables = rows.chain(suite.printed.iter().flat_map(|line| &line.published));
        let values = tables.filter(|table| table.metric == metric).flat_map(|table| table.values.values());
        let most = values.flatten().filter_map(|value| value.value()).map(digits).max();
        most.filter(|_| metric == "gflops")
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

    fn trained(&mut self, line: &Line, column: &Column, published: Option<Published>) -> Cell {
        let runnable = !self.models(line, &column.key).is_empty() && self.is_trained(column);
        let Some(group) = self.group(line, column, &column.key) else {
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
            PublishedVerdict::Unpublished => None,
            PublishedVerdict::Open(_) => Some(OPEN),
            PublishedVerdict::Within => Some(SAME),
            PublishedVerdict::Better(_) => Some(BETTER),
            PublishedVerdict::Worse(_) => Some(WORSE),
        };
        let notes = differs.into_iter().collect();
        Cell { measured: Some(measured), sign, seeds: Some(seeds), notes, ..Cell::default() }
    }

    /// Whether rows of trained models have the metric of `column`, so that a run would fill it.
    fn is_trained(&self, column: &Column) -> bool {
        self.source.metrics.iter().any(|metric| metric.name == column.metrics[0])
    }

    fn is_better(&self, column: &Column, value: f64, than: f64) -> bool {
        let less = self
            .source
            .metrics
            .iter()
            .any(|metric| metric.name == column.metrics[0] && metric.lower_is_better);
        if less { value < than } else { value > than }
    }

    /// The mean over the tasks of the suite, of the seeds that all of them have.
    fn average(&mut self, line: &Line, column: &Column, published: Option<Published>) -> Cell {
        let suite = self.source.suite;
        let tasks = suite.base.task.as_ref().map_or(&[][..], |tasks| tasks.0.as_slice());
        let open = Cell { open: !self.entries(line).is_empty(), ..Cell::default() };
        let parts: Option<Vec<SeedGroup>> = tasks.iter().map(|task| self.group(line, column, task)).collect();
        let Some(parts) = parts.filter(|parts| !parts.is_empty()) else { return open };
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
        let whole = parts.iter().all(|part| part.part() == Some(1.0) && part.values().1 == 0);
        let runs = suite.source_seeds.unwrap_or(1);
        let sign = published.and_then(Published::value).map(|published| {
            match PublishedVerdict::of(&averages, (published, runs), false) {
                PublishedVerdict::Within if whole => SAME,
                PublishedVerdict::Better(_) if whole => BETTER,
                PublishedVerdict::Worse(_) if whole => WORSE,
                _ => OPEN,
            }
        });
        let notes = if whole { Vec::new() } else { vec!["the settings of its parts".to_owned()] };
        let seeds = Some(format!("n={}", averages.len()));
        Cell { measured: Some(format!("{measured:.2}")), sign, seeds, notes, ..Cell::default() }
    }

    /// A measured speed: no verdict, machines differ.
    fn step(&mut self, line: &Line, column: &Column, len: u64, published: Option<Published>) -> Cell {
        let PaperSource { suite, rows, .. } = *self.source;
        let Some(planned) = self.planned_for(line, column).find(|row| row.len == Some(len)) else {
            return Cell::default();
        };
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
        let digits = published.and_then(Published::value).map_or(2, digits).max(2);
        let text = |value: f64| format!("{value:.*}", if value < 0.1 { digits.max(3) } else { digits });
        let measured = row.value.map_or_else(|| row.outcome.to_string(), text);
        Cell { measured: Some(measured), notes, ..Cell::default() }
    }

    /// Value, rule, and what differs in its data.
    pub(super) fn floor(&self, column: &Column) -> Option<(f64, String, Option<String>)> {
        let own = self.source_of(column);
        let protocol = own.suite.protocol.as_str();
        let metric = column.metrics[0].as_str();
        let kind = metric.split('_').next().unwrap_or_default();
        // what the rule is called in the row of a model, where rules are no rows of their own
        let counts = COUNTS.iter().find(|(rule, _)| rule.ends_with(kind)).copied();
        let counts = counts.or_else(|| (metric == "masked_loss").then_some((UNIGRAM, "counts")));
        let of_task = |row: &&Row| row.task.as_deref() == Some(column.key.as_str());
        let is_rule = |row: &Row| row.model == FLOOR && row.metric == metric;
        let scored = own.rows.iter().filter(of_task).any(is_rule);
        let counts = counts.or_else(|| (kind == "accuracy" && !scored).then_some((LARGEST, "largest class")));
        let rule = |row: &&Row| match counts {
            Some((rule, _)) => row.metric == rule && row.protocol == protocol,
            None => is_rule(row),
        };
        let rules: Vec<&Row> = own.rows.iter().filter(rule).filter(of_task).collect();
        // the whole split where there is one
        let whole = rules.iter().any(|row| data(row).is_empty());
        let rules = rules.into_iter().filter(|row| !whole || data(row).is_empty());
        let better = |a: &&Row, b: &&Row| {
            let (a, b) = (a.value.unwrap_or(f64::NAN), b.value.unwrap_or(f64::NAN));
            if self.is_better(column, a, b) { Ordering::Greater } else { Ordering::Less }
        };
        let best = rules.filter(|row| row.value.is_some()).max_by(better)?;
        let rule =
            counts.map_or_else(|| best.variant.clone().unwrap_or_default(), |(_, name)| name.to_owned());
        let words = data(best).join("; ");
        Some((best.value?, rule, (!words.is_empty()).then_some(words)))
    }
}
