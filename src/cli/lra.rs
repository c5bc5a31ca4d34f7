//! `effattn lra`.

use std::collections::BTreeMap;

use anyhow::Result;

use super::grid::Grid;
use super::known::Known;
use super::training::{Curves, Flags, header, incomplete, listed};
use super::{dry, finish, start};
use crate::config::grid::Words;
use crate::config::settings::Settings;
use crate::protocol::grid;
use crate::protocol::lra::floor;
use crate::protocol::lra::plan::{Options, QUICK, Request, cells, defaults, priced};
use crate::protocol::lra::tasks::{self, Reading};
use crate::run::RunError;
use crate::run::plan::{Cell, Plan};
use crate::term::Term;

const EXAMPLES: &str = "\
Examples:
  effattn lra --quick                                   learns ListOps visibly in about a minute
  effattn lra --task listops --model ls                 Transformer-LS Table 1: 5,000 steps, about an hour
  effattn lra --task text --model ls,full --steps 2000 --data-dir ~/data
  effattn lra --suite ls-table1 --task listops --seeds 1234..1237 --dry-run
  effattn lra --floor --task listops,text               what simple rules reach on the same test splits

ListOps and Pathfinder are generated where LRA's own files are not in --data-dir. A killed or stopped run goes on from its last
checkpoint when the same command is given again. Accuracy is that of the test split with the weights of the best
evaluation, in percent.";

#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    #[arg(long, value_name = "LIST", help_heading = "Grid", help = format!("Tasks: {}", tasks::names().join(", ")),
        value_parser = Known::<Words>::new(tasks::names), hide_possible_values = true)]
    task: Option<Words>,
    #[command(flatten)]
    grid: Grid,
    /// Short documents, few steps and a high rate, so that something is learned in minutes; says so
    #[arg(long, help_heading = "Budget")]
    quick: bool,
    /// So many examples of each split, drawn once
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..), help_heading = "Budget")]
    limit: Option<u64>,
    /// Text: select weights on a tenth of the training reviews, not on the test split as the sources do
    #[arg(long, help_heading = "Data")]
    strict: bool,
    /// ListOps: keep closing brackets as tokens (today's LRA), which Table 1 did not
    #[arg(long, help_heading = "Data")]
    keep_close: bool,
    /// Train nothing: what simple rules reach on the same test split (the largest class, the root operator, runs of bytes)
    #[arg(long, help_heading = "Data")]
    floor: bool,
    #[command(flatten)]
    flags: Flags,
}

pub fn run(args: &Args, term: Term) -> Result<u8> {
    let budget =
        Settings { task: args.task.clone(), steps: args.flags.steps, limit: args.limit, ..Settings::NONE };
    let grid = grid::resolve(args.grid.flags(&args.flags.place, budget), &defaults(args.quick))?;
    let ready = start::ready(&grid.settings)?;
    let reading =
        Reading { strict: args.strict, allow_partial: args.flags.allow_partial, keep_close: args.keep_close };
    if args.floor {
        return floors(args, &grid, &ready, reading, term);
    }
    let options = Options { quick: args.quick, rate: args.flags.rate, reading };
    let (cells, requests): (Vec<_>, Vec<_>) = cells(&grid, options, ready.threads)?.into_iter().unzip();
    let mut plan = start::plan("lra", &grid, &ready, cells);
    if args.flags.place.dry_run {
        args.flags.exports.check()?;
        price(&mut plan, &requests, &ready)?;
        return dry::tell(&plan, &args.flags.exports, &term);
    }
    start::folders(&args.flags.place, &args.flags.exports)?;
    let dir = args.flags.data_dir();
    let remarks = data(&mut plan, &dir, reading)?;
    term.say(&header(&plan, &amount(&plan), ready.memory_limit));
    for (task, remark) in remarks {
        term.say(&incomplete(&task, &remark));
    }
    if args.quick {
        let (steps, len, rate) = QUICK;
        term.say(&format!(
            "--quick: {steps} steps on the first {len} tokens at a rate of {rate:e}, where nothing else is said: not the paper's protocol"
        ));
    }
    let curves = Curves { command: "lra", measure: "validation accuracy, %", value: |score| score.value };
    args.flags.run((&plan, &requests), &ready, &grid, &curves, term)
}

/// Scores the simple rules for the tasks.
fn floors(args: &Args, grid: &grid::Grid, ready: &start::Ready, reading: Reading, term: Term) -> Result<u8> {
    let tasks = grid.settings.task.clone().unwrap_or(Words(Vec::new()));
    let (cells, rules): (Vec<_>, Vec<_>) = floor::cells(&tasks, args.limit)?.into_iter().unzip();
    let mut plan = start::plan("lra", grid, ready, cells);
    plan.name = "floor".to_owned();
    if args.flags.place.dry_run {
        args.flags.exports.check()?;
        return dry::tell(&plan, &args.flags.exports, &term);
    }
    start::folders(&args.flags.place, &args.flags.exports)?;
    let dir = args.flags.data_dir();
    for (task, remark) in data(&mut plan, &dir, reading)? {
        term.say(&incomplete(&task, &remark));
    }
    let mut session = start::session(&plan, &args.flags.place, ready, None, term)?;
    let mut result = Ok(());
    for (cell, rule) in plan.cells.iter().zip(rules) {
        let Some(task) = cell.row.task.as_ref().filter(|_| !session.is_done(cell)) else { continue };
        if session.stop.is_set() {
            result = Err(RunError::Stopped);
            break;
        }
        session.term.say(&format!("{task}: {}, {}", rule.name, rule.about));
        let data = tasks::load(task, &dir, reading)?;
        session.record(cell, floor::rows(cell, rule, data.as_ref(), args.limit), Vec::new())?;
    }
    finish::finish(session, result, None, &args.flags.place, &args.flags.exports)
}

/// Prices the cells by a probe step of each mechanism.
fn price(plan: &mut Plan, requests: &[Option<Request>], ready: &start::Ready) -> Result<()> {
    for (cell, request) in plan.cells.iter_mut().zip(requests) {
        let Some(request) = request else { continue };
        let rate = dry::rate(&request.spec, request.spec.len, ready)?;
        if let Some(seconds) = rate.and_then(|rate| priced(request, cell.row.flops?, rate)) {
            cell.seconds = seconds;
        }
    }
    Ok(())
}

/// Reads every task's data once: their hashes belong to the run. Gives what is missing of them.
///
/// # Errors
/// Data that are missing, damaged, or incomplete without permission.
pub fn data(plan: &mut Plan, dir: &std::path::Path, reading: Reading) -> Result<BTreeMap<String, String>> {
    let mut remarks = BTreeMap::new();
    // a preset may read a task in its own way
    let own = |cell: &Cell| serde_json::from_value(cell.request["reading"].clone()).unwrap_or(reading);
    let mut tasks: Vec<(String, Reading)> =
        plan.cells.iter().filter_map(|cell| Some((cell.row.task.clone()?, own(cell)))).collect();
    tasks.dedup();
    for (task, reading) in tasks {
        let data = tasks::load(&task, dir, reading)?;
        plan.data.insert(task.clone(), data.hash().to_owned());
        if let Some(partial) = data.partial() {
            remarks.insert(task, partial.to_owned());
        }
    }
    Ok(remarks)
}

/// `5000 steps · batch 32 · length 2048`.
pub fn amount(plan: &Plan) -> String {
    let steps = plan.cells.iter().filter_map(|cell| cell.request["steps"].as_u64()).max().unwrap_or(0);
    format!(
        "{steps} steps · batch {} · length {}",
        listed(plan, |row| row.batch),
        listed(plan, |row| row.len)
    )
}
