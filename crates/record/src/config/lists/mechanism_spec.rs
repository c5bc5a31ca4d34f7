//! The grammar of `--model`: mechanisms with their knobs, not yet looked up.

use std::fmt;

use serde::Serialize;

use crate::config::ParseError;

/// A mechanism and the knobs that were said.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct MechanismSpec {
    /// Name, `all`, or a pattern such as `ls*`.
    pub name: String,
    /// Knobs and their values as text, in the order given.
    pub knobs: Vec<(String, String)>,
}

impl MechanismSpec {
    /// Whether the name stands for several mechanisms.
    pub fn is_pattern(&self) -> bool {
        self.name == "all" || self.name.contains(['*', '?'])
    }

    /// Whether the name is `name` or matches it.
    pub fn matches(&self, name: &str) -> bool {
        self.name == "all" || glob(self.name.as_bytes(), name.as_bytes())
    }
}

impl fmt::Display for MechanismSpec {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(&self.name)?;
        for (index, (knob, value)) in self.knobs.iter().enumerate() {
            write!(f, "{}{knob}={value}", if index == 0 { ":" } else { "," })?;
        }
        Ok(())
    }
}

/// `*` is any text, `?` one character. Takes time proportional to the product of both lengths at most.
fn glob(pattern: &[u8], text: &[u8]) -> bool {
    let (mut p, mut t) = (0, 0);
    let mut star = None; // the last `*` and where its text ends so far
    while t < text.len() {
        match pattern.get(p) {
            Some(b'*') => {
                star = Some((p, t));
                p += 1;
            }
            Some(&c) if c == b'?' || c == text[t] => {
                p += 1;
                t += 1;
            }
            _ => {
                let Some((at, end)) = star else { return false };
                star = Some((at, end + 1));
                p = at + 1;
                t = end + 1;
            }
        }
    }
    pattern[p..].iter().all(|c| *c == b'*')
}

/// A part with `=` but no `:` continues the variant before it: `ls:w=16,r=2,full` is two entries.
pub(super) fn models(text: &str) -> Result<Vec<MechanismSpec>, ParseError> {
    const WRITE: &str =
        "write full,ls:w=16,r=2 (names from `effattn list mechanisms`, all, or a pattern 'ls*')";
    if text.len() > 10_000 {
        return Err(ParseError(format!("a list of {} characters is too long; {WRITE}", text.len())));
    }
    let mut list: Vec<MechanismSpec> = Vec::new();
    for part in text.split(',').map(str::trim) {
        let (name, knob) = match part.split_once(':') {
            Some((name, knob)) => (Some(name), Some(knob)),
            None if part.contains('=') => (None, Some(part)),
            None => (Some(part), None),
        };
        if let Some(name) = name {
            if name.is_empty() || name.contains('=') {
                return Err(ParseError(format!("{part:?} has no mechanism; {WRITE}")));
            }
            list.push(MechanismSpec { name: name.to_owned(), knobs: Vec::new() });
        }
        let Some(knob) = knob else { continue };
        let Some(variant) = list.last_mut() else {
            return Err(ParseError(format!("{part:?} comes before any mechanism; {WRITE}")));
        };
        match knob.split_once('=') {
            Some((key, value)) if !key.is_empty() && !value.is_empty() => {
                if variant.is_pattern() {
                    let name = &variant.name;
                    return Err(ParseError(format!("{name} means several mechanisms and takes no knobs")));
                }
                if variant.knobs.iter().any(|(known, _)| known == key) {
                    let name = &variant.name;
                    return Err(ParseError(format!(
                        "{name}: knob {key} is given twice; leave one of them out"
                    )));
                }
                variant.knobs.push((key.to_owned(), value.to_owned()));
            }
            _ => return Err(ParseError(format!("{knob:?} is not a knob setting such as w=16; {WRITE}"))),
        }
    }
    Ok(list)
}
