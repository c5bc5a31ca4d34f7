//! `effattn plot norms`.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use serde_json::json;

use super::{Plots, kept_run, say, trained_run};
use crate::cli::value_names::NamedValues;
use crate::protocol::charlm::generate::checkpoint;
use crate::protocol::charlm::request::{load, names};
use crate::protocol::norms::{Probe, norms, of_input, trained_norms, trained_on};
use crate::protocol::stored_input::{Input, InputRequest};
use crate::protocol::stored_model::find_cell;
use crate::protocol::{Protocol, charlm};
use crate::term::Term;
use effattn_data::data_dir;
use effattn_model::attention::choose::choose;
use effattn_model::family::knobs_of;
use effattn_record::config::lists::Models;
use effattn_record::config::settings::Settings;
use effattn_record::file;
use effattn_record::norms::{read, write};
use effattn_record::report::chart;

/// `plot norms`.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// Mechanisms with a window and slots
    #[arg(long, value_name = "NAME,...", default_value = "ls,ls:dual_ln=false")]
    model: Models,
    #[arg(long, value_name = "NAME", default_value = "enwik8", help = format!("Corpus: {}", names().join(", ")),
        value_parser = NamedValues::new(names, str::parse::<String>), hide_possible_values = true)]
    task: String,
    /// Norms of a trained model instead: a run of any command that trains, by folder or name, or latest, or a checkpoint of charlm; of
    /// charlm's models the second segment of the validation text is read behind the first, of others --example
    #[arg(long, value_name = "RUN|FILE", conflicts_with_all = ["model", "task", "preset", "set", "len", "seed"])]
    weights: Option<PathBuf>,
    /// Example of the test split that the trained model reads, from 0 [default: 0]
    #[arg(long, value_name = "I", requires = "weights")]
    example: Option<usize>,
    /// Backbone
    #[arg(long, value_name = "NAME", default_value = "charlm-small")]
    preset: String,
    /// Positions of the segment and of the cache in front of it
    #[arg(long, value_name = "N", default_value_t = 2048, value_parser = clap::value_parser!(u64).range(1..=65536))]
    len: u64,
    /// Override a size of the backbone: layers=4 (repeatable)
    #[arg(long, value_name = "KEY=VALUE", value_parser = Settings::set)]
    set: Vec<Settings>,
    /// Accept an incomplete corpus
    #[arg(long)]
    allow_partial: bool,
    /// Folder with data sets [default: effattn's folder in the user's cache]
    #[arg(long, value_name = "DIR")]
    data_dir: Option<PathBuf>,
    /// Seed of the weights
    #[arg(long, default_value_t = 0, value_name = "N")]
    seed: u64,
    /// Folder of the norms
    #[arg(short, long, default_value = "results", value_name = "DIR")]
    output_path: PathBuf,
    #[command(flatten)]
    plots: Plots,
}

impl Args {
    fn check(&self) -> Result<()> {
        file::ensure_writable(&self.output_path)
            .with_context(|| format!("--output-path {} cannot be written", self.output_path.display()))?;
        self.plots.check()
    }
}

/// [`draw`] of the weights in `path`.
fn draw_trained(path: &Path, args: &Args, term: &Term) -> Result<()> {
    let run = trained_run(&args.output_path, path);
    let path = run.as_deref().unwrap_or(path);
    let dir = args.data_dir.clone().unwrap_or_else(data_dir::default_dir);
    args.check()?;
    let named = || format!("--weights {}", path.display());
    let cell = run.as_deref().map(find_cell).transpose().with_context(named)?;
    let other = cell.filter(|(protocol, _)| protocol.name() != charlm::CharLm.info().name);
    let (all, what, weights, data) = match other {
        Some((protocol, cell)) => {
            let index = args.example.unwrap_or(0);
            let asked = InputRequest { input: Input::Example(index), data: &dir, most: usize::MAX };
            let stored = protocol.stored_input(&cell, &asked).with_context(named)?;
            let norms = of_input(&stored).with_context(named)?;
            (norms, format!("{}, test example {index}", stored.source), cell, None)
        }
        None => {
            ensure!(
                args.example.is_none(),
                "--example is not read by models of charlm, which read the second segment of the validation text; leave it out"
            );
            let file = checkpoint(path)?;
            let (task, len) = trained_on(&file)?;
            let corpus = load(&task, &dir, args.allow_partial)?;
            let norms = trained_norms(&file, &corpus, len).with_context(named)?;
            (
                norms,
                format!("{task}, {len} positions, trained: {}", path.display()),
                file,
                Some((task, corpus.hash)),
            )
        }
    };
    let told = json!({ "weights": weights, "example": args.example, "what": what });
    let mut run = kept_run("norms", told, &args.output_path, 0)?;
    run.manifest.data.extend(data);
    write(&run.path, &all).with_context(|| run.path.display().to_string())?;
    let all = read(&run.path)?;
    super::done(run)?;
    say(&chart::norms(&what, &all)?, &args.plots, term)
}

pub fn draw(args: &Args, term: &Term) -> Result<()> {
    if let Some(path) = &args.weights {
        return draw_trained(path, args, term);
    }
    let settings = args.set.iter().cloned().fold(Settings::NONE, |all, one| one.over(all));
    let dir = args.data_dir.clone().unwrap_or_else(data_dir::default_dir);
    let corpus = load(&args.task, &dir, args.allow_partial)?;
    args.check()?;
    let probe =
        Probe { corpus: &corpus, preset: &args.preset, settings: &settings, len: args.len, seed: args.seed };
    let mut all = Vec::new();
    for choice in choose(&args.model)? {
        all.extend(norms(&choice.label_under(&knobs_of(&args.preset)), &probe)?);
    }
    if all.is_empty() {
        bail!("--model names no mechanism");
    }
    let partial = corpus.partial.as_deref().map_or_else(String::new, |partial| format!(" ({partial})"));
    let told = json!({ "task": args.task, "preset": args.preset, "len": args.len, "set": settings, "partial": corpus.partial });
    let mut run = kept_run("norms", told, &args.output_path, args.seed)?;
    run.manifest.data.insert(args.task.clone(), corpus.hash.clone());
    write(&run.path, &all).with_context(|| run.path.display().to_string())?;
    let all = read(&run.path)?;
    super::done(run)?;
    let subtitle =
        format!("{}, {}{partial}, {} positions, at initialisation", args.preset, args.task, args.len);
    say(&chart::norms(&subtitle, &all)?, &args.plots, term)
}
