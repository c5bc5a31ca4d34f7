//! What earlier runs beside a new one have: finished cells that are taken over, and an unfinished run that is not continued.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::RunError;
use super::journal::{self, Entry, Journal};
use super::manifest::{Manifest, State};
use super::plan::{Cell, Plan};
use effattn_record::config::suite::{BUILTIN_SUITES, Suite};
use effattn_record::departures::{self, is_about_sizes, leaves_share};
use effattn_record::{Outcome, Row};

/// The other runs beside `folder`, the newest first.
fn others(folder: &Path) -> Vec<(PathBuf, Manifest)> {
    let mut found = folder.parent().map(runs).unwrap_or_default();
    found.retain(|(path, _)| path != folder);
    found
}

/// The runs in `base` that were not given up, the newest first. Folders that are no runs are passed over.
pub fn runs(base: &Path) -> Vec<(PathBuf, Manifest)> {
    let paths = std::fs::read_dir(base).into_iter().flatten().filter_map(|entry| Some(entry.ok()?.path()));
    let paths = paths.filter(|path| !path.is_symlink() && path.is_dir());
    let mut found: Vec<(PathBuf, Manifest)> = paths
        .filter_map(|path| Manifest::read(&path).ok().flatten().map(|manifest| (path, manifest)))
        .filter(|(_, manifest)| manifest.state != State::Abandoned)
        .collect();
    found.sort_by(|a, b| (&b.1.start, &b.0).cmp(&(&a.1.start, &a.0)));
    found
}

/// Takes finished cells of `plan` from earlier runs that computed the same and read the same data ([`Cell::reads`], all of
/// them), with their files: a training run is not made twice. What its suite says beside it is said as the suite has it now.
/// Gives what is to be said.
pub fn reuse_finished_cells(
    plan: &Plan,
    folder: &Path,
    journal: &mut Journal,
    done: &mut HashMap<String, Entry>,
) -> Result<Vec<String>, RunError> {
    let mut remarks = Vec::new();
    let mut missing: Vec<_> = plan.cells.iter().filter(|cell| !done.contains_key(&cell.key)).collect();
    for (run, manifest) in if missing.is_empty() { Vec::new() } else { others(folder) } {
        let now = Manifest::new(plan, "");
        let wanted: HashSet<&str> = (missing.iter())
            .filter(|cell| manifest.computes_as(&now, &cell.reads))
            .map(|cell| cell.key.as_str())
            .collect();
        if wanted.is_empty() {
            continue;
        }
        let mut entries: HashMap<String, Entry> = HashMap::new();
        let ended = |entry: &Entry| entry.rows.first().is_some_and(|row| row.outcome == Outcome::Ok);
        let read = journal::entries(&run.join("journal.jsonl"), |entry| {
            if wanted.contains(entry.cell.as_str()) && ended(&entry) {
                entries.insert(entry.cell.clone(), entry);
            }
        });
        read.unwrap_or_else(|error| log::warn!("{}: {error}", run.display()));
        let before = missing.len();
        let mut taken = Vec::new();
        missing.retain(|cell| {
            let entry = entries.remove(&cell.key).filter(|entry| entry_matches_cell(entry, cell));
            let open = entry.is_none();
            taken.extend(entry.map(|entry| (entry, *cell)));
            open
        });
        // a corrected number of the same suite is no reason to train again
        let edited = (manifest.suite != now.suite).then(|| words_of_suites(manifest.suite.as_deref()));
        for (mut entry, cell) in taken {
            if let Some(words) = &edited {
                restate(&mut entry, cell, words);
            }
            let name = super::plan::folder(Path::new(""), &entry.cell);
            copy(&run.join(&name), &folder.join(&name)).map_err(RunError::file(folder.join(&name)))?;
            journal.append(&entry).map_err(RunError::file(folder.join("journal.jsonl")))?;
            done.insert(entry.cell.clone(), entry);
        }
        match before - missing.len() {
            0 => {}
            1 => remarks.push(format!("1 run was finished before and is taken from {}", run.display())),
            count => remarks
                .push(format!("{count} runs were finished before and are taken from {}", run.display())),
        }
    }
    Ok(remarks)
}

/// What suites say against comparing a run with their numbers: that of `text` as it was, and the shipped ones.
fn words_of_suites(text: Option<&str>) -> HashSet<String> {
    let earlier = text.and_then(|text| Suite::parse("suite.toml", text).ok());
    let shipped = BUILTIN_SUITES.iter().filter_map(|(name, _)| Suite::load(name).ok());
    let rows = earlier.into_iter().chain(shipped).flat_map(|suite| suite.rows);
    let mut words = HashSet::new();
    for why in rows.filter_map(|row| row.not_comparable) {
        words.extend(why.split("; ").map(str::to_owned));
    }
    words
}

/// Says in the rows of `entry`, which ran under another text of its suite, what `cell` has beside it now: the published number,
/// and what speaks against comparing it. `said` are the words of suites before.
fn restate(entry: &mut Entry, cell: &Cell, said: &HashSet<String>) {
    let plan = &cell.row;
    // as where a cell ends: the first row has the number of its cell, the others have none or one of another task
    let first = entry.rows.first_mut();
    if let Some(row) = first.filter(|row| (&row.metric, &row.task) == (&plan.metric, &plan.task)) {
        row.published = plan.published;
    }
    let words = |row: &Row| -> Vec<String> {
        let all = row.differs.as_deref().unwrap_or_default().split("; ");
        all.filter(|word| !word.is_empty()).map(str::to_owned).collect()
    };
    for row in &mut entry.rows {
        let mut plan = plan.clone();
        if row.task != plan.task {
            let beside = row.task.as_ref().and_then(|task| cell.published(&row.metric, task));
            row.published = beside.map(|beside| beside.published);
            beside
                .iter()
                .flat_map(|beside| &beside.foreign)
                .for_each(|word| departures::add(&mut plan, word));
        }
        let (now, then) = (words(&plan), words(row));
        let of_suite = |word: &String| said.contains(word) || is_about_sizes(word);
        let rest: Vec<String> =
            then.iter().filter(|word| !now.contains(word) && !of_suite(word)).cloned().collect();
        if now.iter().all(|word| then.contains(word)) && now.len() + rest.len() == then.len() {
            continue;
        }
        row.fraction = match row.fraction {
            Some(share) => plan.fraction.map(|_| share),
            None => plan.fraction.filter(|_| rest.iter().all(|word| leaves_share(word))),
        };
        let all = [now.clone(), rest].concat();
        row.differs = (!all.is_empty()).then(|| all.join("; "));
    }
}

/// Links the files of `from` into `to`, or copies them where links are impossible: they are never written in place.
fn copy(from: &Path, to: &Path) -> std::io::Result<()> {
    if !from.is_dir() {
        return Ok(());
    }
    std::fs::create_dir_all(to)?;
    for entry in std::fs::read_dir(from)? {
        let entry = entry?;
        let target = to.join(entry.file_name());
        if entry.file_type()?.is_file() && !target.exists() {
            std::fs::hard_link(entry.path(), &target)
                .or_else(|_| std::fs::copy(entry.path(), &target).map(|_| ()))?;
        }
    }
    Ok(())
}

/// What to say where an unfinished run of the same command is not continued: what differs.
pub fn explain_new_run(plan: &Plan, folder: &Path) -> Option<String> {
    let unfinished =
        |manifest: &Manifest| manifest.state == State::Unfinished && manifest.command == plan.command;
    let (run, manifest) = others(folder).into_iter().find(|(_, manifest)| unfinished(manifest))?;
    let differ = differences(&manifest, &Manifest::new(plan, ""), true);
    let why = if differ.is_empty() { "other cells".to_owned() } else { differ.join(", ") };
    Some(format!(
        "starting a new run, with {why}: the unfinished one in {} is kept and not continued",
        run.display()
    ))
}

/// A setting's value as it is typed.
fn text(value: &Value) -> String {
    match value {
        Value::Null => "unset".to_owned(),
        Value::String(text) => text.clone(),
        Value::Array(values) => values.iter().map(text).collect::<Vec<_>>().join(","),
        other => other.to_string(),
    }
}

/// In words, what the run of `now` has otherwise than that of `manifest`; with `threads` also their number.
pub fn differences(manifest: &Manifest, now: &Manifest, threads: bool) -> Vec<String> {
    let mut differ = Vec::new();
    if manifest.command != now.command {
        differ.push(format!("{} instead of {}", now.command, manifest.command));
    }
    let keys = |settings: &Value| settings.as_object().map(|all| all.keys().cloned().collect::<Vec<_>>());
    let mut names: Vec<String> =
        [&manifest.settings, &now.settings].into_iter().filter_map(keys).flatten().collect();
    names.sort();
    names.dedup();
    for name in names {
        let (then, now) = (&manifest.settings[&name], &now.settings[&name]);
        if then != now {
            differ.push(format!("{name} {} instead of {}", text(now), text(then)));
        }
    }
    for (name, same) in [
        ("another version", manifest.version == now.version),
        ("another build", manifest.build == now.build),
        ("another number of threads", !threads || manifest.threads == now.threads),
        ("another suite", manifest.suite == now.suite),
    ] {
        if !same {
            differ.push(name.to_owned());
        }
    }
    let sets: BTreeSet<&String> = manifest.data.keys().chain(now.data.keys()).collect();
    let others = sets.into_iter().filter(|name| manifest.data.get(*name) != now.data.get(*name));
    differ.extend(others.map(|name| format!("other data of {name}")));
    differ
}

/// Whether the rows of `entry` can be those of `cell`: some, and each says of itself what the plan says of the cell.
/// (What a search finds, such as a length, the plan leaves open.)
pub(super) fn entry_matches_cell(entry: &Entry, cell: &Cell) -> bool {
    let plan = &cell.row;
    let open = |planned: Option<u64>, found: Option<u64>| planned.is_none() || planned == found;
    let same = |row: &Row| {
        (&row.suite, &row.protocol, &row.model, &row.variant)
            == (&plan.suite, &plan.protocol, &plan.model, &plan.variant)
            && (&row.preset, &row.device, &row.dtype, &row.kernel)
                == (&plan.preset, &plan.device, &plan.dtype, &plan.kernel)
            && (row.threads, row.batch, row.pass, row.seed)
                == (plan.threads, plan.batch, plan.pass, plan.seed)
            && open(plan.len, row.len)
    };
    !entry.rows.is_empty() && entry.rows.iter().all(same)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::plan::{PublishedMatch, TaskNumber};
    use effattn_record::Published;

    #[test]
    fn a_run_that_is_taken_over_has_what_its_suite_says_now() {
        let number = |value| Some(Published::Value(value));
        let row = |published, differs: &str, fraction| Row {
            task: Some("listops".into()),
            published,
            fraction,
            differs: Some(differs.to_owned()).filter(|words| !words.is_empty()),
            ..Row::new("lra", "ls").with("accuracy", "%", Some(40.0))
        };
        let restated = |differs: &str, fraction, now: Row| {
            let first = row(number(1.0), differs, fraction);
            let time = Row { published: None, ..first.clone() }.with("step_time", "s", Some(0.1));
            let changed = Row { task: Some("listops-changed".into()), ..first.clone() };
            let dropped = Row { task: Some("listops-dropped".into()), ..first.clone() };
            let mut entry = Entry { rows: vec![first, time, changed, dropped], ..Entry::new("a") };
            let said = ["no variant computes it".to_owned()].into();
            let metric = "accuracy".to_owned();
            let seven =
                PublishedMatch { published: Published::Value(7.0), foreign: vec!["another head".into()] };
            let also = TaskNumber { metric, task: "listops-changed".to_owned(), number: seven };
            restate(&mut entry, &Cell { row: now, published: vec![also], ..Cell::default() }, &said);
            let [row, time, changed, dropped] = &entry.rows[..] else { panic!("four rows") };
            assert_eq!((changed.published, dropped.published), (number(7.0), None));
            let against =
                |row: &Row| row.differs.as_deref().is_some_and(|words| words.contains("another head"));
            assert!(against(changed) && !against(dropped) && !against(row), "what speaks against its number");
            assert_eq!(changed.fraction, None);
            assert_eq!((time.published, &time.differs), (None, &row.differs));
            (row.published, row.differs.clone().unwrap_or_default(), row.fraction)
        };
        let steps = "steps 5 (10)";
        let partial = "steps 5 (10); 80 training examples (100)";
        let kept = restated(partial, Some(0.4), row(number(2.0), steps, Some(0.5)));
        assert_eq!(kept, (number(2.0), partial.to_owned(), Some(0.4)), "a corrected number");
        assert_eq!(restated("", Some(1.0), row(None, "", Some(1.0))), (None, String::new(), Some(1.0)));
        let why = "steps 5 (10); no variant computes it";
        let told = restated(steps, Some(0.5), row(number(1.0), why, None));
        assert_eq!(told, (number(1.0), why.to_owned(), None), "a reason that is new");
        let told = restated("sizes of a (b); no variant computes it", None, row(number(1.0), "", Some(1.0)));
        assert_eq!(told, (number(1.0), String::new(), Some(1.0)), "reasons that are gone");
    }

    #[test]
    fn only_rows_of_their_own_cell_make_it_done() {
        let row = Row { len: Some(64), seed: Some(1), ..Row::new("speed", "ls") };
        let cell = Cell { key: "a".into(), row: row.clone(), ..Cell::default() };
        let entry = |rows| Entry { rows, ..Entry::new("a") };
        let measured = row.with("step_time", "s", Some(1.0));
        assert!(entry_matches_cell(&entry(vec![measured.clone()]), &cell));
        assert!(!entry_matches_cell(&entry(Vec::new()), &cell));
        let changes: [fn(Row) -> Row; 8] = [
            |row| Row { len: Some(128), ..row },
            |row| Row { model: "full".into(), ..row },
            |row| Row { variant: Some("w=4".into()), ..row },
            |row| Row { seed: Some(2), ..row },
            |row| Row { kernel: "composed".into(), ..row },
            |row| Row { preset: Some("ls-lra".into()), ..row },
            |row| Row { protocol: "memory".into(), ..row },
            |row| Row { threads: Some(7), ..row },
        ];
        for (index, change) in changes.into_iter().enumerate() {
            assert!(
                !entry_matches_cell(&entry(vec![measured.clone(), change(measured.clone())]), &cell),
                "{index}"
            );
        }
        let found = Cell { row: Row { len: None, ..row }, ..cell };
        assert!(entry_matches_cell(&entry(vec![measured]), &found), "a length that was looked for");
    }
}
