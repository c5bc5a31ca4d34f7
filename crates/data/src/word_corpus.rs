//! Texts as streams of words, and the vocabulary that numbers them (`docs/spec/SPEC-text.md` section 3).

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use super::content_hash::ContentHash;
use super::{DataError, store};

/// The words that every vocabulary starts with: start, padding, end of a line, and whatever is not known.
pub const SPECIAL: [&str; 4] = ["<s>", "<pad>", "</s>", "<unk>"];
/// Id of the end of a line.
pub const END: u32 = 2;
/// Id of whatever is not known.
pub const UNKNOWN: u32 = 3;
/// Longest line that is read; the longest paragraph of WikiText-103 is far below it.
const LONGEST: usize = 1 << 22;

/// Words by id: the special ones, then the others by falling count.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Vocabulary {
    words: Vec<String>,
    ids: HashMap<String, u32>,
}

impl Vocabulary {
    /// The special words, then those of `counts` that occur at least `least` times: the more frequent first, equal
    /// counts in the order of code points. Filled with `madeupword0000` and so on to a multiple of `unit`.
    pub fn new(counts: impl IntoIterator<Item = (String, u64)>, least: u64, unit: usize) -> Self {
        let fits = |(word, count): &(String, u64)| *count >= least && !SPECIAL.contains(&word.as_str());
        let mut found: Vec<(String, u64)> = counts.into_iter().filter(fits).collect();
        found.sort_by(|a, b| b.1.cmp(&a.1).then_with(|| a.0.cmp(&b.0)));
        let mut all = Self::default();
        SPECIAL.iter().for_each(|word| all.push((*word).to_owned()));
        found.into_iter().for_each(|(word, _)| all.push(word));
        for number in 0..all.len().next_multiple_of(unit.max(1)) - all.len() {
            all.push(format!("madeupword{number:04}"));
        }
        all
    }

    /// Reads a vocabulary file: a line per word with its count behind a blank, in the order of ids; the special words are
    /// not written. It goes into `content`.
    pub fn read(file: &Path, content: &mut ContentHash) -> Result<Self, DataError> {
        let mut all = Self::new([], 1, 1);
        store::each_line(file, LONGEST, |number, line| {
            content.field(line);
            let text = std::str::from_utf8(line).map_err(|_| "is not UTF-8".to_owned())?;
            let entry = text.trim_end().rsplit_once(' ');
            let (word, _) = entry.filter(|(_, count)| count.parse::<u64>().is_ok()).ok_or_else(|| {
                format!("{:?} is not a word, a blank and its count, such as \"the 512\"", text.trim_end())
            })?;
            match all.ids.get(word) {
                Some(&id) if (id as usize) < SPECIAL.len() => Err(format!(
                    "{word} is one of the special words, which a vocabulary file does not have; delete the line"
                )),
                Some(&id) => {
                    let first = id as usize - SPECIAL.len() + 1;
                    Err(format!(
                        "the word {word:?} occurs twice, in lines {first} and {number}; every word may occur only once"
                    ))
                }
                None => {
                    all.push(word.to_owned());
                    Ok(())
                }
            }
        })?;
        if all.len() == SPECIAL.len() {
            return Err(store::bad_file(
                file,
                "has no words; expected a word, a blank and its count per line",
            ));
        }
        Ok(all)
    }

    fn push(&mut self, word: String) {
        self.ids.insert(word.clone(), self.words.len() as u32);
        self.words.push(word);
    }

    /// Number of words.
    pub fn len(&self) -> usize {
        self.words.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.words.is_empty()
    }

    /// Id of `word`.
    pub fn id(&self, word: &str) -> u32 {
        self.ids.get(word).copied().unwrap_or(UNKNOWN)
    }

    /// The word with this id.
    pub fn word(&self, id: u32) -> Option<&str> {
        self.words.get(id as usize).map(String::as_str)
    }
}

/// A text, wherever it stands.
pub enum CorpusText {
    /// A file, plain or gzip.
    File(PathBuf),
    /// A member of a zip archive.
    Member(PathBuf, &'static str),
    /// Lines of a file.
    Part(PathBuf, Vec<u8>),
    /// Part of the program.
    Embedded(Vec<u8>),
}

impl CorpusText {
    /// What messages call it.
    fn path(&self) -> PathBuf {
        match self {
            Self::File(path) | Self::Part(path, _) => path.clone(),
            Self::Member(path, name) => path.join(name),
            Self::Embedded(_) => PathBuf::from("the built-in text"),
        }
    }

    fn each_line(&self, visit: impl FnMut(usize, &[u8]) -> Result<(), String>) -> Result<(), DataError> {
        match self {
            Self::File(path) => store::each_line(path, LONGEST, visit),
            Self::Member(path, name) => {
                let wrong = |error: String| {
                    store::bad_file(path, format!("is not a zip archive with a member {name:?} ({error})"))
                };
                let file = effattn_record::file::open(path).map_err(|error| wrong(error.to_string()))?;
                let mut archive = zip::ZipArchive::new(file).map_err(|error| wrong(error.to_string()))?;
                let member = archive.by_name(name).map_err(|error| wrong(error.to_string()))?;
                store::lines(member, &self.path(), LONGEST, visit)
            }
            Self::Part(_, bytes) | Self::Embedded(bytes) => {
                store::lines(bytes.as_slice(), &self.path(), LONGEST, visit)
            }
        }
    }

    /// Its lines that are not blank, the number of its words with an end behind every line, and its checksum.
    pub(super) fn lines(&self) -> Result<(Vec<String>, usize, String), DataError> {
        let (mut lines, mut words, mut sum) = (Vec::new(), 0, Sha256::new());
        self.each_line(|_, line| {
            sum.update(line);
            let text = std::str::from_utf8(line).map_err(|_| "is not UTF-8; convert the file".to_owned())?;
            words += text.split_whitespace().count() + 1;
            let text = text.strip_suffix('\n').unwrap_or(text);
            let text = text.strip_suffix('\r').unwrap_or(text);
            if !text.trim().is_empty() {
                lines.push(text.to_owned());
            }
            Ok(())
        })?;
        Ok((lines, words, format!("{:x}", sum.finalize())))
    }

    /// Its words in order as `id` numbers them, an end behind every line, also behind empty ones; and its checksum.
    pub fn stream(
        &self,
        content: &mut ContentHash,
        mut id: impl FnMut(&str) -> u32,
    ) -> Result<(Vec<u32>, String), DataError> {
        let (mut stream, mut sum) = (Vec::new(), Sha256::new());
        self.each_line(|_, line| {
            sum.update(line);
            content.field(line);
            let text = std::str::from_utf8(line).map_err(|error| {
                let at = error.valid_up_to() + 1;
                format!("is not UTF-8 from byte {at} of the line on; expected words separated by blanks")
            })?;
            stream.extend(text.split_whitespace().map(&mut id));
            stream.push(END);
            Ok(())
        })?;
        if stream.iter().all(|id| *id == END) {
            let reason = "has no words; expected lines of words separated by blanks";
            return Err(store::bad_file(&self.path(), reason));
        }
        Ok((stream, format!("{:x}", sum.finalize())))
    }
}

/// Texts of words in memory.
pub struct WordCorpus {
    /// The vocabulary.
    pub vocabulary: Vocabulary,
    /// The stream that is trained on.
    pub train: Vec<u32>,
    /// The stream that weights are selected on.
    pub validation: Vec<u32>,
    /// The stream that is tested; absent: the validation stream is.
    pub test: Option<Vec<u32>>,
    /// Checksums of the texts as they were read, train, validation, test.
    pub sums: Vec<String>,
    /// Checksum of everything that was read.
    pub hash: String,
    /// What is missing, in words.
    pub partial: Option<String>,
}

/// Where the words of a corpus come from.
pub enum VocabSource<'a> {
    /// Words of the training text that occur so often, filled to a multiple of the second number.
    Counted(u64, usize),
    /// A vocabulary file.
    File(&'a Path),
}

impl WordCorpus {
    /// Reads training, validation and test texts.
    pub fn read(texts: [Option<&CorpusText>; 3], source: &VocabSource) -> Result<Self, DataError> {
        let [Some(train), Some(validation), test] = texts else {
            return Err(DataError::Unknown(
                "a corpus of words has a training and a validation text".to_owned(),
            ));
        };
        let mut content = ContentHash::default();
        let mut sums = Vec::new();
        let mut all = |text: &CorpusText, content: &mut ContentHash, id: &mut dyn FnMut(&str) -> u32| {
            let (stream, sum) = text.stream(content, id)?;
            sums.push(sum);
            Ok::<_, DataError>(stream)
        };
        let (vocabulary, train) = match source {
            VocabSource::File(file) => {
                let vocabulary = Vocabulary::read(file, &mut content)?;
                let train = all(train, &mut content, &mut |word| vocabulary.id(word))?;
                (vocabulary, train)
            }
            VocabSource::Counted(least, unit) => {
                // ids in the order of appearance first: the vocabulary is known behind the last word only
                let (mut seen, mut counts) = (HashMap::<String, u32>::new(), Vec::<u64>::new());
                let mut number = |word: &str| {
                    let id = seen.get(word).copied().unwrap_or_else(|| {
                        counts.push(0);
                        seen.insert(word.to_owned(), FRESH + counts.len() as u32 - 1);
                        FRESH + counts.len() as u32 - 1
                    });
                    counts[(id - FRESH) as usize] += 1;
                    id
                };
                let mut train = all(train, &mut content, &mut number)?;
                let mut words = vec![String::new(); counts.len()];
                seen.into_iter().for_each(|(word, id)| words[(id - FRESH) as usize] = word);
                let vocabulary = Vocabulary::new(words.iter().cloned().zip(counts), *least, *unit);
                let own: Vec<u32> = words.iter().map(|word| vocabulary.id(word)).collect();
                train.iter_mut().filter(|id| **id >= FRESH).for_each(|id| *id = own[(*id - FRESH) as usize]);
                (vocabulary, train)
            }
        };
        let mut known = |text: &CorpusText| all(text, &mut content, &mut |word| vocabulary.id(word));
        let validation = known(validation)?;
        let test = test.map(&mut known).transpose()?;
        content.number(vocabulary.len() as u64);
        let hash = content.finish();
        Ok(Self { vocabulary, train, validation, test, sums, hash, partial: None })
    }

    /// The stream that is tested.
    pub fn tested(&self) -> &[u32] {
        self.test.as_deref().unwrap_or(&self.validation)
    }
}

/// First id in the order of appearance: the special words have those below.
const FRESH: u32 = SPECIAL.len() as u32;

/// Perplexity of `stream` under the frequencies of `train`, every word of a vocabulary of `words` counted once more.
pub fn unigram(train: &[u32], stream: &[u32], words: usize) -> f64 {
    let mut counts = vec![1u64; words];
    train.iter().for_each(|id| counts[*id as usize] += 1);
    let all = (train.len() + words) as f64;
    let bits: f64 = stream.iter().map(|id| (all / counts[*id as usize] as f64).ln()).sum();
    (bits / stream.len().max(1) as f64).exp()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(train: &str, validation: &str) -> Result<WordCorpus, DataError> {
        let texts = [train, validation].map(|text| CorpusText::Embedded(text.as_bytes().to_vec()));
        WordCorpus::read([Some(&texts[0]), Some(&texts[1]), None], &VocabSource::Counted(1, 8))
    }

    #[test]
    fn words_are_numbered_by_count_then_by_code_point() {
        let corpus = read(" b a a <unk> \n\n\u{e9} b Z z\n", "a new <unk>\n").unwrap();
        let words: Vec<&str> = (0..16).map_while(|id| corpus.vocabulary.word(id)).collect();
        assert_eq!(words[..9], ["<s>", "<pad>", "</s>", "<unk>", "a", "b", "Z", "z", "\u{e9}"]);
        assert_eq!(
            words[9..],
            [
                "madeupword0000",
                "madeupword0001",
                "madeupword0002",
                "madeupword0003",
                "madeupword0004",
                "madeupword0005",
                "madeupword0006"
            ]
        );
        // the literal <unk> is the unknown word; an empty line has an end
        assert_eq!(corpus.train, [5, 4, 4, 3, 2, 2, 8, 5, 6, 7, 2]);
        assert_eq!(corpus.validation, [4, 3, 3, 2]);
        assert_eq!(corpus.tested(), corpus.validation);
        let rare = Vocabulary::new([("x".to_owned(), 2), ("y".to_owned(), 3)], 3, 1);
        assert_eq!((rare.len(), rare.id("x"), rare.id("y")), (5, UNKNOWN, 4));
    }

    #[test]
    fn what_was_read_is_what_the_checksum_covers() {
        let hash = |train, validation| read(train, validation).unwrap().hash;
        assert_eq!(hash("a b\n", "a\n"), hash("a b\n", "a\n"));
        assert_ne!(hash("a b\n", "a\n"), hash("a  b\n", "a\n"));
        assert_ne!(hash("a b\n", "a\n"), hash("a b\n", "b\n"));
    }

    #[test]
    fn texts_that_are_none_are_errors_with_file_and_line() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("wiki.train.tokens");
        let stream = |bytes: &[u8]| {
            std::fs::write(&file, bytes).unwrap();
            CorpusText::File(file.clone()).stream(&mut ContentHash::default(), |_| 4)
        };
        assert_eq!(stream(b"a b\n\n c").unwrap().0, [4, 4, 2, 2, 4, 2]);
        let error = stream(b"a b\nc \xff\n").unwrap_err().to_string();
        assert!(error.contains("wiki.train.tokens:2: is not UTF-8 from byte 3"), "{error}");
        for empty in [&b""[..], b"\n \n"] {
            let error = stream(empty).unwrap_err().to_string();
            assert!(error.contains("wiki.train.tokens: has no words"), "{error}");
        }
    }

    #[test]
    fn a_vocabulary_file_has_every_word_once() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("dict.txt");
        let read = |text: &str| {
            std::fs::write(&file, text).unwrap();
            Vocabulary::read(&file, &mut ContentHash::default()).map_err(|error| error.to_string())
        };
        let good = read("the 9\n, 7\n").unwrap();
        assert_eq!((good.len(), good.id("the"), good.id(","), good.id("of")), (6, 4, 5, 3));
        let error = read("the 9\n, 7\nthe 3\n").unwrap_err();
        assert!(error.contains("dict.txt:3: the word \"the\" occurs twice, in lines 1 and 3"), "{error}");
        assert!(
            read("the\n").unwrap_err().contains("dict.txt:1: \"the\" is not a word, a blank and its count")
        );
        assert!(read("<unk> 9\n").unwrap_err().contains("dict.txt:1: <unk> is one of the special words"));
        assert!(read("").unwrap_err().contains("dict.txt: has no words"));
    }

    #[test]
    fn a_unigram_is_as_good_as_its_counts() {
        assert!((unigram(&[], &[4, 5], 8) - 8.0).abs() < 1e-12);
        assert!((unigram(&[0, 0, 0], &[0], 1) - 1.0).abs() < 1e-12);
    }
}
