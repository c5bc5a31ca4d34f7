//! Texts with classes from tables of a person's own: which classes there are, and what belongs to which split.

use effattn_kernel::device::rng::RngStream;

use super::OwnFiles;
use super::table::{self, TableRow};
use crate::content_hash::ContentHash;
use crate::labelled::{LabelledTexts, Text};
use crate::{DataError, store};

/// Fewest rows of a file that is divided.
const FEWEST: usize = 10;

/// The texts of a person's files.
pub(super) struct OwnTexts {
    /// Names of the classes: numbers in their order, else in the order of code points.
    pub classes: Vec<String>,
    /// Training, validation and test texts.
    pub splits: [Vec<Text>; 3],
}

impl OwnTexts {
    /// Reads and divides `files`.
    pub fn read(files: &OwnFiles) -> Result<Self, DataError> {
        let tables = files.files.iter().map(|file| table::read(file)).collect::<Result<Vec<_>, _>>()?;
        let (first, pairs) = (&files.files[0], tables[0][0].second.is_some());
        for (file, rows) in files.files.iter().zip(&tables) {
            if let Some(row) = rows.iter().find(|row| row.second.is_some() != pairs) {
                let [one, other] = ["one text", "two texts"];
                let (here, there) = if pairs { (one, other) } else { (other, one) };
                let reason = format!("has {here} where {} has {there}", first.display());
                return Err(DataError::Line { file: file.clone(), line: row.line, reason });
            }
        }
        let classes = classes(&tables[0]);
        if let [only] = classes.as_slice() {
            let reason = format!("every label is {only:?}; a classifier needs at least two classes");
            return Err(store::bad_file(first, reason));
        }
        let mut texts = Vec::new();
        for (file, rows) in files.files.iter().zip(tables) {
            let numbered = rows.into_iter().map(|row| {
                let at =
                    classes.iter().position(|class| *class == row.label).ok_or_else(|| DataError::Line {
                        file: file.clone(),
                        line: row.line,
                        reason: unknown_label(&row.label, &classes, &first.display().to_string()),
                    })?;
                Ok(Text { first: row.first, second: row.second, label: at as u32 })
            });
            texts.push(numbered.collect::<Result<Vec<_>, DataError>>()?);
        }
        Ok(Self { classes, splits: divide(files, texts)? })
    }

    /// `800 / 100 / 100 texts, 2 classes`.
    pub fn records(&self) -> String {
        let [train, validation, test] = self.splits.each_ref().map(Vec::len);
        format!("{train} / {validation} / {test} texts, {} classes", self.classes.len())
    }

    /// SHA-256 of texts, names of classes and splits.
    pub fn hash(&self) -> String {
        let mut content = ContentHash::default();
        content.number(self.classes.len() as u64);
        self.classes.iter().for_each(|class| content.field(class.as_bytes()));
        for side in &self.splits {
            content.number(side.len() as u64);
            for text in side {
                content.field(text.first.as_bytes());
                content.field(text.second.as_deref().unwrap_or_default().as_bytes());
                content.number(u64::from(text.label));
            }
        }
        content.finish()
    }

    /// The same for models with a tokenizer.
    pub fn labelled(self, files: &OwnFiles) -> LabelledTexts {
        let hash = self.hash();
        let [train, held_out, test] = self.splits;
        let set = LabelledTexts::new(train, test).selected_on(held_out);
        set.with_hash(hash).said(None, files.division().into_iter().collect())
    }
}

/// What is said of a label that was not trained on.
pub(super) fn unknown_label(label: &str, classes: &[String], from: &str) -> String {
    let known: Vec<&str> = classes.iter().take(12).map(String::as_str).collect();
    let more = if classes.len() > known.len() { ", ..." } else { "" };
    format!("the label {label:?} is none of those in {from}: {}{more}", known.join(", "))
}

fn classes(rows: &[TableRow]) -> Vec<String> {
    let mut all: Vec<String> = rows.iter().map(|row| row.label.clone()).collect();
    all.sort();
    all.dedup();
    if let Ok(mut numbers) = all.iter().map(|class| class.parse::<i64>()).collect::<Result<Vec<_>, _>>() {
        let same = |number: &i64| number.to_string();
        numbers.sort_unstable();
        if numbers.len() == all.len()
            && all.iter().all(|class| numbers.iter().any(|number| same(number) == *class))
        {
            return numbers.iter().map(same).collect();
        }
    }
    all
}

/// Training, validation and test texts of one, two or three files.
fn divide(files: &OwnFiles, mut texts: Vec<Vec<Text>>) -> Result<[Vec<Text>; 3], DataError> {
    let last = if texts.len() > 1 { texts.pop() } else { None };
    let mut drawn = std::mem::take(&mut texts[0]);
    if let (Some(test), Some(validation)) = (last.as_ref(), texts.get_mut(1)) {
        return Ok([drawn, std::mem::take(validation), test.clone()]);
    }
    let count = drawn.len();
    if count < FEWEST {
        let reason = format!(
            "has {count} rows, which are too few to hold some out ({FEWEST} are needed); give three files: --data train,val,test"
        );
        return Err(store::bad_file(&files.files[0], reason));
    }
    let tenth = count / 10;
    let order = RngStream::new(files.split, "own/split").permutation(count);
    let mut place = vec![0u8; count];
    let held = if last.is_some() { 1 } else { 2 };
    for (rank, &at) in order.iter().take(held * tenth).enumerate() {
        place[at] = if rank < tenth { 1 } else { 2 };
    }
    let mut splits = [Vec::new(), Vec::new(), Vec::new()];
    drawn.drain(..).zip(place).for_each(|(text, place)| splits[usize::from(place)].push(text));
    if let Some(test) = last {
        splits[2] = test;
    }
    Ok(splits)
}
