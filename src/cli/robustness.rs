//! `effattn robustness`.

use anyhow::Result;

use super::curves::Curves;
use super::export::Exports;
use super::grid::{Grid, Place};
use super::{data_dir, dry, finish, start};
use crate::config::grid::{Counts, Words};
use crate::config::settings::Settings;
use crate::config::units::Seconds;
use crate::data::select::PUNCTUATION;
use crate::protocol::lra::plan::Options;
use crate::protocol::lra::tasks::Reading;
use crate::protocol::robustness::{Perturbation, cells, defaults};
use crate::protocol::{grid, training};
use crate::term::{Term, clock};

const EXAMPLES: &str = "\
Examples:
  effattn robustness --suite ls-table2 --dry-run            what the paper's table takes here
  effattn robustness --model linformer,dp --len 1024 --steps 800 --rate 1e-3 --data-dir ~/data

Models are trained on clean texts (lra's task text or retrieval; a finished run of effattn lra with the same settings under
--output-path is used) and tested on clean and on changed texts, which are the same for every model.";

#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Tasks: text, retrieval
    #[arg(long, value_name = "LIST", help_heading = "Grid")]
    task: Option<Words>,
    #[command(flatten)]
    grid: Grid,
    /// Characters inserted per document; the first is compared with the paper, all make the curve
    #[arg(long, value_name = "LIST", default_value = "10,20,40,80", help_heading = "Texts")]
    insertions: Counts,
    /// The characters that are inserted and deleted
    #[arg(long, value_name = "TEXT", default_value = PUNCTUATION, hide_default_value = true, help_heading = "Texts")]
    characters: String,
    /// Seeds that insertions are repeated with
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..=1000), help_heading = "Texts")]
    perturbation_seeds: u64,
    /// Training steps, instead of the protocol's
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..), help_heading = "Budget")]
    steps: Option<u64>,
    /// So many examples of each split, drawn once
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..), help_heading = "Budget")]
    limit: Option<u64>,
    /// Peak or base learning rate, instead of the protocol's
    #[arg(long, value_name = "RATE", value_parser = super::lra::rate, help_heading = "Budget")]
    rate: Option<f64>,
    /// Text: select weights on a tenth of the training reviews, not on the test split as the sources do
    #[arg(long, help_heading = "Data")]
    strict: bool,
    /// Use data that are incomplete; rows say so
    #[arg(long, help_heading = "Data")]
    allow_partial: bool,
    /// Time between checkpoints: what a kill can cost
    #[arg(long, value_name = "TIME", default_value = "10s", help_heading = "Output")]
    save_every: Seconds,
    #[command(flatten)]
    place: Place,
    #[command(flatten)]
    exports: Exports,
}

pub fn run(args: &Args, term: Term) -> Result<u8> {
    if args.characters.is_empty() || !args.characters.is_ascii() {
        anyhow::bail!(
            "--characters takes ASCII characters, at least one; without the flag all 32 punctuation characters"
        );
    }
    let budget = Settings { task: args.task.clone(), steps: args.steps, limit: args.limit, ..Settings::NONE };
    let grid = grid::resolve(args.grid.flags(&args.place, budget), &defaults())?;
    let ready = start::ready(&grid.settings)?;
    let reading = Reading { strict: args.strict, allow_partial: args.allow_partial, keep_close: false };
    let options = Options { quick: false, rate: args.rate, reading };
    let perturbation = Perturbation {
        insertions: args.insertions.0.clone(),
        characters: args.characters.clone(),
        seeds: args.perturbation_seeds,
    };
    let cells = cells(&grid, (options, &perturbation), ready.threads, &args.place.output_path)?;
    let (cells, trials): (Vec<_>, Vec<_>) = cells.into_iter().unzip();
    let mut plan = start::plan("robustness", &grid, &ready, cells);
    if args.place.dry_run {
        args.exports.check()?;
        return dry::tell(&plan, &args.exports, &term);
    }
    start::folders(&args.place, &args.exports)?;
    let dir = args.place.data_dir.clone().unwrap_or_else(data_dir::default_dir);
    let remarks = super::lra::data(&mut plan, &dir, reading)?;
    term.say(&super::lra::header(&plan, ready.memory_limit));
    for (task, remark) in remarks {
        term.say(&format!("{task}: incomplete data ({remark}); rows say which share of the protocol it is"));
    }
    for (cell, trial) in plan.cells.iter().zip(&trials) {
        match trial.as_ref().and_then(|trial| trial.found()) {
            Some(folder) => term.say(&format!("{}: trained before, in {}", cell.key, folder.display())),
            None => term.say(&format!("{}: is trained first, about {}", cell.key, clock(cell.seconds))),
        }
    }
    let mut session = start::session(&plan, &args.place, &ready, None, term)?;
    let left: f64 = plan.cells.iter().filter(|cell| !session.is_done(cell)).map(|cell| cell.seconds).sum();
    session.term.say(&format!("about {} to {}", clock(left), session.path().display()));
    session.term.begin(plan.seconds());
    let curves = Curves {
        command: "robustness",
        measure: "validation accuracy, %",
        value: |score| score.value,
        folder: Curves::folder(&args.place),
    };
    let result =
        training::conduct(&plan, &trials, (&dir, args.save_every.0), &mut session, |all| curves.draw(all));
    finish::finish(session, result, grid.suite.as_ref(), &args.place, &args.exports)
}
