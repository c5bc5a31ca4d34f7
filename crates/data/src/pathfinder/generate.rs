//! Makes images by the published description, in the hard setting with 14 dashes a curve. Every image has a random stream of its own, keyed by seed, size and index: any number of threads
//! makes the same images.

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::curve::{self, Curve, Field};
use super::raster::{Canvas, Stamps};
use super::settings::Settings;

const DISTRACTOR_CONTRAST: f64 = 2.0;
/// Distractors stop when less than this share of the field is free.
const LEAST_FREE: f64 = 0.01;

/// One image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Image {
    /// Gray values, row by row.
    pub pixels: Vec<u8>,
    /// 1 if both markers are on the same curve.
    pub label: u8,
    /// Places of the markers, row and column.
    pub markers: [(i32, i32); 2],
}

/// Makes images of one size under one seed.
pub struct Generator {
    settings: Settings,
    seed: u64,
    stamps: Vec<Stamps>,
}

impl Generator {
    /// A generator for `settings` under `seed`.
    pub fn new(settings: Settings, seed: u64) -> Self {
        let stamps = settings.margins.iter().map(|&margin| Stamps::new(&settings, margin)).collect();
        Self { settings, seed, stamps }
    }

    /// Image number `index`.
    pub fn image(&self, index: u64) -> Image {
        let mut rng = ChaCha8Rng::seed_from_u64(self.seed ^ ((self.settings.size as u64) << 48));
        rng.set_stream(index);
        let stamps = &self.stamps[rng.random_range(0..self.stamps.len())];
        let (mut field, curves) = loop {
            if let Some(done) = self.targets(stamps, &mut rng) {
                break done;
            }
        };
        let mut canvas = Canvas::new(self.settings.size);
        for curve in &curves {
            canvas.max(&curve.image);
        }
        self.distract(stamps, &mut field, &mut canvas, &mut rng);
        let label = u8::from(rng.random::<bool>());
        let first = usize::from(rng.random::<bool>());
        let last = if label == 1 { first } else { 1 - first };
        let markers = [curves[first].tail, curves[last].end];
        for &(y, x) in &markers {
            canvas.stamp(&stamps.marker, y, x, 1.0);
        }
        Image { pixels: canvas.to_bytes(), label, markers }
    }

    /// Both target curves grown in turns, or nothing if one got stuck.
    fn targets(&self, stamps: &Stamps, rng: &mut ChaCha8Rng) -> Option<(Field, [Curve; 2])> {
        let mut field = Field::new(self.settings.size);
        let contrast = self.settings.contrast * 2.0;
        let seeds = field.free_seeds(stamps, 2 * self.settings.seed_distance, rng);
        let a = Curve::seed(stamps, &field, seeds.pick(rng)?, seeds.angle, contrast)?;
        let near = curve::beside(a.tail, self.settings.seed_distance, rng);
        let b = Curve::seed(stamps, &field, near, curve::random_angle(rng), contrast)?;
        let mut curves = [a, b];
        for _ in 1..self.settings.contour {
            for curve in &mut curves {
                curve.extend(stamps, &mut field, self.settings.continuity, contrast, rng)?;
            }
        }
        field.cover(&curves[1].footprint);
        Some((field, curves))
    }

    /// Short curves elsewhere; those that find no room are left out.
    fn distract(&self, stamps: &Stamps, field: &mut Field, canvas: &mut Canvas, rng: &mut ChaCha8Rng) {
        for _ in 0..self.settings.distractors {
            let seeds = field.free_seeds(stamps, 1, rng);
            if seeds.share() < LEAST_FREE {
                return;
            }
            let mut trial = field.clone();
            let placed = seeds.pick(rng).and_then(|place| {
                let mut curve = Curve::seed(stamps, &trial, place, seeds.angle, DISTRACTOR_CONTRAST)?;
                for _ in 1..self.settings.distractor {
                    let contrast = DISTRACTOR_CONTRAST;
                    curve.extend(stamps, &mut trial, self.settings.continuity, contrast, rng)?;
                }
                Some(curve)
            });
            if let Some(curve) = placed {
                trial.cover(&curve.footprint);
                *field = trial;
                canvas.max(&curve.image);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pathfinder::settings::{PATHFINDER32, PATHFINDER64, PATHFINDER128};
    use rayon::prelude::*;

    fn images(settings: Settings, count: u64) -> Vec<Image> {
        let generator = Generator::new(settings, 0);
        (0..count).into_par_iter().map(|index| generator.image(index)).collect()
    }

    /// Statistics of 500 images of the original code.
    #[test]
    fn published_statistics_are_met() {
        let images = images(PATHFINDER32, 500);
        let pixels: Vec<f64> =
            images.iter().flat_map(|image| image.pixels.iter().map(|&p| f64::from(p))).collect();
        let n = pixels.len() as f64;
        let share = |low: f64| pixels.iter().filter(|&&p| p > low).count() as f64 / n;
        let mean = pixels.iter().sum::<f64>() / n;
        let std = (pixels.iter().map(|p| (p - mean).powi(2)).sum::<f64>() / n).sqrt();
        assert!((mean - 20.2).abs() < 2.0, "mean {mean}");
        assert!((std - 51.0).abs() < 4.0, "std {std}");
        assert!((1.0 - share(0.0) - 0.658).abs() < 0.08, "black {}", 1.0 - share(0.0));
        for (low, expected) in [(32.0, 0.145), (64.0, 0.126), (128.0, 0.085)] {
            assert!((share(low) - expected).abs() < 0.02, "above {low}: {}", share(low));
        }
        let ones = images.iter().filter(|image| image.label == 1).count();
        assert!((200..300).contains(&ones), "{ones} of 500 connected");
        for label in [0, 1] {
            let distances = images.iter().filter(|image| image.label == label).map(|image| {
                let [(ay, ax), (by, bx)] = image.markers;
                f64::from((ay - by).pow(2) + (ax - bx).pow(2)).sqrt()
            });
            let distances: Vec<f64> = distances.collect();
            let mean = distances.iter().sum::<f64>() / distances.len() as f64;
            assert!((mean - 13.1).abs() < 1.8, "marker distance {mean} for label {label}");
        }
    }

    #[test]
    fn an_image_depends_on_seed_and_index_only() {
        let generator = Generator::new(PATHFINDER32, 5);
        assert_eq!(generator.image(3), Generator::new(PATHFINDER32, 5).image(3));
        assert_ne!(generator.image(3).pixels, generator.image(4).pixels);
        assert_ne!(generator.image(3).pixels, Generator::new(PATHFINDER32, 6).image(3).pixels);
    }

    #[test]
    fn larger_images_use_the_whole_range() {
        for settings in [PATHFINDER64, PATHFINDER128] {
            for image in images(settings, 4) {
                assert_eq!(image.pixels.len(), settings.size * settings.size);
                assert_eq!(image.pixels.iter().max(), Some(&255));
                assert_eq!(image.pixels[0], 0);
            }
        }
    }
}
