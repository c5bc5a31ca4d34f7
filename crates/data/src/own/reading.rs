//! How texts of a person's own become ids: what a checkpoint must know of its data to be evaluated on others.

use std::collections::HashMap;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::OwnFiles;
use crate::labelled::Text;
use crate::tokenizer::Tokenizer;
use crate::{DataError, byte_ids, byte_name};

/// Words of a vocabulary at most; the less frequent ones are unknown.
const MOST_WORDS: usize = 30_000;
/// Id of a word that is not in the vocabulary; 0 is padding.
const UNKNOWN: u32 = 1;

/// What a text is cut into.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TextUnits {
    /// Its bytes: byte + 1.
    Bytes,
    /// Runs of letters and digits, and every other character that is no blank. The words by falling count in the training texts.
    Words(Vec<String>),
    /// The words of a tokenizer: id + 1.
    Tokenizer {
        /// Its file or folder.
        path: String,
        /// Its checksum.
        hash: String,
    },
}

/// How texts become examples.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reading {
    /// Names of the classes, in the order of their numbers.
    pub classes: Vec<String>,
    /// Whether an example has two texts.
    pub pairs: bool,
    /// What texts are cut into.
    pub units: TextUnits,
}

impl Reading {
    /// How the documents of a text task of the table are read: bytes, classes by number.
    pub fn bytes(classes: usize, pairs: bool) -> Self {
        let classes = (0..classes).map(|class| class.to_string()).collect();
        Self { classes, pairs, units: TextUnits::Bytes }
    }

    /// The reading of `files`, whose vocabulary is made of `texts`.
    pub(super) fn of(files: &OwnFiles, classes: &[String], texts: &[Text]) -> Result<Self, DataError> {
        let pairs = texts.first().is_some_and(|text| text.second.is_some());
        let units = match files.tokenizer.as_str() {
            "bytes" => TextUnits::Bytes,
            "words" => {
                let documents =
                    texts.iter().flat_map(|text| [Some(&text.first), text.second.as_ref()]).flatten();
                TextUnits::Words(frequent(documents.map(String::as_str)))
            }
            path => {
                let hash = Tokenizer::load(Path::new(path))?.hash().to_owned();
                TextUnits::Tokenizer { path: path.to_owned(), hash }
            }
        };
        Ok(Self { classes: classes.to_vec(), pairs, units })
    }

    /// Number of ids, padding included.
    pub fn vocabulary(&self) -> Result<usize, DataError> {
        Ok(match &self.units {
            TextUnits::Bytes => 257,
            TextUnits::Words(words) => words.len() + 2,
            TextUnits::Tokenizer { path, .. } => Tokenizer::load(Path::new(path))?.len() + 1,
        })
    }

    /// What `ids` stand for: bytes, words, or where a tokenizer cut them their numbers there.
    pub fn tokens(&self, ids: &[u32]) -> Vec<String> {
        let token = |id: &u32| match &self.units {
            _ if *id == 0 => "padding".to_owned(),
            TextUnits::Bytes => u8::try_from(id - 1).map_or_else(|_| id.to_string(), byte_name),
            TextUnits::Words(words) => {
                let word = (*id as usize).checked_sub(UNKNOWN as usize + 1).and_then(|at| words.get(at));
                word.map_or_else(|| "unknown word".to_owned(), String::clone)
            }
            TextUnits::Tokenizer { .. } => (id - 1).to_string(),
        };
        ids.iter().map(token).collect()
    }

    /// The ids of one document.
    pub fn document(&self, text: &str) -> Result<Vec<u32>, DataError> {
        Ok(self.ids(std::iter::once(text))?.pop().unwrap_or_default().into_vec())
    }

    /// The ids of the documents of `texts`, in order.
    pub(super) fn ids<'a>(&self, texts: impl Iterator<Item = &'a str>) -> Result<Vec<Box<[u32]>>, DataError> {
        match &self.units {
            TextUnits::Bytes => Ok(texts.map(|text| byte_ids(text.as_bytes(), usize::MAX).into()).collect()),
            TextUnits::Words(words) => {
                let ids: HashMap<&str, u32> = words
                    .iter()
                    .enumerate()
                    .map(|(at, word)| (word.as_str(), at as u32 + UNKNOWN + 1))
                    .collect();
                let id = |word| ids.get(word).copied().unwrap_or(UNKNOWN);
                Ok(texts.map(|text| pieces(text).map(id).collect()).collect())
            }
            TextUnits::Tokenizer { path, hash } => {
                let path = Path::new(path);
                let tokenizer = Tokenizer::load(path)?;
                tokenizer.expect(hash, path)?;
                let mut encoder = tokenizer.encoder();
                Ok(texts.map(|text| encoder.ids(text).into_iter().map(|id| id + 1).collect()).collect())
            }
        }
    }
}

/// Runs of letters and digits, and every other character that is no blank.
fn pieces(text: &str) -> impl Iterator<Item = &str> {
    let mut rest = text;
    std::iter::from_fn(move || {
        rest = rest.trim_start();
        let first = rest.chars().next()?;
        let len = match first.is_alphanumeric() {
            true => rest.find(|letter: char| !letter.is_alphanumeric()).unwrap_or(rest.len()),
            false => first.len_utf8(),
        };
        let (piece, behind) = rest.split_at(len);
        rest = behind;
        Some(piece)
    })
}

/// The most frequent pieces of `texts`, by falling count, equal counts in the order of code points.
fn frequent<'a>(texts: impl Iterator<Item = &'a str>) -> Vec<String> {
    let mut counts: HashMap<&str, u64> = HashMap::new();
    texts.flat_map(pieces).for_each(|piece| *counts.entry(piece).or_default() += 1);
    let mut all: Vec<(&str, u64)> = counts.into_iter().collect();
    all.sort_by(|a, b| b.1.cmp(&a.1).then_with(|| a.0.cmp(b.0)));
    all.truncate(MOST_WORDS);
    all.into_iter().map(|(word, _)| word.to_owned()).collect()
}
