//! Readers of images, of trees of them, and of tokenizers.

use std::io::Cursor;
use std::path::Path;

use effattn::data::images::folder::ImageFolder;
use effattn::data::images::npy::{self, Records};
use effattn::data::images::{decode, write_corrupted};
use effattn::data::tokenizer::Tokenizer;
use image::codecs::jpeg::JpegEncoder;
use image::{ImageFormat, Rgb, RgbImage};

use super::Target;
use super::files::put;

fn picture(width: u32, height: u32) -> RgbImage {
    RgbImage::from_fn(width, height, |x, y| Rgb([(31 * x) as u8, (17 * y) as u8, (x * y) as u8]))
}

fn jpeg(image: &RgbImage) -> Vec<u8> {
    let mut bytes = Vec::new();
    JpegEncoder::new_with_quality(&mut bytes, 80).encode_image(image).unwrap();
    bytes
}

fn png(image: &RgbImage) -> Vec<u8> {
    let mut bytes = Cursor::new(Vec::new());
    image.write_to(&mut bytes, ImageFormat::Png).unwrap();
    bytes.into_inner()
}

/// An array of bytes of `shape` as NumPy writes it.
fn array(shape: &[usize]) -> Vec<u8> {
    let mut bytes = Vec::new();
    npy::front(&mut bytes, shape).unwrap();
    bytes.extend(std::iter::repeat_n(3, shape.iter().product()));
    bytes
}

/// `images`, each of which must be decoded: what is broken of them then reaches the decoder.
fn readable(images: Vec<Vec<u8>>) -> Vec<Vec<u8>> {
    images.iter().for_each(|image| drop(decode::image(image).unwrap()));
    images
}

pub const TARGETS: &[Target] = &[
    Target {
        name: "jpeg",
        weight: 1.0,
        seeds: || readable(vec![jpeg(&picture(24, 17)), jpeg(&picture(8, 8)), jpeg(&RgbImage::new(1, 1))]),
        words: &["\u{0}\u{8}", "Exif\u{0}\u{0}", "ICC_PROFILE\u{0}", "Adobe", "JFIF\u{0}"],
        read: |bytes, _| drop(decode::image(bytes)),
    },
    Target {
        name: "png",
        weight: 1.0,
        seeds: || readable(vec![png(&picture(24, 17)), png(&RgbImage::new(1, 1))]),
        words: &["IHDR", "IDAT", "iCCP", "acTL", "fcTL", "tRNS", "eXIf", "zTXt", "IEND"],
        read: |bytes, _| drop(decode::image(bytes)),
    },
    Target {
        name: "npy",
        weight: 0.5,
        seeds: || vec![array(&[5, 32, 32, 3]), array(&[5]), array(&[10, 32, 32, 3])],
        words: &["'shape': (", "'descr': '|u1'", "'fortran_order': True", "18446744073709551615", ", ", ")"],
        read: |bytes, folder| {
            put(folder, "arrays/fog.npy", bytes);
            put(folder, "arrays/labels.npy", &array(&[5]));
            put(folder, "labels/fog.npy", &array(&[5, 32, 32, 3]));
            put(folder, "labels/labels.npy", bytes);
            for name in ["arrays", "labels"] {
                (0..7).for_each(|severity| drop(Records::open(&folder.join(name), "fog", severity)));
            }
        },
    },
    Target {
        name: "image-tree",
        weight: 0.1,
        seeds: || vec![b"train/a/1.png\ntrain/b/1.jpg\nval/a/1.png\nval/b/2.JPEG\n".to_vec()],
        words: &["train/", "val/", "/.", ".png", ".jpg", "../", "/", "\n", "test/", "\u{e9}", ".webp"],
        read: |bytes, folder| {
            let root = folder.join("tree");
            for name in bytes.split(|byte| *byte == b'\n').take(12) {
                // names that the system has, below the folder
                let name = String::from_utf8_lossy(name).replace('\0', "").replace("..", "");
                let path = root.join(name.trim_start_matches('/'));
                let made = path.parent().is_some_and(|above| std::fs::create_dir_all(above).is_ok());
                if made && !path.is_dir() {
                    let _ = std::fs::write(&path, bytes);
                }
            }
            drop(ImageFolder::open(&root));
            let _ = std::fs::remove_dir_all(root);
        },
    },
    Target {
        name: "image-sources",
        weight: 0.1,
        seeds: || vec![b"{\"a/1.png.jpg\": \"00\", \"b/1.jpg\": \"11\"}".to_vec()],
        words: &["\"../../x\"", "\"a\"", "\"a/b/c\"", "\"/etc/passwd\"", "{", "}", ":", "null"],
        read: |bytes, folder| {
            // no image can be read, so that nothing is drawn
            put(folder, "from/a/1.png", b"no image");
            put(folder, "kept", b"x");
            put(folder, "to/sources.json", bytes);
            drop(write_corrupted::tree(&folder.join("from"), &folder.join("to"), &|_, _| ()));
            assert!(
                folder.join("kept").exists() && folder.join("from/a/1.png").exists(),
                "a file was removed"
            );
            let _ = std::fs::remove_dir_all(folder.join("to"));
        },
    },
    Target {
        name: "tokenizer",
        weight: 0.1,
        seeds: || {
            vec![Tokenizer::train(["a b a b ab ab"].into_iter(), 265).unwrap().json().as_bytes().to_vec()]
        },
        words: &[
            "\"continuing_subword_prefix\":\"##\"",
            "\"end_of_word_suffix\":\"</w>\"",
            "\"ignore_merges\":true",
            "\"special\":false",
            "null",
            "[",
            "{",
            "4294967295",
            "\"<mask>\"",
        ],
        read: |bytes, folder: &Path| {
            put(folder, "tokenizer.json", bytes);
            if let Ok(tokenizer) = Tokenizer::load(&folder.join("tokenizer.json")) {
                let ids = tokenizer.encoder().ids("a b <mask> \u{e9}");
                drop(tokenizer.decode(&ids));
            }
        },
    },
];
