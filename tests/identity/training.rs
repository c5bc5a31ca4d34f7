//! Runs that train: their rows and curves, what their checkpoints say of themselves, and that training goes on from the
//! checkpoints of the build that wrote the fixtures.

use std::collections::BTreeMap;
use std::fs;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use candle_core::{DType, Device, Tensor, safetensors};
use flate2::Compression;
use flate2::read::GzDecoder;
use flate2::write::GzEncoder;
use serde_json::Value;

use super::kept::{DIGITS, alike, place, same};
use super::{blesses, data, effattn, json, latest, plain, processor, said, told};

/// A command that trains one model.
struct Run {
    name: &'static str,
    line: &'static str,
    /// The checkpoint of which training goes on, and the updates that it may have, where one is kept.
    kept: Option<(&'static str, std::ops::Range<u64>)>,
}

const ALWAYS: &str = "--no-plot --threads 1 --data-dir . --save-every 1ms";

const RUNS: &[Run] = &[
    Run {
        name: "lra",
        line: "lra --task listops --model ls:w=4,r=2 --len 16 --batch 8 --rate 1e-3 --steps 40 --keep-close \
               --set layers=1 --set width=8 --set heads=2 --set ffn=8",
        kept: Some(("last", 3..10)),
    },
    Run {
        name: "lra-composed",
        line: "lra --task text --model cosformer --allow-partial --strict --len 16 --batch 8 --steps 4 --limit 12 --seeds 3 \
               --kernel composed --preset lra-repo --set layers=1 --set width=16 --set heads=2 --set ffn=16 --set dropout=0.1",
        kept: None,
    },
    Run {
        name: "charlm",
        line: "charlm --quick --model ls:w=8 --steps 24 --every 8 --len 32,64 --phases 2 --batch 2 --accumulate 2 --limit 200 \
               --set layers=1 --set width=8 --set heads=2 --set ffn=8 --set dropout=0.1",
        kept: Some(("phase1-last", 9..20)),
    },
    Run {
        name: "charlm-overlap",
        line: "charlm --task sample --model transformer-xl --steps 3 --every 1 --len 16 --phases 1 --batch 2 --limit 100 --overlap \
               --rate 1e-3 --set layers=1 --set width=16 --set heads=2 --set ffn=16 --dtype bf16",
        kept: None,
    },
    Run {
        name: "wordlm",
        line: "wordlm --quick --model cosformer --steps 40 --every 10 --len 32 --batch 4 --accumulate 2 --limit 200 \
               --set layers=1 --set width=16 --set heads=2 --set ffn=16",
        kept: Some(("last", 2..9)),
    },
    Run {
        name: "mlm",
        line: "mlm --quick --task words.txt --steps 30 --every 10 --accumulate 2 --set layers=1 --set width=8 --set heads=2 --set ffn=8",
        kept: None, // its vocabulary makes it too large
    },
    Run {
        name: "finetune",
        line: "finetune --quick --model full --len 40 --steps 40 --every 20 --batch 4 --accumulate 2 --limit 60 --set dropout=0.1 \
               --set layers=1 --set width=2 --set heads=1 --set ffn=4",
        kept: Some(("last", 4..19)),
    },
    Run {
        name: "vision",
        line: "vision --quick --len 32 --preset cvt-small --model full --steps 4 --every 2 --batch 4 --accumulate 2 --limit 8",
        kept: None,
    },
    Run {
        name: "robustness",
        line: "robustness --task text --model ls:w=4,r=2 --len 32 --steps 12 --batch 8 --allow-partial --insertions 0,10 \
               --perturbation-seeds 2 --set layers=1 --set width=16 --set heads=2 --set ffn=16",
        kept: None,
    },
];

/// The header of a safetensors file.
fn header(bytes: &[u8]) -> Option<Value> {
    let length = u64::from_le_bytes(bytes.get(..8)?.try_into().unwrap()) as usize;
    serde_json::from_slice(bytes.get(8..8 + length)?).ok()
}

/// The folder of the only cell of `run`.
fn cell(run: &Path) -> PathBuf {
    let mut cells = fs::read_dir(run.join("cells")).unwrap();
    let cell = cells.next().unwrap().unwrap().path();
    assert!(cells.next().is_none(), "one cell");
    cell
}

/// The files in `folder` whose names end in `end`, in order.
fn files(folder: &Path, end: &str) -> Vec<PathBuf> {
    let mut files: Vec<PathBuf> = fs::read_dir(folder).unwrap().map(|file| file.unwrap().path()).collect();
    files.retain(|file| file.to_string_lossy().ends_with(end));
    files.sort();
    files
}

/// What a checkpoint says of itself: everything by which another start takes it or refuses it, and its tensors. Groups of
/// tensors, such as weights and moments, that have one name stand in one line.
fn described(path: &Path) -> String {
    let header = header(&fs::read(path).unwrap()).unwrap();
    let about = &header["__metadata__"];
    let mut text = format!("## {}\n", path.file_name().unwrap().to_string_lossy());
    for key in ["format", "schema", "updates"] {
        text += &format!("{key} {}\n", plain(&about[key]));
    }
    let parsed = |key: &str| serde_json::from_str::<Value>(about[key].as_str().unwrap()).unwrap();
    text += &format!("model {}\n", plain(&parsed("model")));
    let state = parsed("state");
    let mut names: Vec<&String> = state.as_object().unwrap().keys().collect();
    names.sort();
    text += &format!("state {names:?}\n");
    let mut tensors: BTreeMap<String, Vec<&str>> = BTreeMap::new();
    for (name, tensor) in header.as_object().unwrap().iter().filter(|(name, _)| *name != "__metadata__") {
        let (group, name) = name.split_once('/').unwrap();
        let shape = plain(&tensor["shape"]);
        tensors
            .entry(format!("{name} {} {shape}", tensor["dtype"].as_str().unwrap()))
            .or_default()
            .push(group);
    }
    for (tensor, mut groups) in tensors {
        groups.sort_unstable();
        text += &format!("{tensor} {}\n", groups.join(" "));
    }
    text
}

/// The curve and the rows of `run`, times and bytes left out.
fn results(run: &Path) -> (String, String) {
    let curve = fs::read_to_string(cell(run).join("curve.csv")).unwrap();
    let (text, digits) = told(run);
    (text, format!("{digits}{curve}"))
}

fn held(run: &Run) -> tempfile::TempDir {
    let folder = data();
    said(folder.path(), &format!("{} {ALWAYS} --quiet", run.line));
    let path = latest(folder.path(), run.line.split(' ').next().unwrap());
    let (mut text, digits) = results(&path);
    let cell = cell(&path);
    text += &format!("## files\n{}\n", cell.file_name().unwrap().to_string_lossy());
    for file in files(&cell, "") {
        text += &format!("{}\n", file.file_name().unwrap().to_string_lossy());
    }
    files(&cell, "last.safetensors").iter().for_each(|file| text += &described(file));
    let public = files(&cell, "model.safetensors");
    assert_eq!(public.len(), usize::from(run.name == "mlm"), "weights for other programs");
    let digits = format!("{DIGITS}{}\n{digits}", processor(&path));
    same(&format!("runs/{}.txt", run.name), &format!("# effattn {}\n{text}{digits}", run.line));
    folder
}

/// Kills `run` when its checkpoint has the updates that are wanted, and keeps its files. What is kept stays: it is there
/// because an older build wrote it.
fn keep(run: &Run, (name, wanted): (&str, &std::ops::Range<u64>)) {
    let start = Instant::now();
    loop {
        assert!(start.elapsed() < Duration::from_secs(120), "{}: no kill came in time", run.name);
        let folder = data();
        let mut command = effattn(folder.path(), &format!("{} {ALWAYS} --quiet", run.line));
        let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        let runs = folder.path().join("results").join(run.line.split(' ').next().unwrap());
        let updates = || {
            let path =
                fs::read_dir(&runs).ok()?.flatten().map(|run| run.path()).find(|run| !run.is_symlink())?;
            let cell = fs::read_dir(path.join("cells")).ok()?.flatten().next()?.path();
            let header = header(&fs::read(cell.join(format!("{name}.safetensors"))).ok()?)?;
            Some((header["__metadata__"]["updates"].as_str()?.parse::<u64>().ok()?, cell))
        };
        let mut ended = false;
        while !ended && updates().is_none_or(|(updates, _)| updates < wanted.start) {
            ended = child.try_wait().unwrap().is_some();
        }
        let _ = child.kill();
        child.wait().unwrap();
        std::thread::sleep(Duration::from_millis(100)); // its worker ends with it
        let Some((_, cell)) = updates().filter(|(updates, _)| wanted.contains(updates)) else { continue };
        let to = place(&format!("checkpoints/{}", run.name));
        fs::create_dir_all(&to).unwrap();
        for file in files(&cell, ".safetensors") {
            let name = file.file_name().unwrap().to_string_lossy().into_owned() + ".gz";
            let mut packed = GzEncoder::new(fs::File::create(to.join(name)).unwrap(), Compression::best());
            packed.write_all(&fs::read(file).unwrap()).unwrap();
            packed.finish().unwrap();
        }
        return;
    }
}

/// Puts the kept checkpoints in the place of those of a finished `run`, and empties its journal: nothing of it is done.
fn undo(run: &Path, kept: &Path) {
    fs::write(run.join("journal.jsonl"), "").unwrap();
    let cell = cell(run);
    files(&cell, "").iter().for_each(|file| fs::remove_file(file).unwrap());
    let packed = files(kept, ".gz");
    assert!(!packed.is_empty(), "no checkpoint in {}", kept.display());
    for file in packed {
        let mut bytes = Vec::new();
        GzDecoder::new(fs::File::open(&file).unwrap()).read_to_end(&mut bytes).unwrap();
        fs::write(cell.join(file.file_stem().unwrap()), bytes).unwrap();
    }
}

/// The tensors of every checkpoint in `cell`.
fn tensors(cell: &Path) -> Vec<(PathBuf, BTreeMap<String, Tensor>)> {
    let read = |path: PathBuf| {
        let tensors = safetensors::load(&path, &Device::Cpu).unwrap();
        (path, tensors.into_iter().collect())
    };
    files(cell, ".safetensors").into_iter().map(read).collect()
}

/// The largest difference of two tensors, of the largest number in them.
fn apart(a: &Tensor, b: &Tensor) -> f64 {
    let numbers =
        |x: &Tensor| x.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1::<f64>().unwrap();
    let (a, b) = (numbers(a), numbers(b));
    assert_eq!(a.len(), b.len());
    let largest = a.iter().chain(&b).fold(f64::MIN_POSITIVE, |largest, x| largest.max(x.abs()));
    a.iter().zip(&b).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max) / largest
}

/// Kernels add in another order than those of the build that kept a checkpoint.
const ROUNDING: f64 = 1e-4;

/// Trains `run` undisturbed, and again from the kept checkpoint: to the same weights, but for rounding.
fn goes_on(run: &Run, folder: &Path) {
    let Some((name, wanted)) = &run.kept else { return };
    if blesses() && !place(&format!("checkpoints/{}", run.name)).exists() {
        keep(run, (name, wanted));
    }
    let path = latest(folder, run.line.split(' ').next().unwrap());
    let (undisturbed, weights) = (results(&path), tensors(&cell(&path)));
    undo(&path, &place(&format!("checkpoints/{}", run.name)));
    let told = said(folder, &format!("{} {ALWAYS}", run.line));
    assert!(told.contains("continuing") && told.contains(": resuming after step "), "{}: {told}", run.name);
    let number = told.split(": resuming after step ").nth(1).unwrap().split_whitespace().next().unwrap();
    assert!(number.parse::<u64>().unwrap() >= wanted.start, "{}: {told}", run.name);
    assert_eq!(latest(folder, run.line.split(' ').next().unwrap()), path, "the same run");
    let (text, digits) = results(&path);
    alike(run.name, &undisturbed.0, &text);
    let fixture = fs::read_to_string(place(&format!("runs/{}.txt", run.name))).unwrap();
    if !fixture.contains(&format!("{DIGITS}{}\n", processor(&path))) {
        return eprintln!("{}: the checkpoint is of another processor, digits are not compared", run.name);
    }
    alike(run.name, &undisturbed.1, &digits);
    for ((path, now), (_, then)) in tensors(&cell(&path)).iter().zip(&weights) {
        assert!(now.keys().eq(then.keys()), "{}: {} has other tensors", run.name, path.display());
        // softmax does not see a bias of the keys: its gradients, and so its steps, are rounding
        for (name, now) in now.iter().filter(|(name, _)| !name.ends_with("key.bias")) {
            let apart = apart(now, &then[name]);
            assert!(apart <= ROUNDING, "{}: {name} of {} is {apart:e} off", run.name, path.display());
        }
    }
    assert_eq!(json(&path.join("manifest.json"))["state"], "done");
}

fn hold(name: &str) {
    let run = RUNS.iter().find(|run| run.name == name).unwrap();
    let folder = held(run);
    goes_on(run, folder.path());
}

#[test]
fn classifiers_are_trained_as_before_and_go_on_from_older_checkpoints() {
    ["lra", "lra-composed", "robustness", "finetune"].into_iter().for_each(hold);
}

#[test]
fn language_models_are_trained_as_before_and_go_on_from_older_checkpoints() {
    ["charlm", "charlm-overlap", "wordlm", "mlm"].into_iter().for_each(hold);
}

#[test]
fn image_models_are_trained_as_before() {
    hold("vision");
}

/// A checkpoint of other settings in the place of a run's own is refused by the name of the setting.
#[test]
fn an_older_checkpoint_of_another_model_is_refused() {
    if !place("checkpoints/lra").exists() {
        assert!(blesses(), "no checkpoint is kept");
        return; // another test is about to write it
    }
    let folder = data();
    let line = RUNS[0].line.replace("--keep-close ", "");
    said(folder.path(), &format!("{line} {ALWAYS} --quiet"));
    undo(&latest(folder.path(), "lra"), &place("checkpoints/lra"));
    let output = effattn(folder.path(), &format!("{line} {ALWAYS}")).output().unwrap();
    let told = super::stderr(&output);
    assert!(
        !output.status.success() && told.contains("reading.keep_close is true there and false here"),
        "{told}"
    );
}
