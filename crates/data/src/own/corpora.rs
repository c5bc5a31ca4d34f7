//! Running text of a person's own: bytes for character models, words separated by blanks for word models.

use super::{OwnFiles, table};
use crate::corpus::CharCorpus;
use crate::word_corpus::{CorpusText, VocabSource, WordCorpus};
use crate::{DataError, store};

/// Fewest bytes of a corpus of symbols, and of each of its parts.
const FEWEST_BYTES: (usize, usize) = (1000, 16);
/// Fewest lines of a text of words that is divided.
const FEWEST_LINES: usize = 20;

/// The bytes of `files`. One file is divided in its order, 90, 5 and 5 hundredths; of two the last twentieth of the first is
/// held out.
pub(super) fn symbols(files: &OwnFiles) -> Result<CharCorpus, DataError> {
    let mut all = Vec::new();
    let mut ends = Vec::new();
    for file in &files.files {
        let bytes = store::read_limited(store::open(file)?, table::LARGEST)
            .map_err(|error| store::bad_file(file, format!("cannot be read ({error})")))?;
        let least = if files.files.len() == 1 { FEWEST_BYTES.0 } else { FEWEST_BYTES.1 };
        if bytes.len() < least {
            let reason = format!("has {} bytes, which are too few ({least} are needed)", bytes.len());
            return Err(store::bad_file(file, reason));
        }
        all.extend(bytes);
        ends.push(all.len());
    }
    Ok(match ends[..] {
        [train, end] => CharCorpus::with_parts(all, [train * 95 / 100, train, end], 0),
        [train, validation, end] => CharCorpus::with_parts(all, [train, validation, end], 0),
        _ => CharCorpus::new(all, 0),
    })
}

/// The words of `files`, divided as [`symbols`] are, by lines. Every word of the training text is in the vocabulary.
pub(super) fn words(files: &OwnFiles) -> Result<WordCorpus, DataError> {
    let part = |file: usize, shares: [usize; 2]| -> Result<CorpusText, DataError> {
        let path = &files.files[file];
        let text = table::text(path)?;
        let lines: Vec<&str> = text.lines().filter(|line| !line.trim().is_empty()).collect();
        if lines.len() < FEWEST_LINES {
            let reason = format!(
                "has {} lines of text, which are too few to hold some out ({FEWEST_LINES} are needed); give three files: --data \
                 train,val,test",
                lines.len()
            );
            return Err(store::bad_file(path, reason));
        }
        let [from, to] = shares.map(|share| lines.len() * share / 100);
        Ok(CorpusText::Part(path.clone(), (lines[from..to].join("\n") + "\n").into_bytes()))
    };
    let whole = |file: usize| Ok(CorpusText::File(files.files[file].clone()));
    let texts: [Result<CorpusText, DataError>; 3] = match files.files.len() {
        1 => [part(0, [0, 90]), part(0, [90, 95]), part(0, [95, 100])],
        2 => [part(0, [0, 95]), part(0, [95, 100]), whole(1)],
        _ => [whole(0), whole(1), whole(2)],
    };
    let [train, validation, test] = texts;
    let texts = [train?, validation?, test?];
    WordCorpus::read(texts.each_ref().map(Some), &VocabSource::Counted(1, 8))
}
