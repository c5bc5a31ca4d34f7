//! `effattn list programs`: which run here, and what the others need.

use std::thread;

use anyhow::Result;
use serde_json::json;

use super::{Format, List};
use crate::program::description::Description;
use crate::program::{Conditions, Program};
use crate::run::CancelToken;
use effattn_record::report::table::Table;

/// The shipped programs, each started and asked for its version; all at once, because imports take seconds.
pub fn list() -> Result<List> {
    let descriptions = Description::shipped()?;
    let found: Vec<Result<String, String>> = thread::scope(|scope| {
        let asked: Vec<_> = descriptions.iter().map(|one| scope.spawn(|| version(one))).collect();
        let lost = |_| Err("it could not be asked".to_owned());
        asked.into_iter().map(|asked| asked.join().unwrap_or_else(lost)).collect()
    });
    let columns = ["program", "runs", "what", "version, or what is missing", "install"].map(str::to_owned);
    let mut table = Table { columns: columns.to_vec(), ..Table::default() };
    let mut lines = Vec::new();
    for (one, found) in descriptions.iter().zip(found) {
        let runs = found.is_ok();
        let install = one.install.clone().unwrap_or_default();
        let (Ok(said) | Err(said)) = &found;
        let word = if runs { "yes" } else { "no" };
        table.rows.push([&one.name, word, &one.about, said, &install].map(str::to_owned).to_vec());
        lines.push(json!({
            "name": one.name,
            "about": one.about,
            "runs": runs,
            "version": found.as_ref().ok(),
            "missing": found.as_ref().err(),
            "install": one.install,
        }));
    }
    table.title = "Programs, for --program".to_owned();
    table.notes =
        vec!["Python is EFFATTN_PYTHON, or python3. Your own: --program ./mine.py or ./mine.toml".to_owned()];
    Ok(List { table, json: lines })
}

fn version(description: &Description) -> Result<String, String> {
    let stop = CancelToken::default();
    let conditions = Conditions { time: None, resident_limit: u64::MAX, stop: &stop };
    match Program::start(description, 1, &conditions) {
        Ok(Ok(program)) => {
            let version = program.version.clone();
            program.finish();
            Ok(version)
        }
        Ok(Err(failure)) => Err(failure.reason),
        Err(error) => Err(error.to_string()),
    }
}

/// The list in `format`.
pub fn run(format: Format, width: usize) -> Result<String> {
    format.print(list()?, width)
}
