//! Suites: one table or figure of a paper each.

mod published;
mod text;

use std::collections::BTreeMap;
use std::path::Path;

use serde::Deserialize;

use super::lists::MechanismSpec;
use super::settings::Settings;
use super::unknown;
use crate::Published;
use crate::file;

pub use text::toml_problem;

/// The suites in the binary: name and text.
pub const BUILTIN_SUITES: &[(&str, &str)] = &[
    ("cos-figure1", include_str!("../../../../suites/cos-figure1.toml")),
    ("cos-figure3", include_str!("../../../../suites/cos-figure3.toml")),
    ("cos-figure4", include_str!("../../../../suites/cos-figure4.toml")),
    ("cos-figure4-small", include_str!("../../../../suites/cos-figure4-small.toml")),
    ("cos-table1-loss", include_str!("../../../../suites/cos-table1-loss.toml")),
    ("cos-table1-loss-small", include_str!("../../../../suites/cos-table1-loss-small.toml")),
    ("cos-table1", include_str!("../../../../suites/cos-table1.toml")),
    ("cos-table1-small", include_str!("../../../../suites/cos-table1-small.toml")),
    ("cos-table2", include_str!("../../../../suites/cos-table2.toml")),
    ("cos-table2-small", include_str!("../../../../suites/cos-table2-small.toml")),
    ("cos-table3", include_str!("../../../../suites/cos-table3.toml")),
    ("cos-table3-pretraining", include_str!("../../../../suites/cos-table3-pretraining.toml")),
    ("cos-table3-pretraining-small", include_str!("../../../../suites/cos-table3-pretraining-small.toml")),
    ("cos-table3-small", include_str!("../../../../suites/cos-table3-small.toml")),
    ("cos-table4", include_str!("../../../../suites/cos-table4.toml")),
    ("cos-table5", include_str!("../../../../suites/cos-table5.toml")),
    ("cos-table6", include_str!("../../../../suites/cos-table6.toml")),
    ("ls-figure2", include_str!("../../../../suites/ls-figure2.toml")),
    ("ls-figure3", include_str!("../../../../suites/ls-figure3.toml")),
    ("ls-figure6", include_str!("../../../../suites/ls-figure6.toml")),
    ("ls-table1", include_str!("../../../../suites/ls-table1.toml")),
    ("ls-table2", include_str!("../../../../suites/ls-table2.toml")),
    ("ls-table3", include_str!("../../../../suites/ls-table3.toml")),
    ("ls-table3-small", include_str!("../../../../suites/ls-table3-small.toml")),
    ("ls-table4", include_str!("../../../../suites/ls-table4.toml")),
    ("ls-table5-accuracy", include_str!("../../../../suites/ls-table5-accuracy.toml")),
    ("ls-table5", include_str!("../../../../suites/ls-table5.toml")),
    ("ls-table5-small", include_str!("../../../../suites/ls-table5-small.toml")),
    ("ls-table6", include_str!("../../../../suites/ls-table6.toml")),
    ("mixers-charlm-small", include_str!("../../../../suites/mixers-charlm-small.toml")),
    ("mixers-lra-listops-small", include_str!("../../../../suites/mixers-lra-listops-small.toml")),
    ("memory-kernels", include_str!("../../../../suites/memory-kernels.toml")),
    ("mixers-speed", include_str!("../../../../suites/mixers-speed.toml")),
    ("mqar-based", include_str!("../../../../suites/mqar-based.toml")),
    ("mqar-small", include_str!("../../../../suites/mqar-small.toml")),
    ("mqar-zoology", include_str!("../../../../suites/mqar-zoology.toml")),
    ("mad", include_str!("../../../../suites/mad.toml")),
    ("mad-small", include_str!("../../../../suites/mad-small.toml")),
    ("state-tracking", include_str!("../../../../suites/state-tracking.toml")),
    ("state-tracking-small", include_str!("../../../../suites/state-tracking-small.toml")),
];

/// A suite that cannot be used: where and why.
#[derive(Debug, thiserror::Error)]
pub enum SuiteError {
    /// No suite of this name and no such file.
    #[error("{0}, or give a path ending in .toml")]
    Unknown(String),
    /// The file cannot be read.
    #[error("suite {file} cannot be read ({source}); `effattn list suites` shows the built-in ones")]
    Read {
        /// The file.
        file: String,
        /// Why.
        source: std::io::Error,
    },
    /// A file with the name of a shipped suite and another text: its rows would be taken for the paper's.
    #[error(
        "suite {file}: {name} is a suite of effattn's own, and this text is another; rename the file, or run the shipped one with --suite {name}"
    )]
    Shipped {
        /// The file.
        file: String,
        /// The name of both.
        name: String,
    },
    /// The text is wrong at a place.
    #[error("suite {file}:{line}: {problem}")]
    At {
        /// The file.
        file: String,
        /// Number of the line.
        line: usize,
        /// What is wrong and what is allowed.
        problem: String,
    },
}

/// One table or figure of a paper.
#[derive(Clone, Debug)]
pub struct Suite {
    /// Name: the file's stem.
    pub name: String,
    /// Where it came from, for messages.
    pub file: String,
    /// Heading.
    pub title: String,
    /// The command that runs it.
    pub protocol: String,
    /// Paper, table and machine.
    pub source: String,
    /// What a reader should know about the numbers.
    pub analysis: Option<String>,
    /// The preset whose sizes the published numbers belong to, where it is not the base's.
    pub numbers_of: Option<String>,
    /// Runs behind a published mean, where the source says it.
    pub source_seeds: Option<u64>,
    /// Settings of every row.
    pub base: Settings,
    /// Line of `[base]` in the file, for messages.
    pub base_line: usize,
    /// Rows in order.
    pub rows: Vec<SuiteRow>,
    /// What the source prints beside them of models that are not run here.
    pub printed: Vec<PublishedOnlyRow>,
    /// The columns of the source's table, in its order; none where it is a figure.
    pub columns: Vec<Column>,
    /// Ratios of rows that the source compares.
    pub ratios: Vec<SuiteRatio>,
    /// Whether that table has a line for every length.
    pub by_len: bool,
    /// What the command needs besides the suite and a model, as in `--from RUNS`.
    pub also: Option<String>,
    /// The TOML text.
    pub text: String,
}

/// One row of a suite.
#[derive(Clone, Debug)]
pub struct SuiteRow {
    /// Name in the paper.
    pub label: String,
    /// The line of the source's table that it is part of, where several rows make one.
    pub part_of: Option<String>,
    /// Mechanism and knobs.
    pub model: MechanismSpec,
    /// Settings that differ from the base; tasks are those that the row has.
    pub set: Settings,
    /// What the paper printed, a table per metric.
    pub published: Vec<PublishedTable>,
    /// Why the code behind the published number does not compute this, and no variant does.
    pub not_comparable: Option<String>,
    /// Line in the file, for messages.
    pub line: usize,
}

impl SuiteRow {
    /// Name of its line in the source's table.
    pub fn printed_as(&self) -> &str {
        self.part_of.as_deref().unwrap_or(&self.label)
    }

    /// What the paper printed for `metric`.
    pub fn table(&self, metric: &str) -> Option<&PublishedTable> {
        self.published.iter().find(|table| table.metric == metric)
    }

    /// Whether the row has a cell for `task`.
    pub fn has(&self, task: &str) -> bool {
        self.set.task.as_ref().is_none_or(|tasks| tasks.0.iter().any(|known| known == task))
    }
}

/// A line of the source's table that has no model here: it is shown, and compared with nothing.
#[derive(Clone, Debug)]
pub struct PublishedOnlyRow {
    /// Name in the paper.
    pub label: String,
    /// Why it is not run.
    pub why: String,
    /// What the paper printed, a table per metric.
    pub published: Vec<PublishedTable>,
}

/// A column of the source's table.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Column {
    /// Its heading.
    pub title: String,
    /// Metrics of published numbers that stand in it; the first is the one that is compared.
    pub metrics: Vec<String>,
    /// Their key: a task, a pass, or `average` over the other columns of the metric.
    pub key: String,
    /// Length, where numbers go along the lengths.
    pub len: Option<u64>,
    /// The suite that runs it, where it is another one; its rows have the labels of these.
    pub suite: Option<String>,
}

/// A ratio of two rows of the source's table: times or speeds of different machines compare in nothing else.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SuiteRatio {
    /// Label of the row above the line.
    pub over: String,
    /// Label of the row below it.
    pub under: String,
    /// Metric.
    pub metric: String,
    /// Pass or task.
    pub key: String,
    /// Length.
    pub len: u64,
    /// What follows from the printed numbers.
    pub published: f64,
    /// Why the measured ratio is another one, where it is known to be.
    #[serde(default)]
    pub why: String,
}

/// Published numbers of one row.
#[derive(Clone, Debug, PartialEq)]
pub struct PublishedTable {
    /// Metric they are given in.
    pub metric: String,
    /// Where they were read, if not in the suite's source.
    pub source: Option<String>,
    /// By pass or task; several values go along the base's lengths, from the first one on.
    pub values: BTreeMap<String, Vec<Published>>,
    /// Digits behind the point that each value has in the suite's text, without zeros at its end; `None` of an outcome.
    pub digits: BTreeMap<String, Vec<Option<usize>>>,
}

impl PublishedTable {
    /// The value under `key` at position `index`.
    pub fn at(&self, key: &str, index: usize) -> Option<Published> {
        self.values.get(key)?.get(index).copied()
    }

    /// Digits behind the point of the value under `key` at position `index`; 0 where it is a whole number there.
    pub fn digits_at(&self, key: &str, index: usize) -> Option<usize> {
        *self.digits.get(key)?.get(index)?
    }
}

impl Suite {
    /// Whether numbers of a row that runs the preset `own` are of `preset`: it is that one, or the one that the suite says.
    pub fn is_of(&self, own: Option<&str>, preset: &str) -> bool {
        [own, self.numbers_of.as_deref()].into_iter().flatten().any(|known| known == preset)
    }

    /// The preset that its text gives `row`.
    pub fn preset_of<'a>(&'a self, row: &'a SuiteRow) -> Option<&'a str> {
        row.set.preset.as_deref().or(self.base.preset.as_deref())
    }

    /// Names of the suites that fill its table: its own, then those of its columns.
    pub fn runs(&self) -> impl Iterator<Item = &str> {
        let mut others: Vec<&str> =
            self.columns.iter().filter_map(|column| column.suite.as_deref()).collect();
        others.dedup();
        std::iter::once(self.name.as_str()).chain(others)
    }

    /// What `--suite` takes for it: the name of a shipped one, or its file.
    pub fn argument(&self) -> &str {
        let shipped = BUILTIN_SUITES.iter().any(|(name, _)| *name == self.name);
        if shipped { &self.name } else { &self.file }
    }

    /// The first shipped suite of `protocol` with published numbers of `preset`.
    pub fn of(protocol: &str, preset: &str) -> Option<Self> {
        let mut suites = BUILTIN_SUITES.iter().filter_map(|(name, _)| Self::load(name).ok());
        let has = |suite: &Self, row: &SuiteRow| {
            !row.published.is_empty() && suite.is_of(suite.preset_of(row), preset)
        };
        let of = |suite: &Self| suite.protocol == protocol && suite.rows.iter().any(|row| has(suite, row));
        suites.find(of)
    }

    /// The shipped suite called `name`, or the file at that path, which has a shipped one's name only with its text.
    pub fn load(name: &str) -> Result<Self, SuiteError> {
        if let Some((name, text)) = BUILTIN_SUITES.iter().find(|(known, _)| *known == name) {
            return Self::parse(&format!("{name}.toml"), text);
        }
        if !name.ends_with(".toml") {
            return Err(SuiteError::Unknown(unknown(
                "suite",
                name,
                BUILTIN_SUITES.iter().map(|(name, _)| *name),
            )));
        }
        let text = file::read_to_string(Path::new(name))
            .map_err(|source| SuiteError::Read { file: name.to_owned(), source })?;
        let suite = Self::parse(name, &text)?;
        let other = |(known, own): &&(&str, &str)| *known == suite.name && !own.lines().eq(text.lines());
        match BUILTIN_SUITES.iter().find(other) {
            Some(_) => Err(SuiteError::Shipped { file: name.to_owned(), name: suite.name }),
            None => Ok(suite),
        }
    }
}
