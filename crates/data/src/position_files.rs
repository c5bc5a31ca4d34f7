//! Files of examples with labels at positions, for other programs: TSV, or arrays for NumPy.

use std::fmt::Write as _;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use zip::write::{SimpleFileOptions, ZipWriter};

use crate::position_labels::{PositionExample, PositionTask, Segment};
use crate::{DataKind, DataSetEntry, Origin, Split, WriteFormat};
use effattn_record::file;

/// The formats in which `fetch` writes such a set.
pub const FORMATS: &[WriteFormat] = &[
    WriteFormat {
        name: "tsv",
        about: "one example a line: tokens, then a label or - for each",
        write: write_tsv,
    },
    WriteFormat {
        name: "npz",
        about: "arrays of NumPy: tokens, and labels with -100 where there is none",
        write: write_npz,
    },
];

/// The entry of a task whose examples are drawn from a seed.
pub const fn set(
    name: &'static str,
    title: &'static str,
    about: &'static str,
    task: PositionTask,
) -> DataSetEntry {
    DataSetEntry {
        name,
        collection: name,
        title,
        about,
        records: "any number, drawn from a seed",
        kind: DataKind::Positions(task),
        origin: Origin::Generated { formats: FORMATS, instead: None },
        locate: |_| Ok(None),
    }
}

/// Seed of the written examples.
const SEED: u64 = 0;
/// Examples per segment: trained on, validated on, tested on.
const COUNTS: [u64; 3] = [10_000, 500, 1000];

/// Examples of one segment of one split.
struct Part {
    /// `train 64:4`.
    split: Split,
    segment: Segment,
    examples: Vec<PositionExample>,
}

fn parts(task: &PositionTask) -> io::Result<Vec<Part>> {
    let mut parts = Vec::new();
    for (split, count) in Split::ALL.into_iter().zip(COUNTS) {
        let segments = if split == Split::Train { task.train } else { task.test };
        for segment in Segment::list(segments.iter().copied()).map_err(io::Error::other)? {
            let draw = |index| task.example((&segment, task.alphabet), (SEED, split), index);
            parts.push(Part { split, segment, examples: (0..count).map(draw).collect() });
        }
    }
    Ok(parts)
}

fn task(set: &DataSetEntry) -> io::Result<&PositionTask> {
    set.positions().ok_or_else(|| io::Error::other(format!("{} has no labels at positions", set.name)))
}

/// The labels of an example by position; `None` where there is none.
fn by_position(example: &PositionExample) -> Vec<Option<u32>> {
    let mut labels = vec![None; example.tokens.len()];
    example.labels.iter().for_each(|(position, label)| labels[*position] = Some(*label));
    labels
}

fn write_tsv(set: &DataSetEntry, dir: &Path) -> io::Result<Vec<PathBuf>> {
    let parts = parts(task(set)?)?;
    let mut written = Vec::new();
    for split in Split::ALL {
        let path = dir.join(format!("{}_{}.tsv", set.name, split.name()));
        file::write_with(&path, |file| {
            let mut out = BufWriter::new(file);
            out.write_all(b"Segment\tTokens\tLabels\n")?;
            for part in parts.iter().filter(|part| part.split == split) {
                for example in &part.examples {
                    let tokens = example.tokens.iter().map(u32::to_string).collect::<Vec<_>>().join(" ");
                    let word =
                        |label: &Option<u32>| label.map_or_else(|| "-".to_owned(), |label| label.to_string());
                    let labels = by_position(example).iter().map(word).collect::<Vec<_>>().join(" ");
                    writeln!(out, "{}\t{tokens}\t{labels}", part.segment)?;
                }
            }
            out.flush()
        })?;
        written.push(path);
    }
    Ok(written)
}

fn write_npz(set: &DataSetEntry, dir: &Path) -> io::Result<Vec<PathBuf>> {
    let parts = parts(task(set)?)?;
    let path = dir.join(format!("{}.npz", set.name));
    file::write_with(&path, |file| {
        let mut archive = ZipWriter::new(file);
        for Part { split, segment, examples } in &parts {
            let len = examples.iter().map(|example| example.tokens.len()).max().unwrap_or(0);
            let rows = |name: &str, fill: i32, row: &dyn Fn(&PositionExample) -> Vec<i32>| {
                let mut values = Vec::with_capacity(examples.len() * len);
                for example in examples {
                    values.extend(row(example));
                    values.resize(values.len().next_multiple_of(len.max(1)), fill);
                }
                (format!("{}_{segment}_{name}.npy", split.name()), values)
            };
            let tokens =
                rows("tokens", 0, &|example| example.tokens.iter().map(|token| *token as i32).collect());
            let label = |label: Option<u32>| label.map_or(-100, |label| label as i32);
            let labels =
                rows("labels", -100, &|example| by_position(example).into_iter().map(label).collect());
            for (name, values) in [tokens, labels] {
                archive.start_file(name, SimpleFileOptions::default()).map_err(io::Error::other)?;
                archive.write_all(&array(&values, [examples.len(), len]))?;
            }
        }
        archive.finish().map_err(io::Error::other)?;
        Ok(())
    })?;
    Ok(vec![path])
}

/// An array of NumPy, version 1 of its format: a header of a multiple of 64 bytes, then the values.
fn array(values: &[i32], [rows, columns]: [usize; 2]) -> Vec<u8> {
    let mut header = String::new();
    let _ = write!(header, "{{'descr': '<i4', 'fortran_order': False, 'shape': ({rows}, {columns}), }}");
    let room = (10 + header.len() + 1).next_multiple_of(64) - 10;
    header.push_str(&" ".repeat(room - 1 - header.len()));
    header.push('\n');
    let mut bytes = b"\x93NUMPY\x01\x00".to_vec();
    bytes.extend((header.len() as u16).to_le_bytes());
    bytes.extend(header.as_bytes());
    bytes.extend(values.iter().flat_map(|value| value.to_le_bytes()));
    bytes
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;
    use crate::{mqar, parity};

    #[test]
    fn both_formats_hold_the_same_examples() {
        let dir = tempfile::tempdir().unwrap();
        let files = write_tsv(&mqar::SET, dir.path()).unwrap();
        let text = std::fs::read_to_string(&files[2]).unwrap();
        let line: Vec<&str> = text.lines().nth(1).unwrap().split('\t').collect();
        assert_eq!((line[0], text.lines().count()), ("64:4", 1 + 4 * 1000));
        let [npz] = &write_npz(&mqar::SET, dir.path()).unwrap()[..] else { panic!() };
        let mut archive = zip::ZipArchive::new(std::fs::File::open(npz).unwrap()).unwrap();
        for (name, column, none) in [("tokens", line[1], "0"), ("labels", line[2], "-100")] {
            let mut bytes = Vec::new();
            archive.by_name(&format!("test_64:4_{name}.npy")).unwrap().read_to_end(&mut bytes).unwrap();
            let first = &bytes[bytes.len() - 4 * 64 * 1000..][..4 * 64];
            let values =
                first.chunks(4).map(|value| i32::from_le_bytes(value.try_into().unwrap()).to_string());
            let expected = column.split(' ').map(|word| if word == "-" { none } else { word });
            assert!(values.eq(expected.map(str::to_owned)), "{name}");
            assert_eq!((bytes.len() - 4 * 64 * 1000) % 64, 0, "the header fills blocks");
            assert!(String::from_utf8_lossy(&bytes[..128]).contains("'shape': (1000, 64)"));
        }
    }

    #[test]
    fn examples_of_several_lengths_are_padded() {
        let dir = tempfile::tempdir().unwrap();
        let path = write_npz(&parity::SET, dir.path()).unwrap().remove(0);
        let mut archive = zip::ZipArchive::new(std::fs::File::open(path).unwrap()).unwrap();
        let mut bytes = Vec::new();
        archive.by_name("train_3..40_labels.npy").unwrap().read_to_end(&mut bytes).unwrap();
        assert!(String::from_utf8_lossy(&bytes[..128]).contains("'shape': (10000, 39)"));
    }
}
