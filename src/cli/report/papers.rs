//! The tables of the papers in their own form.

use anyhow::Result;

use super::{Stored, is_first_look, stored_at};
use crate::cli::report_suites;
use crate::cli::stored_runs::{StoredRun, latest_rows, mixed_builds};
use crate::protocol::trained_metrics;
use effattn_record::Row;
use effattn_record::config::suite::Suite;
use effattn_record::report::document::{Part, Section};
use effattn_record::report::paper::{Paper, PaperSource, paper};

/// What stands in the cells of the papers' tables.
const SIGNS: &str = "Each cell is measured / published; n is the number of seeds. = within the spread of the seeds (counts: the same \
                     printed digits), ▲ better, ▼ worse, ○ no conclusion: one seed, or settings that differ from the protocol's, \
                     which the letter names, with the protocol's value in parentheses. ↓ marks a number that is worse than \
                     the floor, the best rule without a transformer on the same examples, ≈ one that is the same within the error of \
                     both. - was not run; the last column has the command that runs it.";

/// Every table of the papers in its own form: those of which something was run, and those of which nothing was.
pub fn sections(stored: &Stored, only: Option<&str>) -> Result<(Vec<Section>, Vec<Section>)> {
    let Stored { runs, root } = *stored;
    // a look at whether something runs stands beside no published number
    let rows: Vec<Row> = latest_rows(runs).into_iter().filter(|row| !is_first_look(row)).collect();
    let metrics = trained_metrics();
    let (mut filled, mut empty) = (Vec::new(), Vec::new());
    let mut suites = report_suites::shipped()?;
    suites.extend(report_suites::own(runs));
    let asked = |suite: &&Suite| only.is_none_or(|only| suite.runs().any(|name| name == only));
    let mut shown: Vec<&Suite> =
        suites.iter().filter(|suite| !suite.columns.is_empty()).filter(asked).collect();
    // stand-ins, which have no published numbers, follow the papers' own tables
    shown.sort_by_key(|suite| suite.rows.iter().all(|row| row.published.is_empty()));
    for suite in shown {
        // the suite itself comes first
        let parts: Vec<&Suite> =
            suite.runs().filter_map(|name| suites.iter().find(|suite| suite.name == name)).collect();
        let plans: Vec<Vec<Vec<Row>>> =
            parts.iter().map(|suite| report_suites::planned(suite)).collect::<Result<_>>()?;
        let mut sources: Vec<PaperSource> = (parts.iter().zip(&plans))
            .map(|(suite, planned)| PaperSource {
                suite,
                planned,
                rows: &rows,
                metrics: &metrics,
                others: &[],
            })
            .collect();
        let own = sources.remove(0);
        let source = PaperSource { others: &sources, ..own };
        let Some(Paper { ratios, mut table, used }) = paper(&source) else { continue };
        let of = |run: &&StoredRun| run.rows.iter().any(|row| used.contains(row));
        let behind: Vec<&StoredRun> = runs.iter().filter(of).collect();
        table.notes.extend(mixed_builds(&behind));
        let sources = behind.iter().map(|run| run.source(root)).collect();
        let title = capital(suite.source.split(':').next().unwrap_or(&suite.name));
        let tables = ratios.into_iter().chain([table]).collect();
        let mut section =
            Section { title, part: Part::of_suite(&suite.name), tables, sources, ..Section::default() };
        section.link(|row| stored_at(&behind, row));
        if used.is_empty() { empty.push(section) } else { filled.push(section) }
    }
    // on the first table of every page
    let mut explained: Vec<Part> = Vec::new();
    for section in filled.iter_mut().chain(&mut empty).filter(|section| !section.tables.is_empty()) {
        if !explained.contains(&section.part) {
            explained.push(section.part);
            section.tables.last_mut().into_iter().for_each(|table| table.notes.insert(0, SIGNS.to_owned()));
        }
    }
    Ok((filled, empty))
}

/// `text` as a heading: an article in front of it has a capital.
fn capital(text: &str) -> String {
    match text.split_once(' ') {
        Some((article @ ("a" | "an" | "the" | "our"), rest)) => {
            format!("{}{} {rest}", article[..1].to_uppercase(), &article[1..])
        }
        _ => text.to_owned(),
    }
}
