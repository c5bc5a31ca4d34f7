//! Image: CIFAR-10 (Krizhevsky 2009) in gray, one token per pixel, from the binary archive or its folder.

use std::path::Path;

use super::content_hash::ContentHash;
use super::entry::{DataKind, DataSetEntry, ExampleTask, Origin};
use super::fetch::{DownloadSource, Sum};
use super::{DataError, Dataset, Example, Split, store};

/// The table line.
pub static SET: DataSetEntry = DataSetEntry {
    name: "image",
    collection: "cifar10",
    title: "CIFAR-10",
    about: "which of ten things a gray image of 32 x 32 pixels shows",
    records: "45,000 / 5,000 / 10,000 images",
    kind: DataKind::Images(ExampleTask {
        vocabulary: 256,
        classes: CLASSES as usize,
        len: PIXELS,
        train: TRAIN - TRAIN / 10,
        text: false,
        load: &|dir, reading| Ok(Box::new(Cifar10::load(dir, reading.allow_partial)?)),
    }),
    origin: Origin::Download(DownloadSource {
        name: "cifar10",
        file: "cifar-10-binary.tar.gz",
        names: NAMES,
        url: "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
        bytes: None,
        sum: Sum::Md5("c32a1d4ab5d03f1284b67883e8d87530"),
    }),
    locate: |dir| Ok(store::find(dir, NAMES)),
};

pub(super) const PIXELS: usize = 1024;
/// A record: the class, then red, green and blue planes.
pub(super) const RECORD: usize = 1 + 3 * PIXELS;
pub(super) const CLASSES: u8 = 10;
pub(super) const TRAIN: usize = 50_000;
pub(super) const TEST: usize = 10_000;
/// Names of the archive or folder.
pub const NAMES: &[&str] =
    &["cifar-10-batches-bin", "cifar-10-binary.tar.gz", "cifar-10-binary-subset.tar.gz"];
const BATCHES: [&str; 6] = [
    "data_batch_1.bin",
    "data_batch_2.bin",
    "data_batch_3.bin",
    "data_batch_4.bin",
    "data_batch_5.bin",
    "test_batch.bin",
];

/// The images; validation is the last tenth of the training images.
pub struct Cifar10 {
    train: Vec<u8>,
    test: Vec<u8>,
    hash: String,
    partial: Option<String>,
}

/// Bytes of one stored image: class and gray values.
const STORED: usize = 1 + PIXELS;

impl Cifar10 {
    /// Loads the images from `dir`.
    pub fn load(dir: &Path, allow_partial: bool) -> Result<Self, DataError> {
        let (batches, hash) = read_batches(dir, gray)?;
        let [a, b, c, d, e, test] = batches;
        let train = [a, b, c, d, e].concat();
        let counts = (train.len() / STORED, test.len() / STORED);
        let partial = (counts != (TRAIN, TEST))
            .then(|| format!("{} of {TRAIN} training and {} of {TEST} test images", counts.0, counts.1));
        if let (Some(missing), false) = (&partial, allow_partial) {
            let missing = missing.clone();
            return Err(DataError::Partial { what: "CIFAR-10", dir: dir.to_owned(), missing });
        }
        Ok(Self { train, test, hash, partial })
    }

    fn side(&self, split: Split) -> &[u8] {
        let images = self.train.len() / STORED;
        let cut = (images - images / 10) * STORED;
        match split {
            Split::Train => &self.train[..cut],
            Split::Validation => &self.train[cut..],
            Split::Test => &self.test,
        }
    }
}

impl Dataset for Cifar10 {
    fn len(&self, split: Split) -> usize {
        self.side(split).len() / STORED
    }

    fn example(&self, split: Split, index: usize, max_len: usize) -> Example {
        let image = &self.side(split)[index * STORED..][..STORED];
        let tokens = image[1..].iter().take(max_len).map(|&gray| u32::from(gray)).collect();
        Example { tokens, second: None, label: u32::from(image[0]) }
    }

    fn hash(&self) -> &str {
        &self.hash
    }

    fn partial(&self) -> Option<&str> {
        self.partial.as_deref()
    }
}

/// What `read` makes of the records of every batch in `dir`, training batches first, and the checksum of all records.
pub(super) fn read_batches(
    dir: &Path,
    read: fn(&[u8]) -> Vec<u8>,
) -> Result<([Vec<u8>; 6], String), DataError> {
    let source = store::find(dir, NAMES).ok_or_else(|| DataError::Missing {
        what: "CIFAR-10",
        dir: dir.to_owned(),
        next: "run effattn fetch cifar10, or place cifar-10-binary.tar.gz (or the unpacked folder \
               cifar-10-batches-bin) there"
            .into(),
    })?;
    let mut batches: [Vec<u8>; 6] = Default::default();
    let mut seen: [ContentHash; 6] = Default::default(); // archives may have them in any order
    let number = |name: &str| BATCHES.iter().position(|batch| name.rsplit('/').next() == Some(batch));
    let limit = (RECORD * TEST) as u64;
    store::each_file(
        &source,
        limit,
        |name| number(name).is_some(),
        |name, bytes| {
            if let Some(number) = number(name) {
                let file = source.join(name);
                records(&file, &bytes)?;
                batches[number] = read(&bytes);
                seen[number] = ContentHash::default();
                seen[number].field(&bytes);
            }
            Ok(())
        },
    )?;
    let mut content = ContentHash::default();
    seen.into_iter().for_each(|batch| content.field(batch.finish().as_bytes()));
    Ok((batches, content.finish()))
}

/// Makes sure that `bytes` are whole records with classes.
fn records(file: &Path, bytes: &[u8]) -> Result<(), DataError> {
    if !bytes.len().is_multiple_of(RECORD) {
        let reason = format!("{} bytes are not a whole number of records of {RECORD} bytes", bytes.len());
        return Err(store::bad_file(file, reason));
    }
    match bytes.chunks_exact(RECORD).position(|record| record[0] >= CLASSES) {
        None => Ok(()),
        Some(index) => {
            let reason = format!("record {index} has class {}, expected 0 to 9", bytes[index * RECORD]);
            Err(store::bad_file(file, reason))
        }
    }
}

/// Records as class and gray values: floor(255.5 (0.2989 R + 0.5870 G + 0.1140 B) / 255), which is what the
/// Long Range Arena's pipeline computes for 8-bit images in f32.
fn gray(bytes: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(bytes.len() / RECORD * STORED);
    for record in bytes.chunks_exact(RECORD) {
        out.push(record[0]);
        let (red, rest) = record[1..].split_at(PIXELS);
        let (green, blue) = rest.split_at(PIXELS);
        out.extend(red.iter().zip(green).zip(blue).map(|((&r, &g), &b)| {
            let unit = |x: u8| f32::from(x) / 255.0;
            (255.5 * (0.2989 * unit(r) + 0.5870 * unit(g) + 0.1140 * unit(b))) as u8
        }));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(class: u8, r: u8, g: u8, b: u8) -> Vec<u8> {
        let mut bytes = vec![class];
        for value in [r, g, b] {
            bytes.extend([value; PIXELS]);
        }
        bytes
    }

    #[test]
    fn images_are_gray_and_split() {
        let dir = tempfile::tempdir().expect("a folder");
        let folder = dir.path().join("cifar-10-batches-bin");
        std::fs::create_dir(&folder).expect("a folder");
        let batch: Vec<u8> = (0..20).flat_map(|i| record(i % 10, 255, 255, 255)).collect();
        std::fs::write(folder.join("data_batch_1.bin"), batch).expect("a batch");
        std::fs::write(folder.join("test_batch.bin"), record(3, 255, 0, 0)).expect("a batch");
        let data = Cifar10::load(dir.path(), true).expect("images");
        assert_eq!((data.len(Split::Train), data.len(Split::Validation), data.len(Split::Test)), (18, 2, 1));
        assert_eq!(data.example(Split::Train, 0, 2).tokens, [255, 255]);
        let test = data.example(Split::Test, 0, PIXELS);
        assert_eq!((test.tokens[7], test.label, test.tokens.len()), (76, 3, PIXELS));
    }

    #[test]
    fn the_hash_covers_classes_colours_and_splits() {
        let dir = tempfile::tempdir().expect("a folder");
        let folder = dir.path().join("cifar-10-batches-bin");
        std::fs::create_dir(&folder).expect("a folder");
        let hash = |last: &[Vec<u8>], test: &[Vec<u8>]| {
            std::fs::write(folder.join("data_batch_5.bin"), last.concat()).expect("a batch");
            std::fs::write(folder.join("test_batch.bin"), test.concat()).expect("a batch");
            Cifar10::load(dir.path(), true).expect("images").hash().to_owned()
        };
        use std::slice::from_ref;
        let [a, b] = [record(3, 9, 0, 0), record(4, 0, 9, 0)];
        let (all, one) =
            (hash(&[a.clone(), b.clone()], from_ref(&b)), hash(from_ref(&a), &[b.clone(), b.clone()]));
        assert_ne!(all, one, "an image moved from training to test");
        assert_ne!(hash(&[record(4, 9, 0, 0)], &[b.clone(), b.clone()]), one, "another class");
        let same_gray = record(3, 9, 0, 1);
        assert_eq!(gray(&same_gray), gray(&a));
        assert_ne!(hash(&[same_gray], &[b.clone(), b]), one, "another colour that is the same gray");
    }

    #[test]
    fn broken_records_are_refused() {
        let file = Path::new("data_batch_1.bin");
        let cut = records(file, &record(1, 0, 0, 0)[1..]).expect_err("cut").to_string();
        assert!(cut.contains("3072 bytes"), "{cut}");
        let class = records(file, &record(10, 0, 0, 0)).expect_err("class").to_string();
        assert!(class.contains("class 10"), "{class}");
    }
}
