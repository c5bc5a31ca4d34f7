//! `effattn compare`.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use super::runs::Run;
use crate::record::{Row, csv, json};
use crate::report::compare::compare;
use crate::term::{self, Term};

const EXAMPLES: &str = "\
Examples:
  effattn compare results/speed/A results/speed/B
  effattn compare baseline.csv results/speed/latest --fail-if-regression 5%

Cells are matched by everything that defines them; other devices, number formats, kernels or thread counts are never
compared. Exit code 1 with --fail-if-regression and a cell that is worse by more, beyond its 95 % interval.";

#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Run folder, or rows that were exported as CSV or JSON
    first: PathBuf,
    /// The other one
    second: PathBuf,
    /// Exit with 1 if a cell is worse by more than this
    #[arg(long, value_name = "PERCENT", value_parser = percent)]
    fail_if_regression: Option<f64>,
}

fn percent(text: &str) -> Result<f64, String> {
    match text.trim_end_matches('%').trim().parse::<f64>() {
        Ok(value) if (0.0..=1000.0).contains(&value) => Ok(value / 100.0),
        _ => Err("expected a share such as 5%".to_owned()),
    }
}

pub fn run(args: &Args, term: &Term) -> Result<u8> {
    let (first, second) = (rows(&args.first)?, rows(&args.second)?);
    let comparison = compare(&first, &second);
    if comparison.pairs.is_empty() && comparison.lonely.is_empty() {
        bail!("neither has a row that can be compared");
    }
    let width = comfy_table::Table::new().width().unwrap_or(140);
    term::data(&comparison.table().terminal(width))?;
    let Some(share) = args.fail_if_regression else { return Ok(0) };
    let worse = comparison.regressions(share);
    for pair in &worse {
        term.say(&format!("worse by {:.1} %: {} {}", 100.0 * pair.worse, pair.cell, pair.metric));
    }
    Ok(if worse.is_empty() { 0 } else { super::FAILED })
}

/// The rows of a run folder or an exported file.
fn rows(path: &Path) -> Result<Vec<Row>> {
    if path.is_dir() {
        let run = Run::read(path)?;
        return run.map(|run| run.rows).with_context(|| {
            format!("{} is no run folder; name one with manifest.json and rows.csv", path.display())
        });
    }
    let text = std::fs::read_to_string(path).with_context(|| path.display().to_string())?;
    let rows = if path.extension().is_some_and(|extension| extension == "json") {
        json::from_str(&text).map(|export| export.rows)
    } else {
        csv::from_str(&text)
    };
    rows.with_context(|| path.display().to_string())
}
