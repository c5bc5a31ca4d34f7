//! `campaign --dry-run`: the parts, their cells, and how long they would take here.

use std::path::Path;
use std::time::Duration;

use anyhow::Result;

use super::child;
use super::description::{Campaign, Part};
use super::record::Record;
use super::words;
use crate::cli::command_line::command_line;
use crate::protocol::check::builtin;
use crate::protocol::resolve;
use crate::run::CancelToken;
use crate::term::clock;
use effattn_kernel::device::threads;
use effattn_record::report::table::Table;
use effattn_record::{Row, csv};

/// How long the steps of a part may be tried: behind it its time is guessed from its multiply-adds.
const TRIED: Duration = Duration::from_secs(20);

/// What is expected of a part.
struct Estimate {
    /// Cells, or golden files.
    cells: usize,
    /// Seconds of all cells; none where nothing was tried.
    seconds: Option<f64>,
}

/// The table of `campaign`, whose files would be in `folder`.
pub fn table(campaign: &Campaign, folder: &Path, stop: &CancelToken) -> Result<Table> {
    let mut table = Table {
        title: format!("Campaign {}: {}; nothing was run", campaign.name, campaign.title),
        columns: ["part", "what", "state", "cells", "alone", "at most"].map(str::to_owned).to_vec(),
        numbers: 3,
        ..Table::default()
    };
    let mut record = Record::read(folder).ok().flatten();
    let shares: f64 = campaign.parts.iter().map(|part| part.minutes).sum();
    for part in &campaign.parts {
        let words = words(part, campaign.device, &folder.join(&part.name), false);
        let estimate = estimate(part, &words, stop)?;
        let state = record
            .as_mut()
            .and_then(|record| record.part(&part.name))
            .map_or("waiting", |part| part.state.word());
        table.rows.push(vec![
            part.name.clone(),
            part.about.clone(),
            state.to_owned(),
            estimate.cells.to_string(),
            estimate.seconds.map_or_else(|| "-".to_owned(), clock),
            clock(60.0 * campaign.minutes * part.minutes / shares),
        ]);
        table.notes.push(format!("{}: {}", part.name, command_line(words.into_iter())));
    }
    table.notes.insert(
        0,
        format!(
            "{} minutes on {}. alone: estimated for all cells of the part on this machine; - where its device is not here. at most: its share \
             of the minutes, and what the parts before it leave. What is not done by then is continued when the same command is given again.",
            campaign.minutes, campaign.device
        ),
    );
    Ok(table)
}

fn estimate(part: &Part, words: &[String], stop: &CancelToken) -> Result<Estimate> {
    let Some(args) = part.arguments()? else {
        return Ok(Estimate { cells: builtin::BUILTIN_FILES.len(), seconds: None });
    };
    let grid = resolve(&args.flags, args.protocol)?;
    let cells = args.protocol.cells(&grid, threads::available())?;
    let mut tried = words.to_vec();
    tried.extend(["--dry-run", "--export-csv", "-"].map(str::to_owned));
    let text = child::printed(&tried, TRIED, stop)?;
    let rows: Option<Vec<Row>> = text.and_then(|text| csv::from_str(&text).ok());
    let seconds = match rows {
        Some(rows) => {
            Some(rows.iter().filter(|row| row.metric == "cell_time").filter_map(|row| row.value).sum())
        }
        None if words.iter().any(|word| word == "cpu") => Some(cells.iter().map(|cell| cell.seconds).sum()),
        None => None,
    };
    Ok(Estimate { cells: cells.len(), seconds })
}
