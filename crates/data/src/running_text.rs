//! Running text for masked language models: training texts, texts that are held out, and their checksum.
//!
//! A text (a review, a paragraph, a line) is what ends with `</s>`. Blank texts are left out.

use std::path::{Path, PathBuf};

use super::content_hash::ContentHash;
use super::lra_text::LraText;
use super::wikitext::{self, Part};
use super::{DataError, Dataset, Split, store, story};
use effattn_record::config::registry::Registry;
use effattn_record::config::unknown;

/// Every twentieth text is held out where a source has no validation part of its own.
const HELD_OUT: usize = 20;
/// Most bytes of one file.
const LARGEST: u64 = 2 << 30;

/// Texts that are held out.
pub struct HeldOut {
    /// The source they are from.
    pub name: String,
    /// The texts.
    pub texts: Vec<String>,
}

/// The texts of a source.
pub struct RunningText {
    /// Trained on.
    pub train: Vec<String>,
    /// Validated on; the first is what learning curves show.
    pub held_out: Vec<HeldOut>,
    /// What a tokenizer sees besides the training texts.
    pub besides: Vec<String>,
    /// SHA-256 of everything that was read.
    pub hash: String,
    /// What is missing, in words.
    pub partial: Option<String>,
}

/// A source of running text.
pub struct TextSource {
    /// Its name as a task.
    pub name: &'static str,
    /// Loads it from a folder; the flag permits incomplete data.
    pub load: fn(&Path, bool) -> Result<RunningText, DataError>,
}

/// Every source of the crate.
pub static SOURCES: &[&TextSource] = &[
    &TextSource { name: "imdb", load: imdb },
    &TextSource { name: "wikitext-103", load: wikitext },
    &TextSource { name: "sample", load: sample },
];

static ALL: Registry<TextSource> = Registry::new(SOURCES);

/// Adds a source at run time (a library user's own, or a test's).
pub fn register(source: &'static TextSource) {
    ALL.add(source);
}

/// Names of the sources, for help.
pub fn names() -> Vec<&'static str> {
    ALL.all().iter().map(|source| source.name).collect()
}

/// Makes sure that `name` is a source, or looks like a path.
pub fn known(name: &str) -> Result<(), DataError> {
    let path = Path::new(name);
    if names().contains(&name) || path.components().count() > 1 || path.exists() {
        return Ok(());
    }
    let names = unknown("text", name, names());
    Err(DataError::Unknown(format!("{names}, or a file or folder with text of your own")))
}

/// The texts of the source called `name` in `dir`, or of the file or folder `name`.
pub fn load(name: &str, dir: &Path, allow_partial: bool) -> Result<RunningText, DataError> {
    known(name)?;
    match ALL.all().iter().find(|source| source.name == name) {
        Some(source) => (source.load)(dir, allow_partial),
        None => own(Path::new(name)),
    }
}

impl RunningText {
    /// The texts of a source that has no parts of its own: every twentieth is held out, blank ones are left out.
    pub fn of(name: &str, texts: Vec<String>) -> Self {
        Self::new(name, texts).finish()
    }

    fn new(name: &str, texts: Vec<String>) -> Self {
        let (mut train, mut held_out) = (Vec::new(), Vec::new());
        for (at, text) in texts.into_iter().filter(|text| !text.trim().is_empty()).enumerate() {
            let side = if at % HELD_OUT == HELD_OUT - 1 { &mut held_out } else { &mut train };
            side.push(text);
        }
        let held_out = vec![HeldOut { name: name.to_owned(), texts: held_out }];
        Self { train, held_out, besides: Vec::new(), hash: String::new(), partial: None }
    }

    fn finish(mut self) -> Self {
        let mut content = ContentHash::default();
        let held_out = self.held_out.iter().map(|held| &held.texts);
        for part in [&self.train, &self.besides].into_iter().chain(held_out) {
            content.number(part.len() as u64);
            part.iter().for_each(|text| content.field(text.as_bytes()));
        }
        self.hash = content.finish();
        self
    }
}

/// The training reviews of IMDb, every twentieth held out, and the validation part of WikiText-103; a tokenizer sees all
/// reviews and the test part (`docs/spec/SPEC-text.md` section 10).
fn imdb(dir: &Path, allow_partial: bool) -> Result<RunningText, DataError> {
    let reviews = LraText::load(dir, false, allow_partial)?;
    let review = |at: usize| {
        let bytes = reviews.example(Split::Train, at, usize::MAX).tokens;
        let bytes: Vec<u8> = bytes.into_iter().map(|id| (id - 1) as u8).collect(); // ids are bytes + 1
        String::from_utf8_lossy(&bytes).into_owned()
    };
    let mut prose = RunningText::new("imdb", (0..reviews.len(Split::Train)).map(review).collect());
    let (mut texts, other) = wikitext::prose(dir, &[Part::Test, Part::Valid], allow_partial)?;
    prose.held_out.extend(texts.pop().map(|texts| HeldOut { name: "wikitext-103".to_owned(), texts }));
    prose.besides = prose.held_out[0].texts.iter().cloned().chain(texts.into_iter().flatten()).collect();
    let partial: Vec<String> = reviews.partial().map(str::to_owned).into_iter().chain(other).collect();
    prose.partial = (!partial.is_empty()).then(|| partial.join("; "));
    Ok(prose.finish())
}

/// WikiText-103: paragraphs and headings of its training part, validated on its validation part.
fn wikitext(dir: &Path, allow_partial: bool) -> Result<RunningText, DataError> {
    let mut prose = RunningText::new("wikitext-103", Vec::new());
    let (mut texts, partial) = wikitext::prose(dir, &[Part::Train, Part::Valid], allow_partial)?;
    prose.held_out[0].texts = texts.pop().unwrap_or_default();
    prose.train = texts.pop().unwrap_or_default();
    prose.partial = partial;
    Ok(prose.finish())
}

/// The lines of `file` that are not blank.
fn lines(file: &Path) -> Result<Vec<String>, DataError> {
    let broken = |error: std::io::Error| store::bad_file(file, format!("cannot be read ({error})"));
    let bytes = store::read_limited(store::open(file)?, LARGEST).map_err(broken)?;
    let text = String::from_utf8(bytes).map_err(|error| {
        let before = &error.as_bytes()[..error.utf8_error().valid_up_to()];
        let line = 1 + before.iter().filter(|byte| **byte == b'\n').count();
        DataError::Line { file: file.to_owned(), line, reason: "is not UTF-8; convert the file".to_owned() }
    })?;
    Ok(text.lines().filter(|line| !line.trim().is_empty()).map(str::to_owned).collect())
}

/// The little text that ships with the program, line by line.
fn sample(_: &Path, _: bool) -> Result<RunningText, DataError> {
    let text = String::from_utf8_lossy(&story::text()).into_owned();
    let mut prose = RunningText::new("sample", text.lines().map(str::to_owned).collect());
    prose.partial = Some("the little text that ships with the program".to_owned());
    Ok(prose.finish())
}

/// A person's own text: a file, or every file below a folder whose name ends in `.txt` (or `.txt.gz`).
fn own(path: &Path) -> Result<RunningText, DataError> {
    let mut files = Vec::new();
    if path.is_dir() {
        collect(path, &mut files)?;
        files.sort();
        if files.is_empty() {
            return Err(store::bad_file(path, "contains no file whose name ends in .txt"));
        }
    } else {
        files.push(path.to_owned());
    }
    let mut all = Vec::new();
    for file in &files {
        all.extend(lines(file)?);
    }
    if all.len() < HELD_OUT {
        let reason = format!("has {} lines of text; at least {HELD_OUT} are needed", all.len());
        return Err(store::bad_file(path, reason));
    }
    Ok(RunningText::of(&path.display().to_string(), all))
}

fn collect(folder: &Path, files: &mut Vec<PathBuf>) -> Result<(), DataError> {
    let broken = |error: std::io::Error| store::bad_file(folder, format!("cannot be listed ({error})"));
    for entry in std::fs::read_dir(folder).map_err(broken)? {
        let entry = entry.map_err(broken)?;
        let (path, kind) = (entry.path(), entry.file_type().map_err(broken)?);
        if kind.is_dir() {
            collect(&path, files)?;
        } else if path.to_string_lossy().ends_with(".txt") || path.to_string_lossy().ends_with(".txt.gz") {
            files.push(path);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_persons_own_text_is_read_line_by_line() {
        let folder = tempfile::tempdir().unwrap();
        let below = folder.path().join("b");
        std::fs::create_dir(&below).unwrap();
        let text = |from: usize| (from..from + 20).map(|n| format!("line {n}\n\n")).collect::<String>();
        std::fs::write(below.join("x.txt"), text(20)).unwrap();
        std::fs::write(folder.path().join("a.txt"), text(0)).unwrap();
        std::fs::write(folder.path().join("c.png"), "no text").unwrap();
        let name = folder.path().display().to_string();
        let prose = load(&name, Path::new(""), false).unwrap();
        assert_eq!(
            (prose.train.len(), prose.held_out[0].texts.as_slice()),
            (38, &["line 19", "line 39"].map(str::to_owned)[..])
        );
        assert_eq!(prose.train[19], "line 20");
        let hash = prose.hash;
        std::fs::write(folder.path().join("a.txt"), text(1)).unwrap();
        assert_ne!(load(&name, Path::new(""), false).unwrap().hash, hash);
    }

    #[test]
    fn what_is_no_text_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let says = |name: &str| load(name, folder.path(), false).err().expect("refused").to_string();
        assert!(says("imbd").contains("did you mean imdb") && says("imbd").contains("of your own"));
        assert!(says("wikitext-103").contains("place wiki.train.tokens, wiki.valid.tokens"));
        let name = folder.path().display().to_string();
        assert!(says(&name).contains("ends in .txt"));
        let file = folder.path().join("a.txt");
        std::fs::write(&file, b"one\ntwo\nthr\xffee\n").unwrap();
        assert!(says(&name).contains("a.txt:3: is not UTF-8"), "{}", says(&name));
        std::fs::write(&file, "one\n").unwrap();
        assert!(says(&name).contains("has 1 lines"), "{}", says(&name));
        assert!(says(&folder.path().join("none").display().to_string()).contains("cannot be opened"));
    }
}
