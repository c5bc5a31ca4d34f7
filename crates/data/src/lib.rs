//! The data sets: one file each, one line each in [`TABLE`], read from local files or generated.
//!
//! Imports the kernels (random streams) and the records, and knows no model. The types to know are [`DataSetEntry`] (one data set, as
//! data), [`Dataset`] (a loaded one) and [`tokenizer::Tokenizer`]. To add one: write `crates/data/src/<name>.rs` with a
//! `pub static SET` and add its line to `TABLE`.
//!
//! Archives are read as streams without being unpacked to disk: only expected members are read, and every member has a size
//! limit.

pub mod amazon;
pub mod bracket_arithmetic;
pub mod content_hash;
pub mod corpus;
pub mod data_dir;
pub mod entry;
pub mod enwik8;
pub mod fetch;
pub mod glue;
pub mod images;
pub mod imdb;
pub mod induction;
pub mod labelled;
pub mod listops;
pub mod lra_image;
pub mod lra_text;
pub mod mad;
pub mod masked;
pub mod modular_arithmetic;
pub mod mqar;
pub mod own;
pub mod parity;
pub mod pathfinder;
pub mod position_files;
pub mod position_labels;
pub mod retrieval;
pub mod running_text;
pub mod sample;
pub mod sentences;
pub mod store;
pub mod story;
pub mod subset;
pub mod text8;
pub mod tokenizer;
pub mod wikitext;
pub mod word_corpus;

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use effattn_record::config::registry::Registry;
use effattn_record::config::unknown;
pub use entry::{CharTask, DataKind, DataSetEntry, ExampleTask, Origin, TextTask, WordTask, WriteFormat};
pub use labelled::{LabelledTexts, Text};

/// Every data set of the crate.
pub static TABLE: &[&DataSetEntry] = &[
    &listops::SET,
    &lra_text::SET,
    &imdb::SET,
    &retrieval::SET,
    &lra_image::SET,
    &pathfinder::PATHFINDER32,
    &pathfinder::PATHFINDER64,
    &pathfinder::PATHFINDER128,
    &glue::SST_2,
    &glue::QQP,
    &glue::QQP_SAMPLE,
    &glue::MNLI,
    &glue::MNLI_SAMPLE,
    &amazon::SET,
    &sentences::SET,
    &enwik8::SET,
    &text8::SET,
    &sample::SET,
    &sample::WORDS,
    &wikitext::WIKITEXT103,
    &wikitext::SMALL,
    &mqar::SET,
    &parity::SET,
    &modular_arithmetic::SET,
    &bracket_arithmetic::SET,
    &induction::SET,
    &mad::in_context_recall::SET,
    &mad::noisy_recall::SET,
    &mad::fuzzy_recall::SET,
    &mad::selective_copying::SET,
    &mad::compression::SET,
    &mad::memorization::SET,
];

static ALL: Registry<DataSetEntry> = Registry::new(TABLE);

/// Adds a data set at run time (a library user's own, or a test's).
pub fn register(set: &'static DataSetEntry) {
    ALL.add(set);
}

/// Every data set: the table, then the registered ones.
pub fn data_sets() -> Vec<&'static DataSetEntry> {
    ALL.all()
}

/// The data set called `name`.
pub fn find(name: &str) -> Option<&'static DataSetEntry> {
    data_sets().into_iter().find(|set| set.name == name)
}

/// The data sets that consist of examples with classes.
pub fn tasks() -> Vec<(&'static DataSetEntry, &'static ExampleTask)> {
    data_sets().into_iter().filter_map(|set| Some((set, set.examples()?))).collect()
}

/// The data sets that consist of texts with classes.
pub fn texts() -> Vec<(&'static DataSetEntry, &'static TextTask)> {
    data_sets().into_iter().filter_map(|set| Some((set, set.texts()?))).collect()
}

/// The data sets that are one text of symbols.
pub fn corpora() -> Vec<(&'static DataSetEntry, &'static CharTask)> {
    data_sets().into_iter().filter_map(|set| Some((set, set.symbols()?))).collect()
}

/// The data sets that are texts of words.
pub fn word_corpora() -> Vec<(&'static DataSetEntry, &'static WordTask)> {
    data_sets().into_iter().filter_map(|set| Some((set, set.words()?))).collect()
}

/// The texts of words called `name`, or in the files that it lists.
pub fn words(name: &str) -> Result<(&'static DataSetEntry, &'static WordTask), DataError> {
    match own::words(name)? {
        Some(found) => Ok(found),
        None => find_or_error("corpus of words", name, &word_corpora()),
    }
}

/// The set of examples called `name`, or in the files that it lists.
pub fn task(name: &str) -> Result<(&'static DataSetEntry, &'static ExampleTask), DataError> {
    match own::examples(name)? {
        Some(found) => Ok(found),
        None => find_or_error("task", name, &tasks()),
    }
}

/// The set of texts called `name`, or in the files that it lists.
pub fn text_task(name: &str) -> Result<(&'static DataSetEntry, &'static TextTask), DataError> {
    match own::labelled(name)? {
        Some(found) => Ok(found),
        None => find_or_error("task", name, &texts()),
    }
}

/// The corpus called `name`, or in the files that it lists.
pub fn corpus(name: &str) -> Result<(&'static DataSetEntry, &'static CharTask), DataError> {
    match own::symbols(name)? {
        Some(found) => Ok(found),
        None => find_or_error("corpus", name, &corpora()),
    }
}

fn find_or_error<T>(
    what: &str,
    name: &str,
    known: &[(&'static DataSetEntry, &'static T)],
) -> Result<(&'static DataSetEntry, &'static T), DataError> {
    let names = known.iter().map(|(set, _)| set.name);
    let error = || DataError::Unknown(unknown(what, name, names));
    known.iter().find(|(set, _)| set.name == name).copied().ok_or_else(error)
}

/// How data are read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LoadOptions {
    /// Validation examples are held out of the training split where the source validates on the test split.
    pub strict: bool,
    /// Whether incomplete data may be used.
    pub allow_partial: bool,
    /// Whether closing brackets of ListOps are tokens.
    pub keep_close: bool,
}

impl LoadOptions {
    /// Complete data only, or incomplete ones too.
    pub const fn partial(allow_partial: bool) -> Self {
        Self { strict: false, allow_partial, keep_close: false }
    }
}

/// Which part of a data set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Split {
    /// Trained on.
    Train,
    /// Selected on.
    Validation,
    /// Reported.
    Test,
}

impl Split {
    /// All three.
    pub const ALL: [Self; 3] = [Self::Train, Self::Validation, Self::Test];

    /// Name in messages and files.
    pub fn name(self) -> &'static str {
        match self {
            Self::Train => "train",
            Self::Validation => "validation",
            Self::Test => "test",
        }
    }
}

/// One example: token ids (0 is padding), the second document of a pair, and the class.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Example {
    /// Token ids, not padded.
    pub tokens: Vec<u32>,
    /// The other document.
    pub second: Option<Vec<u32>>,
    /// Class.
    pub label: u32,
}

/// A loaded data set.
pub trait Dataset: Send + Sync {
    /// Number of examples of a split.
    fn len(&self, split: Split) -> usize;

    /// Example `index` of `split`, cut to `max_len` tokens a document.
    fn example(&self, split: Split, index: usize, max_len: usize) -> Example;

    /// SHA-256 of everything that was read, classes and splits included: the data's identity in manifests.
    fn hash(&self) -> &str;

    /// What is missing of the full data set, in words; `None` when it is complete.
    fn partial(&self) -> Option<&str>;

    /// How its texts became ids, where they are a person's own.
    fn reading(&self) -> Option<&own::Reading> {
        None
    }

    /// Whether there is nothing in a split.
    fn is_empty(&self, split: Split) -> bool {
        self.len(split) == 0
    }
}

/// Why data cannot be used. Every message says what to do next.
#[derive(Debug, thiserror::Error)]
pub enum DataError {
    /// A name that no data set has.
    #[error("{0}")]
    Unknown(String),
    /// Nothing was found.
    #[error("{what} is not in {}; {next}", dir.display())]
    Missing {
        /// The data.
        what: &'static str,
        /// Where it was looked for.
        dir: PathBuf,
        /// What to type or place where.
        next: String,
    },
    /// A record that cannot be read.
    #[error("{}:{line}: {reason}", file.display())]
    Line {
        /// The file.
        file: PathBuf,
        /// Line, from 1.
        line: usize,
        /// What is wrong and what was expected.
        reason: String,
    },
    /// A file that cannot be read as what it should be.
    #[error("{}: {reason}", file.display())]
    File {
        /// The file.
        file: PathBuf,
        /// What is wrong and what was expected.
        reason: String,
    },
    /// Data that is not all there, without permission to go on.
    #[error("{what} in {} is incomplete: {missing}; fetch the rest, or use what is there with --allow-partial (rows are labelled)", dir.display())]
    Partial {
        /// The data.
        what: &'static str,
        /// Where.
        dir: PathBuf,
        /// What is missing.
        missing: String,
    },
}

/// Bytes as token ids: byte + 1, so that 0 is padding.
pub fn byte_ids(text: &[u8], max_len: usize) -> Vec<u32> {
    text.iter().take(max_len).map(|&byte| u32::from(byte) + 1).collect()
}

/// A byte as a person reads it.
pub fn byte_name(byte: u8) -> String {
    match byte {
        b'\n' => "end of line".to_owned(),
        b' '..=b'~' => char::from(byte).to_string(),
        _ => format!("byte {byte}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_data_set_file_is_in_the_table() {
        let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
        let read = |path: &std::path::Path| std::fs::read_to_string(path).unwrap_or_default();
        let mut files: Vec<PathBuf> = Vec::new();
        for entry in std::fs::read_dir(&root).unwrap() {
            let path = entry.unwrap().path();
            match path.is_dir() {
                true => files.extend(std::fs::read_dir(path).unwrap().map(|entry| entry.unwrap().path())),
                false => files.push(path),
            }
        }
        let sets = |text: &str| {
            text.lines()
                .filter(|line| line.starts_with("pub static ") && line.contains(": DataSetEntry = "))
                .count()
        };
        let count: usize = files.iter().map(|path| sets(&read(path))).sum();
        assert_eq!(count, TABLE.len(), "one static for each line of the table");
    }

    #[test]
    fn names_are_unique_and_unknown_ones_are_errors() {
        let mut names: Vec<&str> = TABLE.iter().map(|set| set.name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), TABLE.len());
        for error in [task("listop").err().unwrap(), task("enwik8").err().unwrap()] {
            let error = error.to_string();
            assert!(error.contains("listops, text, retrieval") && !error.contains("sample"), "{error}");
        }
        let error = corpus("enwik9").err().unwrap().to_string();
        assert!(error.contains("did you mean enwik8") && error.contains("text8, sample"), "{error}");
    }

    #[test]
    fn entries_are_complete() {
        for set in TABLE {
            assert!(!set.about.is_empty() && !set.records.is_empty(), "{}", set.name);
            match set.examples() {
                Some(examples) => {
                    assert!(
                        examples.vocabulary > 1 && examples.classes > 1 && examples.len > 0,
                        "{}",
                        set.name
                    );
                    assert!(examples.train > 0 && set.kind.documents() > 0, "{}", set.name);
                }
                None => {
                    let texts = set.texts().is_some_and(|texts| texts.classes.len() > 1 && texts.train > 0);
                    let symbols = set.symbols().is_some_and(|symbols| symbols.vocabulary > 1);
                    let words = set.words().is_some_and(|words| words.vocabulary > 1);
                    let positions = set.positions().is_some_and(|task| task.alphabet.vocabulary > 1);
                    assert!(texts || symbols || words || positions, "{}", set.name);
                }
            }
        }
    }
}
