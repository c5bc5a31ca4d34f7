//! `effattn plot`: patterns, attention matrices, and the charts of a run once more.

mod figures;
mod norms;

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use candle_core::{Device, Tensor};
use serde_json::json;

use super::command::{run_folder, started};
use crate::protocol::attention_matrix::{self, ProbeConfig};
use crate::protocol::pattern;
use crate::protocol::run_elsewhere;
use crate::protocol::stored_input::{Input, InputRequest};
use crate::protocol::stored_model;
use crate::protocol::trained_attention::{self, TrainedMatrices};
use crate::run::CancelToken;
use crate::run::folder::{RunFolder, latest};
use crate::run::manifest::{State, now};
use crate::run::plan::Plan;
use crate::term::Term;
use effattn_data::data_dir;
use effattn_model::attention::choose::{MechanismChoice, choose};
use effattn_record::config::lists::Models;
use effattn_record::config::suite::Suite;
use effattn_record::matrix::{self, Matrix};
use effattn_record::report::chart::{self, Shade};
use effattn_record::report::{measured, reference};
use effattn_record::{csv, file};

/// Longest matrix that is drawn.
const LONGEST: usize = 1024;

/// What to draw.
#[derive(Clone, Debug, clap::Subcommand)]
pub enum PlotCommand {
    /// Attention patterns: which keys each query sees, per mechanism (Transformer-LS, Figure 1)
    Pattern(PatternArgs),
    /// How much each query attends to each key (cosFormer, Figure 3)
    Attention(AttentionArgs),
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

/// `plot attention`.
#[derive(Clone, Debug, clap::Args)]
pub struct AttentionArgs {
    /// Mechanisms [default: full,cosformer,relu-linear]
    #[arg(long, value_name = "NAME,...", conflicts_with = "suite")]
    model: Option<Models>,
    /// A paper's figure: cos-figure3 or a TOML file
    #[arg(long, value_name = "NAME|FILE")]
    suite: Option<String>,
    /// Number of positions [default: 64, or that of --weights]
    #[arg(long, value_name = "N", value_parser = length)]
    len: Option<usize>,
    /// Count, per row, the largest entries up to the one that makes their sum exceed this (cosFormer,
    /// Algorithm 2)
    #[arg(long, value_name = "0..1", value_parser = share)]
    threshold: Option<f32>,
    /// Average over this many inputs
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1000))]
    samples: u64,
    /// A run of any command that trains, by folder or name, or latest: every head of every layer of its first model, for --text or
    /// --example. Or a safetensors file, such as a golden file, with queries q and keys k [b, h, n, d], layer input x and the
    /// mechanism's parameters. Without it inputs and parameters are drawn at random
    #[arg(long, value_name = "RUN|FILE", conflicts_with = "samples")]
    weights: Option<PathBuf>,
    /// Text that the trained model reads; of recall token numbers, divided by blanks
    #[arg(long, value_name = "TEXT", requires = "weights", conflicts_with = "example")]
    text: Option<String>,
    /// Example that the trained model reads: of the test split, of language models a segment or block of the tested text, from 0
    /// [default: 0]
    #[arg(long, value_name = "I", requires = "weights")]
    example: Option<usize>,
    /// Folder with data sets, for --example [default: effattn's folder in the user's cache]
    #[arg(long, value_name = "DIR")]
    data_dir: Option<PathBuf>,
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

fn share(text: &str) -> Result<f32, String> {
    let value: Option<f32> = text.parse().ok().filter(|value| (0.0..=1.0).contains(value));
    value.ok_or_else(|| format!("{text:?} is not a number from 0 to 1"))
}

/// Draws and says where; gives the exit code.
pub fn run(what: &PlotCommand, term: &Term) -> Result<u8> {
    match what {
        PlotCommand::Pattern(args) => draw_pattern(args, term)?,
        PlotCommand::Attention(args) => draw_attention(args, term)?,
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

/// Mechanisms and length of the suite called `name`.
fn of_suite(name: &str) -> Result<(Models, Option<usize>)> {
    let suite = Suite::load(name)?;
    ensure!(suite.protocol == "plot attention", "{}", run_elsewhere(&suite, name));
    let len = suite.base.len.as_ref().and_then(|len| len.0.first()).map(|len| *len as usize);
    Ok((Models(suite.rows.into_iter().map(|row| row.model).collect()), len))
}

/// The folder of the run or cell that `named` is, of any command that trains; nothing where it is a file. `latest` is the newest run.
fn trained_run(results: &Path, named: &Path) -> Option<PathBuf> {
    let of = |command| PathBuf::from(run_folder(results, command, named.display().to_string()));
    let found = stored_model::commands().into_iter().map(of).filter(|folder| folder.is_dir());
    found.max_by_key(|folder| started(folder))
}

fn draw_trained(run: &Path, args: &AttentionArgs, term: &Term) -> Result<()> {
    let scene = &args.scene;
    let others = [
        ("model", args.model.is_some()),
        ("suite", args.suite.is_some()),
        ("causal", scene.causal),
        ("head", scene.head.is_some()),
        ("seed", scene.seed.is_some()),
    ];
    if let Some((flag, _)) = others.into_iter().find(|(_, given)| *given) {
        bail!(
            "--{flag} is of mechanisms without a model; a trained model is drawn as it is, with all heads: leave --{flag} out"
        );
    }
    let dir = args.data_dir.clone().unwrap_or_else(data_dir::default_dir);
    let input = match &args.text {
        Some(text) => Input::Text(text),
        None => Input::Example(args.example.unwrap_or(0)),
    };
    let asked = InputRequest { input, data: &dir, most: args.len.unwrap_or(64) };
    let TrainedMatrices { matrices, source } =
        trained_attention::matrices(run, &asked).with_context(|| format!("--weights {}", run.display()))?;
    let matrices: Vec<Matrix> = match args.threshold {
        Some(threshold) => matrices.iter().map(|one| attention_matrix::counted(one, threshold)).collect(),
        None => matrices,
    };
    args.scene.check()?;
    let read = match &args.text {
        Some(text) => format!("{:?}", text.chars().take(24).collect::<String>()),
        None => format!("test example {}", args.example.unwrap_or(0)),
    };
    let title = "Attention of a trained model";
    let subtitle = format!("rows: queries from top; columns: keys; {source}; {read}");
    let settings = json!({ "weights": run, "text": args.text, "example": args.example, "threshold": args.threshold, "title": title, "subtitle": subtitle });
    let matrices = keep("attention", settings, &args.scene, &matrices)?;
    let chart = chart::matrices("attention", (title, &subtitle), &matrices, Shade::Weight)?;
    say(&chart, &args.scene.plots, term)
}

fn draw_attention(args: &AttentionArgs, term: &Term) -> Result<()> {
    let named = args.weights.as_deref();
    if let Some(run) = named.and_then(|named| trained_run(&args.scene.output_path, named)) {
        return draw_trained(&run, args, term);
    }
    if let Some(named) = named.filter(|named| !named.exists()) {
        let known = stored_model::commands().join(", ");
        bail!(
            "--weights {}: no file, and no run of {known} in {}; effattn status lists runs",
            named.display(),
            args.scene.output_path.display()
        );
    }
    if let Some(what) = args.text.as_ref().map(|_| "--text").or(args.example.map(|_| "--example")) {
        bail!("{what} is read by a trained model; give a run of a command that trains with --weights");
    }
    let (models, len) = match (&args.suite, &args.model) {
        (Some(name), _) => of_suite(name)?,
        (None, Some(models)) => (models.clone(), None),
        (None, None) => ("full,cosformer,relu-linear".parse()?, None),
    };
    let probe = match &args.weights {
        Some(path) => {
            given(path, args, args.scene.probe(0)).with_context(|| format!("--weights {}", path.display()))?
        }
        None => args.scene.probe(args.len.or(len).unwrap_or(64)),
    };
    let choices = admitted(&models, &probe, term)?;
    args.scene.check()?;
    let mut matrices = attention_matrix::matrices(&choices, &probe, args.samples, args.threshold)?;
    // the paper's figure has the re-weighting alone as its last panel
    if args.suite.is_some() && choices.iter().any(|choice| choice.label() == "cosformer") {
        matrices.push(attention_matrix::cos_distances(&probe));
    }
    let source = match &args.weights {
        Some(path) => path.file_stem().map_or_else(String::new, |stem| stem.to_string_lossy().into_owned()),
        None => "random weights".to_owned(),
    };
    let (title, kind) = match args.threshold {
        Some(threshold) => {
            ("Largest entries of the attention matrices", format!("up to a sum of {threshold}"))
        }
        None => ("Attention matrices", "white is 0, orange negative".to_owned()),
    };
    let samples = if args.samples == 1 { String::new() } else { format!(", mean of {}", args.samples) };
    let subtitle =
        format!("rows: queries from top; columns: keys; {kind}; {source}{samples}, head {}", probe.head);
    let settings = json!({
        "len": probe.len,
        "causal": probe.causal,
        "head": probe.head,
        "threshold": args.threshold,
        "samples": args.samples,
        "weights": args.weights,
        "title": title,
        "subtitle": subtitle,
    });
    let matrices = keep("attention", settings, &args.scene, &matrices)?;
    let chart = chart::matrices("attention", (title, &subtitle), &matrices, Shade::Weight)?;
    say(&chart, &args.scene.plots, term)
}

fn draw_rows(args: &RowsArgs, term: &Term) -> Result<()> {
    let folder = latest(&args.folder).unwrap_or_else(|| args.folder.clone());
    let path = folder.join("rows.csv");
    let text = file::read_to_string(&path).with_context(|| {
        format!("no rows in {}; run `effattn speed` first, or name a run folder", args.folder.display())
    })?;
    let rows = csv::from_str(&text).with_context(|| path.display().to_string())?;
    args.plots.check()?;
    let name = rows.first().map_or("run", |row| row.suite.as_deref().unwrap_or(&row.protocol)).to_owned();
    let references =
        reference::read(&folder).with_context(|| folder.join(reference::FILE).display().to_string())?;
    let references = reference::with_programs(&rows, &references);
    let charts = measured(&rows, &references, &name)?;
    ensure!(!charts.is_empty(), "{}: no row has a time or a peak", path.display());
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

/// A probe with the tensors of `path`; of a batch the first sample.
fn given(path: &Path, args: &AttentionArgs, probe: ProbeConfig) -> Result<ProbeConfig> {
    let mut tensors: HashMap<String, Tensor> =
        candle_core::safetensors::load_buffer(&file::read(path)?, &Device::Cpu)?;
    for (name, tensor) in &mut tensors {
        let per_sample = ["q", "k", "v", "x", "q_global", "k_global"].contains(&name.as_str());
        if per_sample && tensor.rank() > 0 {
            *tensor = tensor.narrow(0, 0, 1)?;
        }
    }
    let Some(shape) = ["q", "v"].iter().find_map(|name| tensors.get(*name)) else {
        bail!("it has no tensor q or v")
    };
    let (_, heads, len, head_dim) = shape.dims4()?;
    ensure!(len <= LONGEST, "a picture has at most {LONGEST} positions, these are {len}");
    if let Some(asked) = args.len.filter(|asked| *asked != len) {
        bail!("it has {len} positions, not {asked}; leave --len out");
    }
    Ok(ProbeConfig { len, heads, head_dim, given: tensors, ..probe })
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
