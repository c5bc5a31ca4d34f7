//! `vision` and `fetch` on images that a person might have: broken ones, trees that are none, corrupted sets.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use effattn::record::{Outcome, Row, csv};
use image::codecs::jpeg::JpegEncoder;
use image::{ImageBuffer, Rgb, RgbImage};

fn run(folder: &Path, line: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_effattn"));
    let cache = folder.join("cache");
    let words = line.split_whitespace();
    command.args(words).current_dir(folder).env("XDG_CACHE_HOME", cache).env_remove("EFFATTN_LOG");
    command.output().unwrap()
}

fn rows(folder: &Path) -> Vec<Row> {
    csv::from_str(&fs::read_to_string(folder.join("results/vision/latest/rows.csv")).unwrap()).unwrap()
}

fn value(rows: &[Row], task: &str, metric: &str) -> f64 {
    let found = rows.iter().find(|row| row.task.as_deref() == Some(task) && row.metric == metric);
    found.and_then(|row| row.value).unwrap_or_else(|| panic!("no {metric} of {task}"))
}

/// The message of a command that must end with 2 and say why in one or two lines.
fn refused(folder: &Path, line: &str) -> String {
    let output = run(folder, line);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{line}: {said}");
    assert!(said.lines().count() <= 2, "{line}: {said}");
    said
}

/// Puts an image of one shade with a gradient into `name`.
fn put(folder: &Path, name: &str, shade: u8) {
    let path = folder.join(name);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    RgbImage::from_fn(40, 36, |x, y| Rgb([shade, shade ^ (x as u8), y as u8])).save(path).unwrap();
}

/// Two classes with so many images in train and two in val.
fn tree(folder: &Path, count: u8) {
    for (class, shade) in [("light", 200), ("dark", 40)] {
        (0..count).for_each(|number| put(folder, &format!("train/{class}/{number}.png"), shade + number));
        (0..2).for_each(|number| put(folder, &format!("val/{class}/{number}.jpg"), shade + number));
    }
}

const TRAIN: &str = "vision --task folder --data-dir . --preset cvt-small --model full --batch 4 --steps 2 \
                     --threads 1 --no-plot --allow-partial";

#[test]
fn trees_that_are_none_are_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    let says = |line: &str| refused(root, line);
    assert!(says(TRAIN).contains("train/<class>/<image>"));
    fs::create_dir_all(root.join("train")).unwrap();
    fs::create_dir_all(root.join("val")).unwrap();
    assert!(says(TRAIN).contains("0 class folder(s)"));
    fs::create_dir_all(root.join("train/only")).unwrap();
    assert!(says(TRAIN).contains("1 class folder(s); a classifier needs two"));
    tree(root, 1);
    assert!(says(TRAIN).contains("train/only: no JPEG or PNG images"));
    fs::remove_dir(root.join("train/only")).unwrap();
    put(root, "val/grey/1.png", 9);
    assert!(says(TRAIN).contains("the class grey is not in"));
    fs::remove_dir_all(root.join("val/grey")).unwrap();
    let only = says("vision --task folder-c --data-dir .");
    assert!(only.contains("only tested on") && only.contains("--task folder --also folder-c"), "{only}");
    let missing = says(&format!("{TRAIN} --also folder-c"));
    assert!(
        missing.contains("folder-c is not in") && missing.contains("effattn fetch folder-c"),
        "{missing}"
    );
    let foreign = says(&format!("{TRAIN} --also imagenet-a"));
    assert!(foreign.contains("classes of imagenet") && foreign.contains("folder-c"), "{foreign}");
    assert!(says(&format!("{TRAIN} --also imagenet-x")).contains("did you mean imagenet-"));
    assert!(says("fetch imagenet-a --data-dir .").contains("imagenet-a.tar"));
    assert!(says("fetch imagenet-c --data-dir .").contains("effattn fetch imagenet-c --from FOLDER"));
    fs::create_dir_all(root.join("empty")).unwrap();
    assert!(says("fetch imagenet-c --from empty --data-dir .").contains("empty: no class folders"));
}

/// A JPEG of 8 x 8 whose four components are constant; `adobe`: with the marker by which they are stored inverted.
fn cmyk(values: [bool; 4], adobe: bool) -> Vec<u8> {
    let mut bytes = vec![0xff, 0xd8];
    if adobe {
        bytes.extend([0xff, 0xee, 0, 14]);
        bytes.extend(*b"Adobe\0\x64\0\0\0\0\0");
    }
    // one table of 254s: a first coefficient of 4 or -4 is white or black
    bytes.extend([0xff, 0xdb, 0, 67, 0]);
    bytes.extend([254; 64]);
    bytes.extend([0xff, 0xc0, 0, 20, 8, 0, 8, 0, 8, 4]);
    (1..=4).for_each(|component| bytes.extend([component, 0x11, 0]));
    // one code for a difference of three bits (0), one for the end of a block (0)
    for (class, symbol) in [(0x00, 3), (0x10, 0)] {
        bytes.extend([0xff, 0xc4, 0, 20, class, 1]);
        bytes.extend([0; 15]);
        bytes.push(symbol);
    }
    bytes.extend([0xff, 0xda, 0, 14, 4]);
    (1..=4).for_each(|component| bytes.extend([component, 0]));
    bytes.extend([0, 63, 0]);
    // of every component: 0, then 100 for 4 or 011 for -4, then 0
    let bits: String = values.iter().map(|white| if *white { "01000" } else { "00110" }).collect();
    let bits = format!("{bits:1<24}");
    bytes.extend((0..3).map(|at| u8::from_str_radix(&bits[8 * at..8 * at + 8], 2).unwrap()));
    bytes.extend([0xff, 0xd9]);
    bytes
}

/// A PNG that says it has 30,000 x 30,000 pixels.
fn bomb() -> Vec<u8> {
    let mut bytes = std::io::Cursor::new(Vec::new());
    RgbImage::new(1, 1).write_to(&mut bytes, image::ImageFormat::Png).unwrap();
    let mut bytes = bytes.into_inner();
    bytes[16..20].copy_from_slice(&30_000u32.to_be_bytes());
    bytes[20..24].copy_from_slice(&30_000u32.to_be_bytes());
    let step = |sum: u32, byte: &u8| {
        (0..8).fold(sum ^ u32::from(*byte), |sum, _| (sum >> 1) ^ if sum & 1 == 1 { 0xedb8_8320 } else { 0 })
    };
    let sum = !bytes[12..29].iter().fold(u32::MAX, step);
    bytes[29..33].copy_from_slice(&sum.to_be_bytes());
    bytes
}

#[test]
fn cmyk_is_read_as_it_looks() {
    use effattn::data::images::decode;
    // Adobe's files hold how little ink there is: full magenta is 0 in the second component
    let magenta = decode::image(&cmyk([true, false, true, true], true)).unwrap();
    let [r, g, b] = magenta.get_pixel(3, 3).0;
    assert!(r > 240 && g < 15 && b > 240, "{:?}", [r, g, b]);
    assert_eq!(magenta.dimensions(), (8, 8));
}

#[test]
fn unusual_images_are_taken_and_broken_ones_are_named_and_counted() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    tree(root, 4);
    let deep: ImageBuffer<Rgb<u16>, Vec<u16>> = ImageBuffer::from_pixel(20, 30, Rgb([60_000, 300, 9]));
    deep.save(root.join("val/light/deep.png")).unwrap();
    RgbImage::new(1, 1).save(root.join("val/dark/pixel.png")).unwrap();
    fs::write(root.join("val/light/cmyk.jpg"), cmyk([true, false, true, true], true)).unwrap();
    let strict = TRAIN.replace(" --allow-partial", "");
    let output = run(root, &strict);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(
        (value(&rows(root), "folder", "tested"), value(&rows(root), "folder", "left_out")),
        (7.0, 0.0)
    );
    let mut cut = Vec::new();
    JpegEncoder::new(&mut cut).encode_image(&RgbImage::new(64, 64)).unwrap();
    cut.truncate(cut.len() - 9);
    let broken: [(&str, Vec<u8>, &str); 3] = [
        ("cut.jpg", cut, "cut off"),
        ("bomb.png", bomb(), "30000 x 30000 pixels; at most"),
        ("text.png", b"no image".to_vec(), "neither a JPEG nor a PNG"),
    ];
    let place = |name: &str| root.join("val/light").join(name);
    for (name, bytes, why) in &broken {
        fs::write(place(name), bytes).unwrap();
        let output = run(root, &strict);
        let (said, row) = (String::from_utf8_lossy(&output.stderr), &rows(root)[0]);
        let error = row.error.clone().unwrap_or_default();
        assert!(!output.status.success() && row.outcome == Outcome::Failed, "{name}: {said}");
        assert!(error.contains(&format!("val/light/{name}")) && error.contains(why), "{name}: {error}");
        fs::remove_file(place(name)).unwrap();
    }
    broken.iter().for_each(|(name, bytes, _)| fs::write(place(name), bytes).unwrap());
    let output = run(root, TRAIN);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    for (name, _, why) in &broken {
        let named =
            said.lines().any(|line| line.contains("left out: ") && line.contains(name) && line.contains(why));
        assert!(named, "{name}: {said}");
    }
    assert_eq!(
        (value(&rows(root), "folder", "tested"), value(&rows(root), "folder", "left_out")),
        (7.0, 3.0)
    );
}

#[test]
fn weights_are_tested_on_corrupted_images() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    tree(root, 4);
    let made = run(root, "fetch folder-c --data-dir .");
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    assert!(
        String::from_utf8_lossy(&made.stdout).contains("300 files made")
            || String::from_utf8_lossy(&made.stderr).contains("300 files made")
    );
    let output = run(root, &format!("{TRAIN} --also folder-c"));
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let trained = rows(root);
    let of = |name: &str| value(&trained, &format!("folder-c {name}"), "accuracy");
    let names = trained.iter().filter_map(|row| row.task.as_deref()?.strip_prefix("folder-c ")).count();
    assert_eq!((names, value(&trained, "folder-c", "tested")), (15, 300.0));
    assert!((0.0..=100.0).contains(&of("fog")) && (of("snow") * 20.0).fract() == 0.0, "20 images each");
    // the same weights from their file
    let cells = fs::read_dir(root.join("results/vision/latest/cells")).unwrap();
    let best = cells.flatten().next().unwrap().path().join("best.safetensors");
    fs::copy(best, root.join("weights.safetensors")).unwrap();
    let stored = "vision --task folder-c --data-dir . --preset cvt-small --model full --threads 1 --no-plot";
    let output = run(root, &format!("{stored} --weights weights.safetensors"));
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let again = rows(root);
    for row in
        trained.iter().filter(|row| row.task.as_deref().is_some_and(|task| task.starts_with("folder-c")))
    {
        assert_eq!(value(&again, row.task.as_deref().unwrap(), &row.metric), row.value.unwrap());
    }
    // weights of another model, and a file that is none
    let other = "vision --task folder --data-dir . --preset vil-ls-small --model ls2d --threads 1 --no-plot";
    let output = run(root, &format!("{other} --weights weights.safetensors"));
    assert!(!output.status.success());
    let error = rows(root)[0].error.clone().unwrap();
    assert!(
        error.contains("weights.safetensors")
            && error.contains("layer1.0.proj.weight")
            && error.contains("is missing"),
        "{error}"
    );
    fs::remove_file(root.join("folder-c/fog/2/dark/1.jpg")).unwrap();
    let uneven = refused(root, &format!("{stored} --weights weights.safetensors"));
    assert!(uneven.contains("fog/2 has 3 images, gaussian_noise/1 has 4"), "{uneven}");
    fs::remove_dir_all(root.join("folder-c/snow")).unwrap();
    let missing = refused(root, &format!("{stored} --weights weights.safetensors"));
    assert!(
        missing.contains("snow/1: no such folder") && missing.contains("effattn fetch folder-c"),
        "{missing}"
    );
}

/// ImageNet's layout with an image for each of 1000 classes, and ImageNet V2's, whose folders are numbers.
fn imagenet(root: &Path) {
    for number in 0..1000u32 {
        let shade = (number % 251) as u8;
        put(root, &format!("imagenet/train/n{number:08}/1.png"), shade);
        put(root, &format!("imagenet/val/n{number:08}/ILSVRC2012_val_{:08}.png", number + 1), shade);
        put(root, &format!("imagenet-v2/{number}/1.png"), shade);
    }
}

#[test]
fn weights_are_tested_on_other_labels_and_on_new_images() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    imagenet(root);
    let model = "--data-dir . --preset cvt-small --model full --threads 1 --no-plot --limit 8";
    let train =
        format!("vision --task imagenet {model} --batch 4 --steps 1 --also imagenet-real,imagenet-v2");
    assert!(
        refused(root, &train).contains("place real.json (github.com/google-research/reassessed-imagenet)")
    );
    let labels = root.join("imagenet-real/real.json");
    fs::create_dir(root.join("imagenet-real")).unwrap();
    for (text, why) in
        [("[[1], [2]]", "image 3, but"), ("[[1], 2]", "expected a list with a list of classes")]
    {
        fs::write(&labels, text).unwrap();
        let said = refused(root, &train);
        assert!(said.contains(why) && !said.contains("panicked"), "{said}");
    }
    // every class is right for the last three images of the eight that have labels, and one that no image has for the others
    let every = format!("[{}]", (0..1000).map(|class| class.to_string()).collect::<Vec<_>>().join(","));
    let lists = (0..1000).map(|image| match image {
        0 | 1 => "[]".to_owned(),
        2..=6 => "[999]".to_owned(),
        _ => every.clone(),
    });
    fs::write(&labels, format!("[{}]", lists.collect::<Vec<_>>().join(","))).unwrap();
    let output = run(root, &train);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let trained = rows(root);
    assert_eq!(value(&trained, "imagenet-real", "tested"), 8.0);
    assert!(value(&trained, "imagenet-real", "accuracy") >= 37.5);
    assert_eq!(value(&trained, "imagenet-v2", "tested"), 8.0);
    let cells = fs::read_dir(root.join("results/vision/latest/cells")).unwrap();
    let best = cells.flatten().next().unwrap().path().join("best.safetensors");
    fs::copy(best, root.join("weights.safetensors")).unwrap();
    let stored = format!("vision --task imagenet-real,imagenet-v2 {model} --weights weights.safetensors");
    let output = run(root, &stored);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let again = rows(root);
    for task in ["imagenet-real", "imagenet-v2"] {
        assert_eq!(value(&again, task, "accuracy"), value(&trained, task, "accuracy"), "{task}");
    }
    // all images have all classes: every answer is right
    fs::write(&labels, format!("[{}]", vec![every; 1000].join(","))).unwrap();
    let output = run(root, &stored.replace("imagenet-real,imagenet-v2", "imagenet-real"));
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(value(&rows(root), "imagenet-real", "accuracy"), 100.0);
}
