//! What can be set by flag, by suite or by `--set`: the same words everywhere, all optional.

use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::grid::{Batches, Lengths, Modes, Seeds, Words};
use super::units::{Bytes, Seconds};
use super::{SayError, nearest};

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
    type Err = SayError;

    fn from_str(text: &str) -> Result<Self, SayError> {
        let index = |text: &str| text.parse::<usize>().ok().filter(|index| *index < 64);
        match text.split_once(':') {
            None if text == "cpu" => Ok(Self::Cpu),
            None if text == "cuda" => Ok(Self::Cuda(0)),
            None if text == "metal" => Ok(Self::Metal),
            Some(("cuda", number)) if index(number).is_some() => Ok(Self::Cuda(index(number).unwrap_or(0))),
            _ => Err(SayError::new(format!("unknown device {text:?}; allowed: cpu, cuda, cuda:1, metal"))),
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
            type Err = SayError;

            fn from_str(text: &str) -> Result<Self, SayError> {
                match text {
                    $($word => Ok(Self::$variant),)+
                    _ => {
                        let allowed = Self::WORDS.join(", ");
                        Err(SayError::new(format!("unknown {} {text:?}; allowed: {allowed}", $what)))
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
        /// bf16, summed in f32; what is stored stays f32.
        Bf16 = "bf16",
        /// 16-bit float.
        F16 = "f16"
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

macro_rules! settings {
    ($($(#[$doc:meta])* $field:ident: $type:ty,)+) => {
        /// Everything that can be set; `None` where nothing was said.
        #[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
        #[serde(deny_unknown_fields)]
        pub struct Settings {
            $($(#[$doc])* #[serde(default, skip_serializing_if = "Option::is_none")] pub $field: Option<$type>,)+
        }

        impl Settings {
            /// Nothing said.
            pub const NONE: Self = Self { $($field: None),+ };

            /// The keys in TOML and of `--set`.
            pub const KEYS: &'static [&'static str] = &[$(stringify!($field)),+];

            /// These settings where something was said, else those of `lower`.
            #[must_use]
            pub fn over(self, lower: Self) -> Self {
                Self { $($field: self.$field.or(lower.$field)),+ }
            }
        }
    };
}

settings! {
    /// Tasks or corpora.
    task: Words,
    /// Sequence lengths.
    len: Lengths,
    /// Batch sizes.
    batch: Batches,
    /// Seeds.
    seeds: Seeds,
    /// Inference, training or both.
    mode: Modes,
    /// Preset of the backbone.
    preset: String,
    /// Blocks, instead of the preset's.
    layers: u64,
    /// Width of the residual stream, instead of the preset's.
    width: u64,
    /// Heads, instead of the preset's.
    heads: u64,
    /// Hidden width of the feed-forward half, instead of the preset's.
    ffn: u64,
    /// Pooling, instead of the preset's.
    pooling: String,
    /// Dropout, instead of the preset's.
    dropout: f64,
    /// Where to compute.
    device: DeviceName,
    /// Number format.
    dtype: DtypeName,
    /// Fused kernels or plain operations.
    kernel: KernelName,
    /// CPU threads.
    threads: u64,
    /// Steps before the clock starts.
    warmup: u64,
    /// Most measured steps per cell.
    runs: u64,
    /// Fewest measured steps per cell.
    min_runs: u64,
    /// Measuring time per cell.
    max_time: Seconds,
    /// A cell that takes longer than this ends as `timeout`.
    timeout: Seconds,
    /// Training steps.
    steps: u64,
    /// First examples of each split.
    limit: u64,
    /// Live bytes a worker may reach.
    memory_limit: Bytes,
}

impl Settings {
    /// One `--set key=value`: the value is TOML, or text if it is not.
    ///
    /// # Errors
    /// An unknown key (with the nearest) or a value the key does not take.
    pub fn set(text: &str) -> Result<Self, SayError> {
        let (key, value) = text
            .split_once('=')
            .ok_or_else(|| SayError::new(format!("{text:?} is not key=value; write --set batch=8")))?;
        if !Self::KEYS.contains(&key) {
            let hint = nearest(key, Self::KEYS.iter().copied());
            let hint = hint.map_or_else(String::new, |near| format!(" (did you mean {near}?)"));
            let keys = Self::KEYS.join(", ");
            return Err(SayError::new(format!("unknown key {key:?}{hint}; keys: {keys}")));
        }
        let quoted = toml::Value::String(value.to_owned());
        let parsed = toml::from_str::<Self>(&format!("{key} = {value}"));
        parsed
            .or_else(|_| toml::from_str(&format!("{key} = {quoted}")))
            .map_err(|error| SayError::new(format!("--set {key}: {}", error.message())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn set_takes_toml_or_text() {
        assert_eq!(Settings::set("batch=8").unwrap().batch, Some(Batches(vec![8])));
        assert_eq!(Settings::set("len=1k..2k").unwrap().len, Some(Lengths(vec![1024, 2048])));
        assert_eq!(Settings::set("max_time=2s").unwrap().max_time, Some(Seconds(2.0)));
        assert_eq!(Settings::set("len=[3, 5]").unwrap().len, Some(Lengths(vec![3, 5])));
        assert!(Settings::set("lenn=3").unwrap_err().0.contains("did you mean len?"));
        assert!(Settings::set("len=0").unwrap_err().0.contains("length 0 is out of range"));
        assert!(Settings::set("len").is_err());
        assert!(Settings::set("threads=2\nlen=0").is_err());
    }

    #[test]
    fn what_is_said_above_wins() {
        let flag = Settings { runs: Some(5), ..Settings::default() };
        let suite = Settings { runs: Some(50), warmup: Some(10), ..Settings::default() };
        let both = flag.over(suite);
        assert_eq!((both.runs, both.warmup), (Some(5), Some(10)));
    }

    #[test]
    fn settings_survive_json() {
        let text =
            "len = [1024]\nmax_time = \"2s\"\nmemory_limit = \"1GiB\"\ndevice = \"cuda:1\"\nmode = \"train\"";
        let settings: Settings = toml::from_str(text).unwrap();
        let json = serde_json::to_string(&settings).unwrap();
        assert_eq!(serde_json::from_str::<Settings>(&json).unwrap(), settings);
    }
}
