//! Words of masked language models: GPT-2's byte-level BPE, by the `tokenizers` crate (`docs/spec/SPEC-text.md` section 7).
//!
//! A [`Tokenizer`] is trained on a text or read from a file as it stands. A [`TokenEncoder`] turns texts into ids; what it
//! has seen once between two blanks it remembers, which is exact, because no piece of the pattern goes on over a blank:
//!
//! ```text
//! 's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
//! ```
//!
//! A text is a text: `<mask>` in it is six characters, not the special word.

mod files;

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use tokenizers::models::bpe::{BPE, BpeTrainer};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::{Model, OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer, Trainer};

use super::DataError;
use super::content_hash::ContentHash;
use effattn_kernel::embedding::PADDING;

/// Number of ids of a tokenizer that is trained here, where nothing else is said.
pub const VOCABULARY: usize = 8192;
/// Most bytes of a piece of a text that a tokenizer is trained on: the time for one grows with its square (80,000 letters take ten
/// seconds). Words of a language have fewer than 200.
const LONGEST: usize = 1 << 14;
/// Fewest occurrences of a pair that becomes a word.
const LEAST: u64 = 2;
/// Special words by their public names, in the order of their ids; `<mask>` is the last of all ids.
const SPECIALS: [&str; 4] = ["<s>", "<pad>", "</s>", "<unk>"];
const MASK: &str = "<mask>";

/// Ids of the special words; padding is [`PADDING`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Specials {
    /// `<s>`, in front of every input.
    pub start: u32,
    /// `</s>`, behind every text.
    pub end: u32,
    /// `<unk>`.
    pub unknown: u32,
    /// `<mask>`.
    pub mask: u32,
}

impl Specials {
    /// Whether `id` is one of the four that no random word is drawn from: `<s>`, `<pad>`, `</s>`, `<unk>`.
    pub fn reserved(&self, id: u32) -> bool {
        id == PADDING || [self.start, self.end, self.unknown].contains(&id)
    }
}

/// A byte-level BPE with RoBERTa's special words.
#[derive(Clone)]
pub struct Tokenizer {
    bpe: BPE,
    bytes: ByteLevel,
    specials: Specials,
    len: usize,
    hash: String,
    /// Content of its `tokenizer.json`.
    json: String,
}

impl Tokenizer {
    /// The tokenizer of `vocabulary` ids (fewer for a small text) trained on `texts`.
    pub fn train<'a>(texts: impl Iterator<Item = &'a str>, vocabulary: usize) -> Result<Self, String> {
        let alphabet = ByteLevel::alphabet();
        let least = SPECIALS.len() + alphabet.len() + 1;
        if vocabulary < least {
            return Err(format!(
                "a vocabulary of {vocabulary} words is too small: bytes and special words are {least}"
            ));
        }
        let bytes = ByteLevel::new(false, true, true);
        let counts = count(&bytes, texts)?;
        let specials = SPECIALS.iter().map(|word| files::special(word)).collect();
        let mut trainer = BpeTrainer::builder()
            .show_progress(false)
            .min_frequency(LEAST)
            .vocab_size(vocabulary - 1)
            .initial_alphabet(alphabet.into_iter().collect())
            .special_tokens(specials)
            .build();
        let again = |piece: &str| {
            let count = counts.get(piece).copied().unwrap_or(0);
            Ok(vec![piece.to_owned(); count])
        };
        let mut bpe = BPE::default();
        let trained = trainer.feed(counts.keys(), again).and_then(|()| trainer.train(&mut bpe));
        trained.map_err(|error| error.to_string())?;
        files::finish(bpe, bytes, None)
    }

    /// Reads `path`: a `tokenizer.json`, or a folder with one or with `vocab.json` and `merges.txt`.
    pub fn load(path: &Path) -> Result<Self, DataError> {
        files::load(path)
    }

    /// Content of its `tokenizer.json`, for [`Self::load`] and for other programs.
    pub fn json(&self) -> &str {
        &self.json
    }

    /// SHA-256 of what defines it: words with their ids, merges in their order, the special words.
    pub fn hash(&self) -> &str {
        &self.hash
    }

    /// Number of ids.
    #[expect(clippy::len_without_is_empty, reason = "none is empty")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Ids of the special words.
    pub fn specials(&self) -> Specials {
        self.specials
    }

    /// Makes sure that it is the tokenizer that `file` was made with.
    pub fn expect(&self, hash: &str, file: &Path) -> Result<(), DataError> {
        if hash == self.hash {
            return Ok(());
        }
        let short = |hash: &str| hash.chars().take(12).collect::<String>();
        let reason = format!(
            "was made with tokenizer {}, not with {}; give the tokenizer.json that is stored next to it",
            short(hash),
            short(&self.hash)
        );
        Err(super::store::bad_file(file, reason))
    }

    /// The text of `ids`, without special words.
    pub fn decode(&self, ids: &[u32]) -> String {
        let special = |id: u32| self.specials.reserved(id) || id == self.specials.mask;
        let words =
            ids.iter().filter(|id| !special(**id)).filter_map(|id| self.bpe.id_to_token(*id)).collect();
        tokenizers::Decoder::decode(&self.bytes, words).unwrap_or_default()
    }

    /// What `ids` stand for one by one: pieces of text, special words by their names.
    pub fn tokens(&self, ids: &[u32]) -> Vec<String> {
        let special = |id: u32| self.specials.reserved(id) || id == self.specials.mask;
        let token = |id: &u32| match special(*id) {
            true => self.bpe.id_to_token(*id).unwrap_or_default(),
            false => self.decode(&[*id]),
        };
        ids.iter().map(token).collect()
    }

    /// Turns texts into ids.
    pub fn encoder(&self) -> TokenEncoder<'_> {
        TokenEncoder { tokenizer: self, known: HashMap::new() }
    }
}

/// Turns texts into ids and remembers what it has seen.
pub struct TokenEncoder<'a> {
    tokenizer: &'a Tokenizer,
    known: HashMap<Box<str>, Box<[u32]>>,
}

impl TokenEncoder<'_> {
    /// The ids of `text`, without special words.
    pub fn ids(&mut self, text: &str) -> Vec<u32> {
        let mut ids = Vec::with_capacity(text.len() / 3);
        let blank = self.tokenizer.bytes.add_prefix_space && !text.starts_with(' ');
        let first = blank.then(|| format!(" {text}"));
        for part in parts(first.as_deref().unwrap_or(text)) {
            if let Some(known) = self.known.get(part) {
                ids.extend_from_slice(known);
                continue;
            }
            let new = self.encode(part);
            ids.extend_from_slice(&new);
            self.known.insert(part.into(), new.into_boxed_slice());
        }
        ids
    }

    fn encode(&self, part: &str) -> Vec<u32> {
        // every byte is a word (`files::finish`), so that nothing here can fail or be left out
        let pieces = pieces(&self.tokenizer.bytes.add_prefix_space(false), part).unwrap_or_default();
        let words = pieces.iter().filter_map(|piece| self.tokenizer.bpe.tokenize(piece).ok());
        words.flatten().map(|token| token.id).collect()
    }

    /// `<s> text </s>` in at most `most` ids: a text that is too long is cut at its end.
    pub fn single(&mut self, text: &str, most: usize) -> Vec<u32> {
        let mut ids = self.ids(text);
        ids.truncate(most.saturating_sub(2));
        let Specials { start, end, .. } = self.tokenizer.specials;
        [&[start], ids.as_slice(), &[end]].concat()
    }

    /// `<s> a </s></s> b </s>` in at most `most` ids: the longer text is cut, by one id after the other (`b` of two that
    /// are alike).
    pub fn pair(&mut self, a: &str, b: &str, most: usize) -> Vec<u32> {
        let (mut a, mut b) = (self.ids(a), self.ids(b));
        let room = most.saturating_sub(4);
        let over = (a.len() + b.len()).saturating_sub(room);
        // first the longer one alone down to the other's length, then both in turns
        let alone = over.min(a.len().abs_diff(b.len()));
        let (of_a, of_b) = ((over - alone) / 2, (over - alone).div_ceil(2));
        let (more_a, more_b) = if a.len() > b.len() { (alone, 0) } else { (0, alone) };
        a.truncate(a.len() - of_a - more_a);
        b.truncate(b.len() - of_b - more_b);
        let Specials { start, end, .. } = self.tokenizer.specials;
        [&[start], a.as_slice(), &[end, end], b.as_slice(), &[end]].concat()
    }
}

/// `text` cut in front of every run of blanks that follows something else. No piece of the pattern crosses such a place, and
/// none looks over it.
fn parts(text: &str) -> impl Iterator<Item = &str> {
    let mut rest = text;
    std::iter::from_fn(move || {
        let word = rest.find(|c: char| !c.is_whitespace()).unwrap_or(rest.len());
        let end = rest[word..].find(char::is_whitespace).map_or(rest.len(), |end| word + end);
        let (part, after) = rest.split_at(end);
        rest = after;
        (end > 0).then_some(part)
    })
}

/// The pieces of `text` in printable characters, one for each byte.
fn pieces(bytes: &ByteLevel, text: &str) -> Result<Vec<String>, String> {
    let mut text = PreTokenizedString::from(text);
    bytes.pre_tokenize(&mut text).map_err(|error| error.to_string())?;
    let splits = text.get_splits(OffsetReferential::Normalized, OffsetType::Byte);
    Ok(splits.into_iter().map(|(piece, ..)| piece.to_owned()).filter(|piece| !piece.is_empty()).collect())
}

/// How often every piece occurs in `texts`.
fn count<'a>(
    bytes: &ByteLevel,
    texts: impl Iterator<Item = &'a str>,
) -> Result<BTreeMap<String, usize>, String> {
    let mut seen: HashMap<&str, usize> = HashMap::new();
    for part in texts.flat_map(parts) {
        *seen.entry(part).or_default() += 1;
    }
    let mut counts = BTreeMap::new();
    for (part, times) in seen {
        for piece in pieces(bytes, part)? {
            let len = piece.chars().count(); // a character for each byte
            if len > LONGEST {
                let start: String = part.trim_start().chars().take(24).collect();
                return Err(format!(
                    "a word of {len} bytes in the text that begins with {start:?}; a tokenizer is trained on words of at most {LONGEST}"
                ));
            }
            *counts.entry(piece).or_default() += times;
        }
    }
    Ok(counts)
}

/// The checksum of [`Tokenizer::hash`]; `words` in the order of their ids.
fn hash<'a>(
    words: &BTreeMap<u32, String>,
    merges: impl Iterator<Item = (&'a str, &'a str)>,
    specials: Specials,
    blank_in_front: bool,
) -> String {
    let mut content = ContentHash::default();
    for (id, word) in words {
        content.number(u64::from(*id));
        content.field(word.as_bytes());
    }
    for (left, right) in merges {
        content.field(left.as_bytes());
        content.field(right.as_bytes());
    }
    for id in [specials.start, specials.end, specials.unknown, specials.mask] {
        content.number(u64::from(id));
    }
    content.number(u64::from(blank_in_front));
    content.finish()
}

#[cfg(test)]
mod tests;
