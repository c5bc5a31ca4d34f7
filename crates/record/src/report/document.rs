//! A report: an overview, what was found, and sections of tables and charts with where their rows come from, as Markdown or as one
//! HTML file.

use super::chart::Chart;
use super::markdown;
use super::paper::verdicts;
use super::table::{Link, Table};
use crate::Row;

/// What a page of a report is about: the pages of a repository show one each.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Part {
    /// What was found, and what has not been run.
    Findings,
    /// Tables and figures of cosFormer.
    CosFormer,
    /// Tables and figures of Transformer-LS.
    TransformerLs,
    /// Recall, state tracking and the mechanisms that came after both papers.
    Mixers,
    /// Every trained model.
    Trained,
    /// Everything else.
    #[default]
    Other,
}

impl Part {
    /// Every part, by its name in the marker of a page.
    const NAMES: [(&str, Self); 6] = [
        ("findings", Self::Findings),
        ("cosformer", Self::CosFormer),
        ("transformer-ls", Self::TransformerLs),
        ("mixers", Self::Mixers),
        ("trained", Self::Trained),
        ("other", Self::Other),
    ];

    /// The part of tables of the suite called `name`.
    pub fn of_suite(name: &str) -> Self {
        match name.split('-').next() {
            Some("cos") => Self::CosFormer,
            Some("ls") => Self::TransformerLs,
            _ => Self::Mixers,
        }
    }
}

/// A run behind a section.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Source {
    /// Machine, versions, data.
    pub line: String,
    /// What was typed.
    pub command: String,
    /// Its rows, below the folder of results.
    pub rows: String,
}

/// Tables and charts that belong together.
#[derive(Clone, Debug, Default)]
pub struct Section {
    /// Heading.
    pub title: String,
    /// The page it belongs to.
    pub part: Part,
    /// Tables.
    pub tables: Vec<Table>,
    /// Charts, which only HTML shows.
    pub charts: Vec<Chart>,
    /// The runs behind it.
    pub sources: Vec<Source>,
}

/// One thing that was found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Headline {
    /// A sentence.
    pub text: String,
    /// Index of the section that shows it.
    pub section: Option<usize>,
}

/// Everything.
#[derive(Clone, Debug, Default)]
pub struct Document {
    /// Heading.
    pub title: String,
    /// What was run and on what: a word and what there is to say.
    pub overview: Vec<(String, String)>,
    /// What was found, the most important first.
    pub headlines: Vec<Headline>,
    /// The sections.
    pub sections: Vec<Section>,
}

/// Most headlines of a report.
pub const HEADLINES: usize = 5;

impl Section {
    /// One sentence: how many cells agree with what is published, or what the first ranking says.
    pub fn summary(&self) -> Option<String> {
        let counts = verdicts(&self.tables);
        if let Some(words) = counts.words() {
            return Some(words);
        }
        self.tables.iter().find(|table| table.ranks).and_then(|table| table.notes.first().cloned())
    }

    /// Links every cell whose rows are known to where `find` says that they stand.
    pub fn link(&mut self, find: impl Fn(&Row) -> Option<Link>) {
        for table in &mut self.tables {
            let of = |rows: &Vec<Row>| rows.iter().find_map(&find);
            let links = table.behind.iter().map(|cells| cells.iter().map(of).collect());
            table.links = links.collect();
        }
    }
}

impl Document {
    /// As Markdown; of one `part` only where one is given.
    pub fn markdown(&self, part: Option<Part>) -> String {
        let mut text = format!("## {}\n", markdown::escape(&self.title));
        if part.is_none_or(|part| part == Part::Findings) {
            let overview = self.overview.iter();
            let lines: Vec<String> = overview
                .map(|(word, what)| format!("- {}: {}\n", markdown::escape(word), markdown::escape(what)))
                .collect();
            let found = self.headlines.iter().enumerate();
            let found = found
                .map(|(index, headline)| format!("{}. {}\n", index + 1, markdown::escape(&headline.text)));
            for block in
                [lines.concat(), found.collect::<String>()].into_iter().filter(|block| !block.is_empty())
            {
                text.push_str(&format!("\n{block}"));
            }
        }
        let wanted = |section: &&Section| part.is_none_or(|part| section.part == part);
        // a section of charts alone would be an empty heading here
        for section in self.sections.iter().filter(wanted).filter(|section| !section.tables.is_empty()) {
            text.push_str(&format!("\n### {}\n\n", markdown::escape(&section.title)));
            text.push_str(
                &section
                    .summary()
                    .map_or_else(String::new, |words| format!("{}\n\n", markdown::escape(&words))),
            );
            let tables: Vec<String> = section.tables.iter().map(markdown::table).collect();
            text.push_str(&tables.join("\n"));
            for source in &section.sources {
                text.push_str(&format!("\n<sub>{}</sub>\n", markdown::escape(&source.line)));
            }
        }
        text
    }

    /// `text` with what stands between its markers renewed, each on a line of its own; nothing without markers. A marker may name the
    /// part that stands there: `<!-- effattn report: begin cosformer -->`.
    ///
    /// # Errors
    /// A marker without its other one, and what is no part's name.
    pub fn splice(&self, text: &str) -> Result<Option<String>, String> {
        let (mut out, mut open, mut found) = (String::new(), None, false);
        for (index, line) in text.split_inclusive('\n').enumerate() {
            let (number, words) = (index + 1, line.trim());
            let begins = words.starts_with(BEGIN_WORDS) && words.ends_with("-->");
            match open {
                Some(begin) if begins => return Err(no_end(begin)),
                Some(_) if words == END => (open, found) = (None, true),
                Some(_) => continue,
                None if words == END => return Err(format!("line {number}: no {BEGIN} in front of {END}")),
                None => {}
            }
            out.push_str(line);
            if begins {
                open = Some(number);
                let text = self.markdown(part(words)?);
                out.push_str(&format!(
                    "{}{}\n",
                    if line.ends_with('\n') { "" } else { "\n" },
                    text.trim_end()
                ));
            }
        }
        match open {
            Some(begin) => Err(no_end(begin)),
            None => Ok(found.then_some(out)),
        }
    }
}

fn no_end(begin: usize) -> String {
    format!("line {begin}: no {END} behind it; everything up to that marker is replaced")
}

/// The part that the marker `begin` names; none for all of them.
fn part(begin: &str) -> Result<Option<Part>, String> {
    let name = begin.trim_start_matches(BEGIN_WORDS).trim_end_matches("-->").trim();
    if name.is_empty() {
        return Ok(None);
    }
    let part = Part::NAMES.iter().find(|(known, _)| *known == name).map(|(_, part)| Some(*part));
    part.ok_or_else(|| {
        let names: Vec<&str> = Part::NAMES.iter().map(|(name, _)| *name).collect();
        format!("a report has no part {name:?}; one of {}, or none for all of it", names.join(", "))
    })
}

/// How the marker in front of what [`Document::splice`] replaces starts; the name of a part may follow.
pub const BEGIN_WORDS: &str = "<!-- effattn report: begin";
/// That marker for all parts.
pub const BEGIN: &str = "<!-- effattn report: begin -->";
/// Behind what [`Document::splice`] replaces.
pub const END: &str = "<!-- effattn report: end -->";

#[cfg(test)]
mod tests {
    use super::*;

    fn document() -> Document {
        let table = |title: &str| Table {
            title: title.to_owned(),
            columns: vec!["model".into(), "bpc".into()],
            numbers: 1,
            rows: vec![vec!["<x>".into(), "1.0".into()]],
            notes: vec!["n & m".into()],
            ..Table::default()
        };
        let chart = Chart { name: "c".into(), svg: "<?xml?><svg></svg>".into(), csv: String::new() };
        let source = Source { line: "cpu".into(), ..Source::default() };
        let sections = [("T", Part::CosFormer), ("U", Part::Other)].map(|(title, part)| Section {
            title: title.into(),
            part,
            tables: vec![table("a < b")],
            charts: vec![chart.clone()],
            sources: vec![source.clone()],
        });
        let headlines = vec![Headline { text: "ls is < full".into(), section: None }];
        let overview = vec![("run".into(), "1 run".into())];
        Document { title: "All".into(), overview, headlines, sections: sections.to_vec() }
    }

    #[test]
    fn text_cannot_become_markup() {
        let text = document().markdown(None);
        assert!(text.contains("| &lt;x> | 1.0 |") && text.contains("<sub>cpu</sub>"), "{text}");
        assert!(text.contains("\n1. ls is &lt; full\n") && text.contains("\n- run: 1 run\n"), "{text}");
    }

    #[test]
    fn only_what_is_between_the_markers_is_replaced() {
        let text = format!("a\n{BEGIN}\nold\n{END}\nb\n");
        let document = document();
        let once = document.splice(&text).unwrap().unwrap();
        assert!(
            once.starts_with(&format!("a\n{BEGIN}\n## All\n")) && once.ends_with(&format!("\n{END}\nb\n")),
            "{once}"
        );
        assert_eq!(document.splice(&once), Ok(Some(once.clone())));
        assert_eq!(document.splice("no markers"), Ok(None));
        assert_eq!(
            document.splice(&format!("{END} {BEGIN}")),
            Ok(None),
            "in the middle of a line it is text"
        );
        let two = format!("a\n{BEGIN}\nold\n{END}\nb\n{BEGIN_WORDS} trained -->\nold\n{END}\n");
        assert_eq!(document.splice(&two).unwrap().unwrap().matches("old").count(), 0, "every pair");
        let told = |text: &str| document.splice(text).unwrap_err();
        let open = format!("a\n{BEGIN}\nprose\n{BEGIN}\nold\n{END}\n");
        assert!(told(&open).starts_with("line 2: no <!-- effattn report: end -->"), "{}", told(&open));
        assert!(told(&format!("{BEGIN}\nprose")).starts_with("line 1: no "));
        assert!(told(&format!("{END}\n{BEGIN}\n{END}")).starts_with("line 1: no "));
    }

    #[test]
    fn a_page_shows_the_part_that_its_marker_names() {
        let page = |name: &str| format!("{BEGIN_WORDS} {name} -->\n{END}\n");
        let document = document();
        let own = document.splice(&page("cosformer")).unwrap().unwrap();
        assert!(own.contains("### T") && !own.contains("### U") && !own.contains("1. ls"), "{own}");
        let findings = document.splice(&page("findings")).unwrap().unwrap();
        assert!(findings.contains("1. ls is") && !findings.contains("###"), "{findings}");
        let wrong = document.splice(&page("cosfromer")).unwrap_err();
        assert!(wrong.contains("no part \"cosfromer\"; one of findings, cosformer,"), "{wrong}");
    }
}
