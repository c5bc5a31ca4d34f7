//! Tokenizers in files: `tokenizer.json`, or `vocab.json` with `merges.txt`, as Hugging Face writes them.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt;
use std::path::Path;

use serde::Deserialize;
use serde::de::{Error as _, MapAccess, Visitor};
use serde_json::Value as Json;
use tokenizers::models::ModelWrapper;
use tokenizers::models::bpe::BPE;
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::processors::roberta::RobertaProcessing;
use tokenizers::{AddedToken, Model};

use super::{MASK, PADDING, SPECIALS, Specials, Tokenizer, hash};
use crate::{DataError, store};

/// Largest file that is read.
const LARGEST: u64 = 256 << 20;

/// An added word that is special.
pub fn special(word: &str) -> AddedToken {
    AddedToken::from(word, true)
}

/// Words and their ids; none stands twice.
struct Words(HashMap<String, u32>);

impl<'de> Deserialize<'de> for Words {
    fn deserialize<D: serde::Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Once;
        impl<'de> Visitor<'de> for Once {
            type Value = Words;

            fn expecting(&self, to: &mut fmt::Formatter) -> fmt::Result {
                to.write_str("an object of words and their ids")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Words, A::Error> {
                let (mut words, mut ids) = (HashMap::new(), HashSet::new());
                while let Some((word, id)) = map.next_entry::<String, u32>()? {
                    if !ids.insert(id) {
                        return Err(A::Error::custom(format!(
                            "id {id} occurs twice, the second time for {word:?}"
                        )));
                    }
                    if words.insert(word.clone(), id).is_some() {
                        return Err(A::Error::custom(format!("the word {word:?} occurs twice")));
                    }
                }
                Ok(Words(words))
            }
        }
        from.deserialize_map(Once)
    }
}

/// What is checked of a `tokenizer.json` before the crate reads it.
#[derive(Deserialize)]
struct Outline {
    model: Inner,
}

#[derive(Deserialize)]
struct Inner {
    #[serde(rename = "type", default)]
    kind: Option<String>,
    #[expect(dead_code, reason = "it is read to find words that stand twice")]
    vocab: Words,
}

/// The settings of a `tokenizer.json` by their place, and the values with which they change nothing of what is read here. None:
/// any value, because the setting is read, or says nothing about the ids of a text.
type Harmless = Option<fn(&Json) -> bool>;
const IDLE: Harmless = Some(|value| value.is_null() || value == false || value == "");
const SETTINGS: &[(&str, &str, Harmless)] = &[
    ("", "version", None),
    ("", "truncation", IDLE),
    ("", "padding", IDLE),
    ("", "added_tokens", None), // each is looked at by `added`
    ("", "normalizer", IDLE),
    ("", "pre_tokenizer", None),
    ("", "post_processor", None), // by its type: pairs are joined here
    ("", "decoder", None),
    ("", "model", None),
    ("/model", "type", Some(|value| value.is_null() || value == "BPE")),
    ("/model", "dropout", Some(|value| value.is_null() || value.as_f64() == Some(0.0))),
    ("/model", "unk_token", None), // no text has an unknown word: every byte is one
    ("/model", "continuing_subword_prefix", IDLE),
    ("/model", "end_of_word_suffix", IDLE),
    ("/model", "fuse_unk", None),
    ("/model", "byte_fallback", IDLE),
    ("/model", "ignore_merges", IDLE),
    ("/model", "vocab", None),
    ("/model", "merges", None),
    ("/pre_tokenizer", "type", Some(|value| value == "ByteLevel")),
    ("/pre_tokenizer", "add_prefix_space", None),
    ("/pre_tokenizer", "trim_offsets", None),
    ("/pre_tokenizer", "use_regex", Some(|value| value.is_null() || value == true)),
    ("/post_processor", "type", Some(|value| value == "RobertaProcessing" || value == "ByteLevel")),
    ("/post_processor", "sep", None),
    ("/post_processor", "cls", None),
    ("/post_processor", "add_prefix_space", None),
    ("/post_processor", "trim_offsets", None),
    ("/post_processor", "use_regex", None),
    ("/decoder", "type", Some(|value| value == "ByteLevel")),
    ("/decoder", "add_prefix_space", None),
    ("/decoder", "trim_offsets", None),
    ("/decoder", "use_regex", None),
];

/// A setting of `json` that would change how texts are cut and is not read: its name and value.
fn unread(json: &Json) -> Option<String> {
    let short = |value: &Json| {
        let text = value.to_string();
        if text.chars().count() > 40 { text.chars().take(40).chain("...".chars()).collect() } else { text }
    };
    for place in ["", "/model", "/pre_tokenizer", "/post_processor", "/decoder"] {
        let found = json.pointer(place).and_then(Json::as_object);
        for (name, value) in found.into_iter().flatten() {
            let known = SETTINGS.iter().find(|(at, known, _)| *at == place && known == name);
            let fits = known.is_some_and(|(.., harmless)| harmless.is_none_or(|harmless| harmless(value)));
            if !fits {
                let path = format!("{place}/{name}").trim_start_matches('/').replace('/', ".");
                return Some(format!("{path}={}", short(value)));
            }
        }
    }
    let added = json["added_tokens"].as_array().into_iter().flatten();
    let plain = added.clone().find(|token| token["special"] != true);
    plain.map(|token| format!("added_tokens {} that is not special", short(&token["content"])))
}

/// What the crate made of a file of a user; where it panics instead, that is said.
fn guarded<T>(read: impl FnOnce() -> tokenizers::Result<T>) -> Result<T, String> {
    match std::panic::catch_unwind(std::panic::AssertUnwindSafe(read)) {
        Ok(read) => read.map_err(|error| error.to_string()),
        Err(_) => Err("the tokenizers crate cannot read it".to_owned()),
    }
}

/// Reads a file, or the files in a folder.
pub fn load(path: &Path) -> Result<Tokenizer, DataError> {
    if path.is_file() {
        return whole(path);
    }
    let [json, vocab, merges] = ["tokenizer.json", "vocab.json", "merges.txt"].map(|name| path.join(name));
    match (json.is_file(), vocab.is_file(), merges.is_file()) {
        (true, ..) => whole(&json),
        (false, true, true) => parts(&vocab, &merges),
        _ => Err(store::bad_file(
            path,
            "contains no tokenizer: neither tokenizer.json, nor vocab.json with merges.txt",
        )),
    }
}

fn text(file: &Path) -> Result<String, DataError> {
    let broken = |error: std::io::Error| store::bad_file(file, format!("cannot be read ({error})"));
    let bytes = store::read_limited(store::open(file)?, LARGEST).map_err(broken)?;
    String::from_utf8(bytes).map_err(|error| store::bad_file(file, format!("is not text ({error})")))
}

/// A line of a JSON file that cannot be read.
fn at(file: &Path, error: &serde_json::Error) -> DataError {
    // the place stands in front of the message
    let said = error.to_string();
    let reason = said.split(" at line ").next().unwrap_or(&said).to_owned();
    DataError::Line { file: file.to_owned(), line: error.line().max(1), reason }
}

fn whole(file: &Path) -> Result<Tokenizer, DataError> {
    let json = text(file)?;
    let wrong =
        |reason: &str| store::bad_file(file, format!("{reason}; a byte-level BPE as RoBERTa's is needed"));
    let outline: Json = serde_json::from_str(&json).map_err(|error| at(file, &error))?;
    let kind = outline["model"]["type"].as_str().map(str::to_owned);
    if kind.as_deref().is_some_and(|kind| kind != "BPE") || !outline["model"]["merges"].is_array() {
        return Err(wrong("its model is not a BPE"));
    }
    if let Some(setting) = unread(&outline) {
        return Err(wrong(&format!(
            "its setting {setting} is not read, and texts would be cut otherwise than it says"
        )));
    }
    let outline: Outline = serde_json::from_str(&json).map_err(|error| at(file, &error))?;
    debug_assert!(outline.model.kind.is_none_or(|kind| kind == "BPE"));
    let read = guarded(|| tokenizers::Tokenizer::from_bytes(&json)).map_err(|error| wrong(&error))?;
    let (ModelWrapper::BPE(bpe), Some(PreTokenizerWrapper::ByteLevel(bytes))) =
        (read.get_model(), read.get_pre_tokenizer())
    else {
        return Err(wrong("its texts are not cut by ByteLevel alone"));
    };
    let (bpe, bytes) = (bpe.clone(), *bytes);
    finish(bpe, bytes, Some((json, read))).map_err(|reason| store::bad_file(file, reason))
}

fn parts(vocab: &Path, merges: &Path) -> Result<Tokenizer, DataError> {
    let Words(words) = serde_json::from_str(&text(vocab)?).map_err(|error| at(vocab, &error))?;
    if let Some(word) = SPECIALS.iter().chain([&MASK]).find(|word| !words.contains_key(**word)) {
        return Err(store::bad_file(vocab, missing(word)));
    }
    let mut pairs = Vec::new();
    for (number, line) in text(merges)?.lines().enumerate() {
        if line.is_empty() || number == 0 && line.starts_with("#version") {
            continue;
        }
        let wrong = |reason: String| DataError::Line { file: merges.to_owned(), line: number + 1, reason };
        let (left, right) = line
            .split_once(' ')
            .filter(|(left, right)| !left.is_empty() && !right.is_empty() && !right.contains(' '))
            .ok_or_else(|| wrong(format!("{line:?} is not two words with one blank between")))?;
        for word in [left.to_owned(), right.to_owned(), format!("{left}{right}")] {
            if !words.contains_key(&word) {
                let there = vocab.display();
                return Err(wrong(format!(
                    "{word:?} is not a word of {there}; do the two files belong together?"
                )));
            }
        }
        pairs.push((left.to_owned(), right.to_owned()));
    }
    let built =
        BPE::builder().vocab_and_merges(words.into_iter().collect::<tokenizers::models::bpe::Vocab>(), pairs);
    let bpe = guarded(|| built.build()).map_err(|error| store::bad_file(merges, error))?;
    finish(bpe, ByteLevel::new(false, true, true), None).map_err(|reason| store::bad_file(vocab, reason))
}

/// A tokenizer from its parts: `given` is its file with what the crate read, where there is one.
pub fn finish(
    bpe: BPE,
    bytes: ByteLevel,
    given: Option<(String, tokenizers::Tokenizer)>,
) -> Result<Tokenizer, String> {
    for (byte, sign) in signs() {
        if bpe.token_to_id(&sign.to_string()).is_none() {
            return Err(format!("byte {byte} is not a word ({sign:?}); a byte-level BPE has all 256"));
        }
    }
    let (json, built) = match given {
        Some((json, built)) => (Some(json), built),
        None => (None, assemble(bpe.clone(), bytes)?),
    };
    let id = |word: &str| {
        let id = built.token_to_id(word);
        id.ok_or_else(|| missing(word))
    };
    let [start, padding, end, unknown] = SPECIALS.map(id);
    let (specials, padding) =
        (Specials { start: start?, end: end?, unknown: unknown?, mask: id(MASK)? }, padding?);
    if padding != PADDING {
        return Err(format!("<pad> is {padding}, but padding is {PADDING} in RoBERTa's positions"));
    }
    let words: BTreeMap<u32, String> =
        built.get_vocab(true).into_iter().map(|(word, id)| (id, word)).collect();
    let len = words.last_key_value().map_or(0, |(last, _)| *last as usize + 1);
    if words.len() != len {
        return Err(format!(
            "{} words have ids up to {}: some ids are missing, or two words share one",
            words.len(),
            len - 1
        ));
    }
    let model = serde_json::to_value(&bpe).map_err(|error| error.to_string())?;
    let merges = model["merges"].as_array().into_iter().flatten();
    let merges = merges.filter_map(|pair| Some((pair[0].as_str()?, pair[1].as_str()?)));
    let hash = hash(&words, merges, specials, bytes.add_prefix_space);
    let json = match json {
        Some(json) => json,
        None => built.to_string(false).map_err(|error| error.to_string())?,
    };
    Ok(Tokenizer { bpe, bytes, specials, len, hash, json })
}

fn missing(word: &str) -> String {
    format!("has no {word}; RoBERTa's special words are {}, {MASK}", SPECIALS.join(", "))
}

/// As Hugging Face's RoBERTa has it: special words, `<s> a </s></s> b </s>`.
fn assemble(bpe: BPE, bytes: ByteLevel) -> Result<tokenizers::Tokenizer, String> {
    let said = |error: tokenizers::Error| error.to_string();
    let mut built = tokenizers::Tokenizer::new(bpe);
    built.with_pre_tokenizer(Some(bytes)).with_decoder(Some(bytes));
    built.add_special_tokens(SPECIALS.iter().map(|word| special(word))).map_err(said)?;
    built.add_special_tokens([special(MASK).lstrip(true)]).map_err(said)?;
    let id = |word: &str| built.token_to_id(word).unwrap_or_default();
    let ends = [("</s>", id("</s>")), ("<s>", id("<s>"))].map(|(word, id)| (word.to_owned(), id));
    let [sep, cls] = ends;
    built
        .with_post_processor(Some(RobertaProcessing::new(sep, cls).add_prefix_space(bytes.add_prefix_space)));
    Ok(built)
}

/// The printable character of every byte.
fn signs() -> impl Iterator<Item = (u8, char)> {
    let plain = |byte: u8| matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    (0..=255u8).scan(0, move |moved, byte| {
        let sign = if plain(byte) { u32::from(byte) } else { 256 + *moved };
        *moved += u32::from(!plain(byte));
        Some((byte, char::from_u32(sign)?))
    })
}
