//! `effattn status`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use anyhow::{Result, ensure};

use super::stored_runs::StoredRun;
use super::words;
use crate::protocol::training::worker::steps_made;
use crate::run::claim::{Claim, server_time};
use crate::run::folder::is_locked;
use crate::run::manifest::State;
use crate::run::merge::{MergeInput, ShardedRun, owners};
use crate::run::plan::folder;
use crate::run::shard::{Shard, shards};
use crate::term::{self, Term, clock};
use effattn_record::Outcome;
use effattn_record::config::units::Seconds;
use effattn_record::report::table::Table;
use effattn_record::text::plural;

const EXAMPLES: &str = "\
Examples:
  # Runs that have cells left
  effattn status
  # One run, shard by shard
  effattn status results/lra/plan-0123456789ab
  # Every run, again every minute until all are done
  effattn status --all --watch 1m

Everything is read from files: no scheduler is asked, and the folder may be read-only.";

/// Lines of shards that are shown of a run.
const MOST: usize = 40;
/// Trainings that have begun of which that is said.
const BEGUN: usize = 3;
/// Words of a cell's key that name it: task, mechanism, preset and seed; then follows what is unusual.
const NAMED: usize = 4;

#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Folder of a run, of its shards, or of results
    #[arg(value_name = "DIR", default_value = "results")]
    folder: PathBuf,
    /// Include runs and shards that are done
    #[arg(long)]
    all: bool,
    /// Print the status again at this interval until nothing is left to do
    #[arg(long, value_name = "TIME", num_args = 0..=1, default_missing_value = "30s")]
    watch: Option<Seconds>,
}

/// What some cells are at.
#[derive(Clone, Copy, Default)]
struct CellCounts {
    done: usize,
    failed: usize,
    missing: usize,
    /// Weight of cells that are done, and of the others.
    weight: (f64, f64),
    /// Seconds that finished cells took, and their weight.
    took: (f64, f64),
    running: bool,
}

impl CellCounts {
    fn add(&mut self, weight: f64, outcome: Option<Outcome>, took: Option<f64>) {
        match outcome {
            Some(outcome) if outcome.is_final() => self.done += 1,
            Some(_) => self.failed += 1,
            None => self.missing += 1,
        }
        let part =
            if outcome.is_some_and(Outcome::is_final) { &mut self.weight.0 } else { &mut self.weight.1 };
        *part += weight;
        if let Some(took) = took.filter(|_| outcome == Some(Outcome::Ok)) {
            self.took = (self.took.0 + took, self.took.1 + weight);
        }
    }

    fn plus(self, other: &Self) -> Self {
        Self {
            done: self.done + other.done,
            failed: self.failed + other.failed,
            missing: self.missing + other.missing,
            weight: (self.weight.0 + other.weight.0, self.weight.1 + other.weight.1),
            took: (self.took.0 + other.took.0, self.took.1 + other.took.1),
            running: self.running || other.running,
        }
    }

    fn open(&self) -> usize {
        self.failed + self.missing
    }

    fn word(&self) -> &'static str {
        match (self.running, self.open(), self.failed) {
            (true, ..) => "running",
            (false, 0, _) => "done",
            (false, _, 0) => "waiting",
            (false, ..) => "stopped",
        }
    }

    /// Seconds that the open cells take, where finished cells took `rate` seconds for each of their weight.
    fn left(&self, rate: f64) -> f64 {
        self.weight.1 * rate
    }
}

/// A run and its shards.
struct RunStatus {
    whole: ShardedRun,
    parts: BTreeMap<Option<Shard>, CellCounts>,
    total: CellCounts,
}

impl RunStatus {
    fn of(whole: ShardedRun) -> Self {
        let folders = shards(&whole.folder);
        let dealt = whole
            .planned
            .as_ref()
            .and_then(|planned| owners(planned, folders.iter().map(|(shard, _)| shard)));
        let outcomes = whole.outcomes();
        let entries = whole.sources.iter().flat_map(|run| &run.entries);
        let took: std::collections::HashMap<&str, f64> =
            entries.filter_map(|entry| Some((entry.cell.as_str(), entry.seconds?))).collect();
        let mut parts: BTreeMap<Option<Shard>, CellCounts> = BTreeMap::new();
        if let Some((count, _)) = dealt {
            parts.extend((1..=count).map(|index| (Some(Shard { index, count }), CellCounts::default())));
        }
        for (index, cell) in whole.cells().into_iter().enumerate() {
            let owner = |(count, owners): &(usize, Vec<usize>)| {
                Some(Shard { index: *owners.get(index)?, count: *count })
            };
            let weight = whole.planned.as_ref().map_or(0.0, |planned| planned.cells[index].seconds);
            let part = parts.entry(dealt.as_ref().and_then(owner)).or_default();
            part.add(weight, outcomes.get(cell).copied(), took.get(cell).copied());
        }
        let now = server_time(&whole.folder);
        for (shard, count) in &mut parts {
            count.running = match shard {
                Some(shard) => is_running(&whole.folder, &folders, *shard, now),
                None => is_locked(&whole.folder),
            };
        }
        let total = parts.values().fold(CellCounts::default(), |sum, part| sum.plus(part));
        drop((outcomes, took));
        Self { whole, parts, total }
    }

    /// Whether nothing is left: every planned cell ended, or the run says so where no plan is there.
    fn is_done(&self) -> bool {
        let closed = || self.whole.sources.iter().all(|run| run.manifest.state == State::Done);
        self.total.open() == 0 && (self.whole.planned.is_some() || closed())
    }

    /// Seconds per weight of the finished cells; 1 where none was timed.
    fn rate(&self) -> f64 {
        let (seconds, weight) = self.total.took;
        if weight > 0.0 && seconds > 0.0 { seconds / weight } else { 1.0 }
    }

    /// The first trainings that are not finished, with the steps that they have made.
    fn begun(&self) -> Vec<String> {
        let outcomes = self.whole.outcomes();
        let open = |cell: &&str| !outcomes.get(cell).is_some_and(|outcome| outcome.is_final());
        let steps = |cell: &str| {
            let made = self.whole.sources.iter().filter_map(|run| steps_made(&folder(&run.folder, cell)));
            let words: Vec<&str> = cell.split(' ').take(NAMED).collect();
            Some(format!("{} has made {}", words.join(" "), plural(made.max()?, "step")))
        };
        self.whole.cells().into_iter().filter(open).filter_map(steps).take(BEGUN).collect()
    }

    /// Where neither plan nor journals say which cells there are: what its rows say. Nothing of other runs.
    fn without_cells(&self) -> Option<String> {
        let Self { whole, .. } = self;
        let run = whole.sources.first().filter(|run| run.lost && whole.planned.is_none())?;
        let rows = match StoredRun::read(&run.folder) {
            Ok(stored) => plural(stored.map_or(0, |stored| stored.rows.len()) as u64, "row"),
            Err(error) => words(&error),
        };
        let state = if run.manifest.state == State::Done { "done" } else { "unfinished" };
        Some(format!(
            "{}: {state}; {rows}; it has neither plan.json nor journal.jsonl, and its cells are not counted",
            whole.folder.display()
        ))
    }

    /// What of its journals is gone or cannot be read: it counts as missing.
    fn damages(&self) -> Vec<String> {
        let lost = |run: &MergeInput| {
            let folder = run.folder.display();
            let known = run.lost && self.whole.planned.is_some();
            known.then(|| format!(
                "{folder} has no journal.jsonl, and its cells count as missing; copy that of its run into it, or see its rows: \
                 effattn report {folder}"
            ))
        };
        self.whole.sources.iter().filter_map(|run| run.damage().or_else(|| lost(run))).collect()
    }

    /// What is printed of it.
    fn text(&self, all: bool) -> String {
        let table = || self.table(all).terminal(term::width());
        self.without_cells().unwrap_or_else(table) + "\n"
    }

    fn table(&self, all: bool) -> Table {
        let rate = self.rate();
        let CellCounts { done, failed, missing, .. } = self.total;
        let cells = done + failed + missing;
        let longest = self.parts.values().map(|part| part.left(rate)).fold(0.0, f64::max);
        let left = match self.total.open() {
            0 => String::new(),
            _ if self.parts.len() > 1 => format!(
                "; about {} of computing left, {} if all shards run at once",
                clock(self.total.left(rate)),
                clock(longest)
            ),
            _ => format!("; about {} left", clock(self.total.left(rate))),
        };
        let mut table = Table {
            title: format!("{}: {done} of {cells} cells done{left}", self.whole.folder.display()),
            columns: ["shard", "state", "done", "failed", "missing", "left"].map(str::to_owned).to_vec(),
            numbers: 4,
            notes: self.damages(),
            ..Table::default()
        };
        let shown = self.parts.iter().filter(|(_, part)| all || part.open() > 0 || part.running);
        let shown: Vec<_> = shown.collect();
        for (shard, part) in shown.iter().take(MOST) {
            let name = shard.map_or_else(|| "all".to_owned(), |shard| shard.to_string());
            let left = if part.open() == 0 { "-".to_owned() } else { clock(part.left(rate)) };
            let numbers = [part.done, part.failed, part.missing].map(|number| number.to_string());
            table
                .rows
                .push([name, part.word().to_owned()].into_iter().chain(numbers).chain([left]).collect());
        }
        let running = self.parts.values().filter(|part| part.running).count();
        if self.parts.len() > 1 {
            let finished = self.parts.values().filter(|part| part.open() == 0).count();
            let of = self.parts.len();
            table.notes.push(format!("{of} shards: {finished} have no cells left, {running} are running"));
        }
        if shown.len() > MOST {
            table.notes.push(format!("{} more shards are not shown", shown.len() - MOST));
        }
        let begun = self.begun();
        if !begun.is_empty() {
            table.notes.push(format!(
                "begun: {}; what has begun resumes from its checkpoint, and the time left counts it from the start",
                begun.join(", ")
            ));
        }
        if self.total.took.1 == 0.0 && self.total.open() > 0 {
            table.notes.push(
                "no cell has finished yet: times are the estimates of the plan, for one thread".to_owned(),
            );
        }
        table
    }
}

fn is_running(folder: &Path, folders: &[(Shard, PathBuf)], shard: Shard, now: SystemTime) -> bool {
    let found = folders.binary_search_by_key(&shard, |(known, _)| *known);
    found.is_ok() && Claim::is_running(&folder.join(shard.folder()), now)
}

pub fn run(args: &Args, term: &Term) -> Result<u8> {
    loop {
        let wholes = ShardedRun::below(&args.folder)?;
        ensure!(
            !wholes.is_empty(),
            "there is no run in {}; name the folder of a run or of its shards, such as results/lra/plan-0123456789ab",
            args.folder.display()
        );
        let alone = wholes.len() == 1;
        let standings: Vec<RunStatus> = wholes.into_iter().map(RunStatus::of).collect();
        let open = standings.iter().filter(|one| !one.is_done()).count();
        let told = |one: &&RunStatus| args.all || alone || !one.is_done() || !one.damages().is_empty();
        for one in standings.iter().filter(told) {
            term::data(&one.text(args.all))?;
        }
        if open == 0 && !alone && !args.all {
            term.info(&format!("{} runs, all done", standings.len()));
        }
        let Some(pause) = args.watch.filter(|_| open > 0) else { return Ok(0) };
        std::thread::sleep(Duration::try_from_secs_f64(pause.0).unwrap_or(Duration::from_secs(30)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::manifest::Manifest;
    use crate::run::plan::Plan;
    use crate::run::plan_file::PlanFile;
    use effattn_record::{Row, csv};

    /// What is said of a finished run in `folder`.
    fn told(folder: &Path) -> String {
        let whole = ShardedRun::below(folder).unwrap().swap_remove(0);
        let said = RunStatus::of(whole).text(false); // folded where the terminal ends
        said.split_whitespace().collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn a_run_of_rows_alone_has_no_cells_to_count() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        let manifest = Manifest { state: State::Done, ..Manifest::new(&Plan::default(), "id") };
        manifest.write(folder).unwrap();
        std::fs::write(folder.join("rows.csv"), csv::to_string(&[Row::new("lra", "ls")]).unwrap()).unwrap();
        let said = told(folder);
        assert!(said.contains(": done; 1 row; it has neither plan.json nor journal.jsonl"), "{said}");
        PlanFile::of(&Plan::default()).write(folder).unwrap();
        let said = told(folder);
        assert!(said.contains("has no journal.jsonl, and its cells count"), "{said}");
        std::fs::write(folder.join("journal.jsonl"), "{\n").unwrap();
        let said = told(folder);
        assert!(said.contains("line 1 is cut off or damaged"), "{said}");
    }
}
