//! `effattn memory`.

use anyhow::Result;

use super::export::Exports;
use super::grid::{Grid, Place};
use super::{dry, finish, start};
use crate::config::settings::Settings;
use crate::config::units::Bytes;
use crate::protocol::grid;
use crate::protocol::memory::{self, cells, defaults};
use crate::term::{Term, clock};

const EXAMPLES: &str = "\
Examples:
  effattn memory --len 1024..16384 --model full,ls --batch 1,4
  effattn memory --model all --mode train --fit 2GiB      the longest length that fits, per mechanism
  effattn memory --kernel composed --model full           what the papers' codes would need

Bytes are live bytes counted by the allocator: parameters, moments, activations, inputs. One worker at a time.";

#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    #[command(flatten)]
    grid: Grid,
    /// Look for the longest length whose step stays below this, such as 2GiB (--len bounds it)
    #[arg(long, value_name = "SIZE", help_heading = "Grid")]
    fit: Option<Bytes>,
    #[command(flatten)]
    place: Place,
    #[command(flatten)]
    exports: Exports,
}

pub fn run(args: &Args, term: Term) -> Result<u8> {
    let flags = args.grid.flags(&args.place, Settings::NONE);
    let grid = grid::resolve(flags, &defaults(args.fit.is_some()))?;
    let ready = start::ready(&grid.settings)?;
    if let Some(fit) = args.fit
        && fit.0 > ready.memory_limit
    {
        let limit = Bytes(ready.memory_limit);
        anyhow::bail!(
            "--fit {fit} is more than the memory limit of {limit}; choose less, or raise --memory-limit"
        );
    }
    let (cells, requests): (Vec<_>, Vec<_>) = cells(&grid, args.fit, ready.threads)?.into_iter().unzip();
    let mut plan = start::plan("memory", &grid, &ready, cells);
    if args.place.dry_run {
        args.exports.check()?;
        return dry::tell(&plan, &args.exports, &term);
    }
    start::folders(&args.place, &args.exports)?;
    let text = start::text(&args.place, &mut plan)?;
    term.say(&start::header(&plan, &grid.settings, &ready));
    let mut session = start::session(&plan, &args.place, &ready, text.as_ref(), term)?;
    let left: f64 = plan.cells.iter().filter(|cell| !session.is_done(cell)).map(|cell| cell.seconds).sum();
    let count = plan.cells.len() - session.finished();
    session.term.say(&format!("{count} cells, about {} to {}", clock(left), session.path().display()));
    session.term.begin(plan.seconds());
    let result = memory::conduct(&plan, &requests, &mut session);
    finish::finish(session, result, grid.suite.as_ref(), &args.place, &args.exports)
}
