//! Resizing, cropping and normalising (`SPEC-vision.md` section 8).

use image::RgbImage;
use image::imageops::{self, FilterType};

/// How pixels are interpolated; both filters grow with the reduction (antialias).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Interpolation {
    /// Triangle.
    Bilinear,
    /// Catmull-Rom (a = -0.5).
    Bicubic,
}

/// Means and standard deviations of the channels, on 0 to 1.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Normal {
    /// Means.
    pub mean: [f32; 3],
    /// Standard deviations.
    pub std: [f32; 3],
}

/// Those of ImageNet.
pub const IMAGENET: Normal = Normal { mean: [0.485, 0.456, 0.406], std: [0.229, 0.224, 0.225] };

/// `image` at `width` x `height`.
pub fn resize(image: &RgbImage, (width, height): (u32, u32), how: Interpolation) -> RgbImage {
    if image.dimensions() == (width, height) {
        return image.clone();
    }
    let filter = match how {
        Interpolation::Bilinear => FilterType::Triangle,
        Interpolation::Bicubic => FilterType::CatmullRom,
    };
    imageops::resize(image, width, height, filter)
}

/// `image` with its shorter side at `short`, the other in proportion, rounded down as torchvision does.
pub fn resize_short(image: &RgbImage, short: u32, how: Interpolation) -> RgbImage {
    let (width, height) = image.dimensions();
    let other = |long: u32, least: u32| {
        (u64::from(short) * u64::from(long) / u64::from(least.max(1))).clamp(1, 1 << 16) as u32
    };
    let size = if width <= height { (short, other(height, width)) } else { (other(width, height), short) };
    resize(image, size, how)
}

/// The middle of `image`, `size` x `size`; what an image does not reach is black.
pub fn centre_crop(image: &RgbImage, size: u32) -> RgbImage {
    let (width, height) = image.dimensions();
    let start = |length: u32| ((f64::from(length) - f64::from(size)) / 2.0).round_ties_even() as i64;
    let mut out = RgbImage::new(size, size);
    imageops::replace(&mut out, image, -start(width), -start(height));
    out
}

/// What is evaluated of `image`: its shorter side resized to `size` / `share`, and the middle of that.
pub fn evaluated(image: &RgbImage, size: u32, (share, how): (f64, Interpolation)) -> RgbImage {
    centre_crop(&resize_short(image, (f64::from(size) / share) as u32, how), size)
}

/// Planes of red, green and blue, (x / 255 - mean) / std, appended to `to`.
pub fn normalised(image: &RgbImage, normal: &Normal, to: &mut Vec<f32>) {
    for channel in 0..3 {
        let (mean, std) = (normal.mean[channel], normal.std[channel]);
        to.extend(image.pixels().map(|pixel| (f32::from(pixel.0[channel]) / 255.0 - mean) / std));
    }
}

#[cfg(test)]
mod tests {
    use image::Rgb;

    use super::*;

    #[test]
    fn the_shorter_side_is_resized_and_the_middle_kept() {
        let wide = RgbImage::from_fn(400, 200, |x, _| Rgb([(x / 2) as u8; 3]));
        assert_eq!(resize_short(&wide, 256, Interpolation::Bicubic).dimensions(), (512, 256));
        let out = evaluated(&wide, 224, (0.875, Interpolation::Bicubic));
        assert_eq!(out.dimensions(), (224, 224));
        // the middle columns: 144 of 512 are cut off on each side
        assert!(i32::from(out.get_pixel(112, 3).0[0]).abs_diff(100) <= 1);
        let tiny = RgbImage::from_pixel(1, 1, Rgb([9, 8, 7]));
        assert_eq!(evaluated(&tiny, 4, (0.875, Interpolation::Bilinear)).get_pixel(3, 3).0, [9, 8, 7]);
    }

    #[test]
    fn reducing_averages() {
        let stripes = RgbImage::from_fn(64, 64, |x, _| Rgb([if x % 2 == 0 { 0 } else { 200 }; 3]));
        for how in [Interpolation::Bilinear, Interpolation::Bicubic] {
            let small = resize(&stripes, (8, 8), how);
            assert!(small.pixels().all(|pixel| pixel.0[0].abs_diff(100) <= 12), "{how:?}");
        }
    }

    #[test]
    fn planes_are_normalised() {
        let mut planes = Vec::new();
        normalised(&RgbImage::from_pixel(1, 2, Rgb([255, 0, 51])), &IMAGENET, &mut planes);
        assert_eq!(planes.len(), 6);
        assert!((planes[1] - (1.0 - 0.485) / 0.229).abs() < 1e-6 && (planes[2] + 0.456 / 0.224).abs() < 1e-6);
        assert!((planes[5] - (0.2 - 0.406) / 0.225).abs() < 1e-6);
    }
}
