//! The three splits: LRA's own files, the compact file, or the generator.

use std::fmt::Write as _;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use rayon::prelude::*;
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView};
use sha2::{Digest, Sha256};

use super::{Expressions, MAX_LENGTH, Tokenizer, evaluate, generate, parse, to_text, token};
use crate::content_hash::ContentHash;
use crate::entry::{DataKind, DataSetEntry, ExampleTask, Origin, WriteFormat};
use crate::{DataError, Dataset, Example, Split, data_dir, store};
use effattn_record::file;

/// The table line.
pub static SET: DataSetEntry = DataSetEntry {
    name: "listops",
    collection: "listops",
    title: "ListOps",
    about: "the value, 0 to 9, of a nested expression over MIN, MAX, MED and SM",
    records: "96,000 / 2,000 / 2,000 expressions",
    kind: DataKind::Sequences(ExampleTask {
        vocabulary: 16,
        classes: 10,
        len: MAX_LENGTH,
        train: SPLITS[0],
        text: false,
        load: &|dir, reading| {
            let tokenizer = if reading.keep_close { Tokenizer::KeepClose } else { Tokenizer::DropBrackets };
            Ok(Box::new(ListOps::load(dir, tokenizer)?))
        },
    }),
    origin: Origin::Generated {
        formats: &[
            WriteFormat {
                name: "compact",
                about: "one file of token codes",
                write: |_, dir| Ok(vec![write_cache(dir)?]),
            },
            WriteFormat {
                name: "tsv",
                about: "LRA's own basic_train.tsv, basic_val.tsv and basic_test.tsv, 0.6 GB",
                write: |_, dir| write_splits(dir),
            },
        ],
        instead: Some("LRA's basic_train.tsv, basic_val.tsv and basic_test.tsv"),
    },
    locate: |dir| {
        Ok(files(dir)?.map(|files| match files {
            Files::Arena([train, ..]) => train,
            Files::Compact(file) => file,
        }))
    },
};

/// Writes expressions `range` as one of the Long Range Arena's own files: a header, then `text<TAB>value`.
fn write_tsv(
    expressions: &Expressions,
    range: std::ops::Range<usize>,
    mut out: impl Write,
) -> io::Result<()> {
    out.write_all(b"Source\tTarget\n")?;
    let mut line = String::new();
    for index in range {
        line.clear();
        line.push_str(&to_text(expressions.tokens(index)));
        let _ = writeln!(line, "\t{}", expressions.label(index));
        out.write_all(line.as_bytes())?;
    }
    Ok(())
}

/// Expressions per split: training, validation, test.
const SPLITS: [usize; 3] = [96_000, 2000, 2000];
/// Seed of the set that is made where nobody has LRA's own files.
const SEED: u64 = 0;
/// Longest line of a TSV file that is read.
const LONGEST_LINE: usize = 1 << 20;
/// Most expressions of one file: ten times the published number.
const MOST: usize = 1_000_000;
/// The Long Range Arena's own files, by split.
const FILES: [&str; 3] = ["basic_train.tsv", "basic_val.tsv", "basic_test.tsv"];

/// The same expressions in compact form, under one name.
const CACHE: &str = "listops.safetensors";
/// What stands in front of every message about the compact file.
const AGAIN: &str = "delete it or write it again: effattn fetch listops";

/// Writes the generated set as LRA's three files into `dir`; each appears whole or not at all.
fn write_splits(dir: &Path) -> io::Result<Vec<PathBuf>> {
    let all = generate(SEED, SPLITS.iter().sum());
    let mut first = 0;
    let mut written = Vec::new();
    for (name, count) in FILES.iter().zip(SPLITS) {
        let path = dir.join(name);
        file::write_with(&path, |file| {
            let mut out = BufWriter::with_capacity(1 << 20, file);
            write_tsv(&all, first..first + count, &mut out)?;
            out.flush()
        })?;
        written.push(path);
        first += count;
    }
    Ok(written)
}

/// What the generated set is kept as in the user's cache folder, so that only the first command makes it.
const KEPT: &str = "listops-generated.safetensors";

/// The generated set. In the user's own cache folder it is kept; a folder that a person names is left as it is.
fn generated(dir: &Path) -> Result<[Expressions; 3], DataError> {
    let kept = dir.join(KEPT);
    let own = dir == data_dir::default_dir();
    if own
        && kept.is_file()
        && let Ok(splits) = read_cache(&kept)
    {
        return Ok(splits);
    }
    let all = generate(SEED, SPLITS.iter().sum());
    // where it cannot be kept it is made again
    if own && std::fs::create_dir_all(dir).is_ok() && write_compact(&all, &kept).is_err() {
        log::debug!("{} cannot be written", kept.display());
    }
    Ok(split(&all))
}

/// Writes the generated set in compact form into `dir`.
fn write_cache(dir: &Path) -> io::Result<PathBuf> {
    let path = dir.join(CACHE);
    write_compact(&generate(SEED, SPLITS.iter().sum()), &path)?;
    Ok(path)
}

/// Writes `all` in compact form.
fn write_compact(all: &Expressions, path: &Path) -> io::Result<()> {
    let ends: Vec<u8> = all.ends.iter().flat_map(|&end| (end as u64).to_le_bytes()).collect();
    let view =
        |dtype, count: usize, bytes| TensorView::new(dtype, vec![count], bytes).map_err(io::Error::other);
    let tensors = [
        ("ends", view(Dtype::U64, all.ends.len(), &ends)?),
        ("labels", view(Dtype::U8, all.labels.len(), &all.labels)?),
        ("tokens", view(Dtype::U8, all.tokens.len(), &all.tokens)?),
    ];
    let hash = checksum(all);
    let metadata = [("format", "effattn listops".to_owned()), ("sha256", hash)];
    let metadata = metadata.map(|(key, value)| (key.to_owned(), value)).into_iter().collect();
    let bytes = safetensors::serialize(tensors, Some(metadata)).map_err(io::Error::other)?;
    file::write(path, &bytes)
}

/// Reads the compact file; its checksum must fit.
fn read_cache(path: &Path) -> Result<[Expressions; 3], DataError> {
    let damaged = |reason: String| store::bad_file(path, format!("{reason}; {AGAIN}"));
    let bytes = store::read_limited(store::open(path)?, 1 << 30)
        .map_err(|error| damaged(format!("cannot be read ({error})")))?;
    let (_, header) = SafeTensors::read_metadata(&bytes)
        .map_err(|error| damaged(format!("is not a ListOps file of effattn ({error})")))?;
    let stated = header.metadata().as_ref().and_then(|data| data.get("sha256").cloned());
    let content =
        SafeTensors::deserialize(&bytes).map_err(|error| damaged(format!("is damaged ({error})")))?;
    let part = |name: &str| {
        content.tensor(name).map(|view| view.data().to_vec()).map_err(|_| damaged(format!("has no {name}")))
    };
    let (tokens, labels, ends) = (part("tokens")?, part("labels")?, part("ends")?);
    let end = |bytes: &[u8]| {
        <[u8; 8]>::try_from(bytes).map_or(usize::MAX, |bytes| u64::from_le_bytes(bytes) as usize)
    };
    let ends: Vec<usize> = ends.chunks(8).map(end).collect();
    let ordered = ends.is_sorted() && ends.last().is_some_and(|&last| last == tokens.len());
    let known = tokens.iter().all(|&code| code <= token::CLOSE) && labels.iter().all(|&label| label < 10);
    let all = Expressions { tokens, ends, labels };
    if !ordered || !known || all.ends.len() != all.labels.len() || all.len() != SPLITS.iter().sum::<usize>() {
        return Err(damaged("does not contain 100,000 expressions".to_owned()));
    }
    if stated != Some(checksum(&all)) {
        return Err(damaged("does not match the checksum stored in it".to_owned()));
    }
    // the checksum is not of the ends
    let is_wrong = |at: &usize| evaluate(all.tokens(*at)) != Some(all.label(*at));
    if let Some(wrong) = (0..all.len()).into_par_iter().find_first(is_wrong) {
        return Err(damaged(format!("has an expression with another value than its label (number {wrong})")));
    }
    Ok(split(&all))
}

/// The checksum in the compact file: SHA-256 of tokens and values.
fn checksum(all: &Expressions) -> String {
    format!("{:x}", Sha256::new().chain_update(&all.tokens).chain_update(&all.labels).finalize())
}

/// The identity of the three splits.
fn identity(splits: &[Expressions; 3]) -> String {
    let mut content = ContentHash::default();
    for split in splits {
        split.ends.iter().for_each(|&end| content.number(end as u64));
        content.field(&split.tokens);
        content.field(&split.labels);
    }
    content.finish()
}

fn split(all: &Expressions) -> [Expressions; 3] {
    let mut first = 0;
    SPLITS.map(|count| {
        let mut split = Expressions::default();
        (first..first + count).for_each(|index| split.push(all.tokens(index), all.label(index)));
        first += count;
        split
    })
}

/// The task: expressions in three splits.
pub struct ListOps {
    splits: [Expressions; 3],
    tokenizer: Tokenizer,
    hash: String,
    partial: Option<String>,
}

impl ListOps {
    /// The Long Range Arena's files in `dir` where they are, else the compact file, else the generated set.
    pub fn load(dir: &Path, tokenizer: Tokenizer) -> Result<Self, DataError> {
        let splits = match files(dir)? {
            Some(Files::Arena([train, validation, test])) => {
                [read_tsv(&train)?, read_tsv(&validation)?, read_tsv(&test)?]
            }
            Some(Files::Compact(file)) => read_cache(&file)?,
            None => generated(dir)?,
        };
        let counts = splits.each_ref().map(Expressions::len);
        let partial = (counts != SPLITS).then(|| format!("{counts:?} of {SPLITS:?} expressions"));
        Ok(Self { tokenizer, hash: identity(&splits), splits, partial })
    }

    fn side(&self, split: Split) -> &Expressions {
        match split {
            Split::Train => &self.splits[0],
            Split::Validation => &self.splits[1],
            Split::Test => &self.splits[2],
        }
    }
}

impl Dataset for ListOps {
    fn len(&self, split: Split) -> usize {
        self.side(split).len()
    }

    fn example(&self, split: Split, index: usize, max_len: usize) -> Example {
        let side = self.side(split);
        let tokens = self.tokenizer.ids(side.tokens(index)).take(max_len).collect();
        Example { tokens, second: None, label: u32::from(side.label(index)) }
    }

    fn hash(&self) -> &str {
        &self.hash
    }

    fn partial(&self) -> Option<&str> {
        self.partial.as_deref()
    }
}

/// What there is in a folder.
enum Files {
    /// The Long Range Arena's own, by split.
    Arena([PathBuf; 3]),
    /// The compact file.
    Compact(PathBuf),
}

/// The files that are read, plain or gzip.
fn files(dir: &Path) -> Result<Option<Files>, DataError> {
    let found = FILES.map(|name| store::find_file(dir, &[name, &format!("{name}.gz")]));
    match found {
        [Some(train), Some(validation), Some(test)] => Ok(Some(Files::Arena([train, validation, test]))),
        [None, None, None] => Ok(store::find_file(dir, &[CACHE]).map(Files::Compact)),
        found => {
            let missing = FILES.iter().zip(&found).filter(|(_, path)| path.is_none());
            let missing: Vec<&str> = missing.map(|(name, _)| *name).collect();
            let next = format!(
                "of LRA's three files {} is missing; place it there or take the others away",
                missing.join(" and ")
            );
            Err(DataError::Missing { what: "ListOps", dir: dir.to_owned(), next })
        }
    }
}

/// Expressions of one of LRA's files: a header, then `text<TAB>value`.
fn read_tsv(file: &Path) -> Result<Expressions, DataError> {
    let mut made = Expressions::default();
    store::each_line(file, LONGEST_LINE, |number, line| {
        let text = std::str::from_utf8(line).map_err(|_| "is not UTF-8".to_owned())?.trim_end();
        if number == 1 && text == "Source\tTarget" {
            return Ok(());
        }
        if made.len() == MOST {
            return Err(format!("is more than the {MOST} expressions that a file may have"));
        }
        let (source, target) =
            text.split_once('\t').ok_or("has no tab; expected an expression, a tab and its value")?;
        let stated = target.trim().parse::<u8>().ok().filter(|label| *label < 10);
        let stated = stated.ok_or_else(|| format!("has the value {target:?}; expected 0 to 9"))?;
        let (tokens, label) = parse(source).map_err(|error| error.to_string())?;
        if label != stated {
            return Err(format!("says {stated}, but the expression is {label}"));
        }
        made.push(&tokens, label);
        Ok(())
    })?;
    Ok(made)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_compact_file_is_the_generated_set() {
        let folder = tempfile::tempdir().unwrap();
        let made = ListOps::load(folder.path(), Tokenizer::DropBrackets).unwrap();
        let file = write_cache(folder.path()).unwrap();
        assert!(file.metadata().unwrap().len() < 120 << 20);
        let read = ListOps::load(folder.path(), Tokenizer::DropBrackets).unwrap();
        assert_eq!(read.hash(), made.hash());
        // until 822cd16 the hash was that of tokens and values, split by split, without lengths: rows have either
        let mut before = Sha256::new();
        made.splits.iter().for_each(|split| {
            before = before.clone().chain_update(&split.tokens).chain_update(&split.labels)
        });
        let before = format!("{:x}", before.finalize());
        assert_eq!(
            (&before[..8], &made.hash()[..8]),
            ("a84007e8", "7848350e"),
            "other data than in committed rows"
        );
        assert_eq!(read.example(Split::Test, 1999, 2000), made.example(Split::Test, 1999, 2000));
        let mut bytes = std::fs::read(&file).unwrap();
        let mut shifted = bytes.clone();
        let ends = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        shifted[ends + 8 * 98_000] ^= 1; // an expression ends a token sooner or later
        let last = bytes.len() - 1;
        bytes[last] ^= 2; // another known token
        let error = |bytes: &[u8]| {
            std::fs::write(&file, bytes).unwrap();
            let error = ListOps::load(folder.path(), Tokenizer::DropBrackets).err().unwrap().to_string();
            assert!(error.contains("effattn fetch listops"), "{error}");
            error
        };
        assert!(error(&bytes).contains("does not match the checksum"));
        assert!(error(&shifted).contains("another value than its label"), "{}", error(&shifted));
        assert!(
            error(&bytes[..last]).contains("damaged") || error(&bytes[..last]).contains("not a ListOps file")
        );
        error(b"");
    }

    #[test]
    fn the_hash_covers_splits_and_packed_files_are_read() {
        let folder = tempfile::tempdir().unwrap();
        let hash = |counts: [usize; 3]| {
            for (name, count) in FILES.iter().zip(counts) {
                let packed = std::fs::File::create(folder.path().join(format!("{name}.gz"))).unwrap();
                let mut packed = flate2::write::GzEncoder::new(packed, flate2::Compression::fast());
                packed.write_all("7\t7\n".repeat(count).as_bytes()).unwrap();
                packed.finish().unwrap();
            }
            let data = ListOps::load(folder.path(), Tokenizer::KeepClose).unwrap();
            assert_eq!(Split::ALL.map(|split| data.len(split)), counts);
            data.hash().to_owned()
        };
        assert_ne!(hash([3, 2, 1]), hash([2, 3, 1]), "an expression moved from one split to the next");
        let found = (SET.locate)(folder.path()).unwrap().unwrap();
        assert!(found.ends_with("basic_train.tsv.gz"), "{}", found.display());
        std::fs::remove_file(found).unwrap();
        let missing = (SET.locate)(folder.path()).unwrap_err().to_string();
        assert!(missing.contains("basic_train.tsv is missing"), "{missing}");
    }

    #[test]
    fn files_in_the_arenas_layout_are_read_back() {
        let folder = tempfile::tempdir().unwrap();
        let made = generate(5, 40);
        for (name, range) in FILES.iter().zip([0..30, 30..35, 35..40]) {
            let mut text = Vec::new();
            write_tsv(&made, range, &mut text).unwrap();
            std::fs::write(folder.path().join(name), text).unwrap();
        }
        let data = ListOps::load(folder.path(), Tokenizer::KeepClose).unwrap();
        assert_eq!(Split::ALL.map(|split| data.len(split)), [30, 5, 5]);
        assert!(data.partial().is_some());
        let example = data.example(Split::Test, 4, 5000);
        assert_eq!(example.tokens.len(), made.tokens(39).len());
        assert_eq!(example.label, u32::from(made.label(39)));
        let train = folder.path().join(FILES[0]);
        let wrong = |text: &str| {
            std::fs::write(&train, text).unwrap();
            ListOps::load(folder.path(), Tokenizer::KeepClose).err().unwrap().to_string()
        };
        assert!(wrong("Source\tTarget\n( ( ( [MIN 3 ) 4 ) ] )\t4\n").contains("basic_train.tsv:2: says 4"));
        assert!(wrong("Source\tTarget\n[MIN 3 ]\t12\n").contains(":2: has the value"));
        assert!(wrong("[MIN 3 ]").contains(":1: has no tab"));
        std::fs::remove_file(&train).unwrap();
        let missing = ListOps::load(folder.path(), Tokenizer::KeepClose).err().unwrap().to_string();
        assert!(missing.contains("basic_train.tsv is missing"), "{missing}");
    }
}
