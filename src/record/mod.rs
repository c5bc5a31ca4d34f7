//! What is stored: rows, samples and how they become files.
//!
//! A [`Row`] is one metric of one cell. Rows are all that reports and charts read.

pub mod csv;
pub mod file;
pub mod json;
pub mod matrix;
pub mod norms;
mod row;
pub mod text;

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
