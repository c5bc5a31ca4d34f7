//! What is to be run: cells, and the identity by which an unfinished run is found again.

use std::collections::BTreeMap;

use serde_json::Value;
use sha2::{Digest, Sha256};

use super::manifest::BUILD;
use crate::record::Row;

/// One thing to measure.
#[derive(Clone, Debug)]
pub struct Cell {
    /// Name, unique in the plan and the same in every run of it.
    pub key: String,
    /// The row with everything that is known beforehand; what is measured is filled in.
    pub row: Row,
    /// What the worker is asked to do.
    pub request: Value,
    /// Predicted seconds, for the time left.
    pub seconds: f64,
}

/// All cells of one command, in the order of the rows.
#[derive(Clone, Debug, Default)]
pub struct Plan {
    /// Suite or command: the folder below the results.
    pub name: String,
    /// Command.
    pub command: String,
    /// The suite's text, where there is one.
    pub suite: Option<String>,
    /// The words that were typed, without the program.
    pub argv: Vec<String>,
    /// Resolved settings.
    pub settings: Value,
    /// The cells.
    pub cells: Vec<Cell>,
    /// The machine and how memory is allocated: another one does not continue the run.
    pub machine: String,
    /// Hashes of the data, by name.
    pub data: BTreeMap<String, String>,
    /// CPU threads.
    pub threads: usize,
    /// Device.
    pub device: String,
    /// Seeds.
    pub seeds: Vec<u64>,
}

impl Plan {
    /// Twelve hex digits over cells, suite, data, build, machine and threads; where results are written does not count.
    pub fn identity(&self) -> String {
        let mut hash = Sha256::new();
        let mut feed = |text: &str| {
            hash.update(text.len().to_le_bytes());
            hash.update(text);
        };
        feed(&self.command);
        feed(&self.name);
        feed(env!("CARGO_PKG_VERSION"));
        feed(option_env!("EFFATTN_COMMIT").unwrap_or(""));
        feed(BUILD);
        feed(&self.machine);
        feed(self.suite.as_deref().unwrap_or(""));
        feed(&self.threads.to_string());
        feed(&self.device);
        for (name, digest) in &self.data {
            feed(name);
            feed(digest);
        }
        for cell in &self.cells {
            feed(&cell.key);
            feed(&cell.request.to_string());
        }
        hash.finalize()[..6].iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// Whether a finished run of it is kept: a training run is not made twice, a measurement is.
    pub fn keeps(&self) -> bool {
        matches!(self.command.as_str(), "lra" | "charlm" | "robustness")
    }

    /// Predicted seconds of all cells.
    pub fn seconds(&self) -> f64 {
        self.cells.iter().map(|cell| cell.seconds).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_identity_depends_on_what_is_computed_only() {
        let cell = |key: &str| Cell {
            key: key.to_owned(),
            row: Row::new("speed", "ls"),
            request: Value::Null,
            seconds: 1.0,
        };
        let plan = Plan { cells: vec![cell("a")], threads: 2, ..Plan::default() };
        let elsewhere = Plan { argv: vec!["-o".to_owned(), "x".to_owned()], ..plan.clone() };
        assert_eq!(plan.identity(), elsewhere.identity());
        assert_ne!(plan.identity(), Plan { threads: 1, ..plan.clone() }.identity());
        assert_ne!(plan.identity(), Plan { machine: "another".to_owned(), ..plan.clone() }.identity());
        assert_ne!(plan.identity(), Plan { suite: Some("edited".to_owned()), ..plan.clone() }.identity());
        assert_ne!(plan.identity(), Plan { cells: vec![cell("b")], ..plan.clone() }.identity());
    }
}
