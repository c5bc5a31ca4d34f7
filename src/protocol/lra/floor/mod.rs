//! What a simple rule reaches on the same split: the floor under every trained row (`lra --floor`).
//!
//! A rule is fitted on the training split and scored on the examples of the test split that models are tested on (whole batches
//! of the protocol), in percent. It has no layers and
//! no attention; what a transformer has learned beyond it is what lies above it.

mod linear;
mod ngrams;

use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use super::KEEP_CLOSE;
use super::recipe;
use super::tasks::LoadOptions;
use crate::protocol::cell_runner::{CellResult, CellRunner, request};
use crate::protocol::grid::{Grid, GridFlags, PlanError, tasks};
use crate::protocol::own_data::check_tokenizer;
use crate::run::RunError;
use crate::run::outcome::CellFailure;
use crate::run::plan::{Cell, Plan};
use effattn_data as data;
use effattn_data::own::is_own;
use effattn_data::subset::LimitedDataset;
use effattn_data::{Dataset, Split};
use effattn_record::{FLOOR, Outcome, Row};

/// A simple rule.
#[derive(Debug)]
pub struct Rule {
    /// Its name, the variant in rows.
    pub name: &'static str,
    /// Tasks that it is for; none: every task.
    pub tasks: &'static [&'static str],
    /// What it looks at.
    pub about: &'static str,
    /// Accuracy on the test split in percent; documents are cut to so many tokens.
    pub score: fn(&dyn Dataset, usize) -> f64,
}

const PATHFINDER: &[&str] = &["pathfinder32", "pathfinder64", "pathfinder128"];

pub static RULES: &[Rule] = &[
    Rule {
        name: "largest-class",
        tasks: &[],
        about: "the most frequent class of the training split",
        score: |data, _| largest_class(data),
    },
    Rule {
        name: "root-operator",
        tasks: &["listops"],
        about: "the most frequent class after the first token, which is the operator of the whole expression",
        score: |data, _| by_key(data, |index| index),
    },
    Rule {
        name: "byte-ngrams",
        tasks: &["text"],
        about: "naive Bayes on the presence of byte n-grams (three to five bytes)",
        score: ngrams::naive_bayes,
    },
    Rule {
        name: "shared-ngrams",
        tasks: &["retrieval"],
        about: "logistic regression on the share of byte n-grams (three to eight bytes) that both documents have",
        score: ngrams::overlap,
    },
    Rule {
        name: "linear-on-pixels",
        tasks: &["image"],
        about: "softmax regression on the intensities",
        score: linear::pixels,
    },
    Rule {
        name: "ink",
        tasks: PATHFINDER,
        about: "logistic regression on how many pixels have which intensity",
        score: linear::ink,
    },
];

/// What the rules of every command take: which examples, and where they are computed.
const TAKEN: [&str; 7] = ["floor", "task", "limit", "device", "threads", "jobs", "memory_limit"];
/// What chooses lines of a suite, and their tasks with them.
const CHOOSES: [&str; 7] = ["model", "exclude", "preset", "len", "batch", "seeds", "mode"];

/// Refuses what has no effect on rules, which also take the settings `own`.
pub fn check_flags(flags: &GridFlags, own: &[&str]) -> Result<(), PlanError> {
    let said = flags.user_settings();
    if said.floor != Some(true) {
        return Ok(());
    }
    let mut idle = said.set_keys();
    idle.extend(flags.model.is_some().then_some("model"));
    idle.extend(flags.exclude.is_some().then_some("exclude"));
    idle.extend(flags.quick.then_some("quick"));
    let chooses = |key: &str| flags.suite.is_some() && CHOOSES.contains(&key);
    idle.retain(|&key| !TAKEN.contains(&key) && !own.contains(&key) && !chooses(key));
    match idle.first() {
        Some(key) => {
            let key = key.replace('_', "-");
            let reason = "--floor trains nothing, and simple rules take";
            Err(PlanError(format!("{reason} no {key}; leave --{key} out")))
        }
        None => Ok(()),
    }
}

/// The cells of `grid`: a row for each rule and task, with what the rule is.
pub fn cells(grid: &Grid) -> Result<Vec<Cell>, PlanError> {
    let (tasks, settings) = (tasks(grid), &grid.settings);
    for task in &tasks {
        data::task(task).map_err(PlanError::new)?;
        check_tokenizer(settings, task).map_err(PlanError)?;
    }
    let cell = |task: &String, rule: &'static Rule| {
        let mut row = Row::new("lra", FLOOR).with("accuracy", "%", None);
        row.task = Some(task.clone());
        row.variant = Some(rule.name.to_owned());
        row.differs = settings.limit.map(super::tasks::limited);
        row.seed = Some(0);
        let reading = LoadOptions {
            strict: settings.strict.unwrap_or(false),
            allow_partial: settings.allow_partial.unwrap_or(false),
            keep_close: KEEP_CLOSE.of(settings).unwrap_or(false),
        };
        let request =
            FloorRequest { floor: rule.name.to_owned(), task: task.clone(), limit: settings.limit, reading };
        let usual = FloorRequest { limit: None, reading: LoadOptions::default(), ..request.clone() };
        let cell = Cell::new(&format!("{task} {FLOOR} {}", rule.name), row, &request, &usual);
        // Pathfinder's images are made first
        cell.with_seconds(1, |_| if PATHFINDER.contains(&task.as_str()) { 100.0 } else { 10.0 })
    };
    let pairs = tasks.iter().flat_map(|task| {
        let rules = RULES.iter().filter(|rule| rule.tasks.is_empty() || rule.tasks.contains(&task.as_str()));
        rules.map(move |rule| cell(task, rule))
    });
    Ok(pairs.collect())
}

/// What a cell is asked.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FloorRequest {
    /// The rule.
    floor: String,
    pub task: String,
    /// So many examples of each split; absent: all.
    limit: Option<u64>,
    /// How data are read.
    pub reading: LoadOptions,
}

/// The requests of `plan` that are rules; none if models are trained.
pub fn requests(plan: &Plan) -> Vec<FloorRequest> {
    plan.cells.iter().filter_map(|cell| request(cell).ok()).collect()
}

/// Whether two cells are rules on the same data, which are read (or made) once for both.
pub fn together(a: &Cell, b: &Cell) -> bool {
    let data = |cell: &Cell| {
        let asked: Option<FloorRequest> = request(cell).ok();
        asked.map(|asked| (asked.task, asked.reading))
    };
    data(a).is_some_and(|a| data(b) == Some(a))
}

/// Fits and scores the rules of the cells `open`, which are on the same data.
pub fn compute(runner: &mut CellRunner, open: &[usize]) -> Result<(), RunError> {
    let mut loaded = None;
    for &index in open {
        if runner.session.stop.is_cancelled() {
            return Err(RunError::Stopped);
        }
        let cell = &runner.plan.cells[index];
        let FloorRequest { floor, task, limit, reading } = request(cell)?;
        let rule = RULES.iter().find(|rule| rule.name == floor);
        let rule = rule.ok_or_else(|| RunError::Internal(format!("there is no rule {floor}")))?;
        runner.session.term.info(&format!("{task}: {}, {}", rule.name, rule.about));
        match loaded.get_or_insert_with(|| super::tasks::load(&task, &runner.conditions.data, reading)) {
            Ok(data) => {
                let rows = rows(cell, rule, data.as_ref(), limit);
                let summary = rows[0].value.map_or_else(String::new, |value| format!("{value:.2} %"));
                runner.record_result(
                    index,
                    CellResult { rows, samples: Vec::new(), summary, progress_seconds: 0.0 },
                )?;
            }
            Err(error) => {
                runner.record_failure(index, &CellFailure::new(Outcome::Failed, error.to_string()), 0.0)?
            }
        }
    }
    Ok(())
}

/// The rows of `cell`: `rule` fitted and scored on `data`, of which so many examples of each split are used.
fn rows(cell: &Cell, rule: &Rule, data: &dyn Dataset, limit: Option<u64>) -> Vec<Row> {
    let task = cell.row.task.as_deref().unwrap_or_default();
    let limited = LimitedDataset::new(data, limit.map_or(usize::MAX, |limit| limit as usize));
    let limited = limited.in_whole_batches(if is_own(task) { 1 } else { test_batch(task) });
    let mut row = cell.row.clone();
    let missing = super::tasks::missing(task, data.len(Split::Train));
    let words: Vec<String> = missing.into_iter().map(|(_, words)| words).chain(row.differs.take()).collect();
    row.differs = (!words.is_empty()).then(|| words.join("; "));
    let row = row.with_outcome(Outcome::Ok, None);
    vec![
        row.with("accuracy", "%", Some((rule.score)(&limited, kept(task)))),
        row.with("tested", "1", Some(limited.len(Split::Test) as f64)),
    ]
}

/// Tokens of a document that the rules for `task` see: those of Transformer-LS's protocol, else of the arena's.
pub fn kept(task: &str) -> usize {
    let recipe = ["ls-lra", "lra-repo"].iter().find_map(|preset| recipe::find(preset, task, "").ok());
    recipe.map_or(usize::MAX, |recipe| recipe.keep as usize)
}

/// Examples of a batch of the protocol: what fills none at the end of a paper's test split is not tested.
fn test_batch(task: &str) -> usize {
    let recipe = ["ls-lra", "lra-repo"].iter().find_map(|preset| recipe::find(preset, task, "").ok());
    recipe.map_or(1, |recipe| recipe.batch as usize)
}

/// Accuracy of the most frequent class of the training split.
pub fn largest_class(data: &dyn Dataset) -> f64 {
    by_key(data, |_| 0)
}

/// Predicts the most frequent class among the training examples with the same key, a function of the first token.
fn by_key(data: &dyn Dataset, key: fn(usize) -> usize) -> f64 {
    let mut counts: std::collections::BTreeMap<usize, Vec<u64>> = std::collections::BTreeMap::new();
    let read = |split: Split, index: usize| {
        let example = data.example(split, index, 1);
        (key(example.tokens.first().map_or(0, |&id| id as usize)), example.label as usize)
    };
    // Pathfinder's images are made when they are read
    let keys: Vec<(usize, usize)> =
        (0..data.len(Split::Train)).into_par_iter().map(|index| read(Split::Train, index)).collect();
    for (key, label) in keys {
        let classes = counts.entry(key).or_default();
        classes.resize(classes.len().max(label + 1), 0);
        classes[label] += 1;
    }
    let most = |classes: &Vec<u64>| (0..classes.len()).rev().max_by_key(|&class| classes[class]);
    percent(data, |index| {
        let (key, label) = read(Split::Test, index);
        counts.get(&key).and_then(most) == Some(label)
    })
}

/// Share of the test examples for which `right` holds, in percent.
fn percent(data: &dyn Dataset, right: impl Fn(usize) -> bool + Sync) -> f64 {
    let count = data.len(Split::Test);
    100.0 * (0..count).into_par_iter().filter(|&index| right(index)).count() as f64 / count.max(1) as f64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::grid::GridFlags;
    use crate::protocol::lra::tasks::{LoadOptions, load};
    use crate::protocol::resolve;
    use effattn_data::Example;
    use effattn_record::config::settings::Settings;

    /// Documents made of a class's letters, on both sides of a pair or as intensities.
    struct Toy;

    impl Dataset for Toy {
        fn len(&self, split: Split) -> usize {
            if split == Split::Train { 300 } else { 100 }
        }
        fn example(&self, split: Split, index: usize, max_len: usize) -> Example {
            let label = (index + usize::from(split == Split::Test)) % 3 % 2;
            let letter = |place: usize| (1 + 90 * label + (place * (index + 3)) % 80) as u32;
            let tokens: Vec<u32> = (0..64).map(letter).take(max_len).collect();
            let other =
                (0..64).map(|place| if label == 1 { letter(place) } else { 200 + (place % 9) as u32 });
            Example { second: Some(other.take(max_len).collect()), tokens, label: label as u32 }
        }
        fn hash(&self) -> &'static str {
            ""
        }
        fn partial(&self) -> Option<&str> {
            None
        }
    }

    #[test]
    fn every_rule_learns_what_is_plain() {
        for rule in RULES {
            let score = (rule.score)(&Toy, 64);
            let least = if rule.name == "largest-class" { 60.0 } else { 95.0 };
            assert!(score >= least, "{}: {score}", rule.name);
        }
    }

    #[test]
    fn every_task_has_a_rule_beside_the_largest_class() {
        let tasks =
            ["listops", "text", "retrieval", "image", "pathfinder32", "pathfinder64", "pathfinder128"];
        let rules = |task: &str| {
            let settings = Settings { task: Some(task.parse().unwrap()), ..Settings::NONE };
            let flags = GridFlags { settings, ..GridFlags::default() };
            cells(&resolve(&flags, &crate::protocol::lra::Lra).unwrap())
        };
        for task in tasks {
            let rules = rules(task).unwrap();
            assert_eq!(rules.len(), 2, "{task}");
            assert!(kept(task) < usize::MAX, "{task}");
        }
        assert!(rules("lisops").unwrap_err().0.contains("listops"));
    }

    #[test]
    fn the_root_operator_alone_reaches_the_papers_listops() {
        let folder = tempfile::tempdir().unwrap();
        let data = load("listops", folder.path(), LoadOptions::default()).unwrap();
        let score = |name: &str| {
            let rule = RULES.iter().find(|rule| rule.name == name).unwrap();
            (rule.score)(data.as_ref(), 2000)
        };
        assert!((score("root-operator") - 37.55).abs() < 1e-9, "{}", score("root-operator"));
        assert!(score("largest-class") < 20.0);
    }
}
