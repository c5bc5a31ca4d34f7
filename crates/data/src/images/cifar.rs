//! CIFAR-10 (Krizhevsky 2009) in colour, from the files that the Long Range Arena's gray form reads.

use std::path::Path;

use image::RgbImage;

use super::ImageSet;
use crate::lra_image::{CLASSES, PIXELS, RECORD, TEST, TRAIN as PUBLISHED};
use crate::{DataError, Split};

/// Training images of the published set, without those that select.
pub const TRAIN: usize = PUBLISHED - PUBLISHED / 10;

/// Side of an image.
const SIDE: u32 = 32;
const NAMES_OF_CLASSES: [&str; CLASSES as usize] =
    ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"];

/// Names of the classes, in the order of their numbers.
pub fn classes() -> Vec<String> {
    NAMES_OF_CLASSES.map(str::to_owned).to_vec()
}

/// The images; validation is the last tenth of the training images.
pub struct Cifar {
    train: Vec<u8>,
    test: Vec<u8>,
    classes: Vec<String>,
    hash: String,
    partial: Option<String>,
}

impl Cifar {
    /// Loads the images from `dir`.
    pub fn load(dir: &Path, allow_partial: bool) -> Result<Self, DataError> {
        let (batches, hash) = crate::lra_image::read_batches(dir, <[u8]>::to_vec)?;
        let [a, b, c, d, e, test] = batches;
        let train = [a, b, c, d, e].concat();
        let counts = (train.len() / RECORD, test.len() / RECORD);
        let partial = (counts != (PUBLISHED, TEST))
            .then(|| format!("{} of {PUBLISHED} training and {} of {TEST} test images", counts.0, counts.1));
        if let (Some(missing), false) = (&partial, allow_partial) {
            let missing = missing.clone();
            return Err(DataError::Partial { what: "CIFAR-10", dir: dir.to_owned(), missing });
        }
        Ok(Self { train, test, classes: classes(), hash, partial })
    }

    fn side(&self, split: Split) -> &[u8] {
        let images = self.train.len() / RECORD;
        let cut = (images - images / 10) * RECORD;
        match split {
            Split::Train => &self.train[..cut],
            Split::Validation => &self.train[cut..],
            Split::Test => &self.test,
        }
    }

    fn record(&self, split: Split, index: usize) -> &[u8] {
        &self.side(split)[index * RECORD..][..RECORD]
    }
}

impl ImageSet for Cifar {
    fn len(&self, split: Split) -> usize {
        self.side(split).len() / RECORD
    }

    fn classes(&self) -> &[String] {
        &self.classes
    }

    fn label(&self, split: Split, index: usize) -> u32 {
        u32::from(self.record(split, index)[0])
    }

    fn image(&self, split: Split, index: usize) -> Result<RgbImage, DataError> {
        let planes = &self.record(split, index)[1..];
        Ok(RgbImage::from_fn(SIDE, SIDE, |x, y| {
            let at = (y * SIDE + x) as usize;
            image::Rgb([planes[at], planes[PIXELS + at], planes[2 * PIXELS + at]])
        }))
    }

    fn hash(&self) -> &str {
        &self.hash
    }

    fn partial(&self) -> Option<&str> {
        self.partial.as_deref()
    }
}
