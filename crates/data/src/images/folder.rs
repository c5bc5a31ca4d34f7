//! Trees of folders, as ImageNet lies on disks: `train/<class>/<image>` and `val/<class>/<image>`.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use image::RgbImage;

use super::{ImageSet, decode, file_hashes};
use crate::content_hash::ContentHash;
use crate::{DataError, Split, store};

/// Names that the folder of the evaluated images goes by.
const EVALUATED: [&str; 3] = ["val", "validation", "test"];
const ENDINGS: [&str; 3] = ["jpg", "jpeg", "png"];
/// Endings of images that are not read.
const FOREIGN: [&str; 11] = ["avif", "bmp", "gif", "heic", "jp2", "jxl", "ppm", "svg", "tif", "tiff", "webp"];

/// A tree. The same images select weights and are reported, as the sources do.
pub struct ImageFolder {
    root: PathBuf,
    classes: Vec<String>,
    train: Vec<(PathBuf, u32)>,
    val: Vec<(PathBuf, u32)>,
    hash: String,
}

impl ImageFolder {
    /// Lists the images below `root`.
    pub fn open(root: &Path) -> Result<Self, DataError> {
        let missing =
            |next: String| DataError::Missing { what: "a tree of images", dir: root.to_owned(), next };
        let train = root.join("train");
        let val = evaluated(root);
        let (true, Some(val)) = (train.is_dir(), val) else {
            return Err(missing(
                "place images as train/<class>/<image> and val/<class>/<image> there, or name another folder with --data-dir"
                    .to_owned(),
            ));
        };
        let classes = classes(&train)?;
        if classes.len() < 2 {
            let reason = format!("{} class folder(s); a classifier needs two classes or more", classes.len());
            return Err(store::bad_file(&train, reason));
        }
        let here = self::classes(&val)?;
        if let Some(foreign) = here.iter().find(|class| !classes.contains(class)) {
            let reason =
                format!("the class {foreign} is not in {}; both need the same folders", train.display());
            return Err(store::bad_file(&val, reason));
        }
        if here.is_empty() {
            let reason = "no class folders: images must be in one folder per class, as in train";
            return Err(store::bad_file(&val, reason));
        }
        let mut content = ContentHash::default();
        let train = images(&train, &classes, &mut content)?;
        let val = images(&val, &classes, &mut content)?;
        Ok(Self { root: root.to_owned(), classes, train, val, hash: content.finish() })
    }

    fn side(&self, split: Split) -> &[(PathBuf, u32)] {
        match split {
            Split::Train => &self.train,
            Split::Validation | Split::Test => &self.val,
        }
    }
}

/// One folder of classes that are evaluated only: `<class>/<image>`.
pub struct Tree {
    classes: Vec<String>,
    images: Vec<(PathBuf, u32)>,
    hash: String,
}

impl Tree {
    /// Lists the images below `folder`.
    pub fn open(folder: &Path) -> Result<Self, DataError> {
        let classes = classes(folder)?;
        if classes.is_empty() {
            return Err(store::bad_file(folder, "no class folders in it; expected <class>/<image>"));
        }
        let mut content = ContentHash::default();
        let images = images(folder, &classes, &mut content)?;
        Ok(Self { classes, images, hash: content.finish() })
    }

    /// The same images where the folders are called by the numbers of their classes, 0 to `count` - 1; what is wrong otherwise.
    pub fn by_number(mut self, count: usize) -> Result<Self, String> {
        let number = |name: &String| name.parse::<u32>().ok().filter(|number| number.to_string() == *name);
        let numbers: Vec<u32> = self.classes.iter().filter_map(number).collect();
        let all: BTreeSet<u32> = numbers.iter().copied().collect();
        if numbers.len() != self.classes.len()
            || all.len() != count
            || all.last() != Some(&(count as u32 - 1))
        {
            return Err(format!("{} class folders, expected 0 to {}", self.classes.len(), count - 1));
        }
        self.images.iter_mut().for_each(|(_, label)| *label = numbers[*label as usize]);
        self.classes = (0..count).map(|number| number.to_string()).collect();
        Ok(self)
    }

    /// Files of the images with the numbers of their classes.
    pub fn files(&self) -> &[(PathBuf, u32)] {
        &self.images
    }
}

impl ImageSet for Tree {
    fn len(&self, split: Split) -> usize {
        if split == Split::Test { self.images.len() } else { 0 }
    }

    fn classes(&self) -> &[String] {
        &self.classes
    }

    fn label(&self, _: Split, index: usize) -> u32 {
        self.images[index].1
    }

    fn image(&self, _: Split, index: usize) -> Result<RgbImage, DataError> {
        decode::read(&self.images[index].0)
    }

    fn hash(&self) -> &str {
        &self.hash
    }
}

/// The folder of the evaluated images in `root`.
pub fn evaluated(root: &Path) -> Option<PathBuf> {
    EVALUATED.iter().map(|name| root.join(name)).find(|folder| folder.is_dir())
}

/// Names of the folders in `folder`, sorted: the numbers of classes follow this order, as in torchvision. What would be left out
/// without a word is refused.
fn classes(folder: &Path) -> Result<Vec<String>, DataError> {
    let mut names = Vec::new();
    let mut stray = None;
    for entry in listed(folder)? {
        let refuse = |reason: &str| Err(store::bad_file(&entry, reason));
        if !entry.is_dir() {
            stray = stray.or_else(|| ENDINGS.contains(&ending(&entry).as_str()).then(|| entry.clone()));
            continue;
        }
        match entry.file_name().unwrap_or_default().to_str() {
            None => return refuse("the name of a class folder is not UTF-8; rename it"),
            Some(name) if name.starts_with('.') => {
                return refuse("the name of a class folder begins with a dot; rename it, or move it away");
            }
            Some(name) => names.push(name.to_owned()),
        }
    }
    match stray.filter(|_| !names.is_empty()) {
        Some(image) => Err(store::bad_file(&image, "an image in no class folder; move it into one, or away")),
        None => Ok(names),
    }
}

/// The ending of a name, in small letters.
fn ending(path: &Path) -> String {
    path.extension().unwrap_or_default().to_string_lossy().to_lowercase()
}

fn listed(folder: &Path) -> Result<Vec<PathBuf>, DataError> {
    let refuse = |error: std::io::Error| store::bad_file(folder, error.to_string());
    let entries = std::fs::read_dir(folder).map_err(refuse)?;
    let paths: std::io::Result<Vec<PathBuf>> = entries.map(|entry| Ok(entry?.path())).collect();
    let mut paths = paths.map_err(refuse)?;
    paths.sort();
    Ok(paths)
}

/// Images of every class in `folder` with their classes. Their names and contents go into `content`.
fn images(
    folder: &Path,
    classes: &[String],
    content: &mut ContentHash,
) -> Result<Vec<(PathBuf, u32)>, DataError> {
    let mut all = Vec::new();
    for (label, class) in classes.iter().enumerate() {
        let below = folder.join(class);
        if !below.is_dir() {
            continue; // evaluated on fewer classes than trained on
        }
        let before = all.len();
        for path in listed(&below)? {
            let ending = ending(&path);
            if FOREIGN.contains(&ending.as_str()) {
                let reason = format!("{ending} images are not read; convert it to PNG, or move it away");
                return Err(store::bad_file(&path, reason));
            }
            if path.is_dir() {
                let reason =
                    "a folder in a class folder, whose images would be left out; move them up, or it away";
                return Err(store::bad_file(&path, reason));
            }
            if ENDINGS.contains(&ending.as_str()) {
                all.push((path, label as u32));
            }
        }
        if all.len() == before {
            return Err(store::bad_file(&below, "no JPEG or PNG images in it; delete the folder or fill it"));
        }
    }
    let (files, labels): (Vec<PathBuf>, Vec<u32>) = all.into_iter().unzip();
    for ((path, label), digest) in files.iter().zip(&labels).zip(file_hashes::digests(folder, &files)?) {
        content.field(classes[*label as usize].as_bytes());
        content.field(path.file_name().unwrap_or_default().as_encoded_bytes());
        content.field(&digest);
    }
    content.number(files.len() as u64);
    Ok(files.into_iter().zip(labels).collect())
}

impl ImageSet for ImageFolder {
    fn len(&self, split: Split) -> usize {
        self.side(split).len()
    }

    fn classes(&self) -> &[String] {
        &self.classes
    }

    fn label(&self, split: Split, index: usize) -> u32 {
        self.side(split)[index].1
    }

    fn image(&self, split: Split, index: usize) -> Result<RgbImage, DataError> {
        let (path, _) = &self.side(split)[index];
        log::trace!("{} of {}", path.display(), self.root.display());
        decode::read(path)
    }

    fn hash(&self) -> &str {
        &self.hash
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn put(root: &Path, name: &str, shade: u8) {
        let path = root.join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        RgbImage::from_pixel(3, 2, image::Rgb([shade; 3])).save(path).unwrap();
    }

    fn says(root: &Path) -> String {
        ImageFolder::open(root).err().unwrap().to_string()
    }

    #[test]
    fn classes_are_sorted_folders() {
        let dir = tempfile::tempdir().unwrap();
        for (name, shade) in
            [("train/b/1.png", 10), ("train/a/2.png", 20), ("train/a/1.PNG", 30), ("val/b/9.png", 40)]
        {
            put(dir.path(), name, shade);
        }
        std::fs::write(dir.path().join("train/a/notes.txt"), "no image").unwrap();
        let set = ImageFolder::open(dir.path()).unwrap();
        assert_eq!(set.classes(), ["a", "b"]);
        assert_eq!(Split::ALL.map(|split| set.len(split)), [3, 1, 1]);
        assert_eq!((0..3).map(|index| set.label(Split::Train, index)).collect::<Vec<_>>(), [0, 0, 1]);
        assert_eq!(set.image(Split::Test, 0).unwrap().get_pixel(2, 1).0, [40; 3]);
        assert_eq!(set.label(Split::Test, 0), 1);
    }

    #[test]
    fn mistakes_are_named() {
        let dir = tempfile::tempdir().unwrap();
        assert!(says(dir.path()).contains("train/<class>/<image>"));
        put(dir.path(), "train/a/1.png", 1);
        put(dir.path(), "val/a/1.png", 1);
        assert!(says(dir.path()).contains("two classes or more"));
        std::fs::create_dir_all(dir.path().join("train/b")).unwrap();
        assert!(says(dir.path()).contains("no JPEG or PNG images"));
        put(dir.path(), "train/b/1.png", 1);
        put(dir.path(), "val/c/1.png", 1);
        assert!(says(dir.path()).contains("the class c is not in"));
        std::fs::remove_dir_all(dir.path().join("val/c")).unwrap();
        ImageFolder::open(dir.path()).unwrap();
        // nothing is left out without a word
        for (name, why) in [
            ("train/.c/1.png", ".c: the name of a class folder begins with a dot"),
            ("train/a/deep/1.png", "deep: a folder in a class folder"),
            ("val/1.png", "1.png: an image in no class folder"),
        ] {
            put(dir.path(), name, 1);
            assert!(says(dir.path()).contains(why), "{}", says(dir.path()));
            let path = dir.path().join(name);
            std::fs::remove_file(&path).unwrap();
            let _ = std::fs::remove_dir(path.parent().unwrap());
        }
        std::fs::write(dir.path().join("train/a/1.webp"), "an image").unwrap();
        assert!(says(dir.path()).contains("1.webp: webp images are not read"));
        std::fs::remove_file(dir.path().join("train/a/1.webp")).unwrap();
        put(dir.path(), "train/a/.1.png", 1);
        assert_eq!(
            ImageFolder::open(dir.path()).unwrap().len(Split::Train),
            3,
            "a name with a dot is a name"
        );
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_class_folder_that_is_not_utf8_is_refused_by_name() {
        use std::os::unix::ffi::OsStrExt;
        let dir = tempfile::tempdir().unwrap();
        ["train/a/1.png", "train/b/1.png", "val/a/1.png"].iter().for_each(|name| put(dir.path(), name, 1));
        let name = dir.path().join("train").join(std::ffi::OsStr::from_bytes(b"caf\xe9"));
        std::fs::create_dir(name).unwrap();
        assert!(says(dir.path()).contains("the name of a class folder is not UTF-8"), "{}", says(dir.path()));
    }

    #[test]
    fn pixels_are_in_the_checksum_not_only_names_and_sizes() {
        let dir = tempfile::tempdir().unwrap();
        ["train/a/1.png", "train/b/1.png", "val/a/1.png"].iter().for_each(|name| put(dir.path(), name, 1));
        let hash = || ImageFolder::open(dir.path()).unwrap().hash().to_owned();
        let (first, file) = (hash(), dir.path().join("val/a/1.png"));
        assert_eq!(hash(), first);
        let mut bytes = std::fs::read(&file).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        std::fs::write(&file, bytes).unwrap();
        assert_ne!(hash(), first, "the same name and size");
    }
}
