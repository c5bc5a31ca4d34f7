//! A report as one HTML file that can be explored: one screen of what was run and found, contents, filter, sorting, links from every
//! number to its row and command, values under the pointer, light and dark, any width, print. It refers to no other file and
//! asks no network; without scripts it is still readable.

mod cells;

use std::fmt::Write;

use super::chart::Chart;
use super::document::{Document, Section, Source};
use super::table::Table;
use crate::text::visible;
use cells::Cell;

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
        let id = section_id(index);
        let name = escape(&section.title);
        contents.push_str(&format!("<li><a href=\"#{id}\">{name}</a></li>\n"));
        let summary = section.summary();
        let summary =
            summary.map_or_else(String::new, |text| format!("<p class=\"summary\">{}</p>\n", escape(&text)));
        body.push_str(&format!(
            "<section id=\"{id}\">\n<h2>{name}</h2>\n{summary}{}</section>\n",
            content(section, &id)
        ));
    }
    let overview = overview(document);
    format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <meta name=\"color-scheme\" content=\"light dark\">\n<title>{title}</title>\n<style>\n{STYLE}</style>\n</head>\n\
         <body>\n<header>\n<h1>{title}</h1>\n<div class=\"tools\">\n\
         <input id=\"filter\" type=\"search\" placeholder=\"Filter rows, such as: ls train\" aria-label=\"Filter rows\">\n\
         <output id=\"found\"></output>\n<button id=\"theme\" type=\"button\">Light or dark</button>\n</div>\n</header>\n\
         <nav aria-label=\"Contents\">\n<details id=\"contents\">\n<summary>Contents</summary>\n<ol>\n{contents}</ol>\n</details>\n</nav>\n\
         <main>\n{overview}{body}</main>\n\
         <div id=\"tip\" role=\"status\" hidden></div>\n<script>\n{SCRIPT}</script>\n</body>\n</html>\n"
    )
}

fn section_id(index: usize) -> String {
    format!("s{}", index + 1)
}

/// The first screen: what was run, on what, and what was found.
fn overview(document: &Document) -> String {
    if document.overview.is_empty() && document.headlines.is_empty() {
        return String::new();
    }
    let facts = document.overview.iter();
    let facts = facts.map(|(word, text)| format!("<dt>{}</dt><dd>{}</dd>\n", escape(word), escape(text)));
    let found = document.headlines.iter().map(|headline| {
        let text = escape(&headline.text);
        match headline.section {
            Some(index) => format!("<li>{text} <a href=\"#{}\">rows</a></li>\n", section_id(index)),
            None => format!("<li>{text}</li>\n"),
        }
    });
    let found: String = found.collect();
    let list = if found.is_empty() { String::new() } else { format!("<ol class=\"found\">\n{found}</ol>\n") };
    format!("<div class=\"overview\">\n<dl>\n{}</dl>\n{list}</div>\n", facts.collect::<String>())
}

fn content(section: &Section, id: &str) -> String {
    let mut text = String::new();
    for (index, one) in section.tables.iter().enumerate() {
        text.push_str(&table(one, &format!("{id}-t{}", index + 1), (id, &section.sources)));
    }
    section.charts.iter().for_each(|one| text.push_str(&figure(one)));
    if !section.sources.is_empty() {
        let lines = section.sources.iter().enumerate().map(|(index, source)| {
            let Source { line, command, rows } = source;
            let parts = [(command, "code"), (rows, "code")].into_iter().filter(|(text, _)| !text.is_empty());
            let parts = parts.map(|(text, tag)| format!("<br><{tag}>{}</{tag}>", escape(text)));
            format!(
                "<li id=\"{}\">{}{}</li>\n",
                source_id(id, index),
                escape(line),
                parts.collect::<String>()
            )
        });
        let word = if section.sources.len() == 1 { "The run behind it" } else { "The runs behind it" };
        text.push_str(&format!(
            "<details class=\"from\" id=\"{id}-from\">\n<summary>{word}</summary>\n<ul>\n{}</ul>\n</details>\n",
            lines.collect::<String>()
        ));
    }
    text
}

fn source_id(section: &str, index: usize) -> String {
    format!("{section}-r{}", index + 1)
}

/// Characters of a cell that needs some width.
const LONG: usize = 40;
/// The column whose texts are commands: they stand below the table, where no cell is cut off.
const COMMANDS: &str = "to run";

/// A table whose columns sort and whose cells lead to the run that they come from, or to the command that would fill them.
fn table(table: &Table, id: &str, (section, sources): (&str, &[Source])) -> String {
    let commands = table.columns.iter().position(|name| name == COMMANDS);
    let class = |index| if table.is_number(index) { " class=\"number\"" } else { "" };
    let shown = || (0..table.columns.len()).filter(|index| Some(*index) != commands);
    let head = shown().map(|index| {
        let name = escape(&table.columns[index]);
        format!("<th scope=\"col\"{}><button type=\"button\">{name}</button></th>", class(index))
    });
    let mut text = format!(
        "<div class=\"scroll\" tabindex=\"0\">\n<table id=\"{id}\">\n<caption>{}</caption>\n<thead>\n<tr>{}</tr>\n</thead>\n<tbody>\n",
        escape(&table.title),
        head.collect::<String>()
    );
    let paired = table.title.contains("measured / published");
    for (line, row) in table.rows.iter().enumerate() {
        let command = commands.and_then(|index| row.get(index)).filter(|command| !command.is_empty());
        let links = table.links.get(line);
        let cells = shown().map(|index| {
            let cell = Cell::of(&row[index], paired && index > 0);
            let class =
                if row[index].chars().count() > LONG && !paired { " class=\"words\"" } else { class(index) };
            // of a line whose cells have the same rows only the numbers lead there
            let whole = links.is_some_and(|links| links.len() == 1);
            let link = match links.map(Vec::as_slice) {
                Some([whole]) => *whole,
                Some(links) => links.get(index).copied().flatten(),
                None => None,
            };
            let target = match link.and_then(|link| Some((link, sources.get(link.source)?))) {
                _ if index == 0 || row[index].is_empty() || whole && !table.is_number(index) => None,
                Some((link, _)) => Some((source_id(section, link.source), format!("line {}", link.line))),
                None if command.is_some() && cell.is_open() => {
                    Some((format!("{id}-c{}", line + 1), "command".to_owned()))
                }
                None => match sources {
                    [_] if table.is_number(index) => Some((source_id(section, 0), String::new())),
                    _ => None,
                },
            };
            format!("<td{class}{}>{}</td>", cell.verdict(), cell.html(target))
        });
        text.push_str(&format!("<tr>{}</tr>\n", cells.collect::<String>()));
    }
    text.push_str("</tbody>\n</table>\n</div>\n");
    text.push_str(&command_list(table, id, commands));
    table.notes.iter().for_each(|note| text.push_str(&format!("<p class=\"note\">{}</p>\n", escape(note))));
    text
}

/// The commands that would fill a table's empty cells, line by line.
fn command_list(table: &Table, id: &str, column: Option<usize>) -> String {
    let Some(column) = column else { return String::new() };
    let mut lines = String::new();
    for (line, row) in table.rows.iter().enumerate().filter(|(_, row)| !row[column].is_empty()) {
        let (name, command) = (escape(&row[0]), escape(&row[column]));
        let _ = writeln!(lines, "<li id=\"{id}-c{}\">{name}: <code>{command}</code></li>", line + 1);
    }
    if lines.is_empty() {
        return lines;
    }
    format!(
        "<details class=\"from\">\n<summary>Commands for what was not run</summary>\n<ul>\n{lines}</ul>\n</details>\n"
    )
}

/// Most bytes of data that the page holds for a chart.
const LONGEST_CSV: usize = 256 << 10;

/// A chart in the colours of the page, its data as a file that the page itself holds.
fn figure(chart: &Chart) -> String {
    let svg = chart.svg.find("<svg").map_or(chart.svg.as_str(), |at| &chart.svg[at..]);
    let name = escape(&chart.name);
    let data = match chart.csv.len() {
        0..=LONGEST_CSV => {
            let csv = percent(&chart.csv);
            format!(
                " · <a download=\"{name}.csv\" href=\"data:text/csv;charset=utf-8,{csv}\">data as CSV</a>"
            )
        }
        _ => String::new(), // a file beside the rows has them
    };
    format!("<figure>\n{}<figcaption>{name}{data}</figcaption>\n</figure>\n", themed(svg))
}

/// What paper, ink and greys of a chart are on a page that may be dark.
const THEME: [(&str, &str); 5] = [
    ("#FFFFFF", "var(--paper)"),
    ("#1A1A1A", "currentColor"),
    ("#000000", "currentColor"),
    ("#555555", "var(--soft)"),
    ("#DDDDDD", "var(--line)"),
];

fn themed(svg: &str) -> String {
    let mut text = svg.to_owned();
    for (color, variable) in THEME {
        for attribute in ["fill", "stroke"] {
            text = text.replace(&format!("{attribute}=\"{color}\""), &format!("{attribute}=\"{variable}\""));
        }
    }
    text
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
    use crate::report::document::Headline;
    use crate::report::table::Link;

    fn document() -> Document {
        let texts = |cells: &[&str]| cells.iter().map(|cell| (*cell).to_owned()).collect::<Vec<_>>();
        let plain = Table {
            title: "a < b".into(),
            columns: texts(&["model", "verdict", "bpc"]),
            numbers: 1,
            rows: vec![texts(&["<x>", "worse by 1", "1.0"])],
            notes: vec!["n & m".into()],
            ..Table::default()
        };
        let paper = Table {
            title: "T: measured / published (P)".into(),
            columns: texts(&["model", "ListOps", "Text", "to run"]),
            rows: vec![texts(&["ls", "36.29≈ / 37.50≈ ▼ n=4 (a)", "- / 66.01", "effattn lra"])],
            links: vec![vec![None, Some(Link { source: 1, line: 7 }), None]],
            ..Table::default()
        };
        let svg = "<?xml?><svg><rect fill=\"#FFFFFF\"/><text fill=\"#1A1A1A\"/></svg>\n".into();
        let chart = Chart { name: "c".into(), svg, csv: "a,b\n1 %,\"2\"\n".into() };
        let source = |name: &str| Source {
            line: format!("run <{name}>"),
            command: format!("effattn {name}"),
            rows: format!("{name}/rows.csv"),
        };
        let section = Section {
            title: "T\"".into(),
            tables: vec![plain, paper],
            charts: vec![chart],
            sources: vec![source("1"), source("2")],
            ..Section::default()
        };
        Document {
            title: "All".into(),
            overview: vec![("on what".into(), "a <cpu>".into())],
            headlines: vec![Headline { text: "ls & full".into(), section: Some(0) }],
            sections: vec![section],
        }
    }

    #[test]
    fn text_cannot_become_markup() {
        let text = page(&document());
        let row = "<tr><td>&lt;x&gt;</td><td data-verdict=\"worse\">worse by 1</td><td class=\"number\">1.0</td></tr>";
        assert!(text.contains(row), "{text}");
        assert!(
            text.contains("n &amp; m") && text.contains("run &lt;1&gt;") && text.contains("a &lt;cpu&gt;"),
            "{text}"
        );
        assert!(!text.contains("<x>") && !text.contains("run <1>") && !text.contains("<?xml"));
    }

    #[test]
    fn a_cell_has_two_lines_one_mark_and_leads_to_its_row() {
        let text = page(&document());
        let cell = "<td data-verdict=\"worse\"><a href=\"#s1-r2\" title=\"line 7\"><span class=\"m\">36.29≈ ▼ n=4 (a)</span>\
                    <span class=\"p\">37.50≈</span></a></td>";
        assert!(text.contains(cell), "{text}");
        assert!(
            text.contains(
                "<li id=\"s1-r2\">run &lt;2&gt;<br><code>effattn 2</code><br><code>2/rows.csv</code></li>"
            ),
            "{text}"
        );
        assert!(!STYLE.contains("data-verdict=\"better\"]::before"), "the sign is part of the text");
    }

    #[test]
    fn what_was_not_run_leads_to_its_command_and_takes_no_column() {
        let text = page(&document());
        assert!(!text.contains("to run</button>"), "{text}");
        assert!(text.contains("<a href=\"#s1-t2-c1\" title=\"command\"><span class=\"m\">-</span><span class=\"p\">66.01</span></a>"), "{text}");
        assert!(text.contains("<li id=\"s1-t2-c1\">ls: <code>effattn lra</code></li>"), "{text}");
    }

    #[test]
    fn the_first_screen_says_what_was_run_and_found() {
        let text = page(&document());
        let (first, section) = (text.find("<ol class=\"found\">").unwrap(), text.find("<section").unwrap());
        assert!(
            first < section && text.contains("<li>ls &amp; full <a href=\"#s1\">rows</a></li>"),
            "{text}"
        );
        assert!(text.contains("<p class=\"summary\">Cells: 1 worse, 1 not run.</p>"), "{text}");
    }

    #[test]
    fn a_chart_stands_there_once_in_the_colours_of_the_page() {
        let text = page(&document());
        assert!(text.contains("<rect fill=\"var(--paper)\"/><text fill=\"currentColor\"/>"), "{text}");
        assert_eq!(text.matches("<svg").count(), 1);
        assert!(!STYLE.contains("invert("), "colours keep their meaning");
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
    fn links_lead_to_places_that_are_there_and_what_scripts_use_is_there() {
        let text = page(&document());
        for link in text.split("href=\"#").skip(1) {
            let name = link.split('"').next().unwrap();
            assert_eq!(text.matches(&format!("id=\"{name}\"")).count(), 1, "{name}");
        }
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
        for tag in [
            "section", "table", "figure", "nav", "main", "details", "div", "button", "ul", "ol", "span", "dl",
        ] {
            assert_eq!(tags(tag).0, tags(tag).1, "{tag}");
        }
    }

    #[test]
    fn the_data_of_a_chart_survives_the_link() {
        let text = page(&document());
        assert!(text.contains("href=\"data:text/csv;charset=utf-8,a,b%0A1%20%25,%222%22%0A\""), "{text}");
    }
}
