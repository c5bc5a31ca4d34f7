//! A cell of a table as HTML: its verdict, what was measured above what was published, and where it leads.

use super::escape;
use crate::report::paper;

/// A cell's text in its parts.
pub(super) enum Cell<'a> {
    /// As it stands.
    Plain(&'a str),
    /// Measured with its signs, and published.
    Pair {
        /// `36.29≈ ▼ n=4 (a)`.
        measured: String,
        /// `37.50≈`.
        published: &'a str,
    },
}

impl<'a> Cell<'a> {
    /// `text`; of a table of `pairs` its two halves: what stands behind the published number says something of the measured one.
    pub(super) fn of(text: &'a str, pairs: bool) -> Self {
        let Some((measured, rest)) = text.split_once(" / ").filter(|_| pairs) else {
            return Self::Plain(text);
        };
        let starts = |word: &str| {
            [paper::SAME, paper::BETTER, paper::WORSE, paper::OPEN, "≠"].contains(&word)
                || word.starts_with("n=")
                || word.starts_with('(')
        };
        let mut at = 0;
        let published = loop {
            match rest[at..].find(' ') {
                Some(space) if starts(rest[at + space + 1..].split(' ').next().unwrap_or_default()) => {
                    break at + space;
                }
                Some(space) => at += space + 1,
                None => break rest.len(),
            }
        };
        let (published, signs) = rest.split_at(published);
        Self::Pair { measured: format!("{measured}{signs}"), published }
    }

    fn text(&self) -> &str {
        match self {
            Self::Plain(text) => text,
            Self::Pair { measured, .. } => measured,
        }
    }

    /// Whether it was not run.
    pub(super) fn is_open(&self) -> bool {
        self.text() == "-"
    }

    /// Verdicts have a colour; the sign or the word stands in the text.
    pub(super) fn verdict(&self) -> String {
        let text = self.text();
        let starts = |words: &[&str]| words.iter().any(|word| text.starts_with(word));
        let has = |sign: &str| matches!(self, Self::Pair { .. }) && text.split(' ').any(|word| word == sign);
        let word = match () {
            () if has(paper::SAME) || starts(&["within spread", "no difference", "reproduced"]) => "same",
            () if has(paper::BETTER) || starts(&["better", "faster", "less memory"]) => "better",
            () if has(paper::WORSE) || starts(&["worse", "slower", "more memory", "contradicted"]) => "worse",
            () if has(paper::OPEN) || starts(&["not comparable", "nothing published", "not decided"]) => {
                "open"
            }
            () => return String::new(),
        };
        format!(" data-verdict=\"{word}\"")
    }

    /// Markup: a link to `target`, a place with a title, where there is one.
    pub(super) fn html(&self, target: Option<(String, String)>) -> String {
        let text = match self {
            Self::Plain(text) => escape(text),
            Self::Pair { measured, published } => {
                format!(
                    "<span class=\"m\">{}</span><span class=\"p\">{}</span>",
                    escape(measured),
                    escape(published)
                )
            }
        };
        match target {
            Some((place, title)) if title.is_empty() => format!("<a href=\"#{place}\">{text}</a>"),
            Some((place, title)) => format!("<a href=\"#{place}\" title=\"{}\">{text}</a>", escape(&title)),
            None => text,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signs_belong_to_what_was_measured() {
        let parts = |text| match Cell::of(text, true) {
            Cell::Pair { measured, published } => (measured, published.to_owned()),
            Cell::Plain(text) => (text.to_owned(), String::new()),
        };
        let pair = |a: &str, b: &str| (a.to_owned(), b.to_owned());
        assert_eq!(parts("36.29≈ / 37.50≈ ▼ n=4 (a)"), pair("36.29≈ ▼ n=4 (a)", "37.50≈"));
        assert_eq!(parts("1.50 ±0.05 / Transformer oom"), pair("1.50 ±0.05", "Transformer oom"));
        assert_eq!(parts("1.21 / 1.21 ="), pair("1.21 =", "1.21"));
        assert_eq!(parts("- / 65.35↓"), pair("-", "65.35↓"));
        assert_eq!(parts("2.17"), pair("2.17", ""));
        assert!(matches!(Cell::of("a / b", false), Cell::Plain("a / b")));
    }
}
