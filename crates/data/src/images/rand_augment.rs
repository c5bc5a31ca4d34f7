//! RandAugment (Cubuk et al. 2019) with timm's "increasing" operations: two of fifteen per image, each at every second
//! chance, magnitudes around 9 of 10 (`SPEC-vision.md` section 8; ranges as in timm, from general knowledge).

use image::{Rgb, RgbImage};

use effattn_kernel::device::rng::RngStream;

/// Settings.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RandAugment {
    /// Mean magnitude, of 10.
    pub magnitude: f64,
    /// Its standard deviation.
    pub std: f64,
    /// Operations per image.
    pub layers: usize,
}

/// What lies outside an image that was moved: ImageNet's mean.
const FILL: Rgb<u8> = Rgb([124, 116, 104]);

/// One operation: changes an image at a magnitude from 0 to 1; `sign` is -1 or 1.
type Operation = fn(&RgbImage, f64, f64) -> RgbImage;

/// The operations by name.
pub const OPERATIONS: [(&str, Operation); 15] = [
    ("auto-contrast", |image, _, _| tables(image, auto_contrast)),
    ("equalize", |image, _, _| tables(image, equalize)),
    ("invert", |image, _, _| mapped(image, |x| 255 - x)),
    ("rotate", |image, level, sign| {
        let (sin, cos) = (-sign * level * 30.0f64).to_radians().sin_cos();
        affine(image, [cos, sin, -sin, cos], (0.0, 0.0))
    }),
    ("posterize", |image, level, _| {
        let bits = 4 - (4.0 * level) as u32;
        mapped(image, |x| x & !(((1u32 << (8 - bits)) - 1) as u8))
    }),
    ("solarize", |image, level, _| {
        let from = 256 - (256.0 * level) as u32;
        mapped(image, |x| if u32::from(x) < from { x } else { 255 - x })
    }),
    ("solarize-add", |image, level, _| {
        let add = (110.0 * level) as u8;
        mapped(image, |x| if x < 128 { x.saturating_add(add) } else { x })
    }),
    ("color", |image, level, sign| blended(image, factor(level, sign), |_, gray| [gray; 3])),
    ("contrast", |image, level, sign| {
        let all: u64 = image.pixels().map(|pixel| u64::from(gray(pixel))).sum();
        let mean = (all as f64 / f64::from(image.width() * image.height()).max(1.0) + 0.5) as u8;
        blended(image, factor(level, sign), |_, _| [mean; 3])
    }),
    ("brightness", |image, level, sign| blended(image, factor(level, sign), |_, _| [0; 3])),
    ("sharpness", |image, level, sign| {
        let smooth = smooth(image);
        blended(image, factor(level, sign), |(x, y), _| smooth.get_pixel(x, y).0)
    }),
    ("shear-x", |image, level, sign| sheared(image, [1.0, sign * 0.3 * level, 0.0, 1.0])),
    ("shear-y", |image, level, sign| sheared(image, [1.0, 0.0, sign * 0.3 * level, 1.0])),
    ("translate-x", |image, level, sign| {
        affine(image, [1.0, 0.0, 0.0, 1.0], (sign * 0.45 * level * f64::from(image.width()), 0.0))
    }),
    ("translate-y", |image, level, sign| {
        affine(image, [1.0, 0.0, 0.0, 1.0], (0.0, sign * 0.45 * level * f64::from(image.height())))
    }),
];

impl RandAugment {
    /// `image` after the operations that `stream` draws.
    pub fn apply(&self, mut image: RgbImage, stream: &mut RngStream) -> RgbImage {
        for _ in 0..self.layers {
            let (_, operation) = OPERATIONS[stream.below(OPERATIONS.len())];
            let (skipped, noise, sign) = (stream.uniform(0.0, 1.0) >= 0.5, stream.normal(), stream.below(2));
            if !skipped {
                let level = (self.magnitude + self.std * noise).clamp(0.0, 10.0) / 10.0;
                image = operation(&image, level, if sign == 0 { 1.0 } else { -1.0 });
            }
        }
        image
    }
}

/// Share of the image in a blend.
fn factor(level: f64, sign: f64) -> f64 {
    (1.0 + sign * 0.9 * level).max(0.1)
}

fn gray(pixel: &Rgb<u8>) -> u8 {
    let [r, g, b] = pixel.0.map(u32::from);
    ((19_595 * r + 38_470 * g + 7_471 * b + 0x8000) >> 16) as u8
}

fn mapped(image: &RgbImage, map: impl Fn(u8) -> u8) -> RgbImage {
    let mut out = image.clone();
    out.iter_mut().for_each(|value| *value = map(*value));
    out
}

/// Every channel through a table made from its histogram.
fn tables(image: &RgbImage, table: fn(&[u32; 256]) -> Option<[u8; 256]>) -> RgbImage {
    let mut out = image.clone();
    for channel in 0..3 {
        let mut counts = [0u32; 256];
        image.pixels().for_each(|pixel| counts[usize::from(pixel.0[channel])] += 1);
        if let Some(table) = table(&counts) {
            out.pixels_mut().for_each(|pixel| pixel.0[channel] = table[usize::from(pixel.0[channel])]);
        }
    }
    out
}

fn auto_contrast(counts: &[u32; 256]) -> Option<[u8; 256]> {
    let low = counts.iter().position(|count| *count > 0)?;
    let high = counts.iter().rposition(|count| *count > 0)?;
    let scale = 255.0 / high.checked_sub(low).filter(|span| *span > 0)? as f64;
    let value = |x: usize| ((x as f64 - low as f64) * scale).clamp(0.0, 255.0) as u8;
    Some(std::array::from_fn(value))
}

fn equalize(counts: &[u32; 256]) -> Option<[u8; 256]> {
    let last = *counts.iter().rev().find(|count| **count > 0)?;
    let step = (counts.iter().sum::<u32>() - last) / 255;
    if step == 0 {
        return None;
    }
    let mut before = step / 2;
    Some(std::array::from_fn(|x| {
        let value = (before / step).min(255) as u8;
        before += counts[x];
        value
    }))
}

/// `other` + `factor` (image - other), where `other` is made of a place and its gray value.
fn blended(image: &RgbImage, factor: f64, other: impl Fn((u32, u32), u8) -> [u8; 3]) -> RgbImage {
    RgbImage::from_fn(image.width(), image.height(), |x, y| {
        let pixel = image.get_pixel(x, y);
        let other = other((x, y), gray(pixel));
        let mix = |channel: usize| {
            let (own, other) = (f64::from(pixel.0[channel]), f64::from(other[channel]));
            (other + factor * (own - other)).clamp(0.0, 255.0) as u8
        };
        Rgb([mix(0), mix(1), mix(2)])
    })
}

/// Means over 3 x 3 places, the middle one five times; the edge as it is.
fn smooth(image: &RgbImage) -> RgbImage {
    let (width, height) = image.dimensions();
    RgbImage::from_fn(width, height, |x, y| {
        let pixel = *image.get_pixel(x, y);
        if x == 0 || y == 0 || x + 1 == width || y + 1 == height {
            return pixel;
        }
        let mut sums = pixel.0.map(|value| 4 * u32::from(value));
        for (dx, dy) in (0..9).map(|at| (at % 3, at / 3)) {
            let near = image.get_pixel(x + dx - 1, y + dy - 1);
            sums.iter_mut().zip(near.0).for_each(|(sum, value)| *sum += u32::from(value));
        }
        Rgb(sums.map(|sum| ((f64::from(sum) / 13.0) + 0.5) as u8))
    })
}

/// Sheared around the corner, as timm does.
fn sheared(image: &RgbImage, matrix: [f64; 4]) -> RgbImage {
    let (cx, cy) = (f64::from(image.width()) / 2.0, f64::from(image.height()) / 2.0);
    let [a, b, c, d] = matrix;
    affine(image, matrix, (a * cx + b * cy - cx, c * cx + d * cy - cy))
}

/// The image whose place p holds what was at `matrix` (p - middle) + middle + `shift`, bilinear.
pub fn affine(image: &RgbImage, [a, b, c, d]: [f64; 4], (dx, dy): (f64, f64)) -> RgbImage {
    let (width, height) = image.dimensions();
    let (cx, cy) = (f64::from(width) / 2.0, f64::from(height) / 2.0);
    RgbImage::from_fn(width, height, |x, y| {
        let (px, py) = (f64::from(x) + 0.5 - cx, f64::from(y) + 0.5 - cy);
        let (sx, sy) = (a * px + b * py + cx + dx, c * px + d * py + cy + dy);
        if sx < 0.0 || sy < 0.0 || sx >= f64::from(width) || sy >= f64::from(height) {
            return FILL;
        }
        let (sx, sy) = (sx - 0.5, sy - 0.5);
        let (left, top) = (sx.floor(), sy.floor());
        let (u, v) = (sx - left, sy - top);
        let at = |place: f64, end: u32| place.clamp(0.0, f64::from(end - 1)) as u32;
        let near = |x: f64, y: f64| image.get_pixel(at(x, width), at(y, height)).0.map(f64::from);
        let corners =
            [near(left, top), near(left + 1.0, top), near(left, top + 1.0), near(left + 1.0, top + 1.0)];
        let shares = [(1.0 - u) * (1.0 - v), u * (1.0 - v), (1.0 - u) * v, u * v];
        let value = |channel: usize| {
            let sum: f64 = corners.iter().zip(shares).map(|(corner, share)| corner[channel] * share).sum();
            (sum + 0.5) as u8
        };
        Rgb([value(0), value(1), value(2)])
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn picture() -> RgbImage {
        RgbImage::from_fn(12, 8, |x, y| Rgb([(20 * x) as u8, (30 * y) as u8, (10 * (x + y)) as u8]))
    }

    fn apply(name: &str, level: f64, sign: f64) -> RgbImage {
        let (_, operation) = OPERATIONS.iter().find(|(known, _)| *known == name).unwrap();
        operation(&picture(), level, sign)
    }

    #[test]
    fn without_magnitude_nothing_moves() {
        for name in
            ["rotate", "color", "contrast", "brightness", "sharpness", "shear-x", "translate-y", "solarize"]
        {
            assert_eq!(apply(name, 0.0, 1.0), picture(), "{name}");
        }
    }

    #[test]
    fn operations_do_what_they_are_called() {
        let own = picture();
        assert_eq!(apply("invert", 0.0, 1.0).get_pixel(3, 2).0, own.get_pixel(3, 2).0.map(|x| 255 - x));
        assert_eq!(apply("posterize", 0.9, 1.0).get_pixel(7, 5).0, own.get_pixel(7, 5).0.map(|x| x & 0x80));
        assert_eq!(apply("solarize-add", 0.9, 1.0).get_pixel(1, 1).0, [119, 129, 119]);
        assert_eq!(apply("brightness", 1.0, -1.0).get_pixel(11, 7).0, own.get_pixel(11, 7).0.map(|x| x / 10));
        // the source lies 0.45 x 12 = 5.4 places to the right
        let moved = apply("translate-x", 1.0, 1.0);
        assert_eq!(moved.get_pixel(0, 0).0[0], 108);
        assert_eq!(*moved.get_pixel(11, 0), FILL);
        let contrast = apply("auto-contrast", 0.0, 1.0);
        assert_eq!(contrast.get_pixel(0, 0).0, [0; 3]);
        assert!(
            contrast.get_pixel(11, 7).0.iter().all(|&value| value >= 254),
            "the table of values is cut, not rounded"
        );
        let turned = apply("rotate", 1.0, 1.0);
        assert_eq!(turned.get_pixel(0, 0), &FILL);
    }

    #[test]
    fn what_is_drawn_follows_from_the_stream() {
        let augment = RandAugment { magnitude: 9.0, std: 0.5, layers: 2 };
        let draw = |seed| augment.apply(picture(), &mut RngStream::new(seed, "x"));
        assert_eq!(draw(4), draw(4));
        assert!((0..20).any(|seed| draw(seed) != picture()));
        assert!((0..40).all(|seed| draw(seed).dimensions() == (12, 8)));
    }
}
