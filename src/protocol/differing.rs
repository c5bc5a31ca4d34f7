//! What a request asks that its protocol does not: every value that is not worded elsewhere, by its name.

use crate::run::plan::UnusualValue;

/// Values of requests that change nothing of what a protocol fixes, or that rows say elsewhere.
const NEUTRAL: &[(&str, &str)] = &[
    ("device", "a column of the row; no protocol fixes it"),
    ("kernel", "a column of the row; the same operations"),
    ("profile", "steps are timed besides"),
    ("program", "a column of the row"),
    ("accumulate", "the same update in parts"),
    ("allow_partial", "what is missing is said with its number by the worker"),
    ("also", "more tests of the same weights, with rows of their own"),
    ("similarity", "a measurement of the same weights"),
    ("insertions", "every number has rows of its own"),
    ("evaluation", "the metric's name says it"),
    ("weights", "what is tested; the manifest has its checksum"),
    ("weights_sha256", "what is tested"),
    ("from", "where an encoder lies"),
    ("folder", "where an encoder lies"),
    ("encoder", "the protocol's own words say what is started from"),
];

/// What is said of `values`, those of a request that are not the protocol's, but for those that are `compared` already:
/// whatever nobody words is said by its name.
pub fn differing_words(values: &[UnusualValue], compared: &[&str]) -> Vec<String> {
    let about = |value: &UnusualValue, name: &str| value.path.split('.').any(|part| part == name);
    let known = |value: &&UnusualValue| {
        let neutral = NEUTRAL.iter().any(|(name, _)| about(value, name));
        neutral || compared.iter().any(|name| about(value, name))
    };
    let words = |UnusualValue { name, here, usual, .. }: &UnusualValue| {
        let text = |value: &Option<String>| value.clone().unwrap_or_else(|| "none".to_owned());
        format!("{} {} ({})", name.replace('_', " "), text(here), text(usual))
    };
    values.iter().filter(|value| !known(value)).map(words).collect()
}
