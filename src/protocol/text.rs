//! The bytes that `speed` and `memory` read: IMDb reviews where they are, else this project's own documents.

use std::path::Path;

use sha2::{Digest, Sha256};

use crate::data::text::{Imdb, NAMES};
use crate::data::{DataError, Dataset, Split, store};

/// Most bytes that are taken; longer inputs repeat them.
const MOST: usize = 8 << 20;

/// Text and where it comes from.
pub struct Text {
    /// Name in the manifest.
    pub name: &'static str,
    /// The bytes.
    pub bytes: Vec<u8>,
}

impl Text {
    /// SHA-256 of the bytes.
    pub fn hash(&self) -> String {
        Sha256::digest(&self.bytes).iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

/// This project's own documents.
pub fn embedded() -> Text {
    let parts = [
        include_str!("../../README.md"),
        include_str!("../attention/mod.rs"),
        include_str!("../pattern.rs"),
        include_str!("../../LICENSE-APACHE"),
    ];
    Text { name: "embedded", bytes: parts.join("\n").into_bytes() }
}

/// Reviews from `dir` one after another, or [`embedded`] if there are none.
///
/// # Errors
/// Reviews that are there but cannot be read.
pub fn load(dir: &Path) -> Result<Text, DataError> {
    if store::find(dir, NAMES).is_none() {
        return Ok(embedded());
    }
    let reviews = Imdb::load(dir, false, true)?;
    let mut bytes = Vec::new();
    for index in 0..reviews.len(Split::Train) {
        let tokens = reviews.example(Split::Train, index, usize::MAX).tokens;
        bytes.extend(tokens.iter().map(|id| (id - 1) as u8)); // ids are bytes + 1
        bytes.push(b'\n');
        if bytes.len() >= MOST {
            break;
        }
    }
    bytes.truncate(MOST);
    Ok(Text { name: "imdb", bytes })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_reviews_the_text_is_our_own() {
        let empty = tempfile::tempdir().unwrap();
        let text = load(empty.path()).unwrap();
        assert_eq!(text.name, "embedded");
        assert!(text.bytes.len() > 10_000 && text.hash().len() == 64);
    }

    #[test]
    fn reviews_are_read_in_order() {
        let folder = tempfile::tempdir().unwrap();
        for (place, text) in [("train/neg/0_2.txt", "bad film"), ("train/pos/0_9.txt", "good film")] {
            let path = folder.path().join("aclImdb").join(place);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        let text = load(folder.path()).unwrap();
        assert_eq!((text.name, text.bytes.as_slice()), ("imdb", &b"bad film\ngood film\n"[..]));
    }
}
