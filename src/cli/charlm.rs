//! `effattn charlm`.

use std::io::Write;
use std::path::PathBuf;

use anyhow::Result;

use super::grid::Grid;
use super::known::Known;
use super::training::{Curves, Flags, header, incomplete, listed};
use super::{dry, speed, start};
use crate::config::grid::Words;
use crate::config::settings::Settings;
use crate::protocol::charlm::plan::{Options, QUICK, cells, defaults, load, names};
use crate::protocol::charlm::sample::{Draw, sample};
use crate::protocol::grid;
use crate::run::plan::Plan;
use crate::term::Term;
use crate::train::session::Score;

const EXAMPLES: &str = "\
Examples:
  effattn charlm --quick                                a small model on the text in the program, in a minute
  effattn charlm --task enwik8 --model ls --dry-run     what Transformer-LS Table 4 would take here
  effattn charlm --task enwik8 --allow-partial --model ls:w=128,transformer-xl --steps 400 --len 512 --batch 4 \\
      --set layers=4 --set width=256 --set heads=4 --set ffn=1024 --rate 1e-3 --limit 50000
  effattn charlm --suite ls-figure3 --set layers=1 --dry-run    time and memory against length, as effattn speed measures
  effattn charlm --generate results/charlm/latest/cells/*/phase1-best.safetensors --prompt 'The '

Bits per character of the test part, with the weights of the best evaluation. bpc_stream: blocks behind a cache;
bpc_overlap: windows that are encoded alone. A killed or stopped run goes on from its last checkpoint when the same
command is given again.";

#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    #[arg(long, value_name = "LIST", help_heading = "Grid", help = format!("Corpora: {}", names().join(", ")),
        value_parser = Known::<Words>::new(names), hide_possible_values = true)]
    task: Option<Words>,
    #[command(flatten)]
    grid: Grid,
    /// A small model on the little text in the program; says so
    #[arg(long, help_heading = "Budget")]
    quick: bool,
    /// Phases of growing length that are trained, 1 to 3
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=3), help_heading = "Budget")]
    phases: Option<u64>,
    /// First symbols of the validation and the test part that are predicted
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(2..), help_heading = "Budget")]
    limit: Option<u64>,
    /// Updates between evaluations
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..), help_heading = "Budget")]
    every: Option<u64>,
    /// Micro-batches per update: the memory of one, the update of all
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..), help_heading = "Budget")]
    accumulate: Option<u64>,
    /// Evaluate in overlapping windows (the paper) instead of blocks behind a cache (its code)
    #[arg(long, help_heading = "Evaluation")]
    overlap: bool,
    /// Draw text from this checkpoint instead of training
    #[arg(long, value_name = "CHECKPOINT", help_heading = "Text")]
    generate: Option<PathBuf>,
    /// Text in front of what is drawn
    #[arg(long, value_name = "TEXT", default_value = "", help_heading = "Text", requires = "generate")]
    prompt: String,
    /// Symbols to draw
    #[arg(long, value_name = "N", default_value_t = 500, help_heading = "Text", requires = "generate")]
    symbols: usize,
    /// Divides the logits; 0 takes the likeliest symbol
    #[arg(long, value_name = "T", default_value_t = 0.8, help_heading = "Text", requires = "generate")]
    temperature: f64,
    #[command(flatten)]
    flags: Flags,
}

impl Args {
    /// Whether a flag is given that only training has.
    fn trains(&self) -> bool {
        let numbers = [self.flags.steps, self.phases, self.limit, self.every, self.accumulate];
        let switches = [self.quick, self.overlap, self.flags.allow_partial];
        numbers.iter().any(Option::is_some)
            || switches.contains(&true)
            || self.task.is_some()
            || self.flags.rate.is_some()
    }
}

pub fn run(args: &Args, term: Term) -> Result<u8> {
    if let Some(checkpoint) = &args.generate {
        return generate(args, checkpoint);
    }
    if args.grid.is_for("speed") {
        anyhow::ensure!(
            !args.trains(),
            "this suite measures steps and trains nothing: leave --task, --quick and the flags of training out, or run it by \
             effattn speed"
        );
        let args = (args.grid.clone(), args.flags.place.clone(), args.flags.exports.clone());
        return speed::run(&speed::Args::of(args.0, args.1, args.2), term); // Figure 3 measures steps
    }
    let budget =
        Settings { task: args.task.clone(), steps: args.flags.steps, limit: args.limit, ..Settings::NONE };
    let grid = grid::resolve(args.grid.flags(&args.flags.place, budget), &defaults(args.quick))?;
    let ready = start::ready(&grid.settings)?;
    let options = Options {
        quick: args.quick,
        phases: args.phases,
        rate: args.flags.rate,
        accumulate: args.accumulate,
        every: args.every,
        overlap: args.overlap,
        allow_partial: args.flags.allow_partial,
    };
    let (cells, requests): (Vec<_>, Vec<_>) = cells(&grid, options, ready.threads)?.into_iter().unzip();
    let mut plan = start::plan("charlm", &grid, &ready, cells);
    if args.flags.place.dry_run {
        args.flags.exports.check()?;
        return dry::tell(&plan, &args.flags.exports, &term);
    }
    start::folders(&args.flags.place, &args.flags.exports)?;
    let dir = args.flags.data_dir();
    let remarks = data(&mut plan, &dir, args.flags.allow_partial)?;
    term.say(&header(&plan, &amount(&plan), ready.memory_limit));
    remarks.iter().for_each(|remark| term.say(remark));
    if args.quick {
        let quick = toml::to_string(&defaults(true).settings).unwrap_or_default();
        let quick: Vec<String> = quick.lines().map(|line| line.replace(" = ", "=")).collect();
        let (model, rate) = QUICK;
        term.say(&format!(
            "--quick: {model}, {}, rate {rate:e}, where nothing else is said: not the paper's protocol",
            quick.join(", ")
        ));
    }
    let bits = |score: &Score| score.loss / std::f64::consts::LN_2;
    let curves = Curves { command: "charlm", measure: "validation, bits per character", value: bits };
    args.flags.run((&plan, &requests), &ready, &grid, &curves, term)
}

/// Reads every corpus once: their hashes belong to the run. Gives what is to be said about them.
fn data(plan: &mut Plan, dir: &std::path::Path, allow_partial: bool) -> Result<Vec<String>> {
    let mut remarks = Vec::new();
    let mut names: Vec<String> = plan.cells.iter().filter_map(|cell| cell.row.task.clone()).collect();
    names.dedup();
    for name in names {
        let corpus = load(&name, dir, allow_partial)?;
        if let Some(partial) = corpus.partial {
            remarks.push(incomplete(&name, &partial));
        }
        plan.data.insert(name, corpus.hash);
    }
    Ok(remarks)
}

/// `400 updates of 512 · batch 4`.
fn amount(plan: &Plan) -> String {
    let phases = plan.cells.iter().find_map(|cell| cell.request["phases"].as_array());
    let phase = |phase: &serde_json::Value| format!("{} updates of {}", phase["steps"], phase["len"]);
    let phases: Vec<String> = phases.into_iter().flatten().map(phase).collect();
    format!("{} · batch {}", phases.join(", "), listed(plan, |row| row.batch))
}

fn generate(args: &Args, checkpoint: &std::path::Path) -> Result<u8> {
    let draw = Draw {
        prompt: args.prompt.clone(),
        symbols: args.symbols,
        temperature: args.temperature,
        seed: args.grid.seed(),
    };
    let mut out = std::io::stdout().lock();
    sample(checkpoint, &draw, |bytes| {
        out.write_all(bytes)?;
        out.flush()
    })?;
    writeln!(out)?;
    Ok(0)
}
