//! Everything about results that needs no tensors: rows, statistics, attention patterns as data, settings, suites, tables,
//! charts and reports.
//!
//! Imports no other crate of the workspace, and not candle: a report needs no device. The types to know are [`Row`] (one
//! metric of one cell; reports and charts read nothing else), [`pattern::Pattern`] (which query sees which key) and
//! [`config::suite::Suite`] (one table or figure of a paper).

pub mod config;
pub mod csv;
pub mod departures;
pub mod file;
pub mod json;
pub mod matrix;
pub mod norms;
pub mod pattern;
pub mod report;
mod row;
pub mod stats;
pub mod text;

use std::sync::OnceLock;

pub use row::{COLUMNS, Outcome, Pass, Published, Row, rounded};

/// The model in rows of simple rules, which need no transformer; the variant is the rule.
pub const FLOOR: &str = "floor";

/// What results are compared by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Metric {
    /// Name, as in rows.
    pub name: &'static str,
    /// Heading of its table.
    pub title: &'static str,
    /// Unit in the table.
    pub unit: &'static str,
    /// Whether less is better.
    pub lower_is_better: bool,
}

/// A stored file that cannot be read as rows.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// Columns of another program or version.
    #[error("{columns}")]
    Columns {
        /// Which columns are wrong and what to do.
        columns: String,
    },
    /// A line that is not a row.
    #[error("line {line}: {reason}")]
    Line {
        /// Number of the line, the header being 1.
        line: u64,
        /// What is wrong with it.
        reason: String,
    },
    /// Text that is not JSON, or JSON that is not an export.
    #[error("not an effattn export: {0}")]
    Json(#[from] serde_json::Error),
}

static BUILD_COMMIT: OnceLock<Option<&'static str>> = OnceLock::new();

/// Sets the commit that new rows name, once per process. The program calls it first: this crate is not compiled again for
/// every commit.
pub fn set_build_commit(commit: Option<&'static str>) {
    let _ = BUILD_COMMIT.set(commit);
}

/// The commit that the program was built from; `None` outside a checkout.
pub fn build_commit() -> Option<&'static str> {
    BUILD_COMMIT.get().copied().flatten()
}
