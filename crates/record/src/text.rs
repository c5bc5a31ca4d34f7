//! Text from files on its way to a person.

/// `text` with every character that a terminal or an XML reader takes for a command instead of showing it (escape, NUL,
/// the other control characters, changes of direction) replaced by the replacement character. Line feeds stay.
pub fn visible(text: &str) -> String {
    let hidden = |letter: char| {
        letter != '\n' && letter.is_control()
            || matches!(letter, '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
            || matches!(letter, '\u{fffe}' | '\u{ffff}')
    };
    let shown = |letter: char| match letter {
        '\t' => ' ',
        letter if hidden(letter) => '\u{fffd}',
        letter => letter,
    };
    text.chars().map(shown).collect()
}

/// `1 thread`, `2 threads`.
pub fn plural(count: u64, noun: &str) -> String {
    format!("{count} {noun}{}", if count == 1 { "" } else { "s" })
}

/// a to z, then aa, ab, ...
pub fn letter(index: usize) -> String {
    let last = char::from(b'a' + (index % 26) as u8);
    let before = if index >= 26 { letter(index / 26 - 1) } else { String::new() };
    format!("{before}{last}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_is_no_plural() {
        assert_eq!([0, 1, 2].map(|count| plural(count, "core")), ["0 cores", "1 core", "2 cores"]);
    }

    #[test]
    fn nothing_reaches_a_terminal_but_what_it_shows() {
        assert_eq!(visible("a\x1b[31m\0b\r\nc\td\u{202e}e"), "a\u{fffd}[31m\u{fffd}b\u{fffd}\nc d\u{fffd}e");
        assert_eq!(visible("cosFormer ± 95 %\u{a0}ü"), "cosFormer ± 95 %\u{a0}ü");
    }
}
