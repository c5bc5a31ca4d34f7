//! Text: byte-level sentiment of IMDb reviews (Maas et al. 2011), from `aclImdb_v1.tar.gz` or the unpacked folder.

use std::path::Path;

use super::content_hash::ContentHash;
use super::entry::{DataKind, DataSetEntry, ExampleTask, Origin};
use super::fetch::{DownloadSource, Sum};
use super::{DataError, Dataset, Example, Split, byte_ids, store};

/// The table line.
pub static SET: DataSetEntry = DataSetEntry {
    name: "text",
    collection: "imdb",
    title: "IMDb",
    about: "whether a film review is positive, from its bytes",
    records: "25,000 / 25,000 reviews",
    kind: DataKind::Sequences(ExampleTask {
        vocabulary: 257,
        classes: 2,
        len: 4000,
        train: 2 * PER_CLASS,
        text: true,
        load: &|dir, reading| Ok(Box::new(LraText::load(dir, reading.strict, reading.allow_partial)?)),
    }),
    origin: Origin::Download(SOURCE),
    locate: |dir| Ok(store::find(dir, NAMES)),
};

/// Where the reviews come from.
pub const SOURCE: DownloadSource = DownloadSource {
    name: "imdb",
    file: "aclImdb_v1.tar.gz",
    names: NAMES,
    url: "https://ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz",
    bytes: Some(84_125_825),
    sum: Sum::Md5("7c2ac02c03563afcf9b574c7e56c153a"),
};

/// Reviews per class and split.
pub const PER_CLASS: usize = 12_500;
/// Longest review that is read; the longest real one has 13,704 bytes.
const LONGEST: u64 = 1 << 20;
/// Names of the archive or folder.
pub const NAMES: &[&str] = &["aclImdb", "aclImdb_v1.tar.gz", "aclImdb-50k-labelled.tar.gz"];

/// The reviews. The published protocol selects on the test split: validation is the test split, unless a share of
/// the training reviews is held out.
pub struct LraText {
    train: Vec<(Vec<u8>, u32)>,
    held_out: Vec<(Vec<u8>, u32)>,
    test: Vec<(Vec<u8>, u32)>,
    hash: String,
    partial: Option<String>,
}

/// All reviews with their classes, by split, then class, then number.
pub struct Reviews {
    /// The training split.
    pub train: Vec<(Vec<u8>, u32)>,
    /// The test split.
    pub test: Vec<(Vec<u8>, u32)>,
    /// SHA-256 of everything that was read.
    pub hash: String,
    /// What is missing, in words.
    pub partial: Option<String>,
}

impl Reviews {
    /// Reads the reviews in `dir`.
    pub fn read(dir: &Path, allow_partial: bool) -> Result<Self, DataError> {
        let source = store::find(dir, NAMES).ok_or_else(|| DataError::Missing {
            what: "IMDb",
            dir: dir.to_owned(),
            next: "run effattn fetch imdb, or place aclImdb_v1.tar.gz (or the unpacked folder aclImdb) there"
                .into(),
        })?;
        let mut reviews = Vec::new();
        store::each_file(
            &source,
            LONGEST,
            |name| parts_of(name).is_some(),
            |name, bytes| {
                if reviews.len() == 4 * PER_CLASS {
                    let reason = format!("has more than the {} reviews that were published", 4 * PER_CLASS);
                    return Err(store::bad_file(&source, reason));
                }
                if let Some((test, label, id)) = parts_of(name) {
                    reviews.push((test, label, id, bytes));
                }
                Ok(())
            },
        )?;
        reviews.sort_by_key(|(test, label, id, _)| (*test, *label, *id));
        let mut content = ContentHash::default();
        let mut sides = [Vec::new(), Vec::new()];
        for (test, label, id, bytes) in reviews {
            for number in [u32::from(test), label, id] {
                content.number(u64::from(number));
            }
            content.field(&bytes);
            sides[usize::from(test)].push((bytes, label));
        }
        let [train, test] = sides;
        let partial = missing(&train, &test);
        if let (Some(missing), false) = (&partial, allow_partial) {
            return Err(DataError::Partial { what: "IMDb", dir: dir.to_owned(), missing: missing.clone() });
        }
        Ok(Self { train, test, hash: content.finish(), partial })
    }
}

impl LraText {
    /// Loads the reviews from `dir`. With `strict` every tenth training review is held out for validation.
    pub fn load(dir: &Path, strict: bool, allow_partial: bool) -> Result<Self, DataError> {
        let Reviews { mut train, test, hash, partial } = Reviews::read(dir, allow_partial)?;
        let mut held_out = Vec::new();
        if strict {
            let (tenth, rest): (Vec<_>, Vec<_>) =
                train.into_iter().enumerate().partition(|(index, _)| index % 10 == 9);
            held_out = tenth.into_iter().map(|(_, review)| review).collect();
            train = rest.into_iter().map(|(_, review)| review).collect();
        }
        Ok(Self { train, held_out, test, hash, partial })
    }

    fn side(&self, split: Split) -> &[(Vec<u8>, u32)] {
        match split {
            Split::Train => &self.train,
            Split::Validation if !self.held_out.is_empty() => &self.held_out,
            Split::Validation | Split::Test => &self.test,
        }
    }
}

impl Dataset for LraText {
    fn len(&self, split: Split) -> usize {
        self.side(split).len()
    }

    fn example(&self, split: Split, index: usize, max_len: usize) -> Example {
        let (text, label) = &self.side(split)[index];
        Example { tokens: byte_ids(text, max_len), second: None, label: *label }
    }

    fn hash(&self) -> &str {
        &self.hash
    }

    fn partial(&self) -> Option<&str> {
        self.partial.as_deref()
    }
}

/// Split (true: test), class and number of a review by its path `.../{train,test}/{neg,pos}/<id>_<stars>.txt`.
fn parts_of(path: &str) -> Option<(bool, u32, u32)> {
    let mut parts = path.rsplit('/');
    let (file, class, split) = (parts.next()?, parts.next()?, parts.next()?);
    let id = file.strip_suffix(".txt")?.split('_').next()?.parse().ok()?;
    let test = match split {
        "train" => false,
        "test" => true,
        _ => return None,
    };
    let label = match class {
        "neg" => 0,
        "pos" => 1,
        _ => return None,
    };
    Some((test, label, id))
}

fn missing(train: &[(Vec<u8>, u32)], test: &[(Vec<u8>, u32)]) -> Option<String> {
    let complete = [train, test].iter().all(|side| {
        (0..2).all(|class| side.iter().filter(|(_, label)| *label == class).count() == PER_CLASS)
    });
    let all = 2 * PER_CLASS;
    (!complete).then(|| format!("{} of {all} training and {} of {all} test reviews", train.len(), test.len()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder() -> tempfile::TempDir {
        let dir = tempfile::tempdir().expect("a folder");
        for split in ["train", "test"] {
            for (class, text) in [("neg", "bad <br />"), ("pos", "good")] {
                let folder = dir.path().join("aclImdb").join(split).join(class);
                std::fs::create_dir_all(&folder).expect("a folder");
                for id in 0..10 {
                    std::fs::write(folder.join(format!("{id}_3.txt")), text).expect("a review");
                }
            }
            std::fs::create_dir_all(dir.path().join("aclImdb/train/unsup")).expect("a folder");
            std::fs::write(dir.path().join("aclImdb/train/unsup/0_0.txt"), "x").expect("unlabelled");
        }
        dir
    }

    #[test]
    fn reviews_are_bytes_with_markup() {
        let dir = folder();
        let data = LraText::load(dir.path(), false, true).expect("reviews");
        assert_eq!(
            (data.len(Split::Train), data.len(Split::Validation), data.len(Split::Test)),
            (20, 20, 20)
        );
        let first = data.example(Split::Train, 0, 6);
        assert_eq!(first.tokens, b"bad <b".map(|byte| u32::from(byte) + 1));
        assert_eq!((first.label, data.example(Split::Train, 19, 9).label), (0, 1));
        assert_eq!(data.partial(), Some("20 of 25000 training and 20 of 25000 test reviews"));
    }

    /// Until 822cd16 the hash was that of numbers and texts, without classes, splits and lengths: committed rows have either.
    #[test]
    #[ignore = "needs the reviews: EFFATTN_DATA=FOLDER cargo test --release -p effattn-data reviews -- --ignored"]
    fn the_published_reviews_have_both_hashes_of_committed_rows() {
        use sha2::{Digest, Sha256};
        let dir = std::env::var("EFFATTN_DATA").expect("EFFATTN_DATA names the folder of aclImdb");
        let reviews = Reviews::read(Path::new(&dir), false).expect("reviews");
        let source = store::find(Path::new(&dir), NAMES).expect("reviews");
        let mut numbered = Vec::new();
        store::each_file(
            &source,
            LONGEST,
            |name| parts_of(name).is_some(),
            |name, bytes| {
                numbered.push((parts_of(name), bytes));
                Ok(())
            },
        )
        .expect("reviews");
        numbered.sort();
        let mut before = Sha256::new();
        for (parts, bytes) in numbered {
            let (_, _, id) = parts.expect("a review");
            before.update(id.to_le_bytes());
            before.update(&bytes);
        }
        let before = format!("{:x}", before.finalize());
        assert_eq!((&before[..8], &reviews.hash[..8]), ("3743bb6a", "b45055a3"));
    }

    #[test]
    fn the_hash_covers_classes_and_splits() {
        let dir = folder();
        let hash = || LraText::load(dir.path(), false, true).expect("reviews").hash().to_owned();
        let review = |place: &str| dir.path().join("aclImdb").join(place);
        let mut seen = vec![hash()];
        std::fs::rename(review("train/neg/9_3.txt"), review("train/pos/99_3.txt")).expect("moved");
        seen.push(hash());
        std::fs::rename(review("train/neg/8_3.txt"), review("test/neg/8_4.txt")).expect("moved");
        seen.push(hash());
        // the labels of two classes are swapped: the same names and texts
        for class in ["neg", "pos"] {
            std::fs::rename(review("train").join(class), review(class)).expect("moved");
        }
        std::fs::rename(review("neg"), review("train/pos")).expect("moved");
        std::fs::rename(review("pos"), review("train/neg")).expect("moved");
        seen.push(hash());
        seen.sort();
        seen.dedup();
        assert_eq!(seen.len(), 4);
    }

    #[test]
    fn strict_holds_out_a_tenth() {
        let dir = folder();
        let data = LraText::load(dir.path(), true, true).expect("reviews");
        assert_eq!((data.len(Split::Train), data.len(Split::Validation), data.len(Split::Test)), (18, 2, 20));
    }

    #[test]
    fn what_is_missing_is_said() {
        let dir = folder();
        let partial = LraText::load(dir.path(), false, false).err().expect("incomplete").to_string();
        assert!(partial.contains("--allow-partial"), "{partial}");
        let empty = tempfile::tempdir().expect("a folder");
        let missing = LraText::load(empty.path(), false, true).err().expect("missing").to_string();
        assert!(missing.contains("effattn fetch imdb"), "{missing}");
    }
}
