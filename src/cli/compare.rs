//! `effattn compare`.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, bail, ensure};
use serde::Deserialize;
use serde_json::Value;

use super::export::Exports;
use super::finish::print_tables;
use super::stored_runs::StoredRun;
use crate::run::manifest::Manifest;
use crate::term::{self, Term, Warning};
use effattn_record::report::compare::{ComparedRun, RunCalibration, RunMachine, compare_runs, differences};
use effattn_record::{Outcome, Row, csv, file, json};

const EXAMPLES: &str = "\
Examples:
  # Two runs
  effattn compare results/speed/A results/speed/B
  # Save these rows under a name, and compare with them later
  effattn compare results/speed/latest --save-baseline main
  effattn compare results/speed/latest --baseline main
  # Several runs a side, whose scatter then counts
  effattn compare results/speed/A1,results/speed/A2 results/speed/B1
  # For scripts: exit code 1 if a cell became more than 5 % worse
  effattn compare results/speed/A results/speed/latest --fail-if-regression 5%
  # The comparison as data
  effattn compare results/speed/A results/speed/B --export-json -

Cells are matched by everything that defines them; results with different devices, number formats, kernels or thread counts are never compared. Times are not compared where the machine was busy or in another state, as the runs' calibrations or loads tell (then a gate ends with 2); where it differed a little, intervals are wider by that. Verdicts are corrected for the number of comparisons (Holm). With --fail-if-regression the exit code is 1 if a cell is worse by more than the limit, beyond its 95 % interval, or no longer has a value; it is 2 if nothing can be compared.";

#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Run folders, or rows exported as CSV or JSON: before and now, several of a side joined by commas; only now with --baseline
    #[arg(required = true, num_args = 1..=2, value_name = "ROWS")]
    rows: Vec<PathBuf>,
    /// Compare with the rows that --save-baseline saved under this name
    #[arg(long, value_name = "NAME", value_parser = name)]
    baseline: Option<String>,
    /// Save the rows under this name, for --baseline; nothing is saved where --fail-if-regression fails
    #[arg(long, value_name = "NAME", value_parser = name)]
    save_baseline: Option<String>,
    /// Folder for baselines
    #[arg(long, value_name = "DIR", default_value = "results/baselines")]
    baselines_dir: PathBuf,
    /// Exit with code 1 if a cell is worse by more than this
    #[arg(long, value_name = "PERCENT", value_parser = percent)]
    fail_if_regression: Option<f64>,
    #[command(flatten)]
    exports: Exports,
}

fn percent(text: &str) -> Result<f64, String> {
    match text.trim_end_matches('%').trim().parse::<f64>() {
        Ok(value) if (0.0..=1000.0).contains(&value) => Ok(value / 100.0),
        _ => Err("expected a percentage such as 5%".to_owned()),
    }
}

/// A name that is a file name on every system.
fn name(text: &str) -> Result<String, String> {
    let plain = |letter: char| letter.is_ascii_alphanumeric() || "-_.".contains(letter);
    let good = !text.is_empty() && !text.starts_with('.') && text.chars().all(plain);
    good.then(|| text.to_owned()).ok_or_else(|| "a name has letters, digits, - and _ only".to_owned())
}

pub fn run(args: &Args, term: &Term) -> Result<u8> {
    args.exports.check(&inputs(&args.rows))?;
    let (before, now) = match (&args.rows[..], &args.baseline) {
        ([now], Some(name)) => (Some(baseline(&args.baselines_dir, name)?), side(now)?),
        ([before, now], None) => (Some(side(before)?), side(now)?),
        ([now], None) => (None, side(now)?),
        _ => bail!("--baseline replaces the first of two ROWS; give only one"),
    };
    ensure!(
        before.is_some() || args.save_baseline.is_some(),
        "there is only one set of rows and nothing to compare it with; give a second one, --baseline NAME or --save-baseline NAME"
    );
    let code = match before {
        Some(before) => beside(&before.runs, &now.runs, args, term),
        None => Ok(0),
    };
    match &args.save_baseline {
        Some(name) if matches!(code, Ok(0)) => save(now, &args.baselines_dir, name, term)?,
        Some(name) => {
            term.warn(&Warning::Other(format!("these rows are not saved as baseline {name}")));
        }
        None => {}
    }
    code
}

/// Saves the run of `now` as the baseline `name`, with its manifest: a later gate asks how steady the machine was.
fn save(now: ComparedSide, folder: &Path, name: &str, term: &Term) -> Result<()> {
    let ComparedSide { runs, mut manifests } = now;
    let (Ok([ComparedRun { rows, .. }]), Some(manifest)) =
        (<[ComparedRun; 1]>::try_from(runs), manifests.pop())
    else {
        bail!("--save-baseline keeps the rows of one run; give one, or merge them: effattn merge")
    };
    let path = folder.join(format!("{name}.json"));
    std::fs::create_dir_all(folder).with_context(|| format!("--baselines-dir {}", folder.display()))?;
    let count = rows.len();
    let text = json::to_string(&json::Export { manifest, rows })?;
    file::write(&path, text.as_bytes()).with_context(|| path.display().to_string())?;
    term.info(&format!("baseline {name}: {count} rows in {}", path.display()));
    Ok(())
}

/// Prints `now` beside `before` and gives the exit code.
fn beside(before: &[ComparedRun], now: &[ComparedRun], args: &Args, term: &Term) -> Result<u8> {
    let comparison = compare_runs(before, now);
    if comparison.pairs.is_empty() && comparison.lost.is_empty() {
        let all =
            |runs: &[ComparedRun]| -> Vec<Row> { runs.iter().flat_map(|run| &run.rows).cloned().collect() };
        let why = differences(&all(before), &all(now));
        let why = if why.is_empty() { comparison.lonely.iter().take(4).cloned().collect() } else { why };
        let why = if why.is_empty() { vec!["neither run has a value to compare".to_owned()] } else { why };
        bail!("no cell has a value in both runs\n  {}", why.join("\n  "));
    }
    let table = comparison.table();
    print_tables(std::slice::from_ref(&table), &args.exports, term)?;
    let json = || Ok(serde_json::to_string_pretty(&comparison.json())? + "\n");
    args.exports.write_texts(json, || Ok(comparison.csv()?), &[table])?;
    if let (Some(_), Some(why)) = (args.fail_if_regression, &comparison.refused) {
        bail!("the gate cannot tell: {why}");
    }
    let Some(share) = args.fail_if_regression else { return Ok(0) };
    let worse = comparison.regressions(share);
    let share = 100.0 * share;
    let gone: Vec<&String> = comparison.lost.iter().chain(&comparison.absent).collect();
    if worse.is_empty() && gone.is_empty() {
        term.info(&format!(
            "gate passed: none of {} values is worse by more than {share} %",
            comparison.pairs.len()
        ));
        return Ok(0);
    }
    for pair in &worse {
        term.info(&format!(
            "worse by {:.1} %: {} {}",
            100.0 * pair.worse,
            pair.cell,
            pair.metric.replace('_', " ")
        ));
    }
    gone.iter().for_each(|line| term.info(&format!("no longer has a value: {line}")));
    term.error(&format!(
        "gate failed: {} of {} values are worse by more than {share} % or missing",
        worse.len() + gone.len(),
        comparison.pairs.len() + gone.len()
    ));
    Ok(term::FAILED)
}

/// The runs of one side, and the manifest of each: null where its rows come without one.
struct ComparedSide {
    runs: Vec<ComparedRun>,
    manifests: Vec<Value>,
}

impl ComparedSide {
    fn read<'a>(paths: impl IntoIterator<Item = &'a Path>) -> Result<Self> {
        let (mut runs, mut manifests): (Vec<ComparedRun>, Vec<Value>) = (Vec::new(), Vec::new());
        let mut places: Vec<PathBuf> = Vec::new();
        for path in paths {
            let json::Export { manifest, rows } = measured(path)?;
            // a run that counts twice looks like two that agree; a copy of it has its id and its rows
            let place = path.canonicalize().unwrap_or_else(|_| path.to_owned());
            let copied = |(run, known): (&ComparedRun, &Value)| {
                !known["id"].is_null() && known["id"] == manifest["id"] && run.rows == rows
            };
            ensure!(
                !places.contains(&place) && !runs.iter().zip(&manifests).any(copied),
                "{} is given twice; name each run once on a side",
                path.display()
            );
            places.push(place);
            // of a run: an export of other programs has no such manifest
            let machine =
                Manifest::deserialize(&manifest).map_or_else(|_| RunMachine::default(), |it| machine(&it));
            runs.push(ComparedRun { rows, machine });
            manifests.push(manifest);
        }
        Ok(Self { runs, manifests })
    }
}

/// The run kept as `name`; earlier versions kept rows without the manifest, as CSV.
fn baseline(folder: &Path, name: &str) -> Result<ComparedSide> {
    let kept = ["json", "csv"].map(|ending| folder.join(format!("{name}.{ending}")));
    if let Some(path) = kept.iter().find(|path| path.is_file()) {
        return ComparedSide::read([path.as_path()]);
    }
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let stem = |path: PathBuf| path.file_stem().map(|stem| stem.to_string_lossy().into_owned());
    let mut names: Vec<String> = entries.filter_map(|entry| stem(entry.path())).collect();
    names.sort_unstable();
    names.dedup();
    let known = if names.is_empty() {
        "there is none yet".to_owned()
    } else {
        format!("known: {}", names.join(", "))
    };
    bail!("no baseline {name:?} in {} ({known}); --save-baseline {name} creates one", folder.display())
}

/// Files of what is compared: those that are named, and those of the run folders that are.
fn inputs(rows: &[PathBuf]) -> Vec<PathBuf> {
    let parts = |list: &PathBuf| -> Vec<PathBuf> {
        let list = list.to_string_lossy();
        list.split(',').filter(|part| !part.is_empty()).map(PathBuf::from).collect()
    };
    let named = rows.iter().flat_map(|list| parts(list).into_iter().chain([list.clone()]));
    named.flat_map(|path| [path.join("rows.csv"), path.join("manifest.json"), path]).collect()
}

/// The runs of one side: a path, or several joined by commas.
fn side(path: &Path) -> Result<ComparedSide> {
    match path.to_str().filter(|text| text.contains(',') && !path.exists()) {
        Some(list) => ComparedSide::read(list.split(',').filter(|part| !part.is_empty()).map(Path::new)),
        None => ComparedSide::read([path]),
    }
}

/// What a run says of its machine.
fn machine(manifest: &Manifest) -> RunMachine {
    let calibration = manifest.steadiness.as_ref().map(|known| RunCalibration {
        by_thread: known.by_thread,
        seconds: known.seconds,
        spread: known.spread,
        disturbed: known.disturbed as f64 / (known.turns - known.repeated).max(1) as f64,
    });
    RunMachine { calibration, load: manifest.load_average, cores: manifest.machine["cores"].as_f64() }
}

/// The rows of a run folder or an exported file, and the manifest where there is one.
fn measured(path: &Path) -> Result<json::Export> {
    if path.is_dir() {
        let run = StoredRun::read(path)?.with_context(|| {
            format!("{} is not a run folder; give one with manifest.json and rows.csv", path.display())
        })?;
        return Ok(json::Export { manifest: serde_json::to_value(&run.manifest)?, rows: run.rows });
    }
    let text = file::read_to_string(path).with_context(|| {
        format!("{} cannot be read; give a run folder, its rows.csv or an exported file (effattn status lists runs)", path.display())
    })?;
    let place = || path.display().to_string();
    let export = if path.extension().is_some_and(|extension| extension == "json") {
        exported(&text).with_context(place)?
    } else {
        json::Export { manifest: Value::Null, rows: csv::from_str(&text).with_context(place)? }
    };
    numbers(&export.rows).with_context(place)?;
    Ok(export)
}

/// The rows and manifest in `text`, which is JSON.
fn exported(text: &str) -> Result<json::Export> {
    let export = "give what --export-json of a command wrote: a JSON object with manifest and rows";
    let whole: Value =
        serde_json::from_str(text).map_err(|error| anyhow!("it is not JSON ({error}); {export}"))?;
    ensure!(
        whole.get("manifest").is_some() && whole["rows"].is_array(),
        "it is not an export of effattn; {export}"
    );
    Ok(json::from_str(text)?)
}

/// Makes sure that every cell of a file that is ok has a number, and every step a time: nothing says that we wrote the file. In
/// a run folder what is no number counts as gone.
fn numbers(rows: &[Row]) -> Result<()> {
    for (at, row) in rows.iter().enumerate().filter(|(_, row)| row.outcome == Outcome::Ok) {
        let Some(value) = row.value else { continue };
        let (number, label, metric) = (at + 1, row.label(), &row.metric);
        ensure!(
            value.is_finite(),
            "row {number} ({label}) is ok, but its {metric} is {value}, which is no finite number"
        );
        ensure!(
            metric != "step_time" || value > 0.0,
            "row {number} ({label}) is ok, but its {metric} is {value}, and a time is above 0"
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::run::plan::Plan;
    use crate::run::turn::Steadiness;
    use crate::term::{Color, Verbosity};

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        args: Args,
    }

    /// Exit code or message of `compare LINE` in a folder with three files of rows.
    fn said(line: &str, folder: &Path) -> std::result::Result<u8, String> {
        for (name, device, seconds) in [
            ("a", "cpu", 1.0),
            ("a2", "cpu", 1.0),
            ("b", "cpu", 1.5),
            ("b2", "cpu", 1.5),
            ("m", "metal", 1.0),
            ("zero", "cpu", 0.0),
            ("less", "cpu", -5.0),
        ] {
            let row =
                Row { device: device.to_owned(), std: Some(0.01), n: Some(20), ..Row::new("speed", "ls") };
            let row = row.with("step_time", "s", Some(seconds)).with_outcome(Outcome::Ok, None);
            let text = csv::to_string(&[row]).unwrap();
            std::fs::write(folder.join(format!("{name}.csv")), text).unwrap();
        }
        let line = line.replace("DIR", &folder.display().to_string());
        let words = line.split_whitespace().chain(["--baselines-dir", folder.to_str().unwrap()]);
        let cli = Cli::try_parse_from(std::iter::once("compare").chain(words)).map_err(|e| e.to_string())?;
        run(&cli.args, &Term::new(Verbosity::Quiet, Color::Never)).map_err(|error| format!("{error:#}"))
    }

    #[test]
    fn the_exit_code_is_the_gate() {
        let folder = tempfile::tempdir().unwrap();
        for (line, code) in [
            ("DIR/a.csv DIR/b.csv", 0),
            ("DIR/a.csv DIR/b.csv --fail-if-regression 60%", 0),
            ("DIR/a.csv DIR/b.csv --fail-if-regression 5%", term::FAILED),
            ("DIR/b.csv DIR/a.csv --fail-if-regression 5%", 0),
            ("DIR/a.csv --save-baseline main", 0),
            ("DIR/b.csv --baseline main", 0),
            ("DIR/b.csv --baseline main --fail-if-regression 5%", term::FAILED),
            ("DIR/a.csv,DIR/a2.csv DIR/b.csv,DIR/b2.csv --fail-if-regression 5%", term::FAILED),
            ("DIR/a.csv DIR/a.csv --fail-if-regression 5%", 0),
        ] {
            assert_eq!(said(line, folder.path()), Ok(code), "{line}");
        }
    }

    #[test]
    fn a_baseline_keeps_what_the_run_says_of_its_machine() {
        let folder = tempfile::tempdir().unwrap();
        let gate = "--baseline main --fail-if-regression 5%";
        assert_eq!(said("DIR/a.csv --save-baseline main", folder.path()), Ok(0));
        assert_eq!(said(&format!("DIR/a.csv {gate}"), folder.path()), Ok(0));
        let steadiness = Steadiness { seconds: 1.0, turns: 4, disturbed: 4, ..Steadiness::default() };
        let manifest = Manifest { steadiness: Some(steadiness), ..Manifest::new(&Plan::default(), "id") };
        let rows = csv::from_str(&std::fs::read_to_string(folder.path().join("a.csv")).unwrap()).unwrap();
        let export = json::Export { manifest: serde_json::to_value(&manifest).unwrap(), rows };
        std::fs::write(folder.path().join("d.json"), json::to_string(&export).unwrap()).unwrap();
        assert_eq!(said("DIR/d.json --save-baseline main", folder.path()), Ok(0));
        let refused = said(&format!("DIR/a.csv {gate}"), folder.path()).unwrap_err();
        assert!(refused.contains("the gate cannot tell"), "{refused}");
    }

    #[test]
    fn a_copy_of_a_run_is_no_second_run() {
        let folder = tempfile::tempdir().unwrap();
        let row = Row::new("speed", "ls").with("step_time", "s", Some(1.0));
        let kept = |name: &str, rows: Vec<Row>| {
            let manifest = serde_json::to_value(Manifest::new(&Plan::default(), "id")).unwrap();
            let text = json::to_string(&json::Export { manifest, rows }).unwrap();
            std::fs::write(folder.path().join(name), text).unwrap();
        };
        kept("c.json", vec![row.clone()]);
        kept("d.json", vec![row.clone()]);
        kept("e.json", vec![row.with("step_time", "s", Some(2.0))]);
        let twice = said("DIR/c.json,DIR/d.json DIR/c.json", folder.path()).unwrap_err();
        assert!(twice.contains("d.json is given twice"), "{twice}");
        assert_eq!(said("DIR/c.json,DIR/e.json DIR/c.json", folder.path()), Ok(0), "of two machines");
    }

    #[test]
    fn a_file_whose_number_is_none_is_named_with_the_row() {
        let folder = tempfile::tempdir().unwrap();
        let row = Row::new("speed", "ls").with("step_time", "s", Some(1.0));
        let row = row.with_outcome(Outcome::Ok, None);
        let nan = Row { value: Some(f64::NAN), ..row.clone() };
        std::fs::write(folder.path().join("n.csv"), csv::to_string(&[row, nan]).unwrap()).unwrap();
        let refused = said("DIR/a.csv DIR/n.csv", folder.path()).unwrap_err();
        assert!(refused.contains("n.csv: row 2 (ls) is ok, but its step_time is NaN"), "{refused}");
    }

    #[test]
    fn json_of_others_is_no_export() {
        let folder = tempfile::tempdir().unwrap();
        for (text, says) in [
            ("[]", "o.json: it is not an export of effattn; give what --export-json"),
            ("{\"rows\": []}", "o.json: it is not an export of effattn"),
            ("rows", "o.json: it is not JSON (expected value at line 1 column 1); give what --export-json"),
        ] {
            std::fs::write(folder.path().join("o.json"), text).unwrap();
            let refused = said("DIR/a.csv DIR/o.json", folder.path()).unwrap_err();
            assert!(refused.contains(says), "{refused}");
        }
    }

    #[test]
    fn what_does_not_pass_replaces_no_baseline() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(said("DIR/a.csv --save-baseline main", folder.path()), Ok(0));
        let kept = || std::fs::read(folder.path().join("main.json")).unwrap();
        let before = kept();
        let again = "DIR/b.csv --baseline main --save-baseline main";
        let gated = format!("{again} --fail-if-regression 5%");
        assert_eq!(said(&gated, folder.path()), Ok(term::FAILED));
        assert_eq!(kept(), before);
        assert_eq!(said(again, folder.path()), Ok(0));
        assert_ne!(kept(), before, "without a gate it is replaced");
        // as an earlier version kept it
        std::fs::remove_file(folder.path().join("main.json")).unwrap();
        std::fs::copy(folder.path().join("a.csv"), folder.path().join("main.csv")).unwrap();
        assert_eq!(said(&gated, folder.path()), Ok(term::FAILED));
    }

    #[test]
    fn mistakes_name_what_is_allowed() {
        let folder = tempfile::tempdir().unwrap();
        for (line, says) in [
            ("DIR/a.csv DIR/m.csv", "device: cpu before, metal now"),
            ("DIR/a.csv", "nothing to compare it with"),
            ("DIR/a.csv --baseline mian", "no baseline \"mian\""),
            ("DIR/a.csv DIR/b.csv --baseline a", "replaces the first"),
            ("DIR/a.csv --save-baseline ../x", "letters, digits"),
            ("DIR DIR", "is not a run folder"),
            ("DIR/a.csv,DIR/c.csv DIR/b.csv", "c.csv cannot be read"),
            ("DIR/a.csv,DIR/b.csv --save-baseline x", "keeps the rows of one run"),
            ("DIR/a.csv,DIR/b.csv,DIR/./a.csv DIR/b.csv", "a.csv is given twice"),
            ("DIR/a.csv DIR/zero.csv", "zero.csv: row 1 (ls) is ok, but its step_time is 0, and a time"),
            ("DIR/less.csv DIR/a.csv", "less.csv: row 1 (ls) is ok, but its step_time is -5, and a time"),
        ] {
            let error = said(line, folder.path()).unwrap_err();
            assert!(error.contains(says), "{line}: {error}");
        }
    }
}
