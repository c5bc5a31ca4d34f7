//! The little text that ships with the program, so that a language model can be tried without any data.

use super::corpus::CharCorpus;
use super::entry::{CharTask, DataKind, DataSetEntry, Origin, WordTask};
use super::story;
use super::word_corpus::{self, CorpusText, WordCorpus};

/// The table line.
pub static SET: DataSetEntry = DataSetEntry {
    name: "sample",
    collection: "sample",
    title: "the sample",
    about: "the next byte of the little text that ships with the program",
    records: "65,536 bytes",
    kind: DataKind::Symbols(CharTask {
        vocabulary: 256,
        complete: None,
        load: &|_, _| {
            let partial = Some("the little text that ships with the program".to_owned());
            Ok(CharCorpus { partial, ..CharCorpus::new(story::text(), 0) })
        },
    }),
    origin: Origin::BuiltIn,
    locate: |_| Ok(None),
};

/// The same text as words.
pub static WORDS: DataSetEntry = DataSetEntry {
    name: "sample-words",
    collection: "sample",
    title: "the sample",
    about: "the next word of the little text that ships with the program",
    records: "65,536 bytes",
    kind: DataKind::Words(WordTask {
        vocabulary: VOCABULARY,
        complete: None,
        load: &|_, _| {
            let mut text = String::new();
            for letter in String::from_utf8_lossy(&story::text()).chars() {
                // punctuation stands alone, as in published texts of words
                text.extend(letter.is_ascii_punctuation().then_some(' '));
                text.push(letter);
            }
            let lines: Vec<&str> = text.lines().filter(|line| !line.is_empty()).collect();
            let cut = |share: usize| lines.len() * share / 100;
            let part =
                |from, to| CorpusText::Embedded((lines[cut(from)..cut(to)].join("\n") + "\n").into_bytes());
            let [train, validation, test] = [part(0, 90), part(90, 95), part(95, 100)];
            let source = word_corpus::VocabSource::Counted(1, 8);
            let corpus = WordCorpus::read([Some(&train), Some(&validation), Some(&test)], &source)?;
            let partial = Some("the little text that ships with the program".to_owned());
            Ok(WordCorpus { partial, ..corpus })
        },
    }),
    origin: Origin::BuiltIn,
    locate: |_| Ok(None),
};

/// Words of the text in the program.
const VOCABULARY: usize = 440;

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::LoadOptions;

    #[test]
    fn the_words_in_the_program_are_counted_right() {
        let corpus = (WORDS.words().unwrap().load)(Path::new(""), LoadOptions::default()).unwrap();
        assert_eq!(corpus.vocabulary.len(), VOCABULARY);
        assert!(corpus.train.len() > 12_000 && corpus.tested().len() > 500);
    }
}
