//! Parity: whether a row of binary digits has an odd number of ones. Read from `parity.txt` (one example a line: digits,
//! a blank, the class), or generated where there is none.

use std::io;
use std::path::{Path, PathBuf};

use effattn::data::content_hash::ContentHash;
use effattn::data::{
    DataError, DataKind, DataSetEntry, Dataset, Example, ExampleTask, LoadOptions, Origin, Split,
    WriteFormat, store,
};

/// The table line.
pub static SET: DataSetEntry = DataSetEntry {
    name: "odd-ones",
    collection: "odd-ones",
    title: "Parity",
    about: "whether a row of binary digits has an odd number of ones",
    records: "512 / 128 / 128 rows of digits",
    kind: DataKind::Sequences(ExampleTask {
        vocabulary: 3,
        classes: 2,
        len: 12,
        train: SIZES[0],
        text: false,
        load: &load,
    }),
    origin: Origin::Generated {
        formats: &[WriteFormat { name: "text", about: "one example a line", write }],
        instead: Some("parity.txt"),
    },
    locate: |dir| Ok(store::find_file(dir, &["parity.txt"])),
};

/// Examples of each split; a file has them one split after another.
const SIZES: [usize; 3] = [512, 128, 128];
/// Longest line that is read.
const LONGEST: usize = 1 << 10;

/// The lines of the generated set: every number of ten bits, in an order that mixes them.
fn generated() -> impl Iterator<Item = String> {
    let numbers = (0..SIZES.iter().sum::<usize>()).map(|index| index * 389 % 1024);
    numbers.map(|number| format!("{number:010b} {}\n", number.count_ones() % 2))
}

fn write(_: &DataSetEntry, dir: &Path) -> io::Result<Vec<PathBuf>> {
    let path = dir.join("parity.txt");
    std::fs::write(&path, generated().collect::<String>())?;
    Ok(vec![path])
}

/// The rows, one split after another.
struct Parity {
    rows: Vec<(Vec<u32>, u32)>,
    hash: String,
}

fn load(dir: &Path, _: LoadOptions) -> Result<Box<dyn Dataset>, DataError> {
    let mut content = ContentHash::default(); // everything that is read goes into it
    let mut rows = Vec::new();
    let mut take = |line: &str| -> Result<(), String> {
        let (digits, class) =
            line.trim_end().split_once(' ').ok_or("has no blank between digits and class")?;
        let tokens = digits.chars().map(|digit| digit.to_digit(2).map(|digit| digit + 1)); // 0 is padding
        let tokens = tokens.collect::<Option<Vec<u32>>>().ok_or("has other digits than 0 and 1")?;
        let label = class.parse::<u32>().ok().filter(|class| *class < 2).ok_or("has no class 0 or 1")?;
        content.field(line.as_bytes());
        rows.push((tokens, label));
        Ok(())
    };
    match (SET.locate)(dir)? {
        Some(file) => store::each_line(&file, LONGEST, |_, line| take(&String::from_utf8_lossy(line)))?,
        None => {
            generated().try_for_each(|line| take(&line)).map_err(|reason| store::bad_file(dir, reason))?
        }
    }
    if rows.len() != SIZES.iter().sum::<usize>() {
        let missing = format!("{} of {} rows", rows.len(), SIZES.iter().sum::<usize>());
        return Err(DataError::Partial { what: SET.title, dir: dir.to_owned(), missing });
    }
    Ok(Box::new(Parity { rows, hash: content.finish() }))
}

impl Dataset for Parity {
    fn len(&self, split: Split) -> usize {
        match split {
            Split::Train => SIZES[0],
            Split::Validation => SIZES[1],
            Split::Test => SIZES[2],
        }
    }

    fn example(&self, split: Split, index: usize, max_len: usize) -> Example {
        let first = match split {
            Split::Train => 0,
            Split::Validation => SIZES[0],
            Split::Test => SIZES[0] + SIZES[1],
        };
        let (tokens, label) = &self.rows[first + index];
        Example { tokens: tokens.iter().copied().take(max_len).collect(), second: None, label: *label }
    }

    fn hash(&self) -> &str {
        &self.hash
    }

    fn partial(&self) -> Option<&str> {
        None
    }
}
