//! Pathfinder: are the two marked dots ends of the same dashed curve? One token per pixel.
//!
//! A clean-room generator after the published description, or the Long Range Arena's own folders where they are.

mod curve;
pub mod generate;
mod raster;
pub mod settings;

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use super::content_hash::ContentHash;
use super::entry::{DataKind, DataSetEntry, ExampleTask, LoadExamples, Origin};
use super::{DataError, Dataset, Example, Split, store};
use effattn_kernel::device::rng::RngStream;
use generate::Generator;
use settings::Settings;

/// The table line of images of 32 x 32 pixels.
pub static PATHFINDER32: DataSetEntry = DataSetEntry {
    name: "pathfinder32",
    kind: kind(32, &|dir, reading| load("pathfinder32", settings::PATHFINDER32, dir, reading.allow_partial)),
    origin: origin("LRA's folder pathfinder32/curv_contour_length_14"),
    locate: |dir| Ok(locate("pathfinder32", dir)),
    ..COMMON
};

/// The table line of images of 64 x 64 pixels.
pub static PATHFINDER64: DataSetEntry = DataSetEntry {
    name: "pathfinder64",
    kind: kind(64, &|dir, reading| load("pathfinder64", settings::PATHFINDER64, dir, reading.allow_partial)),
    origin: origin("LRA's folder pathfinder64/curv_contour_length_14"),
    locate: |dir| Ok(locate("pathfinder64", dir)),
    ..COMMON
};

/// The table line of images of 128 x 128 pixels (Path-X).
pub static PATHFINDER128: DataSetEntry = DataSetEntry {
    name: "pathfinder128",
    kind: kind(128, &|dir, reading| {
        load("pathfinder128", settings::PATHFINDER128, dir, reading.allow_partial)
    }),
    origin: origin("LRA's folder pathfinder128/curv_contour_length_14"),
    locate: |dir| Ok(locate("pathfinder128", dir)),
    ..COMMON
};

/// What the sizes share.
const COMMON: DataSetEntry = DataSetEntry {
    name: "pathfinder",
    collection: "pathfinder",
    title: "Pathfinder",
    about: "whether the two marked dots are ends of the same dashed curve",
    records: "160,000 / 20,000 / 20,000 images",
    kind: kind(32, &|dir, reading| load("pathfinder32", settings::PATHFINDER32, dir, reading.allow_partial)),
    origin: origin(""),
    locate: |_| Ok(None),
};

const fn kind(side: usize, load: LoadExamples) -> DataKind {
    let train = IMAGES - 2 * (IMAGES / 10);
    DataKind::Images(ExampleTask { vocabulary: 256, classes: 2, len: side * side, train, text: false, load })
}

const fn origin(instead: &'static str) -> Origin {
    Origin::Generated { formats: &[], instead: Some(instead) }
}

/// The hard setting's folder of the arena.
fn locate(name: &str, dir: &Path) -> Option<PathBuf> {
    store::find(dir, &[&format!("{name}/{HARD}")])
}

fn load(
    name: &str,
    settings: Settings,
    dir: &Path,
    allow_partial: bool,
) -> Result<Box<dyn Dataset>, DataError> {
    Ok(Box::new(match locate(name, dir) {
        Some(folder) => Pathfinder::read(&folder, settings.size, allow_partial)?,
        None => Pathfinder::made(settings),
    }))
}

/// Images of one size and difficulty; 80 % are trained on, 10 % selected on, 10 % reported.
const IMAGES: usize = 200_000;
/// Seed of the images that are made, and of the split of those that are read.
const SEED: u64 = 0;
/// Generated images behind the hash: they stand for the generator.
const HASHED: usize = 64;
/// The hard setting in the arena's folders.
const HARD: &str = "curv_contour_length_14";
/// Most bytes of a PNG file of this kind.
const LARGEST: u64 = 1 << 20;

/// Where images come from.
enum Source {
    /// Made when they are first asked for.
    Made { generator: Generator, images: Vec<OnceLock<(Box<[u8]>, u8)>> },
    /// Read from the arena's folders, in a seeded order.
    Read(Vec<(Box<[u8]>, u8)>),
}

/// The images of one size.
pub struct Pathfinder {
    source: Source,
    hash: String,
    partial: Option<String>,
}

impl Pathfinder {
    fn made(settings: Settings) -> Self {
        let generator = Generator::new(settings, SEED);
        let images: Vec<OnceLock<_>> = (0..IMAGES).map(|_| OnceLock::new()).collect();
        let made = Self { source: Source::Made { generator, images }, hash: String::new(), partial: None };
        let mut content = ContentHash::default();
        content.number(IMAGES as u64);
        for index in 0..HASHED {
            let (pixels, label) = made.image(index);
            content.field(pixels);
            content.number(u64::from(label));
        }
        Self { hash: content.finish(), ..made }
    }

    fn read(folder: &Path, size: usize, allow_partial: bool) -> Result<Self, DataError> {
        let listed = listed(folder)?;
        let mut images = Vec::with_capacity(listed.len());
        let mut content = ContentHash::default();
        for (path, label) in &listed {
            if path.metadata().is_ok_and(|meta| meta.len() == 0) {
                log::warn!("{} is empty and is skipped (one such file is known)", path.display());
                continue;
            }
            let pixels = gray(path, size)?;
            content.field(&pixels);
            content.number(u64::from(*label));
            images.push((pixels, *label));
        }
        let order = RngStream::new(SEED, "pathfinder/split").permutation(images.len());
        let mut slots: Vec<Option<_>> = images.into_iter().map(Some).collect();
        let images: Vec<_> = order.into_iter().filter_map(|at| slots[at].take()).collect();
        let partial = (images.len() + 1 < IMAGES).then(|| format!("{} of {IMAGES} images", images.len()));
        if let (Some(missing), false) = (&partial, allow_partial) {
            let (missing, dir) = (missing.clone(), folder.to_owned());
            return Err(DataError::Partial { what: "Pathfinder", dir, missing });
        }
        Ok(Self { source: Source::Read(images), hash: content.finish(), partial })
    }

    fn count(&self) -> usize {
        match &self.source {
            Source::Made { images, .. } => images.len(),
            Source::Read(images) => images.len(),
        }
    }

    fn image(&self, index: usize) -> (&[u8], u8) {
        let (pixels, label) = match &self.source {
            Source::Read(images) => &images[index],
            Source::Made { generator, images } => images[index].get_or_init(|| {
                let image = generator.image(index as u64);
                (image.pixels.into_boxed_slice(), image.label)
            }),
        };
        (pixels, *label)
    }

    /// First image and number of images of a split.
    fn range(&self, split: Split) -> (usize, usize) {
        let (count, tenth) = (self.count(), self.count() / 10);
        match split {
            Split::Train => (0, count - 2 * tenth),
            Split::Validation => (count - 2 * tenth, tenth),
            Split::Test => (count - tenth, tenth),
        }
    }
}

impl Dataset for Pathfinder {
    fn len(&self, split: Split) -> usize {
        self.range(split).1
    }

    fn example(&self, split: Split, index: usize, max_len: usize) -> Example {
        let (pixels, label) = self.image(self.range(split).0 + index);
        let tokens = pixels.iter().take(max_len).map(|&pixel| u32::from(pixel)).collect();
        Example { tokens, second: None, label: u32::from(label) }
    }

    fn hash(&self) -> &str {
        &self.hash
    }

    fn partial(&self) -> Option<&str> {
        self.partial.as_deref()
    }
}

/// Images and labels that the metadata files name, by number of the file and line.
fn listed(folder: &Path) -> Result<Vec<(PathBuf, u8)>, DataError> {
    let metadata = folder.join("metadata");
    let unreadable = |error: std::io::Error| store::bad_file(&metadata, format!("cannot be read ({error})"));
    let mut files: Vec<(u64, PathBuf)> = std::fs::read_dir(&metadata)
        .map_err(unreadable)?
        .filter_map(|entry| {
            let path = entry.ok()?.path();
            Some((path.file_stem()?.to_str()?.parse().ok()?, path))
        })
        .collect();
    files.sort();
    let mut all = Vec::new();
    for (_, file) in files {
        let bytes = store::read_limited(store::open(&file)?, 64 << 20)
            .map_err(|error| store::bad_file(&file, format!("cannot be read ({error})")))?;
        let text = String::from_utf8(bytes).map_err(|_| {
            store::bad_file(
                &file,
                "is not text; LRA's metadata files are text in spite of their names".to_owned(),
            )
        })?;
        for (number, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
            let wrong = |reason: &str| DataError::Line {
                file: file.clone(),
                line: number + 1,
                reason: reason.to_owned(),
            };
            let fields: Vec<&str> = line.split(' ').collect();
            let [images, name, _, label, ..] = fields.as_slice() else {
                return Err(wrong("has fewer than the four fields folder, file, index, label"));
            };
            let label = match *label {
                "0" => 0,
                "1" => 1,
                _ => return Err(wrong("has a label (field 4) that is not 0 or 1")),
            };
            let plain = |part: &str| !part.starts_with('/') && !part.split('/').any(|piece| piece == "..");
            if !plain(images) || !plain(name) {
                return Err(wrong("names a file outside its folder"));
            }
            all.push((folder.join(images).join(name), label));
        }
    }
    if all.is_empty() {
        return Err(store::bad_file(&metadata, "has no metadata files (0.npy, 1.npy, ...)".to_owned()));
    }
    Ok(all)
}

/// The gray values of a PNG image of `size` x `size` pixels.
fn gray(path: &Path, size: usize) -> Result<Box<[u8]>, DataError> {
    let wrong = |reason: String| store::bad_file(path, reason);
    let broken = |error: png::DecodingError| wrong(format!("is not a readable PNG image ({error})"));
    let bytes = store::read_limited(store::open(path)?, LARGEST)
        .map_err(|error| wrong(format!("cannot be read ({error})")))?;
    let mut decoder =
        png::Decoder::new_with_limits(std::io::Cursor::new(bytes), png::Limits { bytes: 1 << 24 });
    decoder.set_transformations(png::Transformations::EXPAND | png::Transformations::STRIP_16);
    let mut reader = decoder.read_info().map_err(broken)?;
    let info = reader.info();
    if (info.width as usize, info.height as usize) != (size, size) {
        let (width, height) = (info.width, info.height);
        return Err(wrong(format!("has {width} x {height} pixels; expected {size} x {size}")));
    }
    let mut pixels = vec![0; reader.output_buffer_size().unwrap_or(0)];
    let frame = reader.next_frame(&mut pixels).map_err(broken)?;
    if frame.color_type.samples() != 1 {
        return Err(wrong(format!("has {} channels; expected gray", frame.color_type.samples())));
    }
    pixels.truncate(size * size);
    Ok(pixels.into_boxed_slice())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(path: &Path, size: u32, pixels: &[u8]) {
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        let mut encoder = png::Encoder::new(std::fs::File::create(path).unwrap(), size, size);
        encoder.set_color(png::ColorType::Grayscale);
        encoder.set_depth(png::BitDepth::Eight);
        encoder.write_header().unwrap().write_image_data(pixels).unwrap();
    }

    #[test]
    fn generated_images_have_the_published_splits() {
        let folder = tempfile::tempdir().unwrap();
        let data = load("pathfinder32", settings::PATHFINDER32, folder.path(), false).unwrap();
        assert_eq!(Split::ALL.map(|split| data.len(split)), [160_000, 20_000, 20_000]);
        let example = data.example(Split::Test, 19_999, 1024);
        assert!(example.tokens.len() == 1024 && example.label < 2);
        assert_ne!(example, data.example(Split::Validation, 19_999, 1024));
        assert!(
            data.hash().starts_with("62a6fb019f8b"),
            "other images than in earlier versions: {}",
            data.hash()
        );
    }

    #[test]
    fn the_arenas_folders_are_read() {
        let folder = tempfile::tempdir().unwrap();
        let hard = folder.path().join("pathfinder32").join(HARD);
        for index in 0..30u8 {
            write(&hard.join(format!("imgs/0/sample_{index}.png")), 32, &[index; 1024]);
        }
        std::fs::write(hard.join("imgs/0/sample_7.png"), b"").unwrap();
        std::fs::create_dir_all(hard.join("metadata")).unwrap();
        let line = |index: usize| format!("imgs/0 sample_{index}.png {index} {} 1 14 4 2\n", index % 2);
        let text: String = (0..30).map(line).collect();
        let metadata = hard.join("metadata/0.npy");
        std::fs::write(&metadata, &text).unwrap();
        let load = |partial| load("pathfinder32", settings::PATHFINDER32, folder.path(), partial);
        assert!(load(false).err().unwrap().to_string().contains("29 of 200000"));
        let data = load(true).unwrap();
        assert_eq!(Split::ALL.map(|split| data.len(split)), [25, 2, 2]);
        for index in 0..25 {
            let example = data.example(Split::Train, index, 1024);
            assert_eq!(example.tokens[5] % 2, example.label);
            assert_ne!(example.tokens[0], 7);
        }
        std::fs::write(&metadata, text.replacen("png 0 0", "png 0 1", 1)).unwrap();
        assert_ne!(load(true).unwrap().hash(), data.hash(), "another label");
        let error = |text: &str| {
            std::fs::write(&metadata, text).unwrap();
            load(true).err().unwrap().to_string()
        };
        assert!(error("imgs/0 sample_1.png 1").contains("0.npy:1: has fewer"));
        assert!(error("imgs/0 sample_1.png 1 3").contains("not 0 or 1"));
        assert!(error("imgs/0 ../../x.png 1 0").contains("outside its folder"));
        assert!(error("imgs/0 sample_99.png 1 0").contains("cannot be opened"));
        assert!(error("").contains("no metadata"));
        write(&hard.join("imgs/0/small.png"), 16, &[0; 256]);
        assert!(error("imgs/0 small.png 1 0").contains("16 x 16 pixels; expected 32 x 32"));
        std::fs::write(hard.join("imgs/0/bad.png"), b"no image").unwrap();
        assert!(error("imgs/0 bad.png 1 0").contains("not a readable PNG"));
    }
}
