//! Texts of a person's own as examples of token ids.

use std::path::Path;

use super::texts::{OwnTexts, unknown_label};
use super::{OwnFiles, Reading, TextUnits, table};
use crate::content_hash::ContentHash;
use crate::labelled::Text;
use crate::{DataError, Dataset, Example, Split};

/// An example, not cut.
struct Document {
    tokens: Box<[u32]>,
    second: Option<Box<[u32]>>,
    label: u32,
}

/// The documents of a person's files.
pub struct OwnDocuments {
    pub(super) reading: Reading,
    splits: [Vec<Document>; 3],
    hash: String,
}

impl OwnDocuments {
    /// Reads `files`; a vocabulary of words is that of the training texts.
    pub(super) fn read(files: &OwnFiles) -> Result<Self, DataError> {
        let texts = OwnTexts::read(files)?;
        let reading = Reading::of(files, &texts.classes, &texts.splits[0])?;
        Self::new(reading, texts.splits)
    }

    /// `splits` as `reading` cuts them.
    pub(super) fn new(reading: Reading, splits: [Vec<Text>; 3]) -> Result<Self, DataError> {
        let mut content = ContentHash::default();
        content.number(reading.classes.len() as u64);
        reading.classes.iter().for_each(|class| content.field(class.as_bytes()));
        match &reading.units {
            TextUnits::Bytes => content.number(0),
            TextUnits::Words(words) => {
                content.number(words.len() as u64);
                words.iter().for_each(|word| content.field(word.as_bytes()));
            }
            TextUnits::Tokenizer { hash, .. } => content.field(hash.as_bytes()),
        }
        let mut all = [const { Vec::new() }; 3];
        for (side, texts) in all.iter_mut().zip(&splits) {
            content.number(texts.len() as u64);
            let first = reading.ids(texts.iter().map(|text| text.first.as_str()))?;
            let second = reading.ids(texts.iter().filter_map(|text| text.second.as_deref()))?;
            let mut second = second.into_iter();
            for (text, tokens) in texts.iter().zip(first) {
                let second = if text.second.is_some() { second.next() } else { None };
                for ids in [Some(&tokens), second.as_ref()].into_iter().flatten() {
                    let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
                    content.field(&bytes);
                }
                content.number(u64::from(text.label));
                side.push(Document { tokens, second, label: text.label });
            }
        }
        Ok(Self { reading, splits: all, hash: content.finish() })
    }

    /// Tokens of the longest training document.
    pub(super) fn longest(&self) -> usize {
        let documents = self.splits[0].iter().flat_map(|one| [Some(&one.tokens), one.second.as_ref()]);
        documents.flatten().map(|ids| ids.len()).max().unwrap_or(1)
    }

    /// `800 / 100 / 100 texts, 2 classes`.
    pub(super) fn records(&self) -> String {
        let [train, validation, test] = self.splits.each_ref().map(Vec::len);
        format!("{train} / {validation} / {test} texts, {} classes", self.reading.classes.len())
    }

    fn side(&self, split: Split) -> &[Document] {
        match split {
            Split::Train => &self.splits[0],
            Split::Validation => &self.splits[1],
            Split::Test => &self.splits[2],
        }
    }
}

impl Reading {
    /// The documents of `file`, all of them as the test split: its labels must be among the classes.
    pub fn test(&self, file: &Path) -> Result<OwnDocuments, DataError> {
        let rows = table::read(file)?;
        let mut texts = Vec::with_capacity(rows.len());
        for row in rows {
            let wrong = |reason: String| DataError::Line { file: file.to_owned(), line: row.line, reason };
            if row.second.is_some() != self.pairs {
                let [here, there] = if self.pairs { ["one text", "two"] } else { ["two texts", "one"] };
                return Err(wrong(format!("has {here}, and the model was trained on {there}")));
            }
            let label = self.classes.iter().position(|class| *class == row.label);
            let label = label
                .ok_or_else(|| wrong(unknown_label(&row.label, &self.classes, "the run's training data")))?;
            texts.push(Text { first: row.first, second: row.second, label: label as u32 });
        }
        OwnDocuments::new(self.clone(), [Vec::new(), Vec::new(), texts])
    }
}

impl Dataset for OwnDocuments {
    fn len(&self, split: Split) -> usize {
        self.side(split).len()
    }

    fn example(&self, split: Split, index: usize, max_len: usize) -> Example {
        let cut = |ids: &[u32]| ids[..ids.len().min(max_len)].to_vec();
        let Document { tokens, second, label } = &self.side(split)[index];
        Example { tokens: cut(tokens), second: second.as_deref().map(cut), label: *label }
    }

    fn hash(&self) -> &str {
        &self.hash
    }

    fn partial(&self) -> Option<&str> {
        None
    }

    fn reading(&self) -> Option<&Reading> {
        Some(&self.reading)
    }
}
