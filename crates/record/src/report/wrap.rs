//! Text folded to a number of columns, never inside a word.

/// A space at which no line is broken: between a number and its unit.
pub const TIED: char = '\u{a0}';

/// `line` in lines of at most `width` columns, broken at spaces; later lines are indented like the first, and
/// two columns more behind a list item's dash. A word that is longer stands alone.
pub fn wrap(line: &str, width: usize) -> String {
    let line = line.trim_end();
    let spaces = line.len() - line.trim_start().len();
    let indent = " ".repeat(if line.trim_start().starts_with("- ") { spaces + 2 } else { spaces });
    let mut lines = vec![line[..spaces].to_owned()];
    for word in line.split(' ').filter(|word| !word.is_empty()) {
        let last = lines.len() - 1;
        let free = lines[last].trim().is_empty();
        if !free && columns(&lines[last]) + 1 + columns(word) > width {
            lines.push(format!("{indent}{word}"));
        } else {
            lines[last].push_str(if free { "" } else { " " });
            lines[last].push_str(word);
        }
    }
    lines.join("\n") + "\n"
}

/// How many columns `text` takes.
pub fn columns(text: &str) -> usize {
    text.chars().count()
}

/// Whether a comma between `before` and `behind` may separate thousands: one to three digits, then three.
fn of_thousands(before: &str, behind: &str) -> bool {
    let digits = |text: &mut dyn Iterator<Item = char>| text.take_while(char::is_ascii_digit).count();
    (1..=3).contains(&digits(&mut before.chars().rev())) && digits(&mut behind.chars()) == 3
}

/// The pieces of a cell that stay whole: words, and the parts of a list of settings behind each comma.
fn pieces(text: &str) -> impl Iterator<Item = &str> {
    let words = text.split_inclusive(' ').filter(|word| !word.trim().is_empty());
    words.flat_map(|word| {
        let bare = word.trim_end_matches(' ').len();
        let commas = word[..bare].match_indices(',').map(|(at, _)| at + 1);
        let commas = commas.filter(move |&end| end < bare && !of_thousands(&word[..end - 1], &word[end..]));
        let mut start = 0;
        commas.chain([word.len()]).map(move |end| &word[std::mem::replace(&mut start, end)..end])
    })
}

/// Columns of the longest piece of a cell.
pub(super) fn longest_piece(text: &str) -> usize {
    pieces(text).map(|piece| columns(piece.trim_end_matches(' '))).max().unwrap_or(0)
}

/// The lines of a cell `width` columns wide.
pub(super) fn cell(text: &str, width: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    for piece in pieces(text) {
        let last = lines.len() - 1;
        if !lines[last].is_empty() && columns(&lines[last]) + columns(piece.trim_end_matches(' ')) > width {
            lines.push(String::new());
        }
        lines.last_mut().into_iter().for_each(|line| line.push_str(piece));
    }
    lines.iter().map(|line| line.trim_end_matches(' ').to_owned()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_lines_are_broken_and_indented() {
        assert_eq!(wrap("  aa bb cc", 7), "  aa bb\n  cc\n");
        assert_eq!(wrap("  - aa bb", 6), "  - aa\n    bb\n");
        assert_eq!(wrap("averylongword b", 4), "averylongword\nb\n");
        assert_eq!(wrap("", 10), "\n");
    }

    #[test]
    fn cells_break_between_words_and_settings() {
        assert_eq!(cell("20\u{a0}ms ±2\u{a0}%", 6), ["20\u{a0}ms", "±2\u{a0}%"]);
        assert_eq!(cell("ls:w=16,r=2,dual_ln=false", 12), ["ls:w=16,r=2,", "dual_ln=false"]);
        assert_eq!(cell("Qin et al., ICLR 2022, Table 5", 14), ["Qin et al.,", "ICLR 2022,", "Table 5"]);
        assert_eq!(cell("Qin et al., ICLR", 40), ["Qin et al., ICLR"]);
        assert_eq!(longest_piece("ls:w=16,r=2"), 8);
        assert_eq!(cell("4,160,000 / 20,000", 12), ["4,160,000 /", "20,000"]);
        assert_eq!(cell("len=1024,2048,4096", 10), ["len=1024,", "2048,4096"]);
        assert_eq!(cell("0,10,20", 5), ["0,10,", "20"]);
        assert_eq!(cell("", 5), [""]);
    }
}
