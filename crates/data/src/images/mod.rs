//! Colour images with classes, for image models: CIFAR-10, trees of folders (ImageNet's layout), generated ones.
//!
//! | module | holds |
//! |---|---|
//! | [`decode`] | one bounded image from a file |
//! | [`cifar`] | CIFAR-10 in colour, from the binary archive or its folder |
//! | [`corrupt`] | the corruptions of ImageNet-C and CIFAR-10-C |
//! | [`file_hashes`] | contents of many files, remembered between starts |
//! | [`folder`] | a tree `train/<class>/<image>`, `val/<class>/<image>` |
//! | [`npy`] | CIFAR-10-C in its published arrays |
//! | [`relabelled`] | ImageNet's validation images with the labels of ImageNet Real |
//! | [`test_only`] | sets that models are only tested on: ImageNet-C, -A, -R, -9 and others |
//! | [`answer`] | their classes, and which answers are right |
//! | [`write_corrupted`] | makes corrupted sets of images that a person has |
//! | [`synthetic`] | images made from a seed, to try a command without data |
//! | [`transform`] | resizing, cropping, normalising |
//! | [`rand_augment`] | RandAugment's operations |
//! | [`augment`] | everything that training draws, as a function of seed, step and image |

pub mod answer;
pub mod augment;
pub mod cifar;
pub mod corrupt;
pub mod decode;
pub mod file_hashes;
pub mod folder;
pub mod limited;
pub mod npy;
pub mod rand_augment;
pub mod relabelled;
pub mod synthetic;
pub mod test_only;
pub mod transform;
pub mod write_corrupted;

use std::path::Path;
use std::sync::Arc;

use image::RgbImage;

use self::answer::Answer;
use super::{DataError, Split};
use effattn_record::config::registry::Registry;
use effattn_record::config::unknown;

/// Images with classes.
pub trait ImageSet: Send + Sync {
    /// Number of images of a split.
    fn len(&self, split: Split) -> usize;

    /// Names of the classes, in the order of their numbers.
    fn classes(&self) -> &[String];

    /// Class of an image.
    fn label(&self, split: Split, index: usize) -> u32;

    /// An image.
    fn image(&self, split: Split, index: usize) -> Result<RgbImage, DataError>;

    /// SHA-256 of what was read: bytes of records, or names and contents of files.
    fn hash(&self) -> &str;

    /// What is missing of a published set, in words.
    fn partial(&self) -> Option<&str> {
        None
    }

    /// How answers are judged, where its labels are no classes.
    fn answer(&self) -> Option<Answer> {
        None
    }

    /// Whether there is nothing in a split.
    fn is_empty(&self, split: Split) -> bool {
        self.len(split) == 0
    }
}

/// Reads a set of images from a data folder; incomplete ones where that is allowed.
pub type Load = fn(&Path, bool) -> Result<Arc<dyn ImageSet>, DataError>;

/// A set of images that `vision` can be told to use.
pub struct ImageSource {
    /// Its name as a task.
    pub name: &'static str,
    /// What it is, in a line.
    pub about: &'static str,
    /// Training images of the published set, where it is one.
    pub published: Option<usize>,
    /// Classes, where that is known before it is read.
    pub classes: Option<usize>,
    /// Reads it from a data folder.
    pub load: Load,
}

/// Every set of images of the crate.
pub static SOURCES: &[&ImageSource] = &[
    &ImageSource {
        name: "imagenet",
        about: "ImageNet's layout: imagenet/train/<class>/*.JPEG and imagenet/val/<class>/*.JPEG",
        published: Some(1_281_167),
        classes: Some(1000),
        load: |dir, _| Ok(Arc::new(folder::ImageFolder::open(&dir.join("imagenet"))?)),
    },
    &ImageSource {
        name: "folder",
        about: "any tree train/<class>/<image>, val/<class>/<image> (JPEG, PNG): the data folder itself",
        published: None,
        classes: None,
        load: |dir, _| Ok(Arc::new(folder::ImageFolder::open(dir)?)),
    },
    &ImageSource {
        name: "cifar10",
        about: "CIFAR-10 in colour: 45,000 / 5,000 / 10,000 images",
        published: Some(cifar::TRAIN),
        classes: Some(10),
        load: |dir, partial| Ok(Arc::new(cifar::Cifar::load(dir, partial)?)),
    },
    &ImageSource {
        name: "generated",
        about: "coloured shapes on noise, ten classes, made from a seed: says nothing about real images",
        published: None,
        classes: Some(10),
        load: |_, _| Ok(Arc::new(synthetic::SyntheticImages::default())),
    },
];

static ALL: Registry<ImageSource> = Registry::new(SOURCES);

/// Adds a set of images at run time (a library user's own, or a test's).
pub fn register(source: &'static ImageSource) {
    ALL.add(source);
}

/// Every set of images: those of the crate, then the registered ones.
pub fn sources() -> Vec<&'static ImageSource> {
    ALL.all()
}

/// The set of images called `name`.
pub fn source(name: &str) -> Result<&'static ImageSource, DataError> {
    let all = sources();
    let found = all.iter().find(|source| source.name == name).copied();
    found.ok_or_else(|| DataError::Unknown(unknown("task", name, all.iter().map(|source| source.name))))
}
