//! `plan.json`: the cells that a run has when it is done, whoever computes them.

use std::path::Path;

use serde::{Deserialize, Serialize};

use super::manifest::SCHEMA;
use super::plan::Plan;
use super::shard::{cost, distribute, without_shard};
use super::{RunError, read_text};
use effattn_record::file;

/// The file's name.
pub const PLAN: &str = "plan.json";

/// A cell as `plan.json` has it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PlannedCell {
    /// Key.
    pub cell: String,
    /// Seconds that it takes by its multiply-adds, on any machine with one thread: a weight.
    pub seconds: f64,
    /// Cells of one group stay on one machine.
    pub group: usize,
}

/// `plan.json`: the cells of a whole plan, whoever computes them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PlanFile {
    /// Version of this file's form.
    pub schema: u64,
    /// [`Plan::digest`].
    pub plan: String,
    /// Suite or command.
    pub name: String,
    /// The words that were typed, without the shard.
    pub argv: Vec<String>,
    /// The cells in the order of the rows.
    pub cells: Vec<PlannedCell>,
}

impl PlanFile {
    /// The whole `plan`: its groups stay together.
    pub fn of(plan: &Plan) -> Self {
        let cells = plan.cells.iter().enumerate().map(|(index, cell)| PlannedCell {
            cell: cell.key.clone(),
            seconds: cell.weight,
            group: plan.groups.get(index).copied().unwrap_or(index),
        });
        let (name, argv) = (plan.name.clone(), without_shard(&plan.argv));
        Self { schema: SCHEMA, plan: plan.digest(), name, argv, cells: cells.collect() }
    }

    /// The shard of every cell, from 1, where there are `count`.
    pub fn assign_shards(&self, count: usize) -> Vec<usize> {
        let groups = self.cells.iter().map(|cell| cell.group + 1).max().unwrap_or(0);
        let mut costs = vec![0; groups];
        for cell in &self.cells {
            costs[cell.group] = u64::saturating_add(costs[cell.group], cost(cell.seconds));
        }
        let owners = distribute(&costs, count);
        self.cells.iter().map(|cell| owners[cell.group] + 1).collect()
    }

    /// Reads the plan in `folder`; none if there is none.
    pub fn read(folder: &Path) -> Result<Option<Self>, RunError> {
        let path = folder.join(PLAN);
        let Some(text) = read_text(&path)? else { return Ok(None) };
        let read: serde_json::Result<Self> = serde_json::from_str(&text);
        match read {
            Ok(plan) if plan.schema > SCHEMA => {
                Err(RunError::Newer { path, found: plan.schema, known: SCHEMA })
            }
            Ok(plan) if plan.cells.iter().any(|cell| cell.group >= plan.cells.len()) => {
                Err(RunError::Damaged { path, reason: "a group is no number of a cell".to_owned() })
            }
            Ok(plan) => Ok(Some(plan)),
            Err(error) => Err(RunError::Damaged { path, reason: error.to_string() }),
        }
    }

    /// Writes it into `folder` where there is none. Shards that start at once write the same.
    pub fn write(&self, folder: &Path) -> Result<(), RunError> {
        let path = folder.join(PLAN);
        if path.exists() {
            return Ok(());
        }
        let text = serde_json::to_string_pretty(self).unwrap_or_default() + "\n";
        file::write(&path, text.as_bytes()).map_err(RunError::file(path))
    }
}
