//! Readers of data files: archives, images, corpora, checkpoints, golden files.

use std::io::Write;
use std::path::Path;

use effattn::data::{LoadOptions, find};
use effattn::protocol::check::Golden;
use effattn::train::checkpoint::Checkpoint;
use flate2::Compression;
use flate2::write::GzEncoder;

use super::Target;

const PARTIAL: LoadOptions = LoadOptions { strict: false, allow_partial: true, keep_close: false };
const KEEP_CLOSE: LoadOptions = LoadOptions { keep_close: true, ..PARTIAL };

/// Loads the data set called `name`; whatever the folder holds, it must not panic.
fn load(name: &str, folder: &Path, options: LoadOptions) {
    let set = find(name).unwrap();
    let _ = (set.locate)(folder);
    match set.examples() {
        Some(examples) => drop((examples.load)(folder, options)),
        None => drop((set.symbols().unwrap().load)(folder, options)),
    }
}

/// Writes `bytes` as `name` below `folder`.
pub fn put(folder: &Path, name: &str, bytes: &[u8]) {
    let path = folder.join(name);
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::write(path, bytes).unwrap();
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

fn tar(members: &[(&str, &[u8])]) -> Vec<u8> {
    let mut builder = tar::Builder::new(Vec::new());
    for (name, bytes) in members {
        let mut header = tar::Header::new_gnu();
        header.set_size(bytes.len() as u64);
        // the crate refuses to write names that lead out of the archive
        header.as_old_mut().name[..name.len()].copy_from_slice(name.as_bytes());
        header.set_cksum();
        builder.append(&header, *bytes).unwrap();
    }
    let mut link = tar::Header::new_gnu();
    link.set_entry_type(tar::EntryType::Symlink);
    link.set_size(0);
    builder.append_link(&mut link, "aclImdb/train/pos/2_9.txt", "/etc/passwd").unwrap();
    builder.into_inner().unwrap()
}

fn zip(name: &str, bytes: &[u8]) -> Vec<u8> {
    let mut writer = zip::ZipWriter::new(std::io::Cursor::new(Vec::new()));
    writer.start_file(name, zip::write::SimpleFileOptions::default()).unwrap();
    writer.write_all(bytes).unwrap();
    writer.finish().unwrap().into_inner()
}

fn png() -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut encoder = png::Encoder::new(&mut bytes, 32, 32);
    encoder.set_color(png::ColorType::Grayscale);
    encoder.set_depth(png::BitDepth::Eight);
    encoder.write_header().unwrap().write_image_data(&[7; 1024]).unwrap();
    bytes
}

/// Text of the letters of both corpora.
fn letters() -> Vec<u8> {
    (0..3000usize).map(|i| b"abc xyz"[i * i % 7]).collect()
}

const HARD: &str = "pathfinder32/curv_contour_length_14";

pub const TARGETS: &[Target] = &[
    Target {
        name: "listops-tsv",
        weight: 0.5,
        seeds: || vec![b"Source\tTarget\n( ( ( [MAX 3 ) 4 ) ] )\t4\n7\t7\n".to_vec()],
        words: &["\t", "\n", "[SM", " ] ) ", "Source\tTarget\n", "10"],
        read: |bytes, folder| {
            put(folder, "basic_train.tsv", bytes);
            put(folder, "basic_val.tsv", b"Source\tTarget\n7\t7\n");
            put(folder, "basic_test.tsv", b"Source\tTarget\n7\t7\n");
            load("listops", folder, KEEP_CLOSE);
        },
    },
    Target {
        name: "listops-file",
        weight: 0.3,
        seeds: || {
            let header = b"{\"__metadata__\":{\"format\":\"effattn listops\",\"sha256\":\"0\"},\"ends\":{\"dtype\":\"U64\",\"shape\":[1],\"data_offsets\":[0,8]},\"labels\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[8,9]},\"tokens\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[9,10]}}";
            let body = [1, 0, 0, 0, 0, 0, 0, 0, 3, 4];
            vec![[&(header.len() as u64).to_le_bytes()[..], header, &body].concat()]
        },
        words: &["\"ends\"", "data_offsets", "\"dtype\":\"U64\"", "\"shape\":[]"],
        read: |bytes, folder| {
            put(folder, "listops.safetensors", bytes);
            load("listops", folder, PARTIAL);
        },
    },
    Target {
        name: "aan",
        weight: 0.5,
        seeds: || vec![b"1.0\tP1\tP2\ttext a\ttext b\n0.0\ta\tb\tx\ty\n".to_vec()],
        words: &["\t", "\n", "0.0", "1.0", "nan"],
        read: |bytes, folder| {
            put(folder, "tsv_data/new_aan_pairs.train.tsv", bytes);
            put(folder, "tsv_data/new_aan_pairs.eval.tsv", b"1.0\ta\tb\tx\ty\n");
            put(folder, "tsv_data/new_aan_pairs.test.tsv.gz", &gzip(bytes));
            load("retrieval", folder, PARTIAL);
        },
    },
    Target {
        name: "imdb",
        weight: 0.5,
        seeds: || {
            vec![tar(&[
                ("aclImdb/train/pos/0_9.txt", b"good"),
                ("aclImdb/test/neg/1_1.txt", b"bad"),
                ("../x.txt", b"no"),
            ])]
        },
        words: &["aclImdb/", "../", "ustar", "0000644"],
        read: |bytes, folder| {
            put(folder, "aclImdb_v1.tar.gz", &gzip(bytes));
            load("text", folder, PARTIAL);
            put(folder, "aclImdb_v1.tar.gz", bytes); // no gzip at all
            load("text", folder, LoadOptions { strict: true, ..PARTIAL });
            assert!(!folder.join("../x.txt").exists(), "nothing is written outside");
        },
    },
    Target {
        name: "cifar10",
        weight: 0.5,
        seeds: || {
            let record: Vec<u8> = (0..3073u32).map(|i| if i == 0 { 3 } else { i as u8 }).collect();
            vec![record.clone(), record.repeat(3)]
        },
        words: &[],
        read: |bytes, folder| {
            put(folder, "cifar-10-batches-bin/data_batch_1.bin", bytes);
            put(folder, "cifar-10-batches-bin/test_batch.bin", bytes);
            load("image", folder, PARTIAL);
        },
    },
    Target {
        name: "pathfinder",
        weight: 0.5,
        seeds: || vec![png(), b"imgs/0 sample_0.png 0 1 1 14 4 2\n".to_vec()],
        words: &["IHDR", "IDAT", "IEND", "PLTE", "tRNS", "acTL", "fdAT", "../", "imgs/0 sample_0.png 0 0\n"],
        read: |bytes, folder| {
            let image = format!("{HARD}/imgs/0/sample_0.png");
            put(folder, &image, bytes);
            put(folder, &format!("{HARD}/metadata/0.npy"), b"imgs/0 sample_0.png 0 1 1 14 4 2\n");
            load("pathfinder32", folder, PARTIAL);
            put(folder, &image, &png());
            put(folder, &format!("{HARD}/metadata/0.npy"), bytes);
            load("pathfinder32", folder, PARTIAL);
        },
    },
    Target {
        name: "corpora",
        weight: 0.5,
        seeds: || vec![zip("enwik8", &letters()), zip("text8", &letters()), gzip(&letters()), letters()],
        words: &["enwik8", "text8", "PK\u{3}\u{4}", "PK\u{1}\u{2}", "PK\u{5}\u{6}"],
        read: |bytes, folder| {
            for name in ["enwik8", "enwik8.zip", "enwik8.gz"] {
                put(folder, &format!("a/{name}"), bytes);
                load("enwik8", &folder.join("a"), PARTIAL);
                std::fs::remove_file(folder.join("a").join(name)).unwrap();
            }
            put(folder, "b/text8.zip", bytes);
            load("text8", &folder.join("b"), PARTIAL);
        },
    },
    Target {
        name: "golden",
        weight: 1.0,
        seeds: || {
            ["full-02", "dp-00", "cosformer-bidir-02"]
                .map(|name| {
                    let path = format!("{}/tests/golden/{name}.safetensors", env!("CARGO_MANIFEST_DIR"));
                    let mut bytes = std::fs::read(path).unwrap();
                    bytes.truncate(1 << 16);
                    bytes
                })
                .to_vec()
        },
        words: &[
            "__metadata__",
            "data_offsets",
            "\"dtype\":\"F32\"",
            "\"shape\":[0]",
            "\"shape\":[18446744073709551615]",
        ],
        read: |bytes, _| {
            let _ = Golden::read("x", bytes);
        },
    },
    Target {
        name: "checkpoint",
        weight: 1.0,
        seeds: || {
            let header = br#"{"__metadata__":{"format":"effattn checkpoint","version":"0.1.0","schema":"1","updates":"3","model":"{}","state":"{}","schedule":"{}"},"weight/a":{"dtype":"F32","shape":[1,2],"data_offsets":[0,8]},"first/0":{"dtype":"F32","shape":[2],"data_offsets":[8,16]}}"#;
            let body = [0u8; 16];
            vec![[&(header.len() as u64).to_le_bytes()[..], header, &body].concat()]
        },
        words: &[
            "__metadata__",
            "weight/",
            "second/",
            "constant/",
            "extra/",
            "\"I64\"",
            "\"shape\":[4294967296,4294967296]",
        ],
        read: |bytes, _| {
            if let Ok(checkpoint) = Checkpoint::read(Path::new("x"), bytes) {
                let _ = checkpoint.builder(&candle_core::Device::Cpu, true);
                let _ = checkpoint.expect_model(&serde_json::json!({ "a": 1 }));
            }
        },
    },
];
