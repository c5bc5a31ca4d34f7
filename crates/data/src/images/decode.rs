//! One image from a file: JPEG or PNG, its dimensions looked at before anything is decoded. The decoder of JPEG is strict: what it
//! would guess of a damaged file is an error.

use std::borrow::Cow;
use std::io::Cursor;
use std::path::Path;

use image::{ImageFormat, ImageReader, Limits, RgbImage};
use zune_jpeg::JpegDecoder;
use zune_jpeg::errors::DecodeErrors;
use zune_jpeg::zune_core::bytestream::ZCursor;
use zune_jpeg::zune_core::colorspace::ColorSpace;
use zune_jpeg::zune_core::options::DecoderOptions;

use crate::{DataError, store};

/// Most pixels of an image: what Pillow takes without a warning. The largest of ImageNet has 61 million.
const PIXELS: u64 = 89_478_485;
/// Most bytes that are unpacked of a colour profile and the like, besides twice the size of the pixels.
const BESIDES: u64 = 4 << 20;
/// Most bytes of a file.
const BYTES: u64 = 256 << 20;

/// The image in `file` as 8-bit red, green and blue; transparency is dropped, gray is repeated.
pub fn read(file: &Path) -> Result<RgbImage, DataError> {
    let refuse = |error: std::io::Error| store::bad_file(file, error.to_string());
    let bytes =
        effattn_record::file::open(file).and_then(|open| store::read_limited(open, BYTES)).map_err(refuse)?;
    image(&bytes).map_err(|reason| store::bad_file(file, reason))
}

/// The image in `bytes`.
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
    if jpeg {
        return strict_jpeg(bytes);
    }
    let mut reader = reader()?;
    let mut limits = Limits::default();
    // what stands in the file besides its pixels (of at most 8 bytes) is bounded by them
    limits.max_alloc = Some(16 * pixels + BESIDES);
    reader.limits(limits);
    let image = reader.decode().map_err(|error| error.to_string())?;
    Ok(image.into_rgb8())
}

/// The JPEG in `bytes`, which must be what it says to the last block.
fn strict_jpeg(bytes: &[u8]) -> Result<RgbImage, String> {
    let options =
        DecoderOptions::default().set_strict_mode(true).set_max_width(usize::MAX).set_max_height(usize::MAX);
    let fenced = fenced(bytes);
    let mut decoder = JpegDecoder::new_with_options(ZCursor::new(&*fenced), options);
    let damaged = |error: DecodeErrors| format!("the image is damaged: {error:?}");
    decoder.decode_headers().map_err(damaged)?;
    let gray = decoder.input_colorspace() == Some(ColorSpace::Luma);
    let space = if gray { ColorSpace::Luma } else { ColorSpace::RGB };
    decoder.set_options(decoder.options().jpeg_set_out_colorspace(space));
    let values = decoder.decode().map_err(damaged)?;
    let (width, height) = decoder.dimensions().ok_or("the image has no size")?;
    let values = if gray { values.iter().flat_map(|value| [*value; 3]).collect() } else { values };
    let image = RgbImage::from_raw(width as u32, height as u32, values);
    image.ok_or_else(|| "the image is damaged: it has not the values of its size".to_owned())
}

/// A baseline JPEG of one scan with ones behind the scan's data: the decoder reads zeros where blocks are missing in front of a
/// marker, but no code is made of ones only. What is whole never reads them. A progressive JPEG stays as it is: its decoder
/// expects a marker right behind every scan.
fn fenced(bytes: &[u8]) -> Cow<'_, [u8]> {
    let Some(scan) = baseline_scan(bytes) else { return Cow::Borrowed(bytes) };
    let inside = |pair: &[u8]| pair[0] == 0xff && !matches!(pair[1], 0x00 | 0xd0..=0xd7 | 0xff);
    let end = bytes[scan..].windows(2).position(inside).map(|at| scan + at);
    match end {
        Some(end) => Cow::Owned([&bytes[..end], &[0xff, 0x00].repeat(16), &bytes[end..]].concat()),
        None => Cow::Borrowed(bytes), // the decoder says so
    }
}

/// Where the entropy-coded data of a baseline JPEG begin; none where it has several scans.
fn baseline_scan(bytes: &[u8]) -> Option<usize> {
    let (mut at, mut components) = (2, None);
    while let [0xff, kind, high, low] = bytes.get(at..at + 4)? {
        let length = 2 + usize::from(u16::from_be_bytes([*high, *low]));
        match kind {
            0xff => at += 1, // fill
            0xda => {
                let all = components.is_some() && components == bytes.get(at + 4).copied();
                return all.then_some(at + length).filter(|scan| *scan < bytes.len());
            }
            _ => {
                if let 0xc0 | 0xc1 = kind {
                    components = bytes.get(at + 9).copied();
                }
                at += length;
            }
        }
    }
    None
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

    fn jpeg(image: &RgbImage, quality: u8) -> Vec<u8> {
        let mut bytes = Vec::new();
        JpegEncoder::new_with_quality(&mut bytes, quality).encode_image(image).unwrap();
        bytes
    }

    /// The first byte of the entropy-coded data.
    fn scan(bytes: &[u8]) -> usize {
        let at = bytes.windows(2).position(|pair| pair == [0xff, 0xda]).unwrap();
        at + 2 + usize::from(u16::from_be_bytes([bytes[at + 2], bytes[at + 3]]))
    }

    #[test]
    fn a_jpeg_that_is_whole_is_read_as_the_lenient_decoder_does() {
        let noise = |x: u32, y: u32| (x.wrapping_mul(2_654_435_761) ^ y.wrapping_mul(40_503)) as u8;
        for (width, height) in [(1, 1), (7, 9), (8, 8), (16, 17), (64, 48), (233, 3), (3, 400), (250, 251)] {
            for quality in [1, 30, 75, 100] {
                let flat = RgbImage::from_pixel(width, height, Rgb([9, 200, 77]));
                let noisy = RgbImage::from_fn(width, height, |x, y| Rgb([noise(x, y), noise(y, x), 3]));
                for own in [flat, noisy, picture(width, height)] {
                    let bytes = jpeg(&own, quality);
                    let lenient = image::load_from_memory(&bytes).unwrap().into_rgb8();
                    assert_eq!(super::image(&bytes).unwrap(), lenient, "{width} x {height}, {quality}");
                    let gray = image::DynamicImage::from(own).into_luma8();
                    let mut bytes = Vec::new();
                    JpegEncoder::new_with_quality(&mut bytes, quality).encode_image(&gray).unwrap();
                    let lenient = image::load_from_memory(&bytes).unwrap().into_rgb8();
                    assert_eq!(super::image(&bytes).unwrap(), lenient, "{width} x {height}, {quality}, gray");
                }
            }
        }
    }

    #[test]
    fn a_damaged_jpeg_is_refused_though_it_has_an_end() {
        let bytes = jpeg(&picture(64, 48), 90);
        let start = scan(&bytes);
        let middle = start + (bytes.len() - start) / 2;
        let mut cut = bytes.clone();
        cut.drain(middle..bytes.len() - 2);
        let mut marker = bytes.clone();
        marker[middle..middle + 4].copy_from_slice(&[0xff, 0xc4, 0x00, 0x02]);
        let mut ones = bytes.clone();
        ones[start + 8..start + 40].copy_from_slice(&[0xff, 0x00].repeat(16));
        for (what, damaged) in [("the second half is gone", cut), ("a marker", marker), ("ones", ones)] {
            assert!(image::load_from_memory(&damaged).is_ok(), "{what}: the lenient decoder says nothing");
            let error = image(&damaged).map(|_| ()).expect_err(what);
            assert!(error.contains("damaged"), "{what}: {error}");
        }
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
