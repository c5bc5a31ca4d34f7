//! One image from a file: JPEG or PNG, its dimensions looked at before anything is decoded.

use std::io::Cursor;
use std::path::Path;

use image::{ImageFormat, ImageReader, Limits, RgbImage};

use crate::{DataError, store};

/// Most pixels of an image: what Pillow takes without a warning. The largest of ImageNet has 61 million.
const PIXELS: u64 = 89_478_485;
/// Most bytes of a file.
const BYTES: u64 = 256 << 20;

/// The image in `file` as 8-bit red, green and blue; transparency is dropped, gray is repeated.
///
/// # Errors
/// A file that cannot be read, is neither JPEG nor PNG, is too large, cut off or damaged.
pub fn read(file: &Path) -> Result<RgbImage, DataError> {
    let refuse = |error: std::io::Error| store::bad_file(file, error.to_string());
    let bytes =
        effattn_record::file::open(file).and_then(|open| store::read_limited(open, BYTES)).map_err(refuse)?;
    image(&bytes).map_err(|reason| store::bad_file(file, reason))
}

/// The image in `bytes`.
///
/// # Errors
/// As [`read`], in words.
pub fn image(bytes: &[u8]) -> Result<RgbImage, String> {
    let reader =
        || ImageReader::new(Cursor::new(bytes)).with_guessed_format().map_err(|error| error.to_string());
    let format = reader()?.format();
    let jpeg = match format {
        Some(ImageFormat::Jpeg) => true,
        Some(ImageFormat::Png) => false,
        _ => return Err("neither a JPEG nor a PNG image".to_owned()),
    };
    let (width, height) = reader()?.into_dimensions().map_err(|error| error.to_string())?;
    let pixels = u64::from(width) * u64::from(height);
    if pixels > PIXELS {
        return Err(format!("{width} x {height} pixels; at most {PIXELS} are decoded"));
    }
    // the decoder paints what is missing of a JPEG gray and says nothing
    if jpeg && !ends(bytes) {
        return Err("the image is cut off: its end is missing".to_owned());
    }
    let mut reader = reader()?;
    let mut limits = Limits::default();
    limits.max_alloc = Some(16 * PIXELS);
    reader.limits(limits);
    let image = reader.decode().map_err(|error| error.to_string())?;
    Ok(image.into_rgb8())
}

/// Whether a JPEG has its end marker behind its first scan.
fn ends(bytes: &[u8]) -> bool {
    let mut at = 2; // behind the start marker
    while let Some([0xff, kind, high, low]) = bytes.get(at..at + 4) {
        match kind {
            0xff => at += 1, // fill
            0xda => return bytes[at..].windows(2).any(|pair| pair == [0xff, 0xd9]),
            _ => at += 2 + usize::from(u16::from_be_bytes([*high, *low])),
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use image::codecs::jpeg::JpegEncoder;
    use image::{DynamicImage, ImageBuffer, Luma, Rgb};

    use super::*;

    fn encoded(image: &DynamicImage, format: ImageFormat) -> Vec<u8> {
        let mut bytes = Cursor::new(Vec::new());
        image.write_to(&mut bytes, format).unwrap();
        bytes.into_inner()
    }

    fn picture(width: u32, height: u32) -> RgbImage {
        RgbImage::from_fn(width, height, |x, y| Rgb([(3 * x) as u8, (5 * y) as u8, (x + y) as u8]))
    }

    #[test]
    fn pngs_of_every_depth_are_read() {
        let own = picture(9, 7);
        assert_eq!(image(&encoded(&own.clone().into(), ImageFormat::Png)).unwrap(), own);
        let deep: ImageBuffer<Rgb<u16>, Vec<u16>> =
            ImageBuffer::from_fn(9, 7, |x, y| Rgb(own.get_pixel(x, y).0.map(|value| 257 * u16::from(value))));
        assert_eq!(image(&encoded(&deep.into(), ImageFormat::Png)).unwrap(), own);
        let gray: ImageBuffer<Luma<u8>, Vec<u8>> = ImageBuffer::from_pixel(1, 1, Luma([77]));
        assert_eq!(image(&encoded(&gray.into(), ImageFormat::Png)).unwrap().get_pixel(0, 0).0, [77; 3]);
    }

    #[test]
    fn a_jpeg_that_is_cut_off_is_said_to_be() {
        let mut bytes = Vec::new();
        JpegEncoder::new_with_quality(&mut bytes, 90).encode_image(&picture(64, 48)).unwrap();
        assert_eq!(image(&bytes).unwrap().dimensions(), (64, 48));
        for cut in [bytes.len() - 2, bytes.len() / 2, 30, 3] {
            let error = image(&bytes[..cut]).unwrap_err();
            assert!(cut != bytes.len() - 2 || error.contains("cut off"), "{cut}: {error}");
        }
        let mut trailing = bytes.clone();
        trailing.extend(*b"something behind the end");
        assert!(image(&trailing).is_ok());
    }

    #[test]
    fn a_decompression_bomb_is_refused_before_it_is_decoded() {
        let mut bytes = encoded(&picture(2, 2).into(), ImageFormat::Png);
        // the header's width and height, and its checksum
        bytes[16..20].copy_from_slice(&30_000u32.to_be_bytes());
        bytes[20..24].copy_from_slice(&30_000u32.to_be_bytes());
        let sum = crc(&bytes[12..29]);
        bytes[29..33].copy_from_slice(&sum.to_be_bytes());
        let error = image(&bytes).unwrap_err();
        assert!(error.contains("30000 x 30000 pixels"), "{error}");
    }

    /// The checksum of PNG chunks.
    fn crc(bytes: &[u8]) -> u32 {
        let step = |sum: u32, byte: &u8| {
            (0..8).fold(sum ^ u32::from(*byte), |sum, _| {
                (sum >> 1) ^ if sum & 1 == 1 { 0xedb8_8320 } else { 0 }
            })
        };
        !bytes.iter().fold(u32::MAX, step)
    }

    #[test]
    fn other_files_are_no_images() {
        for bytes in [&b""[..], b"GIF89a", b"<svg/>", &[0; 64]] {
            assert!(image(bytes).is_err());
        }
        let error = read(Path::new("nowhere.png")).unwrap_err().to_string();
        assert!(error.contains("nowhere.png"), "{error}");
    }
}
