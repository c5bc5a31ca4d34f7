//! Makes corrupted sets of images that a person has, in the layouts of the published ones (`SPEC-vision.md` section 12).
//! What is there already is not made again: a set that was interrupted is made to its end by the same command.

use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use image::RgbImage;
use image::codecs::jpeg::JpegEncoder;
use rayon::prelude::*;

use super::cifar::Cifar;
use super::corrupt::{CORRUPTIONS, SEVERITIES};
use super::folder::Tree;
use super::transform::{Interpolation, centre_crop, resize_short};
use super::{ImageSet, decode, npy};
use crate::{DataError, Split, store};
use effattn_record::file;

/// Seed of everything that corruptions draw.
const SEED: u64 = 0;
/// Sides that images are resized and then cropped to, as in ImageNet-C.
const RESIZED: u32 = 256;
const CROPPED: u32 = 224;
/// Quality of the files.
const QUALITY: u8 = 85;

/// Hears how many of all images are made.
pub type Heard<'a> = &'a (dyn Fn(u64, u64) + Sync);

/// Corrupts the images of the class folders in `from` into `<corruption>/<severity>/<class>/<image>` below `to`; the number
/// of files that were made.
///
/// # Errors
/// Folders without images, an image that cannot be read, a folder that cannot be written.
pub fn tree(from: &Path, to: &Path, heard: Heard) -> Result<u64, DataError> {
    let tree = Tree::open(from)?;
    let mut folders = Vec::new();
    for corruption in &CORRUPTIONS {
        for severity in 1..=SEVERITIES {
            folders.push((corruption, severity, to.join(corruption.name).join(severity.to_string())));
        }
    }
    for (class, (_, _, folder)) in
        tree.classes().iter().flat_map(|class| folders.iter().map(move |f| (class, f)))
    {
        let folder = folder.join(class);
        std::fs::create_dir_all(&folder).map_err(|error| store::bad_file(&folder, error.to_string()))?;
        file::sweep(&folder);
    }
    let (done, made) = (AtomicU64::new(0), AtomicU64::new(0));
    let all = tree.files().len() as u64;
    tree.files().par_iter().try_for_each(|(path, label)| {
        let class = &tree.classes()[*label as usize];
        let name = stored(path);
        let place = |folder: &PathBuf| folder.join(class).join(&name);
        let open: Vec<_> = folders.iter().filter(|(_, _, folder)| !place(folder).exists()).collect();
        if !open.is_empty() {
            let image = decode::read(path)?;
            let image = centre_crop(&resize_short(&image, RESIZED, Interpolation::Bilinear), CROPPED);
            for (corruption, severity, folder) in open {
                let spoiled = corruption.apply(&image, *severity, (SEED, &format!("{class}/{name}")));
                let target = place(folder);
                write(&target, &spoiled).map_err(|error| store::bad_file(&target, error.to_string()))?;
                made.fetch_add(1, Ordering::Relaxed);
            }
        }
        heard(1 + done.fetch_add(1, Ordering::Relaxed), all);
        Ok(())
    })?;
    Ok(made.into_inner())
}

/// The name of a corrupted image: that of the JPEG it comes from, with an ending where it was none.
fn stored(path: &Path) -> String {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let ending = path.extension().unwrap_or_default().to_string_lossy().to_lowercase();
    if ending == "png" { format!("{name}.jpg") } else { name.into_owned() }
}

/// A JPEG that is there completely or not at all. It is not synced: millions would take days, and can be made again.
fn write(path: &Path, image: &RgbImage) -> io::Result<()> {
    let mut bytes = Vec::new();
    JpegEncoder::new_with_quality(&mut bytes, QUALITY).encode_image(image).map_err(io::Error::other)?;
    let mut part = file::beside(path)?;
    part.write_all(&bytes)?;
    part.persist(path).map_err(|error| error.error)?;
    Ok(())
}

/// Corrupts CIFAR-10's test images in `dir` into `<corruption>.npy` and `labels.npy` below `to`; the number of arrays of
/// images that were made, and what is missing of CIFAR-10.
///
/// # Errors
/// No CIFAR-10 in `dir`, a folder that cannot be written.
pub fn cifar(dir: &Path, to: &Path, heard: Heard) -> Result<(u64, Option<String>), DataError> {
    let set = Cifar::load(dir, true)?;
    let count = set.len(Split::Test);
    let refuse = |path: &Path| {
        let path = path.to_owned();
        move |error: io::Error| store::bad_file(&path, error.to_string())
    };
    std::fs::create_dir_all(to).map_err(refuse(to))?;
    file::sweep(to);
    let labels = to.join("labels.npy");
    let all: Vec<u8> =
        (0..count).map(|index| set.label(Split::Test, index) as u8).collect::<Vec<_>>().repeat(SEVERITIES);
    let fill = |file: &mut File| npy::front(file, &[all.len()]).and_then(|()| file.write_all(&all));
    file::write_with(&labels, fill).map_err(refuse(&labels))?;
    let mut made = 0;
    for (number, corruption) in CORRUPTIONS.iter().enumerate() {
        let path = to.join(format!("{}.npy", corruption.name));
        if !path.exists() {
            let one = |at: usize| {
                let (severity, index) = (at / count + 1, at % count);
                let image = set.image(Split::Test, index)?;
                Ok(corruption.apply(&image, severity, (SEED, &index.to_string())).into_raw())
            };
            let images: Result<Vec<Vec<u8>>, DataError> =
                (0..SEVERITIES * count).into_par_iter().map(one).collect();
            let images = images?;
            let fill = |file: &mut File| {
                npy::front(file, &[images.len(), 32, 32, 3])?;
                let mut file = io::BufWriter::with_capacity(1 << 20, file);
                images.iter().try_for_each(|image| file.write_all(image))?;
                file.flush()
            };
            file::write_with(&path, fill).map_err(refuse(&path))?;
            made += 1;
        }
        heard(number as u64 + 1, CORRUPTIONS.len() as u64);
    }
    Ok((made, set.partial().map(str::to_owned)))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::super::test_only::challenge;
    use super::*;

    fn files(root: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
        let (mut waiting, mut found) = (vec![root.to_owned()], BTreeMap::new());
        while let Some(path) = waiting.pop() {
            if path.is_dir() {
                waiting.extend(std::fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path()));
            } else {
                found.insert(path.strip_prefix(root).unwrap().to_owned(), std::fs::read(&path).unwrap());
            }
        }
        found
    }

    fn picture(seed: u32) -> RgbImage {
        RgbImage::from_fn(40, 30, |x, y| image::Rgb([(seed * x) as u8, (5 * y) as u8, (x * y) as u8]))
    }

    #[test]
    fn a_tree_is_made_once_and_to_the_same_bytes() {
        let dir = tempfile::tempdir().unwrap();
        for (name, seed) in [("val/a/1.png", 3), ("val/b/1.jpg", 5)] {
            let path = dir.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            picture(seed).save(path).unwrap();
        }
        let (from, to) = (dir.path().join("val"), dir.path().join("folder-c"));
        assert_eq!(tree(&from, &to, &|_, _| ()).unwrap(), 150);
        let whole = files(&to);
        assert_eq!(whole.len(), 150);
        assert!(
            whole.contains_key(Path::new("fog/4/a/1.png.jpg"))
                && whole.contains_key(Path::new("fog/4/b/1.jpg"))
        );
        // half of it is gone: the rest is made again as it was
        for path in whole.keys().step_by(2) {
            std::fs::remove_file(to.join(path)).unwrap();
        }
        assert_eq!(tree(&from, &to, &|_, _| ()).unwrap(), 75);
        assert!(files(&to) == whole);
        let found = challenge("folder-c").unwrap().scan(dir.path(), None, false).unwrap();
        assert_eq!((found.classes, found.partial), (2, None));
        std::fs::write(from.join("a/2.jpg"), b"no image").unwrap();
        let error = tree(&from, &to, &|_, _| ()).unwrap_err().to_string();
        assert!(error.contains("2.jpg: neither a JPEG nor a PNG"), "{error}");
    }

    #[test]
    fn arrays_of_cifar_are_made_once() {
        let dir = tempfile::tempdir().unwrap();
        let below = dir.path().join("cifar-10-batches-bin");
        std::fs::create_dir_all(&below).unwrap();
        for (batch, records) in (1..=5)
            .map(|number| format!("data_batch_{number}.bin"))
            .chain(["test_batch.bin".to_owned()])
            .zip([2u8; 6])
        {
            let bytes: Vec<u8> = (0..records)
                .flat_map(|record| {
                    [record + 3].into_iter().chain((0..3072).map(move |at| (at % 97) as u8 + record))
                })
                .collect();
            std::fs::write(below.join(batch), bytes).unwrap();
        }
        let to = dir.path().join("cifar10-c");
        let (made, partial) = cifar(dir.path(), &to, &|_, _| ()).unwrap();
        assert!(made == 15 && partial.unwrap().contains("2 of 10000 test images"));
        let whole = files(&to);
        assert_eq!(whole.len(), 16);
        std::fs::remove_file(to.join("fog.npy")).unwrap();
        assert_eq!(cifar(dir.path(), &to, &|_, _| ()).unwrap().0, 1);
        assert!(files(&to) == whole);
        assert!(challenge("cifar10-c").unwrap().scan(dir.path(), None, false).is_ok());
        let set = npy::Records::open(&to, "brightness", 5).unwrap();
        let own = Cifar::load(dir.path(), true).unwrap().image(Split::Test, 1).unwrap();
        let expected = CORRUPTIONS[10].apply(&own, 5, (SEED, "1"));
        assert_eq!((set.image(Split::Test, 1).unwrap(), set.label(Split::Test, 1)), (expected, 4));
    }
}
