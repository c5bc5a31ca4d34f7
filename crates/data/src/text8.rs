//! text8: enwik8's dump reduced to 26 letters and blanks (M. Mahoney).

use super::corpus::{COMPLETE, CharCorpus, Published};
use super::entry::{CharTask, DataKind, DataSetEntry, Origin};
use super::fetch::{DownloadSource, Sum};
use super::store;

/// The table line.
pub static SET: DataSetEntry = DataSetEntry {
    name: "text8",
    collection: "text8",
    title: "text8",
    about: "the next letter of an English Wikipedia dump without markup",
    records: "100,000,000 bytes",
    kind: DataKind::Symbols(CharTask {
        vocabulary: PUBLISHED.vocabulary,
        complete: Some(COMPLETE),
        load: &|dir, reading| CharCorpus::load(&PUBLISHED, dir, reading.allow_partial),
    }),
    origin: Origin::Download(DownloadSource {
        name: "text8",
        file: "text8.zip",
        names: PUBLISHED.files,
        url: "http://mattmahoney.net/dc/text8.zip",
        bytes: Some(31_344_016),
        sum: Sum::Sha256("a6640522afe85d1963ad56c05b0ede0a0c000dddc9671758a6cc09b7a38e5232"),
    }),
    locate: |dir| Ok(store::find_file(dir, PUBLISHED.files)),
};

/// The corpus.
pub const PUBLISHED: Published = Published {
    name: "text8",
    files: &["text8", "text8.zip", "text8.gz", "text8-first-5000000.zip"],
    sha256: None,
    vocabulary: 32,
    allows: |byte| byte == b' ' || byte.is_ascii_lowercase(),
    alphabet: "the letters a to z and blanks",
};
