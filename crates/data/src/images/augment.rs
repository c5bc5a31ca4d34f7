//! What training makes of images (`SPEC-vision.md` section 8): crop, flip, RandAugment, random erasing; for a batch mixup
//! or cutmix and label smoothing. Everything drawn is a function of seed, step and image.

use image::RgbImage;
use image::imageops;
use rand_distr::{Beta, Distribution};

use super::rand_augment::RandAugment;
use super::transform::{Interpolation, Normal, normalised, resize};
use effattn_kernel::device::rng::RngStream;

/// How an image is cut.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Crop {
    /// A part of random area (as a share) and of aspect ratio 3/4 to 4/3, resized bicubically.
    Resized {
        /// Least share of the area.
        least: f64,
    },
    /// A shift by up to so many pixels; what comes in is black.
    Shifted {
        /// Pixels.
        by: u32,
    },
}

/// What is drawn.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Augment {
    /// How images are cut.
    pub crop: Crop,
    /// Operations on the whole image.
    pub operations: Option<RandAugment>,
    /// Chance that a box is replaced by noise.
    pub erase: f64,
    /// Parameter of mixup's Beta distribution; 0: none.
    pub mixup: f64,
    /// Parameter of cutmix's; 0: none. With both, every batch takes one of them.
    pub cutmix: f64,
    /// Label smoothing.
    pub smoothing: f64,
}

impl Augment {
    /// ViL-LS on ImageNet.
    pub const IMAGENET: Self = Self {
        crop: Crop::Resized { least: 0.08 },
        operations: Some(RandAugment { magnitude: 9.0, std: 0.5, layers: 2 }),
        erase: 0.25,
        mixup: 0.8,
        cutmix: 1.0,
        smoothing: 0.1,
    };
    /// Ours, for small images and few epochs.
    pub const SMALL: Self = Self {
        crop: Crop::Shifted { by: 4 },
        operations: None,
        erase: 0.0,
        mixup: 0.0,
        cutmix: 0.0,
        smoothing: 0.1,
    };

    /// Planes [3, size, size] of `image`, appended to `to`.
    pub fn image(
        &self,
        image: &RgbImage,
        size: u32,
        normal: &Normal,
        stream: &mut RngStream,
        to: &mut Vec<f32>,
    ) {
        let mut image = match self.crop {
            Crop::Resized { least } => {
                let (x, y, width, height) = resized_crop(image.dimensions(), least, stream);
                let part = imageops::crop_imm(image, x, y, width, height).to_image();
                resize(&part, (size, size), Interpolation::Bicubic)
            }
            Crop::Shifted { by } => {
                let mut out = RgbImage::new(size, size);
                let image = resize(image, (size, size), Interpolation::Bicubic);
                let mut shift = || stream.below(2 * by as usize + 1) as i64 - i64::from(by);
                imageops::replace(&mut out, &image, shift(), shift());
                out
            }
        };
        if stream.below(2) == 1 {
            imageops::flip_horizontal_in_place(&mut image);
        }
        if let Some(operations) = &self.operations {
            image = operations.apply(image, stream);
        }
        let from = to.len();
        normalised(&image, normal, to);
        if stream.uniform(0.0, 1.0) < self.erase {
            erase(&mut to[from..], size as usize, stream);
        }
    }

    /// Shares of classes [b, classes] of a batch with `labels`, whose planes `pixels` [b, 3, size, size] are mixed in place
    /// with those of the batch in reverse.
    pub fn batch(
        &self,
        pixels: &mut [f32],
        labels: &[u32],
        (classes, size): (usize, usize),
        stream: &mut RngStream,
    ) -> Vec<f32> {
        let cut = match (self.mixup > 0.0, self.cutmix > 0.0) {
            (false, false) => return self.shares(labels, 1.0, classes),
            (true, false) => false,
            (false, true) => true,
            (true, true) => stream.below(2) == 1,
        };
        let drawn = beta(if cut { self.cutmix } else { self.mixup }, stream);
        let own = if cut { cut_mix(pixels, size, drawn, stream) } else { mix_up(pixels, size, drawn) };
        self.shares(labels, own, classes)
    }

    fn shares(&self, labels: &[u32], own: f64, classes: usize) -> Vec<f32> {
        let off = self.smoothing / classes as f64;
        let mut shares = vec![off as f32; labels.len() * classes];
        for (row, (label, other)) in shares.chunks_mut(classes).zip(labels.iter().zip(labels.iter().rev())) {
            let on = 1.0 - self.smoothing;
            for (label, share) in [(label, own), (other, 1.0 - own)] {
                if let Some(place) = row.get_mut(*label as usize) {
                    *place += (share * on) as f32;
                }
            }
        }
        shares
    }
}

fn beta(alpha: f64, stream: &mut RngStream) -> f64 {
    Beta::new(alpha, alpha).map_or(1.0, |beta| beta.sample(stream.rng()))
}

/// Left, top, width and height of a part with an area of at least the share `least`.
fn resized_crop((width, height): (u32, u32), least: f64, stream: &mut RngStream) -> (u32, u32, u32, u32) {
    let area = f64::from(width) * f64::from(height);
    for _ in 0..10 {
        let target = area * stream.uniform(least, 1.0);
        let ratio = stream.uniform((3.0f64 / 4.0).ln(), (4.0f64 / 3.0).ln()).exp();
        let (w, h) = ((target * ratio).sqrt().round() as u32, (target / ratio).sqrt().round() as u32);
        if (1..=width).contains(&w) && (1..=height).contains(&h) {
            let (x, y) = (stream.below((width - w) as usize + 1), stream.below((height - h) as usize + 1));
            return (x as u32, y as u32, w, h);
        }
    }
    // the middle, its aspect ratio within bounds
    let ratio = f64::from(width) / f64::from(height);
    let (w, h) = match ratio {
        r if r < 0.75 => (width, (f64::from(width) / 0.75).round() as u32),
        r if r > 4.0 / 3.0 => ((f64::from(height) * 4.0 / 3.0).round() as u32, height),
        _ => (width, height),
    };
    let (w, h) = (w.clamp(1, width), h.clamp(1, height));
    ((width - w) / 2, (height - h) / 2, w, h)
}

/// Replaces a box of 2 % to a third of the area by normal noise.
fn erase(planes: &mut [f32], size: usize, stream: &mut RngStream) {
    for _ in 0..10 {
        let target = (size * size) as f64 * stream.uniform(0.02, 1.0 / 3.0);
        let ratio = stream.uniform(0.3f64.ln(), (1.0f64 / 0.3).ln()).exp();
        let (h, w) = ((target * ratio).sqrt().round() as usize, (target / ratio).sqrt().round() as usize);
        if h < size && w < size {
            let (top, left) = (stream.below(size - h + 1), stream.below(size - w + 1));
            for plane in planes.chunks_mut(size * size) {
                for row in plane.chunks_mut(size).skip(top).take(h) {
                    row[left..left + w].iter_mut().for_each(|value| *value = stream.normal() as f32);
                }
            }
            return;
        }
    }
}

/// Pairs of images from both ends, each once; the one in the middle pairs with itself.
fn pairs(pixels: &mut [f32], image: usize, mut of: impl FnMut(&mut [f32], &mut [f32])) {
    let count = pixels.len() / image.max(1);
    let (front, back) = pixels.split_at_mut(count.div_ceil(2) * image);
    let last = back.len() / image.max(1);
    for (number, first) in front.chunks_mut(image).take(last).enumerate() {
        let at = (last - 1 - number) * image;
        of(first, &mut back[at..at + image]);
    }
}

/// `own` of every image and the rest of its partner.
fn mix_up(pixels: &mut [f32], size: usize, own: f64) -> f64 {
    let (own, other) = (own as f32, (1.0 - own) as f32);
    pairs(pixels, 3 * size * size, |first, second| {
        for (a, b) in first.iter_mut().zip(second) {
            (*a, *b) = (own * *a + other * *b, own * *b + other * *a);
        }
    });
    f64::from(own)
}

/// A box of the share 1 - `own` exchanged between partners; what is left of an image, the box cut at the edges.
fn cut_mix(pixels: &mut [f32], size: usize, own: f64, stream: &mut RngStream) -> f64 {
    let side = (size as f64 * (1.0 - own).sqrt()) as usize;
    let mut range = || {
        let middle = stream.below(size);
        middle.saturating_sub(side / 2)..(middle + side / 2).min(size)
    };
    let (rows, columns) = (range(), range());
    pairs(pixels, 3 * size * size, |first, second| {
        for plane in 0..3 {
            for row in rows.clone() {
                let at = (plane * size + row) * size;
                let (from, to) = (at + columns.start, at + columns.end);
                first[from..to].swap_with_slice(&mut second[from..to]);
            }
        }
    });
    1.0 - (rows.len() * columns.len()) as f64 / (size * size) as f64
}

#[cfg(test)]
mod tests {
    use image::Rgb;

    use super::super::transform::IMAGENET;
    use super::*;

    #[test]
    fn an_image_is_a_function_of_its_stream() {
        let image = RgbImage::from_fn(50, 40, |x, y| Rgb([(5 * x) as u8, (6 * y) as u8, (x + y) as u8]));
        let draw = |augment: Augment, seed| {
            let mut planes = Vec::new();
            augment.image(&image, 16, &IMAGENET, &mut RngStream::new(seed, "image/0/0"), &mut planes);
            planes
        };
        for augment in [Augment::IMAGENET, Augment::SMALL] {
            assert_eq!(draw(augment, 1), draw(augment, 1));
            assert_ne!(draw(augment, 1), draw(augment, 2));
            assert!((0..30).all(|seed| draw(augment, seed).len() == 3 * 256));
            assert!(draw(augment, 3).iter().all(|value| value.is_finite()));
        }
    }

    #[test]
    fn parts_lie_inside() {
        let stream = &mut RngStream::new(1, "crop");
        for size in [(500, 375), (1, 1), (3, 900), (900, 3), (224, 224)] {
            for _ in 0..50 {
                let (x, y, w, h) = resized_crop(size, 0.08, stream);
                assert!(w > 0 && h > 0 && x + w <= size.0 && y + h <= size.1, "{size:?}: {x} {y} {w} {h}");
            }
        }
    }

    #[test]
    fn shares_follow_what_is_mixed() {
        let size = 8;
        let image = 3 * size * size;
        let start: Vec<f32> = (0..3 * image).map(|at| (at / image) as f32).collect();
        for (augment, seed) in
            [Augment { cutmix: 0.0, ..Augment::IMAGENET }, Augment { mixup: 0.0, ..Augment::IMAGENET }]
                .into_iter()
                .flat_map(|augment| (0..10).map(move |seed| (augment, seed)))
        {
            let mut pixels = start.clone();
            let shares = augment.batch(&mut pixels, &[0, 1, 2], (4, size), &mut RngStream::new(seed, "mix"));
            let rows: Vec<&[f32]> = shares.chunks(4).collect();
            assert!(rows.iter().all(|row| (row.iter().sum::<f32>() - 1.0).abs() < 1e-5));
            // the mean of image 0, which was 0 everywhere, is the share of image 2 times 2
            let mean = pixels[..image].iter().sum::<f32>() / image as f32;
            let other = (rows[0][2] - 0.025) / 0.9;
            assert!((mean - 2.0 * other).abs() < 1e-4, "{mean} {other}");
            assert!(pixels[image..2 * image].iter().all(|value| (*value - 1.0).abs() < 1e-5));
            assert!((rows[1][1] - 0.925).abs() < 1e-5);
        }
        let plain =
            Augment::SMALL.batch(&mut start.clone(), &[1, 0, 0], (2, size), &mut RngStream::new(0, "mix"));
        assert!(
            plain
                .iter()
                .zip([0.05, 0.95, 0.95, 0.05, 0.95, 0.05])
                .all(|(a, b): (&f32, f32)| (a - b).abs() < 1e-6)
        );
    }
}
