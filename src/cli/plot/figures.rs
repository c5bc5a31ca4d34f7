//! `effattn plot figures`.

use std::path::PathBuf;

use anyhow::{Result, ensure};

use super::{Plots, say};
use crate::cli::runs::{Run, latest_rows};
use crate::report::figures;
use crate::term::Term;

/// `plot figures`.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// Folder of results
    #[arg(value_name = "RESULTS", default_value = "results")]
    results: PathBuf,
    #[command(flatten)]
    plots: Plots,
}

pub fn draw(args: &Args, term: &Term) -> Result<()> {
    let rows = latest_rows(&Run::below(&args.results)?);
    args.plots.check()?;
    let charts = figures::draw(&rows)?;
    let about = figures::FIGURES.iter().map(|figure| format!("{}: {}", figure.name, figure.about));
    ensure!(
        !charts.is_empty(),
        "no figure has the rows it needs under {}; there are:\n{}",
        args.results.display(),
        about.collect::<Vec<_>>().join("\n")
    );
    charts.iter().try_for_each(|chart| say(chart, &args.plots, term))
}
