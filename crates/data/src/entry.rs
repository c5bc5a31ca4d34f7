//! What an entry of the table of data sets says.

use std::io;
use std::path::{Path, PathBuf};

use super::corpus::CharCorpus;
use super::fetch::DownloadSource;
use super::labelled::LabelledTexts;
use super::position_labels::PositionTask;
use super::word_corpus::WordCorpus;
use super::{DataError, Dataset, LoadOptions};

/// Loads examples from a folder.
pub type LoadExamples = &'static (dyn Fn(&Path, LoadOptions) -> Result<Box<dyn Dataset>, DataError> + Sync);
/// Loads texts with classes from a folder.
pub type LoadTexts = &'static (dyn Fn(&Path, LoadOptions) -> Result<LabelledTexts, DataError> + Sync);
/// Loads texts of words from a folder.
pub type LoadWords = &'static (dyn Fn(&Path, LoadOptions) -> Result<WordCorpus, DataError> + Sync);
/// Loads a corpus from a folder.
pub type LoadSymbols = &'static (dyn Fn(&Path, LoadOptions) -> Result<CharCorpus, DataError> + Sync);

/// One data set, as data.
pub struct DataSetEntry {
    /// Name in CLI, TOML and CSV.
    pub name: &'static str,
    /// The collection it comes from, which `fetch` takes as a name too.
    pub collection: &'static str,
    /// Name in prose.
    pub title: &'static str,
    /// What a model learns from it, in a line.
    pub about: &'static str,
    /// Size of the whole set, in words.
    pub records: &'static str,
    /// What it consists of, and how that is loaded.
    pub kind: DataKind,
    /// Where it comes from.
    pub origin: Origin,
    /// The file or folder that loading would read in a folder; nothing where there is none.
    pub locate: fn(&Path) -> Result<Option<PathBuf>, DataError>,
}

/// What a data set consists of.
#[derive(Clone, Copy)]
pub enum DataKind {
    /// Documents of token ids, each with a class.
    Sequences(ExampleTask),
    /// Two documents and the class of the pair.
    Pairs(ExampleTask),
    /// Gray pixels as token ids, row by row, and the class of the image.
    Images(ExampleTask),
    /// Texts or pairs of texts with a class, for models with a tokenizer.
    Texts(TextTask),
    /// One text of symbols in three parts.
    Symbols(CharTask),
    /// Texts of words.
    Words(WordTask),
    /// Sequences of token ids with labels at some positions, drawn from a seed.
    Positions(PositionTask),
}

/// Texts with classes.
#[derive(Clone, Copy)]
pub struct TextTask {
    /// Names of the classes, in the order of their numbers.
    pub classes: &'static [&'static str],
    /// Texts in the training split of the whole set.
    pub train: usize,
    /// Loads them.
    pub load: LoadTexts,
}

/// Examples with classes.
#[derive(Clone, Copy)]
pub struct ExampleTask {
    /// Number of token ids, padding included.
    pub vocabulary: usize,
    /// Number of classes.
    pub classes: usize,
    /// Tokens of a document that a protocol reads where no published one says.
    pub len: usize,
    /// Examples in the training split of the whole set.
    pub train: usize,
    /// Whether ids are bytes of text (each plus 1), so that texts can be changed.
    pub text: bool,
    /// Loads them.
    pub load: LoadExamples,
}

/// A text of symbols.
#[derive(Clone, Copy)]
pub struct CharTask {
    /// Rows of the embedding, spare ones of published models included.
    pub vocabulary: usize,
    /// Symbols of the whole corpus; absent where no published protocol uses it.
    pub complete: Option<usize>,
    /// Loads it.
    pub load: LoadSymbols,
}

/// Texts of words.
#[derive(Clone, Copy)]
pub struct WordTask {
    /// Words of the whole set's vocabulary, special ones included.
    pub vocabulary: usize,
    /// Words of the whole training text, ends of lines included; absent where no published protocol trains on it.
    pub complete: Option<usize>,
    /// Loads them.
    pub load: LoadWords,
}

/// Where a data set comes from.
pub enum Origin {
    /// One file at its canonical address.
    Download(DownloadSource),
    /// It is made by this program when it is first used.
    Generated {
        /// Forms in which `fetch` writes it; none for a set that is made example by example.
        formats: &'static [WriteFormat],
        /// What is read instead where it lies in the data folder; `None`: it is always generated.
        instead: Option<&'static str>,
    },
    /// A person places it in the data folder; the words end with the names of its files.
    UserProvided(&'static str),
    /// It is part of the program.
    BuiltIn,
}

/// A form in which a generated set is written.
pub struct WriteFormat {
    /// Name for `--format`.
    pub name: &'static str,
    /// What it is.
    pub about: &'static str,
    /// Writes a set into a folder and gives its files.
    pub write: fn(&DataSetEntry, &Path) -> io::Result<Vec<PathBuf>>,
}

impl DataKind {
    /// Name of the kind.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Sequences(_) => "sequences",
            Self::Pairs(_) => "pairs",
            Self::Images(_) => "images",
            Self::Texts(_) => "texts",
            Self::Symbols(_) => "symbols",
            Self::Words(_) => "words",
            Self::Positions(_) => "positions",
        }
    }

    /// Documents of token ids per example; texts that wait for a tokenizer, corpora and words have none.
    pub fn documents(&self) -> usize {
        match self {
            Self::Sequences(_) | Self::Images(_) | Self::Positions(_) => 1,
            Self::Pairs(_) => 2,
            Self::Texts(_) | Self::Symbols(_) | Self::Words(_) => 0,
        }
    }
}

impl DataSetEntry {
    /// Its examples, where it has any.
    pub fn examples(&self) -> Option<&ExampleTask> {
        match &self.kind {
            DataKind::Sequences(examples) | DataKind::Pairs(examples) | DataKind::Images(examples) => {
                Some(examples)
            }
            DataKind::Texts(_) | DataKind::Symbols(_) | DataKind::Words(_) | DataKind::Positions(_) => None,
        }
    }

    /// Its examples with labels at positions, where it has any.
    pub fn positions(&self) -> Option<&PositionTask> {
        match &self.kind {
            DataKind::Positions(task) => Some(task),
            _ => None,
        }
    }

    /// Its texts, where it has any.
    pub fn texts(&self) -> Option<&TextTask> {
        match &self.kind {
            DataKind::Texts(texts) => Some(texts),
            _ => None,
        }
    }

    /// Its text of symbols, where it is one.
    pub fn symbols(&self) -> Option<&CharTask> {
        match &self.kind {
            DataKind::Symbols(symbols) => Some(symbols),
            _ => None,
        }
    }

    /// Its texts of words, where it has them.
    pub fn words(&self) -> Option<&WordTask> {
        match &self.kind {
            DataKind::Words(words) => Some(words),
            _ => None,
        }
    }

    /// What brings it into a data folder; nothing where it is in the program.
    pub fn command(&self) -> Option<String> {
        match self.origin {
            Origin::BuiltIn => None,
            Origin::Download(_) | Origin::Generated { .. } | Origin::UserProvided(_) => {
                Some(format!("effattn fetch {}", self.collection))
            }
        }
    }
}
