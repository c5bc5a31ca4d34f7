//! The identity of data: a checksum over everything that was read.

use std::io;
use std::path::Path;

use effattn_record::file;
use sha2::{Digest, Sha256};

/// SHA-256 of the content of the file `path`.
pub fn file_digest(path: &Path) -> io::Result<[u8; 32]> {
    let mut hash = Sha256::new();
    io::copy(&mut file::open(path)?, &mut hash)?;
    Ok(hash.finalize().into())
}

/// [`file_digest`] in hexadecimal digits.
pub fn file_hash(path: &Path) -> io::Result<String> {
    Ok(hex(&file_digest(path)?))
}

/// `bytes` in hexadecimal digits.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// SHA-256 over fields. Each has its length in front, so that nothing moves from one field, example or split to the
/// next unseen.
#[derive(Clone, Default)]
pub struct ContentHash(Sha256);

impl ContentHash {
    /// Takes in a field: a text, a row of tokens, the name of a split.
    pub fn field(&mut self, bytes: &[u8]) {
        self.number(bytes.len() as u64);
        self.0.update(bytes);
    }

    /// Takes in a number: a class, a count.
    pub fn number(&mut self, number: u64) {
        self.0.update(number.to_le_bytes());
    }

    /// The checksum, in hexadecimal digits.
    pub fn finish(self) -> String {
        format!("{:x}", self.0.finalize())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_have_ends() {
        let of = |fields: &[&[u8]]| {
            let mut content = ContentHash::default();
            fields.iter().for_each(|field| content.field(field));
            content.finish()
        };
        assert_eq!(of(&[b"ab", b"c"]), of(&[b"ab", b"c"]));
        assert_ne!(of(&[b"ab", b"c"]), of(&[b"a", b"bc"]));
        assert_ne!(of(&[b"", b"x"]), of(&[b"x", b""]));
    }
}
