//! The bytes that `speed` and `memory` read: IMDb reviews where they are, else a text of this project's own.

use std::path::Path;

use sha2::{Digest, Sha256};

use crate::protocol::definition::{DataDirs, Prepared};
use crate::run::plan::Plan;
use effattn_data::lra_text::{LraText, NAMES};
use effattn_data::{DataError, Dataset, Split, store, story};

/// The data set whose texts are read where it is there.
pub const SET: &str = "text";

/// Most bytes that are taken; longer inputs repeat them.
const MOST: usize = 8 << 20;

/// Text and where it comes from.
pub struct InputText {
    /// Name in the manifest.
    pub name: &'static str,
    /// The bytes.
    pub bytes: Vec<u8>,
}

impl InputText {
    /// SHA-256 of the bytes.
    pub fn hash(&self) -> String {
        Sha256::digest(&self.bytes).iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

/// The text that ships with the program.
pub fn embedded() -> InputText {
    InputText { name: "embedded", bytes: story::text() }
}

/// Reviews from `dir` one after another, or [`embedded`] if there are none.
pub fn load(dir: &Path) -> Result<InputText, DataError> {
    if store::find(dir, NAMES).is_none() {
        return Ok(embedded());
    }
    let reviews = LraText::load(dir, false, true)?;
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
    Ok(InputText { name: "imdb", bytes })
}

/// Notes the text in `plan`, and gives it where it is not the built-in one.
pub fn prepare(plan: &mut Plan, dirs: &DataDirs) -> anyhow::Result<Prepared> {
    let text = load(&dirs.data)?;
    plan.data.insert(text.name.to_owned(), text.hash());
    let text = (text.name != embedded().name).then_some(text.bytes);
    Ok(Prepared { text, ..Prepared::default() })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Measurements compare only on the same bytes: another text is another name in the manifest.
    const STORY: &str = "6220b47451a3e83c37d26b1fbdf59c9dcfc1eb83b1cf229f8541c921675ec76f";

    #[test]
    fn without_reviews_the_text_is_our_own_and_never_changes() {
        let empty = tempfile::tempdir().unwrap();
        let text = load(empty.path()).unwrap();
        assert_eq!((text.name, text.bytes.len(), text.hash().as_str()), ("embedded", 1 << 16, STORY));
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
