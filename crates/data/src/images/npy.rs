//! CIFAR-10-C in its published form: an array of NumPy per corruption, `<corruption>.npy` [5 n, 32, 32, 3] with the
//! severities one behind the other, and the classes of all, `labels.npy` [5 n].

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::Path;

use image::RgbImage;

use super::{ImageSet, cifar};
use crate::content_hash::ContentHash;
use crate::{DataError, Split, store};
use effattn_record::file;

const SIDE: u32 = 32;
/// Bytes of an image.
pub const BYTES: usize = 3 * (SIDE * SIDE) as usize;
const SEVERITIES: usize = super::corrupt::SEVERITIES;
/// Most bytes of a header that are read.
const HEADER: usize = 1 << 16;
const MAGIC: &[u8] = b"\x93NUMPY";

/// One severity of one corruption.
pub struct Records {
    pixels: Vec<u8>,
    labels: Vec<u8>,
    classes: Vec<String>,
    hash: String,
}

impl Records {
    /// Severity `severity` (from 1) of `<corruption>.npy` in `root`.
    pub fn open(root: &Path, corruption: &str, severity: usize) -> Result<Self, DataError> {
        let file = root.join(format!("{corruption}.npy"));
        let (mut from, shape) = array(&file)?;
        let [images, 32, 32, 3] = shape[..] else {
            let reason = format!("an array {shape:?}, expected [n, 32, 32, 3]");
            return Err(store::bad_file(&file, reason));
        };
        let names = root.join("labels.npy");
        let (mut labels, of_labels) = array(&names)?;
        if of_labels != [images] || !images.is_multiple_of(SEVERITIES) {
            let reason = format!(
                "{} images and {of_labels:?} labels; expected as many, {SEVERITIES} severities of the same count",
                images
            );
            return Err(store::bad_file(&file, reason));
        }
        let count = images / SEVERITIES;
        let first = severity.clamp(1, SEVERITIES) - 1;
        let refuse = |error: io::Error| store::bad_file(&file, error.to_string());
        let pixels = part(&mut from, first * count * BYTES, count * BYTES).map_err(refuse)?;
        let labels = part(&mut labels, first * count, count).map_err(refuse)?;
        let classes = cifar::classes();
        if let Some(at) = labels.iter().position(|label| usize::from(*label) >= classes.len()) {
            let reason = format!("label {} is {}, expected 0 to 9", first * count + at, labels[at]);
            return Err(store::bad_file(&names, reason));
        }
        let mut content = ContentHash::default();
        content.field(&labels);
        content.field(&pixels);
        Ok(Self { pixels, labels, classes, hash: content.finish() })
    }
}

/// Opens an array of bytes: its file, at the first number, and its shape.
fn array(path: &Path) -> Result<(File, Vec<usize>), DataError> {
    let refuse = |reason: String| store::bad_file(path, reason);
    let mut from = file::open(path).map_err(|error| refuse(error.to_string()))?;
    let size = from.metadata().map_err(|error| refuse(error.to_string()))?.len();
    let mut start = [0u8; 10];
    from.read_exact(&mut start).map_err(|_| refuse("no array of NumPy (.npy)".to_owned()))?;
    let length = usize::from(u16::from_le_bytes([start[8], start[9]]));
    if !start.starts_with(MAGIC) || start[6] != 1 || length > HEADER {
        return Err(refuse("no array of NumPy (.npy, version 1)".to_owned()));
    }
    let mut header = vec![0; length];
    from.read_exact(&mut header).map_err(|_| refuse("the array is cut off".to_owned()))?;
    let header = String::from_utf8_lossy(&header);
    let value = |key: &str| header.split_once(key).map(|(_, behind)| behind.trim_start_matches([':', ' ']));
    let shape = value("'shape'").and_then(|behind| behind.strip_prefix('(')?.split_once(')'));
    let numbers = shape.map(|(shape, _)| shape.split(',').map(str::trim).filter(|word| !word.is_empty()));
    let shape: Option<Vec<usize>> = numbers.and_then(|words| words.map(|word| word.parse().ok()).collect());
    let bytes = value("'descr'").is_some_and(|behind| behind.starts_with("'|u1'"));
    let rows = value("'fortran_order'").is_some_and(|behind| behind.starts_with("False"));
    let (Some(shape), true, true) = (shape, bytes, rows) else {
        return Err(refuse(format!("an array {}; expected bytes (|u1) row by row", header.trim())));
    };
    let whole = shape.iter().try_fold(1u64, |all, side| all.checked_mul(*side as u64));
    let there = size.saturating_sub((start.len() + length) as u64);
    if whole != Some(there) {
        return Err(refuse(format!("{there} bytes behind its header, expected {shape:?}")));
    }
    Ok((from, shape))
}

fn part(from: &mut File, skip: usize, count: usize) -> io::Result<Vec<u8>> {
    from.seek(SeekFrom::Current(skip as i64))?;
    let mut bytes = vec![0; count];
    from.read_exact(&mut bytes)?;
    Ok(bytes)
}

/// The front of an array of bytes of `shape`.
pub fn front(to: &mut impl Write, shape: &[usize]) -> io::Result<()> {
    let sides: Vec<String> = shape.iter().map(usize::to_string).collect();
    let comma = if shape.len() == 1 { "," } else { "" };
    let shape = format!("({}{comma})", sides.join(", "));
    let mut header = format!("{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}, }}");
    while !(MAGIC.len() + 4 + header.len() + 1).is_multiple_of(64) {
        header.push(' ');
    }
    header.push('\n');
    to.write_all(MAGIC)?;
    to.write_all(&[1, 0])?;
    to.write_all(&(header.len() as u16).to_le_bytes())?;
    to.write_all(header.as_bytes())
}

impl ImageSet for Records {
    fn len(&self, split: Split) -> usize {
        if split == Split::Test { self.labels.len() } else { 0 }
    }

    fn classes(&self) -> &[String] {
        &self.classes
    }

    fn label(&self, _: Split, index: usize) -> u32 {
        u32::from(self.labels[index])
    }

    fn image(&self, _: Split, index: usize) -> Result<RgbImage, DataError> {
        let bytes = self.pixels[index * BYTES..][..BYTES].to_vec();
        Ok(RgbImage::from_raw(SIDE, SIDE, bytes).unwrap_or_default())
    }

    fn hash(&self) -> &str {
        &self.hash
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn put(path: &Path, shape: &[usize], of: impl Fn(usize) -> u8) {
        let mut file = File::create(path).unwrap();
        front(&mut file, shape).unwrap();
        let count = shape.iter().product();
        file.write_all(&(0..count).map(of).collect::<Vec<u8>>()).unwrap();
    }

    #[test]
    fn severities_lie_one_behind_the_other() {
        let dir = tempfile::tempdir().unwrap();
        put(&dir.path().join("fog.npy"), &[10, 32, 32, 3], |at| (at / BYTES * 20 + at % 3) as u8);
        put(&dir.path().join("labels.npy"), &[10], |at| at as u8 % 2 + 4);
        for severity in 1..=5 {
            let set = Records::open(dir.path(), "fog", severity).unwrap();
            assert_eq!((set.len(Split::Test), set.label(Split::Test, 1)), (2, 5));
            let shade = (20 * (2 * severity - 1)) as u8;
            assert_eq!(set.image(Split::Test, 1).unwrap().get_pixel(31, 31).0, [shade, shade + 1, shade + 2]);
        }
        // what NumPy writes: the header's end on a multiple of 64
        let bytes = std::fs::read(dir.path().join("labels.npy")).unwrap();
        assert_eq!((bytes.len() - 10) % 64, 0);
        assert!(bytes.windows(14).any(|part| part == b"'shape': (10,)"));
    }

    #[test]
    fn mistakes_are_named() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        let says = || Records::open(root, "fog", 1).err().unwrap().to_string();
        assert!(says().contains("fog.npy"), "{}", says());
        std::fs::write(root.join("fog.npy"), b"nothing").unwrap();
        assert!(says().contains("no array of NumPy"), "{}", says());
        put(&root.join("fog.npy"), &[10, 32, 32], |_| 0);
        assert!(says().contains("[10, 32, 32], expected [n, 32, 32, 3]"), "{}", says());
        put(&root.join("fog.npy"), &[10, 32, 32, 3], |_| 0);
        assert!(says().contains("labels.npy"), "{}", says());
        put(&root.join("labels.npy"), &[9], |_| 0);
        assert!(says().contains("10 images and [9] labels"), "{}", says());
        put(&root.join("labels.npy"), &[10], |_| 10);
        assert!(says().contains("label 0 is 10"), "{}", says());
        let whole = std::fs::read(root.join("fog.npy")).unwrap();
        std::fs::write(root.join("fog.npy"), &whole[..whole.len() - 1]).unwrap();
        assert!(says().contains("bytes behind its header"), "{}", says());
        let mut other = whole.clone();
        let at = whole.windows(3).position(|part| part == b"|u1").unwrap();
        other[at..at + 3].copy_from_slice(b"<f4");
        std::fs::write(root.join("fog.npy"), other).unwrap();
        assert!(says().contains("expected bytes"), "{}", says());
    }
}
