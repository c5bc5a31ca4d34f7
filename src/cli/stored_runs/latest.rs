//! Which rows of several runs count.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::Path;

use super::StoredRun;
use crate::run::manifest::{Manifest, State};
use effattn_record::{Outcome, Row};

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
}

/// In words, that rows of `runs` in one table are of several builds, and whether their kernels differ: earlier versions did not note them.
pub fn mixed_builds(runs: &[&StoredRun]) -> Option<String> {
    // a release has no commit
    let build = |run: &&StoredRun| {
        let Manifest { commit, version, .. } = &run.manifest;
        commit.clone().unwrap_or_else(|| format!("version {version}"))
    };
    let builds: BTreeSet<String> = runs.iter().map(build).collect();
    let kernels: BTreeSet<&str> = runs.iter().map(|run| run.manifest.kernels.as_str()).collect();
    let noted = match kernels.len() {
        0 | 1 if builds.len() < 2 => return None,
        _ if kernels.contains("") => "are not all noted",
        1 => "are the same",
        _ => "differ",
    };
    let count = match builds.len() {
        1 => "several builds".to_owned(),
        count if runs.iter().all(|run| run.manifest.commit.is_some()) => format!("{count} commits"),
        count => format!("{count} builds"),
    };
    let list = builds.into_iter().collect::<Vec<_>>().join(", ");
    Some(format!("The rows are of {count} ({list}), whose kernels {noted}."))
}

/// What a row of a trained model is about: of two alike the newer one counts.
pub fn trained_key(row: &Row) -> String {
    let place = (&row.protocol, &row.task, &row.model, &row.variant, &row.preset, &row.metric);
    let how = (&row.device, &row.dtype, &row.kernel, row.batch, row.len, row.seed);
    format!("{place:?} {how:?} {:?} {:?} {:?} {:?}", row.suite, row.differs, row.fraction, row.settings)
}

/// The oldest first: by start, but where the clock went back between two runs of a folder, by their order there.
pub(super) fn by_age(mut runs: Vec<StoredRun>) -> Vec<StoredRun> {
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
        let how = (row.pass, row.threads, row.other_program());
        format!("{:?} {} {how:?}", folder.parent(), trained_key(row))
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
