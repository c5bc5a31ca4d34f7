//! Texts with classes: what is fine-tuned on. A tokenizer makes ids of them.

use super::Split;
use super::content_hash::ContentHash;

/// One text or pair of texts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Text {
    /// The text, or the first of a pair.
    pub first: String,
    /// The second of a pair.
    pub second: Option<String>,
    /// Class.
    pub label: u32,
}

/// A loaded set of texts.
pub struct LabelledTexts {
    train: Vec<Text>,
    held_out: Vec<Text>,
    test: Vec<Text>,
    hash: String,
    partial: Option<String>,
    remarks: Vec<String>,
}

impl LabelledTexts {
    /// A set that is selected and reported on `test`.
    pub fn new(train: Vec<Text>, test: Vec<Text>) -> Self {
        let mut content = ContentHash::default();
        for side in [&train, &test] {
            content.number(side.len() as u64);
            for text in side {
                content.field(text.first.as_bytes());
                content.field(text.second.as_deref().unwrap_or_default().as_bytes());
                content.number(u64::from(text.label));
            }
        }
        let hash = content.finish();
        Self { train, held_out: Vec::new(), test, hash, partial: None, remarks: Vec::new() }
    }

    /// The same set with texts that weights are selected on instead.
    #[must_use]
    pub fn selected_on(self, held_out: Vec<Text>) -> Self {
        let held = Self::new(held_out, Vec::new());
        let mut content = ContentHash::default();
        content.field(self.hash.as_bytes());
        content.field(held.hash.as_bytes());
        Self { held_out: held.train, hash: content.finish(), ..self }
    }

    /// The same set under another checksum, which covers more.
    #[must_use]
    pub(crate) fn with_hash(self, hash: String) -> Self {
        Self { hash, ..self }
    }

    /// The same set with what is missing of it, and what is to be said about it.
    #[must_use]
    pub fn said(self, partial: Option<String>, remarks: Vec<String>) -> Self {
        Self { partial, remarks, ..self }
    }

    /// The texts of `split`; validation is the test split where none are held out.
    pub fn side(&self, split: Split) -> &[Text] {
        match split {
            Split::Train => &self.train,
            Split::Validation if !self.held_out.is_empty() => &self.held_out,
            Split::Validation | Split::Test => &self.test,
        }
    }

    /// SHA-256 of texts, classes and splits.
    pub fn hash(&self) -> &str {
        &self.hash
    }

    /// What is missing of the whole set, in words.
    pub fn partial(&self) -> Option<&str> {
        self.partial.as_deref()
    }

    /// What is to be said about it: rows that were left out, sizes that the program chose.
    pub fn remarks(&self) -> &[String] {
        &self.remarks
    }
}
