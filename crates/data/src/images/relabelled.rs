//! ImageNet Real (Beyer et al. 2020, "Are we done with ImageNet?"): the validation images of ImageNet with labels assessed anew.
//! `real.json` is a list with a list of classes for every validation image in the order of their names; images whose list is
//! empty are left out.

use std::path::{Path, PathBuf};

use image::RgbImage;

use super::answer::{Answer, IMAGENET};
use super::folder::{self, Tree};
use super::{ImageSet, decode};
use crate::content_hash::ContentHash;
use crate::{DataError, Split, store};
use effattn_record::file;

/// The file of the labels.
pub const LABELS: &str = "real.json";
/// Most bytes of that file; the published one has a hundredth of them.
const BYTES: u64 = 64 << 20;
/// What stands in front of a validation image's number.
const NAME: &str = "ILSVRC2012_val_";

/// Validation images that have labels.
pub struct Relabelled {
    images: Vec<PathBuf>,
    labels: Vec<Vec<u32>>,
    classes: Vec<String>,
    partial: Option<String>,
    hash: String,
}

impl Relabelled {
    /// The labels in `file` for the validation images of the tree `imagenet`.
    pub fn open(file: &Path, imagenet: &Path) -> Result<Self, DataError> {
        let (lists, bytes) = lists(file)?;
        let val = folder::evaluated(imagenet).ok_or_else(|| DataError::Missing {
            what: "imagenet/val",
            dir: imagenet.parent().unwrap_or(imagenet).to_owned(),
            next: "the labels are of ImageNet's validation images: place them as imagenet/val/<class>/<image> there"
                .to_owned(),
        })?;
        let tree = Tree::open(&val)?;
        let mut numbered = Vec::new();
        for (path, _) in tree.files() {
            let number = number(path).ok_or_else(|| {
                let reason = format!(
                    "its name has no number; expected {NAME}00000001.JPEG, by which {LABELS} is ordered"
                );
                store::bad_file(path, reason)
            })?;
            if number == 0 || number > lists.len() {
                let reason = format!("image {number}, but {} has {} lists", file.display(), lists.len());
                return Err(store::bad_file(path, reason));
            }
            numbered.push((number, path.clone()));
        }
        numbered.sort();
        if let Some(pair) = numbered.windows(2).find(|pair| pair[0].0 == pair[1].0) {
            let reason = format!("has the number of {}", pair[0].1.display());
            return Err(store::bad_file(&pair[1].1, reason));
        }
        let partial = (numbered.len() < lists.len())
            .then(|| format!("{} validation images of {}", numbered.len(), lists.len()));
        let mut content = ContentHash::default();
        content.field(&bytes);
        content.field(tree.hash().as_bytes());
        let kept = numbered.into_iter().map(|(number, path)| (path, lists[number - 1].clone()));
        let (images, labels): (Vec<_>, Vec<_>) = kept.filter(|(_, labels)| !labels.is_empty()).unzip();
        if images.is_empty() {
            return Err(store::bad_file(file, "no image has a label"));
        }
        Ok(Self { images, labels, classes: tree.classes().to_vec(), partial, hash: content.finish() })
    }
}

/// The classes of every image in `file`, and its bytes.
fn lists(file: &Path) -> Result<(Vec<Vec<u32>>, Vec<u8>), DataError> {
    let refuse = |error: std::io::Error| store::bad_file(file, error.to_string());
    let bytes = file::open(file).and_then(|open| store::read_limited(open, BYTES)).map_err(refuse)?;
    let lists: Vec<Vec<u32>> = serde_json::from_slice(&bytes).map_err(|error| {
        let reason = format!(
            "{error}; expected a list with a list of classes for every image, such as [[65], [970, 795], []]"
        );
        store::bad_file(file, reason)
    })?;
    let wrong = |(at, list): (usize, &Vec<u32>)| {
        let class = list.iter().find(|class| **class as usize >= IMAGENET)?;
        Some(format!("image {} has class {class}, expected 0 to {}", at + 1, IMAGENET - 1))
    };
    match lists.iter().enumerate().find_map(wrong) {
        Some(reason) => Err(store::bad_file(file, reason)),
        None => Ok((lists, bytes)),
    }
}

/// The number of a validation image, from 1.
fn number(path: &Path) -> Option<usize> {
    path.file_stem()?.to_str()?.strip_prefix(NAME)?.parse().ok()
}

impl ImageSet for Relabelled {
    fn len(&self, split: Split) -> usize {
        if split == Split::Test { self.images.len() } else { 0 }
    }

    fn classes(&self) -> &[String] {
        &self.classes
    }

    /// The place of its list of labels, which [`Self::answer`] knows.
    fn label(&self, _: Split, index: usize) -> u32 {
        index as u32
    }

    fn image(&self, _: Split, index: usize) -> Result<RgbImage, DataError> {
        decode::read(&self.images[index])
    }

    fn hash(&self) -> &str {
        &self.hash
    }

    fn partial(&self) -> Option<&str> {
        self.partial.as_deref()
    }

    fn answer(&self) -> Option<Answer> {
        Some(Answer::OneOf(self.labels.clone()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn put(root: &Path, class: &str, name: &str) {
        let folder = root.join("imagenet/val").join(class);
        std::fs::create_dir_all(&folder).unwrap();
        RgbImage::from_pixel(3, 2, image::Rgb([9; 3])).save(folder.join(name)).unwrap();
    }

    fn opened(root: &Path, labels: &str) -> Result<Relabelled, String> {
        let file = root.join(LABELS);
        std::fs::write(&file, labels).unwrap();
        Relabelled::open(&file, &root.join("imagenet")).map_err(|error| error.to_string())
    }

    #[test]
    fn images_have_the_labels_of_their_number_and_those_without_are_left_out() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        // the order of the folders is not that of the numbers
        for (class, name) in [
            ("n00000001", "ILSVRC2012_val_00000003.png"),
            ("n00000002", "ILSVRC2012_val_00000001.png"),
            ("n00000002", "ILSVRC2012_val_00000002.png"),
        ] {
            put(root, class, name);
        }
        let set = opened(root, "[[7, 9], [], [3]]").unwrap();
        assert_eq!((set.len(Split::Test), set.len(Split::Train), set.partial()), (2, 0, None));
        let answer = set.answer().unwrap();
        let logits = |class: usize| (0..10).map(|at| f32::from(at == class)).collect::<Vec<_>>();
        let right =
            |class: usize| [0, 1].map(|index| answer.right(&logits(class), set.label(Split::Test, index)));
        assert_eq!(right(7), [true, false]);
        assert_eq!(right(9), [true, false]);
        assert_eq!(right(3), [false, true]);
        let hash = set.hash().to_owned();
        assert_ne!(opened(root, "[[7, 8], [], [3]]").unwrap().hash(), hash, "labels are in the checksum");
        let set = opened(root, "[[7, 9], [], [3], [4]]").unwrap();
        assert_eq!(set.partial(), Some("3 validation images of 4"));
    }

    #[test]
    fn what_is_wrong_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        let says = |labels: &str| opened(root, labels).err().unwrap();
        assert!(says("[[1]]").contains("imagenet/val/<class>/<image>"));
        put(root, "n00000001", "ILSVRC2012_val_00000002.png");
        for (labels, why) in [
            ("[[1], [1000]]", "real.json: image 2 has class 1000, expected 0 to 999"),
            ("[[1], [-1]]", "expected a list with a list of classes"),
            ("[1, 2]", "expected a list with a list of classes"),
            ("{", "; expected a list with a list of classes"),
            ("[[1]]", "image 2, but"),
            ("[[1], []]", "no image has a label"),
        ] {
            assert!(says(labels).contains(why), "{labels}: {}", says(labels));
        }
        put(root, "n00000002", "ILSVRC2012_val_00000002.png");
        assert!(says("[[1], [2]]").contains("has the number of"));
        put(root, "n00000002", "cat.png");
        assert!(
            says("[[1], [2]]")
                .contains("cat.png: its name has no number; expected ILSVRC2012_val_00000001.JPEG")
        );
    }
}
