//! `effattn check`: golden files against this build.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use super::command::files_below;
use super::export::Exports;
use super::finish;
use crate::protocol::check::{CheckError, FileVerdict, Golden, IdleKnob, builtin, check_bytes_in, own_case};
use crate::run::manifest::Manifest;
use crate::run::plan::Plan;
use crate::term::{FAILED, Term, USAGE};
use effattn_kernel::device::{Backend, threads};
use effattn_kernel::{KernelMode, with_mode};
use effattn_model::attention::choose::choose;
use effattn_record::config::lists::Models;
use effattn_record::config::settings::{DeviceName, DtypeName, KernelName};
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
  effattn check --kernel composed -v
  # Another program: a shipped one (effattn list programs), or your own file
  effattn check --program torch --model ls,cosformer
  effattn check --program ./mine.py --model full";

#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Folder of golden files [default: the built-in set]
    #[arg(long, value_name = "DIR")]
    pub(super) golden: Option<PathBuf>,
    /// Mechanisms whose files are checked: full,ls or 'ls*'
    #[arg(long, value_name = "LIST")]
    pub(super) model: Option<Models>,
    /// Mechanisms to leave out
    #[arg(long, value_name = "LIST")]
    exclude: Option<Models>,
    /// cpu, cuda, cuda:1 or metal
    #[arg(long, value_name = "DEVICE", default_value = "cpu")]
    pub(super) device: DeviceName,
    /// fused or composed
    #[arg(long, value_name = "KIND", default_value = "fused")]
    kernel: KernelName,
    /// Check programs in the place of effattn: names (effattn list programs), TOML files or Python files
    #[arg(long, value_name = "LIST", value_delimiter = ',', conflicts_with = "kernel")]
    pub(super) program: Vec<String>,
    /// Number format of a program: f32, bf16 or tf32; the coarse ones have a tolerance of 1/16 of a tensor's largest number
    #[arg(long, value_name = "TYPE", default_value = "f32", requires = "program")]
    pub(super) dtype: DtypeName,
    /// CPU threads [default: all cores]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1024))]
    threads: Option<u64>,
    #[command(flatten)]
    pub(super) exports: Exports,
}

impl Args {
    /// Tries what can be wrong, and sets the number of CPU threads, which it gives.
    pub(super) fn begin(&self) -> Result<usize> {
        let mut read: Vec<PathBuf> = self.program.iter().map(PathBuf::from).collect();
        self.golden.iter().for_each(|golden| files_below(golden, &mut read));
        self.exports.check(&read)?;
        for models in [&self.model, &self.exclude].into_iter().flatten() {
            choose(models)?;
        }
        let count = self.threads.map_or_else(threads::available, |count| count as usize);
        threads::set(count, threads::PlainOperations::OnCaller);
        Ok(count)
    }

    /// Whether files about `mechanism` are asked for.
    pub(super) fn includes(&self, mechanism: &str) -> bool {
        let among = |models: &Models| models.0.iter().any(|variant| variant.matches(mechanism));
        self.model.as_ref().is_none_or(among) && !self.exclude.as_ref().is_some_and(among)
    }
}

/// What came of one file.
struct FileResult {
    row: Row,
    /// Not a golden file at all.
    foreign: bool,
    /// Written by `effattn golden`.
    own: bool,
    /// Knobs that the file sets without effect.
    idle: Vec<IdleKnob>,
}

pub fn run(args: &Args, mut term: Term) -> Result<u8> {
    let count = args.begin()?;
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
            Ok(bytes) => with_mode(mode, || one((source.folder(), &name), &bytes, args, backend.device())),
        };
        let Some(result) = checked else { continue };
        let row = Row {
            device: args.device.to_string(),
            kernel: args.kernel.to_string(),
            threads: Some(count as u64),
            ..result.row
        };
        let result = FileResult { row, ..result };
        term.at(&name);
        term.advance(1.0, "");
        term.detail(&line(&result.row, &result.idle));
        done.push(result);
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
    let mut summary = table(&rows);
    summary.notes.extend(note_idle(done));
    summary.notes.extend(own_case::note(done.iter().filter(|checked| checked.own).count()));
    let tables: Vec<Table> = std::iter::once(summary).chain(red(&rows)).collect();
    let idle = done.iter().filter(|checked| !checked.idle.is_empty());
    let idle = idle.map(|checked| json!({ "file": checked.row.variant, "knobs": checked.idle }));
    write_out(&rows, &tables, idle.collect(), args, threads, term)?;
    if done.iter().any(|checked| checked.foreign) {
        return Ok(USAGE);
    }
    // a file that this version cannot check proves nothing
    Ok(if rows.iter().all(|row| row.outcome == Outcome::Ok) { 0 } else { FAILED })
}

/// Prints and exports what was found; `idle` are the knobs without effect, by file.
pub(super) fn write_out(
    rows: &[Row],
    tables: &[Table],
    idle: Value,
    args: &Args,
    threads: usize,
    term: &Term,
) -> Result<()> {
    finish::print_tables(tables, &args.exports, term)?;
    let plan = Plan {
        name: "check".to_owned(),
        command: "check".to_owned(),
        argv: crate::run::manifest::argv(),
        threads,
        device: args.device.to_string(),
        ..Plan::default()
    };
    let mut manifest = serde_json::to_value(Manifest::new(&plan, "check"))?;
    manifest["knobs_without_effect"] = idle;
    args.exports.write(&manifest, rows, tables)
}

/// Where a golden file comes from.
pub(super) enum GoldenSource {
    Shipped(&'static str, &'static [u8]),
    File { path: PathBuf, name: String },
}

impl GoldenSource {
    pub(super) fn name(&self) -> String {
        match self {
            Self::Shipped(name, _) => (*name).to_owned(),
            Self::File { name, .. } => name.clone(),
        }
    }

    fn folder(&self) -> Option<&Path> {
        match self {
            Self::Shipped(..) => None,
            Self::File { path, .. } => path.parent(),
        }
    }

    pub(super) fn bytes(&self) -> io::Result<Vec<u8>> {
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
pub(super) fn sources(golden: Option<&Path>) -> Result<Vec<GoldenSource>> {
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
            if path.join("config.json").is_file() {
                continue; // a checkpoint that golden files are about
            }
            walk(root, &path, files)?;
        } else if path.extension().is_some_and(|extension| extension == "safetensors") {
            let name = path.strip_prefix(root).unwrap_or(&path).to_string_lossy().into_owned();
            files.push((name, path));
        }
    }
    Ok(())
}

/// The row of one file; none if it is about another mechanism than asked.
fn one(
    (folder, name): (Option<&Path>, &str),
    bytes: &[u8],
    args: &Args,
    device: &candle_core::Device,
) -> Option<FileResult> {
    let golden = match Golden::read(name, bytes) {
        Ok(golden) => golden,
        Err(error) => return Some(not_golden(name, error.to_string())),
    };
    let mechanism = golden.meta("mechanism").to_owned();
    if !args.includes(&mechanism) {
        return None;
    }
    let own = golden.is_own();
    drop(golden);
    let row = Row { variant: Some(stem(name)), ..Row::new("check", &mechanism) };
    let checked = |row: Row| Some(FileResult { row, foreign: false, own, idle: Vec::new() });
    match check_bytes_in(folder, name, bytes, device) {
        Ok(verdict) => {
            Some(FileResult { row: of_verdict(&row, &verdict), foreign: false, own, idle: verdict.idle })
        }
        Err(error @ CheckError::NotGolden { .. }) => Some(not_golden(name, error.to_string())),
        Err(error @ CheckError::UnknownMechanism { .. }) => {
            checked(ratio(&row, None).with_outcome(Outcome::Unsupported, Some(error.to_string())))
        }
        Err(error) => checked(ratio(&row, None).with_outcome(Outcome::Failed, Some(error.to_string()))),
    }
}

pub(super) fn stem(name: &str) -> String {
    name.strip_suffix(".safetensors").unwrap_or(name).to_owned()
}

pub(super) fn ratio(row: &Row, value: Option<f64>) -> Row {
    row.with("error_over_tolerance", "1", value)
}

pub(super) fn of_verdict(row: &Row, verdict: &FileVerdict) -> Row {
    // where an output is missing or of another shape nothing was compared, and 0 would say that it is exact
    let compared = verdict.problem.is_none() || !verdict.worst.is_empty();
    let row = ratio(row, compared.then_some(verdict.error_over_tolerance));
    if verdict.passed() {
        return row.with_outcome(Outcome::Ok, None);
    }
    // what was computed with an effect of these knobs cannot be reproduced
    let reasons: Vec<_> =
        std::iter::once(verdict.fault()).chain(verdict.idle.iter().map(IdleKnob::to_string)).collect();
    row.with_outcome(Outcome::Failed, Some(reasons.join("; ")))
}

fn not_golden(name: &str, reason: String) -> FileResult {
    let row = Row { variant: Some(stem(name)), ..Row::new("check", "") };
    let row = ratio(&row, None).with_outcome(Outcome::Failed, Some(reason));
    FileResult { row, foreign: true, own: false, idle: Vec::new() }
}

pub(super) fn line(row: &Row, idle: &[IdleKnob]) -> String {
    let name = row.variant.as_deref().unwrap_or_default();
    let passed = match (&row.error, row.value) {
        (Some(error), _) => return format!("{name}: {}: {error}", row.outcome),
        (None, value) => format!("{name}: {} ({:.3} of the tolerance)", row.outcome, value.unwrap_or(0.0)),
    };
    std::iter::once(passed).chain(idle.iter().map(IdleKnob::to_string)).collect::<Vec<_>>().join("; ")
}

/// The knobs that files set without effect, by mechanism.
fn note_idle(done: &[FileResult]) -> Option<String> {
    let mut knobs: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for checked in done.iter().filter(|checked| !checked.idle.is_empty()) {
        let names = checked.idle.iter().map(|idle| idle.knob);
        knobs.entry(&checked.row.model).or_default().extend(names);
    }
    let lines = knobs
        .iter()
        .map(|(model, names)| format!("{model} ({})", names.iter().copied().collect::<Vec<_>>().join(", ")));
    let lines = lines.collect::<Vec<_>>().join(", ");
    (!knobs.is_empty())
        .then(|| format!("knobs that files set without effect: {lines}; -v gives files, values and reasons"))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_of_which_nothing_was_compared_has_no_error() {
        let verdict = |problem: Option<&str>, worst: &str| FileVerdict {
            name: "a".to_owned(),
            mechanism: "ls".to_owned(),
            error_over_tolerance: 0.0,
            worst: worst.to_owned(),
            element: None,
            problem: problem.map(str::to_owned),
            idle: Vec::new(),
        };
        let row = |verdict| of_verdict(&Row::new("check", "ls"), &verdict);
        let missing = row(verdict(Some("out has shape [1], expected [2]"), ""));
        assert_eq!((missing.outcome, missing.value), (Outcome::Failed, None));
        assert_eq!(table(&[missing]).rows[0].last().map(String::as_str), Some("-"));
        assert_eq!(row(verdict(Some("grad is not finite"), "out")).value, Some(0.0), "out was compared");
        assert_eq!(row(verdict(None, "")).value, Some(0.0), "every number is exact");
    }
}
