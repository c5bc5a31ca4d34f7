//! `effattn speed`.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use super::export::Exports;
use super::grid::{Grid, Place};
use super::{dry, finish, start};
use crate::config::settings::Settings;
use crate::config::units::Seconds;
use crate::protocol::speed::plan::{Request, cells, defaults};
use crate::protocol::{gate, grid, speed};
use crate::record::file;
use crate::report::reference::{self, Reference};
use crate::run::plan::Plan;
use crate::run::session::Session;
use crate::term::{Term, clock};

const EXAMPLES: &str = "\
Examples:
  effattn speed                                       Table 5's mechanisms and ls at 1024 to 4096, minutes
  effattn speed --quick                               short lengths, about a minute
  effattn speed --len 1024..8192 --model full,cosformer,ls:w=16
  effattn speed --suite cos-table5 --max-time 5s --min-runs 3
  effattn speed --mode infer --export-json - | jq '.rows[0]'

A value is the median over the steps of a cell; its 95 % interval is given by order statistics (Student's t
below six steps). Cells of one length, batch and pass take turns in processes of their own.";

#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    #[command(flatten)]
    grid: Grid,
    /// Short lengths and little time; says so
    #[arg(long, help_heading = "Budget")]
    quick: bool,
    /// Steps before the clock starts (at most as long as --max-time)
    #[arg(long, value_name = "N", help_heading = "Budget")]
    warmup: Option<u64>,
    /// Most measured steps per cell
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..), help_heading = "Budget")]
    runs: Option<u64>,
    /// Fewest measured steps per cell, whatever the time
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..), help_heading = "Budget")]
    min_runs: Option<u64>,
    /// Measuring time per cell, such as 2s
    #[arg(long, value_name = "TIME", help_heading = "Budget")]
    max_time: Option<Seconds>,
    /// Another program's numbers beside ours: JSON lines of benches/peer/torch_speed.py, or CSV with its columns
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    reference: Option<PathBuf>,
    #[command(flatten)]
    place: Place,
    #[command(flatten)]
    exports: Exports,
}

impl Args {
    /// A suite of measurements, asked for by another command.
    pub fn of(grid: Grid, place: Place, exports: Exports) -> Self {
        let (warmup, runs, min_runs, max_time, reference) = (None, None, None, None, None);
        Self { grid, quick: false, warmup, runs, min_runs, max_time, reference, place, exports }
    }

    fn budget(&self) -> Settings {
        Settings {
            warmup: self.warmup,
            runs: self.runs,
            min_runs: self.min_runs,
            max_time: self.max_time,
            ..Settings::NONE
        }
    }
}

pub fn run(args: &Args, term: Term) -> Result<u8> {
    let references = args.reference.as_deref().map(references).transpose()?;
    let flags = args.grid.flags(&args.place, args.budget());
    let grid = grid::resolve(flags, &defaults(args.quick))?;
    let ready = start::ready(&grid.settings)?;
    let (plan, requests) = plan(&grid, &ready)?;
    if args.place.dry_run {
        args.exports.check()?;
        return dry::run(&plan, &requests, &ready, &args.exports, &term);
    }
    start::folders(&args.place, &args.exports)?;
    let mut plan = plan;
    let text = start::text(&args.place, &mut plan)?;
    term.say(&start::header(&plan, &grid.settings, &ready));
    if args.quick {
        term.say(
            "--quick: eight mechanisms, lengths up to 1024, 0.25 s per cell, where nothing else is said",
        );
    }
    let mut session = start::session(&plan, &args.place, &ready, text.as_ref(), term)?;
    if let Some(references) = references {
        let path = session.path().join(reference::FILE);
        file::write(&path, reference::to_text(&references)?.as_bytes())
            .with_context(|| path.display().to_string())?;
    }
    let result = conduct(&plan, &requests, &mut session);
    finish::finish(session, result, grid.suite.as_ref(), &args.place, &args.exports)
}

fn references(path: &Path) -> Result<Vec<Reference>> {
    let name = || format!("--reference {}", path.display());
    let text = std::fs::read_to_string(path).with_context(name)?;
    reference::parse(&text).with_context(name)
}

fn conduct(
    plan: &Plan,
    requests: &[Option<Request>],
    session: &mut Session,
) -> std::result::Result<(), crate::run::RunError> {
    let left: f64 = plan.cells.iter().filter(|cell| !session.is_done(cell)).map(|cell| cell.seconds).sum();
    let cells = plan.cells.len() - session.finished();
    session.term.say(&format!("{cells} cells, about {} to {}", clock(left), session.path().display()));
    let red = check(plan, requests, session)?;
    session.term.begin(plan.seconds());
    speed::conduct(plan, requests, &red, session)
}

/// Mechanisms whose shipped golden files are red.
fn check(
    plan: &Plan,
    requests: &[Option<Request>],
    session: &Session,
) -> std::result::Result<HashMap<String, String>, crate::run::RunError> {
    let waiting = plan.cells.iter().zip(requests).filter(|(cell, _)| !session.is_done(cell));
    let mut models = Vec::new();
    let mut first = None;
    for (cell, request) in waiting {
        if let Some(request) = request {
            first = first.or(Some(&request.spec));
            if !models.contains(&cell.row.model) {
                models.push(cell.row.model.clone());
            }
        }
    }
    let Some(spec) = first else { return Ok(HashMap::new()) };
    let count = models.len();
    let (kernel, device) = (spec.kernel, spec.device);
    let answer = gate::conduct(gate::Request { models, kernel, device }, session)?;
    session.term.say(&answer.summary(count));
    Ok(answer.red)
}

fn plan(grid: &grid::Grid, ready: &start::Ready) -> Result<(Plan, Vec<Option<Request>>)> {
    let (plan_cells, requests) = cells(grid, ready.threads)?.into_iter().unzip();
    Ok((start::plan("speed", grid, ready, plan_cells), requests))
}
