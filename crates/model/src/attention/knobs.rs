//! Knobs: the settings that make variants of a mechanism, with defaults and sources.
//!
//! Knob names are the golden files' `config` keys. On the command line a variant is
//! `name:key=value,key=value`; list values join with `+`, `auto` is null. `compat=lra` and `compat=code` stand
//! for the knobs that reproduce a reference code's quirks ([`COMPAT`]).

mod value;

use std::collections::BTreeMap;

use serde_json::Value as Json;

pub use value::{Kind, Value};

/// What `compat=WORD` stands for: word, knob, value. Every such knob that a mechanism has is set.
pub const COMPAT: &[(&str, &str, &str)] =
    &[("lra", "lra_compat", "true"), ("lra", "layout", "released-lra"), ("code", "mem_compress", "hidden")];

/// One knob of a mechanism.
#[derive(Clone, Debug)]
pub struct Knob {
    /// Name, as in golden files.
    pub name: &'static str,
    /// Values it takes.
    pub kind: Kind,
    /// Value when nothing is said.
    pub default: Value,
    /// What it does.
    pub doc: &'static str,
    /// Where the default comes from.
    pub source: &'static str,
}

/// The settings of one variant, every knob resolved.
#[derive(Clone, Debug, PartialEq)]
pub struct Knobs(BTreeMap<&'static str, Value>);

/// A setting that a mechanism does not take.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KnobError {
    /// No such knob.
    #[error("{mechanism} has no knob {name:?}{}; its knobs: {}", nearest(.near), if .known.is_empty() { "none" } else { .known })]
    Unknown {
        /// The mechanism.
        mechanism: &'static str,
        /// What was given.
        name: String,
        /// The nearest name.
        near: Option<&'static str>,
        /// All names.
        known: String,
    },
    /// A value that the knob does not take.
    #[error("{mechanism}: {name}={value} is not allowed; {name} takes {allowed}")]
    Bad {
        /// The mechanism.
        mechanism: &'static str,
        /// The knob.
        name: &'static str,
        /// What was given.
        value: String,
        /// What is allowed.
        allowed: String,
    },
}

fn nearest(near: &Option<&'static str>) -> String {
    near.map_or_else(String::new, |near| format!(" (did you mean {near:?}?)"))
}

impl Knobs {
    /// The defaults of `knobs`, overridden by `given` (text as on the command line).
    ///
    /// # Errors
    /// An unknown knob or a value out of range.
    pub fn parse<'a>(
        mechanism: &'static str,
        knobs: &'static [Knob],
        given: impl IntoIterator<Item = (&'a str, &'a str)>,
    ) -> Result<Self, KnobError> {
        let mut values = Self::defaults(knobs);
        for (name, text) in given {
            if name == "compat" {
                values.set_compat(mechanism, knobs, text)?;
                continue;
            }
            let knob = find(mechanism, knobs, name)?;
            let value = knob.kind.parse(text).ok_or_else(|| bad(mechanism, knob, text))?;
            values.0.insert(knob.name, value);
        }
        Ok(values)
    }

    /// The defaults of `knobs`, overridden by JSON or TOML values (golden files, suites).
    ///
    /// # Errors
    /// An unknown knob or a value out of range.
    pub fn from_json<'a>(
        mechanism: &'static str,
        knobs: &'static [Knob],
        given: impl IntoIterator<Item = (&'a String, &'a Json)>,
    ) -> Result<Self, KnobError> {
        let mut values = Self::defaults(knobs);
        for (name, json) in given {
            if name == "compat" {
                values.set_compat(mechanism, knobs, json.as_str().unwrap_or_default())?;
                continue;
            }
            let knob = find(mechanism, knobs, name)?;
            let value = knob.kind.read(json).ok_or_else(|| bad(mechanism, knob, &json.to_string()))?;
            values.0.insert(knob.name, value);
        }
        Ok(values)
    }

    fn set_compat(
        &mut self,
        mechanism: &'static str,
        knobs: &'static [Knob],
        word: &str,
    ) -> Result<(), KnobError> {
        let meant = |entry: &&(&str, &str, &str)| knobs.iter().any(|knob| knob.name == entry.1);
        let known: Vec<_> = COMPAT.iter().filter(meant).collect();
        if known.is_empty() {
            find(mechanism, knobs, "compat")?;
        }
        let chosen: Vec<_> = known.iter().filter(|entry| entry.0 == word).collect();
        if chosen.is_empty() {
            let words: Vec<&str> = known.iter().map(|entry| entry.0).collect();
            let (value, allowed) = (word.to_owned(), format!("one of {}", words.join(", ")));
            return Err(KnobError::Bad { mechanism, name: "compat", value, allowed });
        }
        for (_, name, text) in chosen {
            let knob = find(mechanism, knobs, name)?;
            let value = knob.kind.parse(text).ok_or_else(|| bad(mechanism, knob, text))?;
            self.0.insert(knob.name, value);
        }
        Ok(())
    }

    /// The defaults of `knobs`.
    pub fn defaults(knobs: &'static [Knob]) -> Self {
        Self(knobs.iter().map(|knob| (knob.name, knob.default.clone())).collect())
    }

    /// The same settings with one value replaced (the caller vouches for it).
    #[must_use]
    pub fn with(mut self, name: &'static str, value: Value) -> Self {
        self.0.insert(name, value);
        self
    }

    /// All settings by name.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, &Value)> {
        self.0.iter().map(|(name, value)| (*name, value))
    }

    /// The settings that differ from the defaults, as on the command line: `w=16,r=2`.
    pub fn changes(&self, knobs: &'static [Knob]) -> String {
        self.changes_and(knobs, &[])
    }

    /// The same with the knobs `also`, whatever their value.
    pub fn changes_and(&self, knobs: &'static [Knob], also: &[&str]) -> String {
        let changed = knobs.iter().filter(|knob| also.contains(&knob.name) || self.differs(knobs, knob.name));
        let pairs = changed.map(|knob| {
            let value = self.0[knob.name].to_string();
            let compat = COMPAT.iter().find(|entry| (entry.1, entry.2) == (knob.name, value.as_str()));
            compat.map_or_else(|| format!("{}={value}", knob.name), |entry| format!("compat={}", entry.0))
        });
        pairs.collect::<Vec<_>>().join(",")
    }

    /// Whether the knob called `name` is set to something else than its default.
    pub fn differs(&self, knobs: &'static [Knob], name: &str) -> bool {
        let default = knobs.iter().find(|knob| knob.name == name).map(|knob| knob.default.to_string());
        self.0.get(name).map(ToString::to_string) != default
    }

    /// A whole number. Zero if the mechanism has no such knob.
    pub fn int(&self, name: &str) -> usize {
        self.opt_int(name).unwrap_or(0)
    }

    /// A whole number, or none where auto.
    pub fn opt_int(&self, name: &str) -> Option<usize> {
        match self.0.get(name) {
            Some(Value::Int(value)) => Some(*value),
            _ => None,
        }
    }

    /// The largest whole number among them.
    pub fn largest(&self) -> usize {
        let values = self.0.values().map(|value| match value {
            Value::Int(value) => *value,
            Value::List(list) => list.iter().copied().max().unwrap_or(0),
            Value::Owned(list) => list.iter().copied().max().unwrap_or(0),
            _ => 0,
        });
        values.max().unwrap_or(0)
    }

    /// True or false; false if the mechanism has no such knob.
    pub fn bool(&self, name: &str) -> bool {
        matches!(self.0.get(name), Some(Value::Bool(true)))
    }

    /// A number; 0 if the mechanism has no such knob.
    pub fn float(&self, name: &str) -> f64 {
        match self.0.get(name) {
            Some(Value::Float(value)) => *value,
            Some(Value::Int(value)) => *value as f64,
            _ => 0.0,
        }
    }

    /// A number, or none where auto.
    pub fn opt_float(&self, name: &str) -> Option<f64> {
        match self.0.get(name) {
            Some(Value::Float(value)) => Some(*value),
            _ => None,
        }
    }

    /// A word; empty where auto or absent.
    pub fn word(&self, name: &str) -> &str {
        match self.0.get(name) {
            Some(Value::Word(value)) => value,
            Some(Value::Text(value)) => value,
            _ => "",
        }
    }

    /// A list; one number counts as a list of one, auto as none.
    pub fn list(&self, name: &str) -> Option<Vec<usize>> {
        match self.0.get(name) {
            Some(Value::List(list)) => Some(list.to_vec()),
            Some(Value::Owned(list)) => Some(list.clone()),
            Some(Value::Int(value)) => Some(vec![*value]),
            _ => None,
        }
    }
}

fn find(mechanism: &'static str, knobs: &'static [Knob], name: &str) -> Result<&'static Knob, KnobError> {
    knobs.iter().find(|knob| knob.name == name).ok_or_else(|| KnobError::Unknown {
        mechanism,
        name: name.to_owned(),
        near: knobs
            .iter()
            .map(|knob| (strsim::damerau_levenshtein(knob.name, name), knob.name))
            .filter(|(distance, _)| *distance <= 3)
            .min()
            .map(|(_, near)| near),
        known: knobs.iter().map(|knob| knob.name).collect::<Vec<_>>().join(", "),
    })
}

fn bad(mechanism: &'static str, knob: &'static Knob, value: &str) -> KnobError {
    KnobError::Bad { mechanism, name: knob.name, value: value.to_owned(), allowed: knob.kind.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;

    static KNOBS: &[Knob] = &[
        Knob { name: "lra_compat", kind: Kind::Bool, default: Value::Bool(false), doc: "", source: "" },
        Knob {
            name: "eps",
            kind: Kind::AutoFloat { min: 0.0, max: 1.0 },
            default: Value::Float(0.5),
            doc: "",
            source: "",
        },
    ];

    #[test]
    fn compat_names_a_reference_code() {
        let knobs = Knobs::parse("toy", KNOBS, [("compat", "lra")]).unwrap();
        assert!(knobs.bool("lra_compat"));
        assert_eq!(knobs.changes(KNOBS), "compat=lra");
        let error = Knobs::parse("toy", KNOBS, [("compat", "code")]).unwrap_err();
        assert_eq!(error.to_string(), "toy: compat=code is not allowed; compat takes one of lra");
        let error = Knobs::parse("toy", &KNOBS[1..], [("compat", "lra")]).unwrap_err();
        assert!(error.to_string().contains("no knob \"compat\""), "{error}");
    }

    #[test]
    fn a_number_may_be_auto() {
        let knobs = Knobs::parse("toy", KNOBS, [("eps", "auto")]).unwrap();
        assert_eq!((knobs.opt_float("eps"), knobs.changes(KNOBS)), (None, "eps=auto".to_owned()));
        assert!(Knobs::parse("toy", KNOBS, [("eps", "1.5")]).is_err());
    }
}
