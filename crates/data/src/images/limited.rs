//! A part of a set of images.

use std::sync::Arc;

use image::RgbImage;

use super::ImageSet;
use super::answer::Answer;
use crate::subset::drawn;
use crate::{DataError, Split};

/// So many images of each split, drawn once: folders are sorted by class.
pub struct LimitedImages {
    set: Arc<dyn ImageSet>,
    chosen: [Vec<usize>; 3],
}

impl LimitedImages {
    /// At most `limit` images of each split of `set`.
    pub fn new(set: Arc<dyn ImageSet>, limit: usize) -> Self {
        let chosen = Split::ALL.map(|split| drawn(split, set.len(split), limit));
        Self { set, chosen }
    }

    fn side(&self, split: Split) -> &[usize] {
        &self.chosen[Split::ALL.iter().position(|one| *one == split).unwrap_or(0)]
    }
}

impl ImageSet for LimitedImages {
    fn len(&self, split: Split) -> usize {
        self.side(split).len()
    }

    fn classes(&self) -> &[String] {
        self.set.classes()
    }

    fn label(&self, split: Split, index: usize) -> u32 {
        self.set.label(split, self.side(split)[index])
    }

    fn image(&self, split: Split, index: usize) -> Result<RgbImage, DataError> {
        self.set.image(split, self.side(split)[index])
    }

    fn hash(&self) -> &str {
        self.set.hash()
    }

    fn partial(&self) -> Option<&str> {
        self.set.partial()
    }

    fn answer(&self) -> Option<Answer> {
        self.set.answer()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Fifty images of each split, the second half of another class.
    struct Sorted(Vec<String>);

    impl ImageSet for Sorted {
        fn len(&self, _: Split) -> usize {
            50
        }
        fn classes(&self) -> &[String] {
            &self.0
        }
        fn label(&self, _: Split, index: usize) -> u32 {
            u32::from(index >= 25)
        }
        fn image(&self, _: Split, index: usize) -> Result<RgbImage, DataError> {
            Ok(RgbImage::from_pixel(1, 1, image::Rgb([index as u8; 3])))
        }
        fn hash(&self) -> &'static str {
            "x"
        }
    }

    #[test]
    fn a_limit_is_drawn_from_all_classes() {
        let few = LimitedImages::new(Arc::new(Sorted(Vec::new())), 20);
        assert_eq!(few.len(Split::Train), 20);
        let ones: u32 = (0..20).map(|index| few.label(Split::Train, index)).sum();
        assert!((4..=16).contains(&ones), "{ones} of 20");
        let fits = |index: usize| {
            let shade = few.image(Split::Train, index).unwrap().get_pixel(0, 0).0[0];
            few.label(Split::Train, index) == u32::from(shade >= 25)
        };
        assert!((0..20).all(fits), "an image keeps its class");
    }
}
