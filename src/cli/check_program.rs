//! `effattn check --program`: golden files put to other programs.

use anyhow::{Result, bail};
use serde_json::json;

use super::check::{self, Args};
use super::interrupt::stop_on_ctrl_c;
use crate::protocol::check::program::{ProgramCheck, ProgramSettings, is_asked};
use crate::protocol::check::{CheckError, FileVerdict, Golden, own_case};
use crate::protocol::measuring;
use crate::term::{FAILED, Term};
use effattn_kernel::device::machine;
use effattn_record::report::table::Table;
use effattn_record::{Outcome, Row};

/// What came of a file: its row, and the verdict where there is one.
struct Checked {
    row: Row,
    verdict: Option<FileVerdict>,
}

/// Puts the golden files that `args` choose to every program.
pub fn run(args: &Args, mut term: Term) -> Result<u8> {
    let threads = args.begin()?;
    let goldens = goldens(args)?;
    let descriptions =
        args.program.iter().map(|word| measuring::described(word)).collect::<Result<Vec<_>>>()?;
    let settings = ProgramSettings {
        threads,
        dtype: args.dtype,
        device: args.device,
        resident_limit: machine::free_memory() / 100 * 95,
        stop: stop_on_ctrl_c(),
    };
    let (mut rows, mut tables) = (Vec::new(), Vec::new());
    for description in &descriptions {
        let mut check = match ProgramCheck::start(description, &settings)? {
            Ok(check) => check,
            Err(failure) => bail!("{}", description.cannot_run(&failure.reason)),
        };
        let here: Vec<&Golden> = match &args.model {
            // nothing was chosen: what it says that it does
            None => goldens
                .iter()
                .filter(|golden| check.abilities.mechanisms.contains_key(golden.meta("mechanism")))
                .collect(),
            Some(_) => goldens.iter().collect(),
        };
        let own = here.iter().filter(|golden| golden.is_own()).count();
        term.start_progress(here.len() as f64);
        let mut checked = Vec::new();
        for golden in here {
            term.at(&format!("{}: {}", description.name, golden.stem));
            let verdict = check.check(golden)?;
            let row = Row {
                variant: Some(check::stem(&golden.file)),
                device: args.device.to_string(),
                dtype: args.dtype.to_string(),
                kernel: String::new(),
                threads: Some(threads as u64),
                program: Some(description.name.clone()),
                ..Row::new("check", golden.meta("mechanism"))
            };
            let one = of(&row, verdict);
            term.advance(1.0, "");
            term.detail(&check::line(&one.row, &[]));
            checked.push(one);
        }
        term.finish_progress();
        if checked.is_empty() {
            bail!("no golden file covers the mechanisms of {}; choose with --model", description.name);
        }
        let mut table = table(&description.name, &check.version, &checked);
        table.notes.extend(own_case::note(own));
        tables.push(table);
        rows.extend(checked.into_iter().map(|checked| checked.row));
        check.finish();
    }
    check::write_out(&rows, &tables, json!([]), args, threads, &term)?;
    let red = rows.iter().any(|row| !matches!(row.outcome, Outcome::Ok | Outcome::Unsupported));
    let none = rows.iter().all(|row| row.outcome == Outcome::Unsupported);
    Ok(if red || none { FAILED } else { 0 })
}

/// The golden files of single mechanisms that `args` choose.
fn goldens(args: &Args) -> Result<Vec<Golden>> {
    let mut all = Vec::new();
    for source in check::sources(args.golden.as_deref())? {
        let golden = Golden::read(&source.name(), &source.bytes()?)?;
        if is_asked(&golden) && args.includes(golden.meta("mechanism")) {
            all.push(golden);
        }
    }
    if all.is_empty() {
        bail!("no golden file of a single mechanism is about these; choose another --model or --exclude");
    }
    Ok(all)
}

fn of(row: &Row, verdict: Result<FileVerdict, CheckError>) -> Checked {
    let ended = |outcome, reason| Checked {
        row: check::ratio(row, None).with_outcome(outcome, Some(reason)),
        verdict: None,
    };
    match verdict {
        Ok(verdict) => Checked { row: check::of_verdict(row, &verdict), verdict: Some(verdict) },
        Err(CheckError::NotAnswered { reason, .. }) => ended(Outcome::Unsupported, reason),
        Err(CheckError::Program { outcome, reason, .. }) => ended(outcome, reason),
        Err(error) => ended(Outcome::Failed, error.to_string()),
    }
}

/// A line per file.
fn table(name: &str, version: &str, checked: &[Checked]) -> Table {
    let count = |outcome| checked.iter().filter(|checked| checked.row.outcome == outcome).count();
    let (green, unanswered) = (count(Outcome::Ok), count(Outcome::Unsupported));
    let red = checked.len() - green - unanswered;
    let columns =
        ["file", "result", "worst tensor", "element", "remark", "error / tolerance"].map(str::to_owned);
    let line = |Checked { row, verdict }: &Checked| {
        let word = match row.outcome {
            Outcome::Ok => "green",
            Outcome::Unsupported => "not answered",
            _ => "red",
        };
        let dash = || "-".to_owned();
        let worst = verdict.as_ref().filter(|verdict| !verdict.worst.is_empty());
        let element = worst.and_then(|verdict| verdict.element.as_ref());
        vec![
            row.variant.clone().unwrap_or_default(),
            word.to_owned(),
            worst.map_or_else(dash, |verdict| verdict.worst.clone()),
            element.map_or_else(dash, |element| format!("{:?}", element.index)),
            row.error.clone().unwrap_or_default(),
            row.value.map_or_else(dash, |value| format!("{value:.3}")),
        ]
    };
    Table {
        title: format!("{name} ({version}): {green} green, {red} red, {unanswered} not answered"),
        columns: columns.to_vec(),
        numbers: 1,
        rows: checked.iter().map(line).collect(),
        ..Table::default()
    }
}
