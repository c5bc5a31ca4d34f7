//! Trained models beside the published numbers and beside what a simple rule reaches, as a table.

use std::collections::HashMap;

use super::floor::{AgainstFloor, Floor, subset};
use super::table::Table;
use crate::config::suite::Suite;
use crate::stats::{Interval, Summary, prediction_interval};
use crate::{FLOOR, Metric, Outcome, Published, Row};

/// The rule of masked language models: how often words are.
pub(super) const UNIGRAM: &str = "unigram_loss";
/// The rules of language models, and what the floor calls them.
pub(super) const COUNTS: &[(&str, &str)] = &[("witten_bell_3_bpc", "order 3"), ("unigram_ppl", "unigram")];
/// What language models reach on the validation part.
const DEV: &str = "dev_bpc";
/// The rule that every classifier has to beat to have learned anything.
pub(super) const LARGEST: &str = "largest_class";
/// Why there is no verdict where every seed stayed there.
const AT_LARGEST_ONLY: &str = "no seed above the largest class";

/// A table per metric, with one line per task, mechanism and setting: the value over its seeds, what the paper has,
/// what a simple rule reaches, and what to make of it. Metrics of one name may belong to several commands: a row stands in
/// the table of the one that it `belongs` to. Nothing where no row is one of a trained model.
pub fn tables(rows: &[Row], metrics: &[Metric], belongs: impl Fn(&Row, &Metric) -> bool) -> Vec<Table> {
    let index = Index::of(rows);
    let table = |metric| table(rows, &index, metric, |row| belongs(row, metric));
    let mut tables: Vec<Table> = metrics.iter().filter_map(table).collect();
    if let Some(first) = tables.first_mut() {
        first.notes.push(NOTE.to_owned());
    }
    tables
}

/// What the columns mean, said once.
const NOTE: &str = "differs: how the run departs from the protocol, with the protocol's value in parentheses. share: the part of \
                    the protocol's steps and data that was run, given only where nothing but the format of numbers and the draw of generated examples differs. Several seeds: mean \
                    ±standard deviation [95 % interval of the mean]; one seed: ± is the standard error due to the size of the \
                    test split. Seeds that failed, or whose accuracy is not above that of the largest class by two standard errors of the split, are \
                    counted separately. last update: the same \
                    with the weights of the last update. floor: the best simple rule on the same examples; within its error is within 1.96 standard errors of the \
                    difference, and of losses, which have none here, within rounding.";

/// The rows that `wanted` takes of `metric`, as seeds of models that were trained and tested alike.
pub(super) fn groups<'a>(
    (rows, index): (&'a [Row], &'a Index<'a>),
    metric: &'a Metric,
    wanted: impl Fn(&Row) -> bool,
) -> Vec<SeedGroup<'a>> {
    let floors: Vec<&Row> =
        rows.iter().filter(|row| row.model == FLOOR && row.metric == metric.name).collect();
    let mut groups: Vec<SeedGroup> = Vec::new();
    let mut known: HashMap<(Option<&str>, String), Vec<usize>> = HashMap::new();
    for row in rows.iter().filter(|row| row.metric == metric.name && wanted(row)) {
        let places = known.entry((row.task.as_deref(), row.label())).or_default();
        match places.iter().find(|place| alike(groups[**place].rows[0], row)) {
            Some(place) => groups[*place].add(row),
            None => {
                places.push(groups.len());
                let published = row.published;
                groups.push(SeedGroup {
                    rows: vec![row],
                    published,
                    all: index,
                    floors: floors.clone(),
                    metric,
                });
            }
        }
    }
    groups
}

fn table<'a>(
    rows: &'a [Row],
    index: &'a Index<'a>,
    metric: &'a Metric,
    belongs: impl Fn(&Row) -> bool,
) -> Option<Table> {
    let groups = groups((rows, index), metric, belongs);
    if groups.is_empty() {
        return None;
    }
    let columns = [
        "task",
        "model",
        "preset",
        "kernel",
        "verdict",
        "differs (there)",
        "batch",
        "length",
        "seeds",
        "share",
        metric.unit,
        "last update",
        "published",
        "floor",
    ];
    let mut lines: Vec<Vec<String>> = groups.iter().map(SeedGroup::line).collect();
    // a column that says the same everywhere says nothing: only kernels differ seldom
    let mut columns = columns.map(str::to_owned).to_vec();
    if lines.iter().all(|line| line[3] == "fused") {
        columns.remove(3);
        lines.iter_mut().for_each(|line| {
            line.remove(3);
        });
    }
    let behind = groups.iter().map(|group| vec![group.rows.iter().map(|row| (*row).clone()).collect()]);
    let (title, behind) = (metric.title.to_owned(), behind.collect());
    Some(Table { title, columns, numbers: 8, rows: lines, behind, ..Table::default() })
}

/// Whether two rows are of the same model, trained and tested in the same way. On which device does not matter: devices differ in how
/// they round, as thread counts do, and seeds differ by far more.
pub(super) fn alike(a: &Row, b: &Row) -> bool {
    (&a.task, &a.model, &a.variant, &a.preset) == (&b.task, &b.model, &b.variant, &b.preset)
        && (&a.dtype, &a.kernel, a.batch, a.len) == (&b.dtype, &b.kernel, b.batch, b.len)
        && settings(a).eq(settings(b))
        && (&a.differs, &a.words, a.fraction.map(f64::to_bits))
            == (&b.differs, &b.words, b.fraction.map(f64::to_bits))
}

/// The settings of a row but its device.
fn settings(row: &Row) -> impl Iterator<Item = &str> {
    row.each_setting().filter(|setting| !setting.starts_with("device="))
}

/// Rows by task, mechanism and seed, so that those of one run are found among those of ten thousand.
pub(super) struct Index<'a>(HashMap<String, Vec<&'a Row>>);

impl<'a> Index<'a> {
    pub(super) fn of(rows: &'a [Row]) -> Self {
        let mut found: HashMap<String, Vec<&Row>> = HashMap::new();
        rows.iter().for_each(|row| found.entry(Self::place(row)).or_default().push(row));
        Self(found)
    }

    fn place(row: &Row) -> String {
        format!("{:?} {} {:?}", row.task, row.model, row.seed)
    }

    /// The rows of the same task, mechanism and seed as `row`.
    fn beside(&self, row: &Row) -> &[&'a Row] {
        self.0.get(&Self::place(row)).map_or(&[], Vec::as_slice)
    }
}

/// What a measured value says of a published one.
#[derive(Clone, Debug, PartialEq)]
pub(in crate::report) enum PublishedVerdict {
    /// There is none.
    Unpublished,
    /// Nothing, and why.
    Open(String),
    /// The published mean lies in the prediction interval of the seeds.
    Within,
    /// Better by so much.
    Better(f64),
    /// Worse by so much.
    Worse(f64),
}

impl PublishedVerdict {
    fn words(&self) -> String {
        match self {
            Self::Unpublished => "nothing published".to_owned(),
            Self::Open(why) => format!("not comparable: {why}"),
            Self::Within => "within spread".to_owned(),
            Self::Better(gap) => format!("better by {gap:.2}"),
            Self::Worse(gap) => format!("worse by {gap:.2}"),
        }
    }

    /// Of `values`, one per seed, against a mean of `runs` runs.
    pub(in crate::report) fn of(values: &[f64], (published, runs): (f64, u64), less_is_better: bool) -> Self {
        let Some(Summary { mean, .. }) = Summary::of(values) else {
            return Self::Open(AT_LARGEST_ONLY.to_owned());
        };
        let gap = mean - published;
        match prediction_interval(values, runs) {
            None => Self::Open(format!("one seed (gap {gap:+.2})")),
            Some(interval) if interval.contains(published) => Self::Within,
            Some(_) if (gap > 0.0) != less_is_better => Self::Better(gap.abs()),
            Some(_) => Self::Worse(gap.abs()),
        }
    }
}

/// Seeds that a mean leaves out, by reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct LeftOut {
    /// Not above the largest class.
    at_largest: usize,
    failed: usize,
    /// Not finished.
    open: usize,
}

impl LeftOut {
    /// How many for which reason, the reasons that apply: `(1, "failed")`.
    fn reasons(self) -> impl Iterator<Item = (usize, &'static str)> {
        let all =
            [(self.at_largest, "at the largest class"), (self.failed, "failed"), (self.open, "not finished")];
        all.into_iter().filter(|(count, _)| *count > 0)
    }

    /// `1 failed, 2 not finished`; nothing where none is left out.
    pub(super) fn words(self) -> Option<String> {
        let parts: Vec<String> = self.reasons().map(|(count, why)| format!("{count} {why}")).collect();
        (!parts.is_empty()).then(|| parts.join(", "))
    }

    /// `, 1 of 3 seeds failed`.
    fn behind_verdict(self, seeds: usize) -> String {
        self.reasons().map(|(count, why)| format!(", {count} of {seeds} seeds {why}")).collect()
    }
}

/// The seeds of one line.
pub(super) struct SeedGroup<'a> {
    pub(super) rows: Vec<&'a Row>,
    pub(super) published: Option<Published>,
    all: &'a Index<'a>,
    /// Simple rules by the same metric.
    floors: Vec<&'a Row>,
    metric: &'a Metric,
}

impl<'a> SeedGroup<'a> {
    /// One more seed; robustness tests the same model that lra trained: it is one seed.
    fn add(&mut self, row: &'a Row) {
        self.published = self.published.or(row.published);
        if self.rows.iter().all(|other| other.seed != row.seed) {
            self.rows.push(row);
        }
    }

    /// What the run of `row` has for another metric.
    fn also(&self, row: &Row, metric: &str) -> Option<f64> {
        let same = |other: &&Row| {
            (other.metric.as_str(), &other.device) == (metric, &row.device) && alike(other, row)
        };
        self.all.beside(row).iter().copied().find(same)?.value
    }

    /// Values of the seeds that learned, and how many did not.
    pub(super) fn values(&self) -> (Vec<f64>, usize) {
        let learned = |row: &&&Row| row.outcome == Outcome::Ok && !self.is_at_largest_class(row);
        let values: Vec<f64> = self.rows.iter().filter(learned).filter_map(|row| row.value).collect();
        let failed = self.rows.len() - values.len();
        (values, failed)
    }

    /// The seeds that are not among [`Self::values`].
    pub(super) fn left_out(&self) -> LeftOut {
        let mut left = LeftOut::default();
        for row in &self.rows {
            match row.outcome {
                Outcome::Interrupted | Outcome::Planned => left.open += 1,
                Outcome::Ok if self.is_at_largest_class(row) => left.at_largest += 1,
                Outcome::Ok if row.value.is_some() => (),
                _ => left.failed += 1,
            }
        }
        left
    }

    /// Whether the accuracy is not above that of the largest class by two standard errors of the split.
    fn is_at_largest_class(&self, row: &Row) -> bool {
        let (Some(value), Some(largest)) = (row.value, self.also(row, LARGEST)) else { return false };
        let tested = self.also(row, "tested").unwrap_or(f64::INFINITY);
        let error = (largest * (100.0 - largest) / tested).sqrt();
        value <= largest + 2.0 * error
    }

    /// The best simple rule for the same examples.
    pub(super) fn floor(&self) -> Option<Floor> {
        let row = self.rows[0];
        let floor = |(rule, value): (String, f64), tested: Option<f64>| Floor {
            rule,
            value,
            tested,
            data: subset(row),
        };
        let counted =
            COUNTS.iter().find_map(|(rule, name)| Some(((*name).to_owned(), self.also(row, rule)?)));
        // the rules are counted for the test part
        if self.metric.name == DEV {
            return None;
        }
        if let Some(counted) = counted {
            return Some(floor(counted, None));
        }
        if let Some(nats) = self.also(row, UNIGRAM) {
            let scale = if self.metric.unit == "bit" { std::f64::consts::LN_2 } else { 1.0 };
            return Some(floor(("counts".to_owned(), nats / scale), None));
        }
        let best = best_rule(self.floors.iter().copied(), row);
        let largest = || Some(("largest class".to_owned(), self.also(row, LARGEST)?));
        let best = best.or_else(|| largest().filter(|_| self.metric.name == "accuracy"))?;
        Some(floor(best, self.also(row, "tested")))
    }

    fn line(&self) -> Vec<String> {
        let row = self.rows[0];
        let (values, _) = self.values();
        let text = |value: Option<&str>| value.unwrap_or("").to_owned();
        let number = |value: Option<u64>| value.map_or_else(String::new, |value| value.to_string());
        let last = format!("{}_last", self.metric.name);
        let last: Vec<f64> = self.rows.iter().filter_map(|row| self.also(row, &last)).collect();
        let last = Summary::of(&last).map_or_else(String::new, |last| format!("{:.2}", last.mean));
        let seeds = match self.left_out().words() {
            None => values.len().to_string(),
            Some(words) => format!("{} ({words})", values.len()),
        };
        let floor = self.floor().filter(|_| row.model != FLOOR);
        vec![
            text(row.task.as_deref()),
            row.label(),
            preset(row),
            if row.dtype == "f32" { row.kernel.clone() } else { format!("{}, {}", row.kernel, row.dtype) },
            self.verdict(&values),
            text(row.differs.as_deref()),
            number(row.batch),
            number(row.len),
            seeds,
            row.fraction.map_or_else(String::new, share),
            self.measured(&values),
            last,
            self.published().map_or_else(|| "-".to_owned(), |value| format!("{value:.2}")),
            floor.map_or_else(String::new, |Floor { rule, value, .. }| format!("{value:.2} ({rule})")),
        ]
    }

    fn published(&self) -> Option<f64> {
        self.published.and_then(Published::value)
    }

    fn measured(&self, values: &[f64]) -> String {
        match Summary::of(values) {
            Some(Summary { mean, std: Some(std), mean_interval: Some(Interval { low, high }), .. }) => {
                format!("{mean:.2} ±{std:.2} [{low:.2}, {high:.2}]")
            }
            Some(summary) => {
                let mut errors = self
                    .rows
                    .iter()
                    .filter_map(|row| super::spread::split_error(row, self.all.beside(row).iter().copied()));
                let error = errors.next().map_or_else(String::new, |error| format!(" ±{error:.2} (split)"));
                format!("{:.2}{error}", summary.mean)
            }
            None => {
                let rest: Vec<f64> = self.rows.iter().filter_map(|row| row.value).collect();
                let none = || self.rows[0].outcome.to_string();
                Summary::of(&rest).map_or_else(none, |rest| format!("{:.2}", rest.mean))
            }
        }
    }

    fn verdict(&self, values: &[f64]) -> String {
        if self.rows[0].model == FLOOR {
            return "a simple rule".to_owned();
        }
        let mut verdict = self.compared(values);
        let Some(floor) = self.floor() else { return verdict };
        let against = |value: f64| floor.against(value, self.metric.lower_is_better);
        let measured = Summary::of(values).map(|summary| against(summary.mean));
        let published = self.published().map(against);
        let words = |standing: AgainstFloor| match standing {
            AgainstFloor::Better => None,
            AgainstFloor::Same => Some("the same as the floor within its error"),
            AgainstFloor::Worse => Some("worse than the floor"),
        };
        match (measured.and_then(words), published.and_then(words)) {
            (Some(measured), Some(published)) if measured == published => {
                verdict.push_str(&format!("; measured and published are {measured}"));
            }
            (measured, published) => {
                for (name, words) in [("measured", measured), ("published", published)] {
                    verdict.push_str(&words.map_or_else(String::new, |words| format!("; {name} is {words}")));
                }
            }
        }
        verdict
    }

    fn compared(&self, values: &[f64]) -> String {
        let standing = self.standing(values);
        match &standing {
            PublishedVerdict::Unpublished => standing.words(),
            PublishedVerdict::Open(_) if self.part().is_none_or(|part| part < 1.0) || values.is_empty() => {
                standing.words()
            }
            _ => format!("{}{}", standing.words(), self.left_out().behind_verdict(self.rows.len())),
        }
    }

    /// The share of the protocol that was run.
    pub(super) fn part(&self) -> Option<f64> {
        self.rows[0].fraction
    }

    /// Within spread: the published mean lies in the prediction interval of at least two seeds of the whole protocol.
    pub(super) fn standing(&self, values: &[f64]) -> PublishedVerdict {
        let row = self.rows[0];
        let Some(published) = self.published() else { return PublishedVerdict::Unpublished };
        if row.fraction.is_none() {
            return PublishedVerdict::Open("other settings".to_owned());
        }
        if row.fraction.is_some_and(|part| part < 1.0) {
            return PublishedVerdict::Open("part of the protocol".to_owned());
        }
        if values.is_empty() {
            let bad = self.rows.iter().find(|row| row.outcome != Outcome::Ok);
            return PublishedVerdict::Open(bad.map_or(AT_LARGEST_ONLY, |row| row.outcome.word()).to_owned());
        }
        PublishedVerdict::of(values, (published, source_seeds(row)), self.metric.lower_is_better)
    }
}

/// The preset; sizes that are not its own make another model of it.
fn preset(row: &Row) -> String {
    let name = row.preset.clone().unwrap_or_default();
    let mut words = row.differs.as_deref().unwrap_or_default().split("; ");
    let size = |word: &str| ["layers ", "width ", "heads ", "ffn "].iter().any(|size| word.starts_with(size));
    if words.any(size) { format!("{name}, other sizes") } else { name }
}

/// The best of `rules`, rows of one metric, for the split that `row` was tested on: its name and value.
pub fn best_rule<'a>(rules: impl Iterator<Item = &'a Row>, row: &Row) -> Option<(String, f64)> {
    let rules = rules.filter(|rule| rule.task == row.task && subset(rule) == subset(row));
    let best = rules.filter_map(|rule| Some((rule.variant.clone()?, rule.value?)));
    best.max_by(|a, b| a.1.total_cmp(&b.1))
}

/// A share in percent with two digits at least.
fn share(part: f64) -> String {
    let percent = 100.0 * part;
    if percent >= 10.0 { format!("{percent:.0} %") } else { format!("{percent:.2} %") }
}

/// Runs behind the published mean: what the suite, or the suite of the preset, says; else one.
fn source_seeds(row: &Row) -> u64 {
    let own = row.suite.as_deref().and_then(|suite| Suite::load(suite).ok());
    let suite = own.or_else(|| Suite::of(&row.protocol, row.preset.as_deref()?));
    suite.and_then(|suite| suite.source_seeds).unwrap_or(1)
}

#[cfg(test)]
mod tests;
