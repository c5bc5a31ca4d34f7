//! `effattn check`: golden files against this build.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use super::export::Exports;
use super::{FAILED, USAGE, finish};
use crate::protocol::check::{CheckError, FileVerdict, Golden, builtin, check_bytes};
use crate::run::manifest::Manifest;
use crate::run::plan::Plan;
use crate::term::Term;
use effattn_kernel::device::{Backend, threads};
use effattn_kernel::{KernelMode, with_mode};
use effattn_model::attention::choose::choose;
use effattn_record::config::lists::Models;
use effattn_record::config::settings::{DeviceName, KernelName};
use effattn_record::report::table::Table;
use effattn_record::{Outcome, Row, file};

/// Largest golden file that is read.
const LARGEST: u64 = 1 << 30;

const EXAMPLES: &str = "\
Examples:
  # Every mechanism against the files in this program
  effattn check
  # A folder and its subfolders
  effattn check --golden golden --model ls,full
  # The plain operations, with a line per file
  effattn check --kernel composed -v";

#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Folder of golden files [default: the built-in set]
    #[arg(long, value_name = "DIR")]
    golden: Option<PathBuf>,
    /// Mechanisms whose files are checked: full,ls or 'ls*'
    #[arg(long, value_name = "LIST")]
    model: Option<Models>,
    /// Mechanisms to leave out
    #[arg(long, value_name = "LIST")]
    exclude: Option<Models>,
    /// cpu, cuda, cuda:1 or metal
    #[arg(long, value_name = "DEVICE", default_value = "cpu")]
    device: DeviceName,
    /// fused or composed
    #[arg(long, value_name = "KIND", default_value = "fused")]
    kernel: KernelName,
    /// CPU threads [default: all cores]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1024))]
    threads: Option<u64>,
    #[command(flatten)]
    exports: Exports,
}

/// What came of one file.
struct FileResult {
    row: Row,
    /// Not a golden file at all.
    foreign: bool,
}

pub fn run(args: &Args, mut term: Term) -> Result<u8> {
    args.exports.check()?;
    for models in [&args.model, &args.exclude].into_iter().flatten() {
        choose(models)?;
    }
    let count = args.threads.map_or_else(threads::available, |count| count as usize);
    threads::set(count);
    let backend = Backend::open(args.device)?;
    let mode = match args.kernel {
        KernelName::Fused => KernelMode::Fused,
        KernelName::Composed => KernelMode::Composed,
    };
    let sources = sources(args.golden.as_deref())?;
    term.start_progress(sources.len() as f64);
    let mut done = Vec::new();
    for source in &sources {
        let name = source.name();
        let bytes = source.bytes();
        let checked = match bytes {
            Err(error) => Some(not_golden(&name, format!("{name} cannot be read: {error}"))),
            Ok(bytes) => with_mode(mode, || one(&name, &bytes, args, backend.device())),
        };
        let Some(FileResult { row, foreign }) = checked else { continue };
        let row = Row {
            device: args.device.to_string(),
            kernel: args.kernel.to_string(),
            threads: Some(count as u64),
            ..row
        };
        term.at(&name);
        term.advance(1.0, "");
        term.detail(&line(&row));
        done.push(FileResult { row, foreign });
    }
    term.finish_progress();
    if done.is_empty() {
        bail!("no golden file covers these mechanisms; choose another --model or --exclude");
    }
    report(&done, args, count, &term)
}

fn report(done: &[FileResult], args: &Args, threads: usize, term: &Term) -> Result<u8> {
    let rows: Vec<Row> = done.iter().map(|checked| checked.row.clone()).collect();
    for checked in done.iter().filter(|checked| checked.foreign) {
        term.error(checked.row.error.as_deref().unwrap_or("not a golden file"));
    }
    let tables: Vec<Table> = std::iter::once(table(&rows)).chain(red(&rows)).collect();
    finish::print_tables(&tables, &args.exports, term)?;
    let plan = Plan {
        name: "check".to_owned(),
        command: "check".to_owned(),
        argv: crate::run::manifest::argv(),
        threads,
        device: args.device.to_string(),
        ..Plan::default()
    };
    let manifest = serde_json::to_value(Manifest::new(&plan, "check"))?;
    args.exports.write(&manifest, &rows, &tables)?;
    if done.iter().any(|checked| checked.foreign) {
        return Ok(USAGE);
    }
    // a file that this version cannot check proves nothing
    Ok(if rows.iter().all(|row| row.outcome == Outcome::Ok) { 0 } else { FAILED })
}

/// Where a golden file comes from.
enum GoldenSource {
    Shipped(&'static str, &'static [u8]),
    File { path: PathBuf, name: String },
}

impl GoldenSource {
    fn name(&self) -> String {
        match self {
            Self::Shipped(name, _) => (*name).to_owned(),
            Self::File { name, .. } => name.clone(),
        }
    }

    fn bytes(&self) -> io::Result<Vec<u8>> {
        match self {
            Self::Shipped(_, bytes) => Ok(bytes.to_vec()),
            Self::File { path, .. } => {
                if fs::metadata(path)?.len() > LARGEST {
                    return Err(io::Error::other(format!("it is larger than {LARGEST} bytes")));
                }
                file::read(path)
            }
        }
    }
}

/// The shipped files, or every safetensors file below `golden` in alphabetical order.
fn sources(golden: Option<&Path>) -> Result<Vec<GoldenSource>> {
    let Some(folder) = golden else {
        return Ok(builtin::BUILTIN_FILES
            .iter()
            .map(|(name, bytes)| GoldenSource::Shipped(name, bytes))
            .collect());
    };
    if !folder.is_dir() {
        bail!("--golden {} is not a folder; give one with .safetensors files", folder.display());
    }
    let mut files = Vec::new();
    walk(folder, folder, &mut files)?;
    files.sort();
    if files.is_empty() {
        bail!("--golden {} contains no .safetensors file, nor do its subfolders", folder.display());
    }
    Ok(files.into_iter().map(|(name, path)| GoldenSource::File { path, name }).collect())
}

fn walk(root: &Path, folder: &Path, files: &mut Vec<(String, PathBuf)>) -> Result<()> {
    let unreadable = || format!("{} cannot be read", folder.display());
    for item in fs::read_dir(folder).with_context(unreadable)? {
        let item = item.with_context(unreadable)?;
        let (path, kind) = (item.path(), item.file_type().with_context(unreadable)?);
        if kind.is_dir() {
            walk(root, &path, files)?;
        } else if path.extension().is_some_and(|extension| extension == "safetensors") {
            let name = path.strip_prefix(root).unwrap_or(&path).to_string_lossy().into_owned();
            files.push((name, path));
        }
    }
    Ok(())
}

/// The row of one file; none if it is about another mechanism than asked.
fn one(name: &str, bytes: &[u8], args: &Args, device: &candle_core::Device) -> Option<FileResult> {
    let golden = match Golden::read(name, bytes) {
        Ok(golden) => golden,
        Err(error) => return Some(not_golden(name, error.to_string())),
    };
    let mechanism = golden.meta("mechanism").to_owned();
    let among = |models: &Models| models.0.iter().any(|variant| variant.matches(&mechanism));
    if args.model.as_ref().is_some_and(|models| !among(models)) || args.exclude.as_ref().is_some_and(among) {
        return None;
    }
    drop(golden);
    let row = Row { variant: Some(stem(name)), ..Row::new("check", &mechanism) };
    let checked = |row: Row| Some(FileResult { row, foreign: false });
    match check_bytes(name, bytes, device) {
        Ok(verdict) => checked(of_verdict(&row, &verdict)),
        Err(error @ CheckError::NotGolden { .. }) => Some(not_golden(name, error.to_string())),
        Err(error @ CheckError::UnknownMechanism { .. }) => {
            checked(ratio(&row, None).with_outcome(Outcome::Unsupported, Some(error.to_string())))
        }
        Err(error) => checked(ratio(&row, None).with_outcome(Outcome::Failed, Some(error.to_string()))),
    }
}

fn stem(name: &str) -> String {
    name.strip_suffix(".safetensors").unwrap_or(name).to_owned()
}

fn ratio(row: &Row, value: Option<f64>) -> Row {
    row.with("error_over_tolerance", "1", value)
}

fn of_verdict(row: &Row, verdict: &FileVerdict) -> Row {
    let row = ratio(row, Some(verdict.error_over_tolerance));
    if verdict.passed() {
        return row.with_outcome(Outcome::Ok, None);
    }
    let reason = verdict.problem.clone().unwrap_or_else(|| {
        format!("{} is off by {:.3} times its tolerance", verdict.worst, verdict.error_over_tolerance)
    });
    row.with_outcome(Outcome::Failed, Some(reason))
}

fn not_golden(name: &str, reason: String) -> FileResult {
    let row = Row { variant: Some(stem(name)), ..Row::new("check", "") };
    FileResult { row: ratio(&row, None).with_outcome(Outcome::Failed, Some(reason)), foreign: true }
}

fn line(row: &Row) -> String {
    let name = row.variant.as_deref().unwrap_or_default();
    match (&row.error, row.value) {
        (Some(error), _) => format!("{name}: {}: {error}", row.outcome),
        (None, value) => format!("{name}: {} ({:.3} of the tolerance)", row.outcome, value.unwrap_or(0.0)),
    }
}

/// One line per mechanism.
fn table(rows: &[Row]) -> Table {
    let green = rows.iter().filter(|row| row.outcome == Outcome::Ok).count();
    let mut table = Table {
        title: format!("{green} of {} golden files are green", rows.len()),
        columns: ["mechanism", "worst file", "files", "green", "red", "error / tolerance"]
            .map(str::to_owned)
            .to_vec(),
        numbers: 4,
        ..Table::default()
    };
    let mut models: Vec<&str> = rows.iter().map(|row| row.model.as_str()).collect();
    models.sort_unstable();
    models.dedup();
    for model in models {
        let here: Vec<&Row> = rows.iter().filter(|row| row.model == model).collect();
        let count = |outcome| here.iter().filter(|row| row.outcome == outcome).count();
        let worst = here.iter().filter(|row| row.value.is_some());
        let worst = worst.max_by(|a, b| a.value.unwrap_or(0.0).total_cmp(&b.value.unwrap_or(0.0)));
        table.rows.push(vec![
            if model.is_empty() { "(not golden)".to_owned() } else { model.to_owned() },
            worst.and_then(|row| row.variant.clone()).unwrap_or_else(|| "-".to_owned()),
            here.len().to_string(),
            count(Outcome::Ok).to_string(),
            count(Outcome::Failed).to_string(),
            worst.and_then(|row| row.value).map_or_else(|| "-".to_owned(), |value| format!("{value:.3}")),
        ]);
    }
    let skipped = rows.iter().filter(|row| row.outcome == Outcome::Unsupported).count();
    if skipped > 0 {
        table.notes.push(format!(
            "{skipped} files are about something that this version does not have and were not checked; see -v"
        ));
    }
    table
}

/// The red files and what is wrong with them.
fn red(rows: &[Row]) -> Option<Table> {
    let red = rows.iter().filter(|row| row.outcome == Outcome::Failed && !row.model.is_empty());
    let lines: Vec<Vec<String>> = red
        .map(|row| vec![row.variant.clone().unwrap_or_default(), row.error.clone().unwrap_or_default()])
        .collect();
    let columns = ["file", "what is wrong"].map(str::to_owned).to_vec();
    let table = Table { title: "Red".to_owned(), columns, rows: lines, ..Table::default() };
    (!table.rows.is_empty()).then_some(table)
}
