//! `effattn plot figures`: the papers' figures, and the learning curves of every task.

use std::path::PathBuf;

use anyhow::{Result, ensure};

use super::{Plots, say};
use crate::cli::curves;
use crate::cli::stored_runs::{StoredRun, latest_rows, newest_trained};
use crate::term::Term;
use effattn_record::Row;
use effattn_record::report::figures;

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
    let runs = StoredRun::find_all(&args.results)?;
    args.plots.check()?;
    let mut charts = figures::draw(&latest_rows(&runs))?;
    let trained: Vec<&StoredRun> = runs.iter().filter(|run| run.trained() && !run.quick()).collect();
    let newest = newest_trained(trained.iter().flat_map(|run| &run.rows));
    let newest: Vec<Row> = newest.into_values().cloned().collect();
    charts.extend(curves::charts(&curves::of_runs(&trained, &newest))?);
    let about = figures::figures().into_iter().map(|figure| format!("{}: {}", figure.name, figure.about));
    ensure!(
        !charts.is_empty(),
        "no figure has the rows it needs under {}; there are:\n{}",
        args.results.display(),
        about.collect::<Vec<_>>().join("\n")
    );
    charts.iter().try_for_each(|chart| say(chart, &args.plots, term))
}
