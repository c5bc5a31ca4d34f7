//! Knobs: the settings that make variants of a mechanism, with defaults and sources.
//!
//! A mechanism declares each knob once, as a constant ([`Knob`]), lists it in its entry and reads it through the constant
//! ([`Knobs::get`]); a test walks every variant, so that a knob that is read but not listed fails.
//!
//! Knob names are the golden files' `config` keys. On the command line a variant is
//! `name:key=value,key=value`; list values join with `+`, `auto` is null. `compat=lra` and `compat=code` stand
//! for the knobs that reproduce a reference code's quirks ([`COMPAT`]).

mod knob;
mod value;

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value as Json;

pub use knob::{Knob, KnobSpec};
pub use value::{Kind, Value, Words};

/// What `compat=WORD` stands for: word, knob, value. Every such knob that a mechanism has is set.
pub const COMPAT: &[(&str, &str, &str)] =
    &[("lra", "lra_compat", "true"), ("lra", "layout", "released-lra"), ("code", "mem_compress", "hidden")];

/// The settings of one variant, every knob resolved, and the names that a user gave, also where the value is the default: two
/// that have the same values are equal.
#[derive(Clone, Debug)]
pub struct Knobs(BTreeMap<&'static str, Value>, BTreeSet<&'static str>);

impl PartialEq for Knobs {
    fn eq(&self, other: &Self) -> bool {
        self.0 == other.0
    }
}

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
    pub fn parse<'a>(
        mechanism: &'static str,
        knobs: &'static [KnobSpec],
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
    pub fn from_json<'a>(
        mechanism: &'static str,
        knobs: &'static [KnobSpec],
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
        knobs: &'static [KnobSpec],
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

    /// As JSON, as golden files have them: null for auto.
    pub fn to_json(&self) -> serde_json::Map<String, Json> {
        self.0.iter().map(|(name, value)| ((*name).to_owned(), value.to_json())).collect()
    }

    /// The defaults of `knobs`.
    pub fn defaults(knobs: &'static [KnobSpec]) -> Self {
        Self(knobs.iter().map(|knob| (knob.name, knob.default())).collect(), BTreeSet::new())
    }

    /// The same settings, of which a user named `names`.
    #[must_use]
    pub fn naming<'a>(mut self, names: impl IntoIterator<Item = &'a str>) -> Self {
        let own = |name: &str| self.0.get_key_value(name).map(|(name, _)| *name);
        self.1 = names.into_iter().filter_map(own).collect();
        self
    }

    /// Whether the knob called `name` was named, or is set to something else than its default.
    pub fn is_set(&self, knobs: &'static [KnobSpec], name: &str) -> bool {
        self.1.contains(name) || self.differs(knobs, name)
    }

    /// The same settings with one value replaced; the caller vouches that the knob takes it.
    ///
    /// # Panics
    /// Settings without a knob called `name`.
    #[must_use]
    pub fn with(mut self, name: &str, value: Value) -> Self {
        match self.0.get_mut(name) {
            Some(held) => *held = value,
            None => panic!("there is no knob {name} among {:?}", self.0.keys()),
        }
        self
    }

    /// All settings by name.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, &Value)> {
        self.0.iter().map(|(name, value)| (*name, value))
    }

    /// The settings that differ from the defaults, as on the command line: `w=16,r=2`.
    pub fn changes(&self, knobs: &'static [KnobSpec]) -> String {
        self.changes_and(knobs, &[])
    }

    /// The same with the knobs `also`, whatever their value.
    pub fn changes_and(&self, knobs: &'static [KnobSpec], also: &[&str]) -> String {
        let changed = knobs.iter().filter(|knob| also.contains(&knob.name) || self.differs(knobs, knob.name));
        let pairs = changed.map(|knob| {
            let value = self.0[knob.name].to_string();
            let compat = COMPAT.iter().find(|entry| (entry.1, entry.2) == (knob.name, value.as_str()));
            compat.map_or_else(|| format!("{}={value}", knob.name), |entry| format!("compat={}", entry.0))
        });
        pairs.collect::<Vec<_>>().join(",")
    }

    /// Whether the knob called `name` is set to something else than its default.
    pub fn differs(&self, knobs: &'static [KnobSpec], name: &str) -> bool {
        let default = knobs.iter().find(|knob| knob.name == name).map(|knob| knob.default().to_string());
        self.0.get(name).map(ToString::to_string) != default
    }

    /// The value of `knob`.
    ///
    /// # Panics
    /// A knob that the mechanism does not declare in [`MechanismEntry::knobs`](super::MechanismEntry::knobs).
    pub fn get<T>(&self, knob: &Knob<T>) -> T {
        let value = self.0.get(knob.name()).and_then(|value| knob.read(value));
        value.unwrap_or_else(|| {
            let (name, declared) = (knob.name(), self.0.keys().copied().collect::<Vec<_>>().join(", "));
            panic!("knob {name} is read, but the mechanism's list declares no such knob: {declared}")
        })
    }

    /// The largest whole number among them.
    pub fn largest(&self) -> usize {
        let values = self.0.values().map(|value| match value {
            Value::Int(value) => *value,
            Value::List(list) => list.iter().copied().max().unwrap_or(0),
            Value::Auto | Value::Bool(_) | Value::Float(_) | Value::Word(_) | Value::Floats(_) => 0,
        });
        values.max().unwrap_or(0)
    }
}

fn find(
    mechanism: &'static str,
    knobs: &'static [KnobSpec],
    name: &str,
) -> Result<&'static KnobSpec, KnobError> {
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

fn bad(mechanism: &'static str, knob: &'static KnobSpec, value: &str) -> KnobError {
    KnobError::Bad { mechanism, name: knob.name, value: value.to_owned(), allowed: knob.kind.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LRA: Knob<bool> = Knob::bool("lra_compat", false).doc("a quirk").source("ours");
    const EPS: Knob<Option<f64>> = Knob::auto_float("eps", 0.0..=1.0).doc("a guard").source("ours");
    static KNOBS: &[KnobSpec] = &[LRA.spec(), EPS.spec()];

    #[test]
    fn compat_names_a_reference_code() {
        let knobs = Knobs::parse("toy", KNOBS, [("compat", "lra")]).unwrap();
        assert!(knobs.get(&LRA));
        assert_eq!(knobs.changes(KNOBS), "compat=lra");
        let error = Knobs::parse("toy", KNOBS, [("compat", "code")]).unwrap_err();
        assert_eq!(error.to_string(), "toy: compat=code is not allowed; compat takes one of lra");
        let error = Knobs::parse("toy", &KNOBS[1..], [("compat", "lra")]).unwrap_err();
        assert!(error.to_string().contains("no knob \"compat\""), "{error}");
    }

    #[test]
    fn a_number_may_be_auto() {
        let knobs = Knobs::parse("toy", KNOBS, [("eps", "0.5")]).unwrap();
        assert_eq!((knobs.get(&EPS), knobs.changes(KNOBS)), (Some(0.5), "eps=0.5".to_owned()));
        assert_eq!(Knobs::parse("toy", KNOBS, [("eps", "auto")]).unwrap().get(&EPS), None);
        assert!(Knobs::parse("toy", KNOBS, [("eps", "1.5")]).is_err());
    }

    #[test]
    #[should_panic(expected = "knob eps is read, but the mechanism's list declares no such knob: lra_compat")]
    fn a_knob_that_is_not_declared_cannot_be_read() {
        Knobs::defaults(&KNOBS[..1]).get(&EPS);
    }
}
