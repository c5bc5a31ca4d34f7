//! `effattn robustness`.

use anyhow::Result;

use super::grid::Grid;
use super::known::Known;
use super::training::{Curves, Flags, header, incomplete};
use super::{dry, start};
use crate::config::grid::{Counts, Words};
use crate::config::settings::Settings;
use crate::data::select::PUNCTUATION;
use crate::protocol::grid;
use crate::protocol::lra::plan::Options;
use crate::protocol::lra::tasks::Reading;
use crate::protocol::robustness::{Perturbation, cells, defaults, tasks};
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
    #[arg(long, value_name = "LIST", help_heading = "Grid", help = format!("Tasks: {}", tasks().join(", ")),
        value_parser = Known::<Words>::new(tasks), hide_possible_values = true)]
    task: Option<Words>,
    #[command(flatten)]
    grid: Grid,
    /// Characters inserted per document; 10 is compared with the paper, all make the curve
    #[arg(long, value_name = "LIST", default_value = "10,20,40,80", help_heading = "Texts")]
    insertions: Counts,
    /// The characters that are inserted and deleted
    #[arg(long, value_name = "TEXT", default_value = PUNCTUATION, hide_default_value = true, help_heading = "Texts")]
    characters: String,
    /// Seeds that insertions are repeated with
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..=1000), help_heading = "Texts")]
    perturbation_seeds: u64,
    /// So many examples of each split, drawn once
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..), help_heading = "Budget")]
    limit: Option<u64>,
    /// Text: select weights on a tenth of the training reviews, not on the test split as the sources do
    #[arg(long, help_heading = "Data")]
    strict: bool,
    #[command(flatten)]
    flags: Flags,
}

pub fn run(args: &Args, term: Term) -> Result<u8> {
    if args.characters.is_empty() || !args.characters.is_ascii() {
        anyhow::bail!(
            "--characters takes ASCII characters, at least one; without the flag all 32 punctuation characters"
        );
    }
    let budget =
        Settings { task: args.task.clone(), steps: args.flags.steps, limit: args.limit, ..Settings::NONE };
    let grid = grid::resolve(args.grid.flags(&args.flags.place, budget), &defaults())?;
    let ready = start::ready(&grid.settings)?;
    let reading = Reading { strict: args.strict, allow_partial: args.flags.allow_partial, keep_close: false };
    let options = Options { quick: false, rate: args.flags.rate, reading };
    let perturbation = Perturbation {
        insertions: args.insertions.0.clone(),
        characters: args.characters.clone(),
        seeds: args.perturbation_seeds,
    };
    let cells = cells(&grid, (options, &perturbation), ready.threads, &args.flags.place.output_path)?;
    let (cells, trials): (Vec<_>, Vec<_>) = cells.into_iter().unzip();
    let mut plan = start::plan("robustness", &grid, &ready, cells);
    if args.flags.place.dry_run {
        args.flags.exports.check()?;
        return dry::tell(&plan, &args.flags.exports, &term);
    }
    start::folders(&args.flags.place, &args.flags.exports)?;
    let dir = args.flags.data_dir();
    let remarks = super::lra::data(&mut plan, &dir, reading)?;
    term.say(&header(&plan, &super::lra::amount(&plan), ready.memory_limit));
    for (task, remark) in remarks {
        term.say(&incomplete(&task, &remark));
    }
    for (cell, trial) in plan.cells.iter().zip(&trials) {
        match trial.as_ref().and_then(|trial| trial.found()) {
            Some(folder) => term.say(&format!("{}: trained before, in {}", cell.key, folder.display())),
            None => term.say(&format!("{}: is trained first, about {}", cell.key, clock(cell.seconds))),
        }
    }
    let curves =
        Curves { command: "robustness", measure: "validation accuracy, %", value: |score| score.value };
    args.flags.run((&plan, &trials), &ready, &grid, &curves, term)
}
