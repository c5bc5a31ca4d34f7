//! `effattn plot attention`.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use candle_core::{Device, Tensor};
use serde_json::json;

use super::{LONGEST, MechanismPlotArgs, admitted, keep, length, say, trained_run};
use crate::protocol::attention_matrix::{self, ProbeConfig};
use crate::protocol::run_elsewhere;
use crate::protocol::stored_input::{Input, InputRequest};
use crate::protocol::stored_model;
use crate::protocol::trained_attention::{self, TrainedMatrices};
use crate::term::Term;
use effattn_data::data_dir;
use effattn_record::config::lists::Models;
use effattn_record::config::suite::Suite;
use effattn_record::file;
use effattn_record::matrix::Matrix;
use effattn_record::report::chart::{self, Shade};

/// Mechanisms where none is said: those of cosFormer's figure.
const MODELS: &str = "full,cosformer,relu-linear";

/// `plot attention`.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    #[arg(long, value_name = "NAME,...", conflicts_with = "suite", help = format!("Mechanisms [default: {MODELS}]"))]
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

fn share(text: &str) -> Result<f32, String> {
    let value: Option<f32> = text.parse().ok().filter(|value| (0.0..=1.0).contains(value));
    value.ok_or_else(|| format!("{text:?} is not a number from 0 to 1"))
}

/// Mechanisms and length of the suite called `name`.
fn of_suite(name: &str) -> Result<(Models, Option<usize>)> {
    let suite = Suite::load(name)?;
    ensure!(suite.protocol == "plot attention", "{}", run_elsewhere(&suite, name));
    let len = suite.base.len.as_ref().and_then(|len| len.0.first()).map(|len| *len as usize);
    Ok((Models(suite.rows.into_iter().map(|row| row.model).collect()), len))
}

fn draw_trained(run: &Path, args: &Args, term: &Term) -> Result<()> {
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

pub fn draw(args: &Args, term: &Term) -> Result<()> {
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
        (None, None) => (MODELS.parse()?, None),
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

/// A probe with the tensors of `path`; of a batch the first sample.
fn given(path: &Path, args: &Args, probe: ProbeConfig) -> Result<ProbeConfig> {
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
