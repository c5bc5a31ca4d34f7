//! What a user says: grammars of flags, and suites. No mechanism is known here.

pub mod lists;
pub mod registry;
pub mod segments;
pub mod settings;
pub mod suite;
pub mod units;

/// Text that does not say what its flag or key takes: what is wrong, what is allowed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct ParseError(pub String);

impl ParseError {
    pub(crate) fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }
}

/// The nearest of `names` to `word`, if one is near enough to be a slip.
pub fn nearest<'a>(word: &str, names: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let near = names.into_iter().map(|name| (strsim::damerau_levenshtein(name, word), name)).min()?;
    (near.0 <= 1 + word.len() / 3).then_some(near.1)
}

/// `unknown mechanism "lss" (did you mean ls?); known: ...`, for any kind of name.
pub fn unknown<'a>(kind: &str, word: &str, names: impl IntoIterator<Item = &'a str> + Clone) -> String {
    let hint =
        nearest(word, names.clone()).map_or_else(String::new, |name| format!(" (did you mean {name}?)"));
    let known: Vec<&str> = names.into_iter().collect();
    format!("unknown {kind} {word:?}{hint}; known: {}", known.join(", "))
}
