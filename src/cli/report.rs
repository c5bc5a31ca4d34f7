//! `effattn report`.

mod measured;
mod papers;

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, bail};
use clap::ValueEnum;

use super::curves;
use super::report_overview;
use super::report_suites;
use super::stored_drawings;
use super::stored_runs::{StoredRun, latest_measured, latest_rows, mixed_builds, newest_trained};
use crate::protocol;
use crate::protocol::trained_metrics;
use crate::term::{self, Term};
use effattn_record::config::suite::Suite;
use effattn_record::report::claims;
use effattn_record::report::document::{BEGIN, Document, END, HEADLINES, Headline, Part, Section};
use effattn_record::report::marked_numbers::fill;
use effattn_record::report::table::{Link, Table};
use effattn_record::report::{figures, published, robustness, trained, training_time};
use effattn_record::{Metric, Row, file};

const EXAMPLES: &str = "\
Examples:
  # Everything under results/, as Markdown
  effattn report
  # One self-contained file to explore, with charts
  effattn report -o report.html
  # Update the tables between the markers of README.md
  effattn report --splice README.md";

/// Form of the report.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Format {
    /// Tables in pipe syntax
    Markdown,
    /// One self-contained file
    Html,
}

impl Format {
    /// What the name of the file asks for.
    fn of(path: Option<&Path>) -> Self {
        let ending = path.and_then(Path::extension).map(|ending| ending.to_ascii_lowercase());
        if ending.is_some_and(|ending| ending == "html" || ending == "htm") {
            Self::Html
        } else {
            Self::Markdown
        }
    }
}

#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Folder of results
    #[arg(value_name = "RESULTS", default_value = "results")]
    results: PathBuf,
    /// Only rows of this suite
    #[arg(long, value_name = "NAME")]
    suite: Option<String>,
    /// Output format [default: HTML if --output ends in .html, else Markdown]
    #[arg(long, value_enum)]
    format: Option<Format>,
    /// Output file [default: standard output]
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Leave out measurements that belong to no paper's table
    #[arg(long)]
    brief: bool,
    /// Update this file in place: the Markdown between its markers (which may name a part), and every number marked with its row
    #[arg(long, value_name = "FILE", conflicts_with_all = ["output", "format"])]
    splice: Option<PathBuf>,
}

/// Refuses a report in the place of a file that it is made from.
fn ensure_no_result(path: &Path, runs: &[StoredRun]) -> Result<()> {
    let Ok(place) = path.canonicalize() else { return Ok(()) };
    const FILES: [&str; 6] =
        ["rows.csv", "manifest.json", "journal.jsonl", "plan.json", "samples.jsonl", "cells"];
    let files = |run: &StoredRun| FILES.map(|name| run.folder.join(name));
    if runs.iter().flat_map(files).any(|file| file.canonicalize().is_ok_and(|file| place.starts_with(file))) {
        bail!("-o {} is a file of the results that the report is of; give another name", path.display());
    }
    Ok(())
}

pub fn run(args: &Args, term: &Term) -> Result<u8> {
    let runs = StoredRun::find_all(&args.results)?;
    let suite = args.suite.as_deref().map(|asked| suite_in_rows(asked, &runs)).transpose()?;
    let name = suite.as_ref().map(|(name, _)| name.as_str());
    let document = document(&Stored { runs: &runs, root: &args.results }, name, args.brief)?;
    if document.sections.is_empty() {
        let (what, command) = match &suite {
            Some((name, command)) => (format!(" of suite {name}"), command.clone()),
            None => (String::new(), "speed --quick".to_owned()),
        };
        let results = args.results.display();
        if args.brief && runs.iter().any(|run| !run.rows.is_empty()) && suite.is_none() {
            bail!("no row under {results} belongs to a paper's table; leave --brief out");
        }
        bail!("no rows{what} under {results}; measure first: effattn {command}");
    }
    let format = args.format.unwrap_or_else(|| Format::of(args.output.as_deref()));
    let results = args.results.display();
    if format == Format::Markdown && document.sections.iter().all(|section| section.tables.is_empty()) {
        bail!(
            "{results} has matrices and no rows, and Markdown shows no charts: effattn report {results} -o report.html"
        );
    }
    if let Some(path) = &args.output {
        ensure_no_result(path, &runs)?;
    }
    if let Some(path) = &args.splice {
        let text = file::read_to_string(path).with_context(|| path.display().to_string())?;
        let filled =
            fill(&text, &latest_rows(&runs)).map_err(|error| anyhow!("{}: {error}", path.display()))?;
        let spliced = document.splice(&filled).map_err(|error| anyhow!("{}: {error}", path.display()))?;
        let new = spliced.or_else(|| (filled.contains("<!-- row ")).then_some(filled)).with_context(|| {
            format!(
                "{} has no markers; put {BEGIN} and {END} on lines of their own, or <!-- row METRIC COLUMN=VALUE .2 --><!-- /row -->",
                path.display()
            )
        })?;
        file::write_user_file(path, new.as_bytes()).with_context(|| path.display().to_string())?;
        term.info(&format!("{}: renewed", path.display()));
        return Ok(0);
    }
    let text = match format {
        Format::Markdown => document.markdown(None),
        Format::Html => document.html(),
    };
    match &args.output {
        None => term::data(&text)?,
        Some(path) => {
            file::write_user_file(path, text.as_bytes()).with_context(|| path.display().to_string())?;
            term.info(&format!("report: {}", path.display()));
        }
    }
    Ok(0)
}

/// What rows call the suite that is `asked` for, by its name or its file, and the words that run it. A name that rows have is
/// known without its file.
fn suite_in_rows(asked: &str, runs: &[StoredRun]) -> Result<(String, String)> {
    let mut rows = runs.iter().flat_map(|run| &run.rows);
    let (name, protocol) = match rows.find(|row| row.suite.as_deref() == Some(asked)) {
        Some(row) => (asked.to_owned(), row.protocol.clone()),
        None => Suite::load(asked).map(|suite| (suite.name, suite.protocol))?,
    };
    Ok((name, format!("{protocol} --suite {asked}")))
}

/// Runs and the folder that they were found in.
#[derive(Clone, Copy)]
struct Stored<'a> {
    runs: &'a [StoredRun],
    root: &'a Path,
}

/// Rows of trained models are put together over runs; measurements are shown run by run, the latest of each folder.
fn document(stored: &Stored, suite: Option<&str>, brief: bool) -> Result<Document> {
    let runs = stored.runs;
    let wanted = |row: &&Row| suite.is_none_or(|suite| row.suite.as_deref() == Some(suite));
    let mut document = Document { title: "Measured by effattn".to_owned(), ..Document::default() };
    let drawn = if suite.is_none() && !brief { stored_drawings::sections(stored.root) } else { Vec::new() };
    if !runs.iter().any(|run| run.rows.iter().any(|row| wanted(&row))) {
        document.sections = drawn;
        return Ok(document);
    }
    let rows: Vec<Row> = latest_rows(runs).into_iter().filter(|row| wanted(&row)).collect();
    let judged = claims::judged(&rows);
    if suite.is_none() && judged.iter().any(|claim| claim.finding.is_some()) {
        document.sections.push(Section {
            title: "Claims of both papers".to_owned(),
            part: Part::Findings,
            tables: vec![claims::table(&rows)],
            ..Section::default()
        });
    }
    let (filled, empty) = papers::sections(stored, suite)?;
    document.sections.extend(filled);
    for (title, quick) in [("Trained models", false), ("Trained in quick runs", true)] {
        let chosen: Vec<&StoredRun> =
            runs.iter().filter(|run| run.trained() && run.quick() == quick).collect();
        document.sections.extend(trained(title, (&chosen, stored.root), wanted)?);
    }
    for run in latest_measured(runs) {
        let rows: Vec<Row> = run.rows.iter().filter(wanted).cloned().collect();
        // how far a mechanism reaches in a memory is a claim of a paper's figure
        let reach = rows.iter().any(|row| row.metric == "longest_length");
        let shown = !brief || run.manifest.suite.is_some() || reach;
        if shown && !rows.is_empty() {
            let parts = run.by_machine(rows);
            for rows in &parts {
                document.sections.push(measured::section((run, stored.root), rows, parts.len() > 1, brief)?);
            }
        }
    }
    document.overview = report_overview::overview(&match suite {
        Some(_) => behind(&document.sections, stored),
        None => runs.iter().collect(),
    });
    let composite = Section {
        title: "Figures of the papers".to_owned(),
        part: Part::Findings,
        charts: figures::draw(&rows)?,
        sources: latest_measured(runs).into_iter().map(|run| run.source(stored.root)).collect(),
        ..Section::default()
    };
    if !composite.charts.is_empty() {
        document.sections.push(composite);
    }
    document.sections.extend(drawn);
    // a report of one run is about that run; what else there is to run stands in its last table
    if runs.len() > 1 || suite.is_some() {
        document.sections.extend(empty);
    }
    if !document.sections.is_empty() && suite.is_none() {
        document.sections.push(missing(runs)?);
    }
    document.headlines = headlines(&judged, &document.sections);
    Ok(document)
}

/// The runs that `sections` are made of.
fn behind<'a>(sections: &[Section], stored: &Stored<'a>) -> Vec<&'a StoredRun> {
    let files: HashSet<&str> =
        sections.iter().flat_map(|section| &section.sources).map(|source| source.rows.as_str()).collect();
    let is_behind = |run: &&StoredRun| files.contains(run.source(stored.root).rows.as_str());
    stored.runs.iter().filter(is_behind).collect()
}

/// What was found: claims that rows decide, of both papers by turns; where there are fewer, what the sections' summaries say.
fn headlines(judged: &[claims::JudgedClaim], sections: &[Section]) -> Vec<Headline> {
    let decided = |paper: &'static str| {
        judged
            .iter()
            .filter(move |claim| claim.paper == paper && claim.verdict() != claims::ClaimVerdict::Undecided)
    };
    let (mut first, mut second) = (decided("cosFormer"), decided("Transformer-LS"));
    let mut found = Vec::new();
    loop {
        let pair = [first.next(), second.next()];
        let texts = pair.into_iter().flatten().filter_map(claims::JudgedClaim::sentence);
        let before = found.len();
        found.extend(texts.map(|text| Headline { text, section: Some(0) }));
        if found.len() == before || found.len() >= HEADLINES {
            break;
        }
    }
    let summaries =
        sections.iter().enumerate().filter(|(_, section)| section.tables.iter().any(|table| table.ranks));
    found
        .extend(summaries.filter_map(|(index, section)| {
            Some(Headline { text: section.summary()?, section: Some(index) })
        }));
    found.truncate(HEADLINES);
    found
}

/// Where `row` stands in one of `runs`.
fn stored_at(runs: &[&StoredRun], row: &Row) -> Option<Link> {
    let mut places = runs.iter().enumerate().filter_map(|(source, run)| {
        let index = run.rows.iter().position(|known| known == row)?;
        Some(Link { source, line: index + 2 })
    });
    places.next_back() // the newest
}

/// Fewest training steps of a row that stands beside published numbers.
const FEWEST_STEPS: u64 = 100;

/// Whether so few steps were made that the row only shows that training runs.
fn is_first_look(row: &Row) -> bool {
    let words = row.differs.as_deref().unwrap_or_default().split("; ");
    let steps = words.filter_map(|word| word.strip_prefix("steps ")?.split(' ').next()?.parse::<u64>().ok());
    steps.into_iter().any(|steps| steps < FEWEST_STEPS)
}

/// Trained models of `runs`: of rows alike the newest; those of few steps in a section of their own.
fn trained(
    title: &str,
    (runs, root): (&[&StoredRun], &Path),
    wanted: impl Fn(&&Row) -> bool,
) -> Result<Vec<Section>> {
    let rows = newest_trained(runs.iter().flat_map(|run| &run.rows).filter(|row| wanted(row)));
    let (looks, rows): (Vec<Row>, Vec<Row>) = rows.into_values().cloned().partition(is_first_look);
    let few =
        format!("{title}: fewer than {FEWEST_STEPS} steps, which show that training runs and no accuracy");
    let mut sections = Vec::new();
    for (title, rows) in [(title.to_owned(), rows), (few, looks)] {
        let section = trained_section(title, (runs, root), &rows)?;
        if !section.tables.is_empty() {
            sections.push(section);
        }
    }
    Ok(sections)
}

fn trained_section(title: String, (runs, root): (&[&StoredRun], &Path), rows: &[Row]) -> Result<Section> {
    let behind: Vec<&StoredRun> =
        runs.iter().filter(|run| run.rows.iter().any(|row| rows.contains(row))).copied().collect();
    let mut section = Section { title, part: Part::Trained, ..Section::default() };
    section.sources = behind.iter().map(|run| run.source(root)).collect();
    let belongs = |row: &Row, metric: &Metric| {
        protocol::find(&row.protocol).is_none_or(|protocol| protocol.info().metrics.contains(metric))
    };
    section.tables = trained::tables(rows, &trained_metrics(), belongs);
    if let Some(table) = section.tables.first_mut() {
        table.notes.extend(mixed_builds(&behind));
    }
    section.link(|row| stored_at(&behind, row));
    section.tables.extend(robustness::table(rows));
    section.tables.extend(published::reasons(rows));
    let curves = curves::of_runs(&behind, rows);
    section.tables.extend(curves::fell(&curves));
    section.tables.extend(training_time::table(rows));
    section.charts = curves::charts(&curves)?;
    Ok(section)
}

/// What the papers have and this report does not.
fn missing(runs: &[StoredRun]) -> Result<Section> {
    let columns = ["what", "why it is not here"].map(str::to_owned).to_vec();
    let mut table =
        Table { title: "Tables and figures that have not been run".to_owned(), columns, ..Table::default() };
    let suites = report_suites::shipped()?;
    // with tables of many runs, those of which nothing was run stand above, too
    let tables = suites.iter().filter(|suite| !suite.columns.is_empty() && runs.len() > 1);
    let above: Vec<&str> = tables.flat_map(Suite::runs).collect();
    for suite in suites.iter().filter(|suite| !above.contains(&suite.name.as_str())) {
        let name = suite.name.as_str();
        let rows = || runs.iter().filter(|run| !run.quick()).flat_map(|run| &run.rows);
        if rows().any(|row| row.suite.as_deref() == Some(name)) {
            continue;
        }
        let near = |row: &Row| {
            let of_own_suite =
                row.suite.as_deref().is_some_and(|name| suites.iter().all(|known| known.name != name));
            row.protocol == suite.protocol
                && row.preset == suite.base.preset
                && row.published.is_some()
                && !of_own_suite
        };
        let why = if rows().any(near) { "partial; full table" } else { "not run; full table" };
        let why = format!("{why}: effattn {} --suite {name}", suite.protocol);
        table.rows.push(vec![suite.source.split(':').next().unwrap_or(name).to_owned(), why]);
    }
    Ok(Section {
        title: "Not in this report".to_owned(),
        part: Part::Findings,
        tables: vec![table],
        ..Section::default()
    })
}

#[cfg(test)]
mod tests;
