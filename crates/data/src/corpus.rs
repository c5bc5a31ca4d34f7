//! Character corpora: one symbol per byte, in three parts. The corpora themselves are files beside this one.

use std::io::Read;
use std::ops::Range;
use std::path::Path;

use sha2::{Digest, Sha256};

use super::{DataError, store};
use effattn_record::file as files;

/// Bytes of a complete corpus.
pub const COMPLETE: usize = 100_000_000;
/// Bytes of the complete training part; validation and test have 5 million each.
const TRAIN: usize = 90_000_000;

/// A published corpus of [`COMPLETE`] bytes.
#[derive(Clone, Copy, Debug)]
pub struct Published {
    /// Name on the command line, and of the member of a zip archive.
    pub name: &'static str,
    /// Names of files, in the order they are looked for.
    pub files: &'static [&'static str],
    /// SHA-256 of the complete corpus, where published.
    pub sha256: Option<&'static str>,
    /// Rows of the embedding: the published models' vocabulary, spare rows included.
    pub vocabulary: usize,
    /// Whether a byte belongs in it.
    pub allows: fn(u8) -> bool,
    /// What the allowed bytes are, in words.
    pub alphabet: &'static str,
}

/// A corpus in memory.
pub struct CharCorpus {
    /// Symbol ids, dense from 0.
    pub symbols: Vec<u8>,
    /// Train, validation and test parts.
    pub parts: [Range<usize>; 3],
    /// The byte each id stands for.
    pub alphabet: Vec<u8>,
    /// Rows the embedding needs.
    pub vocabulary: usize,
    /// SHA-256 of the bytes.
    pub hash: String,
    /// What is missing, in words.
    pub partial: Option<String>,
}

impl CharCorpus {
    /// Loads what is `published` from `dir`: raw, gzip or zip. A prefix is split 90/5/5.
    pub fn load(published: &Published, dir: &Path, allow_partial: bool) -> Result<Self, DataError> {
        let what = published.name;
        let file = store::find_file(dir, published.files).ok_or_else(|| DataError::Missing {
            what,
            dir: dir.to_owned(),
            next: format!("run effattn fetch {what}, or place {what} ({what}.zip, {what}.gz) there"),
        })?;
        let bytes = read(published, &file)?;
        if let Some(at) = bytes.iter().position(|&byte| !(published.allows)(byte)) {
            let reason =
                format!("byte {} at {at} is not in {what}, which has {} only", bytes[at], published.alphabet);
            return Err(store::bad_file(&file, reason));
        }
        if bytes.len() < 1000 {
            let reason = format!("{} bytes are too few to be {what}", bytes.len());
            return Err(store::bad_file(&file, reason));
        }
        let corpus = Self::new(bytes, published.vocabulary);
        let known = published.sha256.is_none_or(|sha256| sha256 == corpus.hash);
        let partial = match corpus.symbols.len() {
            COMPLETE if known => None,
            COMPLETE => Some(format!("{what} has another checksum than the published corpus")),
            len => Some(format!("{len} of {COMPLETE} bytes")),
        };
        match partial {
            Some(missing) if !allow_partial => Err(DataError::Partial { what, dir: dir.to_owned(), missing }),
            partial => Ok(Self { partial, ..corpus }),
        }
    }

    /// A corpus from bytes. Symbols are numbered in increasing byte order of the training part; a byte that
    /// only the other parts have shares one further id.
    pub fn new(bytes: Vec<u8>, vocabulary: usize) -> Self {
        let len = bytes.len();
        let (train, validation) = match len {
            COMPLETE => (TRAIN, TRAIN + 5_000_000),
            _ => (len * 90 / 100, len * 95 / 100),
        };
        Self::with_parts(bytes, [train, validation, len], vocabulary)
    }

    /// A corpus from the bytes of its training, validation and test parts, one behind another, which end at `ends`.
    pub fn with_parts(bytes: Vec<u8>, ends: [usize; 3], vocabulary: usize) -> Self {
        let [train, validation, len] = ends;
        let mut used = [false; 256];
        bytes[..train].iter().for_each(|&byte| used[usize::from(byte)] = true);
        let alphabet: Vec<u8> = (0..=255).filter(|&byte| used[usize::from(byte)]).collect();
        let unknown = alphabet.len().min(255) as u8;
        let mut ids = [unknown; 256];
        for (id, &byte) in alphabet.iter().enumerate() {
            ids[usize::from(byte)] = id as u8;
        }
        let hash = format!("{:x}", Sha256::digest(&bytes));
        let symbols: Vec<u8> = bytes.into_iter().map(|byte| ids[usize::from(byte)]).collect();
        let most = symbols.iter().copied().max().map_or(0, |id| usize::from(id) + 1);
        let parts = [0..train, train..validation, validation..len];
        Self { symbols, parts, alphabet, vocabulary: vocabulary.max(most), hash, partial: None }
    }
}

fn read(published: &Published, file: &Path) -> Result<Vec<u8>, DataError> {
    let limit = COMPLETE as u64;
    let broken = |error: std::io::Error| {
        store::bad_file(file, format!("cannot be read to its end ({error}); fetch it again"))
    };
    if file.extension().is_some_and(|extension| extension == "zip") {
        let raw = files::open(file).map_err(broken)?;
        let wrong = |error: zip::result::ZipError| {
            store::bad_file(
                file,
                format!("is not a zip archive with a member {:?} ({error})", published.name),
            )
        };
        let mut archive = zip::ZipArchive::new(raw).map_err(wrong)?;
        let member = archive.by_name(published.name).map_err(wrong)?;
        return store::read_limited(member, limit).map_err(broken);
    }
    let reader: Box<dyn Read> = store::open(file)?;
    store::read_limited(reader, limit).map_err(broken)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text8::PUBLISHED as TEXT8;

    #[test]
    fn a_prefix_is_split_and_labelled() {
        let dir = tempfile::tempdir().expect("a folder");
        let text: Vec<u8> = (0..2000).map(|i| b"ab c"[i % 4]).collect();
        std::fs::write(dir.path().join("text8"), &text).expect("a file");
        let corpus = CharCorpus::load(&TEXT8, dir.path(), true).expect("a corpus");
        assert_eq!(corpus.parts, [0..1800, 1800..1900, 1900..2000]);
        assert_eq!((corpus.alphabet.as_slice(), corpus.vocabulary), (b" abc".as_slice(), 32));
        assert_eq!(corpus.symbols[..4], [1, 2, 0, 3]);
        assert_eq!(corpus.partial.as_deref(), Some("2000 of 100000000 bytes"));
        let strict = CharCorpus::load(&TEXT8, dir.path(), false).err().expect("partial").to_string();
        assert!(strict.contains("--allow-partial"), "{strict}");
    }

    #[test]
    fn other_files_are_refused() {
        let dir = tempfile::tempdir().expect("a folder");
        let load = || CharCorpus::load(&TEXT8, dir.path(), true).err().expect("refused").to_string();
        assert!(load().contains("effattn fetch text8"));
        std::fs::write(dir.path().join("text8"), b"").expect("a file");
        assert!(load().contains("too few"));
        std::fs::write(dir.path().join("text8"), b"A").expect("a file");
        assert!(load().contains("byte 65 at 0"));
        std::fs::rename(dir.path().join("text8"), dir.path().join("text8.zip")).expect("renamed");
        assert!(load().contains("not a zip archive"));
    }

    #[test]
    fn an_unseen_byte_is_unknown() {
        let mut bytes = vec![b'x'; 1000];
        bytes[999] = b'y';
        let corpus = CharCorpus::new(bytes, 2);
        assert_eq!((corpus.symbols[0], corpus.symbols[999], corpus.vocabulary), (0, 1, 2));
    }
}
