//! Finding and reading run folders.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use super::command_line::command_line;
use crate::protocol;
use crate::run::manifest::{Manifest, State};
use crate::run::plan::sha256;
use crate::run::plan_file::PLAN;
use crate::run::shard::shards;
use effattn_record::report::document::Source;
use effattn_record::text::plural;
use effattn_record::{Outcome, Row, csv, departures, file};

/// A run folder that was read.
pub struct StoredRun {
    /// Where it is.
    pub folder: PathBuf,
    /// Where its rows come from.
    pub manifest: Manifest,
    /// Its rows.
    pub rows: Vec<Row>,
}

/// Folders below the results at which runs are looked for no more.
pub const DEEPEST: usize = 8;

impl StoredRun {
    /// Reads `folder`; nothing if it is no run folder.
    pub fn read(folder: &Path) -> Result<Option<Self>> {
        let run = Self::without_rows(folder)?;
        run.map(Self::with_rows).transpose()
    }

    /// The run in `folder`, its rows left out; nothing where there are none.
    fn without_rows(folder: &Path) -> Result<Option<Self>> {
        let Some(manifest) = Manifest::read(folder)? else { return Ok(None) };
        let there = folder.join("rows.csv").is_file(); // not where it was killed before its first cell
        Ok(there.then(|| Self { folder: folder.to_owned(), manifest, rows: Vec::new() }))
    }

    fn with_rows(self) -> Result<Self> {
        let path = self.folder.join("rows.csv");
        let text = file::read_to_string(&path).with_context(|| path.display().to_string())?;
        if self.manifest.rows_sha256.as_ref().is_some_and(|written| *written != sha256(&text)) {
            bail!(
                "{} is not what its run wrote (it was edited, cut off or replaced); the run's own command writes it again from the journal",
                path.display()
            );
        }
        let mut rows = csv::from_str(&text).with_context(|| path.display().to_string())?;
        departures::complete(&mut rows, &self.manifest.data);
        Ok(Self { rows, ..self })
    }

    /// Makes sure that every cell that is ok has a number: an earlier version wrote no digest of its rows.
    fn finite(self) -> Result<Self> {
        let wrong =
            |row: &Row| row.outcome == Outcome::Ok && row.value.is_some_and(|value| !value.is_finite());
        match self.rows.iter().position(wrong) {
            Some(at) => {
                let (path, row) = (self.folder.join("rows.csv"), &self.rows[at]);
                let (label, metric) = (row.label(), &row.metric);
                bail!(
                    "{}: row {} ({label}) is ok, but its {metric} is no finite number",
                    path.display(),
                    at + 1
                )
            }
            None => Ok(self),
        }
    }

    /// Every run below `root` (or `root` itself) that counts, the oldest first: what was given up is left out, and
    /// measurements that a newer run of their folder replaces are not read.
    pub fn find_all(root: &Path) -> Result<Vec<Self>> {
        let mut runs = Vec::new();
        let mut folders = vec![(root.to_owned(), 0)];
        while let Some((folder, depth)) = folders.pop() {
            let found = match Self::without_rows(&folder) {
                Err(error) if depth > 0 => {
                    log::warn!("{} is left out: {error:#}", folder.display());
                    continue;
                }
                found => found?,
            };
            if let Some(run) = found {
                if run.manifest.state != State::Abandoned {
                    runs.push(run);
                }
                continue;
            }
            if depth == DEEPEST {
                continue;
            }
            if folder.join(PLAN).exists() && !shards(&folder).is_empty() {
                // each shard is a run, but none is the run that was asked for
                log::warn!(
                    "{} has shards that are not joined; join them: effattn merge {0}",
                    folder.display()
                );
                continue;
            }
            let entries = std::fs::read_dir(&folder)
                .with_context(|| format!("{} cannot be read; name a folder of results", folder.display()))?;
            for entry in entries {
                let entry = entry?;
                if entry.file_type()?.is_dir() {
                    folders.push((entry.path(), depth + 1)); // `latest` is a link and passed over
                }
            }
        }
        let mut runs = by_age(runs);
        let measured: BTreeSet<PathBuf> =
            latest_measured(&runs).into_iter().map(|run| run.folder.clone()).collect();
        runs.retain(|run| run.trained() || measured.contains(&run.folder));
        let alone = runs.len() == 1;
        let read = |run: Self| {
            let folder = run.folder.clone();
            match run.with_rows().and_then(Self::finite) {
                Err(error) if !alone => {
                    log::warn!("{} is left out: {error:#}", folder.display());
                    None
                }
                read => Some(read),
            }
        };
        runs.into_iter().filter_map(read).collect()
    }

    /// Where the rows of this run come from and stand, below the folder of results `root`.
    pub fn source(&self, root: &Path) -> Source {
        let folder = self.folder.strip_prefix(root).unwrap_or(&self.folder);
        let command = command_line(self.manifest.argv.iter().cloned());
        Source { line: self.provenance(), command, rows: folder.join("rows.csv").display().to_string() }
    }

    /// The words that were typed, without the command, the flags in `without`, and those that say how often, how long, where and into
    /// which folder, and nothing of what is measured.
    pub fn typed(&self, without: &[&str]) -> String {
        const WITH_VALUE: [&str; 14] = [
            "-o",
            "--output-path",
            "--plots-dir",
            "--data-dir",
            "--max-time",
            "--min-runs",
            "--runs",
            "--warmup",
            "--timeout",
            "--threads",
            "--save-every",
            "--reference",
            "--program",
            "--device",
        ];
        const ALONE: [&str; 6] = ["--no-plot", "-q", "-v", "--quiet", "--allow-partial", "--fresh"];
        let command = self.manifest.command.split(' ').count();
        let mut words = self.manifest.argv.iter().skip(command);
        let mut kept: Vec<&str> = Vec::new();
        while let Some(word) = words.next() {
            let name = word.split('=').next().unwrap_or(word);
            if WITH_VALUE.contains(&name) || without.contains(&name) {
                if !word.contains('=') {
                    words.next();
                }
            } else if !ALONE.contains(&name) && !name.starts_with("--export") {
                kept.push(word);
            }
        }
        kept.join(" ")
    }

    /// `measured with effattn 0.1.0 (e0b18a0) on AMD EPYC, 2 threads, cpu, 2026-11-21; data imdb 0123abcd`.
    pub fn provenance(&self) -> String {
        let Manifest { id, version, commit, machine, threads, device, start, data, state, .. } =
            &self.manifest;
        let commit = commit.as_deref().map_or_else(String::new, |commit| format!(" ({commit})"));
        let machine = machine["cpu"].as_str().unwrap_or("unknown processor");
        let data: Vec<String> =
            data.iter().map(|(name, hash)| format!("{name} {}", hash.get(..12).unwrap_or(hash))).collect();
        let data =
            if data.is_empty() { String::new() } else { format!("; data (SHA-256) {}", data.join(", ")) };
        let threads = plural(*threads, "thread");
        let state = if *state == State::Done { "" } else { "; unfinished" };
        let day = start.get(..10).unwrap_or(start);
        format!("{id}: effattn {version}{commit}, {machine}, {threads}, {device}, {day}{data}{state}")
    }
}

impl StoredRun {
    /// `rows` of this run in parts: machines of one kind stand together, unless they measured the same cell.
    pub fn by_machine(&self, rows: Vec<Row>) -> Vec<Vec<Row>> {
        let kinds: BTreeMap<&str, String> = self
            .manifest
            .parts
            .iter()
            .map(|part| {
                let machine = &part.machine;
                let kind = format!("{} {} {}", machine["cpu"], machine["cores"], machine["simd"]);
                (machine["host"].as_str().unwrap_or_default(), kind)
            })
            .collect();
        let cell = |row: &Row| format!("{} {:?} {:?}", trained_key(row), row.pass, row.threads);
        let mut hosts: Vec<(String, Vec<Row>)> = Vec::new();
        for row in rows {
            let host = row.machine.clone().unwrap_or_default();
            match hosts.iter_mut().find(|(known, _)| *known == host) {
                Some((_, own)) => own.push(row),
                None => hosts.push((host, vec![row])),
            }
        }
        let mut parts: Vec<(Option<&String>, BTreeSet<String>, Vec<Row>)> = Vec::new();
        for (host, rows) in hosts {
            let kind = kinds.get(host.as_str());
            let cells: BTreeSet<String> = rows.iter().map(cell).collect();
            match parts.iter_mut().find(|(known, there, _)| *known == kind && there.is_disjoint(&cells)) {
                Some((_, there, all)) => {
                    there.extend(cells);
                    all.extend(rows);
                }
                None => parts.push((kind, cells, rows)),
            }
        }
        parts.into_iter().map(|(.., rows)| rows).collect()
    }

    /// Whether it trained models.
    pub fn trained(&self) -> bool {
        protocol::find(&self.manifest.command).is_some_and(|protocol| protocol.trains())
    }

    /// What it measures, however often and however long: its settings and the mechanisms that were asked for.
    fn measures(&self) -> String {
        const HOW_OFTEN: [&str; 5] = ["warmup", "runs", "min_runs", "max_time", "timeout"];
        let Manifest { settings, argv, device, .. } = &self.manifest;
        let mut settings = settings.clone();
        if let Some(settings) = settings.as_object_mut() {
            settings.retain(|key, _| !HOW_OFTEN.contains(&key.as_str()));
        }
        let chosen = |flag: &&str| {
            let value = |at: usize| match argv[at].strip_prefix(flag)? {
                "" => argv.get(at + 1).cloned(),
                given => given.strip_prefix('=').map(str::to_owned),
            };
            (0..argv.len()).filter_map(value).collect::<Vec<_>>()
        };
        format!("{device} {settings} {:?}", ["--model", "--exclude"].iter().map(chosen).collect::<Vec<_>>())
    }

    /// Whether it was a first look: its rows enter no table and no figure of a paper.
    pub fn quick(&self) -> bool {
        self.manifest.argv.iter().any(|word| word == "--quick")
    }
}

/// In words, that rows of `runs` in one table are of builds whose kernels differ, or may: earlier versions did not note them.
pub fn mixed_builds(runs: &[&StoredRun]) -> Option<String> {
    let commit = |run: &&StoredRun| run.manifest.commit.clone().unwrap_or_else(|| "no commit".to_owned());
    let commits: BTreeSet<String> = runs.iter().map(commit).collect();
    let kernels: BTreeSet<&str> = runs.iter().map(|run| run.manifest.kernels.as_str()).collect();
    let same = kernels.len() == 1 && !kernels.contains("");
    if commits.len() < 2 || same {
        return None;
    }
    let noted = if kernels.contains("") { "are not all noted" } else { "differ" };
    let list: Vec<String> = commits.into_iter().collect();
    Some(format!("The rows are of {} commits ({}), whose kernels {noted}.", list.len(), list.join(", ")))
}

/// What a row of a trained model is about: of two alike the newer one counts.
pub fn trained_key(row: &Row) -> String {
    let place = (&row.protocol, &row.task, &row.model, &row.variant, &row.preset, &row.metric);
    let how = (&row.device, &row.dtype, &row.kernel, row.batch, row.len, row.seed);
    format!("{place:?} {how:?} {:?} {:?} {:?} {:?}", row.suite, row.differs, row.fraction, row.settings)
}

/// The oldest first: by start, but where the clock went back between two runs of a folder, by their order there.
fn by_age(mut runs: Vec<StoredRun>) -> Vec<StoredRun> {
    let place = |run: &StoredRun| (run.folder.parent().map(Path::to_owned), run.manifest.order);
    runs.sort_by_cached_key(|run| (place(run), run.manifest.start.clone(), run.folder.clone()));
    let (mut base, mut at) = (None, String::new());
    let mut aged: Vec<(String, StoredRun)> = Vec::new();
    for run in runs {
        let parent = run.folder.parent().map(Path::to_owned);
        at = if parent == base { at.max(run.manifest.start.clone()) } else { run.manifest.start.clone() };
        base = parent;
        aged.push((at.clone(), run));
    }
    aged.sort_by(|a, b| a.0.cmp(&b.0));
    aged.into_iter().map(|(_, run)| run).collect()
}

/// Measurements run by run: of those in a folder that measure the same the newest that is finished, else the newest; a quick
/// run counts only where there is no other. `runs` stand by age.
pub fn latest_measured(runs: &[StoredRun]) -> Vec<&StoredRun> {
    fn base(run: &StoredRun) -> &Path {
        run.folder.parent().unwrap_or(Path::new(""))
    }
    let measured = || runs.iter().filter(|run| !run.trained());
    let whole: BTreeSet<&Path> = measured().filter(|run| !run.quick()).map(base).collect();
    let mut latest: BTreeMap<(&Path, String), &StoredRun> = BTreeMap::new();
    for run in measured().filter(|run| !(run.quick() && whole.contains(base(run)))) {
        let known = latest.entry((base(run), run.measures())).or_insert(run);
        if run.manifest.state == State::Done || known.manifest.state != State::Done {
            *known = run;
        }
    }
    latest.into_values().collect()
}

/// The newest row of each kind of trained models; what did not come to an end replaces nothing that did. `rows` stand
/// by age.
pub fn newest_trained<'a>(rows: impl Iterator<Item = &'a Row>) -> BTreeMap<String, &'a Row> {
    let ended = |row: &Row| !matches!(row.outcome, Outcome::Interrupted | Outcome::Failed | Outcome::Planned);
    let mut newest: BTreeMap<String, &Row> = BTreeMap::new();
    for row in rows {
        let known = newest.entry(trained_key(row)).or_insert(row);
        if ended(row) || !ended(known) {
            *known = row;
        }
    }
    newest
}

/// The rows that the papers' figures are drawn from: of trained models the newest of each kind over all runs, measurements of
/// the latest runs, nothing of quick ones.
pub fn latest_rows(runs: &[StoredRun]) -> Vec<Row> {
    let trained = runs.iter().filter(|run| run.trained() && !run.quick());
    let newest = newest_trained(trained.flat_map(|run| &run.rows));
    let latest = latest_measured(runs).into_iter().filter(|run| !run.quick());
    let latest: BTreeMap<&Path, Vec<Row>> = latest
        .filter_map(|run| Some((run.folder.as_path(), run.by_machine(run.rows.clone()).into_iter().next()?)))
        .collect();
    // runs of one folder may have cells in common: the newest that has one counts
    let cell = |folder: &Path, row: &Row| {
        format!("{:?} {} {:?} {:?}", folder.parent(), trained_key(row), row.pass, row.threads)
    };
    let mut newest_run: HashMap<String, &Path> = HashMap::new();
    for folder in runs.iter().map(|run| run.folder.as_path()) {
        let rows = latest.get(folder).into_iter().flatten();
        newest_run.extend(rows.map(|row| (cell(folder, row), folder)));
    }
    let measured = latest.iter().flat_map(|(folder, rows)| rows.iter().map(move |row| (*folder, row)));
    let measured = measured.filter(|(folder, row)| newest_run[&cell(folder, row)] == *folder);
    newest.into_values().chain(measured.map(|(_, row)| row)).cloned().collect()
}

/// The seconds of every measured step of a run, by cell; none where the run kept no samples.
pub fn step_samples(folder: &Path) -> Result<Vec<(String, Vec<f64>)>> {
    #[derive(serde::Deserialize)]
    struct Line {
        cell: String,
        metric: String,
        values: Vec<f64>,
        machine: Option<String>,
    }
    let path = folder.join("samples.jsonl");
    let Ok(text) = file::read_to_string(&path) else { return Ok(Vec::new()) };
    let mut cells = Vec::new();
    for line in text.lines().filter(|line| !line.trim().is_empty()) {
        let line: Line = serde_json::from_str(line).with_context(|| path.display().to_string())?;
        if line.metric == "step_time" {
            let cell = match line.machine {
                Some(machine) => format!("{} on {machine}", line.cell),
                None => line.cell,
            };
            cells.push((cell, line.values));
        }
    }
    Ok(cells)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::plan::Plan;

    /// A folder with copies of a committed run at `places`.
    fn copies(places: &[&str]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        let results = Path::new(env!("CARGO_MANIFEST_DIR")).join("reproduction/results");
        let run = StoredRun::find_all(&results).unwrap().swap_remove(0).folder;
        for place in places {
            let to = folder.path().join(place);
            std::fs::create_dir_all(&to).unwrap();
            for name in ["manifest.json", "rows.csv"] {
                std::fs::copy(run.join(name), to.join(name)).unwrap();
            }
        }
        folder
    }

    /// A committed run as if it lay at `results/speed/NAME` and `words` had been typed.
    fn typed(name: &str, words: &[&str]) -> StoredRun {
        let committed = Path::new(env!("CARGO_MANIFEST_DIR")).join("reproduction/results/speed");
        let mut run = StoredRun::find_all(&committed).unwrap().swap_remove(0);
        run.folder = Path::new("results/speed").join(name);
        run.manifest.argv = words.iter().map(|word| String::from(*word)).collect();
        run
    }

    #[test]
    fn a_run_is_called_by_what_it_measures() {
        let words = [
            "speed",
            "--model",
            "full,ls",
            "-o",
            "results",
            "--max-time=2s",
            "-q",
            "--len",
            "1024",
            "--no-plot",
        ];
        let run = typed("1", &words);
        assert_eq!(run.typed(&[]), "--model full,ls --len 1024");
        assert_eq!(run.typed(&["--model"]), "--len 1024");
        let source = run.source(Path::new("results"));
        assert_eq!(source.rows, "speed/1/rows.csv");
        assert!(source.command.starts_with("effattn speed --model full,ls"), "{}", source.command);
    }

    #[test]
    fn a_run_is_found_however_deep_it_lies() {
        let folder = copies(&["speed/one", "peer/f32/speed/one", "a/b/c/d/e/one"]);
        assert_eq!(StoredRun::find_all(folder.path()).unwrap().len(), 3);
    }

    #[test]
    fn a_quick_run_displaces_nothing_and_enters_no_figure() {
        let (whole, quick) = (typed("1", &["speed"]), typed("2", &["speed", "--quick"]));
        let runs = [whole, quick];
        let names = |runs: &[StoredRun]| -> Vec<PathBuf> {
            latest_measured(runs).iter().map(|run| run.folder.clone()).collect()
        };
        assert_eq!(names(&runs), [Path::new("results/speed/1")]);
        assert_eq!(latest_rows(&runs).len(), runs[0].rows.len());
        assert_eq!(names(&runs[1..]), [Path::new("results/speed/2")]);
        assert!(latest_rows(&runs[1..]).is_empty());
    }

    #[test]
    fn runs_of_different_things_stand_side_by_side_and_a_cell_counts_once() {
        let run = |name: &str, words: &[&str], value: f64| {
            let mut run = typed(name, words);
            run.rows.truncate(1);
            run.rows[0].value = Some(value);
            run
        };
        let all = ["speed", "--model", "all"];
        let runs = [run("1", &all, 1.0), run("2", &["speed", "--model=ls"], 2.0), run("3", &all, 3.0)];
        let kept: Vec<&Path> = latest_measured(&runs).iter().map(|run| run.folder.as_path()).collect();
        assert_eq!(
            kept,
            [Path::new("results/speed/3"), Path::new("results/speed/2")],
            "the repeated one counts"
        );
        let values: Vec<Option<f64>> = latest_rows(&runs).iter().map(|row| row.value).collect();
        assert_eq!(values, [Some(3.0)], "the newest of a cell");
    }

    #[test]
    fn a_damaged_run_does_not_hide_the_others() {
        let folder = copies(&["a/whole", "b/half", "c/rows"]);
        std::fs::write(folder.path().join("b/half/manifest.json"), "{").unwrap();
        std::fs::write(folder.path().join("c/rows/rows.csv"), "no columns").unwrap();
        assert_eq!(StoredRun::find_all(folder.path()).unwrap().len(), 1);
        assert!(
            StoredRun::find_all(&folder.path().join("b/half")).is_err(),
            "what was asked for by name is not passed over"
        );
        assert!(StoredRun::find_all(&folder.path().join("c")).is_err());
    }

    /// A run of `command` in `base` whose only row has `value`.
    fn run(
        base: &str,
        command: &str,
        (order, start): (u64, &str),
        state: State,
        value: Option<f64>,
    ) -> StoredRun {
        let plan = Plan { name: base.to_owned(), command: command.to_owned(), ..Plan::default() };
        let mut manifest = Manifest::new(&plan, "id");
        (manifest.order, manifest.start, manifest.state) = (order, start.to_owned(), state);
        let row = Row::new(command, "ls").with("accuracy", "%", value);
        let outcome = if value.is_some() { Outcome::Ok } else { Outcome::Interrupted };
        let folder = Path::new(base).join(format!("{order}-{start}"));
        StoredRun { folder, manifest, rows: vec![row.with_outcome(outcome, None)] }
    }

    fn values(runs: Vec<StoredRun>) -> Vec<Option<f64>> {
        latest_rows(&by_age(runs)).iter().map(|row| row.value).collect()
    }

    #[test]
    fn the_newest_run_counts_and_not_the_last_path() {
        let old = run("z", "lra", (1, "2026-01-01"), State::Done, Some(1.0));
        let new = run("a", "lra", (1, "2026-01-02"), State::Done, Some(2.0));
        assert_eq!(values(vec![new, old]), [Some(2.0)]);
        let before = run("a", "speed", (1, "2999-01-01"), State::Done, Some(1.0));
        let after = run("a", "speed", (2, "2026-01-02"), State::Done, Some(2.0));
        assert_eq!(values(vec![after, before]), [Some(2.0)], "the clock went back");
    }

    #[test]
    fn an_interrupted_run_replaces_nothing_that_is_finished() {
        for command in ["speed", "lra"] {
            let done = run("a", command, (1, "2026-01-01"), State::Done, Some(1.0));
            let stopped = run("a", command, (2, "2026-01-02"), State::Unfinished, None);
            assert_eq!(values(vec![done, stopped]), [Some(1.0)], "{command}");
        }
    }
}
