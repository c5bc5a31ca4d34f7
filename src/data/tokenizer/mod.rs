//! Words of masked language models: GPT-2's byte-level BPE, by the `tokenizers` crate (`docs/spec/SPEC-text.md` section 7).
//!
//! A [`Tokenizer`] is trained on a text or read from a file as it stands. An [`Encoder`] turns texts into ids; what it
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
use super::content::Content;
use crate::nn::PADDING;

/// Number of ids of a tokenizer that is trained here, where nothing else is said.
pub const VOCABULARY: usize = 8192;
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
    ///
    /// # Errors
    /// A vocabulary without room for the bytes and the special words.
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
    ///
    /// # Errors
    /// Files that are missing or cannot be read, no byte-level BPE, a word or an id that stands twice, a merge of words
    /// that are not there, special words that are missing.
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
    ///
    /// # Errors
    /// It is another one.
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

    /// Turns texts into ids.
    pub fn encoder(&self) -> Encoder<'_> {
        Encoder { tokenizer: self, known: HashMap::new() }
    }
}

/// Turns texts into ids and remembers what it has seen.
pub struct Encoder<'a> {
    tokenizer: &'a Tokenizer,
    known: HashMap<Box<str>, Box<[u32]>>,
}

impl Encoder<'_> {
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
    let mut content = Content::default();
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
mod tests {
    use super::*;

    /// Spoils the text of a file.
    type Spoil<'a> = &'a dyn Fn(&str) -> String;
    use crate::data::story;

    fn story() -> String {
        String::from_utf8(story::text()).expect("text")
    }

    fn trained() -> Tokenizer {
        Tokenizer::train(story().split_inclusive('\n'), 400).expect("a tokenizer")
    }

    #[test]
    fn special_words_stand_where_roberta_has_them() {
        let tokenizer = trained();
        let Specials { start, end, unknown, mask } = tokenizer.specials();
        assert_eq!((start, end, unknown, mask, tokenizer.len()), (0, 2, 3, 399, 400));
        assert!(tokenizer.specials().reserved(PADDING) && !tokenizer.specials().reserved(mask));
        let small = Tokenizer::train(["a"].into_iter(), 260).err().expect("refused");
        assert!(small.contains("261"), "{small}");
    }

    #[test]
    fn every_text_comes_back() {
        let tokenizer = trained();
        let mut encoder = tokenizer.encoder();
        for text in [
            "",
            " ",
            "a",
            "  two  blanks ",
            "it's\n\n\tdone<mask></s>",
            "\u{e9}\u{4e2d}\u{1f600}\u{a0}\u{200b}x",
        ] {
            let ids = encoder.ids(text);
            assert_eq!(tokenizer.decode(&ids), text);
            assert!(ids.iter().all(|id| !tokenizer.specials().reserved(*id)));
        }
    }

    #[test]
    fn parts_are_cut_where_the_pattern_cuts() {
        let tokenizer = trained();
        let whole = |text: &str| {
            let pieces = pieces(&tokenizer.bytes, text).expect("pieces");
            pieces
                .iter()
                .flat_map(|piece| tokenizer.bpe.tokenize(piece).expect("words"))
                .map(|token| token.id)
                .collect::<Vec<_>>()
        };
        let mut encoder = tokenizer.encoder();
        let odd = "a  b\t c\n\n d's  'll 12ab \u{a0}\u{a0}x \u{3000}y--  ";
        for text in [odd, &story()[..4096]] {
            assert_eq!(encoder.ids(text), whole(text));
            assert_eq!(encoder.ids(text), whole(text), "what is remembered is the same");
        }
        assert_eq!(parts(odd).collect::<String>(), odd);
    }

    #[test]
    fn inputs_are_cut_behind_their_ends() {
        let tokenizer = trained();
        let mut encoder = tokenizer.encoder();
        let ids = |encoder: &mut Encoder, text: &str| encoder.ids(text);
        let (a, b) = ("the old lamp in the harbour", "a bell");
        let (long, short) = (ids(&mut encoder, a), ids(&mut encoder, b));
        assert_eq!(encoder.single(a, 512), [&[0], long.as_slice(), &[2]].concat());
        assert_eq!(encoder.single(a, 5), [&[0], &long[..3], &[2]].concat());
        assert_eq!(
            encoder.pair(a, b, 512),
            [&[0], long.as_slice(), &[2, 2], short.as_slice(), &[2]].concat()
        );
        let room = short.len() + 1; // what is left of the longer text
        let cut = [&[0], &long[..room], &[2, 2], short.as_slice(), &[2]].concat();
        assert_eq!(encoder.pair(a, b, cut.len()), cut);
        let swapped = [&[0], short.as_slice(), &[2, 2], &long[..room], &[2]].concat();
        assert_eq!(encoder.pair(b, a, cut.len()), swapped);
        for most in 0..long.len() + 8 {
            assert!(
                encoder.pair(a, b, most).len() <= most.max(4) && encoder.single(a, most).len() <= most.max(2)
            );
        }
    }

    #[test]
    fn files_hold_the_same_tokenizer() {
        let (folder, tokenizer) = (tempfile::tempdir().expect("a folder"), trained());
        assert_eq!(trained().hash(), tokenizer.hash(), "the same text gives the same tokenizer");
        let file = folder.path().join("tokenizer.json");
        std::fs::write(&file, tokenizer.json()).expect("written");
        let text = story();
        let ids = tokenizer.encoder().ids(&text);
        for path in [file.as_path(), folder.path()] {
            let read = Tokenizer::load(path).expect("a tokenizer");
            assert_eq!(
                (read.hash(), read.len(), read.specials()),
                (tokenizer.hash(), 400, tokenizer.specials())
            );
            assert_eq!(read.encoder().ids(&text), ids);
        }
        std::fs::remove_file(&file).expect("removed");
        public(&tokenizer, folder.path());
        let read = Tokenizer::load(folder.path()).expect("a tokenizer");
        assert_eq!((read.hash(), read.encoder().ids(&text)), (tokenizer.hash(), ids));
        let other = Tokenizer::train(["other words"].into_iter(), 300).expect("a tokenizer");
        assert!(read.expect(tokenizer.hash(), &file).is_ok());
        assert!(read.expect(other.hash(), &file).expect_err("refused").to_string().contains("was made with"));
    }

    /// `vocab.json` and `merges.txt`.
    fn public(tokenizer: &Tokenizer, folder: &Path) {
        let json: serde_json::Value = serde_json::from_str(tokenizer.json()).expect("JSON");
        let (mut vocab, merges) =
            (json["model"]["vocab"].clone(), json["model"]["merges"].as_array().expect("merges"));
        vocab["<mask>"] = tokenizer.specials().mask.into();
        let line = |pair: &serde_json::Value| {
            format!("{} {}\n", pair[0].as_str().expect("a word"), pair[1].as_str().expect("a word"))
        };
        let merges: String = merges.iter().map(line).collect();
        std::fs::write(folder.join("vocab.json"), vocab.to_string()).expect("written");
        std::fs::write(folder.join("merges.txt"), format!("#version: 0.2\n{merges}")).expect("written");
    }

    #[test]
    fn bad_files_are_refused_with_their_line() {
        let (folder, tokenizer) = (tempfile::tempdir().expect("a folder"), trained());
        let says = || Tokenizer::load(folder.path()).err().expect("refused").to_string();
        assert!(says().contains("contains no tokenizer"), "{}", says());
        public(&tokenizer, folder.path());
        let [vocab, merges] = ["vocab.json", "merges.txt"].map(|name| folder.path().join(name));
        let good = [&vocab, &merges].map(|file| std::fs::read_to_string(file).expect("text"));
        let cases: &[(usize, Spoil, &str)] = &[
            (0, &|text| text.replacen('{', "{\n\"a\":7000,", 1), "vocab.json:"),
            (0, &|text| text.replacen('{', "{\n\"twice\":7,", 1), "id 7 occurs twice"),
            (0, &|text| text.replace("<mask>", "<musk>"), "has no <mask>"),
            (0, &|text| text.replace("\"<pad>\":1,\"</s>\":2", "\"<pad>\":2,\"</s>\":1"), "<pad> is 2"),
            (0, &|text| text.replacen("\"!\":", "\"\u{3b1}\":", 1), "byte 33 is not a word"),
            (0, &|text| text[..text.len() / 2].to_owned(), "vocab.json:1"),
            (0, &|text| text.replace("399", "1399"), "some ids are missing"),
            (1, &|text| format!("{text}a b c\n"), "is not two words"),
            (1, &|text| format!("{text}zq qz\n"), "is not a word of"),
        ];
        for (file, spoil, expected) in cases {
            for (path, text) in [&vocab, &merges].into_iter().zip(&good) {
                std::fs::write(path, text).expect("written");
            }
            std::fs::write([&vocab, &merges][*file], spoil(&good[*file])).expect("written");
            assert!(says().contains(expected), "{expected}: {}", says());
        }
        let json = folder.path().join("tokenizer.json");
        let cases: &[(Spoil, &str)] = &[
            (&|text| text.replace("\"BPE\"", "\"WordLevel\""), "not a BPE"),
            (
                &|text| text.replacen("\"vocab\":{", "\"vocab\":{\n\"!\":7000,", 1),
                "tokenizer.json:2: the word \"!\" occurs twice",
            ),
            (&|text| text.replace("\"use_regex\":true", "\"use_regex\":false"), "use_regex"),
            (
                &|text| text.replace("\"normalizer\":null", "\"normalizer\":{\"type\":\"Lowercase\"}"),
                "normalizer",
            ),
            (&|_| "[]".to_owned(), "not a BPE"),
            (&|_| "{".to_owned(), "tokenizer.json:1"),
        ];
        for (spoil, expected) in cases {
            std::fs::write(&json, spoil(tokenizer.json())).expect("written");
            assert!(says().contains(expected), "{expected}: {}", says());
        }
    }
}
