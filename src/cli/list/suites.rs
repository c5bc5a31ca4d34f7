//! `effattn list suites`: the papers' tables and figures, what of them is done, and what the rest would take.

use std::path::PathBuf;

use anyhow::Result;
use serde_json::json;

use super::{Format, List};
use crate::cli::stored_runs::StoredRun;
use crate::protocol;
use crate::protocol::grid::{GridFlags, PlanError};
use crate::protocol::resolve;
use crate::run::folder::latest;
use crate::run::plan::Cell;
use crate::term::clock;
use effattn_kernel::device::threads;
use effattn_record::config::suite::{BUILTIN_SUITES, Suite};
use effattn_record::report::table::Table;
use effattn_record::{Row, matrix};

/// `list suites`.
#[derive(Clone, Debug, clap::Args)]
pub struct Suites {
    #[command(flatten)]
    pub format: Format,
    /// Folder of results
    #[arg(long, value_name = "DIR", default_value = "results")]
    results: PathBuf,
}

impl Suites {
    /// Every suite with its cells, how many are done under the results, and the time that the rest is expected to take.
    pub(super) fn list(&self) -> Result<List> {
        let runs = if self.results.is_dir() { StoredRun::find_all(&self.results)? } else { Vec::new() };
        let mut list = List { table: Table::default(), json: Vec::new() };
        list.table.columns = ["suite", "command", "title", "source", "rows", "cells", "done", "left"]
            .map(str::to_owned)
            .to_vec();
        list.table.numbers = 4;
        for (name, text) in BUILTIN_SUITES {
            let suite = Suite::parse(&format!("{name}.toml"), text)?;
            let state = self.state(&suite, &runs)?;
            list.json.push(json!({
                "name": suite.name,
                "protocol": suite.protocol,
                "title": suite.title,
                "source": suite.source,
                "analysis": suite.analysis,
                "cells": state.cells,
                "done": state.done,
                "seconds_left": state.seconds,
                "rows": suite.rows.iter().map(|row| json!({
                    "label": row.label,
                    "model": row.model.to_string(),
                })).collect::<Vec<_>>(),
            }));
            let numbers = [suite.rows.len(), state.cells, state.done].map(|number| number.to_string());
            let left = if state.done == state.cells { "-".to_owned() } else { clock(state.seconds) };
            let texts = [suite.name, suite.protocol, suite.title, suite.source];
            list.table.rows.push(texts.into_iter().chain(numbers).chain([left]).collect());
        }
        list.table.title = format!("{} suites; run one with effattn COMMAND --suite NAME", list.json.len());
        list.table.notes.push(format!(
            "done: cells finished under {}, with the suite's settings and the full protocol; left: a rough estimate for this machine, which --dry-run refines.",
            self.results.display()
        ));
        Ok(list)
    }

    fn state(&self, suite: &Suite, runs: &[StoredRun]) -> Result<State> {
        let Some(cells) = cells(suite)? else {
            let kept = latest(&self.results.join("attention")).and_then(|folder| matrix::read(&folder).ok());
            let labels: Vec<String> = kept.into_iter().flatten().map(|matrix| matrix.label).collect();
            let done = suite.rows.iter().filter(|row| labels.contains(&row.model.to_string())).count();
            return Ok(State { cells: suite.rows.len(), done, seconds: 1.0 });
        };
        let rows: Vec<&Row> = runs
            .iter()
            .flat_map(|run| &run.rows)
            .filter(|row| row.suite.as_deref() == Some(&suite.name))
            .collect();
        let left: Vec<&Cell> = cells.iter().filter(|cell| !rows.iter().any(|row| is_of(row, cell))).collect();
        let seconds = left.iter().map(|cell| cell.seconds).sum();
        Ok(State { cells: cells.len(), done: cells.len() - left.len(), seconds })
    }
}

struct State {
    cells: usize,
    done: usize,
    seconds: f64,
}

/// Whether `row` is a result of `cell`, with nothing else than the cell changed.
fn is_of(row: &Row, cell: &Cell) -> bool {
    let place = |row: &Row| {
        let what = (row.task.clone(), row.model.clone(), row.variant.clone(), row.preset.clone());
        (what, row.settings.clone(), row.len, row.batch, row.pass, row.seed)
    };
    // as much of the protocol as the suite asks for, with the same differences
    let whole = row.protocol == cell.row.protocol && row.differs == cell.row.differs;
    let ended = row.outcome.is_final();
    whole && ended && place(row) == place(&cell.row)
}

/// The cells of `suite`; nothing where no command of the grid runs it.
fn cells(suite: &Suite) -> Result<Option<Vec<Cell>>, PlanError> {
    let Some(protocol) = protocol::find(&suite.protocol) else { return Ok(None) };
    let flags = GridFlags { suite: Some(suite.name.clone()), ..GridFlags::default() };
    protocol.cells(&resolve(&flags, protocol)?, threads::available()).map(Some)
}
