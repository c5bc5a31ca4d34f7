//! `effattn merge`.

use std::path::PathBuf;

use anyhow::Result;

use super::command_line::command_line;
use super::interrupt::stop_on_ctrl_c;
use crate::protocol;
use crate::run::merge::{Merged, merge};
use crate::run::shard::{Shard, without_shard};
use crate::term::{self, Term, Warning};
use effattn_record::text::plural;

const EXAMPLES: &str = "\
Examples:
  # Join shards in place
  effattn merge results/lra/plan-0123456789ab
  # Join what two machines measured
  effattn merge a/results b/results -o all

The result is an ordinary run: report, plot and compare read it, and the same command continues it. Where a cell was measured on two machines, both results are kept; two results of one training run must be identical. The exit code is 1 if cells are missing or failed.";

/// Names of cells that are said at most.
const NAMED: usize = 3;
/// Commands that are printed at most.
const LINES: usize = 12;

#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Folders of shards or runs, or folders above them
    #[arg(required = true, value_name = "DIR")]
    folders: Vec<PathBuf>,
    /// Results folder for the merged run [default: that of the shards; results for whole runs]
    #[arg(short, long, value_name = "DIR")]
    output_path: Option<PathBuf>,
}

/// Whether the command called `name` trains.
fn keeps(name: &str) -> bool {
    protocol::find(name).is_some_and(|protocol| protocol.trains())
}

pub fn run(args: &Args, term: &Term) -> Result<u8> {
    let merged = merge(&args.folders, args.output_path.as_deref(), keeps, &stop_on_ctrl_c())?;
    merged.remarks.iter().for_each(|remark| term.warn(&Warning::Other(remark.clone())));
    term.info(&format!("{} of {} cells to {}", merged.done, merged.cells, merged.folder.display()));
    term.info(&format!("rows: {}", merged.folder.join("rows.csv").display()));
    if merged.missing.is_empty() {
        return Ok(0);
    }
    tell_missing(&merged, term);
    Ok(term::FAILED)
}

/// What is missing, and the commands that run it.
fn tell_missing(merged: &Merged, term: &Term) {
    let missing = merged.cells - merged.done;
    term.info(&left(missing, merged.failed));
    let numbers: Vec<usize> = merged.missing.keys().flatten().map(|shard| shard.index).collect();
    if !numbers.is_empty() {
        term.info(&format!("shards that have cells left: {}", ranges(&numbers)));
    }
    for (shard, cells) in merged.missing.iter().take(LINES) {
        let names = cells.iter().take(NAMED).map(String::as_str).collect::<Vec<_>>().join("; ");
        let more =
            if cells.len() > NAMED { format!("; and {} more", cells.len() - NAMED) } else { String::new() };
        term.info(&format!("  {}    # {names}{more}", command(&merged.manifest.argv, *shard)));
    }
    if merged.missing.len() > LINES {
        term.info(&format!("  and {} more shards in the same way", merged.missing.len() - LINES));
    }
}

/// In words, how many cells are missing and failed.
fn left(missing: usize, failed: usize) -> String {
    let cells = |count: usize| plural(count as u64, "cell");
    let are = if missing == 1 { "is" } else { "are" };
    match (missing, failed) {
        (missing, 0) => format!("{} {are} missing; run", cells(missing)),
        (0, failed) => format!("{} failed; run again", cells(failed)),
        (missing, failed) => format!("{} {are} missing and {failed} failed; run", cells(missing)),
    }
}

/// `1,3-5` as `sbatch --array` takes it: the `numbers` stand in order.
fn ranges(numbers: &[usize]) -> String {
    let mut runs: Vec<(usize, usize)> = Vec::new();
    for &number in numbers {
        match runs.last_mut() {
            Some((_, last)) if *last + 1 == number => *last = number,
            _ => runs.push((number, number)),
        }
    }
    let text = |(first, last): &(usize, usize)| {
        if first == last { first.to_string() } else { format!("{first}-{last}") }
    };
    runs.iter().map(text).collect::<Vec<_>>().join(",")
}

/// The command that runs `shard` of what `argv` asks for.
pub fn command(argv: &[String], shard: Option<Shard>) -> String {
    let shard = shard.map(|shard| ["--shard".to_owned(), shard.to_string()]);
    command_line(without_shard(argv).into_iter().chain(shard.into_iter().flatten()))
}

#[cfg(test)]
mod tests {
    use super::{left, ranges};

    #[test]
    fn one_cell_is_missing_and_two_are() {
        assert_eq!(left(1, 0), "1 cell is missing; run");
        assert_eq!(left(2, 1), "2 cells are missing and 1 failed; run");
        assert_eq!(left(0, 1), "1 cell failed; run again");
    }

    #[test]
    fn numbers_are_what_sbatch_takes() {
        assert_eq!(ranges(&[1, 2, 5, 7, 8, 9]), "1-2,5,7-9");
        assert_eq!(ranges(&[4]), "4");
    }
}
