//! What can be set by flag, by suite or by `--set`: the same words everywhere, all optional.

mod own;

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use serde::de::{MapAccess, Visitor};
use serde::ser::SerializeMap;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::lists::{Batches, Layers, Lengths, Modes, Rates, Seeds, Segments, Words};
use super::registry::Registry;
use super::units::{Bytes, Seconds};
use super::{ParseError, nearest};
use own::{Key, OwnText};
pub use own::{OwnSetting, OwnValues};

/// Writes and reads a type through its text form.
macro_rules! by_text {
    ($name:ty) => {
        impl Serialize for $name {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                let text = String::deserialize(deserializer)?;
                text.parse().map_err(serde::de::Error::custom)
            }
        }
    };
}

by_text!(DeviceName);
by_text!(DtypeName);
by_text!(KernelName);

impl<'de> Deserialize<'de> for Bytes {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

impl Serialize for Bytes {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&format_args!("{}B", self.0))
    }
}

impl<'de> Deserialize<'de> for Seconds {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

impl Serialize for Seconds {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&format_args!("{}s", self.0))
    }
}

/// Where to compute.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeviceName {
    /// The processor.
    #[default]
    Cpu,
    /// An NVIDIA card by index.
    Cuda(usize),
    /// Apple's GPU.
    Metal,
}

impl FromStr for DeviceName {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Self, ParseError> {
        let index = |text: &str| text.parse::<usize>().ok().filter(|index| *index < 64);
        match text.split_once(':') {
            None if text == "cpu" => Ok(Self::Cpu),
            None if text == "cuda" => Ok(Self::Cuda(0)),
            None if text == "metal" => Ok(Self::Metal),
            Some(("cuda", number)) if index(number).is_some() => Ok(Self::Cuda(index(number).unwrap_or(0))),
            _ => Err(ParseError::new(format!("unknown device {text:?}; allowed: cpu, cuda, cuda:1, metal"))),
        }
    }
}

impl std::fmt::Display for DeviceName {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        match self {
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(index) => write!(f, "cuda:{index}"),
            Self::Metal => f.write_str("metal"),
        }
    }
}

macro_rules! words {
    ($(#[$doc:meta])* $name:ident $what:literal { $($(#[$item:meta])* $variant:ident = $word:literal),+ }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub enum $name { $($(#[$item])* $variant),+ }

        impl $name {
            /// Every word.
            pub const WORDS: &'static [&'static str] = &[$($word),+];

            /// The word on the command line, in TOML and in rows.
            pub const fn word(self) -> &'static str {
                match self { $(Self::$variant => $word),+ }
            }
        }

        impl FromStr for $name {
            type Err = ParseError;

            fn from_str(text: &str) -> Result<Self, ParseError> {
                match text {
                    $($word => Ok(Self::$variant),)+
                    _ => {
                        let allowed = Self::WORDS.join(", ");
                        Err(ParseError::new(format!("unknown {} {text:?}; allowed: {allowed}", $what)))
                    }
                }
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
                f.pad(self.word())
            }
        }
    };
}

words! {
    /// Number format of the operands of matrix products.
    DtypeName "number format" {
        /// 32-bit float.
        #[default]
        F32 = "f32",
        /// f32 with 10 bits of mantissa, on CUDA devices.
        Tf32 = "tf32",
        /// bf16, summed in f32; activations wait for the backward pass as bf16.
        Bf16 = "bf16"
    }
}

words! {
    /// Which implementation runs.
    KernelName "kernel" {
        /// Our fused kernels.
        #[default]
        Fused = "fused",
        /// Plain tensor operations, as in the papers' codes.
        Composed = "composed"
    }
}

/// One setting: its key in TOML and of `--set`, and the flag of the protocols that take it.
pub struct Setting {
    /// The key.
    pub key: &'static str,
    /// What it sets.
    pub help: &'static str,
    /// Heading of its flag in `--help`; empty where only `--set` and suites set it.
    pub heading: &'static str,
    /// Name of its value in `--help`; empty for a switch.
    pub value: &'static str,
    /// Reads the value of the flag.
    pub read: fn(&str) -> Result<Settings, ParseError>,
}

/// Settings that protocols declare.
static DECLARED: Registry<Setting> = Registry::new(&[]);

impl Setting {
    /// The setting called `key`: a shared one, or one that a protocol declares.
    pub fn find(key: &str) -> Option<&'static Self> {
        Self::all().into_iter().find(|setting| setting.key == key)
    }

    /// The shared settings, then those that protocols declare.
    pub fn all() -> Vec<&'static Self> {
        SETTINGS.iter().chain(DECLARED.all()).collect()
    }

    /// Makes the setting of a protocol known to `--set` and suites.
    pub fn declare(&'static self) {
        DECLARED.add(self);
    }

    /// Its flag without dashes in front; none where it has no flag.
    pub fn flag(&self) -> Option<String> {
        (!self.heading.is_empty()).then(|| self.key.replace('_', "-"))
    }
}

macro_rules! settings {
    ($($(#[doc = $doc:literal])+ $field:ident: $type:ty, $heading:literal, $value:literal, $read:expr;)+) => {
        /// Everything that can be set; `None` where nothing was said.
        #[derive(Clone, Debug, Default, PartialEq)]
        pub struct Settings {
            $($(#[doc = $doc])+ pub $field: Option<$type>,)+
            /// What was said for settings that protocols declare.
            pub own: OwnValues,
        }

        /// The shared settings; which protocol takes which is said in the protocol's entry.
        pub static SETTINGS: &[Setting] = &[$(Setting {
            key: stringify!($field),
            help: concat!($($doc),+).trim_ascii_start(),
            heading: $heading,
            value: $value,
            read: |text| {
                let read: fn(&str) -> Result<$type, ParseError> = $read;
                Ok(Settings { $field: Some(read(text)?), ..Settings::NONE })
            },
        }),+];

        impl Settings {
            /// Nothing said.
            pub const NONE: Self = Self { $($field: None,)+ own: OwnValues(BTreeMap::new()) };

            /// These settings where something was said, else those of `lower`.
            #[must_use]
            pub fn over(mut self, lower: Self) -> Self {
                let mut own = lower.own;
                own.0.append(&mut self.own.0);
                Self { $($field: self.$field.or(lower.$field),)+ own }
            }

            /// The keys that something was said for.
            pub fn set_keys(&self) -> Vec<&'static str> {
                let mut keys = Vec::new();
                $(if self.$field.is_some() { keys.push(stringify!($field)); })+
                keys.extend(self.own.0.keys());
                keys
            }
        }

        impl Serialize for Settings {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                let mut map = serializer.serialize_map(None)?;
                $(if let Some(value) = &self.$field { map.serialize_entry(stringify!($field), value)?; })+
                self.own.0.iter().try_for_each(|(key, value)| map.serialize_entry(key, value))?;
                map.end()
            }
        }

        impl<'de> Visitor<'de> for SettingsVisitor {
            type Value = Settings;

            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("a table of settings")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Settings, A::Error> {
                let mut settings = Settings::NONE;
                while let Some(Key(setting)) = map.next_key()? {
                    match setting.key {
                        $(stringify!($field) => settings.$field = Some(map.next_value()?),)+
                        _ => settings.own.0.extend(map.next_value_seed(OwnText(setting))?.own.0),
                    }
                }
                Ok(settings)
            }
        }
    };
}

/// Reads a table of settings.
struct SettingsVisitor;

impl<'de> Deserialize<'de> for Settings {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(SettingsVisitor)
    }
}

settings! {
    /// Tasks or corpora: effattn list tasks
    task: Words, "Grid", "LIST", str::parse;
    /// Sequence lengths: 1024,2048 or 1024..8192 (doubling) or 1024..4096+1024 (steps)
    len: Lengths, "Grid", "LIST", str::parse;
    /// Batch size, sequences per step: 1,4 or 1..32 (doubling)
    batch: Batches, "Grid", "LIST", str::parse;
    /// Seeds: 3 or 0..3
    seeds: Seeds, "Grid", "LIST", str::parse;
    /// What a step does: infer, train or infer,train
    mode: Modes, "Grid", "LIST", str::parse;
    /// Model preset (effattn list presets)
    preset: String, "Grid", "NAME", word;
    /// Number of blocks, instead of the preset's
    layers: Layers, "Grid", "N", str::parse;
    /// Width of the residual stream, instead of the preset's
    width: u64, "", "N", |text| within(text, 1, 1 << 16);
    /// Heads, instead of the preset's
    heads: u64, "", "N", |text| within(text, 1, 1 << 16);
    /// Hidden width of the feed-forward layers, instead of the preset's
    ffn: u64, "", "N", |text| within(text, 1, 1 << 20);
    /// Pooling, instead of the preset's
    pooling: String, "", "NAME", word;
    /// Dropout of hidden activations, instead of the preset's
    dropout: f64, "", "P", probability;
    /// Dropout of attention weights, instead of the preset's
    attention_dropout: f64, "", "P", probability;
    /// Find the longest length whose step needs less memory than this, such as 2GiB; --len is the longest that is tried
    fit: Bytes, "Grid", "SIZE", str::parse;
    /// Where to compute: cpu, cuda, cuda:1 or metal
    device: DeviceName, "Machine", "DEVICE", str::parse;
    /// Number format: f32; bf16 (operands of matrix products, summed in f32); tf32 (CUDA devices)
    dtype: DtypeName, "Machine", "FORMAT", str::parse;
    /// CPU threads [default: all cores]
    threads: u64, "Machine", "N", |text| within(text, 1, 1024);
    /// fused: optimized kernels of this program; composed: plain tensor operations, as in the papers' code
    kernel: KernelName, "Machine", "KIND", str::parse;
    /// Maximum memory of all workers together, such as 8GiB [default: 90 % of the free memory]
    memory_limit: Bytes, "Machine", "SIZE", str::parse;
    /// Warm-up steps before measuring starts, for at most --max-time
    warmup: u64, "Budget", "N", |text| within(text, 0, MOST);
    /// Maximum number of measured steps per cell
    runs: u64, "Budget", "N", positive;
    /// Minimum number of measured steps per cell, however long they take
    min_runs: u64, "Budget", "N", positive;
    /// Measuring time per cell, such as 2s
    max_time: Seconds, "Budget", "TIME", str::parse;
    /// Time limit per cell, such as 10m; the outcome of one that takes longer is timeout
    timeout: Seconds, "Budget", "TIME", str::parse;
    /// Profile: time a few extra steps per operation
    profile: bool, "Output", "", switch;
    /// Training steps, instead of the protocol's
    steps: u64, "Budget", "N", positive;
    /// Learning rate (peak of the schedule), instead of the protocol's
    rate: f64, "Budget", "RATE", |text| number(text, |rate| rate > 0.0 && rate <= 10.0, "a number above 0 and up to 10, such as 1e-4");
    /// Start from a pretrained encoder: folders with config.json, a tokenizer and model.safetensors, or runs of mlm; the first that fits is used
    from: Words, "Start", "LIST", str::parse;
    /// Use at most N examples per split
    limit: u64, "Budget", "N", positive;
    /// Updates between evaluations
    every: u64, "Budget", "N", positive;
    /// Split each batch into N micro-batches that are computed one after another, to save memory
    accumulate: u64, "Budget", "N", positive;
    /// Also test the weights on these images: imagenet-c, imagenet-a, imagenet-r, imagenet-9, imagenet-real, imagenet-v2, cifar10-c, folder-c
    also: Words, "Evaluation", "LIST", str::parse;
    /// Mean cosine similarity of patches per block over N images (Figure 6)
    similarity: u64, "Evaluation", "N", |text| within(text, 0, 1 << 20);
    /// Evaluate in overlapping windows, as the paper says, instead of blocks with a cache, as its code does
    overlap: bool, "Evaluation", "", switch;
    /// Select weights on a tenth of the training reviews, not on the test split (the papers select on it)
    strict: bool, "Data", "", switch;
    /// Evaluate simple rules on the same split instead of training: the largest class, the root operator, byte n-grams
    floor: bool, "Data", "", switch;
    /// Accept incomplete data; the rows are marked as such
    allow_partial: bool, "Data", "", switch;
    /// Learning rates to choose from: 1e-3,1e-2 or 3e-4..3e-2 (eight of equal ratio) or 3e-4..3e-2/6 (six)
    rates: Rates, "Budget", "LIST", str::parse;
    /// Segments to train on: length (64), lengths (3..40), or length and pairs (64:8)
    segments: Segments, "Data", "LIST", str::parse;
    /// Segments to validate and test on; longer ones than the model was trained on show how far it goes
    test_segments: Segments, "Data", "LIST", str::parse;
    /// Cells that are trained at the same time, each with --threads threads and its part of the memory
    jobs: u64, "Machine", "N", |text| within(text, 1, 64);
}

/// Keys that protocols take together.
pub mod groups {
    /// What steps are measured with.
    pub const POINTS: &[&str] = &["len", "batch", "seeds", "mode"];
    /// The model, and sizes instead of its preset's.
    pub const MODEL: &[&str] =
        &["preset", "layers", "width", "heads", "ffn", "pooling", "dropout", "attention_dropout"];
    /// Where is computed.
    pub const MACHINE: &[&str] = &["device", "dtype", "threads", "kernel", "memory_limit"];
    /// What training runs are asked for.
    pub const TRAINING: &[&str] = &["task", "len", "batch", "seeds"];
}

fn probability(text: &str) -> Result<f64, ParseError> {
    number(text, |p| (0.0..1.0).contains(&p), "a number from 0 to below 1, such as 0.1")
}

/// Any text.
pub fn word(text: &str) -> Result<String, ParseError> {
    Ok(text.to_owned())
}

/// `true` or `false`.
pub fn switch(text: &str) -> Result<bool, ParseError> {
    text.parse().map_err(|_| ParseError::new(format!("{text:?} is neither true nor false")))
}

/// The largest count that means anything: products of two of them can still be counted.
const MOST: u64 = 1_000_000_000;

fn positive(text: &str) -> Result<u64, ParseError> {
    within(text, 1, MOST)
}

/// A whole number from `least` to `most`.
pub fn within(text: &str, least: u64, most: u64) -> Result<u64, ParseError> {
    let number = text.parse().map_err(|_| ParseError::new(format!("{text:?} is not a whole number")))?;
    let open = most == MOST && number < least;
    let allowed = if open { format!("{least} or more") } else { format!("{least} to {most}") };
    let wrong = || ParseError::new(format!("{number} is out of range; allowed: {allowed}"));
    (least..=most).contains(&number).then_some(number).ok_or_else(wrong)
}

/// A number that is `allowed`; `expected` says which are.
pub fn number(text: &str, allowed: fn(f64) -> bool, expected: &str) -> Result<f64, ParseError> {
    let number = text.parse().ok().filter(|number| allowed(*number));
    number.ok_or_else(|| ParseError::new(format!("{text:?} is not {expected}")))
}

impl Settings {
    /// One `--set key=value`: the value is TOML, or text if it is not.
    pub fn set(text: &str) -> Result<Self, ParseError> {
        let (key, value) = text
            .split_once('=')
            .ok_or_else(|| ParseError::new(format!("{text:?} is not key=value; write --set batch=8")))?;
        let Some(setting) = Setting::find(key) else {
            let known: Vec<&str> = Setting::all().iter().map(|setting| setting.key).collect();
            let hint = nearest(key, known.iter().copied());
            let hint = hint.map_or_else(String::new, |near| format!(" (did you mean {near}?)"));
            let keys = known.join(", ");
            return Err(ParseError::new(format!("unknown key {key:?}{hint}; keys: {keys}")));
        };
        (setting.read)(value).or_else(|error| {
            let toml = toml::from_str::<Self>(&format!("{key} = {value}")).ok();
            let one = |settings: &Self| value.starts_with(['[', '"']) && settings.set_keys() == [key];
            toml.filter(one).ok_or_else(|| ParseError::new(format!("--set {key}: {}", error.0)))
        })
    }

    /// Makes sure that every number is one that its flag would take: TOML knows no bounds.
    pub fn check(&self) -> Result<(), ParseError> {
        let values = serde_json::to_value(self).unwrap_or_default();
        for (key, value) in values.as_object().into_iter().flatten() {
            let setting = Setting::find(key).filter(|_| value.is_number());
            if let Some(Err(error)) = setting.map(|setting| (setting.read)(&value.to_string())) {
                return Err(ParseError::new(format!("{key}: {}", error.0)));
            }
        }
        match (self.runs, self.min_runs) {
            (Some(runs), Some(fewest)) if runs < fewest => {
                Err(ParseError::new(format!("runs {runs} is fewer than min_runs {fewest}; give one of them")))
            }
            _ => Ok(()),
        }
    }

    /// As [`Self::over`]; where `runs` and `min_runs` exclude each other then, the one of `lower` gives way.
    #[must_use]
    pub fn overriding(self, lower: Self) -> Self {
        let said = (self.runs, self.min_runs);
        let all = self.over(lower);
        match (all.runs, all.min_runs) {
            (Some(runs), Some(fewest)) if runs < fewest => match said {
                (Some(_), None) => Self { min_runs: Some(runs), ..all },
                (None, Some(_)) => Self { runs: Some(fewest), ..all },
                _ => all,
            },
            _ => all,
        }
    }
}

#[cfg(test)]
mod tests;
