//! The suites whose tables a report has: those that ship with effattn, and those of one's own that were run.

use anyhow::{Context, Result};

use super::stored_runs::{StoredRun, or_left_out};
use crate::protocol::grid::{Grid, GridEntry, GridFlags};
use crate::protocol::{self, resolve_suite};
use effattn_record::Row;
use effattn_record::config::suite::{BUILTIN_SUITES, Suite};

/// The suites that ship with effattn.
pub fn shipped() -> Result<Vec<Suite>> {
    BUILTIN_SUITES.iter().map(|(name, _)| Ok(Suite::load(name)?)).collect()
}

/// The others of `runs`, each as its newest run has it, with the path that was typed.
pub fn own(runs: &[StoredRun]) -> Vec<Suite> {
    let mut own: Vec<Suite> = Vec::new();
    for run in runs.iter().rev().filter(|run| !run.quick()) {
        let name = run.rows.iter().find_map(|row| row.suite.as_deref());
        let (Some(name), Some(text)) = (name, &run.manifest.suite) else { continue };
        let shipped = BUILTIN_SUITES.iter().any(|(shipped, _)| *shipped == name);
        if shipped || own.iter().any(|suite| suite.name == name) {
            continue;
        }
        let mut typed = run.manifest.argv.iter().skip_while(|word| *word != "--suite").skip(1);
        let file = typed.next().cloned().unwrap_or_else(|| format!("{name}.toml"));
        // an earlier version may have read it otherwise
        let read = Suite::parse(&file, text).map_err(anyhow::Error::from);
        let read = read.and_then(|suite| planned(&suite).map(|_| Some(suite)));
        let named = || format!("the suite in {}", run.folder.join("manifest.json").display());
        own.extend(or_left_out(read.with_context(named), "its table"));
    }
    own
}

/// The rows of every row of `suite`, as they would be run; none where it is drawn and not run.
pub fn planned(suite: &Suite) -> Result<Vec<Vec<Row>>> {
    let Some(protocol) = protocol::find(&suite.protocol) else { return Ok(Vec::new()) };
    let Grid { suite: own, settings, entries } =
        resolve_suite(&GridFlags::default(), Some(suite.clone()), protocol)?;
    let one = |pick: GridEntry| -> Result<Vec<Row>> {
        let grid = Grid { suite: own.clone(), settings: settings.clone(), entries: vec![pick] };
        Ok(protocol.cells(&grid, 1)?.into_iter().map(|cell| cell.row).collect())
    };
    entries.into_iter().map(one).collect()
}
