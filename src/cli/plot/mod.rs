//! `effattn plot`: patterns, attention matrices, and the charts of a run once more.

mod attention;
mod figures;
mod norms;

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use serde_json::json;

use super::command::{run_folder, started};
use super::stored_runs::{StoredRun, or_left_out};
use crate::protocol::attention_matrix::{self, ProbeConfig};
use crate::protocol::pattern;
use crate::protocol::stored_model;
use crate::run::CancelToken;
use crate::run::folder::{RunFolder, latest};
use crate::run::manifest::{State, now};
use crate::run::plan::Plan;
use crate::term::Term;
use effattn_model::attention::choose::{MechanismChoice, choose};
use effattn_record::config::lists::Models;
use effattn_record::matrix::{self, Matrix};
use effattn_record::report::chart::{self, Shade};
use effattn_record::report::{measured, reference};
use effattn_record::{Row, file};

/// Longest matrix that is drawn.
const LONGEST: usize = 1024;

/// What to draw.
#[derive(Clone, Debug, clap::Subcommand)]
pub enum PlotCommand {
    /// Attention patterns: which keys each query sees, per mechanism (Transformer-LS, Figure 1)
    Pattern(PatternArgs),
    /// How much each query attends to each key (cosFormer, Figure 3)
    Attention(attention::Args),
    /// Norms of window and slots, with and without DualLN, at initialisation (Transformer-LS, Figure 2)
    Norms(norms::Args),
    /// The papers' figures and the learning curves from everything under a folder of results
    Figures(figures::Args),
    /// Time and memory against length, redrawn from the rows of a run
    Rows(RowsArgs),
}

/// `plot pattern`.
#[derive(Clone, Debug, clap::Args)]
pub struct PatternArgs {
    /// Mechanisms; the sizes of those named without settings are scaled down to fit the picture
    #[arg(long, value_name = "NAME,...", default_value = "all")]
    model: Models,
    /// Number of positions
    #[arg(long, default_value_t = 64, value_name = "N", value_parser = length)]
    len: usize,
    #[command(flatten)]
    scene: MechanismPlotArgs,
}

/// `plot rows`.
#[derive(Clone, Debug, clap::Args)]
pub struct RowsArgs {
    /// Run folder, or the folder of a suite or command, whose newest run is used
    #[arg(default_value = "results/speed", value_name = "FOLDER")]
    folder: PathBuf,
    #[command(flatten)]
    plots: Plots,
}

/// What pictures of mechanisms share.
#[derive(Clone, Debug, clap::Args)]
struct MechanismPlotArgs {
    /// Draw the causal form
    #[arg(long)]
    causal: bool,
    /// Index of the head to draw, of four [default: 0]
    #[arg(long, value_name = "I")]
    head: Option<usize>,
    /// Seed of random blocks, weights and inputs [default: 0]
    #[arg(long, value_name = "N")]
    seed: Option<u32>,
    /// Folder of the matrices, and of the runs that --weights names
    #[arg(short, long, default_value = "results", value_name = "DIR")]
    output_path: PathBuf,
    #[command(flatten)]
    plots: Plots,
}

#[derive(Clone, Debug, clap::Args)]
struct Plots {
    /// Folder of the charts
    #[arg(long, default_value = "plots", value_name = "DIR")]
    plots_dir: PathBuf,
    /// Also write charts as PNG, at least 1,200 pixels wide
    #[arg(long)]
    png: bool,
}

fn length(text: &str) -> Result<usize, String> {
    let lengths: effattn_record::config::lists::Lengths = text.parse().map_err(|error| format!("{error}"))?;
    match lengths.0[..] {
        [len] if len as usize <= LONGEST => Ok(len as usize),
        [_] => Err(format!("a picture has at most {LONGEST} positions")),
        _ => Err("one length is drawn at a time, such as 64".to_owned()),
    }
}

/// Draws and says where; gives the exit code.
pub fn run(what: &PlotCommand, term: &Term) -> Result<u8> {
    match what {
        PlotCommand::Pattern(args) => draw_pattern(args, term)?,
        PlotCommand::Attention(args) => attention::draw(args, term)?,
        PlotCommand::Norms(args) => norms::draw(args, term)?,
        PlotCommand::Figures(args) => figures::draw(args, term)?,
        PlotCommand::Rows(args) => draw_rows(args, term)?,
    }
    Ok(0)
}

fn draw_pattern(args: &PatternArgs, term: &Term) -> Result<()> {
    let probe = args.scene.probe(args.len);
    let choices = admitted(&args.model, &probe, term)?;
    args.scene.check()?;
    let matrices: Vec<Matrix> =
        choices.iter().map(|choice| pattern::matrix(choice, &probe)).collect::<Result<_>>()?;
    let form = if probe.causal { "causal" } else { "bidirectional" };
    let title = format!("Attention patterns: {} positions, {form}", args.len);
    let subtitle = "rows: queries, from the top; columns: keys (blue; green: global positions) and slots (orange); shades: weights";
    let settings = json!({ "len": args.len, "causal": probe.causal, "head": probe.head, "title": title, "subtitle": subtitle });
    let matrices = keep("pattern", settings, &args.scene, &matrices)?;
    let chart = chart::matrices("pattern", (&title, subtitle), &matrices, Shade::Visible)?;
    say(&chart, &args.scene.plots, term)
}

/// The folder of the run or cell that `named` is, of any command that trains; nothing where it is a file. `latest` is the newest run.
fn trained_run(results: &Path, named: &Path) -> Option<PathBuf> {
    let of = |command| PathBuf::from(run_folder(results, command, named.display().to_string()));
    let found = stored_model::commands().into_iter().map(of).filter(|folder| folder.is_dir());
    found.max_by_key(|folder| started(folder))
}

/// The rows of the run in `folder` as a report reads them; nothing where there are none.
fn rows_of(folder: &Path) -> Result<Option<Vec<Row>>> {
    if let Some(run) = StoredRun::read(folder)? {
        return Ok(Some(run.finite()?.rows));
    }
    let alone = !folder.join("manifest.json").is_file() && folder.join("rows.csv").is_file();
    ensure!(!alone, "there is rows.csv and no manifest.json; copy the whole folder of its run");
    Ok(None)
}

fn draw_rows(args: &RowsArgs, term: &Term) -> Result<()> {
    let folder = latest(&args.folder).unwrap_or_else(|| args.folder.clone());
    let rows = rows_of(&folder)
        .with_context(|| format!("the rows in {} cannot be drawn", args.folder.display()))?
        .with_context(|| {
            format!("no rows in {}; run `effattn speed` first, or name a run folder", args.folder.display())
        })?;
    args.plots.check()?;
    let name = rows.first().map_or("run", |row| row.suite.as_deref().unwrap_or(&row.protocol)).to_owned();
    let known = reference::read(&folder).with_context(|| folder.join(reference::FILE).display().to_string());
    let references = or_left_out(known, "the times of other programs");
    let references = reference::with_programs(&rows, &references);
    let charts = measured(&rows, &references, &name)?;
    ensure!(!charts.is_empty(), "{}: no row has a time or a peak", folder.join("rows.csv").display());
    charts.iter().try_for_each(|chart| say(chart, &args.plots, term))
}

impl Plots {
    fn check(&self) -> Result<()> {
        let folder = &self.plots_dir;
        file::ensure_writable(folder)
            .with_context(|| format!("--plots-dir {} cannot be written", folder.display()))
    }
}

impl MechanismPlotArgs {
    fn check(&self) -> Result<()> {
        let folder = &self.output_path;
        file::ensure_writable(folder)
            .with_context(|| format!("--output-path {} cannot be written", folder.display()))?;
        self.plots.check()
    }

    fn probe(&self, len: usize) -> ProbeConfig {
        ProbeConfig {
            len,
            causal: self.causal,
            head: self.head.unwrap_or(0),
            seed: u64::from(self.seed.unwrap_or(0)),
            ..ProbeConfig::default()
        }
    }
}

/// The mechanisms of `models`, scaled to the picture unless weights are given. Of a pattern, those that cannot
/// be drawn are left out; one that is named must be drawn.
fn admitted(models: &Models, probe: &ProbeConfig, term: &Term) -> Result<Vec<MechanismChoice>> {
    let mut admitted: Vec<MechanismChoice> = Vec::new();
    let mut left_out: Vec<String> = Vec::new();
    probe.check()?;
    for variant in &models.0 {
        for choice in choose(&Models(vec![variant.clone()]))? {
            let choice = if probe.given.is_empty() { pattern::at_scale(&choice, probe) } else { choice };
            if admitted.iter().any(|known| known.label() == choice.label()) {
                continue;
            }
            let drawable = probe.admits(&choice).and_then(|()| {
                match (choice.entry.pattern)(&choice.knobs, &probe.shape()) {
                    Some(_) => Ok(()),
                    None => attention_matrix::implied(&choice, probe).map(drop),
                }
            });
            match drawable {
                Ok(()) => admitted.push(choice),
                Err(error) if variant.is_pattern() => left_out.push(error.to_string()),
                Err(error) => return Err(error),
            }
        }
    }
    ensure!(!admitted.is_empty(), "nothing can be drawn: {}", left_out.join("; "));
    if !left_out.is_empty() {
        term.info(&format!("left out: {}", left_out.join("; ")));
    }
    Ok(admitted)
}

/// Writes the matrices into a run folder and reads them again: a chart shows what is stored.
fn keep(
    name: &str,
    settings: serde_json::Value,
    scene: &MechanismPlotArgs,
    matrices: &[Matrix],
) -> Result<Vec<Matrix>> {
    let run = kept_run(name, settings, &scene.output_path, u64::from(scene.seed.unwrap_or(0)))?;
    matrix::write(&run.path, matrices).with_context(|| run.path.display().to_string())?;
    let matrices = matrix::read(&run.path)?;
    done(run)?;
    Ok(matrices)
}

/// A run folder for what is computed here, without workers.
fn kept_run(name: &str, settings: serde_json::Value, root: &Path, seed: u64) -> Result<RunFolder> {
    let plan = Plan {
        name: name.to_owned(),
        command: format!("plot {name}"),
        argv: crate::run::manifest::argv(),
        settings,
        threads: effattn_kernel::device::threads::available(),
        device: "cpu".to_owned(),
        seeds: vec![seed],
        ..Plan::default()
    };
    Ok(RunFolder::open(root, &plan, true, &CancelToken::default())?)
}

/// Marks `run` as finished.
fn done(mut run: RunFolder) -> Result<()> {
    run.manifest.state = State::Done;
    run.manifest.end = Some(now());
    run.manifest.write(&run.path)?;
    Ok(run.name_latest()?)
}

fn say(chart: &chart::Chart, plots: &Plots, term: &Term) -> Result<()> {
    let path = chart.write(&plots.plots_dir)?;
    term.info(&format!("chart: {}", path.display()));
    if plots.png {
        let path = path.with_extension("png");
        file::write(&path, &chart::png(&chart.svg)?).with_context(|| path.display().to_string())?;
        term.info(&format!("chart: {}", path.display()));
    }
    Ok(())
}

#[cfg(test)]
mod tests;
