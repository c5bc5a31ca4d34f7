//! Ratios of rows, measured beside published: of every speed to that of the table's baseline, and those that a source names itself.

use super::{Line, PrintedNumber, Writer};
use crate::config::suite::{Column, SuiteRatio};
use crate::report::ranking::USUAL;
use crate::report::ratio::Ratio;
use crate::report::table::Table;
use crate::stats::Interval;
use crate::{Published, Row};

/// What a table of a paper says of speeds as multiples of one row's.
pub(super) struct Relative {
    /// The name of that row.
    baseline: Line,
}

impl<'a> Writer<'a> {
    /// The row that speeds are compared with: full attention, where the table has one such row.
    pub(super) fn relative(&self) -> Option<Relative> {
        let suite = self.source.suite;
        let full = |model: &str| USUAL.contains(&model);
        let mut rows = suite.rows.iter().filter(|row| full(&row.model.name) && row.model.knobs.is_empty());
        let (first, second) = (rows.next()?, rows.next());
        let speeds = self.speed_columns().next().is_some();
        (second.is_none() && speeds && !suite.by_len)
            .then(|| Relative { baseline: Line { name: first.printed_as().to_owned(), len: None } })
    }

    /// The columns of speeds, with their length.
    fn speed_columns(&self) -> impl Iterator<Item = (&'a Column, u64)> {
        let columns = self.source.suite.columns.iter();
        columns
            .filter(|column| column.metrics[0].ends_with("_per_second"))
            .filter_map(|column| Some((column, column.len?)))
    }

    /// The table of the ratios; nothing where no row was measured beside the baseline.
    pub(super) fn ratio_table(&self, Relative { baseline }: &Relative) -> Option<Table> {
        let suite = self.source.suite;
        let mut measured = false;
        let mut rows = Vec::new();
        for line in self.lines().iter().filter(|line| *line != baseline) {
            let mut cells = vec![line.name.clone()];
            for (column, len) in self.speed_columns() {
                let ratio = self.speed_ratio((line, baseline), column, len);
                measured |= ratio.is_some();
                let own = ratio.map_or_else(|| "-".to_owned(), Ratio::text);
                let printed = self.printed_ratio((line, baseline), column);
                cells.push(printed.map_or(own.clone(), |printed| format!("{own} / {printed}")));
            }
            rows.push(cells);
        }
        let columns = std::iter::once("model".to_owned());
        let columns: Vec<String> =
            columns.chain(self.speed_columns().map(|(column, _)| column.title.clone())).collect();
        let name = &baseline.name;
        measured.then(|| Table {
            title: format!("{}: times as fast as {name}, measured / published ({})", suite.title, suite.source),
            columns,
            rows,
            notes: vec![format!(
                "±: half of the 95 % interval. {name} oom: {name} ran out of memory in the source, so that there is no ratio. The \
                 table below has the steps per second."
            )],
            ..Table::default()
        })
    }

    /// How many times as fast as the baseline a line is at a length, of two rows that were measured alike.
    fn speed_ratio(&self, (line, baseline): (&Line, &Line), column: &Column, len: u64) -> Option<Ratio> {
        let (_, own) = self.step_row(line, column, len)?;
        let (_, bases) = self.step_rows(baseline, column, len)?;
        Ratio::of(own, bases.into_iter().find(|base| alike(base, own))?)
    }

    /// The same of what the source prints, or what happened instead of it.
    fn printed_ratio(&self, (line, baseline): (&Line, &Line), column: &Column) -> Option<String> {
        let number = |line: &Line| self.published(line, column).map(|PrintedNumber { number, .. }| number);
        Some(match (number(line)?, number(baseline)?) {
            (Published::Outcome(outcome), _) => outcome.to_string(),
            (_, Published::Outcome(outcome)) => format!("{} {outcome}", baseline.name),
            (Published::Value(own), Published::Value(base)) => {
                format!("{:.2}", Ratio::exact(own, base)?.value)
            }
        })
    }

    /// A sentence for each ratio of the suite of which both rows were measured: what it is, what is published, and why they
    /// differ where they do.
    pub(super) fn ratios(&self) -> Vec<String> {
        let suite = self.source.suite;
        let column = |ratio: &SuiteRatio| {
            suite.columns.iter().find(|column| column.metrics[0] == ratio.metric && column.key == ratio.key)
        };
        suite.ratios.iter().filter_map(|ratio| self.ratio(ratio, column(ratio)?)).collect()
    }

    /// Of the batch sizes that both rows were measured with, the one whose ratio is surest.
    fn ratio(&self, ratio: &SuiteRatio, column: &Column) -> Option<String> {
        let rows = |label: &str| {
            let line = Line { name: label.to_owned(), len: self.source.suite.by_len.then_some(ratio.len) };
            self.step_rows(&line, column, ratio.len).map_or_else(Vec::new, |(_, rows)| rows)
        };
        let under = rows(&ratio.under);
        let pairs = rows(&ratio.over).into_iter().flat_map(|over| {
            let beside = under.iter().filter(move |under| alike(over, under));
            beside.filter_map(move |under| Some((over.batch.unwrap_or(1), Ratio::of(over, under)?)))
        });
        let width =
            |ratio: &Ratio| ratio.interval.map_or(f64::INFINITY, |interval| interval.high - interval.low);
        let (batch, surest) = pairs.min_by(|(_, a), (_, b)| width(a).total_cmp(&width(b)))?;
        Some(sentence(ratio, batch, surest))
    }
}

/// Whether two rows were measured in the same way.
fn alike(a: &Row, b: &Row) -> bool {
    (a.batch, &a.dtype, &a.kernel, a.threads) == (b.batch, &b.dtype, &b.kernel, b.threads)
}

fn sentence(
    SuiteRatio { over, under, len, published, why, .. }: &SuiteRatio,
    batch: u64,
    measured: Ratio,
) -> String {
    let range = measured
        .interval
        .map_or_else(String::new, |Interval { low, high }| format!(" [{low:.2}, {high:.2}]"));
    let value = measured.value;
    let said = format!(
        "{over} / {under} at {len}, batch {batch}: {value:.2}{range} measured, {published} published"
    );
    match measured.interval {
        None => format!("{said}."),
        Some(interval) if interval.contains(*published) => format!("{said}: not told apart."),
        Some(_) => format!("{said}: this contradicts the source. {}", why.trim()).trim_end().to_owned(),
    }
}
