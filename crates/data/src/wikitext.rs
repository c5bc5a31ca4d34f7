//! WikiText-103 (Merity et al. 2016): words of Wikipedia articles, from `wikitext-103-v1.zip` or its unpacked files.

use std::path::{Path, PathBuf};

use super::entry::{DataKind, DataSetEntry, Origin, WordTask};
use super::fetch::{DownloadSource, Sum};
use super::word_corpus::{self, CorpusText, WordCorpus};
use super::{DataError, LoadOptions};

/// The published set.
pub static WIKITEXT103: DataSetEntry = DataSetEntry {
    name: "wikitext103",
    collection: "wikitext103",
    title: "WikiText-103",
    about: "the next word of Wikipedia articles",
    records: "103,227,021 / 217,646 / 245,569 words",
    kind: DataKind::Words(WordTask { vocabulary: 267_744, complete: Some(TRAIN), load: &load }),
    origin: Origin::Download(SOURCE),
    locate: |dir| locate(dir, &Part::ALL),
};

/// A small stand-in: trained on the test text, evaluated on the validation text (`docs/spec/SPEC-text.md` section 10).
pub static SMALL: DataSetEntry = DataSetEntry {
    name: "wikitext103-small",
    collection: "wikitext103",
    title: "WikiText-103, small",
    about: "the next word; trained on the published test text, evaluated on the validation text",
    records: "245,569 / 217,646 words",
    kind: DataKind::Words(WordTask { vocabulary: 8125, complete: None, load: &load_small }),
    origin: Origin::Download(SOURCE),
    locate: |dir| locate(dir, &[Part::Test, Part::Valid]),
};

/// The published archive.
const SOURCE: DownloadSource = DownloadSource {
    name: "wikitext103",
    file: ARCHIVE,
    names: &[ARCHIVE, "wikitext-103"],
    url: "https://s3.amazonaws.com/research.metamind.io/wikitext/wikitext-103-v1.zip",
    bytes: None,
    sum: Sum::Sha256("242ba0f20b329cfdf1ccc61e9e9e5b59becf189db7f7a81cd2a0e2fc31539590"),
};
/// Its name.
const ARCHIVE: &str = "wikitext-103-v1.zip";
/// Words of the published training text.
const TRAIN: usize = 103_227_021;
/// A vocabulary in fairseq's form; where it lies beside the texts it is the one.
const DICTIONARY: &str = "dict.txt";

/// One of the three texts.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Part {
    Train,
    Valid,
    Test,
}

impl Part {
    const ALL: [Self; 3] = [Self::Train, Self::Valid, Self::Test];

    /// Names of its file, plain and gzip, and of its member in the archive.
    const fn names(self) -> [&'static str; 3] {
        match self {
            Self::Train => ["wiki.train.tokens", "wiki.train.tokens.gz", "wikitext-103/wiki.train.tokens"],
            Self::Valid => ["wiki.valid.tokens", "wiki.valid.tokens.gz", "wikitext-103/wiki.valid.tokens"],
            Self::Test => ["wiki.test.tokens", "wiki.test.tokens.gz", "wikitext-103/wiki.test.tokens"],
        }
    }

    /// SHA-256 of the published text, where it is known.
    const fn sum(self) -> Option<&'static str> {
        match self {
            Self::Train => None,
            Self::Valid => Some("9aee9f52d6e77de6c7751fc5e7c44287db3ec0eaf15477098acc6b93c1c4250b"),
            Self::Test => Some("56db52eb157b1ab5c89646eef70510c1eca6e12a3bfdb99f0d6b05b4eacb75b9"),
        }
    }

    /// What is not as published of a text of `words` words with the checksum `sum`.
    fn wrong(self, words: usize, sum: &str) -> Option<String> {
        match self.sum() {
            None => (words != TRAIN).then(|| format!("{words} training words ({TRAIN})")),
            Some(known) => (known != sum)
                .then(|| format!("{} has another checksum than the published text", self.names()[0])),
        }
    }

    fn text(self, place: &Path) -> Option<CorpusText> {
        let [plain, gzip, member] = self.names();
        if place.is_file() {
            return Some(CorpusText::Member(place.to_owned(), member));
        }
        [plain, gzip].iter().map(|name| place.join(name)).find(|path| path.is_file()).map(CorpusText::File)
    }
}

/// The archive or the folder in `dir` that has all of `parts`, else one that has some. Folders of other collections, such as
/// WikiText-2 with its files of the same names, are not looked into.
fn found(dir: &Path, parts: &[Part]) -> Option<PathBuf> {
    let folder = dir.join("wikitext-103");
    let archives = [&folder, dir].map(|place| place.join(ARCHIVE));
    let places =
        [folder, dir.to_owned()].into_iter().chain(archives.into_iter().filter(|file| file.is_file()));
    let places: Vec<PathBuf> = places.collect();
    let has = |place: &&PathBuf| parts.iter().filter(|part| part.text(place).is_some()).count();
    let best = places.iter().rev().max_by_key(|place| has(place))?; // the first among equals
    (has(&best) > 0).then(|| best.clone())
}

/// Where all of `parts` are; nothing where there is none of them.
fn locate(dir: &Path, parts: &[Part]) -> Result<Option<PathBuf>, DataError> {
    found(dir, parts).map(|_| texts(dir, parts).map(|(place, _)| place)).transpose()
}

/// The texts `parts` in `dir`, and where they are.
fn texts(dir: &Path, parts: &[Part]) -> Result<(PathBuf, Vec<CorpusText>), DataError> {
    let missing = |next: String| DataError::Missing { what: "WikiText-103", dir: dir.to_owned(), next };
    let names: Vec<&str> = parts.iter().map(|part| part.names()[0]).collect();
    let how = "run effattn fetch wikitext103, or place";
    let place =
        found(dir, parts).ok_or_else(|| missing(format!("{how} {} (or .gz) there", names.join(", "))))?;
    let one = |part: &Part| {
        let name = part.names()[0];
        let next = || {
            format!(
                "{} has other texts of it but no {name}; {how} {name} (or {name}.gz) there",
                place.display()
            )
        };
        part.text(&place).ok_or_else(|| missing(next()))
    };
    let texts = parts.iter().map(one).collect::<Result<_, _>>()?;
    Ok((place, texts))
}

fn load(dir: &Path, options: LoadOptions) -> Result<WordCorpus, DataError> {
    let (place, texts) = texts(dir, &Part::ALL)?;
    let dictionary = place.join(DICTIONARY);
    let source = match dictionary.is_file() {
        true => word_corpus::VocabSource::File(&dictionary),
        false => word_corpus::VocabSource::Counted(1, 8),
    };
    let corpus = WordCorpus::read([Some(&texts[0]), Some(&texts[1]), Some(&texts[2])], &source)?;
    let mut wrong: Vec<String> = Part::Train.wrong(corpus.train.len(), &corpus.sums[0]).into_iter().collect();
    wrong.extend(others(&corpus.sums[1..], &[Part::Valid, Part::Test]));
    check_complete(corpus, wrong, dir, options)
}

/// The lines of `parts` that are not blank, and what of them is not as published.
pub(super) fn prose(
    dir: &Path,
    parts: &[Part],
    allow_partial: bool,
) -> Result<(Vec<Vec<String>>, Option<String>), DataError> {
    let (_, texts) = texts(dir, parts)?;
    let (mut all, mut wrong) = (Vec::new(), Vec::new());
    for (part, text) in parts.iter().zip(&texts) {
        let (lines, words, sum) = text.lines()?;
        wrong.extend(part.wrong(words, &sum));
        all.push(lines);
    }
    Ok((all, incomplete(&wrong, dir, allow_partial)?))
}

fn load_small(dir: &Path, options: LoadOptions) -> Result<WordCorpus, DataError> {
    let parts = [Part::Test, Part::Valid];
    let (_, texts) = texts(dir, &parts)?;
    let corpus =
        WordCorpus::read([Some(&texts[0]), Some(&texts[1]), None], &word_corpus::VocabSource::Counted(3, 1))?;
    let wrong = others(&corpus.sums, &parts);
    check_complete(corpus, wrong, dir, options)
}

/// The texts that are not the published ones, by their checksums.
fn others(sums: &[String], parts: &[Part]) -> Vec<String> {
    parts.iter().zip(sums).filter_map(|(part, sum)| part.wrong(0, sum)).collect()
}

fn check_complete(
    corpus: WordCorpus,
    wrong: Vec<String>,
    dir: &Path,
    options: LoadOptions,
) -> Result<WordCorpus, DataError> {
    let partial = incomplete(&wrong, dir, options.allow_partial)?;
    Ok(WordCorpus { partial, ..corpus })
}

/// What is `wrong`, where that is allowed.
fn incomplete(wrong: &[String], dir: &Path, allow_partial: bool) -> Result<Option<String>, DataError> {
    let partial = (!wrong.is_empty()).then(|| wrong.join("; "));
    match partial {
        Some(missing) if !allow_partial => {
            Err(DataError::Partial { what: "WikiText-103", dir: dir.to_owned(), missing })
        }
        partial => Ok(partial),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PARTIAL: LoadOptions = LoadOptions { strict: false, allow_partial: true, keep_close: false };

    fn write(dir: &Path, name: &str, text: &str) {
        std::fs::create_dir_all(dir.join(name).parent().unwrap()).unwrap();
        std::fs::write(dir.join(name), text).unwrap();
    }

    #[test]
    fn three_files_are_a_corpus_and_a_missing_one_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let refused = |reading| load(dir.path(), reading).err().unwrap().to_string();
        assert!(refused(PARTIAL).contains("run effattn fetch wikitext103, or place wiki.train.tokens"));
        write(dir.path(), "wikitext-103/wiki.train.tokens", " = A =\n a b a <unk>\n");
        write(dir.path(), "wikitext-103/wiki.valid.tokens", "a c\n");
        write(dir.path(), "wikitext-2/wiki.test.tokens", "another\n");
        assert!(
            refused(PARTIAL).contains("no wiki.test.tokens; run effattn fetch wikitext103"),
            "{}",
            refused(PARTIAL)
        );
        write(dir.path(), "wikitext-103/wiki.test.tokens", "b\n");
        let strict = refused(LoadOptions::default());
        assert!(
            strict.contains("incomplete: 9 training words (103227021); wiki.valid.tokens has another"),
            "{strict}"
        );
        let corpus = load(dir.path(), PARTIAL).unwrap();
        assert_eq!((corpus.vocabulary.len(), corpus.train.len()), (8, 9));
        assert_eq!(corpus.tested(), [7, 2]);
        assert!(corpus.partial.is_some_and(|words| words.contains("training words")));
        let place = dir.path().join("wikitext-103");
        assert_eq!((WIKITEXT103.locate)(dir.path()).unwrap(), Some(place));
        write(dir.path(), "wikitext-103/dict.txt", "b 3\nb 2\n");
        assert!(refused(PARTIAL).contains("dict.txt:2: the word \"b\" occurs twice, in lines 1 and 2"));
        write(dir.path(), "wikitext-103/dict.txt", "b 3\na 2\n");
        let own = load(dir.path(), PARTIAL).unwrap();
        assert_eq!((own.tested(), own.vocabulary.id("=")), (&[4, 2][..], word_corpus::UNKNOWN));
    }

    #[test]
    fn the_archive_is_read_as_it_is() {
        use std::io::Write;
        let dir = tempfile::tempdir().unwrap();
        let file = std::fs::File::create(dir.path().join(ARCHIVE)).unwrap();
        let mut archive = zip::ZipWriter::new(file);
        for part in Part::ALL {
            archive.start_file(part.names()[2], zip::write::SimpleFileOptions::default()).unwrap();
            archive.write_all(b"a b\n").unwrap();
        }
        archive.finish().unwrap();
        assert_eq!(load(dir.path(), PARTIAL).unwrap().train, [4, 5, 2]);
        let parts = [Part::Train, Part::Valid];
        let (texts, partial) = prose(dir.path(), &parts, true).unwrap();
        assert_eq!(texts, [["a b"], ["a b"]]);
        let said = "3 training words (103227021); wiki.valid.tokens has another checksum";
        assert!(partial.unwrap().starts_with(said));
        assert!(prose(dir.path(), &parts, false).err().unwrap().to_string().contains(said));
    }

    #[test]
    fn the_small_stand_in_trains_on_the_test_text() {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), "wiki.test.tokens", "a a a b b\n");
        write(dir.path(), "wiki.valid.tokens", "b a\n");
        let corpus = load_small(dir.path(), PARTIAL).unwrap();
        assert_eq!((corpus.vocabulary.len(), corpus.test.as_ref()), (5, None));
        assert_eq!((corpus.train.as_slice(), corpus.tested()), (&[4, 4, 4, 3, 3, 2][..], &[3, 4, 2][..]));
    }
}
