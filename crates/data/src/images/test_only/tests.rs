use super::*;

fn put(root: &Path, name: &str) {
    let path = root.join(name);
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    image::RgbImage::from_pixel(3, 2, image::Rgb([9; 3])).save(path).unwrap();
}

fn says(name: &str, dir: &Path, trained: Option<&[String]>) -> String {
    challenge(name).unwrap().scan(dir, trained, false).err().unwrap().to_string()
}

#[test]
fn names_and_parts_are_the_published_ones() {
    let parts = challenge("imagenet-c").unwrap().parts();
    assert_eq!(
        (parts.len(), parts[0].as_str(), parts[74].as_str()),
        (75, "gaussian_noise/1", "jpeg_compression/5")
    );
    for challenge in TEST_ONLY_SETS {
        assert!(super::super::source(challenge.of).is_ok(), "{}", challenge.name);
        assert!(super::super::source(challenge.name).is_err(), "{}", challenge.name);
    }
}

#[test]
fn what_is_missing_or_wrong_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path();
    let error = says("folder-c", root, None);
    assert!(error.contains("effattn fetch folder-c") && error.contains("<severity>/<class>"), "{error}");
    assert!(says("imagenet-a", root, None).contains("imagenet-a.tar"));
    put(root, "folder-c/gaussian_noise/1/a/1.png");
    put(root, "folder-c/gaussian_noise/1/b/1.png");
    let error = says("folder-c", root, None);
    assert!(error.contains("gaussian_noise/2: no such folder"), "{error}");
    let classes = ["a", "c"].map(str::to_owned);
    assert!(says("folder-c", root, Some(&classes)).contains("class folder b where"));
    for part in challenge("folder-c").unwrap().parts() {
        put(root, &format!("folder-c/{part}/a/1.png"));
        put(root, &format!("folder-c/{part}/b/1.png"));
    }
    let found = challenge("folder-c").unwrap().scan(root, None, false).unwrap();
    assert_eq!((found.classes, found.partial), (2, None));
    put(root, "folder-c/fog/3/a/2.png");
    assert!(says("folder-c", root, None).contains("fog/3 has 3 images, gaussian_noise/1 has 2"));
    let partial = challenge("folder-c").unwrap().scan(root, None, true).unwrap();
    assert!(partial.partial.is_some() && partial.hash != found.hash);
}

#[test]
fn classes_of_imagenet_are_counted_and_named() {
    let dir = tempfile::tempdir().unwrap();
    put(dir.path(), "imagenet-r/cat/1.png");
    assert!(says("imagenet-r", dir.path(), None).contains("the class folder cat; expected WordNet names"));
    std::fs::rename(dir.path().join("imagenet-r/cat"), dir.path().join("imagenet-r/n00000001")).unwrap();
    assert!(says("imagenet-r", dir.path(), None).contains("1 class folders, expected 200"));
    for number in 2..=200 {
        put(dir.path(), &format!("imagenet-r/n{number:08}/1.png"));
    }
    assert!(challenge("imagenet-r").unwrap().scan(dir.path(), None, false).is_ok());
    let few = ["a".to_owned()];
    assert!(says("imagenet-r", dir.path(), Some(&few)).contains("models of ImageNet's 1000 classes"));
    put(dir.path(), "bg_challenge/mixed_same/val/00_cat/1.png");
    assert!(
        says("imagenet-9", dir.path(), None).contains("the folders 00_cat; expected the nine groups 00_dog")
    );
}

/// ImageNet's 1000 class folders with an image each, called by name or by number.
fn thousand(root: &Path, set: &str, by_number: bool) {
    for number in 0..1000 {
        let class = if by_number { number.to_string() } else { format!("n{number:08}") };
        put(root, &format!("{set}/{class}/1.png"));
    }
}

#[test]
fn imagenet_v2_has_class_folders_by_name_or_by_number() {
    let dir = tempfile::tempdir().unwrap();
    let set = challenge("imagenet-v2").unwrap();
    let error = says("imagenet-v2", dir.path(), None);
    assert!(
        error.contains("imagenetv2-matched-frequency.tar.gz") && error.contains("imagenet-v2/<class>"),
        "{error}"
    );
    thousand(dir.path(), "imagenetv2-matched-frequency-format-val", true);
    assert_eq!(set.scan(dir.path(), None, false).unwrap().classes, 1000);
    let root = set.root(dir.path()).unwrap();
    let open = || set.open(&root, "", None);
    let numbered = open().unwrap();
    let labels: Vec<u32> = (0..1000).map(|index| numbered.label(Split::Test, index)).collect();
    assert_eq!(labels[..4], [0, 1, 10, 100], "10 stands before 2, and is still class 10");
    assert_eq!(numbered.classes()[10], "10");
    let few = ["a".to_owned()];
    assert!(says("imagenet-v2", dir.path(), Some(&few)).contains("models of ImageNet's 1000 classes"));
    std::fs::rename(root.join("999"), root.join("1000")).unwrap();
    assert!(open().err().unwrap().to_string().contains("1000 class folders, expected 0 to 999"));
    std::fs::rename(root.join("1000"), root.join("n01440764")).unwrap();
    assert!(open().err().unwrap().to_string().contains("the class folder 0; expected WordNet names"));
    std::fs::remove_dir_all(&root).unwrap();
    thousand(dir.path(), "imagenet-v2", false);
    let names: Vec<String> = (0..1000).map(|number| format!("n{number:08}")).collect();
    assert_eq!(set.scan(dir.path(), Some(&names), false).unwrap().classes, 1000);
    let mut others = names;
    others[7] = "n99999999".to_owned();
    assert!(
        says("imagenet-v2", dir.path(), Some(&others)).contains("where the training images have n99999999")
    );
}

#[test]
fn imagenet_real_needs_its_labels_and_the_validation_images() {
    let dir = tempfile::tempdir().unwrap();
    let error = says("imagenet-real", dir.path(), None);
    assert!(error.contains("imagenet-real is not in") && error.contains("place real.json"), "{error}");
    std::fs::create_dir(dir.path().join("imagenet-real")).unwrap();
    let error = says("imagenet-real", dir.path(), None);
    assert!(error.contains("real.json: no such file; place real.json"), "{error}");
    std::fs::write(dir.path().join("imagenet-real/real.json"), "[[1], [2]]").unwrap();
    assert!(says("imagenet-real", dir.path(), None).contains("imagenet/val is not in"));
    put(dir.path(), "imagenet/val/n00000001/ILSVRC2012_val_00000002.png");
    let error = says("imagenet-real", dir.path(), None);
    assert!(error.contains("1 validation images of 2") && error.contains("--allow-partial"), "{error}");
    let found = challenge("imagenet-real").unwrap().scan(dir.path(), None, true).unwrap();
    assert_eq!(found.partial.as_deref(), Some("1 validation images of 2"));
    put(dir.path(), "imagenet/val/n00000000/ILSVRC2012_val_00000001.png");
    assert_eq!(challenge("imagenet-real").unwrap().scan(dir.path(), None, false).unwrap().partial, None);
    let few = ["a".to_owned()];
    assert!(says("imagenet-real", dir.path(), Some(&few)).contains("models of ImageNet's 1000 classes"));
}
