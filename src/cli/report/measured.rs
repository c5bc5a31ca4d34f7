//! Runs of `speed` and `memory`, one by one.

use std::path::Path;

use anyhow::{Context, Result};

use crate::cli::stored_runs::{StoredRun, or_left_out, step_samples};
use crate::protocol;
use crate::protocol::definition::ResultView;
use effattn_record::config::suite::{BUILTIN_SUITES, Suite};
use effattn_record::report::chart::{Quantity, figure};
use effattn_record::report::document::{Part, Section};
use effattn_record::report::table::{self, Table};
use effattn_record::report::{self, crossing, published, ranking, reference, resident, spread};
use effattn_record::{Outcome, Row};

/// Tables and charts of one run of `speed` or `memory`; of one of its machines, where they stand `apart`.
pub fn section((run, root): (&StoredRun, &Path), rows: &[Row], apart: bool, brief: bool) -> Result<Section> {
    let rows = &begun(rows);
    let suite = run.manifest.suite.as_deref();
    let name = rows.first().and_then(|row| row.suite.clone());
    let suite = match (name, suite) {
        // what a shipped suite says of its table is as true of older runs
        (Some(name), Some(_)) if !run.quick() && BUILTIN_SUITES.iter().any(|(known, _)| *known == name) => {
            Some(Suite::load(&name)?)
        }
        // a suite of one's own may be of a version that reads it otherwise
        (Some(name), Some(text)) if !run.quick() => {
            let read = Suite::parse(&format!("{name}.toml"), text).map(Some);
            let named = || format!("the suite in {}", run.folder.join("manifest.json").display());
            or_left_out(read.map_err(anyhow::Error::from).with_context(named), "its table")
        }
        _ => None,
    };
    let reach = rows.iter().any(|row| row.metric == "longest_length");
    let part = match &suite {
        Some(suite) => Part::of_suite(&suite.name),
        None if reach => Part::TransformerLs, // a claim of its Figure 3
        None => Part::Other,
    };
    let title = match &suite {
        Some(suite) => {
            let typed = run.typed(&["--suite"]);
            if typed.is_empty() { suite.title.clone() } else { format!("{}: {typed}", suite.title) }
        }
        None => format!("{} {}", run.manifest.command, run.typed(&[])).trim_end().to_owned(),
    };
    // ratios lead: they compare, whatever the machine
    let mut tables: Vec<Table> = ranking::rankings(rows, None);
    let protocol = protocol::find(&run.manifest.command);
    match (&suite, protocol.filter(|protocol| protocol.view() == ResultView::Plain)) {
        (_, Some(protocol)) => {
            tables.push(table::plain(protocol.info().about, rows, protocol.info().metrics))
        }
        (Some(suite), None) => tables.extend(published::tables(rows, suite)),
        (None, None) => {
            for quantity in Quantity::TABLES {
                tables.extend(figure(rows, quantity).iter().flat_map(table::growth));
            }
        }
    }
    tables.extend(published::longest(rows));
    tables.extend(crossing::table(rows).filter(|_| !brief));
    let known =
        reference::read(&run.folder).with_context(|| run.folder.join(reference::FILE).display().to_string());
    let known = or_left_out(known, "the times of other programs");
    let references = reference::with_programs(rows, &known);
    tables.extend(reference::tables(rows, &references));
    tables.extend(resident::table(rows));
    tables.extend(published::reasons(rows));
    let samples = or_left_out(step_samples(&run.folder), "percentiles of steps");
    tables.extend(spread::percentiles(&samples).filter(|_| !brief));
    let charts = report::measured(rows, &references, &run.manifest.id)?;
    let quick = if run.quick() { " (a quick run)" } else { "" };
    let machine = rows.first().and_then(|row| row.machine.as_deref()).filter(|_| apart);
    let machine = machine.map_or_else(String::new, |machine| format!(" on {machine}"));
    let title = format!("{title}{quick}{machine}");
    Ok(Section { title, part, tables, charts, sources: vec![run.source(root)] })
}

/// Rows without the lengths that a stopped run has not come to: all of them where it came to none.
fn begun(rows: &[Row]) -> Vec<Row> {
    let open = |row: &Row| matches!(row.outcome, Outcome::Interrupted | Outcome::Planned);
    let place = |row: &Row| (row.pass, row.batch, row.len);
    let reached: Vec<_> = rows.iter().filter(|row| !open(row)).map(place).collect();
    let all = reached.is_empty();
    rows.iter().filter(|row| all || reached.contains(&place(row))).cloned().collect()
}
