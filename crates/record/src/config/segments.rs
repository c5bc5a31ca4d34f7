//! Segments of the splits of recall and state tracking: `64`, `3..40`, `64:8`.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::ParseError;

/// One part of a split: how long its examples are, and how much they ask for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Segment {
    /// Length of the shortest example, in tokens.
    pub shortest: usize,
    /// Length of the longest.
    pub longest: usize,
    /// Key-value pairs (MQAR) or tokens to copy (selective copying); `None`: the task has no such number.
    pub items: Option<usize>,
}

impl FromStr for Segment {
    type Err = ParseError;

    /// Reads `64`, `3..40` or `64:8`.
    fn from_str(text: &str) -> Result<Self, ParseError> {
        let wrong = || {
            let forms = "64 (length), 3..40 (lengths) or 64:8 (length and pairs)";
            ParseError::new(format!("{text:?} is no segment; write {forms}"))
        };
        let number = |text: &str| text.parse::<usize>().ok().filter(|number| (1..=1 << 20).contains(number));
        let (lens, items) = match text.split_once(':') {
            Some((lens, items)) => (lens, Some(number(items).ok_or_else(wrong)?)),
            None => (text, None),
        };
        let (shortest, longest) = lens.split_once("..").unwrap_or((lens, lens));
        let (shortest, longest) = (number(shortest).ok_or_else(wrong)?, number(longest).ok_or_else(wrong)?);
        if shortest > longest {
            return Err(wrong());
        }
        Ok(Self { shortest, longest, items })
    }
}

impl fmt::Display for Segment {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "{}", self.shortest)?;
        if self.longest > self.shortest {
            write!(f, "..{}", self.longest)?;
        }
        self.items.map_or(Ok(()), |items| write!(f, ":{items}"))
    }
}

impl TryFrom<String> for Segment {
    type Error = ParseError;

    fn try_from(text: String) -> Result<Self, ParseError> {
        text.parse()
    }
}

impl From<Segment> for String {
    fn from(segment: Segment) -> Self {
        segment.to_string()
    }
}

impl Segment {
    /// The segments of a list such as `64:4,64:8`.
    pub fn list<'a>(parts: impl IntoIterator<Item = &'a str>) -> Result<Vec<Self>, ParseError> {
        parts.into_iter().map(|part| part.trim().parse()).collect()
    }

    /// Refuses a number of items, which a task without them would not use.
    pub fn without_items(&self) -> Result<(), String> {
        match self.items {
            Some(items) => Err(format!("segment {self}: this task has no pairs; leave :{items} out")),
            None => Ok(()),
        }
    }

    /// Refuses several lengths, for a task whose examples of a segment have one.
    pub fn one_length(&self) -> Result<(), String> {
        match self.shortest == self.longest {
            true => Ok(()),
            false => {
                Err(format!("segment {self}: this task has one length per segment; write {}", self.longest))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn segments_are_read_as_they_are_written() {
        for text in ["64", "3..40", "64:8", "64..128:8"] {
            assert_eq!(text.parse::<Segment>().unwrap().to_string(), text);
        }
        for text in ["", "0", "a", "64:", "64:0", "40..3", "..3", "9999999"] {
            let error = text.parse::<Segment>().unwrap_err().to_string();
            assert!(error.contains("64:8"), "{text}: {error}");
        }
    }
}
