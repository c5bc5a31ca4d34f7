//! enwik8: the first 10^8 bytes of an English Wikipedia dump (M. Mahoney).

use super::corpus::{COMPLETE, CharCorpus, Published};
use super::entry::{CharTask, DataKind, DataSetEntry, Origin};
use super::fetch::{DownloadSource, Sum};
use super::store;

/// The table line.
pub static SET: DataSetEntry = DataSetEntry {
    name: "enwik8",
    collection: "enwik8",
    title: "enwik8",
    about: "the next byte of an English Wikipedia dump",
    records: "100,000,000 bytes",
    kind: DataKind::Symbols(CharTask {
        vocabulary: PUBLISHED.vocabulary,
        complete: Some(COMPLETE),
        load: &|dir, reading| CharCorpus::load(&PUBLISHED, dir, reading.allow_partial),
    }),
    origin: Origin::Download(DownloadSource {
        name: "enwik8",
        file: "enwik8.zip",
        names: PUBLISHED.files,
        url: "http://mattmahoney.net/dc/enwik8.zip",
        bytes: Some(36_445_475),
        sum: Sum::Sha256("547994d9980ebed1288380d652999f38a14fe291a6247c157c3d33d4932534bc"),
    }),
    locate: |dir| Ok(store::find_file(dir, PUBLISHED.files)),
};

/// The corpus.
pub const PUBLISHED: Published = Published {
    name: "enwik8",
    files: &["enwik8", "enwik8.zip", "enwik8.gz", "enwik8-first-4000000.gz"],
    sha256: Some("2b49720ec4d78c3c9fabaee6e4179a5e997302b3a70029f30f2d582218c024a8"),
    vocabulary: 208,
    allows: |_| true,
    alphabet: "any bytes",
};
