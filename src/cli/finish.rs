//! What comes after a run: tables, charts, exports, exit code.

use std::collections::BTreeSet;
use std::path::PathBuf;

use anyhow::Result;

use super::command::CommandArgs;
use super::command_line::command_line;
use super::export::Exports;
use super::stored_runs::step_samples;
use crate::protocol::Protocol;
use crate::protocol::definition::ResultView;
use crate::run::manifest::argv;
use crate::run::session::Session;
use crate::run::turn::Steadiness;
use crate::term::{self, Term, Verbosity, Warning};
use effattn_record::config::suite::Suite;
use effattn_record::report::chart::{Quantity, figure};
use effattn_record::report::table::{self, Table};
use effattn_record::report::{
    crossing, measured, profile, published, ranking, reference, resident, spread, trained,
};
use effattn_record::text::plural;
use effattn_record::{Outcome, Pass, Row};

/// Ends `session` after `result`, prints and writes everything, and gives the exit code. `charts` are drawn already.
pub fn finish(
    session: Session,
    result: std::result::Result<(), crate::run::RunError>,
    suite: Option<&Suite>,
    args: &CommandArgs,
    charts: &BTreeSet<PathBuf>,
) -> Result<u8> {
    let (protocol, exports) = (args.protocol, &args.exports);
    let stopped = matches!(result, Err(crate::run::RunError::Stopped));
    if !stopped {
        result?;
    }
    let (done, of) = session.progress();
    let (finished, term) = session.finish()?;
    // ratios lead: they compare, whatever the machine
    let mut tables = match protocol.view() {
        ResultView::Growth => ranking::rankings(&finished.rows, args.baseline.as_deref()),
        ResultView::Trained | ResultView::Plain => Vec::new(),
    };
    tables.extend(tables_of(protocol, &finished.rows, suite));
    if protocol.view() == ResultView::Growth {
        tables.extend(crossing::table(&finished.rows));
        tables.extend(profile::tables(&finished.rows));
        if term.verbosity() == Verbosity::Verbose {
            tables.extend(spread::percentiles(&step_samples(&finished.folder)?));
        }
    }
    let references = reference::read(&finished.folder)?;
    let given = !references.is_empty();
    if let Some(words) = reference::unmatched(&finished.rows, &references) {
        term.warn(&Warning::Other(words));
    }
    let references = reference::with_programs(&finished.rows, &references);
    let beside = reference::tables(&finished.rows, &references);
    if beside.is_empty() && given {
        term.warn(&Warning::Other(
            "--reference has no cell with the model, length, batch and mode of one that was measured".into(),
        ));
    }
    tables.extend(beside);
    tables.extend(resident::table(&finished.rows));
    let note = finished.manifest.steadiness.as_ref().and_then(Steadiness::note);
    if let Some((first, note)) = tables.first_mut().zip(note) {
        first.notes.push(note);
    }
    print_tables(&tables, exports, &term)?;
    let manifest = serde_json::to_value(&finished.manifest)?;
    exports.write(&manifest, &finished.rows, &tables)?;
    warn(&finished.rows, &term);
    if !args.output.no_plot && protocol.view() == ResultView::Growth {
        let rows = &finished.rows;
        let prefix = rows.first().map_or("run", |row| row.suite.as_deref().unwrap_or(&row.protocol));
        // its own files: another quantity than that of a step
        let decoded = !rows.is_empty() && rows.iter().all(|row| row.pass == Some(Pass::Decode));
        let prefix = &if decoded { format!("{prefix}-decode") } else { prefix.to_owned() };
        for chart in measured(rows, &references, prefix)? {
            term.info(&format!("chart: {}", chart.write(&args.output.plots_dir)?.display()));
        }
    }
    for chart in charts {
        term.info(&format!("chart: {}", chart.display()));
    }
    term.info(&format!("rows: {}", finished.folder.join("rows.csv").display()));
    if stopped {
        let line = command_line(argv().into_iter());
        let begun =
            protocol.curve().as_ref().map_or("", |_| " Training that had begun resumes from its checkpoint.");
        term.info(&format!(
            "stopped: {done} of {of} cells are finished and saved.{begun} Resume with: {line}"
        ));
        return Ok(term::STOPPED);
    }
    let none =
        !finished.rows.is_empty() && finished.rows.iter().all(|row| row.outcome == Outcome::Unsupported);
    let failed = none || finished.rows.iter().any(|row| row.outcome.is_failure());
    Ok(if failed { term::FAILED } else { 0 })
}

/// The tables of `rows`.
fn tables_of(protocol: &dyn Protocol, rows: &[Row], suite: Option<&Suite>) -> Vec<Table> {
    let mut tables = match (protocol.view(), suite) {
        (ResultView::Trained, _) => trained::tables(rows, protocol.info().metrics, |_, _| true),
        (ResultView::Plain, _) => vec![table::plain(protocol.info().about, rows, protocol.info().metrics)],
        (ResultView::Growth, Some(suite)) => published::tables(rows, suite),
        (ResultView::Growth, None) => Quantity::TABLES
            .iter()
            .filter_map(|quantity| figure(rows, *quantity))
            .flat_map(|figure| table::growth(&figure))
            .collect(),
    };
    if protocol.view() == ResultView::Growth {
        tables.extend(published::longest(rows));
    }
    tables.extend(published::reasons(rows));
    if protocol.view() == ResultView::Growth {
        tables.extend(table::costs(rows));
    }
    tables
}

/// Prints tables: on stdout, or on stderr where stdout is taken by an export.
pub fn print_tables(tables: &[Table], exports: &Exports, term: &Term) -> Result<()> {
    let text: Vec<String> = tables.iter().map(|table| table.terminal(term::width())).collect();
    let text = text.join("\n");
    if exports.to_stdout() {
        term.info(&text);
    } else {
        term::data(&text)?;
    }
    Ok(())
}

/// At most three warnings about single cells.
fn warn(rows: &[Row], term: &Term) {
    let mut wide: Vec<(f64, Warning)> = Vec::new();
    for row in rows.iter().filter(|row| row.metric == "step_time" && row.outcome == Outcome::Ok) {
        let (Some(value), Some((low, high))) = (row.value, row.interval()) else { continue };
        let relative = (high - value).max(value - low) / value; // as in the tables
        if relative > 0.1 {
            let pass = row.pass.map_or("", |pass| pass.word());
            let cell = format!("{} at {} {pass}", row.label(), row.len.unwrap_or(0));
            let n = row.n.unwrap_or(0) as usize;
            wide.push((relative, Warning::Wide { cell, relative, n }));
        }
    }
    wide.sort_by(|a, b| b.0.total_cmp(&a.0));
    let more = wide.len().saturating_sub(3);
    for (_, warning) in wide.into_iter().take(3) {
        term.warn(&warning);
    }
    if more > 0 {
        let have = if more == 1 { "has a wide interval" } else { "have wide intervals" };
        let cells = plural(more as u64, "more cell");
        term.warn(&Warning::Other(format!("{cells} {have}; see ci_low and ci_high")));
    }
}
