//! Values of knobs: what a knob takes, and how it is written.

use std::fmt;

use serde_json::Value as Json;

/// The value of a knob.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// Null; `auto` on the command line.
    Auto,
    /// True or false.
    Bool(bool),
    /// A whole number, not negative.
    Int(usize),
    /// A number.
    Float(f64),
    /// A word.
    Word(&'static str),
    /// A list of whole numbers, joined with `+` on the command line.
    List(Vec<usize>),
    /// A list of numbers, joined with `+` on the command line.
    Floats(Vec<f64>),
}

impl Value {
    /// As golden files and suites have it.
    pub fn to_json(&self) -> Json {
        match self {
            Self::Auto => Json::Null,
            Self::Bool(value) => (*value).into(),
            Self::Int(value) => (*value).into(),
            Self::Float(value) => (*value).into(),
            Self::Word(value) => (*value).into(),
            Self::List(values) => values.clone().into(),
            Self::Floats(values) => values.clone().into(),
        }
    }

    pub(super) const fn int(&self) -> Option<usize> {
        match self {
            Self::Int(value) => Some(*value),
            _ => None,
        }
    }

    pub(super) const fn float(&self) -> Option<f64> {
        match self {
            Self::Float(value) => Some(*value),
            _ => None,
        }
    }
}

/// The words that a knob takes.
#[derive(Clone, Copy)]
pub struct Words(&'static (dyn WordList + Sync));

/// Words with values of a type that only their knob knows.
trait WordList {
    fn word(&self, at: usize) -> Option<&'static str>;
}

impl<T, const N: usize> WordList for [(&'static str, T); N] {
    fn word(&self, at: usize) -> Option<&'static str> {
        self.get(at).map(|(word, _)| *word)
    }
}

impl Words {
    pub(super) const fn new<T: Sync, const N: usize>(words: &'static [(&'static str, T); N]) -> Self {
        Self(words)
    }

    /// The words in order.
    pub fn iter(self) -> impl Iterator<Item = &'static str> {
        (0..).map_while(move |at| self.0.word(at))
    }
}

impl fmt::Debug for Words {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

/// What values a knob takes, and the default; `auto` where that is allowed.
#[derive(Clone, Copy, Debug)]
pub enum Kind {
    /// True or false.
    Bool {
        /// The default.
        default: bool,
    },
    /// A whole number within bounds (both in).
    Int {
        /// Smallest value.
        min: usize,
        /// Largest value.
        max: usize,
        /// The default.
        default: usize,
    },
    /// A whole number within bounds, or auto.
    AutoInt {
        /// Smallest value.
        min: usize,
        /// Largest value.
        max: usize,
        /// The default; `None`: auto.
        default: Option<usize>,
    },
    /// A finite number within bounds (both in).
    Float {
        /// Smallest value.
        min: f64,
        /// Largest value.
        max: f64,
        /// The default.
        default: f64,
    },
    /// A finite number within bounds (both in), or auto.
    AutoFloat {
        /// Smallest value.
        min: f64,
        /// Largest value.
        max: f64,
    },
    /// One of these words.
    Word {
        /// The words.
        words: Words,
        /// The default.
        default: &'static str,
    },
    /// A list of whole numbers; one number is a list of one.
    List {
        /// The default.
        default: &'static [usize],
    },
    /// A whole number, a list of them, or auto.
    AutoIntOrList,
    /// A list of numbers within bounds (both in), or auto. A null in JSON is infinity.
    AutoFloats {
        /// Smallest value.
        min: f64,
        /// Largest value.
        max: f64,
    },
}

/// Largest whole number that a knob takes: more than the longest sequence, and small enough that no product of sizes
/// wraps around.
const MOST: usize = 1 << 24;
/// Most numbers in a list.
const LONGEST: usize = 1 << 12;

impl Kind {
    pub(super) fn default(self) -> Value {
        match self {
            Self::Bool { default } => Value::Bool(default),
            Self::Int { default, .. } => Value::Int(default),
            Self::Float { default, .. } => Value::Float(default),
            Self::Word { default, .. } => Value::Word(default),
            Self::List { default } => Value::List(default.to_vec()),
            Self::AutoInt { default: Some(default), .. } => Value::Int(default),
            Self::AutoInt { .. } | Self::AutoFloat { .. } | Self::AutoIntOrList | Self::AutoFloats { .. } => {
                Value::Auto
            }
        }
    }

    pub(super) fn parse(self, text: &str) -> Option<Value> {
        let int = |min: usize, max: usize| {
            text.parse().ok().filter(|value| (min..=max.min(MOST)).contains(value)).map(Value::Int)
        };
        let list = || {
            if text == NONE {
                return Some(Value::List(Vec::new()));
            }
            let parts = text.split('+').filter(|part| !part.is_empty());
            let number = |part: &str| part.parse().ok().filter(|number| *number <= MOST);
            let list = parts.map(number).collect::<Option<Vec<usize>>>();
            list.filter(|list| list.len() <= LONGEST).map(Value::List)
        };
        let float =
            |min, max| text.parse().ok().filter(|value| (min..=max).contains(value)).map(Value::Float);
        match self {
            Self::Bool { .. } => match text {
                "true" => Some(Value::Bool(true)),
                "false" => Some(Value::Bool(false)),
                _ => None,
            },
            Self::Int { min, max, .. } => int(min, max),
            Self::AutoInt { .. } | Self::AutoFloat { .. } | Self::AutoIntOrList | Self::AutoFloats { .. }
                if text == "auto" =>
            {
                Some(Value::Auto)
            }
            Self::AutoInt { min, max, .. } => int(min, max),
            Self::Float { min, max, .. } | Self::AutoFloat { min, max } => float(min, max),
            Self::Word { words, .. } => words.iter().find(|word| *word == text).map(Value::Word),
            Self::List { .. } => list(),
            Self::AutoIntOrList if text.contains('+') => list(),
            Self::AutoIntOrList => int(0, usize::MAX),
            Self::AutoFloats { min, max } => {
                let number = |part: &str| part.parse().ok().filter(|value: &f64| (min..=max).contains(value));
                let list = text.split('+').map(number).collect::<Option<Vec<f64>>>();
                list.filter(|list| list.len() <= LONGEST).map(Value::Floats)
            }
        }
    }

    pub(super) fn read(self, json: &Json) -> Option<Value> {
        match json {
            Json::Null => match self {
                Self::AutoInt { .. }
                | Self::AutoFloat { .. }
                | Self::AutoIntOrList
                | Self::AutoFloats { .. } => Some(Value::Auto),
                _ => None,
            },
            Json::Bool(value) => self.parse(if *value { "true" } else { "false" }),
            Json::Number(number) => self.parse(&number.to_string()),
            Json::String(text) => self.parse(text),
            Json::Array(items) => {
                let number =
                    |item: &Json| item.as_u64().map(|item| item as usize).filter(|item| *item <= MOST);
                let list = items.iter().map(number);
                match self {
                    Self::List { .. } | Self::AutoIntOrList if items.len() <= LONGEST => {
                        list.collect::<Option<Vec<_>>>().map(Value::List)
                    }
                    Self::AutoFloats { .. } => {
                        let word = |item: &Json| match item {
                            Json::Null => "inf".to_owned(),
                            item => item.to_string(),
                        };
                        self.parse(&items.iter().map(word).collect::<Vec<_>>().join("+"))
                    }
                    _ => None,
                }
            }
            Json::Object(_) => None,
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let range = |f: &mut fmt::Formatter, min: usize, max: usize| match max {
            max if max > MOST => write!(f, "a whole number from {min} to {MOST}"),
            max => write!(f, "a whole number from {min} to {max}"),
        };
        match self {
            Self::Bool { .. } => f.write_str("true or false"),
            Self::Int { min, max, .. } => range(f, *min, *max),
            Self::AutoInt { min, max, .. } => {
                range(f, *min, *max)?;
                f.write_str(", or auto")
            }
            Self::Float { min, max, .. } => write!(f, "a number from {min} to {max}"),
            Self::AutoFloat { min, max } => write!(f, "a number from {min} to {max}, or auto"),
            Self::Word { words, .. } => write!(f, "one of {}", words.iter().collect::<Vec<_>>().join(", ")),
            Self::List { .. } => f.write_str("whole numbers joined with +, or none"),
            Self::AutoIntOrList => f.write_str("a whole number, several joined with +, or auto"),
            Self::AutoFloats { min, max } => write!(f, "numbers from {min} to {max} joined with +, or auto"),
        }
    }
}

/// An empty list on the command line.
const NONE: &str = "none";

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let join = |list: &[usize]| match list {
            [] => NONE.to_owned(),
            list => list.iter().map(usize::to_string).collect::<Vec<_>>().join("+"),
        };
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Bool(value) => write!(f, "{value}"),
            Self::Int(value) => write!(f, "{value}"),
            Self::Float(value) => write!(f, "{value}"),
            Self::Word(value) => f.write_str(value),
            Self::List(list) => f.write_str(&join(list)),
            Self::Floats(list) => f.write_str(&list.iter().map(f64::to_string).collect::<Vec<_>>().join("+")),
        }
    }
}
