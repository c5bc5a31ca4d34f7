//! A report: sections of tables and charts with where their rows come from, as Markdown or as one HTML file.

use super::chart::Chart;
use super::markdown;
use super::table::Table;
use crate::record::text::visible;

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
                text.push_str(&format!("\n<sub>{}</sub>\n", html(line)));
            }
        }
        text
    }

    /// As one HTML file without references to others.
    pub fn html(&self) -> String {
        let mut body = format!("<h1>{}</h1>\n", html(&self.title));
        for section in &self.sections {
            body.push_str(&format!("<section>\n<h2>{}</h2>\n", html(&section.title)));
            section.tables.iter().for_each(|table| body.push_str(&html_table(table)));
            for chart in &section.charts {
                let svg = chart.svg.find("<svg").map_or(chart.svg.as_str(), |at| &chart.svg[at..]);
                body.push_str(&format!("<figure>{svg}</figure>\n"));
            }
            for line in &section.provenance {
                body.push_str(&format!("<p class=\"from\">{}</p>\n", html(line)));
            }
            body.push_str("</section>\n");
        }
        format!(
            "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n<title>{}</title>\n<style>\n{STYLE}</style>\n\
             </head>\n<body>\n{body}</body>\n</html>\n",
            html(&self.title)
        )
    }
}

const STYLE: &str = "\
body { font: 16px/1.45 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; color: #1a1a1a; }
table { border-collapse: collapse; margin: 0.5rem 0 1.5rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; padding: 0.3rem 0; }
th, td { padding: 0.2rem 0.7rem; border-bottom: 1px solid #ddd; text-align: left; vertical-align: top; }
.number { text-align: right; }
figure { margin: 1rem 0; }
svg { max-width: 100%; height: auto; }
.from, .note { color: #555; font-size: 0.85rem; }
";

fn html_table(table: &Table) -> String {
    let line = |cells: &[String], tag: &str| {
        let cells = cells.iter().enumerate().map(|(index, cell)| {
            let class = if table.is_number(index) { " class=\"number\"" } else { "" };
            format!("<{tag}{class}>{}</{tag}>", html(cell))
        });
        format!("<tr>{}</tr>\n", cells.collect::<String>())
    };
    let mut text = format!("<table>\n<caption>{}</caption>\n<thead>\n", html(&table.title));
    text.push_str(&line(&table.columns, "th"));
    text.push_str("</thead>\n<tbody>\n");
    table.rows.iter().for_each(|row| text.push_str(&line(row, "td")));
    text.push_str("</tbody>\n</table>\n");
    table.notes.iter().for_each(|note| text.push_str(&format!("<p class=\"note\">{}</p>\n", html(note))));
    text
}

/// Text that cannot start markup.
fn html(text: &str) -> String {
    visible(text).replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
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
        let text = document().html();
        assert!(text.contains("<td>&lt;x&gt;</td><td class=\"number\">1.0</td>"), "{text}");
        assert!(text.contains("<figure><svg></svg></figure>") && text.contains("n &amp; m"));
        assert!(!text.contains("<x>"));
        let text = document().markdown();
        assert!(text.contains("| \\<x> | 1.0 |") && text.contains("<sub>cpu</sub>"), "{text}");
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
