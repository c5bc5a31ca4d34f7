//! The little text that ships with the program, so that a language model can be tried without any data.

use super::corpus::Corpus;
use super::set::{DataSet, Kind, Origin, Symbols, Words};
use super::story;
use super::words::{self, Text, WordCorpus};

/// The table line.
pub static SET: DataSet = DataSet {
    name: "sample",
    collection: "sample",
    title: "the sample",
    about: "the next byte of the little text that ships with the program",
    records: "65,536 bytes",
    kind: Kind::Symbols(Symbols {
        vocabulary: 256,
        complete: None,
        load: |_, _| {
            let partial = Some("the little text that ships with the program".to_owned());
            Ok(Corpus { partial, ..Corpus::new(story::text(), 0) })
        },
    }),
    origin: Origin::Embedded,
    locate: |_| Ok(None),
};

/// The same text as words.
pub static WORDS: DataSet = DataSet {
    name: "sample-words",
    collection: "sample",
    title: "the sample",
    about: "the next word of the little text that ships with the program",
    records: "65,536 bytes",
    kind: Kind::Words(Words {
        vocabulary: VOCABULARY,
        complete: None,
        load: |_, _| {
            let mut text = String::new();
            for letter in String::from_utf8_lossy(&story::text()).chars() {
                // punctuation stands alone, as in published texts of words
                text.extend(letter.is_ascii_punctuation().then_some(' '));
                text.push(letter);
            }
            let lines: Vec<&str> = text.lines().filter(|line| !line.is_empty()).collect();
            let cut = |share: usize| lines.len() * share / 100;
            let part = |from, to| Text::Embedded((lines[cut(from)..cut(to)].join("\n") + "\n").into_bytes());
            let [train, validation, test] = [part(0, 90), part(90, 95), part(95, 100)];
            let source = words::Source::Counted(1, 8);
            let corpus = WordCorpus::read([Some(&train), Some(&validation), Some(&test)], &source)?;
            let partial = Some("the little text that ships with the program".to_owned());
            Ok(WordCorpus { partial, ..corpus })
        },
    }),
    origin: Origin::Embedded,
    locate: |_| Ok(None),
};

/// Words of the text in the program.
const VOCABULARY: usize = 440;

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::data::Reading;

    #[test]
    fn the_words_in_the_program_are_counted_right() {
        let corpus = (WORDS.words().unwrap().load)(Path::new(""), Reading::default()).unwrap();
        assert_eq!(corpus.vocabulary.len(), VOCABULARY);
        assert!(corpus.train.len() > 12_000 && corpus.tested().len() > 500);
    }
}
