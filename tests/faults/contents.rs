//! A row is what was read: every file of a run is known by its content, and what is not a run's own is not shown as its.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::mem::MaybeUninit;
use std::path::{Path, PathBuf};

use rustix::fs::inotify;

use effattn::record::{Row, csv};

use super::identity::reviews;
use super::{LRA, SPEED, effattn, fresh, latest, rows, run, runs, said, stderr, suite, unsealed};

/// What is changed in a file: one byte that every reader takes for data.
enum Change {
    /// The lowest bit of the last byte that is no blank.
    Last,
    /// One text for another.
    Text(&'static str, &'static str),
}

fn change(file: &Path, how: &Change) -> Vec<u8> {
    let before = fs::read(file).unwrap();
    let after = match how {
        Change::Last => {
            let mut bytes = before.clone();
            let last = bytes.iter().rposition(|byte| !byte.is_ascii_whitespace()).unwrap();
            bytes[last] ^= 1;
            bytes
        }
        Change::Text(from, to) => {
            let text = String::from_utf8(before.clone()).unwrap();
            assert!(text.contains(from), "{}: no {from}", file.display());
            text.replacen(from, to, 1).into_bytes()
        }
    };
    assert_ne!(before, after);
    fs::write(file, after).unwrap();
    before
}

/// The files that commands read, as docs/reliability.md lists them.
const READ: &[(&str, &[(&str, Change)])] = &[
    (
        "speed --preset ls-lra --model full --len 32 --max-time 30ms",
        &[("aclImdb/train/neg/0_1.txt", Change::Last)],
    ),
    ("memory --preset ls-lra --model full --len 32", &[("aclImdb/train/pos/0_9.txt", Change::Last)]),
    (
        "speed --preset ls-lra --model full --len 32 --max-time 30ms --program ./mine.toml",
        &[
            ("aclImdb/train/neg/0_1.txt", Change::Last),
            ("mine.toml", Change::Text("about = 'x'", "about = 'y'")),
            ("mine.sh", Change::Last),
            ("mine.txt", Change::Last),
        ],
    ),
    (
        "speed --suite s.toml",
        &[
            ("s.toml", Change::Text("title = \"t\"", "title = \"u\"")),
            ("aclImdb/train/neg/0_1.txt", Change::Last),
        ],
    ),
    (
        "lra --task listops --model full --len 16 --steps 2",
        &[
            ("basic_train.tsv", Change::Text("[MAX 9 ) 7 )", "[MAX 9 ) 6 )")),
            ("basic_val.tsv", Change::Text("[MAX 9 ) 8 )", "[MAX 9 ) 7 )")),
            ("basic_test.tsv", Change::Text("[MAX 8 ) 9 )", "[MAX 7 ) 9 )")),
        ],
    ),
    (
        "lra --task text --model full --len 16 --steps 2 --allow-partial",
        &[("aclImdb/train/neg/3_1.txt", Change::Last), ("aclImdb/test/pos/7_9.txt", Change::Last)],
    ),
    (
        "robustness --task text --model ls --len 16 --steps 2 --allow-partial",
        &[("aclImdb/train/neg/3_1.txt", Change::Last), ("aclImdb/test/pos/7_9.txt", Change::Last)],
    ),
    (
        "lra --data own.csv,own-val.csv,own-test.csv --tokenizer own --model full --len 16 --steps 2",
        &[
            ("own.csv", Change::Text("fox,1", "fox,2")),
            ("own-val.csv", Change::Text("the hen 3", "the hen 4")),
            ("own-test.csv", Change::Text("the hen 3", "the hen 4")),
            ("own/tokenizer.json", Change::Text("\"add_prefix_space\":false", "\"add_prefix_space\":true")),
        ],
    ),
    (
        "finetune --quick --data own.csv,own-val.csv,own-test.csv --steps 2",
        &[
            ("own.csv", Change::Text("fox,1", "fox,2")),
            ("own-val.csv", Change::Text("the hen 3", "the hen 4")),
            ("own-test.csv", Change::Text("the hen 3", "the hen 4")),
        ],
    ),
    (
        "charlm --data ./enwik8 --model full --steps 2 --every 2 --len 16 --batch 2 --set layers=1",
        &[("enwik8", Change::Last)],
    ),
    (
        "wordlm --quick --data words.txt --model full --steps 2 --every 2 --len 16 --batch 2 --set layers=1",
        &[("words.txt", Change::Text("the 1", "the 2"))],
    ),
    (
        "charlm --task enwik8 --allow-partial --model full --steps 2 --every 2 --len 16 --batch 2 --set layers=1",
        &[("enwik8", Change::Last)],
    ),
    (
        "wordlm --task wikitext103 --allow-partial --model full --steps 2 --every 2 --len 16 --batch 2 --set layers=1 \
         --set width=64",
        &[
            ("wiki.train.tokens", Change::Last),
            ("wiki.valid.tokens", Change::Last),
            ("wiki.test.tokens", Change::Last),
        ],
    ),
    (
        "mlm --task words.txt --model full --steps 2 --every 2 --len 16 --batch 2 --set layers=1 \
         --set width=32 --set ffn=32 --set heads=2",
        &[("words.txt", Change::Last)],
    ),
    (
        "mlm --task words.txt --tokenizer own --model full --steps 2 --every 2 --len 16 --batch 2 --set layers=1 \
         --set width=32 --set ffn=32 --set heads=2",
        &[
            ("words.txt", Change::Last),
            ("own/tokenizer.json", Change::Text("\"add_prefix_space\":false", "\"add_prefix_space\":true")),
        ],
    ),
    (
        "mlm --task words.txt --from own --model full --steps 2 --every 2 --batch 2",
        &[
            ("words.txt", Change::Last),
            ("own/config.json", Change::Text("\"layer_norm_eps\": 0.00001", "\"layer_norm_eps\": 0.00002")),
            ("own/tokenizer.json", Change::Text("\"trim_offsets\":true", "\"trim_offsets\":false")),
            ("own/model.safetensors", Change::Last),
        ],
    ),
    (
        "finetune --task imdb --from own --model full --len 16 --steps 2 --allow-partial",
        &[
            ("aclImdb/train/neg/3_1.txt", Change::Last),
            ("aclImdb/test/pos/7_9.txt", Change::Last),
            ("own/config.json", Change::Text("\"layer_norm_eps\": 0.00001", "\"layer_norm_eps\": 0.00002")),
            ("own/tokenizer.json", Change::Text("\"trim_offsets\":true", "\"trim_offsets\":false")),
            ("own/model.safetensors", Change::Last),
        ],
    ),
    (
        "vision --task folder --preset cvt-small --model full --steps 2 --every 2 --batch 2 --also folder-c",
        &[
            ("train/a/0.png", Change::Last),
            ("val/b/0.png", Change::Last),
            ("folder-c/fog/3/a/0.png.jpg", Change::Last),
        ],
    ),
    (
        "vision --task folder-c --preset cvt-small --model full --weights w.safetensors",
        &[("w.safetensors", Change::Last), ("folder-c/snow/5/b/0.png.jpg", Change::Last)],
    ),
];

/// A program that does nothing: it refuses what it is asked first.
const REFUSES: &str = r#"answer='{"outcome":"unsupported","error":"nothing"}'
printf "effattn1\\$(printf %o ${#answer})\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0$answer"
exec cat >/dev/null
"#;

/// A folder with every file of [`READ`].
fn files() -> tempfile::TempDir {
    let folder = fresh("lra");
    let at = |name: &str| folder.path().join(name);
    reviews(folder.path(), false);
    fs::write(at("s.toml"), suite("\"t\"", &["layers = 1"])).unwrap();
    fs::write(at("mine.toml"), "about = 'x'\ncommand = ['sh', 'mine.sh', 'mine.txt']\n").unwrap();
    fs::write(at("mine.sh"), REFUSES).unwrap();
    fs::write(at("mine.txt"), "1").unwrap();
    let line = |index: usize| format!("the {} saw the {}\n", index % 7, index % 11);
    fs::write(at("words.txt"), (0..60).map(line).collect::<String>()).unwrap();
    let own = |rows: usize| -> String {
        let row = |at: usize| format!("the hen {at} and the fox,{}\n", 1 + at % 2);
        "text,label\n".to_owned() + &(0..rows).map(row).collect::<String>()
    };
    [("own.csv", 40), ("own-val.csv", 8), ("own-test.csv", 8)].iter().for_each(|(name, rows)| {
        fs::write(at(name), own(*rows)).unwrap();
    });
    fs::write(at("enwik8"), (0..1000).map(line).collect::<String>()).unwrap();
    for (part, lines) in [("train", 400), ("valid", 60), ("test", 60)] {
        fs::write(at(&format!("wiki.{part}.tokens")), (0..lines).map(line).collect::<String>()).unwrap();
    }
    let quick = "mlm --quick --model full --steps 2 --every 2 --set layers=1 --set width=32 --set ffn=32";
    said(folder.path(), &format!("{quick} --no-plot --threads 1 -o encoder"));
    let cell = |command: &str| {
        let cells = folder.path().join("encoder").join(command).join("latest/cells");
        fs::read_dir(cells).unwrap().next().unwrap().unwrap().path()
    };
    fs::create_dir(at("own")).unwrap();
    for name in ["config.json", "tokenizer.json", "model.safetensors"] {
        fs::copy(cell("mlm").join(name), at("own").join(name)).unwrap();
    }
    for (name, shade) in [("train/a/0", 1), ("train/b/0", 2), ("val/a/0", 3), ("val/b/0", 4)] {
        let path = at(&format!("{name}.png"));
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        image::RgbImage::from_pixel(8, 8, image::Rgb([shade; 3])).save(path).unwrap();
    }
    said(folder.path(), "fetch folder-c --data-dir .");
    let train = "vision --task folder --preset cvt-small --model full --steps 2 --every 2 --batch 2";
    said(folder.path(), &format!("{train} --data-dir . --no-plot --threads 1 -o encoder"));
    fs::copy(cell("vision").join("best.safetensors"), at("w.safetensors")).unwrap();
    fs::remove_dir_all(at("encoder")).unwrap();
    folder
}

/// Folders of which a command reads many files; [`READ`] names one of each.
const TREES: [&str; 4] = ["aclImdb/", "train/", "val/", "folder-c/"];

/// Files of a tree that are changed, of those that were opened.
const CHANGED: usize = 6;

/// Whether the file `name` is what `listed` stands for: itself, or one of the same tree.
fn is_listed(listed: &str, name: &str) -> bool {
    listed == name || TREES.iter().any(|tree| listed.starts_with(tree) && name.starts_with(tree))
}

/// The files below `folder` that `run` and its processes open, as the kernel reports them; those that it makes are left out, and
/// so is the program's own memory of hashes.
fn opened(folder: &Path, run: impl FnOnce()) -> BTreeSet<String> {
    let watch = inotify::init(inotify::CreateFlags::CLOEXEC | inotify::CreateFlags::NONBLOCK).unwrap();
    let mut folders = BTreeMap::new();
    let mut left = vec![folder.to_owned()];
    while let Some(next) = left.pop() {
        let number = inotify::add_watch(&watch, &next, inotify::WatchFlags::OPEN).unwrap();
        let entries = fs::read_dir(&next).unwrap().flatten().filter(|entry| entry.file_name() != "cache");
        left.extend(entries.filter(|entry| entry.file_type().unwrap().is_dir()).map(|entry| entry.path()));
        folders.insert(number, next);
    }
    let before = |path: &PathBuf| path.is_file();
    let known: BTreeSet<PathBuf> = folders
        .values()
        .flat_map(|folder| fs::read_dir(folder).unwrap().flatten())
        .map(|entry| entry.path())
        .filter(before)
        .collect();
    run();
    let mut buffer = [MaybeUninit::uninit(); 4096];
    let mut events = inotify::Reader::new(watch, &mut buffer);
    let mut found = BTreeSet::new();
    while let Ok(event) = events.next() {
        assert!(!event.events().contains(inotify::ReadFlags::QUEUE_OVERFLOW), "opens were lost");
        let (Some(above), Some(name)) = (folders.get(&event.wd()), event.file_name()) else { continue };
        let path = above.join(name.to_str().unwrap());
        if known.contains(&path) {
            found.insert(path.strip_prefix(folder).unwrap().to_str().unwrap().to_owned());
        }
    }
    found
}

#[test]
fn a_byte_of_any_file_that_is_read_is_another_plan() {
    let folder = files();
    let output = tempfile::tempdir().unwrap();
    let plans = std::cell::Cell::new(0);
    let aside = |line: &str| {
        plans.set(plans.get() + 1);
        let output = output.path().join(plans.get().to_string());
        said(folder.path(), &format!("{line} --no-plot --threads 1 --data-dir . -o {}", output.display()));
        output
    };
    // the last of a thousand shards has no cell: nothing is computed
    let plan = |line: &str| {
        let base = fs::read_dir(aside(&format!("{line} --shard 1000/1000")))
            .unwrap()
            .next()
            .unwrap()
            .unwrap()
            .path();
        fs::read_dir(base).unwrap().next().unwrap().unwrap().file_name().into_string().unwrap()
    };
    let (mut traced, mut changed) = (0, 0);
    for (line, files) in READ {
        let before = plan(line);
        assert!(before.starts_with("plan-"), "{before}");
        let read = opened(folder.path(), || drop(aside(line)));
        for name in &read {
            assert!(
                files.iter().any(|(listed, _)| is_listed(listed, name)),
                "{line} opens {name}, which is not listed"
            );
        }
        for (listed, _) in *files {
            assert!(read.contains(*listed), "{line} does not open {listed}: {read:?}");
        }
        traced += read.len();
        // they cut inputs from the first reviews; the others are opened, and have no effect
        let measured = ["speed", "memory"].iter().any(|command| line.starts_with(command));
        let trees = TREES.iter().flat_map(|tree| {
            let files: Vec<_> = read.iter().filter(|name| !measured && name.starts_with(tree)).collect();
            let step = files.len().div_ceil(CHANGED).max(1);
            files.into_iter().step_by(step)
        });
        let listed = files.iter().map(|(name, how)| (*name, how));
        for (name, how) in listed.chain(trees.map(|name| (name.as_str(), &Change::Last))) {
            let file = folder.path().join(name);
            let bytes = change(&file, how);
            assert_ne!(plan(line), before, "{line}: a byte of {name}");
            fs::write(&file, bytes).unwrap();
            assert_eq!(plan(line), before, "{line}: {name} is back");
            changed += 1;
        }
    }
    println!(
        "{} commands opened {traced} files, all of them listed; a byte of each of {changed} was another plan",
        READ.len()
    );
}

#[test]
fn weights_that_were_overwritten_are_evaluated_again() {
    let folder = fresh("vision");
    let vision = "vision --quick --preset cvt-small --model full --batch 4 --limit 8 --no-plot --threads 1";
    said(folder.path(), &format!("{vision} --steps 2 --every 2 --seeds 1..2"));
    let cells = latest(folder.path(), "vision").canonicalize().unwrap().join("cells");
    let mut best: Vec<_> =
        fs::read_dir(cells).unwrap().map(|cell| cell.unwrap().path().join("best.safetensors")).collect();
    best.sort();
    let loss = || {
        let rows = rows(folder.path(), "vision").into_iter();
        rows.filter(|row| row.metric == "loss").map(|row| row.value.unwrap()).next().unwrap()
    };
    let losses = best.iter().map(|file| {
        fs::copy(file, folder.path().join("w.safetensors")).unwrap();
        said(folder.path(), &format!("{vision} --weights w.safetensors"));
        loss()
    });
    let losses: Vec<f64> = losses.collect();
    assert_ne!(losses[0], losses[1], "two models under one name");
    let told = said(folder.path(), &format!("{vision} --weights w.safetensors"));
    assert_eq!((runs(folder.path(), "vision"), loss()), (3, losses[1]), "{told}");
}

#[test]
fn results_of_another_tokenizer_are_not_carried_over() {
    let folder = files();
    let line = "mlm --task words.txt --tokenizer own --model full --steps 2 --every 2 --len 16 --batch 2 --set layers=1 \
                --set width=32 --set ffn=32 --set heads=2 --no-plot --threads 1";
    said(folder.path(), &format!("{line} --seeds 1"));
    let first = rows(folder.path(), "mlm");
    let told = said(folder.path(), &format!("{line} --seeds 1,2"));
    assert!(told.contains("1 run was finished before"), "{told}");
    change(
        &folder.path().join("own/tokenizer.json"),
        &Change::Text("\"add_prefix_space\":false", "\"add_prefix_space\":true"),
    );
    let told = said(folder.path(), &format!("{line} --seeds 1,2"));
    assert!(!told.contains("finished before"), "{told}");
    let second = rows(folder.path(), "mlm");
    assert_ne!(first[0].words, second[0].words);
}

#[test]
fn texts_whose_names_are_alike_are_cells_of_their_own() {
    let folder = fresh("mlm");
    let text: String = (0..60).map(|index| format!("the {} saw the {}\n", index % 7, index % 11)).collect();
    ["a b.txt", "a_b.txt"].iter().for_each(|name| fs::write(folder.path().join(name), &text).unwrap());
    let mut command = effattn(
        folder.path(),
        "mlm --model full --steps 2 --every 2 --len 16 --batch 2 --set layers=1 --set width=32 --set ffn=32 --set heads=2 \
         --no-plot --threads 1",
    );
    let output = command.args(["--task", "a b.txt,a_b.txt"]).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    let cells = fs::read_dir(latest(folder.path(), "mlm").join("cells")).unwrap();
    assert_eq!(cells.count(), 2);
}

#[test]
fn equal_trainings_leave_equal_files() {
    let bytes = || {
        let folder = fresh("lra");
        said(folder.path(), LRA);
        let cells = fs::read_dir(latest(folder.path(), "lra").join("cells")).unwrap();
        fs::read(cells.flatten().next().unwrap().path().join("best.safetensors")).unwrap()
    };
    assert!(bytes() == bytes());
}

#[test]
fn rows_that_their_run_did_not_write_are_named_and_left_out() {
    let folder = fresh("speed");
    said(folder.path(), SPEED);
    said(folder.path(), &format!("{SPEED} -o other"));
    let file = latest(folder.path(), "speed").join("rows.csv");
    let good = fs::read_to_string(&file).unwrap();
    let last = good.trim_end().rfind('\n').unwrap();
    let rows: Vec<Row> = csv::from_str(&good).unwrap();
    let edited = |value: f64| {
        let edit = |row: &Row| Row { value: row.value.map(|_| value), ..row.clone() };
        csv::to_string(&rows.iter().map(edit).collect::<Vec<_>>()).unwrap()
    };
    for text in
        [edited(77.7), edited(f64::NAN), edited(1e300).replace("1e300", "1e999"), good[..=last].to_owned()]
    {
        fs::write(&file, &text).unwrap();
        let output = run(folder.path(), "report results");
        assert!(
            !output.status.success() && stderr(&output).contains("is not what its run wrote"),
            "{}",
            stderr(&output)
        );
        let output = run(folder.path(), "report .");
        assert!(output.status.success() && stderr(&output).contains("is left out"), "{}", stderr(&output));
    }
    // what an earlier version wrote has no digest
    let manifest = file.with_file_name("manifest.json");
    let sealed = fs::read_to_string(&manifest).unwrap();
    fs::write(&manifest, unsealed(&manifest)).unwrap();
    fs::write(&file, edited(f64::NAN)).unwrap();
    let output = run(folder.path(), "report results");
    assert!(stderr(&output).contains("no finite number"), "{}", stderr(&output));
    fs::write(&file, good).unwrap();
    fs::write(&manifest, sealed).unwrap();
    assert!(run(folder.path(), "report results").status.success());
}
