//! Files of a person's own, named on the command line: texts with labels for classifiers, running text for language models.
//!
//! The name of such a data set lists its files and says how they are read: `train.csv+val.csv+test.csv`,
//! `reviews.csv:tokenizer=words:split=7`. It stands wherever the name of a data set stands (`--task`, suites, rows), and
//! `--data train.csv,val.csv,test.csv` is a short way to write it. One file is divided by a seed (`split`, 1 if nothing is said)
//! into eight, one and one tenths; of two files the second is the test split, and a tenth of the first is held out.

mod corpora;
mod documents;
mod reading;
mod table;
mod texts;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::SystemTime;

use crate::entry::{CharTask, DataKind, DataSetEntry, ExampleTask, Origin, TextTask, WordTask};
use crate::{DataError, Split};
pub use documents::OwnDocuments;
pub use reading::{Reading, TextUnits};
use texts::OwnTexts;

/// Ends of names that are taken for files, also where there is no such file.
const ENDS: [&str; 8] = [".csv", ".tsv", ".jsonl", ".ndjson", ".txt", ".text", ".tokens", ".gz"];
/// Seed of the division of a file where nothing is said.
const SPLIT: u64 = 1;
/// Fewest and most tokens of a document that are read where nothing is said.
const LENGTHS: (usize, usize) = (16, 1024);

/// Files of a person's own, and how they are read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OwnFiles {
    /// The name of the data set: all of it.
    pub name: String,
    /// The files: all in one, train and test, or train, validation and test.
    pub files: Vec<PathBuf>,
    /// `bytes`, `words`, or the file or folder of a tokenizer.
    pub tokenizer: String,
    /// Seed that examples are held out by.
    pub split: u64,
}

impl OwnFiles {
    /// The files that `name` lists; nothing where it is, or looks like, the name of a data set.
    pub fn of(name: &str) -> Result<Option<Self>, DataError> {
        if crate::find(name).is_some() {
            return Ok(None);
        }
        let mut list = name;
        let (mut tokenizer, mut split) = ("bytes".to_owned(), SPLIT);
        while let Some((front, option)) = list.rsplit_once(':') {
            match option.split_once('=') {
                Some(("tokenizer", value)) if !value.is_empty() => value.clone_into(&mut tokenizer),
                Some(("split", value)) => {
                    let wrong =
                        || DataError::Unknown(format!("{name}: split={value} is no seed; write split=7"));
                    split = value.parse().map_err(|_| wrong())?;
                }
                _ => break,
            }
            list = front;
        }
        let files: Vec<PathBuf> = match Path::new(list).is_file() {
            true => vec![PathBuf::from(list)],
            false => list.split('+').map(PathBuf::from).collect(),
        };
        if !files.iter().any(|file| is_file_name(file)) {
            return Ok(None);
        }
        if files.len() > 3 || files.iter().any(|file| file.as_os_str().is_empty()) {
            let reason = "give one file, two (train and test) or three (train, validation, test)";
            return Err(DataError::Unknown(format!("{name} is not a list of one to three files; {reason}")));
        }
        // another spelling of a file, or a link to it, is the same file
        let whole = |file: &PathBuf| std::fs::canonicalize(file).unwrap_or_else(|_| file.clone());
        let all: Vec<PathBuf> = files.iter().map(whole).collect();
        if let Some(at) = (1..all.len()).find(|&at| all[..at].contains(&all[at])) {
            let file = files[at].display();
            return Err(DataError::Unknown(format!(
                "{name}: {file} is named twice; splits are different files"
            )));
        }
        Ok(Some(Self { name: name.to_owned(), files, tokenizer, split }))
    }

    /// The name that `--data` (files separated by commas) and `--tokenizer` stand for.
    pub fn name_of(data: &str, tokenizer: Option<&str>) -> Result<String, DataError> {
        let files: Vec<&str> = data.split(',').map(str::trim).collect();
        let name = files.join("+");
        let name =
            tokenizer.map_or_else(|| name.clone(), |tokenizer| format!("{name}:tokenizer={tokenizer}"));
        let known = Self::of(&name)?.is_some();
        let ends = ENDS.join(", ");
        let none = || {
            DataError::Unknown(format!(
                "--data {data} names no file: there is none with this name, and it does not end in one of {ends}; data sets are \
                 named by --task"
            ))
        };
        known.then_some(name).ok_or_else(none)
    }

    /// What is to be said about the splits; nothing where there are three files.
    fn division(&self) -> Option<String> {
        match self.files.len() {
            1 => Some(format!(
                "{} is divided by seed {}: 80 % training, 10 % validation, 10 % test; give three files (--data train,val,test) \
                 for splits of your own",
                self.files[0].display(),
                self.split
            )),
            2 => Some(format!(
                "a tenth of {} is held out for validation by seed {}",
                self.files[0].display(),
                self.split
            )),
            _ => None,
        }
    }
}

/// Whether `file` is meant as a file: it is one, its name says so, or it has a folder in front.
fn is_file_name(file: &Path) -> bool {
    let name = file.to_string_lossy().to_lowercase();
    file.is_file() || file.components().count() > 1 || ENDS.iter().any(|end| name.ends_with(end))
}

/// The kinds that files are read as.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum ReadAs {
    Examples,
    Texts,
    Symbols,
    Words,
}

/// Names, and what their files were when they were read.
type Known = BTreeMap<(String, ReadAs), (Vec<Option<(u64, SystemTime)>>, &'static DataSetEntry)>;

/// Entries of files that were looked at. They are kept until the process ends, as those of the table are.
static KNOWN: Mutex<Known> = Mutex::new(BTreeMap::new());

/// The entry of the documents that `name` lists.
pub(crate) fn examples(
    name: &str,
) -> Result<Option<(&'static DataSetEntry, &'static ExampleTask)>, DataError> {
    Ok(entry(name, ReadAs::Examples)?.and_then(|set| Some((set, set.examples()?))))
}

/// The entry of the texts that `name` lists.
pub(crate) fn labelled(name: &str) -> Result<Option<(&'static DataSetEntry, &'static TextTask)>, DataError> {
    Ok(entry(name, ReadAs::Texts)?.and_then(|set| Some((set, set.texts()?))))
}

/// The entry of the symbols that `name` lists.
pub(crate) fn symbols(name: &str) -> Result<Option<(&'static DataSetEntry, &'static CharTask)>, DataError> {
    Ok(entry(name, ReadAs::Symbols)?.and_then(|set| Some((set, set.symbols()?))))
}

/// The entry of the words that `name` lists.
pub(crate) fn words(name: &str) -> Result<Option<(&'static DataSetEntry, &'static WordTask)>, DataError> {
    Ok(entry(name, ReadAs::Words)?.and_then(|set| Some((set, set.words()?))))
}

fn entry(name: &str, read: ReadAs) -> Result<Option<&'static DataSetEntry>, DataError> {
    let Some(files) = OwnFiles::of(name)? else { return Ok(None) };
    let state = |path: &Path| {
        let about = path.metadata().ok()?;
        Some((about.len(), about.modified().ok()?))
    };
    let tokenizer = Path::new(&files.tokenizer);
    let now: Vec<_> = files.files.iter().map(PathBuf::as_path).chain([tokenizer]).map(state).collect();
    let key = (name.to_owned(), read);
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((then, set)) = known.get(&key)
        && *then == now
    {
        return Ok(Some(set));
    }
    let set = leak(make(files, read)?);
    known.insert(key, (now, set));
    Ok(Some(set))
}

fn leak<T>(value: T) -> &'static T {
    Box::leak(Box::new(value))
}

fn word(text: String) -> &'static str {
    Box::leak(text.into_boxed_str())
}

/// Reads `files` once, to know what an entry says.
fn make(files: OwnFiles, read: ReadAs) -> Result<DataSetEntry, DataError> {
    if matches!(read, ReadAs::Symbols | ReadAs::Words | ReadAs::Texts) && files.tokenizer != "bytes" {
        let (name, tokenizer) = (&files.name, &files.tokenizer);
        return Err(DataError::Unknown(format!(
            "{name}: tokenizer={tokenizer} is for lra; charlm reads bytes, wordlm reads words, finetune reads by the tokenizer of its encoder"
        )));
    }
    let files = leak(files);
    let name = files.name.as_str();
    let (records, kind) = match read {
        ReadAs::Examples => examples_of(files)?,
        ReadAs::Texts => {
            let set = OwnTexts::read(files)?;
            let classes: Vec<&'static str> = set.classes.iter().map(|class| word(class.clone())).collect();
            let train = set.splits[0].len();
            let load = leak(move |_: &Path, _| OwnTexts::read(files).map(|set| set.labelled(files)));
            (set.records(), DataKind::Texts(TextTask { classes: leak(classes), train, load }))
        }
        ReadAs::Symbols => {
            let corpus = corpora::symbols(files)?;
            let sizes = corpus.parts.each_ref().map(|part| part.len().to_string());
            let load = leak(move |_: &Path, _| corpora::symbols(files));
            let kind = DataKind::Symbols(CharTask { vocabulary: corpus.vocabulary, complete: None, load });
            (format!("{} bytes", sizes.join(" / ")), kind)
        }
        ReadAs::Words => {
            let corpus = corpora::words(files)?;
            let sizes = [&corpus.train[..], &corpus.validation[..], corpus.tested()]
                .map(|part| part.len().to_string());
            let load = leak(move |_: &Path, _| corpora::words(files));
            let vocabulary = corpus.vocabulary.len();
            let kind = DataKind::Words(WordTask { vocabulary, complete: None, load });
            (format!("{} words", sizes.join(" / ")), kind)
        }
    };
    Ok(DataSetEntry {
        name,
        collection: name,
        title: name,
        about: "files of your own",
        records: word(records),
        kind,
        origin: Origin::UserProvided("the files that the name lists"),
        locate: |_| Ok(None),
    })
}

fn examples_of(files: &'static OwnFiles) -> Result<(String, DataKind), DataError> {
    let documents = OwnDocuments::read(files)?;
    let reading = &documents.reading;
    let (least, most) = LENGTHS;
    let task = ExampleTask {
        vocabulary: reading.vocabulary()?,
        classes: reading.classes.len(),
        len: documents.longest().next_power_of_two().clamp(least, most),
        train: crate::Dataset::len(&documents, Split::Train),
        text: reading.units == TextUnits::Bytes,
        load: leak(move |_: &Path, _| Ok(Box::new(OwnDocuments::read(files)?) as Box<dyn crate::Dataset>)),
    };
    let kind = if reading.pairs { DataKind::Pairs(task) } else { DataKind::Sequences(task) };
    Ok((documents.records(), kind))
}

/// How the tables that `name` lists are divided, in words; nothing where there are three, and for data sets of the table.
pub fn division(name: &str) -> Option<String> {
    OwnFiles::of(name).ok()??.division()
}

/// How the running text that `name` lists is divided, in words; nothing where there are three files, and for corpora of the table.
pub fn order(name: &str) -> Option<String> {
    let files = OwnFiles::of(name).ok()??.files;
    let first = files[0].display();
    match files.len() {
        1 => Some(format!(
            "{first} is divided in its order: 90 % training, 5 % validation, 5 % test; give three files (--data train,val,test) \
             for parts of your own"
        )),
        2 => Some(format!("the last twentieth of {first} is held out for validation")),
        _ => None,
    }
}

/// Sizes of the splits of the files that `name` lists, once they were read.
pub fn records(name: &str) -> Option<&'static str> {
    let known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    let of = |((own, _), (_, set)): (&(String, ReadAs), &(_, &'static DataSetEntry))| {
        (own == name).then_some(set.records)
    };
    known.iter().find_map(of)
}

/// Whether `name` lists files of a person's own.
pub fn is_own(name: &str) -> bool {
    matches!(OwnFiles::of(name), Ok(Some(_)))
}

#[cfg(test)]
mod tests;
