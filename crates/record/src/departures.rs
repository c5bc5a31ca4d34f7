//! Departures from a protocol that no setting of a run makes: the number format of a source, generated data, parts of test
//! sets, and what builds of one time did not have. Rows are completed with them when they are recorded, and again when they
//! are read: rows of older builds were written without.

use std::collections::BTreeMap;

use crate::{FLOOR, Row};

/// What the sources of `lra`, `charlm` and `vision` compute in and this program does not; a number format and no setting.
pub const PRECISION: &str = "f32 (mixed precision)";
/// Expressions that the task's generator made, where the published numbers belong to the files of the release.
const GENERATED: &str = "generated expressions (the release's files)";
/// Starts of the checksums of generated ListOps: of the splits, and of the compact file that an earlier version wrote.
const GENERATED_LISTOPS: [&str; 2] = ["7848350e67a2", "a84007e83f19"];

/// A departure that a row's own columns tell.
struct Departure {
    words: &'static str,
    applies: fn(&Row) -> bool,
}

/// The tasks of Transformer-LS, Table 1, and those that `robustness` makes of them.
fn is_table_1(row: &Row) -> bool {
    let task = row.task.as_deref().unwrap_or_default();
    let trained = task.split('-').next().unwrap_or_default();
    matches!(row.protocol.as_str(), "lra" | "robustness")
        && row.preset.as_deref() == Some("ls-lra")
        && ["listops", "text", "retrieval"].contains(&trained)
}

fn is_character_lm(row: &Row) -> bool {
    row.protocol == "charlm" && row.preset.as_deref().is_some_and(|preset| preset.starts_with("charlm-"))
}

/// Builds that trained `wordlm` and `mlm` without dropout of attention weights and whose rows do not say so; only full
/// attention among their mechanisms has such weights.
const WITHOUT_DROPOUT: [&str; 1] = ["28fe7201f918"];

fn lacks_dropout(row: &Row) -> bool {
    let built = row.commit.as_deref().is_some_and(|commit| WITHOUT_DROPOUT.contains(&commit));
    built && matches!(row.protocol.as_str(), "wordlm" | "mlm") && row.model == "full"
}

const TABLE: &[Departure] = &[
    Departure {
        words: PRECISION,
        applies: |row| row.dtype == "f32" && row.model != FLOOR && (is_table_1(row) || is_character_lm(row)),
    },
    Departure { words: "no attention dropout (0.1)", applies: lacks_dropout },
];

/// A published test split.
struct TestSplit {
    task: &'static str,
    /// Examples.
    size: u64,
    /// How often each is tested: ImageNet-C has every image in 15 corruptions of 5 strengths.
    times: u64,
    /// What an example is called.
    unit: &'static str,
}

const fn split(task: &'static str, size: u64, unit: &'static str) -> TestSplit {
    TestSplit { task, size, times: 1, unit }
}

/// Largest batch whose last, incomplete one a protocol leaves out.
const BATCH: u64 = 512;

const TEST_SPLITS: &[TestSplit] = &[
    split("listops", 2000, "examples"),
    split("text", 25_000, "examples"),
    split("retrieval", 17_437, "pairs"),
    split("image", 10_000, "images"),
    split("pathfinder32", 20_000, "images"),
    split("pathfinder64", 20_000, "images"),
    split("pathfinder128", 20_000, "images"),
    split("imdb", 25_000, "examples"),
    split("cifar10", 10_000, "images"),
    split("imagenet", 50_000, "images"),
    split("imagenet-a", 7500, "images"),
    split("imagenet-r", 30_000, "images"),
    split("imagenet-v2", 10_000, "images"),
    TestSplit { times: 75, ..split("cifar10-c", 10_000, "images") },
    TestSplit { times: 75, ..split("imagenet-c", 50_000, "images") },
];

/// What `rows`, all of one cell, say of the part of the published test split of `row`'s task that they were tested on.
fn part_of_test(row: &Row, rows: &[Row]) -> Option<String> {
    let task = row.task.as_deref()?;
    let own =
        |known: &str| task == known || task.strip_prefix(known).is_some_and(|rest| rest.starts_with(' '));
    let of_text = |known: &str| row.protocol == "robustness" && task.starts_with(&format!("{known}-"));
    let split = TEST_SPLITS.iter().find(|split| own(split.task) || of_text(split.task))?;
    // what --limit says is said
    if row.differs.as_deref().is_some_and(|words| words.contains(" of each split")) {
        return None;
    }
    let counts = rows.iter().filter(|other| other.metric == "tested" && is_same_run(other, row));
    let exact = counts.clone().find(|count| count.task == row.task);
    let count = exact.or_else(|| counts.clone().find(|count| count.task.as_deref() == Some(split.task)))?;
    let tested = count.value? as u64 / split.times;
    let TestSplit { size, unit, .. } = split;
    (tested + BATCH.min(size / 20) < *size).then(|| format!("tested on {tested} {unit} ({size})"))
}

/// Whether both rows are of one model that was trained once.
fn is_same_run(a: &Row, b: &Row) -> bool {
    (&a.model, &a.variant, &a.preset, a.seed, a.len, a.batch)
        == (&b.model, &b.variant, &b.preset, b.seed, b.len, b.batch)
        && (&a.settings, &a.dtype, &a.kernel) == (&b.settings, &b.dtype, &b.kernel)
}

/// Whether `word` of `differs` leaves a run comparable with what is published: it is about how numbers are kept, or which
/// examples the same generator drew.
pub fn leaves_share(word: &str) -> bool {
    [PRECISION, GENERATED].contains(&word)
}

/// Starts of the words of [`sizes_of`].
const SIZES_OF: &str = "sizes of ";

/// That a model has the sizes of `preset` where the published number belongs to `published`.
pub fn sizes_of(preset: &str, published: &str) -> String {
    format!("{SIZES_OF}{preset} ({published})")
}

/// Whether `word` of `differs` is one of [`sizes_of`].
pub fn is_about_sizes(word: &str) -> bool {
    word.starts_with(SIZES_OF)
}

/// The words of `row` about the part of its data set that it was trained and tested on.
pub fn data_words(row: &Row) -> Vec<&str> {
    const ABOUT: [&str; 7] = [
        " examples",
        " images",
        " pairs",
        " symbols",
        " blocks of",
        "incomplete data",
        " words of validation",
    ];
    let words = row.differs.as_deref().unwrap_or_default().split("; ");
    words.filter(|word| ABOUT.iter().any(|about| word.contains(about))).collect()
}

/// Adds to `differs` of `rows`, those of a run on `data` (checksums by name), every departure that is not said there. One that
/// does not leave the share takes it away. Rows that have all of them stay as they are.
pub fn complete(rows: &mut [Row], data: &BTreeMap<String, String>) {
    let all = |row: &Row| -> Vec<String> {
        let table = TABLE.iter().filter(|departure| (departure.applies)(row));
        let known = table.map(|departure| departure.words.to_owned());
        let generated =
            data.get("listops").filter(|hash| GENERATED_LISTOPS.iter().any(|known| hash.starts_with(known)));
        let generated = generated.filter(|_| row.task.as_deref() == Some("listops"));
        known.chain(generated.map(|_| GENERATED.to_owned())).chain(part_of_test(row, rows)).collect()
    };
    let found: Vec<Vec<String>> = rows.iter().map(all).collect();
    for (row, found) in rows.iter_mut().zip(found) {
        found.iter().for_each(|word| add(row, word));
    }
}

/// Adds to `differs` of `row` what of `words`, separated by semicolons, is not said there. What does not leave the share takes it away.
pub fn add(row: &mut Row, words: &str) {
    let said = row.differs.take().unwrap_or_default();
    let mut all: Vec<&str> = said.split("; ").filter(|word| !word.is_empty()).collect();
    for word in words.split("; ").filter(|word| !word.is_empty()) {
        if !all.contains(&word) {
            all.push(word);
            row.fraction = row.fraction.filter(|_| leaves_share(word));
        }
    }
    row.differs = (!all.is_empty()).then(|| all.join("; "));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(protocol: &str, task: &str, preset: &str) -> Row {
        Row {
            task: Some(task.to_owned()),
            preset: Some(preset.to_owned()),
            seed: Some(1),
            fraction: Some(1.0),
            ..Row::new(protocol, "full")
        }
    }

    fn completed(mut rows: Vec<Row>, data: &[(&str, &str)]) -> Vec<Row> {
        let data = data.iter().map(|(name, hash)| ((*name).to_owned(), (*hash).to_owned())).collect();
        complete(&mut rows, &data);
        let once = rows.clone();
        complete(&mut rows, &data);
        assert_eq!(rows, once, "a second time changes nothing");
        rows
    }

    #[test]
    fn number_format_and_generated_data_are_said_and_leave_the_share() {
        let rows = completed(vec![row("lra", "listops", "ls-lra")], &[("listops", "7848350e67a2ff")]);
        assert_eq!(
            (rows[0].differs.as_deref(), rows[0].fraction),
            (Some("f32 (mixed precision); generated expressions (the release's files)"), Some(1.0))
        );
        let rows = completed(vec![row("lra", "listops", "lra-repo")], &[("listops", "another")]);
        assert_eq!(rows[0].differs, None, "the arena's code is f32, and these are its files");
        let bf16 = Row { dtype: "bf16".to_owned(), ..row("charlm", "enwik8", "charlm-small") };
        assert_eq!(completed(vec![bf16], &[])[0].differs, None, "its own words say so");
    }

    #[test]
    fn a_part_of_a_test_set_is_said_and_takes_the_share() {
        let of =
            |task: &str, metric: &str, value| row("vision", task, "cvt-small").with(metric, "1", Some(value));
        let rows = vec![
            of("cifar10", "accuracy", 60.0),
            of("cifar10", "tested", 9000.0),
            of("cifar10-c fog", "accuracy", 50.0),
            of("cifar10-c", "tested", 75_000.0),
        ];
        let rows = completed(rows, &[]);
        assert_eq!(rows[0].differs.as_deref(), Some("tested on 9000 images (10000)"));
        assert_eq!(rows[0].fraction, None);
        assert_eq!(rows[2].differs.as_deref(), Some("tested on 1000 images (10000)"));
        let of = |tested| {
            let count = row("lra", "retrieval", "bag").with("tested", "1", Some(tested));
            completed(vec![count], &[])[0].differs.clone()
        };
        assert_eq!((of(17_408.0), of(576.0).as_deref()), (None, Some("tested on 576 pairs (17437)")));
    }

    #[test]
    fn rows_of_a_build_without_dropout_say_so() {
        let built = |model: &str, commit: &str| {
            let row = Row {
                commit: Some(commit.to_owned()),
                model: model.to_owned(),
                ..row("mlm", "imdb", "roberta-small")
            };
            completed(vec![row], &[])[0].differs.clone()
        };
        assert_eq!(built("full", "28fe7201f918").as_deref(), Some("no attention dropout (0.1)"));
        assert_eq!((built("linear", "28fe7201f918"), built("full", "6dba4a1693e5")), (None, None));
    }
}
