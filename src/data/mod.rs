//! Tasks and corpora: one file each, read from what a person has or generated.
//!
//! Nothing is unpacked to disk: archives are read as streams, only expected members are looked at, and every
//! member has a size limit.

pub mod corpus;
pub mod fetch;
pub mod image;
pub mod listops;
pub mod pathfinder;
pub mod retrieval;
pub mod select;
pub mod store;
pub mod text;

use std::path::PathBuf;

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
    pub tokens: Vec<u16>,
    /// The other document.
    pub second: Option<Vec<u16>>,
    /// Class.
    pub label: u32,
}

/// A loaded data set.
pub trait Dataset: Send + Sync {
    /// Number of examples of a split.
    fn len(&self, split: Split) -> usize;

    /// Example `index` of `split`, cut to `max_len` tokens a document.
    fn example(&self, split: Split, index: usize, max_len: usize) -> Example;

    /// SHA-256 of what was read, in a canonical order: the data's identity in manifests.
    fn hash(&self) -> &str;

    /// What is missing of the full data set, in words; `None` when it is complete.
    fn partial(&self) -> Option<&str>;

    /// Whether there is nothing in a split.
    fn is_empty(&self, split: Split) -> bool {
        self.len(split) == 0
    }
}

/// Why data cannot be used. Every message says what to do next.
#[derive(Debug, thiserror::Error)]
pub enum DataError {
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
    #[error("{what} in {} is incomplete: {missing}; fetch the rest, or go on with --allow-partial (rows are labelled)", dir.display())]
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
pub(crate) fn byte_ids(text: &[u8], max_len: usize) -> Vec<u16> {
    text.iter().take(max_len).map(|&byte| u16::from(byte) + 1).collect()
}
