//! `effattn lra`.

use std::collections::BTreeMap;

use anyhow::Result;

use super::curves::Curves;
use super::export::Exports;
use super::grid::{Grid, Place};
use super::{data_dir, dry, finish, start};
use crate::config::grid::Words;
use crate::config::settings::Settings;
use crate::config::units::{Bytes, Seconds};
use crate::protocol::grid;
use crate::protocol::lra::plan::{Options, QUICK, Request, cells, defaults, priced};
use crate::protocol::lra::tasks::{self, Reading};
use crate::protocol::training;
use crate::run::plan::Plan;
use crate::term::{Term, clock};

const EXAMPLES: &str = "\
Examples:
  effattn lra --quick                                   learns ListOps visibly in about a minute
  effattn lra --task listops --model ls                 Transformer-LS Table 1: 5,000 steps, about an hour
  effattn lra --task text --model ls,full --steps 2000 --data-dir ~/data
  effattn lra --suite ls-table1 --task listops --seeds 1234..1237 --dry-run

ListOps and Pathfinder are generated where LRA's own files are not in --data-dir. A killed or stopped run goes on from its last
checkpoint when the same command is given again. Accuracy is that of the test split with the weights of the best
evaluation, in percent.";

#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Tasks: listops, text, retrieval, image, pathfinder32, pathfinder64, pathfinder128
    #[arg(long, value_name = "LIST", help_heading = "Grid")]
    task: Option<Words>,
    #[command(flatten)]
    grid: Grid,
    /// Short documents, few steps and a high rate, so that something is learned in minutes; says so
    #[arg(long, help_heading = "Budget")]
    quick: bool,
    /// Training steps, instead of the protocol's
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..), help_heading = "Budget")]
    steps: Option<u64>,
    /// So many examples of each split, drawn once
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..), help_heading = "Budget")]
    limit: Option<u64>,
    /// Peak (one cycle) or base learning rate, instead of the protocol's
    #[arg(long, value_name = "RATE", value_parser = rate, help_heading = "Budget")]
    rate: Option<f64>,
    /// Text: select weights on a tenth of the training reviews, not on the test split as the sources do
    #[arg(long, help_heading = "Data")]
    strict: bool,
    /// Use data that are incomplete; rows say so
    #[arg(long, help_heading = "Data")]
    allow_partial: bool,
    /// ListOps: keep closing brackets as tokens (today's LRA), which Table 1 did not
    #[arg(long, help_heading = "Data")]
    keep_close: bool,
    /// Time between checkpoints: what a kill can cost
    #[arg(long, value_name = "TIME", default_value = "10s", help_heading = "Output")]
    save_every: Seconds,
    #[command(flatten)]
    place: Place,
    #[command(flatten)]
    exports: Exports,
}

/// A learning rate.
///
/// # Errors
/// Text that is none.
pub fn rate(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(rate) if rate > 0.0 && rate <= 10.0 => Ok(rate),
        _ => Err("expected a number above 0 and up to 10, such as 1e-4".to_owned()),
    }
}

pub fn run(args: &Args, term: Term) -> Result<u8> {
    let budget = Settings { task: args.task.clone(), steps: args.steps, limit: args.limit, ..Settings::NONE };
    let grid = grid::resolve(args.grid.flags(&args.place, budget), &defaults(args.quick))?;
    let ready = start::ready(&grid.settings)?;
    let reading =
        Reading { strict: args.strict, allow_partial: args.allow_partial, keep_close: args.keep_close };
    let options = Options { quick: args.quick, rate: args.rate, reading };
    let (cells, requests): (Vec<_>, Vec<_>) = cells(&grid, options, ready.threads)?.into_iter().unzip();
    let mut plan = start::plan("lra", &grid, &ready, cells);
    if args.place.dry_run {
        args.exports.check()?;
        price(&mut plan, &requests, &ready)?;
        return dry::tell(&plan, &args.exports, &term);
    }
    start::folders(&args.place, &args.exports)?;
    let dir = args.place.data_dir.clone().unwrap_or_else(data_dir::default_dir);
    let remarks = data(&mut plan, &dir, reading)?;
    term.say(&header(&plan, ready.memory_limit));
    for (task, remark) in remarks {
        term.say(&format!("{task}: incomplete data ({remark}); rows say which share of the protocol it is"));
    }
    if args.quick {
        let (steps, len, rate) = QUICK;
        term.say(&format!(
            "--quick: {steps} steps on the first {len} tokens at a rate of {rate:e}, where nothing else is said: not the paper's protocol"
        ));
    }
    let mut session = start::session(&plan, &args.place, &ready, None, term)?;
    let left: f64 = plan.cells.iter().filter(|cell| !session.is_done(cell)).map(|cell| cell.seconds).sum();
    let count = plan.cells.len() - session.finished();
    let runs = if count == 1 { "run" } else { "runs" };
    session.term.say(&format!("{count} {runs}, about {} to {}", clock(left), session.path().display()));
    session.term.begin(plan.seconds());
    let curves = Curves {
        command: "lra",
        measure: "validation accuracy, %",
        value: |score| score.value,
        folder: Curves::folder(&args.place),
    };
    let result =
        training::conduct(&plan, &requests, (&dir, args.save_every.0), &mut session, |all| curves.draw(all));
    finish::finish(session, result, grid.suite.as_ref(), &args.place, &args.exports)
}

/// Prices the cells by a probe step of each mechanism.
fn price(plan: &mut Plan, requests: &[Option<Request>], ready: &start::Ready) -> Result<()> {
    for (cell, request) in plan.cells.iter_mut().zip(requests) {
        let Some(request) = request else { continue };
        let rate = dry::rate(&request.spec, request.spec.len, ready)?;
        if let Some(seconds) = rate.and_then(|rate| priced(request, rate)) {
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
    let mut tasks: Vec<String> = plan.cells.iter().filter_map(|cell| cell.row.task.clone()).collect();
    tasks.dedup();
    for task in tasks {
        let data = tasks::load(&task, dir, reading)?;
        plan.data.insert(task.clone(), data.hash().to_owned());
        if let Some(partial) = data.partial() {
            remarks.insert(task, partial.to_owned());
        }
    }
    Ok(remarks)
}

/// `effattn lra · listops · ls-lra · 5000 steps · batch 32 · length 2048 · 2 threads · limit 20 GiB`.
pub fn header(plan: &Plan, limit: u64) -> String {
    let list = |of: &dyn Fn(&crate::record::Row) -> Option<String>| {
        let mut all: Vec<String> = plan.cells.iter().filter_map(|cell| of(&cell.row)).collect();
        all.dedup();
        all.join(",")
    };
    let (tasks, presets) = (list(&|row| row.task.clone()), list(&|row| row.preset.clone()));
    let steps = plan.cells.iter().filter_map(|cell| cell.request["steps"].as_u64()).max().unwrap_or(0);
    let (batch, len) =
        (list(&|row| row.batch.map(|x| x.to_string())), list(&|row| row.len.map(|x| x.to_string())));
    let (threads, limit) = (plan.threads, Bytes(limit));
    format!(
        "effattn lra · {tasks} · {presets} · {steps} steps · batch {batch} · length {len} · {} · {threads} threads · limit {limit}",
        plan.device
    )
}
