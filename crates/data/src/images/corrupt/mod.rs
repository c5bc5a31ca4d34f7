//! The fifteen corruptions of ImageNet-C at five severities (Hendrycks and Dietterich 2019; `SPEC-vision.md` section 12),
//! and of CIFAR-10-C with the numbers of its released script: functions of an image, a severity and a stream.

pub mod blur;
pub mod digital;
pub mod noise;
pub mod planes;
pub mod weather;

use image::RgbImage;

use effattn_kernel::device::rng::RngStream;
use planes::Planes;

/// Severities of every corruption.
pub const SEVERITIES: usize = 5;

/// Images from this side on are corrupted as ImageNet-C's, smaller ones as CIFAR-10-C's.
const LARGE: u32 = 64;

/// A way to spoil an image.
pub struct Corruption {
    /// Name of its folder or file in the published sets.
    pub name: &'static str,
    /// Mean error of AlexNet under it over the severities, in ImageNet-C (`SPEC-vision.md` section 11).
    pub alexnet: f64,
    /// Makes severity 0 to 4 of an image, with ImageNet-C's numbers or else CIFAR-10-C's.
    make: fn(&RgbImage, usize, bool, &mut RngStream) -> RgbImage,
}

/// The number of a severity: `large` has those of ImageNet-C, `small` those of CIFAR-10-C.
fn pick<T: Copy>(severity: usize, is_large: bool, large: [T; 5], small: [T; 5]) -> T {
    if is_large { large[severity] } else { small[severity] }
}

const fn corruption(
    name: &'static str,
    alexnet: f64,
    make: fn(&RgbImage, usize, bool, &mut RngStream) -> RgbImage,
) -> Corruption {
    Corruption { name, alexnet, make }
}

/// Every corruption, in the order of the published tables.
pub static CORRUPTIONS: [Corruption; 15] = [
    corruption("gaussian_noise", 0.886428, |image, severity, large, stream| {
        let std = pick(severity, large, [0.08, 0.12, 0.18, 0.26, 0.38], [0.04, 0.06, 0.08, 0.09, 0.10]);
        noise::gaussian(Planes::of(image), std, stream).image()
    }),
    corruption("shot_noise", 0.894468, |image, severity, large, stream| {
        let photons = pick(severity, large, [60.0, 25.0, 12.0, 5.0, 3.0], [500.0, 250.0, 100.0, 75.0, 50.0]);
        noise::shot(Planes::of(image), photons, stream).image()
    }),
    corruption("impulse_noise", 0.922640, |image, severity, large, stream| {
        let share = pick(severity, large, [0.03, 0.06, 0.09, 0.17, 0.27], [0.01, 0.02, 0.03, 0.05, 0.07]);
        noise::impulse(Planes::of(image), share, stream).image()
    }),
    corruption("defocus_blur", 0.819880, |image, severity, large, _| {
        let disk = pick(
            severity,
            large,
            [(3.0, 0.1), (4.0, 0.5), (6.0, 0.5), (8.0, 0.5), (10.0, 0.5)],
            [(0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1.0, 0.2), (1.5, 0.1)],
        );
        blur::defocus(&Planes::of(image), disk).image()
    }),
    corruption("glass_blur", 0.826268, |image, severity, large, stream| {
        let glass = pick(
            severity,
            large,
            [(0.7, 1, 2), (0.9, 2, 1), (1.0, 2, 3), (1.1, 3, 2), (1.5, 4, 2)],
            [(0.05, 1, 1), (0.25, 1, 1), (0.4, 1, 1), (0.25, 1, 2), (0.4, 1, 2)],
        );
        blur::glass(&Planes::of(image), glass, stream).image()
    }),
    corruption("motion_blur", 0.785948, |image, severity, large, stream| {
        let line = pick(
            severity,
            large,
            [(10.0, 3.0), (15.0, 5.0), (15.0, 8.0), (15.0, 12.0), (20.0, 15.0)],
            [(6.0, 1.0), (6.0, 1.5), (6.0, 2.0), (8.0, 2.0), (9.0, 2.5)],
        );
        let moved = blur::motion(&Planes::of(image), line, stream.uniform(-45.0, 45.0));
        moved.map(|x| x + 0.5 / 255.0).image() // ImageMagick rounds
    }),
    corruption("zoom_blur", 0.798360, |image, severity, large, _| {
        let zooms = pick(
            severity,
            large,
            [(12, 0.01), (16, 0.01), (11, 0.02), (13, 0.02), (11, 0.03)],
            [(7, 0.01), (12, 0.01), (16, 0.01), (21, 0.01), (26, 0.01)],
        );
        blur::zoom(Planes::of(image), zooms).image()
    }),
    corruption("snow", 0.866816, |image, severity, large, stream| {
        let flakes = pick(
            severity,
            large,
            [
                (0.1, 0.3, 3.0, 0.5, 10.0, 4.0, 0.8),
                (0.2, 0.3, 2.0, 0.5, 12.0, 4.0, 0.7),
                (0.55, 0.3, 4.0, 0.9, 12.0, 8.0, 0.7),
                (0.55, 0.3, 4.5, 0.85, 12.0, 8.0, 0.65),
                (0.55, 0.3, 2.5, 0.85, 12.0, 12.0, 0.55),
            ],
            [
                (0.1, 0.2, 1.0, 0.6, 8.0, 3.0, 0.95),
                (0.1, 0.2, 1.0, 0.5, 10.0, 4.0, 0.9),
                (0.15, 0.3, 1.75, 0.55, 10.0, 4.0, 0.9),
                (0.25, 0.3, 2.25, 0.6, 12.0, 6.0, 0.85),
                (0.3, 0.3, 1.25, 0.65, 14.0, 12.0, 0.8),
            ],
        );
        weather::snow(Planes::of(image), flakes, stream).image()
    }),
    corruption("frost", 0.826572, |image, severity, large, stream| {
        let shares = pick(
            severity,
            large,
            [(1.0, 0.4), (0.8, 0.6), (0.7, 0.7), (0.65, 0.7), (0.6, 0.75)],
            [(1.0, 0.2), (1.0, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45)],
        );
        weather::frost(Planes::of(image), shares, stream).image()
    }),
    corruption("fog", 0.819324, |image, severity, large, stream| {
        let cloud = pick(
            severity,
            large,
            [(1.5, 2.0), (2.0, 2.0), (2.5, 1.7), (2.5, 1.5), (3.0, 1.4)],
            [(0.2, 3.0), (0.5, 3.0), (0.75, 2.5), (1.0, 2.0), (1.5, 1.75)],
        );
        weather::fog(Planes::of(image), cloud, stream).image()
    }),
    corruption("brightness", 0.564592, |image, severity, large, _| {
        let more = pick(severity, large, [0.1, 0.2, 0.3, 0.4, 0.5], [0.05, 0.1, 0.15, 0.2, 0.3]);
        digital::brightness(Planes::of(image), more).image()
    }),
    corruption("contrast", 0.853204, |image, severity, large, _| {
        let share = pick(severity, large, [0.4, 0.3, 0.2, 0.1, 0.05], [0.75, 0.5, 0.4, 0.3, 0.15]);
        digital::contrast(Planes::of(image), share).image()
    }),
    corruption("elastic_transform", 0.646056, |image, severity, large, stream| {
        let (alpha, sigma, shift) = pick(
            severity,
            large,
            [(2.0, 0.7, 0.1), (2.0, 0.08, 0.2), (0.05, 0.01, 0.02), (0.07, 0.01, 0.02), (0.12, 0.01, 0.02)],
            [(0.0, 0.0, 0.08), (0.05, 0.2, 0.07), (0.08, 0.06, 0.06), (0.1, 0.04, 0.05), (0.1, 0.03, 0.03)],
        );
        // the released script of ImageNet-C says 244 for images of 224
        let side = if large { 244.0 } else { 32.0 };
        let numbers = (side * alpha, side * sigma, side * shift);
        digital::elastic(&Planes::of(image), numbers, stream).image()
    }),
    corruption("pixelate", 0.717840, |image, severity, large, _| {
        let share = pick(severity, large, [0.6, 0.5, 0.4, 0.3, 0.25], [0.95, 0.9, 0.85, 0.75, 0.65]);
        digital::pixelate(&Planes::of(image), share).map(|x| x + 0.5 / 255.0).image()
    }),
    corruption("jpeg_compression", 0.606500, |image, severity, large, _| {
        digital::jpeg(image, pick(severity, large, [25, 18, 15, 10, 7], [80, 65, 58, 50, 40]))
    }),
];

impl Corruption {
    /// `image` at `severity` (1 to 5), with what `seed` and the image's `key` draw.
    pub fn apply(&self, image: &RgbImage, severity: usize, (seed, key): (u64, &str)) -> RgbImage {
        let severity = severity.clamp(1, SEVERITIES);
        let stream = &mut RngStream::new(seed, &format!("{}/{severity}/{key}", self.name));
        (self.make)(image, severity - 1, image.width().min(image.height()) >= LARGE, stream)
    }
}

#[cfg(test)]
mod tests;
