//! Brightness, contrast, and what cameras and files do: stretched, coarse pixels, JPEG.

use std::io::Cursor;

use image::codecs::jpeg::JpegEncoder;
use image::{ImageFormat, RgbImage};

use super::planes::{Border, Planes, Weights};
use effattn_kernel::device::rng::RngStream;

/// V of hue, saturation and value, plus `more`, at most 1: a pixel is scaled by how its largest channel grows.
pub fn brightness(mut image: Planes, more: f32) -> Planes {
    for at in 0..image.width * image.height {
        let value = image.planes.iter().map(|plane| plane[at]).fold(0.0f32, f32::max);
        let new = (value + more).min(1.0);
        for plane in &mut image.planes {
            plane[at] = if value > 0.0 { plane[at] * new / value } else { new };
        }
    }
    image
}

/// What a channel differs from its mean by, times `share`.
pub fn contrast(mut image: Planes, share: f32) -> Planes {
    for plane in &mut image.planes {
        let sum: f64 = plane.iter().map(|x| f64::from(*x)).sum();
        let mean = (sum / plane.len().max(1) as f64) as f32;
        plane.iter_mut().for_each(|x| *x = (*x - mean) * share + mean);
    }
    image
}

/// An affine map that moves three points by up to `shift` pixels, then places moved by up to about `alpha` pixels,
/// neighbours within `sigma` alike.
pub fn elastic(image: &Planes, (alpha, sigma, shift): (f64, f64, f64), stream: &mut RngStream) -> Planes {
    let (width, height) = image.size();
    let (cx, cy, far) = ((width / 2) as f64, (height / 2) as f64, (width.min(height) / 3) as f64);
    let points = [(cx + far, cy + far), (cx + far, cy - far), (cx - far, cy - far)];
    let moved = points.map(|(x, y)| (x + stream.uniform(-shift, shift), y + stream.uniform(-shift, shift)));
    let map = affine(moved, points);
    let stretched = image.sampled(Border::Reflect101, |x, y| map.at(x as f64, y as f64));
    let mut field = || {
        let drawn = Planes::layer((width, height), |_, _| stream.uniform(-1.0, 1.0) as f32);
        drawn.blurred(sigma, 3.0, Border::Reflect).map(|x| x * alpha as f32)
    };
    let (dx, dy) = (field(), field());
    stretched.sampled(Border::Reflect, |x, y| {
        let at = y * width + x;
        (x as f64 + f64::from(dx.planes[0][at]), y as f64 + f64::from(dy.planes[0][at]))
    })
}

/// x' = a x + b y + c, y' = d x + e y + f.
struct Affine([f64; 6]);

impl Affine {
    fn at(&self, x: f64, y: f64) -> (f64, f64) {
        let [a, b, c, d, e, f] = self.0;
        (a * x + b * y + c, d * x + e * y + f)
    }
}

/// The affine map that takes three points to three others; the points themselves where they lie on a line.
fn affine(from: [(f64, f64); 3], to: [(f64, f64); 3]) -> Affine {
    let [(x0, y0), (x1, y1), (x2, y2)] = from;
    let area = (x1 - x0) * (y2 - y0) - (x2 - x0) * (y1 - y0);
    if area == 0.0 {
        return Affine([1.0, 0.0, 0.0, 0.0, 1.0, 0.0]);
    }
    let row = |[z0, z1, z2]: [f64; 3]| {
        let a = ((z1 - z0) * (y2 - y0) - (z2 - z0) * (y1 - y0)) / area;
        let b = ((x1 - x0) * (z2 - z0) - (x2 - x0) * (z1 - z0)) / area;
        [a, b, z0 - a * x0 - b * y0]
    };
    let ([a, b, c], [d, e, f]) = (row(to.map(|(x, _)| x)), row(to.map(|(_, y)| y)));
    Affine([a, b, c, d, e, f])
}

/// Made smaller to the share `share` of each side, and large again, by means of the pixels that a pixel covers.
pub fn pixelate(image: &Planes, share: f64) -> Planes {
    let (width, height) = image.size();
    let small = |len: usize| ((len as f64 * share) as usize).max(1);
    let rounded = |value: f32| (value * 255.0).round() / 255.0;
    let resized = |image: &Planes, (width, height): (usize, usize)| {
        let mixed = image.mixed(&boxes(image.width, width), &boxes(image.height, height), rounded);
        mixed.map(rounded)
    };
    resized(&resized(image, (small(width), small(height))), (width, height))
}

/// `to` boxes over `from` places: those whose middles a box covers, in equal shares, as Pillow does.
fn boxes(from: usize, to: usize) -> Weights {
    let scale = from as f64 / to as f64;
    let (wide, reach) = (scale.max(1.0), scale.max(1.0) / 2.0);
    let row = |at: usize| {
        let middle = (at as f64 + 0.5) * scale;
        let first = ((middle - reach + 0.5).max(0.0) as usize).min(from - 1);
        let last = ((middle + reach + 0.5) as usize).clamp(first + 1, from);
        let inside = |place: usize| {
            let far = (place as f64 - middle + 0.5) / wide;
            f32::from(u8::from(far > -0.5 && far <= 0.5))
        };
        let weights: Vec<f32> = (first..last).map(inside).collect();
        let sum = weights.iter().sum::<f32>().max(1.0);
        (first, weights.into_iter().map(|weight| weight / sum).collect())
    };
    (0..to).map(row).collect()
}

/// The image after a JPEG of `quality` was made of it and read.
pub fn jpeg(image: &RgbImage, quality: u8) -> RgbImage {
    let mut bytes = Vec::new();
    let made = JpegEncoder::new_with_quality(&mut bytes, quality).encode_image(image);
    let read = made.and_then(|()| image::load(Cursor::new(bytes), ImageFormat::Jpeg));
    // an image in memory can always be written and read: only sides above 65,535 have no JPEG
    read.map_or_else(|_| image.clone(), |read| read.into_rgb8())
}

#[cfg(test)]
mod tests {
    use image::Rgb;

    use super::*;

    fn picture(side: u32) -> Planes {
        Planes::of(&RgbImage::from_fn(side, side, |x, y| Rgb([(7 * x) as u8, (5 * y) as u8, (x * y) as u8])))
    }

    #[test]
    fn brightness_adds_to_the_largest_channel_and_keeps_hue_and_saturation() {
        let one = |pixel: [f32; 3], more| {
            let image = Planes { planes: pixel.map(|x| vec![x]).to_vec(), width: 1, height: 1 };
            brightness(image, more).planes.concat()
        };
        assert_eq!(one([0.5, 0.25, 0.0], 0.1), [0.6, 0.3, 0.0]);
        assert_eq!(one([0.8, 0.4, 0.2], 0.5), [1.0, 0.5, 0.25]);
        assert_eq!(one([0.0; 3], 0.3), [0.3; 3], "black becomes gray");
    }

    #[test]
    fn contrast_keeps_means_and_shrinks_what_differs() {
        let own = picture(16);
        let flat = contrast(own.clone(), 0.05);
        for (plane, before) in flat.planes.iter().zip(&own.planes) {
            let mean = |plane: &[f32]| plane.iter().sum::<f32>() / plane.len() as f32;
            assert!((mean(plane) - mean(before)).abs() < 1e-5);
            let mean = mean(before);
            assert!(plane.iter().zip(before).all(|(a, b)| (a - mean - 0.05 * (b - mean)).abs() < 1e-5));
        }
    }

    #[test]
    fn an_affine_map_takes_its_points_to_theirs() {
        let (from, to) = ([(1.0, 2.0), (5.0, -1.0), (3.0, 3.0)], [(0.0, 1.0), (2.0, 2.0), (7.0, -3.0)]);
        let map = affine(from, to);
        for ((x, y), expected) in from.into_iter().zip(to) {
            let got = map.at(x, y);
            assert!((got.0 - expected.0).abs() < 1e-9 && (got.1 - expected.1).abs() < 1e-9);
        }
    }

    #[test]
    fn an_elastic_image_moves_as_far_as_it_is_told() {
        let own = picture(32);
        let still = elastic(&own, (0.0, 0.2, 0.0), &mut RngStream::new(1, "elastic"));
        let far = |a: &Planes| {
            a.planes
                .iter()
                .flatten()
                .zip(own.planes.iter().flatten())
                .map(|(a, b)| (a - b).abs())
                .sum::<f32>()
        };
        assert!(far(&still) < 1e-2, "nothing moves without alpha and shift: {}", far(&still));
        let moved = elastic(&own, (0.0, 0.2, 2.0), &mut RngStream::new(1, "elastic"));
        assert!(far(&moved) > 1.0);
        // without a blur of the field, places move by at most alpha
        let ramp = Planes::layer((64, 64), |x, _| x as f32);
        let shaken = elastic(&ramp, (3.0, 0.01, 0.0), &mut RngStream::new(2, "elastic"));
        let steps: Vec<f32> = shaken.planes[0].iter().zip(&ramp.planes[0]).map(|(a, b)| a - b).collect();
        assert!(steps.iter().all(|step| step.abs() <= 3.0 + 1e-4) && steps.iter().any(|step| *step > 2.5));
    }

    #[test]
    fn coarse_pixels_are_means() {
        let ramp = Planes::layer((8, 8), |x, _| (10 * x) as f32 / 255.0);
        let out = pixelate(&ramp, 0.25);
        // 2 pixels of 4 places each: means 15 and 55
        let line: Vec<u8> = out.planes[0][..8].iter().map(|x| (x * 255.0).round() as u8).collect();
        assert_eq!(line, [15, 15, 15, 15, 55, 55, 55, 55]);
        // 8 to 5: boxes 1.6 wide, of the one or two places whose middles they hold
        let weights = boxes(8, 5);
        assert!(weights.iter().all(|(_, row)| (row.iter().sum::<f32>() - 1.0).abs() < 1e-6));
        assert_eq!(
            weights.iter().map(|(first, row)| (*first, row.len())).collect::<Vec<_>>(),
            [(0, 2), (2, 1), (3, 2), (5, 1), (6, 2)]
        );
    }

    #[test]
    fn a_jpeg_of_less_quality_is_farther_off() {
        let own = picture(32).image();
        let far = |quality: u8| {
            let out = jpeg(&own, quality);
            out.iter().zip(own.iter()).map(|(a, b)| (f64::from(*a) - f64::from(*b)).powi(2)).sum::<f64>()
        };
        assert!(far(95) < far(25) && far(25) < far(7) && far(7) > 0.0);
    }
}
