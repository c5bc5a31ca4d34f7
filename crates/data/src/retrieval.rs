//! Retrieval: do two papers of the ACL Anthology Network cite each other? Bytes of both, from the Long Range
//! Arena's `new_aan_pairs.{train,eval,test}.tsv` (no header: label, id 1, id 2, text 1, text 2).

use std::path::{Path, PathBuf};

use super::content_hash::ContentHash;
use super::entry::{DataKind, DataSetEntry, ExampleTask, Origin};
use super::{DataError, Dataset, Example, Split, byte_ids, store};

/// The table line.
pub static SET: DataSetEntry = DataSetEntry {
    name: "retrieval",
    collection: "aan",
    title: "AAN",
    about: "whether one paper cites the other, from the bytes of both",
    records: "147,086 / 18,090 / 17,437 pairs",
    kind: DataKind::Pairs(ExampleTask {
        vocabulary: 257,
        classes: 2,
        len: 4000,
        train: PUBLISHED[0],
        text: true,
        load: &|dir, reading| Ok(Box::new(Aan::load(dir, reading.allow_partial)?)),
    }),
    origin: Origin::UserProvided(
        "LRA's pairs are inside https://storage.googleapis.com/long-range-arena/lra_release.gz (7.7 GB, no published \
         checksum, so it is not downloaded here): unpack it and place new_aan_pairs.train.tsv, .eval.tsv and .test.tsv",
    ),
    locate: |dir| {
        let files = STEMS.map(|stem| locate(dir, stem));
        match files.iter().all(Result::is_err) {
            true => Ok(None),
            false => files.into_iter().collect::<Result<Vec<_>, _>>().map(|files| files.into_iter().next()),
        }
    },
};

/// Bytes of a document that are kept; the published pipeline cuts here before anything else.
const KEPT: usize = 10_000;
/// Pairs of the published splits.
const PUBLISHED: [usize; 3] = [147_086, 18_090, 17_437];
/// Longest line that is read: two documents.
const LONGEST_LINE: usize = 64 << 20;
/// Names of the folder that holds the three files.
const FOLDERS: &[&str] = &["tsv_data", "."];
/// File stems by split.
const STEMS: [&str; 3] = ["new_aan_pairs.train.tsv", "new_aan_pairs.eval.tsv", "new_aan_pairs.test.tsv"];

/// The pairs. Texts occur in many pairs; they are stored as they stand in the files, cut to what is kept.
pub struct Aan {
    splits: [Vec<Pair>; 3],
    hash: String,
    partial: Option<String>,
}

struct Pair {
    label: u32,
    first: Vec<u8>,
    second: Vec<u8>,
}

impl Aan {
    /// Loads the pairs from `dir`.
    pub fn load(dir: &Path, allow_partial: bool) -> Result<Self, DataError> {
        let mut content = ContentHash::default();
        let mut splits = Vec::new();
        for (stem, most) in STEMS.iter().zip(PUBLISHED) {
            content.field(stem.as_bytes());
            splits.push(read(&locate(dir, stem)?, most, &mut content)?);
        }
        let counts: Vec<usize> = splits.iter().map(Vec::len).collect();
        let partial = (counts != PUBLISHED).then(|| {
            let share = |at: usize| format!("{} of {}", counts[at], PUBLISHED[at]);
            format!("{} training, {} validation and {} test pairs", share(0), share(1), share(2))
        });
        if let (Some(missing), false) = (&partial, allow_partial) {
            return Err(DataError::Partial { what: "AAN", dir: dir.to_owned(), missing: missing.clone() });
        }
        let splits = <[Vec<Pair>; 3]>::try_from(splits).unwrap_or_default();
        Ok(Self { splits, hash: content.finish(), partial })
    }

    fn side(&self, split: Split) -> &[Pair] {
        match split {
            Split::Train => &self.splits[0],
            Split::Validation => &self.splits[1],
            Split::Test => &self.splits[2],
        }
    }
}

impl Dataset for Aan {
    fn len(&self, split: Split) -> usize {
        self.side(split).len()
    }

    fn example(&self, split: Split, index: usize, max_len: usize) -> Example {
        let pair = &self.side(split)[index];
        let ids = |text: &[u8]| byte_ids(text, max_len);
        Example { tokens: ids(&pair.first), second: Some(ids(&pair.second)), label: pair.label }
    }

    fn hash(&self) -> &str {
        &self.hash
    }

    fn partial(&self) -> Option<&str> {
        self.partial.as_deref()
    }
}

fn locate(dir: &Path, stem: &str) -> Result<PathBuf, DataError> {
    let names: Vec<String> = FOLDERS
        .iter()
        .flat_map(|folder| [format!("{folder}/{stem}"), format!("{folder}/{stem}.gz")])
        .collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    store::find(dir, &names).ok_or_else(|| DataError::Missing {
        what: "AAN",
        dir: dir.to_owned(),
        next: format!(
            "run effattn fetch aan, or place {stem} (or {stem}.gz) of the Long Range Arena release there, in tsv_data"
        ),
    })
}

fn read(file: &Path, most: usize, content: &mut ContentHash) -> Result<Vec<Pair>, DataError> {
    let mut pairs = Vec::new();
    store::each_line(file, LONGEST_LINE, |_, line| {
        if pairs.len() == most {
            return Err(format!("is one more than the {most} pairs that were published"));
        }
        content.field(line);
        let end = line.iter().rposition(|byte| !matches!(byte, b'\n' | b'\r')).map_or(0, |last| last + 1);
        pairs.push(pair(&line[..end])?);
        Ok(())
    })?;
    Ok(pairs)
}

fn pair(line: &[u8]) -> Result<Pair, String> {
    let columns: Vec<&[u8]> = line.split(|&byte| byte == b'\t').collect();
    let [label, _, _, first, second] = columns.as_slice() else {
        return Err(format!(
            "{} columns, expected 5 separated by tabs: label, id 1, id 2, text 1, text 2",
            columns.len()
        ));
    };
    let text = String::from_utf8_lossy(label);
    let label = match text.trim().parse::<f64>() {
        Ok(0.0) => 0,
        Ok(1.0) => 1,
        _ => {
            return Err(format!(
                "label {:?}, expected 0.0 or 1.0",
                text.chars().take(20).collect::<String>()
            ));
        }
    };
    let kept = |text: &[u8]| text[..text.len().min(KEPT)].to_vec();
    Ok(Pair { label, first: kept(first), second: kept(second) })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(train: &str) -> tempfile::TempDir {
        let dir = tempfile::tempdir().expect("a folder");
        std::fs::create_dir(dir.path().join("tsv_data")).expect("a folder");
        for (stem, text) in STEMS.iter().zip([train, "0.0\ta\tb\tx\ty\n", "1.0\ta\tb\tx\t\n"]) {
            std::fs::write(dir.path().join("tsv_data").join(stem), text).expect("a file");
        }
        dir
    }

    #[test]
    fn pairs_are_bytes() {
        let dir = folder("1.0\tP1\tP2\tab\"c\td\r\n0.0\ta\tb\tx\ty");
        let data = Aan::load(dir.path(), true).expect("pairs");
        let first = data.example(Split::Train, 0, 3);
        assert_eq!((first.tokens, first.second, first.label), (vec![98, 99, 35], Some(vec![101]), 1));
        assert_eq!((data.len(Split::Train), data.len(Split::Validation), data.len(Split::Test)), (2, 1, 1));
        assert!(data.partial().expect("partial").starts_with("2 of 147086 training"));
    }

    #[test]
    fn the_hash_covers_labels_and_splits() {
        let line = "0.0\ta\tb\tx\ty\n"; // also that of the validation split
        let dir = folder(&line.repeat(2));
        let hash = || Aan::load(dir.path(), true).expect("pairs").hash().to_owned();
        let file = |index: usize| dir.path().join("tsv_data").join(STEMS[index]);
        let before = hash();
        std::fs::write(file(0), line).expect("a file");
        std::fs::write(file(1), line.repeat(2)).expect("a file");
        let moved = hash();
        assert_ne!(moved, before, "a pair moved from one split to the next");
        std::fs::write(file(0), line.replace("0.0", "1.0")).expect("a file");
        assert_ne!(hash(), moved, "another label");
    }

    #[test]
    fn a_set_of_which_files_are_missing_is_named() {
        let dir = folder("1.0\tP1\tP2\ta\tb\n");
        let found = (SET.locate)(dir.path()).expect("the files").expect("a file");
        assert!(found.ends_with(STEMS[0]));
        std::fs::remove_file(dir.path().join("tsv_data").join(STEMS[2])).expect("removed");
        let error = (SET.locate)(dir.path()).expect_err("one is missing").to_string();
        assert!(error.contains(STEMS[2]), "{error}");
        let empty = tempfile::tempdir().expect("a folder");
        assert!((SET.locate)(empty.path()).expect("nothing is no mistake").is_none());
    }

    #[test]
    fn a_bad_line_is_named() {
        for (line, says) in [("1.0\ta\tb\tx\n", "4 columns"), ("2.0\ta\tb\tx\ty\n", "label \"2.0\"")] {
            let dir = folder(&format!("1.0\ta\tb\tx\ty\n{line}"));
            let error = Aan::load(dir.path(), true).err().expect("a bad line").to_string();
            assert!(error.contains(".tsv:2: ") && error.contains(says), "{error}");
        }
    }
}
