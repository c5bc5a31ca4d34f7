//! A report as one HTML file that can be explored: contents, filter, sorting, values under the pointer, light and dark,
//! any width, print. It refers to no other file and asks no network; without scripts it is still readable.

use super::chart::Chart;
use super::document::{Document, Section};
use super::paper;
use super::table::Table;
use crate::text::visible;

/// How it looks.
const STYLE: &str = include_str!("style.css");
/// What it does.
const SCRIPT: &str = include_str!("script.js");

impl Document {
    /// As one HTML file without references to others.
    pub fn html(&self) -> String {
        page(self)
    }
}

fn page(document: &Document) -> String {
    let title = escape(&document.title);
    let mut contents = String::new();
    let mut body = String::new();
    for (index, section) in document.sections.iter().enumerate() {
        let id = format!("s{}", index + 1);
        let name = escape(&section.title);
        contents.push_str(&format!("<li><a href=\"#{id}\">{name}</a></li>\n"));
        body.push_str(&format!(
            "<section id=\"{id}\">\n<h2>{name}</h2>\n{}</section>\n",
            content(section, &id)
        ));
    }
    format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <meta name=\"color-scheme\" content=\"light dark\">\n<title>{title}</title>\n<style>\n{STYLE}</style>\n</head>\n\
         <body>\n<header>\n<h1>{title}</h1>\n<div class=\"tools\">\n\
         <input id=\"filter\" type=\"search\" placeholder=\"Filter rows, such as: ls train\" aria-label=\"Filter rows\">\n\
         <output id=\"found\"></output>\n<button id=\"theme\" type=\"button\">Light or dark</button>\n</div>\n</header>\n\
         <nav id=\"contents\" aria-label=\"Contents\">\n<ol>\n{contents}</ol>\n</nav>\n<main>\n{body}</main>\n\
         <div id=\"tip\" role=\"status\" hidden></div>\n<script>\n{SCRIPT}</script>\n</body>\n</html>\n"
    )
}

fn content(section: &Section, id: &str) -> String {
    let from = section.provenance.join("\n");
    let mut text = String::new();
    for (index, one) in section.tables.iter().enumerate() {
        text.push_str(&table(one, &format!("{id}-t{}", index + 1), &from));
    }
    section.charts.iter().for_each(|one| text.push_str(&figure(one, &from)));
    if !section.provenance.is_empty() {
        let lines = section.provenance.iter().map(|line| format!("<li>{}</li>\n", escape(line)));
        text.push_str(&format!(
            "<details class=\"from\" open>\n<summary>Where the numbers come from</summary>\n<ul>\n{}</ul>\n</details>\n",
            lines.collect::<String>()
        ));
    }
    text
}

/// Characters of a cell that needs some width.
const LONG: usize = 40;

/// A table whose columns sort and whose rows say where they come from.
fn table(table: &Table, id: &str, from: &str) -> String {
    let class = |index| if table.is_number(index) { " class=\"number\"" } else { "" };
    let head = table.columns.iter().enumerate().map(|(index, name)| {
        format!("<th scope=\"col\"{}><button type=\"button\">{}</button></th>", class(index), escape(name))
    });
    let mut text = format!(
        "<div class=\"scroll\" tabindex=\"0\">\n<table id=\"{id}\" data-from=\"{}\">\n<caption>{}</caption>\n<thead>\n<tr>{}</tr>\n\
         </thead>\n<tbody>\n",
        escape(from),
        escape(&table.title),
        head.collect::<String>()
    );
    for row in &table.rows {
        let cells = row.iter().enumerate().map(|(index, cell)| {
            let mark = verdict(cell).map_or_else(String::new, |word| format!(" data-verdict=\"{word}\""));
            // a column of sentences would be squeezed to its longest word
            let class = if cell.chars().count() > LONG { " class=\"words\"" } else { class(index) };
            format!("<td{class}{mark}>{}</td>", escape(cell))
        });
        text.push_str(&format!("<tr>{}</tr>\n", cells.collect::<String>()));
    }
    text.push_str("</tbody>\n</table>\n</div>\n");
    table.notes.iter().for_each(|note| text.push_str(&format!("<p class=\"note\">{}</p>\n", escape(note))));
    text
}

/// Verdicts have a colour and a sign.
fn verdict(cell: &str) -> Option<&'static str> {
    let starts = |words: &[&str]| words.iter().any(|word| cell.starts_with(word));
    match cell {
        _ if ends(cell, paper::SAME) => Some("same"),
        _ if ends(cell, paper::BETTER) => Some("better"),
        _ if ends(cell, paper::WORSE) => Some("worse"),
        _ if ends(cell, paper::OPEN) => Some("open"),
        _ if starts(&["within spread", "no difference"]) => Some("same"),
        _ if starts(&["better", "faster", "less memory"]) => Some("better"),
        _ if starts(&["worse", "slower", "more memory"]) => Some("worse"),
        _ if starts(&["not comparable", "nothing published"]) => Some("open"),
        _ => None,
    }
}

/// Whether `cell` of a paper's table has this sign.
fn ends(cell: &str, sign: &str) -> bool {
    cell.contains(" / ") && cell.split(' ').any(|word| word == sign)
}

/// A chart, its data as a file that the page itself holds.
fn figure(chart: &Chart, from: &str) -> String {
    let svg = chart.svg.find("<svg").map_or(chart.svg.as_str(), |at| &chart.svg[at..]);
    let name = escape(&chart.name);
    format!(
        "<figure data-from=\"{}\">\n{svg}<figcaption>{name} · <a download=\"{name}.csv\" href=\"data:text/csv;charset=utf-8,{}\">\
         data as CSV</a></figcaption>\n</figure>\n",
        escape(from),
        percent(&chart.csv)
    )
}

/// Text in a URL.
fn percent(text: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.,:/".contains(&byte);
    let mut encoded = String::with_capacity(text.len());
    for byte in text.bytes() {
        match plain(byte) {
            true => encoded.push(char::from(byte)),
            false => encoded.push_str(&format!("%{byte:02X}")),
        }
    }
    encoded
}

/// Text that cannot start markup.
fn escape(text: &str) -> String {
    visible(text).replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn document() -> Document {
        let texts = |cells: &[&str]| cells.iter().map(|cell| (*cell).to_owned()).collect::<Vec<_>>();
        let table = Table {
            title: "a < b".into(),
            columns: texts(&["model", "verdict", "bpc"]),
            numbers: 1,
            rows: vec![texts(&["<x>", "worse by 1", "1.0"])],
            notes: vec!["n & m".into()],
            ..Table::default()
        };
        let chart =
            Chart { name: "c".into(), svg: "<?xml?><svg></svg>\n".into(), csv: "a,b\n1 %,\"2\"\n".into() };
        let section = Section {
            title: "T\"".into(),
            tables: vec![table],
            charts: vec![chart],
            provenance: vec!["run <1>".into()],
        };
        Document { title: "All".into(), sections: vec![section] }
    }

    #[test]
    fn text_cannot_become_markup() {
        let text = page(&document());
        let row = "<tr><td>&lt;x&gt;</td><td data-verdict=\"worse\">worse by 1</td><td class=\"number\">1.0</td></tr>";
        assert!(text.contains(row), "{text}");
        assert!(text.contains("n &amp; m") && text.contains("data-from=\"run &lt;1&gt;\""), "{text}");
        assert!(!text.contains("<x>") && !text.contains("run <1>") && !text.contains("<?xml"));
    }

    #[test]
    fn one_file_without_the_network_on_any_screen() {
        let text = page(&document());
        assert!(text.contains("name=\"viewport\" content=\"width=device-width, initial-scale=1\""));
        for outside in ["src=", "href=\"http", "url(", "@import", "<link", "fetch(", "XMLHttpRequest"] {
            assert!(!text.contains(outside), "{outside}");
        }
        assert!(STYLE.contains("@media print") && STYLE.contains("prefers-color-scheme: dark"));
    }

    #[test]
    fn contents_lead_to_sections_and_what_scripts_use_is_there() {
        let text = page(&document());
        assert!(
            text.contains("<a href=\"#s1\">T&quot;</a>") && text.contains("<section id=\"s1\">"),
            "{text}"
        );
        let mut rest = SCRIPT;
        let mut asked = 0;
        while let Some(at) = rest.find("byId('") {
            let name = rest[at + 6..].split('\'').next().unwrap();
            assert!(text.contains(&format!("id=\"{name}\"")), "{name}");
            (rest, asked) = (&rest[at + 6..], asked + 1);
        }
        assert!(asked >= 4);
        let tags = |tag: &str| {
            (text.matches(&format!("<{tag}")).count(), text.matches(&format!("</{tag}>")).count())
        };
        for tag in ["section", "table", "figure", "nav", "main", "details", "div", "button", "ul", "ol"] {
            assert_eq!(tags(tag).0, tags(tag).1, "{tag}");
        }
    }

    #[test]
    fn the_data_of_a_chart_survives_the_link() {
        let text = page(&document());
        assert!(text.contains("href=\"data:text/csv;charset=utf-8,a,b%0A1%20%25,%222%22%0A\""), "{text}");
    }
}
