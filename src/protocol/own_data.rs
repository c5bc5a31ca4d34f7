//! `--data`: files of a person's own in the place of a task, and `--tokenizer`: what they are cut into.

use effattn_data::own::{OwnFiles, is_own};
use effattn_record::config::lists::Words;
use effattn_record::config::settings::{Settings, word};
use effattn_record::own_setting;

own_setting! {
    /// Files of your own instead of a task: train.csv,val.csv,test.csv, or one that is divided (docs/own-data.md)
    pub DATA: String = "data", "Grid", "FILES", word;
}

own_setting! {
    /// Tokenizer: tokenizer.json, or a folder with it or with vocab.json and merges.txt [default: trained on the text]
    pub TOKENIZER: String = "tokenizer", "Data", "PATH", word;
}

/// Help of `--data` where the files are tables.
pub const TABLES: &str = "Files of your own instead of a task, tables with the columns text,label or text1,text2,label: \
                          train.csv,val.csv,test.csv (or .tsv, .jsonl); one file is divided 80/10/10 by a seed";

/// Refuses a tokenizer for a `task` that is not read by it.
pub fn check_tokenizer(settings: &Settings, task: &str) -> Result<(), String> {
    match TOKENIZER.of(settings).filter(|_| !is_own(task)) {
        Some(tokenizer) => Err(format!(
            "--tokenizer {tokenizer} says how --data is read, and {task} is read in its own way; leave it out"
        )),
        None => Ok(()),
    }
}

/// Refuses `data` in a suite: its lines run tasks.
pub fn check_suite(settings: &Settings) -> Result<(), String> {
    let Some(data) = DATA.of(settings) else { return Ok(()) };
    let name =
        OwnFiles::name_of(&data, TOKENIZER.of(settings).as_deref()).map_err(|error| error.to_string())?;
    Err(format!("data is for the command line; in a suite these files are a task: task = [{name:?}]"))
}

/// The task that `--data` of what was `said` stands for; nothing where it is not said. `suite` is the name of the suite that is
/// run.
pub fn own_task(said: &Settings, suite: Option<&str>) -> Result<Option<Words>, String> {
    let Some(data) = DATA.of(said) else { return Ok(None) };
    if let Some(suite) = suite {
        return Err(format!("suite {suite} has data of its own; leave out --suite {suite} or --data {data}"));
    }
    if let Some(Words(tasks)) = &said.task {
        let tasks = tasks.join(",");
        return Err(format!("--data {data} takes the place of --task {tasks}; give one of them"));
    }
    let name = OwnFiles::name_of(&data, TOKENIZER.of(said).as_deref()).map_err(|error| error.to_string())?;
    Ok(Some(Words(vec![name])))
}
