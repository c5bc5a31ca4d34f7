//! Images made from a seed, so that a command can be tried without data: a coloured shape on noise, ten classes.

use image::{Rgb, RgbImage};

use super::ImageSet;
use crate::{DataError, Split};
use effattn_kernel::device::rng::RngStream;

const SIDE: u32 = 32;
const SHAPES: [&str; 5] = ["disk", "square", "cross", "ring", "stripe"];
const SHADES: [&str; 2] = ["bright", "dark"];

/// Made-up images.
pub struct SyntheticImages(Vec<String>);

impl Default for SyntheticImages {
    fn default() -> Self {
        let names =
            SHADES.iter().flat_map(|shade| SHAPES.iter().map(move |shape| format!("{shade} {shape}")));
        Self(names.collect())
    }
}

/// Whether the shape covers a place `x`, `y` from its middle, of radius `r`.
fn covers(shape: usize, x: f64, y: f64, r: f64) -> bool {
    let far = x.hypot(y);
    match shape {
        0 => far <= r,
        1 => x.abs().max(y.abs()) <= r,
        2 => x.abs().min(y.abs()) <= r / 3.0 && x.abs().max(y.abs()) <= r,
        3 => far <= r && far >= 0.6 * r,
        _ => y.abs() <= r / 3.0 && x.abs() <= r,
    }
}

impl ImageSet for SyntheticImages {
    fn len(&self, split: Split) -> usize {
        match split {
            Split::Train => 2000,
            Split::Validation | Split::Test => 400,
        }
    }

    fn classes(&self) -> &[String] {
        &self.0
    }

    fn label(&self, _: Split, index: usize) -> u32 {
        (index % self.0.len()) as u32
    }

    fn image(&self, split: Split, index: usize) -> Result<RgbImage, DataError> {
        let label = self.label(split, index) as usize;
        let stream = &mut RngStream::new(0, &format!("image/{}/{index}", split.name()));
        let (x, y) = (stream.uniform(10.0, 22.0), stream.uniform(10.0, 22.0));
        let radius = stream.uniform(6.0, 9.0);
        let shade = if label / SHAPES.len() == 0 { 200.0 } else { 50.0 };
        Ok(RgbImage::from_fn(SIDE, SIDE, |column, row| {
            let here = covers(label % SHAPES.len(), f64::from(column) - x, f64::from(row) - y, radius);
            let base = if here { shade } else { 125.0 };
            Rgb([0; 3].map(|_: u8| (base + 20.0 * stream.normal()).clamp(0.0, 255.0) as u8))
        }))
    }

    fn hash(&self) -> &'static str {
        "made by this version"
    }
}
