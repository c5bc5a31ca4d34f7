//! `effattn report`.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, bail};
use clap::ValueEnum;

use super::curves;
use super::report_overview;
use super::report_suites;
use super::stored_drawings;
use super::stored_runs::{
    StoredRun, latest_measured, latest_rows, mixed_builds, newest_trained, or_left_out, step_samples,
};
use crate::protocol;
use crate::protocol::definition::ResultView;
use crate::protocol::trained_metrics;
use crate::term::{self, Term};
use effattn_record::config::suite::{BUILTIN_SUITES, Suite};
use effattn_record::report::chart::{Quantity, figure};
use effattn_record::report::claims;
use effattn_record::report::document::{BEGIN, Document, END, HEADLINES, Headline, Part, Section};
use effattn_record::report::marked_numbers::fill;
use effattn_record::report::paper::{Paper, PaperSource, paper};
use effattn_record::report::table::{self, Link, Table};
use effattn_record::report::{
    self, crossing, figures, published, ranking, reference, resident, robustness, spread, trained,
    training_time,
};
use effattn_record::{Metric, Outcome, Row, file};

const EXAMPLES: &str = "\
Examples:
  # Everything under results/, as Markdown
  effattn report
  # One self-contained file to explore, with charts
  effattn report -o report.html
  # Update the tables between the markers of README.md
  effattn report --splice README.md";

/// What stands in the cells of the papers' tables.
const SIGNS: &str = "Each cell is measured / published; n is the number of seeds. = within the spread of the seeds (counts: the same \
                     printed digits), ▲ better, ▼ worse, ○ no conclusion: one seed, or settings that differ from the protocol's, \
                     which the letter names, with the protocol's value in parentheses. ↓ marks a number that is worse than \
                     the floor, the best rule without a transformer on the same examples, ≈ one that is the same within the error of \
                     both. - was not run; the last column has the command that runs it.";

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
    let files = |run: &StoredRun| ["rows.csv", "manifest.json"].map(|name| run.folder.join(name));
    if runs.iter().flat_map(files).any(|file| file.canonicalize().is_ok_and(|file| file == place)) {
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
        bail!("no rows{what} under {}; measure first: effattn {command}", args.results.display());
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
    document.overview = report_overview::overview(runs);
    let judged = claims::judged(&rows);
    if suite.is_none() && judged.iter().any(|claim| claim.finding.is_some()) {
        document.sections.push(Section {
            title: "Claims of both papers".to_owned(),
            part: Part::Findings,
            tables: vec![claims::table(&rows)],
            ..Section::default()
        });
    }
    let (filled, empty) = papers(stored, suite)?;
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
                document.sections.push(measured((run, stored.root), rows, parts.len() > 1, brief)?);
            }
        }
    }
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

/// Every table of the papers in its own form: those of which something was run, and those of which nothing was.
fn papers(stored: &Stored, only: Option<&str>) -> Result<(Vec<Section>, Vec<Section>)> {
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

/// Tables and charts of one run of `speed` or `memory`; of one of its machines, where they stand `apart`.
fn measured((run, root): (&StoredRun, &Path), rows: &[Row], apart: bool, brief: bool) -> Result<Section> {
    let rows = &begun(rows);
    let suite = run.manifest.suite.as_deref();
    let name = rows.first().and_then(|row| row.suite.clone());
    let suite = match (name, suite) {
        // what a shipped suite says of its table is as true of older runs
        (Some(name), Some(_)) if !run.quick() && BUILTIN_SUITES.iter().any(|(known, _)| *known == name) => {
            Some(Suite::load(&name)?)
        }
        // a suite of one's own may be of a version that reads it otherwise
        (Some(name), Some(text)) if !run.quick() => {
            let read = Suite::parse(&format!("{name}.toml"), text).map(Some);
            let named = || format!("the suite in {}", run.folder.join("manifest.json").display());
            or_left_out(read.map_err(anyhow::Error::from).with_context(named), "its table")
        }
        _ => None,
    };
    let reach = rows.iter().any(|row| row.metric == "longest_length");
    let part = match &suite {
        Some(suite) => Part::of_suite(&suite.name),
        None if reach => Part::TransformerLs, // a claim of its Figure 3
        None => Part::Other,
    };
    let title = match &suite {
        Some(suite) => {
            let typed = run.typed(&["--suite"]);
            if typed.is_empty() { suite.title.clone() } else { format!("{}: {typed}", suite.title) }
        }
        None => format!("{} {}", run.manifest.command, run.typed(&[])).trim_end().to_owned(),
    };
    // ratios lead: they compare, whatever the machine
    let mut tables: Vec<Table> = ranking::rankings(rows, None);
    let protocol = protocol::find(&run.manifest.command);
    match (&suite, protocol.filter(|protocol| protocol.view() == ResultView::Plain)) {
        (_, Some(protocol)) => {
            tables.push(table::plain(protocol.info().about, rows, protocol.info().metrics))
        }
        (Some(suite), None) => tables.extend(published::tables(rows, suite)),
        (None, None) => {
            for quantity in Quantity::TABLES {
                tables.extend(figure(rows, quantity).iter().flat_map(table::growth));
            }
        }
    }
    tables.extend(published::longest(rows));
    tables.extend(crossing::table(rows).filter(|_| !brief));
    let known =
        reference::read(&run.folder).with_context(|| run.folder.join(reference::FILE).display().to_string());
    let known = or_left_out(known, "the times of other programs");
    let references = reference::with_programs(rows, &known);
    tables.extend(reference::tables(rows, &references));
    tables.extend(resident::table(rows));
    tables.extend(published::reasons(rows));
    let samples = or_left_out(step_samples(&run.folder), "percentiles of steps");
    tables.extend(spread::percentiles(&samples).filter(|_| !brief));
    let charts = report::measured(rows, &references, &run.manifest.id)?;
    let quick = if run.quick() { " (a quick run)" } else { "" };
    let machine = rows.first().and_then(|row| row.machine.as_deref()).filter(|_| apart);
    let machine = machine.map_or_else(String::new, |machine| format!(" on {machine}"));
    let title = format!("{title}{quick}{machine}");
    Ok(Section { title, part, tables, charts, sources: vec![run.source(root)] })
}

/// Rows without the lengths that a stopped run has not come to: all of them where it came to none.
fn begun(rows: &[Row]) -> Vec<Row> {
    let open = |row: &Row| matches!(row.outcome, Outcome::Interrupted | Outcome::Planned);
    let place = |row: &Row| (row.pass, row.batch, row.len);
    let reached: Vec<_> = rows.iter().filter(|row| !open(row)).map(place).collect();
    let all = reached.is_empty();
    rows.iter().filter(|row| all || reached.contains(&place(row))).cloned().collect()
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
            row.protocol == suite.protocol && row.preset == suite.base.preset && row.published.is_some()
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
