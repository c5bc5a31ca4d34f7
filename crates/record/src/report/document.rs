//! A report: sections of tables and charts with where their rows come from, as Markdown or as one HTML file.

use super::chart::Chart;
use super::markdown;
use super::table::Table;

/// Tables and charts that belong together.
#[derive(Clone, Debug, Default)]
pub struct Section {
    /// Heading.
    pub title: String,
    /// Tables.
    pub tables: Vec<Table>,
    /// Charts, which only HTML shows.
    pub charts: Vec<Chart>,
    /// Machine, versions, data: a line per run.
    pub provenance: Vec<String>,
}

/// Everything.
#[derive(Clone, Debug, Default)]
pub struct Document {
    /// Heading.
    pub title: String,
    /// The sections.
    pub sections: Vec<Section>,
}

impl Document {
    /// As Markdown.
    pub fn markdown(&self) -> String {
        let mut text = format!("## {}\n", markdown::escape(&self.title));
        // a section of charts alone would be an empty heading here
        for section in self.sections.iter().filter(|section| !section.tables.is_empty()) {
            text.push_str(&format!("\n### {}\n\n", markdown::escape(&section.title)));
            let tables: Vec<String> = section.tables.iter().map(markdown::table).collect();
            text.push_str(&tables.join("\n"));
            for line in &section.provenance {
                text.push_str(&format!("\n<sub>{}</sub>\n", markdown::escape(line)));
            }
        }
        text
    }
}

/// `text` with everything between the two markers replaced by `content`; nothing without both markers in order.
pub fn splice(text: &str, content: &str) -> Option<String> {
    let start = line(text, BEGIN)? + BEGIN.len();
    let end = start + line(&text[start..], END)?;
    Some(format!("{}\n{}\n{}", &text[..start], content.trim_end(), &text[end..]))
}

/// Where `marker` stands on a line of its own: in the middle of one it is text.
fn line(text: &str, marker: &str) -> Option<usize> {
    let alone = |at: usize| {
        let (before, after) = (&text[..at], &text[at + marker.len()..]);
        let blank = |text: &str| text.trim().is_empty();
        blank(before.rsplit('\n').next().unwrap_or("")) && blank(after.split('\n').next().unwrap_or(""))
    };
    text.match_indices(marker).map(|(at, _)| at).find(|at| alone(*at))
}

/// In front of what [`splice`] replaces.
pub const BEGIN: &str = "<!-- effattn report: begin -->";
/// Behind what [`splice`] replaces.
pub const END: &str = "<!-- effattn report: end -->";

#[cfg(test)]
mod tests {
    use super::*;

    fn document() -> Document {
        let table = Table {
            title: "a < b".into(),
            columns: vec!["model".into(), "bpc".into()],
            numbers: 1,
            rows: vec![vec!["<x>".into(), "1.0".into()]],
            notes: vec!["n & m".into()],
            ..Table::default()
        };
        let chart = Chart { name: "c".into(), svg: "<?xml?><svg></svg>".into(), csv: String::new() };
        let section = Section {
            title: "T".into(),
            tables: vec![table],
            charts: vec![chart],
            provenance: vec!["cpu".into()],
        };
        Document { title: "All".into(), sections: vec![section] }
    }

    #[test]
    fn text_cannot_become_markup() {
        let text = document().markdown();
        assert!(text.contains("| &lt;x> | 1.0 |") && text.contains("<sub>cpu</sub>"), "{text}");
    }

    #[test]
    fn only_what_is_between_the_markers_is_replaced() {
        let text = format!("a\n{BEGIN}\nold\n{END}\nb\n");
        let once = splice(&text, "new\n").unwrap();
        assert_eq!(once, format!("a\n{BEGIN}\nnew\n{END}\nb\n"));
        assert_eq!(splice(&once, "new\n").unwrap(), once);
        assert_eq!(splice("no markers", "new"), None);
        assert_eq!(splice(&format!("{END} {BEGIN}"), "new"), None);
    }
}
