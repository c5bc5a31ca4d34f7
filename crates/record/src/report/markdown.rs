//! Tables as Markdown.

use super::table::Table;
use crate::text::visible;

/// `table` in the pipe syntax, its title in bold above and its notes below.
pub fn table(table: &Table) -> String {
    let mut text = String::new();
    if !table.title.is_empty() {
        text.push_str(&format!("**{}**\n\n", escape(&table.title)));
    }
    text.push_str(&line(&table.columns));
    let rule = (0..table.columns.len()).map(|index| if table.is_number(index) { "---:" } else { "---" });
    text.push_str(&format!("|{}|\n", rule.collect::<Vec<_>>().join("|")));
    for row in &table.rows {
        text.push_str(&line(row));
    }
    for note in &table.notes {
        text.push_str(&format!("\n{}\n", escape(note)));
    }
    text
}

fn line(cells: &[String]) -> String {
    let cells: Vec<String> = cells.iter().map(|cell| escape(cell)).collect();
    format!("| {} |\n", cells.join(" | "))
}

/// Text that cannot end a cell or start markup.
pub(super) fn escape(text: &str) -> String {
    let mut escaped = String::new();
    for letter in visible(text).chars() {
        match letter {
            '|' | '*' | '_' | '`' | '[' | '\\' => escaped.extend(['\\', letter]),
            '<' => escaped.push_str("&lt;"), // so that nothing reads as the markers of a splice either
            '&' => escaped.push_str("&amp;"),
            '\n' | '\r' | super::wrap::TIED => escaped.push(' '),
            letter => escaped.push(letter),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cells_cannot_break_the_table() {
        let text = table(&Table {
            title: "a_b".into(),
            columns: vec!["model".into(), "1024".into()],
            numbers: 1,
            rows: vec![vec!["x|y".into(), "1\n2".into()]],
            notes: vec!["done".into()],
            ..Table::default()
        });
        assert_eq!(text, "**a\\_b**\n\n| model | 1024 |\n|---|---:|\n| x\\|y | 1 2 |\n\ndone\n");
    }
}
