//! Makes corrupted sets of images that a person has, in the layouts of the published ones (`SPEC-vision.md` section 12).
//! What is there already is not made again: a set that was interrupted is made to its end by the same command. A tree has a
//! list of its sources with their checksums (`SOURCES`): what was made of other images is made again.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Write};
use std::path::{Component, Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use image::RgbImage;
use image::codecs::jpeg::JpegEncoder;
use rayon::prelude::*;

use super::cifar::Cifar;
use super::corrupt::{CORRUPTIONS, SEVERITIES};
use super::folder::Tree;
use super::transform::{Interpolation, centre_crop, resize_short};
use super::{ImageSet, decode, npy};
use crate::content_hash::file_hash;
use crate::{DataError, Split, store};
use effattn_record::file;

/// Seed of everything that corruptions draw.
const SEED: u64 = 0;
/// Sides that images are resized and then cropped to, as in ImageNet-C.
const RESIZED: u32 = 256;
const CROPPED: u32 = 224;
/// Quality of the files.
const QUALITY: u8 = 85;

/// Name of the list of sources in a corrupted tree: `<class>/<image>` and the SHA-256 of the image that it was made of.
const SOURCES: &str = "sources.json";

/// The images of a corrupted tree, `<class>/<image>`, with the SHA-256 of their sources.
type Sources = BTreeMap<String, String>;

/// Hears how many of all images are made.
pub type Heard<'a> = &'a (dyn Fn(u64, u64) + Sync);

/// Corrupts the images of the class folders in `from` into `<corruption>/<severity>/<class>/<image>` below `to`; the number
/// of files that were made.
pub fn tree(from: &Path, to: &Path, heard: Heard) -> Result<u64, DataError> {
    let tree = Tree::open(from)?;
    let mut folders = Vec::new();
    for corruption in &CORRUPTIONS {
        for severity in 1..=SEVERITIES {
            folders.push((corruption, severity, to.join(corruption.name).join(severity.to_string())));
        }
    }
    let sources = sources(&tree)?;
    let before = read_sources(to)?;
    let stale = |(name, digest): &(&String, &String)| sources.get(*name) != Some(*digest);
    let stale: Vec<&String> = before.iter().filter(stale).map(|(name, _)| name).collect();
    for (.., folder) in &folders {
        for name in &stale {
            remove(&folder.join(name))?;
        }
        for class in tree.classes() {
            let folder = folder.join(class);
            std::fs::create_dir_all(&folder).map_err(|error| store::bad_file(&folder, error.to_string()))?;
            file::sweep(&folder);
        }
        nothing_foreign(folder, &sources, &before)?;
    }
    file::sweep_here(to);
    // before the first image: whatever is there from now on is made of these sources
    let list = to.join(SOURCES);
    let text = serde_json::to_string_pretty(&sources).unwrap_or_default() + "\n";
    file::write(&list, text.as_bytes()).map_err(|error| store::bad_file(&list, error.to_string()))?;
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

/// The images that will be in a corrupted copy of `tree`.
fn sources(tree: &Tree) -> Result<Sources, DataError> {
    let one = |(path, label): &(PathBuf, u32)| {
        let digest = file_hash(path).map_err(|error| store::bad_file(path, error.to_string()))?;
        Ok((format!("{}/{}", tree.classes()[*label as usize], stored(path)), digest, path.clone()))
    };
    let found: Vec<_> = tree.files().par_iter().map(one).collect::<Result<_, DataError>>()?;
    let (mut sources, mut from) = (Sources::new(), BTreeMap::new());
    for (name, digest, path) in found {
        if let Some(other) = from.insert(name.clone(), path) {
            let reason =
                format!("it and {} would both be corrupted as {name}; rename one of them", other.display());
            return Err(store::bad_file(&from[&name], reason));
        }
        sources.insert(name, digest);
    }
    Ok(sources)
}

/// The sources that the tree `to` was made of so far; none where nothing was made yet.
fn read_sources(to: &Path) -> Result<Sources, DataError> {
    let list = to.join(SOURCES);
    let bad = |reason: String| store::bad_file(&list, format!("{reason}; move {} away", to.display()));
    match file::read_to_string(&list) {
        Ok(text) => {
            let sources: Sources = serde_json::from_str(&text).map_err(|error| bad(error.to_string()))?;
            let inside = |name: &String| {
                let mut parts = Path::new(name).components();
                parts.by_ref().take(2).filter(|part| matches!(part, Component::Normal(_))).count() == 2
                    && parts.next().is_none()
            };
            match sources.keys().find(|name| !inside(name)) {
                Some(name) => Err(bad(format!("{name:?} is not <class>/<image>"))),
                None => Ok(sources),
            }
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Sources::new()),
        Err(error) => Err(store::bad_file(&list, error.to_string())),
    }
}

/// Removes what was made of an image that is another now, or gone, and the folder of a class of which nothing is left.
fn remove(image: &Path) -> Result<(), DataError> {
    match std::fs::remove_file(image) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            return Err(store::bad_file(image, error.to_string()));
        }
        _ => {}
    }
    let _ = image.parent().map(std::fs::remove_dir); // refused where something is left
    Ok(())
}

/// Makes sure that every image in `folder` is of the `sources` and was made here, `before`.
fn nothing_foreign(folder: &Path, sources: &Sources, before: &Sources) -> Result<(), DataError> {
    let list = |path: &Path| -> Result<Vec<PathBuf>, DataError> {
        let entries = std::fs::read_dir(path).and_then(|entries| {
            entries.map(|entry| entry.map(|entry| entry.path())).collect::<io::Result<Vec<_>>>()
        });
        entries.map_err(|error| store::bad_file(path, error.to_string()))
    };
    for class in list(folder)?.into_iter().filter(|path| path.is_dir()) {
        for path in list(&class)? {
            let name = path.strip_prefix(folder).unwrap_or(&path).to_string_lossy().replace('\\', "/");
            if !(sources.contains_key(&name) && before.contains_key(&name)) {
                let reason = format!(
                    "was not made of these images by this command (there is no line for it in {SOURCES}); move the folder away, \
                     or name another one with --data-dir"
                );
                return Err(store::bad_file(&path, reason));
            }
        }
    }
    Ok(())
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
        assert_eq!(whole.len(), 151, "and their list");
        assert!(
            whole.contains_key(Path::new("fog/4/a/1.png.jpg"))
                && whole.contains_key(Path::new("fog/4/b/1.jpg"))
        );
        // half of it is gone: the rest is made again as it was
        for path in whole.keys().filter(|path| !path.ends_with(SOURCES)).step_by(2) {
            std::fs::remove_file(to.join(path)).unwrap();
        }
        for part in [".effattn-x.part", "fog/4/a/.effattn-y.part"] {
            std::fs::write(to.join(part), b"of a killed process").unwrap();
        }
        assert_eq!(tree(&from, &to, &|_, _| ()).unwrap(), 75);
        assert!(files(&to) == whole);
        let found = challenge("folder-c").unwrap().scan(dir.path(), None, false).unwrap();
        assert_eq!((found.classes, found.partial), (2, None));
        // a source that was replaced, and a class that is gone
        picture(7).save(from.join("a/1.png")).unwrap();
        assert_eq!(tree(&from, &to, &|_, _| ()).unwrap(), 75);
        let now = files(&to);
        let changed = |path: &&PathBuf| whole.get(*path) != now.get(*path);
        assert_eq!(now.keys().filter(changed).count(), 76, "the pictures of one source, and the list");
        picture(3).save(from.join("a/1.png")).unwrap();
        tree(&from, &to, &|_, _| ()).unwrap();
        assert!(files(&to) == whole, "the same sources, the same bytes");
        std::fs::create_dir(from.join("c")).unwrap();
        picture(9).save(from.join("c/1.jpg")).unwrap();
        assert_eq!(tree(&from, &to, &|_, _| ()).unwrap(), 75);
        std::fs::remove_dir_all(from.join("c")).unwrap();
        assert_eq!(tree(&from, &to, &|_, _| ()).unwrap(), 0);
        assert!(files(&to) == whole && !to.join("fog/4/c").exists(), "what a class that is gone had is gone");
        // two names that would be one, a file that nobody made here
        picture(3).save_with_format(from.join("a/1.png.jpg"), image::ImageFormat::Jpeg).unwrap();
        let error = tree(&from, &to, &|_, _| ()).unwrap_err().to_string();
        assert!(
            error.contains("a/1.png") && error.contains("would both be corrupted as a/1.png.jpg"),
            "{error}"
        );
        std::fs::remove_file(from.join("a/1.png.jpg")).unwrap();
        std::fs::copy(to.join("fog/4/b/1.jpg"), to.join("fog/4/b/2.jpg")).unwrap();
        let error = tree(&from, &to, &|_, _| ()).unwrap_err().to_string();
        assert!(error.contains("fog/4/b/2.jpg: was not made of these images"), "{error}");
        std::fs::remove_file(to.join("fog/4/b/2.jpg")).unwrap();
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
