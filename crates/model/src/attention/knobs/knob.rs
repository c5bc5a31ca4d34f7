//! A knob as a typed constant: declared once beside its mechanism, read by [`super::Knobs::get`].

use std::ops::RangeInclusive;

use super::value::{Kind, Value, Words};

/// One knob of a mechanism, as help, parsing and tests see it.
#[derive(Clone, Copy, Debug)]
pub struct KnobSpec {
    /// Name, as in golden files.
    pub name: &'static str,
    /// Values it takes, and the default.
    pub kind: Kind,
    /// What it does.
    pub doc: &'static str,
    /// Where the default comes from.
    pub source: &'static str,
}

impl KnobSpec {
    /// Value when nothing is said.
    pub fn default(&self) -> Value {
        self.kind.default()
    }
}

type Choices<T> = &'static [(&'static str, T)];

/// A knob with values of type `T`.
///
/// ```
/// use effattn_model::attention::knobs::{Knob, KnobSpec, Knobs};
///
/// #[derive(Clone, Copy, PartialEq)]
/// enum Reweight {
///     Cos,
///     None,
/// }
///
/// const W: Knob<usize> = Knob::int("w", 8, 1..=1 << 16)
///     .doc("window: keys that a query sees")
///     .source("Transformer-LS sec. 3.2");
/// const REWEIGHT: Knob<Reweight> = Knob::words("reweight", &[("cos", Reweight::Cos), ("none", Reweight::None)])
///     .doc("cos: re-weighting by distance; none: without")
///     .source("cosFormer eq. 9");
/// static KNOBS: &[KnobSpec] = &[W.spec(), REWEIGHT.spec()];
///
/// let knobs = Knobs::parse("toy", KNOBS, [("reweight", "none")]).unwrap();
/// assert!(knobs.get(&W) == 8 && knobs.get(&REWEIGHT) == Reweight::None);
/// ```
#[derive(Clone, Copy)]
pub struct Knob<T: 'static> {
    spec: KnobSpec,
    /// Words and their values; empty unless it takes words.
    choices: Choices<T>,
    read: fn(&Value, Choices<T>) -> Option<T>,
}

impl<T> Knob<T> {
    const fn new(name: &'static str, kind: Kind, read: fn(&Value, Choices<T>) -> Option<T>) -> Self {
        Self { spec: KnobSpec { name, kind, doc: "", source: "" }, choices: &[], read }
    }

    /// The same with what it does: the help of `list mechanisms`.
    #[must_use]
    pub const fn doc(mut self, doc: &'static str) -> Self {
        self.spec.doc = doc;
        self
    }

    /// The same with where its default comes from.
    #[must_use]
    pub const fn source(mut self, source: &'static str) -> Self {
        self.spec.source = source;
        self
    }

    /// The line of [`MechanismEntry::knobs`](crate::attention::MechanismEntry::knobs).
    ///
    /// # Panics
    /// Without [`Self::doc`] or [`Self::source`]; in a constant that is a compile error.
    pub const fn spec(&self) -> KnobSpec {
        assert!(!self.spec.doc.is_empty(), "a knob needs a doc");
        assert!(!self.spec.source.is_empty(), "a knob needs the source of its default");
        self.spec
    }

    /// Its name.
    pub const fn name(&self) -> &'static str {
        self.spec.name
    }

    pub(super) fn read(&self, value: &Value) -> Option<T> {
        (self.read)(value, self.choices)
    }
}

impl Knob<bool> {
    /// True or false.
    pub const fn bool(name: &'static str, default: bool) -> Self {
        Self::new(name, Kind::Bool { default }, |value, _| match value {
            Value::Bool(value) => Some(*value),
            _ => None,
        })
    }
}

impl Knob<usize> {
    /// A whole number in `range`.
    pub const fn int(name: &'static str, default: usize, range: RangeInclusive<usize>) -> Self {
        let (min, max) = (*range.start(), *range.end());
        assert!(min <= default && default <= max, "the default of a knob is outside of its range");
        Self::new(name, Kind::Int { min, max, default }, |value, _| value.int())
    }
}

impl Knob<Option<usize>> {
    /// A whole number in `range`, or auto (`None`), which is the default.
    pub const fn auto_int(name: &'static str, range: RangeInclusive<usize>) -> Self {
        let kind = Kind::AutoInt { min: *range.start(), max: *range.end() };
        Self::new(name, kind, |value, _| match value {
            Value::Auto => Some(None),
            value => value.int().map(Some),
        })
    }
}

impl Knob<f64> {
    /// A finite number in `range`.
    pub const fn float(name: &'static str, default: f64, range: RangeInclusive<f64>) -> Self {
        let (min, max) = (*range.start(), *range.end());
        assert!(min <= default && default <= max, "the default of a knob is outside of its range");
        Self::new(name, Kind::Float { min, max, default }, |value, _| value.float())
    }
}

impl Knob<Option<f64>> {
    /// A finite number in `range`, or auto (`None`), which is the default.
    pub const fn auto_float(name: &'static str, range: RangeInclusive<f64>) -> Self {
        let kind = Kind::AutoFloat { min: *range.start(), max: *range.end() };
        Self::new(name, kind, |value, _| match value {
            Value::Auto => Some(None),
            value => value.float().map(Some),
        })
    }
}

impl Knob<Vec<usize>> {
    /// A list of whole numbers, which may be empty.
    pub const fn list(name: &'static str, default: &'static [usize]) -> Self {
        Self::new(name, Kind::List { default }, |value, _| match value {
            Value::List(list) => Some(list.clone()),
            _ => None,
        })
    }
}

impl Knob<Option<Vec<usize>>> {
    /// A whole number, a list of them, or auto (`None`), which is the default.
    pub const fn auto_list(name: &'static str) -> Self {
        Self::new(name, Kind::AutoIntOrList, |value, _| match value {
            Value::Auto => Some(None),
            Value::Int(one) => Some(Some(vec![*one])),
            Value::List(list) => Some(Some(list.clone())),
            _ => None,
        })
    }
}

impl<T: Copy + Sync> Knob<T> {
    /// One of `choices`: words with what they mean. The first is the default.
    pub const fn words<const N: usize>(name: &'static str, choices: &'static [(&'static str, T); N]) -> Self {
        Self::words_from(name, 0, choices)
    }

    /// The same with the word number `default` (from 0) as the default.
    pub const fn words_from<const N: usize>(
        name: &'static str,
        default: usize,
        choices: &'static [(&'static str, T); N],
    ) -> Self {
        let kind = Kind::Word { words: Words::new(choices), default: choices[default].0 };
        let read = |value: &Value, choices: Choices<T>| match value {
            Value::Word(word) => choices.iter().find(|(name, _)| name == word).map(|(_, meant)| *meant),
            _ => None,
        };
        Self { choices, ..Self::new(name, kind, read) }
    }
}
