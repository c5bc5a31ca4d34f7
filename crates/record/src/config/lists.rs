//! The grammars of `--len`, `--batch`, `--seeds`, `--mode` and `--model`, on the command line and in suites.
//!
//! `1024,2048` lists, `1024..8192` doubles, `1024..4096+1024` steps (both ends in), `1k` = 1024. Seeds
//! count by one: `0..3` is 0, 1, 2, 3.

mod mechanism_spec;

use std::fmt;
use std::marker::PhantomData;
use std::str::FromStr;

use serde::de::{self, Deserializer, SeqAccess, Visitor};
use serde::{Deserialize, Serialize};

use super::ParseError;
use super::segments::Segment;
use crate::Pass;
use mechanism_spec::models;

pub use mechanism_spec::MechanismSpec;

/// Longest sequence that can be asked for.
pub const MAX_LEN: u64 = 1 << 22;
/// Largest batch that can be asked for.
pub const MAX_BATCH: u64 = 1 << 16;
/// Largest seed.
pub const MAX_SEED: u64 = u32::MAX as u64;
/// Most values one grammar may give.
const MAX_VALUES: usize = 4096;

/// How `a..b` without a step goes on.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Rise {
    Double,
    One,
}

/// Bounds and wording of one list of numbers.
struct Grammar {
    what: &'static str,
    min: u64,
    max: u64,
    rise: Rise,
    examples: &'static str,
}

const LENGTHS: Grammar = Grammar {
    what: "length",
    min: 1,
    max: MAX_LEN,
    rise: Rise::Double,
    examples: "1024,2048 or 1024..8192 (doubling) or 1024..4096+1024 (steps)",
};
const BATCHES: Grammar = Grammar {
    what: "batch size",
    min: 1,
    max: MAX_BATCH,
    rise: Rise::Double,
    examples: "1,4 or 1..32 (doubling)",
};
const SEEDS: Grammar = Grammar {
    what: "seed",
    min: 0,
    max: MAX_SEED,
    rise: Rise::One,
    examples: "3 or 0..3 (0, 1, 2, 3) or 1,5",
};

const COUNTS: Grammar = Grammar {
    what: "count",
    min: 0,
    max: 1 << 20,
    rise: Rise::Double,
    examples: "10 or 10..80 (10, 20, 40, 80) or 5,50",
};

const LAYERS: Grammar = Grammar {
    what: "number of layers",
    min: 1,
    max: 1 << 12,
    rise: Rise::One,
    examples: "2, or what each layer is: shortconv,mixer",
};

impl Grammar {
    fn error(&self, problem: impl fmt::Display) -> ParseError {
        ParseError(format!("{problem}; write {}", self.examples))
    }

    fn number(&self, text: &str) -> Result<u64, ParseError> {
        let trimmed = text.trim();
        let (digits, factor) = match trimmed.strip_suffix(['k', 'K']) {
            Some(digits) if self.rise == Rise::Double => (digits, 1024),
            _ => (trimmed, 1),
        };
        let all_digits = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
        if !all_digits {
            return Err(self.error(format!("{text:?} is not a {}", self.what)));
        }
        let value = digits.parse::<u64>().ok().and_then(|value| value.checked_mul(factor));
        self.bounded(value.unwrap_or(u64::MAX), trimmed)
    }

    fn bounded(&self, value: u64, text: &str) -> Result<u64, ParseError> {
        if (self.min..=self.max).contains(&value) {
            return Ok(value);
        }
        let Self { what, min, max, .. } = self;
        Err(self.error(format!("{what} {text} is out of range; allowed: {min} to {max}")))
    }

    fn part(&self, text: &str) -> Result<Vec<u64>, ParseError> {
        let Some((start, rest)) = text.split_once("..") else { return Ok(vec![self.number(text)?]) };
        let (end, step) = match rest.split_once('+') {
            Some((end, step)) => (end, Some(step)),
            None => (rest, None),
        };
        let (start, end) = (self.number(start)?, self.number(end)?);
        if end < start {
            return Err(self.error(format!("{text} ends before it starts")));
        }
        let step = match step {
            Some(step) => match self.number(step) {
                Ok(step) if step > 0 => Some(step),
                _ => return Err(self.error(format!("the step +{step} must be a number of at least 1"))),
            },
            None => (self.rise == Rise::One).then_some(1),
        };
        let mut values = Vec::new();
        let mut value = start;
        while value < end {
            values.push(value);
            if values.len() > MAX_VALUES {
                return Err(ParseError(format!(
                    "{text} gives more than {MAX_VALUES} values; take a larger step"
                )));
            }
            value = step.map_or(value * 2, |step| value + step);
        }
        values.push(end);
        Ok(values)
    }

    fn parse(&self, text: &str) -> Result<Vec<u64>, ParseError> {
        let mut values = Vec::new();
        for part in text.split(',') {
            for value in self.part(part)? {
                if !values.contains(&value) {
                    values.push(value);
                }
            }
        }
        Ok(values)
    }
}

/// A list that can be written as a number, a text or an array of both.
trait ParseList: Sized {
    const EXPECTING: &'static str;
    fn parse_list(text: &str) -> Result<Self, ParseError>;
}

struct ListVisitor<T>(PhantomData<T>);

impl<'de, T: ParseList> Visitor<'de> for ListVisitor<T> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(T::EXPECTING)
    }

    fn visit_i64<E: de::Error>(self, value: i64) -> Result<T, E> {
        T::parse_list(&value.to_string()).map_err(E::custom)
    }

    fn visit_u64<E: de::Error>(self, value: u64) -> Result<T, E> {
        T::parse_list(&value.to_string()).map_err(E::custom)
    }

    fn visit_f64<E: de::Error>(self, value: f64) -> Result<T, E> {
        T::parse_list(&value.to_string()).map_err(E::custom)
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<T, E> {
        T::parse_list(text).map_err(E::custom)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<T, A::Error> {
        let mut parts = Vec::new();
        while let Some(Part(part)) = seq.next_element()? {
            parts.push(part);
        }
        T::parse_list(&parts.join(",")).map_err(de::Error::custom)
    }
}

/// One element of an array: a number or a text.
struct Part(String);

impl<'de> Deserialize<'de> for Part {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct PartVisitor;
        impl Visitor<'_> for PartVisitor {
            type Value = Part;
            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("a number or a text")
            }
            fn visit_i64<E: de::Error>(self, value: i64) -> Result<Part, E> {
                Ok(Part(value.to_string()))
            }
            fn visit_u64<E: de::Error>(self, value: u64) -> Result<Part, E> {
                Ok(Part(value.to_string()))
            }
            fn visit_f64<E: de::Error>(self, value: f64) -> Result<Part, E> {
                Ok(Part(value.to_string()))
            }
            fn visit_str<E: de::Error>(self, text: &str) -> Result<Part, E> {
                Ok(Part(text.to_owned()))
            }
        }
        deserializer.deserialize_any(PartVisitor)
    }
}

macro_rules! list {
    ($(#[$doc:meta])* $name:ident, $item:ty, $expecting:literal, $parse:expr) => {
        $(#[$doc])*
        #[derive(Clone, Debug, PartialEq, Serialize)]
        #[serde(transparent)]
        pub struct $name(pub Vec<$item>);

        impl ParseList for $name {
            const EXPECTING: &'static str = $expecting;
            fn parse_list(text: &str) -> Result<Self, ParseError> {
                let parse: fn(&str) -> Result<Vec<$item>, ParseError> = $parse;
                parse(text).map(Self)
            }
        }

        impl FromStr for $name {
            type Err = ParseError;
            fn from_str(text: &str) -> Result<Self, ParseError> {
                Self::parse_list(text)
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                deserializer.deserialize_any(ListVisitor(PhantomData))
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
                let parts: Vec<String> = self.0.iter().map(ToString::to_string).collect();
                f.write_str(&parts.join(","))
            }
        }
    };
}

list! {
    /// Sequence lengths.
    Lengths, u64, "lengths such as 1024, [1024, 2048] or \"1024..8192\"", |text| LENGTHS.parse(text)
}
list! {
    /// Batch sizes.
    Batches, u64, "batch sizes such as 1, [1, 4] or \"1..32\"", |text| BATCHES.parse(text)
}
list! {
    /// Seeds.
    Seeds, u64, "seeds such as 3, [1, 5] or \"0..3\"", |text| SEEDS.parse(text)
}
list! {
    /// Numbers of things.
    Counts, u64, "counts such as 10, [10, 20] or \"10..80\"", |text| COUNTS.parse(text)
}
list! {
    /// Passes to measure.
    Modes, Pass, "\"infer\", \"train\" or both in a list", modes
}
list! {
    /// Names, such as tasks.
    Words, String, "a name or a list of names", words
}
list! {
    /// Mechanisms with their knobs.
    Models, MechanismSpec, "mechanisms such as \"ls:w=16,r=2,full\"", models
}

list! {
    /// Parts of a split.
    Segments, Segment, "segments such as \"64:8\" or [\"3..40\", \"64\"]", |text| Segment::list(text.split(','))
}
list! {
    /// Learning rates to choose from.
    Rates, f64, "rates such as \"3e-4..3e-2\" or [1e-3, 1e-2]", rates
}

/// How many blocks, or what each of them is.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub enum Layers {
    /// As many of one kind.
    Count(u64),
    /// The kind of every block, from the first.
    Each(Vec<String>),
}

impl Layers {
    /// Number of blocks.
    pub fn count(&self) -> u64 {
        match self {
            Self::Count(count) => *count,
            Self::Each(kinds) => kinds.len() as u64,
        }
    }
}

impl From<u64> for Layers {
    fn from(count: u64) -> Self {
        Self::Count(count)
    }
}

impl ParseList for Layers {
    const EXPECTING: &'static str = "a number of layers, or a list such as \"shortconv,mixer\"";

    fn parse_list(text: &str) -> Result<Self, ParseError> {
        if text.bytes().next().is_none_or(|first| !first.is_ascii_alphabetic()) {
            return LAYERS.number(text).map(Self::Count);
        }
        let kinds = words(text)?;
        LAYERS.bounded(kinds.len() as u64, &kinds.len().to_string())?;
        Ok(Self::Each(kinds))
    }
}

impl FromStr for Layers {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Self, ParseError> {
        Self::parse_list(text)
    }
}

impl<'de> Deserialize<'de> for Layers {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(ListVisitor(PhantomData))
    }
}

impl fmt::Display for Layers {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Self::Count(count) => write!(f, "{count}"),
            Self::Each(kinds) => f.write_str(&kinds.join(",")),
        }
    }
}

/// Rates of a range without a number.
const RATES: u32 = 8;

/// `1e-3,3e-3`, or `3e-4..3e-2`: rates of equal ratio, eight or as many as `3e-4..3e-2/6` says; rounded to three digits.
fn rates(text: &str) -> Result<Vec<f64>, ParseError> {
    let wrong = |part: &str| {
        let forms = "1e-3,3e-3,1e-2 or 3e-4..3e-2 (eight of equal ratio) or 3e-4..3e-2/6 (six)";
        ParseError(format!("{part:?} is no learning rate above 0 and up to 10; write {forms}"))
    };
    let number = |text: &str| {
        text.trim().parse::<f64>().ok().filter(|rate| *rate > 0.0 && *rate <= 10.0).ok_or_else(|| wrong(text))
    };
    let rounded = |rate: f64| format!("{rate:.2e}").parse::<f64>().unwrap_or(rate);
    let mut all: Vec<f64> = Vec::new();
    for part in text.split(',') {
        let Some((low, high)) = part.split_once("..") else {
            all.push(number(part)?);
            continue;
        };
        let (high, count) =
            high.split_once('/').map_or((high, Ok(RATES)), |(high, count)| (high, count.parse()));
        let count = count.ok().filter(|count| (2..=64).contains(count)).ok_or_else(|| wrong(part))?;
        let (low, high) = (number(low)?, number(high)?);
        let ratio = (high / low).powf(1.0 / f64::from(count - 1));
        all.extend((0..count).map(|index| rounded(low * ratio.powi(index as i32))));
    }
    all.sort_by(f64::total_cmp);
    all.dedup();
    Ok(all)
}

fn modes(text: &str) -> Result<Vec<Pass>, ParseError> {
    let mut passes = Vec::new();
    for word in text.split(',').map(str::trim) {
        let pass = match word {
            "infer" => Pass::Infer,
            "train" => Pass::Train,
            "decode" => Pass::Decode,
            _ => {
                return Err(ParseError(format!(
                    "unknown mode {word:?}; allowed: infer, train, decode, or several: infer,train"
                )));
            }
        };
        if !passes.contains(&pass) {
            passes.push(pass);
        }
    }
    Ok(passes)
}

fn words(text: &str) -> Result<Vec<String>, ParseError> {
    let words: Vec<String> = text.split(',').map(|word| word.trim().to_owned()).collect();
    if words.iter().any(String::is_empty) {
        return Err(ParseError(format!("{text:?} has an empty name; write a,b")));
    }
    Ok(words)
}

#[cfg(test)]
mod tests;
