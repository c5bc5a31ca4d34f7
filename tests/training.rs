//! Training runs of the real binary, killed and continued.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use candle_core::{Device, Tensor};
use effattn::attention::choose::choose;
use effattn::data::tokenizer::Tokenizer;
use effattn::model::Backbone;
use effattn::model::roberta::{Roberta, RobertaConfig, Top};
use effattn::nn::params::ParamBuilder;
use effattn::record::{Outcome, Row, csv};

use crate::run::kill_with_workers;

fn effattn(folder: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_effattn"));
    let cache = folder.join("cache");
    command.args(args).current_dir(folder).env("XDG_CACHE_HOME", cache).env_remove("EFFATTN_LOG");
    command
}

fn run(folder: &Path, args: &[&str]) -> Output {
    let output = effattn(folder, args).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    output
}

/// Everything but times and memory.
fn results(folder: &Path, command: &str) -> Vec<String> {
    let path = folder.join("results").join(command).join("latest/rows.csv");
    let rows: Vec<Row> = csv::from_str(&fs::read_to_string(path).unwrap()).unwrap();
    assert!(rows.iter().all(|row| row.outcome == Outcome::Ok));
    let told = rows.iter().filter(|row| row.metric != "step_time");
    told.map(|row| format!("{} {} {:?}", row.label(), row.metric, row.value)).collect()
}

fn curve(folder: &Path, command: &str) -> String {
    let cells = folder.join("results").join(command).join("latest/cells");
    let cell = fs::read_dir(cells).unwrap().next().unwrap().unwrap();
    fs::read_to_string(cell.path().join("curve.csv")).unwrap()
}

/// LRA's three files with few expressions.
fn expressions(folder: &Path) {
    let line = |index: usize| {
        let (a, b, c) = (index % 10, index / 10 % 10, index / 7 % 10);
        let (name, value) = match index % 2 {
            0 => ("[MAX", a.max(b).max(c)),
            _ => ("[MIN", a.min(b).min(c)),
        };
        format!("( ( ( ( {name} {a} ) {b} ) {c} ) ] )\t{value}\n")
    };
    for (name, range) in [("train", 0..80), ("val", 80..100), ("test", 100..120)] {
        let text: String = range.map(line).collect();
        fs::write(folder.join(format!("basic_{name}.tsv")), format!("Source\tTarget\n{text}")).unwrap();
    }
}

/// Kills the command again and again, each time a little later, until it ends by itself.
fn killed(folder: &Path, args: &[&str], kills: u64) -> u64 {
    let mut done = 0;
    for number in 0..kills {
        let mut child = effattn(folder, args).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        std::thread::sleep(Duration::from_millis(60 + 47 * number));
        child.kill().unwrap(); // SIGKILL
        if child.wait().unwrap().code().is_none() {
            done += 1;
        }
    }
    run(folder, args);
    done
}

const LRA: &[&str] = &[
    "lra",
    "--task",
    "listops",
    "--model",
    "ls:w=4,r=2",
    "--len",
    "16",
    "--batch",
    "8",
    "--rate",
    "1e-3",
    "--data-dir",
    ".",
    "--no-plot",
    "--threads",
    "1",
    "--save-every",
    "1ms",
];

#[test]
fn a_run_that_is_killed_again_and_again_ends_like_one_that_is_not() {
    let args = [LRA, &["--steps", "150"]].concat();
    let undisturbed = tempfile::tempdir().unwrap();
    expressions(undisturbed.path());
    run(undisturbed.path(), &args);
    let folder = tempfile::tempdir().unwrap();
    expressions(folder.path());
    let kills = killed(folder.path(), &args, 10);
    assert!(kills >= 1, "no kill hit a running program");
    assert_eq!(results(folder.path(), "lra"), results(undisturbed.path(), "lra"));
    assert_eq!(curve(folder.path(), "lra"), curve(undisturbed.path(), "lra"));
}

#[test]
fn a_language_model_goes_on_with_its_cache() {
    let args = [
        "charlm",
        "--quick",
        "--steps",
        "80",
        "--every",
        "10",
        "--len",
        "64",
        "--batch",
        "4",
        "--accumulate",
        "2",
        "--model",
        "ls:w=16",
        "--limit",
        "400",
        "--set",
        "layers=1",
        "--set",
        "dropout=0.1",
        "--no-plot",
        "--threads",
        "1",
        "--save-every",
        "1ms",
    ];
    let undisturbed = tempfile::tempdir().unwrap();
    run(undisturbed.path(), &args);
    let folder = tempfile::tempdir().unwrap();
    let kills = killed(folder.path(), &args, 8);
    assert!(kills >= 1, "no kill hit a running program");
    assert_eq!(results(folder.path(), "charlm"), results(undisturbed.path(), "charlm"));
    assert_eq!(curve(folder.path(), "charlm"), curve(undisturbed.path(), "charlm"));
}

const MLM: &[&str] = &["mlm", "--quick", "--every", "30", "--accumulate", "2", "--no-plot", "--threads", "1"];

/// The only cell's folder.
fn cell(folder: &Path, command: &str) -> PathBuf {
    let cells = folder.join("results").join(command).join("latest/cells");
    fs::read_dir(cells).unwrap().next().unwrap().unwrap().path()
}

#[test]
fn a_masked_language_model_that_is_killed_ends_with_the_same_weights() {
    let whole = [MLM, &["--steps", "120"]].concat();
    let args = [whole.as_slice(), &["--save-every", "1ms"]].concat();
    let undisturbed = tempfile::tempdir().unwrap();
    run(undisturbed.path(), &whole);
    let folder = tempfile::tempdir().unwrap();
    let kills = killed(folder.path(), &args, 10);
    assert!(kills >= 1, "no kill hit a running program");
    assert_eq!(results(folder.path(), "mlm"), results(undisturbed.path(), "mlm"));
    assert_eq!(curve(folder.path(), "mlm"), curve(undisturbed.path(), "mlm"));
    let [one, other] = [folder.path(), undisturbed.path()].map(|folder| cell(folder, "mlm"));
    for file in ["model.safetensors", "config.json", "tokenizer.json"] {
        let [one, other] = [&one, &other].map(|folder| fs::read(folder.join(file)).unwrap());
        assert!(one == other, "{file} differs");
    }
    let losses = curve(folder.path(), "mlm");
    let bits = |line: Option<&str>| line.unwrap().rsplit(',').next().unwrap().parse::<f64>().unwrap();
    let (first, last) = (bits(losses.lines().nth(1)), bits(losses.lines().last()));
    assert!(last < first, "{losses}");
    let config: serde_json::Value =
        serde_json::from_slice(&fs::read(one.join("config.json")).unwrap()).unwrap();
    assert_eq!((&config["model_type"], &config["max_position_embeddings"]), (&"roberta".into(), &66.into()));
    let words = config["effattn"]["tokenizer"].as_str().unwrap();
    let rows = fs::read_to_string(folder.path().join("results/mlm/latest/rows.csv")).unwrap();
    assert!(
        rows.lines().skip(1).all(|line| line.contains(&words[..12])),
        "rows carry the tokenizer's checksum"
    );
}

#[test]
fn a_masked_language_model_whose_loss_is_not_finite_is_a_row() {
    let folder = tempfile::tempdir().unwrap();
    let args = [MLM, &["--steps", "5000", "--save-every", "1ms"]].concat();
    let mut child =
        effattn(folder.path(), &args).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let runs = || fs::read_dir(folder.path().join("results/mlm")).ok();
    let cells = || runs()?.flatten().find_map(|run| fs::read_dir(run.path().join("cells")).ok());
    let saved =
        || cells()?.flatten().map(|cell| cell.path().join("last.safetensors")).find(|file| file.exists());
    let start = Instant::now();
    while saved().is_none() {
        assert!(start.elapsed() < Duration::from_secs(120), "no checkpoint was written");
        std::thread::sleep(Duration::from_millis(5));
    }
    kill_with_workers(&mut child);
    let file = saved().unwrap();
    let mut bytes = fs::read(&file).unwrap();
    let front = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: serde_json::Value = serde_json::from_slice(&bytes[8..front]).unwrap();
    let at = front + header["weight/lm_head.bias"]["data_offsets"][0].as_u64().unwrap() as usize;
    bytes[at..at + 4].copy_from_slice(&f32::NAN.to_le_bytes());
    fs::write(&file, bytes).unwrap();
    let output = effattn(folder.path(), &args).output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", String::from_utf8_lossy(&output.stderr));
    let path = folder.path().join("results/mlm/latest/rows.csv");
    let rows: Vec<Row> = csv::from_str(&fs::read_to_string(path).unwrap()).unwrap();
    assert!(rows.iter().all(|row| row.outcome == Outcome::Diverged), "{:?}", rows[0].error);
    assert_eq!(rows[0].metric, "masked_loss");
}

/// A small encoder of full attention for 16 words, in the files of `--from`.
fn encoder(folder: &Path) {
    let choice = choose(&"full".parse().unwrap()).unwrap().remove(0);
    let texts = ["the old lamp was good .", "to me the meal was not dull and long .", "the plot was awful ."];
    let tokenizer = Tokenizer::train(texts.into_iter(), 300).unwrap();
    let (entry, knobs) = (choice.entry, choice.knobs);
    let (backbone, vocab) = (Backbone::new(2, 16, 2, 24), tokenizer.len());
    let model = RobertaConfig { entry, knobs, backbone, vocab, positions: 16, eps: 1e-5, top: Top::Masked };
    let builder = ParamBuilder::seeded(5, &Device::Cpu, false);
    Roberta::new(&model, &builder).unwrap();
    let params = builder.finish();
    let weights: HashMap<String, Tensor> =
        params.names().map(|name| (name.to_owned(), params.value(name).unwrap())).collect();
    fs::create_dir_all(folder).unwrap();
    candle_core::safetensors::save(&weights, folder.join("model.safetensors")).unwrap();
    fs::write(folder.join("tokenizer.json"), tokenizer.json()).unwrap();
    let config = format!(
        "{{\"architectures\": [\"RobertaForMaskedLM\"], \"model_type\": \"roberta\", \"hidden_size\": 16, \
         \"num_hidden_layers\": 2, \"num_attention_heads\": 2, \"intermediate_size\": 24, \"vocab_size\": {vocab}, \
         \"max_position_embeddings\": 18, \"layer_norm_eps\": 1e-5}}"
    );
    fs::write(folder.join("config.json"), config).unwrap();
}

/// The tensors of every checkpoint of a run.
fn tensors(folder: &Path, command: &str) -> Vec<(String, Vec<u8>)> {
    let cells = folder.join("results").join(command).join("latest/cells");
    let files = fs::read_dir(cells).unwrap().flat_map(|cell| fs::read_dir(cell.unwrap().path()).unwrap());
    let files = files.map(|file| file.unwrap().path());
    let mut all: Vec<(String, Vec<u8>)> = files
        .filter(|file| file.extension().is_some_and(|end| end == "safetensors"))
        .map(|file| {
            let bytes = fs::read(&file).unwrap();
            let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
            (
                file.display().to_string().rsplit("/cells/").next().unwrap().to_owned(),
                bytes[8 + header..].to_vec(),
            )
        })
        .collect();
    all.sort();
    all
}

#[test]
fn a_converted_encoder_is_fine_tuned_to_the_same_bits_however_often_it_is_killed() {
    let line = "finetune --quick --from encoder --model full,ls:w=4,r=2 --len 40 --steps 60 --every 15 --batch 8 --accumulate 2 \
                --limit 200 --set dropout=0.2 --no-plot --threads 1 --save-every 1ms";
    let args: Vec<&str> = line.split_whitespace().collect();
    let undisturbed = tempfile::tempdir().unwrap();
    encoder(&undisturbed.path().join("encoder"));
    run(undisturbed.path(), &args);
    let folder = tempfile::tempdir().unwrap();
    encoder(&folder.path().join("encoder"));
    let kills = killed(folder.path(), &args, 10);
    assert!(kills >= 1, "no kill hit a running program");
    assert_eq!(results(folder.path(), "finetune"), results(undisturbed.path(), "finetune"));
    assert_eq!(tensors(folder.path(), "finetune"), tensors(undisturbed.path(), "finetune"));
    assert_eq!(tensors(folder.path(), "finetune").len(), 4, "the last and the best weights of two models");
}

#[test]
fn phases_hand_over_their_weights_and_text_can_be_drawn() {
    let args = [
        "charlm",
        "--quick",
        "--steps",
        "4",
        "--len",
        "32,64",
        "--batch",
        "2",
        "--model",
        "ls:w=16",
        "--limit",
        "200",
        "--set",
        "layers=1",
        "--no-plot",
        "--threads",
        "1",
    ];
    let folder = tempfile::tempdir().unwrap();
    run(folder.path(), &args);
    let curve = curve(folder.path(), "charlm");
    assert!(curve.lines().last().unwrap().starts_with("8,"), "{curve}");
    let cells = folder.path().join("results/charlm/latest/cells");
    let cell = fs::read_dir(cells).unwrap().next().unwrap().unwrap().path();
    let checkpoint = cell.join("phase2-best.safetensors").display().to_string();
    let draw = |seed: &str| {
        let args =
            ["charlm", "--generate", &checkpoint, "--symbols", "80", "--prompt", "The ", "--seed", seed];
        run(folder.path(), &args).stdout
    };
    let text = draw("1");
    assert!(text.starts_with(b"The ") && text.len() >= 84, "{}", String::from_utf8_lossy(&text));
    assert_eq!(text, draw("1"));
    assert_ne!(text, draw("2"));
}

/// Losses of the curve of `args`.
fn losses(folder: &Path, args: &[&str]) -> Vec<f64> {
    run(folder, args);
    let curve = curve(folder, "charlm");
    let numbers = curve.lines().skip(1).map(|line| line.split(',').nth(2).unwrap().parse().unwrap());
    numbers.collect()
}

#[test]
fn the_number_of_threads_changes_results_within_rounding_only() {
    let args = |threads| {
        let line = "charlm --quick --model ls:w=16 --steps 30 --every 10 --len 64 --batch 4 --limit 300 --no-plot --threads";
        line.split(' ').chain([threads]).collect::<Vec<&str>>()
    };
    let [one, again, three] =
        ["1", "1", "3"].map(|threads| losses(tempfile::tempdir().unwrap().path(), &args(threads)));
    assert_eq!(one, again, "same seed, threads and build");
    assert_eq!(one.len(), 3);
    for (a, b) in one.iter().zip(&three) {
        assert!((a - b).abs() <= 1e-3 * a, "{one:?} {three:?}");
    }
}
